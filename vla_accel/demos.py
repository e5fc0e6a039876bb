"""Demonstrations: recorded from a simulator's scripted expert, kept as a `datasets` folder, cut into action chunks.

Not here: learning from them (`sft.py`).
Usage: `demos = record(SimulatorConfig(), episodes=1000, seed=0)`, `demos.save(folder)`, `Demonstrations.load(folder)`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from vla_accel.config import SimulatorConfig
from vla_accel.envs.make import make_env
from vla_accel.rules import check
from vla_accel.types import Observation

if TYPE_CHECKING:
    from datasets import Dataset


@dataclass(kw_only=True)
class Demonstrations:
    """F frames of recorded episodes, in the order they were played.

    Attributes:
        images: camera -> uint8 `[F, P, P, 3]`.
        state: float32 `[F, Q]`.
        action: float32 `[F, A]`, what the expert would do in this frame, in environment units.
        task_id: int64 `[F]`.
        episode: int64 `[F]`, counted from 0.
        success: bool `[F]`, whether the frame's episode solved its task.
        instructions: indexed by task id.
    """

    images: dict[str, np.ndarray]
    state: np.ndarray
    action: np.ndarray
    task_id: np.ndarray
    episode: np.ndarray
    success: np.ndarray
    instructions: list[str]

    def __len__(self) -> int:
        return len(self.episode)

    def observation(self, index: np.ndarray) -> Observation:
        """The frames in `index` as a policy sees them."""
        return Observation(
            images={name: image[index] for name, image in self.images.items()},
            state=self.state[index],
            instructions=[self.instructions[task] for task in self.task_id[index]],
        )

    def successful(self) -> Demonstrations:
        """The episodes that solved their task.

        Raises:
            ValueError: when there is none.
        """
        keep = self.success
        if not keep.any():
            raise ValueError("None of the demonstrations solved its task, and --data.keep_failures is False.")
        return Demonstrations(
            images={name: image[keep] for name, image in self.images.items()},
            state=self.state[keep],
            action=self.action[keep],
            task_id=self.task_id[keep],
            episode=self.episode[keep],
            success=keep[keep],
            instructions=self.instructions,
        )

    def chunk(self, index: np.ndarray, size: int) -> np.ndarray:
        """The expert's next `size` actions from each frame, float32 `[B, K, A]`.

        Past its end an episode repeats its last action.
        """
        ahead = index[:, None] + np.arange(size)
        last = np.searchsorted(self.episode, self.episode[index], side="right") - 1
        return self.action[np.minimum(ahead, last[:, None])]

    def save(self, folder: str | Path) -> None:
        """Write a folder for `datasets.load_from_disk`: one row per frame, images as PNG."""
        from datasets import Dataset, Features, Image, List, Value

        features: dict[str, Any] = {f"image.{name}": Image() for name in self.images}
        features |= {"state": List(Value("float32")), "action": List(Value("float32"))}
        features |= {"task_id": Value("int64"), "episode": Value("int64"), "success": Value("bool")}
        features |= {"instruction": Value("string")}
        data = Dataset.from_generator(self._rows, features=Features(features))
        data.info.description = "\n".join(self.instructions)
        data.save_to_disk(str(folder))

    def _rows(self) -> Iterator[dict[str, Any]]:
        for i in range(len(self)):
            yield {
                **{f"image.{name}": image[i] for name, image in self.images.items()},
                "state": self.state[i],
                "action": self.action[i],
                "task_id": int(self.task_id[i]),
                "episode": int(self.episode[i]),
                "success": bool(self.success[i]),
                "instruction": self.instructions[int(self.task_id[i])],
            }

    @classmethod
    def load(cls, folder: str | Path) -> Demonstrations:
        """Read what `save` wrote.

        Raises:
            ValueError: when the folder is missing or holds something else.
        """
        data = open_demonstrations(folder).with_format("numpy")
        names = [name for name in data.column_names if name.startswith("image.")]
        return cls(
            images={name.removeprefix("image."): np.stack(list(data[name])).astype(np.uint8) for name in names},
            state=np.asarray(data["state"], np.float32),
            action=np.asarray(data["action"], np.float32),
            task_id=np.asarray(data["task_id"], np.int64),
            episode=np.asarray(data["episode"], np.int64),
            success=np.asarray(data["success"], bool),
            instructions=data.info.description.split("\n"),
        )


def open_demonstrations(folder: str | Path) -> Dataset:
    """Find out whether a folder holds demonstrations, without reading its frames.

    Raises:
        ValueError: when it is missing or holds something else.
    """
    from datasets import Dataset, load_from_disk

    rule = "must be a folder written by record_demos.py"
    try:
        data = load_from_disk(str(folder))
    except (OSError, ValueError, KeyError) as error:  # missing, of another kind, or cut short
        reason = f"({type(error).__name__}: {str(error).splitlines()[0][:200]})"
        check(False, "data.path", rule, str(folder), reason)
    check(isinstance(data, Dataset), "data.path", rule, str(folder), "It holds several data sets.")
    wanted = {"state", "action", "task_id", "episode", "success", "instruction"}
    found = data.column_names
    check(wanted <= set(found), "data.path", f"must hold the columns {', '.join(sorted(wanted))}", found)
    return data


def record(
    config: SimulatorConfig,
    *,
    episodes: int,
    seed: int,
    speed: float = 1.0,
    speed_jitter: float = 0.0,
    noise: float = 0.0,
) -> Demonstrations:
    """Let a simulator's scripted expert play training states.

    Args:
        config: which environment; it must have a method `expert_action(speed=...)`.
        episodes: how many.
        seed: of the choice of tasks and states, and of the noise.
        speed: how fast the expert moves, as a share of the largest step.
        speed_jitter: standard deviation of the logarithm of each step's own factor on the speed.
        noise: standard deviation of Gaussian noise on the executed actions. The recorded action stays the expert's
            own, so that the data shows how to come back from a mistake (arXiv 1703.09327).

    Raises:
        ValueError: when the environment has no expert.
    """
    env = make_env(config.name, **config.parsed_options())
    core: Any = env.unwrapped
    check(hasattr(core, "expert_action"), "env.name", "must name an environment with a scripted expert", config.name)
    limit = config.max_episode_steps or core.max_episode_steps
    states = core.state_ids["train"]
    rng = np.random.default_rng([21, seed])
    frames: list[dict[str, Any]] = []
    try:
        for episode in range(episodes):
            task = episode % len(core.instructions)
            state_id = int(states[rng.integers(len(states))])
            obs, _ = env.reset(seed=int(rng.integers(2**31)), options={"task_id": task, "state_id": state_id})
            first = len(frames)
            for _ in range(limit):
                pace = min(1.0, speed * float(np.exp(speed_jitter * rng.standard_normal())))
                action = core.expert_action(speed=pace)
                frames.append({"obs": obs, "action": action, "task_id": task, "episode": episode})
                executed = action + noise * rng.standard_normal(action.shape)
                low, high = env.action_space.low, env.action_space.high
                obs, _, terminated, truncated, info = env.step(np.clip(executed, low, high).astype(np.float32))
                if terminated or truncated:
                    break
            for frame in frames[first:]:
                frame["success"] = bool(info["success"])
    finally:
        env.close()
    observations = [frame["obs"] for frame in frames]
    return Demonstrations(
        images={name: np.stack([obs["images"][name] for obs in observations]) for name in observations[0]["images"]},
        state=np.stack([obs["state"] for obs in observations]).astype(np.float32),
        action=np.stack([frame["action"] for frame in frames]).astype(np.float32),
        task_id=np.array([frame["task_id"] for frame in frames]),
        episode=np.array([frame["episode"] for frame in frames]),
        success=np.array([frame["success"] for frame in frames]),
        instructions=list(core.instructions),
    )
