"""The update of PPO: from scored decisions to an optimizer step, the same for every policy and every sharding.

Not here: collecting (`rollout.py`), advantages (`advantages.py`), the course of a run (`train.py`).
Usage: `metrics = update(accelerator, model, optimizer, batch, options, ...)` inside `train_mode(model)`.

Losses are sums, divided by the number of valid terms in the minibatch over all processes. So the gradient depends on
neither the micro-batch size nor the number of processes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from vla_accel.config import PPOOptions
from vla_accel.distributed import global_max, global_sum
from vla_accel.types import PolicyScore, Rollout, TensorDict

if TYPE_CHECKING:
    from accelerate import Accelerator

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to this size before the exponential, so that a stale sample cannot overflow."""


@dataclass(kw_only=True)
class Batch:
    """The valid decisions of one rollout on this rank, flat.

    Attributes:
        inputs: dict of `[B, ...]`.
        trace: dict of `[B, ...]`.
        old_log_prob: float32 `[B, U]`, by the training forward before the first epoch.
        unit_mask: bool `[B, U]`, units of environment steps that were executed.
        advantage: float32 `[B]`.
        returns: float32 `[B]`, targets of the value head.
        value: float32 `[B]`, the rollout's estimates.
        row: int64 `[B]`, decision's place in time (0..T-1).
        env: int64 `[B]`, its environment, counted over all processes.
        num_decisions: T, places in time that a row can have.
        spare: any one decision of this rank, `[1]`, valid or not: what a rank without rows runs at weight 0.
    """

    inputs: TensorDict
    trace: TensorDict
    old_log_prob: Tensor
    unit_mask: Tensor
    advantage: Tensor
    returns: Tensor
    value: Tensor
    row: Tensor
    env: Tensor
    num_decisions: int
    spare: Batch | None = None

    def __len__(self) -> int:
        return self.row.shape[0]

    def select(self, index: Tensor, device: torch.device | str) -> Batch:
        """The rows in `index` (int64 `[b]`), moved to `device`."""

        def take(x: Tensor) -> Tensor:
            return x[index].to(device, non_blocking=True)

        return Batch(
            inputs={name: take(x) for name, x in self.inputs.items()},
            trace={name: take(x) for name, x in self.trace.items()},
            num_decisions=self.num_decisions,
            **{name: take(getattr(self, name)) for name in _ROWS},  # type: ignore[arg-type]
        )


_ROWS = ("old_log_prob", "unit_mask", "advantage", "returns", "value", "row", "env")


def unit_mask(unit_step: Tensor, executed: Tensor) -> Tensor:
    """Which units acted on an environment step that was executed.

    Args:
        unit_step: int64 `[U]`, as in `Policy.unit_step`.
        executed: int64 `[B]`, executed steps of each decision.

    Returns:
        bool `[B, U]`, True = keep.
    """
    return unit_step[None, :] < executed[:, None]


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
    """Sums over the valid terms of one micro-batch; the first three carry gradients."""

    policy: Tensor
    value: Tensor
    entropy: Tensor
    kl: Tensor
    clipped: Tensor
    log_ratio_max: Tensor


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
        outside = (mask & (surrogate < ratio * advantage)).sum().float()
        largest = torch.where(mask, log_ratio.abs(), zero).amax() if mask.numel() else zero
    return LossSums(
        policy=-torch.where(mask, surrogate, zero).sum(),
        value=0.5 * value_error.sum(),
        entropy=entropy,
        kl=kl,
        clipped=outside,
        log_ratio_max=largest,
    )


def make_batch(rollout: Rollout, advantage: Tensor, returns: Tensor, *, unit_step: Tensor, first_env: int) -> Batch:
    """Flatten a rollout to its valid decisions. `old_log_prob` is the rollout's until `rescore` replaces it.

    Args:
        rollout: `[T, N]`.
        advantage: float32 `[T, N]`, normalised or not.
        returns: float32 `[T, N]`.
        unit_step: int64 `[U]`.
        first_env: number of this rank's first environment, counted over all processes.
    """
    whole = _flatten(rollout, advantage, returns, unit_step=unit_step, first_env=first_env)
    keep = torch.nonzero((rollout.valid & (rollout.executed > 0)).flatten()).flatten()
    batch = whole.select(keep, "cpu")
    batch.spare = whole.select(torch.zeros(1, dtype=torch.int64), "cpu")
    return batch


def _flatten(rollout: Rollout, advantage: Tensor, returns: Tensor, *, unit_step: Tensor, first_env: int) -> Batch:
    num_steps, num_envs = rollout.valid.shape

    def flat(x: Tensor) -> Tensor:
        return x.flatten(0, 1)

    row = torch.arange(num_steps)[:, None].expand(num_steps, num_envs)
    env = (first_env + torch.arange(num_envs))[None, :].expand(num_steps, num_envs)
    return Batch(
        inputs={name: flat(x) for name, x in rollout.inputs.items()},
        trace={name: flat(x) for name, x in rollout.trace.items()},
        old_log_prob=flat(rollout.log_prob),
        unit_mask=unit_mask(unit_step.cpu(), flat(rollout.executed)),
        advantage=flat(advantage),
        returns=flat(returns),
        value=flat(rollout.value),
        row=flat(row),
        env=flat(env),
        num_decisions=num_steps,
    )


def minibatches(batch: Batch, *, num_minibatches: int, seed: int) -> list[Tensor]:
    """Deal the decisions of a rollout to minibatches, the same way on any number of processes.

    Each environment's decisions are shuffled by a generator of its own and dealt in turn, one environment after the
    other. So every minibatch takes about as many from each environment, and hence from each rank, and where all
    decisions are valid and the number of minibatches divides them, all minibatches are of one size.

    Args:
        batch: this rank's decisions.
        num_minibatches: how many.
        seed: of the shuffling.

    Returns:
        `num_minibatches` int64 index tensors into the batch, together each row once; some may be empty.
    """
    goes_to = torch.zeros(len(batch), dtype=torch.int64)
    for env in batch.env.unique().tolist():
        rows = torch.nonzero(batch.env == env).flatten()
        generator = torch.Generator().manual_seed((seed * 1_000_003 + env) % (2**63))
        rows = rows[torch.randperm(len(rows), generator=generator)]
        # Each time the dealing comes round to where it began, it moves on by one: else the environments that lack
        # decisions would all lack them in the same minibatches.
        dealt = env * batch.num_decisions
        begin = dealt + dealt // math.lcm(batch.num_decisions, num_minibatches)
        goes_to[rows] = (begin + torch.arange(len(rows))) % num_minibatches
    return [torch.nonzero(goes_to == number).flatten() for number in range(num_minibatches)]


def micro_batches(
    accelerator: Accelerator, batch: Batch, index: Tensor, size: int
) -> Iterator[tuple[Batch, float, bool]]:
    """Cut the rows in `index` into micro-batches, the same number on every rank.

    A rank with fewer rows runs its spare row with weight 0, so that collectives stay in step.
    Collective: call on every rank.

    Yields:
        the micro-batch on the accelerator's device, its weight (1 or 0), and whether it is the last.
    """
    parts = [part for part in index.split(size) if len(part)]
    rounds = int(global_max(accelerator, len(parts)))
    for number in range(rounds):
        own = number < len(parts)
        source, rows = (batch, parts[number]) if own else (batch.spare, torch.zeros(1, dtype=torch.int64))
        assert source is not None, "make_batch gives every batch a spare row"
        yield source.select(rows, accelerator.device), float(own), number == rounds - 1


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
        or gradient was not finite), `ppo/kl_stop` (1 if the KL ended it early).
    """
    unit_step = unit_step.to(accelerator.device)
    totals = dict.fromkeys(_MEANS, 0.0)
    steps = skipped = 0
    stopped = False
    first_log_ratio: float | None = None
    for epoch in range(options.epochs):
        for index in minibatches(batch, num_minibatches=num_minibatches, seed=seed * 1009 + epoch):
            counts = _global_counts(accelerator, batch, index, unit_step, options)
            if counts["rows"] == 0:
                continue
            sums = _backward(accelerator, model, batch, index, options, unit_step, counts, train_policy)
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
            else:
                skipped += 1
            optimizer.zero_grad(set_to_none=True)
        if stopped:
            break
    metrics = {name: x / max(steps, 1) for name, x in totals.items()}
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
) -> dict[str, float]:
    """Accumulate the gradient of one minibatch; returns this rank's sums."""
    sums = {"policy": 0.0, "value": 0.0, "entropy": 0.0, "kl": 0.0, "clipped": 0.0, "log_ratio_max": 0.0}
    for micro, weight, last in micro_batches(accelerator, batch, index, options.micro_batch_size):
        with _sync(accelerator, model, last):
            part = ppo_loss(model(micro.inputs, micro.trace), micro, unit_step, options)
            policy = part.policy / counts["ratios"] - options.entropy_coef * part.entropy / counts["units"]
            value = part.value / counts["rows"]
            # Every output stays in the graph, weighted by 0 if need be: data parallelism waits for all parameters.
            loss = weight * (float(train_policy) * policy + options.value_coef * value)
            # Data parallelism averages gradients over the ranks; these are parts of one sum.
            accelerator.backward(loss * accelerator.num_processes)
        if weight:
            for name in sums:
                x = float(getattr(part, name).detach())
                sums[name] = max(sums[name], x) if name == "log_ratio_max" else sums[name] + x
    return sums


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
