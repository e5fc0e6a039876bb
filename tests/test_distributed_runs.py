"""Whole runs on several ranks: the same numbers as one process, resuming, and ranks with unequal work."""

import functools
import json
import subprocess
import sys

import pytest

from tests.distributed.launch import ROOT, clean_env, launch
from tests.distributed.runs_worker import CHECKS, CURVES, metrics_of

pytestmark = [pytest.mark.dist, pytest.mark.slow]

# Rates at which Adam does not blow rounding errors up to steps: with the tabletop's own, one process already differs
# from itself by 3e-4 when its micro-batches have another size.
RUN = (
    "--model", "openvla", "--run.iterations", "5", "--run.eval-episodes", "0", "--run.video_episodes", "0",
    "--rollout.num_decisions", "8", "--env.num-envs", "8", "--ppo.minibatch-size", "32", "--ppo.micro_batch_size", "16",
    "--ppo.epochs", "2", "--ppo.learning-rate", "3e-5", "--ppo.value-learning-rate", "1e-4",
)  # fmt: skip
PRESETS = {
    "ddp": ("ddp", "--mixed_precision", "no", "--num_processes", "2"),
    "fsdp1": ("cpu_fsdp1",),
    "fsdp2": ("cpu_fsdp2",),
}


@pytest.fixture(scope="module")
def outcome(tmp_path_factory):
    return launch(
        "runs_worker.py", str(tmp_path_factory.mktemp("runs")), "fsdp1", "fsdp2", "ddp", ranks=2, timeout_s=280
    )


@pytest.mark.parametrize("title", CHECKS)
@pytest.mark.parametrize("wrapper", ["fsdp1", "fsdp2", "ddp"])
def test_on_two_ranks(outcome, wrapper, title):
    outcome.require(f"{wrapper}: {title}")


def script(preset, *options, folder):
    """Run the script as the README says and return its curves and what it printed."""
    command = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch", "--main_process_port", "0"]
    command += ["--config_file", str(ROOT / "accelerate_configs" / f"{preset}.yaml"), *options]
    command += [str(ROOT / "scripts" / "ppo_vla.py"), *RUN, "--run.output_dir", str(folder)]
    done = subprocess.run(command, env=clean_env(), cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-5000:]
    return metrics_of(folder), done.stdout + done.stderr


@functools.cache
def alone(folder):
    return script("cpu", folder=folder)[0]


@pytest.mark.parametrize("wrapper", PRESETS)
def test_loss_curves_equal_those_of_one_process(tmp_path_factory, tmp_path, wrapper):
    one = alone(tmp_path_factory.getbasetemp() / "alone")
    preset, *options = PRESETS[wrapper]
    two, printed = script(preset, *options, folder=tmp_path / "run")
    assert ("sharded into" in printed) == (wrapper != "ddp"), printed
    assert len(one) == len(two) == 5
    for left, right in zip(one, two, strict=True):
        for name in CURVES:
            assert abs(left[name] - right[name]) < 1e-5, (name, left["iteration"], left[name], right[name])
    # Curves that are flat at zero would agree as well.
    assert any(abs(row["loss/policy"]) > 1e-3 for row in one), json.dumps(one)
    assert any(row["rollout/reward"] > 0 for row in one)
