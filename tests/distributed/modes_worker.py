"""Check what `modes.py` promises, for each wrapper named on the command line: `fsdp1-full-fp32`, `fsdp2-bf16`, ..."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import (
    FSDPModule,
    FullyShardedDataParallel,
)
from torch.distributed.tensor import DTensor

from tests.distributed.launch import Checks
from tests.distributed.models import Block, batch, loss_of, raises
from tests.distributed.modes_cases import Case, CollectiveCounter, held_bytes
from vla_accel.distributed import gather_objects, global_sum, policy_of
from vla_accel.modes import full_params, rollout_mode, train_mode
from vla_accel.roll_call import meet
from vla_accel.sharding import check_sharding

STEPS = (4, 9, 6, 5)
"""Forwards per rank in a rollout: as uneven as episodes are."""


def assert_same(left, right) -> None:
    """Equal to the last bit."""
    for name in ("log_prob", "entropy", "value"):
        torch.testing.assert_close(getattr(left, name), getattr(right, name), rtol=0, atol=0)


def check_units(case: Case) -> None:
    names = ("Block", "TowerBlock")
    # Accelerate's FSDP2 makes the final norm a unit too.
    by_accelerate = isinstance(case.model, FSDPModule) and not case.stock
    assert check_sharding(case.model, names, expected=6) == (8 if by_accelerate else 7)
    strategy = getattr(case.model, "sharding_strategy", None)
    assert strategy is None or (strategy.name == "SHARD_GRAD_OP") == ("grad" in case.name)
    if "hybrid" in case.name and isinstance(case.model, FSDPModule):
        assert {str(p.placements) for p in case.model.parameters()} == {"(Replicate(), Shard(dim=0))"}
    with raises(RuntimeError, "5 layers", "Block"):
        check_sharding(case.model, names, expected=5)


def check_no_collective(case: Case) -> None:
    counter, mode = CollectiveCounter(), rollout_mode(case.model)
    mode.__enter__()
    with counter:
        for step in range(STEPS[case.rank]):
            case.model(batch(step))
            case.score(step)
        mode.__exit__(None, None, None)  # leaving has none either
    assert counter.names == [], counter.names
    control = CollectiveCounter()
    with control:
        case.sharded_score()
    assert bool(control.names) == (not case.name.startswith("plain") and case.size > 1), control.names


def check_same_forward(case: Case) -> None:
    outside = case.sharded_score()
    with rollout_mode(case.model):
        inside = [case.score() for _ in range(3)]
        sample = case.model(batch(1))
        again = case.model(batch(1), sample.trace)
    for score in inside:
        assert_same(score, outside)
    case.reference.eval()
    if not case.bf16:
        with torch.no_grad():
            assert_same(case.reference(batch(1), case.trace), outside)
    gap = (again.log_prob - sample.log_prob).abs().max().item()
    assert gap < (1e-2 if case.bf16 else 1e-5), gap
    assert sample.log_prob.dtype == outside.log_prob.dtype
    assert (outside.log_prob.dtype == torch.bfloat16) == (case.stock and isinstance(case.model, FSDPModule))
    if case.stock:
        return
    assert outside.value.dtype == torch.float32
    assert set(policy_of(case.model).seen) == {torch.float32}, "inputs were cast on their way to the policy"


def check_memory(case: Case) -> None:
    parameters = list(case.reference.parameters())
    copy_bytes = sum(p.numel() for p in parameters) * (2 if case.bf16 else 4)
    case.sharded_score()
    case.model.eval()
    with rollout_mode(case.model):
        case.score()
    before = held_bytes()
    with rollout_mode(case.model):
        entered = held_bytes() - before
        case.score()
        used = held_bytes() - before
    after = held_bytes() - before
    sharded = case.fsdp and case.size > 1
    # Padding of shards to a multiple of the ranks, and the random state kept in the context.
    slack = 16 * 8 * len(parameters) + 16_000
    if sharded:
        # The padding is this model's; the benchmark measures the share on a larger one.
        assert copy_bytes * 0.9 <= entered <= copy_bytes + slack, (entered, copy_bytes)
        assert copy_bytes * 0.9 <= used <= copy_bytes + slack, (used, copy_bytes)
    elif not case.fsdp:
        assert used <= slack, used
    assert after <= 8_000, after
    assert_resharded(case)


def assert_resharded(case: Case) -> None:
    if case.size == 1 or not case.fsdp:
        return
    total = sum(p.numel() for p in case.reference.parameters())
    own = sum((p.to_local() if isinstance(p, DTensor) else p).numel() for p in case.model.parameters())
    assert own < 0.75 * total, (own, total)


def check_restores(case: Case) -> None:
    model, policy = case.model, policy_of(case.model)
    model.train()
    policy.tower.eval()
    blocks = [module for module in model.modules() if isinstance(module, Block)]
    assert len(blocks) == 4
    for block in blocks:
        block.gradient_checkpointing = True
    before = {module: module.training for module in model.modules()}
    random = torch.get_rng_state()

    def check() -> None:
        assert {module: module.training for module in model.modules()} == before
        assert all(block.gradient_checkpointing for block in blocks)
        assert torch.equal(torch.get_rng_state(), random)
        assert torch.is_grad_enabled()
        assert_resharded(case)

    def interrupt(*_) -> None:
        raise KeyboardInterrupt

    draws = []
    for failure in (None, ValueError("in the loop"), KeyboardInterrupt()):
        with contextlib.suppress(ValueError, KeyboardInterrupt), rollout_mode(model):
            assert not any(module.training for module in model.modules())
            assert not any(block.gradient_checkpointing for block in blocks)
            assert not torch.is_grad_enabled()
            draws.append(torch.rand(1).item())
            case.score()
            with rollout_mode(model):
                case.score()
            assert not any(module.training for module in model.modules())
            if isinstance(failure, KeyboardInterrupt):
                # In the middle of a layer; then once more after the script went on regardless.
                handle = blocks[2].mix.register_forward_pre_hook(interrupt)
                with contextlib.suppress(KeyboardInterrupt):
                    case.score()
                handle.remove()
                case.score()
                handle = blocks[2].mix.register_forward_pre_hook(interrupt)
                try:
                    case.score()
                finally:
                    handle.remove()
            if failure:
                raise failure
        check()
    assert len(set(draws)) == 3, "every rollout drew the same numbers"
    torch.manual_seed(7)  # as weights are seeded, alike on all ranks
    with rollout_mode(nn.Linear(1, 1)):
        drawn = gather_objects(case.accelerator, torch.rand(1).item())
    assert len(set(drawn)) == case.size, "every rank drew the same numbers"
    for block in blocks:
        block.gradient_checkpointing = False
    case.sharded_score()


def check_trains_on(case: Case) -> None:
    for round_ in range(3):
        if round_:
            with rollout_mode(case.model):
                old = case.score()
                for step in range(STEPS[case.rank]):
                    case.model(batch(step))
        case.backward()
        if round_ == 1:
            with rollout_mode(case.model):  # between backward and step: gradients must survive
                case.score()
        case.step()
        if round_:
            with rollout_mode(case.model):
                new = case.score()
            assert not torch.equal(old.log_prob, new.log_prob), "the rollout saw old weights"
            assert_same(new, case.sharded_score())
    if not case.bf16:
        reference = {name: p.detach() for name, p in case.reference.named_parameters()}
        found = case.weights()
        assert found.keys() == reference.keys(), found.keys() ^ reference.keys()
        for name, value in reference.items():
            torch.testing.assert_close(found[name], value, msg=lambda text, name=name: f"{name}: {text}")


def check_writes_stay_inside(case: Case) -> None:
    before = case.weights()
    alone = case.size == 1 and isinstance(case.model, FullyShardedDataParallel)
    unsharded = not case.fsdp or (alone and not case.bf16)
    if unsharded:
        parameter = next(case.model.parameters())
        for tensor in (parameter, parameter.data):  # the second past autograd
            with raises(RuntimeError, "written"), rollout_mode(case.model):
                tensor.add_(1.0)
            with torch.no_grad():
                parameter.sub_(1.0)
    else:
        with rollout_mode(case.model):
            for _ in range(2):  # as gathered, and after a forward
                assert sum(p.numel() for p in case.model.parameters()) == sum(p.numel() for p in before.values())
                for parameter in case.model.parameters():
                    parameter.add_(1.0)
                    parameter.data.add_(1.0)
                case.score()
    buffers = {name: (buffer, buffer.clone()) for name, buffer in case.model.named_buffers()}
    blocks = [module for module in case.model.modules() if isinstance(module, Block)]
    with rollout_mode(case.model):
        for buffer, _ in buffers.values():
            buffer.data.add_(1)
        blocks[0].scale = blocks[0].scale + 1.0
    assert dict(case.model.named_buffers()).keys() == buffers.keys()
    for name, buffer in case.model.named_buffers():
        assert buffer is buffers[name][0], name
        assert torch.equal(buffer, buffers[name][1]), name
    for name, value in case.weights().items():
        torch.testing.assert_close(value, before[name], msg=lambda text, name=name: f"{name}: {text}")
    assert_same(case.sharded_score(), case.sharded_score())


def check_one_rank_alone(case: Case) -> None:
    if case.size == 1:
        return
    if case.rank == 0:
        started = time.monotonic()
        with raises(RuntimeError, "enter rollout_mode", "[1"), rollout_mode(case.model, timeout_s=0.3):
            pass
        assert time.monotonic() - started < 5
    dist.barrier()
    with rollout_mode(case.model):  # it may try again
        case.score()
    with raises(RuntimeError, "leave early", "enter rollout_mode"):
        meet("leave early" if case.rank else "enter rollout_mode", timeout_s=5)
    case.sharded_score()


def check_waits_for_rollouts(case: Case) -> None:
    """A rank that is through with its rollout waits for those that are not, however impatient it is."""
    with rollout_mode(case.model):
        time.sleep(1.5 * case.rank)
    with rollout_mode(case.model, timeout_s=0.5):
        case.score()


def check_train_mode(case: Case) -> None:
    model = case.model
    blocks = [module for module in model.modules() if isinstance(module, Block)]
    with rollout_mode(model), raises(RuntimeError, "train_mode", "rollout_mode"), train_mode(model):
        pass
    with train_mode(model):
        assert_same(case.score(), case.score())
        assert not any(m.training for m in model.modules() if isinstance(m, nn.Dropout))
        plain = loss_of(model(batch(5), case.trace))
        case.accelerator.backward(plain)
        case.optimizer.zero_grad()
    for block in blocks:
        block.gradient_checkpointing, block.recomputed = True, 0
    with train_mode(model):
        checkpointed = loss_of(model(batch(5), case.trace))
        case.accelerator.backward(checkpointed)
        case.optimizer.zero_grad()
    assert [block.recomputed for block in blocks] == [2] * 4, "checkpointing did not recompute"
    torch.testing.assert_close(checkpointed, plain, rtol=0, atol=0)
    for block in blocks:
        block.gradient_checkpointing = False


def check_full_params(case: Case) -> None:
    found = case.weights()
    shapes = {name: parameter.shape for name, parameter in case.reference.named_parameters()}
    assert {name: value.shape for name, value in found.items()} == shapes, found.keys() ^ shapes.keys()
    assert {value.dtype for value in found.values()} == {torch.float32}
    if case.fsdp:
        with rollout_mode(case.model), raises(RuntimeError, "full_params", "rollout_mode"), full_params(case.model):
            pass
        assert_resharded(case)
    with full_params(case.model):
        for parameter in case.model.parameters():
            parameter.detach().add_(0.0)
    case.sharded_score()


def check_autograd(case: Case) -> None:
    with rollout_mode(case.model):
        sample = case.model(batch(case.rank))
    with train_mode(case.model):
        score = case.model(batch(case.rank), sample.trace)
        loss = ((score.log_prob - sample.log_prob).exp() * sample.value[:, None]).mean() + loss_of(score)
        case.accelerator.backward(loss)
    grads = [p.grad for p in case.model.parameters() if p.grad is not None and p.grad.numel()]
    # FSDP1 may lay all trainable parameters of a rank's units into other ranks' shards.
    assert global_sum(case.accelerator, len(grads))[0] > 0
    assert all((grad.to_local() if isinstance(grad, DTensor) else grad).isfinite().all() for grad in grads)
    case.optimizer.zero_grad()


def check_hooks(case: Case) -> None:
    """A user's hooks run in a rollout as outside, and stay where they were."""
    layer = [m for m in case.model.modules() if isinstance(m, Block)][1]
    calls = []
    handles = [
        layer.register_forward_pre_hook(lambda *_: calls.append("before")),
        layer.register_forward_hook(lambda *_: calls.append("after")),
    ]
    places = [list(layer._forward_pre_hooks), list(layer._forward_hooks)]
    case.sharded_score()
    with rollout_mode(case.model):
        case.score()
        inside = layer.register_forward_hook(lambda *_: calls.append("late"))
        case.score()
    assert calls == ["before", "after"] * 3 + ["late"]
    inside.remove()
    assert [list(layer._forward_pre_hooks), list(layer._forward_hooks)] == places
    for handle in handles:
        handle.remove()


def check_refusals(case: Case) -> None:
    inner = next(m for m in case.model.modules() if isinstance(m, nn.ModuleList))
    with raises(ValueError, "accelerator.prepare"), rollout_mode(inner):
        pass


CHECKS = {
    "is sharded in units": (check_units, ("fsdp",)),
    "first rollout is uneven and has no collective": (check_no_collective, ()),
    "forwards inside equal sharded ones": (check_same_forward, ()),
    "holds one copy in compute dtype and gives it back": (check_memory, ()),
    "restores flags, checkpointing and randomness": (check_restores, ()),
    "trains on like one process, with fresh weights": (check_trains_on, ()),
    "writes inside stay inside": (check_writes_stay_inside, ()),
    "one rank alone is an error": (check_one_rank_alone, ("fsdp", "ddp")),
    "ranks still in a rollout are waited for": (check_waits_for_rollouts, ("fsdp2-fp32", "ddp")),
    "train mode has no dropout but checkpoints": (check_train_mode, ()),
    "full parameters are whole and raw": (check_full_params, ()),
    "rollout tensors enter autograd": (check_autograd, ()),
    "hooks of others run and stay": (check_hooks, ()),
    "inner module is refused": (check_refusals, ("fsdp",)),
}


def main() -> None:
    checks = Checks()
    spent: dict[str, float] = {}
    gc.freeze()  # what the imports made is none of `held_bytes`' business
    for name in sys.argv[1:]:
        case = None
        with checks(f"{name}: builds"):
            case = Case(name)
        for title, (check, only) in CHECKS.items():
            if case and (not only or name.startswith(only)):
                started = time.monotonic()
                with checks(f"{name}: {title}"):
                    check(case)
                spent[title] = spent.get(title, 0.0) + time.monotonic() - started
    print({title: round(seconds, 1) for title, seconds in spent.items()})  # noqa: T201
    with contextlib.suppress(RuntimeError):
        dist.barrier()  # rank 0 keeps the store that the others may still read
    os._exit(0)  # no teardown: what it would wait for is not under test


if __name__ == "__main__":
    main()
