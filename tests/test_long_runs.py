"""Runs with worker processes: they grow neither in number nor in size, and an interrupted one leaves nothing behind."""

import importlib
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

import pytest

from tests.distributed.launch import ROOT, clean_env
from vla_accel.cli import parse_args
from vla_accel.config import PPOConfig

pytestmark = [pytest.mark.slow, pytest.mark.dist]

WORDS = (
    "--model openvla-oft --recipe tabletop --policy.value-hidden 8 --env.options image_size 32 --env.num-envs 2 "
    "--env.vectorization async --env.max-episode-steps 10 --rollout.num-decisions 4 --ppo.minibatch-size 8 "
    "--run.eval-episodes 0 --run.video-episodes 0 --run.trackers none"
)
PAGE = os.sysconf("SC_PAGE_SIZE")


def size(pid):
    """Megabytes of memory that are the process's own."""
    _, resident, shared, *_ = Path(f"/proc/{pid}/statm").read_text().split()
    return (int(resident) - int(shared)) * PAGE / 1e6


def test_processes_files_and_memory_stay_as_they_are_over_50_iterations(tiny_openvla_oft, tmp_path, monkeypatch):
    seen, training = [], importlib.import_module("vla_accel.train")
    collect = training.collect

    def watched(model, policy, envs, *args, **options):
        workers = [process.pid for process in envs.processes]
        if len(seen) == 20:
            os.kill(workers[0], signal.SIGKILL)
        rollout = collect(model, policy, envs, *args, **options)
        workers = [process.pid for process in envs.processes]
        children = len(multiprocessing.active_children())
        seen.append((children, len(os.listdir("/proc/self/fd")), size(os.getpid()), [size(pid) for pid in workers]))
        return rollout

    monkeypatch.setattr(training, "collect", watched)
    words = [*WORDS.split(), "--policy.path", str(tiny_openvla_oft), "--run.iterations", "50"]
    result = training.train(parse_args(PPOConfig, [*words, "--run.output-dir", str(tmp_path / "run")]))
    lines = (Path(result["output_dir"]) / "metrics.jsonl").read_text().splitlines()
    assert len(seen) == len(lines) == 50
    assert sum('"rollout/voided": 1.0' in line for line in lines) == 1, "the killed worker's episode must be counted"
    children, files, own, workers = zip(*seen, strict=True)
    assert set(children) == {2}
    assert max(files[25:]) <= max(files[5:15]) + 1
    # Megabytes between the means of ten iterations each; one leaked rollout per iteration would be 3.
    assert median(own[40:]) - median(own[8:18]) < 8
    for number in range(2):
        late, early = ([sizes[number] for sizes in workers[part]] for part in (slice(40, 50), slice(22, 32)))
        assert median(late) - median(early) < 2
    assert multiprocessing.active_children() == []


@pytest.mark.parametrize("to_all", [False, True])
def test_ctrl_c_leaves_no_process(tiny_openvla_oft, tmp_path, to_all):
    words = [*WORDS.split(), "--policy.path", str(tiny_openvla_oft), "--run.iterations", "10000"]
    command = [sys.executable, str(ROOT / "scripts" / "ppo_vla.py"), *words]
    metrics = tmp_path / "run" / "metrics.jsonl"
    run = subprocess.Popen(
        [*command, "--run.output-dir", str(metrics.parent)], env=clean_env(), cwd=ROOT, start_new_session=True,
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        wait_until(lambda: metrics.exists() and metrics.read_text().count("\n") > 2, 200)
        family = members(run.pid)
        assert len(family) >= 4  # the script, two workers, the server that starts them
        (os.killpg if to_all else os.kill)(run.pid, signal.SIGINT)  # a terminal sends it to all
        _, said = run.communicate(timeout=60)
        wait_until(lambda: not members(run.pid), 20)
        assert run.returncode == 130
        assert "interrupted\n" in said
        assert "Traceback" not in said
    finally:
        for pid in members(run.pid):
            os.kill(pid, signal.SIGKILL)


def wait_until(condition, seconds):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.1)


def members(session):
    """Living processes of a session."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                state, _, _, of = (folder / "stat").read_text().rpartition(")")[2].split()[:4]
            except (FileNotFoundError, ProcessLookupError):
                continue
            if int(of) == session and state != "Z":
                found.append(int(folder.name))
    return found
