"""Meta-World itself: contract, pictures, experts, chunks, workers. Needs the extra and OpenGL."""

import warnings

import numpy as np
import pytest

from vla_accel.config import SimulatorConfig
from vla_accel.demos import record
from vla_accel.envs import check_env, make_env, make_vector_env, read_step
from vla_accel.envs.base import ActionChunk
from vla_accel.envs.metaworld_tasks import INSTRUCTIONS
from vla_accel.types import Job

pytestmark = pytest.mark.sim
pytest.importorskip("metaworld")

FAST = {"image_size": 64, "quality": "fast"}


@pytest.fixture(autouse=True)
def _quiet_experts():
    """The scripted policies warn whenever a movement is cut off."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Constant")
        yield


def begin(name="reach", state_id=0, **options):
    env = make_env(f"metaworld:{name}", **{**FAST, **options})
    return env, env.reset(options={"task_id": 0, "state_id": state_id})[0]


@pytest.mark.parametrize("options", [{}, {"action_dim": 7, "cameras": ["topview", "gripperPOV"], "reward": "dense"}])
def test_metaworld_keeps_the_contract(options):
    env = make_env("metaworld:reach,button-press-topdown", **{**FAST, **options})
    check_env(env)
    env.close()


def test_the_words_and_the_experts_cover_exactly_the_tasks_of_the_package():
    import metaworld
    from metaworld.policies import ENV_POLICY_MAP

    assert set(INSTRUCTIONS) == set(metaworld.ALL_V3_ENVIRONMENTS) == set(ENV_POLICY_MAP)


@pytest.mark.parametrize("task", ["reach", "push", "drawer-open", "button-press-topdown", "pick-place"])
def test_the_scripted_expert_solves_and_ends_the_episode_with_reward_1(task):
    solved = 0
    env, _ = begin(task)
    env.set_rendering(False)
    for state_id in range(3):
        env.reset(options={"task_id": 0, "state_id": state_id})
        for _ in range(150):
            _, reward, terminated, truncated, info = env.step(env.expert_action())
            assert not truncated
            assert reward == float(info["success"]) == float(terminated)
            if terminated:
                solved += 1
                break
    env.close()
    assert solved == 3


@pytest.mark.parametrize("task", ["reach", "push", "pick-place"])
def test_the_first_picture_shows_the_goal_where_it_is_whatever_was_played_before(task):
    env, _ = begin(task)
    for state_id in range(4):
        obs = env.reset(options={"task_id": 0, "state_id": state_id})[0]
        core = env._now.env
        np.testing.assert_array_equal(core.data.site("goal").xpos, core._target_pos)
    fresh, expected = begin(task, 3)
    np.testing.assert_array_equal(obs["images"]["corner2"], expected["images"]["corner2"])
    for each in (env, fresh):
        each.close()


def test_full_quality_is_the_picture_of_the_package_itself_turned_upright():
    import metaworld

    env, obs = begin("push", 5, quality="full")
    sim = env._now.env
    from gymnasium.envs.mujoco.mujoco_rendering import MujocoRenderer

    renderer = MujocoRenderer(sim.model, sim.data, width=64, height=64, max_geom=1000, camera_name="corner2")
    np.testing.assert_array_equal(obs["images"]["corner2"], renderer.render("rgb_array")[::-1, ::-1])
    renderer.close()
    assert isinstance(sim, metaworld.ALL_V3_ENVIRONMENTS["push-v3"])
    np.testing.assert_allclose(sim.model.camera("corner2").pos, [0.75, 0.075, 0.7])


def test_fast_quality_shows_the_same_scene_without_shadows():
    full, fast = (
        begin("push", 5, quality=quality)[1]["images"]["corner2"].astype(float) for quality in ("full", "fast")
    )
    difference = np.abs(full - fast)
    assert 0 < difference.mean() < 20
    assert np.median(difference) < 8  # most of the picture lies in no shadow and on no edge


def test_the_state_is_hand_and_gripper_and_the_gripper_closes_at_plus_1():
    env, obs = begin()
    np.testing.assert_allclose(obs["state"][:3], env._now.env.get_endeff_pos(), atol=1e-6)
    widths = []
    for close in (1.0, -1.0):
        for _ in range(40):
            obs = env.step(np.array([0, 0, 0, close], np.float32))[0]
        widths.append(float(obs["state"][3]))
    assert widths[0] < widths[1] - 0.2
    env.close()


def test_seven_dimensions_move_as_the_four_of_them_that_count():
    four, _ = begin(state_id=2)
    seven, _ = begin(state_id=2, action_dim=7)
    for action in np.random.default_rng(0).uniform(-1, 1, (5, 7)).astype(np.float32):
        one = four.step(action[[0, 1, 2, 6]])[0]
        two = seven.step(action)[0]
        np.testing.assert_array_equal(one["state"], two["state"])
    np.testing.assert_array_equal(one["images"]["corner2"], two["images"]["corner2"])


def test_the_dense_reward_lies_in_0_to_1_and_rises_towards_the_goal():
    env, _ = begin(reward="dense")
    env.set_rendering(False)
    rewards = [env.step(env.expert_action())[1] for _ in range(30)]
    assert all(0 <= reward <= 1 for reward in rewards)
    assert rewards[-1] > rewards[0]


def test_a_chunk_shows_and_pays_what_its_steps_one_by_one_do_with_one_picture(monkeypatch):
    single, _ = begin("button-press-topdown", 1)
    chunked = ActionChunk(begin("button-press-topdown", 1)[0], 8)
    renderer, drawn = chunked.unwrapped._now._renderer, []
    draw = renderer.render
    monkeypatch.setattr(renderer, "render", lambda: drawn.append(1) or draw())
    terminated, chunks = False, 0
    while not terminated:
        steps = []
        while len(steps) < 8 and not (steps and steps[-1][2]):
            action = single.expert_action()
            steps.append((*single.step(action), action))
        padded = np.stack([step[-1] for step in steps] + [action] * (8 - len(steps)))
        obs, reward, terminated, truncated, info = chunked.step(padded)
        chunks += 1
        assert (reward, terminated) == (sum(step[1] for step in steps), steps[-1][2])
        assert (truncated, info["executed"], info["success"]) == (False, len(steps), steps[-1][4]["success"])
        assert len(drawn) == chunks
        np.testing.assert_array_equal(obs["state"], steps[-1][0]["state"])
        np.testing.assert_array_equal(obs["images"]["corner2"], steps[-1][0]["images"]["corner2"])
    assert reward == 1.0
    assert len(steps) < 8  # the success lies inside a chunk
    for env in (single, chunked):
        env.close()


def test_demonstrations_can_be_recorded():
    config = SimulatorConfig(name="metaworld:reach", options={"image_size": "32", "quality": "fast"})
    demos = record(config, episodes=2, seed=0)
    assert demos.success.all()
    assert demos.action.shape[1] == 4
    assert demos.instructions == ["move the gripper to the goal"]


def test_a_worker_process_plays_the_same_episode_as_this_one():
    jobs = [Job(task_id=0, state_id=4, seed=0)]
    envs = make_vector_env("metaworld:reach", num_envs=1, chunk_size=4, jobs=[jobs], env_options=FAST)
    here = ActionChunk(begin(state_id=4)[0], 4)
    try:
        envs.reset()
        for actions in np.random.default_rng(0).uniform(-1, 1, (3, 4, 4)).astype(np.float32):
            obs, *_, infos = envs.step(actions[None])
            expected = here.step(actions)[0]
            np.testing.assert_array_equal(obs["images"]["corner2"][0], expected["images"]["corner2"])
            np.testing.assert_array_equal(obs["state"][0], expected["state"])
        assert read_step(infos, 1).executed.tolist() == [4]
    finally:
        envs.close()
