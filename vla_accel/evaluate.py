"""Scoring a policy: greedy, on held-out initial states, with a confidence interval; and filming it.

Not here: training. Usage: `result = evaluate(accelerator, model, policy, env_config, episodes=100, seed=0)`.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

import gymnasium as gym
import numpy as np
import torch
from torch import nn

from vla_accel.config import EnvConfig
from vla_accel.distributed import gather_objects
from vla_accel.envs.base import deal, evaluation_jobs, read_step, to_observation
from vla_accel.envs.make import make_env, make_vector_env
from vla_accel.modes import rollout_mode
from vla_accel.policies.base import Policy
from vla_accel.rollout import act, start
from vla_accel.types import Episode, Job, Observation

if TYPE_CHECKING:
    from accelerate import Accelerator


def wilson_interval(successes: int, n: int, *, z: float = 1.959964) -> tuple[float, float]:
    """Wilson's score interval of a proportion; z = 1.96 gives 95 %. For n = 0: (0, 1)."""
    if n == 0:
        return 0.0, 1.0
    rate, z2 = successes / n, z * z
    centre = (rate + z2 / (2 * n)) / (1 + z2 / n)
    half = z / (1 + z2 / n) * math.sqrt(rate * (1 - rate) / n + z2 / (4 * n * n))
    return max(0.0, centre - half), min(1.0, centre + half)


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Outcome of an evaluation.

    Attributes:
        episodes: all of them, sorted by task and initial state.
        instructions: of the environment, indexed by task id.
        voided: episodes lost to a simulator that failed; each was played again, so none is missing above.
    """

    episodes: list[Episode]
    instructions: list[str]
    voided: int = 0

    @property
    def success(self) -> float:
        """Share of episodes that solved their task at any step."""
        return sum(e.success for e in self.episodes) / max(len(self.episodes), 1)

    def summary(self, episodes: list[Episode] | None = None) -> dict[str, Any]:
        """Success, interval and steps of some of the episodes (None: of all)."""
        chosen = self.episodes if episodes is None else episodes
        solved = [e for e in chosen if e.success]
        steps = [e.success_step for e in solved if e.success_step is not None]
        low, high = wilson_interval(len(solved), len(chosen))
        return {
            "success": len(solved) / max(len(chosen), 1),
            "n": len(chosen),
            "interval_95": [low, high],
            "success_at_end": sum(e.success_at_end for e in chosen) / max(len(chosen), 1),
            "median_steps_to_success": median(steps) if steps else None,
        }

    def to_dict(self) -> dict[str, Any]:
        """Everything, ready for JSON: overall, per task, and each episode with its state id and seed."""
        tasks = sorted({e.job.task_id for e in self.episodes})
        names = [self.instructions[task] for task in tasks]
        # Different tasks of LIBERO-90 share their words.
        names = [
            f"{name} (task {task})" if names.count(name) > 1 else name for task, name in zip(tasks, names, strict=True)
        ]
        return {
            **self.summary(),
            "voided": self.voided,
            "tasks": {
                name: self.summary([e for e in self.episodes if e.job.task_id == task])
                for task, name in zip(tasks, names, strict=True)
            },
            "episodes": [
                {
                    "task_id": e.job.task_id,
                    "state_id": e.job.state_id,
                    "seed": e.job.seed,
                    "success": e.success,
                    "success_at_end": e.success_at_end,
                    "success_step": e.success_step,
                    "steps": e.steps,
                }
                for e in self.episodes
            ],
        }

    def table(self) -> str:
        """A table of success per task."""
        result = self.to_dict()
        rows = [*result["tasks"].items(), ("all", result)]
        width = max(len(name) for name, _ in rows)
        lines = [f"{'task':<{width}}  success      n  95 % interval   at end  median steps"]
        for name, row in rows:
            low, high = row["interval_95"]
            steps = "-" if row["median_steps_to_success"] is None else f"{row['median_steps_to_success']:g}"
            lines.append(
                f"{name:<{width}}  {row['success']:7.1%}  {row['n']:5d}  {low:6.1%} .. {high:6.1%}"
                f"  {row['success_at_end']:6.1%}  {steps:>12}"
            )
        if self.voided:
            lines.append(f"Episodes lost to a simulator that failed, and played again: {self.voided}.")
        return "\n".join(lines)


@torch.no_grad()
def evaluate(
    accelerator: Accelerator,
    model: nn.Module,
    policy: Policy,
    config: EnvConfig,
    *,
    episodes: int,
    seed: int = 0,
    split: str = "eval",
    blank: str = "none",
) -> Evaluation:
    """Play held-out episodes greedily. Collective: call on every rank; the ranks share the episodes.

    Args:
        accelerator: from `make_accelerator`.
        model: the policy as prepared.
        policy: the policy inside `model`.
        config: which environment.
        episodes: over all ranks, spread evenly over the tasks.
        seed: of the environments.
        split: "eval" for held-out initial states, "train" for those to train on, by which one may choose settings.
        blank: "image" or "instruction" hides that from the policy (a control), "none" nothing.

    Returns:
        The same on every rank.
    """
    jobs, instructions = _jobs(config, episodes=episodes, seed=seed, split=split)
    own = deal(jobs, accelerator.num_processes)[accelerator.process_index]
    own.sort(key=lambda job: job.task_id)  # in some simulators another task takes long
    num_envs = max(1, min(len(own), config.num_envs // accelerator.num_processes))
    borders = [len(own) * number // num_envs for number in range(num_envs + 1)]
    envs = make_vector_env(
        config.name,
        num_envs=num_envs,
        chunk_size=config.chunk_size or policy.chunk_size,
        jobs=[own[begin:end] for begin, end in itertools.pairwise(borders)],
        max_episode_steps=config.max_episode_steps,
        vectorization=None if config.vectorization == "auto" else config.vectorization,
        env_options=config.parsed_options(),
        timeout_s=config.timeout_s,
    )
    try:
        with rollout_mode(model):
            played = play(model, policy, envs, device=accelerator.device, blank=blank)
    finally:
        envs.close()
    parts = gather_objects(accelerator, played)
    everything = [episode for episodes, _ in parts for episode in episodes]
    everything.sort(key=lambda e: (e.job.task_id, e.job.state_id, e.job.seed))
    return Evaluation(episodes=everything, instructions=instructions, voided=sum(voided for _, voided in parts))


@dataclass(frozen=True, kw_only=True)
class Film:
    """One episode in pictures.

    Attributes:
        frames: uint8 `[P, P, 3]` each, after each executed environment step.
        episode: what was played, and how it ended.
        instruction: what the policy was told.
    """

    frames: list[np.ndarray]
    episode: Episode
    instruction: str


def can_film(config: EnvConfig) -> bool:
    """Whether the environment's `render()` gives pictures (`render_mode` is "rgb_array")."""
    env = make_env(config.name, **config.parsed_options())
    try:
        return env.render_mode == "rgb_array"
    finally:
        env.close()


@torch.no_grad()
def film(
    model: nn.Module,
    policy: Policy,
    config: EnvConfig,
    *,
    device: torch.device,
    episodes: int,
    seed: int = 0,
    split: str = "eval",
    task_id: int | None = None,
    blank: str = "none",
) -> list[Film]:
    """Play held-out episodes greedily, side by side in this process, and film them: the first ones of `evaluate`.

    Not collective. A sharded model must be in `rollout_mode`, which every rank enters; one of them may then film.

    Args:
        model: the policy as prepared.
        policy: the policy inside `model`.
        config: which environment; `can_film` must hold.
        device: of the model.
        episodes: how many; with `task_id`, of that task.
        seed: of the environments.
        split: as for `evaluate`.
        task_id: the only task to film; None: the tasks take turns.
        blank: as for `evaluate`.
    """
    jobs, instructions = _jobs(config, episodes=episodes, seed=seed, split=split, task_id=task_id)
    envs = make_vector_env(
        config.name,
        num_envs=len(jobs),
        chunk_size=config.chunk_size or policy.chunk_size,
        jobs=[[job] for job in jobs],
        max_episode_steps=config.max_episode_steps,
        vectorization="sync",
        env_options=config.parsed_options(),
    )
    frames: list[list[np.ndarray]] = [[] for _ in jobs]
    try:
        for queue, pictures in zip(envs.envs, frames, strict=True):
            queue.env.frames = pictures
        ended, _ = play(model, policy, envs, device=device, blank=blank)
        played = {episode.job: episode for episode in ended}
    finally:
        envs.close()
    return [
        Film(frames=pictures, episode=played[job], instruction=instructions[job.task_id])
        for job, pictures in zip(jobs, frames, strict=True)
    ]


def _jobs(
    config: EnvConfig, *, episodes: int, seed: int, split: str, task_id: int | None = None
) -> tuple[list[Job], list[str]]:
    """Jobs on a split's initial states, of all tasks or of one, and the table of instructions."""
    probe = make_env(config.name, **config.parsed_options())
    try:
        core: Any = probe.unwrapped
        tasks = range(len(core.instructions))
        total = episodes if task_id is None else episodes * len(tasks)
        jobs = evaluation_jobs(task_ids=tasks, state_ids=core.state_ids[split], episodes=total, seed=seed)
        return [job for job in jobs if task_id in (None, job.task_id)], list(core.instructions)
    finally:
        probe.close()


def play(
    model: nn.Module, policy: Policy, envs: gym.vector.VectorEnv, *, device: torch.device, blank: str = "none"
) -> tuple[list[Episode], int]:
    """Act greedily until every environment has played all its jobs. Finished environments cost no forward.

    Returns:
        The episodes in the order they ended, and how many more were lost to a simulator that failed and played again.
    """
    state = start(envs)
    episodes: list[Episode] = []
    shape = (envs.num_envs, *envs.single_action_space.shape)
    while not state.idle.all():
        busy = np.flatnonzero(~state.idle)
        action = np.zeros(shape, dtype=np.float32)
        inputs = policy.prepare(_blanked(state.obs.select(busy), blank))
        with policy.acting_only():
            action[busy] = act(model, inputs, device, greedy=True).action[:, : shape[1]].numpy()
        space = envs.single_action_space
        obs, _, _, _, infos = envs.step(np.clip(action, space.low, space.high))
        info = read_step(infos, envs.num_envs)
        episodes += [episode for _, episode in info.episodes]
        state.voided += int(info.voided.sum())
        state.obs, state.idle = to_observation(obs, envs.instructions), info.idle
    return episodes, state.voided


def _blanked(obs: Observation, blank: str) -> Observation:
    if blank == "image":
        black = {name: np.zeros_like(image) for name, image in obs.images.items()}
        return Observation(images=black, state=obs.state, instructions=obs.instructions)
    if blank == "instruction":
        return Observation(images=obs.images, state=obs.state, instructions=[""] * len(obs))
    return obs
