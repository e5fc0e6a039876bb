"""Muon beside AdamW: one optimizer to those who hold it."""

import pytest
import torch

from vla_accel.optim import MuonWithAdamW

pytestmark = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="needs torch 2.9")


def test_learning_rates_reach_both_parts_also_after_loading_a_state():
    matrix, vector = torch.nn.Parameter(torch.eye(2)), torch.nn.Parameter(torch.ones(2))
    groups = [{"params": [matrix, vector], "lr": 0.1, "weight_decay": 0.0}]
    optimizer = MuonWithAdamW(groups, matrices=[matrix], muon_lr=0.2)
    optimizer.load_state_dict(optimizer.state_dict())  # accelerate does so when it prepares one
    assert [group["initial_lr"] for group in optimizer.param_groups] == [0.1, 0.2]
    for factor in (0.0, 1.0):
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"] * factor
        before = matrix.detach().clone(), vector.detach().clone()
        matrix.grad, vector.grad = torch.eye(2), torch.ones(2)
        optimizer.step()
        moved = [float((now.detach() - then).abs().max()) for now, then in zip((matrix, vector), before, strict=True)]
        assert [distance > 0.05 for distance in moved] == [factor > 0] * 2
        assert factor > 0 or moved == [0.0, 0.0]
