"""The wrappers that `modes_worker.py` checks, each with the plain model it must equal, and what is counted on them."""

from __future__ import annotations

import contextlib
import copy
import gc
import os
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

from tests.distributed.models import Block, TinyPolicy, TowerBlock, batch, loss_of
from vla_accel.distributed import make_accelerator, policy_of, prepare_policy, seed_weights
from vla_accel.modes import full_params, train_mode


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
                "FSDP_RESHARD_AFTER_FORWARD": str(rest[0] != "keep"),
                "FSDP_SHARDING_STRATEGY": "SHARD_GRAD_OP" if rest[0] == "grad" else "FULL_SHARD",
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
