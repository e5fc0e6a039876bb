"""Environments of other packages through the general adapter. Each needs its package; Fetch needs OpenGL."""

import importlib.util

import numpy as np
import pytest

from vla_accel.envs import check_env, make_env, make_vector_env, read_step
from vla_accel.types import Job

pytestmark = pytest.mark.sim

CASES = {
    "gym_pusht": ("gym:gym_pusht:gym_pusht/PushT-v0", {"make": {"obs_type": "pixels_agent_pos"}, "image_key": "pixels",
                                                       "scale_actions": True}, 300, "push t"),
    "gymnasium_robotics": ("gym:gymnasium_robotics:FetchReach-v4", {"state_key": "observation"}, 50, "fetch reach"),
}  # fmt: skip


@pytest.mark.parametrize("package", sorted(CASES))
def test_an_environment_of_another_package_keeps_the_contract_and_is_played_in_a_worker(package):
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    name, options, limit, words = CASES[package]
    options = {"image_size": 64, **options}
    env = make_env(name, **options)
    check_env(env)
    assert (env.max_episode_steps, env.instructions) == (limit, [words])
    envs = make_vector_env(
        name, num_envs=1, chunk_size=8, jobs=[[Job(task_id=0, state_id=1, seed=0)]], max_episode_steps=20,
        env_options=options,
    )  # fmt: skip
    try:
        begin, _ = envs.reset()
        executed, episodes = [], []
        for _ in range(3):
            obs, *_, infos = envs.step(np.zeros((1, *envs.single_action_space.shape), np.float32))
            info = read_step(infos, 1)
            executed += info.executed.tolist()
            episodes += info.episodes
        assert executed == [8, 8, 4]
        assert [episode.job.state_id for _, episode in episodes] == [1]
        assert begin["images"]["main"].std() > 5  # there is something to see
        assert obs["images"]["main"].shape == (1, 64, 64, 3)
    finally:
        envs.close()
