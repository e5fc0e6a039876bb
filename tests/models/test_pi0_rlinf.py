"""Chains, log-probabilities, values and gradients against RLinf's, on the same PI0 with the same recorded noise.

Four denoising steps at noise level 0.5; five of ten action steps and seven of 32 columns are executed. RLinf averages a
joint log-probability over the steps and one more term, that of the first noise, which no weight influences.
"""

import copy

import pytest
import torch
from pi0_golden import DATA, NOISE, OBSERVATION, STATE, model
from safetensors.torch import load_file
from torch.nn import functional as F

from vla_accel.policies.flow import (
    Draws,
    entropy,
    integrate,
    learned_std,
    log_density,
    sample,
    score,
    time_of,
    transition,
)

GOLDEN = load_file(DATA / "rlinf.safetensors")
STEPS = {"sde_i0": [0], "sde_i2": [2], "sde_last": [3], "sde_joint": [0, 1, 2, 3], "noise_joint": [0, 1, 2, 3]}
OPTIONS = {"num_steps": 4, "noise_level": 0.5}
CLOSE = {"atol": 1e-5, "rtol": 0}
tags = pytest.mark.parametrize("tag", STEPS)


def kind(tag):
    return tag.split("_")[0]


def executed(x):
    return x[..., :5, :7]


def mlp(x, name, activation):
    """A stored head: linear layers with an activation between them."""
    layers = sorted({key.rsplit(".", 1)[0] for key in GOLDEN if key.startswith(f"heads.{name}") and "weight" in key})
    for index, layer in enumerate(layers):
        x = F.linear(x, GOLDEN[f"{layer}.weight"], GOLDEN[f"{layer}.bias"])
        x = activation(x) if index < len(layers) - 1 else x
    return x


def deviation(hidden):
    return learned_std(mlp(hidden, "noise_head.mlp_logvar", torch.tanh), low=0.08, high=0.16)


def value(hidden):
    return mlp(hidden.mean(1), "value_head.mlp", torch.relu).squeeze(-1)


def run(tag):
    """Sample as RLinf did; returns the chain and the critic's value at each step."""
    net, values = model("pi0"), []
    step = net.stepper(net.prefix_cache(*OBSERVATION), STATE)

    def velocity(x, time):
        v, hidden = step(x, time)
        values.append(value(hidden))
        return v, deviation(hidden) if kind(tag) == "noise" else None

    steps = torch.tensor(STEPS[tag]).expand(3, -1)
    draws = Draws(start=NOISE, step=steps, noise=GOLDEN["step_noise"][STEPS[tag]].transpose(0, 1))
    with torch.no_grad():
        return sample(velocity, draws, kind=kind(tag), **OPTIONS), torch.stack(values, 1)


def rescore(net, tag, chains):
    """Log-probability, entropy and value of each noisy step of stored chains, `[3, S, ...]`, with gradients."""
    cache, results = net.prefix_cache(*OBSERVATION), []
    for index in STEPS[tag]:
        step = torch.full((3,), index)
        velocity, hidden = net.denoise(cache, STATE, chains[:, index], time_of(step, 4))
        std = deviation(hidden) if kind(tag) == "noise" else None
        scored = score(chains[:, index], chains[:, index + 1], step, velocity, kind=kind(tag), std=std, **OPTIONS)
        results.append((*scored, value(hidden)))
    return [None if any(x is None for x in column) else torch.stack(column, 1) for column in zip(*results, strict=True)]


@tags
def test_chains_and_log_probs_of_the_rollout(tag):
    chain, values = run(tag)
    chains = GOLDEN[f"{tag}.chains"]
    for slot, index in enumerate(STEPS[tag]):
        torch.testing.assert_close(chain.x[:, slot], chains[:, index], **CLOSE)
        torch.testing.assert_close(chain.x_next[:, slot], chains[:, index + 1], **CLOSE)
    torch.testing.assert_close(chain.action, chains[:, 4], **CLOSE)
    log_prob = chain.log_prob
    if tag.endswith("joint"):
        first = log_density(NOISE, torch.zeros(()), torch.ones(()))
        log_prob = torch.cat([first[:, None], log_prob], 1)
    torch.testing.assert_close(executed(log_prob).mean(1), GOLDEN[f"{tag}.prev_logprobs"], **CLOSE)
    torch.testing.assert_close(values.mean(1, keepdim=True), GOLDEN[f"{tag}.prev_values"], **CLOSE)


@tags
@torch.no_grad()
def test_log_probs_entropies_and_values_of_the_update(tag):
    """Log-densities reach 4 nats, so the tolerance is relative too.

    With a deviation of 0.1 and a noise of 3, a velocity that is off by 1e-6 moves a log-density by 1e-5.
    """
    log_prob, bonus, values = rescore(model("pi0"), tag, GOLDEN[f"{tag}.chains"])
    joint = tag.endswith("joint")
    expected = GOLDEN[f"{tag}.re_logprobs_full"][:, int(joint) :]
    torch.testing.assert_close(executed(log_prob), executed(expected), atol=1e-5, rtol=1e-5)
    assert (log_prob - expected).square().mean().sqrt() < 5e-6
    torch.testing.assert_close(values, GOLDEN[f"{tag}.re_values_full"], **CLOSE)
    if kind(tag) == "noise":
        expected = GOLDEN[f"{tag}.re_entropy_full"]
        torch.testing.assert_close(bonus, expected[:, 1:], **CLOSE)
        torch.testing.assert_close(entropy(torch.ones(())).expand_as(expected[:, 0]), expected[:, 0], **CLOSE)
    else:
        assert bonus is None


@pytest.mark.parametrize("tag", ["sde_joint", "noise_joint"])
@torch.no_grad()
def test_mean_and_deviation_of_every_step(tag):
    net = model("pi0")
    cache, chains = net.prefix_cache(*OBSERVATION), GOLDEN[f"{tag}.chains"]
    for index in range(4):
        step = torch.full((3,), index)
        velocity, hidden = net.denoise(cache, STATE, chains[:, index], time_of(step, 4))
        std = deviation(hidden) if kind(tag) == "noise" else None
        mean, spread = transition(chains[:, index], velocity, step, kind=kind(tag), std=std, **OPTIONS)
        torch.testing.assert_close(mean, GOLDEN[f"{tag}.mean.{index}"], **CLOSE)
        torch.testing.assert_close(spread.expand_as(mean), GOLDEN[f"{tag}.std.{index}"], **CLOSE)


@tags
def test_gradients_of_the_log_prob(tag):
    """Relative to the largest entry: the stored ones are sums over 105 elements and reach into the hundreds."""
    net = copy.deepcopy(model("pi0"))
    log_prob, _, _ = rescore(net, tag, GOLDEN[f"{tag}.chains"])
    terms = len(STEPS[tag]) + tag.endswith("joint")  # the first noise's term has no gradient but counts in the mean
    (executed(log_prob).sum() / terms).backward()
    for ours, name in (
        (net.action_out_proj.weight.grad, "grad_action_out_proj"),
        (net.expert.layers[0].self_attn.q_proj.weight.grad, "grad_expert_q0"),
    ):
        theirs = GOLDEN[f"{tag}.{name}"]
        scale = theirs.abs().max()
        torch.testing.assert_close(ours / scale, theirs / scale, **CLOSE)


def test_evaluation_is_the_ode():
    net = model("pi0")
    with torch.no_grad():
        step = net.stepper(net.prefix_cache(*OBSERVATION), STATE)
    actions = integrate(step, NOISE, num_steps=4)
    torch.testing.assert_close(actions, GOLDEN["eval.actions"], **CLOSE)
    assert torch.equal(actions, net.sample_actions(*OBSERVATION, STATE, noise=NOISE, num_steps=4))
