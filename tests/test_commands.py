"""Scoring, filming, exporting and recording, as the scripts do them."""

import dataclasses
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.policies import ColorSeeker
from safetensors.torch import load_file

from vla_accel.commands import export, record_demos, run_evaluation
from vla_accel.config import (
    EnvConfig,
    EvalConfig,
    ExpertConfig,
    ExportConfig,
    PolicyConfig,
    PPOConfig,
    PPOOptions,
    RecordConfig,
    RolloutConfig,
    RunConfig,
    SimulatorConfig,
    default_policy,
)
from vla_accel.demos import Demonstrations, record
from vla_accel.envs import make_env, to_observation
from vla_accel.evaluate import can_film, evaluate, film
from vla_accel.models import load_vla
from vla_accel.train import train

CPU = torch.device("cpu")


def env_config(**options):
    return EnvConfig(
        **{"name": "helpers.wandering_env:Wandering", "num_envs": 8, "options": {"image_size": "32"}, **options}
    )


# --------------------------------------------------------------------------------------------------------------------
# Films
# --------------------------------------------------------------------------------------------------------------------


def frames_by_hand(policy, job, config):
    """Play one job step by step in the bare simulator."""
    env = make_env(config.name, **config.parsed_options())
    obs, _ = env.reset(seed=job.seed, options={"task_id": job.task_id, "state_id": job.state_id})
    frames, ended = [], False
    while not ended and len(frames) < env.max_episode_steps:
        single = {
            "images": {camera: image[None] for camera, image in obs["images"].items()},
            "state": obs["state"][None],
            "task_id": np.array([obs["task_id"]]),
        }
        action = policy(policy.prepare(to_observation(single, env.instructions)), greedy=True).action[0]
        for row in action.numpy():
            obs, _, ended, _, _ = env.step(np.clip(row, env.action_space.low, env.action_space.high))
            frames.append(env.render())
            if ended or len(frames) == env.max_episode_steps:
                break
    return frames


def test_a_film_shows_every_step_of_an_episode():
    policy, config = ColorSeeker(), env_config()
    films = film(policy, policy, config, device=CPU, episodes=3, seed=1)
    assert len({one.instruction for one in films}) == 3
    for one in films:
        assert len(one.frames) == one.episode.steps
        np.testing.assert_array_equal(one.frames, frames_by_hand(policy, one.episode.job, config))


def test_a_film_shows_the_steps_inside_a_chunk(make_policy):
    policy, config = make_policy("openvla-oft"), env_config()
    policy.fit_instructions(make_env("tabletop").instructions)
    films = film(policy, policy, config, device=CPU, episodes=8)
    assert policy.chunk_size == 4
    assert any(one.episode.steps % 4 for one in films)
    for one in films:
        assert len(one.frames) == one.episode.steps
        np.testing.assert_array_equal(one.frames, frames_by_hand(policy, one.episode.job, config))


@pytest.mark.parametrize("task_id", [None, 2])
def test_films_are_of_the_first_episodes_that_are_scored(accelerator, task_id):
    policy, config = ColorSeeker(), env_config()
    scored = evaluate(accelerator, policy, policy, config, episodes=16, seed=3).episodes
    filmed = [one.episode for one in film(policy, policy, config, device=CPU, episodes=3, seed=3, task_id=task_id)]
    wanted = [(0, 0), (1, 0), (2, 0)] if task_id is None else [(2, 0), (2, 1), (2, 2)]
    assert [(e.job.task_id, e.job.state_id) for e in filmed] == wanted
    assert all(e in scored for e in filmed)


def test_an_environment_without_pictures_cannot_be_filmed():
    assert can_film(EnvConfig())
    assert not can_film(EnvConfig(name="helpers.counting_env:CountingEnv"))


# --------------------------------------------------------------------------------------------------------------------
# Scoring and export
# --------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["openvla", "openvla-oft"])
def finished_run(request, tmp_path_factory, tiny_openvla, tiny_openvla_oft):
    """A run of one iteration with a large step: its config and its result. Entropy moves it, also without success."""
    folder = {"openvla": tiny_openvla, "openvla-oft": tiny_openvla_oft}[request.param]
    config = PPOConfig(
        model=request.param,
        policy=dataclasses.replace(default_policy(request.param), path=str(folder), value_hidden=16),
        env=env_config(num_envs=4),
        rollout=RolloutConfig(num_decisions=4),
        ppo=PPOOptions(minibatch_size=8, learning_rate=0.01, epochs=1, entropy_coef=0.1),
        run=RunConfig(
            iterations=1,
            eval_episodes=16,
            video_episodes=2,
            trackers=("none",),
            output_dir=str(tmp_path_factory.mktemp("run")),
        ),
    )
    return config, train(config)


def evaluation_of(config, path, **options):
    return run_evaluation(
        EvalConfig(
            model=config.model,
            policy=dataclasses.replace(config.policy, path=str(path)),
            env=config.env,
            **{"episodes": config.run.eval_episodes, "seed": config.run.seed, **options},
        )
    )


def test_the_exported_policy_scores_as_it_did_at_the_end_of_the_run(finished_run, tmp_path, capsys):
    config, result = finished_run
    policy = export(ExportConfig(run=result["output_dir"], out=str(tmp_path / "policy")))
    again = evaluation_of(config, policy, output=str(tmp_path / "new" / "result.json"))
    assert again == result["after"]
    assert len({(e["success"], e["steps"]) for e in again["episodes"]}) > 2, "the outcomes should differ"
    written = json.loads((tmp_path / "new" / "result.json").read_text())
    assert written.pop("config")["seed"] == config.run.seed
    assert written == again
    assert "reach the blue block" in capsys.readouterr().out


def test_a_run_films_the_episodes_asked_for_and_names_their_outcome(finished_run):
    config, result = finished_run
    films = film_names(Path(result["output_dir"]) / "videos")
    outcomes = {(e["task_id"], e["state_id"]): e["success"] for e in result["after"]["episodes"]}
    assert films == [f"after_{n}_{'success' if outcomes[n, 0] else 'failure'}.mp4" for n in range(2)]


def film_names(folder):
    return sorted(file.name for file in folder.iterdir())


def test_the_films_of_a_scoring_are_one_per_task(finished_run, tmp_path):
    config, result = finished_run
    evaluation_of(config, f"{result['output_dir']}/policy", video=str(tmp_path / "films"))
    colors = ("red", "green", "blue", "yellow")
    assert film_names(tmp_path / "films") == [f"00{n}_reach_the_{color}_block.mp4" for n, color in enumerate(colors)]


def test_an_exported_policy_is_a_checkpoint_of_its_own(finished_run, tmp_path):
    config, result = finished_run
    policy = export(ExportConfig(run=result["output_dir"], out=str(tmp_path / "policy")))
    model, _ = load_vla(policy)
    before, _ = load_vla(config.policy.path)
    assert any(not torch.equal(a, b) for a, b in zip(model.parameters(), before.parameters(), strict=True))
    assert [path.name for path in tmp_path.iterdir()] == ["policy"]


def test_a_folder_that_is_no_finished_run_is_not_exported(tmp_path):
    with pytest.raises(ValueError, match=r"^--run must be the output folder of a finished run.*--run\.resume\.$"):
        export(ExportConfig(run=str(tmp_path), out=str(tmp_path / "policy")))


def test_a_damaged_policy_is_not_exported(finished_run, tmp_path):
    shutil.copytree(finished_run[1]["output_dir"], tmp_path / "run")
    weights = tmp_path / "run" / "policy" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"model\.safetensors is not a whole safetensors file"):
        export(ExportConfig(run=str(tmp_path / "run"), out=str(tmp_path / "out")))
    assert not (tmp_path / "out").exists()


def test_nothing_is_exported_over_other_files(finished_run, tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ValueError, match=r"^--out must be a new or an empty folder"):
        export(ExportConfig(run=finished_run[1]["output_dir"], out=str(tmp_path)))
    assert film_names(tmp_path) == ["file"]


def test_films_of_an_environment_without_pictures_are_refused_before_scoring(tiny_openvla, tmp_path):
    class_name = f"{__name__}:DarkTabletop"
    with pytest.raises(ValueError, match=r"^--video needs an environment that renders pictures, but is '.*Dark"):
        run_evaluation(
            EvalConfig(
                model="openvla",
                policy=PolicyConfig(path=str(tiny_openvla)),
                env=EnvConfig(name=class_name),
                video=str(tmp_path / "films"),
            )
        )


def test_a_result_that_is_a_folder_is_refused_before_scoring(tiny_openvla, tmp_path):
    config = EvalConfig(model="openvla", policy=PolicyConfig(path=str(tiny_openvla)), output=str(tmp_path))
    with pytest.raises(ValueError, match=r"^--output must name a file, not a folder, but is "):
        run_evaluation(config)


@pytest.mark.parametrize(
    ("option", "value"),
    [("episodes", 4), ("seed", 1), ("split", "train"), ("blank", "image")],
)
def test_an_option_of_scoring_changes_the_scores(finished_run, option, value):
    config, result = finished_run
    policy = f"{result['output_dir']}/policy"
    assert evaluation_of(config, policy, **{option: value}) != evaluation_of(config, policy)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_policy_is_exported_in_the_type_asked_for(finished_run, tmp_path, dtype):
    source = f"{finished_run[1]['output_dir']}"
    policy = export(ExportConfig(run=source, out=str(tmp_path / "policy"), dtype=dtype))
    stored = load_file(policy / "model.safetensors")
    assert {str(x.dtype) for x in stored.values()} == {f"torch.{dtype}"}
    before = load_file(Path(source) / "policy" / "model.safetensors")
    assert all(torch.equal(stored[name], x.to(getattr(torch, dtype))) for name, x in before.items())


def DarkTabletop():  # noqa: N802 - stands for a class
    env = make_env("tabletop")
    env.render_mode = None
    return env


# --------------------------------------------------------------------------------------------------------------------
# Recording
# --------------------------------------------------------------------------------------------------------------------


def test_recorded_demonstrations_are_those_of_the_expert(tmp_path, capsys):
    simulator = SimulatorConfig(options={"image_size": "32"})
    config = RecordConfig(
        out=str(tmp_path / "demos"), env=simulator, data=ExpertConfig(episodes=5, speed=0.5, noise=0.1), seed=7
    )
    stored = Demonstrations.load(record_demos(config))
    wanted = record(simulator, episodes=5, seed=7, speed=0.5, noise=0.1)
    for name in ("state", "action", "task_id", "episode", "success"):
        np.testing.assert_array_equal(getattr(stored, name), getattr(wanted, name))
    np.testing.assert_array_equal(stored.images["wrist"], wanted.images["wrist"])
    assert stored.instructions == wanted.instructions
    assert json.loads((tmp_path / "demos" / "recorded_with.json").read_text())["data"]["speed"] == 0.5
    solved = sum(wanted.success[wanted.episode == n][-1] for n in range(5))
    assert f"5 episodes ({solved / 5:.1%} succeed), {len(wanted)} frames" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("group", "option", "value"),
    [
        ("", "seed", 1),
        ("data", "episodes", 4),
        ("data", "speed", 0.5),
        ("data", "speed_jitter", 0.3),
        ("data", "noise", 0.3),
        ("env", "max_episode_steps", 2),
        ("env", "options", {"image_size": "32", "num_blocks": "3"}),
        ("env", "name", "helpers.wandering_env:Wandering"),
    ],
)
def test_an_option_of_recording_changes_the_demonstrations(tmp_path, group, option, value):
    def recorded(name, **changes):
        config = RecordConfig(
            out=str(tmp_path / name),
            env=SimulatorConfig(**{"options": {"image_size": "32"}, **changes.get("env", {})}),
            data=ExpertConfig(**{"episodes": 3, **changes.get("data", {})}),
            **changes.get("", {}),
        )
        demos = Demonstrations.load(record_demos(config))
        return [demos.state.tolist(), demos.action.tolist(), demos.task_id.tolist(), demos.instructions]

    assert recorded("usual") == recorded("again")
    assert recorded("changed", **{group: {option: value}}) != recorded("usual-too")


def test_nothing_is_recorded_over_other_files(tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ValueError, match=r"^--out must be a new or an empty folder"):
        record_demos(RecordConfig(out=str(tmp_path)))


def test_failed_demonstrations_can_be_left_out():
    demos = record(SimulatorConfig(max_episode_steps=3, options={"image_size": "32"}), episodes=12, seed=0)
    solved = {int(e) for e in demos.episode if demos.success[demos.episode == e].all()}
    assert 0 < len(solved) < 12
    kept = demos.successful()
    assert set(kept.episode.tolist()) == solved
    assert len(kept) == sum(demos.episode == e for e in solved).sum()
    assert kept.success.all()
    demos.success[:] = False
    with pytest.raises(ValueError, match=r"None of the demonstrations solved its task, and --data\.keep_failures"):
        demos.successful()
