"""The files of a checkpoint folder, read so that a broken one is one sentence that names it.

Not here: what the files mean (`openvla/`, `pi0/`). Every function raises `ValueError`.
Usage: `data = read_json(folder / "config.json")`, `shapes = tensor_shapes(folder / "model.safetensors")`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

_HINT = "an unfinished download or a git-lfs pointer?"
_AGAIN = "Download or copy it again."


def read_json(path: Path) -> dict[str, Any]:
    """The table of names and values that a JSON file holds."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # of the syntax or of the encoding
        raise ValueError(f"{path} is not a whole JSON file ({_HINT}): {error}. {_AGAIN}") from error
    return table(data, str(path))


def table(value: Any, name: str) -> dict[str, Any]:
    """The value itself, if it is a table of names and values."""
    if not isinstance(value, dict):
        raise ValueError(f"{name} must hold a table {{name: value}}, but holds {_short(value)}. {_AGAIN}")
    return value


def shard_names(index: Path) -> list[str]:
    """Names of the weight files that an index file lists."""
    names = table(read_json(index).get("weight_map"), f"weight_map of {index}").values()
    if not names or not all(isinstance(name, str) for name in names):
        raise ValueError(f"weight_map of {index} must name a file for each tensor. {_AGAIN}")
    return sorted(set(names))


@contextmanager
def open_tensors(path: Path, device: str = "cpu") -> Iterator[Any]:
    """A safetensors file, opened for reading single tensors."""
    try:
        file = safe_open(path, framework="pt", device=device)
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} is not a whole safetensors file ({_HINT}): {error}. {_AGAIN}") from error
    with file as opened:
        yield opened


def tensor_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor of a safetensors file, reading none."""
    with open_tensors(path) as file:
        return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 (not a mapping)


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Every tensor of a safetensors file."""
    with open_tensors(path) as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)


def read_tokenizer(kind: Any, folder: Path) -> Any:
    """The tokenizer in a folder, by a class `kind` of transformers, without the network or foreign code."""
    try:
        return kind.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers and tokenizers let through whatever a broken file makes them raise
        raise ValueError(f"The tokenizer files in {folder} cannot be read ({_HINT}): {error}. {_AGAIN}") from error


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
