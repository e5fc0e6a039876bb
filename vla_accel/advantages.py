"""From rewards to advantages: pure functions on `[T, N]` tensors.

Not here: anything that talks to other processes; `distributed.global_sum` supplies the sums of `normalize`.
Usage: `advantage, returns, used = estimate(rollout, options, global_sum=partial(global_sum, accelerator))`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from vla_accel.config import PPOOptions
from vla_accel.types import Rollout


def estimate(
    rollout: Rollout, options: PPOOptions, *, global_sum: Callable[..., Sequence[float]]
) -> tuple[Tensor, Tensor, Tensor]:
    """Advantages, targets of the value head, and which decisions to learn from, each `[T, N]`.

    Collective: call on every rank.

    Args:
        rollout: for grpo, one whole episode of each environment.
        options: of PPO.
        global_sum: as for `normalize`.
    """
    if options.advantage == "grpo":
        ended = rollout.terminated | rollout.truncated
        advantage, used = group_relative(
            rollout.reward, ended=ended, valid=rollout.valid, group_size=options.group_size
        )
        return advantage, rollout.value, used
    advantage, returns = gae(
        rollout.reward,
        rollout.value,
        next_value=rollout.next_value,
        terminated=rollout.terminated,
        truncated=rollout.truncated,
        valid=rollout.valid,
        gamma=options.gamma,
        gae_lambda=options.gae_lambda,
    )
    if options.normalize_advantages:
        advantage = normalize(advantage, rollout.valid, global_sum=global_sum)
    return advantage, returns, rollout.valid


def gae(
    reward: Tensor,
    value: Tensor,
    *,
    next_value: Tensor,
    terminated: Tensor,
    truncated: Tensor,
    valid: Tensor,
    gamma: float,
    gae_lambda: float,
) -> tuple[Tensor, Tensor]:
    r"""Generalised advantage estimation (arXiv 1506.02438) that keeps termination and truncation apart.

    \[ \delta_t = r_t + \gamma (1 - \mathrm{terminated}_t)\, V'_t - V_t, \qquad
       \hat A_t = \delta_t + \gamma \lambda (1 - \mathrm{terminated}_t)(1 - \mathrm{truncated}_t)\, \hat A_{t+1} \]

    where \(V'_t\) is the value of the observation decision t led to. A truncated episode is bootstrapped with the
    value of its own final observation; a terminated one is worth nothing more. Neither lets an advantage flow over
    the boundary.

    Args:
        reward: float32 `[T, N]`.
        value: float32 `[T, N]`, estimates at the decisions.
        next_value: float32 `[T, N]`, as in `Rollout.next_value`.
        terminated: bool `[T, N]`.
        truncated: bool `[T, N]`.
        valid: bool `[T, N]`; invalid entries get 0 and pass nothing on.
        gamma: discount per decision.
        gae_lambda: 0 gives one-step targets, 1 discounted sums of rewards.

    Returns:
        advantage and returns (advantage + value), float32 `[T, N]`, no gradient.
    """
    advantage = torch.zeros_like(reward)
    running = torch.zeros_like(reward[0])
    alive = 1.0 - terminated.float()
    inside = alive * (1.0 - truncated.float())
    for t in reversed(range(reward.shape[0])):
        delta = reward[t] + gamma * alive[t] * next_value[t] - value[t]
        running = delta + gamma * gae_lambda * inside[t] * running
        running = torch.where(valid[t], running, torch.zeros_like(running))
        advantage[t] = running
    returns = torch.where(valid, advantage + value, torch.zeros_like(value))
    return advantage, returns


def group_relative(
    reward: Tensor, *, ended: Tensor, valid: Tensor, group_size: int, eps: float = 1e-8
) -> tuple[Tensor, Tensor]:
    r"""How much better each episode went than others from the same initial state (GRPO, arXiv 2402.03300).

    \[ \hat A_{t,n} = \frac{R_n - \mathrm{mean}(R_{G(n)})}{\mathrm{std}(R_{G(n)})}, \qquad R_n = \sum_t r_{t,n} \]

    where \(G(n)\) is n's group of `group_size` neighbouring environments, each of which plays one episode. An episode
    that was broken off counts nowhere. Groups whose episodes all went alike say nothing and are left out, as are those
    with fewer than two episodes.

    Args:
        reward: float32 `[T, N]`.
        ended: bool `[T, N]`, True at an episode's last decision, however it ended.
        valid: bool `[T, N]`, False after the episode and where a decision was lost.
        group_size: a divisor of N.
        eps: a deviation below this counts as 0.

    Returns:
        advantage, float32 `[T, N]`, 0 where it says nothing; and where it does say something, bool `[T, N]`.
    """
    length = valid.sum(0)
    place = torch.arange(len(valid))[:, None]
    whole = ended.any(0) & (valid == (place < length)).all(0)
    total = torch.where(valid, reward, torch.zeros_like(reward)).sum(0).double().unflatten(0, (-1, group_size))
    counts = whole.unflatten(0, (-1, group_size)).double()
    number = counts.sum(1, keepdim=True).clamp_min(1.0)
    centred = (total - (total * counts).sum(1, keepdim=True) / number) * counts
    deviation = (centred.square().sum(1, keepdim=True) / number).sqrt()
    told = (deviation > eps).expand_as(counts).flatten() & whole
    score = (centred / deviation.clamp_min(eps)).flatten().to(reward.dtype)
    used = valid & told
    return torch.where(used, score, torch.zeros_like(reward)), used


def normalize(
    advantage: Tensor, valid: Tensor, *, global_sum: Callable[..., Sequence[float]], eps: float = 1e-8
) -> Tensor:
    """Bring the valid entries of all processes to mean 0 and standard deviation 1; the others become 0.

    One valid entry, or entries that are all equal, give 0. Collective: call on every rank.

    Args:
        advantage: float32, any shape; invalid entries may hold anything, NaN included.
        valid: bool, same shape.
        global_sum: sums its numbers over all processes, e.g. `partial(distributed.global_sum, accelerator)`.
        eps: a deviation below this counts as 0.
    """
    kept = torch.where(valid, advantage, torch.zeros_like(advantage)).double()
    count, total = global_sum(float(valid.sum()), float(kept.sum()))
    if count == 0:
        return torch.zeros_like(advantage)
    centred = torch.where(valid, kept - total / count, torch.zeros_like(kept))
    (squares,) = global_sum(float(centred.square().sum()))
    deviation = (squares / count) ** 0.5
    scale = 1.0 / deviation if deviation > eps else 0.0
    return (centred * scale).to(advantage.dtype)
