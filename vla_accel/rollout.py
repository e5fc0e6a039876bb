"""Collecting: a policy and environments in, a `Rollout` out.

Not here: sharding state (call inside `rollout_mode`), advantages, the update. No collective is used, so ranks may take
different numbers of steps.
Usage: `state = start(envs); rollout = collect(model, policy, envs, state, num_decisions=16, device=device)`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor, nn

from vla_accel.batch import Kept
from vla_accel.envs.base import read_idle, read_step, stack_final, to_observation
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
    num_decisions: int,
    device: torch.device,
) -> Rollout:
    """Take `num_decisions` decisions in every environment, going on where the last rollout ended.

    Args:
        model: the policy as prepared for its wrapper; all forwards go through it.
        policy: the policy inside `model`, for `prepare`.
        envs: from `make_vector_env`.
        state: where the environments stand; moved on in place.
        num_decisions: T.
        device: of the model.

    Returns:
        A rollout on the CPU.
    """
    steps: list[dict] = []
    kept = Kept(policy.keep_bytes // (num_decisions * envs.num_envs))
    episodes: list[Episode] = []
    finals: list[tuple[int, int, dict]] = []
    voided, state.voided = state.voided, 0
    seconds = Seconds()
    for t in range(num_decisions):
        with seconds.measure("policy"):
            inputs = policy.prepare(state.obs)
            sample = kept.strip(act(model, inputs, device))
        with seconds.measure("env"):
            obs, reward, terminated, truncated, infos = envs.step(_for_env(sample.action, envs))
            info = read_step(infos, envs.num_envs)
        steps.append(
            {
                "inputs": inputs,
                "sample": sample,
                "reward": reward,
                "terminated": terminated,
                "truncated": truncated & ~terminated,
                "executed": info.executed,
                "valid": ~state.idle & (info.executed > 0),
            }
        )
        voided += int(info.voided.sum())
        episodes += [episode for _, episode in info.episodes]
        for env, final in info.final_obs:
            if truncated[env] and not terminated[env]:
                finals.append((t, env, final))
        state.obs, state.idle = to_observation(obs, envs.instructions), info.idle
    with seconds.measure("policy"):
        next_value = _next_values(model, policy, envs, steps, state, finals, device)
    rollout = _stack(steps, next_value, episodes, voided, seconds.total)
    rollout.kept = kept.rows
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


def _next_values(
    model: nn.Module,
    policy: Policy,
    envs: gym.vector.VectorEnv,
    steps: list[dict],
    state: EnvState,
    finals: list[tuple[int, int, dict]],
    device: torch.device,
) -> Tensor:
    """float32 `[T, N]`: the value of what each decision led to; see `Rollout.next_value`."""
    values = torch.stack([step["sample"].value for step in steps])
    last = act(model, policy.prepare(state.obs), device, greedy=True).value
    after = torch.cat([values[1:], last[None]])
    terminated = torch.from_numpy(np.stack([step["terminated"] for step in steps]))
    after = torch.where(terminated, torch.zeros_like(after), after)
    num_envs = len(state.obs)
    for begin in range(0, len(finals), num_envs):
        part = finals[begin : begin + num_envs]
        obs = to_observation(stack_final([(env, final) for _, env, final in part]), envs.instructions)
        value = act(model, policy.prepare(obs), device, greedy=True).value
        for (t, env, _), x in zip(part, value, strict=True):
            after[t, env] = x
    return after


def _stack(
    steps: list[dict], next_value: Tensor, episodes: list[Episode], voided: int, seconds: dict[str, float]
) -> Rollout:
    samples = [step["sample"] for step in steps]

    def numbers(name: str, dtype: torch.dtype) -> Tensor:
        return torch.from_numpy(np.stack([step[name] for step in steps])).to(dtype)

    valid = numbers("valid", torch.bool)

    def in_episodes(x: Tensor) -> Tensor:
        x[~valid] = 0
        return x

    return Rollout(
        inputs={name: torch.stack([step["inputs"][name] for step in steps]) for name in steps[0]["inputs"]},
        trace={name: torch.stack([sample.trace[name] for sample in samples]) for name in samples[0].trace},
        log_prob=in_episodes(torch.stack([sample.log_prob for sample in samples])),
        value=in_episodes(torch.stack([sample.value for sample in samples])),
        next_value=in_episodes(next_value),
        reward=numbers("reward", torch.float32),
        executed=numbers("executed", torch.int64),
        terminated=numbers("terminated", torch.bool),
        truncated=numbers("truncated", torch.bool),
        valid=valid,
        episodes=episodes,
        voided=voided,
        seconds=seconds,
    )
