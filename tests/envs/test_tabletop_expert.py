"""The tabletop's scripted expert."""

import math

import numpy as np
import pytest

from vla_accel.envs.tabletop import Tabletop

VERBS = ("reach", "push", "pick")


def expert_succeeds(env, steps=16):
    for _ in range(steps):
        *_, terminated, _, info = env.step(env.expert_action())
        if terminated:
            break
    return info["success"]


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("num_blocks", [1, 2, 4])
def test_expert_solves_evaluation_states_within_the_default_limit(verb, num_blocks):
    env = Tabletop(tasks=(verb,), num_blocks=num_blocks)
    env.set_rendering(False)
    solved = 0
    for state in range(100):
        env.reset(options={"task_id": state % 4, "state_id": state})
        solved += expert_succeeds(env, env.max_episode_steps)
    assert solved == 100


def test_expert_reaches_from_every_evaluation_state_and_for_every_colour():
    env = Tabletop(num_blocks=4, start_jitter=0.05)
    env.set_rendering(False)
    for state in env.state_ids["eval"]:
        for task in range(4):
            env.reset(options={"task_id": task, "state_id": state})
            assert expert_succeeds(env), (state, task)


@pytest.mark.parametrize("verb", VERBS)
def test_expert_recovers_from_random_actions(verb):
    env, rng = Tabletop(tasks=(verb,), num_blocks=1), np.random.default_rng(0)
    env.set_rendering(False)
    tried = 0
    for state in range(40):
        env.reset(options={"task_id": 0, "state_id": state})
        if any(env.step(rng.uniform(-1, 1, 7))[2] for _ in range(12)):
            continue
        tried += 1
        assert expert_succeeds(env, 60), state
    assert tried > 20


def test_a_slow_expert_stays_below_its_speed():
    env = Tabletop()
    env.reset(options={"task_id": 0, "state_id": 3})
    for _ in range(3):
        action = env.expert_action(speed=0.3)
        assert np.abs(action[:3]).max() <= 0.3 + 1e-6
        env.step(action)
    with pytest.raises(ValueError, match=r"speed must lie in \(0, 1\], got 0"):
        env.expert_action(speed=0)


def test_the_expert_asks_nothing_but_the_present_state():
    env = Tabletop(tasks=VERBS)
    env.reset(options={"task_id": 2, "state_id": 0})
    first = env.expert_action()
    np.testing.assert_array_equal(env.expert_action(), first)
    assert (first.dtype, first.shape) == (np.float32, (7,))


@pytest.mark.parametrize("verb", VERBS)
def test_skill_without_colours_succeeds_half_the_time_with_two_blocks(verb):
    env, rng = Tabletop(tasks=(verb,)), np.random.default_rng(0)
    env.set_rendering(False)
    solved = 0
    for state in range(200):
        env.reset(options={"task_id": state % 4, "state_id": state})
        target, guess, terminated = env.target, int(rng.integers(2)), False
        while not terminated:
            env.target = guess
            action = env.expert_action()
            env.target = target
            _, _, terminated, _, info = env.step(action)
        solved += info["success"]
    assert abs(solved - 100) < 3 * math.sqrt(200) / 2  # three standard deviations of a fair coin
