"""LIBERO itself: contract, conventions, the quick reset against the original one, chunks, success. Needs the extra.

Each simulator takes 1.5 GB and several seconds, so the tests share one per suite.
"""

import importlib.util
import os
import subprocess
import sys

import gymnasium as gym
import numpy as np
import pytest

from vla_accel.envs import check_env, graphics, make_env, make_vector_env, read_step
from vla_accel.envs.base import ActionChunk
from vla_accel.envs.libero import LIMITS, STORED
from vla_accel.envs.libero_package import build
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


class Original:
    """The package's own simulator of a task, reset as others do it, and its observations as others read them."""

    def __init__(self, task):
        self.task = task
        cameras = ["agentview", "robot0_eye_in_hand"]
        self.env = build(task.problem_file, image_size=64, cameras=cameras, multisampling=True, hard_reset=True)

    def reset(self, state_id, seed=0):
        self.current()
        self.env.seed(seed if state_id < STORED else state_id)
        # The package adds to this list whenever it compiles, so that a layout would depend on how often it did.
        self.env.env.object_property_initializers.clear()
        self.env.reset()
        self.current()
        if state_id < STORED:
            self.env.set_init_state(self.task.states()[state_id])
        for _ in range(10):
            obs, *_ = self.env.step([0, 0, 0, 0, 0, 0, -1])
        return self.read(obs)

    def step(self, action):
        self.current()
        obs, _, done, _ = self.env.step(action)
        return self.read(obs), bool(done)

    def current(self):
        context = self.env.sim._render_context_offscreen
        if context is not None:
            context.gl_ctx.make_current()

    def read(self, obs):
        state = (obs["robot0_eef_pos"], axis_angle(obs["robot0_eef_quat"]), obs["robot0_gripper_qpos"])
        return {
            "agentview": obs["agentview_image"][::-1, ::-1],
            "wrist": obs["robot0_eye_in_hand_image"][::-1, ::-1],
            "state": np.concatenate(state).astype(np.float32),
        }


def fulfil(simulator):
    """Put things where the task wants them, by hand."""
    core, data = simulator.env, simulator.sim.data
    for predicate, *names in core.parsed_problem["goal_state"]:
        if predicate in ("on", "in"):
            thing, place = names
            joint = core.objects_dict[thing].joints[-1]
            if place in core.object_sites_dict:
                where = data.get_site_xpos(place).copy()
            else:
                where = data.body_xpos[core.obj_body_id[place]].copy()
            pose = data.get_joint_qpos(joint).copy()
            pose[:3] = where + [0, 0, 0.03]
            data.set_joint_qpos(joint, pose)
        else:
            name = names[0]
            joint = (core.objects_dict.get(name) or core.fixtures_dict.get(name) or core.object_sites_dict[name]).joints
            site = core.object_sites_dict.get(name)
            parent = core.get_object(name if site is None else site.parent_name)
            properties = parent.object_properties["articulation"]
            key = {"open": "default_open_ranges", "close": "default_close_ranges", "turnon": "default_turnon_ranges"}
            for each in joint:
                data.set_joint_qpos(each, float(np.mean(properties[key[predicate]])))
    simulator.sim.forward()


def same(obs, expected):
    np.testing.assert_array_equal(obs["images"]["agentview"], expected["agentview"])
    np.testing.assert_array_equal(obs["images"]["wrist"], expected["wrist"])
    np.testing.assert_array_equal(obs["state"], expected["state"])


@pytest.mark.parametrize(
    ("suite", "task_id", "plays"),
    [
        ("libero_spatial", 0, [(3, 0), (17, 7)]),
        ("libero_spatial", 4, [(51, 0)]),  # a bowl in a drawer
        ("libero_goal", 7, [(0, 0)]),  # a stove, whose burner is drawn one step after it was lit
        ("libero_goal", 0, [(12, 7)]),  # a drawer
    ],
)
def test_the_quick_reset_equals_the_original_one_to_the_last_bit(suite, task_id, plays, spatial, monkeypatch):
    env = spatial if suite == "libero_spatial" else make_env(suite, **SMALL)
    original = Original(env.tasks[task_id])
    try:
        for state_id, seed in plays:
            # What happened before must leave no trace.
            begin(env, 50, task_id)
            fulfil(env._sim.env)
            for action in ACTIONS[:3]:
                env.step(action)
            monkeypatch.setattr(env, "task_seed", seed)
            same(begin(env, state_id, task_id), original.reset(state_id, seed))
            ends = []
            for number, action in enumerate(ACTIONS[:8]):
                if number == 3:
                    fulfil(env._sim.env)
                    fulfil(original.env)
                obs, _, terminated, *_ = env.step(action)
                expected, done = original.step(action)
                same(obs, expected)
                assert terminated == done
                ends.append(done)
            assert any(ends)
            assert not all(ends)
    finally:
        original.env.close()
        if env is not spatial:
            env.close()


def test_a_layout_of_the_simulators_own_follows_from_its_number_alone(spatial):
    def layout(state_id):
        return begin(spatial, state_id, 4)["images"]["agentview"], spatial._sim.env.sim.data.body_xpos.copy()

    first, again, other, at_last = (layout(state_id) for state_id in (50, 50, 51, 50))  # after different ones
    for pictures, places in (again, at_last):
        np.testing.assert_array_equal(pictures, first[0])
        np.testing.assert_array_equal(places, first[1])
    assert (first[0] != other[0]).any()


def test_the_task_seed_moves_the_fixtures(spatial, monkeypatch):
    def cabinet():
        model = spatial._sim.env.sim.model
        return model.body_pos[model.body_name2id("wooden_cabinet_1_main")].copy()

    begin(spatial)
    usual = cabinet()
    monkeypatch.setattr(spatial, "task_seed", 7)
    begin(spatial)
    assert (cabinet() != usual).any()


@pytest.mark.parametrize("end", ["none", "time", "success"])
def test_a_chunk_shows_and_pays_what_its_steps_one_by_one_do_with_one_picture(spatial, end, monkeypatch):
    # Where a chunk ends early, its picture is drawn afterwards: from what the cameras had noted.
    limit = 5 if end == "time" else 100

    def start():
        begin(spatial, 2)
        if end == "success":
            fulfil(spatial._sim.env)

    start()
    steps = []
    while len(steps) < min(8, limit) and not (steps and steps[-1][2]):
        steps.append(spatial.step(ACTIONS[len(steps)]))
    chunked = ActionChunk(gym.wrappers.TimeLimit(spatial, limit), 8)
    chunked.reset(options={"task_id": 0, "state_id": 2})
    start()
    context, drawn = spatial._sim.env.sim._render_context_offscreen, []
    draw = context.render
    monkeypatch.setattr(context, "render", lambda *args: (drawn.append(args), draw(*args)))
    obs, reward, terminated, truncated, info = chunked.step(ACTIONS[:8])
    assert (len(steps) < 8) == (end != "none")
    assert (terminated, truncated, info["executed"]) == (end == "success", end == "time", len(steps))
    assert reward == sum(step[1] for step in steps) == float(end == "success")
    assert info["success"] == (end == "success")
    assert len(drawn) == len(spatial.cameras)
    for camera in spatial.cameras:
        np.testing.assert_array_equal(obs["images"][camera], steps[-1][0]["images"][camera])
    np.testing.assert_array_equal(obs["state"], steps[-1][0]["state"])


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


GOALS = {
    "libero_spatial": 0,
    "libero_object": 0,
    "libero_goal": 0,
    "libero_10": 0,
    "libero_90": 7,
}


@pytest.mark.parametrize("suite", sorted(GOALS))
def test_a_fulfilled_goal_is_success_with_reward_1_and_ends_the_episode(suite):
    env = make_env(suite, **SMALL)
    try:
        begin(env, 0, GOALS[suite])
        env.set_rendering(False)
        _, reward, terminated, _, info = env.step(np.array([0, 0, 0, 0, 0, 0, -1], np.float32))
        assert (reward, terminated, info["success"]) == (0.0, False, False)
        fulfil(env._sim.env)
        for _ in range(30):
            _, reward, terminated, _, info = env.step(np.array([0, 0, 0, 0, 0, 0, -1], np.float32))
            if terminated:
                break
        assert (reward, terminated, info["success"]) == (1.0, True, True)
    finally:
        env.close()


DRAW = """
from vla_accel.envs import make_env
env = make_env("libero_spatial", image_size=64, wait_steps=1, cameras=["agentview"])
print(env.reset(options={"task_id": 0, "state_id": 0})[0]["images"]["agentview"].std() > 20)
env.close()
"""


@pytest.mark.parametrize(
    "environ",
    [
        {"CUDA_VISIBLE_DEVICES": ""},
        {"CUDA_VISIBLE_DEVICES": "GPU-1f3a,GPU-77b0"},
        {"CUDA_VISIBLE_DEVICES": "63", "MUJOCO_EGL_DEVICE_ID": "0"},
        {"MUJOCO_GL": "osmesa"},
    ],
    ids=str,
)
def test_a_fresh_process_draws_whatever_gpus_are_hidden_and_without_egl(environ):
    if "MUJOCO_GL" in environ:
        if not graphics._has_osmesa():
            pytest.skip("libOSMesa is not installed")
    elif not graphics.egl_devices():
        pytest.skip("there is no EGL device")
    chosen = ("MUJOCO_GL", "PYOPENGL_PLATFORM", "MUJOCO_EGL_DEVICE_ID", "CUDA_VISIBLE_DEVICES", "LOCAL_RANK")
    rest = {name: value for name, value in os.environ.items() if name not in chosen}
    done = subprocess.run(
        [sys.executable, "-c", DRAW], env=rest | environ, capture_output=True, text=True, timeout=180, check=False
    )
    assert (done.returncode, done.stdout.strip()) == (0, "True"), done.stderr


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
        ("eval_states", 51), ("task_seed", -1), ("max_episode_steps", 0),
    ],
)  # fmt: skip
def test_a_bad_option_is_refused_by_name(option, value):
    with pytest.raises(ValueError, match=f"^{option} must "):
        make_env("libero_spatial", **{option: value})
