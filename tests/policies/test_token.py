"""The maths of token policies against `torch.distributions` and against counted samples."""

import math

import pytest
import torch
from torch.distributions import Categorical

from vla_accel.policies.token import gumbel_noise, likelihood, sample, score, smoothed

TEMPERATURES = (0.5, 1.0, 1.6)


def random_logits(*shape, seed=0, scale=2.0):
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def streams(num, *, first=0):
    return [torch.Generator().manual_seed(first + i) for i in range(num)]


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_score_equals_a_categorical_over_the_scaled_logits(temperature):
    logits = random_logits(5, 7, 256)
    index = torch.randint(256, (5, 7), generator=torch.Generator().manual_seed(1))
    log_prob, entropy = score(logits, index, temperature=temperature)
    reference = Categorical(logits=logits.double() / temperature)
    torch.testing.assert_close(log_prob.double(), reference.log_prob(index), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropy.double(), reference.entropy(), rtol=1e-5, atol=1e-5)


def test_score_of_a_uniform_distribution_is_the_logarithm_of_the_number_of_bins():
    log_prob, entropy = score(torch.zeros(1, 256), torch.tensor([3]), temperature=1.6)
    # ln 256 = 8 ln 2
    torch.testing.assert_close(log_prob, torch.tensor([-5.545177]))
    torch.testing.assert_close(entropy, torch.tensor([5.545177]))


def test_score_is_finite_where_bins_are_impossible():
    logits = torch.tensor([[0.0, float("-inf"), 0.0, float("-inf")]])
    log_prob, entropy = score(logits, torch.tensor([2]), temperature=0.5)
    torch.testing.assert_close(log_prob, torch.tensor([-0.693147]))
    torch.testing.assert_close(entropy, torch.tensor([0.693147]))


def test_score_passes_the_gradient_of_the_log_probability():
    logits = random_logits(1, 4).requires_grad_()
    score(logits, torch.tensor([1]), temperature=2.0)[0].sum().backward()
    # d log p_1 / d logit_j = (1[j = 1] - p_j) / T
    expected = (torch.tensor([[0.0, 1.0, 0.0, 0.0]]) - (logits.detach() / 2.0).softmax(-1)) / 2.0
    torch.testing.assert_close(logits.grad, expected)


def test_score_works_in_float32_whatever_the_logits_are():
    log_prob, entropy = score(random_logits(2, 9).bfloat16(), torch.tensor([0, 1]), temperature=1.0)
    assert log_prob.dtype == entropy.dtype == torch.float32


def test_sample_without_noise_takes_the_most_likely_bin():
    assert sample(torch.tensor([[0.0, 3.0, 1.0], [2.0, -1.0, 0.0]]), temperature=1.6, noise=None).tolist() == [1, 0]


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_sampled_frequencies_match_the_probabilities(temperature):
    num = 8000
    logits = random_logits(40, seed=3)
    index = sample(logits.expand(num, 40), temperature=temperature, noise=gumbel_noise(streams(num), (40,)))
    expected = num * (logits / temperature).softmax(-1)
    common = expected >= 5  # the rare bins are counted together, else their share of chi-square is not one
    counts = torch.bincount(index, minlength=40).float()
    seen = torch.cat([counts[common], counts[~common].sum().reshape(1)])
    hoped = torch.cat([expected[common], expected[~common].sum().reshape(1)])
    seen, hoped = seen[hoped > 0], hoped[hoped > 0]
    freedom = len(seen) - 1
    # Chi-square has mean f and variance 2 f; a wrong temperature gives thousands.
    assert ((seen - hoped).square() / hoped).sum() < freedom + 4 * (2 * freedom) ** 0.5


def test_consecutive_draws_of_one_environment_are_independent():
    """Two draws of one stream fall on each pair of bins as often as the product of their probabilities says."""
    num = 4000
    logits = random_logits(4, seed=5, scale=1.0)
    own = streams(num)
    pair = [sample(logits.expand(num, 4), temperature=1.0, noise=gumbel_noise(own, (4,))) for _ in range(2)]
    probs = logits.softmax(-1)
    expected = num * (probs[:, None] * probs[None, :]).flatten()
    seen = torch.bincount(4 * pair[0] + pair[1], minlength=16).float()
    assert ((seen - expected).square() / expected).sum() < 15 + 4 * 30**0.5


def test_noise_is_that_of_a_standard_gumbel():
    noise = gumbel_noise(streams(400), (250,)).double()
    # Mean: Euler's constant; variance: pi^2 / 6. Over 100 000 draws their standard errors are 0.004 and 0.013.
    assert abs(noise.mean() - 0.5772) < 0.015
    assert abs(noise.var() - 1.6449) < 0.05


def test_noise_of_an_environment_does_not_depend_on_its_neighbours():
    together = gumbel_noise(streams(5), (3, 8))
    assert torch.equal(gumbel_noise(streams(2, first=3), (3, 8)), together[3:])


def test_noise_is_finite_even_where_the_generator_gives_0(monkeypatch):
    monkeypatch.setattr(torch, "rand", lambda shape, **_: torch.zeros(shape))
    assert gumbel_noise(streams(1), (4,)).isfinite().all()


def test_smoothed_targets_are_a_gaussian_around_the_bin():
    target = smoothed(torch.tensor([2, 0]), 5, width=0.5)
    weights = torch.tensor([math.exp(-2.0 * d * d) for d in (2, 1, 0, 1, 2)])
    torch.testing.assert_close(target[0], weights / weights.sum())
    torch.testing.assert_close(target.sum(-1), torch.ones(2))
    assert target.argmax(-1).tolist() == [2, 0]
    assert target[1, 1] > target[1, 2]


def test_likelihood_of_a_certain_target_is_its_log_probability():
    logits = torch.tensor([[0.0, 1.0, 3.0], [2.0, -1.0, 0.5]])
    index = torch.tensor([2, 0])
    certain = torch.nn.functional.one_hot(index, 3).float()
    torch.testing.assert_close(
        likelihood(logits, certain), -torch.nn.functional.cross_entropy(logits, index, reduction="none")
    )
    half = torch.tensor([[0.5, 0.0, 0.5]])
    both = torch.distributions.Categorical(logits=logits[:1]).log_prob(torch.tensor([[0], [2]])).mean(0)
    torch.testing.assert_close(likelihood(logits[:1], half), both)
