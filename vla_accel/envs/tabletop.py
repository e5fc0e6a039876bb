"""The embedded simulator: coloured blocks, a two-finger gripper and an instruction; NumPy and Pillow only.

Shaped like LIBERO: the same state, action and gripper sign, sparse reward, success terminates. Two blocks of different
colours are on the table by default and the instruction names one of them, so a policy that ignores either the picture
or the words gets at most one in two right.
Not here: contacts (`tabletop_world.py`), drawing (`drawing.py`), the scripted expert (`tabletop_expert.py`).
Usage: `Tabletop(tasks=["reach", "push"]).reset(options={"task_id": 0, "state_id": 7})`.

| part | entries | meaning |
|---|---|---|
| state | 0-2 | fingertip point x, y, z (m) |
| | 3-5 | axis-angle of the gripper (rad); only the last, yaw, is ever not 0 |
| | 6-7 | finger positions +w, -w (m) |
| action | 0-2 | dx, dy, dz in [-1, 1], in units of 0.05 m |
| | 3-5 | rotation in [-1, 1], in units of 0.5 rad; roll and pitch have no effect |
| | 6 | gripper in [-1, 1]: -1 opens, +1 closes |

| verb | success | failure that ends the episode |
|---|---|---|
| reach | fingertip point within `reach_radius` of the block's centre | the same with another block |
| push | block moved at least 0.05 m over the table | another block moved as far |
| pick | block gripped and lifted at least 0.06 m | another block lifted as high |
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import gymnasium as gym
import numpy as np

from vla_accel.envs.arguments import check_names, check_within, episode_of, pictures
from vla_accel.envs.drawing import Box, Camera, Table, draw
from vla_accel.envs.tabletop_expert import VERBS, expert_action
from vla_accel.envs.tabletop_world import HALF_BLOCK, HALF_FINGER, HALF_TABLE, World

PHRASES = {"reach": "reach the {} block", "push": "push the {} block", "pick": "pick up the {} block"}
COLORS = {"red": (212, 44, 40), "green": (44, 156, 66), "blue": (44, 92, 208), "yellow": (238, 198, 40)}
CAMERAS = ("wrist", "front")
MAX_STEP = 0.05
"""Metres per step and axis at full command."""
MAX_TURN = 0.5
"""Radians per step at full command."""
PUSHED, LIFTED = 0.05, 0.06
"""What counts as pushed and as lifted, metres."""

_LAYOUT, _COLORING, _LOOK = 7001, 7002, 7003  # one random stream per aspect of an initial state
_START = (0.0, 0.0, 0.20)
_SPREAD = 0.17  # blocks start within +-_SPREAD
_APART = 0.12  # between the centres of two blocks at the start
_CLEAR = 0.07  # between a block and the point below the gripper at the start
_WRIST_HEIGHT, _WRIST_FOV = 0.22, 66.0
_FINGER_HEIGHT, _FINGER_DEPTH = 0.045, 0.009  # slim, so that they hide little
_FRONT = Camera.look_at((-0.66, 0.0, 0.64), (-0.01, 0.0, 0.07), fov=46.0)
_DARK, _METAL = (44, 46, 52), (104, 108, 116)


class Tabletop(gym.Env):
    """A table with coloured blocks and a gripper; see the module's tables.

    Args:
        tasks: verbs, out of "reach", "push", "pick".
        colors: colours that an instruction may name, out of "red", "green", "blue", "yellow". The tasks are all pairs
            of verb and colour, the colour running faster.
        num_blocks: blocks on the table, 1 to 4, all of different colours. The others' colours come from `colors`, as
            far as these suffice.
        cameras: out of "wrist" (looks straight down and moves with the gripper, but does not turn with it) and "front"
            (stands at the near edge of the table).
        image_size: P, side of the images in pixels, at least 16.
        reach_radius: metres, 0.025 to 0.055.
        start_jitter: how far the gripper's start may be from the middle in x and y, and half of it in z; metres, 0 to
            0.08.
        max_episode_steps: the usual time limit, in steps. The simulator itself never truncates.

    Raises:
        ValueError: naming the option that breaks its rule.
    """

    metadata: ClassVar[dict[str, Any]] = {"render_modes": ["rgb_array"], "render_fps": 10}
    vectorization: ClassVar[str] = "sync"  # a step is cheaper than a message to a worker
    render_mode = "rgb_array"

    def __init__(
        self,
        *,
        tasks: Sequence[str] = ("reach",),
        colors: Sequence[str] = tuple(COLORS),
        num_blocks: int = 2,
        cameras: Sequence[str] = ("wrist",),
        image_size: int = 48,
        reach_radius: float = 0.04,
        start_jitter: float = 0.04,
        max_episode_steps: int = 12,
    ):
        tasks = check_names("tasks", tasks, VERBS)
        self.colors = check_names("colors", colors, tuple(COLORS))
        self.cameras = check_names("cameras", cameras, CAMERAS)
        check_within("num_blocks", num_blocks, 1, len(COLORS))
        check_within("image_size", image_size, 16, 4096)
        check_within("reach_radius", reach_radius, 0.025, 0.055)
        check_within("start_jitter", start_jitter, 0.0, 0.08)
        check_within("max_episode_steps", max_episode_steps, 1, 10**9)
        self.num_blocks, self.image_size, self.reach_radius = num_blocks, image_size, reach_radius
        self.start_jitter, self.max_episode_steps = start_jitter, max_episode_steps
        self.tasks = [(verb, color) for verb in tasks for color in self.colors]
        self.instructions = [PHRASES[verb].format(color) for verb, color in self.tasks]
        self.state_ids = {"train": range(1000, 1_000_000), "eval": range(1000)}
        self.observation_space = gym.spaces.Dict(
            {
                "images": pictures(self.cameras, image_size),
                "state": gym.spaces.Box(-4.0, 4.0, (8,), np.float32),
                "task_id": gym.spaces.Discrete(len(self.tasks)),
            }
        )
        self.action_space = gym.spaces.Box(-1.0, 1.0, (7,), np.float32)
        self._rendering = True
        self._running = False

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
        self.task_id, (self.verb, color) = task_id, self.tasks[task_id]
        spots, tip = _layout(state_id, self.start_jitter)
        self.world = World(spots[: self.num_blocks], tip)
        self.block_colors = _coloring(state_id, color, self.colors, self.num_blocks)
        self.target = self.block_colors.index(color)
        self._table, self._light = _look(state_id)
        self._running = True
        return self.render_observation(), {"success": False}

    def step(self, action: np.ndarray) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Move the gripper for one step.

        Args:
            action: float `[7]`, clipped to [-1, 1].

        Raises:
            RuntimeError: if no episode is running.
        """
        if not self._running:
            raise RuntimeError("the episode has ended: call reset() before the next step()")
        dx, dy, dz, _, _, turn, close = np.clip(np.asarray(action, dtype=np.float64), -1.0, 1.0).tolist()
        self.world.move((dx * MAX_STEP, dy * MAX_STEP, dz * MAX_STEP), yaw=turn * MAX_TURN, close=close)
        done = self._done_with()
        success = done == self.target
        self._running = done is None
        obs = self.render_observation() if self._rendering else self._observe(blank=True)
        return obs, float(success), done is not None, False, {"success": success}

    def render(self) -> np.ndarray:
        """The front camera at 256 pixels, uint8 `[256, 256, 3]`, for videos."""
        return self._picture("front", 256)

    def set_rendering(self, on: bool) -> None:
        """Switch the cameras; while off, `step` returns black images."""
        self._rendering = on

    def render_observation(self) -> dict[str, Any]:
        """The current observation, with images."""
        return self._observe(blank=False)

    def expert_action(self, *, speed: float = 1.0) -> np.ndarray:
        """What a scripted expert, who sees the simulator's state, does next.

        Args:
            speed: in (0, 1]: no axis moves faster than `speed * MAX_STEP`.

        Returns:
            float32 `[7]`. It depends on nothing but the current state, so it may be asked at any moment, also to
            label what another policy did.
        """
        if not 0 < speed <= 1:
            raise ValueError(f"speed must lie in (0, 1], got {speed}")
        delta, turn, close = expert_action(self.verb, self.world, self.target)
        scale = min(1.0, speed * MAX_STEP / max(1e-9, *(abs(part) for part in delta)))
        action = [part * scale / MAX_STEP for part in delta] + [0.0, 0.0, turn / MAX_TURN, close]
        return np.clip(np.array(action, dtype=np.float32), -1.0, 1.0)

    def _done_with(self) -> int | None:
        """Index of the block with which the verb was carried out, the target first; None while there is none."""
        blocks, tip = self.world.blocks, self.world.tip
        if self.verb == "reach":
            done = [math.dist(tip, (block.x, block.y, block.z)) <= self.reach_radius for block in blocks]
        elif self.verb == "push":
            done = [block.displacement >= PUSHED and block is not self.world.held for block in blocks]
        else:
            done = [block is self.world.held and block.z - HALF_BLOCK >= LIFTED for block in blocks]
        if done[self.target]:
            return self.target
        return done.index(True) if any(done) else None

    def _observe(self, *, blank: bool) -> dict[str, Any]:
        world, size = self.world, self.image_size
        state = [*world.tip, 0.0, 0.0, world.yaw, world.width, -world.width]
        pictures = {
            camera: np.zeros((size, size, 3), np.uint8) if blank else self._picture(camera, size)
            for camera in self.cameras
        }
        return {"images": pictures, "state": np.array(state, dtype=np.float32), "task_id": np.int64(self.task_id)}

    def _picture(self, name: str, size: int) -> np.ndarray:
        """Draw one camera's view, uint8 `[size, size, 3]`."""
        world = self.world
        x, y, z = world.tip
        boxes = [
            Box((block.x, block.y, block.z), (HALF_BLOCK,) * 3, 0.0, COLORS[color])
            for block, color in zip(world.blocks, self.block_colors, strict=True)
        ]
        shadows = [_shadow(block.x, block.y, block.z - HALF_BLOCK, HALF_BLOCK) for block in world.blocks]
        for fx, fy in world.fingers():
            half = (_FINGER_DEPTH / 2, HALF_FINGER, _FINGER_HEIGHT / 2)
            boxes.append(Box((fx, fy, z + _FINGER_HEIGHT / 2), half, world.yaw, _DARK))
            shadows.append(_shadow(fx, fy, z, 0.008))
        if name == "wrist":
            camera = Camera.look_down((x, y, z + _WRIST_HEIGHT), fov=_WRIST_FOV)
        else:
            camera = _FRONT
            boxes.append(Box((x, y, z + _FINGER_HEIGHT + 0.012), (0.018, 0.052, 0.012), world.yaw, _METAL))
            boxes.append(Box((x, y, z + _FINGER_HEIGHT + 0.074), (0.016, 0.016, 0.05), world.yaw, _METAL))
        return draw(camera, size, table=self._table, shadows=shadows, boxes=boxes, light=self._light)


def _layout(state_id: int, jitter: float) -> tuple[list[tuple[float, float]], list[float]]:
    """Block positions (always all four, so that their number changes none) and the gripper's start."""
    rng = np.random.default_rng([_LAYOUT, state_id])
    tip = (np.array(_START) + rng.uniform(-1, 1, 3) * (jitter, jitter, jitter / 2)).tolist()
    while True:
        spots: list[tuple[float, float]] = []
        for x, y in rng.uniform(-_SPREAD, _SPREAD, (24, 2)).tolist():
            if math.dist((x, y), tip[:2]) > _CLEAR and all(math.dist((x, y), spot) > _APART for spot in spots):
                spots.append((x, y))
            if len(spots) == len(COLORS):
                return spots, tip


def _coloring(state_id: int, target: str, colors: Sequence[str], num_blocks: int) -> list[str]:
    """Colours of the blocks: the state's own, with the target put in the place of one where it is missing.

    Seen over all states and tasks, every block in the picture is equally likely to be the target.
    """
    rng = np.random.default_rng([_COLORING, state_id])
    others = [color for color in COLORS if color not in colors]
    order = rng.permutation(list(colors)).tolist() + rng.permutation(others).tolist()
    place = int(rng.integers(min(num_blocks, len(colors))))
    shown = order[:num_blocks]
    if target not in shown:
        shown[place] = target
    return shown


def _look(state_id: int) -> tuple[Table, float]:
    """A slightly different table and light for each state."""
    rng = np.random.default_rng([_LOOK, state_id])
    shade, warmth, offset = rng.integers(-10, 11), rng.integers(-6, 7), rng.uniform(-0.04, 0.04)
    color = (int(190 + shade + warmth), int(184 + shade), int(174 + shade - warmth))
    grooves = tuple(float(offset + x) for x in (-0.18, -0.09, 0.0, 0.09, 0.18))
    return Table(HALF_TABLE, color, grooves), float(rng.uniform(0.92, 1.08))


def _shadow(x: float, y: float, height: float, half: float) -> tuple[np.ndarray, float]:
    """A shadow on the table: the higher a thing, the farther off and the fainter."""
    x, y, half = x + 0.25 * height, y - 0.2 * height, half + 0.004
    outline = np.array([(x - half, y - half), (x + half, y - half), (x + half, y + half), (x - half, y + half)])
    return outline, min(0.92, 0.68 + height)
