"""The groups of options, each the `--group.option` part of a command line: defaults, units and rules.

Not here: whole programs, and what an option of one group asks of another (`config.py`). Standard library only.
Usage: `options = PPOOptions(learning_rate=1e-5)`.

The class of the policy options is the model's own, so an option that a model does not have does not exist.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from typing import Any, Literal

from vla_accel.rules import check, check_choice, check_counts, check_numbers, check_seed, check_shares

DTYPES = ("float32", "bfloat16")
TRACKERS = (
    "none", "tensorboard", "wandb", "trackio", "comet_ml", "aim", "mlflow", "clearml", "dvclive", "swanlab",
)  # fmt: skip
"""Accelerate's names, which are also the names of the packages they need, and "none"."""


@dataclass(frozen=True, kw_only=True)
class BasePolicyConfig:
    """The policy: which checkpoint, how it samples, what of it is trained."""

    path: str | None = None
    """Folder of a checkpoint, or a hub name owner/name. None: the small trained one that ships with the package."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the stored weights. Computing in bfloat16 over float32 weights is accelerate's --mixed_precision bf16."""
    gradient_checkpointing: bool = False
    """Trade one more forward pass per update for the memory of activations."""
    value_hidden: int | None = None
    """Width of the value head's two hidden layers. None: as in the checkpoint, or 256 where it has none."""
    value_detach: bool = True
    """The value loss trains the head only. False: also the policy's trunk."""

    def __post_init__(self) -> None:
        if self.value_hidden is not None:
            check_counts("policy", self, "value_hidden", least=1)
        check(self.path is None or self.path.strip() != "", "policy.path", "must be a folder or a hub name", self.path)
        check_choice("policy.dtype", self.dtype, DTYPES)


@dataclass(frozen=True, kw_only=True)
class PolicyConfig(BasePolicyConfig):
    """OpenVLA: one token after the other."""

    unnorm_key: str | None = None
    """Which statistics of the checkpoint turn its actions into environment units. None: the only ones, or the
    environment's own name."""
    temperature: float = 1.0
    """Of the sampling distribution in rollouts, and so of every log-probability. Evaluation is greedy."""
    freeze_vision: bool = False
    """Keep the vision towers as they are."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_numbers("policy", self, "temperature", above=0)


@dataclass(frozen=True, kw_only=True)
class OFTPolicyConfig(PolicyConfig):
    """OpenVLA-OFT: a whole chunk of actions in one bidirectional pass."""

    append_stop_token: bool | None = None
    """End the placeholder tokens with the stop token, as the original does. None: as the checkpoint says."""


@dataclass(frozen=True, kw_only=True)
class Pi0PolicyConfig(BasePolicyConfig):
    """PI0 and PI0.5: a chunk of actions out of noise, in a few denoising steps."""

    tokenizer: str | None = None
    """Folder or hub name of the tokenizer. None: the one in the checkpoint's folder."""
    num_steps: int = 4
    """Denoising steps of a decision, in rollouts and evaluation."""
    noise: Literal["sde", "learned"] = "sde"
    """What makes denoising random: noise that keeps the flow's distribution (Flow-SDE), or a head that learns how much
    (Flow-Noise). Evaluation follows the flow without noise."""
    noise_level: float | None = None
    """Strength of sde, or largest standard deviation of learned, whose smallest is half of it. None: 0.5, or 0.16."""
    noise_steps: Literal["one", "all"] = "one"
    """How many denoising steps of a decision are random; one is drawn for each decision. Scoring runs the action expert
    once per random step."""
    freeze_vlm: bool = True
    """Train the action expert only."""
    prefix_cache_gb: float | None = None
    """Memory per process for what the frozen part made of a rollout's observations, so that no pass of the update
    computes it again; if it does not fit, every pass does (GB). 0: never. None: 8, or 0 without freeze_vlm."""
    prefix_cache_place: Literal["device", "host"] = "device"
    """Where that memory is: on the device of the rollout, or the CPU's (pinned), from which each pass fetches it."""
    constant_dims: Literal["error", "unit", "exact"] = "error"
    """What to do with an entry of state or action that never moved in the data of the statistics: refuse, leave its
    scale as it is, or divide as the original does."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_counts("policy", self, "num_steps", least=1)
        check_choice("policy.noise", self.noise, ("sde", "learned"))
        if self.noise_level is not None:
            check_numbers("policy", self, "noise_level", above=0)
        check_choice("policy.noise_steps", self.noise_steps, ("one", "all"))
        check_choice("policy.prefix_cache_place", self.prefix_cache_place, ("device", "host"))
        check_choice("policy.constant_dims", self.constant_dims, ("error", "unit", "exact"))
        rule = "must be True while --policy.freeze_vlm is, since the value is read from the frozen part"
        check(self.value_detach or not self.freeze_vlm, "policy.value_detach", rule, self.value_detach)
        if self.prefix_cache_gb is not None:
            check_numbers("policy", self, "prefix_cache_gb")
            rule = "must be 0 or left out with --policy.freeze_vlm False, since training changes what would be kept"
            check(self.freeze_vlm or self.prefix_cache_gb == 0, "policy.prefix_cache_gb", rule, self.prefix_cache_gb)


@dataclass(frozen=True, kw_only=True)
class SimulatorConfig:
    """One simulator."""

    name: str = "tabletop"
    """Which environment: tabletop, libero_spatial, libero_object, libero_goal, libero_10, libero_90, metaworld:<task>,
    maniskill:<task>, gym:<id> or my_module:MyClass."""
    max_episode_steps: int | None = None
    """Time limit of an episode in environment steps. None: the environment's own."""
    options: dict[str, str] = field(default_factory=dict)
    """Further options of the environment as pairs, e.g. --env.options num_blocks 3 image_size 96."""

    def __post_init__(self) -> None:
        if self.max_episode_steps is not None:
            check_counts("env", self, "max_episode_steps", least=1)

    def parsed_options(self) -> dict[str, Any]:
        """`options` with each value read as JSON where it is JSON, and as a string elsewhere."""
        return {key.replace("-", "_"): _json_or_text(value) for key, value in self.options.items()}


@dataclass(frozen=True, kw_only=True)
class EnvConfig(SimulatorConfig):
    """The simulator, many times over."""

    num_envs: int = 32
    """Environments that run side by side, over all processes together."""
    chunk_size: int | None = None
    """Environment steps per decision. None: the policy's own chunk. Less: the rest of each chunk is dropped."""
    vectorization: Literal["auto", "sync", "async"] = "auto"
    """In this process, or one worker process per environment. auto: the environment's own choice."""
    timeout_s: float = 120.0
    """Seconds after which a worker process that does not answer is replaced and its episode played again."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_counts("env", self, "num_envs", least=1)
        if self.chunk_size is not None:
            check_counts("env", self, "chunk_size", least=1)
        check_numbers("env", self, "timeout_s", above=0)
        check_choice("env.vectorization", self.vectorization, ("auto", "sync", "async"))


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """How much experience an update gets."""

    num_decisions: int = 12
    """Decisions of each environment per iteration. Episodes go on over the end of an iteration. With --ppo.advantage
    grpo only a number to divide by: there each environment plays one whole episode."""
    num_groups: int = 1
    """Groups of environments that take turns: while one steps, in worker processes, the policy acts for the next.
    Changes speed, not the result."""

    def __post_init__(self) -> None:
        check_counts("rollout", self, "num_decisions", "num_groups", least=1)


@dataclass(frozen=True, kw_only=True)
class PPOOptions:
    """The update (PPO, arXiv 1707.06347)."""

    advantage: Literal["gae", "grpo"] = "gae"
    """gae: of each decision, by a value head (GAE, arXiv 1506.02438). grpo: of a whole episode, by comparing it with
    others from the same initial state (GRPO, arXiv 2402.03300); no value is learned, groups that agree are left out."""
    group_size: int = 8
    """Episodes from the same initial state that grpo compares."""

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
    minibatch_size: int = 96
    """Decisions per optimizer step, over all processes together."""
    micro_batch_size: int = 48
    """Decisions per forward and backward pass on one process. Changes memory and speed, not the result."""
    value_coef: float = 0.5
    """Weight of the value loss of gae."""
    value_clip: float = 0.0
    """Clip the value's change from the rollout's here. 0: never."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus."""
    normalize_advantages: bool = True
    """Bring the advantages of gae to mean 0 and deviation 1, over a rollout's valid decisions on all processes."""
    target_kl: float = 0.0
    """End an iteration's update when the approximate KL to the rollout's policy passes this (nats per ratio).
    0: never."""
    critic_warmup: int = 0
    """Iterations at the start in which only the value head learns."""
    max_skipped: int = 10
    """Stop the run after this many optimizer steps in a row had no finite gradient."""

    def __post_init__(self) -> None:
        check_numbers(
            "ppo", self, "learning_rate", "value_learning_rate", "weight_decay", "max_grad_norm", "value_coef",
            "value_clip", "entropy_coef", "target_kl",
        )  # fmt: skip
        check_numbers("ppo", self, "clip_low", "clip_high", above=0)
        check_shares("ppo", self, "gamma", "gae_lambda", "lr_final")
        check_counts("ppo", self, "epochs", "minibatch_size", "micro_batch_size", "max_skipped", least=1)
        check_counts("ppo", self, "critic_warmup", "lr_warmup", least=0)
        check(self.clip_low < 1, "ppo.clip_low", "must be below 1", self.clip_low)
        check_counts("ppo", self, "group_size", least=2)
        check_choice("ppo.advantage", self.advantage, ("gae", "grpo"))
        check_choice("ppo.ratio_level", self.ratio_level, ("unit", "step", "chunk"))
        check_choice("ppo.lr_schedule", self.lr_schedule, ("constant", "linear", "cosine"))


@dataclass(frozen=True, kw_only=True)
class BaseRunConfig:
    """The run: seed, what is written and where."""

    seed: int = 0
    """Of weights, environments, sampling noise and shuffling."""
    output_dir: str | None = None
    """Where everything is written. None: a new folder in runs/ with model, environment and time in its name."""
    eval_episodes: int = 100
    """Held-out episodes, greedy, of each evaluation. 0: no evaluation."""
    timeout_s: int = 1800
    """Seconds after which a process that waits for another in vain gives up."""

    def __post_init__(self) -> None:
        check_seed("run", self.seed)
        check_counts("run", self, "eval_episodes", least=0)
        check_counts("run", self, "timeout_s", least=1)


@dataclass(frozen=True, kw_only=True)
class RunConfig(BaseRunConfig):
    """The run: length, seed, what is written and where. It is evaluated before and after training."""

    iterations: int = 40
    """Rollout and update, this many times."""
    eval_every: int = 0
    """Evaluate every so many iterations, too. 0: only before and after."""
    save_every: int = 0
    """Write a checkpoint every so many iterations. 0: only the policy, at the end."""
    keep_checkpoints: int = 2
    """Delete all but this many of the newest checkpoints."""
    resume: str | None = None
    """Output folder of an earlier run to go on with, exactly where its last checkpoint stands; the other options must
    be that run's."""
    trackers: tuple[str, ...] = ("tensorboard",)
    """Accelerate's trackers beside the JSON lines that are always written, e.g. wandb. "none": no other."""
    video_episodes: int = 4
    """Held-out episodes filmed at the end. 0: no video."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_counts("run", self, "iterations", "eval_every", "save_every", "video_episodes", least=0)
        check_counts("run", self, "keep_checkpoints", least=1)
        check(
            self.resume is None or self.output_dir is None,
            "run.output_dir",
            "must be left out where --run.resume names the folder",
            self.output_dir,
        )
        for name in self.trackers:
            check_choice("run.trackers", name, TRACKERS)


@dataclass(frozen=True, kw_only=True)
class ExpertConfig:
    """Demonstrations to record from the environment's scripted expert."""

    episodes: int = 2000
    """Episodes to record."""
    speed: float = 1.0
    """How fast the scripted expert moves, as a share of the largest step."""
    speed_jitter: float = 0.0
    """Each of the expert's steps is this much faster or slower, standard deviation of the logarithm."""
    noise: float = 0.0
    """Standard deviation of noise on the executed actions; the recorded ones stay clean."""

    def __post_init__(self) -> None:
        check_counts("data", self, "episodes", least=1)
        check_numbers("data", self, "speed", above=0)
        check_shares("data", self, "speed")
        check_numbers("data", self, "speed_jitter", "noise")


@dataclass(frozen=True, kw_only=True)
class DataConfig(ExpertConfig):
    """Demonstrations to learn from: recorded ones, or new ones of the environment's scripted expert."""

    path: str | None = None
    """Folder written by scripts/record_demos.py. None: record them now."""
    keep_failures: bool = True
    """Learn from episodes that did not succeed, too."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for option in dataclasses.fields(ExpertConfig):
            value = getattr(self, option.name)
            check(
                self.path is None or value == option.default,
                f"data.{option.name}",
                "must be left out where --data.path names recorded demonstrations",
                value,
            )


@dataclass(frozen=True, kw_only=True)
class SFTOptions:
    """The imitation of demonstrations."""

    learning_rate: float = 1e-3
    """AdamW's, after the warm-up; falls to a tenth along a cosine."""
    muon_learning_rate: float = 0.0
    """Muon's, on hidden matrices, instead of AdamW there; for learning from random weights, e.g. 0.02. 0: not."""
    lr_warmup: int = 100
    """Steps over which the rates rise."""
    weight_decay: float = 0.01
    """AdamW's, on matrices."""
    max_grad_norm: float = 1.0
    """Clip the gradient's global norm here. 0: never."""
    steps: int = 5000
    """Optimizer steps."""
    batch_size: int = 32
    """Frames per optimizer step, over all processes together."""
    smoothing: float = 0.0
    """Spread each target over its neighbours, standard deviation in bins. Helps to learn from scratch. 0: not."""
    repeats: int = 1
    """PI0 and PI0.5: points of the flow at which each frame is learned. The vision-language model runs once for all of
    them, so more cost little."""
    instruction_dropout: float = 0.0
    """Share of the frames whose instruction is hidden, so that the policy knows what to do without one."""

    def __post_init__(self) -> None:
        check_numbers("sft", self, "learning_rate", above=0)
        check_numbers("sft", self, "muon_learning_rate", "weight_decay", "max_grad_norm", "smoothing")
        check_shares("sft", self, "instruction_dropout")
        check_counts("sft", self, "steps", "batch_size", "repeats", least=1)
        check_counts("sft", self, "lr_warmup", least=0)


def _json_or_text(text: str) -> object:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text
