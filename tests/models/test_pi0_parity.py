"""PI0 and PI0.5 against numbers that LeRobot and openpi computed with the same weights, float32 on a CPU."""

import json

import pytest
import torch
from pi0_golden import (
    ACTIONS,
    DATA,
    NOISE,
    OBSERVATION,
    PATCHES,
    STATE,
    TIME,
    VARIANTS,
    embedding_ids,
    folder,
    load,
    model,
    outputs,
)

from vla_accel.models.pi0.loading import EMBEDDING
from vla_accel.models.pi0.prefix import time_embedding

pytestmark = pytest.mark.parametrize("variant", VARIANTS)


def close(actual, expected, atol):
    torch.testing.assert_close(actual, expected, atol=atol, rtol=0)


@torch.no_grad()
def test_prefix_embeddings_match(variant):
    """Root mean square error below 1e-6 of a signal of size 1.2.

    Single entries may differ by more: the original's own are up to 4.7e-6 from a float64 evaluation.
    """
    embeds, valid = model(variant).embed_prefix(*OBSERVATION)
    expected = outputs(variant)
    assert torch.equal(valid, expected["prefix_pad_masks"])
    error = embeds[valid] - expected["prefix_embs"][valid]
    assert error.square().mean().sqrt() < 1e-6
    close(error, torch.zeros_like(error), 6e-6)


@torch.no_grad()
def test_prefix_embeddings_are_as_near_to_float64_as_the_original_s(variant):
    embeds, valid = model(variant).embed_prefix(*OBSERVATION)
    precise = load_double(variant)
    exact, _ = precise.embed_prefix(OBSERVATION[0].double(), *OBSERVATION[1:])
    ours = (embeds[valid] - exact[valid]).square().mean().sqrt()
    theirs = (outputs(variant)["prefix_embs"][valid] - exact[valid]).square().mean().sqrt()
    assert ours < 1.1 * theirs


def load_double(variant):
    import copy

    return copy.deepcopy(model(variant)).double()


@torch.no_grad()
def test_cached_keys_and_values_match(variant):
    cache, expected = model(variant).prefix_cache(*OBSERVATION), outputs(variant)
    valid = expected["prefix_pad_masks"]
    assert torch.equal(cache.lengths, valid.sum(1))
    for layer in range(3):
        for ours, name in ((cache.keys, "key"), (cache.values, "value")):
            theirs = expected[f"kv.{layer}.{name}"][:, 0][valid]
            close(ours[:, layer][cache.mask], theirs, 1e-5)


@torch.no_grad()
def test_prefix_output_matches(variant):
    cache, expected = model(variant).prefix_cache(*OBSERVATION, with_output=True), outputs(variant)
    close(cache.output[cache.mask], expected["prefix_out"][expected["prefix_pad_masks"]], 1e-5)


def test_time_embedding_matches_in_float64(variant):
    if "time_emb" in outputs(variant):
        close(time_embedding(TIME.double(), 32), outputs(variant)["time_emb"], 1e-12)


@torch.no_grad()
def test_suffix_embeddings_match(variant):
    net, expected = model(variant), outputs(variant)
    actions, cond = net._suffix(expected["x_t"], TIME)
    close(actions, expected["suffix_embs"][:, -actions.shape[1] :], 1e-6)
    if variant == "pi05":
        close(cond, expected["adarms_cond"], 1e-6)
    else:
        close(net._state_token(STATE)[:, 0], expected["suffix_embs"][:, 0], 1e-6)


@torch.no_grad()
def test_velocity_and_its_features_match(variant):
    net, expected = model(variant), outputs(variant)
    velocity, hidden = net.denoise(net.prefix_cache(*OBSERVATION), STATE, expected["x_t"], TIME)
    close(velocity, expected["v_t_joint"], 1e-5)
    close(velocity, expected["openpi.v_t_joint"], 1e-5)
    close(hidden, expected["joint_suffix_out"][:, -hidden.shape[1] :], 2e-5)


@torch.no_grad()
def test_loss_matches(variant):
    net = model(variant)
    loss = net(net.prefix_cache(*OBSERVATION), STATE, ACTIONS, noise=NOISE, time=TIME, reduction="none")
    close(loss, outputs(variant)["loss_elem"], 5e-5)


@pytest.mark.parametrize("num_steps", [4, 10])
def test_sampled_actions_match_lerobot(variant, num_steps):
    actions = model(variant).sample_actions(*OBSERVATION, STATE, noise=NOISE, num_steps=num_steps)
    close(actions, outputs(variant)[f"sampled_actions_{num_steps}"], 1e-5)


@pytest.mark.parametrize(("num_steps", "atol"), [(4, 1e-5), (10, 3e-4)])
def test_sampled_actions_match_openpi(variant, num_steps, atol, tmp_path):
    """openpi adds up the flow time in float32, which shifts ten steps by up to 2e-4; four steps are exact in binary."""
    net = load(folder(tmp_path, variant, layout="openpi"), layout="openpi")
    actions = net.sample_actions(*OBSERVATION, STATE, noise=NOISE, num_steps=num_steps)
    close(actions, outputs(variant)[f"openpi.sampled_actions_{num_steps}"], atol)


def test_gradients_match(variant):
    net, expected = load_double(variant).float(), outputs(variant)
    net(net.prefix_cache(*OBSERVATION), STATE, ACTIONS, noise=NOISE, time=TIME, reduction="none").mean().backward()
    gradients = {name: p.grad for name, p in net.named_parameters() if p.grad is not None}
    gradients[EMBEDDING], gradients[PATCHES] = gradients[EMBEDDING][embedding_ids()], gradients[PATCHES][:8]
    names = [name.removeprefix("grad.") for name in expected if name.startswith("grad.")]
    assert len(names) >= 8
    for name in names:
        close(gradients[name], expected[f"grad.{name}"], 1e-6)
    total = sum(p.grad.double().square().sum() for p in net.parameters() if p.grad is not None).sqrt()
    torch.testing.assert_close(total, expected["grad_norm_total"][0], rtol=1e-6, atol=0)


def test_bfloat16_keeps_in_float32_what_lerobot_keeps(variant, tmp_path):
    net = load(folder(tmp_path, variant), dtype="bfloat16")
    wide = {name for name, p in net.named_parameters() if p.dtype == torch.float32}
    assert wide == set(json.loads((DATA / f"float32_in_bf16_{variant}.json").read_text()))
    assert {p.dtype for p in net.parameters()} == {torch.float32, torch.bfloat16}


def test_bfloat16_samples_are_as_near_to_float32_as_lerobot_s(variant, tmp_path):
    """Rounding differs between kernels: the original's own distance from float32 is the yardstick."""
    net, expected = load(folder(tmp_path, variant), dtype="bfloat16"), outputs(variant)
    actions = net.sample_actions(*OBSERVATION, STATE, noise=NOISE)
    assert actions.dtype == torch.float32
    exact, theirs = expected["sampled_actions_10"], expected["bf16.sampled_actions_10"]
    assert (actions - exact).square().mean() < 2 * (theirs - exact).square().mean()
    assert (actions - theirs).abs().max() < 0.05
