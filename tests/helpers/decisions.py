"""Observations, rollouts and batches made of random numbers, for any policy of the tabletop."""

import numpy as np
import torch

from vla_accel.batch import Kept, make_batch
from vla_accel.rollout import act
from vla_accel.types import Observation, Rollout

INSTRUCTIONS = ("reach the red block", "pick up the blue block", "slide it far away", "push the yellow block")
"""Four tasks whose prompts have at least three lengths."""


def observation(num, *, seed=0, instructions=INSTRUCTIONS):
    rng = np.random.default_rng(seed)
    patches = rng.integers(0, 256, (num, 5, 5, 3), dtype=np.uint8)  # noise per pixel would look all alike
    return Observation(
        images={"wrist": patches.repeat(8, axis=1).repeat(8, axis=2)},
        state=rng.uniform(-0.3, 0.3, (num, 8)).astype(np.float32),
        instructions=[instructions[i % len(instructions)] for i in range(num)],
    )


def acts(policy, obs, *, greedy=False, seed=0, first_env=0):
    """What the policy does first of all with new streams of noise."""
    policy.seed(seed, first_env=first_env, num_envs=len(obs))
    return policy(policy.prepare(obs), greedy=greedy)


def rollout_of(policy, *, num_decisions=3, num_envs=4, seed=0):
    """Sampled decisions on random observations; chunks end after a random number of steps, one row is invalid."""
    policy.seed(seed, first_env=0, num_envs=num_envs)
    draw = torch.Generator().manual_seed(seed)
    policy.fit_instructions(list(INSTRUCTIONS))
    inputs = [policy.prepare(observation(num_envs, seed=seed + t)) for t in range(num_decisions)]
    kept = Kept(policy.keep_bytes, on_host=policy.keep_on_host)
    samples = [kept.strip(act(policy, x, torch.device("cpu"))) for x in inputs]
    shape = (num_decisions, num_envs)
    executed = torch.randint(1, policy.chunk_size + 1, shape, generator=draw)
    valid = torch.ones(shape, dtype=torch.bool)
    valid[-1, -1], executed[-1, -1] = False, 0
    return Rollout(
        inputs={name: torch.stack([x[name] for x in inputs]) for name in inputs[0]},
        trace={name: torch.stack([x.trace[name] for x in samples]) for name in samples[0].trace},
        log_prob=torch.stack([x.log_prob for x in samples]),
        value=torch.stack([x.value for x in samples]),
        next_value=torch.randn(shape, generator=draw),
        reward=torch.randn(shape, generator=draw),
        executed=executed,
        terminated=torch.zeros(shape, dtype=torch.bool),
        truncated=torch.zeros(shape, dtype=torch.bool),
        valid=valid,
        kept=kept.rows,
    )


def batch_of(policy, *, first_env=0, **sizes):
    """The valid decisions of `rollout_of`, with random advantages and returns."""
    rollout = rollout_of(policy, **sizes)
    draw = torch.Generator().manual_seed(1)
    advantage, returns = (torch.randn(rollout.valid.shape, generator=draw) for _ in range(2))
    return make_batch(rollout, advantage, returns, unit_step=policy.unit_step, first_env=first_env)
