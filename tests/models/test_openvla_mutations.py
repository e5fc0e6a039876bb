"""Each mistake that ports of OpenVLA make moves the outputs beyond the tolerance that the parity tests use."""

import pytest
import torch
from openvla_golden import PIXELS, TOLERANCE, golden, make_model, oft_model, prompt
from torch import nn

from vla_accel.models.openvla import modeling
from vla_accel.models.openvla.vision import VisionBlock

RL = golden("rl")


def base_logits(model, **changes):
    ids = golden("base/p1")["generate/tokens"]
    return model.action_logits(model.action_states(**{**prompt(1), **changes}, action_ids=ids))


def base_error(model, **changes):
    """Largest difference to the original's scores of prompt p1, autoregressive."""
    return (base_logits(model, **changes) - golden("base/p1")["rescore/logits_action"]).abs().max().item()


def oft_error(model, **changes):
    """Largest difference to the original's scores of three left-padded prompts, parallel."""
    inputs = {name: RL[f"batch3_left/{name}"] for name in ("input_ids", "attention_mask")} | {"pixel_values": PIXELS}
    logits = model.action_logits(model.action_states(**{**inputs, **changes}))
    return (logits - RL["forward/logits_action"]).abs().max().item()


def rms_epsilon(model, _):
    for module in model.modules():
        if hasattr(module, "variance_epsilon"):
            module.variance_epsilon = 1e-5


def tanh_gelu(model, _):
    for block in [*model.vision_backbone.featurizer.blocks, *model.vision_backbone.fused_featurizer.blocks]:
        block.mlp.act = nn.GELU(approximate="tanh")


def tanh_gelu_in_the_projector(model, _):
    model.projector.activation = nn.GELU(approximate="tanh")


def vision_norm_epsilon(model, _):
    for module in model.vision_backbone.modules():
        if isinstance(module, nn.LayerNorm):
            module.eps = 1e-5


def last_block(model, _):
    for tower in model.vision_backbone.towers:
        tower.blocks.append(nn.Identity())  # `all but the last` now ends one block later


def second_block_from_the_end_skipped(model, _):
    for tower in model.vision_backbone.towers:
        del tower.blocks[-1]


def patches_before_the_first_token(_, monkeypatch):
    monkeypatch.setattr(modeling, "after_first", lambda columns, inserted: torch.cat([inserted, columns], dim=1))


def one_token_late(model, _):
    hidden = model._hidden
    model._hidden = lambda *args, **kwargs: hidden(*args, **kwargs).roll(-1, dims=1)


COMMON = [
    rms_epsilon,
    tanh_gelu,
    tanh_gelu_in_the_projector,
    vision_norm_epsilon,
    last_block,
    second_block_from_the_end_skipped,
    patches_before_the_first_token,
    one_token_late,
]


@pytest.mark.parametrize("mutate", COMMON, ids=lambda mutate: mutate.__name__)
@pytest.mark.parametrize(("make", "error"), [(make_model, base_error), (oft_model, oft_error)], ids=["base", "oft"])
@torch.no_grad()
def test_a_mistake_in_the_model_breaks_parity(make, error, mutate, monkeypatch):
    model = make()
    assert error(model) < TOLERANCE["atol"]
    mutate(model, monkeypatch)
    assert error(model) > TOLERANCE["atol"]


@pytest.mark.parametrize("error", [base_error, oft_error])
@torch.no_grad()
def test_swapped_towers_break_parity(error):
    model = make_model() if error is base_error else oft_model()
    swapped = PIXELS.roll(3, dims=1)
    assert error(model, pixel_values=swapped[1:2] if error is base_error else swapped) > 1e-4


@torch.no_grad()
def test_a_prompt_without_its_space_token_breaks_parity():
    inputs = prompt(1)
    short = {"input_ids": inputs["input_ids"][:, :-1], "attention_mask": inputs["attention_mask"][:, :-1]}
    assert base_error(make_model(), **short) > 1e-4
    left = {name: RL[f"batch3_left/{name}"][:, :-1] for name in ("input_ids", "attention_mask")}
    assert oft_error(oft_model(), **left) > 1e-4


@torch.no_grad()
def test_a_missing_stop_token_breaks_parity():
    assert oft_error(oft_model(append_stop_token=False)) > 1e-4


@torch.no_grad()
def test_causal_attention_breaks_parity_of_parallel_decoding():
    model = oft_model()
    model._attention = lambda mask, _: {"attention_mask": mask}
    assert oft_error(model) > 1e-4


@torch.no_grad()
def test_bidirectional_attention_breaks_parity_of_autoregressive_decoding():
    model = make_model()
    parallel = oft_model()
    model._attention = parallel._attention
    assert base_error(model) > 1e-4


@torch.no_grad()
def test_placeholders_that_are_not_zeroed_break_parity():
    model = oft_model()
    zeros = model._placeholders

    def embedded(like):
        placeholders = zeros(like)
        placeholders[:, :56] = model.get_input_embeddings().weight[1]
        return placeholders

    model._placeholders = embedded
    assert oft_error(model) > 1e-4


@torch.no_grad()
def test_pads_left_where_they_were_break_parity(monkeypatch):
    in_place = torch.arange(RL["batch3_left/attention_mask"].shape[1]).expand(3, -1)
    monkeypatch.setattr(modeling, "pads_after_first", lambda _: in_place)
    assert oft_error(oft_model()) > 1e-4


@torch.no_grad()
def test_positions_that_count_pads_break_parity():
    model = oft_model()
    model.language_model.model.register_forward_pre_hook(
        lambda _, args, kwargs: (args, {**kwargs, "position_ids": None}), with_kwargs=True
    )
    assert oft_error(model) > 1e-4


@torch.no_grad()
def test_pads_that_are_seen_break_parity():
    ones = torch.ones_like(RL["batch3_left/attention_mask"])
    assert oft_error(oft_model(), attention_mask=ones) > 1e-4


def film_error(model):
    logits = model.action_logits(model.action_states(**prompt(1)))
    return (logits - golden("oft/film/p1")["logits_action"]).abs().max().item()


@torch.no_grad()
def test_modulation_by_a_vector_without_the_stop_token_breaks_parity():
    model = oft_model(use_film=True)
    assert film_error(model) < 1e-4
    language = model._language
    model._language = lambda text, mask: language(text[:, :-1], mask[:, :-1])
    assert film_error(model) > 1e-4


@torch.no_grad()
def test_modulation_after_the_mlp_breaks_parity(monkeypatch):
    def after_mlp(block, hidden, language):
        hidden = hidden + block.ls1(block.attn(block.norm1(hidden)))
        hidden = hidden + block.ls2(block.mlp(block.norm2(hidden)))
        return hidden * (1 + block.scale(language).unsqueeze(1)) + block.shift(language).unsqueeze(1)

    monkeypatch.setattr(VisionBlock, "_compute", after_mlp)
    assert film_error(oft_model(use_film=True)) > 1e-4
