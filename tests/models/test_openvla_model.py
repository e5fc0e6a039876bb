"""The OpenVLA model against what the original code returned (float32, tolerance 1e-4; the model is the same)."""

import pytest
import torch
from openvla_golden import ACTIONS, PIXELS, TOLERANCE, golden, greedy, log_probs_and_entropy, make_model, prompt

from vla_accel.models.openvla.layout import pads_after_first

BASE = golden("base")
PROMPTS = [0, 1, 2]
assert_close = torch.testing.assert_close


@pytest.fixture(scope="module")
def model():
    return make_model().requires_grad_(False)


def right_padded():
    return {name: BASE[f"batch3_right/{name}"] for name in ("input_ids", "attention_mask")} | {"pixel_values": PIXELS}


def left_padded():
    """The same rows with the pads first, and ids in the pads that would do harm if they were seen."""
    inputs = right_padded()
    order = inputs["attention_mask"].argsort(dim=1, stable=True)
    mask = inputs["attention_mask"].gather(1, order)
    return inputs | {
        "input_ids": torch.where(mask == 1, inputs["input_ids"].gather(1, order), 31900),
        "attention_mask": mask,
    }


def bos_left():
    names = {"input_ids", "attention_mask"}
    return {name: BASE[f"batch3_bosleft/{name}"] for name in names} | {"pixel_values": PIXELS}


LAYOUTS = {"right": right_padded, "left": left_padded, "bos_left": bos_left}


def test_patch_features_and_projection_match_the_original(model):
    features = model.vision_backbone(PIXELS)
    assert_close(features, BASE["vision/patch_features"], **TOLERANCE)
    assert_close(model.projector(features), BASE["vision/projected"], **TOLERANCE)


@pytest.mark.parametrize("index", PROMPTS)
def test_forward_matches_the_originals_logits_and_hidden_states(model, index):
    want = golden(f"base/p{index}/forward")
    out = model(**prompt(index), output_hidden_states=True)
    assert_close(out.logits[..., ACTIONS], want["logits_action"], **TOLERANCE)
    assert_close(out.logits.logsumexp(-1), want["logits_logsumexp"], **TOLERANCE)
    assert torch.equal(out.logits.argmax(-1), want["logits_argmax"])
    assert_close(out.hidden_states[0], want["hidden_0"], **TOLERANCE)
    assert_close(out.hidden_states[-1], want["hidden_2"], **TOLERANCE)


def test_forward_matches_the_original_where_a_right_padded_batch_has_tokens(model):
    inputs = right_padded()
    out = model(**inputs)
    patches = torch.ones(3, 16, dtype=torch.int64)
    real = torch.cat([patches, inputs["attention_mask"]], dim=1).bool()
    assert_close(out.logits[..., ACTIONS][real], BASE["batch3_right/forward/logits_action"][real], **TOLERANCE)
    assert_close(out.logits.logsumexp(-1)[real], BASE["batch3_right/forward/logits_logsumexp"][real], **TOLERANCE)


@pytest.mark.parametrize("index", PROMPTS)
def test_greedy_decoding_gives_the_originals_tokens_and_scores(model, index):
    want = golden(f"base/p{index}/generate")
    states, ids = model.decode_actions(**prompt(index), choose=greedy)
    assert torch.equal(ids, want["tokens"])
    assert_close(model.action_logits(states), want["scores_action"], **TOLERANCE)


@pytest.mark.parametrize("temperature", [1.0, 1.6])
@pytest.mark.parametrize("index", PROMPTS)
def test_scoring_tokens_gives_the_originals_log_probs_and_entropy(model, index, temperature):
    want = golden(f"base/p{index}/rescore")
    ids = BASE[f"p{index}/generate/tokens"]
    logits = model.action_logits(model.action_states(**prompt(index), action_ids=ids))
    assert_close(logits, want["logits_action"], **TOLERANCE)
    log_prob, entropy = log_probs_and_entropy(logits, ids, temperature)
    assert_close(log_prob, want[f"T{temperature}/logprob_action256"], **TOLERANCE)
    assert_close(entropy, want[f"T{temperature}/entropy_action256"], **TOLERANCE)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_padded_batch_decodes_like_its_rows_alone(model, layout):
    states, ids = model.decode_actions(**LAYOUTS[layout](), choose=greedy)
    assert torch.equal(ids, torch.cat([BASE[f"p{i}/generate/tokens"] for i in PROMPTS]))
    want = torch.cat([BASE[f"p{i}/generate/scores_action"] for i in PROMPTS])
    assert_close(model.action_logits(states), want, **TOLERANCE)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_padded_batch_scores_like_its_rows_alone(model, layout):
    ids = torch.cat([BASE[f"p{i}/generate/tokens"] for i in PROMPTS])
    logits = model.action_logits(model.action_states(**LAYOUTS[layout](), action_ids=ids))
    assert_close(logits, torch.cat([BASE[f"p{i}/rescore/logits_action"] for i in PROMPTS]), **TOLERANCE)


def test_scoring_agrees_with_cached_decoding_for_sampled_tokens(model):
    generator = torch.Generator().manual_seed(0)
    chosen = []

    def choose(logits):
        chosen.append(logits)
        return torch.multinomial(logits.softmax(-1), 1, generator=generator).squeeze(1)

    states, ids = model.decode_actions(**right_padded(), choose=choose)
    assert [tuple(logits.shape) for logits in chosen] == [(3, 256)] * 7
    assert_close(torch.stack(chosen, dim=1), model.action_logits(states), **TOLERANCE)
    assert_close(model.action_states(**left_padded(), action_ids=ids), states, **TOLERANCE)


def test_the_last_action_token_is_not_an_input(model):
    ids = BASE["p0/generate/tokens"]
    other = ids.clone()
    other[:, -1] = 31999
    assert torch.equal(
        model.action_states(**prompt(0), action_ids=ids), model.action_states(**prompt(0), action_ids=other)
    )


def test_pads_go_between_the_first_token_and_the_rest_on_whichever_side_they_were():
    mask = torch.tensor([[1, 1, 1, 0, 0], [0, 0, 1, 1, 1], [1, 0, 0, 1, 1], [1, 1, 1, 1, 1]])
    want = [[0, 3, 4, 1, 2], [2, 0, 1, 3, 4], [0, 1, 2, 3, 4], [0, 1, 2, 3, 4]]
    assert pads_after_first(mask).tolist() == want


def test_the_original_layout_of_mask_and_positions_is_reproduced(model):
    seen = {}

    def record(_, args, kwargs):
        seen.update(kwargs)

    with_hook = model.language_model.model.register_forward_pre_hook(record, with_kwargs=True)
    model.action_states(**right_padded(), action_ids=BASE["p0/generate/tokens"].expand(3, -1)[:, :1])
    with_hook.remove()
    assert torch.equal(seen["attention_mask"], BASE["batch3_bosleft/multimodal_attention_mask"])
    real = seen["attention_mask"].bool()
    assert torch.equal(seen["position_ids"][real], BASE["batch3_bosleft/position_ids"][real])


def test_fine_tuning_loss_and_gradients_match_the_original():
    model = make_model()
    sft = golden("base/sft")
    out = model(sft["input_ids"], sft["attention_mask"], PIXELS, labels=sft["labels"])
    assert_close(out.loss, sft["loss"], **TOLERANCE)
    real = torch.cat([torch.ones(3, 16, dtype=torch.int64), sft["attention_mask"]], dim=1).bool()
    assert_close(out.logits[..., ACTIONS][real], sft["logits_action"][real], **TOLERANCE)
    out.loss.backward()
    gradients = golden("base/sft/grad")
    assert len(gradients) == 7
    for name, want in gradients.items():
        assert_close(model.get_parameter(name).grad, want, **TOLERANCE)
