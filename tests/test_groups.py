"""Groups that take turns: nothing changes but the time it takes."""

import importlib
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.policies import CountingPolicy

from vla_accel.config import EnvConfig, PolicyConfig, PPOConfig, PPOOptions, RolloutConfig
from vla_accel.envs import make_vector_env, read_idle, read_step, training_jobs
from vla_accel.rollout import collect, start
from vla_accel.train import own_envs
from vla_accel.types import Job

CPU = torch.device("cpu")
NUM_ENVS = 4
OPTIONS = {"image_size": 32, "num_blocks": 4, "reach_radius": 0.055, "start_jitter": 0.08}


def tabletop(num_groups, **options):
    jobs = [
        training_jobs(task_ids=range(4), state_ids=range(1000, 2000), seed=5, stream=env, num_streams=NUM_ENVS)
        for env in range(NUM_ENVS)
    ]
    return make_vector_env(
        "tabletop", num_envs=NUM_ENVS, chunk_size=4, jobs=jobs, max_episode_steps=10, env_options=OPTIONS,
        num_groups=num_groups, **options,
    )  # fmt: skip


def collected(policy, envs, *lengths):
    policy.fit_instructions(envs.instructions)
    policy.seed(0, first_env=0, num_envs=NUM_ENVS)
    state = start(envs)
    try:
        return [collect(policy, policy, envs, state, num_decisions=n, device=CPU) for n in lengths]
    finally:
        envs.close()


def assert_same_rollout(one, other):
    """Equal to the bit but for what a forward computes: batches of other sizes differ in their last bits."""
    for name in ("reward", "executed", "terminated", "truncated", "valid"):
        assert torch.equal(getattr(one, name), getattr(other, name)), name
    for name in ("inputs", "trace"):
        left, right = getattr(one, name), getattr(other, name)
        assert set(left) == set(right)
        assert all(torch.equal(left[key], right[key]) for key in left), name
    for name in ("log_prob", "value", "next_value"):
        torch.testing.assert_close(getattr(one, name), getattr(other, name), rtol=1e-4, atol=1e-4)
    assert (one.episodes, one.voided) == (other.episodes, other.voided)


@pytest.mark.parametrize("num_groups", [2, 4])
def test_every_environment_sees_and_does_the_same_in_any_number_of_groups(make_policy, num_groups):
    policy = make_policy("openvla-oft")
    policy.statistics.high[2] = -0.2  # go down, meet blocks: some episodes terminate
    alone, grouped = (collected(policy, tabletop(number), 5, 4) for number in (1, num_groups))
    assert torch.cat([rollout.terminated for rollout in alone]).any()
    assert torch.cat([rollout.truncated for rollout in alone]).any()
    for one, other in zip(alone, grouped, strict=True):
        assert_same_rollout(one, other)


@pytest.mark.dist
def test_groups_of_worker_processes_do_what_one_group_in_this_process_does(make_policy):
    policy = make_policy("openvla-oft")
    alone = collected(policy, tabletop(1, vectorization="sync"), 5, 4)
    grouped = collected(policy, tabletop(2, vectorization="async"), 5, 4)
    for one, other in zip(alone, grouped, strict=True):
        assert_same_rollout(one, other)


def test_an_episode_is_resumed_in_another_number_of_groups():
    envs = tabletop(2)
    envs.reset()
    for seed in range(4):
        actions = np.random.default_rng(seed).uniform(-1, 1, envs.action_space.shape).astype(np.float32)
        obs, *_ = envs.step(actions)
    again = tabletop(4)
    again.set_attr("resume_from", envs.call("episode_state"))
    resumed, infos = again.reset()
    np.testing.assert_array_equal(resumed["images"]["wrist"], obs["images"]["wrist"])
    np.testing.assert_array_equal(resumed["state"], obs["state"])
    assert not read_idle(infos, NUM_ENVS).any()


def test_groups_step_together_like_one_vector_environment():
    # Episodes of 1 to 4 steps, so that in most steps only one of the groups has an episode that ends.
    jobs = [[Job(task_id=0, state_id=20 + n, seed=0), Job(task_id=1, state_id=n, seed=0)] for n in (1, 2, 3, 4)]
    outcomes = []
    for num_groups in (1, 2):
        envs = make_vector_env(
            "helpers.counting_env:CountingEnv", num_envs=4, chunk_size=1, jobs=jobs, num_groups=num_groups
        )
        outcome = [read_idle(envs.reset()[1], 4).tolist()]
        for _ in range(10):
            obs, *ends, infos = envs.step(np.zeros((4, 1, 2), np.float32))
            info = read_step(infos, 4)
            final = [(env, single["state"].tolist()) for env, single in info.final_obs]
            outcome.append(
                (obs["state"].tolist(), [x.tolist() for x in ends], info.idle.tolist(), info.episodes, final)
            )
        outcomes.append(outcome)
    assert outcomes[0] == outcomes[1]


def test_the_policy_acts_for_one_group_while_the_other_steps():
    course = []

    class Noted(CountingPolicy):
        def forward(self, inputs, trace=None, *, greedy=False):
            course.append("act" if not greedy else "value")
            return super().forward(inputs, trace, greedy=greedy)

    jobs = [[Job(task_id=1, state_id=7, seed=0)]] * 4
    envs = make_vector_env("helpers.counting_env:CountingEnv", num_envs=4, chunk_size=1, jobs=jobs, num_groups=2)
    for name, part in zip("AB", envs.parts, strict=True):
        _note(part, name, course)
    policy = Noted(1)
    collect(policy, policy, envs, start(envs), num_decisions=2, device=CPU)
    expected = "act begin A act begin B wait A act begin A wait B act begin B wait A wait B value value"
    assert " ".join(course) == expected


def _note(part, name, course):
    """Let a vector environment step in two parts, and write down when."""
    sent = []

    def step_async(actions):
        course.append(f"begin {name}")
        sent.append(actions)

    def step_wait():
        course.append(f"wait {name}")
        return part.step(sent.pop())

    part.step_async, part.step_wait = step_async, step_wait


@pytest.mark.slow
def test_two_groups_hide_the_shorter_of_policy_and_simulator(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "scripts"))
    overlap = importlib.import_module("benchmarks.env").overlap
    one, two = overlap(100.0, decisions=10)
    assert two <= 0.6 * one


@pytest.mark.parametrize("num_groups", [0, 3])
def test_groups_that_do_not_divide_are_refused(num_groups):
    with pytest.raises(
        ValueError, match=rf"^num_groups must be at least 1 and divide num_envs \(4\), got {num_groups}"
    ):
        tabletop(num_groups)


def test_groups_must_divide_the_environments_of_the_run_and_of_each_process():
    with pytest.raises(ValueError, match=r"^--rollout\.num_groups must divide env\.num_envs \(8\), but is 3\.$"):
        PPOConfig(
            model="openvla", policy=PolicyConfig(), env=EnvConfig(num_envs=8), ppo=PPOOptions(minibatch_size=4),
            rollout=RolloutConfig(num_groups=3),
        )  # fmt: skip
    assert own_envs(8, 1, 2, num_groups=2) == (4, 4)
    with pytest.raises(ValueError, match=r"^--rollout\.num_groups must divide .* = 8, processes: 2\), but is 8\.$"):
        own_envs(8, 1, 2, num_groups=8)


def test_environments_that_play_the_same_episode_are_on_one_process():
    assert own_envs(12, 1, 2, group_size=3) == (6, 6)
    with pytest.raises(ValueError, match=r"^--ppo\.group_size must divide .* = 12, processes: 2\), but is 4\.$"):
        own_envs(12, 1, 2, group_size=4)
