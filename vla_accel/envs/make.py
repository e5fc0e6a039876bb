"""From a name to a running vector environment.

Not here: the simulators and their options; names resolve to `module:attr` strings, so that no simulator is imported
before it is asked for.
Usage: `make_vector_env("tabletop", num_envs=8, chunk_size=4, jobs=[...])`.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import multiprocessing
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import GeneratorType
from typing import Any

import gymnasium as gym
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv

from vla_accel.envs.base import ActionChunk, EpisodeQueue
from vla_accel.envs.batched import Batched
from vla_accel.envs.groups import Groups
from vla_accel.envs.processes import Reporter
from vla_accel.envs.workers import Workers
from vla_accel.types import Job

REGISTRY: dict[str, str] = {
    "tabletop": "vla_accel.envs.tabletop:Tabletop",
    "gym:": "vla_accel.envs.gymnasium_env:GymnasiumEnv",
    "maniskill:": "vla_accel.envs.maniskill:ManiSkill",
    "metaworld:": "vla_accel.envs.metaworld:MetaWorld",
    **{f"libero_{suite}": "vla_accel.envs.libero:Libero" for suite in ("spatial", "object", "goal", "10", "90")},
}
"""Environment name -> `module:attr`. A name that ends in a colon takes what follows it as first argument; so does a
class with a positional parameter the name itself."""

_WORKER_ENVIRON = dict.fromkeys(
    ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS", "LP_NUM_THREADS"), "1"
)


def make_env(name: str, **options: Any) -> gym.Env:
    """Build one simulator, without any wrapper.

    Args:
        name: a name of `REGISTRY`; `prefix:rest` where the prefix is registered; or `package.module:Class` of your own.
        **options: of the simulator.

    Raises:
        ValueError: if the name is unknown, or an option is.
    """
    factory, arguments = _resolve(name)
    known = inspect.signature(factory).parameters
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in known.values()):
        names = [key for key, parameter in known.items() if parameter.kind is not parameter.POSITIONAL_ONLY]
        for option in options:
            if option not in names:
                raise ValueError(f"environment {name!r} has no option {option!r}; {_suggest(option, names)}")
    return factory(*arguments, **options)


def find_factory(name: str) -> Any:
    """The class or function that builds what a name stands for.

    Raises:
        ValueError: if the name is unknown.
    """
    return _resolve(name)[0]


def make_vector_env(
    name: str,
    *,
    num_envs: int,
    chunk_size: int,
    jobs: Sequence[Iterable[Job | None]],
    max_episode_steps: int | None = None,
    vectorization: str | None = None,
    env_options: Mapping[str, Any] | None = None,
    timeout_s: float = 120.0,
    num_groups: int = 1,
) -> VectorEnv:
    """Build N environments that play their jobs, each action a chunk `[K, A]`.

    Per environment: simulator, `TimeLimit`, `ActionChunk`, `EpisodeQueue`. An environment whose episode ended starts
    its next job in the same step (`AutoresetMode.SAME_STEP`); `read_step` finds the final observation.

    Args:
        name: as for `make_env`.
        num_envs: N, on this rank.
        chunk_size: K, environment steps per decision.
        jobs: for each environment the jobs it plays. In worker processes anything that can be pickled: a list, or
            what `training_jobs` returns; not a generator.
        max_episode_steps: time limit in environment steps; None for the simulator's own.
        vectorization: `"sync"` for one process, `"async"` for a worker process each, None for the simulator's choice,
            which may also be `"batched"`: one simulator for all.
        env_options: options of the simulator.
        timeout_s: seconds after which a worker process that does not answer is replaced; see `workers.py`.
        num_groups: how many parts of equal size can be stepped alone; see `groups.py`.

    Returns:
        A vector environment with the further attributes `instructions`, `state_ids`, `chunk_size` and
        `max_episode_steps`, which are plain values and need no call into a worker.

    Raises:
        ValueError: naming the argument that breaks its rule.
    """
    options = dict(env_options or {})
    if num_envs < 1:
        raise ValueError(f"num_envs must be at least 1, got {num_envs}")
    if len(jobs) != num_envs:
        raise ValueError(f"jobs must hold one iterable per environment: expected {num_envs}, got {len(jobs)}")
    if num_groups < 1 or num_envs % num_groups:
        raise ValueError(f"num_groups must be at least 1 and divide num_envs ({num_envs}), got {num_groups}")
    probe = make_env(name, **options)
    instructions = list(probe.get_wrapper_attr("instructions"))
    state_ids = dict(probe.get_wrapper_attr("state_ids"))
    limit = max_episode_steps if max_episode_steps is not None else _attribute(probe, "max_episode_steps", None)
    mode = vectorization or _attribute(probe, "vectorization", "async")
    alone = _StandIn(probe)
    stand_in = _StandIn(ActionChunk(alone, chunk_size))
    probe.close()
    if limit is None or limit < 1:
        raise ValueError(f"max_episode_steps must be at least 1 and {name!r} has no limit of its own, got {limit}")
    if mode not in ("sync", "async", "batched"):
        raise ValueError(f"vectorization must be 'sync', 'async' or None, got {mode!r}")

    def start(streams: Sequence[Iterable[Job | None]]) -> VectorEnv:
        if mode == "batched":
            simulator = probe.unwrapped.batch(len(streams))
            return Batched(simulator, streams, alone, chunk_size=chunk_size, max_episode_steps=limit)
        builders = [_Builder(name, options, limit, chunk_size, stream, os.getpid()) for stream in streams]
        return _start_sync(builders) if mode == "sync" else _start_async(builders, stand_in, timeout_s)

    size = num_envs // num_groups
    parts = [start(jobs[begin : begin + size]) for begin in range(0, num_envs, size)]
    envs = parts[0] if num_groups == 1 else Groups(parts)
    for each in (envs, *parts):
        each.instructions, each.state_ids = instructions, state_ids
        each.chunk_size, each.max_episode_steps = chunk_size, limit
    return envs


@dataclass(frozen=True)
class _Builder:
    """Builds one environment, here or in a worker process."""

    name: str
    options: dict[str, Any]
    max_episode_steps: int
    chunk_size: int
    jobs: Iterable[Job | None]
    parent: int

    def __call__(self) -> gym.Env:
        if os.getpid() != self.parent:
            os.environ.update(_WORKER_ENVIRON)
        env = make_env(self.name, **self.options)
        env = gym.wrappers.TimeLimit(env, max_episode_steps=self.max_episode_steps)
        return EpisodeQueue(ActionChunk(env, self.chunk_size), self.jobs)


class _StandIn(gym.Env):
    """Has the spaces of an environment and nothing else."""

    def __init__(self, env: gym.Env):
        self.observation_space, self.action_space = env.observation_space, env.action_space
        self.metadata, self.render_mode = env.metadata, env.render_mode


@dataclass(frozen=True)
class _WorkerBuilder:
    """Builds one environment for a worker process; in the parent, which looks at the spaces only, a stand-in."""

    builder: _Builder
    stand_in: _StandIn

    def __call__(self) -> gym.Env:
        return self.stand_in if os.getpid() == self.builder.parent else Reporter(self.builder())


def _start_sync(builders: list[_Builder]) -> VectorEnv:
    return SyncVectorEnv(builders, autoreset_mode=AutoresetMode.SAME_STEP)


def _start_async(builders: list[_Builder], stand_in: _StandIn, timeout_s: float) -> VectorEnv:
    """One worker process per environment; not forked, since threads and graphics contexts do not survive a fork."""
    for index, builder in enumerate(builders):
        if isinstance(builder.jobs, GeneratorType):
            raise ValueError(
                f"jobs[{index}] is a generator, which cannot be sent to a worker process; "
                "pass a list or what training_jobs returns, or use vectorization='sync'"
            )
    context = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
    with _environ(_WORKER_ENVIRON):
        jobs = [builder.jobs for builder in builders]
        workers = [_WorkerBuilder(builder, stand_in) for builder in builders]
        return Workers(workers, jobs, context=context, timeout_s=timeout_s)


@contextmanager
def _environ(values: Mapping[str, str]) -> Iterator[None]:
    """Let processes started here inherit `values`: libraries read thread counts when they load, which is early."""
    before = {key: os.environ.get(key) for key in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for key, value in before.items():
            if value is None:
                del os.environ[key]
            else:
                os.environ[key] = value


def _attribute(env: gym.Env, name: str, default: Any) -> Any:
    return env.get_wrapper_attr(name) if env.has_wrapper_attr(name) else default


def _resolve(name: str) -> tuple[Any, tuple[str, ...]]:
    """The callable behind a name, and the arguments the name carries."""
    prefix, colon, rest = name.partition(":")
    if name in REGISTRY and not name.endswith(":"):
        factory = _load(REGISTRY[name])
        kinds = [parameter.kind for parameter in inspect.signature(factory).parameters.values()]
        return factory, (name,) if inspect.Parameter.POSITIONAL_ONLY in kinds else ()
    if colon and rest and prefix + ":" in REGISTRY:
        return _load(REGISTRY[prefix + ":"]), (rest,)
    if colon and rest and prefix not in REGISTRY:
        try:
            return _load(name), ()
        except ModuleNotFoundError as error:
            if error.name is None or not prefix.startswith(error.name):
                raise
        except AttributeError as error:
            raise ValueError(f"environment {name!r}: {error}") from None
    known = [f"{key}<name>" if key.endswith(":") else key for key in REGISTRY]
    raise ValueError(f"unknown environment {name!r}; {_suggest(name, known)}, or package.module:Class of your own")


def _load(target: str) -> Any:
    module, _, attribute = target.partition(":")
    return getattr(importlib.import_module(module), attribute)


def _suggest(name: str, known: Sequence[str]) -> str:
    nearest = difflib.get_close_matches(name, known, n=1)
    hint = f" (did you mean {nearest[0]!r}?)" if nearest else ""
    return f"known: {', '.join(sorted(known))}{hint}"
