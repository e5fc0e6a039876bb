"""A run that is cut short goes on as if it had not been."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file

from vla_accel.checkpoint import checkpoints, find_checkpoint
from vla_accel.cli import parse_args
from vla_accel.config import PPOConfig
from vla_accel.train import train

WORDS = (
    "--model openvla-oft --recipe tabletop --policy.value-hidden 8 --env.options image_size 32 --env.num-envs 3 "
    "--env.max-episode-steps 10 --rollout.num-decisions 4 --ppo.minibatch-size 6 --run.iterations 4 "
    "--run.save-every 1 --run.keep-checkpoints 4 --run.eval-episodes 0 --run.video-episodes 0 --run.trackers none"
)


def options(folder, *more):
    return parse_args(PPOConfig, [*WORDS.split(), "--policy.path", str(folder), *map(str, more)])


def rows(folder):
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [{k: x for k, x in json.loads(line).items() if not k.startswith("time/")} for line in lines]


@pytest.fixture(scope="module")
def whole_run(tiny_openvla_oft, tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole") / "run"
    train(options(tiny_openvla_oft, "--run.output-dir", folder))
    return folder


@pytest.fixture
def cut_run(whole_run, tmp_path):
    """The same run as if it had been killed while it wrote its third checkpoint."""
    return cut(whole_run, tmp_path / "run")


def cut(whole_run, folder):
    shutil.copytree(whole_run, folder)
    for late in (folder / "policy", folder / "checkpoints" / "000004"):
        shutil.rmtree(late)
    (folder / "checkpoints" / "000003").rename(folder / "checkpoints" / "000003.part")
    (folder / "checkpoints" / "000003.part" / "checkpoint.json").unlink()
    (folder / "metrics.jsonl").write_text(
        "\n".join((folder / "metrics.jsonl").read_text().splitlines()[:3]) + '\n{"ite'
    )
    return folder


def test_a_run_that_was_killed_resumes_exactly(whole_run, cut_run, tiny_openvla_oft):
    # 10 steps in chunks of 4: episodes run over the checkpoint, so running ones have to be replayed.
    assert find_checkpoint(cut_run).name == "000002"
    train(options(tiny_openvla_oft, "--run.resume", cut_run))
    assert_same_run(cut_run, whole_run)


def test_a_run_of_whole_episodes_that_was_killed_resumes_exactly(tiny_openvla_oft, tmp_path):
    grpo = ("--ppo.advantage", "grpo", "--ppo.group-size", 3)
    train(options(tiny_openvla_oft, "--run.output-dir", tmp_path / "whole", *grpo))
    again = cut(tmp_path / "whole", tmp_path / "run")
    train(options(tiny_openvla_oft, "--run.resume", again, *grpo))
    assert_same_run(again, tmp_path / "whole")


def assert_same_run(run, other):
    assert rows(run) == rows(other)
    for name in ("model.safetensors", "value_head.safetensors"):
        expected, found = (load_file(folder / "policy" / name) for folder in (other, run))
        assert expected.keys() == found.keys()
        assert all(torch.equal(expected[key], found[key]) for key in expected), name


def test_the_newest_checkpoints_are_kept(whole_run, tiny_openvla_oft, tmp_path):
    assert [path.name for path in checkpoints(whole_run)] == ["000001", "000002", "000003", "000004"]
    train(options(tiny_openvla_oft, "--run.output-dir", tmp_path / "run", "--run.keep-checkpoints", 1))
    assert [path.name for path in checkpoints(tmp_path / "run")] == ["000004"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--ppo.gamma", "0.5"], r"^--ppo\.gamma must be as the run in .* was started, 0\.99, but is 0\.5\."),
        (["--run.seed", "1"], r"^--run\.seed must be as the run in .* was started, 0, but is 1\."),
        (["--run.iterations", "8"], r"^--run\.iterations must be as the run in .* was started, 4, but is 8\."),
    ],
)
def test_a_run_resumed_with_other_options_is_refused(cut_run, tiny_openvla_oft, words, message):
    with pytest.raises(ValueError, match=message):
        train(options(tiny_openvla_oft, "--run.resume", cut_run, *words))


def test_a_checkpoint_of_another_number_of_processes_is_refused(cut_run, tiny_openvla_oft):
    about = cut_run / "checkpoints" / "000002" / "checkpoint.json"
    about.write_text(json.dumps({**json.loads(about.read_text()), "world": 2}))
    with pytest.raises(ValueError, match=r"^--run\.resume must be continued as the run was started: world 2"):
        train(options(tiny_openvla_oft, "--run.resume", cut_run))
