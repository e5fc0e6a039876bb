"""Collecting: a policy and environments in, a `Rollout` out.

Not here: sharding state (call inside `rollout_mode`), advantages, the update. No collective is used, so ranks may take
different numbers of steps. Groups of environments take turns, if `make_vector_env` was asked for more than one: while
one steps, in worker processes, the policy acts for the next.
Usage: `state = start(envs); rollout = collect(model, policy, envs, state, num_decisions=16, device=device)`.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor, nn

from vla_accel.batch import Kept
from vla_accel.envs.base import read_idle, read_step, stack_final, to_observation
from vla_accel.envs.groups import begin_step, parts_of
from vla_accel.policies.base import Policy
from vla_accel.types import Episode, Observation, PolicySample, Rollout, TensorDict


@dataclass(kw_only=True)
class EnvState:
    """Where the environments stand between two rollouts.

    Attributes:
        obs: what each environment shows now.
        idle: bool `[N]`, True where an environment has no more jobs.
        voided: episodes lost that no rollout has counted yet.
    """

    obs: Observation
    idle: np.ndarray
    voided: int = 0


def start(envs: gym.vector.VectorEnv) -> EnvState:
    """Reset all environments; each begins the first of its jobs."""
    obs, infos = envs.reset()
    return EnvState(
        obs=to_observation(obs, envs.instructions),
        idle=read_idle(infos, envs.num_envs),
        voided=int(np.sum(infos.get("voided", 0))),
    )


@dataclass
class Seconds:
    """Wall time by phase."""

    total: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def measure(self, phase: str) -> Iterator[None]:
        """Add the time spent inside to `phase`."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.total[phase] = self.total.get(phase, 0.0) + time.perf_counter() - begin


@torch.no_grad()
def collect(
    model: nn.Module,
    policy: Policy,
    envs: gym.vector.VectorEnv,
    state: EnvState,
    *,
    num_decisions: int | None,
    device: torch.device,
) -> Rollout:
    """Take `num_decisions` decisions in every environment, going on where the last rollout ended.

    Args:
        model: the policy as prepared for its wrapper; all forwards go through it.
        policy: the policy inside `model`, for `prepare`.
        envs: from `make_vector_env`.
        state: where the environments stand; moved on in place.
        num_decisions: T. None: as many as it takes until all environments are idle.
        device: of the model.

    Returns:
        A rollout on the CPU.
    """
    everywhere = np.arange(envs.num_envs)
    groups = [
        _Group(envs=part, rows=rows, obs=state.obs.select(everywhere[rows]), idle=state.idle[rows])
        for part, rows in parts_of(envs)
    ]
    kept = Kept(policy.keep_bytes, on_host=policy.keep_on_host)
    seconds = Seconds()
    for t in itertools.count():
        for group in groups:
            if t > 0:
                with seconds.measure("env"):
                    group.finish()
            if group is groups[0]:
                more = t < num_decisions if num_decisions else not all(each.idle.all() for each in groups)
            if more:
                with seconds.measure("policy"), _noise_of(policy, group.rows):
                    inputs = policy.prepare(group.obs)
                    sample = kept.strip(act(model, inputs, device))
                with seconds.measure("env"):
                    group.begin(inputs, sample)
        if not more:
            break
    with seconds.measure("policy"):
        next_value = torch.cat([_next_values(model, policy, group, device) for group in groups], 1)
    rollout = _stack(groups, next_value)
    rollout.voided += state.voided
    rollout.kept, rollout.seconds = kept.rows, seconds.total
    state.obs, state.idle = _joined([group.obs for group in groups]), np.concatenate([group.idle for group in groups])
    state.voided = 0
    return rollout


def act(model: nn.Module, inputs: TensorDict, device: torch.device, *, greedy: bool = False) -> PolicySample:
    """One forward through the wrapped root; the answer lies on the CPU."""
    sample = model({name: x.to(device) for name, x in inputs.items()}, greedy=greedy)
    return PolicySample(
        action=sample.action.float().cpu(),
        trace={name: x.cpu() for name, x in sample.trace.items()},
        log_prob=sample.log_prob.cpu(),
        value=sample.value.cpu(),
        kept=sample.kept,
    )


def _for_env(action: Tensor, envs: gym.vector.VectorEnv) -> np.ndarray:
    """The part of each chunk that the environments take, clipped to their action space."""
    space = envs.single_action_space
    taken = action[:, : space.shape[0]].numpy()
    return np.clip(taken, space.low, space.high).astype(space.dtype)


@contextmanager
def _noise_of(policy: Policy, rows: slice) -> Iterator[None]:
    """Let the policy act for some of the environments, each with its own stream of noise."""
    everyone = getattr(policy, "streams", [])  # a policy that draws nothing need not have any
    policy.streams = everyone[rows]
    try:
        yield
    finally:
        policy.streams = everyone


@dataclass(kw_only=True)
class _Group:
    """Environments that step together, and their part of a rollout.

    Attributes:
        envs: the environments.
        rows: their places among all.
        obs: what they show.
        idle: bool, which have no more jobs.
        steps: what each decision was and led to.
        finals: (decision, environment, observation) at the end of each truncated episode.
        episodes: (decision, record) of each episode that ended.
        voided: episodes lost.
        wait: gives what the step that was begun returns.
    """

    envs: gym.vector.VectorEnv
    rows: slice
    obs: Observation
    idle: np.ndarray
    steps: list[dict[str, Any]] = field(default_factory=list)
    finals: list[tuple[int, int, dict[str, Any]]] = field(default_factory=list)
    episodes: list[tuple[int, Episode]] = field(default_factory=list)
    voided: int = 0
    wait: Callable[[], tuple[Any, ...]] = field(init=False)

    def begin(self, inputs: TensorDict, sample: PolicySample) -> None:
        """Begin to execute a decision."""
        self.steps.append({"inputs": inputs, "trace": sample.trace, "log_prob": sample.log_prob, "value": sample.value})
        self.wait = begin_step(self.envs, _for_env(sample.action, self.envs))

    def finish(self) -> None:
        """Wait until it is executed, and record what it led to."""
        t = len(self.steps) - 1
        obs, reward, terminated, truncated, infos = self.wait()
        info = read_step(infos, self.envs.num_envs)
        self.steps[t] |= {
            "reward": reward,
            "terminated": terminated,
            "truncated": truncated & ~terminated,
            "executed": info.executed,
            "valid": ~self.idle & (info.executed > 0),
        }
        self.voided += int(info.voided.sum())
        self.episodes += [(t, episode) for _, episode in info.episodes]
        self.finals += [(t, env, final) for env, final in info.final_obs if truncated[env] and not terminated[env]]
        self.obs, self.idle = to_observation(obs, self.envs.instructions), info.idle


def _next_values(model: nn.Module, policy: Policy, group: _Group, device: torch.device) -> Tensor:
    """float32 `[T, N]` of a group: the value of what each decision led to; see `Rollout.next_value`."""
    values = torch.stack([step["value"] for step in group.steps])
    last = act(model, policy.prepare(group.obs), device, greedy=True).value
    after = torch.cat([values[1:], last[None]])
    terminated = torch.from_numpy(np.stack([step["terminated"] for step in group.steps]))
    after = torch.where(terminated, torch.zeros_like(after), after)
    num_envs = len(group.obs)
    for begin in range(0, len(group.finals), num_envs):
        part = group.finals[begin : begin + num_envs]
        obs = to_observation(stack_final([(env, final) for _, env, final in part]), group.envs.instructions)
        value = act(model, policy.prepare(obs), device, greedy=True).value
        for (t, env, _), x in zip(part, value, strict=True):
            after[t, env] = x
    return after


def _stack(groups: list[_Group], next_value: Tensor) -> Rollout:
    def each(name: str, key: str | None = None) -> Tensor:
        steps = [[step[name] if key is None else step[name][key] for step in group.steps] for group in groups]
        parts = [torch.stack([torch.as_tensor(x) for x in xs]) for xs in steps]
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)

    valid = each("valid")

    def in_episodes(x: Tensor) -> Tensor:
        x[~valid] = 0
        return x

    first = groups[0].steps[0]
    ended = itertools.chain.from_iterable(group.episodes for group in groups)
    return Rollout(
        inputs={key: each("inputs", key) for key in first["inputs"]},
        trace={key: each("trace", key) for key in first["trace"]},
        log_prob=in_episodes(each("log_prob")),
        value=in_episodes(each("value")),
        next_value=in_episodes(next_value),
        reward=each("reward").float(),
        executed=each("executed"),
        terminated=each("terminated"),
        truncated=each("truncated"),
        valid=valid,
        episodes=[episode for _, episode in sorted(ended, key=lambda end: end[0])],
        voided=sum(group.voided for group in groups),
    )


def _joined(parts: list[Observation]) -> Observation:
    """What the groups show, as one record."""
    return Observation(
        images={camera: np.concatenate([part.images[camera] for part in parts]) for camera in parts[0].images},
        state=np.concatenate([part.state for part in parts]),
        instructions=[text for part in parts for text in part.instructions],
    )
