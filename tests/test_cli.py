"""Command lines: what is read, what is refused, and how a program ends."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers.programs import start

from vla_accel.cli import options, parse_args, quiet
from vla_accel.config import (
    MODELS,
    POLICY_OPTIONS,
    EvalConfig,
    ExportConfig,
    OFTPolicyConfig,
    PPOConfig,
    RecordConfig,
    SFTConfig,
)


def refusal(capsys, kind, words):
    """The one line that a refused command line ends with."""
    with pytest.raises(SystemExit) as caught:
        parse_args(kind, words)
    assert caught.value.code == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    return line


# --------------------------------------------------------------------------------------------------------------------
# Reading
# --------------------------------------------------------------------------------------------------------------------


def test_without_words_every_option_has_its_default():
    parsed = parse_args(PPOConfig, [])
    assert parsed == PPOConfig(model="openvla", policy=POLICY_OPTIONS["openvla"]())


@pytest.mark.parametrize("words", [["--model", "openvla-oft"], ["--model=openvla-oft"]])
@pytest.mark.parametrize("kind", [PPOConfig, SFTConfig, EvalConfig])
def test_the_model_chooses_the_class_of_the_policy_options(kind, words):
    parsed = parse_args(kind, ["--policy.append-stop-token", "True", *words])
    assert type(parsed) is kind
    assert parsed.model == "openvla-oft"
    assert parsed.policy == OFTPolicyConfig(append_stop_token=True)


@pytest.mark.parametrize("option", ["--ppo.learning-rate", "--ppo.learning_rate"])
@pytest.mark.parametrize("form", ["{} 1e-5", "{}=1e-5"])
def test_hyphens_and_underscores_and_both_forms_of_a_value_work(option, form):
    assert parse_args(PPOConfig, form.format(option).split()).ppo.learning_rate == 1e-5


def test_the_last_value_counts():
    words = ["--model", "openvla", "--run.seed", "1", "--run.seed", "2", "--model=openvla-oft"]
    parsed = parse_args(PPOConfig, words)
    assert (parsed.run.seed, parsed.model) == (2, "openvla-oft")


def test_lists_pairs_and_none_are_read():
    words = "--run.trackers wandb tensorboard --env.options num_blocks 3 tasks reach --env.chunk_size None"
    parsed = parse_args(PPOConfig, words.split())
    assert parsed.run.trackers == ("wandb", "tensorboard")
    assert parsed.env.options == {"num_blocks": "3", "tasks": "reach"}
    assert parsed.env.chunk_size is None


@pytest.mark.parametrize(
    ("words", "recipe"), [("", "tabletop"), ("--policy.path None", "tabletop"), ("--policy.path folder", "finetune")]
)
def test_the_recipe_follows_the_checkpoint(words, recipe):
    assert parse_args(PPOConfig, words.split()).recipe == recipe


def test_programs_without_a_policy_are_read():
    assert parse_args(ExportConfig, ["--run", "a", "--out=b"]) == ExportConfig(run="a", out="b")
    parsed = parse_args(
        RecordConfig, ["--out", "demos", "--data.episodes", "3", "--env.max-episode-steps", "5", "--seed", "4"]
    )
    assert (parsed.data.episodes, parsed.env.max_episode_steps, parsed.seed) == (3, 5, 4)


@pytest.mark.parametrize("kind", [PPOConfig, SFTConfig, EvalConfig, ExportConfig, RecordConfig])
def test_help_shows_every_option_with_its_default_and_explanation(kind, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    with pytest.raises(SystemExit) as caught:
        parse_args(kind, ["--model", "openvla-oft", "--help"] if kind in (PPOConfig, SFTConfig, EvalConfig) else ["-h"])
    assert caught.value.code == 0
    shown = capsys.readouterr().out
    names = [name for name, _ in options(kind, policy=OFTPolicyConfig)]
    assert [name for name in names if not re.search(rf"--{name.replace('_', '-')}\s", shown)] == []
    groups = {name.split(".")[0] for name in names if "." in name}
    assert [group for group in groups if f"{group} options" not in shown] == []
    assert shown.count("(default: ") + shown.count("(required)") == len(names)
    assert kind.__doc__ in " ".join(shown.split())


# --------------------------------------------------------------------------------------------------------------------
# Refusing
# --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--model open-vla", f"--model must be one of {', '.join(MODELS)}, but is 'open-vla'. Did you mean openvla?"),
        ("--model", "--model needs a value."),
        ("--run.sead 1", "--run.sead is not an option. Did you mean run.seed?"),
        ("--run.out x", "--run.out is not an option. Did you mean run.output_dir?"),
        ("--quick", "--quick is not an option. See --help."),
        (
            "--env.num_blocks 3",
            "--env.num_blocks is not an option. Did you mean env.num_envs? "
            "Options of the environment itself are pairs after --env.options.",
        ),
        (
            "--policy.append_stop_token True",
            "--policy.append_stop_token is an option of openvla-oft, not of the --model chosen.",
        ),
        ("seed 1", "'seed' does not belong to an option; options have the form --group.option value."),
        ("--run.seed", "--run.seed needs a value."),
        ("--run.seed 1 2", "--run.seed takes one value, but is given '1 2'."),
        ("--run.seed one", "--run.seed must be a whole number, but is 'one'."),
        ("--run.seed 1.5", "--run.seed must be a whole number, but is '1.5'."),
        ("--ppo.gamma high", "--ppo.gamma must be a number, but is 'high'."),
        ("--policy.freeze-vision yes", "--policy.freeze_vision must be one of True, False, but is 'yes'."),
        (
            "--ppo.ratio-level units",
            "--ppo.ratio_level must be one of unit, step, chunk, but is 'units' (Did you mean unit?).",
        ),
        ("--env.options num_blocks", "--env.options must be pairs of a name and a value, but is 'num_blocks'."),
        (
            "--rollout.num-decisions 7",
            "--ppo.minibatch_size must divide the decisions of an iteration (rollout.num_decisions x env.num_envs = "
            "224), but is 96. The nearest that does: 112.",
        ),
    ],
)
def test_a_wrong_command_line_gets_one_sentence(words, sentence, capsys):
    assert refusal(capsys, PPOConfig, words.split()) == f"error: {sentence}"


@pytest.mark.parametrize("kind", [PPOConfig, SFTConfig, EvalConfig])
def test_an_empty_path_is_not_the_small_checkpoint(kind, capsys):
    sentence = refusal(capsys, kind, ["--model", "openvla", "--policy.path", ""])
    assert sentence == "error: --policy.path must be a folder or a hub name, but is ''."


def test_a_needed_option_is_named(capsys):
    assert refusal(capsys, ExportConfig, ["--run", "a"]) == "error: --out is needed. See --help."


def test_a_program_without_a_policy_has_no_model(capsys):
    assert refusal(capsys, RecordConfig, ["--out", "a", "--model", "openvla"]) == (
        "error: --model is not an option. See --help."
    )


def test_of_many_processes_one_explains_the_command_line(capsys, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "1")
    with pytest.raises(SystemExit) as caught:
        parse_args(PPOConfig, ["--run.seed", "one"])
    assert caught.value.code == 2
    assert capsys.readouterr().err == ""


# --------------------------------------------------------------------------------------------------------------------
# Ends
# --------------------------------------------------------------------------------------------------------------------


def refuse(config):
    raise ValueError(f"--run {config.run!r} cannot be.")


def break_down(config):
    raise RuntimeError("the simulator died.")


def interrupt(config):
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("target", "code", "message"),
    [
        ("refuse", 2, "error: --run 'a' cannot be.\n"),
        ("break_down", 1, "error: the simulator died.\n"),
        ("interrupt", 130, "interrupted\n"),
    ],
)
def test_an_error_ends_in_one_sentence_and_its_own_code(capsys, target, code, message):
    assert start(capsys, ExportConfig, f"{__name__}:{target}", "--run", "a", "--out", "b") == (code, message)


def hit_by(config):
    """As a launcher does that answers Ctrl-C by ending what it started."""
    first, *later = map(int, config.run.split())
    try:
        os.kill(os.getpid(), first)
        time.sleep(20)
    finally:
        for number in later:
            os.kill(os.getpid(), number)


@pytest.mark.parametrize("signals", [[signal.SIGINT], [signal.SIGTERM], [signal.SIGINT, signal.SIGTERM]])
def test_signals_end_a_program_once_and_in_order(signals):
    code = f"from vla_accel import cli, config; cli.run(config.ExportConfig, '{__name__}:hit_by')"
    words = ["--run", " ".join(str(int(number)) for number in signals), "--out", "b"]
    paths = os.pathsep.join([str(Path(__file__).parents[1]), str(Path(__file__).parent)])
    environment = {name: value for name, value in os.environ.items() if name != "WORLD_SIZE"} | {"PYTHONPATH": paths}
    command = [sys.executable, "-c", code, *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (130, "interrupted\n")


def test_the_whole_traceback_shows_on_request(capsys, monkeypatch):
    monkeypatch.setenv("VLA_ACCEL_DEBUG", "1")
    with pytest.raises(ValueError, match="cannot be"):
        start(capsys, ExportConfig, f"{__name__}:refuse", "--run", "a", "--out", "b")


def test_loading_bars_are_silenced_and_those_of_downloads_are_not():
    from huggingface_hub.utils import are_progress_bars_disabled
    from transformers.utils import logging

    before = logging.is_progress_bar_enabled()
    try:
        quiet()
        assert not logging.is_progress_bar_enabled()
        assert not are_progress_bars_disabled()
    finally:
        if before:
            logging.enable_progress_bar()


def test_torchrun_gets_the_sentence_for_its_report(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    start(capsys, ExportConfig, f"{__name__}:refuse", "--run", "a", "--out", "b")
    left = json.loads((tmp_path / "error.json").read_text())
    assert left["message"] == "error: --run 'a' cannot be."
    assert abs(int(left["timestamp"]) - time.time()) < 60
