"""What training and sharding rely on: one vision pass, recomputation, frozen parts, copies, formats, refusals."""

import copy
import json
import pickle

import pytest
import torch
from openvla_golden import DATA, PIXELS, golden, greedy, make_model, oft_model, prompt
from torch import nn

from vla_accel.models.openvla.configuration import OpenVLAConfig
from vla_accel.models.openvla.modeling import OpenVLAForActionPrediction

assert_close = torch.testing.assert_close
TOKENS = golden("base")["p0/generate/tokens"]


def count_calls(module):
    calls = []
    module.register_forward_hook(lambda *_: calls.append(1))
    return calls


def tiny_config(**options):
    """A still smaller model, with a vocabulary of 384: 320 real ids, of which 256 are action tokens."""
    text = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    sizes = {"embed_dim": 16, "depth": 3, "num_heads": 2}
    base = {
        "text_config": {**text, "num_key_value_heads": 2, "vocab_size": 384, "pad_token_id": 320},
        "pad_token_id": 320,
        "timm_model_kwargs": [sizes, sizes],
        "image_sizes": [28, 28],
    }
    return OpenVLAConfig(**{**base, **options})


@pytest.mark.parametrize("make", [make_model, oft_model])
def test_images_are_seen_once_and_the_prompt_once_per_decision(make):
    model = make()
    vision, first_tower = count_calls(model.vision_backbone), count_calls(model.vision_backbone.featurizer.blocks[0])
    widths = []
    model.language_model.model.layers[0].register_forward_hook(lambda _, args, __: widths.append(args[0].shape[1]))
    with torch.no_grad():
        model.decode_actions(**prompt(0), choose=greedy)
    assert (len(vision), len(first_tower)) == (1, 1)
    assert widths == ([16 + 35] + [1] * 6 if make is make_model else [16 + 35 + 56 + 1])


def test_only_the_action_rows_of_the_head_are_computed():
    model = make_model()
    head = count_calls(model.language_model.lm_head)
    states = model.action_states(**prompt(0), action_ids=TOKENS)
    logits = model.action_logits(states)
    assert len(head) == 0
    assert_close(logits, model.language_model.lm_head(states)[..., 31744:32000])


def test_an_adapted_head_is_used_with_its_adapter():
    class Doubled(nn.Module):
        def __init__(self, head):
            super().__init__()
            self.base_layer = head

        @property
        def weight(self):
            return self.base_layer.weight

        def forward(self, states):
            return 2 * self.base_layer(states)

    model = make_model()
    states = model.action_states(**prompt(0), action_ids=TOKENS)
    plain = model.action_logits(states)
    model.language_model.lm_head = Doubled(model.language_model.lm_head)
    assert_close(model.action_logits(states), 2 * plain)


def test_scores_of_a_bfloat16_model_are_float32_and_not_rounded():
    model = oft_model().to(torch.bfloat16)
    states = model.action_states(**prompt(0))
    logits = model.action_logits(states)
    assert (states.dtype, logits.dtype) == (torch.bfloat16, torch.float32)
    assert (logits != logits.bfloat16().float()).any()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(model.action_logits(states), logits)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("make", [make_model, oft_model])
def test_checkpointing_recomputes_every_layer_and_changes_no_gradient(make, training):
    def gradients(model):
        states = model.action_states(**prompt(0), action_ids=TOKENS)
        model.action_logits(states).log_softmax(-1)[..., 7].sum().backward()
        return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    plain, recomputed = make().train(training), make().train(training)
    recomputed.gradient_checkpointing_enable()
    llama = count_calls(recomputed.language_model.model.layers[0].input_layernorm)
    tower = count_calls(recomputed.vision_backbone.featurizer.blocks[0].norm1)
    want, got = gradients(plain), gradients(recomputed)
    assert (len(llama), len(tower)) == (2, 2)
    assert want.keys() == got.keys()
    for name in want:
        assert_close(got[name], want[name])
    assert recomputed.language_model.model.layers[0].training is training


@pytest.mark.parametrize("training", [False, True])
def test_fine_tuning_is_recomputed_too(training):
    model = make_model().train(training)
    model.gradient_checkpointing_enable()
    llama = count_calls(model.language_model.model.layers[0].input_layernorm)
    sft = golden("base/sft")
    model(sft["input_ids"], sft["attention_mask"], PIXELS, labels=sft["labels"]).loss.backward()
    assert len(llama) == 2
    assert_close(model.projector.fc1.weight.grad, golden("base/sft/grad")["projector.fc1.weight"], atol=1e-4, rtol=0)


def test_decoding_keeps_its_cache_with_checkpointing_on_in_training_mode():
    model = make_model().train()
    model.gradient_checkpointing_enable()
    _, ids = model.decode_actions(**prompt(0), choose=greedy)
    assert torch.equal(ids, TOKENS)


def test_the_inert_parts_are_frozen_and_never_run():
    model = oft_model()
    inert = [name for name, p in model.named_parameters() if not p.requires_grad]
    vision = "vision_backbone."
    assert {name.split(".")[2] for name in inert} == {"blocks", "norm", "attn_pool"}
    assert any(name.startswith(vision + "featurizer.blocks.2.") for name in inert)
    assert not any(name.startswith(vision + "featurizer.blocks.1.") for name in inert)
    before = model.action_states(**prompt(0))
    with torch.no_grad():
        for name in inert:
            model.get_parameter(name).fill_(torch.nan)
    after = model.action_states(**prompt(0))
    assert torch.equal(before, after)
    after.sum().backward()
    idle = {name for name, p in model.named_parameters() if p.grad is None}
    assert idle == {*inert, "language_model.lm_head.weight"}


def test_copies_and_pickles_act_alike():
    model = oft_model(use_film=True).requires_grad_(False)
    want = model.action_states(**prompt(0))
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(twin.action_states(**prompt(0)), want)


def test_a_single_tower_model_has_the_originals_names_and_takes_three_channels():
    sizes = {"embed_dim": 16, "depth": 3, "num_heads": 2}
    config = tiny_config(
        vision_backbone_id="siglip-vit-so400m", timm_model_kwargs=[sizes], image_sizes=[28], action_decoding="parallel"
    )
    model = OpenVLAForActionPrediction(config)
    names = set(model.state_dict())
    assert not any("fused_featurizer" in name or "projector.fc3" in name or "scale_factor" in name for name in names)
    assert {name for name in names if name.startswith("projector.")} == {
        f"projector.fc{i}.{kind}" for i in (1, 2) for kind in ("weight", "bias")
    }
    ids = torch.ones(2, 5, dtype=torch.int64)
    states = model.action_states(ids, torch.ones_like(ids), torch.randn(2, 3, 28, 28))
    assert states.shape == (2, 56, 16)


def test_a_small_vocabulary_moves_the_action_tokens():
    model = OpenVLAForActionPrediction(tiny_config()).requires_grad_(False)
    assert model.config.action_token_begin == 64
    ids = torch.ones(2, 5, dtype=torch.int64)
    pixels = torch.randn(2, 6, 28, 28, generator=torch.Generator().manual_seed(0))
    states, actions = model.decode_actions(ids, torch.ones_like(ids), pixels, lambda logits: logits.argmax(-1))
    full = model.language_model.lm_head(states)[..., 64:320]
    assert torch.equal(actions, 64 + full.argmax(-1))


def test_the_llama_is_built_in_the_type_that_is_asked_for():
    config = OpenVLAConfig(**json.loads((DATA / "config.json").read_text()))
    assert config.text_config.dtype == torch.bfloat16
    model = OpenVLAForActionPrediction._from_config(config, dtype=torch.float32)
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_inputs_that_do_not_fit_are_refused_with_the_option_to_change():
    model = make_model()
    inputs = prompt(0)
    with pytest.raises(ValueError, match="num_images_in_input"):
        model.action_states(**{**inputs, "pixel_values": torch.zeros(1, 12, 56, 56)}, action_ids=TOKENS)
    with pytest.raises(ValueError, match="action_ids must be given"):
        model.action_states(**inputs)
    with pytest.raises(ValueError, match="use_proprio=False"):
        model.action_states(**inputs, action_ids=TOKENS, proprio=torch.zeros(1, 8))
    with pytest.raises(ValueError, match="use_proprio=True"):
        oft_model(use_proprio=True).action_states(**inputs)
    with pytest.raises(ValueError, match="padded on the right"):
        model(inputs["input_ids"], inputs["attention_mask"] * torch.arange(35).clamp(max=1), inputs["pixel_values"])
    with pytest.raises(ValueError, match="pixel_values must be given"):
        model(inputs["input_ids"])
