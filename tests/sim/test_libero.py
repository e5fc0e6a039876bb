"""LIBERO itself: contract, conventions, the quick reset against the original one, chunks, success. Needs the extra.

Each simulator takes 1.5 GB and several seconds, so the tests share one per suite.
"""

import importlib.util

import numpy as np
import pytest

from vla_accel.envs import check_env, make_env, make_vector_env, read_step
from vla_accel.envs.base import ActionChunk
from vla_accel.envs.libero import LIMITS
from vla_accel.envs.rotations import axis_angle
from vla_accel.types import Job

pytestmark = pytest.mark.sim
if importlib.util.find_spec("libero") is None:
    pytest.skip("LIBERO is not installed", allow_module_level=True)

SMALL = {"image_size": 64}
ACTIONS = np.random.default_rng(0).uniform(-1, 1, (64, 7)).astype(np.float32)


@pytest.fixture(scope="module")
def spatial():
    env = make_env("libero_spatial", **SMALL)
    yield env
    env.close()


def begin(env, state_id=0, task_id=0):
    env.set_rendering(True)
    return env.reset(options={"task_id": task_id, "state_id": state_id})[0]


def test_libero_keeps_the_contract(spatial, monkeypatch):
    # One task: each change to another one takes a new simulator.
    monkeypatch.setattr(spatial, "tasks", spatial.tasks[:1])
    monkeypatch.setattr(spatial, "instructions", spatial.instructions[:1])
    space = dict(spatial.observation_space.spaces) | {"task_id": type(spatial.observation_space["task_id"])(1)}
    monkeypatch.setattr(spatial, "observation_space", type(spatial.observation_space)(space))
    check_env(spatial)


@pytest.mark.parametrize("suite", sorted(LIMITS))
def test_a_suite_has_its_tasks_their_words_their_states_and_its_official_limit(suite):
    env = make_env(suite, **SMALL)
    assert len(env.tasks) == len(set(env.instructions)) == (90 if suite == "libero_90" else 10) or suite == "libero_90"
    assert env.max_episode_steps == LIMITS[suite]
    assert all(len(task.states()) == 50 for task in env.tasks)
    assert env.state_ids == {"train": range(40), "eval": range(40, 50)}
    assert make_env(suite, eval_states=50, **SMALL).state_ids["eval"] == range(50)


@pytest.fixture(scope="module")
def original(spatial):
    """The package's own simulator, reset as others do it, and its observation as others read it."""
    from vla_accel.envs.libero_package import build

    task = spatial.tasks[0]
    cameras = ["agentview", "robot0_eye_in_hand"]
    env = build(task.problem_file, image_size=64, cameras=cameras, multisampling=True, hard_reset=True)

    class Original:
        def reset(self, state_id):
            self.current()
            env.seed(0)
            env.reset()
            env.set_init_state(task.states()[state_id])
            self.current()
            for _ in range(10):
                obs, *_ = env.step([0, 0, 0, 0, 0, 0, -1])
            return self.read(obs)

        def step(self, action):
            self.current()
            return self.read(env.step(action)[0])

        def current(self):
            context = env.sim._render_context_offscreen
            if context is not None:
                context.gl_ctx.make_current()

        def read(self, obs):
            state = (obs["robot0_eef_pos"], axis_angle(obs["robot0_eef_quat"]), obs["robot0_gripper_qpos"])
            return {
                "agentview": obs["agentview_image"][::-1, ::-1],
                "wrist": obs["robot0_eye_in_hand_image"][::-1, ::-1],
                "state": np.concatenate(state).astype(np.float32),
            }

    yield Original()
    env.close()


@pytest.mark.parametrize("state_id", [3, 17])
def test_the_quick_reset_equals_the_original_one_to_the_last_bit(spatial, original, state_id):
    begin(spatial, 5)
    for action in ACTIONS[:3]:
        spatial.step(action)  # what happened before must leave no trace
    pairs = [(original.reset(state_id), begin(spatial, state_id))]
    pairs += [(original.step(action), spatial.step(action)[0]) for action in ACTIONS[:6]]
    for expected, obs in pairs:
        np.testing.assert_array_equal(obs["images"]["agentview"], expected["agentview"])
        np.testing.assert_array_equal(obs["images"]["wrist"], expected["wrist"])
        np.testing.assert_array_equal(obs["state"], expected["state"])


@pytest.mark.parametrize("executed", [8, 5])
def test_a_chunk_shows_what_its_steps_one_by_one_do(spatial, executed):
    # Where the time limit ends a chunk early, its picture is drawn afterwards: from what the cameras had noted.
    begin(spatial, 2)
    steps = [spatial.step(action)[0] for action in ACTIONS[:8]]

    class Limited(ActionChunk):
        pass

    import gymnasium as gym

    chunked = Limited(gym.wrappers.TimeLimit(spatial, executed), 8)
    spatial.set_rendering(True)
    chunked.reset(options={"task_id": 0, "state_id": 2})
    obs, _, terminated, truncated, info = chunked.step(ACTIONS[:8])
    assert (terminated, truncated, info["executed"]) == (False, True, executed)
    for camera in ("agentview", "wrist"):
        np.testing.assert_array_equal(obs["images"][camera], steps[executed - 1]["images"][camera])
    np.testing.assert_array_equal(obs["state"], steps[executed - 1]["state"])


def test_the_gripper_opens_at_minus_1_and_openvla_says_1(spatial):
    def width(action, steps=6):
        begin(spatial)
        spatial.set_rendering(False)
        for _ in range(steps):
            obs = spatial.step(np.array([0, 0, 0, 0, 0, 0, action], np.float32))[0]
        return float(obs["state"][6] - obs["state"][7])

    opened, closed = width(-1.0), width(1.0)
    assert closed < opened - 0.02
    try:
        spatial.gripper = "openvla"
        assert width(1.0) == opened
        assert width(0.0) == closed
    finally:
        spatial.gripper = "env"


def test_a_layout_of_the_simulators_own_follows_from_its_number(spatial):
    first, other, again = (begin(spatial, state_id)["images"]["agentview"] for state_id in (50, 51, 50))
    np.testing.assert_array_equal(first, again)
    assert (first != other).any()


GOALS = {
    "libero_spatial": 0,
    "libero_object": 0,
    "libero_goal": 0,
    "libero_10": 0,
    "libero_90": 7,
}


def fulfil(env):
    """Put things where the task wants them, by hand."""
    core, data = env._sim.env.env, env._sim.env.sim.data
    for predicate, *names in core.parsed_problem["goal_state"]:
        if predicate in ("on", "in"):
            thing, place = names
            joint = core.objects_dict[thing].joints[-1]
            if place in core.object_sites_dict:
                site = core.object_sites_dict[place]
                where = data.get_site_xpos(place).copy()
                assert site is not None
            else:
                where = data.body_xpos[core.obj_body_id[place]].copy()
            pose = data.get_joint_qpos(joint).copy()
            pose[:3] = where + [0, 0, 0.03]
            data.set_joint_qpos(joint, pose)
        else:
            name = names[0]
            joint = (core.objects_dict.get(name) or core.fixtures_dict.get(name) or core.object_sites_dict[name]).joints
            ranges = core.object_sites_dict[name].object_properties if name in core.object_sites_dict else None
            parent = core.get_object(core.object_sites_dict[name].parent_name) if ranges is not None else None
            properties = parent.object_properties["articulation"]
            key = {"open": "default_open_ranges", "close": "default_close_ranges", "turnon": "default_turnon_ranges"}
            for each in joint:
                data.set_joint_qpos(each, float(np.mean(properties[key[predicate]])))
    env._sim.env.sim.forward()


@pytest.mark.parametrize("suite", sorted(GOALS))
def test_a_fulfilled_goal_is_success_with_reward_1_and_ends_the_episode(suite):
    env = make_env(suite, **SMALL)
    try:
        begin(env, 0, GOALS[suite])
        env.set_rendering(False)
        _, reward, terminated, _, info = env.step(np.array([0, 0, 0, 0, 0, 0, -1], np.float32))
        assert (reward, terminated, info["success"]) == (0.0, False, False)
        fulfil(env)
        for _ in range(30):
            _, reward, terminated, _, info = env.step(np.array([0, 0, 0, 0, 0, 0, -1], np.float32))
            if terminated:
                break
        assert (reward, terminated, info["success"]) == (1.0, True, True)
    finally:
        env.close()


def test_a_worker_process_plays_the_same_episode_as_this_one(spatial):
    jobs = [Job(task_id=0, state_id=4, seed=0)]
    envs = make_vector_env("libero_spatial", num_envs=1, chunk_size=4, jobs=[jobs], env_options=SMALL)
    try:
        begin(spatial, 4)
        here = ActionChunk(spatial, 4)
        envs.reset()
        for actions in ACTIONS[:8].reshape(2, 4, 7):
            obs, *_, infos = envs.step(actions[None])
            expected = here.step(actions)[0]
            np.testing.assert_array_equal(obs["images"]["agentview"][0], expected["images"]["agentview"])
            np.testing.assert_array_equal(obs["state"][0], expected["state"])
        assert read_step(infos, 1).executed.tolist() == [4]
    finally:
        envs.close()


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("cameras", ["front"]), ("image_size", 8), ("quality", "best"), ("gripper", "pi0"), ("wait_steps", 0),
        ("eval_states", 51), ("max_episode_steps", 0),
    ],
)  # fmt: skip
def test_a_bad_option_is_refused_by_name(option, value):
    with pytest.raises(ValueError, match=f"^{option} must "):
        make_env("libero_spatial", **{option: value})
