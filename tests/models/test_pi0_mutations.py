"""The mistakes that ports of PI0 make: each one breaks parity, so the parity tests would see it."""

import math

import pytest
import torch
from pi0_golden import NOISE, OBSERVATION, SIZES, STATE, TIME, model, outputs

from vla_accel.models.pi0 import layers, modeling, prefix, vision

TOLERANCE = 1e-5  # of test_pi0_parity, for sampled actions


def error(net, variant="pi0", num_steps=10):
    actions = net.sample_actions(*OBSERVATION, STATE, noise=NOISE, num_steps=num_steps)
    return (actions - outputs(variant)[f"sampled_actions_{num_steps}"]).abs().max().item()


def embed_unscaled(monkeypatch):
    monkeypatch.setattr(layers.GemmaStack, "embed", lambda self, tokens: self.embed_tokens(tokens))


def embed_scaled_twice(monkeypatch):
    plain = layers.GemmaStack.embed
    monkeypatch.setattr(layers.GemmaStack, "embed", lambda self, t: plain(self, t) * self.sizes.width**0.5)


def images_divided_by_the_width(monkeypatch):
    """What transformers did before 5.4."""
    plain = modeling.Pi0Model.embed_images
    monkeypatch.setattr(
        modeling.Pi0Model, "embed_images", lambda self, x: plain(self, x) / SIZES["vlm"]["width"] ** 0.5
    )


def float32_time_embedding(monkeypatch):
    def embedding(time, dim, *, min_period, max_period):
        period = min_period * (max_period / min_period) ** torch.linspace(0, 1, dim // 2)
        angle = 1.0 / period * 2 * math.pi * time[:, None]
        return torch.cat([angle.sin(), angle.cos()], -1)

    monkeypatch.setattr(modeling, "time_embedding", embedding)


def times_added_up_in_float32(monkeypatch):
    def times(num_steps):
        step, now, result = torch.tensor(-1.0 / num_steps), torch.tensor(1.0), []
        for _ in range(num_steps):
            result.append(now.item())
            now = now + step
        return result

    monkeypatch.setattr(modeling, "denoising_times", times)


def masked_tokens_count_as_positions(monkeypatch):
    monkeypatch.setattr(prefix.PrefixCache, "lengths", property(lambda self: torch.full((3,), self.mask.shape[1])))


def padding_is_seen(monkeypatch):
    monkeypatch.setattr(modeling, "pack", lambda embeds, valid: (embeds, torch.ones_like(valid)))


def norm_weight_without_the_one(monkeypatch):
    def forward(self, x, cond=None):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.weight, None

    monkeypatch.setattr(layers.RMSNorm, "forward", forward)


def rotation_of_neighbours(monkeypatch):
    def rotate(x, table):
        cos, sin = (part.to(x.dtype)[..., part.shape[-1] // 2 :] for part in table)
        even, odd = x.unflatten(-1, (-1, table[0].shape[-1])).unflatten(-1, (-1, 2)).unbind(-1)
        return torch.stack([even * cos - odd * sin, odd * cos + even * sin], -1).flatten(-2).flatten(-2)

    monkeypatch.setattr(layers, "rotate", rotate)


def exact_gelu(monkeypatch):
    for module in (layers, vision):
        monkeypatch.setattr(module, "gelu", layers.F.gelu)


MUTATIONS = [
    embed_unscaled,
    embed_scaled_twice,
    images_divided_by_the_width,
    float32_time_embedding,
    times_added_up_in_float32,
    masked_tokens_count_as_positions,
    padding_is_seen,
    norm_weight_without_the_one,
    rotation_of_neighbours,
    exact_gelu,
]


@pytest.mark.parametrize("mutate", MUTATIONS, ids=lambda f: f.__name__)
def test_a_known_mistake_breaks_parity(mutate, monkeypatch):
    assert error(model("pi0")) < TOLERANCE
    mutate(monkeypatch)
    assert error(model("pi0")) > 2 * TOLERANCE


@torch.no_grad()
def test_a_state_token_that_sees_the_actions_breaks_parity(monkeypatch):
    net, expected = model("pi0"), outputs("pi0")
    cache, plain = net.prefix_cache(*OBSERVATION), layers.attend
    monkeypatch.setattr(layers, "attend", lambda *tokens, **options: plain(*tokens, **{**options, "blind": 0}))
    velocity = net.velocity(cache, STATE, expected["x_t"], TIME)
    assert (velocity - expected["v_t_joint"]).abs().max() > 1e-3


def test_pi05_without_its_gates_breaks_parity(monkeypatch):
    assert error(model("pi05"), "pi05") < TOLERANCE
    monkeypatch.setattr(layers, "_residual", lambda x, branch, _: x + branch)
    assert error(model("pi05"), "pi05") > 1e-3
