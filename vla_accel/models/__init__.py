"""The Hugging Face side: configurations, models and processors. Knows nothing of reinforcement learning.

Usage: `model, processor = load_vla("path/to/checkpoint")`.
"""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedModel

# `model_type` of a config.json -> module with `register()`, `load(folder, dtype=, device=, **config_overrides)`
# and `save(model, processor, folder, **kwargs)`.
_FAMILIES: dict[str, str] = {
    "openvla": "vla_accel.models.openvla.auto",
    **dict.fromkeys(("pi0", "pi05", "vla_pi0"), "vla_accel.models.pi0.auto"),
}

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_HUB_FILES = ["*.json", "*.safetensors", "tokenizer.model", "tokenizer/*", "assets/*"]


def register_vla_models() -> None:
    """Make the models known to Hugging Face's `AutoConfig`, `AutoProcessor`, `AutoModelFor...`.

    Calling it again changes nothing.
    """
    for module in dict.fromkeys(_FAMILIES.values()):
        importlib.import_module(module).register()


def load_vla(
    path: str | Path,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    **config_overrides: Any,
) -> tuple[PreTrainedModel, Any]:
    """Load a checkpoint folder strictly.

    Args:
        path: a local folder; or a hub name `owner/name`, which is downloaded (and cached) by `huggingface_hub`. A
            path of another form never reaches the network.
        dtype: floating-point type of the parameters; None for float32.
        device: where to put them.
        **config_overrides: fields of the model's configuration that replace those of the folder, e.g.
            `action_decoding="parallel", num_actions_chunk=8`.

    Returns:
        The model, in evaluation mode, and its processor.

    Raises:
        ValueError: the folder is missing or of an unknown kind; a file or tensor is missing, left over or of the
            wrong shape; the weights are pickles; an option is unknown or out of range.
    """
    import torch

    folder, family = _family(path)
    return family.load(folder, dtype=dtype or torch.float32, device=device, **config_overrides)


def peek_vla(path: str | Path, **config_overrides: Any) -> PretrainedConfig:
    """Check that a checkpoint is whole, without reading a weight: a matter of seconds for any size.

    Args:
        path: as for `load_vla`.
        **config_overrides: as for `load_vla`.

    Returns:
        The configuration that `load_vla` would give the model.

    Raises:
        ValueError: as for `load_vla`.
    """
    folder, family = _family(path)
    return family.peek(folder, **config_overrides)


def save_vla(model: PreTrainedModel, processor: Any | None, folder: str | Path, **kwargs: Any) -> None:
    """Write a folder that `load_vla` and the model's original code can load.

    Args:
        model: the model; all its tensors are written, also those that influence nothing.
        processor: written beside it; None to leave the folder without one.
        folder: created if absent.
        **kwargs: passed to the model's `save_pretrained`, e.g. `state_dict` (gathered elsewhere) or `max_shard_size`.
    """
    importlib.import_module(_FAMILIES[model.config.model_type]).save(model, processor, Path(folder), **kwargs)
    share_weights(folder)


def share_weights(folder: str | Path) -> None:
    """Give the weight files of a folder the permissions of its config.json.

    Safetensors writes files that only their owner can read; a checkpoint on a shared disk is for everybody that can
    read its other files.
    """
    mode = (Path(folder) / "config.json").stat().st_mode & 0o777
    for file in Path(folder).glob("*.safetensors"):
        file.chmod(mode)


def _family(path: str | Path) -> tuple[Path, Any]:
    """The local folder of a checkpoint and the module of its model family."""
    folder = _folder(path)
    if not (folder / "config.json").is_file():
        raise ValueError(f"{folder} has no config.json. Give the folder of a Hugging Face checkpoint.")
    from vla_accel.models.reading import read_json

    data = read_json(folder / "config.json")
    kind = data.get("model_type", data.get("type", "pi0" if "action_horizon" in data else None))  # openpi names none
    if kind not in tuple(_FAMILIES):
        raise ValueError(f"{folder / 'config.json'} has model_type {kind!r}; known are {sorted(_FAMILIES)}.")
    register_vla_models()
    return folder, importlib.import_module(_FAMILIES[kind])


def _folder(path: str | Path) -> Path:
    """The local folder of a path or hub name."""
    folder = Path(path)
    if folder.is_dir():
        return folder
    # `runs/export` looks like a hub name too; an owner that is a local folder means a mistyped path.
    looks_local = isinstance(path, Path) or folder.parent.is_dir() and folder.parent != Path()
    if looks_local or not _HUB_NAME.fullmatch(str(path)):
        raise ValueError(f"{path} is not a folder. Give a checkpoint folder, or a hub name of the form owner/name.")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    from vla_accel.models.openvla.loading import refuse_parts

    refuse_parts(str(path), _hub_listing(str(path)))
    try:
        return Path(snapshot_download(str(path), allow_patterns=_HUB_FILES))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise ValueError(
            f"{path} is neither a local folder nor a model that the hub gives out ({type(error).__name__}). "
            "Check the spelling, log in if the model is gated, or give a local folder."
        ) from error


def _hub_listing(name: str) -> list[str]:
    """Names of all files of a model on the hub, also of those that are not downloaded; none where it does not answer.

    What is wrong then is said by the download, which also finds what was fetched before.
    """
    from huggingface_hub import HfApi

    try:
        return [file.rfilename for file in HfApi().model_info(name, timeout=10).siblings or []]
    except Exception:  # noqa: BLE001 - the errors of whichever HTTP library the hub's client uses
        return []
