"""The update of PPO: from scored decisions to an optimizer step, the same for every policy and every sharding.

Not here: collecting (`rollout.py`), advantages (`advantages.py`), dealing decisions to minibatches (`batch.py`), the
course of a run (`train.py`).
Usage: `metrics = update(accelerator, model, optimizer, batch, options, ...)` inside `train_mode(model)`.

Losses are sums, divided by the number of valid terms in the minibatch over all processes. So the gradient depends on
neither the micro-batch size nor the number of processes.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from vla_accel.batch import Batch, micro_batches, minibatches
from vla_accel.config import PPOOptions
from vla_accel.distributed import global_max, global_sum
from vla_accel.types import PolicyScore, UnitGroups

if TYPE_CHECKING:
    from accelerate import Accelerator

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to this size before the exponential, so that a stale sample cannot overflow."""


def reduce_units(x: Tensor, mask: Tensor, unit_step: Tensor, level: str) -> tuple[Tensor, Tensor]:
    """Sum log-densities of units to the level at which ratios are taken.

    Args:
        x: float32 `[B, U]`.
        mask: bool `[B, U]`; masked units count as 0 and get no gradient.
        unit_step: int64 `[U]`.
        level: "unit" keeps `V = U`, "step" gives `V = K` (one per environment step), "chunk" gives `V = 1`.

    Returns:
        float32 `[B, V]` and its mask, bool `[B, V]`.
    """
    x = torch.where(mask, x, torch.zeros_like(x))
    if level == "unit":
        return x, mask
    group = unit_step if level == "step" else torch.zeros_like(unit_step)
    steps = int(group.max()) + 1
    index = group.expand_as(x)
    sums = torch.zeros(x.shape[0], steps, dtype=x.dtype, device=x.device).scatter_add(1, index, x)
    counts = torch.zeros(x.shape[0], steps, dtype=torch.int64, device=x.device).scatter_add(1, index, mask.long())
    return sums, counts > 0


@dataclass(kw_only=True)
class LossSums:
    """Sums over the valid terms of one micro-batch; the first three carry gradients.

    `parts` holds for each part of `UnitGroups` how many ratios with a unit of it were clipped, and how many there are.
    """

    policy: Tensor
    value: Tensor
    entropy: Tensor
    kl: Tensor
    clipped: Tensor
    log_ratio_max: Tensor
    parts: dict[str, Tensor]


def ppo_loss(score: PolicyScore, batch: Batch, unit_step: Tensor, options: PPOOptions) -> LossSums:
    r"""The clipped surrogate and its companions, as sums (arXiv 1707.06347, eq. 7).

    \[ L = \sum_{b,v} -\min\big(\rho_{bv} A_b,\ \mathrm{clip}(\rho_{bv}, 1-\epsilon_l, 1+\epsilon_h) A_b\big) \]

    The KL is the estimator \(\rho - 1 - \log\rho\), never negative.

    Args:
        score: of the batch's decisions.
        batch: `[B]` decisions on the score's device.
        unit_step: int64 `[U]`.
        options: clip ranges, ratio level, value clip.
    """
    new, mask = reduce_units(score.log_prob, batch.unit_mask, unit_step, options.ratio_level)
    old, _ = reduce_units(batch.old_log_prob, batch.unit_mask, unit_step, options.ratio_level)
    log_ratio = (new - old).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio = log_ratio.exp()
    advantage = batch.advantage[:, None]
    clipped = ratio.clamp(1.0 - options.clip_low, 1.0 + options.clip_high)
    surrogate = torch.minimum(ratio * advantage, clipped * advantage)
    zero = torch.zeros((), device=new.device)
    value_error = (score.value - batch.returns).square()
    if options.value_clip > 0:
        near = batch.value + (score.value - batch.value).clamp(-options.value_clip, options.value_clip)
        value_error = torch.maximum(value_error, (near - batch.returns).square())
    entropy = zero
    if score.entropy is not None:
        entropy = torch.where(batch.unit_mask, score.entropy, torch.zeros_like(score.entropy)).sum()
    with torch.no_grad():
        kl = torch.where(mask, ratio - 1.0 - log_ratio, zero).sum()
        outside = mask & (surrogate < ratio * advantage)
        largest = torch.where(mask, log_ratio.abs(), zero).amax() if mask.numel() else zero
    return LossSums(
        policy=-torch.where(mask, surrogate, zero).sum(),
        value=0.5 * value_error.sum(),
        entropy=entropy,
        kl=kl,
        clipped=outside.sum().float(),
        log_ratio_max=largest,
        parts=_count_parts(score.groups, outside, batch.unit_mask, unit_step, options.ratio_level),
    )


def _count_parts(
    groups: UnitGroups | None, outside: Tensor, mask: Tensor, unit_step: Tensor, level: str
) -> dict[str, Tensor]:
    """`LossSums.parts`; `outside` is bool `[B, V]`, `mask` `[B, U]`."""
    counts = {}
    for number, name in enumerate(groups.names if groups else ()):
        own = mask & (groups.index == number)  # type: ignore[union-attr]
        _, own = reduce_units(torch.zeros(own.shape, device=own.device), own, unit_step, level)
        counts[name] = torch.stack([(outside & own).sum(), own.sum()]).double()
    return counts


@torch.no_grad()
def rescore(accelerator: Accelerator, model: nn.Module, batch: Batch, options: PPOOptions) -> dict[str, float]:
    """Replace the rollout's log-probabilities by those of the training forward, and report how far apart they were.

    Collective: call on every rank.

    Returns:
        `ppo/rescore_gap`: largest |log-prob difference| of a valid unit; `ppo/rescore_kl`: mean squared half of it.
    """
    rescored = torch.zeros_like(batch.old_log_prob)
    index = torch.arange(len(batch))
    done = 0
    for micro, weight, _ in micro_batches(accelerator, batch, index, options.micro_batch_size):
        score = model(micro.inputs, micro.trace)
        if weight:
            rescored[done : done + len(micro)] = score.log_prob.cpu()
            done += len(micro)
    gap = torch.where(batch.unit_mask, (rescored - batch.old_log_prob).abs(), torch.zeros(()))
    batch.old_log_prob = rescored
    count, squares = global_sum(accelerator, float(batch.unit_mask.sum()), float(gap.square().sum()))
    return {
        "ppo/rescore_gap": global_max(accelerator, float(gap.amax()) if gap.numel() else 0.0),
        "ppo/rescore_kl": 0.5 * squares / max(count, 1.0),
    }


def learning_rate_factor(options: PPOOptions, iteration: int, iterations: int) -> float:
    """Share of the learning rates at an iteration: warm-up, then the course of `lr_schedule` down to `lr_final`."""
    warm = min(1.0, (iteration + 1) / (options.lr_warmup + 1))
    if options.lr_schedule == "constant":
        return warm
    done = iteration / max(iterations - 1, 1)
    shape = 1.0 - done if options.lr_schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return warm * (options.lr_final + (1.0 - options.lr_final) * shape)


def set_learning_rates(optimizer: torch.optim.Optimizer, options: PPOOptions, iteration: int, iterations: int) -> None:
    """Set each group's rate to its own full value (`initial_lr`) times the iteration's factor."""
    factor = learning_rate_factor(options, iteration, iterations)
    for group in optimizer.param_groups:
        group["lr"] = group["initial_lr"] * factor


_MEANS = ("loss/policy", "loss/value", "loss/entropy", "ppo/kl", "ppo/clip_fraction", "ppo/grad_norm")


def update(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: Batch,
    options: PPOOptions,
    *,
    unit_step: Tensor,
    num_minibatches: int,
    seed: int,
    train_policy: bool = True,
) -> dict[str, float]:
    """Run the epochs of one iteration. Collective: call on every rank.

    Args:
        accelerator: from `make_accelerator`.
        model: the prepared policy.
        optimizer: the prepared optimizer; its value head's parameters are the group named "value".
        batch: this rank's decisions, already rescored.
        options: of PPO.
        unit_step: int64 `[U]`, on any device.
        num_minibatches: optimizer steps per epoch.
        seed: of the shuffling; the same on every rank, another for every iteration.
        train_policy: False trains the value head only (critic warm-up).

    Returns:
        The same on every rank. Means over the optimizer steps of this iteration (0 where there was none):
        `loss/policy`, `loss/value`, `loss/entropy`, `ppo/kl`, `ppo/clip_fraction`, `ppo/grad_norm`. Further
        `ppo/first_log_ratio` (largest before the first step), `ppo/steps`, `ppo/skipped` (steps left out because loss
        or gradient was not finite), `ppo/kl_stop` (1 if the KL ended it early). Of a policy that tells parts of its
        decisions apart also `ppo/clip_fraction/<part>`.
    """
    unit_step = unit_step.to(accelerator.device)
    totals = dict.fromkeys(_MEANS, 0.0)
    parts: dict[str, Tensor] = {}
    steps = skipped = 0
    stopped = False
    first_log_ratio: float | None = None
    for epoch in range(options.epochs):
        for index in minibatches(batch, num_minibatches=num_minibatches, seed=seed * 1009 + epoch):
            counts = _global_counts(accelerator, batch, index, unit_step, options)
            if counts["rows"] == 0:
                continue
            sums, counted = _backward(accelerator, model, batch, index, options, unit_step, counts, train_policy)
            if first_log_ratio is None:
                first_log_ratio = global_max(accelerator, sums["log_ratio_max"])
            means = _global_means(accelerator, sums, counts)
            if options.target_kl > 0 and train_policy and means["ppo/kl"] > options.target_kl:
                optimizer.zero_grad(set_to_none=True)
                stopped = True
                break
            if not train_policy:
                _keep_value_gradients(optimizer)
            norm = _clip(accelerator, model, options.max_grad_norm)
            finite = norm < float("inf") and all(abs(x) < float("inf") for x in means.values())
            if finite:
                optimizer.step()
                steps += 1
                for name, x in {**means, "ppo/grad_norm": norm}.items():
                    totals[name] += x
                parts = {name: x + parts.get(name, 0.0) for name, x in counted.items()}
            else:
                skipped += 1
            optimizer.zero_grad(set_to_none=True)
        if stopped:
            break
    metrics = {name: x / max(steps, 1) for name, x in totals.items()}
    summed = global_sum(accelerator, *parts.values()) if parts else ()
    for name, (clipped, count) in zip(parts, summed, strict=True):
        metrics[f"ppo/clip_fraction/{name}"] = float(clipped / max(count, 1.0))
    return {
        **metrics,
        "ppo/first_log_ratio": first_log_ratio or 0.0,
        "ppo/steps": float(steps),
        "ppo/skipped": float(skipped),
        "ppo/kl_stop": float(stopped),
    }


def _global_counts(
    accelerator: Accelerator, batch: Batch, index: Tensor, unit_step: Tensor, options: PPOOptions
) -> dict[str, float]:
    """Valid rows, units and ratios of a minibatch over all processes."""
    mask = batch.unit_mask[index]
    _, level_mask = reduce_units(torch.zeros(mask.shape), mask, unit_step.cpu(), options.ratio_level)
    rows, units, ratios = global_sum(accelerator, len(index), float(mask.sum()), float(level_mask.sum()))
    return {"rows": rows, "units": units, "ratios": ratios}


def _backward(
    accelerator: Accelerator,
    model: nn.Module,
    batch: Batch,
    index: Tensor,
    options: PPOOptions,
    unit_step: Tensor,
    counts: dict[str, float],
    train_policy: bool,
) -> tuple[dict[str, float], dict[str, Tensor]]:
    """Accumulate the gradient of one minibatch; returns this rank's sums, and those of `LossSums.parts`."""
    sums = {"policy": 0.0, "value": 0.0, "entropy": 0.0, "kl": 0.0, "clipped": 0.0, "log_ratio_max": 0.0}
    parts: dict[str, Tensor] = {}
    for micro, weight, last in micro_batches(accelerator, batch, index, options.micro_batch_size):
        with _sync(accelerator, model, last):
            part = ppo_loss(model(micro.inputs, micro.trace), micro, unit_step, options)
            policy = part.policy / counts["ratios"] - options.entropy_coef * part.entropy / counts["units"]
            value = part.value / counts["rows"]
            # Every output stays in the graph, weighted by 0 if need be: data parallelism waits for all parameters.
            value_coef = options.value_coef if options.advantage == "gae" else 0.0
            loss = weight * (float(train_policy) * policy + value_coef * value)
            # Data parallelism averages gradients over the ranks; these are parts of one sum.
            accelerator.backward(loss * accelerator.num_processes)
        if weight:
            for name in sums:
                x = float(getattr(part, name).detach())
                sums[name] = max(sums[name], x) if name == "log_ratio_max" else sums[name] + x
        parts = {name: weight * x + parts.get(name, 0.0) for name, x in part.parts.items()}
    return sums, parts


def _sync(accelerator: Accelerator, model: nn.Module, last: bool) -> AbstractContextManager:
    """Under DDP, exchange gradients with the last micro-batch only. Sharded gradients are reduced at once."""
    data_parallel = isinstance(model, nn.parallel.DistributedDataParallel)
    return accelerator.no_sync(model) if data_parallel and not last else nullcontext()


def _keep_value_gradients(optimizer: torch.optim.Optimizer) -> None:
    """Drop the gradients of all but the value head, so that neither weight decay nor a shared trunk moves the rest."""
    for group in optimizer.param_groups:
        if group.get("name") != "value":
            for parameter in group["params"]:
                parameter.grad = None


def _global_means(accelerator: Accelerator, sums: dict[str, float], counts: dict[str, float]) -> dict[str, float]:
    policy, value, entropy, kl, clipped = global_sum(
        accelerator, sums["policy"], sums["value"], sums["entropy"], sums["kl"], sums["clipped"]
    )
    return {
        "loss/policy": policy / counts["ratios"],
        "loss/value": value / counts["rows"],
        "loss/entropy": entropy / counts["units"],
        "ppo/kl": kl / counts["ratios"],
        "ppo/clip_fraction": clipped / counts["ratios"],
    }


def _clip(accelerator: Accelerator, model: nn.Module, max_norm: float) -> float:
    """Clip the global gradient norm and return what it was before. NaN counts as infinite."""
    norm = accelerator.clip_grad_norm_(model.parameters(), max_norm if max_norm > 0 else float("inf"))
    norm = float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
    return norm if norm == norm else float("inf")
