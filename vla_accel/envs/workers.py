"""Environments in worker processes that may raise, die or hang: the run goes on without the episode that was lost.

Every environment has a Gymnasium `AsyncVectorEnv` of its own, with one worker process, shared memory for observations
and `AutoresetMode.SAME_STEP`. One that fails is thrown away with its process, and a new one plays the job again.

Not here: the environments (`base.py`), building them (`make.py`), what runs in the worker (`processes.py`).
Usage: `Workers(builders, jobs, context="forkserver", timeout_s=120)`, then as any vector environment.

What a failure looks like to the loop, in the step in which it is noticed:

| | |
|---|---|
| observation | the first one of the job that is played again |
| reward, terminated, truncated | 0, False, False |
| `executed` | 0, so the decision is no sample |
| `voided` | how many episodes were lost (more than 1 where the new worker failed, too) |

A worker that fails only after an episode's end, while the next one begins, costs no decision: its numbers stand.
"""

from __future__ import annotations

import copy
import itertools
import logging
import multiprocessing
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, VectorEnv

from vla_accel.envs.groups import join, take_spaces
from vla_accel.envs.processes import discard, in_threads
from vla_accel.types import Job

MAX_FAILURES = 3
"""An environment that fails this often without finishing an episode in between ends the run."""

STARTING_S = 60.0
"""How long a worker may take to start, if `timeout_s` does not allow more: it loads libraries, but no simulator yet."""

CLOSING_S = 10.0
"""How long workers may take to close their simulators before they are killed."""

_log = logging.getLogger(__name__)


class Workers(VectorEnv):
    """N environments, each in a process of its own, that outlive failures.

    Args:
        builders: each makes one `Reporter` in the worker; called here as well, on several threads, for the spaces only.
        jobs: what each environment plays, as its builder knows it; only for messages.
        context: how processes start, `"forkserver"` or `"spawn"`.
        timeout_s: seconds that one call may take in a worker, the start of the next episode included.

    Attributes:
        timeout_s: as given.

    Raises:
        RuntimeError: if a worker cannot be started, or one environment fails `MAX_FAILURES` times in a row.
    """

    def __init__(
        self,
        builders: Sequence[Callable[[], gym.Env]],
        jobs: Sequence[Iterable[Job | None]],
        *,
        context: str,
        timeout_s: float,
    ):
        self.timeout_s, self.num_envs = timeout_s, len(builders)
        self._builders, self._jobs, self._context = list(builders), list(jobs), context
        self._workers: list[AsyncVectorEnv | None] = [None] * self.num_envs
        # What brings a new worker to where the old one was: jobs begun, and actions to replay of the last of them.
        self._resume: list[dict[str, Any]] = [{"taken": 0, "actions": []} for _ in builders]
        self._failures = [0] * self.num_envs
        self._idle = [False] * self.num_envs
        problems = self._start(range(self.num_envs))
        for index, problem in problems.items():
            self.close_extras()
            raise RuntimeError(f"environment {index} could not be started in a worker process: {problem}")
        take_spaces(self, self._workers[0])

    @property
    def processes(self) -> list[Any]:
        """The worker processes, in the environments' order."""
        return [worker.processes[0] for worker in self._workers if worker is not None]

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Begin the next job in every environment; the jobs decide seeds and options."""
        if seed is not None or options:
            raise ValueError(f"the jobs decide seeds and options: call reset() plainly, got {seed=}, {options=}")
        everywhere = range(self.num_envs)
        for resume in self._resume:
            if not resume.pop("pending", False):
                resume.update(taken=resume["taken"] + 1, actions=[])
        answers, problems = self._ask(everywhere, "reset")
        observations, infos = self._gather(answers, problems, lost_decision=False)
        return observations, infos

    def step(self, actions: np.ndarray) -> tuple[dict[str, Any], np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        """Take one decision in every environment.

        Args:
            actions: float `[N, K, A]`.

        Raises:
            RuntimeError: if one environment fails too often in a row.
        """
        self.step_async(actions)
        return self.step_wait()

    def step_async(self, actions: np.ndarray) -> None:
        """Begin a step; nothing but `step_wait` or `close` may follow."""
        self._asked = self._send(range(self.num_envs), "step", actions)

    def step_wait(self) -> tuple[dict[str, Any], np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        """What `step` returns, for the step that was begun."""
        answers, problems = self._receive(*self._asked)
        numbers = {
            index: (float(answer[1][0]), bool(answer[2][0]), bool(answer[3][0])) for index, answer in answers.items()
        }
        reward, terminated, truncated = (
            np.array([numbers.get(index, (0.0, False, False))[place] for index in range(self.num_envs)])
            for place in range(3)
        )
        resets = {index: (answer[0], answer[4]) for index, answer in answers.items()}
        observations, infos = self._gather(resets, problems, lost_decision=True)
        return observations, reward, terminated, truncated, infos

    def call(self, name: str, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Call a method of every environment, or read an attribute.

        Raises:
            RuntimeError: if a worker does not answer; it is replaced in the next step.
        """
        return tuple(self._demand(name, *args, **kwargs))

    def get_attr(self, name: str) -> tuple[Any, ...]:
        """An attribute of every environment."""
        return self.call(name)

    def set_attr(self, name: str, values: Any) -> None:
        """Set an attribute of every environment, one value for all or a list or tuple of one for each.

        Raises:
            RuntimeError: if a worker does not answer.
        """
        values = list(values) if isinstance(values, (list, tuple)) else [values] * self.num_envs
        if len(values) != self.num_envs:
            raise ValueError(f"values must hold one entry per environment: expected {self.num_envs}, got {len(values)}")
        if name == "resume_from":
            self._resume = [{**value, "pending": True} for value in values]
        for index, value in enumerate(values):
            try:
                self._workers[index].set_attr(name, [value])
            except Exception as error:
                raise self._no_answer(index, name, error) from error

    def close_extras(self, **_: Any) -> None:
        """Let every simulator close; kill the workers that do not within `CLOSING_S`."""
        workers = [worker for worker in self._workers if worker is not None]
        self._workers = [None] * self.num_envs
        in_threads([worker.close for worker in workers], timeout_s=CLOSING_S)
        for worker in workers:
            discard(worker)

    def __del__(self) -> None:
        """Leave no process behind."""
        for worker in getattr(self, "_workers", []):
            if worker is not None:
                discard(worker)

    # Asking workers ------------------------------------------------------------------------------------------------

    def _ask(self, indices: Iterable[int], what: str) -> tuple[dict[int, tuple], dict[int, str]]:
        """Send one command to some workers and wait for all; answers and, where there is none, the reason."""
        return self._receive(*self._send(indices, what))

    def _send(
        self, indices: Iterable[int], what: str, actions: np.ndarray | None = None
    ) -> tuple[str, list[int], dict[int, str], float]:
        """Send one command to some workers; what `_receive` must know."""
        sent: list[int] = []
        problems: dict[int, str] = {}
        for index in indices:
            try:
                if what == "step":
                    self._workers[index].step_async(actions[index : index + 1])
                else:
                    self._workers[index].reset_async()
                sent.append(index)
            except Exception as error:
                problems[index] = self._describe(index, error)
        return what, sent, problems, time.monotonic() + self.timeout_s

    def _receive(
        self, what: str, sent: list[int], problems: dict[int, str], deadline: float
    ) -> tuple[dict[int, tuple], dict[int, str]]:
        """Wait for the answers to a command; the answers and, where there is none, the reason."""
        answers: dict[int, tuple] = {}
        for index in sent:
            try:
                wait = self._workers[index].step_wait if what == "step" else self._workers[index].reset_wait
                answer = wait(timeout=max(deadline - time.monotonic(), 0.0))
            except Exception as error:
                problems[index] = self._describe(index, error)
                continue
            infos = answer[-1]
            if "taken" in infos:
                self._resume[index] = {"taken": int(infos.pop("taken")[0]), "actions": []}
                infos.pop("_taken")
            failure = infos.pop("failure", None)
            infos.pop("_failure", None)
            if failure is not None:
                problems[index] = str(failure[0]).strip()
            if failure is None or "final_info" in infos:
                answers[index] = answer
        return answers, problems

    def _gather(
        self, answers: dict[int, tuple], problems: dict[int, str], *, lost_decision: bool
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Replace what failed, and put the environments' observations and infos together."""
        rows = {index: (obs, _single(infos)) for index, (obs, infos) in answers.items()}
        for index, (_, info) in rows.items():
            if "final_info" in info:
                self._failures[index] = 0
        lost = dict.fromkeys(range(self.num_envs), 0)
        while problems:
            for index, problem in problems.items():
                lost[index] += not self._idle[index]
                self._count_failure(index, problem)
            fresh, problems = self._replace(list(problems))
            for index, (obs, infos) in fresh.items():
                stands = rows[index][1] if index in rows else {}
                if lost_decision and not stands:
                    stands = {"executed": 0, "success": False}
                rows[index] = (obs, {**stands, **_single(infos)})
        merged: dict[str, Any] = {}
        for index in range(self.num_envs):
            info = rows[index][1]
            self._idle[index] = bool(info["idle"])
            merged = self._add_info(merged, {**info, "voided": lost[index]}, index)
        return join([rows[index][0] for index in range(self.num_envs)]), merged

    def _demand(self, name: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Call something in every worker, side by side; each is heard before one that did not answer is an error."""
        asked: list[int] = []
        answers: list[Any] = []
        errors: dict[int, Exception] = {}
        for index, worker in enumerate(self._workers):
            try:
                worker.call_async(name, *args, **kwargs)
                asked.append(index)
            except Exception as error:
                errors[index] = error
        deadline = time.monotonic() + self.timeout_s
        for index in asked:
            try:
                answers.append(self._workers[index].call_wait(timeout=max(deadline - time.monotonic(), 0.0))[0])
            except Exception as error:
                errors[index] = error
        lost = [self._no_answer(index, name, error) for index, error in sorted(errors.items())]
        if lost:
            raise lost[0] from errors[min(errors)]
        return answers

    def _no_answer(self, index: int, name: str, error: Exception) -> RuntimeError:
        """The error for a call that cannot be made good; the worker will be found dead by the next step."""
        text = self._describe(index, error)
        discard(self._workers[index])
        return RuntimeError(f"environment {index} did not answer {name!r}: {text}")

    # Replacing workers ---------------------------------------------------------------------------------------------

    def _start(self, indices: Iterable[int]) -> dict[int, str]:
        """Start workers side by side; the reasons where that failed."""
        indices = list(indices)

        def start(index: int) -> Callable[[], AsyncVectorEnv]:
            return lambda: AsyncVectorEnv(
                [self._builders[index]],
                shared_memory=True,
                copy=False,
                context=self._context,
                autoreset_mode=AutoresetMode.SAME_STEP,
            )

        results = in_threads([start(index) for index in indices], timeout_s=max(self.timeout_s, STARTING_S))
        problems = {}
        for index, result in zip(indices, results, strict=True):
            if isinstance(result, AsyncVectorEnv):
                self._workers[index] = result
            else:
                self._workers[index] = None
                problems[index] = self._describe(index, result)
        return problems

    def _replace(self, indices: list[int]) -> tuple[dict[int, tuple], dict[int, str]]:
        """New workers that begin the lost jobs again; their first answers, and the reasons where that failed, too."""
        for index in indices:
            if self._workers[index] is not None:
                discard(self._workers[index])
        problems = self._start(indices)
        alive = [index for index in indices if index not in problems]
        for index in alive:
            try:
                self._workers[index].set_attr("resume_from", [self._resume[index]])
            except Exception as error:
                problems[index] = self._describe(index, error)
        answers, more = self._ask([index for index in alive if index not in problems], "reset")
        return answers, problems | more

    def _count_failure(self, index: int, problem: str) -> None:
        self._failures[index] += 1
        job = self._job(index)
        if self._failures[index] >= MAX_FAILURES:
            raise RuntimeError(
                f"environment {index} failed {MAX_FAILURES} times without finishing an episode, "
                f"the last time in {job}: {problem}"
            )
        _log.warning(
            "environment %d failed in %s; its worker is replaced and the episode played again. %s", index, job, problem
        )

    def _job(self, index: int) -> str:
        """The job that an environment plays, in words."""
        taken = self._resume[index]["taken"]
        jobs = iter(copy.deepcopy(self._jobs[index]))
        job = next(itertools.islice(jobs, max(taken - 1, 0), None), None)
        return f"job {taken} ({job})" if job else f"job {taken}"

    def _describe(self, index: int, error: object) -> str:
        """Why a worker gave no answer."""
        worker = self._workers[index]
        if error is None:
            return f"it did not start within {max(self.timeout_s, STARTING_S):g} s"
        if isinstance(error, multiprocessing.TimeoutError):
            return f"it gave no answer for {self.timeout_s:g} s (--env.timeout_s)"
        if worker is None and isinstance(error, EOFError):
            return "its process ended while it started; what it said is above"
        if worker is not None and isinstance(error, (EOFError, OSError)):
            process = worker.processes[0]
            process.join(timeout=1.0)
            return f"its process ended with exit code {process.exitcode}"
        return f"{type(error).__name__}: {error}".rstrip(": ")


def _single(infos: Mapping[str, Any]) -> dict[str, Any]:
    """The infos of a vector of one environment as that environment's own info."""
    info = {}
    for key, value in infos.items():
        if not key.startswith("_"):
            info[key] = _single(value) if key == "final_info" else value[0]
    return info
