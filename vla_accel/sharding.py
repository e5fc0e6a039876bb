"""FSDP through Accelerate as a policy needs it: by the policy's own layers, on CPUs too, and checked afterwards.

Not here: when to shard (`distributed.py`, the user of this file), and what a rollout does to a sharded model
(`modes.py`).
Usage: `plugin = make_fsdp_plugin("bf16", ("LlamaDecoderLayer",), cpu=False)`; after preparing,
`check_sharding(model, names, expected=32)`.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.logging import get_logger
from accelerate.state import PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch import nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
)

logger = get_logger(__name__)


def make_fsdp_plugin(precision: str, shard_units: Sequence[str], *, cpu: bool) -> FullyShardedDataParallelPlugin:
    """The launcher's FSDP options, with the policy's layers, and only what a CPU can do where there is no device.

    Args:
        precision: `"no"` or `"bf16"`.
        shard_units: layer class names, taken where the launcher names none.
        cpu: whether the processes run on CPUs.

    Raises:
        ValueError: options that a policy cannot be trained with, and what to set instead.
    """
    options: dict[str, Any] = {}
    if cpu:
        options = {"cpu_ram_efficient_loading": False}
        if os.environ.get("FSDP_VERSION", "1") == "1":
            options["sync_module_states"] = False
    plugin = FullyShardedDataParallelPlugin(**options)
    if plugin.fsdp_version == 1 and plugin.cpu_offload.offload_params:
        raise ValueError(
            "fsdp_offload_params is true under FSDP1, where a rollout would copy parameters to the device for every "
            "forward. Use `fsdp_version: 2`, as fsdp2_offload.yaml does."
        )
    if cpu and isinstance(plugin.cpu_offload, CPUOffloadPolicy):
        plugin.cpu_offload = CPUOffloadPolicy(pin_memory=False)
    if plugin.fsdp_version == 1 and not plugin.use_orig_params:
        raise ValueError(
            "fsdp_use_orig_params is false in the preset: a policy mixes frozen and trainable parameters and learning "
            "rates, which flattened parameters cannot. Set `fsdp_use_orig_params: true`, or use `fsdp_version: 2`."
        )
    if plugin.auto_wrap_policy is not None and hasattr(plugin.auto_wrap_policy, "__name__"):
        by_class = "transformer" in plugin.auto_wrap_policy.__name__
        if by_class and not plugin.transformer_cls_names_to_wrap:
            plugin.transformer_cls_names_to_wrap = list(shard_units)
    if precision == "bf16":
        # Gradients are summed in float32, buffers (rotary frequencies) keep their precision, and results are not
        # cast down: log-probs stay float32.
        if plugin.fsdp_version == 1:
            plugin.mixed_precision_policy = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        else:
            plugin.mixed_precision_policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return plugin


def shard_on_cpu(plugin: FullyShardedDataParallelPlugin, timeout: timedelta) -> None:
    """Tell Accelerate that these CPU processes shard, which it believes of accelerator devices only.

    Its states share one dict, filled here before the accelerator reads it. Collective: call on every rank.
    """
    if "LOCAL_RANK" not in os.environ and not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
    PartialState(cpu=True, timeout=timeout)
    PartialState._shared_state.update(
        distributed_type=DistributedType.FSDP, device=torch.device("cpu"), fsdp_plugin=plugin
    )


def wrap_classes(accelerator: Accelerator, policy: nn.Module) -> tuple[str, ...]:
    """Tell Accelerate which layer classes to shard one by one, and return their names; each exists in the policy.

    Raises:
        ValueError: a class that the policy does not have, with those that it repeats.
    """
    plugin = accelerator.state.fsdp_plugin
    if plugin.auto_wrap_policy is None or "transformer" not in getattr(plugin.auto_wrap_policy, "__name__", ""):
        logger.warning(
            "The preset wraps no layers one by one: the whole policy is gathered for every forward. Set "
            "`fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP` to shard it layer by layer."
        )
        return ()
    names = tuple(plugin.transformer_cls_names_to_wrap or getattr(policy, "shard_units", ()))
    known = {type(module).__name__ for module in policy.modules()}
    missing = sorted(set(names) - known)
    if missing or not names:
        raise ValueError(
            f"fsdp_transformer_layer_cls_to_wrap names {missing or 'no class'}, which this policy does not have. "
            f"Its repeated layers are {_candidates(policy)}; leave the option out of the preset to take the policy's "
            "own choice."
        )
    plugin.transformer_cls_names_to_wrap = list(names)
    return names


def check_sharding(model: nn.Module, names: Iterable[str], *, expected: int) -> int:
    """Check that every layer of the classes `names` is an FSDP unit of its own, and the root too.

    Args:
        model: prepared by Accelerate as FSDP1 or FSDP2.
        names: layer class names.
        expected: how many such layers the policy had before.

    Returns:
        The number of FSDP units, the root included.

    Raises:
        RuntimeError: the model is not sharded, or not in these units.
    """
    units = [module for module in model.modules() if isinstance(module, (FullyShardedDataParallel, FSDPModule))]
    classes = [_layer_class(unit) for unit in units]
    found = sum(name in set(names) for name in classes)
    if model not in units or found != expected:
        raise RuntimeError(
            f"Sharding failed: {expected} layers of class {sorted(names)} and a root were to be FSDP units, but the "
            f"units are {dict.fromkeys(classes)}. Repeated layers of the policy: {_candidates(model)}."
        )
    return len(units)


def _layer_class(unit: nn.Module) -> str:
    layer = unit.module if isinstance(unit, FullyShardedDataParallel) else unit
    layer = getattr(layer, "_checkpoint_wrapped_module", layer)
    return type(layer).__name__.removeprefix("FSDP")


def _candidates(policy: nn.Module) -> list[str]:
    """Class names of the layers a policy repeats, the ones worth sharding."""
    lists = (module for module in policy.modules() if isinstance(module, (nn.ModuleList, nn.Sequential)))
    layers = (layer for repeated in lists for layer in repeated if next(layer.parameters(), None) is not None)
    return sorted({type(layer).__name__ for layer in layers})


def unify_dtypes(accelerator: Accelerator, policy: nn.Module, *, names: Sequence[str]) -> None:
    """Float32 master weights under mixed precision, and one dtype per FSDP1 unit, which flattens its parameters."""
    if accelerator.mixed_precision != "no":
        for parameter in policy.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.float()
    if accelerator.distributed_type != DistributedType.FSDP or accelerator.is_fsdp2:
        return
    units = [module for module in policy.modules() if type(module).__name__ in names]
    inside = {parameter for unit in units for parameter in unit.parameters()}
    rest = [parameter for parameter in policy.parameters() if parameter not in inside]
    for group in [*(list(unit.parameters()) for unit in units), rest]:
        dtypes = {parameter.dtype for parameter in group if parameter.is_floating_point()}
        if len(dtypes) > 1:
            widest = max(dtypes, key=lambda dtype: dtype.itemsize)
            for parameter in group:
                parameter.data = parameter.data.to(widest)


def keep_inputs(model: nn.Module) -> None:
    """Hand inputs to the root as they are: casting states and stored actions to bf16 would move the log-probs.

    Layers inside still cast what they get, and autocast covers the root's own.
    """
    if isinstance(model, FullyShardedDataParallel):
        model.mixed_precision = dataclasses.replace(
            model.mixed_precision, cast_forward_inputs=False, cast_root_forward_inputs=False
        )
    else:
        state = model._get_fsdp_state()
        state._mp_policy = dataclasses.replace(state._mp_policy, cast_forward_inputs=False)
