"""Check what `modes.py` promises, for each wrapper named on the command line: `fsdp1-full-fp32`, `fsdp2-bf16`, ..."""

from __future__ import annotations

import contextlib
import copy
import gc
import os
import sys
import time
from functools import partial

import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState, GradientState, PartialState
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FSDPModule,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.distributed.launch import Checks
from tests.distributed.models import Block, TinyPolicy, TowerBlock, batch, loss_of, raises
from vla_accel.distributed import global_sum, make_accelerator, policy_of, prepare_policy, seed_weights
from vla_accel.modes import full_params, rollout_mode, train_mode
from vla_accel.roll_call import meet
from vla_accel.sharding import check_sharding

STEPS = (4, 9, 6, 5)
"""Forwards per rank in a rollout: as uneven as episodes are."""


class CollectiveCounter(TorchDispatchMode):
    """Counts what reaches a process group, whoever calls it: both generations of FSDP end in `c10d` operators."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "c10d" in func.namespace:
            self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


def held_bytes() -> int:
    """Bytes of all tensor storages alive in this process."""
    gc.collect()
    seen = {}
    for thing in gc.get_objects():
        if issubclass(type(thing), torch.Tensor) and not isinstance(thing, DTensor):
            with contextlib.suppress(Exception):
                storage = thing.untyped_storage()
                seen[storage.data_ptr()] = storage.nbytes()
    return sum(seen.values())


class Case:
    """One wrapper: an accelerator made anew, a prepared model, and the plain model it must equal."""

    def __init__(self, name: str):
        self.name = name
        kind, *rest = name.split("-")
        self.bf16, self.fsdp = rest[-1] == "bf16", kind.startswith("fsdp")
        for state in (AcceleratorState, GradientState, PartialState):
            state._shared_state.clear()
        for key in [key for key in os.environ if key.startswith(("FSDP_", "ACCELERATE_", "PARALLELISM_"))]:
            del os.environ[key]
        if self.fsdp:
            os.environ |= {
                "ACCELERATE_USE_FSDP": "true",
                "FSDP_VERSION": kind[4],
                "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
                "FSDP_USE_ORIG_PARAMS": "true",
                "FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT",
                "FSDP_OFFLOAD_PARAMS": str("offload" in rest),
                "FSDP_RESHARD_AFTER_FORWARD": {"full": "FULL_SHARD", "grad": "SHARD_GRAD_OP", "keep": "false"}.get(
                    rest[0], "true"
                ),
            }
        if rest[0] == "hybrid" and kind == "fsdp2":
            os.environ |= {
                "ACCELERATE_USE_PARALLELISM_CONFIG": "true",
                "PARALLELISM_CONFIG_DP_REPLICATE_SIZE": "2",
                "PARALLELISM_CONFIG_DP_SHARD_SIZE": "2",
            }
        self.accelerator = make_accelerator(mixed_precision="bf16" if self.bf16 else "no", timeout_s=20)
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        seed_weights(0)
        policy = TinyPolicy(adapters="lora" in rest)
        self.reference = copy.deepcopy(policy)
        groups = {"lr": 0.05, "momentum": 0.9}
        self.reference_optimizer = torch.optim.SGD(
            [p for p in self.reference.parameters() if p.requires_grad], **groups
        )
        self.stock = rest[0] == "stock"
        if kind == "plain" or self.stock or (rest[0] in ("flat", "hybrid") and kind == "fsdp1"):
            by_hand = {"plain": lambda policy, _: policy, "fsdp1": fsdp1_by_hand, "fsdp2": fsdp2_by_hand}[kind]
            self.model = by_hand(policy, rest[0])
            self.optimizer = torch.optim.SGD([p for p in self.model.parameters() if p.requires_grad], **groups)
        else:
            self.model, self.optimizer = prepare_policy(
                self.accelerator, policy, learning_rate=0.05, make_optimizer=partial(torch.optim.SGD, momentum=0.9)
            )
        policy_of(self.model).tower.eval()
        self.trace = {"tokens": torch.arange(16).reshape(4, 4)}
        self.rounds = 0

    def score(self, seed: int = 1):
        """A scoring forward without gradients."""
        with torch.no_grad():
            return self.model(batch(seed), self.trace)

    def sharded_score(self, seed: int = 1):
        with train_mode(self.model):
            return self.score(seed)

    def backward(self) -> None:
        with train_mode(self.model):
            loss = loss_of(self.model(batch(100 * self.rounds + self.rank), self.trace))
            self.accelerator.backward(loss)

    def step(self) -> None:
        clip = getattr(
            self.model, "clip_grad_norm_", partial(self.accelerator.clip_grad_norm_, self.model.parameters())
        )
        clip(1.0)
        if self.rounds == 1:
            self.sharded_score()  # leaves the root gathered, from before the step
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.reference.eval()
        alone = self.model is policy_of(self.model) and not isinstance(self.model, FSDPModule)
        ranks = [self.rank] if alone else range(self.size)
        for rank in ranks:
            (loss_of(self.reference(batch(100 * self.rounds + rank), self.trace)) / len(ranks)).backward()
        torch.nn.utils.clip_grad_norm_(self.reference.parameters(), 1.0)
        self.reference_optimizer.step()
        self.reference_optimizer.zero_grad()
        self.rounds += 1

    def weights(self) -> dict[str, torch.Tensor]:
        with full_params(self.model):
            return {
                name.replace("_fsdp_wrapped_module.", "").removeprefix("module."): parameter.detach().clone()
                for name, parameter in self.model.named_parameters()
            }


def fsdp1_by_hand(policy: nn.Module, how: str) -> nn.Module:
    """Flattened parameters, replicas of shards, and casts as FSDP1 does them when nobody asks for less."""
    options = {"use_orig_params": how != "flat"}
    if how == "hybrid":
        options |= {"device_mesh": init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))}
        options |= {"sharding_strategy": ShardingStrategy.HYBRID_SHARD}
    if how == "stock":
        options |= {"mixed_precision": MixedPrecision(param_dtype=torch.bfloat16)}
    wrap = partial(transformer_auto_wrap_policy, transformer_layer_cls={Block, TowerBlock})
    return FullyShardedDataParallel(policy, auto_wrap_policy=wrap, device_id=torch.device("cpu"), **options)


def fsdp2_by_hand(policy: nn.Module, _: str) -> nn.Module:
    """Casts of inputs and outputs as FSDP2 does them when asked for all."""
    cast = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.bfloat16)
    for module in policy.modules():
        if isinstance(module, (Block, TowerBlock)):
            fully_shard(module, mp_policy=cast)
    return fully_shard(policy, mp_policy=cast)


def assert_same(left, right) -> None:
    """Equal to the last bit."""
    for name in ("log_prob", "entropy", "value"):
        torch.testing.assert_close(getattr(left, name), getattr(right, name), rtol=0, atol=0)


def check_units(case: Case) -> None:
    names = ("Block", "TowerBlock")
    # Accelerate's FSDP2 makes the final norm a unit too.
    by_accelerate = isinstance(case.model, FSDPModule) and not case.stock
    assert check_sharding(case.model, names, expected=6) == (8 if by_accelerate else 7)
    if "hybrid" in case.name and isinstance(case.model, FSDPModule):
        assert {str(p.placements) for p in case.model.parameters()} == {"(Replicate(), Shard(dim=0))"}
    with raises(RuntimeError, "5 layers", "Block"):
        check_sharding(case.model, names, expected=5)


def check_no_collective(case: Case) -> None:
    counter = CollectiveCounter()
    with rollout_mode(case.model), counter:
        for step in range(STEPS[case.rank]):
            case.model(batch(step))
            case.score(step)
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
        with raises(RuntimeError, "written"), rollout_mode(case.model):
            parameter.add_(1.0)
        with torch.no_grad():
            parameter.sub_(1.0)
    else:
        with rollout_mode(case.model):
            for _ in range(2):  # as gathered, and after a forward
                assert sum(p.numel() for p in case.model.parameters()) == sum(p.numel() for p in before.values())
                for parameter in case.model.parameters():
                    parameter.add_(1.0)
                case.score()
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
    else:
        time.sleep(0.6)
        with raises(RuntimeError, "leave early", "enter rollout_mode"):
            meet("leave early", timeout_s=5)
    dist.barrier()
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
