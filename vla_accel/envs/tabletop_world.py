"""The world of the tabletop simulator: blocks, a two-finger gripper, and how the one moves the other.

Kinematic: nothing has mass, a free block lies on the table, a pushed block moves exactly as far as it must, and the
table has an invisible rim.
Plain floats instead of arrays, which are faster at this size.
Not here: tasks, observations, drawing.
Usage: `world = World(blocks=[(0.1, 0.0)], tip=(0, 0, 0.2)); world.move((0.01, 0, 0), yaw=0.0, close=1.0)`.

Frame: x forward, y left, z up, metres; the table top is z = 0, its centre the origin. At yaw 0 the fingers are at +y
and -y of the fingertip point.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

HALF_TABLE = 0.25
REACH = 0.24
"""The fingertip point stays within +-REACH in x and y."""
LOWEST, HIGHEST = 0.01, 0.32
"""Limits of the fingertip point's height."""
HALF_BLOCK = 0.02
BLOCK_TOP = 2 * HALF_BLOCK
OPEN = 0.04
"""Distance of each finger's inner face from the fingertip point when fully open."""
FINGER_SPEED = 0.02
"""How far each finger travels in one step at full command."""
HALF_FINGER = 0.004

_CONTACT = 0.03  # between the centres of a block and of a finger: closer, and the block gives way
_OVER = 0.026  # a descending finger this close to a block's centre lands on its top
_BLOCK_GAP = 0.043  # between the centres of two blocks
_GRIP_DEPTH = 0.018  # how far off the fingers' plane a block may be to lie between them
_SUBSTEP = 0.01


@dataclass
class Block:
    """A cube.

    Attributes:
        x: of its centre.
        y: of its centre.
        z: of its centre; `HALF_BLOCK` on the table.
        start: x and y at the episode's start.
    """

    x: float
    y: float
    z: float
    start: tuple[float, float]

    @property
    def displacement(self) -> float:
        """How far it was moved over the table, metres."""
        return math.hypot(self.x - self.start[0], self.y - self.start[1])


class World:
    """Blocks and a gripper.

    Args:
        blocks: x and y of each block.
        tip: fingertip point, x, y, z.

    Attributes:
        blocks: the blocks, in the order given.
        tip: fingertip point, x, y, z.
        yaw: rotation of the gripper about z, radians.
        width: distance of each finger's inner face from the fingertip point, `0..OPEN`.
        held: the block between the closed fingers, or None.
    """

    def __init__(self, blocks: Sequence[tuple[float, float]], tip: Sequence[float]):
        self.blocks = [Block(x, y, HALF_BLOCK, (x, y)) for x, y in blocks]
        self.tip = [float(value) for value in tip]
        self.yaw = 0.0
        self.width = OPEN
        self.held: Block | None = None

    def move(self, delta: Sequence[float], *, yaw: float, close: float) -> None:
        """Move the gripper for one step, through substeps of at most 1 cm.

        Args:
            delta: of the fingertip point, metres; cut off at the limits of the workspace.
            yaw: rotation to add, radians; the gripper turns within a quarter turn either way.
            close: -1..1, the share of `FINGER_SPEED` by which the fingers close.
        """
        limits = ((-REACH, REACH), (-REACH, REACH), (LOWEST, HIGHEST))
        goal = [min(max(at + by, low), high) for at, by, (low, high) in zip(self.tip, delta, limits, strict=True)]
        travel = [to - at for to, at in zip(goal, self.tip, strict=True)]
        self.yaw = min(max(self.yaw + yaw, -math.pi / 2), math.pi / 2)
        near = self.held is not None or min(goal[2], self.tip[2]) < BLOCK_TOP
        substeps = max(1, math.ceil(max(map(abs, travel)) / _SUBSTEP - 1e-9)) if near else 1
        for _ in range(substeps):
            width = self.width - close * FINGER_SPEED / substeps
            self._substep([part / substeps for part in travel], min(max(width, 0.0), OPEN), closing=close > 0)

    def _substep(self, travel: list[float], width: float, *, closing: bool) -> None:
        """Move a little; then let what is in the way give way."""
        height = self.tip[2]
        self.tip = [at + by for at, by in zip(self.tip, travel, strict=True)]
        if self.held:
            self._carry(travel, width)
            return
        self.width = width
        if self.tip[2] >= BLOCK_TOP:
            return
        if height >= BLOCK_TOP and self._lands():
            self.tip[2] = BLOCK_TOP
            return
        for block in self.blocks:
            self._touch(block, closing=closing)

    def fingers(self) -> list[tuple[float, float]]:
        """Centres of the two fingers, x and y."""
        reach = self.width + HALF_FINGER
        dx, dy = -math.sin(self.yaw) * reach, math.cos(self.yaw) * reach
        return [(self.tip[0] + dx, self.tip[1] + dy), (self.tip[0] - dx, self.tip[1] - dy)]

    def _lands(self) -> bool:
        """Whether a finger comes down on a block."""
        return any(math.hypot(block.x - x, block.y - y) < _OVER for block in self.blocks for x, y in self.fingers())

    def _touch(self, block: Block, *, closing: bool) -> None:
        """Let one block give way to the fingers, or be gripped by them."""
        sin, cos = math.sin(self.yaw), math.cos(self.yaw)
        dx, dy = block.x - self.tip[0], block.y - self.tip[1]
        across, along = cos * dx + sin * dy, cos * dy - sin * dx  # along: the direction in which the fingers close
        if abs(across) < _GRIP_DEPTH and abs(along) < self.width and (self.width >= HALF_BLOCK or closing):
            room = max(self.width - HALF_BLOCK, 0.0)
            inside = min(max(along, -room), room)
            self._shift(block, (inside - along) * -sin, (inside - along) * cos)
            if closing and room <= 1e-9:
                self.width, self.held = HALF_BLOCK, block
            return
        reach = self.width + HALF_FINGER
        # Fingers too close for a block to fit between push like one flat bar, so it moves straight ahead.
        bar = [min(max(along, -reach), reach)] if self.width < HALF_BLOCK else [-reach, reach]
        for nearest in bar:
            distance = math.hypot(across, along - nearest)
            if 1e-9 < distance < _CONTACT:
                push = (_CONTACT - distance) / distance
                da, db = across * push, (along - nearest) * push
                left = self._shift(block, cos * da - sin * db, sin * da + cos * db)
                self.tip[0] -= left[0]
                self.tip[1] -= left[1]

    def _carry(self, travel: list[float], width: float) -> None:
        """Take the held block along; let go when the fingers open."""
        block = self.held
        block.z = max(HALF_BLOCK, block.z + travel[2])
        self.width = max(width, HALF_BLOCK)
        self._shift(block, travel[0], travel[1])
        if self.width > HALF_BLOCK + 1e-9:
            self.held, block.z = None, HALF_BLOCK
            self._shift(block, 0.0, 0.0)

    def _shift(self, block: Block, dx: float, dy: float) -> tuple[float, float]:
        """Move a block over the table, and the blocks it runs into; returns what the rim kept it from."""
        edge = HALF_TABLE - HALF_BLOCK
        wanted = (block.x + dx, block.y + dy)
        block.x, block.y = (min(max(value, -edge), edge) for value in wanted)
        left = (wanted[0] - block.x, wanted[1] - block.y)
        if block.z - HALF_BLOCK >= BLOCK_TOP:
            return left
        for other in self.blocks:
            dx, dy = other.x - block.x, other.y - block.y
            distance = math.hypot(dx, dy)
            if other is not block and 1e-9 < distance < _BLOCK_GAP:
                push = (_BLOCK_GAP - distance) / distance
                other.x = min(max(other.x + dx * push, -edge), edge)
                other.y = min(max(other.y + dy * push, -edge), edge)
        return left
