"""Streams of training jobs and lists of evaluation jobs."""

import itertools
import pickle
from collections import Counter

import pytest

from vla_accel.envs.jobs import deal, evaluation_jobs, training_jobs


def take(count, **changes):
    arguments = {"task_ids": range(3), "state_ids": range(1000, 2000), "seed": 0, "stream": 0, "num_streams": 1}
    return list(itertools.islice(training_jobs(**{**arguments, **changes}), count))


def test_a_stream_is_a_function_of_its_arguments():
    assert take(20, stream=2, num_streams=4) == take(20, stream=2, num_streams=4)


def test_streams_and_seeds_differ():
    streams = [take(10, stream=stream, num_streams=4) for stream in range(4)]
    assert len({job for stream in streams for job in stream}) == 40
    assert take(10, seed=1) != take(10, seed=0)


def test_streams_do_not_depend_on_how_far_others_have_come():
    first = training_jobs(task_ids=[0], state_ids=range(9), seed=0, stream=0, num_streams=2)
    for _ in range(5):
        next(first)
    assert take(3, stream=1, num_streams=2) == take(6, stream=1, num_streams=2)[:3]


def test_streams_together_cover_every_task_equally():
    jobs = [job for stream in range(5) for job in take(6, stream=stream, num_streams=5)]
    assert Counter(job.task_id for job in jobs) == {0: 10, 1: 10, 2: 10}


def test_states_come_from_the_given_ids_only():
    jobs = take(200, state_ids=range(7, 10), task_ids=[4])
    assert {job.state_id for job in jobs} == {7, 8, 9}
    assert {job.task_id for job in jobs} == {4}


@pytest.mark.parametrize(("num_streams", "group_size"), [(4, 4), (8, 4), (1, 3), (3, 2)])
def test_every_group_plays_one_job(num_streams, group_size):
    streams = [take(6, stream=stream, num_streams=num_streams, group_size=group_size) for stream in range(num_streams)]
    episodes = [streams[index % num_streams][index // num_streams] for index in range(6 * num_streams)]
    groups = [episodes[start : start + group_size] for start in range(0, len(episodes), group_size)]
    assert all(len(set(group)) == 1 for group in groups)
    assert len({group[0] for group in groups}) == len(groups)


def test_a_group_is_played_side_by_side_by_neighbouring_streams():
    streams = [take(5, stream=stream, num_streams=4, group_size=2) for stream in range(4)]
    assert streams[0] == streams[1]
    assert streams[2] == streams[3]
    assert not set(streams[0]) & set(streams[2])


def test_a_stream_goes_on_where_it_was_left():
    stream = training_jobs(task_ids=[0, 1], state_ids=range(99), seed=3, stream=1, num_streams=2)
    played = [next(stream) for _ in range(4)]
    assert stream.taken == 4
    following = [next(pickle.loads(pickle.dumps(stream))), next(stream)]
    again = training_jobs(task_ids=[0, 1], state_ids=range(99), seed=3, stream=1, num_streams=2, start=4)
    assert following == [next(again)] * 2
    assert following[0] not in played


def test_evaluation_spreads_episodes_over_tasks_and_meets_states_in_order():
    jobs = evaluation_jobs(task_ids=[5, 6, 7], state_ids=range(50), episodes=8, seed=0)
    assert [(job.task_id, job.state_id) for job in jobs] == [
        (5, 0), (6, 0), (7, 0), (5, 1), (6, 1), (7, 1), (5, 2), (6, 2),
    ]  # fmt: skip
    assert jobs == evaluation_jobs(task_ids=[5, 6, 7], state_ids=range(50), episodes=8, seed=0)
    assert len({job.seed for job in jobs}) == 8


def test_a_longer_evaluation_begins_with_the_shorter_one():
    arguments = {"task_ids": range(4), "state_ids": range(50), "seed": 1}
    assert evaluation_jobs(episodes=20, **arguments)[:7] == evaluation_jobs(episodes=7, **arguments)


def test_evaluation_warns_when_it_must_repeat_states():
    with pytest.warns(UserWarning, match="repeat some of the 6 pairs"):
        jobs = evaluation_jobs(task_ids=[0, 1], state_ids=range(3), episodes=8, seed=0)
    assert [job.state_id for job in jobs] == [0, 0, 1, 1, 2, 2, 0, 0]


@pytest.mark.parametrize(("episodes", "streams"), [(7, 3), (2, 5), (6, 6), (1, 1)])
def test_dealing_loses_and_repeats_no_job(episodes, streams):
    jobs = evaluation_jobs(task_ids=[0, 1], state_ids=range(50), episodes=episodes, seed=0)
    hands = deal(jobs, streams)
    assert len(hands) == streams
    assert Counter(job for hand in hands for job in hand) == Counter(jobs)
    assert max(map(len, hands)) - min(map(len, hands)) <= 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"stream": 2, "num_streams": 2}, r"stream must lie in \[0, num_streams\), got stream=2"),
        ({"group_size": 0}, "group_size must be at least 1, got 0"),
        ({"task_ids": []}, "task_ids must be at least one id"),
        ({"task_ids": [-1]}, "task_ids must be at least one id, none below 0"),
        ({"state_ids": range(0)}, "state_ids must hold at least one id"),
        ({"seed": -1}, "seed must be at least 0, got -1"),
        ({"start": -1}, "start must be at least 0, got -1"),
    ],
)
def test_training_jobs_name_the_argument_that_is_wrong(changes, message):
    with pytest.raises(ValueError, match=message):
        take(1, **changes)


def test_evaluation_and_dealing_refuse_nothing_to_do():
    with pytest.raises(ValueError, match="episodes must be at least 1, got 0"):
        evaluation_jobs(task_ids=[0], state_ids=range(9), episodes=0, seed=0)
    with pytest.raises(ValueError, match="streams must be at least 1, got 0"):
        deal([], 0)


def test_pinned_streams_keep_to_one_task_and_share_the_tasks_evenly():
    streams = [
        training_jobs(
            task_ids=[4, 5], state_ids=range(9), seed=0, stream=stream, num_streams=8, group_size=2, pin_tasks=True
        )
        for stream in range(8)
    ]
    played = [[next(stream) for _ in range(6)] for stream in streams]
    assert [{job.task_id for job in jobs} for jobs in played] == [{4}, {4}, {5}, {5}, {4}, {4}, {5}, {5}]
    assert played[0] == played[1]  # a group still shares its jobs
    assert len({job.state_id for job in played[0]}) > 1
    with pytest.raises(ValueError, match="pin_tasks needs num_streams to be a multiple of 4, got num_streams=6"):
        training_jobs(
            task_ids=[4, 5], state_ids=range(9), seed=0, stream=0, num_streams=6, group_size=2, pin_tasks=True
        )
