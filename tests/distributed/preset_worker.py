"""Start from a preset, train two steps, roll out unevenly, and report what really ran, one line per rank."""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

from tests.distributed.models import TinyPolicy, batch, loss_of
from vla_accel.distributed import global_sum, make_accelerator, prepare_policy, seed_weights
from vla_accel.modes import full_params, rollout_mode, train_mode
from vla_accel.sharding import check_sharding


def main() -> None:
    accelerator = make_accelerator(timeout_s=30)
    for group in dist.distributed_c10d._world.pg_map:
        backend = group._get_backend(accelerator.device)
        assert backend.options._timeout == timedelta(seconds=30), group.group_name
    seed_weights(0)
    model, optimizer = prepare_policy(accelerator, TinyPolicy(), learning_rate=1e-2)
    units = 1
    if isinstance(model, (FSDPModule, FullyShardedDataParallel)):
        units = check_sharding(model, TinyPolicy.shard_units, expected=6)
    trace = {"tokens": torch.ones(4, 4, dtype=torch.int64)}
    for step in range(2):
        with rollout_mode(model):
            for _ in range(1 + accelerator.process_index):
                model({name: x.to(accelerator.device) for name, x in batch(step).items()})
        with train_mode(model):
            loss = loss_of(model(batch(step), trace))
            accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    (mean,) = global_sum(accelerator, loss.item() / accelerator.num_processes)
    with full_params(model):
        total = sum(p.numel() for p in model.parameters())
    report = (
        f"{type(model).__name__} {units} {accelerator.num_processes} {accelerator.mixed_precision} {mean:.6f} {total}"
    )
    Path(sys.argv[1]).mkdir(exist_ok=True)
    (Path(sys.argv[1]) / str(accelerator.process_index)).write_text(report)


if __name__ == "__main__":
    main()
