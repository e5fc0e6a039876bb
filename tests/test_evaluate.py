"""Evaluation with a policy that solves the tabletop by eye: exact counts, equal results, and controls that bite."""

import dataclasses
import json
import subprocess
import sys

import numpy as np
import pytest
import torch
from helpers.policies import ColorSeeker

from tests.distributed.launch import ROOT, clean_env
from vla_accel.config import EnvConfig
from vla_accel.envs import make_env
from vla_accel.evaluate import Evaluation, evaluate, wilson_interval
from vla_accel.types import Episode, Job


def config(**options):
    return EnvConfig(**{"num_envs": 8, "options": {"image_size": "32"}, **options})


def run(accelerator, policy=None, *, episodes=14, **options):
    evaluation = {name: options.pop(name) for name in ("seed", "split", "blank") if name in options}
    policy = policy or ColorSeeker()
    return evaluate(accelerator, policy, policy, config(**options), episodes=episodes, **evaluation)


# --------------------------------------------------------------------------------------------------------------------
# Wilson's interval
# --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("successes", "n", "low", "high"),
    [
        # Newcombe, Statistics in Medicine 17 (1998), table I, method 3.
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
        # By hand, z^2 = 3.8415: 0.5 -+ 1.96 / 1.38415 * sqrt(0.025 + 0.0096036) = 0.5 -+ 0.2634.
        (5, 10, 0.2366, 0.7634),
        # z^2 / (10 + z^2) = 0.2775.
        (10, 10, 0.7225, 1.0),
    ],
)
def test_wilson_interval_equals_known_values(successes, n, low, high):
    assert np.round(wilson_interval(successes, n), 4).tolist() == [low, high]


def test_wilson_interval_knows_nothing_without_episodes():
    assert wilson_interval(0, 0) == (0.0, 1.0)


# --------------------------------------------------------------------------------------------------------------------
# Playing
# --------------------------------------------------------------------------------------------------------------------


def test_a_policy_that_sees_and_reads_succeeds(accelerator):
    assert run(accelerator, episodes=32).success >= 0.9


@pytest.mark.parametrize("episodes", [1, 5, 14])
@pytest.mark.parametrize("num_envs", [1, 3, 8])
def test_the_number_of_episodes_is_exact_and_the_result_free_of_the_number_of_environments(
    accelerator, episodes, num_envs
):
    result = run(accelerator, episodes=episodes, num_envs=num_envs, max_episode_steps=5)
    assert len(result.episodes) == result.summary()["n"] == episodes
    assert result == run(accelerator, episodes=episodes, num_envs=5, max_episode_steps=5)


def test_results_are_mixed_in_the_test_of_their_equality(accelerator):
    outcomes = {episode.success for episode in run(accelerator, max_episode_steps=5).episodes}
    assert outcomes == {True, False}


def test_only_held_out_states_are_played_spread_over_the_tasks(accelerator):
    env = make_env("tabletop")
    result = run(accelerator, episodes=14)
    jobs = [episode.job for episode in result.episodes]
    assert all(job.state_id in env.state_ids["eval"] for job in jobs)
    assert not any(job.state_id in env.state_ids["train"] for job in jobs)
    assert np.bincount([job.task_id for job in jobs]).tolist() == [4, 4, 3, 3]
    assert len({(job.task_id, job.state_id) for job in jobs}) == 14
    assert result.instructions == env.instructions


def test_the_same_seed_plays_the_same_episodes(accelerator):
    first, second, other = (run(accelerator, episodes=6, seed=seed) for seed in (3, 3, 4))
    assert first == second
    assert [e.job.seed for e in first.episodes] != [e.job.seed for e in other.episodes]


def test_training_states_are_played_where_they_are_asked_for(accelerator):
    result = run(accelerator, episodes=6, split="train", max_episode_steps=2)
    assert {e.job.state_id for e in result.episodes} <= set(range(1000, 1_000_000))


def test_the_time_limit_of_the_config_holds(accelerator):
    result = run(accelerator, episodes=6, max_episode_steps=2)
    assert [(e.steps, e.truncated, e.success) for e in result.episodes] == [(2, True, False)] * 6


@pytest.mark.parametrize("blank", ["none", "image", "instruction"])
def test_blanking_hides_from_the_policy_what_it_says_and_nothing_else(accelerator, blank):
    policy = ColorSeeker()
    run(accelerator, policy, episodes=4, num_envs=4, blank=blank, max_episode_steps=3)
    plain = ColorSeeker()
    run(accelerator, plain, episodes=4, num_envs=4, max_episode_steps=3)
    first, untouched = policy.seen[0], plain.seen[0]
    assert (first.images["wrist"].max() == 0) == (blank == "image")
    assert np.array_equal(first.images["wrist"], untouched.images["wrist"]) == (blank != "image")
    assert first.instructions == ([""] * 4 if blank == "instruction" else untouched.instructions)
    assert np.array_equal(first.state, untouched.state)


@pytest.mark.parametrize("blank", ["image", "instruction"])
def test_without_image_or_instruction_the_policy_fails(accelerator, blank):
    assert run(accelerator, episodes=12, blank=blank).success <= 0.1


def test_finished_environments_cost_no_forward(accelerator):
    policy = ColorSeeker()
    result = run(accelerator, policy, episodes=5, num_envs=4)
    assert sum(len(obs) for obs in policy.seen) == sum(episode.steps for episode in result.episodes)


def test_evaluating_leaves_the_noise_of_rollouts_alone(accelerator, make_policy):
    policy = make_policy("openvla")
    policy.seed(0, first_env=0, num_envs=2)
    before = [stream.get_state() for stream in policy.streams]
    run(accelerator, policy, episodes=3, max_episode_steps=2)
    assert all(torch.equal(stream.get_state(), x) for stream, x in zip(policy.streams, before, strict=True))


@pytest.mark.dist
@pytest.mark.parametrize("num_envs", [1, 8])
def test_worker_processes_give_the_same_result_as_one_process(accelerator, num_envs):
    result = run(accelerator, num_envs=num_envs, vectorization="async", max_episode_steps=5)
    assert result == run(accelerator, max_episode_steps=5)


@pytest.mark.parametrize("model", ["openvla", "openvla-oft"])
def test_a_vision_language_action_policy_is_evaluated_alike_on_any_number_of_environments(
    accelerator, make_policy, model
):
    policy = make_policy(model)
    results = [run(accelerator, policy, episodes=5, num_envs=num, max_episode_steps=6) for num in (1, 4)]
    assert results[0] == results[1]


# --------------------------------------------------------------------------------------------------------------------
# The report
# --------------------------------------------------------------------------------------------------------------------


def episode(task_id, *, success, steps=5, success_at_end=None, success_step=None):
    at_end = success if success_at_end is None else success_at_end
    job = Job(task_id=task_id, state_id=steps, seed=1)
    return Episode(
        job=job, success=success, success_at_end=at_end, steps=steps, total_reward=float(success),
        truncated=not success, success_step=(success_step or steps) if success else None,
    )  # fmt: skip


REPORT = Evaluation(
    episodes=[
        episode(0, success=True, steps=4),
        episode(0, success=True, steps=8, success_at_end=False),
        episode(0, success=False, steps=16),
        episode(2, success=False, steps=16),
    ],
    instructions=["reach the red block", "never played", "push it"],
)


def test_the_report_counts_over_all_and_per_task():
    report = REPORT.to_dict()
    assert (report["success"], report["n"], report["success_at_end"]) == (0.5, 4, 0.25)
    assert report["median_steps_to_success"] == 6.0
    assert report["interval_95"] == list(wilson_interval(2, 4))
    assert list(report["tasks"]) == ["reach the red block", "push it"]
    assert report["tasks"]["reach the red block"]["success"] == 2 / 3
    assert report["tasks"]["push it"]["median_steps_to_success"] is None
    assert [(e["state_id"], e["success"]) for e in report["episodes"]] == [(4, 1), (8, 1), (16, 0), (16, 0)]


def test_the_median_is_of_the_first_success_where_it_does_not_end_the_episode():
    episodes = [episode(0, success=True, steps=300, success_step=step) for step in (20, 30, 70)]
    report = dataclasses.replace(REPORT, episodes=episodes).to_dict()
    assert report["median_steps_to_success"] == 30
    assert [(e["steps"], e["success_step"]) for e in report["episodes"]] == [(300, 20), (300, 30), (300, 70)]


def test_the_table_has_a_row_per_task_and_one_for_all():
    lines = REPORT.table().splitlines()
    assert len(lines) == 4
    assert lines[1].startswith("reach the red block    66.7%      3")
    assert lines[-1].split()[:3] == ["all", "50.0%", "4"]


# --------------------------------------------------------------------------------------------------------------------
# On several ranks
# --------------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_script_gives_the_same_result_on_any_number_of_ranks_and_environments(one_by_one, tmp_path, ranks):
    result = scored(tmp_path / "result.json", ranks, num_envs=8)
    assert result == one_by_one
    assert {episode["success"] for episode in result["episodes"]} == {True, False}


@pytest.fixture(scope="module")
def one_by_one(tmp_path_factory):
    return scored(tmp_path_factory.mktemp("eval") / "result.json", 1, num_envs=1)


def scored(file, ranks, *, num_envs):
    """What `scripts/eval_vla.py` writes for the shipped policy: 13 episodes, which divide evenly by nothing."""
    command = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch", "--main_process_port", "0"]
    command += ["--config_file", str(ROOT / "accelerate_configs" / ("cpu.yaml" if ranks == 1 else "ddp.yaml"))]
    command += ["--mixed_precision", "no", "--num_processes", str(ranks), str(ROOT / "scripts" / "eval_vla.py")]
    command += [*f"--model openvla --episodes 13 --output {file} --env.num_envs {num_envs}".split()]
    done = subprocess.run(command, env=clean_env(), cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-5000:]
    result = json.loads(file.read_text())
    del result["config"]  # says how many environments there were
    return result


def test_tasks_that_share_their_words_have_rows_of_their_own():
    report = dataclasses.replace(REPORT, instructions=["reach", "reach", "reach"])
    tasks = report.to_dict()["tasks"]
    assert {name: row["n"] for name, row in tasks.items()} == {"reach (task 0)": 3, "reach (task 2)": 1}
