"""Rules that the options and resets of all simulators here obey, and how they are refused.

Not here: the options themselves, which are arguments of each simulator.
Usage: `check_option("quality", quality in ("full", "fast"), "be 'full' or 'fast'", quality)`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium as gym
import numpy as np


def check_option(option: str, ok: bool, rule: str, value: object) -> None:
    """Raise `ValueError` "<option> must <rule>, got <value>" unless `ok`."""
    if not ok:
        raise ValueError(f"{option} must {rule}, got {value!r}")


def check_within(option: str, value: Any, low: float, high: float) -> None:
    """Raise `ValueError` unless `value` is a number in `low..high`, a whole one where `low` is."""
    whole = isinstance(low, int)
    number = isinstance(value, int if whole else (int, float)) and not isinstance(value, bool)
    check_option(option, number, "be a whole number" if whole else "be a number", value)
    check_option(option, low <= value <= high, f"lie in [{low}, {high}]", value)


def check_count(option: str, value: Any, *, least: int = 1) -> None:
    """Raise `ValueError` unless `value` is a whole number of at least `least`."""
    number = isinstance(value, int) and not isinstance(value, bool)
    check_option(option, number and value >= least, f"be a whole number of at least {least}", value)


def check_names(option: str, given: str | Sequence[str], known: Sequence[str]) -> list[str]:
    """One name or several as a list.

    Raises:
        ValueError: if there is none, an unknown one, or one twice.
    """
    names = [given] if isinstance(given, str) else list(given) if isinstance(given, Sequence) else given
    ok = isinstance(names, list) and bool(names) and all(name in known and names.count(name) == 1 for name in names)
    check_option(option, ok, f"be one or more of {', '.join(known)}, each at most once", names)
    return names


def episode_of(
    options: Mapping[str, Any] | None, draw: np.random.Generator, *, num_tasks: int, train: range, end: int
) -> tuple[int, int]:
    """Task and initial state of an episode, as a `reset` is asked for them.

    Args:
        options: `task_id` and `state_id`.
        draw: for what is missing; the state out of `train`.
        num_tasks: how many tasks there are.
        train: initial states to train on.
        end: no initial state has this number or a higher one.

    Raises:
        ValueError: if an option is unknown or an id out of range.
    """
    rest = dict(options or {})
    task_id, state_id = rest.pop("task_id", None), rest.pop("state_id", None)
    task_id = int(draw.integers(num_tasks) if task_id is None else task_id)
    state_id = int(draw.integers(train.start, train.stop) if state_id is None else state_id)
    check_option("reset options", not rest, "be task_id and state_id only", sorted(rest))
    check_option("task_id", 0 <= task_id < num_tasks, f"lie in [0, {num_tasks})", task_id)
    check_option("state_id", 0 <= state_id < end, f"lie in [0, {end})", state_id)
    return task_id, state_id


def pictures(cameras: Sequence[str], image_size: int) -> gym.spaces.Dict:
    """The space of pictures in the order of the cameras, which is that in which a policy sees them."""
    picture = gym.spaces.Box(0, 255, (image_size, image_size, 3), np.uint8)
    return gym.spaces.Dict([(camera, picture) for camera in cameras])  # a mapping would be sorted by name


def observations(cameras: Sequence[str], image_size: int, *, state_size: int, num_tasks: int) -> gym.spaces.Dict:
    """The space of observations that the contract asks for; the state is unbounded."""
    return gym.spaces.Dict(
        images=pictures(cameras, image_size),
        state=gym.spaces.Box(-np.inf, np.inf, (state_size,), np.float32),
        task_id=gym.spaces.Discrete(num_tasks),
    )
