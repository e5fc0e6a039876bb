"""Reading and writing PI0 checkpoints: LeRobot's folders and those converted by openpi. Strict: nothing is guessed.

Not here: the model (`modeling.py`) and the processor files (`files.py`).
Usage: `model, processor = load_pi0(folder, dtype="bfloat16", device="cuda")`.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from vla_accel.models.pi0.configuration import ACTION_KEY, SIDE_FILE, STATE_KEY, Pi0Config
from vla_accel.models.pi0.files import find_norm_stats, read_norm_stats
from vla_accel.models.pi0.modeling import Pi0Model
from vla_accel.models.pi0.processing import Pi0Processor
from vla_accel.models.reading import open_tensors, read_json, shard_names, tensor_shapes

WEIGHTS = "model.safetensors"
ROOTS = ("paligemma_with_expert.", "state_proj.", "action_", "time_mlp_")
VLM_HEAD = "paligemma_with_expert.paligemma.lm_head.weight"
EXPERT_HEAD = "paligemma_with_expert.gemma_expert.lm_head.weight"
EMBEDDING = "paligemma_with_expert.paligemma.model.language_model.embed_tokens.weight"
# Kept in float32 when the rest is bfloat16: the image path, every norm, and the small projections around the expert.
FLOAT32_PARTS = ("vision_tower", "multi_modal_projector", "input_layernorm", "post_attention_layernorm", "model.norm")
# Data sets whose openpi configurations make the model predict some actions relative to the state.
RELATIVE_ASSETS = {("pi0", "physical-intelligence/libero"), ("pi0", "trossen"), ("pi05", "trossen")}
# openpi's PI0.5 configuration for this data set leaves the state out of the prompt.
STATELESS_ASSETS = {("pi05", "physical-intelligence/libero")}


def load_pi0(
    path: str | Path,
    *,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str = "cpu",
    expert_dtype: torch.dtype | str | None = None,
    tokenizer: Any = None,
    statistics: dict[str, dict[str, Any]] | None = None,
    asset_id: str | None = None,
    relative_actions: bool | None = None,
    constant_dims: str = "error",
    need_statistics: bool = False,
    **overrides: Any,
) -> tuple[Pi0Model, Pi0Processor]:
    """Load a PI0 or PI0.5 checkpoint and its processor.

    Args:
        path: a LeRobot folder, a folder converted by openpi, or the hub name of either.
        dtype: of the weights. None: as the checkpoint says. In bfloat16 the parts of `FLOAT32_PARTS` stay float32.
        device: where to.
        expert_dtype: of the action expert; float32 keeps exact master weights of what RL trains. None: `dtype`.
        tokenizer: a tokenizer, a folder with one or a hub name. None: the one in the folder.
        statistics: feature -> statistic -> `[dim]`, instead of the checkpoint's.
        asset_id: openpi only, which of several statistics.
        relative_actions: openpi only, whether the actions are relative to the state; its folders do not say. None:
            as its configuration for that data set.
        constant_dims: `"error"`, `"unit"` or `"exact"`, for dimensions that never moved in the data.
        need_statistics: refuse a checkpoint without statistics, as base models are.
        **overrides: fields of `Pi0Config`. `chunk_size` also sets `n_action_steps`.

    Returns:
        The model, in eval mode, and its processor.

    Raises:
        ValueError: the folder is another model's, an older layout, incomplete or inconsistent; the message says which.
    """
    folder = resolve_folder(path)
    config = read_config(folder, asset_id=asset_id, relative_actions=relative_actions, **overrides)
    options = {"tokenizer": tokenizer, "statistics": statistics, "asset_id": asset_id, "constant_dims": constant_dims}
    processor = Pi0Processor.from_pretrained(folder, config=config, **options)
    if need_statistics:
        processor.check_statistics()
    model = load_model(folder, config=config, dtype=dtype, device=device, expert_dtype=expert_dtype)
    return model, processor


def peek_pi0(path: str | Path, **options: Any) -> Pi0Config:
    """Check that a checkpoint is whole without reading a weight; arguments and errors as for `load_pi0`.

    Returns:
        The configuration that its model would have.
    """
    folder = resolve_folder(path)
    names = ("asset_id", "tokenizer", "statistics", "constant_dims")
    unread = ("dtype", "device", "expert_dtype", "need_statistics", *names[1:])
    config = read_config(folder, **{key: value for key, value in options.items() if key not in unread})
    given = {key: options[key] for key in names if key in options}
    processor = Pi0Processor.from_pretrained(folder, config=config, **given)
    if options.get("need_statistics"):
        processor.check_statistics()
    check_weights(folder, config)
    return config


def resolve_folder(path: str | Path) -> Path:
    """A local folder as it is; a hub name `owner/name` downloaded (weights, JSON, tokenizer)."""
    folder = Path(path)
    if folder.is_dir():
        return folder
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", str(path)) or folder.parent.is_dir():
        raise ValueError(f"The checkpoint must be a folder or a hub name owner/name, but {str(path)!r} is neither.")
    from huggingface_hub import snapshot_download

    patterns = ["*.json", "*.safetensors", "*.model", "tokenizer/*", "assets/*"]
    return Path(snapshot_download(str(path), allow_patterns=patterns))


def read_config(
    folder: Path, *, asset_id: str | None = None, relative_actions: bool | None = None, **overrides: Any
) -> Pi0Config:
    """Read the configuration of a checkpoint folder; arguments as in `load_pi0`."""
    path = folder / "config.json"
    if not path.is_file():
        hint = " It holds a LoRA adapter: merge it first." if (folder / "adapter_config.json").is_file() else ""
        raise ValueError(f"{folder.name} is not a PI0 checkpoint: it has no config.json.{hint}")
    raw = read_json(path)
    side = read_json(folder / SIDE_FILE) if (folder / SIDE_FILE).is_file() else {}
    if {"action_dim", "action_horizon"} <= raw.keys():
        config = _openpi_config(folder, raw, asset_id=asset_id, relative_actions=relative_actions, overrides=overrides)
    elif "type" in raw:
        if relative_actions:
            raise ValueError("relative_actions must not be true: such checkpoints are not supported.")
        config = Pi0Config.from_lerobot(raw, side)
    else:
        raise ValueError(
            f"config.json of {folder.name} is neither LeRobot's (it has no 'type') nor openpi's (no 'action_horizon'); "
            f"its model_type is {raw.get('model_type')!r}."
        )
    if not overrides:
        return config
    fields = config.to_dict()
    for name in overrides:
        if name not in fields:
            known = ", ".join(sorted(Pi0Config.__init__.__kwdefaults__))
            raise ValueError(f"Unknown option {name!r} of a PI0 checkpoint; known are {known}.")
    if "chunk_size" in overrides:
        overrides = {"n_action_steps": None, **overrides}
    return Pi0Config.from_dict({**fields, **overrides})


def _openpi_config(
    folder: Path,
    raw: dict[str, Any],
    *,
    asset_id: str | None,
    relative_actions: bool | None,
    overrides: dict[str, Any],
) -> Pi0Config:
    keys = {_rename(key, "pi05") for file in weight_files(folder) for key in tensor_shapes(file)}
    variant = "pi0" if "state_proj.weight" in keys else "pi05"
    values, found = {}, find_norm_stats(folder, asset_id)
    if relative_actions or (found and relative_actions is None and (variant, found[0]) in RELATIVE_ASSETS):
        raise ValueError(
            f"{folder.name}: openpi trains {variant} on {found[0] if found else 'this data'!r} to predict actions "
            "relative to the state, which is not supported. "
            "If this checkpoint was trained on absolute actions, pass relative_actions=False."
        )
    if found:
        stats = read_norm_stats(found[1])
        state, action = (len(next(iter(stats[key].values()))) for key in (STATE_KEY, ACTION_KEY))
        values["output_features"] = {ACTION_KEY: {"type": "ACTION", "shape": [action]}}
        values["state_in_prompt"] = (variant, found[0]) not in STATELESS_ASSETS
        default = Pi0Config(variant=variant).input_features
        values["input_features"] = {**default, STATE_KEY: {"type": "STATE", "shape": [state]}}
    sizes = {name: overrides[name] for name in ("vision", "vlm", "expert") if name in overrides}
    return Pi0Config.from_openpi(raw, variant=variant, **values, **sizes)


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a checkpoint, whole or in shards."""
    index = folder / f"{WEIGHTS}.index.json"
    names = shard_names(index) if index.is_file() else [WEIGHTS]
    for name in names:
        if not (folder / name).is_file():
            raise ValueError(f"{folder.name} has no {name}.")
    return [folder / name for name in names]


def _rename(key: str, variant: str) -> str:
    """A checkpoint's name of a tensor to ours."""
    bare = key.removeprefix("model.")
    key = bare if bare.startswith(ROOTS) else key
    key = re.sub(r"\.vision_tower\.(?!vision_model\.)", ".vision_tower.vision_model.", key)
    return re.sub(r"^time_mlp_", "action_time_mlp_", key) if variant == "pi0" else key


def index_weights(folder: Path, variant: str) -> dict[str, tuple[Path, str]]:
    """Our name of each weight -> the file and the name under which it lies; unused language-model heads left out.

    The embedding is `embed_tokens` where the file has it; the head, to which it is tied in base models, elsewhere:
    after full fine-tuning the two differ and the head is stale.

    Raises:
        ValueError: an older layout, or one weight under two names.
    """
    found: dict[str, tuple[Path, str]] = {}
    for file in weight_files(folder):
        for key in tensor_shapes(file):
            if "normalize_inputs." in key or ".paligemma.language_model." in key:
                raise ValueError(
                    f"{folder.name} has the layout that LeRobot used before October 2025 ({key}). "
                    "Convert it with LeRobot's migration script first."
                )
            name = _rename(key, variant)
            if name in found:
                raise ValueError(f"{folder.name} has {name} twice, as {found[name][1]} and as {key}.")
            found[name] = (file, key)
    head = found.pop(VLM_HEAD, None)
    found.pop(EXPERT_HEAD, None)
    if head is not None:
        found.setdefault(EMBEDDING, head)
    return found


def _shapes(config: Pi0Config) -> dict[str, torch.Size]:
    """Names and shapes of a model's tensors."""
    with torch.device("meta"):
        return {name: parameter.shape for name, parameter in Pi0Model(config).named_parameters()}


def check_weights(folder: Path, config: Pi0Config) -> dict[str, tuple[Path, str]]:
    """Compare names and shapes with the model's, reading no weight; returns `index_weights`.

    Raises:
        ValueError: weights are missing, left over or of another shape.
    """
    wanted = _shapes(config)
    found = index_weights(folder, config.variant)
    missing, left_over = sorted(wanted.keys() - found.keys()), sorted(found.keys() - wanted.keys())
    if missing or left_over:
        raise ValueError(
            f"{folder.name} does not fit a {config.variant} model: {len(missing)} weights are missing "
            f"({', '.join(missing[:3])}), {len(left_over)} are left over ({', '.join(left_over[:3])})."
        )
    stored = {file: tensor_shapes(file) for file in weight_files(folder)}
    for name, (file, key) in found.items():
        shape = stored[file][key]
        if list(shape) != list(wanted[name]):
            raise ValueError(
                f"{folder.name}: {name} must have the shape {list(wanted[name])} that the configuration implies, "
                f"but has {list(shape)}."
            )
    return found


def parameter_dtype(name: str, dtype: torch.dtype, expert_dtype: torch.dtype | None = None) -> torch.dtype:
    """The dtype of one parameter in a model of `dtype`."""
    if not name.startswith("paligemma_with_expert.") or any(part in name for part in FLOAT32_PARTS):
        return torch.float32
    return expert_dtype if expert_dtype is not None and ".gemma_expert." in name else dtype


def about_the_model(options: dict[str, Any]) -> dict[str, Any]:
    """Of the options of a `from_pretrained`, those that the Auto classes do not pass on by themselves."""
    ignored = {"trust_remote_code", "code_revision", "adapter_kwargs", "revision", "local_files_only", "token"}
    ignored |= {"name_or_path", "_from_auto", "_commit_hash"}
    unset = {"cache_dir", "force_download", "proxies", "subfolder"}
    return {name: value for name, value in options.items() if name not in ignored and (value or name not in unset)}


def load_model(
    folder: str | Path,
    *,
    config: Pi0Config | None = None,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str = "cpu",
    expert_dtype: torch.dtype | str | None = None,
    **auto: Any,
) -> Pi0Model:
    """Load the weights alone; arguments as in `load_pi0`. Also what `AutoModel.from_pretrained` calls.

    Raises:
        ValueError: weights are missing, left over or of another shape.
    """
    if unknown := about_the_model(auto):
        raise ValueError(f"Unknown options of a PI0 model: {', '.join(sorted(unknown))}.")
    folder = resolve_folder(folder)
    config = config or read_config(folder)
    base = _dtype(dtype if dtype is not None else config.precision)
    expert = None if expert_dtype is None else _dtype(expert_dtype)
    index = check_weights(folder, config)
    tensors: dict[str, Tensor] = {}
    for file in weight_files(folder):
        with open_tensors(file) as reader:
            for name, (where, key) in index.items():
                if where == file:
                    tensor = reader.get_tensor(key)
                    tensors[name] = tensor.to(device=device, dtype=parameter_dtype(name, base, expert))
    with torch.device("meta"):
        model = Pi0Model(config)
    model.load_state_dict(tensors, assign=True)
    return model.eval()


def _dtype(dtype: torch.dtype | str) -> torch.dtype:
    names = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    resolved = names.get(str(dtype).removeprefix("torch."))
    if resolved is None:
        raise ValueError(f"dtype must be float32 or bfloat16, but is {dtype!r}.")
    return resolved


def save_model(
    model: Pi0Model,
    folder: str | Path,
    *,
    state_dict: dict[str, Tensor] | None = None,
    is_main_process: bool = True,
) -> None:
    """Write `config.json`, the side file and `model.safetensors` as LeRobot's `save_pretrained` names them.

    LeRobot builds two language-model heads that nothing reads and complains when they are absent: the first is
    written as a copy of the embedding, the second as zeros.

    Args:
        model: whose configuration to write.
        folder: made where it does not exist.
        state_dict: full weights, where the model holds shards. None: the model's.
        is_main_process: False writes nothing.

    Raises:
        ValueError: `state_dict` has other entries than the model.
    """
    if not is_main_process:
        return
    folder = Path(folder)
    weights = dict(state_dict if state_dict is not None else model.state_dict())
    expected = _shapes(model.config).keys()  # a sharded model's own `state_dict` needs all ranks
    if weights.keys() != expected:
        raise ValueError(
            f"state_dict must have the model's {len(expected)} entries, but differs in "
            f"{', '.join(sorted(weights.keys() ^ expected)[:3])}. Merge adapters before saving."
        )
    embedding = weights[EMBEDDING]
    model.config.precision = str(embedding.dtype).removeprefix("torch.")
    model.config.save_pretrained(folder)
    weights[VLM_HEAD] = embedding.clone()
    weights[EXPERT_HEAD] = torch.zeros(len(embedding), model.config.expert["width"], dtype=embedding.dtype)
    tensors = {f"model.{name}": tensor.detach().cpu().contiguous() for name, tensor in weights.items()}
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})


def save_pi0(model: Pi0Model, processor: Pi0Processor | None, folder: str | Path, **kwargs: Any) -> None:
    """Write a folder that `load_pi0` and LeRobot load: weights, configuration, statistics, tokenizer.

    Args:
        model: of `save_model`.
        processor: None leaves the folder without statistics and tokenizer.
        folder: made where it does not exist.
        **kwargs: of `save_model`.
    """
    save_model(model, folder, **kwargs)
    if processor is not None and kwargs.get("is_main_process", True):
        processor.save_pretrained(folder)
