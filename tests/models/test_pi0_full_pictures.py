"""PI0 at the real grid of tokens, 256 per camera, 48 of words and a chunk of 50, against what LeRobot computed."""

import json

import pytest
import torch
from pi0_golden import DATA
from safetensors.torch import load_file, save_file

from vla_accel.models.pi0 import load_model, read_config
from vla_accel.models.pi0.loading import EMBEDDING, EXPERT_HEAD, VLM_HEAD

STORED = load_file(DATA / "tiny224.safetensors")
SIZES = {
    "vision": {"width": 32, "depth": 2, "mlp_dim": 64, "num_heads": 2},
    "vlm": {"width": 48, "depth": 2, "mlp_dim": 96, "num_heads": 8, "num_kv_heads": 1, "head_dim": 8},
    "expert": {"width": 24, "depth": 2, "mlp_dim": 48, "num_heads": 8, "num_kv_heads": 1, "head_dim": 8},
    "vocab_size": 256,
}


def part(kind):
    return {name.removeprefix(f"{kind}."): x for name, x in STORED.items() if name.startswith(f"{kind}.")}


WEIGHTS, INPUTS, EXPECTED = part("weight"), part("input"), part("output")


def observation():
    """Two observations: three cameras, and two of them."""
    pictures, mask = INPUTS["pictures"], INPUTS["img_masks"]
    images = torch.full((2, 3, *pictures.shape[1:]), -1.0)
    images[mask] = pictures
    return images, mask, INPUTS["lang_tokens"], INPUTS["lang_masks"]


@pytest.fixture(scope="module")
def net(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny224")
    config = json.loads((DATA / "config_pi0.json").read_text())
    config |= {"image_resolution": [224, 224], "tokenizer_max_length": 48, "chunk_size": 50, "n_action_steps": 50}
    for feature in config["input_features"].values():
        if feature["type"] == "VISUAL":
            feature["shape"] = [3, 224, 224]
    (folder / "config.json").write_text(json.dumps(config))
    heads = {VLM_HEAD: WEIGHTS[EMBEDDING].clone(), EXPERT_HEAD: torch.zeros(256, 24)}
    save_file({f"model.{name}": x for name, x in {**WEIGHTS, **heads}.items()}, folder / "model.safetensors")
    return load_model(folder, config=read_config(folder, **SIZES))


def close(actual, expected, atol):
    torch.testing.assert_close(actual, expected, atol=atol, rtol=0)


@torch.no_grad()
def test_every_sixteenth_prefix_embedding_matches(net):
    embeds, valid = net.embed_prefix(*observation())
    assert torch.equal(valid, EXPECTED["prefix_pad_masks"])
    assert valid.shape == (2, 3 * 256 + 48)
    kept = valid[:, ::16]
    error = embeds[:, ::16][kept] - EXPECTED["prefix_embs"][kept]
    assert error.square().mean().sqrt() < 1e-6


@torch.no_grad()
def test_velocity_matches(net):
    cache = net.prefix_cache(*observation())
    velocity, hidden = net.denoise(cache, INPUTS["state"], EXPECTED["x_t"], INPUTS["time"])
    close(velocity, EXPECTED["v_t_cached"], 1e-5)
    close(velocity, EXPECTED["v_t_joint"], 1e-5)
    close(hidden, EXPECTED["joint_suffix_out"][:, -hidden.shape[1] :], 2e-5)


@pytest.mark.parametrize("num_steps", [4, 10])
def test_sampled_actions_match(net, num_steps):
    actions = net.sample_actions(*observation(), INPUTS["state"], noise=INPUTS["noise"], num_steps=num_steps)
    close(actions, EXPECTED[f"sampled_actions_{num_steps}"], 1e-5)


def test_loss_and_gradients_match(net):
    cache = net.prefix_cache(*observation())
    known = {"noise": INPUTS["noise"], "time": INPUTS["time"]}
    loss = net(cache, INPUTS["state"], INPUTS["actions"], **known, reduction="none")
    close(loss.detach(), EXPECTED["loss_elem"], 5e-5)
    loss.mean().backward()
    gradients = dict(net.named_parameters())
    expected = part("grad")
    assert len(expected) == 13
    for name, gradient in expected.items():
        close(gradients[name].grad[: len(gradient)], gradient, 1e-6)
    net.zero_grad(set_to_none=True)
