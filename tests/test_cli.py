"""Command lines: what is read, what is refused and how, and the scripts as a user starts them."""

import importlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from vla_accel import config
from vla_accel.cli import options, parse_args, quiet, run
from vla_accel.config import (
    POLICY_OPTIONS,
    EvalConfig,
    ExportConfig,
    OFTPolicyConfig,
    PPOConfig,
    RecordConfig,
    SFTConfig,
)
from vla_accel.models import load_vla, save_vla

ROOT = Path(__file__).parents[1]
TRAIN = "vla_accel.train:train"
SMALL = [
    "--run.iterations=2",
    "--run.eval-episodes=4",
    "--run.video_episodes=1",
    "--rollout.num_decisions=4",
    "--ppo.minibatch-size=8",
    "--ppo.epochs=1",
    "--policy.value_hidden=16",
    "--env.num-envs=4",
    *("--env.options", "image_size", "32"),
]


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
        ("--model open-vla", "--model must be one of openvla, openvla-oft, but is 'open-vla'. Did you mean openvla?"),
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
            "224), but is 128. The nearest that does: 112.",
        ),
    ],
)
def test_a_wrong_command_line_gets_one_sentence(words, sentence, capsys):
    assert refusal(capsys, PPOConfig, words.split()) == f"error: {sentence}"


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


@pytest.fixture
def start(monkeypatch, capsys):
    """Run a program in this process; gives its exit code and what it wrote to standard error."""

    def run_it(kind, target, *words):
        monkeypatch.setattr(sys, "argv", ["program.py", *map(str, words)])
        code = 0
        try:
            run(kind, target)
        except SystemExit as end:
            code = end.code
        return code, capsys.readouterr().err

    return run_it


@pytest.mark.parametrize(
    ("target", "code", "message"),
    [
        ("refuse", 2, "error: --run 'a' cannot be.\n"),
        ("break_down", 1, "error: the simulator died.\n"),
        ("interrupt", 130, "interrupted\n"),
    ],
)
def test_an_error_ends_in_one_sentence_and_its_own_code(start, target, code, message):
    assert start(ExportConfig, f"{__name__}:{target}", "--run", "a", "--out", "b") == (code, message)


def test_the_whole_traceback_shows_on_request(start, monkeypatch):
    monkeypatch.setenv("VLA_ACCEL_DEBUG", "1")
    with pytest.raises(ValueError, match="cannot be"):
        start(ExportConfig, f"{__name__}:refuse", "--run", "a", "--out", "b")


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


# --------------------------------------------------------------------------------------------------------------------
# Bad input, before anything slow starts
# --------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def broken(tiny_openvla, tmp_path):
    """Make a copy of the tiny checkpoint with one thing wrong."""

    def shard_gone(folder):
        model, processor = load_vla(tiny_openvla)
        save_vla(model, processor, folder, max_shard_size="200KB")
        (folder / "model.safetensors").unlink(missing_ok=True)
        shards = sorted(folder.glob("model-*.safetensors"))
        assert len(shards) > 1
        shards[1].unlink()

    def key_renamed(folder):
        weights = load_file(folder / "model.safetensors")
        weights["language_model.model.norm.wait"] = weights.pop("language_model.model.norm.weight")
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})

    def cut_short(folder):
        file = folder / "model.safetensors"
        file.write_bytes(file.read_bytes()[:-1000])

    def six_dimensions(folder):
        statistics = json.loads((folder / "dataset_statistics.json").read_text())
        action = statistics["tabletop"]["action"]
        statistics["tabletop"]["action"] = {name: values[:6] for name, values in action.items()}
        (folder / "dataset_statistics.json").write_text(json.dumps(statistics))

    def make(kind):
        folder = tmp_path / "checkpoint"
        shutil.copytree(tiny_openvla, folder)
        {f.__name__: f for f in (shard_gone, key_renamed, cut_short, six_dimensions)}[kind](folder)
        return folder

    return make


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("shard_gone", r"lacks 1 of \d+ weight files: model-00002-of-\d+\.safetensors\. .*copy the folder again"),
        ("key_renamed", r"1 missing: language_model\.model\.norm\.weight; 1 left over: \S+\.norm\.wait"),
        ("six_dimensions", r"--env\.name must name an environment with 6-dimensional actions, .*\(this one has 7\)"),
    ],
)
def test_half_a_checkpoint_is_refused_before_the_run_has_a_folder(start, broken, tmp_path, kind, message):
    out = tmp_path / "run"
    code, error = start(PPOConfig, TRAIN, "--policy.path", broken(kind), "--run.output_dir", out, *SMALL)
    assert code == 2
    assert re.search(message, error)
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert not out.exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--policy.path {tmp}/nowhere", r"/nowhere is not a folder\. Give a checkpoint folder, or a hub name"),
        ("--policy.unnorm_key libero", r"libero.*tabletop"),
        ("--env.name tabeltop", r"unknown environment 'tabeltop'; known: .*did you mean 'tabletop'\?"),
        ("--env.options num_blokcs 3", r"'tabletop' has no option 'num_blokcs'; .*did you mean 'num_blocks'\?"),
        ("--env.options num_blocks 9", r"num_blocks must lie in \[1, 4\], got 9"),
        ("--env.chunk_size 2", r"--env\.chunk_size must be at most the policy's chunk, 1, but is 2"),
        ("--run.trackers aim", r"--run\.trackers must name installed packages, but is 'aim'\. .*pip install aim"),
        ("--run.resume {tmp}/nowhere", r"--run\.resume .*/nowhere"),
    ],
)
def test_what_cannot_work_is_refused_before_the_run_has_a_folder(start, tiny_openvla, tmp_path, words, message):
    words = words.format(tmp=tmp_path).split()
    path = [] if "--policy.path" in words else ["--policy.path", tiny_openvla]
    out = [] if "--run.resume" in words else ["--run.output_dir", tmp_path / "run"]
    code, error = start(PPOConfig, TRAIN, *SMALL, *path, *out, *words)
    assert code == 2
    assert re.search(message, error)
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_an_output_folder_below_a_file_is_refused(start, tiny_openvla, tmp_path):
    (tmp_path / "file").write_text("mine")
    code, error = start(PPOConfig, TRAIN, "--policy.path", tiny_openvla, "--run.output_dir", tmp_path / "file" / "run")
    assert code == 2
    assert re.fullmatch(r"error: --run\.output_dir must be a folder that can be written, but '.*' is not .*\n", error)


def test_an_output_folder_that_holds_a_run_is_refused_and_left_alone(start, tiny_openvla, tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"iteration": 0}\n')
    code, error = start(PPOConfig, TRAIN, "--policy.path", tiny_openvla, "--run.output_dir", tmp_path)
    assert code == 2
    assert re.fullmatch(r"error: --run\.output_dir must be new, but '.*' holds a run\. .*--run\.resume\.\n", error)
    assert [file.name for file in tmp_path.iterdir()] == ["metrics.jsonl"]


# --------------------------------------------------------------------------------------------------------------------
# As a user starts it
# --------------------------------------------------------------------------------------------------------------------

LAUNCHERS = {
    "python": [sys.executable],
    "accelerate": [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes", "1"],
}


def script(launcher, name, *words, cwd):
    """Start a script from another folder, as from a shell with an empty home."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("ACCELERATE_")}
    environment |= {"HF_HOME": str(cwd), "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    command = [*LAUNCHERS[launcher], str(ROOT / "scripts" / name), *map(str, words)]
    return subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=240, check=False,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip


def test_two_iterations_by_accelerate_launch_leave_everything_a_run_leaves(tiny_openvla, tmp_path):
    done = script("accelerate", "ppo_vla.py", "--model", "openvla", "--policy.path", tiny_openvla, *SMALL, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (out,) = (tmp_path / "runs").iterdir()
    names = {file.name for file in out.iterdir()}
    assert names >= {"config.json", "metrics.jsonl", "result.json", "curves.png", "policy", "videos", "vla_accel"}
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [row["iteration"] for row in rows] == [0, 1]
    assert all(row["ppo/first_log_ratio"] < 1e-5 for row in rows)
    assert len(list((out / "videos").glob("after_0_*.mp4"))) == 1
    load_vla(out / "policy")
    assert "Before training: " in done.stdout
    assert re.search(r"^all .*->.* 4$", done.stdout, re.MULTILINE)
    assert str(out.relative_to(tmp_path)) in done.stdout
    assert "2/2" in done.stderr
    assert "Writing model shards" not in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_script_says_what_is_wrong_in_one_line_and_ends_with_a_code(launcher, tmp_path):
    done = script(launcher, "ppo_vla.py", "--model", "open-vla", cwd=tmp_path)
    assert done.returncode == (2 if launcher == "python" else 1)  # the launcher has a code of its own
    sentence = "error: --model must be one of openvla, openvla-oft, but is 'open-vla'. Did you mean openvla?"
    assert done.stderr.splitlines().count(sentence) == 1
    before, _, after = done.stderr.partition(sentence)
    assert "Traceback" not in before
    if launcher == "python":
        assert done.stderr == f"{sentence}\n"
    else:
        assert after.startswith("\n(The traceback below is the launcher's, which only saw the script end.)\n")


@pytest.mark.parametrize("name", sorted(path.name for path in (ROOT / "scripts").glob("*.py")))
def test_a_script_is_thin_and_names_a_function_that_exists(name):
    text = (ROOT / "scripts" / name).read_text()
    assert len(text.splitlines()) < 30
    found = re.search(r'run\((\w+), "vla_accel\.(\w+):(\w+)"\)', text)
    if found:
        kind, module, function = found.groups()
        assert callable(getattr(importlib.import_module(f"vla_accel.{module}"), function))
        assert hasattr(config, kind)
