"""Scaling of states and actions between a robot's units and the model's, with the originals' small numbers.

Not here: reading statistics from files (`files.py`).
Usage: `scaler = Scaler("MEAN_STD", {"mean": mean, "std": std}, name="action"); raw = scaler.inverse(normalised)`.

| mode | forward | in LeRobot | in openpi |
|---|---|---|---|
| MEAN_STD | (x - mean) / std | std + 1e-8 forward only | std + 1e-6 both ways |
| QUANTILES (q01, q99), QUANTILE10, MIN_MAX | 2 (x - low) / (high - low) - 1 | 1e-8 for a width of 0 | width + 1e-6 |
"""

from __future__ import annotations

import torch
from torch import Tensor

_ENDS = {"QUANTILES": ("q01", "q99"), "QUANTILE10": ("q10", "q90"), "MIN_MAX": ("min", "max")}
MODES = ("IDENTITY", "MEAN_STD", *_ENDS)
CONSTANT_DIMS = ("error", "unit", "exact")
OPENPI_EPS = 1e-6
FLAT = 1e-6  # below it a standard deviation or a width says that the dimension never moved


class Scaler:
    """One feature's normalisation and its inverse.

    Args:
        mode: `"IDENTITY"`, `"MEAN_STD"`, `"MIN_MAX"`, `"QUANTILES"` or `"QUANTILE10"`.
        stats: `mean` and `std`, or the two ends that the mode reads, each `[dim]`.
        name: of the feature, for messages.
        rule: `"lerobot"` or `"openpi"`.
        eps: LeRobot's small number.
        constant_dims: what to do with a dimension that never moved in the data: `"error"`; `"unit"`, give it scale 1;
            `"exact"`, divide as the originals do (a deviation of 0.1 becomes 1e7).

    Raises:
        ValueError: an unknown mode, or statistics that are missing, of two lengths, not finite, negative, or flat with
            `constant_dims="error"`.
    """

    def __init__(
        self,
        mode: str,
        stats: dict[str, Tensor],
        *,
        name: str,
        rule: str = "lerobot",
        eps: float = 1e-8,
        constant_dims: str = "error",
    ):
        if constant_dims not in CONSTANT_DIMS:
            raise ValueError(f"constant_dims must be one of {', '.join(CONSTANT_DIMS)}, but is {constant_dims!r}.")
        self.mode, self.name, self.rule, self.eps = mode, name, rule, eps
        if mode not in MODES:
            raise ValueError(f"The normalization mode of {name} must be one of {', '.join(MODES)}, but is {mode!r}.")
        if mode == "IDENTITY":
            return
        self.names = ("mean", "std") if mode == "MEAN_STD" else _ENDS[mode]
        for key in self.names:
            if key not in stats:
                raise ValueError(f"The statistics of {name} must have {key!r} for {mode}, but have {sorted(stats)}.")
            if not torch.isfinite(torch.as_tensor(stats[key])).all():
                raise ValueError(f"The statistics of {name} must be finite, but {key!r} is {list(stats[key])}.")
        first, second = (torch.as_tensor(stats[key]).float().flatten() for key in self.names)
        if len(first) != len(second):
            raise ValueError(
                f"The statistics of {name} must have one length, but {' and '.join(self.names)} have {len(first)} and "
                f"{len(second)} entries."
            )
        width = second if mode == "MEAN_STD" else second - first
        if (width < 0).any():
            dims = (width < 0).nonzero().flatten().tolist()
            rule_text = (
                "std must not be negative" if mode == "MEAN_STD" else f"{self.names[1]} must be >= {self.names[0]}"
            )
            raise ValueError(f"In the statistics of {name}, {rule_text}, but it is not in dimensions {dims}.")
        flat = width < FLAT
        if constant_dims == "error" and flat.any():
            raise ValueError(
                f"The statistics of {name} have {'a standard deviation' if mode == 'MEAN_STD' else 'a range'} of 0 in "
                f"dimensions {flat.nonzero().flatten().tolist()}, so these cannot be normalised. "
                'Pass constant_dims="unit" (--policy.constant_dims unit) to leave their scale as it is, or "exact" to '
                "divide as the original does."
            )
        if constant_dims == "unit":
            if mode == "MEAN_STD":
                second = torch.where(flat, 1.0, second)
            else:
                first, second = torch.where(flat, first - 1, first), torch.where(flat, first + 1, second)
        self.first, self.second = first, second

    @property
    def dim(self) -> int | None:
        """Entries of the feature; None where nothing is scaled."""
        return None if self.mode == "IDENTITY" else len(self.first)

    def _ends(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if x.shape[-1] != len(self.first):
            raise ValueError(f"{self.name} must have {len(self.first)} entries, but has {x.shape[-1]}.")
        return self.first.to(x.device), self.second.to(x.device)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise `[..., dim]`."""
        if self.mode == "IDENTITY":
            return x
        first, second = self._ends(x)
        if self.mode == "MEAN_STD":
            return (x - first) / (second + (OPENPI_EPS if self.rule == "openpi" else self.eps))
        if self.rule == "openpi":
            return (x - first) / (second - first + OPENPI_EPS) * 2.0 - 1.0
        return 2.0 * (x - first) / self._width(first, second) - 1.0

    def inverse(self, x: Tensor) -> Tensor:
        """Undo `forward`."""
        if self.mode == "IDENTITY":
            return x
        first, second = self._ends(x)
        if self.mode == "MEAN_STD":
            return x * (second + OPENPI_EPS if self.rule == "openpi" else second) + first
        if self.rule == "openpi":
            return (x + 1.0) / 2.0 * (second - first + OPENPI_EPS) + first
        return (x + 1.0) * self._width(first, second) / 2.0 + first

    def _width(self, first: Tensor, second: Tensor) -> Tensor:
        width = second - first
        return torch.where(width == 0, self.eps, width)
