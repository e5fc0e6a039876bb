"""Worker processes that raise, die, hang or stop: nothing is lost but the episode, and nothing is left behind."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from helpers.policies import CountingPolicy

from vla_accel.envs import make_vector_env, read_idle, read_step
from vla_accel.evaluate import play
from vla_accel.rollout import collect, start
from vla_accel.types import Job

pytestmark = pytest.mark.dist

CPU = torch.device("cpu")
FIRST = [Job(task_id=1, state_id=7, seed=0), Job(task_id=0, state_id=13, seed=0)]
"""Five steps until the time limit, then solved after three."""
SECOND = [Job(task_id=0, state_id=24, seed=0), Job(task_id=1, state_id=9, seed=0)]
"""Solved after four steps, then five steps until the time limit."""


@pytest.fixture
def faulty(tmp_path):
    """Build environments with a fault, two steps per decision; closed at the end."""
    opened = []

    def make(*jobs, timeout_s=30.0, **fault):
        marks = tmp_path / "marks"
        marks.mkdir(exist_ok=True)
        envs = make_vector_env(
            "helpers.faulty_env:Faulty",
            num_envs=len(jobs),
            chunk_size=2,
            jobs=list(jobs),
            env_options={"marks": str(marks), **fault},
            timeout_s=timeout_s,
        )
        opened.append(envs)
        return envs

    yield make
    for envs in opened:
        envs.close()


def collected(envs, num_decisions):
    policy = CountingPolicy(2)
    return collect(policy, policy, envs, start(envs), num_decisions=num_decisions, device=CPU)


@pytest.mark.parametrize(
    ("kind", "timeout_s"), [("raise", 30), ("unpicklable", 30), ("kill", 30), ("hang", 3), ("stop", 3)]
)
def test_a_lost_decision_is_no_sample_and_its_episode_is_played_again(faulty, kind, timeout_s):
    rollout = collected(faulty(FIRST, SECOND, kind=kind, timeout_s=timeout_s), 8)
    # The first environment fails in step 3, so in its second decision: one row is void, then the episode begins anew.
    assert rollout.valid.T.int().tolist() == [[1, 0, 1, 1, 1, 1, 1, 0], [1, 1, 1, 1, 1, 0, 0, 0]]
    assert rollout.executed.T.tolist() == [[2, 0, 2, 2, 1, 2, 1, 0], [2, 2, 2, 2, 1, 0, 0, 0]]
    assert rollout.reward.T.tolist() == [[3, 0, 3, 7, 5, 3, 3, 0], [3, 7, 3, 7, 5, 0, 0, 0]]
    assert rollout.value[:, 0].tolist() == [700, 0, 700, 702, 704, 1300, 1302, 0]
    # The decision before the failure led to step 2 of the lost episode, worth 702.
    assert rollout.next_value[:, 0].tolist() == [702, 0, 702, 704, 705, 1302, 0, 0]
    assert not (rollout.terminated | rollout.truncated)[:2].any(dim=0)[0]
    assert rollout.voided == 1
    assert sorted(map(str, (e.job for e in rollout.episodes))) == sorted(map(str, FIRST + SECOND))
    assert [(e.steps, e.total_reward) for e in rollout.episodes if e.job == FIRST[0]] == [(5, 15.0)]


@pytest.mark.parametrize("kind", ["raise", "kill"])
def test_a_failure_in_the_first_reset_is_made_good_before_anything_is_shown(faulty, kind):
    rollout = collected(faulty(FIRST, kind=kind, step=0), 3)
    assert rollout.reward.T.tolist() == [[3, 7, 5]]
    assert rollout.valid.all()
    assert rollout.voided == 1


def test_an_exception_while_the_next_episode_begins_does_not_cost_the_decision_before(faulty):
    envs = faulty(FIRST, kind="raise", step=0, state_id=13)
    rollout = collected(envs, 5)
    assert rollout.reward.T.tolist() == [[3, 7, 5, 3, 3]]
    assert rollout.next_value.T.tolist() == [[702, 704, 705, 1302, 0]]
    assert rollout.valid.all()
    assert [e.job for e in rollout.episodes] == FIRST
    assert rollout.voided == 1


def test_a_worker_killed_while_the_next_episode_begins_plays_the_unreported_one_again(faulty):
    rollout = collected(faulty(FIRST, kind="kill", step=0, state_id=13), 8)
    assert rollout.executed.T.tolist() == [[2, 2, 0, 2, 2, 1, 2, 1]]
    assert [e.job for e in rollout.episodes] == FIRST
    assert rollout.voided == 1


def test_a_worker_killed_between_two_decisions_is_noticed_by_the_next(faulty):
    envs = faulty(FIRST, SECOND, kind="raise", times=0)
    envs.reset()
    before = envs.processes[0].pid
    os.kill(before, signal.SIGKILL)
    obs, *_, infos = envs.step(np.zeros((2, 2, 2), np.float32))
    info = read_step(infos, 2)
    assert (info.executed.tolist(), info.voided.tolist(), info.idle.tolist()) == ([0, 2], [1, 0], [False, False])
    assert obs["state"].tolist() == [[1, 7, 0], [0, 24, 2]]
    assert envs.processes[0].pid != before


@pytest.mark.parametrize(("how", "timeout_s"), [(signal.SIGKILL, 30), (signal.SIGSTOP, 2)])
def test_a_call_that_one_worker_does_not_answer_leaves_the_others_as_they_were(faulty, how, timeout_s):
    envs = faulty(FIRST, SECOND, kind="raise", times=0, timeout_s=timeout_s)
    envs.reset()
    before = [process.pid for process in envs.processes]
    os.kill(before[0], how)
    with pytest.raises(RuntimeError, match="environment 0 did not answer 'episode_state'"):
        envs.call("episode_state")
    info = read_step(envs.step(np.zeros((2, 2, 2), np.float32))[4], 2)
    assert (info.executed.tolist(), info.voided.tolist()) == ([0, 2], [1, 0])
    assert envs.processes[0].pid != before[0]
    assert envs.processes[1].pid == before[1]


def test_an_idle_worker_that_dies_costs_no_episode(faulty):
    envs = faulty([], SECOND, kind="raise", times=0)
    assert read_idle(envs.reset()[1], 2).tolist() == [True, False]
    os.kill(envs.processes[0].pid, signal.SIGKILL)
    info = read_step(envs.step(np.zeros((2, 2, 2), np.float32))[4], 2)
    assert (info.voided.tolist(), info.idle.tolist()) == ([0, 0], [True, False])


@pytest.mark.parametrize("kind", ["raise", "kill"])
def test_an_environment_that_keeps_failing_ends_the_run_with_its_number_its_job_and_the_cause(faulty, kind):
    envs = faulty(SECOND, FIRST, kind=kind, times=99)
    with pytest.raises(RuntimeError, match="environment 1 failed 3 times") as caught:
        collected(envs, 20)
    assert "job 1 (Job(task_id=1, state_id=7, seed=0))" in str(caught.value)
    assert ("ValueError: the arm is broken" if kind == "raise" else "exit code -9") in str(caught.value)


def test_failures_with_finished_episodes_in_between_do_not_add_up(faulty):
    jobs = [Job(task_id=1, state_id=number, seed=0) for number in range(5)]
    marks = {"kind": "raise", "state_id": None, "step": 5, "times": 2}
    rollout = collected(faulty(jobs, **marks), 21)
    assert (rollout.voided, len(rollout.episodes)) == (2, 5)


def test_an_evaluation_with_failures_plays_every_episode_once_and_counts_the_lost_ones(faulty):
    jobs = [[Job(task_id=1, state_id=number, seed=0) for number in range(n, n + 4)] for n in (0, 10)]
    envs = faulty(*jobs, kind="kill", state_id=None, times=2)
    policy = CountingPolicy(2)
    episodes, voided = play(policy, policy, envs, device=CPU)
    assert sorted(e.job.state_id for e in episodes) == [0, 1, 2, 3, 10, 11, 12, 13]
    assert {e.steps for e in episodes} == {5}
    assert voided == 2


def test_a_lost_episode_is_resumed_where_a_checkpoint_stands(faulty):
    plain = faulty(FIRST, kind="raise", times=0)
    plain.reset()
    plain.step(np.zeros((1, 2, 2), np.float32))
    states = plain.call("episode_state")
    envs = faulty(FIRST, kind="kill", step=1)
    envs.set_attr("resume_from", states)
    obs, infos = envs.reset()  # dies while the stored actions are replayed
    assert obs["state"].tolist() == [[1, 7, 2]]
    assert infos["voided"].tolist() == [1]


def test_processes_and_files_stay_as_many_over_many_failures(faulty):
    jobs = [Job(task_id=1, state_id=number % 90, seed=0) for number in range(200)]
    envs = faulty(jobs, kind="raise", state_id=None, times=99, step=1)
    envs._failures = [-1000]
    envs.reset()
    envs.step(np.zeros((1, 2, 2), np.float32))
    processes, files = len(multiprocessing.active_children()), len(os.listdir("/proc/self/fd"))
    for _ in range(8):
        envs.step(np.zeros((1, 2, 2), np.float32))
    assert len(multiprocessing.active_children()) == processes
    assert len(os.listdir("/proc/self/fd")) <= files + 1


def test_a_worker_that_hangs_is_not_waited_for_when_closing(faulty, monkeypatch):
    monkeypatch.setattr("vla_accel.envs.workers.CLOSING_S", 1.0)
    envs = faulty(FIRST, kind="raise", times=0)
    (process,) = envs.processes
    os.kill(process.pid, signal.SIGSTOP)
    begin = time.monotonic()
    envs.close()
    assert time.monotonic() - begin < 8
    assert not process.is_alive()


def test_a_worker_that_cannot_start_is_an_error_at_once(tmp_path):
    with pytest.raises(RuntimeError, match="environment 0 could not be started"):
        make_vector_env(
            f"{__name__}:OnlyInTheParent", num_envs=1, chunk_size=1, jobs=[[]], vectorization="async",
            env_options={"parent": os.getpid()},
        )  # fmt: skip


def OnlyInTheParent(parent):  # noqa: N802
    from helpers.counting_env import CountingEnv

    if os.getpid() != parent:
        raise ValueError("not here")
    return CountingEnv()


RUN = """
import numpy as np, os, time
from vla_accel.envs import make_vector_env
from vla_accel.types import Job
if __name__ == "__main__":
    jobs = [[Job(task_id=1, state_id=7, seed=0)] * 99] * 2
    name = "helpers.counting_env:CountingEnv"
    envs = make_vector_env(name, num_envs=2, chunk_size=2, jobs=jobs, vectorization="async")
    envs.reset()
    print(*[process.pid for process in envs.processes], flush=True)
    while True:
        envs.step(np.zeros((2, 2, 2), np.float32))
        time.sleep(0.01)
"""


@pytest.mark.parametrize(("how", "to_all"), [(signal.SIGINT, False), (signal.SIGINT, True), (signal.SIGKILL, False)])
def test_an_interrupted_or_killed_run_leaves_no_process(tmp_path, how, to_all):
    (tmp_path / "run.py").write_text(RUN)
    run = subprocess.Popen(
        [sys.executable, str(tmp_path / "run.py")], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        text=True, start_new_session=True, env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    pids = [int(pid) for pid in run.stdout.readline().split()]
    assert len(pids) == 2
    (os.killpg if to_all else os.kill)(run.pid, how)
    run.wait(timeout=20)
    deadline = time.monotonic() + 10
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(alive, pids))


def alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_only_one_simulator_is_built_outside_the_workers(tmp_path):
    envs = make_vector_env(
        f"{__name__}:Marking", num_envs=3, chunk_size=2, jobs=[FIRST] * 3, env_options={"folder": str(tmp_path)},
        vectorization="async",
    )  # fmt: skip
    envs.close()
    built = [int(file.name.partition("-")[0]) for file in tmp_path.iterdir()]
    assert len(built) == 4
    assert built.count(os.getpid()) == 1


def Marking(folder):  # noqa: N802
    from helpers.counting_env import CountingEnv

    with open(f"{folder}/{os.getpid()}-{time.monotonic_ns()}", "w"):
        return CountingEnv()
