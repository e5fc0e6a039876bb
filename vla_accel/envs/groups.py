"""Several vector environments as one, whose parts may take turns: one steps while the policy acts for another.

Not here: the turns themselves (`rollout.collect`). Only worker processes really step in the meantime; other vector
environments do so when they are waited for, with the same result.
Usage: `envs = Groups([first, second])`; then `wait = begin_step(envs.parts[0], actions)` and, later, `wait()`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from gymnasium.vector import VectorEnv
from gymnasium.vector.utils import batch_space


class Groups(VectorEnv):
    """Vector environments of the same kind, one after the other.

    Args:
        parts: at least one.

    Attributes:
        parts: as given; each may be stepped alone.
    """

    def __init__(self, parts: Sequence[VectorEnv]):
        self.parts = list(parts)
        self.num_envs = sum(part.num_envs for part in self.parts)
        take_spaces(self, self.parts[0])

    def reset(self, **arguments: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """Reset every part."""
        answers = [part.reset(**arguments) for part in self.parts]
        return join([obs for obs, _ in answers]), self._join_infos([infos for _, infos in answers])

    def step(self, actions: np.ndarray) -> tuple[dict[str, Any], np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        """Step every part, side by side where they can."""
        waits = [begin_step(part, actions[rows]) for part, rows in parts_of(self)]
        obs, reward, terminated, truncated, infos = zip(*[wait() for wait in waits], strict=True)
        ends = (np.concatenate(values) for values in (reward, terminated, truncated))
        return join(obs), *ends, self._join_infos(infos)

    def call(self, name: str, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Call a method of every environment, or read an attribute."""
        return tuple(answer for part in self.parts for answer in part.call(name, *args, **kwargs))

    def get_attr(self, name: str) -> tuple[Any, ...]:
        """An attribute of every environment."""
        return self.call(name)

    def set_attr(self, name: str, values: Any) -> None:
        """Set an attribute of every environment, one value for all or a list or tuple of one for each."""
        each = list(values) if isinstance(values, (list, tuple)) else [values] * self.num_envs
        for part, rows in parts_of(self):
            part.set_attr(name, each[rows])

    def close_extras(self, **_: Any) -> None:
        """Close every part."""
        for part in self.parts:
            part.close()

    def _join_infos(self, infos: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Infos of the parts as those of one; where a part says nothing, its environments' masks are False."""
        joined: dict[str, Any] = {}
        for key in dict.fromkeys(key for info in infos for key in info):
            values = [info.get(key) for info in infos]
            like = next(value for value in values if value is not None)
            if isinstance(like, Mapping):
                joined[key] = self._join_infos([value or {} for value in values])
            else:
                nothing = [np.zeros(part.num_envs, dtype=like.dtype) for part in self.parts]
                joined[key] = np.concatenate(
                    [zero if value is None else value for value, zero in zip(values, nothing, strict=True)]
                )
        return joined


def take_spaces(envs: VectorEnv, one: VectorEnv) -> None:
    """Give a vector environment of `envs.num_envs` the spaces and metadata of `one` of which it consists."""
    envs.metadata, envs.render_mode = one.metadata, one.render_mode
    envs.single_observation_space, envs.single_action_space = one.single_observation_space, one.single_action_space
    envs.observation_space = batch_space(envs.single_observation_space, envs.num_envs)
    envs.action_space = batch_space(envs.single_action_space, envs.num_envs)


def parts_of(envs: VectorEnv) -> list[tuple[VectorEnv, slice]]:
    """The parts that may be stepped alone, each with its place among the environments; else the whole."""
    found, begin = [], 0
    for part in envs.parts if isinstance(envs, Groups) else [envs]:
        found.append((part, slice(begin, begin + part.num_envs)))
        begin += part.num_envs
    return found


def begin_step(envs: VectorEnv, actions: np.ndarray) -> Callable[[], tuple[Any, ...]]:
    """Set a vector environment going, if it can step meanwhile; what is returned waits for what `step` returns."""
    if hasattr(envs, "step_async"):
        envs.step_async(actions)
        return envs.step_wait
    return partial(envs.step, actions)


def join(observations: Sequence[Any]) -> Any:
    """Stacked observations one after the other, as those of one vector; new memory."""
    if isinstance(observations[0], Mapping):
        return {key: join([obs[key] for obs in observations]) for key in observations[0]}
    return np.concatenate(observations)
