"""Every option of the command lines: frozen dataclasses with their defaults, units and rules, and `parse_args`.

Not here: anything that acts on an option. Standard library and tyro only, so that `--help` and a wrong option are fast.
Usage: `config = parse_args(PPOConfig, ["--model", "openvla", "--run.seed", "1"])`.

`--model` and `--recipe` are read first; the rest is a dataclass narrowed to that model, so an option that a model does
not have is refused instead of ignored. Everything else is `--group.option`; hyphens and underscores both work.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

MODELS = ("openvla", "openvla-oft")
DTYPES = ("float32", "bfloat16")


def check(ok: bool, option: str, rule: str, value: object, remedy: str = "") -> None:
    """Raise a `ValueError` that names the option, the rule, the value given and, where there is one, the remedy."""
    if not ok:
        raise ValueError(f"--{option} {rule}, but is {value!r}." + (f" {remedy}" if remedy else ""))


def _check_positive(group: str, config: object, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        check(_finite(value) and value > 0, f"{group}.{name}", "must be a number above 0", value)


def _check_not_negative(group: str, config: object, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        check(_finite(value) and value >= 0, f"{group}.{name}", "must be a number of at least 0", value)


def _finite(value: object) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)


def _check_choice(option: str, value: str, choices: Sequence[str]) -> None:
    if value not in choices:
        near = difflib.get_close_matches(str(value), choices, n=1)
        check(False, option, f"must be one of {', '.join(choices)}", value, f"Did you mean {near[0]}?" if near else "")


@dataclass(frozen=True, kw_only=True)
class PolicyConfig:
    """The policy: which checkpoint, how it samples, what of it is trained."""

    path: str | None = None
    """Folder of a checkpoint, or a hub name owner/name. None: the small trained one that ships with the package."""
    unnorm_key: str | None = None
    """Which statistics of the checkpoint turn its actions into environment units. None: the only ones, or the
    environment's own name."""
    temperature: float = 1.0
    """Of the sampling distribution in rollouts, and so of every log-probability. Evaluation is greedy."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the stored weights. Computing in bfloat16 over float32 weights is accelerate's --mixed_precision bf16."""
    freeze_vision: bool = False
    """Keep the vision towers as they are."""
    gradient_checkpointing: bool = False
    """Trade one more forward pass per update for the memory of activations."""
    value_hidden: int = 256
    """Width of the value head's two hidden layers."""
    value_detach: bool = True
    """The value loss trains the head only. False: also the policy's trunk."""

    def __post_init__(self) -> None:
        _check_positive("policy", self, "temperature", "value_hidden")
        _check_choice("policy.dtype", self.dtype, DTYPES)


@dataclass(frozen=True, kw_only=True)
class OFTPolicyConfig(PolicyConfig):
    """OpenVLA-OFT: a whole chunk of actions in one bidirectional pass."""

    append_stop_token: bool | None = None
    """End the placeholder tokens with the stop token, as the original does. None: as the checkpoint says."""


@dataclass(frozen=True, kw_only=True)
class EnvConfig:
    """The simulator."""

    name: str = "tabletop"
    """Which environment."""
    num_envs: int = 32
    """Environments that run side by side, over all processes together."""
    chunk_size: int | None = None
    """Environment steps per decision. None: the policy's own chunk. Less: the rest of each chunk is dropped."""
    max_episode_steps: int | None = None
    """Time limit of an episode in environment steps. None: the environment's own."""
    vectorization: Literal["auto", "sync", "async"] = "auto"
    """In this process, or one worker process per environment. auto: the environment's own choice."""
    options: dict[str, str] = field(default_factory=dict)
    """Further options of the environment as pairs, e.g. --env.options num_blocks 3 image_size 96."""

    def __post_init__(self) -> None:
        _check_positive("env", self, "num_envs")
        for name in ("chunk_size", "max_episode_steps"):
            if getattr(self, name) is not None:
                _check_positive("env", self, name)
        _check_choice("env.vectorization", self.vectorization, ("auto", "sync", "async"))

    def parsed_options(self) -> dict[str, Any]:
        """`options` with each value read as JSON where it is JSON, and as a string elsewhere."""
        return {key.replace("-", "_"): _json_or_text(value) for key, value in self.options.items()}


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """How much experience an update gets."""

    num_decisions: int = 16
    """Decisions of each environment per iteration. Episodes go on over the end of an iteration."""

    def __post_init__(self) -> None:
        _check_positive("rollout", self, "num_decisions")


@dataclass(frozen=True, kw_only=True)
class PPOOptions:
    """The update (PPO, arXiv 1707.06347; GAE, arXiv 1506.02438)."""

    learning_rate: float = 3e-4
    """Of the policy (AdamW)."""
    value_learning_rate: float = 1e-3
    """Of the value head."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "linear"
    """Course of both rates over the run's iterations; linear and cosine end at lr_final times the start."""
    lr_final: float = 0.1
    """Share of the learning rates that is left at the last iteration."""
    lr_warmup: int = 0
    """Iterations over which both rates rise to their full value."""
    weight_decay: float = 0.0
    """AdamW's, on matrices."""
    max_grad_norm: float = 1.0
    """Clip the gradient's global norm here. 0: never."""
    gamma: float = 0.99
    """Discount per decision."""
    gae_lambda: float = 0.95
    """GAE's lambda."""
    clip_low: float = 0.2
    """The ratio counts down to 1 - clip_low."""
    clip_high: float = 0.2
    """The ratio counts up to 1 + clip_high."""
    ratio_level: Literal["unit", "step", "chunk"] = "unit"
    """One ratio per token (unit), per environment step, or per decision (chunk)."""
    epochs: int = 2
    """Passes over each rollout."""
    minibatch_size: int = 128
    """Decisions per optimizer step, over all processes together."""
    micro_batch_size: int = 64
    """Decisions per forward and backward pass on one process. Changes memory and speed, not the result."""
    value_coef: float = 0.5
    """Weight of the value loss."""
    value_clip: float = 0.0
    """Clip the value's change from the rollout's here. 0: never."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus."""
    normalize_advantages: bool = True
    """Bring the advantages of a rollout to mean 0 and deviation 1, over its valid decisions on all processes."""
    target_kl: float = 0.0
    """End an iteration's update when the approximate KL to the rollout's policy passes this (nats per ratio).
    0: never."""
    critic_warmup: int = 0
    """Iterations at the start in which only the value head learns."""
    max_skipped: int = 10
    """Stop the run after this many optimizer steps in a row had no finite gradient."""

    def __post_init__(self) -> None:
        _check_not_negative(
            "ppo", self, "learning_rate", "value_learning_rate", "weight_decay", "max_grad_norm", "value_coef",
            "value_clip", "entropy_coef", "target_kl", "critic_warmup", "lr_warmup",
        )  # fmt: skip
        _check_positive(
            "ppo", self, "epochs", "minibatch_size", "micro_batch_size", "clip_low", "clip_high", "max_skipped"
        )
        for name in ("gamma", "gae_lambda", "lr_final"):
            value = getattr(self, name)
            check(_finite(value) and 0 <= value <= 1, f"ppo.{name}", "must lie between 0 and 1", value)
        check(self.clip_low < 1, "ppo.clip_low", "must be below 1", self.clip_low)
        _check_choice("ppo.ratio_level", self.ratio_level, ("unit", "step", "chunk"))
        _check_choice("ppo.lr_schedule", self.lr_schedule, ("constant", "linear", "cosine"))


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """The run: length, seed, what is written and where."""

    iterations: int = 60
    """Rollout and update, this many times."""
    seed: int = 0
    """Of weights, environments, sampling noise and shuffling."""
    output_dir: str | None = None
    """Where everything is written. None: runs/<model>-<env>-<time>."""
    resume: str | None = None
    """Output folder of an earlier run to go on with, exactly where its last checkpoint stands."""
    save_every: int = 0
    """Write a checkpoint every so many iterations. 0: only at the end."""
    keep_checkpoints: int = 2
    """Delete all but this many of the newest checkpoints."""
    eval_episodes: int = 100
    """Held-out episodes, greedy, before and after training. 0: no evaluation."""
    eval_every: int = 0
    """Evaluate every so many iterations too. 0: only before and after."""
    trackers: tuple[str, ...] = ("tensorboard",)
    """Accelerate's trackers beside the JSON lines that are always written, e.g. wandb. "none": no other."""
    video_episodes: int = 4
    """Episodes filmed at the end. 0: no video."""
    timeout_s: int = 1800
    """Seconds after which a process that waits for another in vain gives up."""

    def __post_init__(self) -> None:
        _check_not_negative("run", self, "iterations", "save_every", "eval_episodes", "eval_every", "video_episodes")
        _check_positive("run", self, "keep_checkpoints", "timeout_s")
        check(
            isinstance(self.seed, int) and 0 <= self.seed < 2**31, "run.seed", "must lie in 0 .. 2^31 - 1", self.seed
        )


@dataclass(frozen=True, kw_only=True)
class PPOConfig:
    """Improve a vision-language-action policy by PPO in a simulator."""

    model: str
    policy: PolicyConfig
    env: EnvConfig = field(default_factory=EnvConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    ppo: PPOOptions = field(default_factory=PPOOptions)
    run: RunConfig = field(default_factory=RunConfig)

    def __post_init__(self) -> None:
        batch = self.rollout.num_decisions * self.env.num_envs
        check(
            batch % self.ppo.minibatch_size == 0,
            "ppo.minibatch_size",
            f"must divide the decisions of an iteration (rollout.num_decisions x env.num_envs = {batch})",
            self.ppo.minibatch_size,
            f"The nearest that does: {_nearest_divisor(batch, self.ppo.minibatch_size)}.",
        )


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Demonstrations."""

    path: str | None = None
    """Folder written by scripts/record_demos.py. None: record them now."""
    episodes: int = 2000
    """Episodes to record, over all processes together."""
    speed: float = 1.0
    """How fast the scripted expert moves, as a share of the largest step."""
    speed_jitter: float = 0.0
    """Each of the expert's steps is this much faster or slower, standard deviation of the logarithm."""
    noise: float = 0.0
    """Standard deviation of noise on the executed actions; the recorded ones stay clean."""
    keep_failures: bool = True
    """Learn from episodes that did not succeed, too."""

    def __post_init__(self) -> None:
        _check_positive("data", self, "episodes", "speed")
        _check_not_negative("data", self, "speed_jitter", "noise")
        check(self.speed <= 1, "data.speed", "must be at most 1", self.speed)


@dataclass(frozen=True, kw_only=True)
class SFTOptions:
    """The imitation of demonstrations."""

    learning_rate: float = 1e-3
    """AdamW's, after the warm-up; falls to a tenth along a cosine."""
    lr_warmup: int = 100
    """Steps over which the rate rises."""
    weight_decay: float = 0.01
    """AdamW's, on matrices."""
    max_grad_norm: float = 1.0
    """Clip the gradient's global norm here. 0: never."""
    steps: int = 5000
    """Optimizer steps."""
    batch_size: int = 64
    """Frames per optimizer step, over all processes together."""

    def __post_init__(self) -> None:
        _check_positive("sft", self, "learning_rate", "steps", "batch_size")
        _check_not_negative("sft", self, "lr_warmup", "weight_decay", "max_grad_norm")


@dataclass(frozen=True, kw_only=True)
class SFTConfig:
    """Teach a vision-language-action policy by imitating demonstrations."""

    model: str
    policy: PolicyConfig
    env: EnvConfig = field(default_factory=EnvConfig)
    data: DataConfig = field(default_factory=DataConfig)
    sft: SFTOptions = field(default_factory=SFTOptions)
    run: RunConfig = field(default_factory=RunConfig)


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """Score a checkpoint, greedily, on held-out initial states."""

    model: str
    policy: PolicyConfig
    env: EnvConfig = field(default_factory=EnvConfig)
    episodes: int = 100
    """Held-out episodes, spread evenly over the tasks."""
    seed: int = 0
    """Of the environments."""
    output: str | None = None
    """A JSON file for the result. None: only the table."""
    video: str | None = None
    """Folder for films of the first episodes. None: no films."""
    blank: Literal["none", "image", "instruction"] = "none"
    """Control: hide the images or the instruction from the policy."""

    def __post_init__(self) -> None:
        check(_finite(self.episodes) and self.episodes > 0, "episodes", "must be a number above 0", self.episodes)
        _check_choice("blank", self.blank, ("none", "image", "instruction"))


Config = TypeVar("Config")


def _nearest_divisor(number: int, wanted: int) -> int:
    return min((d for d in range(1, number + 1) if number % d == 0), key=lambda d: abs(d - wanted))


def _json_or_text(text: str) -> object:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def default_config(kind: type[Config], model: str) -> Config:
    """The preset of a model: the defaults that `--help` shows.

    Raises:
        ValueError: for a model that is not one of `MODELS`.
    """
    _check_choice("model", model, MODELS)
    policy: PolicyConfig = OFTPolicyConfig() if model == "openvla-oft" else PolicyConfig()
    values: dict[str, Any] = {"model": model, "policy": policy}
    return kind(**values)


def parse_args(kind: type[Config], argv: Sequence[str] | None = None) -> Config:
    """Read a command line into a config of class `kind`.

    Args:
        kind: `PPOConfig` or another of this module's whole-program configs.
        argv: words of the command line without the program. None: `sys.argv[1:]`.

    Raises:
        SystemExit: with code 0 after `--help`, with code 2 after one sentence on standard error for a wrong option.
    """
    import tyro

    words = list(sys.argv[1:] if argv is None else argv)
    try:
        model, rest = _take_flag(words, "model", "openvla")
        default = default_config(kind, model)
        config = tyro.cli(
            _narrowed(kind, type(default.policy)),  # type: ignore[attr-defined]
            args=rest,
            default=default,
            prog=Path(sys.argv[0]).name,
            description=f"{kind.__doc__}\n\n--model {{{','.join(MODELS)}}}: the options below are those of {model}.",
            config=(tyro.conf.FlagConversionOff, tyro.conf.SuppressFixed, tyro.conf.AvoidSubcommands),
        )
        return kind(**{f.name: getattr(config, f.name) for f in dataclasses.fields(config)})  # type: ignore[arg-type]
    except ValueError as error:
        sys.stderr.write(f"error: {error}\n")
        raise SystemExit(2) from None


def _take_flag(words: list[str], name: str, default: str) -> tuple[str, list[str]]:
    """Take `--name value` or `--name=value` out of the words; the last one counts."""
    value, rest, position = default, [], 0
    while position < len(words):
        word = words[position]
        if word == f"--{name}":
            if position + 1 >= len(words):
                raise ValueError(f"--{name} needs a value.")
            value, position = words[position + 1], position + 2
        elif word.startswith(f"--{name}="):
            value, position = word.split("=", 1)[1], position + 1
        else:
            rest.append(word)
            position += 1
    return value, rest


def _narrowed(kind: type, policy_class: type) -> type:
    """`kind` with its `policy` field typed as one model's policy options and `model` fixed."""
    import tyro

    fields: list[Any] = []
    for f in dataclasses.fields(kind):
        annotation: Any = {"model": tyro.conf.Fixed[str], "policy": policy_class}.get(f.name)
        fields.append((f.name, annotation or _resolved(kind)[f.name], f))
    narrowed = dataclasses.make_dataclass(
        kind.__name__, [(name, kind_, _copy_field(f)) for name, kind_, f in fields], frozen=True, kw_only=True
    )
    narrowed.__doc__ = kind.__doc__
    return narrowed


def _copy_field(f: dataclasses.Field) -> Any:
    if f.default_factory is not dataclasses.MISSING:
        return field(default_factory=f.default_factory)
    return field() if f.default is dataclasses.MISSING else field(default=f.default)


def _resolved(kind: type) -> dict[str, Any]:
    import typing

    return typing.get_type_hints(kind)


def to_dict(config: object) -> dict[str, Any]:
    """A config as plain dictionaries, ready for JSON."""
    return dataclasses.asdict(config)  # type: ignore[call-overload]
