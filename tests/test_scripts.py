"""The scripts on bad input, in this process, and as a user starts them, in a process of their own."""

import importlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from datasets import Dataset
from helpers.programs import start
from safetensors.torch import load_file, save_file

from vla_accel import config
from vla_accel.config import PPOConfig, SFTConfig
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
]


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
def test_half_a_checkpoint_is_refused_before_the_run_has_a_folder(capsys, broken, tmp_path, kind, message):
    out = tmp_path / "run"
    code, error = start(capsys, PPOConfig, TRAIN, "--policy.path", broken(kind), "--run.output_dir", out, *SMALL)
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
def test_what_cannot_work_is_refused_before_the_run_has_a_folder(capsys, tiny_openvla, tmp_path, words, message):
    words = words.format(tmp=tmp_path).split()
    path = [] if "--policy.path" in words else ["--policy.path", tiny_openvla]
    out = [] if "--run.resume" in words else ["--run.output_dir", tmp_path / "run"]
    code, error = start(capsys, PPOConfig, TRAIN, *SMALL, *path, *out, *words)
    assert code == 2
    assert re.search(message, error)
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", ["missing", "empty", "other columns"])
def test_demonstrations_that_are_none_are_refused_before_the_run_has_a_folder(capsys, tiny_openvla, tmp_path, kind):
    folder = tmp_path / "demos"
    if kind == "empty":
        folder.mkdir()
    if kind == "other columns":
        Dataset.from_dict({"state": [0.0]}).save_to_disk(str(folder))
    words = ["--policy.path", tiny_openvla, "--data.path", folder, "--run.output_dir", tmp_path / "run"]
    code, error = start(capsys, SFTConfig, "vla_accel.sft:finetune", "--model", "openvla", *words)
    assert code == 2
    rule = "hold the columns action, episode" if kind == "other columns" else r"be a folder written by record_demos\.py"
    assert re.match(rf"error: --data\.path must {rule}.*, but is ", error)
    assert error.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_an_output_folder_below_a_file_is_refused(capsys, tiny_openvla, tmp_path):
    (tmp_path / "file").write_text("mine")
    code, error = start(
        capsys, PPOConfig, TRAIN, "--policy.path", tiny_openvla, "--run.output_dir", tmp_path / "file" / "run"
    )
    assert code == 2
    assert re.fullmatch(r"error: --run\.output_dir must be a folder that can be written, but '.*' is not .*\n", error)


def test_an_output_folder_that_holds_a_run_is_refused_and_left_alone(capsys, tiny_openvla, tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"iteration": 0}\n')
    code, error = start(capsys, PPOConfig, TRAIN, "--policy.path", tiny_openvla, "--run.output_dir", tmp_path)
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


def test_two_iterations_by_accelerate_launch_leave_everything_a_run_leaves(tmp_path):
    done = script("accelerate", "ppo_vla.py", "--model", "openvla", *SMALL, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (out,) = (tmp_path / "runs").iterdir()
    names = {file.name for file in out.iterdir()}
    assert names >= {"config.json", "metrics.jsonl", "result.json", "curves.png", "policy", "videos", "vla_accel"}
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [row["iteration"] for row in rows] == [0, 1]
    assert all(row["ppo/first_log_ratio"] < 1e-5 for row in rows)
    assert len(list((out / "videos").glob("after_0_*.mp4"))) == 1
    load_vla(out / "policy")
    assert "the small checkpoint that ships with vla_accel (no --policy.path given)" in done.stdout
    assert "; computing in float32; recipe tabletop." in done.stdout
    assert "Before training: " in done.stdout
    assert re.search(r"^all .*->.* 4$", done.stdout, re.MULTILINE)
    assert str(out.relative_to(tmp_path)) in done.stdout
    assert "2/2" in done.stderr
    assert "Writing model shards" not in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("model", config.MODELS)
def test_two_iterations_of_the_default_command_start_at_a_success_to_improve(model, tmp_path):
    done = script("accelerate", "ppo_vla.py", "--model", model, "--run.iterations", 2, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (result,) = (tmp_path / "runs").glob("*/result.json")
    before, after = json.loads(result.read_text()).values()
    assert (before["n"], after["n"]) == (100, 100)
    assert 0.2 <= before["success"] <= 0.7
    assert f"{model}: the small checkpoint that ships with vla_accel (no --policy.path given); " in done.stdout


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_script_says_what_is_wrong_in_one_line_and_ends_with_a_code(launcher, tmp_path):
    done = script(launcher, "ppo_vla.py", "--model", "open-vla", cwd=tmp_path)
    assert done.returncode == (2 if launcher == "python" else 1)  # the launcher has a code of its own
    sentence = f"error: --model must be one of {', '.join(config.MODELS)}, but is 'open-vla'. Did you mean openvla?"
    assert done.stderr.splitlines().count(sentence) >= 1  # some versions of the launcher repeat what the script said
    before, _, after = done.stderr.partition(sentence)
    assert "Traceback" not in before
    if launcher == "python":
        assert done.stderr == f"{sentence}\n"
    else:
        assert after.startswith("\n(The traceback below is the launcher's, which only saw the script end.)\n")


@pytest.mark.parametrize("name", ["ppo_vla", "sft_vla", "eval_vla", "export_vla", "record_demos"])
def test_a_script_is_thin_and_names_a_function_that_exists(name):
    text = (ROOT / "scripts" / f"{name}.py").read_text()
    assert len(text.splitlines()) < 15
    kind, module, function = re.search(r'run\((\w+), "vla_accel\.(\w+):(\w+)"\)', text).groups()
    assert callable(getattr(importlib.import_module(f"vla_accel.{module}"), function))
    assert hasattr(config, kind)
