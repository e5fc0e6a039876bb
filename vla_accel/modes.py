"""The two states of a sharded model: rollout mode, with every parameter at hand, and train mode, sharded.

Sharded training gathers each layer for each forward, on all ranks in step. A rollout cannot keep step: episodes end
when they end. `rollout_mode` gathers everything once, in the dtype forwards compute in, and keeps it until the end.

Not here: building and sharding models (`distributed.py`), and collecting a rollout (`rollout.py`).
Usage: `with rollout_mode(model): sample = model(inputs)`; always call the prepared model itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule as FSDP2
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1
from torch.distributed.fsdp._common_utils import HandleTrainingState, TrainingState
from torch.distributed.fsdp._flat_param import HandleShardingStrategy
from torch.distributed.fsdp._runtime_utils import _lazy_init, _reshard, _unshard
from torch.distributed.tensor import DTensor

from vla_accel.roll_call import meet

_open_rollouts: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()


@contextmanager
def rollout_mode(model: nn.Module, *, timeout_s: float = 60.0) -> Iterator[nn.Module]:
    """Act with a model that may be sharded: no gradients, eval mode, and no collective until the context ends.

    Entering gathers one full copy of the parameters in compute dtype (bf16 under bf16 mixed precision); leaving frees
    it. Inside, each rank may run as many forwards as it likes. Everything is put back on the way out, also after an
    exception: every submodule's train/eval flag, gradient checkpointing, and torch's global random state. Entering
    again inside changes nothing.

    Collective on entry: call on every rank.

    Args:
        model: prepared as FSDP1, FSDP2 or DDP, or a plain module.
        timeout_s: seconds to wait on entry for the other ranks.

    Raises:
        RuntimeError: a rank that does not enter.
        ValueError: a wrapper that cannot be gathered this way.
    """
    if _open_rollouts.get(model):
        yield model
        return
    kind = _kind_of(model)
    if kind != "plain":
        meet("enter rollout_mode", timeout_s=timeout_s)
    with ExitStack() as stack:
        stack.enter_context(_restored_flags(model))
        stack.enter_context(torch.random.fork_rng())
        stack.enter_context(torch.no_grad())
        model.eval()
        _set_checkpointing(model, False)
        if kind == "fsdp1":
            stack.enter_context(_fsdp1_gathered(model))
        elif kind == "fsdp2":
            stack.enter_context(_fsdp2_gathered(model))
        _open_rollouts[model] = True
        stack.callback(_open_rollouts.pop, model)
        yield model


@contextmanager
def train_mode(model: nn.Module) -> Iterator[nn.Module]:
    """Score and update: gradients on, parameters sharded, dropout off, gradient checkpointing as configured.

    Dropout stays off because old and new log-probs must come from the same function: then PPO's ratio is 1 before the
    first step. Layers that checkpoint only in train mode are put into it; what is inside them is not. Flags are put
    back on leaving.

    Raises:
        RuntimeError: entered inside `rollout_mode` of the same model, where nothing is sharded.
    """
    if _open_rollouts.get(model):
        raise RuntimeError("train_mode was entered inside rollout_mode of the same model; leave rollout_mode first.")
    with _restored_flags(model), torch.enable_grad():
        model.eval()
        model.training = True
        for module in model.modules():
            if getattr(module, "gradient_checkpointing", False) is True:
                module.training = True
        yield model


@contextmanager
def full_params(model: nn.Module) -> Iterator[nn.Module]:
    """Show the raw full-precision parameters of a model that may be sharded, to read: export, folding, copies.

    For reading weights, not for forwards (`rollout_mode`). What is written inside is lost. Holds a full copy at the
    parameters' own dtype on every rank. Collective: call on every rank.
    """
    kind = _kind_of(model)
    if kind == "fsdp1":
        with FSDP1.summon_full_params(model, writeback=False):
            yield model
    elif kind == "fsdp2":
        with _fsdp2_full_precision(model):
            yield model
    else:
        yield model


def _kind_of(model: nn.Module) -> str:
    """`fsdp1`, `fsdp2`, `ddp` or `plain`; refuses what cannot be gathered."""
    if isinstance(model, FSDP1):
        return "fsdp1"
    if isinstance(model, FSDP2):
        return "fsdp2"
    if any(isinstance(module, (FSDP1, FSDP2)) for module in model.modules()):
        raise ValueError("this module is inside a sharded model: pass the model that accelerator.prepare returned.")
    if type(model).__name__ == "DeepSpeedEngine":
        raise ValueError("DeepSpeed is not supported: use the preset fsdp2.yaml (or fsdp2_offload.yaml).")
    if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        raise ValueError("tensor parallelism is not supported: use the preset fsdp2.yaml, which shards over all ranks.")
    return "ddp" if isinstance(model, nn.parallel.DistributedDataParallel) else "plain"


@contextmanager
def _restored_flags(model: nn.Module) -> Iterator[None]:
    """Put back each submodule's `training` and `gradient_checkpointing` flags."""
    training = {module: module.training for module in model.modules()}
    checkpointing = {
        module: module.gradient_checkpointing for module in training if hasattr(module, "gradient_checkpointing")
    }
    try:
        yield
    finally:
        for module, flag in training.items():
            module.training = flag
        for module, flag in checkpointing.items():
            module.gradient_checkpointing = flag


def _set_checkpointing(model: nn.Module, flag: bool) -> None:
    for module in model.modules():
        if hasattr(module, "gradient_checkpointing"):
            module.gradient_checkpointing = flag


@contextmanager
def _fsdp1_gathered(model: FSDP1) -> Iterator[None]:
    """Unshard each unit in compute dtype, and keep its own forward from resharding it."""
    _lazy_init(model, model)
    units = [unit for unit in FSDP1.fsdp_modules(model) if unit._handle is not None]
    strategies = [unit._handle._sharding_strategy for unit in units]
    keep = {
        HandleShardingStrategy.FULL_SHARD: HandleShardingStrategy.SHARD_GRAD_OP,
        HandleShardingStrategy.HYBRID_SHARD: HandleShardingStrategy._HYBRID_SHARD_ZERO2,
    }
    try:
        for unit in units:
            stream = unit._device_handle.current_stream()
            _unshard(unit, unit._handle, stream, stream)
            unit._handle._sharding_strategy = keep.get(unit._handle._sharding_strategy, unit._handle._sharding_strategy)
        yield
    finally:
        for unit, strategy in zip(units, strategies, strict=True):
            unit._handle._sharding_strategy = strategy
            unit._handle._training_state, unit.training_state = HandleTrainingState.IDLE, TrainingState.IDLE
            _reshard(unit, unit._handle, unit._handle.uses_sharded_strategy)


@contextmanager
def _fsdp2_gathered(model: FSDP2) -> Iterator[None]:
    """Unshard each unit in compute dtype, and keep its own forward from resharding it."""
    model._get_fsdp_state()._lazy_init()
    units = [module for module in model.modules() if isinstance(module, FSDP2)]
    groups = [group for unit in units for group in unit._get_fsdp_state()._fsdp_param_groups]
    meshes = [group.post_forward_mesh_info for group in groups]
    try:
        for unit in units:
            unit.unshard()
        for group in groups:
            group.post_forward_mesh_info = None
        yield
    finally:
        for group, mesh in zip(groups, meshes, strict=True):
            group.post_forward_mesh_info = mesh
        for unit in units:
            unit.reshard()


@contextmanager
def _fsdp2_full_precision(model: FSDP2) -> Iterator[None]:
    """Register full copies in place of the sharded parameters."""
    full: dict[nn.Parameter, nn.Parameter] = {}
    places = [
        (module, name, parameter)
        for module in model.modules()
        for name, parameter in module._parameters.items()
        if isinstance(parameter, DTensor)
    ]
    try:
        for module, name, parameter in places:
            if parameter not in full:
                data = parameter.detach().to(parameter.device_mesh.device_type).full_tensor()
                full[parameter] = nn.Parameter(data, requires_grad=parameter.requires_grad)
            module._parameters[name] = full[parameter]
        yield
    finally:
        for module, name, parameter in places:
            module._parameters[name] = parameter
