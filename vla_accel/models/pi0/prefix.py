"""What surrounds PI0's two stacks: the prefix's packing and cache, the suffix's mask, flow time and its embedding.

Not here: parameters. Pure functions and one record.
Usage: `embeds, mask = pack(embeds, valid)`; `cache.select(rows)`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F


@dataclass
class PrefixCache:
    """What the action expert reads of B observations. Plain tensors: index, store and move them at will.

    Attributes:
        keys: `[B, layers, n, kv_heads * head_dim]`, rotated; valid tokens come first.
        values: the same shape.
        mask: bool `[B, n]`, True = a valid token.
        output: `[B, n, width]`, the language model's normalised output, where it was asked for.
    """

    keys: Tensor
    values: Tensor
    mask: Tensor
    output: Tensor | None = None

    @property
    def lengths(self) -> Tensor:
        """Valid tokens of each row, int64 `[B]`."""
        return self.mask.sum(1)

    def select(self, rows: Tensor) -> PrefixCache:
        """The cache of some rows (an index `[B']` or a bool mask `[B]`)."""
        output = None if self.output is None else self.output[rows]
        return PrefixCache(self.keys[rows], self.values[rows], self.mask[rows], output)

    def mean_output(self) -> Tensor:
        """Mean of the output over valid tokens, float32 `[B, width]`."""
        if self.output is None:
            raise ValueError("This cache has no output: build it with prefix_cache(..., with_output=True).")
        weight = self.mask[..., None].float()
        return (self.output.float() * weight).sum(1) / weight.sum(1)


def time_embedding(time: Tensor, dim: int, *, min_period: float = 4e-3, max_period: float = 4.0) -> Tensor:
    """Sines and cosines of flow time at `dim / 2` geometrically spaced periods.

    Computed in float64: the fastest angle reaches 1571 rad, where float32 is off by 1e-4.

    Args:
        time: float32 `[B]`, in [0, 1].
        dim: even.
        min_period: shortest period.
        max_period: longest.

    Returns:
        `[B, dim]` in time's dtype.
    """
    device = torch.device("cpu") if time.device.type == "mps" else time.device  # mps has no float64
    fraction = torch.linspace(0.0, 1.0, dim // 2, dtype=torch.float64, device=device)
    period = min_period * (max_period / min_period) ** fraction
    angle = 2 * math.pi / period * time.to(device=device, dtype=torch.float64)[:, None]
    return torch.cat([angle.sin(), angle.cos()], -1).to(device=time.device, dtype=time.dtype)


def denoising_times(num_steps: int) -> list[float]:
    """Flow times at which a sampler with `num_steps` steps evaluates the velocity: 1 (noise) down to 1 / num_steps."""
    step = -1.0 / num_steps
    return [1.0 + index * step for index in range(num_steps)]


def pack(embeds: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
    """Move valid tokens to the front, in order, and cut what no row needs: `[B, n, width]`, bool `[B, n]`."""
    if valid.all():
        return embeds, valid
    if (valid == valid[:1]).all():
        columns = valid[0].nonzero().squeeze(1)
        return embeds[:, columns], valid[:, columns]
    count = int(valid.sum(1).max())
    order = torch.argsort(~valid, dim=1, stable=True)[:, :count]
    return embeds.take_along_dim(order[..., None], 1), valid.take_along_dim(order, 1)


def visible(prefix: Tensor, count: int = 0) -> Tensor | None:
    """Which keys may be seen, of a prefix (bool `[B, n]`) and `count` tokens behind it: bool `[B, n + count]`.

    None where all may be.
    """
    return None if prefix.all() else F.pad(prefix, (0, count), value=True)
