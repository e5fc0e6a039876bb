"""A folder as openpi's converter writes it, through `load_vla`: weights, statistics, tokenizer, actions."""

import json
import shutil

import numpy as np
import pytest
import torch
from pi0_golden import DATA, NOISE, OBSERVATION, STATE, folder, outputs, sizes, weights

from vla_accel.models import load_vla, peek_vla

DRAW = np.random.default_rng(5)
STATS = {
    part: {
        "mean": DRAW.uniform(-0.5, 0.5, dim).tolist(),
        "std": DRAW.uniform(0.2, 0.6, dim).tolist(),
        "q01": [-1.0] * dim,
        "q99": [1.0] * dim,
    }
    for part, dim in (("state", 8), ("actions", 7))
}


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    """config.json of openpi's fields, weights without an embedding of their own, assets/<data set>, a tokenizer."""
    path = folder(tmp_path_factory.mktemp("openpi"), layout="openpi")
    (path / "assets" / "our_arm").mkdir(parents=True)
    (path / "assets" / "our_arm" / "norm_stats.json").write_text(json.dumps({"norm_stats": STATS}))
    shutil.copytree(DATA / "policy" / "tokenizer", path / "tokenizer")
    return path


def test_a_converted_folder_samples_openpi_s_actions(converted):
    net, _ = load_vla(converted, **sizes("openpi"))
    assert all(torch.equal(net.state_dict()[name], x) for name, x in weights("pi0").items())
    actions = net.sample_actions(*OBSERVATION, STATE, noise=NOISE, num_steps=4)
    torch.testing.assert_close(actions, outputs("pi0")["openpi.sampled_actions_4"], atol=1e-5, rtol=0)


def test_its_processor_scales_as_openpi_does(converted):
    net, processor = load_vla(converted, **sizes("openpi"))
    state = DRAW.uniform(-1, 1, (2, 8)).astype(np.float32)
    frames = {"base_0_rgb": np.zeros((2, 40, 40, 3), np.uint8), "left_wrist_0_rgb": np.zeros((2, 40, 40, 3), np.uint8)}
    inputs = processor.prepare(frames, state, ["pick_up\nthe block"] * 2)
    mean, std = (np.array(STATS["state"][name]) for name in ("mean", "std"))
    expected = torch.from_numpy((state - mean) / (std + 1e-6)).float()
    torch.testing.assert_close(inputs["state"][:, :8], expected)
    assert not inputs["state"][:, 8:].any()
    observed = processor.model_inputs(inputs)
    assert observed["image_mask"].tolist() == [[True, True, False]] * 2
    noise = torch.randn(2, 10, 32, generator=torch.Generator().manual_seed(0))
    sampled = net.sample_actions(**observed, noise=noise, num_steps=2)
    mean, std = (torch.tensor(STATS["actions"][name]) for name in ("mean", "std"))
    torch.testing.assert_close(processor.unnormalize_actions(sampled), sampled[..., :7] * (std + 1e-6) + mean)


def test_peeking_finds_what_loading_gives(converted):
    config = peek_vla(converted, **sizes("openpi"))
    assert (config.variant, config.chunk_size, config.state_dim, config.action_dim) == ("pi0", 10, 8, 7)
