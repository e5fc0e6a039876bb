"""What PI0's model promises beyond numbers: what it computes, what it leaves out, and that leaving out is exact."""

import copy

import pytest
import torch
from pi0_golden import ACTIONS, NOISE, OBSERVATION, STATE, TIME, VARIANTS, model

from vla_accel.models.pi0 import Pi0Config, Pi0Model, denoising_times
from vla_accel.models.pi0.layers import GemmaLayer, RMSNorm, attend, rotary_table, rotate
from vla_accel.models.pi0.prefix import time_embedding

CLOSE = {"atol": 1e-5, "rtol": 0}
both = pytest.mark.parametrize("variant", VARIANTS)


class Calls:
    """Counts forwards of modules while it is open."""

    def __init__(self, *modules):
        self.count, self.modules = 0, modules

    def __enter__(self):
        self.handles = [m.register_forward_hook(self.hook) for m in self.modules]
        return self

    def hook(self, *_):
        self.count += 1

    def __exit__(self, *_):
        for handle in self.handles:
            handle.remove()


@both
@torch.no_grad()
def test_steps_without_gradients_equal_the_joint_pass(variant):
    net = model(variant)
    cache = net.prefix_cache(*OBSERVATION)
    step = net.stepper(cache, STATE)
    for x, time in ((NOISE, torch.ones(3)), (ACTIONS, TIME), (NOISE, TIME)):
        for ours, joint in zip(step(x, time), net.denoise(cache, STATE, x, time), strict=True):
            torch.testing.assert_close(ours, joint, **CLOSE)


@both
@torch.no_grad()
def test_what_masked_cameras_and_padding_hold_changes_nothing(variant):
    net = model(variant)
    images, image_mask, tokens, token_mask = OBSERVATION
    garbage = torch.where(image_mask[..., None, None, None], images, torch.full_like(images, 0.7))
    words = torch.where(token_mask, tokens, 3)
    for ours, other in zip(
        net.embed_prefix(*OBSERVATION), net.embed_prefix(garbage, image_mask, words, token_mask), strict=True
    ):
        valid = net.embed_prefix(*OBSERVATION)[1]
        assert torch.equal(ours[valid], other[valid])
    actions = net.sample_actions(*OBSERVATION, STATE, noise=NOISE, num_steps=2)
    assert torch.equal(
        actions, net.sample_actions(garbage, image_mask, words, token_mask, STATE, noise=NOISE, num_steps=2)
    )


@both
@torch.no_grad()
def test_an_observation_gives_the_same_actions_alone_and_among_longer_ones(variant):
    net = model(variant)
    together = net.sample_actions(*OBSERVATION, STATE, noise=NOISE, num_steps=4)
    for row in range(3):
        alone = [x[row : row + 1] for x in (*OBSERVATION, STATE)]
        actions = net.sample_actions(*alone, noise=NOISE[row : row + 1], num_steps=4)
        torch.testing.assert_close(actions[0], together[row], **CLOSE)


@torch.no_grad()
def test_cameras_that_no_row_has_are_not_encoded():
    net = model("pi0")
    seen = []
    handle = net.vision_tower.register_forward_hook(lambda _, inputs, __: seen.append(len(inputs[0])))
    net.prefix_cache(*OBSERVATION)  # 3 + 2 + 1 cameras
    net.prefix_cache(*(x[1:2] for x in OBSERVATION))
    handle.remove()
    assert seen == [6, 2]


@torch.no_grad()
def test_cache_is_cut_to_the_longest_valid_row():
    cache = model("pi0").prefix_cache(*(x[1:] for x in OBSERVATION))
    assert cache.keys.shape == (2, 3, 2 * 16 + 6, 16)
    assert cache.lengths.tolist() == [38, 18]


@both
def test_prefix_runs_once_for_all_denoising_steps(variant):
    net = model(variant)
    with Calls(net.language_model) as prefix, Calls(net.vision_tower) as tower, Calls(net.expert) as expert:
        net.sample_actions(*OBSERVATION, STATE, noise=NOISE, num_steps=7)
    assert (prefix.count, tower.count) == (1, 1)
    assert expert.count == 7 + (variant == "pi0")  # PI0's state token once


@torch.no_grad()
def test_last_block_runs_only_where_its_output_is_read():
    net = model("pi0")
    last = net.language_model.layers[-1]
    with Calls(last.mlp, last.self_attn.o_proj, last.self_attn.q_proj, net.language_model.norm) as calls:
        lean = net.prefix_cache(*OBSERVATION)
        assert (calls.count, lean.output) == (0, None)
        full = net.prefix_cache(*OBSERVATION, with_output=True)
        assert calls.count == 4
    assert torch.equal(lean.keys, full.keys)
    with pytest.raises(ValueError, match="with_output=True"):
        lean.mean_output()


@torch.no_grad()
def test_mean_output_counts_valid_tokens_only():
    cache = model("pi0").prefix_cache(*OBSERVATION, with_output=True)
    expected = torch.stack([cache.output[row, : cache.lengths[row]].mean(0) for row in range(3)])
    torch.testing.assert_close(cache.mean_output(), expected)


@torch.no_grad()
def test_selected_rows_of_a_cache_score_like_the_rows():
    net = model("pi0")
    cache, rows = net.prefix_cache(*OBSERVATION), torch.tensor([2, 0, 2])
    whole = net.velocity(cache, STATE, NOISE, TIME)
    some = net.velocity(cache.select(rows), STATE[rows], NOISE[rows], TIME[rows])
    torch.testing.assert_close(some, whole[rows], **CLOSE)


def test_only_the_weights_that_no_action_reads_are_frozen():
    net = copy.deepcopy(model("pi0"))
    net(net.prefix_cache(*OBSERVATION), STATE, ACTIONS, noise=NOISE, time=TIME).backward()
    without = {name for name, p in net.named_parameters() if p.grad is None}
    assert without == {name for name, p in net.named_parameters() if not p.requires_grad}
    frozen = {id(p) for p in net.output_only_parameters()}
    assert frozen == {id(p) for p in net.parameters() if not p.requires_grad}


def test_real_sizes_have_no_language_model_heads():
    """3.238 billion parameters; with the two heads that LeRobot allocates it would be 4.028."""
    with torch.device("meta"):
        net = Pi0Model(Pi0Config())
    assert round(sum(p.numel() for p in net.parameters()) / 1e6) == 3238
    assert not any("lm_head" in name for name, _ in net.named_parameters())


def test_loss_averages_the_real_action_columns():
    net = model("pi0")
    options = {"noise": NOISE, "time": TIME}
    with torch.no_grad():
        cache = net.prefix_cache(*OBSERVATION)
        each = net(cache, STATE, ACTIONS, reduction="none", **options)
        torch.testing.assert_close(net(cache, STATE, ACTIONS, **options), each[..., :7].mean())


@both
def test_gradient_checkpointing_changes_no_gradient(variant):
    grads = []
    for recompute in (False, True):
        net = copy.deepcopy(model(variant))
        if recompute:
            net.gradient_checkpointing_enable()
            assert net.language_model.gradient_checkpointing
            assert net.expert.gradient_checkpointing
            assert net.vision_tower.gradient_checkpointing
        net(net.prefix_cache(*OBSERVATION), STATE, ACTIONS, noise=NOISE, time=TIME).backward()
        grads.append([p.grad for p in net.parameters() if p.grad is not None])
    for plain, recomputed in zip(*grads, strict=True):
        torch.testing.assert_close(recomputed, plain)


@both
@torch.no_grad()
def test_autocast_keeps_the_flow_in_float32(variant):
    net, cache = model(variant), None
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cache = net.prefix_cache(*OBSERVATION)
        assert cache.keys.dtype == torch.bfloat16
        velocity, hidden = net.denoise(cache, STATE, NOISE, TIME)
        stepped, _ = net.stepper(cache, STATE)(NOISE, TIME)
    assert velocity.dtype == hidden.dtype == stepped.dtype == torch.float32
    exact = net.velocity(net.prefix_cache(*OBSERVATION), STATE, NOISE, TIME)
    assert 0 < (velocity - exact).abs().max() < 0.2
    assert (stepped - velocity).abs().max() < 0.2


def test_drawn_times_follow_the_beta_distribution():
    """Beta(1.5, 1) has mean 0.6 and P(t < 0.5) = 0.5 ** 1.5; scaled by 0.999 and moved by 0.001."""
    times = model("pi0").sample_time(20000, generator=torch.Generator().manual_seed(0))
    assert 0.001 <= times.min() < times.max() <= 1.0
    assert abs(times.mean() - (0.6 * 0.999 + 0.001)) < 0.005  # standard error 0.0019
    assert abs((times < 0.5 * 0.999 + 0.001).float().mean() - 0.5**1.5) < 0.01  # standard error 0.0034


def test_denoising_times_start_at_noise_and_stop_one_step_before_the_action():
    assert denoising_times(4) == [1.0, 0.75, 0.5, 0.25]
    assert denoising_times(10)[-1] == pytest.approx(0.1)


def test_time_embedding_needs_float64():
    """At the shortest period one float32 rounding of the angle is worth 1e-4; LeRobot's numbers have none."""
    time = torch.tensor([0.9, 0.77])
    exact = time_embedding(time.double(), 1024)
    torch.testing.assert_close(time_embedding(time, 1024).double(), exact, atol=1e-6, rtol=0)
    period = 4e-3 * 1e3 ** torch.linspace(0, 1, 512)
    angle = 2 * torch.pi / period * time[:, None]
    assert (torch.cat([angle.sin(), angle.cos()], -1) - exact).abs().max() > 2e-5


@pytest.mark.parametrize("blind", [0, 1, 2])
@pytest.mark.parametrize("masked", [False, True])
def test_attention_equals_attention_with_repeated_keys_and_a_mask_for_each_query(blind, masked):
    """Of 7 keys the last 5 are the tokens' own: the first `blind` tokens see 2 + `blind` of them."""
    generator = torch.Generator().manual_seed(0)
    for groups in (1, 2):
        query = torch.randn(2, 5, 8 * 4, generator=generator)
        key, value = torch.randn(2, 2, 7, groups * 4, generator=generator)
        mask = torch.rand(2, 7, generator=generator) < (0.7 if masked else 1.0)
        mask[:, 0] = True
        seen = mask[:, None].repeat(1, 5, 1)
        seen[:, :blind, 2 + blind :] = False

        def heads(x):
            return x.unflatten(-1, (-1, 4)).transpose(1, 2)

        repeated = (heads(x).repeat_interleave(8 // groups, 1) for x in (key, value))
        scores = heads(query) @ next(repeated).transpose(-1, -2) / 2
        expected = scores.masked_fill(~seen[:, None], -torch.inf).softmax(-1) @ next(repeated)
        actual = attend(query, key, value, mask=mask if masked else None, head_dim=4, blind=blind)
        torch.testing.assert_close(actual, expected.transpose(1, 2).flatten(-2))


def test_rotation_pairs_the_halves_of_a_head():
    """Position 2, head width 4: entries (0, 2) turn by 2 rad, entries (1, 3) by 0.02 rad."""
    x = torch.tensor([[[1.0, 1.0, 0.0, 0.0]]])
    turned = rotate(x, rotary_table(torch.tensor([[2]]), 4))
    angle = torch.tensor([2.0, 0.02])
    torch.testing.assert_close(turned[0, 0], torch.cat([angle.cos(), angle.sin()]))


def test_adaptive_norm_scales_shifts_and_returns_the_gate():
    norm = RMSNorm(2, cond_dim=1)
    with torch.no_grad():
        norm.dense.weight.zero_()
        norm.dense.bias.copy_(torch.tensor([1.0, 1.0, 10.0, 20.0, 5.0, 6.0]))
    out, gate = norm(torch.tensor([[[3.0, 4.0]]]), torch.zeros(1, 1))
    rms = (25 / 2) ** 0.5
    torch.testing.assert_close(out, torch.tensor([[[3 / rms * 2 + 10, 4 / rms * 2 + 20]]]))
    assert gate.flatten().tolist() == [5.0, 6.0]


def test_a_block_computes_everything_inside_its_forward():
    """Sharding gathers a block's weights around its forward, so nothing outside may read them."""
    net = model("pi0")
    blocks = {id(p) for stack in (net.language_model, net.expert) for layer in stack.layers for p in layer.parameters()}
    assert all(isinstance(layer, GemmaLayer) for layer in net.expert.layers)
    assert blocks.isdisjoint(id(p) for p in (*net.language_model.norm.parameters(), net.get_input_embeddings().weight))
    assert set(net._no_split_modules) == {"GemmaLayer", "SiglipLayer"}


@pytest.mark.parametrize(
    ("options", "message"),
    [({"num_steps": 0}, "num_steps must be at least 1, but is 0"), ({"num_steps": -3}, "num_steps must be at least 1")],
)
def test_number_of_steps_is_checked(options, message):
    with pytest.raises(ValueError, match=message):
        model("pi0").sample_actions(*OBSERVATION, STATE, noise=NOISE, **options)


def test_reduction_is_checked():
    with pytest.raises(ValueError, match="reduction must be mean or none, but is 'sum'"):
        model("pi0")(model("pi0").prefix_cache(*OBSERVATION), STATE, ACTIONS, reduction="sum")
