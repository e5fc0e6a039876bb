"""Building blocks of PI0: attention over cached keys, Gemma's block with plain or adaptive norms, a stack of them.

Not here: how the stacks are wired (`modeling.py`) and the image tower (`vision.py`). Plain torch; parameter names are
those of the checkpoints.
Usage: `hidden, keys, values = stack(tokens, stack.table(positions), mask=mask)`.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from vla_accel.models.pi0.configuration import GemmaSizes

NORM_EPS = 1e-6
ROPE_BASE = 10000.0
ROWS = 320  # tokens whose MLP activations stay in a CPU's cache


def by_rows(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Apply a function of single tokens to `[..., width]`; on a CPU without gradients, in pieces that fit its cache."""
    count = x.shape[:-1].numel()
    if x.requires_grad or x.device.type != "cpu" or count <= ROWS:
        return function(x)
    parts = x.reshape(-1, x.shape[-1]).chunk(-(-count // ROWS))
    return torch.cat([function(part) for part in parts]).unflatten(0, x.shape[:-1])


def gelu(x: Tensor) -> Tensor:
    """The tanh form of GELU, `x * sigmoid(2 sqrt(2 / pi) (x + 0.044715 x^3))`.

    Written out where torch's own kernel is slow, which on a CPU is half of what it could be.
    """
    if x.requires_grad or x.device.type != "cpu" or x.dtype != torch.float32:
        return F.gelu(x, approximate="tanh")
    slope = 2.0 * (2.0 / math.pi) ** 0.5
    inner = torch.addcmul(x.new_tensor(slope), x, x, value=0.044715 * slope)
    return inner.mul_(x).sigmoid_().mul_(x)


def times(x: Tensor, y: Tensor) -> Tensor:
    """`x * y` for a fresh `x`: in place where no gradient needs it."""
    return x * y if x.requires_grad or y.requires_grad else x.mul_(y)


def attend(query: Tensor, key: Tensor, value: Tensor, *, mask: Tensor | None, head_dim: int, blind: int = 0) -> Tensor:
    """Softmax attention in which several query heads share each key/value head.

    The query heads of one key head are laid behind each other along the token axis, so the keys are never repeated
    and nothing is copied where there is one key head (as in every PI0).

    Args:
        query: `[B, n, heads * head_dim]`.
        key: `[B, m, kv_heads * head_dim]`.
        value: the same.
        mask: bool `[B, m]`, keys that may be seen; True = keep. None: all.
        head_dim: width of a head; the scale is its inverse square root.
        blind: the last n keys are the tokens' own, and this many tokens at the front see no later one's.

    Returns:
        `[B, n, heads * head_dim]`.
    """
    if blind:  # two calls, since a mask for each query would cost more than it saves
        until = key.shape[1] - query.shape[1] + blind
        shown = None if mask is None else mask[:, :until]
        front = attend(query[:, :blind], key[:, :until], value[:, :until], mask=shown, head_dim=head_dim)
        return torch.cat([front, attend(query[:, blind:], key, value, mask=mask, head_dim=head_dim)], 1)
    batch, count, width = query.shape
    groups = key.shape[-1] // head_dim
    repeat = width // head_dim // groups
    query = query.view(batch, count, groups, repeat, head_dim).transpose(1, 2).reshape(batch, groups, -1, head_dim)
    key = key.unflatten(-1, (groups, head_dim)).transpose(1, 2)
    value = value.unflatten(-1, (groups, head_dim)).transpose(1, 2)
    if mask is not None:
        mask = mask[:, None, None]
    out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
    return out.view(batch, groups, count, repeat, head_dim).transpose(1, 2).reshape(batch, count, width)


def rotary_table(positions: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
    """Cosines and signed sines of the rotary embedding (arXiv 2104.09864), halves of a head paired.

    Args:
        positions: int64 `[B, n]`.
        head_dim: width of a head.

    Returns:
        Two float32 tensors `[B, n, 1, head_dim]`; the first half of the sines is negated.
    """
    exponent = torch.arange(0, head_dim, 2, dtype=torch.float32, device=positions.device) / head_dim
    angle = (positions.float()[..., None] * ROPE_BASE**-exponent)[:, :, None]
    cos, sin = angle.cos(), angle.sin()
    return torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)


def rotate(x: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
    """Apply a rotary table to heads `[B, n, heads * head_dim]`, in their dtype."""
    cos, sin = (part.to(x.dtype) for part in table)
    heads = x.unflatten(-1, (-1, cos.shape[-1]))
    return (heads * cos).addcmul_(heads.roll(cos.shape[-1] // 2, -1), sin).flatten(-2)


class RMSNorm(nn.Module):
    """Gemma's norm in float32; the stored weight is the offset from one.

    With `cond_dim` it is adaptive (PI0.5): scale, shift and gate are read from a condition by `dense`.
    """

    def __init__(self, dim: int, *, cond_dim: int | None = None):
        super().__init__()
        if cond_dim is None:
            self.weight = nn.Parameter(torch.zeros(dim))
        else:
            self.dense = nn.Linear(cond_dim, 3 * dim)
        self.adaptive = cond_dim is not None

    def forward(self, x: Tensor, cond: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Normalise.

        Args:
            x: `[B, n, dim]`.
            cond: `[B, cond_dim]` float32, for an adaptive norm.

        Returns:
            The normalised `[B, n, dim]` in x's dtype, and the gate `[B, 1, dim]` of the branch or None.
        """
        normed = x.float()
        normed = normed * torch.rsqrt(normed.square().mean(-1, keepdim=True) + NORM_EPS)
        if not self.adaptive:
            return times(normed, 1.0 + self.weight.float()).to(x.dtype), None
        with torch.autocast(x.device.type, enabled=False):
            modulation = self.dense(cond.to(self.dense.weight.dtype)).float()
        scale, shift, gate = modulation[:, None].chunk(3, -1)
        return torch.addcmul(shift, normed, 1.0 + scale).to(x.dtype), gate.to(x.dtype)


class GemmaAttention(nn.Module):
    """The four projections of a Gemma attention; `GemmaLayer` does the rest."""

    def __init__(self, sizes: GemmaSizes):
        super().__init__()
        heads, shared = sizes.num_heads * sizes.head_dim, sizes.num_kv_heads * sizes.head_dim
        self.q_proj = nn.Linear(sizes.width, heads, bias=False)
        self.k_proj = nn.Linear(sizes.width, shared, bias=False)
        self.v_proj = nn.Linear(sizes.width, shared, bias=False)
        self.o_proj = nn.Linear(heads, sizes.width, bias=False)


class GemmaMLP(nn.Module):
    """Gated MLP with the tanh form of GELU."""

    def __init__(self, sizes: GemmaSizes):
        super().__init__()
        self.gate_proj = nn.Linear(sizes.width, sizes.mlp_dim, bias=False)
        self.up_proj = nn.Linear(sizes.width, sizes.mlp_dim, bias=False)
        self.down_proj = nn.Linear(sizes.mlp_dim, sizes.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map `[B, n, width]` to the same shape."""
        return by_rows(self._rows, x)

    def _rows(self, x: Tensor) -> Tensor:
        return self.down_proj(times(gelu(self.gate_proj(x)), self.up_proj(x)))


class GemmaLayer(nn.Module):
    """One block. Everything that it computes is inside `forward`, so that it can be sharded on its own."""

    def __init__(self, sizes: GemmaSizes, *, cond_dim: int | None = None):
        super().__init__()
        self.head_dim = sizes.head_dim
        self.self_attn = GemmaAttention(sizes)
        self.mlp = GemmaMLP(sizes)
        self.input_layernorm = RMSNorm(sizes.width, cond_dim=cond_dim)
        self.post_attention_layernorm = RMSNorm(sizes.width, cond_dim=cond_dim)

    def forward(
        self,
        x: Tensor,
        table: tuple[Tensor, Tensor],
        *,
        mask: Tensor | None = None,
        past: tuple[Tensor, Tensor] | None = None,
        in_place: bool = False,
        cond: Tensor | None = None,
        blind: int = 0,
        keys_only: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Run the block.

        Args:
            x: `[B, n, width]`.
            table: rotary table of the tokens.
            mask: of `attend`, over past and own keys.
            past: rotated keys and values `[B, p, kv_heads * head_dim]` that the tokens may see besides their own.
            in_place: `past` ends with n columns of room, into which the own keys and values are written.
            cond: condition of adaptive norms.
            blind: of `attend`.
            keys_only: stop after keys and values; the returned hidden state is `x`.

        Returns:
            The hidden state `[B, n, width]`, and the tokens' own rotated keys and values.
        """
        normed, gate = self.input_layernorm(x, cond)
        attn = self.self_attn
        key, value = rotate(attn.k_proj(normed), table), attn.v_proj(normed)
        all_keys, all_values = _join(past, key, value, in_place=in_place)
        if keys_only:
            return x, key, value
        query = rotate(attn.q_proj(normed), table)
        mixed = attend(query, all_keys, all_values.to(query.dtype), mask=mask, head_dim=self.head_dim, blind=blind)
        x = _residual(x, attn.o_proj(mixed), gate)
        normed, gate = self.post_attention_layernorm(x, cond)
        return _residual(x, self.mlp(normed), gate), key, value


def _join(past: tuple[Tensor, Tensor] | None, key: Tensor, value: Tensor, *, in_place: bool) -> tuple[Tensor, Tensor]:
    """Keys and values that the tokens may see: the past's and their own."""
    if past is None:
        return key, value
    if in_place:
        for room, own in zip(past, (key, value), strict=True):
            room[:, -own.shape[1] :] = own
        return past
    return torch.cat([past[0].to(key.dtype), key], 1), torch.cat([past[1].to(value.dtype), value], 1)


def _residual(x: Tensor, branch: Tensor, gate: Tensor | None) -> Tensor:
    if gate is not None:
        return torch.addcmul(x, branch.to(x.dtype), gate)
    if x.requires_grad or branch.requires_grad or x.dtype != branch.dtype:
        return x + branch
    return branch.add_(x)


class GemmaStack(nn.Module):
    """A Gemma without a language-model head.

    Args:
        sizes: of the stack.
        vocab_size: rows of the token embedding; None builds none.
        cond_dim: width of the condition of adaptive norms; None for plain norms.
    """

    def __init__(self, sizes: GemmaSizes, *, vocab_size: int | None = None, cond_dim: int | None = None):
        super().__init__()
        self.sizes = sizes
        if vocab_size is not None:
            self.embed_tokens = nn.Embedding(vocab_size, sizes.width)
        self.layers = nn.ModuleList(GemmaLayer(sizes, cond_dim=cond_dim) for _ in range(sizes.depth))
        self.norm = RMSNorm(sizes.width, cond_dim=cond_dim)
        self.gradient_checkpointing = False

    @property
    def compute_dtype(self) -> torch.dtype:
        """Dtype of the residual stream."""
        return self.layers[0].self_attn.q_proj.weight.dtype

    def embed(self, tokens: Tensor) -> Tensor:
        """Embed token ids `[B, L]`; the rows are scaled by the square root of the width, as Gemma does."""
        rows = self.embed_tokens(tokens)
        return rows * torch.tensor(self.sizes.width**0.5, dtype=rows.dtype, device=rows.device)

    def table(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """The rotary table of tokens at some positions, int64 `[B, n]`."""
        return rotary_table(positions, self.sizes.head_dim)

    def forward(
        self,
        x: Tensor,
        table: tuple[Tensor, Tensor],
        *,
        mask: Tensor | None = None,
        past: list[tuple[Tensor, Tensor]] | None = None,
        in_place: bool = False,
        cond: Tensor | None = None,
        blind: int = 0,
        with_output: bool = True,
    ) -> tuple[Tensor | None, list[Tensor], list[Tensor]]:
        """Run all blocks.

        Args:
            x: `[B, n, width]`.
            table: of the tokens; see `table`.
            mask: of `attend`.
            past: one pair per layer, of `GemmaLayer`.
            in_place: of `GemmaLayer`.
            cond: of adaptive norms.
            blind: of `attend`.
            with_output: False where only keys and values are read: of the last block nothing else is computed.

        Returns:
            The normalised output `[B, n, width]` (or None), and one tensor of keys and one of values per layer.
        """
        x = x.to(self.compute_dtype)
        keys, values = [], []
        for index, layer in enumerate(self.layers):
            options = {
                "mask": mask,
                "past": past[index] if past is not None else None,
                "in_place": in_place,
                "cond": cond,
                "blind": blind,
                "keys_only": not with_output and index == len(self.layers) - 1,
            }
            if self.gradient_checkpointing and torch.is_grad_enabled():
                x, key, value = checkpoint(layer, x, table, **options, use_reentrant=False)
            else:
                x, key, value = layer(x, table, **options)
            keys.append(key)
            values.append(value)
        return (self.norm(x, cond)[0] if with_output else None), keys, values
