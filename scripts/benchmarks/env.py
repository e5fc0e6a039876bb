"""How fast a simulator runs: chunks against single steps, LIBERO's quick reset against the ordinary, several workers.

Steps and resets are counted in CPU time of one core, which other load on the machine hardly changes; workers in wall
clock time, which it does. With --overlap nothing but the turns of groups is measured: a simulator that sleeps in its
worker process, and a policy that sleeps as long.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from vla_accel.envs.base import ActionChunk
from vla_accel.envs.graphics import prepare_graphics
from vla_accel.envs.make import make_env, make_vector_env
from vla_accel.envs.tabletop import Tabletop
from vla_accel.policies.base import Policy
from vla_accel.rollout import collect, start
from vla_accel.types import Job, Observation, PolicySample


def seconds_of(task: Callable[[], Any]) -> float:
    """CPU seconds of this process."""
    begin = time.process_time()
    task()
    return time.process_time() - begin


def reset(env: Any, state_id: int) -> None:
    """Begin an episode of the first task."""
    env.reset(options={"task_id": 0, "state_id": state_id})


def chunks(env: Any, options: argparse.Namespace) -> tuple[float, float]:
    """Seconds per environment step, one by one with pictures and in chunks with one picture."""
    low, high = env.action_space.low, env.action_space.high
    shape = (options.decisions, options.chunk, *env.action_space.shape)
    actions = np.random.default_rng(0).uniform(-0.3, 0.3, shape).astype(np.float32).clip(low, high)
    steps = options.decisions * options.chunk
    reset(env, 0)
    single = seconds_of(lambda: [env.step(action) for action in actions.reshape(steps, -1)]) / steps
    chunked = ActionChunk(env, options.chunk)
    reset(env, 0)
    return single, seconds_of(lambda: [chunked.step(action) for action in actions]) / steps


def ordinary_reset(env: Any) -> float | None:
    """Seconds of the reset that LIBERO itself offers, with its ten steps of waiting; None for other simulators."""
    if not hasattr(env, "wait_steps"):
        return None
    from vla_accel.envs.libero import CAMERAS
    from vla_accel.envs.libero_package import build

    task = env.tasks[0]
    cameras = [CAMERAS[name] for name in env.cameras]
    original = build(
        task.problem_file, image_size=env.image_size, cameras=cameras, multisampling=env.quality == "full",
        hard_reset=True,
    )  # fmt: skip

    def begin() -> None:
        original.seed(0)
        original.reset()
        original.set_init_state(task.states()[0])
        for _ in range(env.wait_steps):
            original.step([0, 0, 0, 0, 0, 0, -1])

    try:
        return min(seconds_of(begin) for _ in range(2))
    finally:
        original.close()


def workers(name: str, env_options: dict[str, Any], count: int, options: argparse.Namespace) -> float:
    """Environment steps per second, wall clock, of several workers in chunks."""
    jobs = [[Job(task_id=0, state_id=number, seed=0)] * 1000 for number in range(count)]
    envs = make_vector_env(
        name, num_envs=count, chunk_size=options.chunk, jobs=jobs, max_episode_steps=10_000, vectorization="async",
        env_options=env_options, timeout_s=600,
    )  # fmt: skip
    try:
        envs.reset()
        still = np.zeros(envs.action_space.shape, np.float32).clip(envs.action_space.low, envs.action_space.high)
        begin = time.perf_counter()
        for _ in range(options.decisions):
            envs.step(still)
        return count * options.decisions * options.chunk / (time.perf_counter() - begin)
    finally:
        envs.close()


class Sleeper(Tabletop):
    """A simulator whose step takes a given time and no processor.

    Args:
        sleep_ms: how long.
    """

    vectorization = "async"

    def __init__(self, *, sleep_ms: float):
        super().__init__(image_size=16)
        self.sleep_ms = sleep_ms

    def step(self, action: np.ndarray) -> Any:
        """Sleep, then step."""
        time.sleep(self.sleep_ms / 1e3)
        return super().step(action)


class Sleepy(Policy):
    """A policy that takes as long to stand still."""

    chunk_size, action_dim = 1, 7

    def __init__(self, sleep_ms: float):
        super().__init__()
        self.sleep_ms = sleep_ms

    def prepare(self, obs: Observation) -> dict[str, torch.Tensor]:
        """The state."""
        return {"state": torch.from_numpy(obs.state)}

    def forward(self, inputs: Any, trace: Any = None, *, greedy: bool = False) -> PolicySample:
        """Sleep, then stand still; asked for a value only, do not sleep."""
        assert trace is None
        time.sleep(0.0 if greedy else self.sleep_ms / 1e3)
        rows = len(inputs["state"])
        return PolicySample(
            action=torch.zeros(rows, 1, 7), trace={}, log_prob=torch.zeros(rows, 7), value=torch.zeros(rows)
        )


def overlap(sleep_ms: float, *, decisions: int) -> tuple[float, float]:
    """Seconds per decision of an environment with one group of two environments, and with two such groups."""
    seconds = []
    for num_groups in (1, 2):
        num_envs, policy = 2 * num_groups, Sleepy(sleep_ms)
        jobs = [[Job(task_id=0, state_id=number, seed=0)] * 1000 for number in range(num_envs)]
        envs = make_vector_env(
            "benchmarks.env:Sleeper", num_envs=num_envs, chunk_size=1, jobs=jobs, max_episode_steps=10_000,
            env_options={"sleep_ms": sleep_ms}, num_groups=num_groups,
        )  # fmt: skip
        try:
            state = start(envs)
            begin = time.perf_counter()
            collect(policy, policy, envs, state, num_decisions=decisions, device=torch.device("cpu"))
            seconds.append((time.perf_counter() - begin) / (decisions * num_groups))
        finally:
            envs.close()
    return seconds[0], seconds[1]


def main(argv: list[str]) -> None:
    """Measure one environment and print a table."""
    parser = argparse.ArgumentParser(prog="benchmark.py env", description=__doc__)
    parser.add_argument("--env.name", dest="name", default="tabletop", help="environment (default: tabletop)")
    parser.add_argument("--env.options", dest="env_options", nargs="*", default=[], help="pairs, as for the programs")
    parser.add_argument("--chunk", type=int, default=8, help="steps per decision (default: 8)")
    parser.add_argument("--decisions", type=int, default=8, help="decisions per measurement (default: 8)")
    parser.add_argument("--workers", type=int, nargs="*", default=[1, 2, 4], help="worker counts (default: 1 2 4)")
    parser.add_argument("--overlap", type=float, metavar="MS", help="measure groups: a step and an act of MS each")
    options = parser.parse_args(argv)
    if options.overlap:
        one, two = overlap(options.overlap, decisions=options.decisions)
        print(f"| two groups, each as large as the one | {two / one:.2f} of its time per decision |")
        return
    from vla_accel.config import SimulatorConfig

    pairs = dict(zip(options.env_options[::2], options.env_options[1::2], strict=True))
    env_options = SimulatorConfig(options=pairs).parsed_options()
    prepare_graphics(required=False)
    env = make_env(options.name, **env_options)
    first = seconds_of(lambda: reset(env, 0))
    again = seconds_of(lambda: [reset(env, number) for number in (1, 2, 3)]) / 3
    single, chunked = chunks(env, options)
    ordinary = ordinary_reset(env)
    env.close()
    print(f"{options.name} {env_options or ''}, chunks of {options.chunk}, CPU time of one core")
    print("| | |\n|---|---|")
    print(f"| first reset | {first:.2f} s |")
    print(f"| reset | {again * 1e3:.0f} ms |")
    if ordinary is not None:
        print(f"| the package's own reset | {ordinary * 1e3:.0f} ms, {ordinary / again:.1f} times as long |")
    print(f"| one by one, with pictures | {1 / single:.1f} steps/s |")
    print(f"| in chunks | {1 / chunked:.1f} steps/s, {single / chunked:.2f} times as many |")
    for count in options.workers:
        print(f"| {count} workers, wall clock | {workers(options.name, env_options, count, options):.1f} steps/s |")
