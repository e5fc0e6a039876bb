"""The policy seam: what the loop asks of a policy, whatever model is behind it.

Not here: any model's arithmetic (`token.py`, `flow.py`) or adapter (`openvla.py`, `pi0.py`).
Usage: subclass `Policy`, set the four attributes, write `prepare` and `forward`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from vla_accel.types import Observation, PolicySample, PolicyScore, TensorDict


@dataclass(frozen=True, kw_only=True)
class PolicySpec:
    """What a checkpoint says of itself before its weights are loaded.

    Attributes:
        path: its folder.
        chunk_size: K.
        action_dim: A.
        shard_units: as in `Policy`.
        embedded: whether it is the one that ships with the package.
        num_images: how many cameras it reads, at most.
        has_entropy: whether the entropy depends on the weights, so that a bonus on it does something.
        has_bins: whether actions are drawn from bins, to whose neighbours an imitated target can spread.
    """

    path: str
    chunk_size: int
    action_dim: int
    shard_units: tuple[str, ...]
    embedded: bool
    num_images: int
    has_entropy: bool = True
    has_bins: bool = True


class Policy(nn.Module):
    """One module for Accelerate: a VLA model and its value head, seen as a distribution over action chunks.

    A plain `nn.Module`, not an abstract base class: FSDP2 replaces the class of the modules it shards.
    Acting and scoring both go through `forward`, so that sharding hooks, casts and autocast are the same in both
    and PPO's ratio is 1 before the first update.

    Attributes:
        chunk_size: K, environment steps per decision.
        action_dim: A.
        unit_step: int64 buffer `[U]` in `[0, K)`: the environment step of the chunk that a unit acts on.
        streams: sources of sampling noise, CPU generators, one per environment of this rank; see `seed`.
        shard_units: names of the layer classes that sharding wraps one by one.
        keep_bytes: how much of a rollout, all decisions of this rank together, the loop may store of
            `PolicySample.kept`. If it is more, nothing is stored.
        keep_on_host: whether the loop stores it in the CPU's memory.
        value_read: whether anybody reads the value of a sample; see `acting_only`.
    """

    shard_units: ClassVar[tuple[str, ...]] = ()
    keep_bytes: int = 0
    keep_on_host: bool = False
    value_read: bool = True

    chunk_size: int
    action_dim: int
    unit_step: torch.Tensor
    streams: list[torch.Generator]

    def seed(self, seed: int, *, first_env: int, num_envs: int) -> None:
        """Start new streams of sampling noise, one per environment.

        An environment's stream depends on the seed and on its number over all processes alone, so that a run draws the
        same actions on any number of processes.

        Args:
            seed: of the run.
            first_env: number of this rank's first environment, counted over all processes.
            num_envs: environments of this rank.
        """
        self.streams = [
            torch.Generator().manual_seed((seed * 1_000_003 + first_env + i) % 2**63) for i in range(num_envs)
        ]

    def fit_instructions(self, instructions: list[str]) -> None:
        """Learn which instructions will come, so that all prepared prompts get one length."""

    def prepare(self, obs: Observation) -> TensorDict:
        """Turn observations into compact model inputs.

        Runs on the CPU and is deterministic: images stay uint8, token ids int64, state float32.

        Args:
            obs: N observations.

        Returns:
            A dict of tensors `[N, ...]` that `forward` takes.
        """
        raise TypeError(f"{type(self).__name__} does not define prepare")

    def forward(
        self, inputs: TensorDict, trace: TensorDict | None = None, *, greedy: bool = False
    ) -> PolicySample | PolicyScore:
        """Act on inputs, or score stored decisions.

        Args:
            inputs: what `prepare` returned, `[B, ...]`, on the model's device; to score, perhaps also the rows of
                the samples' `kept`, which then need not be computed again.
            trace: None to act; the `trace` of earlier samples, `[B, ...]`, to score them.
            greedy: act with the most likely action instead of a sample.

        Returns:
            `PolicySample` when acting (no gradient), `PolicyScore` when scoring (with gradient).
        """
        raise TypeError(f"{type(self).__name__} does not define forward")

    def encode_demonstration(self, action: torch.Tensor, *, smoothing: float = 0.0, repeats: int = 1) -> TensorDict:
        """The trace with which the policy would have taken these actions, for imitation.

        Args:
            action: float32 `[B, K, A]`, in environment units.
            smoothing: how far a target spreads to its neighbours, in the policy's own resolution (bins). 0: not.
            repeats: how many times each row is drawn anew, for a policy whose traces of a demonstration are random.

        Returns:
            A trace `[B, ...]`, to be scored by `forward`. Where the policy's own log-probability is of no use for
            imitation, as that of a flow's denoising steps, the score's `log_prob` is what to raise instead; it is
            then the only field that counts, and `value` only keeps the value head in the graph.

        Raises:
            ValueError: for a smoothing or repeats that the policy has no use for.
        """
        raise TypeError(f"{type(self).__name__} cannot score demonstrations")

    def save(self, folder: str, state_dict: TensorDict) -> None:
        """Write a folder from which the policy, and the model alone, can be loaded again.

        Args:
            folder: to create.
            state_dict: full weights of this policy, on the CPU.
        """
        raise TypeError(f"{type(self).__name__} does not define save")

    @contextmanager
    def acting_only(self) -> Iterator[None]:
        """Context in which nobody reads the value of a sample: the policy may leave it 0 and not run what it needs."""
        self.value_read = False
        try:
            yield
        finally:
            self.value_read = True

    def reference(self) -> AbstractContextManager:
        """Context in which the policy is the one training started from, at no extra memory (adapters off)."""
        return nullcontext()


class ValueHead(nn.Module):
    """An MLP from a feature of the policy's trunk to a scalar value.

    The last layer starts at zero, so the first estimates are 0 for every observation.

    Args:
        feature_dim: width of the feature.
        hidden_dim: width of the two hidden layers.
        detach: read the feature without passing gradients back to the trunk. With a shared trunk the value loss of
            an untrained head can wreck a good policy; sharing is for those who measured that it helps.
    """

    def __init__(self, feature_dim: int, *, hidden_dim: int = 256, detach: bool = True):
        super().__init__()
        self.detach = detach
        self.norm = nn.LayerNorm(feature_dim)
        self.fc1 = nn.Linear(feature_dim, hidden_dim)
        self.fc2 = nn.Linear(hidden_dim, hidden_dim)
        self.out = nn.Linear(hidden_dim, 1)
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.out.bias)

    def forward(self, feature: torch.Tensor) -> torch.Tensor:
        """Map features `[B, feature_dim]` to values, float32 `[B]`."""
        feature = feature.detach() if self.detach else feature
        hidden = self.norm(feature.to(self.fc1.weight.dtype))
        hidden = nn.functional.gelu(self.fc1(hidden))
        hidden = nn.functional.gelu(self.fc2(hidden))
        return self.out(hidden).squeeze(-1).float()
