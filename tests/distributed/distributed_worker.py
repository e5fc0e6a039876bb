"""Check what `distributed.py` promises, for the wrapper named on the command line: `fsdp1`, `fsdp2` or `ddp`."""

from __future__ import annotations

import os
import sys
from functools import partial

import torch
from accelerate.state import AcceleratorState, GradientState, PartialState

from tests.distributed.launch import Checks
from tests.distributed.models import TinyPolicy, batch, loss_of, raises
from vla_accel.distributed import (
    broadcast_object,
    gather_objects,
    global_any,
    global_max,
    global_sum,
    make_accelerator,
    policy_of,
    prepare_policy,
    rank_seed,
    seed_weights,
)
from vla_accel.modes import full_params, train_mode


def start(wrapper: str, **env: str):
    """A new accelerator in the same processes."""
    for state in (AcceleratorState, GradientState, PartialState):
        state._shared_state.clear()
    for key in [key for key in os.environ if key.startswith(("FSDP_", "ACCELERATE_"))]:
        del os.environ[key]
    if wrapper != "ddp":
        os.environ |= {
            "ACCELERATE_USE_FSDP": "true",
            "FSDP_VERSION": wrapper[4],
            "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
            "FSDP_USE_ORIG_PARAMS": "true",
        }
    os.environ |= env
    return make_accelerator(timeout_s=20)


def whole(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    with full_params(model):
        return {
            name.replace("_fsdp_wrapped_module.", "").removeprefix("module."): parameter.detach().clone()
            for name, parameter in model.named_parameters()
        }


def sums(wrapper: str) -> None:
    accelerator = start(wrapper)
    rank, size = accelerator.process_index, accelerator.num_processes
    total = size * (size - 1) / 2
    number, vector = global_sum(accelerator, rank, torch.tensor([[1.0, rank]]))
    assert number == total
    assert isinstance(number, float)
    assert vector.dtype == torch.float64
    assert vector.tolist() == [[size, total]]
    # In float32 the ones would vanish beside 1e9.
    assert global_sum(accelerator, 1e9 if rank == 0 else 1.0)[0] == 1e9 + size - 1
    assert global_max(accelerator, -rank) == 0.0
    assert global_any(accelerator, rank == size - 1) is True
    assert global_any(accelerator, False) is False
    assert gather_objects(accelerator, {"rank": rank}) == [{"rank": r} for r in range(size)]
    assert broadcast_object(accelerator, f"from {rank}") == "from 0"
    seeds = gather_objects(accelerator, rank_seed(7, rank))
    assert len(set(seeds)) == size


def trains_what_it_should(wrapper: str) -> None:
    accelerator = start(wrapper)
    seed_weights(3)
    policy = TinyPolicy()
    frozen = {name for name, p in policy.named_parameters() if not p.requires_grad}
    assert len(frozen) == 8
    before = {name: p.detach().clone() for name, p in policy.named_parameters()}
    rates = {"policy": 1e-3, "value": 2e-3}
    model, optimizer = prepare_policy(
        accelerator, policy, learning_rate=1e-3, value_learning_rate=2e-3, weight_decay=0.01
    )
    assert policy_of(model) is policy
    groups = {(g["name"], g["lr"], g["initial_lr"], g["weight_decay"]) for g in optimizer.param_groups}
    assert groups == {(name, rate, rate, decay) for name, rate in rates.items() for decay in (0.01, 0.0)}
    assert all(p.requires_grad for group in optimizer.param_groups for p in group["params"])
    for seed in range(2):
        with train_mode(model):
            accelerator.backward(loss_of(model(batch(seed), {"tokens": torch.ones(4, 4, dtype=torch.int64)})))
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    after = whole(model)
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved == set(before) - frozen, sorted(moved ^ (set(before) - frozen))
    # Adam's first steps are about the learning rate long, so the two rates show in the weights.
    steps = {name: (after[name] - before[name]).abs().amax().item() for name in moved}
    assert max(step for name, step in steps.items() if not name.startswith("value_head")) < 2.1e-3
    assert max(step for name, step in steps.items() if name.startswith("value_head")) > 2.5e-3


def clips_the_global_norm(wrapper: str) -> None:
    accelerator = start(wrapper)
    rank, size = accelerator.process_index, accelerator.num_processes
    seed_weights(3)
    reference = TinyPolicy()
    seed_weights(3)
    model, _ = prepare_policy(accelerator, TinyPolicy(), learning_rate=1e-3)
    trace = {"tokens": torch.ones(4, 4, dtype=torch.int64)}
    reference.eval()
    for other in range(size):
        (loss_of(reference(batch(other), trace), weight=50.0) / size).backward()
    expected = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
    with train_mode(model):
        accelerator.backward(loss_of(model(batch(rank), trace), weight=50.0))
    norm = accelerator.clip_grad_norm_(model.parameters(), 0.5)
    assert expected > 1.0, "nothing to clip"
    torch.testing.assert_close(float(norm), float(expected), rtol=1e-5, atol=0.0)
    clipped = accelerator.clip_grad_norm_(model.parameters(), float("inf"))
    torch.testing.assert_close(float(clipped), 0.5, rtol=1e-4, atol=0.0)


def refuses_other_weights(wrapper: str) -> None:
    accelerator = start(wrapper)
    seed_weights(accelerator.process_index)
    with raises(RuntimeError, "[1", "seed_weights"):
        prepare_policy(accelerator, TinyPolicy(), learning_rate=1e-3)


def refuses_unknown_layers(wrapper: str) -> None:
    accelerator = start(wrapper, FSDP_TRANSFORMER_CLS_TO_WRAP="LlamaDecoderLayer")
    with raises(ValueError, "LlamaDecoderLayer", "'Block', 'TowerBlock'"):
        prepare_policy(accelerator, TinyPolicy(), learning_rate=1e-3)
    accelerator = start(wrapper)
    with raises(ValueError, "'Block', 'TowerBlock'"):
        prepare_policy(accelerator, TinyPolicy(units=()), learning_rate=1e-3)


def warns_without_wrapping(wrapper: str) -> None:
    accelerator = start(wrapper, FSDP_AUTO_WRAP_POLICY="NO_WRAP")
    seed_weights(0)
    import logging

    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    logging.getLogger("vla_accel.sharding").addHandler(handler)
    prepare_policy(accelerator, TinyPolicy(), learning_rate=1e-3)
    assert accelerator.process_index or any("TRANSFORMER_BASED_WRAP" in text for text in records), records


def mixes_dtypes(wrapper: str) -> None:
    """A frozen bf16 body under a float32 head, as adapters on a large checkpoint have it."""
    accelerator = start(wrapper, ACCELERATE_MIXED_PRECISION="bf16")
    seed_weights(0)
    policy = TinyPolicy(adapters=True)
    for parameter in policy.parameters():
        if not parameter.requires_grad:
            parameter.data = parameter.data.bfloat16()
    model, optimizer = prepare_policy(accelerator, policy, learning_rate=1e-2)
    trace = {"tokens": torch.ones(4, 4, dtype=torch.int64)}
    losses = []
    for _ in range(4):
        with train_mode(model):
            loss = loss_of(model(batch(0), trace))
            accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0], losses
    assert {p.dtype for group in optimizer.param_groups for p in group["params"]} == {torch.float32}


CHECKS = {
    "sums and decisions are shared": (sums, ("fsdp1", "fsdp2", "ddp")),
    "trainable parameters move at their own rates, frozen ones do not": (
        trains_what_it_should,
        ("fsdp1", "fsdp2", "ddp"),
    ),
    "clips the global norm": (clips_the_global_norm, ("fsdp1", "fsdp2", "ddp")),
    "ranks with other weights are refused": (refuses_other_weights, ("fsdp1", "fsdp2")),
    "unknown layer classes are refused": (refuses_unknown_layers, ("fsdp1", "fsdp2")),
    "wrapping nothing warns": (warns_without_wrapping, ("fsdp1", "fsdp2")),
    "a bf16 body takes a float32 head": (mixes_dtypes, ("fsdp1", "fsdp2", "ddp")),
}


def main() -> None:
    checks = Checks()
    for wrapper in sys.argv[1:]:
        for title, (check, wrappers) in CHECKS.items():
            if wrapper in wrappers:
                with checks(f"{wrapper}: {title}"):
                    partial(check, wrapper)()
    os._exit(0)


if __name__ == "__main__":
    main()
