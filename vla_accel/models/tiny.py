"""Tiny checkpoints of the real architectures, written to disk exactly as real ones are: for tests, demos and CPUs.

Not here: trained weights. A tiny checkpoint is seeded noise, initialised so that behaviour cloning learns from it.
Usage: `make_tiny_openvla("runs/tiny")`, then `load_vla("runs/tiny")`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors
from transformers import PreTrainedTokenizerFast

from vla_accel.models import save_vla
from vla_accel.models.openvla.configuration import OpenVLAConfig
from vla_accel.models.openvla.images import PrismaticImageProcessor
from vla_accel.models.openvla.modeling import OpenVLAForActionPrediction
from vla_accel.models.openvla.processing import PROMPTS, SPACE, PrismaticProcessor

NUM_ACTION_TOKENS = 256
FIRST_ACTION_CHARACTER = 0x4E00
"""The action tokens' text is 256 consecutive characters from here on (Chinese), which no instruction contains."""

TASK_WORDS = tuple(
    f"{verb} the {color} block"
    for verb in ("reach", "push", "pick up", "lift", "place", "slide")
    for color in ("red", "green", "blue", "yellow", "purple", "orange", "white", "black")
)
"""Instructions whose words get tokens of their own unless a checkpoint is made for other texts."""


def tiny_tokenizer(tasks: Iterable[str] = TASK_WORDS) -> PreTrainedTokenizerFast:
    """Build a Llama-style tokenizer in which every word of the prompt and of the tasks is one token.

    Same pipeline as Llama-2's: a space piece put in front and for every space, byte-pair merges with bytes as the last
    resort, `<s>` in front. Ids: `<unk>`, `<s>`, `</s>`, 256 bytes, then pieces, then 256 single characters that serve
    as action tokens, V in all (a multiple of 64); `<PAD>` is V. Depends on nothing but `tasks`.

    Args:
        tasks: instructions to have tokens for; upper case is ignored, as in the prompt. Other text still encodes, in
            single characters and bytes.

    Raises:
        ValueError: a task contains one of the action characters.
    """
    actions = [chr(FIRST_ACTION_CHARACTER + i) for i in range(NUM_ACTION_TOKENS)]
    text = "\n".join(" " + PROMPTS["openvla"].format(task=task.lower()) for task in ["", *tasks])
    clash = sorted(set(text) & set(actions))
    if clash:
        raise ValueError(f"tasks must not contain the characters of the action tokens, got {''.join(clash)!r}")
    pieces, merges = _word_pieces(text.replace(" ", SPACE))
    alphabet = [SPACE, *(chr(code) for code in range(0x21, 0x7F))]
    ordinary = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *alphabet, *pieces]
    ordinary += [f"<reserved{i}>" for i in range(-(len(ordinary) + NUM_ACTION_TOKENS) % 64)]
    vocab = {piece: index for index, piece in enumerate(ordinary + actions)}
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    special = [("<s>", 1)]
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", "<s> $A <s>:1 $B:1", special)
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in ("<unk>", "<s>", "</s>", "<PAD>")])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<PAD>",
        model_max_length=2048,
        padding_side="right",
        clean_up_tokenization_spaces=False,
    )


def _word_pieces(text: str) -> tuple[list[str], list[tuple[str, str]]]:
    """Pieces and merges that spell every word of `text` from left to right, one character at a time.

    Every merge adds one character to a piece that begins a word, so merges cannot compete with each other and a word
    always ends up as the longest piece that it starts with.
    """
    pieces: list[str] = []
    merges: list[tuple[str, str]] = []
    words = sorted(set(re.findall(rf"{SPACE}?[A-Za-z]+", text)), key=lambda word: (not word.startswith(SPACE), word))
    for word in words:
        for end in range(2, len(word) + 1):
            if word[:end] not in pieces:
                pieces.append(word[:end])
                merges.append((word[: end - 1], word[end - 1]))
    return pieces, merges


def tabletop_statistics(
    *,
    key: str = "tabletop",
    action_dim: int = 7,
    proprio_low: Sequence[float] = (-1.0,) * 8,
    proprio_high: Sequence[float] = (1.0,) * 8,
) -> dict[str, Any]:
    """Statistics in the form of `dataset_statistics.json`, for an environment whose actions are already in [-1, 1].

    All action dimensions map -1..1 onto themselves; the last one, a gripper in 0..1, is not normalised at all.

    Args:
        key: name of the data set.
        action_dim: A, gripper included.
        proprio_low: Q state values that normalise to -1.
        proprio_high: Q state values that normalise to 1.
    """

    def entry(low: Sequence[float], high: Sequence[float]) -> dict[str, list[float]]:
        low, high = [float(x) for x in low], [float(x) for x in high]
        pairs = list(zip(low, high, strict=True))
        middle, half = [(a + b) / 2 for a, b in pairs], [(b - a) / 2 for a, b in pairs]
        return {"mean": middle, "std": half, "max": high, "min": low, "q01": low, "q99": high}

    action = entry([-1.0] * (action_dim - 1) + [0.0], [1.0] * action_dim)
    mask = [True] * (action_dim - 1) + [False]
    return {
        key: {
            "action": {**action, "mask": mask},
            "proprio": entry(proprio_low, proprio_high),
            "num_transitions": 0,
            "num_trajectories": 0,
        }
    }


def make_tiny_openvla(
    folder: str | Path,
    *,
    decoding: str = "autoregressive",
    chunk: int = 1,
    seed: int = 0,
    image_size: int = 48,
    patch_size: int = 8,
    vision_dims: tuple[int, int] = (64, 64),
    vision_depth: int = 3,
    vision_heads: int = 4,
    hidden: int = 96,
    intermediate: int = 192,
    layers: int = 2,
    heads: int = 4,
    fused: bool = True,
    num_images: int = 1,
    use_proprio: bool = False,
    use_film: bool = False,
    action_dim: int = 7,
    proprio_low: Sequence[float] = (-1.0,) * 8,
    proprio_high: Sequence[float] = (1.0,) * 8,
    statistics: dict[str, Any] | None = None,
    tasks: Sequence[str] = TASK_WORDS,
    dtype: torch.dtype = torch.bfloat16,
) -> Path:
    """Write an untrained OpenVLA (or OpenVLA-OFT) checkpoint of under a million parameters.

    The folder has every file of a real one and loads the same way. The same arguments give the same bytes.

    Args:
        folder: created if missing; files of the same names are overwritten.
        decoding: `"autoregressive"` (OpenVLA) or `"parallel"` (OpenVLA-OFT).
        chunk: K, environment steps per decision; above 1 for parallel decoding only.
        seed: of the weights.
        image_size: side of the model's images in pixels, a multiple of `patch_size`.
        patch_size: side of a patch in pixels.
        vision_dims: widths of the DINOv2 and the SigLIP tower (both multiples of `vision_heads` and of 4).
        vision_depth: blocks per tower; the last one does not influence the model, as in the original.
        vision_heads: attention heads per tower.
        hidden: width of the language model.
        intermediate: width of its MLPs.
        layers: its depth.
        heads: its attention heads.
        fused: both towers; False leaves SigLIP alone.
        num_images: C, cameras.
        use_proprio: read the robot state.
        use_film: let the instruction modulate the towers.
        action_dim: A, of the statistics where none are given: -1..1, a gripper last.
        proprio_low: Q state values that the policy reads as -1, likewise.
        proprio_high: Q state values that it reads as 1, likewise.
        statistics: content of `dataset_statistics.json`, instead of `tabletop_statistics` with the three above.
        tasks: instructions whose words get tokens of their own.
        dtype: of the stored weights.

    Returns:
        The folder.

    Raises:
        ValueError: sizes that do not divide, or a combination the configuration refuses.
    """
    if image_size % patch_size:
        raise ValueError(f"image_size must be a multiple of patch_size ({patch_size}), got {image_size}")
    if any(dim % vision_heads or dim % 4 for dim in vision_dims):
        raise ValueError(f"vision_dims must be multiples of 4 and of vision_heads ({vision_heads}), got {vision_dims}")
    if hidden % heads:
        raise ValueError(f"hidden must be a multiple of heads ({heads}), got {hidden}")
    tokenizer = tiny_tokenizer(tasks)
    if statistics is None:
        statistics = tabletop_statistics(action_dim=action_dim, proprio_low=proprio_low, proprio_high=proprio_high)
    dims = vision_dims if fused else vision_dims[1:]
    vision = {"depth": vision_depth, "num_heads": vision_heads, "patch_size": patch_size}
    text = {
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "vocab_size": tokenizer.pad_token_id + 64,
        "pad_token_id": tokenizer.pad_token_id,
    }
    config = OpenVLAConfig(
        "dinosiglip-vit-so-224px" if fused else "siglip-vit-so400m",
        text_config=text,
        timm_model_kwargs=[{"embed_dim": dim, **vision} for dim in dims],
        image_sizes=[image_size] * len(dims),
        image_resize_strategy="resize-naive",
        pad_token_id=tokenizer.pad_token_id,
        norm_stats=statistics,
        action_decoding=decoding,
        num_actions_chunk=chunk,
        num_images_in_input=num_images,
        use_proprio=use_proprio,
        proprio_dim=_proprio_dim(statistics),
        use_film=use_film,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = OpenVLAForActionPrediction(config)
        init_for_training(model)
    processor = PrismaticProcessor(_image_processor(image_size, fused=fused), tokenizer)
    save_vla(model.to(dtype), processor, folder)
    return Path(folder)


@torch.no_grad()
def init_for_training(model: OpenVLAForActionPrediction) -> None:
    """Initialise a small model so that it learns from scratch; draws from torch's global generator.

    The usual 0.02 everywhere suits widths in the thousands and fine-tuning. Here linear weights are normal with
    standard deviation `0.7 fan_in ** -0.5`, queries and keys 1.5 times that, patch embeddings 0.1; position embeddings
    are two-dimensional sines, layer scales 1. Token embeddings have unit size: at 0.02 a word drowns in what the first
    layer adds, and the mean over a prompt, which FiLM reads, hardly depends on one word of it. The head keeps 0.02, so
    that the untrained policy is close to uniform. FiLM starts as the identity.
    """
    model.get_input_embeddings().weight.normal_()
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and not name.endswith("lm_head"):
            module.weight.normal_(std=0.7 * module.in_features**-0.5)
            if module.bias is not None:
                module.bias.zero_()
        if name.endswith(("q_proj", "k_proj")):
            module.weight.mul_(1.5)
        if name.endswith("attn.qkv"):
            module.weight[: 2 * module.in_features].mul_(1.5)
        if isinstance(module, torch.nn.Conv2d):
            module.weight.normal_(std=0.1)
        if name.endswith((".scale", ".shift")):
            module.weight.zero_()
        if hasattr(module, "scale_factor"):
            module.scale_factor.fill_(1.0)
    for tower in model.vision_backbone.towers:
        tower.pos_embed.copy_(_sines(tower.patch_embed.grid_size, tower.embed_dim))


def _sines(grid: tuple[int, int], dim: int) -> torch.Tensor:
    """Two-dimensional sine position embeddings, `[1, rows * columns, dim]`: half the channels for each direction."""
    frequency = 1e-2 ** (torch.arange(dim // 4) / (dim // 4))  # waves of 6 to 600 patches: these grids are small
    rows, columns = torch.meshgrid(torch.arange(grid[0]), torch.arange(grid[1]), indexing="ij")
    angles = torch.cat([place.reshape(-1, 1) * frequency for place in (rows, columns)], dim=1)
    return torch.cat([angles.sin(), angles.cos()], dim=1).unsqueeze(0)


def _image_processor(size: int, *, fused: bool) -> PrismaticImageProcessor:
    means, stds = [[0.485, 0.456, 0.406], [0.5, 0.5, 0.5]], [[0.229, 0.224, 0.225], [0.5, 0.5, 0.5]]
    towers = slice(0 if fused else 1, 2)
    return PrismaticImageProcessor(
        fused,
        image_resize_strategy="resize-naive",
        input_sizes=[[3, size, size]] * len(means[towers]),
        interpolations=["bicubic"] * len(means[towers]),
        means=means[towers],
        stds=stds[towers],
    )


def _proprio_dim(statistics: dict[str, Any]) -> int:
    widths = {len(entry["proprio"]["q01"]) for entry in statistics.values() if entry.get("proprio")}
    return widths.pop() if len(widths) == 1 else 8
