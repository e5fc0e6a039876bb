"""Every option: its default is valid, its rule refuses by name, it survives JSON, and something reads it."""

import ast
import dataclasses
import inspect
import json
import math
import types
import typing
from pathlib import Path

import pytest

import vla_accel
from vla_accel.cli import options, parse_args
from vla_accel.config import (
    MODELS,
    POLICY_OPTIONS,
    BasePolicyConfig,
    BaseRunConfig,
    DataConfig,
    EnvConfig,
    EvalConfig,
    ExpertConfig,
    ExportConfig,
    OFTPolicyConfig,
    Pi0PolicyConfig,
    PolicyConfig,
    PPOConfig,
    PPOOptions,
    RecordConfig,
    RolloutConfig,
    RunConfig,
    SFTConfig,
    SFTOptions,
    SimulatorConfig,
    default_policy,
    from_dict,
    to_dict,
)

NAN, INF = math.nan, math.inf
NOT_POSITIVE = [0.0, -1.0, NAN, INF]
NEGATIVE = [-1e-6, NAN, INF]
NOT_A_COUNT = [0, -1, 1.5]
NEGATIVE_COUNT = [-1, 0.5]
NOT_A_SHARE = [-0.1, 1.1, NAN]
NOT_A_SEED = [-1, 2**31, 0.5]

# Option -> values that break its rule. A numeric option or a choice that is missing here fails a test below.
BAD = {
    "policy.temperature": NOT_POSITIVE,
    "policy.dtype": ["float16"],
    "policy.value_hidden": NOT_A_COUNT,
    "env.max_episode_steps": NOT_A_COUNT,
    "env.num_envs": NOT_A_COUNT,
    "env.chunk_size": NOT_A_COUNT,
    "env.vectorization": ["asinc"],
    "env.timeout_s": NOT_POSITIVE,
    "rollout.num_decisions": NOT_A_COUNT,
    "rollout.num_groups": NOT_A_COUNT,
    "ppo.learning_rate": NEGATIVE,
    "ppo.value_learning_rate": NEGATIVE,
    "ppo.lr_schedule": ["cosinus"],
    "ppo.lr_final": NOT_A_SHARE,
    "ppo.lr_warmup": NEGATIVE_COUNT,
    "ppo.weight_decay": NEGATIVE,
    "ppo.max_grad_norm": NEGATIVE,
    "ppo.advantage": ["critic"],
    "ppo.group_size": [*NOT_A_COUNT, 1],
    "ppo.gamma": NOT_A_SHARE,
    "ppo.gae_lambda": NOT_A_SHARE,
    "ppo.clip_low": [*NOT_POSITIVE, 1.0],
    "ppo.clip_high": NOT_POSITIVE,
    "ppo.ratio_level": ["token"],
    "ppo.epochs": NOT_A_COUNT,
    "ppo.minibatch_size": NOT_A_COUNT,
    "ppo.micro_batch_size": NOT_A_COUNT,
    "ppo.value_coef": NEGATIVE,
    "ppo.value_clip": NEGATIVE,
    "ppo.entropy_coef": NEGATIVE,
    "ppo.target_kl": NEGATIVE,
    "ppo.critic_warmup": NEGATIVE_COUNT,
    "ppo.max_skipped": NOT_A_COUNT,
    "sft.learning_rate": NOT_POSITIVE,
    "sft.muon_learning_rate": NEGATIVE,
    "sft.smoothing": NEGATIVE,
    "sft.repeats": NOT_A_COUNT,
    "sft.instruction_dropout": [*NEGATIVE, 1.1],
    "sft.lr_warmup": NEGATIVE_COUNT,
    "sft.weight_decay": NEGATIVE,
    "sft.max_grad_norm": NEGATIVE,
    "sft.steps": NOT_A_COUNT,
    "sft.batch_size": NOT_A_COUNT,
    "data.episodes": NOT_A_COUNT,
    "data.speed": [*NOT_POSITIVE, 1.1],
    "data.speed_jitter": NEGATIVE,
    "data.noise": NEGATIVE,
    "run.seed": NOT_A_SEED,
    "run.timeout_s": NOT_A_COUNT,
    "run.eval_episodes": NEGATIVE_COUNT,
    "run.iterations": NEGATIVE_COUNT,
    "run.eval_every": NEGATIVE_COUNT,
    "run.save_every": NEGATIVE_COUNT,
    "run.keep_checkpoints": NOT_A_COUNT,
    "run.video_episodes": NEGATIVE_COUNT,
    "run.trackers": ["tensorbord"],
    "episodes": NOT_A_COUNT,
    "seed": NOT_A_SEED,
    "split": ["test"],
    "blank": ["pictures"],
    "dtype": ["float16"],
}
CASES = [(option, value) for option, values in BAD.items() for value in values]

GROUPS = {
    "policy": PolicyConfig, "env": EnvConfig, "rollout": RolloutConfig, "ppo": PPOOptions, "run": RunConfig,
    "sft": SFTOptions, "data": DataConfig,
}  # fmt: skip
ROOTS = (PPOConfig, SFTConfig, EvalConfig, ExportConfig, RecordConfig)
CLASSES = (
    *GROUPS.values(), BasePolicyConfig, BaseRunConfig, ExpertConfig, OFTPolicyConfig, Pi0PolicyConfig, SimulatorConfig,
    *ROOTS,
)  # fmt: skip


def program_of(option):
    """A root config that has the option."""
    group = option.rpartition(".")[0]
    if option == "dtype":
        return ExportConfig
    return {"sft": SFTConfig, "data": SFTConfig, "": EvalConfig}.get(group, PPOConfig)


def build(option, value):
    """The option's dataclass with this value."""
    group, _, name = option.rpartition(".")
    value = (value,) if option == "run.trackers" else value
    if group:
        return GROUPS[group](**{name: value})
    if option == "dtype":
        return ExportConfig(run="run", out="out", dtype=value)
    return EvalConfig(model="openvla", policy=PolicyConfig(), **{name: value})


def all_options(kind):
    return dict(options(kind, policy=OFTPolicyConfig if kind in (PPOConfig, SFTConfig, EvalConfig) else None))


# --------------------------------------------------------------------------------------------------------------------
# Rules
# --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("option", "value"), CASES)
def test_a_bad_value_is_refused_by_name_rule_and_value(option, value):
    with pytest.raises(ValueError, match=rf"^--{option} must ") as caught:
        build(option, value)
    assert f"but is {value!r}." in str(caught.value)


@pytest.mark.parametrize(("option", "value"), [(option, values[0]) for option, values in BAD.items()])
def test_a_bad_value_on_the_command_line_ends_with_code_2_and_one_sentence(option, value, capsys):
    with pytest.raises(SystemExit) as caught:
        parse_args(program_of(option), [f"--{option}", str(value)])
    assert caught.value.code == 2
    stdout, stderr = capsys.readouterr()
    assert stdout == ""
    (line,) = stderr.strip().splitlines()
    assert line.startswith(f"error: --{option} must ")
    assert str(value) in line


@pytest.mark.parametrize("kind", ROOTS)
def test_every_number_and_choice_has_a_rule(kind):
    def is_ruled(annotation):
        parts = typing.get_args(annotation) if isinstance(annotation, types.UnionType) else (annotation,)
        return any(part in (int, float) or typing.get_origin(part) is typing.Literal for part in parts)

    ruled = [name for name, annotation in all_options(kind).items() if is_ruled(annotation)]
    assert [name for name in ruled if name not in BAD] == []


def test_a_seed_of_recording_keeps_the_same_rule():
    with pytest.raises(ValueError, match=r"^--seed must be a whole number from 0 to 2147483647, but is -1\.$"):
        RecordConfig(out="demos", seed=-1)


def test_minibatches_must_divide_the_decisions_and_the_nearest_size_is_named():
    with pytest.raises(ValueError, match=r"^--ppo\.minibatch_size must divide .* = 96\), but is 44\. .*does: 48\.$"):
        PPOConfig(
            model="openvla",
            policy=PolicyConfig(),
            env=EnvConfig(num_envs=12),
            rollout=RolloutConfig(num_decisions=8),
            ppo=PPOOptions(minibatch_size=44),
        )


def test_environments_must_divide_into_groups_and_the_nearest_size_is_named():
    grpo = PPOOptions(advantage="grpo", group_size=5)
    with pytest.raises(ValueError, match=r"^--ppo\.group_size must divide env\.num_envs = 32, but is 5\. .*does: 4\.$"):
        PPOConfig(model="openvla", policy=PolicyConfig(), ppo=grpo)


def test_an_output_folder_beside_resume_is_refused():
    with pytest.raises(ValueError, match=r"^--run\.output_dir must be left out where --run\.resume .* but is 'b'"):
        RunConfig(resume="a", output_dir="b")


@pytest.mark.parametrize(("name", "value"), [("episodes", 3), ("speed", 0.5), ("speed_jitter", 0.1), ("noise", 0.1)])
def test_options_of_recording_beside_recorded_demonstrations_are_refused(name, value):
    with pytest.raises(ValueError, match=rf"^--data\.{name} must be left out where --data\.path "):
        DataConfig(path="demos", **{name: value})


@pytest.mark.parametrize("kind", [PPOConfig, SFTConfig, EvalConfig])
def test_policy_options_of_another_model_are_refused(kind):
    with pytest.raises(ValueError, match=r"^--policy must be a OFTPolicyConfig for openvla-oft"):
        kind(model="openvla-oft", policy=PolicyConfig())


@pytest.mark.parametrize("kind", [PPOConfig, SFTConfig, EvalConfig])
def test_an_unknown_model_is_refused_with_the_nearest_one(kind):
    with pytest.raises(ValueError, match=r"^--model must be one of .*but is 'open-vla'\. Did you mean openvla\?$"):
        kind(model="open-vla", policy=PolicyConfig())


# --------------------------------------------------------------------------------------------------------------------
# Shape
# --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", CLASSES)
def test_configs_are_frozen_and_keyword_only(kind):
    assert kind.__dataclass_params__.frozen
    assert all(f.kw_only for f in dataclasses.fields(kind))


@pytest.mark.parametrize("kind", CLASSES)
def test_every_option_is_explained(kind):
    (definition,) = ast.parse(inspect.getsource(kind)).body
    body = definition.body
    for place, node in enumerate(body):
        is_group = isinstance(node, ast.AnnAssign) and node.target.id in GROUPS
        if isinstance(node, ast.AnnAssign) and not is_group:
            after = body[place + 1]
            assert isinstance(after, ast.Expr), f"{kind.__name__}.{node.target.id} has no docstring"
            assert isinstance(after.value.value, str)


@pytest.mark.parametrize("model", MODELS)
def test_ppo_has_a_number_of_options_that_one_can_read(model):
    assert 40 <= len(dict(options(PPOConfig, policy=POLICY_OPTIONS[model]))) <= 60


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("kind", [PPOConfig, SFTConfig, EvalConfig])
def test_a_config_survives_json(kind, model):
    config = kind(model=model, policy=default_policy(model))
    if kind is PPOConfig:
        config = dataclasses.replace(
            config, env=EnvConfig(options={"num_blocks": "3"}), run=RunConfig(trackers=("wandb", "tensorboard"))
        )
    assert from_dict(kind, json.loads(json.dumps(to_dict(config)))) == config


def test_a_stored_config_with_an_unknown_option_is_refused():
    tree = to_dict(RecordConfig(out="demos"))
    tree["data"]["velocity"] = 1.0
    with pytest.raises(TypeError, match="velocity"):
        from_dict(RecordConfig, tree)


def test_environment_options_are_json_where_they_can_be_and_text_elsewhere():
    given = {"num-blocks": "3", "tasks": '["reach", "push"]', "jitter": "0.1", "flag": "true", "verb": "reach"}
    parsed = {"num_blocks": 3, "tasks": ["reach", "push"], "jitter": 0.1, "flag": True, "verb": "reach"}
    assert EnvConfig(options=given).parsed_options() == parsed


def test_every_option_is_read_outside_the_config():
    package = Path(vla_accel.__file__).parent
    reading = {
        node.attr
        for file in package.rglob("*.py")
        if file.name not in ("config.py", "options.py", "rules.py", "cli.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)
    }
    # `options` of an environment is read through `parsed_options`.
    reading |= {"options"} if "parsed_options" in reading else set()
    names = {f.name: kind.__name__ for kind in CLASSES for f in dataclasses.fields(kind)}
    assert {f"{owner}.{name}" for name, owner in names.items() if name not in reading} == set()


@pytest.mark.parametrize(
    ("words", "recipe", "learning_rate"),
    [
        ([], "tabletop", 3e-4),
        (["--policy.path", "some/folder"], "finetune", 5e-6),
        (["--policy.path=some/folder", "--recipe", "tabletop"], "tabletop", 3e-4),
        (["--recipe=finetune", "--ppo.learning-rate", "1e-5"], "finetune", 1e-5),
    ],
)
def test_a_recipe_sets_defaults_and_follows_the_checkpoint(words, recipe, learning_rate):
    config = parse_args(PPOConfig, words)
    assert (config.recipe, config.ppo.learning_rate) == (recipe, learning_rate)


def test_an_unknown_recipe_is_refused_with_the_known_ones(capsys):
    with pytest.raises(SystemExit):
        parse_args(PPOConfig, ["--recipe", "finetuned"])
    message = "error: --recipe must be one of tabletop, finetune, but is 'finetuned'. Did you mean finetune?"
    assert capsys.readouterr().err.strip() == message
