"""What survives a run: checkpoints to resume from, and the exported policy.

Not here: what a model's folder looks like (`Policy.save`). Nothing is pickled by this module; Accelerate's own state
files are read only from folders that this module wrote.
Usage: `save_checkpoint(...)` in the loop, `resume(...)` before it, `export_policy(...)` at the end.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from vla_accel.distributed import gather_objects
from vla_accel.modes import full_params
from vla_accel.policies.base import Policy
from vla_accel.track import write_json

if TYPE_CHECKING:
    from accelerate import Accelerator

FORMAT = 1
"""Of the checkpoint folders; a checkpoint of another format is refused."""


def full_state_dict(model: nn.Module) -> dict[str, torch.Tensor]:
    """All weights of a prepared policy under their own names, whole, on the CPU. Collective: call on every rank."""
    with full_params(model):
        return {
            _own_name(name): x.detach().to("cpu", copy=True)
            for name, x in [*model.named_parameters(), *_persistent_buffers(model)]
        }


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


def export_policy(accelerator: Accelerator, model: nn.Module, policy: Policy, folder: Path) -> None:
    """Write the policy as a folder that loads like the checkpoint it came from. Collective: call on every rank.

    The folder appears whole or not at all.
    """
    state = full_state_dict(model)
    if accelerator.is_main_process:
        temporary = folder.with_name(folder.name + ".part")
        shutil.rmtree(temporary, ignore_errors=True)
        policy.save(str(temporary), state)
        shutil.rmtree(folder, ignore_errors=True)
        temporary.replace(folder)
    accelerator.wait_for_everyone()
