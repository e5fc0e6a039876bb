"""The reinforcement-learning side of the models: each as a distribution over action chunks.

Not here: model code (`models/`). Usage: `policy = load_policy("openvla", PolicyConfig(), suite="tabletop")`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from vla_accel.rules import check

if TYPE_CHECKING:
    from vla_accel.config import BasePolicyConfig
    from vla_accel.policies.base import Policy, PolicySpec

POLICIES = {
    "openvla": "vla_accel.policies.openvla",
    "openvla-oft": "vla_accel.policies.openvla",
    "pi0": "vla_accel.policies.pi0",
    "pi05": "vla_accel.policies.pi0",
}
"""Model name -> module with `peek(model, config, suite)` and `load(model, config, suite)`."""


def peek_policy(model: str, config: BasePolicyConfig, *, suite: str | None = None) -> PolicySpec:
    """What a checkpoint says of itself, without loading a weight: for checks before anything slow.

    Raises:
        ValueError: for an unknown model, or a checkpoint that cannot be used, with the reason.
    """
    try:
        return _module(model).peek(model, config, suite)
    except ValueError as error:  # the model's side knows folders, not options
        if str(error).startswith("--"):
            raise
        raise ValueError(f"--policy.path does not name a checkpoint that can be used: {error}") from error


def load_policy(model: str, config: BasePolicyConfig, *, suite: str | None = None) -> Policy:
    """Load a checkpoint as a policy, on the CPU.

    Args:
        model: a name in `POLICIES`.
        config: which checkpoint, and how it samples.
        suite: name of the environment, for choosing action statistics.

    Raises:
        ValueError: for an unknown model, or a checkpoint that cannot be used, with the reason.
    """
    return _module(model).load(model, config, suite)


def _module(model: str):  # noqa: ANN202 - a module
    check(model in POLICIES, "model", f"must be one of {', '.join(POLICIES)}", model)
    return importlib.import_module(POLICIES[model])
