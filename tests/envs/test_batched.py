"""One simulator of many environments does what many simulators of one do, told by one that counts."""

import gymnasium as gym
import numpy as np
import pytest
import torch
from helpers.counting_env import CountingEnv
from helpers.policies import CountingPolicy

from vla_accel.envs import check_env, make_vector_env, read_idle, read_step
from vla_accel.envs.batched import Batched
from vla_accel.rollout import collect, start
from vla_accel.types import Job


class Together:
    """Counting environments that always step all at once, as those of a GPU do: also those that should rest."""

    def __init__(self, num_envs):
        self.num_envs = num_envs
        self.envs = [CountingEnv() for _ in range(num_envs)]
        self.begun, self.looks = [], 0
        for env in self.envs:
            env.reset(options={"task_id": 1, "state_id": 0})

    def begin(self, rows, jobs):
        for row, job in zip(rows, jobs, strict=True):
            self.begun.append((row, job.state_id))
            self.envs[row].reset(options={"task_id": job.task_id, "state_id": job.state_id})

    def step(self, action, running):
        assert running.shape == (self.num_envs,)
        results = [env.step(row) for env, row in zip(self.envs, action, strict=True)]
        return tuple(np.array(x) for x in zip(*[(r[1], r[2], r[4]["success"]) for r in results], strict=True))

    def observe(self):
        self.looks += 1
        shown = [env._observe() for env in self.envs]
        return {
            "images": {"top": np.stack([obs["images"]["top"] for obs in shown])},
            "state": np.stack([obs["state"] for obs in shown]),
            "task_id": np.array([obs["task_id"] for obs in shown]),
        }

    def close(self):
        self.closed = True


class CountingTogether(CountingEnv):
    """A counting environment of which there can be many in one."""

    vectorization = "batched"
    made = None

    def batch(self, num_envs):
        CountingTogether.made = Together(num_envs)
        return CountingTogether.made


NAME = f"{__name__}:CountingTogether"
JOBS = [
    [Job(task_id=0, state_id=13, seed=0), Job(task_id=1, state_id=7, seed=0), Job(task_id=0, state_id=21, seed=0)],
    [Job(task_id=1, state_id=4, seed=0)],
    [],
    [Job(task_id=0, state_id=number, seed=0) for number in (12, 15, 14, 13, 11, 12)],
]
"""Episodes that end within chunks and at their ends, solved or cut; environments that run out of jobs, or have none."""


def make(name, jobs=JOBS, **options):
    return make_vector_env(name, num_envs=len(jobs), chunk_size=3, jobs=jobs, max_episode_steps=5, **options)


def plain(obs):
    return [np.asarray(x).tolist() for x in (obs["images"]["top"], obs["state"], obs["task_id"])]


def course(envs, decisions=9):
    """All that a vector environment says."""
    obs, infos = envs.reset()
    told = [(plain(obs), read_idle(infos, envs.num_envs).tolist())]
    for _ in range(decisions):
        obs, reward, terminated, truncated, infos = envs.step(np.zeros(envs.action_space.shape, np.float32))
        info = read_step(infos, envs.num_envs)
        final = [(env, plain(single)) for env, single in info.final_obs]
        numbers = [x.tolist() for x in (reward, terminated, truncated, info.executed, info.idle, info.voided)]
        told.append((plain(obs), numbers, info.episodes, final))
    return told


@pytest.mark.parametrize("num_groups", [1, 2])
def test_one_simulator_for_all_tells_what_one_for_each_does(num_groups):
    expected = course(make("helpers.counting_env:CountingEnv"))
    assert course(make(NAME, num_groups=num_groups)) == expected
    episodes = [record for step in expected[1:] for _, record in step[2]]
    assert len(episodes) == sum(map(len, JOBS))
    assert {episode.truncated for episode in episodes} == {True, False}
    assert {episode.success_step for episode in episodes} == {None, 1, 2, 3, 4, 5}


def test_it_looks_only_where_an_episode_ends_and_after_the_chunk():
    envs = make(NAME, jobs=[[Job(task_id=1, state_id=1, seed=0)]] * 2)
    envs.reset()
    looks = CountingTogether.made.looks
    envs.step(np.zeros((2, 3, 2), np.float32))
    assert CountingTogether.made.looks == looks + 1
    envs.step(np.zeros((2, 3, 2), np.float32))  # cut after its second step
    assert CountingTogether.made.looks == looks + 3


def test_a_rollout_of_one_simulator_for_all_equals_that_of_one_for_each():
    rollouts = []
    for name in ("helpers.counting_env:CountingEnv", NAME):
        envs, policy = make(name), CountingPolicy(3)
        rollouts.append(collect(policy, policy, envs, start(envs), num_decisions=7, device=torch.device("cpu")))
    for name in ("reward", "executed", "terminated", "truncated", "valid", "value", "next_value"):
        assert torch.equal(getattr(rollouts[0], name), getattr(rollouts[1], name)), name
    assert rollouts[0].episodes == rollouts[1].episodes


@pytest.mark.parametrize("decisions", range(8))
def test_episodes_are_resumed_where_they_were(decisions):
    envs = make(NAME)
    obs, _ = envs.reset()
    for _ in range(decisions):
        obs, *_ = envs.step(np.zeros((4, 3, 2), np.float32))
    for other in ("helpers.counting_env:CountingEnv", NAME):
        again = make(other)
        again.set_attr("resume_from", envs.call("episode_state"))
        resumed, infos = again.reset()
        assert plain(resumed) == plain(obs)
        assert read_idle(infos, 4).tolist() == [play.job is None for play in envs._plays]
        rest, expected = (course_from(each) for each in (again, make_at(decisions)))
        assert rest == expected


def make_at(decisions):
    envs = make(NAME)
    envs.reset()
    for _ in range(decisions):
        envs.step(np.zeros((4, 3, 2), np.float32))
    return envs


def course_from(envs):
    told = []
    for _ in range(5):
        obs, reward, *_, infos = envs.step(np.zeros((4, 3, 2), np.float32))
        told.append((plain(obs), reward.tolist(), read_step(infos, 4).episodes))
    return told


def test_cameras_stay_in_the_order_of_the_simulator():
    class Wide(Together):
        def observe(self):
            shown = super().observe()
            return shown | {"images": {name: shown["images"]["top"].copy() for name in ("wrist", "front")}}

    space = CountingEnv().observation_space
    images = gym.spaces.Dict([(name, space["images"]["top"]) for name in ("wrist", "front")])
    env = CountingEnv()
    env.observation_space = gym.spaces.Dict(images=images, state=space["state"], task_id=space["task_id"])
    envs = Batched(Wide(4), JOBS, env, chunk_size=3, max_episode_steps=5)
    obs, _ = envs.reset()
    final = read_step(envs.step(np.zeros((4, 3, 2), np.float32))[4], 4).final_obs
    assert list(obs["images"]) == list(envs.single_observation_space["images"]) == ["wrist", "front"]
    assert list(final[0][1]["images"]) == ["wrist", "front"]


def test_what_does_not_fit_is_refused():
    envs = make(NAME)
    with pytest.raises(ValueError, match="the jobs decide"):
        envs.reset(seed=1)
    envs.reset()
    with pytest.raises(ValueError, match=r"\[N, K, A\] = \(4, 3, 2\), got \(4, 2, 2\)"):
        envs.step(np.zeros((4, 2, 2), np.float32))
    with pytest.raises(ValueError, match="not finite"):
        envs.step(np.full((4, 3, 2), np.nan, np.float32))
    with pytest.raises(ValueError, match="no single environments to call 'render'"):
        envs.call("render")
    with pytest.raises(ValueError, match="no single environments to set 'frames'"):
        envs.set_attr("frames", [])
    envs.close()
    assert CountingTogether.made.closed


def test_the_check_asks_for_the_simulator_of_many():
    class Without(CountingEnv):
        vectorization = "batched"

    check_env(CountingTogether())
    with pytest.raises(ValueError, match=r"vectorization 'batched' needs batch\(num_envs\)"):
        check_env(Without())
