"""How each generation of FSDP gathers a model's parameters, keeps them, and gives them back.

The one file that knows torch's private FSDP names; written against torch 2.6 to 2.14.

Not here: what else changes between rollout and training (`modes.py`, the only user).
Usage: `with gathered(model): ...`
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule as FSDP2
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1
from torch.distributed.fsdp._runtime_utils import _lazy_init, _reshard, _unshard
from torch.distributed.tensor import DTensor
from torch.distributed.utils import _cast_forward_inputs, _to_kwargs

_SPLIT = "Tensor parallelism is not supported"


def kind_of(model: nn.Module) -> str:
    """`fsdp1`, `fsdp2`, `ddp` or `plain`.

    Raises:
        ValueError: for what cannot be gathered, with what to use instead.
    """
    if isinstance(model, FSDP1):
        if any(unit.cpu_offload.offload_params for unit in FSDP1.fsdp_modules(model)):
            raise ValueError("FSDP1 with parameters offloaded to the CPU is not supported: use fsdp2_offload.yaml.")
        return "fsdp1"
    if isinstance(model, FSDP2):
        groups = [group for unit in model.modules() if isinstance(unit, FSDP2) for group in _groups(unit)]
        if any(getattr(parameter, "is_dtensor", False) for group in groups for parameter in group.fsdp_params):
            raise ValueError(f"{_SPLIT} under FSDP2: use fsdp2.yaml, which shards over all ranks.")
        return "fsdp2"
    if any(isinstance(module, (FSDP1, FSDP2)) for module in model.modules()):
        raise ValueError("This module is part of a sharded model; pass what accelerator.prepare returned instead.")
    if type(model).__name__ == "DeepSpeedEngine" or any(hasattr(p, "ds_id") for p in model.parameters()):
        raise ValueError("DeepSpeed (ZeRO) is not supported: use fsdp2.yaml, or fsdp2_offload.yaml for offloading.")
    if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        raise ValueError(f"{_SPLIT}: use fsdp2.yaml, which shards over all ranks.")
    return "ddp" if isinstance(model, nn.parallel.DistributedDataParallel) else "plain"


def gathered(model: nn.Module) -> AbstractContextManager[None]:
    """Every parameter at hand in compute dtype, and forwards without a collective. Collective on entry if sharded."""
    ways: dict[str, Callable[[Any], AbstractContextManager[None]]] = {
        "fsdp1": fsdp1_gathered,
        "fsdp2": fsdp2_gathered,
        "ddp": unsynchronized,
        "plain": unsharded,
    }
    return ways[kind_of(model)](model)


@contextmanager
def unsharded(model: nn.Module) -> Iterator[None]:
    """Gather nothing: these parameters are the ones that train, so raise if they are written to."""
    parameters = dict(model.named_parameters())

    def state() -> list[tuple[int, int]]:
        versions = [parameter._version for parameter in parameters.values()]
        return list(zip(versions, _fingerprints(list(parameters.values())), strict=True))

    before = state()
    yield
    written = [name for name, old, new in zip(parameters, before, state(), strict=True) if old != new]
    if written:
        raise RuntimeError(f"Parameters were written to inside rollout_mode, which changes what trains: {written[:5]}.")


def _fingerprints(parameters: list[nn.Parameter]) -> list[int]:
    """One number per parameter that tells writes past autograd, such as those to `.data`: the sum of its bits."""
    words = {1: torch.int8, 2: torch.int16, 4: torch.int32}
    sums = [p.detach().view(words.get(p.element_size(), torch.int64)).sum(dtype=torch.int64) for p in parameters]
    return [int(number) for number in torch.stack([x.cpu() for x in sums])] if sums else []


@contextmanager
def unsynchronized(model: nn.parallel.DistributedDataParallel) -> Iterator[None]:
    """Like `unsharded`, and keep DDP from broadcasting buffers before each forward."""
    before, model.require_forward_param_sync = model.require_forward_param_sync, False
    try:
        with unsharded(model):
            yield
    finally:
        model.require_forward_param_sync = before


@contextmanager
def fsdp1_gathered(model: FSDP1) -> Iterator[None]:
    """Gather each unit in compute dtype, and run forwards past the hooks that would give it back. Collective on entry.

    Where parameters are kept in compute dtype this is `summon_full_params`. Under mixed precision, summoning makes a
    full-precision copy that no layer reads while each layer still gathers its own; there, units gather the way their
    forwards do.
    """
    _lazy_init(model, model)
    reshard(model)
    units = FSDP1.fsdp_modules(model)
    handles = [unit._handle for unit in units if unit._handle]
    with ExitStack() as stack:
        if not any(handle._uses_param_mixed_precision for handle in handles):
            if not any(handle.uses_sharded_strategy for handle in handles):  # a single process
                stack.enter_context(unsharded(model))
            stack.enter_context(FSDP1.summon_full_params(model, writeback=False))
        else:
            stack.callback(reshard, model)
            for unit in units:
                if unit._handle:
                    stream = unit._device_handle.current_stream()
                    _unshard(unit, unit._handle, stream, stream)
                    if not unit._handle._use_orig_params:
                        unit._handle._use_unsharded_views(as_params=False)
        for unit in units:
            stack.callback(vars(unit).pop, "forward")
            unit.forward = partial(_forward_past_hooks, unit)
        yield


def _forward_past_hooks(unit: FSDP1, *args: Any, **kwargs: Any) -> Any:
    """What an FSDP1 forward does but for gathering: move and cast the inputs, and call the module."""
    if unit._is_root and (args or kwargs):
        ((args,), (kwargs,)) = _to_kwargs(args, kwargs, unit.compute_device, False)
    policy = unit.mixed_precision
    if (policy.cast_root_forward_inputs and unit._is_root) or (policy.cast_forward_inputs and unit._handle):
        args, kwargs = _cast_forward_inputs(policy.param_dtype, *args, **kwargs)
    return unit.module(*args, **kwargs)


@contextmanager
def fsdp2_gathered(model: FSDP2) -> Iterator[None]:
    """Gather each unit in compute dtype, and run forwards past the hooks that would give it back. Collective on entry.

    Hooks that serve several modules at once stay; they find their unit gathered, and leave it so.
    """
    root = model._get_fsdp_state()
    root._lazy_init()
    units = [module for module in model.modules() if isinstance(module, FSDP2)]
    states = [unit._get_fsdp_state() for unit in units]
    groups = [group for unit in units for group in _groups(unit)]
    after_forward = [group.post_forward_mesh_info for group in groups]
    reshard(model)
    with ExitStack() as stack:
        stack.callback(reshard, model)
        for unit in units:
            unit.unshard()
        stack.callback(_forget_forwards, root, states)
        for group, mesh_info in zip(groups, after_forward, strict=True):
            stack.callback(setattr, group, "post_forward_mesh_info", mesh_info)
            group.post_forward_mesh_info = None
        for unit, state in zip(units, states, strict=True):
            stack.enter_context(_past_hooks(unit, state))
        yield


@contextmanager
def _past_hooks(unit: FSDP2, state: Any) -> Iterator[None]:
    """Replace a unit's own FSDP hooks by what they do but for gathering: move and cast inputs, cast outputs."""
    before = [(hooks, dict(hooks)) for hooks in (unit._forward_pre_hooks, unit._forward_hooks)]
    own = {key for _, kept in before for key, hook in kept.items() if getattr(hook, "__self__", None) is state}
    if not own:
        yield
        return
    policy, to_device = state._mp_policy, state._is_root and state._device.type != "cpu"

    def enter(_: nn.Module, args: Any, kwargs: Any) -> Any:
        if to_device and (args or kwargs):
            ((args,), (kwargs,)) = _to_kwargs(args, kwargs, state._device, False)
        if policy.cast_forward_inputs:
            args, kwargs = _cast_forward_inputs(policy.param_dtype, *args, **kwargs)
        return args, kwargs

    def leave(_: nn.Module, _args: Any, output: Any) -> Any:
        return _cast_forward_inputs(policy.output_dtype, output)[0][0]

    for hooks, _ in before:
        for key in own:
            hooks.pop(key, None)
    handles = []
    if to_device or (policy.cast_forward_inputs and policy.param_dtype):
        handles.append(unit.register_forward_pre_hook(enter, prepend=True, with_kwargs=True))
    if policy.output_dtype:
        handles.append(unit.register_forward_hook(leave))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        for hooks, kept in before:
            now = dict(hooks)
            hooks.clear()
            hooks.update({key: hook for key, hook in kept.items() if key in own or key in now} | now)


def _forget_forwards(root: Any, states: list[Any]) -> None:
    """As after a backward: no forward under way, even if one was cut short, and no order to prefetch by."""
    root._state_ctx.iter_forward_root = None
    root._comm_ctx.post_forward_order.clear()
    for state in states:
        state._training_state = type(state._training_state).IDLE
        for group in _groups_of(state):
            group._training_state = type(group._training_state).IDLE
            group._post_forward_indices.clear()


def reshard(model: nn.Module) -> None:
    """Free what is gathered; nothing to do for an unsharded model.

    A forward without a backward leaves the root gathered, and older than the optimizer's next step.
    """
    for unit in model.modules():
        if isinstance(unit, FSDP2):
            unit.reshard()
        elif isinstance(unit, FSDP1) and unit._handle and unit._is_root is not None:
            _reshard(unit, unit._handle, unit._handle.uses_sharded_strategy)


def _groups(unit: FSDP2) -> list[Any]:
    return _groups_of(unit._get_fsdp_state())


def _groups_of(state: Any) -> list[Any]:
    groups = state._fsdp_param_groups if hasattr(state, "_fsdp_param_groups") else [state._fsdp_param_group]
    return [group for group in groups if group is not None]


@contextmanager
def full_precision(model: nn.Module) -> Iterator[None]:
    """Show whole parameters in the dtype they are kept in. Collective on entry."""
    if isinstance(model, FSDP1):
        _lazy_init(model, model)
    reshard(model)
    if isinstance(model, FSDP1):
        with FSDP1.summon_full_params(model, writeback=False):
            yield
        return
    places = [
        (module, name, parameter)
        for module in model.modules()
        for name, parameter in module._parameters.items()
        if isinstance(parameter, DTensor)
    ]
    whole: dict[nn.Parameter, nn.Parameter] = {}
    try:
        for module, name, parameter in places:
            if parameter not in whole:  # tied parameters stay tied
                data = parameter.detach().to(parameter.device_mesh.device_type).full_tensor()
                whole[parameter] = nn.Parameter(data, requires_grad=parameter.requires_grad)
            module._parameters[name] = whole[parameter]
        yield
    finally:
        for module, name, parameter in places:
            module._parameters[name] = parameter
