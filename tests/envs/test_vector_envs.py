"""Names, options, and vector environments in one process and in several."""

import json
import os
import sys

import gymnasium as gym
import numpy as np
import pytest

from vla_accel.config import SimulatorConfig
from vla_accel.demos import Demonstrations, record
from vla_accel.envs import (
    EpisodeQueue,
    deal,
    evaluation_jobs,
    make_env,
    make_vector_env,
    read_idle,
    read_step,
    stack_final,
    to_observation,
    training_jobs,
)
from vla_accel.envs.make import REGISTRY
from vla_accel.envs.tabletop import Tabletop

SMALL = {"image_size": 16, "cameras": ("wrist", "front")}


def start(num_envs, episodes=6, chunk_size=3, env_options=SMALL, **options):
    jobs = evaluation_jobs(task_ids=range(4), state_ids=range(100), episodes=episodes, seed=0)
    return make_vector_env(
        "tabletop",
        num_envs=num_envs,
        chunk_size=chunk_size,
        jobs=deal(jobs, num_envs),
        env_options=env_options,
        **options,
    )


def play(envs, decisions, seed=0):
    """Everything that `decisions` random decisions bring to light."""
    rng = np.random.default_rng(seed)
    obs, infos = envs.reset()
    steps = [(obs, read_idle(infos, envs.num_envs))]
    for _ in range(decisions):
        actions = rng.uniform(-1, 1, envs.action_space.shape).astype(np.float32)
        *results, infos = envs.step(actions)
        steps.append((*results, vars(read_step(infos, envs.num_envs))))
    envs.close()
    return steps


def assert_same(one, other):
    if isinstance(one, dict):
        assert set(one) == set(other)
        for key in one:
            assert_same(one[key], other[key])
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other)
        for left, right in zip(one, other, strict=True):
            assert_same(left, right)
    else:
        np.testing.assert_array_equal(one, other)


@pytest.mark.dist
@pytest.mark.parametrize("context", ["forkserver", "spawn"])
def test_worker_processes_give_the_same_transitions_as_one_process(context, monkeypatch):
    monkeypatch.setattr("multiprocessing.get_all_start_methods", lambda: [context])
    results = {}
    for mode in ("sync", "async"):
        envs = start(2, episodes=3, max_episode_steps=7, vectorization=mode)
        assert getattr(envs, "_context", context) == context
        results[mode] = play(envs, 9)
    episodes = [record for step in results["sync"][1:] for _, record in step[4]["episodes"]]
    assert len(episodes) == 3
    assert results["sync"][-1][4]["idle"].tolist() == [True, True]
    assert_same(results["sync"], results["async"])


@pytest.mark.dist
def test_worker_processes_start_in_the_middle_of_a_training_stream_and_use_one_thread(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    arguments = {"task_ids": range(4), "state_ids": range(1000, 2000), "seed": 0, "num_streams": 2}
    streams = [training_jobs(stream=stream, start=5, **arguments) for stream in range(2)]
    envs = make_vector_env(
        "tabletop", num_envs=2, chunk_size=1, jobs=streams, vectorization="async", env_options={"image_size": 16}
    )
    try:
        obs, _ = envs.reset()
        assert obs["task_id"].tolist() == [
            next(training_jobs(stream=stream, start=5, **arguments)).task_id for stream in range(2)
        ]
        with open(f"/proc/{envs.processes[0].pid}/environ", "rb") as environ:
            assert b"OMP_NUM_THREADS=1" in environ.read().split(b"\0") or sys.platform != "linux"
    finally:
        envs.close()
    assert "OMP_NUM_THREADS" not in os.environ


def test_final_observation_is_the_last_of_its_own_episode():
    jobs = evaluation_jobs(task_ids=[0], state_ids=range(9), episodes=2, seed=0)
    envs = make_vector_env("tabletop", num_envs=1, chunk_size=2, jobs=[jobs], max_episode_steps=3, env_options=SMALL)
    alone = Tabletop(**SMALL)
    alone.reset(options={"task_id": 0, "state_id": 0})
    up = np.zeros((1, 2, 7), np.float32)
    up[..., 2] = 0.5
    for _ in range(3):
        expected = alone.step(up[0, 0])[0]
    envs.reset()
    envs.step(up)
    obs, _, _, truncated, infos = envs.step(up)
    info = read_step(infos, 1)
    assert truncated.tolist() == [True]
    assert info.executed.tolist() == [1]
    assert_same(info.final_obs[0][1], expected)
    first, _ = alone.reset(options={"task_id": 0, "state_id": 1})
    assert_same({"images": {k: v[0] for k, v in obs["images"].items()}, "state": obs["state"][0]},
                {"images": first["images"], "state": first["state"]})  # fmt: skip


@pytest.mark.parametrize(("num_envs", "episodes"), [(1, 3), (3, 7), (4, 2)])
def test_every_job_is_played_exactly_once_by_any_number_of_environments(num_envs, episodes):
    envs = start(num_envs, episodes=episodes, max_episode_steps=4)
    steps = play(envs, 2 * episodes + 1)
    played = [record.job for step in steps[1:] for _, record in step[4]["episodes"]]
    expected = evaluation_jobs(task_ids=range(4), state_ids=range(100), episodes=episodes, seed=0)
    assert sorted(map(str, played)) == sorted(map(str, expected))
    assert steps[-1][4]["idle"].all()
    assert steps[-1][4]["executed"].sum() == 0


def test_earlier_observations_survive_later_steps():
    envs = start(2)
    obs, _ = envs.reset()
    kept = obs["images"]["wrist"].copy()
    envs.step(np.ones((2, 3, 7), np.float32))
    np.testing.assert_array_equal(obs["images"]["wrist"], kept)


def test_a_vector_environment_tells_its_tables_and_limits():
    envs = start(2, chunk_size=5)
    assert envs.instructions[:2] == ["reach the red block", "reach the green block"]
    assert envs.state_ids == Tabletop().state_ids
    assert (envs.chunk_size, envs.max_episode_steps) == (5, 12)
    assert envs.single_action_space.shape == (5, 7)
    assert envs.metadata["autoreset_mode"] is gym.vector.AutoresetMode.SAME_STEP
    assert start(1, max_episode_steps=9).max_episode_steps == 9


def test_the_simulator_chooses_its_vectorization():
    assert isinstance(start(1), gym.vector.SyncVectorEnv)


def test_wrappers_come_in_order():
    wrappers, env = [], start(1).envs[0]
    while isinstance(env, gym.Wrapper):
        wrappers.append(type(env).__name__)
        env = env.env
    assert wrappers == ["EpisodeQueue", "ActionChunk", "TimeLimit"]
    assert isinstance(env, Tabletop)
    assert EpisodeQueue.__name__ == wrappers[0]


def test_unknown_names_list_the_known_ones_and_the_nearest():
    with pytest.raises(ValueError, match=r"unknown environment 'tabeltop'; known: .*\btabletop\b") as caught:
        make_env("tabeltop")
    assert "did you mean 'tabletop'?" in str(caught.value)
    with pytest.raises(ValueError, match="unknown environment 'no_such_package:Env'"):
        make_env("no_such_package:Env")
    with pytest.raises(ValueError, match="unknown environment 'tabletop:red'"):
        make_env("tabletop:red")


def test_unknown_options_list_the_known_ones_and_the_nearest():
    with pytest.raises(ValueError, match="'tabletop' has no option 'num_block'.*did you mean 'num_blocks'"):
        make_env("tabletop", num_block=3)


def test_a_prefix_hands_the_rest_of_the_name_to_its_factory(monkeypatch):
    monkeypatch.setitem(REGISTRY, "named:", f"{__name__}:named")
    monkeypatch.setattr(sys.modules[__name__], "named", lambda rest, **options: (rest, options), raising=False)
    assert make_env("named:a:b", size=3) == ("a:b", {"size": 3})
    with pytest.raises(ValueError, match=r"known: .*\bnamed:<name>.*\btabletop\b"):
        make_env("named:")


def test_a_class_of_ones_own_needs_no_registration():
    env = make_env("vla_accel.envs.tabletop:Tabletop", num_blocks=3)
    assert env.num_blocks == 3
    with pytest.raises(ValueError, match="has no attribute 'Nothing'"):
        make_env("vla_accel.envs.tabletop:Nothing")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_envs": 0, "jobs": []}, "num_envs must be at least 1, got 0"),
        ({"jobs": [[]]}, "jobs must hold one iterable per environment: expected 2, got 1"),
        ({"max_episode_steps": 0}, "max_episode_steps must be at least 1"),
        ({"vectorization": "threads"}, "vectorization must be 'sync', 'async' or None, got 'threads'"),
        ({"chunk_size": 0}, "chunk_size must be at least 1, got 0"),
        ({"jobs": [[], (job for job in [])], "vectorization": "async"}, r"jobs\[1\] is a generator"),
    ],
)
def test_make_vector_env_names_the_argument_that_is_wrong(changes, message):
    with pytest.raises(ValueError, match=message):
        make_vector_env("tabletop", **{"num_envs": 2, "chunk_size": 1, "jobs": [[], []], **changes})


CAMERAS = ["wrist", "front"]
"""Not in the order of the alphabet, in which Gymnasium sorts a mapping of spaces."""


@pytest.mark.parametrize("vectorization", ["sync", pytest.param("async", marks=pytest.mark.dist)])
@pytest.mark.parametrize("num_groups", [1, 2])
def test_cameras_stay_in_the_order_in_which_they_were_asked_for(vectorization, num_groups):
    """A policy reads its pictures by their order."""
    envs = start(2, max_episode_steps=3, vectorization=vectorization, num_groups=num_groups)
    try:
        first, _ = envs.reset()
        then, *_, infos = envs.step(np.zeros(envs.action_space.shape, np.float32))
    finally:
        envs.close()
    info = read_step(infos, 2)
    alone, _ = make_env("tabletop", **SMALL).reset(options={"task_id": 0, "state_id": 0})
    for images in (first["images"], then["images"], info.final_obs[0][1]["images"], alone["images"]):
        assert list(images) == CAMERAS
    assert list(to_observation(then, envs.instructions).images) == CAMERAS
    assert list(to_observation(stack_final(info.final_obs), envs.instructions).images) == CAMERAS
    np.testing.assert_array_equal(first["images"]["front"][0], alone["images"]["front"])


def test_demonstrations_keep_the_order_of_the_cameras(tmp_path):
    config = SimulatorConfig(name="tabletop", options={"cameras": json.dumps(CAMERAS), "image_size": "16"})
    demos = record(config, episodes=1, seed=0)
    demos.save(tmp_path / "demos")
    assert list(demos.images) == list(Demonstrations.load(tmp_path / "demos").images) == CAMERAS


@pytest.mark.parametrize("name", ["metaworld:reach", "tabletop"])
def test_spaces_hold_the_cameras_in_the_order_in_which_they_were_asked_for(name, monkeypatch):
    monkeypatch.setattr("vla_accel.envs.metaworld.installed", lambda: True)
    cameras = ["topview", "corner2"] if name != "tabletop" else CAMERAS
    env = make_env(name, cameras=cameras)
    assert list(env.observation_space["images"]) == cameras
