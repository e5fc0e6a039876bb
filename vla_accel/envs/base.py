"""The environment contract, the two wrappers that every simulator gets, and what the loop reads from a vector env.

Not here: simulators (one file each), building them (`make.py`), job streams (`jobs.py`), the check (`checks.py`).
Usage: `EpisodeQueue(ActionChunk(TimeLimit(simulator, 16), 4), jobs)`, then only `reset()` and `step(actions)`.

The contract. A simulator is a `gymnasium.Env` with

| part | rule |
|---|---|
| `observation_space["images"]` | `Dict` of camera name -> `Box` uint8 `[P, P, 3]`: RGB, upright, in a fixed order |
| `observation_space["state"]` | `Box` float32 `[Q]`: proprioception |
| `observation_space["task_id"]` | `Discrete`: index into `instructions` (text does not fit into shared memory) |
| `action_space` | `Box` float32 `[A]`; the simulator clips what lies outside |
| `instructions` | `list[str]`, one per task id, fixed for the life of the environment |
| `state_ids` | `{"train": range, "eval": range}`: ids of initial states, disjoint |
| `reset(seed=, options=)` | `options={"task_id": int, "state_id": int}`; equal arguments start equal episodes |
| `step(action)` | new arrays each time; `terminated` only by the task, `truncated` left to the time limit |
| `info["success"]` | bool on every step: is the task solved now |

and, where it has them,

| optional part | meaning |
|---|---|
| `max_episode_steps` | its usual time limit, in environment steps |
| `vectorization` | `"sync"`, `"async"` (the default) or `"batched"`: how `make_vector_env` runs several of them |
| `batch(num_envs)` | one simulator that steps many environments at once, for `"batched"`; see `batched.py` |
| `slow_task_change` | True: another task takes seconds, so that each environment should keep to one if it can |
| `render()` | a picture uint8 `[H, W, 3]` for films, where `render_mode` is `"rgb_array"` |
| `set_rendering(on)` | switch the cameras; while off, `step` may return black images |
| `render_observation()` | the current observation with images, without a step; goes with `set_rendering` |

The constructor is cheap and builds the simulator in the first `reset`: it also runs in the parent process, which only
wants to know the spaces, and a graphics context must not cross into a worker.
`check_env` explains every rule that an environment breaks.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import gymnasium as gym
import numpy as np

from vla_accel.envs.checks import check_env
from vla_accel.envs.jobs import deal, evaluation_jobs, training_jobs
from vla_accel.types import Episode, Job, Observation

__all__ = [
    "ActionChunk",
    "EpisodeQueue",
    "StepInfo",
    "check_env",
    "deal",
    "evaluation_jobs",
    "read_idle",
    "read_step",
    "stack_final",
    "to_observation",
    "training_jobs",
]


def to_action(action: Any, space: gym.Space, *, shape: str) -> np.ndarray:
    """What a policy returned as an action of a space.

    Raises:
        ValueError: if the shape, which `shape` puts in words, differs or a number is not finite.
    """
    action = np.asarray(action, dtype=space.dtype)
    if action.shape != space.shape:
        raise ValueError(f"expected actions of shape {shape} = {space.shape}, got {action.shape}")
    if not np.isfinite(action).all():
        raise ValueError("the policy returned an action that is not finite; look at the loss of the last updates")
    return action


class ActionChunk(gym.Wrapper):
    """Executes K actions per step and stops at the episode's end, so that no action leaks into the next episode.

    The reward is the undiscounted sum over the executed steps. The info is the last executed step's, plus `executed`
    (1..K), `success` (any executed step solved the task), `success_step` (the first that did, 1..K, or None) and
    `success_at_end` (the last one did). Cameras are off except in the chunk's last step, if the simulator can do that.

    Args:
        env: an environment with a flat `Box` action space `[A]`.
        chunk_size: K.

    Attributes:
        frames: None, or a list that gets `env.render()` after each executed step, for films.

    Raises:
        ValueError: if `chunk_size` is less than 1 or the action space is no flat `Box`.
    """

    def __init__(self, env: gym.Env, chunk_size: int):
        super().__init__(env)
        space = env.action_space
        if chunk_size < 1:
            raise ValueError(f"chunk_size must be at least 1, got {chunk_size}")
        if not isinstance(space, gym.spaces.Box) or len(space.shape) != 1:
            raise ValueError(f"ActionChunk needs a Box action space of shape [A], got {space}")
        self.chunk_size = chunk_size
        self.frames: list[np.ndarray] | None = None
        low, high = (np.tile(bound, (chunk_size, 1)) for bound in (space.low, space.high))
        self.action_space = gym.spaces.Box(low, high, dtype=space.dtype)
        switchable = chunk_size > 1 and env.has_wrapper_attr("set_rendering")
        self._set_rendering = env.get_wrapper_attr("set_rendering") if switchable else None

    def step(self, action: np.ndarray) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Execute up to K actions.

        Args:
            action: float `[K, A]`, in environment units.

        Raises:
            ValueError: if the shape differs or a number is not finite.
        """
        action = to_action(action, self.action_space, shape="[K, A]")
        total, success_step = 0.0, None
        if self._set_rendering:
            self._set_rendering(False)
        for executed, row in enumerate(action, start=1):
            if self._set_rendering and executed == self.chunk_size:
                self._set_rendering(True)
            obs, reward, terminated, truncated, info = self.env.step(row)
            if self.frames is not None:
                self.frames.append(self.env.render())
            total += float(reward)
            if success_step is None and info["success"]:
                success_step = executed
            if terminated or truncated:
                break
        if self._set_rendering and executed < self.chunk_size:
            self._set_rendering(True)
            obs = self.env.get_wrapper_attr("render_observation")()
        info = {
            **info,
            "executed": executed,
            "success": success_step is not None,
            "success_step": success_step,
            "success_at_end": bool(info["success"]),
        }
        return obs, total, bool(terminated), bool(truncated), info


class EpisodeQueue(gym.Wrapper):
    """Plays one job after the other: each `reset()` starts the next, without arguments.

    When no job is left the environment is idle: `reset` and `step` return an observation of zeros, reward 0 and no end,
    and the simulator rests. So any number of jobs fits any number of environments.

    The info of a step holds `executed` (0 when idle), `success`, `idle`, and at an episode's end `episode`, a
    `vla_accel.types.Episode`; the info of a reset holds `idle`. Other keys of the simulator stop here, since vector
    environments can only stack what all of them report with one type. An end by the task is never also a truncation.

    Args:
        env: an `ActionChunk`.
        jobs: jobs to play, endless or not; None lets the environment rest until the next `reset()`.
    """

    def __init__(self, env: gym.Env, jobs: Iterable[Job | None]):
        super().__init__(env)
        self._jobs = iter(jobs)
        self._job: Job | None = None
        self._taken = 0
        self._actions: list[np.ndarray] = []
        self.resume_from: dict[str, Any] | None = None
        self._steps, self._total = 0, 0.0
        self._success_step: int | None = None

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Start the next job.

        Raises:
            ValueError: if given a seed or options, since the jobs decide both.
        """
        if seed is not None or options:
            raise ValueError(f"the jobs decide seeds and options: call reset() plainly, got {seed=}, {options=}")
        if self.resume_from is not None:
            return self._resume()
        self._job = next(self._jobs, None)
        self._taken += 1
        self._actions = []
        self._steps, self._total, self._success_step = 0, 0.0, None
        if self._job is None:
            return zeros(self.observation_space), {"idle": True}
        options = {"task_id": self._job.task_id, "state_id": self._job.state_id}
        obs, _ = self.env.reset(seed=self._job.seed, options=options)
        return obs, {"idle": False}

    def step(self, action: np.ndarray) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Execute one chunk `[K, A]`, or nothing when idle."""
        if self._job is None:
            return zeros(self.observation_space), 0.0, False, False, {"executed": 0, "success": False, "idle": True}
        self._actions.append(np.array(action))
        obs, reward, terminated, truncated, info = self.env.step(action)
        truncated = truncated and not terminated
        executed, success = int(info["executed"]), bool(info["success"])
        if self._success_step is None and success:
            self._success_step = self._steps + info["success_step"]
        self._steps += executed
        self._total += reward
        report: dict[str, Any] = {"executed": executed, "success": success, "idle": False}
        if terminated or truncated:
            report["episode"] = Episode(
                job=self._job,
                success=self._success_step is not None,
                success_at_end=bool(info["success_at_end"]),
                steps=self._steps,
                total_reward=self._total,
                truncated=truncated,
                success_step=self._success_step,
            )
        return obs, reward, terminated, truncated, report

    def episode_state(self) -> dict[str, Any]:
        """How far the jobs are and what was done in the running episode; set it as `resume_from` and reset to return.

        The simulator itself is not stored: replaying the actions brings a deterministic one back to the same state.
        """
        return {"taken": self._taken, "actions": [action.tolist() for action in self._actions]}

    def _resume(self) -> tuple[Any, dict[str, Any]]:
        """Skip the jobs that were played, start the one that ran, and replay its actions."""
        state, self.resume_from = self.resume_from, None
        for _ in range(state["taken"] - 1 - self._taken):
            next(self._jobs, None)
        self._taken = max(self._taken, state["taken"] - 1)
        obs, info = self.reset()
        for action in state["actions"]:
            obs, *_, info = self.step(np.asarray(action, dtype=self.action_space.dtype))
        return obs, {"idle": info["idle"]}


@dataclass(frozen=True, kw_only=True)
class StepInfo:
    """What a step of the vector environment reports beside its five results.

    Attributes:
        executed: int64 `[N]`, environment steps executed, 0..K; 0 where the environment was idle or the decision lost
            with its worker. Only a decision with more than 0 is a sample.
        idle: bool `[N]`, no episode runs after this step: what the next decision does there counts for nothing.
        episodes: (environment, record) of each episode that ended.
        final_obs: (environment, single observation): the last observation of each episode that ended. The stacked
            observation of the same step already shows the next episode.
        voided: int64 `[N]`, episodes lost to a worker that failed; their jobs are played again.
    """

    executed: np.ndarray
    idle: np.ndarray
    voided: np.ndarray
    episodes: list[tuple[int, Episode]] = field(default_factory=list)
    final_obs: list[tuple[int, dict[str, Any]]] = field(default_factory=list)


def read_step(infos: dict[str, Any], num_envs: int) -> StepInfo:
    """Read the infos of a step of a vector environment in `AutoresetMode.SAME_STEP`.

    Where an episode ended, `infos` describe the reset and `infos["final_info"]` the step.

    Args:
        infos: as returned by `step`.
        num_envs: N.

    Raises:
        RuntimeError: if the environments do not report what `EpisodeQueue` does.
    """
    final = infos.get("final_info", {})
    executed = np.zeros(num_envs, dtype=np.int64)
    known = np.zeros(num_envs, dtype=bool)
    for source in (infos, final):
        if "executed" in source:
            mask = source["_executed"]
            executed[mask] = source["executed"][mask]
            known |= mask
    if not known.all():
        raise RuntimeError(
            f"environments {np.flatnonzero(~known).tolist()} did not report `executed`; wrap each in EpisodeQueue and "
            "use AutoresetMode.SAME_STEP, as make_vector_env does"
        )
    ended = np.flatnonzero(infos.get("_final_obs", np.zeros(num_envs, dtype=bool))).tolist()
    return StepInfo(
        executed=executed,
        idle=read_idle(infos, num_envs),
        voided=np.array(infos.get("voided", np.zeros(num_envs)), dtype=np.int64),
        episodes=[(index, final["episode"][index]) for index in ended],
        final_obs=[(index, infos["final_obs"][index]) for index in ended],
    )


def read_idle(infos: dict[str, Any], num_envs: int) -> np.ndarray:
    """Which environments have no episode to play, bool `[N]`, from the infos of a `reset` or a `step`."""
    if "idle" not in infos or not infos["_idle"].all():
        raise RuntimeError(f"not all of {num_envs} environments reported `idle`; wrap each in EpisodeQueue")
    return np.array(infos["idle"], dtype=bool)


def to_observation(obs: dict[str, Any], instructions: list[str]) -> Observation:
    """Turn stacked observations of a vector environment into the record that policies take.

    Args:
        obs: `images` camera -> uint8 `[N, P, P, 3]`, `state` float32 `[N, Q]`, `task_id` int `[N]`.
        instructions: the environment's table, indexed by task id.
    """
    return Observation(
        images=dict(obs["images"]),
        state=obs["state"],
        instructions=[instructions[task_id] for task_id in obs["task_id"]],
    )


def stack_final(final_obs: list[tuple[int, dict[str, Any]]]) -> dict[str, Any]:
    """Stack the final observations of a `StepInfo` in its order, ready for `to_observation`.

    Raises:
        ValueError: if there are none.
    """
    if not final_obs:
        raise ValueError("no episode ended in this step, so there is nothing to stack")
    singles = [obs for _, obs in final_obs]
    return {
        "images": {camera: np.stack([obs["images"][camera] for obs in singles]) for camera in singles[0]["images"]},
        "state": np.stack([obs["state"] for obs in singles]),
        "task_id": np.array([obs["task_id"] for obs in singles], dtype=np.int64),
    }


def zeros(space: gym.Space) -> Any:
    """An observation of zeros: that of an environment in which no episode runs."""
    if isinstance(space, gym.spaces.Dict):
        return {name: zeros(part) for name, part in space.items()}
    if isinstance(space, gym.spaces.Discrete):
        return np.int64(0)
    return np.zeros(space.shape, dtype=space.dtype)
