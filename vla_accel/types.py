"""The records that travel between environments, policies and the update; nothing here computes.

Not here: options (`config.py`) and the classes that produce these records.
Usage: `from vla_accel.types import Observation, Rollout`.

Shape letters, the same in every docstring of the package:

| letter | meaning |
|---|---|
| `T` | decisions per rollout: one decision is one policy call, one PPO sample, one action chunk |
| `N` | environments on this rank |
| `B` | any flat batch of decisions |
| `K` | environment steps per decision (the chunk) |
| `A` | action dimensions |
| `U` | units: the smallest factors of a decision's log-density (a token, an element of a denoising transition) |
| `Q` | entries of the robot state |
| `S` | stored stochastic denoising transitions |
| `H`, `D` | horizon and action width of a flow model |
| `L` | prompt tokens |
| `C`, `P` | cameras; image side in pixels |
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    import numpy as np
    import torch

TensorDict: TypeAlias = "dict[str, torch.Tensor]"
"""Tensors by name, all with the same first dimensions."""


@dataclass(frozen=True, kw_only=True)
class Observation:
    """What N environments show a policy before one decision.

    Attributes:
        images: camera name -> uint8 `[N, P, P, 3]`, RGB, 0..255, upright; cameras in the environment's order.
        state: float32 `[N, Q]`, proprioception in environment units.
        instructions: N strings in natural language, e.g. `"reach the red block"`.
    """

    images: dict[str, np.ndarray]
    state: np.ndarray
    instructions: list[str]

    def __len__(self) -> int:
        return len(self.instructions)

    def select(self, rows: list[int] | np.ndarray) -> Observation:
        """The same record for some of its rows (`rows`: int indices, or a boolean mask `[N]`)."""
        import numpy as np

        index = np.asarray(rows)
        index = np.flatnonzero(index) if index.dtype == bool else index
        return Observation(
            images={camera: image[index] for camera, image in self.images.items()},
            state=self.state[index],
            instructions=[self.instructions[i] for i in index],
        )


@dataclass(frozen=True, kw_only=True)
class PolicySample:
    """Answer of a policy asked to act. Nothing in it carries a gradient.

    Attributes:
        action: float32 `[N, K, A]`, in environment units, ready to be stepped.
        trace: what must be kept to score the decision again: a dict of tensors `[N, ...]`.
        log_prob: float32 `[N, U]`, log-density of each unit under the sampling distribution (nats).
        value: float32 `[N]`, estimate of the discounted return from this decision on.
        kept: what scoring these decisions need not compute again, since training does not change it: a dict of tensors
            `[N, ...]`, on the device. The loop hands its rows back among the inputs, under the same names, or does
            not; sizes may differ from one decision to the next, and rows are then padded with zeros at their ends.
    """

    action: torch.Tensor
    trace: TensorDict
    log_prob: torch.Tensor
    value: torch.Tensor
    kept: TensorDict = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class UnitGroups:
    """Parts of a decision about which metrics are reported apart, such as the denoising steps of a flow.

    Attributes:
        names: of the parts, the same for every batch.
        index: int64 `[B, U]`, which of them each unit belongs to.
    """

    names: tuple[str, ...]
    index: torch.Tensor


@dataclass(frozen=True, kw_only=True)
class PolicyScore:
    """Answer of a policy asked to score stored decisions. Carries gradients.

    Attributes:
        log_prob: float32 `[B, U]`, log-density of each stored unit (nats).
        entropy: float32 `[B, U]` (nats), or None where the policy's entropy has no closed form.
        value: float32 `[B]`.
        groups: parts of the decisions to report about, or None.
    """

    log_prob: torch.Tensor
    entropy: torch.Tensor | None
    value: torch.Tensor
    groups: UnitGroups | None = None


@dataclass(frozen=True, kw_only=True)
class Job:
    """One episode to play: which task, from which initial state, with which seed."""

    task_id: int
    state_id: int
    seed: int


@dataclass(frozen=True, kw_only=True)
class Episode:
    """One finished episode.

    Attributes:
        job: what was played.
        success: whether the task was solved at any step (`info["success"]`).
        success_at_end: whether it was solved at the last step.
        steps: executed environment steps.
        total_reward: undiscounted sum of rewards.
        truncated: True when the time limit ended it, False when the task did.
        success_step: environment steps until the task was first solved; None where it never was.
    """

    job: Job
    success: bool
    success_at_end: bool
    steps: int
    total_reward: float
    truncated: bool
    success_step: int | None = None


@dataclass(kw_only=True)
class Rollout:
    """T decisions of N environments, as collected. Tensors live on the CPU.

    Rows that are no samples are False in `valid`: of an environment that had no more jobs, and of a decision that was
    lost with its simulator. Their numbers are 0; `inputs` and `trace` hold what the policy saw and did there.

    Attributes:
        inputs: policy inputs, a dict of tensors `[T, N, ...]`.
        trace: a dict of tensors `[T, N, ...]`.
        log_prob: float32 `[T, N, U]`, as sampled.
        value: float32 `[T, N]`, as estimated while acting.
        next_value: float32 `[T, N]`, value of the observation the decision led to: of the episode's own final
            observation where it was truncated (never of the next episode's first), 0 where it terminated.
        reward: float32 `[T, N]`, sum over the executed environment steps.
        executed: int64 `[T, N]`, environment steps executed, 0..K.
        terminated: bool `[T, N]`, the task ended (success or failure) in this decision.
        truncated: bool `[T, N]`, the time limit ended the episode in this decision.
        valid: bool `[T, N]`.
        episodes: the episodes that ended in this rollout, in the order they ended.
        voided: episodes lost to a simulator that raised, died or hung; their jobs were played again.
        seconds: wall time by phase, e.g. `{"policy": 1.2, "env": 0.4}`.
        kept: `PolicySample.kept` of row `t * N + n`, without the batch dimension and where the policy made it; empty
            where the policy keeps nothing, or more than it may.
    """

    inputs: TensorDict
    trace: TensorDict
    log_prob: torch.Tensor
    value: torch.Tensor
    next_value: torch.Tensor
    reward: torch.Tensor
    executed: torch.Tensor
    terminated: torch.Tensor
    truncated: torch.Tensor
    valid: torch.Tensor
    episodes: list[Episode] = field(default_factory=list)
    voided: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    kept: list[TensorDict] = field(default_factory=list)
