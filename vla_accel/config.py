"""The options of each program, and how they go together: frozen dataclasses, checked when they are made.

Not here: the groups of options that they are made of (`options.py`, whose names are imported here for the callers),
reading a command line (`cli.parse_args`) and anything that acts on an option. Standard library only.
Usage: `config = PPOConfig(model="openvla", policy=PolicyConfig(temperature=0.8))`.
"""

from __future__ import annotations

import dataclasses
import typing
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from vla_accel.options import (
    DTYPES,
    BasePolicyConfig,
    BaseRunConfig,
    DataConfig,
    EnvConfig,
    ExpertConfig,
    OFTPolicyConfig,
    Pi0PolicyConfig,
    PolicyConfig,
    PPOOptions,
    RolloutConfig,
    RunConfig,
    SFTOptions,
    SimulatorConfig,
)
from vla_accel.rules import check, check_choice, check_counts, check_seed, nearest_divisor

Config = TypeVar("Config")


@dataclass(frozen=True, kw_only=True)
class PPOConfig:
    """Improve a vision-language-action policy by PPO in a simulator."""

    model: str
    """Kind of policy. The policy options are this model's own."""
    recipe: str = "tabletop"
    """Which defaults the options below have: tabletop suits the small checkpoint that ships with the package, finetune
    a pre-trained model of real size. Where --policy.path is given: finetune."""
    policy: BasePolicyConfig
    env: EnvConfig = field(default_factory=EnvConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    ppo: PPOOptions = field(default_factory=PPOOptions)
    run: RunConfig = field(default_factory=RunConfig)

    def __post_init__(self) -> None:
        _check_model(self)
        check_choice("recipe", self.recipe, tuple(RECIPES))
        rule = f"must divide env.num_envs ({self.env.num_envs})"
        groups = self.rollout.num_groups
        check(self.env.num_envs % groups == 0, "rollout.num_groups", rule, groups)
        batch = self.rollout.num_decisions * self.env.num_envs
        grpo = self.ppo.advantage == "grpo"
        rule = f"must divide env.num_envs = {self.env.num_envs}"
        check(
            not grpo or self.env.num_envs % self.ppo.group_size == 0,
            "ppo.group_size",
            rule,
            self.ppo.group_size,
            f"The nearest that does: {nearest_divisor(self.env.num_envs, self.ppo.group_size)}.",
        )
        check(
            grpo or batch % self.ppo.minibatch_size == 0,
            "ppo.minibatch_size",
            f"must divide the decisions of an iteration (rollout.num_decisions x env.num_envs = {batch})",
            self.ppo.minibatch_size,
            f"The nearest that does: {nearest_divisor(batch, self.ppo.minibatch_size)}.",
        )


@dataclass(frozen=True, kw_only=True)
class SFTConfig:
    """Teach a vision-language-action policy by imitating demonstrations."""

    model: str
    """Kind of policy. The policy options are this model's own."""
    policy: BasePolicyConfig
    env: EnvConfig = field(default_factory=EnvConfig)
    data: DataConfig = field(default_factory=DataConfig)
    sft: SFTOptions = field(default_factory=SFTOptions)
    run: BaseRunConfig = field(default_factory=BaseRunConfig)

    def __post_init__(self) -> None:
        _check_model(self)


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """Score a checkpoint, greedily, on held-out initial states."""

    model: str
    """Kind of policy. The policy options are this model's own."""
    policy: BasePolicyConfig
    env: EnvConfig = field(default_factory=EnvConfig)
    episodes: int = 100
    """Held-out episodes, spread evenly over the tasks."""
    seed: int = 0
    """Of the environments."""
    output: str | None = None
    """A JSON file for the result. None: only the table."""
    video: str | None = None
    """Folder for films of the first episodes. None: no films."""
    split: Literal["eval", "train"] = "eval"
    """Which initial states: held-out ones, or those to train on, by which one may choose settings."""
    blank: Literal["none", "image", "instruction"] = "none"
    """Control: hide the images or the instruction from the policy."""

    def __post_init__(self) -> None:
        _check_model(self)
        check_counts("", self, "episodes", least=1)
        check_seed("", self.seed)
        check_choice("split", self.split, ("eval", "train"))
        check_choice("blank", self.blank, ("none", "image", "instruction"))


@dataclass(frozen=True, kw_only=True)
class ExportConfig:
    """Copy the policy that a run has trained out of the run's folder."""

    run: str
    """Output folder of the run."""
    out: str
    """Folder for the policy; it must not hold anything yet."""
    dtype: Literal["stored", "float32", "bfloat16"] = "stored"
    """Of the written weights. stored: as the run has them."""

    def __post_init__(self) -> None:
        check_choice("dtype", self.dtype, ("stored", *DTYPES))


@dataclass(frozen=True, kw_only=True)
class RecordConfig:
    """Record demonstrations of an environment's scripted expert."""

    out: str
    """Folder for the demonstrations; it must not hold anything yet."""
    env: SimulatorConfig = field(default_factory=SimulatorConfig)
    data: ExpertConfig = field(default_factory=ExpertConfig)
    seed: int = 0
    """Of the choice of tasks and initial states, and of the noise."""

    def __post_init__(self) -> None:
        check_seed("", self.seed)


POLICY_OPTIONS: dict[str, type[BasePolicyConfig]] = {
    "openvla": PolicyConfig,
    "openvla-oft": OFTPolicyConfig,
    "pi0": Pi0PolicyConfig,
    "pi05": Pi0PolicyConfig,
}
"""Model name -> the class of its policy options."""

MODELS = tuple(POLICY_OPTIONS)

RECIPES: dict[str, PPOOptions] = {
    "tabletop": PPOOptions(),
    # After the settings published for models of 7 billion parameters (arXiv 2509.09674, 2510.06710).
    "finetune": PPOOptions(
        learning_rate=5e-6, value_learning_rate=1e-4, lr_schedule="constant", clip_high=0.28, epochs=1
    ),
}
"""Recipe name -> the defaults of the PPO options."""


def default_policy(model: str) -> BasePolicyConfig:
    """A model's policy options at their defaults.

    Raises:
        ValueError: for a model that is not one of `MODELS`.
    """
    check_choice("model", model, MODELS)
    return POLICY_OPTIONS[model]()


def default_ppo(model: str, recipe: str) -> PPOConfig:
    """A model's whole configuration at a recipe's defaults.

    Raises:
        ValueError: for an unknown model or recipe.
    """
    policy = default_policy(model)
    check_choice("recipe", recipe, tuple(RECIPES))
    return PPOConfig(model=model, recipe=recipe, policy=policy, ppo=RECIPES[recipe])


def _check_model(config: PPOConfig | SFTConfig | EvalConfig) -> None:
    check_choice("model", config.model, MODELS)
    wanted = POLICY_OPTIONS[config.model]
    check(type(config.policy) is wanted, "policy", f"must be a {wanted.__name__} for {config.model}", config.policy)


def to_dict(config: object) -> dict[str, Any]:
    """A config as plain dictionaries, ready for JSON."""
    return dataclasses.asdict(config)  # type: ignore[call-overload]


def from_dict(kind: type[Config], tree: dict[str, Any]) -> Config:
    """The config that `to_dict` wrote, also after JSON: what a run's `config.json` holds.

    Args:
        kind: its root class, e.g. `PPOConfig`.
        tree: nested dictionaries.

    Raises:
        TypeError: for an option that does not exist.
        ValueError: for a value that breaks its rule.
    """
    values: dict[str, Any] = {}
    for name, annotation in typing.get_type_hints(kind).items():
        if name not in tree:
            continue
        value = tree[name]
        if name == "policy":
            annotation = type(default_policy(tree["model"]))
        if dataclasses.is_dataclass(annotation):
            value = from_dict(typing.cast(type, annotation), value)
        values[name] = tuple(value) if isinstance(value, list) else value
    return kind(**{**tree, **values})
