"""What the small scripts do: score a checkpoint, take a run's policy out of its folder, record demonstrations.

Not here: the steps themselves (`evaluate.py`, `demos.py`). Each function checks its options before anything slow
starts. Usage: `run_evaluation(parse_args(EvalConfig))`.
"""

from __future__ import annotations

import dataclasses
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import DistributedType
from torch import nn

from vla_accel.config import EvalConfig, ExportConfig, RecordConfig, SimulatorConfig, to_dict
from vla_accel.demos import record
from vla_accel.distributed import make_accelerator, precision_of, prepare_policy, seed_weights
from vla_accel.envs.families import for_model
from vla_accel.envs.make import make_env
from vla_accel.evaluate import can_film, evaluate, film
from vla_accel.models import load_vla, peek_vla, save_vla
from vla_accel.modes import rollout_mode
from vla_accel.policies import load_policy, peek_policy
from vla_accel.policies.base import Policy
from vla_accel.rules import check
from vla_accel.track import check_writable, new_folder, write_json, write_video
from vla_accel.train import check_env_fits

if TYPE_CHECKING:
    from accelerate import Accelerator

FILMED = 2
"""Episodes per task in `--video`."""


def run_evaluation(config: EvalConfig) -> dict[str, Any]:
    """Score a checkpoint; print the table, and write the JSON file and the films that are asked for.

    Returns:
        `Evaluation.to_dict()`, on every rank.

    Raises:
        ValueError: for options that cannot work, before any weight is loaded.
    """
    spec = peek_policy(config.model, config.policy, suite=config.env.name)
    config = dataclasses.replace(config, env=for_model(config.env, config.model, num_images=spec.num_images))
    check_env_fits(config.env, spec)
    if config.output:
        check_writable(Path(config.output), option="output")
        check(not Path(config.output).is_dir(), "output", "must name a file, not a folder", config.output)
    if config.video:
        check_writable(Path(config.video) / "film.mp4", option="video")
        check(can_film(config.env), "video", "needs an environment that renders pictures", config.env.name)
    accelerator = make_accelerator(shard_units=spec.shard_units)
    seed_weights(config.seed)
    policy = load_policy(config.model, config.policy, suite=config.env.name)
    policy.fit_instructions(_instructions(config.env))
    states = {"eval": "held-out", "train": "training"}[config.split]
    where = "the small checkpoint that ships with vla_accel" if spec.embedded else spec.path
    precision = precision_of(accelerator, config.policy.dtype)
    accelerator.print(
        f"{config.model}: {where}; computing in {precision}; {config.episodes} {states} episodes of {config.env.name}."
    )
    model = _for_acting(accelerator, policy)
    result = evaluate(
        accelerator,
        model,
        policy,
        config.env,
        episodes=config.episodes,
        seed=config.seed,
        split=config.split,
        blank=config.blank,
    )
    accelerator.print(result.table())
    if config.output and accelerator.is_main_process:
        write_json(Path(config.output), {"config": to_dict(config), **result.to_dict()})
        accelerator.print(f"The result is in {config.output}.")
    if config.video:
        _film_tasks(accelerator, model, policy, config, result.instructions)
    return result.to_dict()


def _instructions(config: SimulatorConfig) -> list[str]:
    env: Any = make_env(config.name, **config.parsed_options())
    try:
        return list(env.unwrapped.instructions)
    finally:
        env.close()


def _for_acting(accelerator: Accelerator, policy: Policy) -> nn.Module:
    """Place a policy that will not be trained. Collective: call on every rank."""
    if accelerator.distributed_type == DistributedType.FSDP:
        model, _ = prepare_policy(accelerator, policy, learning_rate=0.0)
        return model
    policy.requires_grad_(False)
    return accelerator.prepare_model(policy, evaluation_mode=True)


def _film_tasks(
    accelerator: Accelerator, model: nn.Module, policy: Policy, config: EvalConfig, instructions: list[str]
) -> None:
    """Write one MP4 per task. Collective: call on every rank; the main process plays."""
    with rollout_mode(model):
        for task_id, instruction in enumerate(instructions if accelerator.is_main_process else []):
            films = film(
                model,
                policy,
                config.env,
                device=accelerator.device,
                episodes=FILMED,
                seed=config.seed,
                task_id=task_id,
                split=config.split,
                blank=config.blank,
            )
            name = f"{task_id:03d}_{_slug(instruction)}.mp4"
            write_video(Path(config.video or "") / name, [frame for one in films for frame in one.frames])
    accelerator.print(f"Films of {FILMED} episodes per task are in {config.video}.")


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "_", text.lower()).strip("_")[:80]


def export(config: ExportConfig) -> Path:
    """Copy the policy of a run, after a check that it is whole, to a folder that `load_vla` and `--policy.path` take.

    Returns:
        The new folder, which appears whole or not at all.

    Raises:
        ValueError: when the run has no policy, the policy's folder is damaged, or the new folder is in use.
    """
    source = Path(config.run) / "policy"
    check(
        source.is_dir(),
        "run",
        "must be the output folder of a finished run, which has a folder policy",
        config.run,
        "A run writes it when it ends; an interrupted one goes on with --run.resume.",
    )
    out = new_folder(config.out, option="out")
    peek_vla(source)
    temporary = out.with_name(out.name + ".part")
    shutil.rmtree(temporary, ignore_errors=True)
    shutil.copytree(source, temporary)
    if config.dtype != "stored":
        save_vla(*load_vla(source, dtype=getattr(torch, config.dtype)), temporary)
    temporary.replace(out)
    print(f"The policy is in {out}. Use it with --policy.path {out}, or load_vla({str(out)!r}).")  # noqa: T201
    return out


def record_demos(config: RecordConfig) -> Path:
    """Record demonstrations and write them as a folder for `--data.path`, with the options that made them.

    Returns:
        The new folder, which appears whole or not at all.

    Raises:
        ValueError: when the folder is in use, or the environment has no expert.
    """
    out = new_folder(config.out, option="out")
    data = config.data
    demos = record(
        config.env,
        episodes=data.episodes,
        seed=config.seed,
        speed=data.speed,
        speed_jitter=data.speed_jitter,
        noise=data.noise,
    )
    temporary = out.with_name(out.name + ".part")
    shutil.rmtree(temporary, ignore_errors=True)
    demos.save(temporary)
    write_json(temporary / "recorded_with.json", to_dict(config))
    temporary.replace(out)
    ends = demos.episode != [*demos.episode[1:], -1]
    print(f"{data.episodes} episodes ({demos.success[ends].mean():.1%} succeed), {len(demos)} frames: {out}")  # noqa: T201
    return out
