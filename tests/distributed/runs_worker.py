"""Check whole runs and updates of the shipped policy, for each wrapper on the command line: `fsdp1`, `fsdp2`, `ddp`."""

from __future__ import annotations

import copy
import json
import os
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

from tests.distributed.distributed_worker import start, whole
from tests.distributed.launch import Checks
from tests.distributed.models import add_adapters
from tests.helpers.decisions import observation, rollout_of
from vla_accel.batch import make_batch
from vla_accel.cli import parse_args
from vla_accel.config import PPOConfig, PPOOptions, default_policy
from vla_accel.distributed import gather_objects, prepare_policy, seed_weights
from vla_accel.modes import rollout_mode, train_mode
from vla_accel.policies import load_policy
from vla_accel.ppo import rescore, update
from vla_accel.train import train

RUN = (
    "--model=openvla", "--run.eval-episodes=0", "--run.video_episodes=0", "--run.trackers=none",
    "--rollout.num_decisions=6", "--ppo.minibatch-size=48", "--ppo.micro_batch_size=24", "--ppo.epochs=1",
    "--ppo.lr-schedule=constant", "--ppo.learning-rate=3e-5", "--ppo.value-learning-rate=1e-4", "--env.num-envs=8",
)  # fmt: skip
CURVES = ("loss/policy", "loss/value", "loss/entropy", "rollout/reward", "rollout/success", "ppo/kl")


def metrics_of(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def run(*words: str) -> list[dict[str, float]]:
    config = parse_args(PPOConfig, [*RUN, *words])
    return metrics_of(Path(train(config)["output_dir"]))


def resumes(wrapper: str, folder: Path) -> None:
    """4 iterations, and once more from the checkpoint after 2: the same numbers and weights, to the last bit."""
    weights = folder / "policy" / "model.safetensors"
    accelerator = start(wrapper)
    straight = run("--run.iterations=4", "--run.save_every=2", f"--run.output_dir={folder}")
    first = weights.read_bytes()
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        shutil.rmtree(folder / "checkpoints" / "000004")
        weights.unlink()
    accelerator.wait_for_everyone()
    start(wrapper)
    resumed = run("--run.iterations=4", "--run.save_every=2", f"--run.resume={folder}")
    assert len(resumed) == len(straight) == 4
    for left, right in zip(resumed, straight, strict=True):
        for name in CURVES:
            assert left[name] == right[name], (name, left["iteration"], left[name], right[name])
    assert weights.read_bytes() == first


class Alone:
    """What `ppo.update` needs of an accelerator, for one process among several."""

    num_processes, device = 1, torch.device("cpu")

    def backward(self, loss):
        loss.backward()

    def clip_grad_norm_(self, parameters, norm):
        return torch.nn.utils.clip_grad_norm_(parameters, norm)


def shipped():
    return load_policy("openvla", default_policy("openvla"), suite="tabletop")


def updates(
    wrapper: str, keep, *, shift=(), options=None, load=shipped, own=lambda rollout, _: rollout, num_minibatches=2
):
    """Update the sharded policy on this rank's part of a rollout, and a plain one on all of it.

    Args:
        wrapper: how to shard.
        keep: for each rank, how many of its decisions are valid.
        shift: for each rank, added to its old log-probs after they were scored again.
        options: of PPO.
        load: makes the policy, the same on every rank.
        own: changes this rank's part of the rollout, given it and the rank.
        num_minibatches: optimizer steps. The shipped policy's gradient on noise changes by a percent with the last bits
            of its weights, so that only the first is the same for all.
    """
    accelerator = start(wrapper)
    rank = accelerator.process_index
    seed_weights(0)
    policy = load()
    plain = copy.deepcopy(policy)
    rollout = rollout_of(plain, num_decisions=4, num_envs=2 * len(keep))
    draw = torch.Generator().manual_seed(1)
    advantage, returns = (torch.randn(rollout.valid.shape, generator=draw) for _ in range(2))
    rollout.valid[:], rollout.executed[:] = False, 1
    for other, rows in enumerate(keep):
        for number in range(rows):
            rollout.valid[number % 4, 2 * other + number // 4] = True
    options = options or PPOOptions(minibatch_size=8, micro_batch_size=2, epochs=1)
    model, optimizer = prepare_policy(accelerator, policy, learning_rate=1e-3, make_optimizer=torch.optim.SGD)
    assert isinstance(model, (FSDPModule, FullyShardedDataParallel)) == (wrapper != "ddp")
    part = own(slice_of(rollout, 2 * rank), rank)
    results = []
    for who, target, steps, mine, first in (
        (accelerator, model, optimizer, part, 2 * rank),
        (Alone(), plain, torch.optim.SGD(trainable(plain), lr=1e-3), rollout, 0),
    ):
        columns = slice(first, first + mine.valid.shape[1])
        batch = make_batch(mine, advantage[:, columns], returns[:, columns], unit_step=plain.unit_step, first_env=first)
        with train_mode(target):
            rescore(who, target, batch, options)
            for other, size in enumerate(shift):
                batch.old_log_prob[(batch.env // 2) == other] += size
            sizes = {"unit_step": plain.unit_step, "num_minibatches": num_minibatches}
            results.append(update(who, target, steps, batch, options, **sizes, seed=0))
    everyone = gather_objects(accelerator, results[0])
    assert all(other == everyone[0] for other in everyone), "ranks report different numbers"
    return SimpleNamespace(found=results[0], expected=results[1], weights=whole(model), plain=plain, model=model)


def trainable(policy):
    return [p for p in policy.parameters() if p.requires_grad]


def slice_of(rollout, first):
    def cut(x):
        return x[:, first : first + 2]

    fields = {name: cut(x) for name, x in vars(rollout).items() if isinstance(x, torch.Tensor)}
    nested = {name: {key: cut(x) for key, x in getattr(rollout, name).items()} for name in ("inputs", "trace")}
    num_envs = rollout.valid.shape[1]
    kept = [row for place, row in enumerate(rollout.kept) if first <= place % num_envs < first + 2]
    return type(rollout)(**fields, **nested, kept=kept)


def assert_like_one_process(done) -> None:
    for name in ("loss/policy", "loss/value", "ppo/grad_norm", "ppo/steps"):
        assert abs(done.found[name] - done.expected[name]) < 1e-4, (name, done.found, done.expected)
    for name, parameter in done.plain.named_parameters():
        torch.testing.assert_close(
            done.weights[name], parameter.detach(), msg=lambda text, name=name: f"{name}: {text}"
        )


def unequal_rows(wrapper: str, _: Path) -> None:
    done = updates(wrapper, (5, 7), num_minibatches=1)
    assert done.found["ppo/steps"] == 1
    assert_like_one_process(done)


def empty_rank(wrapper: str, _: Path) -> None:
    done = updates(wrapper, (6, 0), num_minibatches=1)
    assert done.found["ppo/steps"] == 1
    assert_like_one_process(done)


def stops_together(wrapper: str, _: Path) -> None:
    """Rank 0's KL is far over the target, rank 1's is 0; the mean over both decides for both."""
    options = PPOOptions(minibatch_size=8, micro_batch_size=2, epochs=3, target_kl=0.05)
    done = updates(wrapper, (4, 8), shift=(1.0, 0.0), options=options)
    assert done.found["ppo/kl_stop"] == 1.0
    assert done.found["ppo/steps"] == done.expected["ppo/steps"] == 0
    assert_like_one_process(done)
    # The same shift under a target that it misses on average: nobody stops.
    options = PPOOptions(minibatch_size=8, micro_batch_size=2, epochs=1, target_kl=5.0)
    done = updates(wrapper, (4, 8), shift=(1.0, 0.0), options=options)
    assert done.found["ppo/kl_stop"] == 0.0
    assert done.found["ppo/steps"] == 2


def adapters(wrapper: str, _: Path) -> None:
    """LoRA by peft on a frozen model: only that and the value head move, rollouts see it, and it can be folded in."""
    from peft.tuners.lora import LoraLayer

    before = {}

    def load():
        policy = shipped()
        add_adapters(policy.model, "q_proj", "v_proj")
        before.update({name: p.detach().clone() for name, p in policy.named_parameters()})
        return policy

    done = updates(wrapper, (5, 7), load=load)
    assert_like_one_process(done)
    moved = {name for name, x in done.weights.items() if not torch.equal(x, before[name])}
    added = {name for name in before if "lora_" in name}
    assert added <= moved <= added | {name for name in before if name.startswith("value_head.")}, moved
    rank = torch.distributed.get_rank()
    inputs = done.plain.prepare(observation(4))
    with rollout_mode(done.model), rollout_mode(done.plain):
        for _ in range(1 + rank):
            found = done.model(inputs, greedy=True)
        expected = done.plain(inputs, greedy=True)
    torch.testing.assert_close(found.log_prob, expected.log_prob)
    assert torch.equal(found.action, expected.action)
    layers = {name: layer for name, layer in done.plain.named_modules() if isinstance(layer, LoraLayer)}
    assert len(layers) == 4
    for name, layer in layers.items():
        base, down, up = (
            done.weights[f"{name}.{part}.weight"] for part in ("base_layer", "lora_A.default", "lora_B.default")
        )
        layer.merge()
        torch.testing.assert_close(base + layer.scaling["default"] * up @ down, layer.base_layer.weight.detach())


CHECKS = {
    "5 against 7 rows train like 12 in one process": unequal_rows,
    "a rank without rows joins in": empty_rank,
    "ranks stop together at the KL target": stops_together,
    "adapters of peft train, act and fold like in one process": adapters,
    "a resumed run is the run that was not stopped": resumes,
}


def main() -> None:
    checks, folder = Checks(), Path(sys.argv[1])
    for wrapper in sys.argv[2:]:
        for title, check in CHECKS.items():
            with checks(f"{wrapper}: {title}"):
                check(wrapper, folder / wrapper)
    os._exit(0)


if __name__ == "__main__":
    main()
