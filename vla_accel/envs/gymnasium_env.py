"""Any registered Gymnasium environment with continuous actions, as `gym:<id>`.

The adapter gives it what a policy for instructions needs: pictures, a state vector, one task with one instruction, and
numbered initial states (the state id becomes the seed).

Not here: simulators with many tasks, which deserve an adapter of their own; docs/custom_env.md shows one.
Usage: `make_env("gym:FetchReach-v4", instruction="move the gripper to the red ball")`. An id may name the module that
registers it: `gym:gymnasium_robotics:FetchReach-v4`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import gymnasium as gym
import numpy as np
from PIL import Image

from vla_accel.envs.arguments import check_count, check_option, episode_of, observations
from vla_accel.envs.graphics import prepare_graphics

SUCCESS_KEYS = ("is_success", "success")


class GymnasiumEnv(gym.Env):
    """One registered environment, with one task.

    Args:
        env_id: as for `gymnasium.make`.
        instruction: what the policy is told; None: the words of the id.
        image_key: key of the picture in the observation; None: what `render()` gives, or the observation itself where
            that is a picture.
        state_key: key or keys of the state in the observation; None: all of it that is a vector. Where there is none,
            the state is one 0.
        success_key: key in the step's info that says whether the task is solved; None: `is_success` or `success`, any.
        success_ends: end the episode when the task is solved.
        scale_actions: let actions of -1..1 span the environment's own bounds. False: actions are in its own units.
        image_size: P; pictures that are not square get black borders.
        make: further arguments for `gymnasium.make`.

    Raises:
        ValueError: naming the option that does not fit the environment.
    """

    metadata: ClassVar[dict[str, Any]] = {"render_modes": ["rgb_array"]}
    render_mode = "rgb_array"

    def __init__(
        self,
        env_id: str,
        /,
        *,
        instruction: str | None = None,
        image_key: str | None = None,
        state_key: str | Sequence[str] | None = None,
        success_key: str | None = None,
        success_ends: bool = True,
        scale_actions: bool = False,
        image_size: int = 128,
        make: Mapping[str, Any] | None = None,
    ):
        check_count("image_size", image_size, least=16)
        for name, text in (("instruction", instruction), ("image_key", image_key), ("success_key", success_key)):
            check_option(name, text is None or isinstance(text, str), "be a text", text)
        listed = isinstance(state_key, Sequence) and all(isinstance(key, str) for key in state_key)
        check_option("state_key", state_key is None or listed, "be a key or a list of keys", state_key)
        for name, flag in (("success_ends", success_ends), ("scale_actions", scale_actions)):
            check_option(name, isinstance(flag, bool), "be true or false", flag)
        check_option("make", make is None or isinstance(make, Mapping), "be an object of arguments", make)
        self._id, self._make = env_id, dict(make or {})
        self.image_key, self.success_key, self.success_ends = image_key, success_key, success_ends
        self.image_size = image_size
        self.instructions = [instruction or _words(env_id)]
        self.state_ids = {"train": range(1000, 1_000_000), "eval": range(1000)}
        self._env: gym.Env | None = None
        self._rendering, self._obs = True, None
        probe = self._build()
        try:
            limit = gym.spec(env_id.rpartition(":")[2]).max_episode_steps
            if limit is not None:
                self.max_episode_steps = int(limit)
            own = probe.action_space
            if not isinstance(own, gym.spaces.Box) or len(own.shape) != 1:
                raise ValueError(f"gym:{env_id} must have a Box action space of shape [A], has {own}")
            low, high = own.low.astype(np.float32), own.high.astype(np.float32)
            if scale_actions and not (np.isfinite(low).all() and np.isfinite(high).all()):
                raise ValueError(f"scale_actions needs finite bounds, but gym:{env_id} has {own}")
            self._scale = ((high - low) / 2, (high + low) / 2) if scale_actions else None
            self._own_actions = own
            self.action_space = gym.spaces.Box(-1.0, 1.0, own.shape) if scale_actions else gym.spaces.Box(low, high)
            self._state_keys = self._choose_state(probe.observation_space, state_key)
            self._shows_itself = _is_picture(probe.observation_space)
            size = sum(int(np.prod(box.shape)) for box in self._vectors(probe.observation_space))
        finally:
            probe.close()
        self.observation_space = observations(["main"], image_size, state_size=max(size, 1), num_tasks=1)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Start the episode of an initial state.

        Args:
            seed: decides the state where `options` name none.
            options: `task_id` (0) and `state_id`, which seeds the environment; drawn at random out of "train" where
                missing.

        Raises:
            ValueError: if an option is unknown or an id out of range.
        """
        super().reset(seed=seed)
        train = self.state_ids["train"]
        _, state_id = episode_of(options, self.np_random, num_tasks=1, train=train, end=train.stop)
        if self._env is None:
            self._env = self._build()
        self._obs, _ = self._env.reset(seed=state_id)
        return self.render_observation(), {"success": False}

    def step(self, action: np.ndarray) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Execute an action `[A]`, clipped to the bounds."""
        if self._env is None:
            raise RuntimeError("call reset() before the first step()")
        action = np.clip(action, self.action_space.low, self.action_space.high)
        if self._scale is not None:
            action = action * self._scale[0] + self._scale[1]
        self._obs, reward, terminated, truncated, info = self._env.step(action.astype(self._own_actions.dtype))
        success = self._success(info)
        ended = bool(terminated) or (success and self.success_ends)
        return self._observe(blank=not self._rendering), float(reward), ended, bool(truncated), {"success": success}

    def render(self) -> np.ndarray:
        """What the environment's own `render()` gives, for films."""
        return np.asarray(self._env.render())

    def set_rendering(self, on: bool) -> None:
        """Switch the camera; while off, `step` returns black images."""
        self._rendering = on

    def render_observation(self) -> dict[str, Any]:
        """The current observation, with its image."""
        return self._observe(blank=False)

    def close(self) -> None:
        """Close the environment."""
        if self._env is not None:
            self._env.close()
            self._env = None

    def _build(self) -> gym.Env:
        prepare_graphics(required=False)
        os.environ.setdefault("SDL_VIDEODRIVER", "dummy")
        arguments = {"render_mode": "rgb_array", "max_episode_steps": -1, "disable_env_checker": True, **self._make}
        try:
            return gym.make(self._id, **arguments)
        except (gym.error.Error, ModuleNotFoundError, TypeError) as error:  # TypeError: for arguments it does not take
            raise ValueError(f"gym:{self._id} cannot be made: {error}") from error

    def _choose_state(self, space: gym.Space, wanted: str | Sequence[str] | None) -> list[str] | None:
        """Keys of the observation that make the state; None where the observation is the state itself."""
        if not isinstance(space, gym.spaces.Dict):
            if wanted is not None or self.image_key is not None:
                raise ValueError(f"state_key and image_key need a Dict observation, but gym:{self._id} has {space}")
            if not _is_vector(space) and not _is_picture(space):
                raise ValueError(f"gym:{self._id} must observe a vector, a picture or a Dict, observes {space}")
            return None if _is_vector(space) else []
        if self.image_key is not None and self.image_key not in space.spaces:
            raise ValueError(f"image_key must be one of {sorted(space)}, got {self.image_key!r}")
        vectors = [key for key, box in space.items() if _is_vector(box)]
        if wanted is None:
            return vectors
        keys = [wanted] if isinstance(wanted, str) else list(wanted)
        if not keys or not set(keys) <= set(vectors):
            raise ValueError(f"state_key must be one or more of {sorted(vectors)}, got {wanted!r}")
        return keys

    def _vectors(self, obs: Any) -> list[Any]:
        return [obs] if self._state_keys is None else [obs[key] for key in self._state_keys]

    def _success(self, info: Mapping[str, Any]) -> bool:
        if self.success_key is not None and self.success_key not in info:
            raise ValueError(f"success_key must be one of the info's {sorted(info)}, got {self.success_key!r}")
        keys = SUCCESS_KEYS if self.success_key is None else (self.success_key,)
        return any(bool(info[key]) for key in keys if key in info)

    def _observe(self, *, blank: bool) -> dict[str, Any]:
        vectors = self._vectors(self._obs) or [np.zeros(1)]
        state = np.concatenate([np.asarray(part, dtype=np.float32).ravel() for part in vectors])
        size = self.image_size
        picture = np.zeros((size, size, 3), np.uint8) if blank else square(self._picture(), size)
        return {"images": {"main": picture}, "state": state, "task_id": np.int64(0)}

    def _picture(self) -> Any:
        if self._shows_itself:
            return self._obs
        return self._env.render() if self.image_key is None else self._obs[self.image_key]


def _is_vector(space: gym.Space) -> bool:
    return isinstance(space, gym.spaces.Box) and len(space.shape) == 1


def _is_picture(space: gym.Space) -> bool:
    return isinstance(space, gym.spaces.Box) and space.dtype == np.uint8 and space.shape[2:] == (3,)


def square(picture: Any, size: int) -> np.ndarray:
    """A picture uint8 `[H, W, 3]` as `[size, size, 3]`, with black borders where it is not square."""
    picture = np.asarray(picture)
    if picture.dtype != np.uint8 or picture.ndim != 3 or picture.shape[2] != 3:
        raise ValueError(f"a picture must be uint8 [H, W, 3], got {picture.dtype} {list(picture.shape)}")
    height, width = picture.shape[:2]
    if (height, width) == (size, size):
        return picture.copy()
    scale = size / max(height, width)
    inner = (max(1, round(width * scale)), max(1, round(height * scale)))
    canvas = Image.new("RGB", (size, size))
    resized = Image.fromarray(picture).resize(inner, Image.Resampling.BILINEAR)
    canvas.paste(resized, ((size - inner[0]) // 2, (size - inner[1]) // 2))
    return np.array(canvas)


def _words(env_id: str) -> str:
    """An id in words: `gym_pusht/PushT-v0` is "push t"."""
    name = env_id.rpartition(":")[2].rpartition("/")[2].partition("-v")[0].replace("_", " ").replace("-", " ")
    spaced = "".join(f" {letter}" if letter.isupper() else letter for letter in name)
    return " ".join(spaced.lower().split())
