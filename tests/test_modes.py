"""What rollout mode, train mode and full parameters promise: alone here, on several ranks in `distributed/`."""

import functools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from tests.distributed.launch import launch
from tests.distributed.models import Block, TinyPolicy, batch
from tests.distributed.modes_worker import CHECKS
from vla_accel.modes import full_params, rollout_mode, train_mode

DEFAULT = ("fsdp1-full-fp32", "fsdp1-full-bf16", "fsdp2-fp32", "fsdp2-bf16", "ddp-fp32")
MATRIX = (*DEFAULT, "fsdp1-grad-fp32", "fsdp1-grad-bf16", "ddp-bf16")
SINGLE = ("fsdp1-full-fp32", "fsdp1-full-bf16", "fsdp2-fp32", "fsdp2-bf16", "plain-fp32", "plain-bf16")
ODD = (
    "fsdp1-grad-fp32", "fsdp1-grad-bf16", "ddp-bf16", "fsdp1-full-lora-fp32", "fsdp1-full-lora-bf16",
    "fsdp2-lora-fp32", "fsdp2-lora-bf16", "ddp-lora-fp32", "fsdp1-flat-fp32", "fsdp1-stock-bf16", "fsdp2-stock-bf16",
    "fsdp2-keep-fp32", "fsdp2-keep-bf16", "fsdp2-offload-fp32", "fsdp2-offload-bf16", "plain-fp32",
)  # fmt: skip
HYBRID = ("fsdp1-hybrid-fp32", "fsdp2-hybrid-fp32", "fsdp2-hybrid-bf16")


@functools.cache
def outcome(ranks, cases):
    return launch("modes_worker.py", *cases, ranks=ranks, timeout_s=200)


def claims(cases):
    return [
        (case, title)
        for case in cases
        for title, (_, wrappers) in CHECKS.items()
        if not wrappers or case.startswith(wrappers)
    ]


@pytest.mark.dist
@pytest.mark.parametrize(("case", "title"), claims(DEFAULT))
def test_on_two_ranks(case, title):
    outcome(2, DEFAULT).require(f"{case}: {title}")


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize(("case", "title"), claims(MATRIX))
def test_on_three_ranks(case, title):
    outcome(3, MATRIX).require(f"{case}: {title}")


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize(("case", "title"), claims(SINGLE))
def test_on_one_rank(case, title):
    outcome(1, SINGLE).require(f"{case}: {title}")


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize(("case", "title"), claims(ODD))
def test_with_adapters_offloading_and_other_settings(case, title):
    outcome(2, ODD).require(f"{case}: {title}")


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize(("case", "title"), claims(HYBRID))
def test_with_replicated_shards(case, title):
    outcome(4, HYBRID).require(f"{case}: {title}")


@pytest.fixture
def policy():
    torch.manual_seed(0)
    return TinyPolicy()


def test_flags_come_back_one_by_one(policy):
    policy.train()
    policy.tower.eval()
    policy.blocks[1].dropout.eval()
    before = {name: module.training for name, module in policy.named_modules()}
    with rollout_mode(policy):
        assert not any(module.training for module in policy.modules())
    assert {name: module.training for name, module in policy.named_modules()} == before
    with train_mode(policy):
        pass
    assert {name: module.training for name, module in policy.named_modules()} == before


def test_rollouts_leave_the_global_random_state_and_have_their_own(policy):
    torch.manual_seed(5)
    expected = torch.rand(4)
    torch.manual_seed(5)
    draws = []
    for _ in range(2):
        with rollout_mode(policy):
            draws.append(torch.rand(4))
    torch.testing.assert_close(torch.rand(4), expected, rtol=0, atol=0)
    assert not torch.equal(*draws)


def test_nested_rollout_mode_changes_nothing(policy):
    with rollout_mode(policy):
        with rollout_mode(policy):
            pass
        assert not policy.training
        assert not torch.is_grad_enabled()
        policy(batch(0))


def test_writing_to_unsharded_parameters_in_a_rollout_is_an_error(policy):
    with pytest.raises(RuntimeError, match=r"written.*head\.bias"), rollout_mode(policy):
        policy.head.bias.add_(1.0)


def test_writing_past_autograd_is_an_error_too(policy):
    for value in (policy.head.bias + 1.0, policy.head.bias * (1.0 + 1e-6)):
        with pytest.raises(RuntimeError, match=r"written.*head\.bias"), rollout_mode(policy):
            policy.head.bias.data.copy_(value)


def test_buffers_come_back_also_after_an_exception(policy):
    scale = policy.blocks[0].scale
    before = scale.clone()

    def write_and_fail(replace):
        with rollout_mode(policy):
            if replace:
                policy.blocks[0].scale = before + 1.0
            else:
                scale.mul_(2.0)
            raise KeyError

    for replace in (False, True):
        with pytest.raises(KeyError):
            write_and_fail(replace)
        assert policy.blocks[0].scale is scale
        assert torch.equal(scale, before)


def test_an_exception_inside_is_not_hidden_by_the_check_for_writes(policy):
    def write_and_fail():
        policy.head.bias.add_(1.0)
        raise KeyError("cause")

    with pytest.raises(KeyError, match="cause"), rollout_mode(policy):
        write_and_fail()


def test_train_mode_inside_a_rollout_is_refused(policy):
    with (
        rollout_mode(policy),
        pytest.raises(RuntimeError, match="train_mode was entered inside rollout_mode"),
        train_mode(policy),
    ):
        pass


def test_train_mode_recomputes_layers_that_checkpoint_and_no_others(policy):
    trace = {"tokens": torch.ones(4, 4, dtype=torch.int64)}
    policy.blocks[1].gradient_checkpointing = True
    with train_mode(policy):
        policy(batch(0), trace).log_prob.sum().backward()
    assert [block.recomputed for block in policy.blocks] == [1, 2, 1, 1]
    with rollout_mode(policy):
        policy(batch(0), trace)
        assert not policy.blocks[1].gradient_checkpointing
    assert policy.blocks[1].gradient_checkpointing


def test_full_parameters_of_a_plain_model_are_its_own(policy):
    with full_params(policy):
        assert next(policy.parameters()) is policy.tower[0].norm.weight


@pytest.mark.parametrize(("wrapper", "instead"), [("DeepSpeedEngine", "fsdp2.yaml"), ("ZeRO", "fsdp2_offload.yaml")])
def test_deepspeed_is_refused_by_name(policy, wrapper, instead):
    if wrapper == "ZeRO":
        policy.head.weight.ds_id = 0
    else:
        policy = type("DeepSpeedEngine", (nn.Module,), {})()
    for mode in (rollout_mode, full_params):
        with pytest.raises(ValueError, match=rf"DeepSpeed.*{instead}"), mode(policy):
            pass


@pytest.fixture
def mesh():
    """A mesh of this process alone, to shard over and to split layers over."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1, 1), mesh_dim_names=("data", "tensor"))
    dist.destroy_process_group()


@pytest.mark.parametrize("sharded", [False, True])
def test_tensor_parallelism_is_refused_by_name(policy, mesh, sharded):
    parallelize_module(policy, mesh["tensor"], {"head": ColwiseParallel()})
    if sharded:
        fully_shard(policy, mesh=mesh["data"])
    for mode in (rollout_mode, full_params):
        with pytest.raises(ValueError, match=r"Tensor parallelism is not supported.*fsdp2\.yaml"), mode(policy):
            pass


def test_the_test_policy_would_show_dropout():
    """The checks on dropout mean something only if train mode differs from eval mode."""
    torch.manual_seed(0)
    block, x = Block(32).train(), torch.randn(2, 3, 32)
    assert not torch.equal(block(x), block(x))
