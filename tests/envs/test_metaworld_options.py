"""What of Meta-World can be said without its package: names, words, options. The rest is in tests/sim."""

import json

import pytest

from vla_accel.envs import make_env
from vla_accel.envs.metaworld import task_names
from vla_accel.envs.metaworld_tasks import INSTRUCTIONS, SUITES


@pytest.fixture(autouse=True)
def _as_if_installed(monkeypatch):
    monkeypatch.setattr("vla_accel.envs.metaworld.installed", lambda: True)


def test_without_the_package_the_extra_is_named(monkeypatch):
    monkeypatch.setattr("vla_accel.envs.metaworld.installed", lambda: False)
    with pytest.raises(ValueError, match=r'pip install "vla_accel\[metaworld\]"'):
        make_env("metaworld:reach")


def test_fifty_tasks_have_fifty_different_instructions():
    assert len(INSTRUCTIONS) == len(set(INSTRUCTIONS.values())) == 50


def test_the_suites_part_all_tasks_by_difficulty():
    sizes = {name: len(SUITES[name]) for name in ("easy", "medium", "hard", "very_hard")}
    assert sizes == {"easy": 28, "medium": 11, "hard": 6, "very_hard": 5}
    assert sorted(SUITES["easy"] + SUITES["medium"] + SUITES["hard"] + SUITES["very_hard"]) == sorted(INSTRUCTIONS)
    assert set(SUITES["mt10"]) <= set(SUITES["mt50"])
    assert len(set(SUITES["mt10"])) == 10


def test_names_stand_for_tasks_suites_or_several_of_both():
    assert task_names("reach") == task_names("reach-v3") == ["reach-v3"]
    assert task_names("push, reach") == ["push-v3", "reach-v3"]
    assert task_names("hard,reach") == [*SUITES["hard"], "reach-v3"]
    with pytest.raises(ValueError, match="metaworld:raech is neither .* Did you mean reach-v3?"):
        task_names("raech")
    with pytest.raises(ValueError, match="tasks must name each task once"):
        task_names("hard,push")


def test_options_shape_the_spaces_without_the_simulator():
    env = make_env("metaworld:mt10", cameras=["topview", "corner2"], image_size=32, action_dim=7)
    assert env.action_space.shape == (7,)
    assert env.observation_space["task_id"].n == 10
    assert env.observation_space["images"]["topview"].shape == (32, 32, 3)
    assert make_env("metaworld:mt10", max_episode_steps=100).max_episode_steps == 100


def test_tasks_that_cannot_all_be_kept_change_slowly():
    assert not make_env("metaworld:hard,reach").slow_task_change
    assert make_env("metaworld:mt10").slow_task_change


def test_a_file_replaces_some_of_the_instructions(tmp_path):
    file = tmp_path / "words.json"
    file.write_text(json.dumps({"reach-v3": "Reach a goal position"}))
    assert make_env("metaworld:reach,push", instructions_file=str(file)).instructions == [
        "Reach a goal position", INSTRUCTIONS["push-v3"],
    ]  # fmt: skip
    file.write_text(json.dumps({"reach": "no such task"}))
    with pytest.raises(ValueError, match="instructions_file must name tasks of Meta-World only, got \\['reach'\\]"):
        make_env("metaworld:reach", instructions_file=str(file))
    file.write_text("{not JSON")
    with pytest.raises(ValueError, match="instructions_file must be a JSON file that can be read, got '.*words.json'"):
        make_env("metaworld:reach", instructions_file=str(file))
    file.write_text(json.dumps(["reach"]))
    with pytest.raises(ValueError, match="instructions_file must hold an object"):
        make_env("metaworld:reach", instructions_file=str(file))


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("cameras", ["corner9"]), ("cameras", []), ("image_size", 8), ("quality", "best"), ("action_dim", 5),
        ("reward", "shaped"), ("max_episode_steps", 0), ("cameras", 3), ("image_size", "big"), ("quality", ["fast"]),
        ("action_dim", "four"), ("action_dim", 4.0), ("max_episode_steps", "long"), ("reward", None),
        ("instructions_file", 3), ("instructions_file", "no/such/file.json"), ("instructions_file", "."),
    ],
)  # fmt: skip
def test_a_bad_option_is_refused_by_name(option, value):
    with pytest.raises(ValueError, match=f"^{option} must "):
        make_env("metaworld:reach", **{option: value})
