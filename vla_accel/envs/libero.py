"""LIBERO (arXiv 2306.03310) as `libero_spatial`, `libero_object`, `libero_goal`, `libero_10` and `libero_90`.

The conventions are those under which OpenVLA, OpenVLA-OFT and PI0 were trained and scored: pictures turned by 180
degrees, an 8-dimensional state, ten steps of waiting for objects to settle, and the official time limits.

Not here: what is installed and where (`libero_package.py`).
Usage: `make_env("libero_spatial", cameras=["agentview"])`; needs `pip install "vla_accel[libero]"`.

| part | entries | meaning |
|---|---|---|
| state | 0-2 | gripper x, y, z (m) |
| | 3-5 | its rotation as axis times angle (rad) |
| | 6-7 | finger positions (m) |
| action | 0-2 | dx, dy, dz in [-1, 1], in units of 0.05 m |
| | 3-5 | rotation in [-1, 1], in units of 0.5 rad |
| | 6 | gripper: -1 opens, +1 closes; with `gripper="openvla"` 0 closes, 1 opens |

State ids 0 to 49 are the stored initial states of a task. From 50 on the simulator lays the objects out itself, seeded
with the id.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import gymnasium as gym
import numpy as np

from vla_accel.envs.arguments import check_count, check_names, check_option, check_within, episode_of, observations
from vla_accel.envs.libero_package import LiberoTask, build, load_suite
from vla_accel.envs.rotations import axis_angle

LIMITS = {"libero_spatial": 220, "libero_object": 280, "libero_goal": 300, "libero_10": 520, "libero_90": 400}
"""Suite -> official time limit in steps, without the steps of waiting."""

CAMERAS = {"agentview": "agentview", "wrist": "robot0_eye_in_hand"}
"""Name in observations -> the simulator's."""

END = 1_000_000
"""No initial state has this number or a higher one."""

STORED = 50
"""Stored initial states of each task; all of them are the official evaluation."""

_POSES = (
    "xpos", "xquat", "xmat", "xipos", "ximat", "geom_xpos", "geom_xmat", "site_xpos", "site_xmat", "cam_xpos",
    "cam_xmat", "light_xpos", "light_xdir", "subtree_com",
)  # fmt: skip
"""What of MuJoCo's data a picture is drawn from; of its model it is the colours of sites, such as a stove's burner."""

_WAIT = (0.0, 0.0, 0.0, 0.0, 0.0, 0.0, -1.0)


class Libero(gym.Env):
    """One suite; see the module's tables.

    Args:
        suite: a name of `LIMITS`.
        cameras: out of "agentview" and "wrist", in the order in which the policy takes them.
        image_size: P; the policies named above were trained on pictures drawn at 256.
        quality: "full", or "fast": edges are not smoothed, twice as quick without a GPU.
        gripper: "env" or "openvla", how the policy speaks of the gripper.
        wait_steps: steps of waiting after a reset.
        task_seed: with which the simulator lays out what a stored state does not say, above all where fixtures stand:
            0 as OpenVLA is scored, 7 as PI0 is.
        eval_states: how many stored states are held out for evaluation, the last ones; 50: all, the official
            evaluation, and training plays layouts of the simulator's own.
        max_episode_steps: the usual time limit, in steps; None: the suite's official one.

    Raises:
        ValueError: naming the option that breaks its rule, or the package that is missing.
    """

    metadata: ClassVar[dict[str, Any]] = {"render_modes": ["rgb_array"], "render_fps": 20}
    render_mode = "rgb_array"
    slow_task_change: ClassVar[bool] = True

    def __init__(
        self,
        suite: str,
        /,
        *,
        cameras: Sequence[str] = ("agentview", "wrist"),
        image_size: int = 256,
        quality: str = "full",
        gripper: str = "env",
        wait_steps: int = 10,
        task_seed: int = 0,
        eval_states: int = 10,
        max_episode_steps: int | None = None,
    ):
        self.cameras = check_names("cameras", cameras, tuple(CAMERAS))
        check_within("image_size", image_size, 16, 1024)
        check_option("quality", quality in ("full", "fast"), "be 'full' or 'fast'", quality)
        check_option("gripper", gripper in ("env", "openvla"), "be 'env' or 'openvla'", gripper)
        check_count("wait_steps", wait_steps)
        check_within("task_seed", task_seed, 0, 2**32 - 1)
        check_within("eval_states", eval_states, 1, STORED)
        limit = LIMITS[suite] if max_episode_steps is None else max_episode_steps
        check_count("max_episode_steps", limit)
        self.image_size, self.quality, self.gripper, self.wait_steps = image_size, quality, gripper, wait_steps
        self.task_seed = task_seed
        self.max_episode_steps = limit
        self.tasks = load_suite(suite)
        self.instructions = [task.instruction for task in self.tasks]
        held_out = STORED - eval_states
        self.state_ids = {
            "train": range(held_out) if held_out else range(STORED, END),
            "eval": range(held_out, STORED),
        }
        self.observation_space = observations(self.cameras, image_size, state_size=8, num_tasks=len(self.tasks))
        self.action_space = gym.spaces.Box(-1.0, 1.0, (7,), np.float32)
        self._sim: _Simulator | None = None
        self._rendering = True

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Start an episode; the first of a task builds its simulator, which takes seconds.

        Args:
            seed: decides what `options` leave open; the simulator itself has no noise.
            options: `task_id` and `state_id`; drawn at random (the state out of "train") where missing.

        Raises:
            ValueError: if an option is unknown or an id out of range.
        """
        super().reset(seed=seed)
        task_id, state_id = episode_of(
            options, self.np_random, num_tasks=len(self.tasks), train=self.state_ids["train"], end=END
        )
        if self._sim is None or self._sim.task != self.tasks[task_id]:
            self.close()
            cameras = [CAMERAS[camera] for camera in self.cameras]
            self._sim = _Simulator(self.tasks[task_id], self.image_size, cameras, smooth=self.quality == "full")
        self.task_id = task_id
        self._sim.reset(state_id, self.task_seed, self.wait_steps)
        return self.render_observation(), {"success": False}

    def step(self, action: np.ndarray) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Move the arm for one step.

        Args:
            action: float `[7]`, clipped to [-1, 1].

        Raises:
            RuntimeError: before the first `reset`.
        """
        if self._sim is None:
            raise RuntimeError("call reset() before the first step()")
        action = np.clip(np.asarray(action, dtype=np.float64), -1.0, 1.0)
        if self.gripper == "openvla":
            action[6] = -np.sign(2.0 * action[6] - 1.0)
        success = self._sim.step(action)
        return self._observe(blank=not self._rendering), float(success), success, False, {"success": success}

    def render(self) -> np.ndarray:
        """The first camera's picture, uint8 `[P, P, 3]`, for films."""
        return self._sim.picture(CAMERAS[self.cameras[0]])

    def set_rendering(self, on: bool) -> None:
        """Switch the cameras; while off, `step` returns black images."""
        self._rendering = on

    def render_observation(self) -> dict[str, Any]:
        """The current observation, with images."""
        return self._observe(blank=False)

    def close(self) -> None:
        """Free the simulator and its graphics."""
        if self._sim is not None:
            self._sim.close()
            self._sim = None

    def _observe(self, *, blank: bool) -> dict[str, Any]:
        size = self.image_size
        pictures = {
            camera: np.zeros((size, size, 3), np.uint8) if blank else self._sim.picture(CAMERAS[camera])
            for camera in self.cameras
        }
        return {"images": pictures, "state": self._sim.state(), "task_id": np.int64(self.task_id)}


class _Simulator:
    """One task's simulator, whose cameras draw only when they are asked.

    The original draws every camera in every step, at a moment within the step and not at its end. Here a camera only
    notes where everything is at that moment, and the picture is drawn from these notes if anyone looks.
    """

    def __init__(self, task: LiberoTask, size: int, cameras: list[str], *, smooth: bool):
        self.task, self._size = task, size
        self._states = task.states()
        self.env = build(task.problem_file, image_size=size, cameras=cameras, multisampling=smooth, hard_reset=False)
        self._unplaced = self._model_before_a_layout()
        self._moment: dict[str, np.ndarray] = {}
        self._pictures: dict[str, np.ndarray] = {}
        self._blank = np.zeros((size, size, 3), np.uint8)

        def note(_: dict[str, Any]) -> np.ndarray:
            """Stands in for a camera: remember what it would see."""
            self._moment, self._pictures = self._poses(), {}
            return self._blank

        note.__modality__ = "image"
        for camera in cameras:
            self.env.env._observables[f"{camera}_image"]._sensor = note

    def reset(self, state_id: int, task_seed: int, wait_steps: int) -> None:
        """Bring the arm and the objects to their places and let them settle.

        As the original does, but without compiling the model again: what a reset of that kind forgets is put right by
        hand, so that all that follows is the same to the last bit.
        """
        env = self.env
        for name, values in self._unplaced.items():
            getattr(env.sim.model._model, name)[:] = values
        env.seed(task_seed if state_id < STORED else state_id)
        env.env.reset()
        for robot in env.env.robots:
            robot.gripper.current_action = np.zeros_like(robot.gripper.current_action)
        if state_id < STORED:
            env.set_init_state(self._states[state_id])
        for _ in range(wait_steps):
            self.step(np.array(_WAIT))

    def step(self, action: np.ndarray) -> bool:
        """One step; whether the task is solved after it."""
        self._obs, _, done, _ = self.env.step(action)
        return bool(done)

    def state(self) -> np.ndarray:
        obs = self._obs
        parts = (obs["robot0_eef_pos"], axis_angle(obs["robot0_eef_quat"]), obs["robot0_gripper_qpos"])
        return np.concatenate(parts).astype(np.float32)

    def picture(self, camera: str) -> np.ndarray:
        """uint8 `[P, P, 3]`, upright."""
        if camera not in self._pictures:
            context = self.env.sim._render_context_offscreen
            context.gl_ctx.make_current()
            now = self._poses()
            self._set_poses(self._moment)
            try:
                context.render(self._size, self._size, self.env.sim.model.camera_name2id(camera))
            finally:
                self._set_poses(now)
            # OpenGL counts rows from below, so turning by 180 degrees leaves only the columns to be reversed.
            drawn = context.read_pixels(self._size, self._size, depth=False)
            self._pictures[camera] = np.ascontiguousarray(drawn[::-1, ::-1])
        return self._pictures[camera].copy()

    def close(self) -> None:
        self.env.close()

    def _model_before_a_layout(self) -> dict[str, np.ndarray]:
        """What a layout and an episode change of the model, as it was compiled: a soft reset leaves it as it is."""
        model = self.env.sim.model
        places, turns = model.body_pos.copy(), model.body_quat.copy()
        for fixture in self.env.env.fixtures_dict.values():
            body, element = model.body_name2id(fixture.root_body), fixture.get_obj()
            places[body] = np.array(element.get("pos", "0 0 0").split(), float)
            turns[body] = np.array(element.get("quat", "1 0 0 0").split(), float)
        return {"body_pos": places, "body_quat": turns, "site_rgba": model.site_rgba.copy()}

    def _poses(self) -> dict[str, np.ndarray]:
        data, model = self.env.sim.data._data, self.env.sim.model._model
        return {name: getattr(data, name).copy() for name in _POSES} | {"site_rgba": model.site_rgba.copy()}

    def _set_poses(self, poses: dict[str, np.ndarray]) -> None:
        data, model = self.env.sim.data._data, self.env.sim.model._model
        for name, values in poses.items():
            getattr(model if name == "site_rgba" else data, name)[:] = values
