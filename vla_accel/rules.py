"""Rules that the value of an option must keep, and the one sentence about a value that does not.

Not here: the options (`config.py`). Standard library only.
Usage: `check(0 < x, "ppo.clip_low", "must be above 0", x)`; the others take the group's dotted prefix, its config and
the names of some of its fields. All of them raise `ValueError`.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Sequence


def check(ok: bool, option: str, rule: str, value: object, remedy: str = "") -> None:
    """Raise a `ValueError` that names the option, the rule, the value given and, where there is one, the remedy."""
    if not ok:
        raise ValueError(f"--{option} {rule}, but is {value!r}." + (f" {remedy}" if remedy else ""))


def check_choice(option: str, value: str, choices: Sequence[str]) -> None:
    """One of a few names."""
    check(value in choices, option, f"must be one of {', '.join(choices)}", value, did_you_mean(value, choices))


def check_numbers(group: str, config: object, *names: str, above: float | None = None) -> None:
    """Finite numbers of at least 0, or above `above`."""
    for name in names:
        value = getattr(config, name)
        rule = "must be a number of at least 0" if above is None else f"must be a number above {above:g}"
        number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
        check(number and (value >= 0 if above is None else value > above), _dotted(group, name), rule, value)


def check_shares(group: str, config: object, *names: str) -> None:
    """Numbers from 0 to 1."""
    for name in names:
        value = getattr(config, name)
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        check(number and 0 <= value <= 1, _dotted(group, name), "must be a number from 0 to 1", value)


def check_counts(group: str, config: object, *names: str, least: int) -> None:
    """Whole numbers of at least `least`."""
    for name in names:
        value = getattr(config, name)
        rule = f"must be a whole number of at least {least}"
        check(_is_whole(value) and value >= least, _dotted(group, name), rule, value)


def check_seed(group: str, seed: int) -> None:
    """A whole number that every generator takes."""
    rule = "must be a whole number from 0 to 2147483647"
    check(_is_whole(seed) and 0 <= seed < 2**31, _dotted(group, "seed"), rule, seed)


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """The question "Did you mean ...?" for a name that is nearly a known one, else nothing."""
    near = difflib.get_close_matches(str(name), list(known), n=1)
    return f"Did you mean {near[0]}?" if near else ""


def nearest_divisor(number: int, wanted: int) -> int:
    """The divisor of `number` that is nearest to `wanted`."""
    return min((d for d in range(1, number + 1) if number % d == 0), key=lambda d: abs(d - wanted))


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _dotted(group: str, name: str) -> str:
    return f"{group}.{name}" if group else name
