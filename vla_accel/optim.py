"""Muon for a policy's hidden matrices beside AdamW for the rest: for teaching a small model from random weights.

Not here: the optimizer of PPO and of ordinary fine-tuning, which is AdamW.
Usage: `prepare_policy(..., make_optimizer=partial(MuonWithAdamW, matrices=hidden_matrices(policy), muon_lr=0.02))`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from vla_accel.rules import check


def hidden_matrices(policy: nn.Module) -> list[nn.Parameter]:
    """Trainable two-dimensional weights that are neither token embeddings, position embeddings nor the head."""
    outside = {id(module.weight) for module in policy.modules() if isinstance(module, nn.Embedding)}
    return [
        parameter
        for name, parameter in policy.named_parameters()
        if parameter.ndim == 2 and parameter.requires_grad and id(parameter) not in outside
        if not name.startswith("value_head") and "lm_head" not in name
    ]


class MuonWithAdamW(torch.optim.Optimizer):
    """Two optimizers that step together: Muon (torch's, after K. Jordan 2024) on matrices, AdamW on everything else.

    Muon makes all directions of a matrix's update equally large. So it also learns what little of a mean over a prompt
    depends on one word, where AdamW follows what all prompts have in common.

    Args:
        groups: parameter groups as for any optimizer, each with `lr` and `weight_decay`.
        matrices: the parameters that Muon updates; whole, not sharded.
        muon_lr: Muon's learning rate, the spectral size of an update.

    Raises:
        ValueError: on a torch without Muon (before 2.9).
    """

    def __init__(self, groups: list[dict[str, Any]], *, matrices: list[nn.Parameter], muon_lr: float):
        check(hasattr(torch.optim, "Muon"), "sft.muon_learning_rate", "needs torch 2.9 or newer", torch.__version__)
        chosen = {id(parameter) for parameter in matrices}
        rest = [{**group, "params": [p for p in group["params"] if id(p) not in chosen]} for group in groups]
        rest = [group for group in rest if group["params"]]
        super().__init__([{"params": [p for group in groups for p in group["params"]]}], {})
        self.parts = (
            torch.optim.AdamW(rest),
            torch.optim.Muon(matrices, lr=muon_lr, weight_decay=0.0),
        )
        self.param_groups = [group for part in self.parts for group in part.param_groups]
        for group in self.param_groups:
            group["initial_lr"] = group["lr"]

    def step(self, closure: Callable[[], Any] | None = None) -> None:
        """Step both, at the learning rates that stand in `param_groups`.

        Loading a state, which is also how accelerate prepares an optimizer, gives this one groups of its own.
        """
        if closure is not None:
            closure()
        for own, group in zip(self.param_groups, (g for part in self.parts for g in part.param_groups), strict=True):
            group["lr"] = own["lr"]
        for part in self.parts:
            part.step()
