"""ManiSkill itself: contract, gripper, success, the batched path. Needs the extra and a Vulkan driver.

Without a GPU one environment takes half a minute to build, and only one fits into a simulator: what many of them on a
GPU do is told by the stand-ins of tests/envs.
"""

import importlib.util
import os
import subprocess
import sys

import numpy as np
import pytest

from vla_accel.envs import check_env, make_env, make_vector_env, read_step
from vla_accel.envs.maniskill import NO_DRIVER, can_draw
from vla_accel.types import Job

pytestmark = pytest.mark.sim
if importlib.util.find_spec("mani_skill") is None:
    pytest.skip("not run: ManiSkill is not installed", allow_module_level=True)
if not can_draw("cpu"):
    pytest.skip(f"not run: {NO_DRIVER}", allow_module_level=True)

SMALL = {"image_size": 64, "backend": "cpu"}


@pytest.fixture(scope="module")
def pick():
    env = make_env("maniskill:PickCube-v1", **SMALL)
    yield env
    env.close()


def begin(env, state_id=0):
    env.set_rendering(True)
    return env.reset(options={"task_id": 0, "state_id": state_id})[0]


def test_maniskill_keeps_the_contract(pick):
    check_env(pick)


def test_the_picture_shows_the_goal_and_differs_between_states(pick):
    pictures = [begin(pick, state_id)["images"]["base_camera"].astype(int) for state_id in (0, 1)]
    assert (pictures[0] != pictures[1]).any()
    for picture in pictures:
        red, green, blue = picture[..., 0], picture[..., 1], picture[..., 2]
        assert ((red > 150) & (green < 60) & (blue < 60)).any(), "no red cube"
        assert ((green > 100) & (red < 60) & (blue < 60)).any(), "no green goal"


def test_the_gripper_opens_at_plus_1_and_openvla_says_0_to_close(pick):
    def width(action, gripper="env"):
        begin(pick)
        pick._scene._gripper = gripper
        for _ in range(6):
            obs = pick.step(np.array([0, 0, 0, 0, 0, 0, action], np.float32))[0]
        pick._scene._gripper = "env"
        return float(obs["state"][6] + obs["state"][7])

    opened, closed = width(1.0), width(-1.0)
    assert closed < opened - 0.04
    assert (width(1.0, "openvla"), width(0.0, "openvla")) == (opened, closed)


def test_an_action_of_1_moves_the_fingertips_some_centimetres_along_its_axis(pick):
    for axis in (0, 1):
        start = begin(pick)["state"][:3]
        action = np.zeros(7, np.float32)
        action[axis], action[6] = 1.0, 1.0
        for _ in range(3):
            obs = pick.step(action)[0]
        moved = obs["state"][:3] - start
        # The target lies 0.1 m ahead, but each step sets a new one before it is reached.
        assert 0.06 < moved[axis] < 0.3
        assert np.abs(np.delete(moved, axis)).max() < 0.03


def test_a_cube_at_the_goal_is_success_with_reward_1_and_ends_the_episode(pick):
    begin(pick, 3)
    still = np.array([0, 0, 0, 0, 0, 0, 1], np.float32)
    _, reward, terminated, _, info = pick.step(still)
    assert (reward, terminated, info["success"]) == (0.0, False, False)
    core = pick._scene.env
    pose = core.cube.pose
    core.goal_site.set_pose(pose)
    _, reward, terminated, truncated, info = pick.step(still)
    assert (reward, terminated, truncated, info["success"]) == (1.0, True, False, True)


def test_one_environment_of_a_batched_simulator_does_what_one_alone_does():
    jobs = [[Job(task_id=0, state_id=number, seed=0) for number in (4, 9)]]
    actions = np.random.default_rng(0).uniform(-1, 1, (4, 1, 4, 7)).astype(np.float32)
    told = []
    for vectorization in ("sync", "batched"):
        envs = make_vector_env(
            "maniskill:PickCube-v1", num_envs=1, chunk_size=4, jobs=jobs, max_episode_steps=6, env_options=SMALL,
            vectorization=vectorization,
        )  # fmt: skip
        shown = [envs.reset()[0]]
        reports = []
        for action in actions:
            obs, *ends, infos = envs.step(action)
            info = read_step(infos, 1)
            shown += [obs, *[single for _, single in info.final_obs]]
            reports.append((*[x.tolist() for x in ends], info.executed.tolist(), info.idle.tolist(), info.episodes))
        told.append((shown, reports))
        envs.close()
    assert told[0][1] == told[1][1]
    assert [report[3] for report in told[0][1]] == [[4], [2], [4], [2]]
    for one, other in zip(told[0][0], told[1][0], strict=True):
        np.testing.assert_array_equal(one["images"]["base_camera"], other["images"]["base_camera"])
        np.testing.assert_array_equal(one["state"], other["state"])


def test_a_task_whose_files_are_missing_is_refused_without_a_prompt():
    env = make_env("maniskill:PickSingleYCB-v1", instruction="pick it up", **SMALL)
    with pytest.raises(RuntimeError, match=r"not on disk.*python -m mani_skill\.utils\.download_asset ycb"):
        env.reset()


def test_without_a_driver_it_is_refused_before_maniskill_is_loaded():
    code = (
        "import sys\nfrom vla_accel.envs import make_env\n"
        "try:\n    make_env('maniskill:PickCube-v1', backend='cpu')\n"
        "except RuntimeError as error:\n    print('mani_skill' in sys.modules, error)"
    )
    environ = os.environ | {"VK_ICD_FILENAMES": "/nowhere.json", "PYTHONPATH": os.pathsep.join(sys.path)}
    run = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, timeout=120)
    assert run.stdout.strip() == f"False {NO_DRIVER}"
