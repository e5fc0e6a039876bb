"""The processor files beside a PI0 checkpoint: LeRobot's two pipelines with their statistics, openpi's norm_stats.

Not here: what the numbers are used for (`processing.py`) and the weights (`loading.py`).
Usage: `record = read_pipelines(folder)`; `write_pipelines(folder, config, record)`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from vla_accel.models.pi0.configuration import ACTION_KEY, STATE_KEY, Pi0Config
from vla_accel.models.reading import read_json, read_tensors, table

Statistics = dict[str, dict[str, Tensor]]

PRE, POST = "policy_preprocessor", "policy_postprocessor"
TOKENIZER_NAME = "google/paligemma-3b-pt-224"
_KNOWN_STEPS = {
    "rename_observations_processor",
    "to_batch_processor",
    "pi0_new_line_processor",
    "pi05_prepare_state_tokenizer_processor_step",
    "tokenizer_processor",
    "device_processor",
    "relative_actions_processor",
    "absolute_actions_processor",
    "normalizer_processor",
    "unnormalizer_processor",
}


@dataclass(kw_only=True)
class Pipelines:
    """What the two pipeline files say.

    Attributes:
        statistics: feature -> statistic -> float32 `[dim]`; empty where the checkpoint has none.
        norm_map: `{"STATE": mode, "ACTION": mode}`; None where no file says.
        eps: small number of the normalisation.
        rename_map: a robot's observation name -> the checkpoint's.
        tokenizer_name: the hub name that the file gives; never fetched.
        max_length: prompt tokens after padding; None where no file says.
    """

    statistics: Statistics = field(default_factory=dict)
    norm_map: dict[str, str] | None = None
    eps: float = 1e-8
    rename_map: dict[str, str] = field(default_factory=dict)
    tokenizer_name: str = TOKENIZER_NAME
    max_length: int | None = None


def read_pipelines(folder: Path) -> Pipelines:
    """Read LeRobot's `policy_preprocessor.json` and `policy_postprocessor.json` with the state files that they name.

    Raises:
        ValueError: a file is broken, a step is not implemented (named), or the two files disagree about the actions.
    """
    record = Pipelines()
    after: dict[str, Tensor] = {}
    for name in (PRE, POST):
        for step in _read_steps(folder / f"{name}.json"):
            kind, options, where = step["registry_name"], step["config"], f"{name}.json of {folder.name}"
            if kind == "rename_observations_processor":
                record.rename_map = table(options.get("rename_map") or {}, f"rename_map in {where}")
            elif kind == "tokenizer_processor":
                record.tokenizer_name = options.get("tokenizer_name") or TOKENIZER_NAME
                record.max_length = options.get("max_length")
                if record.max_length is not None and (type(record.max_length) is not int or record.max_length < 1):
                    raise ValueError(
                        f"max_length in {where} must be a whole number of at least 1, but is {record.max_length!r}."
                    )
            elif kind == "normalizer_processor":
                record.eps = options.get("eps", 1e-8)
                if type(record.eps) not in (int, float) or not record.eps >= 0:
                    raise ValueError(f"eps in {where} must be a number of at least 0, but is {record.eps!r}.")
                record.norm_map = dict(table(options.get("norm_map") or {}, f"norm_map in {where}"))
                only = options.get("normalize_observation_keys")
                if only is not None and STATE_KEY not in only:
                    record.norm_map["STATE"] = "IDENTITY"
                record.statistics = _read_state(folder, step)
            elif kind == "unnormalizer_processor":
                after = _read_state(folder, step).get(ACTION_KEY, {})
    before = record.statistics.setdefault(ACTION_KEY, after) if after else record.statistics.get(ACTION_KEY, {})
    for key in before.keys() & after.keys():
        if not torch.equal(before[key], after[key]):
            raise ValueError(f"{PRE}.json and {POST}.json of {folder.name} name different statistics action.{key}.")
    return record


def _read_steps(path: Path) -> list[dict[str, Any]]:
    """The steps of a pipeline file, each with its `config`; none where there is no file."""
    if not path.is_file():
        return []
    steps = read_json(path).get("steps")
    if not isinstance(steps, list):
        raise ValueError(f"{path} must have a list 'steps', but has {steps!r}. Copy it from the original checkpoint.")
    for step in steps:
        kind = table(step, f"A step of {path}").get("registry_name")
        step["config"] = table(step.get("config") or {}, f"config of {kind} in {path}")
        if kind not in tuple(_KNOWN_STEPS):
            raise ValueError(f"{path.name}: the processing step {kind!r} is not supported.")
        if kind in ("relative_actions_processor", "absolute_actions_processor") and step["config"].get("enabled"):
            raise ValueError(
                f"{path.name}: {kind} is enabled: checkpoints that predict actions relative to the state are not "
                "supported."
            )
    return steps


def _read_state(folder: Path, step: dict[str, Any]) -> Statistics:
    """The flat `<feature>.<statistic>` file of a step, nested, without the pixels' statistics."""
    if "state_file" not in step:
        return {}
    path = folder / str(step["state_file"])
    if not path.is_file():
        raise ValueError(f"{folder.name} lacks {path.name}, the statistics that its pipeline file names.")
    nested: Statistics = {}
    for key, value in read_tensors(path).items():
        feature, _, name = key.rpartition(".")
        if feature in (STATE_KEY, ACTION_KEY):
            nested.setdefault(feature, {})[name] = value.float()
    return nested


def write_pipelines(folder: Path, config: Pi0Config, record: Pipelines) -> None:
    """Write both pipelines as LeRobot 0.6 does."""
    norm_map = {"VISUAL": "IDENTITY", **(record.norm_map or config.normalization_mapping)}
    relative = {"enabled": False, "exclude_joints": ["gripper"], "action_names": None}
    rename = _step("rename_observations_processor", rename_map=record.rename_map)
    batch, device = _step("to_batch_processor"), _step("device_processor", device="cpu", float_dtype=None)
    tokenize = _step(
        "tokenizer_processor",
        max_length=record.max_length or config.tokenizer_max_length,
        task_key="task",
        padding_side="right",
        padding="max_length",
        truncation=True,
        tokenizer_name=record.tokenizer_name,
    )
    features = {**config.input_features, **config.output_features}
    normalize = _step("normalizer_processor", eps=record.eps, features=features, norm_map=norm_map)
    relative_step = _step("relative_actions_processor", **relative)
    if config.variant == "pi05":
        prepare = _step("pi05_prepare_state_tokenizer_processor_step")
        before = [rename, batch, relative_step, normalize, prepare, tokenize, device]
    else:
        before = [rename, batch, _step("pi0_new_line_processor"), tokenize, device, relative_step, normalize]
    after = [
        _step("unnormalizer_processor", eps=record.eps, features=config.output_features, norm_map=norm_map),
        _step("absolute_actions_processor", enabled=False),
        device,
    ]
    for name, steps in ((PRE, before), (POST, after)):
        for index, step in enumerate(steps):
            if "normalizer" in step["registry_name"] and record.statistics:
                step["state_file"] = f"{name}_step_{index}_{step['registry_name']}.safetensors"
                save_file(_flatten(record.statistics), folder / step["state_file"])
        (folder / f"{name}.json").write_text(json.dumps({"name": name, "steps": steps}, indent=2) + "\n")


def _step(registry_name: str, **config: Any) -> dict[str, Any]:
    return {"registry_name": registry_name, "config": config}


def _flatten(statistics: Statistics) -> dict[str, Tensor]:
    return {
        f"{feature}.{name}": value.contiguous()
        for feature, stats in statistics.items()
        for name, value in stats.items()
    }


def find_norm_stats(folder: Path, asset_id: str | None) -> tuple[str, Path] | None:
    """Find openpi's `assets/<asset_id>/norm_stats.json`: its asset id and path, or None where there is none.

    Raises:
        ValueError: several, or none of the given name.
    """
    root = folder / "assets"
    found = {path.parent.relative_to(root).as_posix(): path for path in sorted(root.rglob("norm_stats.json"))}
    if asset_id is not None:
        if asset_id not in found:
            raise ValueError(f"asset_id must be one of {', '.join(found) or '(none found)'}, but is {asset_id!r}.")
        return asset_id, found[asset_id]
    if len(found) > 1:
        raise ValueError(f"{folder.name} has statistics for {', '.join(found)}: choose with asset_id.")
    return next(iter(found.items()), None)


def read_norm_stats(path: Path) -> Statistics:
    """Read openpi's `norm_stats.json`.

    Raises:
        ValueError: the file is broken, or lacks numbers of the state or of the actions.
    """
    raw = read_json(path)
    raw = table(raw.get("norm_stats", raw), f"norm_stats of {path}")
    found: Statistics = {}
    for feature, key in (("state", STATE_KEY), ("actions", ACTION_KEY)):
        stats = table(raw.get(feature), f"{feature!r} in {path}")
        rows = {name: values for name, values in stats.items() if values is not None}
        if not rows:
            raise ValueError(f"{feature!r} in {path} has no statistics. Copy the file from the original checkpoint.")
        found[key] = {name: _numbers(values, f"{name!r} of {feature!r} in {path}") for name, values in rows.items()}
    return found


def _numbers(values: Any, name: str) -> Tensor:
    try:
        return torch.tensor([float(value) for value in values])
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name} must be a list of numbers, but is {values!r}.") from error
