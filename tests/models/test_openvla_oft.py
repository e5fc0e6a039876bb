"""OpenVLA-OFT with discrete tokens against its original and two reinforcement-learning forks (float32, 1e-4)."""

import pytest
import torch
from openvla_golden import (
    ACTIONS,
    PIXELS,
    SPACE_ID,
    TOLERANCE,
    golden,
    greedy,
    log_probs_and_entropy,
    oft_model,
    prompt,
)

OFT, RL, RLINF = golden("oft"), golden("rl"), golden("rlinf")
assert_close = torch.testing.assert_close


@pytest.fixture(scope="module")
def model():
    return oft_model().requires_grad_(False)


def rl_inputs():
    """Three prompts padded on the left, as they are stored there."""
    return {name: RL[f"batch3_left/{name}"] for name in ("input_ids", "attention_mask")} | {"pixel_values": PIXELS}


def two_images(ids, mask):
    """Prompt p0 with two images; the original appends 29871 to the ids it is given."""
    ids = torch.cat([ids, torch.full((1, 1), SPACE_ID)], dim=1) if ids[0, -1] != SPACE_ID else ids
    pixels = torch.cat([PIXELS[:1], PIXELS[2:]], dim=1)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids) * mask[0, 0], "pixel_values": pixels}


@pytest.mark.parametrize("index", [0, 1, 2])
def test_one_bidirectional_pass_gives_the_originals_states_and_logits(model, index):
    want = golden(f"oft/discrete/p{index}")
    states, ids = model.decode_actions(**prompt(index), choose=greedy)
    assert_close(states, want["action_hidden_states"], **TOLERANCE)
    assert_close(model.action_logits(states), want["logits_action"], **TOLERANCE)
    in_range = (want["argmax_fullvocab"] >= ACTIONS.start) & (want["argmax_fullvocab"] < ACTIONS.stop)
    assert torch.equal(ids[in_range], want["argmax_fullvocab"][in_range])
    full = model.language_model.lm_head(states)
    assert_close(full.logsumexp(-1), want["logits_logsumexp"], **TOLERANCE)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_every_attention_implementation_is_bidirectional(implementation):
    model = oft_model().requires_grad_(False)
    model.language_model.set_attn_implementation(implementation)
    assert_close(model.action_logits(model.action_states(**rl_inputs())), RL["forward/logits_action"], **TOLERANCE)


def test_the_embeddings_are_laid_out_as_in_the_original(model):
    seen = {}

    def record(_, args, kwargs):
        seen.update(kwargs)

    handle = model.language_model.model.register_forward_pre_hook(record, with_kwargs=True)
    model.action_states(**prompt(1))
    handle.remove()
    assert_close(seen["inputs_embeds"], OFT["discrete/p1/multimodal_embeds"], **TOLERANCE)


def test_two_images_match_the_original():
    model = oft_model(num_images_in_input=2)
    inputs = two_images(OFT["l1/input_ids"], OFT["l1/attention_mask"])
    assert_close(model.action_logits(model.action_states(**inputs)), OFT["discrete_2img/logits_action"], **TOLERANCE)


def test_two_images_and_the_robots_state_match_the_original():
    model = oft_model(num_images_in_input=2, use_proprio=True)
    inputs = two_images(OFT["l1/input_ids"], OFT["l1/attention_mask"])
    states = model.action_states(**inputs, proprio=OFT["l1/proprio_normalized"].float().unsqueeze(0))
    assert_close(states, OFT["l1/action_hidden_states"], **TOLERANCE)
    assert_close(model.action_logits(states), OFT["l1/logits_action"], **TOLERANCE)


def test_language_modulation_matches_the_original_alone_and_in_a_padded_batch():
    model = oft_model(use_film=True)
    alone = model.action_logits(model.action_states(**prompt(1)))
    assert_close(alone, OFT["film/p1/logits_action"], **TOLERANCE)
    batch = model.action_logits(model.action_states(**rl_inputs()))
    assert_close(batch[1:2], OFT["film/p1/logits_action"], **TOLERANCE)


def test_the_training_forward_matches_the_original(model):
    train = golden("oft/train")
    out = model(train["input_ids"], train["attention_mask"], PIXELS, labels=train["labels"])
    assert_close(out.loss, train["loss"], **TOLERANCE)
    real = torch.cat([torch.ones(3, 16, dtype=torch.int64), train["attention_mask"]], dim=1).bool()
    assert_close(out.logits[..., ACTIONS][real], train["logits_action"][real], **TOLERANCE)


def test_the_training_forward_finds_the_action_tokens_without_labels(model):
    train = golden("oft/train")
    inputs = train["input_ids"], train["attention_mask"], PIXELS
    assert torch.equal(model(*inputs).logits, model(*inputs, labels=train["labels"]).logits)


def test_greedy_tokens_of_a_left_padded_batch_match_simplevla_rl(model):
    _, ids = model.decode_actions(**rl_inputs(), choose=greedy)
    assert torch.equal(ids, RL["greedy/responses"])


@pytest.mark.parametrize("temperature", [1.0, 1.6])
def test_log_probs_and_entropy_match_simplevla_rl(model, temperature):
    logits = model.action_logits(model.action_states(**rl_inputs(), action_ids=RL["given_tokens"]))
    assert_close(logits, RL["forward/logits_action"], **TOLERANCE)
    log_prob, entropy = log_probs_and_entropy(logits, RL["given_tokens"], temperature)
    assert_close(log_prob, RL[f"forward/T{temperature}/logprobs_given"], **TOLERANCE)
    assert_close(entropy, RL[f"forward/T{temperature}/entropy"], **TOLERANCE)


def test_gradients_of_the_mean_log_prob_match_simplevla_rl():
    model = oft_model()
    logits = model.action_logits(model.action_states(**rl_inputs()))
    objective = log_probs_and_entropy(logits, RL["given_tokens"], 1.6)[0].mean()
    assert_close(objective, RL["grad/objective"], **TOLERANCE)
    objective.backward()
    names = [name for name in golden("rl/grad") if name != "objective"]
    assert len(names) == 4
    for name in names:
        assert_close(model.get_parameter(name).grad, RL[f"grad/{name}"], **TOLERANCE)


def test_a_causal_run_of_the_same_model_does_not_match(model):
    logits = model.action_logits(model.action_states(**rl_inputs()))
    assert (logits - RL["causal_control"]).abs().max() > 1.0


@pytest.mark.parametrize("temperature", [1.0, 1.6])
def test_without_the_stop_token_the_model_matches_rlinf(temperature):
    model = oft_model(append_stop_token=False).requires_grad_(False)
    inputs = {name: RLINF[name] for name in ("input_ids", "attention_mask")} | {"pixel_values": PIXELS}
    logits = model.action_logits(model.action_states(**inputs))
    assert_close(logits, RLINF["logits_action"], **TOLERANCE)
    log_prob, entropy = log_probs_and_entropy(logits, RLINF["action_tokens"].flatten(1), temperature)
    assert_close(log_prob, RLINF[f"T{temperature}/logprobs"], **TOLERANCE)
    assert_close(entropy, RLINF[f"T{temperature}/entropy"], **TOLERANCE)
    _, ids = model.decode_actions(**inputs, choose=greedy)
    assert torch.equal(ids, RLINF["greedy/tokens"].flatten(1))


def test_with_the_stop_token_the_model_does_not_match_rlinf(model):
    inputs = {name: RLINF[name] for name in ("input_ids", "attention_mask")} | {"pixel_values": PIXELS}
    logits = model.action_logits(model.action_states(**inputs))
    assert (logits - RLINF["logits_action"]).abs().max() > 1e-1


def test_parallel_predictions_do_not_depend_on_the_tokens_that_are_scored(model):
    inputs = rl_inputs()
    assert torch.equal(model.action_states(**inputs), model.action_states(**inputs, action_ids=RL["given_tokens"]))
