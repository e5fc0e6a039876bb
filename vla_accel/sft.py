"""Supervised fine-tuning: a policy imitates demonstrations, by the likelihood it gives to the expert's actions.

Not here: recording demonstrations (`demos.py`), reinforcement learning (`train.py`).
Usage: `finetune(parse_args(SFTConfig))`, from a script under `accelerate launch`.
"""

from __future__ import annotations

import dataclasses
import math
from functools import partial
from typing import Any

import numpy as np
import torch

from vla_accel.checkpoint import export_policy
from vla_accel.config import SFTConfig, SFTOptions, to_dict
from vla_accel.demos import Demonstrations, open_demonstrations, record
from vla_accel.distributed import global_sum, make_accelerator, precision_of, prepare_policy, seed_weights
from vla_accel.envs.families import for_model
from vla_accel.evaluate import evaluate
from vla_accel.modes import train_mode
from vla_accel.optim import MuonWithAdamW, hidden_matrices
from vla_accel.policies import load_policy, peek_policy
from vla_accel.policies.base import Policy
from vla_accel.rules import check
from vla_accel.track import Progress, RunLog, agree_on_folder, make_output_dir, write_json
from vla_accel.train import check_env_fits

LOG_EVERY = 50
"""Optimizer steps per line of metrics."""


def finetune(config: SFTConfig) -> dict[str, Any]:
    """Imitate demonstrations and export the policy.

    Returns:
        `output_dir` and `after`, the held-out evaluation as a dict, or None without one.

    Raises:
        ValueError: for options that cannot work together, before any weight is loaded.
    """
    spec = peek_policy(config.model, config.policy, suite=config.env.name)
    config = dataclasses.replace(config, env=for_model(config.env, config.model, num_images=spec.num_images))
    rule = f"must be 0, since {config.model}'s actions have no bins to spread a target over"
    check(spec.has_bins or config.sft.smoothing == 0, "sft.smoothing", rule, config.sft.smoothing)
    check_env_fits(config.env, spec)
    if config.data.path:
        open_demonstrations(config.data.path)
    output = make_output_dir(config.run.output_dir, default=f"sft-{config.model}-{config.env.name}")
    accelerator = make_accelerator(timeout_s=config.run.timeout_s, shard_units=spec.shard_units)
    output = agree_on_folder(accelerator, output)
    seed_weights(config.run.seed)
    policy = load_policy(config.model, config.policy, suite=config.env.name)
    demos = _demonstrations(config)
    policy.fit_instructions(demos.instructions)
    model, optimizer = prepare_policy(
        accelerator,
        policy,
        learning_rate=config.sft.learning_rate,
        weight_decay=config.sft.weight_decay,
        **_optimizer(config.sft, policy, accelerator.num_processes),
    )
    if accelerator.is_main_process:
        write_json(output / "config.json", to_dict(config))
    precision = precision_of(accelerator, config.policy.dtype)
    accelerator.print(
        f"{len(demos)} frames of {len(np.unique(demos.episode))} demonstrations; computing in {precision}; "
        f"output: {output}"
    )
    log = RunLog(output, enabled=accelerator.is_main_process)
    progress = Progress(config.sft.steps, enabled=accelerator.is_main_process)
    recent: list[float] = []
    rng = np.random.default_rng([31, config.run.seed])
    with train_mode(model):
        for step in range(config.sft.steps):
            for group in optimizer.param_groups:
                group["lr"] = group["initial_lr"] * _rate(config.sft, step)
            loss = _step(accelerator, model, policy, optimizer, demos, rng, config.sft)
            recent.append(loss)
            progress.step(loss=f"{loss:.3f}")
            if (step + 1) % LOG_EVERY == 0:
                log.write(step + 1, {"loss/imitation": sum(recent) / len(recent)})
                recent.clear()
    progress.close()
    after = None
    if config.run.eval_episodes:
        result = evaluate(
            accelerator, model, policy, config.env, episodes=config.run.eval_episodes, seed=config.run.seed
        )
        after = result.to_dict()
        accelerator.print(result.table())
    export_policy(accelerator, model, policy, output / "policy", value_head=False)
    if accelerator.is_main_process:
        write_json(output / "result.json", {"after": after})
        log.plot(("loss/imitation",))
    accelerator.print(f"The policy is in {output / 'policy'}.")
    return {"output_dir": str(output), "after": after}


def _demonstrations(config: SFTConfig) -> Demonstrations:
    data = config.data
    demos = (
        Demonstrations.load(data.path)
        if data.path
        else record(
            config.env,
            episodes=data.episodes,
            seed=config.run.seed,
            speed=data.speed,
            speed_jitter=data.speed_jitter,
            noise=data.noise,
        )
    )
    return demos if data.keep_failures else demos.successful()


def _optimizer(options: SFTOptions, policy: Policy, num_processes: int) -> dict[str, Any]:
    """The keyword of `prepare_policy` that asks for Muon, or none."""
    if options.muon_learning_rate == 0:
        return {}
    rule = "must be 0 with several processes, since Muon needs whole matrices"
    check(num_processes == 1, "sft.muon_learning_rate", rule, options.muon_learning_rate)
    matrices = hidden_matrices(policy)
    return {"make_optimizer": partial(MuonWithAdamW, matrices=matrices, muon_lr=options.muon_learning_rate)}


def _rate(options: SFTOptions, step: int) -> float:
    """Share of the learning rate at a step."""
    warm = min(1.0, (step + 1) / (options.lr_warmup + 1))
    return warm * (0.1 + 0.9 * 0.5 * (1.0 + math.cos(math.pi * step / options.steps)))


def _step(
    accelerator: Any,
    model: torch.nn.Module,
    policy: Any,
    optimizer: torch.optim.Optimizer,
    demos: Demonstrations,
    rng: np.random.Generator,
    options: SFTOptions,
) -> float:
    """One optimizer step; returns the mean negative log-likelihood per unit over all processes. Collective."""
    chosen = rng.integers(len(demos), size=options.batch_size)
    own = chosen[accelerator.process_index :: accelerator.num_processes]
    obs = demos.observation(own)
    hidden = rng.random(options.batch_size)[accelerator.process_index :: accelerator.num_processes]
    for row in np.flatnonzero(hidden < options.instruction_dropout):
        obs.instructions[row] = ""
    inputs = policy.prepare(obs)
    action = torch.from_numpy(demos.chunk(own, policy.chunk_size))
    trace = policy.encode_demonstration(action, smoothing=options.smoothing, repeats=options.repeats)
    device = accelerator.device
    score = model({k: x.to(device) for k, x in inputs.items()}, {k: x.to(device) for k, x in trace.items()})
    units = options.batch_size * score.log_prob.shape[1]
    # The value head takes part with weight 0: data parallelism waits for every parameter's gradient.
    loss = -score.log_prob.sum() / units + 0.0 * score.value.sum()
    accelerator.backward(loss * accelerator.num_processes)
    if options.max_grad_norm > 0:
        accelerator.clip_grad_norm_(model.parameters(), options.max_grad_norm)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return global_sum(accelerator, float(loss.detach()))[0]
