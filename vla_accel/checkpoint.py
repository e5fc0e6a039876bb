"""What survives a run: checkpoints to resume from exactly, and the exported policy.

A checkpoint holds, per rank, the local pieces of all parameters and of the optimizer's state, the streams of sampling
noise and what each environment has played; all as safetensors and JSON. Nothing is gathered and nothing is pickled, so
saving is as quick as the disk and the same for one process, DDP, FSDP1 and FSDP2. The price: a run is resumed on as
many processes and with the same preset as it was started.

Not here: what a model's folder looks like (`Policy.save`).
Usage: `save_checkpoint(...)` in the loop, `load_checkpoint(...)` before it, `export_policy(...)` at the end.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gymnasium as gym
import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from vla_accel.config import to_dict
from vla_accel.distributed import gather_objects
from vla_accel.modes import full_params
from vla_accel.policies.base import Policy
from vla_accel.rules import check
from vla_accel.track import write_json

if TYPE_CHECKING:
    from accelerate import Accelerator

FORMAT = 1
"""Of the checkpoint folders; a checkpoint of another format is refused."""

FOLDER = "checkpoints"


@dataclass(frozen=True, kw_only=True)
class Resumed:
    """Where a resumed run goes on.

    Attributes:
        iteration: the next one to run.
        extra: what the loop had put into the checkpoint.
    """

    iteration: int
    extra: dict[str, Any]


def save_checkpoint(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    policy: Policy,
    envs: gym.vector.VectorEnv,
    output: Path,
    *,
    iteration: int,
    keep: int,
    extra: dict[str, Any],
) -> Path:
    """Write `<output>/checkpoints/<iteration>` and delete the oldest beyond `keep`. Collective: call on every rank.

    The folder appears whole or not at all, so a run that is killed meanwhile resumes from the one before.

    Args:
        accelerator: from `make_accelerator`.
        model: the prepared policy.
        optimizer: the prepared optimizer.
        policy: the policy inside `model`.
        envs: this rank's environments, between two rollouts.
        output: the run's folder.
        iteration: the next one to run.
        keep: how many checkpoints to leave.
        extra: anything JSON can hold, the same on every rank.

    Raises:
        RuntimeError: on every rank, when any of them could not write (a full disk, say).
    """
    folder = output / FOLDER / f"{iteration:06d}"
    part = folder.with_name(folder.name + ".part")
    problem = None
    try:
        if accelerator.is_main_process:
            shutil.rmtree(part, ignore_errors=True)
        accelerator.wait_for_everyone()
        part.mkdir(parents=True, exist_ok=True)
        rank = accelerator.process_index
        save_file(_local_tensors(model, optimizer, policy), part / f"rank{rank:05d}.safetensors")
        write_json(part / f"rank{rank:05d}.json", {"envs": [_plain(state) for state in envs.call("episode_state")]})
    except (OSError, RuntimeError) as error:
        problem = f"rank {accelerator.process_index}: {error}"
    problems = [text for text in gather_objects(accelerator, problem) if text]
    if problems:
        shutil.rmtree(part, ignore_errors=True)
        raise RuntimeError(f"The checkpoint of iteration {iteration} could not be written ({'; '.join(problems)}).")
    if accelerator.is_main_process:
        about = {"format": FORMAT, "iteration": iteration, "world": accelerator.num_processes, "extra": extra}
        write_json(part / "checkpoint.json", {**about, "sharding": _sharding(accelerator)})
        shutil.rmtree(folder, ignore_errors=True)
        part.replace(folder)
        for old in checkpoints(output)[:-keep]:
            shutil.rmtree(old, ignore_errors=True)
    accelerator.wait_for_everyone()
    return folder


def checkpoints(output: Path) -> list[Path]:
    """The whole checkpoints of a run, oldest first."""
    found = (path.parent for path in (output / FOLDER).glob("*/checkpoint.json"))
    return sorted(path for path in found if path.name.isdigit())


def find_checkpoint(output: str | Path) -> Path:
    """The newest whole checkpoint of a run.

    Raises:
        ValueError: when there is none.
    """
    check(Path(output).is_dir(), "run.resume", "must name the output folder of a run", str(output))
    found = checkpoints(Path(output))
    check(
        bool(found),
        "run.resume",
        "must name a run that has a checkpoint",
        str(output),
        "Runs write them with --run.save_every.",
    )
    return found[-1]


FREE = {"resume", "output_dir", "save_every", "keep_checkpoints", "trackers", "video_episodes", "timeout_s"}
"""Options that may differ when a run is resumed, since no number depends on them."""


def check_same_options(config: Any, output: Path) -> None:
    """Raise a `ValueError` that names the first option in which a resumed run differs from the run as started."""
    stored = json.loads((output / "config.json").read_text(encoding="utf-8"))
    now = json.loads(json.dumps(to_dict(config)))
    for name in sorted({*stored, *now}):
        old, new = (tree.get(name) for tree in (stored, now))
        pairs = [(name, old, new)]
        if isinstance(old, dict) and isinstance(new, dict):
            pairs = [(f"{name}.{key}", old.get(key), new.get(key)) for key in sorted({*old, *new} - FREE)]
        for option, before, after in pairs:
            rule = f"must be as the run in {output} was started, {before!r}"
            check(before == after, option, rule, after, "Give the options of that run beside --run.resume.")


def load_checkpoint(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    policy: Policy,
    envs: gym.vector.VectorEnv,
    folder: Path,
) -> Resumed:
    """Bring everything back to where it stood. Collective: call on every rank; reset `envs` afterwards.

    Raises:
        ValueError: when the checkpoint was written by another number of processes, another kind of sharding, or does
            not fit the model.
    """
    about = json.loads((folder / "checkpoint.json").read_text(encoding="utf-8"))
    for name, here in (("world", accelerator.num_processes), ("sharding", _sharding(accelerator)), ("format", FORMAT)):
        check(
            about[name] == here,
            "run.resume",
            f"must be continued as the run was started: {name} {about[name]!r} in {folder}",
            here,
            "Use the same number of processes and the same preset.",
        )
    rank = accelerator.process_index
    stored = load_file(folder / f"rank{rank:05d}.safetensors")
    _restore_tensors(model, optimizer, policy, stored)
    states = json.loads((folder / f"rank{rank:05d}.json").read_text(encoding="utf-8"))["envs"]
    envs.set_attr("resume_from", states)
    return Resumed(iteration=about["iteration"], extra=about["extra"])


def full_state_dict(model: nn.Module) -> dict[str, torch.Tensor]:
    """All weights of a prepared policy under their own names, whole, on the CPU. Collective: call on every rank."""
    with full_params(model):
        return {
            _own_name(name): x.detach().to("cpu", copy=True)
            for name, x in [*model.named_parameters(), *_persistent_buffers(model)]
        }


def export_policy(
    accelerator: Accelerator, model: nn.Module, policy: Policy, folder: Path, *, value_head: bool = True
) -> None:
    """Write the policy as a folder that loads like the checkpoint it came from. Collective: call on every rank.

    The folder appears whole or not at all.

    Args:
        accelerator: from `make_accelerator`.
        model: the prepared policy.
        policy: the policy inside `model`.
        folder: to write; replaced if it exists.
        value_head: whether the value head goes with it; there is no use in one that was never trained.
    """
    state = full_state_dict(model)
    if not value_head:
        state = {name: x for name, x in state.items() if not name.startswith("value_head.")}
    if accelerator.is_main_process:
        temporary = folder.with_name(folder.name + ".part")
        shutil.rmtree(temporary, ignore_errors=True)
        policy.save(str(temporary), state)
        shutil.rmtree(folder, ignore_errors=True)
        temporary.replace(folder)
    accelerator.wait_for_everyone()


def _local_tensors(model: nn.Module, optimizer: Any, policy: Policy) -> dict[str, torch.Tensor]:
    """This rank's pieces: `model/<name>`, `optimizer/<name>/<entry>`, `noise` (one row per environment)."""
    tensors = {}
    state = _state_of(optimizer)
    for name, parameter in model.named_parameters():
        tensors[f"model/{name}"] = _local(parameter)
        for entry, x in state.get(parameter, {}).items():
            tensors[f"optimizer/{name}/{entry}"] = _local(torch.as_tensor(x))
    for name, buffer in _persistent_buffers(model):
        tensors[f"model/{name}"] = _local(buffer)
    tensors["noise"] = torch.stack([stream.get_state() for stream in policy.streams])
    # Safetensors wants memory of its own for every tensor.
    return {name: x.detach().cpu().contiguous().clone() for name, x in tensors.items()}


@torch.no_grad()
def _restore_tensors(model: nn.Module, optimizer: Any, policy: Policy, stored: dict[str, torch.Tensor]) -> None:
    state = _state_of(optimizer)
    on_device = {
        parameter: bool(group.get("fused") or group.get("capturable"))
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    places = [*model.named_parameters(), *_persistent_buffers(model)]
    missing = [name for name, _ in places if f"model/{name}" not in stored]
    check(not missing, "run.resume", "must name a run of the same model", missing[:3])
    for name, parameter in places:
        piece = stored[f"model/{name}"]
        check(
            piece.shape == _local(parameter).shape,
            "run.resume",
            f"must name a run of the same model ({name} differs)",
            tuple(piece.shape),
        )
        _local(parameter).copy_(piece)
        prefix = f"optimizer/{name}/"
        entries = {key.removeprefix(prefix): x for key, x in stored.items() if key.startswith(prefix)}
        if entries:
            beside = on_device[parameter]
            state[parameter] = {key: _like(parameter, key, x, on_device=beside) for key, x in entries.items()}
    for stream, saved in zip(policy.streams, stored["noise"], strict=True):
        stream.set_state(saved.clone())  # a row of its own: torch reads it as aligned memory


def _like(parameter: torch.Tensor, entry: str, x: torch.Tensor, *, on_device: bool) -> torch.Tensor:
    """An optimizer's entry as the optimizer keeps it: beside its parameter, and sharded like it.

    The count of steps is one number for all ranks, beside the parameter only if the optimizer is fused.
    """
    if entry == "step":
        return x.to(parameter.device) if on_device else x
    place = torch.zeros_like(parameter, dtype=x.dtype)
    _local(place).copy_(x)
    return place.detach()


def _state_of(optimizer: Any) -> dict:
    return getattr(optimizer, "optimizer", optimizer).state


def _local(x: torch.Tensor) -> torch.Tensor:
    """This rank's piece of a tensor; FSDP1 and DDP hold it as such, FSDP2 inside a DTensor."""
    x = x.detach()
    return x.to_local() if hasattr(x, "to_local") else x


def _sharding(accelerator: Accelerator) -> str:
    kind = str(accelerator.distributed_type).rsplit(".", 1)[-1]
    return f"{kind}2" if accelerator.is_fsdp2 else kind


def _plain(state: dict[str, Any]) -> dict[str, Any]:
    return {name: x.tolist() if isinstance(x, np.ndarray) else x for name, x in state.items()}


def _persistent_buffers(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [
        (f"{prefix}.{name}" if prefix else name, x)
        for prefix, module in model.named_modules()
        for name, x in module.named_buffers(recurse=False)
        if name not in module._non_persistent_buffers_set
    ]


def _own_name(name: str) -> str:
    """A parameter's name without what wrappers put into it."""
    hidden = ("_fsdp_wrapped_module", "_orig_mod", "_checkpoint_wrapped_module")
    parts = [part for part in name.split(".") if part not in hidden]
    return ".".join(parts[1:] if parts[0] == "module" else parts)
