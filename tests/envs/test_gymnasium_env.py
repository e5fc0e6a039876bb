"""Registered Gymnasium environments through the adapter, and the example of docs/custom_env.md."""

import re
import sys
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
from helpers.policies import CountingPolicy

from vla_accel.envs import check_env, make_env, make_vector_env
from vla_accel.envs.gymnasium_env import square
from vla_accel.evaluate import play
from vla_accel.types import Job

DOCS = Path(__file__).parents[2] / "docs" / "custom_env.md"


class Plain(gym.Env):
    """A Dict observation, bounds 0..512, a picture twice as wide as high, success at 300 in both."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}

    def __init__(self, render_mode=None, goal=300.0):
        self.render_mode, self.goal, self.renders = render_mode, goal, 0
        picture = gym.spaces.Box(0, 255, (10, 20, 3), np.uint8)
        place = gym.spaces.Box(0.0, 512.0, (2,), np.float64)
        self.observation_space = gym.spaces.Dict(pixels=picture, place=place, goal=place)
        self.action_space = gym.spaces.Box(0.0, 512.0, (2,), np.float64)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.place = self.np_random.uniform(0, 512, 2)
        return self._observe(), {}

    def step(self, action):
        assert self.action_space.contains(action), action
        self.place = np.array(action)
        return self._observe(), -1.0, False, False, {"is_success": bool((self.place == self.goal).all())}

    def render(self):
        self.renders += 1
        return np.full((10, 20, 3), 7, np.uint8)

    def _observe(self):
        pixels = np.full((10, 20, 3), 9, np.uint8)
        return {"pixels": pixels, "place": self.place, "goal": np.full(2, self.goal)}


class Bare(Plain):
    """Observes a vector and reports no success."""

    def __init__(self, render_mode=None):
        super().__init__(render_mode)
        self.observation_space = gym.spaces.Box(0.0, 512.0, (2,), np.float64)

    def _observe(self):
        return self.place


gym.register("tests/Plain-v0", f"{__name__}:Plain", max_episode_steps=40)
gym.register("tests/Bare-v0", f"{__name__}:Bare")


class Pixels(Plain):
    """Observes a picture and nothing else, bare or in a Dict."""

    def __init__(self, render_mode=None, bare=True):
        super().__init__(render_mode)
        self.bare, picture = bare, self.observation_space["pixels"]
        self.observation_space = picture if bare else gym.spaces.Dict(pixels=picture)

    def _observe(self):
        pixels = np.full((10, 20, 3), self.place[0] // 4, np.uint8)
        return pixels if self.bare else {"pixels": pixels}


gym.register("tests/Pixels-v0", f"{__name__}:Pixels", max_episode_steps=40)
gym.register("tests/Discrete-v0", "gymnasium.envs.classic_control.cartpole:CartPoleEnv")


def begin(name="gym:tests/Plain-v0", **options):
    env = make_env(name, **options)
    return env, env.reset(options={"task_id": 0, "state_id": 3})[0]


@pytest.mark.parametrize("options", [{}, {"image_key": "pixels"}, {"scale_actions": True, "image_size": 16}])
def test_an_adapted_environment_keeps_the_contract(options):
    check_env(make_env("gym:tests/Plain-v0", **options))
    assert make_env("gym:tests/Plain-v0", **options).max_episode_steps == 40


def test_a_vector_is_the_state_and_an_environment_without_a_limit_says_so():
    env, obs = begin("gym:tests/Bare-v0")
    check_env(env)
    np.testing.assert_allclose(obs["state"], np.random.default_rng(3).uniform(0, 512, 2), rtol=1e-6)
    with pytest.raises(ValueError, match="has no limit of its own"):
        make_vector_env("gym:tests/Bare-v0", num_envs=1, chunk_size=1, jobs=[[]], vectorization="sync")


def test_the_picture_comes_from_render_or_from_its_key():
    assert begin(image_size=20)[1]["images"]["main"][10, 10].tolist() == [7, 7, 7]
    assert begin(image_size=20, image_key="pixels")[1]["images"]["main"][10, 10].tolist() == [9, 9, 9]


@pytest.mark.parametrize("options", [{}, {"make": {"bare": False}, "image_key": "pixels"}])
def test_an_environment_that_observes_only_a_picture_shows_it_and_has_a_state_of_one_zero(options):
    check_env(make_env("gym:tests/Pixels-v0", **options))
    env, _ = begin("gym:tests/Pixels-v0", image_size=20, **options)
    obs = env.step(np.array([80.0, 0.0], np.float32))[0]
    assert obs["images"]["main"][10, 10].tolist() == [20, 20, 20]
    assert obs["state"].tolist() == [0.0]


def test_states_are_seeds_and_those_out_of_range_are_refused():
    env, obs = begin("gym:tests/Bare-v0")
    drawn, again, other = (env.reset(seed=seed)[0]["state"].tolist() for seed in (1, 1, 2))
    assert drawn == again != other
    for options, message in (
        ({"state_id": 1_000_000}, r"state_id must lie in \[0, 1000000\), got 1000000"),
        ({"state_id": -1}, r"state_id must lie in \[0, 1000000\), got -1"),
        ({"task_id": 1}, r"task_id must lie in \[0, 1\), got 1"),
        ({"level": 1}, r"reset options must be task_id and state_id only, got \['level'\]"),
    ):
        with pytest.raises(ValueError, match=message):
            env.reset(options=options)


def test_a_picture_that_is_not_square_gets_borders_and_is_not_stretched():
    wide = square(np.full((10, 20, 3), 200, np.uint8), 40)
    assert wide.shape == (40, 40, 3)
    assert (wide[10:30] == 200).all()
    assert (wide[:10] == 0).all()
    assert (wide[30:] == 0).all()


def test_the_state_is_every_vector_or_the_ones_named():
    assert begin()[1]["state"].shape == (4,)
    assert begin(state_key="goal")[1]["state"].tolist() == [300.0, 300.0]
    assert begin(state_key=["place", "goal"])[1]["state"][2:].tolist() == [300.0, 300.0]


def test_scaled_actions_span_the_bounds_and_others_keep_their_units():
    env, _ = begin(scale_actions=True)
    assert env.action_space == gym.spaces.Box(-1.0, 1.0, (2,))
    assert env.step(np.array([-1.0, 0.5], np.float32))[0]["state"][:2].tolist() == [0.0, 384.0]
    env, _ = begin()
    assert env.action_space == gym.spaces.Box(0.0, 512.0, (2,))
    assert env.step(np.array([-9.0, 600.0], np.float32))[0]["state"][:2].tolist() == [0.0, 512.0]


def test_success_is_read_and_ends_the_episode_unless_told_otherwise():
    solved = np.array([300.0, 300.0], np.float32)
    assert begin()[0].step(solved)[2:] == (True, False, {"success": True})
    assert begin(success_ends=False)[0].step(solved)[2:] == (False, False, {"success": True})
    assert begin(success_key="is_success")[0].step(solved + 1)[2:] == (False, False, {"success": False})
    with pytest.raises(ValueError, match=r"success_key must be one of the info's \['is_success'\], got 'done'"):
        begin(success_key="done")[0].step(solved)


def test_a_camera_that_is_off_takes_no_picture():
    env, _ = begin()
    before = env._env.unwrapped.renders
    env.set_rendering(False)
    assert env.step(np.zeros(2, np.float32))[0]["images"]["main"].sum() == 0
    assert env._env.unwrapped.renders == before
    assert env.render_observation()["images"]["main"].max() == 7


def test_arguments_reach_the_environment_and_the_instruction_is_told():
    env, obs = begin(make={"goal": 5.0}, instruction="go there")
    assert obs["state"][2:].tolist() == [5.0, 5.0] or obs["state"][:2].tolist() == [5.0, 5.0]
    assert env.instructions == ["go there"]
    assert make_env("gym:tests/Plain-v0").instructions == ["plain"]


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("gym:tests/Plain-v0", {"image_size": 8}, "image_size must be a whole number of at least 16, got 8"),
        ("gym:tests/Plain-v0", {"image_key": "image"}, r"image_key must be one of .*'pixels'.*, got 'image'"),
        ("gym:tests/Plain-v0", {"state_key": "pixels"}, r"state_key must be one or more of \['goal', 'place'\]"),
        ("gym:tests/Plain-v0", {"image_size": "big"}, "image_size must be a whole number of at least 16, got 'big'"),
        ("gym:tests/Plain-v0", {"instruction": 3}, "instruction must be a text, got 3"),
        ("gym:tests/Plain-v0", {"image_key": ["pixels"]}, r"image_key must be a text, got \['pixels'\]"),
        ("gym:tests/Plain-v0", {"success_key": True}, "success_key must be a text, got True"),
        ("gym:tests/Plain-v0", {"state_key": 3}, "state_key must be a key or a list of keys, got 3"),
        ("gym:tests/Plain-v0", {"state_key": [["goal"]]}, "state_key must be a key or a list of keys"),
        ("gym:tests/Plain-v0", {"success_ends": "no"}, "success_ends must be true or false, got 'no'"),
        ("gym:tests/Plain-v0", {"scale_actions": 1}, "scale_actions must be true or false, got 1"),
        ("gym:tests/Plain-v0", {"make": "goal"}, "make must be an object of arguments, got 'goal'"),
        ("gym:tests/Plain-v0", {"make": {"gaol": 5.0}}, "gym:tests/Plain-v0 cannot be made: .*'gaol'"),
        ("gym:no_such_package:Nothing-v0", {}, "gym:no_such_package:Nothing-v0 cannot be made: .*no_such_package"),
        ("gym:tests/Pixels-v0", {"state_key": "place"}, "need a Dict observation"),
        ("gym:tests/Bare-v0", {"image_key": "pixels"}, "need a Dict observation"),
        ("gym:tests/Discrete-v0", {}, r"must have a Box action space of shape \[A\]"),
        ("gym:tests/Nothing-v0", {}, "gym:tests/Nothing-v0 cannot be made"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(name, options, message):
    with pytest.raises(ValueError, match=message):
        make_env(name, **options)


def test_the_example_of_the_documentation_is_short_keeps_the_contract_and_can_be_played(monkeypatch, tmp_path):
    blocks = re.findall(r"```python\n(.*?)```", DOCS.read_text(), flags=re.DOTALL)
    assert len([line for line in blocks[0].splitlines() if line.strip()]) <= 40
    (tmp_path / "my_module.py").write_text(blocks[0])
    monkeypatch.syspath_prepend(str(tmp_path))
    exec(blocks[1], {})
    jobs = [Job(task_id=task, state_id=0, seed=0) for task in (0, 1)]
    envs = make_vector_env("my_module:Sides", num_envs=1, chunk_size=4, jobs=[jobs], vectorization="sync")

    class Leftwards(CountingPolicy):
        action_dim = 1

        def forward(self, inputs, trace=None, *, greedy=False):
            sample = super().forward({"state": inputs["state"].repeat(1, 3)}, trace, greedy=greedy)
            return type(sample)(**{**vars(sample), "action": torch.full((len(inputs["state"]), 4, 1), -1.0)})

    policy = Leftwards(4)
    episodes, _ = play(policy, policy, envs, device=torch.device("cpu"))
    assert [(e.job.task_id, e.success) for e in episodes] == [(0, True), (1, False)]
    assert "my_module" in sys.modules
