"""Which episodes to play: streams of jobs for training, lists of jobs for evaluation.

Not here: playing them (`EpisodeQueue` in `base.py`). Nothing is shared between processes: a job is a pure function of
the seed and of its place, so every rank computes its own streams and they never need to talk.
Usage: `training_jobs(task_ids=range(4), state_ids=env.state_ids["train"], seed=0, stream=i, num_streams=n)`.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from vla_accel.types import Job

_ORDER, _STATE, _EVALUATION = 11, 12, 13  # what a random stream is for; keeps them apart at equal seeds
_MAX_SEED = 2**31


class TrainingJobs(Iterator[Job]):
    """Endless jobs of one stream; see `training_jobs`.

    A class and not a generator, because worker processes receive their stream by value.

    Attributes:
        taken: jobs handed out so far, counted from the very first; pass it as `start` to go on from here.
    """

    def __init__(
        self,
        *,
        task_ids: Sequence[int],
        state_ids: Sequence[int],
        seed: int,
        stream: int,
        num_streams: int,
        group_size: int,
        start: int,
        pin_tasks: bool,
    ):
        self.pin_tasks = pin_tasks
        self.task_ids, self.state_ids, self.seed = task_ids, state_ids, seed
        self.stream, self.num_streams, self.group_size = stream, num_streams, group_size
        self.taken = start

    def __next__(self) -> Job:
        group = (self.taken * self.num_streams + self.stream) // self.group_size
        self.taken += 1
        cycle, place = divmod(group, len(self.task_ids))
        order = np.random.default_rng([_ORDER, self.seed, cycle]).permutation(len(self.task_ids))
        draw = np.random.default_rng([_STATE, self.seed, group])
        task = self.stream // self.group_size % len(self.task_ids) if self.pin_tasks else order[place]
        return Job(
            task_id=int(self.task_ids[task]),
            state_id=int(self.state_ids[draw.integers(len(self.state_ids))]),
            seed=int(draw.integers(_MAX_SEED)),
        )


class WithRests(Iterator[Job | None]):
    """Each of some jobs, and after it None, which lets the environment rest until the next `reset()`.

    Args:
        jobs: endless or not.
    """

    def __init__(self, jobs: Iterable[Job]):
        self.jobs = iter(jobs)
        self.rests = True

    def __next__(self) -> Job | None:
        self.rests = not self.rests
        return None if self.rests else next(self.jobs)


def training_jobs(
    *,
    task_ids: Sequence[int],
    state_ids: Sequence[int],
    seed: int,
    stream: int,
    num_streams: int,
    group_size: int = 1,
    start: int = 0,
    pin_tasks: bool = False,
) -> TrainingJobs:
    """The endless jobs of one environment.

    Job `n` of stream `s` is episode `e = n * num_streams + s` of the run. Episodes fall into groups of `group_size`
    consecutive ones; all members of a group play the same job, which therefore also names the group. With `num_streams`
    a multiple of `group_size`, a group is played side by side by neighbouring streams. Groups run through all tasks in
    an order shuffled anew for each pass, and draw their initial state uniformly.

    Args:
        task_ids: tasks to train on.
        state_ids: initial states to train on, usually `env.state_ids["train"]`.
        seed: of the run, >= 0; the same on every rank.
        stream: index of the environment over all ranks, in `[0, num_streams)`.
        num_streams: environments over all ranks.
        group_size: episodes that share one job (GRPO); 1 for independent episodes.
        start: jobs of this stream that were already played.
        pin_tasks: let each stream play one task only, for simulators in which changing the task takes long. Only
            where `num_streams` is a multiple of `group_size` times the number of tasks, so that each gets as many.

    Returns:
        An endless iterator that survives pickling.

    Raises:
        ValueError: naming the argument that breaks its rule.
    """
    _check_ids(task_ids, state_ids, seed)
    if num_streams < 1 or not 0 <= stream < num_streams:
        raise ValueError(f"stream must lie in [0, num_streams), got stream={stream}, num_streams={num_streams}")
    if group_size < 1:
        raise ValueError(f"group_size must be at least 1, got {group_size}")
    if start < 0:
        raise ValueError(f"start must be at least 0, got {start}")
    even = group_size * len(task_ids)
    if pin_tasks and num_streams % even:
        raise ValueError(f"pin_tasks needs num_streams to be a multiple of {even}, got num_streams={num_streams}")
    return TrainingJobs(
        task_ids=task_ids,
        state_ids=state_ids,
        seed=seed,
        stream=stream,
        num_streams=num_streams,
        group_size=group_size,
        start=start,
        pin_tasks=pin_tasks,
    )


def evaluation_jobs(*, task_ids: Sequence[int], state_ids: Sequence[int], episodes: int, seed: int) -> list[Job]:
    """A fixed list of episodes, spread evenly over the tasks.

    The tasks take turns; each task meets the initial states in their order, from the first. The first
    `episodes % len(task_ids)` tasks get one episode more.

    Args:
        task_ids: tasks to evaluate.
        state_ids: held-out initial states, usually `env.state_ids["eval"]`.
        episodes: how many episodes in all, >= 1.
        seed: from which each job's own seed is derived.

    Returns:
        `episodes` jobs. The same arguments give the same list.

    Raises:
        ValueError: naming the argument that breaks its rule.
    """
    _check_ids(task_ids, state_ids, seed)
    if episodes < 1:
        raise ValueError(f"episodes must be at least 1, got {episodes}")
    distinct = len(task_ids) * len(state_ids)
    if episodes > distinct:
        warnings.warn(
            f"{episodes} evaluation episodes over {len(task_ids)} tasks and {len(state_ids)} initial states repeat "
            f"some of the {distinct} pairs; a confidence interval that takes them as independent is too narrow",
            stacklevel=2,
        )
    jobs = []
    for index in range(episodes):
        turn, task = divmod(index, len(task_ids))
        draw = np.random.default_rng([_EVALUATION, seed, index])
        state_id = int(state_ids[turn % len(state_ids)])
        jobs.append(Job(task_id=int(task_ids[task]), state_id=state_id, seed=int(draw.integers(_MAX_SEED))))
    return jobs


def deal(jobs: Sequence[Job], streams: int) -> list[list[Job]]:
    """Deal jobs round-robin to `streams` environments; some get none where there are too few.

    Raises:
        ValueError: if `streams` is less than 1.
    """
    if streams < 1:
        raise ValueError(f"streams must be at least 1, got {streams}")
    return [list(jobs[stream::streams]) for stream in range(streams)]


def _check_ids(task_ids: Sequence[int], state_ids: Sequence[int], seed: int) -> None:
    """Refuse what would only fail later, inside a worker."""
    if len(task_ids) == 0 or min(task_ids) < 0:
        raise ValueError(f"task_ids must be at least one id, none below 0, got {list(task_ids)}")
    if len(state_ids) == 0:
        raise ValueError(f"state_ids must hold at least one id, got {state_ids!r}")
    if seed < 0:
        raise ValueError(f"seed must be at least 0, got {seed}")
