"""Processes and devices: the accelerator, a policy prepared with its optimizer, and what ranks share.

The same for one process, DDP, FSDP1 and FSDP2, all of them also on CPUs. Accelerate's internals are touched here and in
`sharding.py` only.

Not here: how FSDP is set up (`sharding.py`), switching a sharded model between rollout and training (`modes.py`),
checkpoints (`checkpoint.py`).
Usage: `accelerator = make_accelerator(shard_units=MyPolicy.shard_units)`, then
`model, optimizer = prepare_policy(accelerator, policy, learning_rate=1e-5, value_learning_rate=1e-4)`.
"""

from __future__ import annotations

import hashlib
import os
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.logging import get_logger
from accelerate.state import PartialState
from accelerate.utils import DistributedType, InitProcessGroupKwargs, convert_outputs_to_fp32
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from vla_accel.roll_call import Watch
from vla_accel.sharding import (
    check_sharding,
    keep_inputs,
    make_fsdp_plugin,
    shard_on_cpu,
    unify_dtypes,
    wrap_classes,
)

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
    _refuse_split_layers()
    if cpu is None:
        cpu = _env_flag("ACCELERATE_USE_CPU") or not torch.accelerator.is_available()
    precision = _choose_precision(mixed_precision, cpu=cpu)
    plugin = make_fsdp_plugin(precision, shard_units, cpu=cpu) if _env_flag("ACCELERATE_USE_FSDP") else None
    timeout = timedelta(seconds=timeout_s)
    if plugin is not None and cpu:
        shard_on_cpu(plugin, timeout)
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
    _share_timeout(timeout)
    Watch.start(timeout_s=timeout_s)
    return accelerator


def _env_flag(name: str) -> bool:
    return os.environ.get(name, "").lower() in ("1", "true", "yes", "y", "on", "t")


def _refuse_split_layers() -> None:
    """A rollout without collectives needs whole layers, and data that ranks do not share."""
    for kind in ("tp", "cp", "sp"):
        size = os.environ.get(f"PARALLELISM_CONFIG_{kind.upper()}_SIZE", "1")
        if size not in ("", "1"):
            raise ValueError(
                f"parallelism_config_{kind}_size must be 1, but is {size}: layers or sequences split over processes "
                "are not supported. Use a preset of accelerate_configs/, such as fsdp2 or hsdp_multi_node."
            )


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


def _share_timeout(timeout: timedelta) -> None:
    """Give the groups of a device mesh the whole job's timeout: torch gives them its own default, 10 min on GPUs."""
    if dist.is_initialized():
        c10d = dist.distributed_c10d
        set_timeout = getattr(c10d, "set_timeout", None) or c10d._set_pg_timeout  # the public name is torch 2.14's
        for group in c10d._world.pg_map:
            set_timeout(timeout, group)


def precision_of(accelerator: Accelerator, stored: str) -> str:
    """What forwards compute in, in words; it says so where that is slow.

    Args:
        accelerator: from `make_accelerator`.
        stored: `"float32"` or `"bfloat16"`, the type of the weights.
    """
    name = "bfloat16" if accelerator.mixed_precision == "bf16" else stored
    slow = name == "bfloat16" and accelerator.device.type == "cpu" and not _cpu_has_bf16()
    return f"{name}, which is slow here: this CPU has no bf16 units" if slow else name


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


def _fused_adamw(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """AdamW that passes over memory once, also on a CPU."""
    return torch.optim.AdamW(groups, fused=True)


def prepare_policy(
    accelerator: Accelerator,
    policy: nn.Module,
    *,
    learning_rate: float,
    value_learning_rate: float | None = None,
    weight_decay: float = 0.0,
    make_optimizer: Callable[[list[dict[str, Any]]], torch.optim.Optimizer] = _fused_adamw,
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
    names = wrap_classes(accelerator, policy) if sharded else ()
    expected = sum(type(module).__name__ in names for module in policy.modules())
    if sharded:
        _check_equal_weights(accelerator, policy)
    unify_dtypes(accelerator, policy, names=names)
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
        keep_inputs(model)
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
