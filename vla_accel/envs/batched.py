"""A simulator that steps many environments at once, as a vector environment with the habits of all others here.

Not here: such simulators. They bring a class with

| part | rule |
|---|---|
| `num_envs` | N |
| `begin(rows, jobs)` | start an episode in each of these environments; the others stay as they are |
| `step(action, running)` | float `[N, A]`, bool `[N]` -> reward float `[N]`, terminated and success bool `[N]` |
| `observe()` | the stacked observation of all N, as the contract in `base.py` has it, in new memory |
| `close()` | free everything |

where rows that are not `running` may go on in any way that disturbs no other.
Usage: `Batched(simulator, jobs, env, chunk_size=8, max_episode_steps=50)`, then only `reset()` and `step(actions)`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from vla_accel.envs.base import ActionChunk, to_action
from vla_accel.types import Episode, Job


class Simulator(Protocol):
    """What the module's table says."""

    num_envs: int

    def begin(self, rows: list[int], jobs: list[Job]) -> None:
        """Start episodes."""

    def step(self, action: np.ndarray, running: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Step all environments."""

    def observe(self) -> dict[str, Any]:
        """Look at all environments."""

    def close(self) -> None:
        """Free everything."""


@dataclass
class _Play:
    """One environment's jobs and the episode it is in; `job` is None where there is no more."""

    jobs: Iterator[Job | None]
    job: Job | None = None
    taken: int = 0
    actions: list[np.ndarray] = field(default_factory=list)
    steps: int = 0
    total: float = 0.0
    success_step: int | None = None
    success_at_end: bool = False

    def next(self) -> Job | None:
        """Go on to the next job."""
        self.job = next(self.jobs, None)
        self.taken += 1
        self.actions, self.steps, self.total, self.success_step, self.success_at_end = [], 0, 0.0, None, False
        return self.job


class Batched(VectorEnv):
    """N environments of one simulator: chunks, jobs, time limits, and the next episode in the step that ends one.

    All that a step reports is what environments in `ActionChunk`, `EpisodeQueue` and `AutoresetMode.SAME_STEP` do.
    An environment whose episode ends within a chunk rests until the others are done.

    Args:
        simulator: see the module's table.
        jobs: for each environment the jobs it plays; None lets it rest until the next `reset`.
        env: a single environment, for the spaces only.
        chunk_size: K.
        max_episode_steps: time limit in environment steps.
    """

    def __init__(
        self,
        simulator: Simulator,
        jobs: Sequence[Iterable[Job | None]],
        env: gym.Env,
        *,
        chunk_size: int,
        max_episode_steps: int,
    ):
        self.num_envs, self._simulator = simulator.num_envs, simulator
        self._limit = max_episode_steps
        self._plays = [_Play(iter(stream)) for stream in jobs]
        self._resume: list[dict[str, Any]] | None = None
        self.metadata = {**env.metadata, "autoreset_mode": AutoresetMode.SAME_STEP}
        self.render_mode = env.render_mode
        self.single_observation_space = env.observation_space
        self.single_action_space = ActionChunk(env, chunk_size).action_space
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.action_space = batch_space(self.single_action_space, self.num_envs)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Begin the next job in every environment; the jobs decide seeds and options."""
        if seed is not None or options:
            raise ValueError(f"the jobs decide seeds and options: call reset() plainly, got {seed=}, {options=}")
        if self._resume is None:
            self._next(range(self.num_envs))
        else:
            self._replay(self._resume)
            self._resume = None
        return self._observe(), self._infos([{} for _ in self._plays])

    def step(self, actions: np.ndarray) -> tuple[dict[str, Any], np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        """Execute one chunk in every environment.

        Args:
            actions: float `[N, K, A]`.

        Raises:
            ValueError: if the shape differs or a number is not finite.
        """
        actions = to_action(actions, self.action_space, shape="[N, K, A]")
        running = np.array([play.job is not None for play in self._plays])
        reward = np.zeros(self.num_envs)
        terminated, truncated = np.zeros((2, self.num_envs), dtype=bool)
        reports: list[dict[str, Any]] = [{"executed": 0, "success": False} for _ in self._plays]
        for row in np.flatnonzero(running):
            self._plays[row].actions.append(actions[row].copy())
        for action in actions.swapaxes(0, 1):
            if not running.any():
                break
            ended = self._step_once(action, running, reward, terminated, reports)
            truncated |= ended & ~terminated
            if ended.any():
                self._close_episodes(np.flatnonzero(ended), truncated, reports)
            running &= ~ended
        self._next(np.flatnonzero(terminated | truncated))
        return self._observe(), reward, terminated, truncated, self._infos(reports)

    def call(self, name: str, *_: Any, **__: Any) -> tuple[Any, ...]:
        """Only `episode_state`: how far each environment is with its jobs, and what it did in the running episode."""
        if name != "episode_state":
            raise ValueError(f"a batched simulator has no single environments to call {name!r} of")
        return tuple(
            {"taken": play.taken, "actions": [action.tolist() for action in play.actions]} for play in self._plays
        )

    def set_attr(self, name: str, values: Any) -> None:
        """Only `resume_from`: what `episode_state` told of each environment, for the next `reset`."""
        if name != "resume_from":
            raise ValueError(f"a batched simulator has no single environments to set {name!r} of")
        self._resume = list(values)

    def close_extras(self, **_: Any) -> None:
        """Close the simulator."""
        self._simulator.close()

    # Within a chunk ------------------------------------------------------------------------------------------------

    def _step_once(
        self,
        action: np.ndarray,
        running: np.ndarray,
        reward: np.ndarray,
        terminated: np.ndarray,
        reports: list[dict[str, Any]],
    ) -> np.ndarray:
        """One environment step where episodes run; where they ended in it, bool `[N]`."""
        gain, done, success = self._simulator.step(action, running)
        ended = np.zeros(self.num_envs, dtype=bool)
        for row in np.flatnonzero(running):
            play, report = self._plays[row], reports[row]
            play.steps += 1
            play.total += float(gain[row])
            play.success_at_end = bool(success[row])
            if play.success_step is None and play.success_at_end:
                play.success_step = play.steps
            reward[row] += gain[row]
            report["executed"] += 1
            report["success"] = report["success"] or play.success_at_end
            terminated[row] = done[row]
            ended[row] = done[row] or play.steps >= self._limit
        return ended

    def _close_episodes(self, rows: np.ndarray, truncated: np.ndarray, reports: list[dict[str, Any]]) -> None:
        """Report the episodes that ended in this step, with what they showed last."""
        shown = self._simulator.observe()
        for row in rows:
            play = self._plays[row]
            episode = Episode(
                job=play.job,
                success=play.success_step is not None,
                success_at_end=play.success_at_end,
                steps=play.steps,
                total_reward=play.total,
                truncated=bool(truncated[row]),
                success_step=play.success_step,
            )
            reports[row] |= {"final_info": {"episode": episode}, "final_obs": _row(shown, row)}

    def _next(self, rows: Iterable[int]) -> None:
        """Begin the next jobs of some environments."""
        begun = [(int(row), job) for row in rows if (job := self._plays[row].next()) is not None]
        if begun:
            self._simulator.begin([row for row, _ in begun], [job for _, job in begun])

    def _replay(self, states: list[dict[str, Any]]) -> None:
        """Skip the jobs that were played, begin those that ran, and replay their actions, all up to the same moment."""
        for play, state in zip(self._plays, states, strict=True):
            while play.taken < state["taken"] - 1:
                play.next()
            play.job = None  # rests until its turn comes
        for left in range(max(len(state["actions"]) for state in states), -1, -1):
            self._next([row for row, state in enumerate(states) if len(state["actions"]) == left])
            if left:
                actions = np.zeros(self.action_space.shape, dtype=self.action_space.dtype)
                for row, state in enumerate(states):
                    if len(state["actions"]) >= left:
                        actions[row] = state["actions"][-left]
                self.step(actions)

    def _observe(self) -> dict[str, Any]:
        """What all environments show; nothing where no episode runs."""
        shown = self._simulator.observe()
        for row, play in enumerate(self._plays):
            if play.job is None:
                _blank(shown, row)
        return shown

    def _infos(self, reports: list[dict[str, Any]]) -> dict[str, Any]:
        infos: dict[str, Any] = {}
        for row, (play, report) in enumerate(zip(self._plays, reports, strict=True)):
            infos = self._add_info(infos, {**report, "idle": play.job is None}, row)
        return infos


def _row(shown: dict[str, Any], row: int) -> dict[str, Any]:
    """One environment's observation out of a stacked one."""
    return {key: _row(part, row) if isinstance(part, dict) else part[row].copy() for key, part in shown.items()}


def _blank(shown: dict[str, Any], row: int) -> None:
    """Set one environment's observation to zeros."""
    for part in shown.values():
        if isinstance(part, dict):
            _blank(part, row)
        else:
            part[row] = 0
