"""A counting environment whose simulator fails as told."""

import os
import signal
import time
from pathlib import Path

from helpers.counting_env import CountingEnv


class Faulty(CountingEnv):
    """Fails in episodes of one initial state: in step `step`, or in the reset where `step` is 0.

    Args:
        kind: "raise", "kill", "hang", "stop" (the process is stopped from outside), or "unpicklable", an exception
            that cannot be sent anywhere.
        marks: folder in which each failure leaves a file; no more than `times` of them.
        state_id: of the episodes that fail; None: all.
        step: in which.
        times: how often.
    """

    vectorization = "async"

    def __init__(self, *, kind, marks, state_id=7, step=3, times=1):
        super().__init__()
        self.fault = (kind, Path(marks), state_id, step, times)

    def reset(self, **arguments):
        result = super().reset(**arguments)
        self._fail(0)
        return result

    def step(self, action):
        result = super().step(action)
        self._fail(self.steps)
        return result

    def _fail(self, now):
        kind, marks, state_id, step, times = self.fault
        if now != step or state_id not in (None, self.state_id) or len(list(marks.iterdir())) >= times:
            return
        (marks / f"{os.getpid()}-{time.monotonic_ns()}").touch()
        if kind == "raise":
            raise ValueError("the arm is broken")
        if kind == "unpicklable":
            raise type("Local", (Exception,), {"__reduce__": lambda _: 1 / 0})("cannot travel")
        if kind == "hang":
            time.sleep(600)
        os.kill(os.getpid(), signal.SIGSTOP if kind == "stop" else signal.SIGKILL)
