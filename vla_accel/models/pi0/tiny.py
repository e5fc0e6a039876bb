"""Tiny PI0 and PI0.5 checkpoints, written to disk exactly as real ones are: for tests, demos and CPUs.

Not here: trained weights. A tiny checkpoint is seeded noise, initialised so that flow matching learns from it.
Usage: `make_tiny_pi0("runs/tiny", variant="pi05")`, then `load_pi0("runs/tiny")`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal

import torch
from tokenizers import Regex, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from tokenizers.processors import TemplateProcessing
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast

from vla_accel.models.pi0.configuration import ACTION_KEY, CAMERAS, IMAGE_PREFIX, STATE_KEY, Pi0Config
from vla_accel.models.pi0.files import Pipelines, Statistics
from vla_accel.models.pi0.layers import RMSNorm
from vla_accel.models.pi0.loading import parameter_dtype, save_pi0
from vla_accel.models.pi0.modeling import Pi0Model
from vla_accel.models.pi0.processing import Pi0Processor

SPECIAL = ("<pad>", "<eos>", "<bos>", "<unk>", "\n")
TASKS = tuple(
    f"{verb} the {color} block"
    for verb in ("reach", "push", "pick up", "lift", "place", "slide")
    for color in ("red", "green", "blue", "yellow", "purple", "orange", "white", "black")
)
"""Instructions whose words get tokens of their own unless a checkpoint is made for other texts."""

LEVELS = range(-1, 256)
"""Numbers that PI0.5's prompt may hold."""

_PIECES = r"\n|[A-Za-z]+|-?[0-9]+|[^A-Za-z0-9\s]"


def tiny_pi0_tokenizer(tasks: Iterable[str] = TASKS) -> PreTrainedTokenizerFast:
    """Build a tokenizer that stands in for PaliGemma's: one token per word, number or sign, the begin token in front.

    It knows the words of the tasks and of PI0.5's prompt and the numbers -1..255; anything else is `<unk>`.

    Args:
        tasks: instructions to have tokens for.
    """
    text = " ".join(["Task: , State: ; Action: . - '", *tasks])
    words = sorted(set(re.findall(_PIECES, text)) | {str(number) for number in LEVELS})
    vocab = {piece: index for index, piece in enumerate([*SPECIAL, *words])}
    tokenizer = Tokenizer(WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Split(Regex(_PIECES), behavior="removed", invert=True)
    tokenizer.post_processor = TemplateProcessing("<bos> $A", "<bos> $A $B:1", [("<bos>", vocab["<bos>"])])
    names = {"pad_token": "<pad>", "eos_token": "<eos>", "bos_token": "<bos>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, padding_side="right", **names)


def range_statistics(
    *, state: tuple[Sequence[float], Sequence[float]], action: tuple[Sequence[float], Sequence[float]]
) -> Statistics:
    """Statistics of data spread evenly over given ranges: mean, standard deviation, ends and quantiles.

    Args:
        state: smallest and largest robot state, `state_dim` numbers each.
        action: smallest and largest action, `action_dim` numbers each.
    """

    def entry(low: Sequence[float], high: Sequence[float]) -> dict[str, Tensor]:
        low, high = torch.tensor(low, dtype=torch.float32), torch.tensor(high, dtype=torch.float32)
        width = high - low
        return {
            "mean": (low + high) / 2,
            "std": width / 12**0.5,
            "min": low,
            "max": high,
            "q01": low + 0.01 * width,
            "q99": high - 0.01 * width,
            "q10": low + 0.1 * width,
            "q90": high - 0.1 * width,
        }

    return {STATE_KEY: entry(*state), ACTION_KEY: entry(*action)}


def tabletop_statistics() -> Statistics:
    """Statistics for the embedded simulator: where its gripper goes, and how fast a slow expert moves it."""
    low = [-0.25, -0.25, 0.0, -1.0, -1.0, -1.6, -0.04, -0.04]
    high = [0.25, 0.25, 0.3, 1.0, 1.0, 1.6, 0.04, 0.04]
    pace = [0.3] * 3 + [1.0] * 4
    return range_statistics(state=(low, high), action=([-x for x in pace], pace))


def make_tiny_pi0(
    folder: str | Path,
    *,
    variant: Literal["pi0", "pi05"] = "pi0",
    chunk: int = 10,
    seed: int = 0,
    image_size: int = 48,
    patch_size: int = 8,
    vision_width: int = 64,
    vision_depth: int = 2,
    vision_heads: int = 4,
    layers: int = 3,
    width: int = 96,
    mlp_dim: int = 192,
    expert_width: int = 64,
    expert_mlp_dim: int = 128,
    num_heads: int = 8,
    head_dim: int = 16,
    cameras: Sequence[str] = CAMERAS,
    rename: dict[str, str] | None = None,
    state_dim: int = 8,
    action_dim: int = 7,
    max_state_dim: int = 32,
    max_action_dim: int = 32,
    min_period: float = 4e-3,
    min_time: float = 1e-3,
    time_alpha: float = 1.5,
    num_steps: int = 10,
    prompt_length: int | None = None,
    statistics: Statistics | None = None,
    tasks: Iterable[str] = TASKS,
    dtype: torch.dtype = torch.float32,
) -> Path:
    """Write an untrained PI0 or PI0.5 checkpoint of under a million parameters, as LeRobot's `save_pretrained` does.

    The same arguments give the same bytes.

    Args:
        folder: created if missing; files of the same names are overwritten.
        variant: `"pi0"` or `"pi05"`.
        chunk: H, action steps predicted at once.
        seed: of the weights.
        image_size: side of the model's images in pixels, a multiple of `patch_size`.
        patch_size: side of a patch in pixels.
        vision_width: of the image tower, a multiple of `vision_heads`.
        vision_depth: its blocks.
        vision_heads: its attention heads.
        layers: blocks of both stacks.
        width: of the language model.
        mlp_dim: of its MLPs.
        expert_width: of the action expert, even.
        expert_mlp_dim: of its MLPs.
        num_heads: query heads of both stacks; they share one key head.
        head_dim: even.
        cameras: names of the image inputs.
        rename: a robot's camera name -> one of `cameras`.
        state_dim: entries of the robot state.
        action_dim: entries of an action.
        max_state_dim: width of the state after padding.
        max_action_dim: D, width of an action after padding.
        min_period: shortest period of the time embedding. The original's sees steps in flow time of a thousandth,
            which a model that learns from scratch takes for noise.
        min_time: least flow time that it is trained at. The less, the more the velocity is about the noise.
        time_alpha: how much training prefers times near 1, where the observation alone tells the action; exponent
            minus 1 of their density.
        num_steps: denoising steps by default.
        prompt_length: L, prompt tokens. None: 16, and 48 for PI0.5, whose prompt holds the state.
        statistics: as of `range_statistics`. None: those of the embedded simulator, or everything in [-1, 1] where
            its state (8) or action (7) has another width.
        tasks: instructions whose words get tokens of their own.
        dtype: of the stored weights.

    Returns:
        The folder.

    Raises:
        ValueError: sizes that do not fit each other.
    """
    if vision_width % vision_heads:
        raise ValueError(f"vision_width must be a multiple of vision_heads ({vision_heads}), but is {vision_width}.")
    tokenizer = tiny_pi0_tokenizer(tasks)
    heads = {"depth": layers, "num_heads": num_heads, "num_kv_heads": 1, "head_dim": head_dim}
    shape = [3, image_size, image_size]
    config = Pi0Config(
        variant=variant,
        vision={
            "width": vision_width,
            "depth": vision_depth,
            "mlp_dim": 2 * vision_width,
            "num_heads": vision_heads,
            "patch_size": patch_size,
        },
        vlm={"width": width, "mlp_dim": mlp_dim, **heads},
        expert={"width": expert_width, "mlp_dim": expert_mlp_dim, **heads},
        vocab_size=-(-len(tokenizer) // 64) * 64,
        image_size=image_size,
        chunk_size=chunk,
        max_state_dim=max_state_dim,
        max_action_dim=max_action_dim,
        min_period=min_period,
        time_sampling_beta_alpha=time_alpha,
        time_sampling_scale=1.0 - min_time,
        time_sampling_offset=min_time,
        num_inference_steps=num_steps,
        tokenizer_max_length=prompt_length or (48 if variant == "pi05" else 16),
        input_features={
            **{IMAGE_PREFIX + name: {"type": "VISUAL", "shape": shape} for name in cameras},
            STATE_KEY: {"type": "STATE", "shape": [state_dim]},
        },
        output_features={ACTION_KEY: {"type": "ACTION", "shape": [action_dim]}},
    )
    ends = {"state": ([-1.0] * state_dim, [1.0] * state_dim), "action": ([-1.0] * action_dim, [1.0] * action_dim)}
    if statistics is None:
        statistics = tabletop_statistics() if (state_dim, action_dim) == (8, 7) else range_statistics(**ends)
    renames = {IMAGE_PREFIX + old: IMAGE_PREFIX + new for old, new in (rename or {}).items()}
    pipelines = Pipelines(statistics=statistics, rename_map=renames)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Pi0Model(config)
        init_for_training(model)
        rows = model.get_input_embeddings().weight
        rows.data[tokenizer.convert_tokens_to_ids([str(number) for number in LEVELS])] = _numbers(rows.shape[1])
    for name, parameter in model.named_parameters():
        parameter.data = parameter.data.to(parameter_dtype(name, dtype))
    save_pi0(model, Pi0Processor(config, tokenizer, pipelines=pipelines), folder)
    return Path(folder)


@torch.no_grad()
def init_for_training(model: Pi0Model) -> None:
    """Initialise a small model so that it learns from scratch; draws from torch's global generator.

    The usual 0.02 everywhere suits widths in the thousands and fine-tuning. Here linear weights are normal with
    standard deviation `0.7 fan_in ** -0.5`, queries and keys 1.5 times that, patch embeddings 0.1; position embeddings
    are two-dimensional sines; token rows have norm 1 before Gemma scales them. The head of the velocity starts at 0,
    and adaptive norms start as plain norms with open gates.
    """
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            module.weight.normal_(std=0.7 * module.in_features**-0.5)
            if module.bias is not None:
                module.bias.zero_()
        if name.endswith(("q_proj", "k_proj")):
            module.weight.mul_(1.5)
        if isinstance(module, nn.Conv2d):
            module.weight.normal_(std=0.1)
        if isinstance(module, nn.Embedding):
            module.weight.normal_(std=module.embedding_dim**-0.5)
    for module in model.modules():
        if isinstance(module, RMSNorm) and module.adaptive:
            module.dense.weight.mul_(0.1)
            module.dense.bias.view(3, -1)[2].fill_(1.0)
    model.action_out_proj.weight.zero_()
    positions = model.vision_tower.embeddings.position_embedding.weight
    positions.copy_(_sines(round(len(positions) ** 0.5), positions.shape[1]))


def _numbers(dim: int) -> Tensor:
    """Embeddings of `LEVELS`, `[257, dim]`: sines of the number, so that near ones are alike; rows have norm 1."""
    angles = torch.tensor(LEVELS)[:, None] / 85 * 10 ** torch.linspace(0, 1, dim // 2)  # half a turn to five
    return torch.cat([angles.sin(), angles.cos()], dim=1) / (dim // 2) ** 0.5


def _sines(side: int, dim: int) -> Tensor:
    """Two-dimensional sine position embeddings, `[side * side, dim]`: half the channels for each direction."""
    frequency = 1e-2 ** (torch.arange(-(-dim // 4)) / (dim / 4))  # waves of 6 to 600 patches: these grids are small
    rows, columns = torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")
    angles = torch.cat([place.reshape(-1, 1) * frequency for place in (rows, columns)], dim=1)
    return torch.cat([angles.sin(), angles.cos()], dim=1)[:, :dim]
