"""Every rule of the environment contract, broken once."""

import gymnasium as gym
import numpy as np
import pytest

from vla_accel.envs import check_env, make_env


def space(images=None, state=None, task_id=None):
    images = {"eye": gym.spaces.Box(0, 255, (4, 4, 3), np.uint8)} if images is None else images
    return gym.spaces.Dict(
        images=gym.spaces.Dict(images),
        state=gym.spaces.Box(-9, 9, (2,), np.float32) if state is None else state,
        task_id=gym.spaces.Discrete(2) if task_id is None else task_id,
    )


class Good(gym.Env):
    """Keeps every rule."""

    observation_space = space()
    action_space = gym.spaces.Box(-1, 1, (2,), np.float32)
    instructions = ["a", "b"]
    state_ids = {"train": range(10, 20), "eval": range(10)}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.task_id, self.state = options["task_id"], np.full(2, options["state_id"] / 10, np.float32)
        return self.observe(), {}

    def observe(self):
        image = np.zeros((4, 4, 3), np.uint8)
        return {"images": {"eye": image}, "state": self.state.copy(), "task_id": np.int64(self.task_id)}

    def step(self, action):
        self.state += np.clip(action, -1, 1)
        return self.observe(), 0.0, False, False, {"success": False}


def test_a_good_environment_passes_with_and_without_the_time_limit():
    check_env(Good())
    check_env(gym.wrappers.TimeLimit(Good(), 100))


def test_tabletop_passes():
    check_env(make_env("tabletop", tasks=("reach", "push", "pick"), cameras=("wrist", "front"), image_size=32))


ATTRIBUTES = [
    ("action_space", gym.spaces.Discrete(3), "action_space must be a float32 Box"),
    ("action_space", gym.spaces.Box(-1, 1, (2,), np.float64), "action_space must be a float32 Box"),
    ("observation_space", gym.spaces.Box(0, 1, (2,)), "observation_space must be a Dict with exactly"),
    ("observation_space", gym.spaces.Dict(state=gym.spaces.Discrete(2)), "must be a Dict with exactly"),
    ("observation_space", space(images={}), "must be a Dict of at least one camera"),
    ("observation_space", space(images={"eye": gym.spaces.Box(0, 1, (4, 4, 3))}), "must be a uint8 Box of shape"),
    (
        "observation_space",
        space(images={"eye": gym.spaces.Box(0, 255, (4, 6, 3), np.uint8)}),
        r"\['eye'\] must be a uint8 Box of shape \[P, P, 3\]",
    ),
    ("observation_space", space(state=gym.spaces.Box(-1, 1, (2, 2), np.float32)), "must be a float32 Box of shape"),
    ("observation_space", space(task_id=gym.spaces.Discrete(2, start=1)), "must be a Discrete that starts at 0"),
    ("instructions", ("a", "b"), "instructions must be a list of non-empty strings"),
    ("instructions", ["a", " "], "instructions must be a list of non-empty strings"),
    ("instructions", ["a"], "one entry per task id: 2 ids, 1 instructions"),
    ("state_ids", {"train": range(3)}, "keys 'train' and 'eval'"),
    ("state_ids", {"train": range(3), "eval": [4]}, "must be ranges that are not empty"),
    ("state_ids", {"train": range(3), "eval": range(0)}, "must be ranges that are not empty"),
    ("state_ids", {"train": range(0, 10, 2), "eval": range(4, 5)}, "must be disjoint"),
    ("max_episode_steps", 0, "max_episode_steps must be an int of at least 1"),
    ("vectorization", "thread", "vectorization must be 'sync', 'async' or 'batched'"),
    ("set_rendering", print, "set_rendering needs render_observation"),
    ("slow_task_change", "yes", "slow_task_change must be a bool"),
]


@pytest.mark.parametrize(("name", "value", "message"), ATTRIBUTES)
def test_a_broken_attribute_is_reported(name, value, message):
    broken = type("Broken", (Good,), {name: value})
    with pytest.raises(ValueError, match=message):
        check_env(broken())


def returns(**changes):
    """A `step` that returns the good five values with some changed."""

    def step(self, action):
        names = ("obs", "reward", "terminated", "truncated", "info")
        values = {**dict(zip(names, Good.step(self, action), strict=True)), **changes}
        return tuple(values[name] for name in names)

    return step


def observes(**changes):
    return lambda self: {**Good.observe(self), **changes}


def resets(change):
    """A `reset` that returns what `change` makes of the observation; options reach the good one first."""

    def reset(self, *, seed=None, options=None):
        return change(Good.reset(self, seed=seed, options=options)[0])

    return reset


def raises(self, action):
    raise KeyError("motor")


def ignores_options(self, *, seed=None, options=None):
    return Good.reset(self, seed=seed, options={**options, "task_id": 0})


def returns_four(self, action):
    return Good.step(self, action)[:4]


def drifts(self, action):
    Drift.offset += 0.01
    self.state += Drift.offset
    return Good.step(self, action)


class Drift:
    offset = 0.0


METHODS = [
    ("reset", resets(lambda obs: obs), r"reset must return \(observation, info\)"),
    ("reset", resets(lambda obs: (obs["state"], {})), "reset must return the observation as a dict"),
    ("reset", resets(lambda obs: (obs, None)), "info must be a dict, got NoneType"),
    ("reset", ignores_options, "reset must obey options: asked for task_id 1, the observation shows 0"),
    ("observe", observes(state=np.zeros(2)), r"\['state'\] must be a float32 array \[2\], got float64 \[2\]"),
    ("observe", observes(state=np.full(2, 99, np.float32)), r"\['state'\] must lie within its Box"),
    ("observe", observes(images={"nose": 1}), r"observation\['images'\] must be a dict with the keys \['eye'\]"),
    ("observe", observes(images={"eye": np.zeros((8, 8, 3), np.uint8)}), r"array \[4, 4, 3\], got uint8 \[8, 8, 3\]"),
    ("observe", observes(task_id=7), r"observation\['task_id'\] must be an int in \[0, 2\), got 7"),
    ("observe", lambda self: {**Good.observe(self), "state": self.state}, "observations must be new arrays"),
    ("step", returns_four, "step must return five values"),
    ("step", raises, "got KeyError: 'motor'"),
    ("step", returns(reward=np.nan), "reward must be a finite number, got nan"),
    ("step", returns(reward=None), "reward must be a finite number, got None"),
    ("step", returns(terminated=0), "terminated must be a bool, got 0"),
    ("step", returns(truncated=True), "truncated must stay False"),
    ("step", returns(info={}), r"info\['success'\] must be a bool on every step, got None"),
    ("step", returns(info=None), "info must be a dict, got NoneType"),
    ("step", drifts, "must give equal episodes"),
]


@pytest.mark.parametrize(("name", "method", "message"), METHODS)
def test_a_broken_method_is_reported(name, method, message):
    broken = type("Broken", (Good,), {name: method})
    with pytest.raises(ValueError, match=message):
        check_env(broken())


class Cameras(Good):
    """Keeps the rules about cameras and films, too."""

    render_mode, on = "rgb_array", True

    def set_rendering(self, on):
        self.on = on

    def render_observation(self):
        return self.draw()

    def draw(self):
        return Good.observe(self) | {"images": {"eye": np.full((4, 4, 3), int(10 * self.state[0]) % 256, np.uint8)}}

    def observe(self):
        return self.draw() if self.on else Good.observe(self)

    def render(self):
        return np.zeros((6, 8, 3), np.uint8)


def test_switched_cameras_and_films_pass():
    check_env(Cameras())


def sleeps_while_dark(self, action):
    return Good.step(self, action if self.on else 0 * action)


def breaks_the_camera(self, on):
    self.on, self.draw = on, lambda: Good.observe(self)


DRAWING = [
    ("render", lambda _: None, r"render must return a uint8 array \[H, W, 3\] .* got NoneType"),
    ("render", lambda _: np.zeros((6, 8)), r"render must return .* got float64 \[6, 8\]"),
    ("render", gym.Env.render, "pictures must work .* got NotImplementedError"),
    ("render_observation", Good.observe, "render_observation must show what the step before it returned"),
    ("step", sleeps_while_dark, "set_rendering must change nothing but images"),
    ("set_rendering", breaks_the_camera, "render_observation must show the same after steps with cameras off"),
]


@pytest.mark.parametrize(("name", "method", "message"), DRAWING)
def test_a_broken_picture_is_reported(name, method, message):
    with pytest.raises(ValueError, match=message):
        check_env(type("Broken", (Cameras,), {name: method})())


def test_actions_out_of_bounds_must_be_clipped():
    def step(self, action):
        self.state += action
        return self.observe(), 0.0, False, False, {"success": False}

    with pytest.raises(ValueError, match="actions outside action_space must do what those at its bounds do"):
        check_env(type("Broken", (Good,), {"step": step})())


@pytest.mark.parametrize("slow", [False, True])
def test_every_task_is_tried_unless_another_one_takes_long(slow):
    tried = []

    def reset(self, *, seed=None, options=None):
        tried.append(options["task_id"])
        return Good.reset(self, seed=seed, options=options)

    changes = {"instructions": ["a", "b", "c"], "observation_space": space(task_id=gym.spaces.Discrete(3))}
    check_env(type("Three", (Good,), {**changes, "reset": reset, "slow_task_change": slow})())
    assert set(tried) == ({0, 2} if slow else {0, 1, 2})


def test_cameras_in_another_order_than_the_space_are_reported():
    """Gymnasium sorts a mapping by name."""
    picture = gym.spaces.Box(0, 255, (4, 4, 3), np.uint8)

    def observe(self):
        return Good.observe(self) | {"images": {name: np.zeros((4, 4, 3), np.uint8) for name in ("wrist", "front")}}

    for cameras in ({"wrist": picture, "front": picture}, [("wrist", picture), ("front", picture)]):
        env = type("Two", (Good,), {"observation_space": space(images=cameras), "observe": observe})()
        if isinstance(cameras, list):
            check_env(env)
        else:
            with pytest.raises(ValueError, match=r"in the order of its space, \['front', 'wrist'\], got \['wrist'"):
                check_env(env)


def test_all_broken_rules_are_reported_at_once_each_on_its_line():
    broken = type("Broken", (Good,), {"instructions": ["a"], "state_ids": {}, "action_space": gym.spaces.Discrete(2)})
    with pytest.raises(ValueError, match="Broken breaks the environment contract") as caught:
        check_env(broken())
    assert str(caught.value).count("\n- ") == 3


def test_a_rule_broken_in_every_step_is_reported_once():
    broken = type("Broken", (Good,), {"step": returns(info={})})
    with pytest.raises(ValueError, match="success") as caught:
        check_env(broken(), steps=5)
    assert str(caught.value).count("success") == 1


def test_something_else_than_an_environment_is_refused():
    with pytest.raises(ValueError, match="must be a gymnasium.Env, got int"):
        check_env(3)
