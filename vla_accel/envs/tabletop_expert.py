"""A scripted expert for the tabletop simulator, which reads the simulator's state instead of pictures.

Each verb is a function of the current state alone: which phase it is in follows from where things are. So the expert
also recovers from whatever another policy did, and can label its states.
Not here: units of actions and speed limits (`Tabletop.expert_action`).
Usage: `delta, turn, close = expert_action("push", world, target=0)`.
"""

from __future__ import annotations

import math

from vla_accel.envs.tabletop_world import BLOCK_TOP, HALF_BLOCK, OPEN, REACH, Block, World

VERBS = ("reach", "push", "pick")

_HOVER = 0.075  # height at which the gripper passes over blocks
_LOW = 0.02  # height at which it pushes and grips
_BEHIND = 0.055  # distance behind a block from which it is pushed
_NEAR = 0.006  # close enough in the plane
_STROKE = 0.056  # how far a block is pushed
_GAP = 0.03  # between the fingertip point and the centre of a block that is being pushed

Vector = tuple[float, float, float]


def expert_action(verb: str, world: World, target: int) -> tuple[Vector, float, float]:
    """What to do next.

    Args:
        verb: one of `VERBS`.
        world: the simulator's state.
        target: index of the block to act on.

    Returns:
        The displacement of the fingertip point still to go (metres, not limited), the rotation still to go (radians)
        and the gripper command (-1 opens, +1 closes).
    """
    block = world.blocks[target]
    goal, close = {"reach": _reach, "push": _push, "pick": _pick}[verb](world, block)
    delta = tuple(to - at for to, at in zip(goal, world.tip, strict=True))
    return delta, (0.0 if verb == "reach" else -world.yaw), close


def _reach(world: World, block: Block) -> tuple[Vector, float]:
    """Straight to the block's centre, fingers open."""
    del world
    return (block.x, block.y, block.z), -1.0


def _push(world: World, block: Block) -> tuple[Vector, float]:
    """Close the fingers, go behind the block at a safe height, go down, push."""
    dx, dy = _push_direction(world, block)
    x, y, z = world.tip
    if world.held is not None:
        return (x, y, z), -1.0
    along = (block.x - x) * dx + (block.y - y) * dy
    across = (block.y - y) * dx - (block.x - x) * dy
    low = z < BLOCK_TOP - 0.005
    if low and along > _GAP / 2 and abs(across) < 2 * _NEAR and world.width < 0.004:
        left = max(_STROKE - _moved(block, dx, dy), 0.01)
        reach = along - _GAP + left
        return (x + dx * reach - dy * across, y + dy * reach + dx * across, _LOW), 1.0
    behind = (block.x - dx * _BEHIND, block.y - dy * _BEHIND)
    if math.dist((x, y), behind) < _NEAR:
        return (*behind, _LOW if world.width < 0.004 else max(z, _HOVER)), 1.0
    if z < _HOVER - 0.02:
        return (x, y, _HOVER), 1.0
    return (*behind, _HOVER), 1.0


def _pick(world: World, block: Block) -> tuple[Vector, float]:
    """Go above the block with open fingers, go down, close, lift."""
    x, y, z = world.tip
    if world.held is block:
        return (x, y, z + 0.08), 1.0
    if world.held is not None:
        return (x, y, z), -1.0
    if math.dist((x, y), (block.x, block.y)) < _NEAR:
        if z > _LOW + 0.008:
            return (block.x, block.y, _LOW if world.width > OPEN - 0.004 else max(z, _HOVER)), -1.0
        return (x, y, z), 1.0
    if z < _HOVER - 0.02:
        return (x, y, _HOVER), -1.0
    return (block.x, block.y, _HOVER), -1.0


def _moved(block: Block, dx: float, dy: float) -> float:
    """How far the block has come in a direction."""
    return (block.x - block.start[0]) * dx + (block.y - block.start[1]) * dy


def _push_direction(world: World, block: Block) -> tuple[float, float]:
    """The direction along an axis with most room: behind the block for the gripper, before it for the block.

    Seen from where the blocks started, so that it stays the same while one of them moves.
    """
    x, y = block.start
    others = [other.start for other in world.blocks if other is not block]

    def room(direction: tuple[float, float]) -> float:
        dx, dy = direction
        before, behind = (x + 2 * _STROKE * dx, y + 2 * _STROKE * dy), (x - _BEHIND * dx, y - _BEHIND * dy)
        spare = [REACH - HALF_BLOCK - max(map(abs, before)), REACH - max(map(abs, behind))]
        clear = [math.dist(point, other) - 0.05 for point in (before, behind) for other in others]
        return min(spare + clear + [0.06])

    return max(((1.0, 0.0), (-1.0, 0.0), (0.0, 1.0), (0.0, -1.0)), key=room)
