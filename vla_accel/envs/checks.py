"""The check of the environment contract: one message for each rule that a simulator breaks, with the remedy.

Not here: the contract's table (`base.py`).
Usage: `check_env(MySimulator())`, in the tests of a simulator or once by hand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import gymnasium as gym
import numpy as np


def check_env(env: gym.Env, *, steps: int = 3) -> None:
    """Check an environment against the contract; resets and steps it.

    Args:
        env: a simulator, bare or in a wrapper that keeps the contract.
        steps: environment steps to try per episode.

    Raises:
        ValueError: with one line for each broken rule.
    """
    if not isinstance(env, gym.Env):
        raise ValueError(f"environment contract: must be a gymnasium.Env, got {type(env).__name__}")
    problems = [*_spaces(env), *_tables(env), *_optional(env)]
    for rules in (_episodes, _drawing):  # only sound spaces and tables tell how to reset and step, and so on
        problems = problems or list(_tried(rules, env, steps))
    if problems:
        lines = "\n".join(f"- {problem}" for problem in problems)
        raise ValueError(f"{type(env.unwrapped).__name__} breaks the environment contract:\n{lines}")


def _spaces(env: gym.Env) -> Iterator[str]:
    """Rules about the two spaces."""
    space, action = getattr(env, "observation_space", None), getattr(env, "action_space", None)
    if not isinstance(action, gym.spaces.Box) or action.dtype != np.float32 or len(action.shape) != 1:
        yield f"action_space must be a float32 Box of shape [A], got {action}"
    expected = {"images", "state", "task_id"}
    if not isinstance(space, gym.spaces.Dict) or set(space) != expected:
        yield f"observation_space must be a Dict with exactly the keys {sorted(expected)}, got {space}"
        return
    images, state, task_id = space["images"], space["state"], space["task_id"]
    if not isinstance(images, gym.spaces.Dict) or len(images) == 0:
        yield f"observation_space['images'] must be a Dict of at least one camera, got {images}"
    else:
        for camera, box in images.items():
            square = isinstance(box, gym.spaces.Box) and len(box.shape) == 3 and box.shape[0] == box.shape[1]
            if not square or box.shape[2] != 3 or box.dtype != np.uint8:
                yield f"observation_space['images'][{camera!r}] must be a uint8 Box of shape [P, P, 3], got {box}"
    if not isinstance(state, gym.spaces.Box) or state.dtype != np.float32 or len(state.shape) != 1:
        yield f"observation_space['state'] must be a float32 Box of shape [Q], got {state}"
    if not isinstance(task_id, gym.spaces.Discrete) or task_id.start != 0:
        yield f"observation_space['task_id'] must be a Discrete that starts at 0, got {task_id}"


def _tables(env: gym.Env) -> Iterator[str]:
    """Rules about instructions and initial states."""
    instructions, state_ids = _get(env, "instructions"), _get(env, "state_ids")
    if not isinstance(instructions, list) or not all(isinstance(text, str) and text.strip() for text in instructions):
        yield f"instructions must be a list of non-empty strings, got {instructions!r}"
    else:
        space = getattr(env, "observation_space", None)
        task_id = space["task_id"] if isinstance(space, gym.spaces.Dict) and "task_id" in space.spaces else None
        if isinstance(task_id, gym.spaces.Discrete) and task_id.n != len(instructions):
            yield f"instructions must hold one entry per task id: {task_id.n} ids, {len(instructions)} instructions"
    if not isinstance(state_ids, dict) or set(state_ids) != {"train", "eval"}:
        yield f"state_ids must be a dict with the keys 'train' and 'eval', got {state_ids!r}"
        return
    train, held_out = state_ids["train"], state_ids["eval"]
    if not all(isinstance(ids, range) and len(ids) > 0 for ids in (train, held_out)):
        yield f"state_ids['train'] and state_ids['eval'] must be ranges that are not empty, got {train!r}, {held_out!r}"
    elif _overlap(train, held_out):
        yield f"state_ids['train'] and state_ids['eval'] must be disjoint, got {train!r}, {held_out!r}"


def _optional(env: gym.Env) -> Iterator[str]:
    """Rules about parts that an environment may leave out."""
    limit, mode = _get(env, "max_episode_steps"), _get(env, "vectorization")
    if limit is not None and (not isinstance(limit, int) or limit < 1):
        yield f"max_episode_steps must be an int of at least 1 where it exists, got {limit!r}"
    if mode not in (None, "sync", "async", "batched"):
        yield f"vectorization must be 'sync', 'async' or 'batched' where it exists, got {mode!r}"
    if _get(env, "slow_task_change") not in (None, True, False):
        yield f"slow_task_change must be a bool where it exists, got {_get(env, 'slow_task_change')!r}"
    if mode == "batched" and not callable(_get(env, "batch")):
        yield "vectorization 'batched' needs batch(num_envs): what it returns steps them all; see batched.py"
    if callable(_get(env, "set_rendering")) != callable(_get(env, "render_observation")):
        yield "set_rendering needs render_observation and the reverse: an episode must show its end with cameras off"


def _tried(rules: Callable[[gym.Env, int], Iterator[str]], env: gym.Env, steps: int) -> Iterator[str]:
    """What some rules find; whatever a simulator raises meanwhile is a finding, too."""
    try:
        yield from rules(env, steps)
    except _Broken as problem:
        yield str(problem)
    except Exception as error:
        yield f"reset, step and pictures must work for every task and state id, got {type(error).__name__}: {error}"


def _first(env: gym.Env) -> dict[str, int]:
    return {"task_id": 0, "state_id": _get(env, "state_ids")["train"][0]}


def _episodes(env: gym.Env, steps: int) -> Iterator[str]:
    """Rules about resetting and stepping."""
    tasks, state_ids, first = range(len(_get(env, "instructions"))), _get(env, "state_ids"), _first(env)
    held_out = tasks[-1:] if _get(env, "slow_task_change") else tasks
    episodes = [first, *({"task_id": task, "state_id": state_ids["eval"][-1]} for task in held_out)]
    inner, edge, beyond = _actions(env.action_space, steps)
    records = [_play(env, options, inner) for options in episodes]
    again, at_edge, past_edge = (_play(env, first, actions) for actions in (inner, edge, beyond))
    for options, record in zip(episodes, records, strict=True):
        shown = int(record[0]["observation"]["task_id"])
        if shown != options["task_id"]:
            yield f"reset must obey options: asked for task_id {options['task_id']}, the observation shows {shown}"
    yield from _records(env, [entry for record in records for entry in record])
    if not _equal(records[0], again):
        yield "equal seed, options and actions must give equal episodes; seed every source of randomness in reset"
    elif not _equal(at_edge, past_edge):
        yield "actions outside action_space must do what those at its bounds do: clip them in step"


def _actions(space: gym.spaces.Box, steps: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Some actions `[steps, A]` inside the bounds, others at them, and the latter as far again beyond."""
    draw = np.random.default_rng(0)
    inner = np.clip(draw.uniform(-0.2, 0.2, (steps, *space.shape)).astype(np.float32), space.low, space.high)
    bounded = np.isfinite(space.low) & np.isfinite(space.high)
    high = draw.random(inner.shape) < 0.5
    edge = np.where(bounded, np.where(high, space.high, space.low), inner)
    width = np.where(bounded, space.high, 0.0) - np.where(bounded, space.low, 0.0)
    beyond = edge + np.where(high, width, -width)
    return tuple(actions.astype(np.float32) for actions in (inner, edge, beyond))


def _drawing(env: gym.Env, steps: int) -> Iterator[str]:
    """Rules about films and about cameras that can be switched."""
    options, actions = _first(env), _actions(env.action_space, steps)[0]
    switch, look = _get(env, "set_rendering"), _get(env, "render_observation")
    shown = _play(env, options, actions)[-1]["observation"]
    if env.render_mode == "rgb_array":
        frame = env.render()
        if not isinstance(frame, np.ndarray) or frame.dtype != np.uint8 or frame.ndim != 3 or frame.shape[2] != 3:
            got = f"{frame.dtype} {list(frame.shape)}" if isinstance(frame, np.ndarray) else type(frame).__name__
            yield f"render must return a uint8 array [H, W, 3] where render_mode is 'rgb_array', got {got}"
    if switch is None or look is None:
        return
    if not _equal(look(), shown):
        yield "render_observation must show what the step before it returned"
    switch(False)
    try:
        blind = _play(env, options, actions)[-1]["observation"]
    finally:
        switch(True)
    if not _equal({**blind, "images": None}, {**shown, "images": None}):
        yield "set_rendering must change nothing but images: the state or the task differs with cameras off"
    elif not _equal(look(), shown):
        yield "render_observation must show the same after steps with cameras off as after steps with cameras on"


def _records(env: gym.Env, record: list[dict[str, Any]]) -> Iterator[str]:
    """Rules about each thing that reset and step returned; each complaint once."""
    seen = set()
    for entry in record:
        for problem in _entry(env, entry):
            if problem not in seen:
                seen.add(problem)
                yield problem
    if any(entry["changed"] for entry in record):
        yield "observations must be new arrays: an earlier one changed when the environment was stepped"


def _entry(env: gym.Env, entry: dict[str, Any]) -> Iterator[str]:
    yield from _mismatches(env.observation_space, entry["observation"], "observation")
    if not isinstance(entry["info"], dict):
        yield f"info must be a dict, got {type(entry['info']).__name__}"
    if "reward" not in entry:
        return
    if not isinstance(entry["reward"], (int, float, np.number)) or not np.isfinite(entry["reward"]):
        yield f"reward must be a finite number, got {entry['reward']!r}"
    for name in ("terminated", "truncated"):
        if not isinstance(entry[name], (bool, np.bool_)):
            yield f"{name} must be a bool, got {entry[name]!r}"
    if entry["truncated"]:
        yield "truncated must stay False: the time limit is a wrapper's, so that it can be chosen"
    if isinstance(entry["info"], dict) and not isinstance(entry["info"].get("success"), (bool, np.bool_)):
        yield f"info['success'] must be a bool on every step, got {entry['info'].get('success')!r}"


def _mismatches(space: gym.Space, value: Any, where: str) -> Iterator[str]:
    """How a value differs from its space, leaf by leaf."""
    if isinstance(space, gym.spaces.Dict):
        if not isinstance(value, dict) or set(value) != set(space):
            yield f"{where} must be a dict with the keys {sorted(space)}, got {value!r:.80}"
            return
        if where == "observation['images']" and list(value) != list(space):
            yield (
                f"{where} must hold the cameras in the order of its space, {list(space)}, got {list(value)}; Gymnasium "
                "sorts a space that is made from a mapping, but not one from a list of pairs"
            )
        for key, part in space.items():
            yield from _mismatches(part, value[key], f"{where}[{key!r}]")
    elif isinstance(space, gym.spaces.Discrete):
        if not space.contains(value):
            yield f"{where} must be an int in [0, {space.n}), got {value!r}"
    elif not isinstance(value, np.ndarray) or value.dtype != space.dtype or value.shape != space.shape:
        got = f"{value.dtype} {list(value.shape)}" if isinstance(value, np.ndarray) else type(value).__name__
        yield f"{where} must be a {space.dtype} array {list(space.shape)}, got {got}"
    elif not space.contains(value):
        yield f"{where} must lie within its Box, got values from {value.min()} to {value.max()}"


class _Broken(Exception):
    """A call returned something that cannot be looked at further."""


def _play(env: gym.Env, options: dict[str, int], actions: np.ndarray) -> list[dict[str, Any]]:
    """Play one short episode, actions `[steps, A]`; `changed` marks an observation that was overwritten afterwards."""
    result = env.reset(seed=0, options=dict(options))
    if not isinstance(result, tuple) or len(result) != 2:
        raise _Broken(f"reset must return (observation, info), got {result!r:.80}")
    if not isinstance(result[0], dict) or "task_id" not in result[0]:
        raise _Broken(f"reset must return the observation as a dict with 'task_id', got {result[0]!r:.80}")
    record = [{"observation": result[0], "info": result[1]}]
    copies = [_map(np.copy, result[0])]
    for action in actions:
        result = env.step(action.copy())
        if not isinstance(result, tuple) or len(result) != 5:
            raise _Broken(f"step must return five values, got {result!r:.80}")
        record.append(dict(zip(("observation", "reward", "terminated", "truncated", "info"), result, strict=True)))
        copies.append(_map(np.copy, result[0]))
        if result[2] or result[3]:
            break
    for entry, copy in zip(record, copies, strict=True):
        entry["changed"] = not _equal(entry["observation"], copy)
    return record


def _map(function: Callable[[Any], Any], value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _map(function, part) for key, part in value.items()}
    return function(value)


def _equal(one: Any, other: Any) -> bool:
    """Deep equality of dicts and lists of arrays; infos may differ in what they add beside `success`."""
    if isinstance(one, dict) and isinstance(other, dict):
        keys = set(one) - {"info"}
        return keys == set(other) - {"info"} and all(_equal(one[key], other[key]) for key in keys)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_equal, one, other))
    return np.array_equal(one, other)


def _overlap(one: range, other: range) -> bool:
    """Whether two ranges share an element, without walking through the longer one."""
    short, long = sorted((one, other), key=len)
    return any(element in long for element in short)


def _get(env: gym.Env, name: str) -> Any:
    return env.get_wrapper_attr(name) if env.has_wrapper_attr(name) else None
