"""Where the columns of a multimodal sequence go.

Not here: what the columns hold (`modeling.py`).
Usage: `order = pads_after_first(mask)`, then `input_ids.gather(1, order)`.
"""

from __future__ import annotations

import torch


def pads_after_first(mask: torch.Tensor) -> torch.Tensor:
    """Column order, int64 `[B, L]`, that puts each row's first real token first, then its pads, then the rest."""
    mask = mask.long()
    is_first = (mask.cumsum(1) == 1) & (mask == 1)
    return torch.argsort(mask - 2 * is_first.long(), dim=1, stable=True)


def after_first(columns: torch.Tensor, inserted: torch.Tensor) -> torch.Tensor:
    """Insert `[B, I, ...]` after column 0 of `[B, L, ...]`."""
    return torch.cat([columns[:, :1], inserted, columns[:, 1:]], dim=1)


def append(embeds: torch.Tensor | None, mask: torch.Tensor, tail: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Append real tokens `[B, I, hidden]` to embeddings (None: return the tail alone) and extend the mask."""
    ones = torch.ones(tail.shape[:2], dtype=mask.dtype, device=mask.device)
    joined = tail if embeds is None else torch.cat([embeds, tail.to(embeds.dtype)], dim=1)
    return joined, torch.cat([mask, ones], dim=1)
