r"""The maths of flow policies: a decision is a chain of denoising steps, some of which draw Gaussian noise.

Not here: models and heads. Pure functions, all in float32.
Usage: `chain = sample(model, draw(streams, (H, D), num_steps=4), num_steps=4)`, and later, with the velocity at the
stored points, `log_prob, entropy = score(chain.x, chain.x_next, chain.step, velocity, num_steps=4)`.

Step k of N goes from time t = 1 - k/N to t' = t - 1/N; time 1 is noise, time 0 the action; v is the model's velocity.

| kind | mean of x' | standard deviation | source |
|---|---|---|---|
| ODE | x - v/N | 0 | evaluation, and every step that is not drawn |
| `sde` | x - v/N - (a^2 / 2N c) (x + (1-t) v) | a sqrt(t / N c) | Flow-SDE: arXiv 2505.05470, 2510.25889 |
| `noise` | x - v/N | learned, per element | Flow-Noise: arXiv 2505.22094, 2510.25889 |

a is the noise level and c = 1 - t, but 1/N in the first step, where 1 - t is 0. The last term of the mean of `sde` is
the score of the flow: with it every x keeps the distribution that the ODE gives it, so noise explores around the
trained policy without spoiling it. `noise` has no such term: its distribution is changed, and trained, on purpose.
Entropy depends on the weights for `noise` only.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

KINDS = ("sde", "noise")

Model = Callable[[Tensor, Tensor], tuple[Tensor, "Tensor | None"]]
"""`model(x [B, H, D], time [B])` -> velocity `[B, H, D]` and, for `noise`, the standard deviation `[B, H, D]`."""


@dataclass(frozen=True, kw_only=True)
class Draws:
    """The randomness of B decisions.

    Attributes:
        start: float32 `[B, H, D]`, standard normal: where the chain begins.
        step: int64 `[B, S]`, the denoising steps that draw noise, of `0..N-1`, ascending.
        noise: float32 `[B, S, H, D]`, standard normal, one for each of them.
    """

    start: Tensor
    step: Tensor
    noise: Tensor

    def to(self, device: torch.device | str) -> Draws:
        """The same on another device."""
        return Draws(start=self.start.to(device), step=self.step.to(device), noise=self.noise.to(device))


@dataclass(frozen=True, kw_only=True)
class Chain:
    """What a decision did, and what is needed to score it again.

    Attributes:
        action: float32 `[B, H, D]`, the end of the chain, in the model's units.
        x: float32 `[B, S, H, D]`, before each step that drew noise.
        x_next: float32 `[B, S, H, D]`, after it.
        step: int64 `[B, S]`, which steps those were.
        log_prob: float32 `[B, S, H, D]`, log-density of each element (nats).
    """

    action: Tensor
    x: Tensor
    x_next: Tensor
    step: Tensor
    log_prob: Tensor


def time_of(step: Tensor, num_steps: int) -> Tensor:
    """Flow time before a step: float32 of the step's shape. 1 for step 0; rounded once, from float64."""
    return (1.0 + step.double() * (-1.0 / num_steps)).float()


def transition(
    x: Tensor,
    velocity: Tensor,
    step: Tensor,
    *,
    num_steps: int,
    kind: str = "sde",
    noise_level: float = 0.5,
    std: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of x after a step that draws noise; see the module's table.

    Args:
        x: float32 `[..., H, D]`.
        velocity: the same shape.
        step: int64 `[...]`.
        num_steps: N.
        kind: `"sde"` or `"noise"`.
        noise_level: a, of `sde`; 0 gives the ODE.
        std: of `noise`, `[..., H, D]`.

    Returns:
        Two float32 tensors that broadcast to x's shape.

    Raises:
        ValueError: an unknown kind, or `noise` without its deviation.
    """
    x, velocity = x.float(), velocity.float()
    euler = x + (-1.0 / num_steps) * velocity
    if kind == "noise":
        if std is None:
            raise ValueError("kind 'noise' needs the standard deviation that the model learned.")
        return euler, std.float()
    if kind != "sde":
        raise ValueError(f"kind must be one of {', '.join(KINDS)}, but is {kind!r}.")
    gone = (step.float() / num_steps)[..., None, None]  # 1 - t
    spread = gone.clamp_min(1.0 / num_steps)
    time = time_of(step, num_steps)[..., None, None]
    mean = euler - noise_level**2 / (2 * num_steps * spread) * (x + gone * velocity)
    return mean, noise_level * (time / (num_steps * spread)).sqrt()


def learned_std(raw: Tensor, *, low: float, high: float) -> Tensor:
    """Squash a noise head's output into a standard deviation, in the logarithm of the variance.

    Args:
        raw: any shape; 0 gives the geometric mean of the ends.
        low: smallest deviation, above 0.
        high: largest.

    Returns:
        float32 of the same shape, in (low, high).
    """
    middle, half = math.log(low * high) / 2, math.log(high / low) / 2
    return torch.exp(middle + half * raw.float().tanh())


def log_density(x: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """Log-density of each element under a Gaussian; 0 where nothing was drawn (std 0), with a gradient of 0.

    Args:
        x: what was drawn.
        mean: broadcasts to x.
        std: broadcasts to x, at least 0.

    Returns:
        float32 of x's shape (nats).
    """
    x, mean, std = x.float(), mean.float(), std.float()
    drawn = std > 0
    safe = torch.where(drawn, std, 1.0)  # a division by 0 under torch.where would still make the gradient NaN
    density = -0.5 * ((x - mean) / safe).square() - safe.log() - 0.5 * math.log(2 * math.pi)
    return torch.where(drawn, density, 0.0)


def entropy(std: Tensor) -> Tensor:
    """Entropy of each element's Gaussian (nats): `0.5 log(2 pi e std^2)`, and 0 where nothing is drawn."""
    std = std.float()
    drawn = std > 0
    return torch.where(drawn, torch.where(drawn, std, 1.0).log() + 0.5 * math.log(2 * math.pi * math.e), 0.0)


def draw(
    streams: list[torch.Generator],
    shape: tuple[int, int],
    *,
    num_steps: int,
    every_step: bool = False,
    skip_last: bool = False,
) -> Draws:
    """Draw the randomness of B decisions, row i from generator i.

    One stream per environment: what an environment samples depends neither on its neighbours nor on how environments
    are dealt to processes.

    Args:
        streams: B CPU generators.
        shape: H and D.
        num_steps: N.
        every_step: every step draws noise (S = N). False: one step per decision does (S = 1), each equally likely.
        skip_last: never the last step, whose noise is the smallest and whose ratio is the most sensitive. With one
            step only, that step draws.

    Raises:
        ValueError: `num_steps` below 1.
    """
    if num_steps < 1:
        raise ValueError(f"num_steps must be at least 1, but is {num_steps}.")
    choices = max(num_steps - 1, 1) if skip_last else num_steps
    count = choices if every_step else 1
    starts, steps, noises = [], [], []
    for stream in streams:
        steps.append(torch.arange(count) if every_step else torch.randint(choices, (1,), generator=stream))
        starts.append(torch.randn(shape, generator=stream))
        noises.append(torch.randn(count, *shape, generator=stream))
    return Draws(start=torch.stack(starts), step=torch.stack(steps), noise=torch.stack(noises))


def sample(model: Model, draws: Draws, *, num_steps: int, kind: str = "sde", noise_level: float = 0.5) -> Chain:
    """Walk B chains from noise to actions. Steps that draw nothing follow the ODE.

    Args:
        model: gives the velocity.
        draws: on the model's device.
        num_steps: N.
        kind: of `transition`.
        noise_level: of `transition`.
    """
    x, step = draws.start.float(), draws.step
    before, after, log_prob = (torch.zeros_like(draws.noise) for _ in range(3))
    drawing = set(step.flatten().tolist())
    for index in range(num_steps):
        velocity, std = model(x, time_of(torch.full_like(step[:, 0], index), num_steps))
        x_next = x + (-1.0 / num_steps) * velocity.float()
        if index in drawing:
            rows, slots = (step == index).nonzero(as_tuple=True)
            options = {"num_steps": num_steps, "kind": kind, "noise_level": noise_level}
            options["std"] = None if std is None else std[rows]
            mean, deviation = transition(x[rows], velocity[rows], step[rows, slots], **options)
            drawn = mean + deviation * draws.noise[rows, slots]
            before[rows, slots], after[rows, slots] = x[rows], drawn
            log_prob[rows, slots] = log_density(drawn, mean, deviation)
            x_next = x_next.index_copy(0, rows, drawn)
        x = x_next
    return Chain(action=x, x=before, x_next=after, step=step, log_prob=log_prob)


def integrate(model: Model, start: Tensor, *, num_steps: int) -> Tensor:
    """Follow the ODE from noise `[B, H, D]` to actions: what a flow policy does when it is evaluated."""
    x = start.float()
    for index in range(num_steps):
        time = time_of(torch.full((len(x),), index, device=x.device), num_steps)
        x = x + (-1.0 / num_steps) * model(x, time)[0].float()
    return x


def score(
    x: Tensor,
    x_next: Tensor,
    step: Tensor,
    velocity: Tensor,
    *,
    num_steps: int,
    kind: str = "sde",
    noise_level: float = 0.5,
    std: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Score stored steps under the model as it is now.

    Args:
        x: float32 `[..., H, D]`, before the step.
        x_next: float32 `[..., H, D]`, after it.
        step: int64 `[...]`.
        velocity: `[..., H, D]`, the model's at x and the step's time, with gradient.
        num_steps: N, as it was sampled.
        kind: as it was sampled.
        noise_level: as it was sampled.
        std: of `noise`, `[..., H, D]`, with gradient.

    Returns:
        Log-density of each element and, for `noise`, its entropy (else None), float32 `[..., H, D]` (nats).
    """
    options = {"num_steps": num_steps, "kind": kind, "noise_level": noise_level, "std": std}
    mean, deviation = transition(x, velocity, step, **options)
    return log_density(x_next, mean, deviation), entropy(deviation) if kind == "noise" else None
