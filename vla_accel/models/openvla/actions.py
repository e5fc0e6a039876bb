"""OpenVLA's action alphabet: bins, token ids, and the statistics that turn bins into robot commands.

Not here: sampling and log-probabilities of tokens (the policy side) and image or text processing (`processing.py`).
Usage: `ActionTokenizer(32000).decode(ids)`, then `ActionStatistics.from_norm_stats(norm_stats, key).unnormalize(...)`.
"""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any, TypeVar

import numpy as np
import torch

Array = TypeVar("Array", np.ndarray, torch.Tensor)

OFT_EPS = 1e-8
"""What OpenVLA-OFT adds to the range of an action dimension; the base model adds 0."""

MODES = {"q99": ("q01", "q99"), "min_max": ("min", "max")}
"""Normalisation mode -> the two statistics that map to -1 and 1 (upstream names: BOUNDS_Q99 and BOUNDS)."""


class ActionTokenizer:
    """Maps normalised actions to the last `n_bins` ids of the vocabulary, and back.

    `n_bins` edges over [-1, 1] bound `n_bins - 1` intervals. An action's bin is the number of edges at or below it,
    1..n_bins, and its id is `vocab_size - bin`: large actions have small ids. Bin `n_bins` holds exactly 1.0 and has no
    interval of its own, so the two smallest ids decode to the same value (31744 and 31745 in Llama-2's vocabulary).
    They stay distinct tokens for the policy: each has its own probability.

    Args:
        vocab_size: ids of the vocabulary before padding (32000 for Llama-2, not 32064).
        n_bins: number of action tokens.

    Attributes:
        bins: float64 `[n_bins]`, the edges.
        centers: float64 `[n_bins - 1]`, the values that ids decode to.
        begin: smallest action id, the first of the `n_bins` logit columns of the policy.

    Raises:
        ValueError: `n_bins` below 2 or above `vocab_size`.
    """

    def __init__(self, vocab_size: int, n_bins: int = 256):
        if not 2 <= n_bins <= vocab_size:
            raise ValueError(f"n_bins must lie in 2..vocab_size ({vocab_size}), got {n_bins}")
        self.vocab_size = vocab_size
        self.n_bins = n_bins
        self.begin = vocab_size - n_bins
        self.bins = np.linspace(-1.0, 1.0, n_bins)
        self.centers = (self.bins[:-1] + self.bins[1:]) / 2.0

    def encode(self, action: Array) -> Array:
        """Turn normalised actions into token ids.

        Args:
            action: any shape, float, nominally in [-1, 1]; values outside are clipped.

        Returns:
            int64 of the same shape and kind (numpy or torch, same device), in `[begin, vocab_size)`.

        Raises:
            ValueError: a numpy action that is not a number.
        """
        if isinstance(action, torch.Tensor):
            edges = torch.as_tensor(self.bins, device=action.device)
            return self.vocab_size - torch.bucketize(action.double().clamp(-1.0, 1.0), edges, right=True)
        action = np.asarray(action, dtype=np.float64)
        if np.isnan(action).any():
            raise ValueError("an action to encode is NaN; check the data set or the policy that produced it")
        return self.vocab_size - np.digitize(np.clip(action, -1.0, 1.0), self.bins).astype(np.int64)

    def decode(self, ids: Array) -> Array:
        """Turn token ids into normalised actions.

        Args:
            ids: any shape, integer. Ids that are no action tokens decode to the nearest end of the range.

        Returns:
            Bin centres of the same shape and kind: float64 in numpy, float32 in torch.
        """
        if isinstance(ids, torch.Tensor):
            index = (self.vocab_size - 1 - ids.long()).clamp(0, self.n_bins - 2)
            return torch.as_tensor(self.centers, dtype=torch.float32, device=ids.device)[index]
        ids = np.asarray(ids, dtype=np.int64)
        return self.centers[np.clip(self.vocab_size - 1 - ids, 0, self.n_bins - 2)]

    def index_to_id(self, index: Array) -> Array:
        """Turn columns of the action logits, 0..n_bins-1, into token ids."""
        return index + self.begin

    def id_to_index(self, ids: Array) -> Array:
        """Turn token ids into columns of the action logits; ids that are no action tokens fall outside the columns."""
        return ids - self.begin

    def is_action(self, ids: Array) -> Array:
        """Bool of the same shape: which ids are action tokens."""
        return (ids >= self.begin) & (ids < self.vocab_size)


class ActionStatistics:
    """Ranges of one data set's actions and proprioception.

    Args:
        entry: `norm_stats[key]` of a checkpoint: `{"action": {"q01": [A], "q99": [A], "mask": [A]}, "proprio": ...}`.
        mode: `"q99"` for the 1 % and 99 % quantiles (LIBERO, Bridge), `"min_max"` for the extremes (ALOHA).
        name: key of the data set, for messages.

    Attributes:
        low: float64 `[A]`, action value that normalises to -1.
        high: float64 `[A]`, action value that normalises to 1.
        mask: bool `[A]`, True where an action is normalised; the others (a gripper in 0..1) pass unchanged.
        constant: bool `[A]`, True where the data set never moved; such dimensions normalise to 0.
        proprio_low: float64 `[Q]`, state value that normalises to -1, or None without state statistics.
        proprio_high: float64 `[Q]`, state value that normalises to 1, or None.
        proprio_mask: bool `[Q]`, as `mask`, or None.

    Raises:
        ValueError: unknown mode, or statistics that lack what the mode needs.
    """

    def __init__(self, entry: Mapping[str, Any], *, mode: str = "q99", name: str = ""):
        if mode not in MODES:
            raise ValueError(f"mode must be one of {', '.join(MODES)}, got {mode!r}")
        if not isinstance(entry, Mapping) or not entry.get("action") or not isinstance(entry["action"], Mapping):
            raise ValueError(f'norm_stats[{name!r}] has no "action" statistics; it has: {_listing(entry)}')
        action = entry["action"]
        self.name = name
        self.low, self.high, self.mask = _bounds(action, mode, where=f'norm_stats[{name!r}]["action"]')
        extremes = [action.get(bound) for bound in ("min", "max")]
        if None in extremes:
            extremes = [self.low, self.high]
        lowest, highest = (_numbers(x, f'norm_stats[{name!r}]["action"]: min and max') for x in extremes)
        if not lowest.shape == highest.shape == self.low.shape:
            raise ValueError(
                f'norm_stats[{name!r}]["action"]: min and max must have {len(self.low)} entries as the others, '
                f"got {lowest.shape} and {highest.shape}"
            )
        self.constant = lowest == highest
        self.proprio_low: np.ndarray | None = None
        self.proprio_high: np.ndarray | None = None
        self.proprio_mask: np.ndarray | None = None
        if entry.get("proprio"):
            bounds = _bounds(entry["proprio"], mode, where=f'norm_stats[{name!r}]["proprio"]')
            self.proprio_low, self.proprio_high, self.proprio_mask = bounds

    @classmethod
    def from_norm_stats(
        cls,
        norm_stats: Mapping[str, Any] | None,
        key: str | None = None,
        *,
        suite: str | None = None,
        mode: str = "q99",
    ) -> ActionStatistics:
        """Choose one data set's statistics with `resolve_unnorm_key` and read them."""
        key = resolve_unnorm_key(norm_stats, key, suite=suite)
        return cls(norm_stats[key], mode=mode, name=key)

    @property
    def action_dim(self) -> int:
        """A, the number of action dimensions."""
        return len(self.low)

    def unnormalize(self, actions: Array, eps: float = 0.0) -> Array:
        """Turn normalised actions into environment units: `0.5 (a + 1) (high - low + eps) + low` where `mask`.

        Args:
            actions: `[..., A]`, float, in [-1, 1].
            eps: what the checkpoint's family adds to the range: 0 for OpenVLA, `OFT_EPS` for OpenVLA-OFT.

        Returns:
            float64 `[..., A]` of the same kind and on the same device.

        Raises:
            ValueError: the last dimension is not A.
        """
        actions = self._checked(actions, self.low, "actions")
        low, high, mask = (_like(x, actions) for x in (self.low, self.high, self.mask))
        return _where(mask, 0.5 * (actions + 1.0) * (high - low + eps) + low, actions)

    def normalize(self, actions: Array, eps: float = OFT_EPS) -> Array:
        """Turn actions in environment units into training targets, the inverse of `unnormalize` inside the range.

        Masked dimensions become `clip(2 (a - low) / (high - low + eps) - 1, -1, 1)`, the others pass unchanged, and
        dimensions that are constant in the data set become 0.

        Args:
            actions: `[..., A]`, float, environment units.
            eps: guards the division; upstream always trains with 1e-8.

        Returns:
            float64 `[..., A]` of the same kind and on the same device; finite for finite actions.

        Raises:
            ValueError: the last dimension is not A.
        """
        actions = self._checked(actions, self.low, "actions")
        scaled = _scaled(actions, self.low, self.high, self.mask, eps)
        return _where(_like(self.constant, actions), 0.0 * scaled, scaled)

    def normalize_proprio(self, state: Array, eps: float = OFT_EPS) -> Array:
        """Turn robot states into model inputs: `clip(2 (s - low) / (high - low + eps) - 1, -1, 1)` where masked in.

        Args:
            state: `[..., Q]`, float, environment units.
            eps: guards the division.

        Returns:
            float64 `[..., Q]` of the same kind and on the same device; finite for finite states.

        Raises:
            ValueError: the last dimension is not Q, or the data set has no state statistics.
        """
        if self.proprio_low is None:
            raise ValueError(
                f"the statistics {self.name!r} have no 'proprio' entry, so states cannot be normalised; turn "
                "proprioception off or add the entry to dataset_statistics.json"
            )
        state = self._checked(state, self.proprio_low, "state")
        return _scaled(state, self.proprio_low, self.proprio_high, self.proprio_mask, eps)

    def _checked(self, value: Array, reference: np.ndarray, what: str) -> Array:
        value = value.double() if isinstance(value, torch.Tensor) else np.asarray(value, dtype=np.float64)
        if value.ndim == 0 or value.shape[-1] != len(reference):
            raise ValueError(
                f"{what} must end in {len(reference)} dimensions to match the statistics {self.name!r}, "
                f"got shape {tuple(value.shape)}"
            )
        return value


def resolve_unnorm_key(
    norm_stats: Mapping[str, Any] | None, key: str | None = None, *, suite: str | None = None
) -> str:
    """Choose the data set whose statistics un-normalise the actions.

    In this order: the key asked for; the only key there is; the suite's name; the suite's name with `_no_noops`.

    Args:
        norm_stats: data set key -> statistics.
        key: the user's choice, or None.
        suite: name of the benchmark suite being played, or None.

    Returns:
        A key of `norm_stats`.

    Raises:
        ValueError: there are no statistics, the key is unknown, or several keys fit and none was chosen.
    """
    if not norm_stats:
        raise ValueError(
            "the checkpoint has no action statistics: neither norm_stats in config.json nor dataset_statistics.json; "
            "put the dataset_statistics.json of the training data into the checkpoint folder"
        )
    if key is not None:
        if key in norm_stats:
            return key
        raise ValueError(f"unnorm_key {key!r} is not among the checkpoint's statistics. {_known(norm_stats, key)}")
    if len(norm_stats) == 1:
        return next(iter(norm_stats))
    for candidate in (suite, f"{suite}_no_noops") if suite else ():
        if candidate in norm_stats:
            return candidate
    tried = f"the suite {suite!r} matches none of them" if suite else "none was chosen"
    raise ValueError(
        f"the checkpoint has statistics of {len(norm_stats)} data sets and {tried}; set unnorm_key. "
        f"{_known(norm_stats, suite)}"
    )


def _known(norm_stats: Mapping[str, Any], wanted: str | None) -> str:
    nearest = get_close_matches(wanted, list(norm_stats), n=1, cutoff=0.4) if wanted else []
    hint = f" Nearest: {nearest[0]!r}." if nearest else ""
    return f"Known keys: {', '.join(sorted(norm_stats))}.{hint}"


def _listing(entry: Any) -> str:
    return ", ".join(sorted(entry)) if isinstance(entry, Mapping) and entry else "nothing"


def _bounds(entry: Mapping[str, Any], mode: str, *, where: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    names = MODES[mode]
    missing = [name for name in names if entry.get(name) is None]
    if missing:
        raise ValueError(
            f"{where} lacks {' and '.join(missing)}, needed by mode {mode!r}; it has: {_listing(entry)}; "
            f"choose the other mode ({', '.join(set(MODES) - {mode})}) or complete dataset_statistics.json"
        )
    low, high = (_numbers(entry[name], f"{where}: {name}") for name in names)
    mask = np.asarray(entry["mask"], dtype=bool) if entry.get("mask") is not None else np.ones(low.shape, dtype=bool)
    if low.ndim != 1 or not low.shape == high.shape == mask.shape:
        raise ValueError(
            f"{where}: {names[0]}, {names[1]} and mask must be lists of one length, "
            f"got {low.shape}, {high.shape} and {mask.shape}"
        )
    return low, high, mask


def _numbers(values: Any, where: str) -> np.ndarray:
    try:
        numbers = np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError):
        numbers = np.asarray(np.nan)
    if not np.isfinite(numbers).all():
        raise ValueError(f"{where} must be lists of finite numbers, got {values!r}; correct dataset_statistics.json")
    return numbers


def _scaled(value: Array, low: np.ndarray, high: np.ndarray, mask: np.ndarray, eps: float) -> Array:
    span = high - low + eps
    span = np.where(span == 0.0, 1.0, span)
    low, span, mask = (_like(x, value) for x in (low, span, mask))
    return _where(mask, (2.0 * (value - low) / span - 1.0).clip(-1.0, 1.0), value)


def _like(constant: np.ndarray, value: Array) -> Array:
    return torch.as_tensor(constant, device=value.device) if isinstance(value, torch.Tensor) else constant


def _where(mask: Array, yes: Array, no: Array) -> Array:
    return torch.where(mask, yes, no) if isinstance(yes, torch.Tensor) else np.where(mask, yes, no)
