"""OpenVLA checkpoint folders: strict reading, and writing in the form the original code reads.

Reads safetensors and JSON only. Nothing is guessed: a tensor that is missing, left over or of another shape is an
error that names it.
Not here: finding a folder by its hub name (`vla_accel.models.load_vla`), training checkpoints (`checkpoint.py`).
Usage: `model, processor = load(folder, dtype=torch.bfloat16, device="cuda")`, later `save(model, processor, out)`.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights

from vla_accel.models.openvla.configuration import OpenVLAConfig
from vla_accel.models.openvla.modeling import OpenVLAForActionPrediction
from vla_accel.models.openvla.processing import PrismaticProcessor
from vla_accel.models.reading import open_tensors, read_json, shard_names, tensor_shapes

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_STATISTICS = "dataset_statistics.json"
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_SHOWN = 3  # names listed in an error before "and n more"

# What an OpenVLA-OFT folder keeps beside its weights, by the file's stem: why it cannot be used as it is.
_CONTINUOUS_HEADS = {"action_head": "L1-regression", "noisy_action_projector": "diffusion"}
_SIDE_MODULES = {"proprio_projector": "use_proprio", "vision_backbone": "use_film"}

_OPTIONS = frozenset(inspect.signature(OpenVLAConfig.__init__).parameters) - {"self", "kwargs"}


@dataclass(frozen=True, kw_only=True)
class _Stored:
    """Where one tensor of a checkpoint is stored."""

    file: Path
    name: str
    shape: tuple[int, ...]


def load(
    folder: Path, *, dtype: torch.dtype, device: torch.device | str, **config_overrides: Any
) -> tuple[OpenVLAForActionPrediction, PrismaticProcessor]:
    """Load an OpenVLA or discrete-token OpenVLA-OFT folder; see `vla_accel.models.load_vla`."""
    config = read_config(folder, **config_overrides)
    _refuse_heads_of(config)
    refuse_parts(str(folder), [file.name for file in folder.iterdir()], use_proprio=config.use_proprio)
    with init_empty_weights(include_buffers=False):
        model = OpenVLAForActionPrediction(config)
    load_weights(model, folder, dtype=dtype, device=device)
    return model.eval(), _read_processor(folder, config)


def peek(folder: Path, **config_overrides: Any) -> OpenVLAConfig:
    """Check that a folder is whole without reading a weight; see `vla_accel.models.peek_vla`."""
    config = read_config(folder, **config_overrides)
    _refuse_heads_of(config)
    refuse_parts(str(folder), [file.name for file in folder.iterdir()], use_proprio=config.use_proprio)
    with init_empty_weights(include_buffers=False):
        expected = {name: tuple(x.shape) for name, x in OpenVLAForActionPrediction(config).state_dict().items()}
    stored = _stored_tensors(folder)
    if config.use_proprio:
        stored.update(_side_tensors(folder, "proprio_projector"))
    _check_names(folder, expected, stored)
    _read_processor(folder, config)
    return config


def read_config(folder: Path, **overrides: Any) -> OpenVLAConfig:
    """Read `config.json`, with the statistics of `dataset_statistics.json` where the folder has them.

    Args:
        folder: checkpoint folder.
        overrides: fields of `OpenVLAConfig` that replace those of the file.

    Raises:
        ValueError: an override is no field of `OpenVLAConfig`, or a value is out of range.
    """
    for name in sorted(set(overrides) - _OPTIONS):
        near = get_close_matches(name, _OPTIONS, n=1)
        hint = f" Did you mean {near[0]}?" if near else ""
        raise ValueError(f"{name} is not an option of an OpenVLA model; options are {sorted(_OPTIONS)}.{hint}")
    data = read_json(folder / "config.json")
    if (folder / _STATISTICS).is_file():
        data["norm_stats"] = read_json(folder / _STATISTICS)
    config = OpenVLAConfig(**{**data, **overrides})
    config.name_or_path = str(folder)
    return config


def _read_processor(folder: Path, config: OpenVLAConfig) -> PrismaticProcessor:
    """Read the processor, and check that the pictures it makes are those the towers take."""
    processor = PrismaticProcessor.from_pretrained(folder)
    made = [size[-1] for size in processor.image_processor.input_sizes]
    if made != config.image_sizes:
        raise ValueError(
            f"{folder}: preprocessor_config.json makes images of side {made} (input_sizes), and config.json has towers "
            f"for {config.image_sizes} (image_sizes), one number per tower. Copy both files from one checkpoint."
        )
    return processor


def load_weights(
    model: OpenVLAForActionPrediction, folder: Path, *, dtype: torch.dtype, device: torch.device | str
) -> None:
    """Fill a model, built without memory for its parameters, with a folder's tensors.

    Args:
        model: the model; its parameters are replaced.
        folder: checkpoint folder with one safetensors file, or shards and their index.
        dtype: floating-point type of the parameters afterwards.
        device: where they live afterwards.

    Raises:
        ValueError: a file is missing, cut short or a pickle; a tensor is missing, left over or of another shape.
    """
    stored = _stored_tensors(folder)
    if model.config.use_proprio:
        stored.update(_side_tensors(folder, "proprio_projector"))
    expected = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    _check_names(folder, expected, stored)
    state: dict[str, torch.Tensor] = {}
    for file in sorted({entry.file for entry in stored.values()}):
        with open_tensors(file, device=str(device)) as opened:
            for name, entry in stored.items():
                if entry.file == file:
                    state[name] = opened.get_tensor(entry.name).to(dtype)
    model.load_state_dict(state, strict=True, assign=True)
    model.to(device)  # what is left are the rotary tables, which keep float32
    model.config.dtype = model.config.text_config.dtype = dtype


def save(model: OpenVLAForActionPrediction, processor: PrismaticProcessor | None, folder: Path, **kwargs: Any) -> None:
    """Write a folder that `load` and the original code can load; see `vla_accel.models.save_vla`."""
    model.save_pretrained(folder, **{"max_shard_size": "5GB", **kwargs})
    if model.norm_stats:
        (folder / _STATISTICS).write_text(json.dumps(model.norm_stats, indent=2) + "\n", encoding="utf-8")
    if processor is not None:
        processor.save_pretrained(folder)


def refuse_parts(source: str, names: Iterable[str], *, use_proprio: bool = True) -> None:
    """Refuse a checkpoint that keeps a part of the model in files that are not loaded.

    Args:
        source: folder or hub name, for the message.
        names: of its files.
        use_proprio: whether the model has a state projector, which may lie in a safetensors file of its own.

    Raises:
        ValueError: naming the file, and what to do.
    """
    for name in sorted(names):
        for stem, head in _CONTINUOUS_HEADS.items():
            if name.startswith(stem):
                raise ValueError(_no_probability(source, head, name))
        for stem, option in _SIDE_MODULES.items():
            usable = option == "use_proprio" and use_proprio and name.endswith(".safetensors")
            if name.startswith(stem) and not usable:
                raise ValueError(
                    f"{source} keeps a part of the model in {name}, which is not loaded. Store its tensors as "
                    f"{stem}.* in the model's safetensors and load with {option}=True, or remove the file."
                )


def _refuse_heads_of(config: OpenVLAConfig) -> None:
    """Refuse a configuration that says its model has another head."""
    for field, head in (("use_l1_regression", "L1-regression"), ("use_diffusion", "diffusion")):
        if getattr(config, field, False):
            raise ValueError(_no_probability(config.name_or_path, head, "config.json"))


def _no_probability(source: str, head: str, found_in: str) -> str:
    return (
        f"{source} is an OpenVLA-OFT checkpoint with a {head} action head ({found_in}): it computes actions "
        "without a probability, so there is nothing to reinforce. Use a checkpoint fine-tuned with discrete "
        "action tokens and parallel decoding, e.g. Haozhan72/Openvla-oft-SFT-libero10-trajall, or an "
        "autoregressive one, e.g. openvla/openvla-7b-finetuned-libero-10."
    )


def _stored_tensors(folder: Path) -> dict[str, _Stored]:
    """Every tensor of the folder's main weights."""
    if (folder / _SINGLE).is_file():
        return _tensors_of(folder / _SINGLE)
    if (folder / _INDEX).is_file():
        files = shard_names(folder / _INDEX)
        missing = [name for name in files if not (folder / name).is_file()]
        if missing:
            raise ValueError(
                f"{folder} lacks {len(missing)} of {len(files)} weight files: {_some(missing)}. "
                "Download or copy the folder again."
            )
        return {name: entry for file in files for name, entry in _tensors_of(folder / file).items()}
    pickles = sorted(file.name for pattern in _PICKLES for file in folder.glob(pattern))
    if pickles:
        raise ValueError(
            f"{folder} has pickled weights only ({_some(pickles)}), which can run code when loaded and are refused. "
            "Convert them to safetensors where you trust them."
        )
    raise ValueError(f"{folder} has neither {_SINGLE} nor {_INDEX}. Download or copy the weights into it.")


def _tensors_of(file: Path) -> dict[str, _Stored]:
    """Name, place and shape of every tensor of one file."""
    return {name: _Stored(file=file, name=name, shape=shape) for name, shape in tensor_shapes(file).items()}


def _side_tensors(folder: Path, stem: str) -> dict[str, _Stored]:
    """Tensors of a module that is stored in a file of its own, under the names they have in the model."""
    found = {}
    for file in folder.glob(f"{stem}*.safetensors"):
        for name, entry in _tensors_of(file).items():
            found[f"{stem}.{name.removeprefix('module.').removeprefix(stem + '.')}"] = entry
    return found


def _check_names(folder: Path, expected: dict[str, tuple[int, ...]], stored: dict[str, _Stored]) -> None:
    """Raise for tensors that are missing, left over or of another shape, naming them."""
    missing = sorted(set(expected) - set(stored))
    extra = sorted(set(stored) - set(expected))
    wrong = [
        f"{name} {list(stored[name].shape)} instead of {list(expected[name])}"
        for name in sorted(set(expected) & set(stored))
        if stored[name].shape != expected[name]
    ]
    problems = [
        f"{len(names)} {label}: {_some(names)}"
        for label, names in (("missing", missing), ("left over", extra), ("of another shape", wrong))
        if names
    ]
    if not problems:
        return
    remedy = "The weights and config.json do not belong together, or a file is incomplete: copy the folder again."
    if any(name.startswith("proprio_projector.") for name in extra + missing):
        remedy = "Set use_proprio to whether the model was trained with the robot's state."
    elif any(".scale.weight" in name for name in extra + missing):
        remedy = "Set use_film to whether the model was trained with language modulation (FiLM)."
    raise ValueError(f"The weights in {folder} do not fit the model. Tensors {'; '.join(problems)}. {remedy}")


def _some(names: list[str]) -> str:
    """The first names, and how many more there are."""
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {more} more" if more > 0 else "")
