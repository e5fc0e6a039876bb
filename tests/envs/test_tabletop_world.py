"""How the tabletop's gripper moves its blocks."""

import math

import numpy as np
import pytest

from vla_accel.envs.tabletop_world import BLOCK_TOP, HALF_BLOCK, HIGHEST, LOWEST, OPEN, REACH, World


def test_a_block_that_is_let_go_falls_back_on_the_table():
    world = World([(0.0, 0.0)], (0.0, 0.0, 0.02))
    world.move((0, 0, 0), yaw=0, close=1)
    world.move((0.01, 0, 0.04), yaw=0, close=1)
    assert (world.blocks[0].x, world.blocks[0].z) == (pytest.approx(0.01), pytest.approx(0.06))
    world.move((0, 0, 0), yaw=0, close=-1)
    assert world.held is None
    assert world.blocks[0].z == HALF_BLOCK
    assert world.blocks[0].displacement == pytest.approx(0.01)


def test_closing_fingers_centre_a_block_and_stop_at_its_sides():
    world = World([(0.0, 0.012)], (0.0, 0.0, 0.02))
    for _ in range(3):
        world.move((0, 0, 0), yaw=0, close=1)
    assert world.blocks[0].y == pytest.approx(0.0)
    assert world.width == HALF_BLOCK


def test_turned_fingers_grip_along_their_own_axis():
    world = World([(0.012, 0.0)], (0.0, 0.0, 0.02))
    world.yaw = math.pi / 2
    for _ in range(3):
        world.move((0, 0, 0), yaw=0, close=1)
    assert world.held is world.blocks[0]
    assert world.blocks[0].x == pytest.approx(0.0, abs=1e-9)


def test_fingers_that_close_above_a_block_grip_nothing():
    world = World([(0.0, 0.0)], (0.0, 0.0, 0.06))
    for _ in range(3):
        world.move((0, 0, 0), yaw=0, close=1)
    assert (world.held, world.width) == (None, 0.0)


def test_a_closed_gripper_lands_on_a_block_instead_of_going_through():
    world = World([(0.0, 0.0)], (0.0, 0.0, 0.06))
    world.width = 0.0
    world.move((0, 0, -0.05), yaw=0, close=0)
    assert world.tip[2] == BLOCK_TOP
    assert world.blocks[0].displacement == 0.0


def test_open_fingers_pass_on_both_sides_of_a_block():
    world = World([(0.0, 0.0)], (-0.1, 0.0, 0.02))
    for _ in range(4):
        world.move((0.05, 0, 0), yaw=0, close=0)
    assert world.width == OPEN
    assert world.blocks[0].displacement == 0.0


def test_a_pushed_block_pushes_the_next():
    world = World([(0.0, 0.0), (0.05, 0.0)], (-0.05, 0.0, 0.02))
    world.width = 0.0
    for _ in range(2):
        world.move((0.05, 0, 0), yaw=0, close=0)
    assert world.blocks[0].x == pytest.approx(0.05 + 0.03)
    assert world.blocks[1].x == pytest.approx(0.05 + 0.03 + 0.043)


def test_a_pushed_block_stops_at_the_edge_of_the_table_and_the_gripper_with_it():
    world = World([(0.15, 0.0)], (0.1, 0.0, 0.02))
    world.width = 0.0
    for _ in range(4):
        world.move((0.05, 0, 0), yaw=0, close=0)
    assert world.blocks[0].x == pytest.approx(0.23)
    assert world.tip[0] == pytest.approx(0.23 - 0.03)


def test_a_gripper_above_the_blocks_moves_none():
    world = World([(0.05, 0.0)], (0.0, 0.0, 0.045))
    world.width = 0.0
    world.move((0.05, 0, 0), yaw=0, close=0)
    assert world.blocks[0].displacement == 0.0


def test_no_sequence_of_moves_breaks_the_world():
    rng = np.random.default_rng(0)
    spots = [(0.1, 0.0), (-0.1, 0.05), (0.0, 0.13), (0.0, -0.12)]
    gripped = 0
    for _ in range(30):
        world, drift = World(spots, (0.0, 0.0, 0.1)), rng.uniform(-0.03, 0.03, 3) - (0, 0, 0.02)
        for _ in range(40):
            turn, close = rng.uniform(-0.5, 0.5), rng.choice([-1.0, 0.3, 1.0])
            world.move((drift + rng.normal(0, 0.03, 3)).clip(-0.05, 0.05), yaw=turn, close=close)
            gripped += world.held is not None
            x, y, z = world.tip
            assert max(abs(x), abs(y)) <= REACH + 0.03  # a block at the rim may hold the gripper off sideways
            assert LOWEST - 1e-9 <= z <= HIGHEST + 1e-9
            assert 0 <= world.width <= OPEN
            for block in world.blocks:
                assert max(abs(block.x), abs(block.y)) <= 0.23 + 1e-9
                assert block.z == HALF_BLOCK if block is not world.held else block.z >= HALF_BLOCK
    assert gripped > 0
