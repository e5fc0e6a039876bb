"""What rollout mode costs and saves: seconds, collectives and bytes, for each way to shard.

Beside a forward inside `rollout_mode` stand (a) the sharded forward, (b) the forward inside what a wrapper offers by
itself (FSDP1: `summon_full_params`; FSDP2: `unshard` of all units), and (c) the forward of an unsharded copy in
compute dtype. The four take turns, and each figure is the median, so that other load on the machine hits all of them.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import gc
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from vla_accel.distributed import make_accelerator, prepare_policy, seed_weights
from vla_accel.modes import rollout_mode, train_mode

BF16 = {"BENCHMARK_BF16": "1"}
FULL, GRAD = ({"FSDP_VERSION": "1", "FSDP_SHARDING_STRATEGY": name} for name in ("FULL_SHARD", "SHARD_GRAD_OP"))
SECOND = {"FSDP_VERSION": "2", "FSDP_RESHARD_AFTER_FORWARD": "true"}
CASES = {
    "FSDP1 FULL_SHARD, float32": FULL,
    "FSDP1 FULL_SHARD, bf16": FULL | BF16,
    "FSDP1 SHARD_GRAD_OP, bf16": GRAD | BF16,
    "FSDP2, float32": SECOND,
    "FSDP2, bf16": SECOND | BF16,
}
COLUMNS = ("enter s", "leave s", "forward s", "x (c)", "x (b)", "(a) s", "(b) s", "(c) s", "collectives", "x copy")


class Layer(nn.Module):
    """A transformer layer."""

    def __init__(self, width: int):
        super().__init__()
        self.heads = width // 60
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map `[B, L, width]` to the same."""
        rows, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(rows, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        x = x + self.out(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


class Stack(nn.Module):
    """Layers between an embedding and a head."""

    shard_units = ("Layer",)

    def __init__(self, layers: int, width: int):
        super().__init__()
        self.embed, self.head = nn.Embedding(1024, width), nn.Linear(width, 8)
        self.layers = nn.ModuleList(Layer(width) for _ in range(layers))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Map token ids `[B, L]` to `[B, L, 8]`."""
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Collectives(TorchDispatchMode):
    """Counts what reaches a process group."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator and count it if it communicates."""
        self.count += "c10d" in func.namespace
        return func(*args, **(kwargs or {}))


def held_bytes() -> int:
    """Bytes of all tensor storages alive in this process."""
    gc.collect()
    tensors = [x for x in gc.get_objects() if issubclass(type(x), torch.Tensor) and not isinstance(x, DTensor)]
    storages = {}
    for tensor in tensors:
        with contextlib.suppress(Exception):  # some have no storage
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    return sum(storages.values())


@contextlib.contextmanager
def offered(model: nn.Module) -> Iterator[None]:
    """What the wrapper itself offers to see whole parameters."""
    model.eval()
    with torch.no_grad():
        if isinstance(model, FullyShardedDataParallel):
            with FullyShardedDataParallel.summon_full_params(model, writeback=False):
                yield
        else:
            units = [unit for unit in model.modules() if isinstance(unit, FSDPModule)]
            for unit in units:
                unit.unshard()
            yield
            for unit in units:
                unit.reshard()


def measure(layers: int, width: int, forwards: int, rounds: int) -> dict[str, float]:
    """Measure one case on this rank; the environment says which."""
    torch.set_num_threads(1)
    gc.freeze()  # `held_bytes` need not look at what the imports made
    precision = "bf16" if os.environ.get("BENCHMARK_BF16") else "no"
    accelerator = make_accelerator(mixed_precision=precision, timeout_s=300)
    seed_weights(0)
    policy = Stack(layers, width)
    whole = copy.deepcopy(policy).eval()
    if precision == "bf16":
        whole = whole.bfloat16()
        whole.forward = torch.autocast(accelerator.device.type, dtype=torch.bfloat16)(whole.forward)
    copy_bytes = sum(p.numel() * p.element_size() for p in whole.parameters())
    model, _ = prepare_policy(accelerator, policy, learning_rate=1e-3)
    ids = torch.arange(16, device=accelerator.device).reshape(2, 8)
    seconds: dict[str, list[float]] = {name: [] for name in ("enter", "leave", "inside", "a", "b", "c")}

    def run(**modules: nn.Module) -> None:
        for number in range(forwards + 1):
            for name, module in modules.items():
                started = time.perf_counter()
                with torch.no_grad():
                    module(ids)
                if number:  # the first one warms up
                    seconds[name].append(time.perf_counter() - started)

    with rollout_mode(model):
        model(ids)  # allocates what stays, before anything is measured
    idle, collectives = held_bytes(), 0
    with rollout_mode(model):
        model(ids)
        held = held_bytes() - idle
    for _ in range(rounds):
        accelerator.wait_for_everyone()
        started = time.perf_counter()
        with rollout_mode(model):
            seconds["enter"].append(time.perf_counter() - started)
            with Collectives() as counter:
                model(ids)
            collectives += counter.count
            run(inside=model, c=whole)
            started = time.perf_counter()
        seconds["leave"].append(time.perf_counter() - started)
        with train_mode(model):
            run(a=model)
        with offered(model):
            run(b=model)
    found = {name: statistics.median(values) for name, values in seconds.items()}
    numel = sum(p.numel() for p in whole.parameters())
    return found | {"collectives": collectives, "held": held / copy_bytes, "million": numel / 1e6}


def start(name: str, options: argparse.Namespace) -> dict[str, float]:
    """Run one case on several ranks and return what rank 0 measured."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    shared = {
        "ACCELERATE_USE_FSDP": "true", "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
        "FSDP_USE_ORIG_PARAMS": "true",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(options.ranks),
        "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore",
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        arguments = [options.layers, options.width, options.forwards, options.rounds]
        processes = [
            subprocess.Popen(
                [sys.executable, __file__, str(Path(folder) / str(rank)), *map(str, arguments)],
                env=os.environ | shared | CASES[name] | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=subprocess.DEVNULL,
            )
            for rank in range(options.ranks)
        ]
        if any([process.wait() for process in processes]):
            raise RuntimeError(f"The benchmark of {name} failed; its ranks' messages are above.")
        return json.loads((Path(folder) / "0").read_text())


def main(argv: list[str]) -> None:
    """Run all cases and print the table."""
    parser = argparse.ArgumentParser(prog="benchmark.py modes", description=__doc__)
    parser.add_argument("--ranks", type=int, default=2, help="processes (default: 2)")
    parser.add_argument("--layers", type=int, default=16, help="transformer layers (default: 16)")
    parser.add_argument("--width", type=int, default=720, help="hidden width, a multiple of 60 (default: 720)")
    parser.add_argument("--forwards", type=int, default=6, help="timed forwards per turn (default: 6)")
    parser.add_argument("--rounds", type=int, default=8, help="turns (default: 8)")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    options = parser.parse_args(argv)
    print(f"{options.ranks} ranks, {options.layers} layers of width {options.width}, forwards of 2 x 8 tokens")
    print(f"| | M params | {' | '.join(COLUMNS)} |")
    print("|" + "---|" * (len(COLUMNS) + 2))
    missed = []
    for name in CASES:
        if options.only not in name:
            continue
        x = start(name, options)
        to_c, to_b = x["inside"] / x["c"], x["inside"] / x["b"]
        times = [f"{x[key]:.3f}" for key in ("enter", "leave", "inside")]
        others = [f"{x[key]:.3f}" for key in ("a", "b", "c")]
        cells = [*times, f"{to_c:.2f}", f"{to_b:.2f}", *others, f"{x['collectives']:.0f}", f"{x['held']:.3f}"]
        print(f"| {name} | {x['million']:.0f} | {' | '.join(cells)} |", flush=True)
        half = "forward at most half of (b)"
        if x["c"] > 0.5 * x["b"]:
            half += f" (out of reach: the unsharded copy itself takes {x['c'] / x['b']:.2f} of (b))"
        reached = {"forward at most 1.1 x (c)": to_c <= 1.1, half: to_b <= 0.5,
                   "at most 1.05 copies held": x["held"] <= 1.05, "no collective": x["collectives"] == 0}  # fmt: skip
        missed += [f"{name}: {goal}" for goal, met in reached.items() if not met]
    print("All goals reached." if not missed else "Missed: " + "; ".join(missed))


if __name__ == "__main__":
    file, *numbers = sys.argv[1:]
    result = measure(*map(int, numbers))
    Path(file).write_text(json.dumps(result))
