"""What lies in a policy's folder beside the model itself: its heads.

Not here: the model's own files (`models/`).
Usage: `width = value_width(path, config.value_hidden)`, then `load_head(policy.value_head, path, VALUE_HEAD_FILE)`.
"""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import save_file
from torch import nn

from vla_accel.models.reading import read_tensors, tensor_shapes
from vla_accel.rules import check
from vla_accel.types import TensorDict

EMBEDDED = Path(__file__).parent.parent / "assets"
"""Folder of the small checkpoints that ship with the package, one per model name."""

VALUE_HEAD_FILE = "value_head.safetensors"
DEFAULT_WIDTH = 256


def value_width(path: str, asked: int | None) -> int:
    """Width of the value head's hidden layers: the stored head's, else the one asked for, else the default.

    Raises:
        ValueError: when another width than the stored one is asked for, or the stored head is broken.
    """
    head = Path(path) / VALUE_HEAD_FILE
    if not head.exists():
        return asked or DEFAULT_WIDTH
    stored, *_ = tensor_shapes(head).get("fc1.weight") or (None,)
    if stored is None:
        raise ValueError(f"{head} is no value head: it has no fc1.weight. Copy it again, or remove it to start anew.")
    rule = f"must be {stored}, the width of the value head in {path}"
    check(asked in (None, stored), "policy.value_hidden", rule, asked)
    return stored


def load_head(head: nn.Module | None, path: str, name: str) -> None:
    """Fill a head from the file `name` of a folder; one without that file keeps its weights."""
    if head is not None and (Path(path) / name).exists():
        head.load_state_dict(read_tensors(Path(path) / name))


def part_of(state_dict: TensorDict, prefix: str) -> TensorDict:
    """The tensors whose names begin with `prefix`, without it."""
    return {name.removeprefix(prefix): x for name, x in state_dict.items() if name.startswith(prefix)}


def save_head(state_dict: TensorDict, prefix: str, folder: str, name: str) -> None:
    """Write the part of a policy's weights that is a head to the file `name`, if there is such a part."""
    if head := part_of(state_dict, prefix):
        save_file({key: x.contiguous() for key, x in head.items()}, Path(folder) / name)
