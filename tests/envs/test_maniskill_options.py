"""What of ManiSkill can be said without its package or a GPU, by a stand-in. The rest is in tests/sim."""

import numpy as np
import pytest
import torch

from vla_accel.envs import make_env
from vla_accel.envs.maniskill import TASKS, Scenes
from vla_accel.types import Job


@pytest.fixture
def installed(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda _: True)


def test_without_the_package_the_extra_is_named(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(ValueError, match=r'pip install "vla_accel\[maniskill\]"'):
        make_env("maniskill:PickCube-v1")


def test_without_a_driver_it_is_refused_in_one_sentence(installed, monkeypatch):
    monkeypatch.setattr("vla_accel.envs.maniskill.can_draw", lambda _: False)
    with pytest.raises(RuntimeError, match=r"^maniskill draws with Vulkan and found no driver.*mesa-vulkan-drivers"):
        make_env("maniskill:PickCube-v1")


def test_a_gpu_simulates_all_environments_at_once_and_a_processor_one_in_each_worker(installed, monkeypatch):
    monkeypatch.setattr("vla_accel.envs.maniskill.can_draw", lambda _: True)
    for gpu, vectorization in ((True, "batched"), (False, "async")):
        monkeypatch.setattr("torch.cuda.is_available", lambda gpu=gpu: gpu)
        assert make_env("maniskill:PickCube-v1").vectorization == vectorization
    assert make_env("maniskill:PickCube-v1").max_episode_steps == TASKS["PickCube-v1"][1] == 50


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("cameras", ["front"]), ("image_size", 8), ("gripper", "pi0"), ("reward", "rel"), ("backend", "tpu"),
        ("max_episode_steps", 0),
    ],
)  # fmt: skip
def test_a_bad_option_is_refused_by_name(option, value):
    with pytest.raises(ValueError, match=f"^{option} must "):
        make_env("maniskill:PickCube-v1", **{option: value})


def test_a_gpu_that_is_not_there_is_refused(installed, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ValueError, match="^backend must be 'cpu' or 'auto' where PyTorch sees no GPU"):
        make_env("maniskill:PickCube-v1", backend="gpu")


def test_an_unknown_task_needs_words():
    with pytest.raises(ValueError, match=r"maniskill:OpenCabinetDrawer-v1 is none of PickCube-v1, .* instruction$"):
        make_env("maniskill:OpenCabinetDrawer-v1")


# --------------------------------------------------------------------------------------------------------------------
# Many environments at once
# --------------------------------------------------------------------------------------------------------------------


class Goal:
    hidden = True

    def show_visual(self):
        self.hidden = False


class StandIn:
    """Answers as ManiSkill's own class does for three environments, and writes down what it is asked."""

    num_envs, device = 3, torch.device("cpu")

    def __init__(self):
        self._sensors = {"base_camera": None, "hand_camera": None}
        self.goal = Goal()
        self._hidden_objects = [self.goal]
        self._obs_mode = "rgb"
        self.resets, self.actions, self.drawn = [], [], 0
        self.agent = self
        self.tcp = self.pose = self.robot = self
        self.raw_pose = torch.tensor([[0.1, 0.2, 0.3, 0.0, 1.0, 0.0, 0.0]] * 3)

    def get_qpos(self):
        return torch.arange(27.0).reshape(3, 9)

    def get_info(self):
        return {}

    def get_obs(self, info):
        assert info == {}
        if self._obs_mode == "none":
            return {}
        self.drawn += 1
        picture = torch.arange(3, dtype=torch.uint8)[:, None, None, None].expand(3, 16, 16, 3)
        return {"sensor_data": {name: {"rgb": picture} for name in self._sensors}}

    def reset(self, *, seed, options):
        self.resets.append((seed, options["env_idx"].tolist()))
        return self.get_obs({}), {}

    def step(self, action):
        self.actions.append(action.tolist())
        success = torch.tensor([True, False, False])
        self.get_obs({})
        return {}, success.float(), success, torch.zeros(3, dtype=torch.bool), {"success": success}


def scenes(**options):
    return Scenes(StandIn(), **{"cameras": ["base_camera"], "image_size": 16, "gripper": "env", **options})


def test_each_environment_starts_alone_from_its_own_state_without_being_drawn():
    many = scenes()
    many.begin([0, 2], [Job(task_id=0, state_id=5, seed=1), Job(task_id=0, state_id=8, seed=2)])
    assert many.env.resets == [([5, 5, 5], [0]), ([8, 8, 8], [2])]
    assert (many.env.drawn, many.env._obs_mode) == (0, "rgb")


def test_a_step_draws_nothing_clips_and_lets_those_that_rest_stand_still():
    many = scenes()
    reward, terminated, success = many.step(np.full((3, 7), 2.0, np.float32), np.array([True, True, False]))
    assert many.env.actions == [[[1.0] * 7, [1.0] * 7, [0.0] * 7]]
    assert (reward.tolist(), terminated.tolist(), success.tolist()) == (
        [1, 0, 0],
        [True, False, False],
        [True, False, False],
    )
    assert many.env.drawn == 0


def test_openvla_says_1_to_open_and_0_to_close_and_maniskill_opens_at_1():
    many = scenes(gripper="openvla")
    action = np.zeros((3, 7), np.float32)
    action[:, 6] = [1.0, 0.0, 0.7]
    many.step(action, np.ones(3, dtype=bool))
    assert [row[6] for row in many.env.actions[0]] == [1.0, -1.0, 1.0]


def test_it_observes_the_cameras_asked_for_the_fingertips_and_the_fingers():
    many = scenes()
    shown = many.observe()
    assert set(shown["images"]) == {"base_camera"}
    assert shown["images"]["base_camera"][:, 0, 0, 0].tolist() == [0, 1, 2]
    # A half turn about x, and the last two of nine joints.
    np.testing.assert_allclose(shown["state"][1], [0.1, 0.2, 0.3, np.pi, 0, 0, 16, 17], rtol=1e-6)
    assert many.observe(pictures=False)["images"]["base_camera"].max() == 0
    assert many.env.drawn == 1


def test_goals_are_shown_and_cameras_not_asked_for_are_left_out():
    many = scenes()
    assert not many.env.goal.hidden
    assert many.env._hidden_objects == []
    assert set(many.env._sensors) == {"base_camera"}
    with pytest.raises(RuntimeError, match="the task's cameras are base_camera, hand_camera, not side_camera"):
        scenes(cameras=["side_camera"])
