"""ManiSkill 3 (arXiv 2410.00425) as `maniskill:<task>`, e.g. `maniskill:PickCube-v1`: Panda tasks on a table.

On an NVIDIA GPU all environments of a process are one simulator that steps and draws them together; without one, each
is a worker process of its own, which draws in software. Both need a Vulkan driver.

Not here: chunks, jobs and time limits of many environments at once (`batched.py`).
Usage: `make_env("maniskill:StackCube-v1", image_size=224)`; needs `pip install "vla_accel[maniskill]"`.

| part | entries | meaning |
|---|---|---|
| state | 0-2 | point between the fingertips x, y, z (m) |
| | 3-5 | its rotation as axis times angle (rad) |
| | 6-7 | finger positions (m) |
| action | 0-2 | dx, dy, dz in [-1, 1], in units of 0.1 m, of which one step covers less than half |
| | 3-5 | rotation in [-1, 1], in units of 0.1 rad |
| | 6 | gripper: +1 opens, -1 closes; with `gripper="openvla"` 1 opens, 0 closes |

The initial state's id seeds the places of objects and goal. Success ends an episode, and so does failure where the task
knows one.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import gymnasium as gym
import numpy as np

from vla_accel.envs.arguments import check_count, check_names, check_option, check_within, episode_of, observations
from vla_accel.envs.graphics import load_triton
from vla_accel.envs.rotations import axis_angle
from vla_accel.types import Job

TASKS: dict[str, tuple[str, int]] = {
    "PickCube-v1": ("pick up the red cube and move it to the green goal", 50),
    "PushCube-v1": ("push the blue cube to the target", 50),
    "PullCube-v1": ("pull the blue cube to the target", 50),
    "StackCube-v1": ("stack the red cube on the green cube", 50),
    "PokeCube-v1": ("poke the cube with the peg", 50),
    "LiftPegUpright-v1": ("put the peg upright", 50),
    "RollBall-v1": ("roll the ball to the target", 80),
    "PlaceSphere-v1": ("place the ball in the bin", 50),
    "PullCubeTool-v1": ("pull the cube closer with the tool", 100),
    "PegInsertionSide-v1": ("insert the peg into the hole in the box", 100),
    "PlugCharger-v1": ("plug the charger into the receptacle", 200),
    "StackPyramid-v1": ("stack the blue cube on the red and the green cube", 250),
}
"""Task -> what a policy is told, and ManiSkill's time limit in steps. ManiSkill itself has no words for its tasks."""

NO_DRIVER = (
    "maniskill draws with Vulkan and found no driver that it can use: with an NVIDIA GPU install its driver, without "
    "one Mesa 24.3 or newer (Debian 13: apt-get install libvulkan1 mesa-vulkan-drivers; Debian 12: the same, "
    "mesa-vulkan-drivers from bookworm-backports)"
)


class ManiSkill(gym.Env):
    """One environment of a task; see the module's tables.

    Args:
        task: a name of `TASKS`, or another registered one that a Panda plays, with `instruction`.
        cameras: out of "base_camera" and, where the task's robot has one, "hand_camera".
        image_size: P.
        gripper: "env" or "openvla", how the policy speaks of the gripper.
        reward: "sparse" (1 when solved, -1 when failed) or "dense" (the simulator's own, brought to 0..1).
        backend: "gpu", "cpu", or "auto": gpu where there is one.
        instruction: what a policy is told; None: as in `TASKS`.
        max_episode_steps: the usual time limit, in steps; None: as in `TASKS`, or 100.

    Raises:
        ValueError: naming the option that breaks its rule, or the package that is missing.
        RuntimeError: if there is no Vulkan driver.
    """

    metadata: ClassVar[dict[str, Any]] = {"render_modes": ["rgb_array"], "render_fps": 20}
    render_mode = "rgb_array"

    def __init__(
        self,
        task: str,
        /,
        *,
        cameras: Sequence[str] = ("base_camera",),
        image_size: int = 128,
        gripper: str = "env",
        reward: str = "sparse",
        backend: str = "auto",
        instruction: str | None = None,
        max_episode_steps: int | None = None,
    ):
        known = task in TASKS
        if not known and instruction is None:
            raise ValueError(
                f"maniskill:{task} is none of {', '.join(TASKS)}; for another task of ManiSkill say what a policy is "
                "told: --env.options instruction"
            )
        words, limit = TASKS.get(task, (instruction, 100))
        self.task, self.cameras = task, check_names("cameras", cameras, ("base_camera", "hand_camera"))
        check_within("image_size", image_size, 16, 1024)
        check_option("gripper", gripper in ("env", "openvla"), "be 'env' or 'openvla'", gripper)
        check_option("reward", reward in ("sparse", "dense"), "be 'sparse' or 'dense'", reward)
        check_option("backend", backend in ("auto", "gpu", "cpu"), "be 'auto', 'gpu' or 'cpu'", backend)
        self.max_episode_steps = limit if max_episode_steps is None else max_episode_steps
        check_count("max_episode_steps", self.max_episode_steps)
        if importlib.util.find_spec("mani_skill") is None:
            raise ValueError('maniskill needs its package: pip install "vla_accel[maniskill]"')
        self.backend = _choose_backend(backend)
        if not can_draw(self.backend):
            raise RuntimeError(NO_DRIVER)
        self.vectorization = "batched" if self.backend == "gpu" else "async"
        self.image_size, self.gripper, self.reward = image_size, gripper, reward
        self.instructions = [instruction or words]
        self.state_ids = {"train": range(1000, 1_000_000), "eval": range(1000)}
        self.observation_space = observations(self.cameras, image_size, state_size=8, num_tasks=1)
        self.action_space = gym.spaces.Box(-1.0, 1.0, (7,), np.float32)
        self._scene: Scenes | None = None
        self._rendering = True

    def batch(self, num_envs: int) -> Scenes:
        """One simulator for many environments; on the CPU there can only be one.

        Raises:
            RuntimeError: for files of the task that are not on disk, or a camera that its robot has not.
        """
        _check_files(self.task)
        made = gym.make(
            self.task,
            num_envs=num_envs,
            obs_mode="rgb",
            control_mode="pd_ee_delta_pose",
            reward_mode="sparse" if self.reward == "sparse" else "normalized_dense",
            sim_backend="physx_cuda" if self.backend == "gpu" else "physx_cpu",
            render_backend=self.backend,
            sensor_configs={"width": self.image_size, "height": self.image_size},
            reconfiguration_freq=0,
        )
        return Scenes(made.unwrapped, cameras=self.cameras, image_size=self.image_size, gripper=self.gripper)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Start an episode; the first one builds the simulator, which takes half a minute.

        Args:
            seed: decides what `options` leave open; the simulator itself has no noise.
            options: `task_id` (0) and `state_id`; the state drawn at random out of "train" where missing.

        Raises:
            ValueError: if an option is unknown or an id out of range.
        """
        super().reset(seed=seed)
        train = self.state_ids["train"]
        _, state_id = episode_of(options, self.np_random, num_tasks=1, train=train, end=train.stop)
        if self._scene is None:
            self._scene = self.batch(1)
        self._scene.begin([0], [Job(task_id=0, state_id=state_id, seed=0)])
        return self.render_observation(), {"success": False}

    def step(self, action: np.ndarray) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Move the arm for one step.

        Args:
            action: float `[7]`, clipped to [-1, 1].

        Raises:
            RuntimeError: before the first `reset`.
        """
        if self._scene is None:
            raise RuntimeError("call reset() before the first step()")
        action = np.asarray(action, dtype=np.float32)[None]
        reward, terminated, success = self._scene.step(action, np.ones(1, dtype=bool))
        obs = _first(self._scene.observe(pictures=self._rendering))
        return obs, float(reward[0]), bool(terminated[0]), False, {"success": bool(success[0])}

    def render(self) -> np.ndarray:
        """The first camera's picture, uint8 `[P, P, 3]`, for films."""
        return self.render_observation()["images"][self.cameras[0]]

    def set_rendering(self, on: bool) -> None:
        """Switch the cameras; while off, `step` returns black images."""
        self._rendering = on

    def render_observation(self) -> dict[str, Any]:
        """The current observation, with images."""
        return _first(self._scene.observe())

    def close(self) -> None:
        """Free the simulator and its graphics."""
        if self._scene is not None:
            self._scene.close()
            self._scene = None


class Scenes:
    """N environments of one task, stepped together; what `batched.py` asks of a simulator.

    An episode depends on its initial state's id only, whatever the other environments do: each is started alone, since
    ManiSkill seeds all those that start together by the first one's seed.

    Args:
        env: ManiSkill's `BaseEnv`, bare.
        cameras: names of those to draw.
        image_size: of their pictures.
        gripper: as for `ManiSkill`.

    Raises:
        RuntimeError: for a camera that the task has not.
    """

    def __init__(self, env: Any, *, cameras: list[str], image_size: int, gripper: str):
        self.env, self.num_envs = env, env.num_envs
        self._cameras, self._size, self._gripper = cameras, image_size, gripper
        sensors = env._sensors
        if not set(cameras) <= set(sensors):
            raise RuntimeError(f"the task's cameras are {', '.join(sensors)}, not {', '.join(cameras)}")
        for camera in set(sensors) - set(cameras):
            del sensors[camera]
        # Goals are hidden from cameras by default, though a policy that sees nothing else must know them.
        for goal in env._hidden_objects:
            goal.show_visual()
        env._hidden_objects.clear()

    def begin(self, rows: list[int], jobs: list[Job]) -> None:
        """Start episodes."""
        import torch

        for row, job in zip(rows, jobs, strict=True):
            with self._blind():
                self.env.reset(
                    seed=[job.state_id] * self.num_envs,
                    options={"env_idx": torch.tensor([row], device=self.env.device)},
                )

    def step(self, action: np.ndarray, running: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Step all environments; those that are not running stand still."""
        import torch

        action = np.clip(action, -1.0, 1.0)
        if self._gripper == "openvla":
            action[:, 6] = np.sign(2.0 * action[:, 6] - 1.0)
        action[~running] = 0.0
        with self._blind():
            _, reward, terminated, _, info = self.env.step(torch.from_numpy(action).to(self.env.device))
        reward, terminated, success = (
            x.cpu().numpy().reshape(self.num_envs) for x in (reward, terminated, info["success"])
        )
        return reward, terminated, success

    def observe(self, *, pictures: bool = True) -> dict[str, Any]:
        """What all environments show now; black images without `pictures`."""
        if pictures:
            shown = self.env.get_obs(self.env.get_info())["sensor_data"]
            images = {camera: shown[camera]["rgb"].cpu().numpy().copy() for camera in self._cameras}
        else:
            images = {
                camera: np.zeros((self.num_envs, self._size, self._size, 3), np.uint8) for camera in self._cameras
            }
        pose = self.env.agent.tcp.pose.raw_pose.cpu().numpy()
        fingers = self.env.agent.robot.get_qpos()[:, -2:].cpu().numpy()
        turned = np.array([axis_angle(quaternion[[1, 2, 3, 0]]) for quaternion in pose[:, 3:]])
        state = np.concatenate([pose[:, :3], turned, fingers], axis=1).astype(np.float32)
        return {"images": images, "state": state, "task_id": np.zeros(self.num_envs, np.int64)}

    def close(self) -> None:
        """Free the simulator."""
        self.env.close()

    @contextmanager
    def _blind(self) -> Iterator[None]:
        """Let the simulator draw nothing, as it otherwise does in every step and reset."""
        self.env._obs_mode = "none"
        try:
            yield
        finally:
            self.env._obs_mode = "rgb"


@functools.cache
def can_draw(backend: str) -> bool:
    """Whether SAPIEN, with which ManiSkill draws, finds a Vulkan driver; asked of itself, in a second or two."""
    import warnings

    load_triton()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import sapien

    sapien.render.set_log_level("off")
    try:
        sapien.render.RenderSystem(sapien.Device("cuda" if backend == "gpu" else "cpu"))
    except RuntimeError:
        return False
    finally:
        sapien.render.set_log_level("warning")
    return True


def _choose_backend(wanted: str) -> str:
    import torch

    if wanted == "gpu" and not torch.cuda.is_available():
        raise ValueError("backend must be 'cpu' or 'auto' where PyTorch sees no GPU, got 'gpu'")
    return ("gpu" if torch.cuda.is_available() else "cpu") if wanted == "auto" else wanted


def _check_files(task: str) -> None:
    """Refuse what ManiSkill would ask on the terminal whether to download."""
    import mani_skill.envs  # registers the tasks
    from mani_skill.utils.assets.data import is_data_source_downloaded
    from mani_skill.utils.registration import REGISTERED_ENVS

    if task not in REGISTERED_ENVS:
        raise RuntimeError(f"maniskill:{task} is not a task of {mani_skill.__name__}")
    missing = [name for name in REGISTERED_ENVS[task].asset_download_ids or [] if not is_data_source_downloaded(name)]
    if missing:
        raise RuntimeError(
            f"maniskill:{task} needs files that are not on disk, and nothing is downloaded unasked: "
            f"python -m mani_skill.utils.download_asset {' '.join(missing)}"
        )


def _first(shown: dict[str, Any]) -> dict[str, Any]:
    """The only environment's observation."""
    images = {camera: picture[0] for camera, picture in shown["images"].items()}
    return {"images": images, "state": shown["state"][0], "task_id": np.int64(0)}
