"""The decisions of a rollout as one flat batch, and how they are dealt to optimizer steps and forward passes.

Not here: the loss and the update (`ppo.py`).
Usage: `batch = make_batch(rollout, advantage, returns, used, unit_step=policy.unit_step, first_env=0)`.
"""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from vla_accel.distributed import global_any, global_max
from vla_accel.types import PolicySample, Rollout, TensorDict

if TYPE_CHECKING:
    from accelerate import Accelerator


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
        kept: `Rollout.kept` of each row, or empty.
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
    kept: list[TensorDict] = field(default_factory=list)
    spare: Batch | None = None

    def __len__(self) -> int:
        return self.row.shape[0]

    def select(self, index: Tensor, device: torch.device | str) -> Batch:
        """The rows in `index` (int64 `[b]`), moved to `device`, but for what was kept, which stays where it is."""

        def take(x: Tensor) -> Tensor:
            return x[index].to(device, non_blocking=True)

        return Batch(
            inputs={name: take(x) for name, x in self.inputs.items()},
            trace={name: take(x) for name, x in self.trace.items()},
            num_decisions=self.num_decisions,
            kept=[self.kept[row] for row in index.tolist()] if self.kept else [],
            **{name: take(getattr(self, name)) for name in _ROWS},  # type: ignore[arg-type]
        )


_ROWS = ("old_log_prob", "unit_mask", "advantage", "returns", "value", "row", "env")


class Kept:
    """Gathers what a policy keeps of its decisions, row by row, or nothing if it is too much.

    Args:
        limit: bytes of all rows together.
        on_host: move it to the CPU's memory, pinned where there is a CUDA device, instead of leaving it where it is.

    Attributes:
        rows: as in `Rollout.kept`, if `strip` was called in that order.
    """

    def __init__(self, limit: int, *, on_host: bool = False):
        self.limit, self.held, self.on_host, self.full = limit, 0, on_host, False
        self.rows: list[TensorDict] = []

    def strip(self, sample: PolicySample) -> PolicySample:
        """Take what is kept of the next decisions out of a sample, which then no longer holds it."""
        count = len(sample.value)
        if sample.kept and not self.full:
            self.held += sum(x.numel() * x.element_size() for x in sample.kept.values())
            if self.held > self.limit:
                self.full, self.rows = True, []
                warnings.warn(
                    f"What a policy would keep of a rollout for the update exceeds {self.limit / 1e9:.3g} GB, so each "
                    "pass of it computes that again (--policy.prefix_cache_gb).",
                    stacklevel=2,
                )
            else:
                kept = {name: _on_host(x) for name, x in sample.kept.items()} if self.on_host else sample.kept
                self.rows += [{name: x[row] for name, x in kept.items()} for row in range(count)]
        return dataclasses.replace(sample, kept={})


def _on_host(x: Tensor) -> Tensor:
    if x.device.type == "cpu":
        return x
    return torch.empty_like(x, device="cpu", pin_memory=x.is_cuda).copy_(x)


def join_rows(rows: list[TensorDict], device: torch.device | str) -> TensorDict:
    """Put rows side by side on a device: a dict of tensors `[len(rows), ...]`.

    Where the rows of a tensor differ in size, the smaller ones are padded with zeros at their ends.
    """
    joined = {}
    for name in rows[0]:
        parts = [row[name] for row in rows]
        size = [max(sizes) for sizes in zip(*(part.shape for part in parts), strict=True)]
        equal = all(list(part.shape) == size for part in parts)
        whole = (torch.empty if equal else torch.zeros)(len(rows), *size, dtype=parts[0].dtype, device=device)
        for place, part in zip(whole, parts, strict=True):
            place[tuple(slice(length) for length in part.shape)].copy_(part, non_blocking=True)
        joined[name] = whole
    return joined


def unit_mask(unit_step: Tensor, executed: Tensor) -> Tensor:
    """Which units acted on an environment step that was executed.

    Args:
        unit_step: int64 `[U]`, as in `Policy.unit_step`.
        executed: int64 `[B]`, executed steps of each decision.

    Returns:
        bool `[B, U]`, True = keep.
    """
    return unit_step[None, :] < executed[:, None]


def make_batch(
    rollout: Rollout,
    advantage: Tensor,
    returns: Tensor,
    used: Tensor | None = None,
    *,
    unit_step: Tensor,
    first_env: int,
) -> Batch:
    """Flatten a rollout to the decisions to learn from. `old_log_prob` is the rollout's until `rescore` replaces it.

    Args:
        rollout: `[T, N]`.
        advantage: float32 `[T, N]`, normalised or not.
        returns: float32 `[T, N]`.
        used: bool `[T, N]`, which valid decisions to learn from. None: all.
        unit_step: int64 `[U]`.
        first_env: number of this rank's first environment, counted over all processes.
    """
    whole = _flatten(rollout, advantage, returns, unit_step=unit_step, first_env=first_env)
    keep = rollout.valid & (rollout.executed > 0)
    keep = torch.nonzero((keep if used is None else keep & used).flatten()).flatten()
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
        kept=rollout.kept,
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

    A rank with fewer rows runs its spare row with weight 0, so that collectives stay in step. For the same reason what
    the policy kept of the rollout is among the inputs only if all ranks have it.
    Collective: call on every rank.

    Yields:
        the micro-batch on the accelerator's device, its weight (1 or 0), and whether it is the last.
    """
    parts = [part for part in index.split(size) if len(part)]
    rounds = int(global_max(accelerator, len(parts)))
    lacking = global_any(accelerator, not (batch.kept or (batch.spare and batch.spare.kept)))
    for number in range(rounds):
        own = number < len(parts)
        source, rows = (batch, parts[number]) if own else (batch.spare, torch.zeros(1, dtype=torch.int64))
        assert source is not None, "make_batch gives every batch a spare row"
        micro = source.select(rows, accelerator.device)
        if not lacking:
            micro.inputs |= join_rows(micro.kept, accelerator.device)
        yield micro, float(own), number == rounds - 1
