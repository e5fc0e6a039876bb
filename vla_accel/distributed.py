"""Processes, devices and sharding: the one file that touches Accelerate's internals.

Builds the accelerator for one process, DDP, FSDP1 and FSDP2 (all of them also on CPUs), prepares policy and optimizer
together, and holds the sums and decisions that every rank must share.

Not here: switching a sharded model between rollout and training (`modes.py`), checkpoints (`checkpoint.py`).
Usage: `accelerator = make_accelerator(shard_units=MyPolicy.shard_units)`, then
`model, optimizer = prepare_policy(accelerator, policy, learning_rate=1e-5, value_learning_rate=1e-4)`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import warnings
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.logging import get_logger
from accelerate.state import PartialState
from accelerate.utils import (
    DistributedType,
    FullyShardedDataParallelPlugin,
    InitProcessGroupKwargs,
    convert_outputs_to_fp32,
)
from torch import nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
)

from vla_accel.roll_call import Watch

logger = get_logger(__name__)

# --------------------------------------------------------------------------------------------------------------------
# The accelerator
# --------------------------------------------------------------------------------------------------------------------


def make_accelerator(
    *,
    mixed_precision: str | None = None,
    gradient_accumulation_steps: int = 1,
    timeout_s: float = 1800.0,
    log_with: Sequence[str] = (),
    project_dir: str | None = None,
    shard_units: Sequence[str] = (),
    cpu: bool | None = None,
) -> Accelerator:
    """Build the accelerator the launcher's preset describes.

    Accelerate shards only on accelerator devices; on a CPU this function makes an FSDP preset really shard, over gloo.
    Collective when started with several processes: call on every rank.

    Args:
        mixed_precision: `"no"` or `"bf16"`; None takes the preset's, and falls back to `"no"` on a CPU without bf16
            units (where bf16 is slower than float32).
        gradient_accumulation_steps: backward passes per optimizer step that Accelerate counts.
        timeout_s: seconds after which a collective that not every rank has joined fails, and after which a rank that
            gives no sign of life ends the others.
        log_with: names of Accelerate's trackers.
        project_dir: folder for trackers and checkpoints.
        shard_units: layer class names that FSDP wraps one by one, used where the preset names none.
        cpu: run on the CPU; None does so where there is no accelerator device or the preset asks for it.

    Raises:
        ValueError: a precision, preset or environment variable that cannot work, and what to set instead.
        RuntimeError: processes that were launched together but did not find each other.
    """
    if cpu is None:
        cpu = _env_flag("ACCELERATE_USE_CPU") or not torch.accelerator.is_available()
    precision = _choose_precision(mixed_precision, cpu=cpu)
    plugin = _make_fsdp_plugin(precision, shard_units, cpu=cpu) if _env_flag("ACCELERATE_USE_FSDP") else None
    timeout = timedelta(seconds=timeout_s)
    if plugin is not None and cpu:
        _shard_on_cpu(plugin, timeout)
    accelerator = Accelerator(
        mixed_precision=precision,
        gradient_accumulation_steps=gradient_accumulation_steps,
        cpu=cpu,
        fsdp_plugin=plugin,
        log_with=list(log_with) or None,
        project_dir=project_dir,
        kwargs_handlers=[InitProcessGroupKwargs(timeout=timeout)],
    )
    _check_accelerator(accelerator, gradient_accumulation_steps)
    Watch.start(timeout_s=timeout_s)
    return accelerator


def _env_flag(name: str) -> bool:
    return os.environ.get(name, "").lower() in ("1", "true", "yes", "y", "on", "t")


def _choose_precision(requested: str | None, *, cpu: bool) -> str:
    precision = requested or os.environ.get("ACCELERATE_MIXED_PRECISION", "no").lower()
    if precision not in ("no", "bf16"):
        raise ValueError(
            f"mixed_precision must be 'no' or 'bf16', got {precision!r}: float16 and fp8 need loss scaling, which the "
            "update does not do. Set `mixed_precision: bf16` in the preset."
        )
    if precision == "bf16" and requested is None and cpu and not _cpu_has_bf16():
        PartialState(cpu=True)
        logger.warning("This CPU has no bf16 units; running in float32 instead of the preset's mixed_precision bf16.")
        precision = "no"
    return precision


def _cpu_has_bf16() -> bool:
    probes = ("_is_avx512_bf16_supported", "_is_amx_tile_supported", "_is_arm_bf16_supported")
    return any(getattr(torch.cpu, probe)() for probe in probes if hasattr(torch.cpu, probe))


def _make_fsdp_plugin(precision: str, shard_units: Sequence[str], *, cpu: bool) -> FullyShardedDataParallelPlugin:
    """The launcher's FSDP options, with the policy's layers, and only what a CPU can do where there is no device."""
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


def _shard_on_cpu(plugin: FullyShardedDataParallelPlugin, timeout: timedelta) -> None:
    """Tell Accelerate that these CPU processes shard, which it believes of accelerator devices only.

    Its states share one dict, filled here before the accelerator reads it.
    """
    if "LOCAL_RANK" not in os.environ and not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
    PartialState(cpu=True, timeout=timeout)
    PartialState._shared_state.update(
        distributed_type=DistributedType.FSDP, device=torch.device("cpu"), fsdp_plugin=plugin
    )


def _check_accelerator(accelerator: Accelerator, gradient_accumulation_steps: int) -> None:
    if _env_flag("ACCELERATE_USE_FSDP") and accelerator.distributed_type != DistributedType.FSDP:
        raise RuntimeError(
            f"The preset asks for FSDP but Accelerate runs {accelerator.distributed_type.value}. "
            "Create this accelerator before any other."
        )
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    if accelerator.num_processes != launched:
        raise RuntimeError(
            f"{launched} processes were launched but this one sees {accelerator.num_processes}: they would train "
            "apart. Start the script with a preset of accelerate_configs/."
        )
    if accelerator.gradient_accumulation_steps != gradient_accumulation_steps:
        raise ValueError(
            f"gradient_accumulation_steps is {gradient_accumulation_steps} but Accelerate runs with "
            f"{accelerator.gradient_accumulation_steps}, from the environment variable "
            "ACCELERATE_GRADIENT_ACCUMULATION_STEPS or the preset. Remove it there."
        )


# --------------------------------------------------------------------------------------------------------------------
# Policy and optimizer
# --------------------------------------------------------------------------------------------------------------------


def prepare_policy(
    accelerator: Accelerator,
    policy: nn.Module,
    *,
    learning_rate: float,
    value_learning_rate: float | None = None,
    weight_decay: float = 0.0,
    make_optimizer: Callable[[list[dict[str, Any]]], torch.optim.Optimizer] = torch.optim.AdamW,
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Wrap, shard and place a policy together with its optimizer, and check the result.

    One call for both, because sharding replaces or re-cuts the parameters and the optimizer has to follow. Collective:
    call on every rank.

    Args:
        accelerator: from `make_accelerator`.
        policy: the module to train, with the same weights on every rank; frozen parameters are those whose
            `requires_grad` is False. Its parameters under `value_head` are the critic's.
        learning_rate: of the policy's parameters.
        value_learning_rate: of the critic's; None takes `learning_rate`.
        weight_decay: of matrices; biases and norms have none.
        make_optimizer: takes the parameter groups, e.g. `functools.partial(torch.optim.AdamW, betas=(0.9, 0.95))`.

    Returns:
        The prepared model, to be called as the policy was, and the prepared optimizer. Its groups hold trainable
        parameters only, whose they are (`"policy"` or `"value"`) under `"name"`, and the full rate under
        `"initial_lr"`.

    Raises:
        ValueError: nothing to train, or layer classes that the policy does not have.
        RuntimeError: ranks with different weights, or a sharding other than the one asked for.
    """
    sharded = accelerator.distributed_type == DistributedType.FSDP
    names = _wrap_classes(accelerator, policy) if sharded else ()
    expected = sum(type(module).__name__ in names for module in policy.modules())
    if sharded:
        _check_equal_weights(accelerator, policy)
    _unify_dtypes(accelerator, policy, names)
    rates = {"policy": learning_rate, "value": learning_rate if value_learning_rate is None else value_learning_rate}
    optimizer = make_optimizer(_param_groups(policy, rates, weight_decay))
    # Policies return views, and nothing writes to what they return.
    warnings.filterwarnings("ignore", message=r"FSDP2-wrapped module .* returned a view tensor")
    if accelerator.is_fsdp2 and accelerator.native_amp:
        # Accelerate wraps forward in autocast everywhere but here; the arithmetic must not depend on the preset.
        autocast = torch.autocast(accelerator.device.type, dtype=torch.bfloat16)
        policy.forward = convert_outputs_to_fp32(autocast(policy.forward))
    model, optimizer = accelerator.prepare(policy, optimizer)
    if sharded:
        units = check_sharding(model, names, expected=expected)
        _keep_inputs(model)
        how = f"FSDP{accelerator.state.fsdp_plugin.fsdp_version}"
        accelerator.print(f"{how}: sharded into {units} units over {accelerator.num_processes} processes.")
    return model, optimizer


def policy_of(model: nn.Module) -> nn.Module:
    """The policy inside a prepared model, for its attributes and `prepare`; never call its `forward` directly."""
    while True:
        if isinstance(model, (FullyShardedDataParallel, nn.parallel.DistributedDataParallel)):
            model = model.module
        elif hasattr(model, "_orig_mod"):
            model = model._orig_mod
        else:
            return model


def _wrap_classes(accelerator: Accelerator, policy: nn.Module) -> tuple[str, ...]:
    """Names of the layer classes to shard one by one; every one of them exists in the policy."""
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


def _candidates(policy: nn.Module) -> list[str]:
    """Class names of the layers a policy repeats, the ones worth sharding."""
    lists = (module for module in policy.modules() if isinstance(module, (nn.ModuleList, nn.Sequential)))
    layers = (layer for repeated in lists for layer in repeated if next(layer.parameters(), None) is not None)
    return sorted({type(layer).__name__ for layer in layers})


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


def _check_equal_weights(accelerator: Accelerator, policy: nn.Module) -> None:
    """Sharding keeps a different part of every rank's copy, so unequal copies make a chimera; compare samples."""
    plugin = accelerator.state.fsdp_plugin
    if accelerator.num_processes == 1 or plugin.cpu_ram_efficient_loading or plugin.sync_module_states:
        return
    digest = hashlib.sha256()
    for parameter in policy.parameters():
        flat = parameter.detach().reshape(-1)
        digest.update(flat[:: max(1, flat.numel() // 64)].float().cpu().numpy().tobytes())
    digests = gather_objects(accelerator, digest.hexdigest())
    different = [rank for rank, other in enumerate(digests) if other != digests[0]]
    if different:
        raise RuntimeError(
            f"Ranks {different} start from other weights than rank 0. Call seed_weights(seed) with the same seed on "
            "all ranks before building the policy, or load the same checkpoint."
        )


def _unify_dtypes(accelerator: Accelerator, policy: nn.Module, names: tuple[str, ...]) -> None:
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


def _param_groups(policy: nn.Module, rates: dict[str, float], weight_decay: float) -> list[dict[str, Any]]:
    groups: dict[tuple[str, float], list[nn.Parameter]] = {}
    for name, parameter in policy.named_parameters():
        if parameter.requires_grad:
            part = "value" if name.split(".")[0] == "value_head" else "policy"
            groups.setdefault((part, weight_decay if parameter.ndim > 1 else 0.0), []).append(parameter)
    if not groups:
        raise ValueError("The policy has no trainable parameter: every requires_grad is False.")
    return [
        {"params": members, "lr": rates[part], "initial_lr": rates[part], "weight_decay": decay, "name": part}
        for (part, decay), members in groups.items()
    ]


def _keep_inputs(model: nn.Module) -> None:
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


# --------------------------------------------------------------------------------------------------------------------
# What ranks share
# --------------------------------------------------------------------------------------------------------------------


def seed_weights(seed: int) -> None:
    """Seed torch's global generators for building a policy: the same on every rank."""
    torch.manual_seed(seed)


def rank_seed(seed: int, rank: int, stream: str = "rollout") -> int:
    """A seed for this rank's own randomness, in `[0, 2**63)`: different for each (seed, rank, stream)."""
    digest = hashlib.sha256(f"{seed}/{rank}/{stream}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def global_sum(accelerator: Accelerator, *values: float | torch.Tensor) -> tuple[Any, ...]:
    """Sum each value over all ranks, in float64, with one collective for all of them.

    Collective: call on every rank, with the same number of values of the same shapes.

    Returns:
        One result per value, in order: a float for a number, a float64 tensor of the same shape, on the value's
        device, for a tensor.
    """
    return _reduce(accelerator, values, dist.ReduceOp.SUM)


def global_max(accelerator: Accelerator, value: float) -> float:
    """The largest of all ranks' numbers. Collective: call on every rank."""
    return _reduce(accelerator, (value,), dist.ReduceOp.MAX)[0]


def global_any(accelerator: Accelerator, flag: bool) -> bool:
    """True on every rank if `flag` is true on any: the way to take a decision around a collective. Collective."""
    return global_max(accelerator, float(flag)) > 0


def _reduce(accelerator: Accelerator, values: Sequence[float | torch.Tensor], op: Any) -> tuple[Any, ...]:
    device = accelerator.device
    dtype = torch.float32 if device.type == "mps" else torch.float64
    parts = [torch.as_tensor(value).detach().to(device=device, dtype=dtype).reshape(-1) for value in values]
    flat = torch.cat(parts) if parts else torch.zeros(0, dtype=dtype, device=device)
    if accelerator.num_processes > 1:
        dist.all_reduce(flat, op=op)
    reduced = flat.split([part.numel() for part in parts])
    return tuple(
        result.reshape(value.shape).to(value.device) if isinstance(value, torch.Tensor) else result.item()
        for value, result in zip(values, reduced, strict=True)
    )


def gather_objects(accelerator: Accelerator, obj: Any) -> list[Any]:
    """One picklable object per rank, in rank order, on every rank. Collective."""
    if accelerator.num_processes == 1:
        return [obj]
    gathered: list[Any] = [None] * accelerator.num_processes
    dist.all_gather_object(gathered, obj)
    return gathered


def broadcast_object(accelerator: Accelerator, obj: Any) -> Any:
    """Rank 0's object, on every rank. Collective."""
    return gather_objects(accelerator, obj if accelerator.is_main_process else None)[0]
