"""Whole runs on several ranks: the same numbers as one process, resuming, ranks with unequal work, and Ctrl-C."""

import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.distributed.launch import ROOT, clean_env, launch
from tests.distributed.runs_worker import CHECKS

pytestmark = [pytest.mark.dist, pytest.mark.slow]

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


def parent_of(pid):
    """The process that started another; None once that is gone, or nothing but an entry in a table."""
    try:
        state, parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:2]
    except OSError:
        return None
    return None if state == "Z" else int(parent)


def started_by(pid):
    """Processes that another started, directly or not."""
    parents = {int(path.name): parent_of(path.name) for path in Path("/proc").glob("[0-9]*")}
    found = {pid}
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return found - {pid}


@contextlib.contextmanager
def launched(preset, *options, script, folder):
    """A script under the launcher, as a process that leads a session of its own; both print into a file."""
    command = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch", "--main_process_port", "0"]
    command += ["--config_file", str(ROOT / "accelerate_configs" / f"{preset}.yaml"), *options, str(ROOT / script[0])]
    folder.mkdir(exist_ok=True)
    with open(folder / "printed", "w") as log:
        run = subprocess.Popen(
            [*command, *script[1:]], env=clean_env(), cwd=ROOT, stdout=log, stderr=log, start_new_session=True
        )
    try:
        yield run
    finally:
        started = started_by(run.pid)
        for pid in {run.pid, *started} if run.poll() is None else ():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def curves_of(preset, *options, folder):
    """What each optimizer update of `curves_worker.py` reported, by the name of its run, and what was printed."""
    worker = ("tests/distributed/curves_worker.py", str(folder))
    with launched(preset, *options, script=worker, folder=folder) as run:
        code = run.wait(timeout=250)
    printed = (folder / "printed").read_text()
    assert code == 0, printed[-5000:]
    return json.loads((folder / "curves.json").read_text()), printed


@functools.cache
def alone(folder):
    return curves_of("cpu", folder=folder)[0]


@pytest.mark.parametrize("wrapper", PRESETS)
def test_loss_curves_equal_those_of_one_process(tmp_path_factory, tmp_path, wrapper):
    one = alone(tmp_path_factory.getbasetemp() / "alone")
    preset, *options = PRESETS[wrapper]
    two, printed = curves_of(preset, *options, folder=tmp_path / "run")
    assert printed.count("sharded into") == (0 if wrapper == "ddp" else 2), printed
    # At the default rates Adam makes steps of rounding errors, and longer curves drift apart; docs/distributed.md.
    for run, updates, gap in (("default options", 5, 1e-4), ("low rates", 20, 1e-5)):
        assert len(one[run]) == len(two[run]) >= updates
        for number, (left, right) in enumerate(zip(one[run][:updates], two[run], strict=False)):
            for name in ("loss/policy", "loss/value", "loss/entropy", "ppo/kl"):
                assert abs(left[name] - right[name]) < gap, (run, number, name, left[name], right[name])
        # Curves that are flat at zero would agree as well.
        assert max(abs(row["loss/policy"]) for row in one[run]) > 1e-3, one[run]
        assert max(row["ppo/kl"] for row in one[run]) > 1e-5, one[run]


@pytest.mark.skipif(not Path("/proc").exists(), reason="finds processes in /proc")
@pytest.mark.parametrize(("preset", "ranks"), [("cpu", 1), ("cpu_fsdp2", 2)])
def test_ctrl_c_ends_a_run_and_every_process_that_it_started(tmp_path, preset, ranks):
    words = (
        "--model openvla --run.iterations 999 --run.eval-episodes 0 --run.trackers none --env.vectorization async "
        f"--env.num-envs 2 --rollout.num_decisions 2 --ppo.minibatch-size 4 --run.output_dir {tmp_path / 'run'}"
    ).split()
    printed = tmp_path / "printed"
    with launched(preset, script=("scripts/ppo_vla.py", *words), folder=tmp_path) as run:
        deadline = time.monotonic() + 200
        while not (tmp_path / "run" / "metrics.jsonl").exists() and time.monotonic() < deadline:
            assert run.poll() is None, printed.read_text()
            time.sleep(0.1)
        started = started_by(run.pid)
        assert len(started) >= ranks + 2, "neither ranks nor simulators were found"
        os.killpg(run.pid, signal.SIGINT)  # as a terminal does; the launcher of several ranks passes it on
        assert run.wait(timeout=60) != 0
    deadline = time.monotonic() + 20
    while any(map(parent_of, started)) and time.monotonic() < deadline:
        time.sleep(0.1)
    left = list(filter(parent_of, started))
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    printed = printed.read_text()
    assert left == [], printed
    assert ("sharded into" in printed) == (ranks > 1)
    own = [line for line in printed.splitlines() if "interrupted" in line]
    assert own == ["interrupted"], printed
    assert f"{ROOT / 'vla_accel'}" not in printed, "a traceback of ours"
