"""The course of a run, top to bottom: load, evaluate, [ roll out, estimate advantages, update ], evaluate, save.

Not here: how any of these steps works; each is a function of its own module, to be used in other loops as well.
Usage: `train(parse_args(PPOConfig))`, from a script under `accelerate launch`.
"""

from __future__ import annotations

import dataclasses
import math
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import torch

from vla_accel.advantages import estimate
from vla_accel.batch import make_batch
from vla_accel.checkpoint import check_same_options, export_policy, find_checkpoint, load_checkpoint, save_checkpoint
from vla_accel.config import EnvConfig, PPOConfig, to_dict
from vla_accel.distributed import (
    gather_objects,
    global_sum,
    make_accelerator,
    precision_of,
    prepare_policy,
    seed_weights,
)
from vla_accel.envs.base import training_jobs
from vla_accel.envs.families import for_model
from vla_accel.envs.jobs import WithRests
from vla_accel.envs.make import make_env, make_vector_env
from vla_accel.evaluate import can_film, evaluate, film
from vla_accel.modes import rollout_mode, train_mode
from vla_accel.policies import load_policy, peek_policy
from vla_accel.policies.base import Policy, PolicySpec
from vla_accel.ppo import rescore, set_learning_rates, update
from vla_accel.rollout import Seconds, collect, start
from vla_accel.rules import check
from vla_accel.track import (
    Progress,
    RunLog,
    agree_on_folder,
    check_trackers,
    closing_table,
    make_output_dir,
    write_json,
    write_video,
)
from vla_accel.types import Rollout

CURVES = (
    "rollout/success", "eval/success", "rollout/reward", "loss/policy", "loss/value", "ppo/kl",
    "ppo/clip_fraction", "loss/entropy", "ppo/grad_norm",
)  # fmt: skip


def train(config: PPOConfig) -> dict[str, Any]:
    """Improve a policy by PPO.

    Args:
        config: the whole run; see `config.py`.

    Returns:
        `output_dir`, and `before` and `after`: the evaluations as dicts, or None where there were none.

    Raises:
        ValueError: for options that cannot work together, before any weight is loaded.
        RuntimeError: when the update no longer has finite gradients, or a simulator cannot be kept alive.
    """
    num_images = peek_policy(config.model, config.policy, suite=config.env.name).num_images
    config = dataclasses.replace(config, env=for_model(config.env, config.model, num_images=num_images))
    checkpoint = find_checkpoint(config.run.resume) if config.run.resume else None
    if checkpoint:
        check_same_options(config, Path(config.run.resume or ""))
    spec = check_run(config)
    output = make_output_dir(
        config.run.resume or config.run.output_dir,
        default=f"{config.model}-{config.env.name}",
        resume=checkpoint is not None,
    )
    trackers = [name for name in config.run.trackers if name != "none"]
    accelerator = make_accelerator(
        timeout_s=config.run.timeout_s, log_with=trackers, project_dir=str(output), shard_units=spec.shard_units
    )
    output = agree_on_folder(accelerator, output)
    main = accelerator.is_main_process
    say = accelerator.print
    seed_weights(config.run.seed)
    policy = load_policy(config.model, config.policy, suite=config.env.name)
    say(describe(config, spec, policy, output, precision=precision_of(accelerator, config.policy.dtype)))
    if main:
        write_json(output / "config.json", to_dict(config))
    if trackers:
        accelerator.init_trackers("vla_accel", config=_flat(to_dict(config)))

    whole_episodes = config.ppo.advantage == "grpo"
    group_size = config.ppo.group_size if whole_episodes else 1
    first_env, num_envs = own_envs(
        config.env.num_envs,
        accelerator.process_index,
        accelerator.num_processes,
        num_groups=config.rollout.num_groups,
        group_size=group_size,
    )
    envs = make_training_envs(config, policy, first_env, num_envs, group_size=group_size)
    policy.fit_instructions(envs.instructions)
    policy.seed(config.run.seed, first_env=first_env, num_envs=num_envs)
    model, optimizer = prepare_policy(
        accelerator,
        policy,
        learning_rate=config.ppo.learning_rate,
        value_learning_rate=config.ppo.value_learning_rate,
        weight_decay=config.ppo.weight_decay,
    )
    log = RunLog(output, enabled=main)
    per_env = math.ceil(envs.max_episode_steps / envs.chunk_size) if whole_episodes else config.rollout.num_decisions
    num_minibatches = max(1, per_env * config.env.num_envs // config.ppo.minibatch_size)
    run_evaluation = partial(
        evaluate, accelerator, model, policy, config.env, episodes=config.run.eval_episodes, seed=config.run.seed
    )
    first = skipped_in_a_row = 0
    before = None
    if checkpoint:
        resumed = load_checkpoint(accelerator, model, optimizer, policy, envs, checkpoint)
        first, before = resumed.iteration, resumed.extra["before"]
        log.load(first)
    elif config.run.eval_episodes:
        before = run_evaluation().to_dict()
        say(f"Before training: {before['success']:.1%} of {before['n']} held-out episodes succeed.")

    state = start(envs)
    progress = Progress(config.run.iterations, start=first, enabled=main)
    for iteration in range(first, config.run.iterations):
        seconds = Seconds()
        with seconds.measure("rollout"), rollout_mode(model):
            rollout = collect(
                model, policy, envs, state,
                num_decisions=None if whole_episodes else config.rollout.num_decisions,
                device=accelerator.device,
            )  # fmt: skip
            if whole_episodes:
                state = start(envs)
        estimates = estimate(rollout, config.ppo, global_sum=partial(global_sum, accelerator))
        batch = make_batch(rollout, *estimates, unit_step=policy.unit_step, first_env=first_env)
        set_learning_rates(optimizer, config.ppo, iteration, config.run.iterations)
        with seconds.measure("update"), train_mode(model):
            metrics = rescore(accelerator, model, batch, config.ppo)
            metrics |= update(
                accelerator,
                model,
                optimizer,
                batch,
                config.ppo,
                unit_step=policy.unit_step,
                num_minibatches=num_minibatches,
                seed=config.run.seed * 1_000_003 + iteration,
                train_policy=iteration >= config.ppo.critic_warmup,
            )
        skipped_in_a_row = 0 if metrics["ppo/steps"] else skipped_in_a_row + int(metrics["ppo/skipped"])
        if skipped_in_a_row >= config.ppo.max_skipped:
            raise RuntimeError(
                f"The last {skipped_in_a_row} optimizer steps had no finite gradient (--ppo.max_skipped "
                f"{config.ppo.max_skipped}), the last in iteration {iteration}. Try a lower --ppo.learning_rate."
            )
        metrics |= rollout_metrics(accelerator, rollout)
        if config.run.eval_every and (iteration + 1) % config.run.eval_every == 0:
            with seconds.measure("eval"):
                metrics["eval/success"] = run_evaluation().success
        metrics |= {f"time/{name}": x for name, x in {**rollout.seconds, **seconds.total}.items()}
        metrics["ppo/learning_rate"] = optimizer.param_groups[0]["lr"]
        log.write(iteration, metrics)
        accelerator.log(metrics, step=iteration)
        if config.run.save_every and (iteration + 1) % config.run.save_every == 0:
            try:
                save_checkpoint(
                    accelerator, model, optimizer, policy, envs, output,
                    iteration=iteration + 1, keep=config.run.keep_checkpoints, extra={"before": before},
                )  # fmt: skip
            except RuntimeError as error:  # the run is worth more than one checkpoint; the one before is still there
                say(f"warning: {error} The run goes on.")
        del rollout, batch  # what the policy kept of them would lie beside that of the next rollout
        progress.step(success=f"{metrics['rollout/success']:.2f}", kl=f"{metrics['ppo/kl']:.3f}")
    progress.close()
    envs.close()
    if voided := sum(int(row["rollout/voided"]) for row in log.rows):
        say(f"Episodes lost to a simulator that failed, and played again: {voided}.")

    after = run_evaluation().to_dict() if config.run.eval_episodes and config.run.iterations else before
    export_policy(accelerator, model, policy, output / "policy")
    if main:
        write_json(output / "result.json", {"before": before, "after": after})
        log.plot(CURVES)
    if config.run.video_episodes:
        film_run(accelerator, model, policy, config, output / "videos")
    if trackers:
        accelerator.end_training()
    say(closing_table(before, after))
    say(f"Everything is in {output}; the policy itself in {output / 'policy'}.")
    return {"output_dir": str(output), "before": before, "after": after}


def check_run(config: PPOConfig) -> PolicySpec:
    """Find out before anything slow starts what cannot work: checkpoint, environment, and the two together.

    Raises:
        ValueError: naming the option.
    """
    check_trackers(config.run.trackers)
    spec = peek_policy(config.model, config.policy, suite=config.env.name)
    rule = f"must be 0, since {config.model}'s entropy does not depend on its weights"
    bonus = config.ppo.entropy_coef
    check(spec.has_entropy or bonus == 0, "ppo.entropy_coef", rule, bonus)
    check_env_fits(config.env, spec)
    return spec


def check_env_fits(config: EnvConfig, spec: PolicySpec) -> None:
    """Raise a `ValueError` if the environment and the checkpoint disagree on the action, or the chunk is too long."""
    env = make_env(config.name, **config.parsed_options())
    try:
        (action_dim,) = env.action_space.shape
    finally:
        env.close()
    check(
        action_dim == spec.action_dim,
        "env.name",
        f"must name an environment with {spec.action_dim}-dimensional actions, as the checkpoint {spec.path} has "
        f"(this one has {action_dim})",
        config.name,
        "Choose another environment, or another --policy.path or --policy.unnorm_key.",
    )
    if config.chunk_size is not None:
        check(
            config.chunk_size <= spec.chunk_size,
            "env.chunk_size",
            f"must be at most the policy's chunk, {spec.chunk_size}",
            config.chunk_size,
        )


def own_envs(num_envs: int, rank: int, world: int, *, num_groups: int = 1, group_size: int = 1) -> tuple[int, int]:
    """First environment and number of environments of a rank; they need not divide if there are no groups.

    Args:
        num_envs: over all processes.
        rank: of the process.
        world: number of processes.
        num_groups: groups in each process that take turns.
        group_size: environments that play the same episode, all in one process.

    Raises:
        ValueError: when there are fewer environments than processes, or they do not divide into groups.
    """
    check(num_envs >= world, "env.num_envs", f"must be at least the number of processes, {world}", num_envs)
    rule = f"must divide the environments of each process evenly (env.num_envs = {num_envs}, processes: {world})"
    check(num_groups == 1 or num_envs % (world * num_groups) == 0, "rollout.num_groups", rule, num_groups)
    rule = f"must divide the environments of each process (env.num_envs = {num_envs}, processes: {world})"
    check(group_size == 1 or num_envs % (world * group_size) == 0, "ppo.group_size", rule, group_size)
    share, rest = divmod(num_envs, world)
    return rank * share + min(rank, rest), share + (rank < rest)


def make_training_envs(
    config: PPOConfig, policy: Policy, first_env: int, num_envs: int, *, group_size: int = 1
) -> gym.vector.VectorEnv:
    """This rank's environments, each with an endless stream of training jobs.

    With a `group_size` above 1 that many neighbours play the same jobs, and rest after each until they are reset.
    """
    env = config.env
    probe = make_env(env.name, **env.parsed_options())
    task_ids, state_ids = range(len(probe.unwrapped.instructions)), probe.unwrapped.state_ids["train"]
    pin_tasks = getattr(probe.unwrapped, "slow_task_change", False) and env.num_envs % (group_size * len(task_ids)) == 0
    probe.close()
    jobs = [
        training_jobs(
            task_ids=task_ids,
            state_ids=state_ids,
            seed=config.run.seed,
            stream=first_env + i,
            num_streams=env.num_envs,
            group_size=group_size,
            pin_tasks=pin_tasks,
        )
        for i in range(num_envs)
    ]
    return make_vector_env(
        env.name,
        num_envs=num_envs,
        chunk_size=env.chunk_size or policy.chunk_size,
        jobs=jobs if group_size == 1 else [WithRests(stream) for stream in jobs],
        max_episode_steps=env.max_episode_steps,
        vectorization=None if env.vectorization == "auto" else env.vectorization,
        env_options=env.parsed_options(),
        timeout_s=env.timeout_s,
        num_groups=config.rollout.num_groups,
    )


def rollout_metrics(accelerator: Any, rollout: Rollout) -> dict[str, float]:
    """Success, length and return of the episodes that ended in a rollout, over all processes. Collective."""
    episodes = [e for part in gather_objects(accelerator, rollout.episodes) for e in part]
    valid, reward, voided = global_sum(
        accelerator, float(rollout.valid.sum()), float(rollout.reward.sum()), float(rollout.voided)
    )
    count = max(len(episodes), 1)
    return {
        "rollout/success": sum(e.success for e in episodes) / count,
        "rollout/episodes": float(len(episodes)),
        "rollout/episode_steps": sum(e.steps for e in episodes) / count,
        "rollout/truncated": sum(e.truncated for e in episodes) / count,
        "rollout/reward": reward / max(valid, 1.0),
        "rollout/decisions": valid,
        "rollout/voided": voided,
    }


def film_run(accelerator: Any, model: torch.nn.Module, policy: Policy, config: PPOConfig, folder: Path) -> None:
    """Write an MP4 of each of the first held-out episodes. Collective: call on every rank; the main process plays.

    A film that fails is no reason to lose a run that is at its end.
    """
    if not can_film(config.env):
        accelerator.print(f"No films: the environment {config.env.name} renders no pictures.")
        return
    with rollout_mode(model):
        if not accelerator.is_main_process:
            return
        episodes, seed = config.run.video_episodes, config.run.seed
        try:
            films = film(model, policy, config.env, device=accelerator.device, episodes=episodes, seed=seed)
            for number, one in enumerate(films):
                outcome = "success" if one.episode.success else "failure"
                write_video(folder / f"after_{number}_{outcome}.mp4", one.frames)
        except (OSError, RuntimeError) as error:
            accelerator.print(f"warning: the films could not be written ({error}).")


def describe(config: PPOConfig, spec: PolicySpec, policy: Policy, output: Path, *, precision: str) -> str:
    """The lines a run opens with."""
    total = sum(p.numel() for p in policy.parameters())
    trained = sum(p.numel() for p in policy.parameters() if p.requires_grad)
    where = "the small checkpoint that ships with vla_accel (no --policy.path given)" if spec.embedded else spec.path
    return (
        f"{config.model}: {where}; {total / 1e6:.2f} M parameters, {trained / 1e6:.2f} M of them trained; "
        f"computing in {precision}; recipe {config.recipe}.\n"
        f"{config.env.name}: {config.env.num_envs} environments, chunks of "
        f"{config.env.chunk_size or spec.chunk_size}, {config.run.iterations} iterations. Output: {output}"
    )


def _flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested options as `group.option` with values a tracker can store."""
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = value if isinstance(value, (int, float, str, bool)) else str(value)
    return flat


__all__ = ["check_run", "describe", "own_envs", "rollout_metrics", "train"]
