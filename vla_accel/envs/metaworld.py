"""Meta-World (arXiv 1910.10897) as `metaworld:<task, suite, or tasks with commas>`, e.g. `metaworld:reach-v3`.

Not here: the tasks' words and groups (`metaworld_tasks.py`).
Usage: `make_env("metaworld:push-v3,reach-v3", image_size=128)`; needs `pip install "vla_accel[metaworld]"`.

| part | entries | meaning |
|---|---|---|
| state | 0-2 | gripper x, y, z (m) |
| | 3 | how far it is open, 0..1 |
| action (4) | 0-2 | dx, dy, dz in [-1, 1], in units of 0.01 m |
| | 3 | gripper in [-1, 1]: -1 opens, +1 closes |
| action (7) | 0-2, 6 | the same; 3-5, a rotation, have no effect: for policies of seven dimensions |

An episode ends when the task is solved. The initial state's id seeds the places of objects and goal.
"""

from __future__ import annotations

import atexit
import importlib.util
import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import gymnasium as gym
import numpy as np

from vla_accel.envs.arguments import check_count, check_names, check_option, check_within, episode_of, observations
from vla_accel.envs.graphics import prepare_graphics
from vla_accel.envs.metaworld_tasks import INSTRUCTIONS, SUITES

CAMERAS = ("corner2", "corner", "corner3", "corner4", "topview", "behindGripper", "gripperPOV")
CLOSE_UP = (0.75, 0.075, 0.7)
"""Where others who train policies on Meta-World have put the camera corner2."""

_BUILT = 8  # simulators kept at a time: changing between so many tasks costs nothing, among more some are built anew


class MetaWorld(gym.Env):
    """Some of Meta-World's tasks; see the module's tables.

    Args:
        tasks: a task, a suite (easy, medium, hard, very_hard, mt10, mt50), or tasks with commas between them.
        cameras: out of `CAMERAS`.
        image_size: P, in pixels, 16 to 1024.
        quality: "full", or "fast": no antialiasing, shadows and reflections, ten times as quick without a GPU.
        action_dim: 4, or 7 for policies that also rotate.
        reward: "sparse" (1 when solved) or "dense" (the simulator's own, brought to 0..1).
        instructions_file: a JSON file, task name -> sentence, that replaces some of the instructions.
        max_episode_steps: the usual time limit, in steps.

    Raises:
        ValueError: naming the option that breaks its rule, or the package that is missing.
    """

    metadata: ClassVar[dict[str, Any]] = {"render_modes": ["rgb_array"], "render_fps": 80}
    render_mode = "rgb_array"

    def __init__(
        self,
        tasks: str,
        /,
        *,
        cameras: Sequence[str] = ("corner2",),
        image_size: int = 256,
        quality: str = "full",
        action_dim: int = 4,
        reward: str = "sparse",
        instructions_file: str | None = None,
        max_episode_steps: int = 500,
    ):
        self.tasks = task_names(tasks)
        self.cameras = check_names("cameras", cameras, CAMERAS)
        check_within("image_size", image_size, 16, 1024)
        check_option("quality", quality in ("full", "fast"), "be 'full' or 'fast'", quality)
        check_option("action_dim", isinstance(action_dim, int) and action_dim in (4, 7), "be 4 or 7", action_dim)
        check_option("reward", reward in ("sparse", "dense"), "be 'sparse' or 'dense'", reward)
        check_count("max_episode_steps", max_episode_steps)
        self.image_size, self.quality, self.action_dim, self.reward = image_size, quality, action_dim, reward
        self.max_episode_steps = max_episode_steps
        words = INSTRUCTIONS | _read_instructions(instructions_file)
        self.instructions = [words[task] for task in self.tasks]
        self.state_ids = {"train": range(1000, 1_000_000), "eval": range(1000)}
        self.observation_space = observations(self.cameras, image_size, state_size=4, num_tasks=len(self.tasks))
        self.action_space = gym.spaces.Box(-1.0, 1.0, (action_dim,), np.float32)
        if not installed():
            raise ValueError('metaworld needs its package: pip install "vla_accel[metaworld]"')
        self.slow_task_change = len(self.tasks) > _BUILT
        self._built: OrderedDict[str, _Simulator] = OrderedDict()
        self._now: _Simulator | None = None
        self._rendering = True

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Start an episode.

        Args:
            seed: decides what `options` leave open; the simulator itself has no noise.
            options: `task_id` and `state_id`; drawn at random (the state out of "train") where missing.

        Raises:
            ValueError: if an option is unknown or an id out of range.
        """
        super().reset(seed=seed)
        train = self.state_ids["train"]
        task_id, state_id = episode_of(options, self.np_random, num_tasks=len(self.tasks), train=train, end=train.stop)
        self.task_id = task_id
        self._now = self._simulator(self.tasks[task_id])
        self._now.reset(state_id)
        return self.render_observation(), {"success": False}

    def step(self, action: np.ndarray) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Move the gripper for one step.

        Args:
            action: float `[4]` or `[7]`, clipped to [-1, 1].

        Raises:
            RuntimeError: before the first `reset`.
        """
        if self._now is None:
            raise RuntimeError("call reset() before the first step()")
        action = np.clip(np.asarray(action, dtype=np.float32), -1.0, 1.0)
        success, dense = self._now.step(action[[0, 1, 2, -1]])
        reward = float(success) if self.reward == "sparse" else dense / 10.0
        return self._observe(blank=not self._rendering), reward, success, False, {"success": success}

    def render(self) -> np.ndarray:
        """The first camera's picture, uint8 `[P, P, 3]`, for films."""
        return self._now.picture(self.cameras[0])

    def set_rendering(self, on: bool) -> None:
        """Switch the cameras; while off, `step` returns black images."""
        self._rendering = on

    def render_observation(self) -> dict[str, Any]:
        """The current observation, with images."""
        return self._observe(blank=False)

    def expert_action(self, *, speed: float = 1.0) -> np.ndarray:
        """What Meta-World's own scripted policy for the task does next.

        Args:
            speed: in (0, 1]: the share of each movement that is made.

        Returns:
            float32 `[4]` or `[7]`.
        """
        if not 0 < speed <= 1:
            raise ValueError(f"speed must lie in (0, 1], got {speed}")
        action = np.zeros(self.action_dim, np.float32)
        action[[0, 1, 2, -1]] = self._now.expert_action()
        action[:3] *= speed
        return action

    def close(self) -> None:
        """Free the simulators and their graphics."""
        for simulator in self._built.values():
            simulator.close()
        self._built.clear()
        self._now = None

    def _simulator(self, task: str) -> _Simulator:
        """The task's simulator; the one that was used longest ago goes where there are too many."""
        if task not in self._built:
            if len(self._built) >= _BUILT:
                self._built.popitem(last=False)[1].close()
            self._built[task] = _Simulator(task, self.image_size, fast=self.quality == "fast")
        self._built.move_to_end(task)
        return self._built[task]

    def _observe(self, *, blank: bool) -> dict[str, Any]:
        size = self.image_size
        pictures = {
            camera: np.zeros((size, size, 3), np.uint8) if blank else self._now.picture(camera)
            for camera in self.cameras
        }
        return {"images": pictures, "state": self._now.state(), "task_id": np.int64(self.task_id)}


class _Simulator:
    """One task's simulator, its camera and its expert."""

    def __init__(self, task: str, size: int, *, fast: bool):
        prepare_graphics()
        import metaworld.policies
        import mujoco

        self._mujoco, self._fast, self._size = mujoco, fast, size
        self.env = metaworld.ALL_V3_ENVIRONMENTS[task]()
        self._expert = metaworld.policies.ENV_POLICY_MAP[task]()
        # The simulator asks for a task object, hides the goal from its observation, and keeps its first layout or draws
        # from NumPy's global generator unless told otherwise. Only the expert sees the goal; policies get 4 numbers.
        self.env._set_task_called, self.env._partially_observable = True, False
        self.env._freeze_rand_vec, self.env.seeded_rand_vec = False, True
        self.env.__dict__.pop("sawyer_observation_space", None)
        self.env.max_path_length = 10**9  # the time limit is a wrapper's
        model = self.env.model
        model.camera("corner2").pos[:] = CLOSE_UP
        model.vis.global_.offwidth = max(size, model.vis.global_.offwidth)
        model.vis.global_.offheight = max(size, model.vis.global_.offheight)
        if fast:
            model.vis.quality.offsamples = 0
        self._renderer: Any = None
        self._obs = np.zeros(39)

    def reset(self, state_id: int) -> None:
        self.env.seed(state_id)
        self._obs, _ = self.env.reset()
        # The goal is moved after its place in pictures was computed: the first one would show where it was before.
        self._mujoco.mj_kinematics(self.env.model, self.env.data)
        self._mujoco.mj_camlight(self.env.model, self.env.data)

    def step(self, action: np.ndarray) -> tuple[bool, float]:
        self._obs, reward, _, _, info = self.env.step(action)
        return bool(info["success"]), float(reward)

    def state(self) -> np.ndarray:
        return np.array(self._obs[:4], dtype=np.float32)

    def expert_action(self) -> np.ndarray:
        return np.clip(np.asarray(self._expert.get_action(self._obs), dtype=np.float32), -1.0, 1.0)

    def picture(self, camera: str) -> np.ndarray:
        """uint8 `[P, P, 3]`, upright."""
        if self._renderer is None:
            self._renderer = self._mujoco.Renderer(self.env.model, self._size, self._size)
            # Freed while the graphics library is still there, or it complains when the process ends.
            atexit.register(self.close)
        self._renderer.update_scene(self.env.data, camera)
        flags, names = self._renderer.scene.flags, self._mujoco.mjtRndFlag
        flags[names.mjRND_SHADOW] = flags[names.mjRND_REFLECTION] = not self._fast
        picture = self._renderer.render()
        # The cameras in the corners hang upside down.
        return picture[::-1, ::-1].copy() if camera.startswith("corner") else picture.copy()

    def close(self) -> None:
        if self._renderer is not None:
            atexit.unregister(self.close)
            self._renderer.close()
            self._renderer = None
        self.env.close()


def installed() -> bool:
    """Whether the package is there."""
    return importlib.util.find_spec("metaworld") is not None


def task_names(given: str) -> list[str]:
    """The tasks that a name stands for: a suite, a task with or without `-v3`, or several of these with commas.

    Raises:
        ValueError: for a name that is neither, listing the suites and the nearest task.
    """
    names: list[str] = []
    for part in given.split(","):
        name = part.strip()
        if name in SUITES:
            names += SUITES[name]
        elif name in INSTRUCTIONS or f"{name}-v3" in INSTRUCTIONS:
            names.append(name if name in INSTRUCTIONS else f"{name}-v3")
        else:
            import difflib

            near = difflib.get_close_matches(name, list(INSTRUCTIONS), n=1, cutoff=0.3)
            hint = f" Did you mean {near[0]}?" if near else ""
            raise ValueError(f"metaworld:{name} is neither a task nor one of the suites {', '.join(SUITES)}.{hint}")
    check_option("tasks", len(set(names)) == len(names), "name each task once", given)
    return names


def _read_instructions(file: str | None) -> Mapping[str, str]:
    if file is None:
        return {}
    check_option("instructions_file", isinstance(file, str), "be the path of a JSON file", file)
    try:
        words = json.loads(Path(file).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"instructions_file must be a JSON file that can be read, got {file!r} ({error})") from error
    fits = isinstance(words, dict) and all(isinstance(text, str) and text.strip() for text in words.values())
    check_option("instructions_file", fits, "hold an object of task name -> sentence", file)
    unknown = sorted(set(words) - set(INSTRUCTIONS))
    check_option("instructions_file", not unknown, "name tasks of Meta-World only", unknown)
    return words
