"""No option changes nothing: for each, a tiny run with another value ends differently, or leaves something else.

A run's outcome is everything it leaves but for times and names: metrics, results, weights, files, and what the run was
built from (classes, counts of forwards), where an option is about how and not what is computed.
"""

import dataclasses
import hashlib
import importlib
import json
import shutil
from pathlib import Path

import pytest
import torch
from helpers.pi0 import make_folder as make_pi0_folder
from safetensors.torch import load_file, save_file

from vla_accel.cli import options, parse_args
from vla_accel.commands import record_demos
from vla_accel.config import POLICY_OPTIONS, PPOConfig, RecordConfig, SFTConfig
from vla_accel.models.pi0.tiny import TASKS, tiny_pi0_tokenizer

SIMULATOR = "--env.name helpers.wandering_env:Wandering --env.options image_size 32"
PPO = (
    f"{SIMULATOR} --env.num-envs 2 --rollout.num-decisions 4 --ppo.minibatch-size 4 --policy.value-hidden 8 "
    "--recipe tabletop --run.iterations 2 --run.eval-episodes 0 --run.video-episodes 0 --run.trackers none"
)
SFT = (
    f"{SIMULATOR} --policy.value-hidden 8 --data.episodes 4 --sft.steps 3 --sft.lr-warmup 0 --sft.batch-size 4 "
    "--run.eval-episodes 0"
)

# Option -> words of the changed run, and words of both runs where the effect needs them.
PPO_CASES = {
    "recipe": ("--recipe finetune", ""),
    "policy.path": ("--policy.path {root}/other", ""),
    "policy.unnorm_key": ("--policy.unnorm_key second", "--policy.path {root}/keys --policy.unnorm_key first"),
    "policy.temperature": ("--policy.temperature 0.5", ""),
    "policy.dtype": ("--policy.dtype bfloat16", ""),
    "policy.freeze_vision": ("--policy.freeze_vision True", ""),
    "policy.gradient_checkpointing": ("--policy.gradient_checkpointing True", ""),
    "policy.value_hidden": ("--policy.value_hidden 9", ""),
    "policy.value_detach": ("--policy.value_detach False", ""),
    "policy.append_stop_token": ("--policy.append_stop_token False", "--policy.append_stop_token True"),
    "env.name": ("--env.name tabletop", ""),
    "env.num_envs": ("--env.num_envs 4", ""),
    "env.chunk_size": ("--env.chunk_size 2", ""),
    "env.max_episode_steps": ("--env.max_episode_steps 2", ""),
    "env.vectorization": ("--env.vectorization async", ""),
    "env.timeout_s": ("--env.timeout_s 77", "--env.vectorization async"),
    "env.options": ("--env.options image_size 40", ""),
    "rollout.num_decisions": ("--rollout.num_decisions 6", ""),
    "rollout.num_groups": ("--rollout.num_groups 2", ""),
    "ppo.learning_rate": ("--ppo.learning_rate 1e-3", ""),
    "ppo.value_learning_rate": ("--ppo.value_learning_rate 1e-2", ""),
    "ppo.lr_schedule": ("--ppo.lr_schedule constant", ""),
    "ppo.lr_final": ("--ppo.lr_final 0.5", ""),
    "ppo.lr_warmup": ("--ppo.lr_warmup 1", ""),
    "ppo.weight_decay": ("--ppo.weight_decay 0.1", ""),
    "ppo.max_grad_norm": ("--ppo.max_grad_norm 1e-3", ""),
    "ppo.advantage": ("--ppo.advantage grpo", "--ppo.group_size 2"),
    "ppo.group_size": ("--ppo.group_size 4", "--ppo.advantage grpo --ppo.group_size 2 --env.num_envs 4"),
    "ppo.gamma": ("--ppo.gamma 0.5", ""),
    "ppo.gae_lambda": ("--ppo.gae_lambda 0.5", "--ppo.value_learning_rate 0.1"),
    "ppo.clip_low": ("--ppo.clip_low 1e-4", ""),
    "ppo.clip_high": ("--ppo.clip_high 1e-4", ""),
    "ppo.ratio_level": ("--ppo.ratio_level chunk", ""),
    "ppo.epochs": ("--ppo.epochs 1", ""),
    "ppo.minibatch_size": ("--ppo.minibatch_size 8", ""),
    "ppo.micro_batch_size": ("--ppo.micro_batch_size 1", ""),
    "ppo.value_coef": ("--ppo.value_coef 0", ""),
    "ppo.value_clip": ("--ppo.value_clip 1e-6", "--ppo.value_learning_rate 0.1"),
    "ppo.entropy_coef": ("--ppo.entropy_coef 0.1", ""),
    "ppo.normalize_advantages": ("--ppo.normalize_advantages False", ""),
    "ppo.target_kl": ("--ppo.target_kl 1e-9", ""),
    "ppo.critic_warmup": ("--ppo.critic_warmup 1", ""),
    "ppo.max_skipped": ("--ppo.max_skipped 9", "--ppo.max_skipped 1 --env.options image_size 32 reward NaN"),
    "run.seed": ("--run.seed 1", ""),
    "run.output_dir": ("--run.output_dir {root}/elsewhere", ""),
    "run.eval_episodes": ("--run.eval_episodes 4", ""),
    "run.timeout_s": ("--run.timeout_s 77", ""),
    "run.iterations": ("--run.iterations 1", ""),
    "run.eval_every": ("--run.eval_every 1", "--run.eval_episodes 4"),
    "run.save_every": ("--run.save_every 1", ""),
    "run.keep_checkpoints": ("--run.keep_checkpoints 1", "--run.save_every 1"),
    "run.resume": ("--run.resume {root}/resumable", ""),
    "run.trackers": ("--run.trackers tensorboard", ""),
    "run.video_episodes": ("--run.video_episodes 1", ""),
}
PI0 = f"{PPO} --policy.path {{root}}/pi0"
PI0_CASES = {
    "policy.path": ("--policy.path {root}/pi0-other", ""),
    "policy.dtype": ("--policy.dtype bfloat16", ""),
    "policy.gradient_checkpointing": ("--policy.gradient_checkpointing True", ""),
    "policy.value_hidden": ("--policy.value_hidden 9", ""),
    "policy.value_detach": ("--policy.value_detach False", "--policy.freeze_vlm False"),
    "policy.tokenizer": ("--policy.tokenizer {root}/words", ""),
    "policy.num_steps": ("--policy.num_steps 3", ""),
    "policy.noise": ("--policy.noise learned", "--policy.noise_level 0.5"),
    "policy.noise_level": ("--policy.noise_level 0.3", ""),
    "policy.noise_steps": ("--policy.noise_steps all", ""),
    "policy.freeze_vlm": ("--policy.freeze_vlm False", ""),
    "policy.prefix_cache_gb": ("--policy.prefix_cache_gb 0", ""),
    "policy.prefix_cache_place": ("--policy.prefix_cache_place host", ""),
    "policy.constant_dims": ("--policy.constant_dims exact", "--policy.path {root}/flat --policy.constant_dims unit"),
}
SFT_CASES = {
    "data.path": ("--data.path {root}/demos --data.episodes 2000", ""),
    "data.episodes": ("--data.episodes 5", ""),
    "data.speed": ("--data.speed 0.5", ""),
    "data.speed_jitter": ("--data.speed_jitter 0.3", ""),
    "data.noise": ("--data.noise 0.3", ""),
    "data.keep_failures": ("--data.keep_failures False", ""),
    "sft.learning_rate": ("--sft.learning_rate 1e-2", ""),
    "sft.muon_learning_rate": ("--sft.muon_learning_rate 0.02", ""),
    "sft.smoothing": ("--sft.smoothing 1.0", ""),
    "sft.repeats": ("--sft.repeats 2", "--model pi0 --policy.path {root}/pi0"),
    "sft.instruction_dropout": ("--sft.instruction_dropout 1.0", ""),
    "sft.lr_warmup": ("--sft.lr_warmup 2", ""),
    "sft.weight_decay": ("--sft.weight_decay 0.5", ""),
    "sft.max_grad_norm": ("--sft.max_grad_norm 1e-3", ""),
    "sft.steps": ("--sft.steps 2", ""),
    "sft.batch_size": ("--sft.batch_size 5", ""),
}
QUICK = ("policy.prefix_cache_gb", "ppo.gamma", "ppo.micro_batch_size", "run.save_every", "sft.batch_size")
"""What the default tests look at; the rest is marked slow."""


def test_every_option_has_a_case():
    for kind, cases in ((PPOConfig, PPO_CASES), (SFTConfig, {**PPO_CASES, **SFT_CASES})):
        names = [name for name, _ in options(kind, policy=POLICY_OPTIONS["openvla-oft"]) if name != "model"]
        assert [name for name in names if name not in cases] == []
    names = [f"policy.{option.name}" for option in dataclasses.fields(POLICY_OPTIONS["pi0"])]
    assert [name for name in names if name not in PI0_CASES] == []


def cases(table):
    return [
        pytest.param(name, *words, id=name, marks=[] if name in QUICK else pytest.mark.slow)
        for name, words in table.items()
    ]


@pytest.mark.parametrize(("option", "changed", "shared"), cases(PPO_CASES))
def test_an_option_of_ppo_changes_the_run(option, changed, shared, outcome):
    model = "--model openvla-oft"
    words = f"{model} {PPO} {shared}"
    assert outcome(PPOConfig, words) != outcome(PPOConfig, f"{words} {changed}")


@pytest.mark.parametrize(("option", "changed", "shared"), cases(PI0_CASES))
def test_an_option_of_pi0_changes_the_run(option, changed, shared, outcome):
    words = f"--model pi0 {PI0} {shared}"
    assert outcome(PPOConfig, words) != outcome(PPOConfig, f"{words} {changed}")


@pytest.mark.parametrize(("option", "changed", "shared"), cases(SFT_CASES))
def test_an_option_of_imitation_changes_the_run(option, changed, shared, outcome):
    words = f"--model openvla-oft {SFT} {shared}"
    assert outcome(SFTConfig, words) != outcome(SFTConfig, f"{words} {changed}")


def test_the_same_run_has_the_same_outcome(outcome):
    words = f"--model openvla-oft {PPO}"
    assert outcome(PPOConfig, words, again=True) == outcome(PPOConfig, words, again=True)
    assert outcome(PPOConfig, words)["weights"] is not None


# --------------------------------------------------------------------------------------------------------------------
# Runs and what they leave
# --------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def places(tiny_openvla_oft, tmp_path_factory):
    """Folders that options point to."""
    root = tmp_path_factory.mktemp("places")
    shutil.copytree(tiny_openvla_oft, root / "other")
    weights = load_file(root / "other" / "model.safetensors")
    save_file({name: x * 1.1 for name, x in weights.items()}, root / "other" / "model.safetensors")
    shutil.copytree(tiny_openvla_oft, root / "keys")
    statistics = json.loads((root / "keys" / "dataset_statistics.json").read_text())["tabletop"]
    narrow = json.loads(json.dumps(statistics).replace("1.0", "0.5"))
    (root / "keys" / "dataset_statistics.json").write_text(json.dumps({"first": statistics, "second": narrow}))
    record_demos(parse_args(RecordConfig, f"--out {root}/demos --data.episodes 2 {SIMULATOR}".split()))
    make_pi0_folder(root / "pi0")
    make_pi0_folder(root / "pi0-other", seed=1)
    make_pi0_folder(root / "flat")
    for file in (root / "flat").glob("*normalizer_processor.safetensors"):
        save_file({**load_file(file), "action.std": torch.tensor([0.0, *[0.5] * 6])}, file)
    tiny_pi0_tokenizer(["other", "words", "first", *TASKS]).save_pretrained(root / "words")
    places = {"root": root, "tiny": tiny_openvla_oft}
    _run(PPOConfig, f"--model openvla-oft {PPO} --run.save_every 1 --run.output_dir {root}/resumable", places, "")
    shutil.rmtree(root / "resumable" / "checkpoints" / "000002")
    return places


@pytest.fixture(scope="module")
def outcome(places):
    """Run a command line and tell what it leaves; the same words run once, unless asked `again`."""
    known = {}

    def run(kind, words, *, again=False):
        if again or words not in known:
            known[words] = _run(kind, words, places, f"run{len(list(places['root'].iterdir()))}")
        return known[words]

    return run


def _run(kind, words, places, name):
    words = words.format(**places)
    if "--policy.path" not in words:
        words += f" --policy.path {places['tiny']}"
    if "--run.output_dir" not in words and "--run.resume" not in words:
        words += f" --run.output_dir {places['root']}/{name}"
    module = importlib.import_module("vla_accel.train" if kind is PPOConfig else "vla_accel.sft")
    with pytest.MonkeyPatch.context() as patch:
        built = _watch(patch, module)
        try:
            program = module.train if kind is PPOConfig else module.finetune
            folder = Path(program(parse_args(kind, words.split()))["output_dir"])
        except RuntimeError as error:
            return {"error": str(error)}
    return {"place": folder.name.rstrip("0123456789"), "built": built, **_left_in(folder)}


def _left_in(folder):
    metrics = folder / "metrics.jsonl"
    rows = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []
    weights = b"".join(file.read_bytes() for file in sorted((folder / "policy").glob("*.safetensors")))
    files = sorted(str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file())
    return {
        "metrics": [{k: x for k, x in row.items() if not k.startswith("time/")} for row in rows],
        "result": json.loads((folder / "result.json").read_text()),
        "weights": hashlib.sha256(weights).hexdigest(),
        "files": [file for file in files if "tfevents" not in file and "hparams" not in file],
        "tracked": any("tfevents" in file for file in files),
    }


def _watch(patch, module):
    """What a run is built from, filled in while it runs."""
    built = {"forwards": 0}

    def watched(name, look):
        original = getattr(module, name)

        def call(*args, **options):
            value = original(*args, **options)
            look(value, options)
            return value

        patch.setattr(module, name, call)

    def look_at_policy(policy, _):
        built["keep_on_host"] = policy.keep_on_host
        built["checkpointing"] = any(getattr(module, "gradient_checkpointing", False) for module in policy.modules())
        for module in policy.modules():
            module.register_forward_hook(lambda *_: built.update(forwards=built["forwards"] + 1))

    watched("load_policy", look_at_policy)
    watched("make_accelerator", lambda _, options: built.update(timeout_s=options["timeout_s"]))
    if hasattr(module, "make_training_envs"):
        watched("make_training_envs", lambda envs, _: built.update(envs=type(envs).__name__, limit=_limit(envs)))
    return built


def _limit(envs):
    return getattr(envs, "timeout_s", None)
