"""The maths of token policies: a decision is U tokens, each drawn from a softmax over the action bins.

Not here: models. Pure functions, all in float32.
Usage: `index = sample(logits, temperature=t, noise=noise)`, `log_prob, entropy = score(logits, index, temperature=t)`.
"""

from __future__ import annotations

import torch
from torch import Tensor


def gumbel_noise(streams: list[torch.Generator], shape: tuple[int, ...]) -> Tensor:
    """Standard Gumbel noise, float32 `[N, *shape]`, row i from generator i of `streams` (N CPU generators).

    One stream per environment: what an environment samples depends neither on its neighbours nor on how environments
    are dealt to processes.
    """
    tiny = torch.finfo(torch.float32).tiny
    uniform = torch.stack([torch.rand(shape, generator=stream) for stream in streams])
    exponential = -uniform.clamp_min(tiny).log()
    return -exponential.clamp_min(tiny).log()


def sample(logits: Tensor, *, temperature: float, noise: Tensor | None) -> Tensor:
    """Draw from softmax(logits / temperature) by the Gumbel-max trick (arXiv 1411.0030).

    Args:
        logits: float32 `[..., bins]`.
        temperature: above 0.
        noise: standard Gumbel noise of the logits' shape. None: the most likely bin.

    Returns:
        int64 `[...]`, indices of bins.
    """
    if noise is None:
        return logits.argmax(-1)
    return (logits / temperature + noise).argmax(-1)


def score(logits: Tensor, index: Tensor, *, temperature: float) -> tuple[Tensor, Tensor]:
    """Log-probability of drawn bins and entropy of the distribution they were drawn from.

    Args:
        logits: float32 `[..., bins]`.
        index: int64 `[...]`.
        temperature: the one they were drawn with.

    Returns:
        log_prob and entropy, float32 `[...]`, in nats.
    """
    log_probs = (logits.float() / temperature).log_softmax(-1)
    log_prob = log_probs.gather(-1, index.unsqueeze(-1)).squeeze(-1)
    # A bin of probability 0 contributes nothing; -inf * 0 would be NaN.
    entropy = -(log_probs.exp() * log_probs.clamp_min(torch.finfo(torch.float32).min)).sum(-1)
    return log_prob, entropy


def smoothed(index: Tensor, bins: int, *, width: float) -> Tensor:
    """Soft targets for imitation: a Gaussian over neighbouring bins (arXiv 2403.03950).

    Plain targets treat a neighbouring bin like one at the other end; soft ones tell a policy that learns from scratch
    how far off it is.

    Args:
        index: int64 `[...]`, the bins to aim at.
        bins: how many there are.
        width: standard deviation in bins, above 0.

    Returns:
        float32 `[..., bins]`, each row a distribution.
    """
    distance = torch.arange(bins, device=index.device) - index.unsqueeze(-1)
    return (-0.5 * (distance / width) ** 2).softmax(-1)


def likelihood(logits: Tensor, target: Tensor) -> Tensor:
    """Expected log-probability of bins drawn from soft targets, float32 `[...]`; both arguments `[..., bins]`."""
    return (logits.float().log_softmax(-1) * target).sum(-1)
