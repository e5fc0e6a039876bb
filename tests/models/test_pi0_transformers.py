"""PI0 against transformers' own implementation, at other sizes than the stored numbers have.

transformers computes the time embedding in float32, which is off by 1e-4; here it is given the float64 one. Its loader
reads the folders that we save, so this also checks those.
"""

import pytest
import torch
import transformers
from packaging.version import Version

from vla_accel.models.pi0 import load_pi0, save_pi0
from vla_accel.models.pi0.prefix import time_embedding
from vla_accel.models.pi0.tiny import make_tiny_pi0

if Version(transformers.__version__) < Version("5.24"):
    pytest.skip("older releases have no PI0 or do not read LeRobot's names", allow_module_level=True)
from transformers.models import pi0 as PI0  # noqa: E402, N812

SHAPES = [
    {"image_size": 42, "patch_size": 14, "vision_width": 48, "vision_heads": 3, "width": 64, "expert_width": 32},
    {"image_size": 32, "patch_size": 8, "layers": 2, "num_heads": 4, "head_dim": 24, "chunk": 7, "vision_depth": 3},
]


def theirs(folder, config):
    """transformers' model of the folder."""
    gemma = {"model_type": "gemma", "num_hidden_layers": config.vlm["depth"], "vocab_size": config.vocab_size}
    shared = {
        "num_attention_heads": config.vlm["num_heads"],
        "num_key_value_heads": config.vlm["num_kv_heads"],
        "head_dim": config.vlm["head_dim"],
    }
    vision = {
        "model_type": "siglip_vision_model",
        "hidden_size": config.vision["width"],
        "intermediate_size": config.vision["mlp_dim"],
        "num_hidden_layers": config.vision["depth"],
        "num_attention_heads": config.vision["num_heads"],
        "patch_size": config.vision["patch_size"],
        "image_size": config.image_size,
        "vision_use_head": False,
    }
    width = config.vlm["width"]
    text = {**gemma, **shared, "hidden_size": width, "intermediate_size": config.vlm["mlp_dim"]}
    their_config = PI0.PI0Config(
        vlm_config={
            "model_type": "paligemma",
            "text_config": text,
            "vision_config": vision,
            "projection_dim": width,
            "image_token_id": config.vocab_size,
        },
        dit_config={
            **gemma,
            **shared,
            "hidden_size": config.expert["width"],
            "intermediate_size": config.expert["mlp_dim"],
        },
        chunk_size=config.chunk_size,
    )
    net, info = PI0.PI0ForConditionalGeneration.from_pretrained(folder, config=their_config, output_loading_info=True)
    missing = {name for name in info["missing_keys"] if "dit.embed_tokens" not in name}  # a table that nothing reads
    assert (missing, set(info["unexpected_keys"]), info["mismatched_keys"]) == (set(), set(), set())
    net.embed_action_time.sinusoid_embeds.forward = lambda time: time_embedding(time, config.expert["width"])
    return net.float().eval()


@pytest.fixture(scope="module", params=SHAPES, ids=["three-heads-of-image", "short-chunk"])
def pair(request, tmp_path_factory):
    """Our model, transformers' model and an observation for each, with one camera masked and padded words."""
    folder = make_tiny_pi0(tmp_path_factory.mktemp("pi0"), **request.param)
    net, processor = load_pi0(folder)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in net.parameters():  # norms and biases start at 0, which would hide mistakes
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    save_pi0(net, processor, folder)
    config, batch = net.config, 3
    images = torch.rand(batch, 3, 3, config.image_size, config.image_size, generator=generator) * 2 - 1
    image_mask = torch.tensor([[True, True, True], [True, True, False], [True, False, True]])
    tokens = torch.randint(5, 200, (batch, 9), generator=generator)
    token_mask = torch.arange(9) < torch.tensor([[9], [4], [6]])
    state = torch.randn(batch, 32, generator=generator)
    noise = torch.randn(batch, config.chunk_size, 32, generator=generator)
    patches = (config.image_size // config.vision["patch_size"]) ** 2
    slots = torch.full((batch, 3 * patches), config.vocab_size)
    inputs = {
        "input_ids": torch.cat([slots, tokens], 1),
        "pixel_values": images,
        "attention_mask": torch.cat([image_mask.repeat_interleave(patches, 1), token_mask], 1).long(),
        "pixel_attention_mask": torch.ones_like(image_mask),  # their own masking drops slots; here they are only unseen
    }
    return net, theirs(folder, config), (images, image_mask, tokens, token_mask, state), inputs, noise


def test_sampled_actions_equal_transformers(pair):
    ours, other, observation, inputs, noise = pair
    for num_steps in (1, 4, 10):
        expected = other.sample_actions(state=observation[-1], noise=noise, num_steps=num_steps, **inputs)
        actual = ours.sample_actions(*observation, noise=noise, num_steps=num_steps)
        torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)


def test_loss_and_all_gradients_equal_transformers(pair):
    ours, other, observation, inputs, noise = pair
    actions, time = noise.flip(0).roll(1, 1), torch.tensor([0.2, 0.55, 0.97])
    options = {"state": observation[-1], "noise": noise, "timestep": time, "actions": actions}
    expected = other(**options, **inputs).loss
    cache = ours.prefix_cache(*observation[:-1])
    actual = ours(cache, observation[-1], actions, noise=noise, time=time, reduction="none").mean()
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)
    expected.backward()
    actual.backward()
    theirs_by_shape = {}
    for parameter in other.parameters():
        if parameter.grad is not None and parameter.grad.any():
            theirs_by_shape.setdefault(tuple(parameter.shape), []).append(parameter)
    checked = 0
    for name, parameter in ours.named_parameters():
        if parameter.grad is None or not parameter.grad.any():
            continue
        twins = [p for p in theirs_by_shape[tuple(parameter.shape)] if torch.equal(p, parameter)]
        assert len(twins) == 1, name
        difference = (parameter.grad - twins[0].grad).abs().max()
        assert difference < 2e-6 + 1e-4 * twins[0].grad.abs().max(), name
        checked += 1
    assert checked > 80
