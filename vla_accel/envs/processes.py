"""What worker processes are handled with: answers instead of exceptions, an end at once, and waiting for many.

Not here: who is asked what (`workers.py`). Usage: `Reporter(EpisodeQueue(...))` in the worker.
"""

from __future__ import annotations

import multiprocessing
import signal
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector import AsyncVectorEnv

from vla_accel.envs.base import EpisodeQueue, zeros


class Reporter(gym.Wrapper):
    """Runs in the worker: an exception becomes an ordinary answer, `info["failure"]`, with the traceback as text.

    So nothing of the exception has to be pickled, and nobody waits for what could not be. Interrupts are ignored, since
    Ctrl-C reaches the workers as well and it is the parent that ends them.
    """

    def __init__(self, env: EpisodeQueue):
        super().__init__(env)
        if multiprocessing.parent_process() is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, signal.SIG_IGN)

    def reset(self, **arguments: Any) -> tuple[Any, dict[str, Any]]:
        """As the queue's, with `taken`: how many jobs it has begun."""
        try:
            obs, info = self.env.reset(**arguments)
        except Exception:
            obs, info = self._nothing(), {"failure": traceback.format_exc()}
        return obs, {**info, "taken": self.env.episode_state()["taken"]}

    def step(self, action: np.ndarray) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """As the queue's."""
        try:
            return self.env.step(action)
        except Exception:
            return self._nothing(), 0.0, False, False, {"failure": traceback.format_exc()}

    def _nothing(self) -> Any:
        return zeros(self.observation_space)


def discard(worker: AsyncVectorEnv) -> None:
    """End a worker at once, whatever it is doing; nothing to do where it is closed."""
    for process in worker.processes:
        process.kill()
        process.join()
    for pipe in worker.parent_pipes:
        if pipe is not None:
            pipe.close()
    worker.error_queue.close()
    worker.closed = True


def in_threads(tasks: Sequence[Callable[[], Any]], *, timeout_s: float) -> list[Any]:
    """Run tasks side by side; for each its result, the exception it raised, or None where it is not done in time."""
    results: list[Any] = [None] * len(tasks)

    def run(place: int) -> None:
        try:
            results[place] = tasks[place]()
        except Exception as error:
            results[place] = error

    threads = [threading.Thread(target=run, args=(place,), daemon=True) for place in range(len(tasks))]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + timeout_s
    for thread in threads:
        thread.join(max(deadline - time.monotonic(), 0.0))
    return list(results)
