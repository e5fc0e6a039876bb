"""Check PI0's updates and runs, for each wrapper on the command line: `fsdp1`, `fsdp2`, `ddp`."""

from __future__ import annotations

import functools
import os
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file

from tests.distributed.distributed_worker import start
from tests.distributed.launch import Checks
from tests.distributed.runs_worker import assert_like_one_process, metrics_of, updates
from tests.helpers.pi0 import make_policy
from vla_accel.cli import parse_args
from vla_accel.config import PPOConfig
from vla_accel.train import train


class Towers:
    """Loads a policy and counts how often its image tower runs in updates; not that of copies."""

    def __init__(self, folder: Path, **options):
        self.load_policy = functools.partial(make_policy, folder / "pi0", **options)
        self.calls = 0

    def __call__(self):
        policy = self.load_policy()
        policy.model.vision_tower.register_forward_pre_hook(self.count)
        self.frozen = {name: p.clone() for name, p in policy.named_parameters() if not p.requires_grad}
        return policy

    def count(self, *_):
        self.calls += torch.is_grad_enabled()  # not in rollouts


def update_like_one_process(wrapper: str, folder: Path, *, calls, keep=(5, 7), own=None, **options) -> None:
    towers = Towers(folder, **options)
    done = updates(wrapper, keep, load=towers, own=own or (lambda rollout, _: rollout))
    assert done.found["ppo/steps"] == 2
    assert done.found["ppo/first_log_ratio"] < 1e-4
    assert_like_one_process(done)
    assert (towers.calls > 0) == calls
    for name, before in towers.frozen.items():
        assert torch.equal(done.weights[name], before), name
    parts = [f"ppo/clip_fraction/step_{step}" for step in range(4)]
    assert [done.found[name] for name in parts] == [done.expected[name] for name in parts]


def kept(wrapper: str, folder: Path) -> None:
    update_like_one_process(wrapper, folder, calls=False, noise_steps="all")


def empty_rank(wrapper: str, folder: Path) -> None:
    update_like_one_process(wrapper, folder, calls=False, keep=(6, 0))


def one_rank_kept_nothing(wrapper: str, folder: Path) -> None:
    """The plain policy still reuses its own; the result is the same."""

    def forget(rollout, rank):
        rollout.kept = [] if rank == 1 else rollout.kept
        return rollout

    update_like_one_process(wrapper, folder, calls=True, own=forget)


def trained_vlm(wrapper: str, folder: Path) -> None:
    update_like_one_process(wrapper, folder, calls=True, freeze_vlm=False, gradient_checkpointing=True)


def learned_noise(wrapper: str, folder: Path) -> None:
    update_like_one_process(wrapper, folder, calls=False, noise="learned", gradient_checkpointing=True)


def whole_run(wrapper: str, folder: Path) -> None:
    """Two iterations; the language model's weights come out as they went in, bit for bit."""
    accelerator = start(wrapper)
    out = folder / wrapper
    words = (
        f"--model=pi0 --policy.path={folder / 'pi0'} --env.name=tests.helpers.wandering_env:Wandering "
        "--env.options image_size 32 --env.num_envs=2 "
        "--env.max_episode_steps=6 --rollout.num_decisions=4 --ppo.minibatch_size=4 --run.iterations=2 "
        f"--run.eval_episodes=0 --run.video_episodes=0 --run.trackers none --run.output_dir={out}"
    )
    train(parse_args(PPOConfig, words.split()))
    accelerator.wait_for_everyone()
    rows = metrics_of(out)
    assert [row["ppo/first_log_ratio"] < 1e-4 for row in rows] == [True, True]
    before, after = (load_file(path / "model.safetensors") for path in (folder / "pi0", out / "policy"))
    assert before.keys() == after.keys()
    same = {name for name, x in before.items() if torch.equal(x, after[name])}
    assert {name for name in before if ".paligemma." in name} <= same
    assert any("action_out_proj" in name for name in before.keys() - same)


CHECKS = {
    "an update from kept prefixes is that of one process": kept,
    "a rank without rows runs its spare row from what was kept": empty_rank,
    "where one rank kept nothing all compute the prefix again": one_rank_kept_nothing,
    "a trained language model with gradient checkpointing": trained_vlm,
    "learned noise with gradient checkpointing": learned_noise,
    "a run leaves the frozen language model bit-equal": whole_run,
}


def main() -> None:
    checks, folder = Checks(), Path(sys.argv[1])
    for wrapper in sys.argv[2:]:
        for title, check in CHECKS.items():
            with checks(f"{wrapper}: {title}"):
                check(wrapper, folder)
    os._exit(0)


if __name__ == "__main__":
    main()
