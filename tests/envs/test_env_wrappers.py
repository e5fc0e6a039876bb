"""ActionChunk, EpisodeQueue and the readers of vector infos, on an environment whose every number is known."""

import gymnasium as gym
import numpy as np
import pytest

from vla_accel.envs.base import (
    ActionChunk,
    EpisodeQueue,
    read_idle,
    read_step,
    stack_final,
    to_observation,
)
from vla_accel.types import Episode, Job


class Walk(gym.Env):
    """Walks along a line by the action; solved at `goal` or beyond. Reward: the position. Counts all its steps."""

    def __init__(self, goal=3.0, ends=True):
        self.goal, self.ends, self.steps, self.resets = goal, ends, 0, []
        self.instructions = ["walk", "run"]
        self.observation_space = gym.spaces.Dict(
            {
                "images": gym.spaces.Dict({"eye": gym.spaces.Box(0, 255, (4, 4, 3), np.uint8)}),
                "state": gym.spaces.Box(-np.inf, np.inf, (1,), np.float32),
                "task_id": gym.spaces.Discrete(2),
            }
        )
        self.action_space = gym.spaces.Box(-1.0, 2.0, (1,), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.resets.append((seed, options))
        self.x, self.task_id = 0.0, (options or {}).get("task_id", 0)
        return self.observe(), {}

    def observe(self):
        image = np.full((4, 4, 3), int(abs(self.x)), np.uint8)
        return {"images": {"eye": image}, "state": np.array([self.x], np.float32), "task_id": np.int64(self.task_id)}

    def step(self, action):
        self.steps += 1
        self.x += float(action[0])
        success = self.x >= self.goal
        return self.observe(), self.x, self.ends and success, False, {"success": success}


class DarkWalk(Walk):
    """A walk with cameras that can be switched; keeps count of the pictures taken."""

    on, pictures = True, 0

    def set_rendering(self, on):
        self.on = on

    def render_observation(self):
        self.pictures += 1
        return super().observe()

    def observe(self):
        if self.on:
            return self.render_observation()
        return {**super().observe(), "images": {"eye": np.zeros((4, 4, 3), np.uint8)}}


def chunk(*values):
    return np.array(values, np.float32).reshape(-1, 1)


def jobs(count):
    return [Job(task_id=index % 2, state_id=10 + index, seed=100 + index) for index in range(count)]


def test_a_chunk_equals_its_steps_one_by_one():
    one, many = Walk(), ActionChunk(Walk(), 3)
    one.reset()
    many.reset()
    rewards = [one.step(np.array([a], np.float32))[1] for a in (0.5, -1.0, 2.0)]
    obs, reward, terminated, truncated, info = many.step(chunk(0.5, -1.0, 2.0))
    assert rewards == [0.5, -0.5, 1.5]
    assert reward == 1.5
    np.testing.assert_array_equal(obs["state"], one.observe()["state"])
    assert (terminated, truncated) == (False, False)
    assert info == {"success": False, "executed": 3, "success_step": None, "success_at_end": False}


def test_a_chunk_stops_where_the_episode_ends():
    env = ActionChunk(Walk(goal=3.0), 4)
    env.reset()
    obs, reward, terminated, truncated, info = env.step(chunk(1.0, 2.0, 2.0, 2.0))
    assert env.unwrapped.steps == 2
    assert (reward, terminated, truncated) == (1.0 + 3.0, True, False)
    assert obs["state"] == [3.0]
    assert (info["executed"], info["success"], info["success_at_end"]) == (2, True, True)


def test_a_chunk_stops_at_the_time_limit():
    env = ActionChunk(gym.wrappers.TimeLimit(Walk(goal=99.0), 3), 2)
    env.reset()
    assert env.step(chunk(1, 1))[2:4] == (False, False)
    *_, terminated, truncated, info = env.step(chunk(1, 1))
    assert (terminated, truncated, info["executed"]) == (False, True, 1)


def test_success_in_the_middle_of_a_chunk_is_remembered_when_it_does_not_last():
    env = ActionChunk(Walk(goal=2.0, ends=False), 3)
    env.reset()
    info = env.step(chunk(2.0, -1.0, 0.0))[4]
    assert (info["success"], info["success_step"], info["success_at_end"]) == (True, 1, False)


@pytest.mark.parametrize(("actions", "shown"), [((1, 0, 1, 0), 2), ((1, 2, 0, 0), 3)])
def test_a_chunk_takes_one_picture_and_shows_its_last_state(actions, shown):
    env = ActionChunk(gym.wrappers.TimeLimit(DarkWalk(goal=3.0), 50), 4)
    env.reset()
    env.unwrapped.pictures = 0
    obs = env.step(chunk(*actions))[0]
    assert env.unwrapped.pictures == 1
    assert env.unwrapped.on
    assert np.unique(obs["images"]["eye"]).tolist() == [shown]
    assert obs["state"] == [shown]


def test_chunk_space_repeats_the_bounds_of_one_action():
    space = ActionChunk(Walk(), 2).action_space
    assert space == gym.spaces.Box(-1.0, 2.0, (2, 1), np.float32)


def test_chunk_refuses_a_wrong_shape_and_numbers_that_are_not_finite():
    env = ActionChunk(Walk(), 2)
    env.reset()
    with pytest.raises(ValueError, match=r"\[K, A\] = \(2, 1\), got \(3, 1\)"):
        env.step(chunk(0, 0, 0))
    with pytest.raises(ValueError, match="not finite"):
        env.step(chunk(0, np.nan))
    assert env.unwrapped.steps == 0
    with pytest.raises(ValueError, match="chunk_size must be at least 1, got 0"):
        ActionChunk(Walk(), 0)


def test_queue_resets_with_the_seed_and_ids_of_each_job():
    env = EpisodeQueue(ActionChunk(Walk(), 1), jobs(2))
    assert env.reset()[1] == {"idle": False}
    obs, info = env.reset()
    assert info == {"idle": False}
    assert obs["task_id"] == 1
    assert env.unwrapped.resets == [(100, {"task_id": 0, "state_id": 10}), (101, {"task_id": 1, "state_id": 11})]


def test_queue_reports_the_whole_episode_at_its_end():
    env = EpisodeQueue(ActionChunk(Walk(goal=3.0), 2), jobs(1))
    env.reset()
    *_, info = env.step(chunk(1.0, 0.5))
    assert info == {"executed": 2, "success": False, "idle": False}
    _, reward, terminated, truncated, info = env.step(chunk(1.5, 0.0))
    assert (reward, terminated, truncated) == (3.0, True, False)
    assert info["episode"] == Episode(
        job=jobs(1)[0], success=True, success_at_end=True, steps=3, total_reward=1.0 + 1.5 + 3.0, truncated=False,
        success_step=3,
    )  # fmt: skip


def test_queue_starts_each_episode_with_fresh_counters():
    env = EpisodeQueue(ActionChunk(Walk(goal=2.0), 1), jobs(2))
    for start in (1.5, 0.25):
        env.reset()
        env.step(chunk(start))
        *_, info = env.step(chunk(2.0))
        assert info["episode"].steps == 2
        assert info["episode"].total_reward == start + start + 2.0


def test_queue_tells_success_at_any_step_from_success_at_the_end():
    env = EpisodeQueue(ActionChunk(gym.wrappers.TimeLimit(Walk(goal=2.0, ends=False), 3), 1), jobs(1))
    env.reset()
    for action in (2.0, -1.0, 0.0):
        *_, info = env.step(chunk(action))
    episode = info["episode"]
    assert (episode.success, episode.success_at_end, episode.truncated, episode.steps) == (True, False, True, 3)


@pytest.mark.parametrize(("chunk_size", "actions"), [(1, (1, 0, 1, -1, 1, 0)), (4, (1, 0, 1, -1, 1, 0)), (3, (0,) * 6)])
def test_queue_tells_the_step_of_the_first_success_where_it_does_not_end_the_episode(chunk_size, actions):
    env = EpisodeQueue(ActionChunk(gym.wrappers.TimeLimit(Walk(goal=2.0, ends=False), 6), chunk_size), jobs(2))
    for played in (actions, (0,) * 6):
        env.reset()
        padded = np.array([*played, 0, 0], np.float32)
        for begin in range(0, 6, chunk_size):
            *_, info = env.step(padded[begin : begin + chunk_size, None])
        assert info["episode"].steps == 6
        assert info["episode"].success_step == (3 if any(played) else None)


def test_an_end_by_the_task_at_the_time_limit_is_no_truncation():
    env = EpisodeQueue(ActionChunk(gym.wrappers.TimeLimit(Walk(goal=2.0), 1), 1), jobs(1))
    env.reset()
    _, _, terminated, truncated, info = env.step(chunk(2.0))
    assert (terminated, truncated, info["episode"].truncated) == (True, False, False)


def test_a_queue_without_jobs_idles_and_lets_the_simulator_rest():
    env = EpisodeQueue(ActionChunk(Walk(), 2), [])
    obs, info = env.reset()
    assert info == {"idle": True}
    assert env.observation_space.contains(obs)
    obs, reward, terminated, truncated, info = env.step(chunk(2.0, 2.0))
    assert (reward, terminated, truncated) == (0.0, False, False)
    assert info == {"executed": 0, "success": False, "idle": True}
    assert (obs["state"].sum(), obs["images"]["eye"].sum(), int(obs["task_id"])) == (0, 0, 0)
    assert (env.unwrapped.steps, env.unwrapped.resets) == (0, [])


def test_queue_refuses_seeds_and_options_of_its_caller():
    env = EpisodeQueue(ActionChunk(Walk(), 1), jobs(1))
    with pytest.raises(ValueError, match="the jobs decide"):
        env.reset(seed=3)
    with pytest.raises(ValueError, match="the jobs decide"):
        env.reset(options={"task_id": 0})


def vector(streams, limit=3, chunk_size=2):
    def build(stream):
        env = gym.wrappers.TimeLimit(Walk(goal=3.0), limit)
        return lambda: EpisodeQueue(ActionChunk(env, chunk_size), stream)

    return gym.vector.SyncVectorEnv(
        [build(stream) for stream in streams], autoreset_mode=gym.vector.AutoresetMode.SAME_STEP
    )


def test_read_step_separates_ended_running_and_idle_environments():
    envs = vector([jobs(2), jobs(1), []])
    _, infos = envs.reset()
    assert read_idle(infos, 3).tolist() == [False, False, True]

    obs, *_, infos = envs.step(np.stack([chunk(2, 2), chunk(1, 0), chunk(2, 2)]))
    info = read_step(infos, 3)
    assert info.executed.tolist() == [2, 2, 0]
    assert info.executed.dtype == np.int64
    assert info.idle.tolist() == [False, False, True]
    assert [(index, episode.job, episode.success) for index, episode in info.episodes] == [(0, jobs(2)[0], True)]
    [(index, last)] = info.final_obs
    assert (index, last["state"].tolist()) == (0, [4.0])
    assert obs["state"][0] == 0.0  # the stacked observation already is the next episode's

    *_, terminated, truncated, infos = envs.step(np.stack([chunk(0, 0), chunk(0, 0), chunk(0, 0)]))
    info = read_step(infos, 3)
    assert (terminated.tolist(), truncated.tolist()) == ([False] * 3, [False, True, False])
    assert info.executed.tolist() == [2, 1, 0]
    assert info.idle.tolist() == [False, True, True]
    assert info.episodes[0][1].steps == 3
    assert info.final_obs[0][1]["state"].tolist() == [1.0]


def test_read_step_works_where_all_environments_end_together():
    envs = vector([jobs(1), jobs(1)])
    envs.reset()
    info = read_step(envs.step(np.stack([chunk(2, 2), chunk(1, 2)]))[4], 2)
    assert info.executed.tolist() == [2, 2]
    assert info.idle.tolist() == [True, True]
    assert [index for index, _ in info.episodes] == [0, 1]


def test_read_step_names_environments_that_report_nothing():
    with pytest.raises(RuntimeError, match=r"\[0, 1\] did not report `executed`"):
        read_step({}, 2)
    with pytest.raises(RuntimeError, match="reported `idle`"):
        read_idle({}, 2)


def test_stacked_final_observations_become_an_observation_in_their_order():
    envs = vector([jobs(2)[1:], jobs(1)])
    envs.reset()
    info = read_step(envs.step(np.stack([chunk(2, 1), chunk(1, 2)]))[4], 2)
    observation = to_observation(stack_final(info.final_obs), ["walk", "run"])
    assert observation.instructions == ["run", "walk"]
    assert observation.state.tolist() == [[3.0], [3.0]]
    assert observation.images["eye"].shape == (2, 4, 4, 3)
    assert (observation.state.dtype, observation.images["eye"].dtype) == (np.float32, np.uint8)
    with pytest.raises(ValueError, match="no episode ended"):
        stack_final([])
