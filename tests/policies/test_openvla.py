"""OpenVLA and OpenVLA-OFT as policies: one distribution for acting and scoring, rows that do not know of each other."""

import numpy as np
import pytest
import torch
from helpers.decisions import INSTRUCTIONS, acts, batch_of, observation
from torch.distributions import Categorical

from vla_accel.config import OFTPolicyConfig
from vla_accel.models.tiny import make_tiny_openvla, tabletop_statistics
from vla_accel.policies import load_policy

MODELS = ("openvla", "openvla-oft")
TEMPERATURES = (0.5, 1.0, 1.6)


def reference_logits(policy, inputs, bins):
    """Scores of the action tokens through the model's own `forward`, prompts of one length: float32 `[B, U, 256]`."""
    model, ids = policy.model, bins + policy.tokenizer.begin
    parts = [inputs["input_ids"], ids]
    if model.config.is_parallel and model.config.append_stop_token:
        parts.append(torch.full((len(ids), 1), model.config.text_config.eos_token_id))
    sequence = torch.cat(parts, dim=1)
    images = inputs["images"].flatten(0, 1)
    pixels = policy.processor.image_processor.normalize(images).unflatten(0, (len(ids), -1)).flatten(1, 2)
    logits = model(sequence, torch.ones_like(sequence), pixels).logits
    patches = logits.shape[1] - sequence.shape[1]
    first = patches + inputs["input_ids"].shape[1] - 1
    begin = policy.tokenizer.begin
    return logits[:, first : first + bins.shape[1], begin : begin + 256]


# --------------------------------------------------------------------------------------------------------------------
# The distribution
# --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("model", MODELS)
def test_log_probs_and_entropies_are_those_of_a_categorical_over_the_action_bins(make_policy, model, temperature):
    policy = make_policy(model, temperature=temperature)
    obs = observation(3, instructions=INSTRUCTIONS[:1])
    sample = acts(policy, obs)
    inputs = policy.prepare(obs)
    with torch.no_grad():
        score = policy(inputs, sample.trace)
        expected = Categorical(logits=reference_logits(policy, inputs, sample.trace["bins"]).double() / temperature)
    for log_prob in (sample.log_prob, score.log_prob):
        torch.testing.assert_close(log_prob.double(), expected.log_prob(sample.trace["bins"]), rtol=0, atol=1e-5)
    torch.testing.assert_close(score.entropy.double(), expected.entropy(), rtol=0, atol=1e-5)
    assert expected.entropy().mean() < 5.4, "the test needs a policy that is far from uniform (ln 256 = 5.55)"


@pytest.mark.parametrize("model", MODELS)
def test_scoring_gives_the_value_that_acting_gave(make_policy, model):
    policy = make_policy(model)
    obs = observation(4)
    sample = acts(policy, obs)
    score = policy(policy.prepare(obs), sample.trace)
    torch.testing.assert_close(score.value, sample.value, rtol=0, atol=1e-5)
    torch.testing.assert_close(acts(policy, obs, greedy=True).value, sample.value, rtol=0, atol=1e-5)
    assert sample.value.std() > 1e-3


@pytest.mark.parametrize("model", MODELS)
def test_the_value_does_not_depend_on_the_actions(make_policy, model):
    policy = make_policy(model)
    batch = batch_of(policy)
    first = policy(batch.inputs, batch.trace).value
    other = policy(batch.inputs, {"bins": torch.zeros_like(batch.trace["bins"])}).value
    torch.testing.assert_close(other, first, rtol=0, atol=1e-5)


@pytest.mark.parametrize("temperature", [0.5, 1.6])
@pytest.mark.parametrize("model", MODELS)
def test_sampled_actions_are_as_frequent_as_their_probabilities_say(make_policy, model, temperature):
    """The first token of one and the same decision, drawn by many environments."""
    num = 1000
    policy = make_policy(model, temperature=temperature)
    one = observation(1)
    inputs = {name: x.expand(num, *x.shape[1:]) for name, x in policy.prepare(one).items()}
    policy.seed(11, first_env=0, num_envs=num)
    bins = policy(inputs).trace["bins"][:, 0]
    with torch.no_grad():
        logits = reference_logits(policy, policy.prepare(one), acts(policy, one).trace["bins"])[0, 0]
    expected = num * (logits / temperature).softmax(-1)
    common = expected >= 5  # the rare bins are counted together, else their share of chi-square is not one
    seen = torch.bincount(bins, minlength=256).float()
    seen = torch.cat([seen[common], seen[~common].sum().reshape(1)])
    hoped = torch.cat([expected[common], expected[~common].sum().reshape(1)])
    freedom = len(seen) - 1
    assert freedom > 20
    # Chi-square has mean f and variance 2 f.
    assert ((seen - hoped).square() / hoped).sum() < freedom + 4 * (2 * freedom) ** 0.5


@pytest.mark.parametrize("model", MODELS)
def test_greedy_takes_the_most_likely_bin_of_every_token(make_policy, model):
    policy = make_policy(model)
    obs = observation(3, instructions=INSTRUCTIONS[:1])
    bins = acts(policy, obs, greedy=True).trace["bins"]
    assert torch.equal(reference_logits(policy, policy.prepare(obs), bins).argmax(-1), bins)


@pytest.mark.parametrize("model", MODELS)
def test_actions_are_the_bins_decoded_and_in_environment_units(make_policy, model):
    policy = make_policy(model)
    policy.statistics.low[0], policy.statistics.high[0] = 0.0, 10.0
    sample = acts(policy, observation(5))
    bins = sample.trace["bins"].reshape(5, policy.chunk_size, 7)
    assert sample.action.shape == bins.shape
    assert sample.action.dtype == torch.float32
    # Column 0 is the largest action, column 255 the smallest; 255 intervals over [-1, 1], and two columns share one.
    centre = -1.0 + (2.0 * (254 - (bins - 1).clamp(min=0)).double() + 1.0) / 255.0
    expected = centre.clone()
    expected[..., 0] = 5.0 * (centre[..., 0] + 1.0)
    torch.testing.assert_close(sample.action.double(), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("model", MODELS)
def test_a_demonstration_is_scored_as_the_action_nearest_to_it(make_policy, model):
    policy = make_policy(model)
    sample = acts(policy, observation(4))
    bins = policy.encode_demonstration(sample.action)["bins"]
    again = policy._environment_action(bins + policy.tokenizer.begin)
    torch.testing.assert_close(again, sample.action, rtol=0, atol=1e-6)
    wild = policy.encode_demonstration(torch.full_like(sample.action, 99.0))["bins"]
    assert wild.shape == bins.shape
    assert bool((wild == 0).all())
    with pytest.raises(ValueError, match=r"--sft\.repeats must be 1 for tokens"):
        policy.encode_demonstration(sample.action, repeats=2)


# --------------------------------------------------------------------------------------------------------------------
# Rows and noise
# --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", MODELS)
def test_a_batch_acts_like_its_rows_one_by_one(make_policy, model):
    policy = make_policy(model)
    obs = observation(3)
    assert len({int(n) for n in policy.prepare(obs)["attention_mask"].sum(1)}) == 3, "three lengths of prompts"
    together = acts(policy, obs, greedy=True)
    for order in ([2, 0, 1], [1], [0], [2]):
        part = acts(policy, obs.select(order), greedy=True)
        assert torch.equal(part.trace["bins"], together.trace["bins"][order])
        torch.testing.assert_close(part.log_prob, together.log_prob[order], rtol=0, atol=1e-5)
        torch.testing.assert_close(part.value, together.value[order], rtol=0, atol=1e-5)
    assert len(set(together.value.tolist())) == 3, "three different decisions"


@pytest.mark.parametrize("model", MODELS)
def test_fitting_longer_instructions_changes_the_padding_and_nothing_else(make_policy, model):
    policy = make_policy(model)
    obs = observation(3)
    before, length = acts(policy, obs), policy.prepare(obs)["input_ids"].shape[1]
    policy.fit_instructions(["push the very very far away yellow block and come back to me", "reach it"])
    assert policy.prepare(obs)["input_ids"].shape[1] > length
    after = acts(policy, obs)
    assert torch.equal(after.trace["bins"], before.trace["bins"])
    torch.testing.assert_close(after.log_prob, before.log_prob, rtol=0, atol=1e-5)


@pytest.mark.parametrize("model", MODELS)
def test_what_an_environment_samples_depends_on_no_neighbour(make_policy, model):
    policy = make_policy(model)
    obs, other = observation(5), observation(5, seed=9)
    whole = acts(policy, obs)
    # Dealt to two ranks, of 2 and 3 environments.
    for first, rows in ((0, [0, 1]), (2, [2, 3, 4])):
        rank = acts(policy, obs.select(rows), first_env=first)
        assert torch.equal(rank.trace["bins"], whole.trace["bins"][rows])
    # With other pictures in the environments before and after it.
    mixed = type(obs)(
        images={"wrist": np.where(np.arange(5)[:, None, None, None] == 2, obs.images["wrist"], other.images["wrist"])},
        state=obs.state,
        instructions=obs.instructions,
    )
    sample = acts(policy, mixed)
    assert torch.equal(sample.trace["bins"][2], whole.trace["bins"][2])
    assert not torch.equal(sample.trace["bins"], whole.trace["bins"])


@pytest.mark.parametrize("model", MODELS)
def test_environments_and_decisions_and_seeds_sample_differently(make_policy, model):
    policy = make_policy(model)
    obs = observation(1)
    same = obs.select([0, 0, 0])
    policy.seed(0, first_env=0, num_envs=3)
    first, second = (policy(policy.prepare(same)).trace["bins"] for _ in range(2))
    other = acts(policy, same, seed=1).trace["bins"]
    rows = [tuple(row.tolist()) for sample in (first, second, other) for row in sample]
    assert len(set(rows)) == 9
    assert torch.equal(acts(policy, same).trace["bins"], first)


def test_sampling_without_a_stream_per_environment_is_refused(make_policy):
    policy = make_policy("openvla")
    policy.seed(0, first_env=0, num_envs=1)
    with pytest.raises(RuntimeError, match=r"3 environments .* 1 streams .* num_envs=3"):
        policy(policy.prepare(observation(3)))


# --------------------------------------------------------------------------------------------------------------------
# Vision
# --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", MODELS)
def test_black_and_white_images_are_told_apart(make_policy, model):
    policy = make_policy(model)
    obs = observation(2, instructions=INSTRUCTIONS[:1])
    obs.images["wrist"][0], obs.images["wrist"][1] = 0, 255
    inputs = policy.prepare(obs)
    bins = torch.zeros(2, len(policy.unit_step), dtype=torch.int64)
    with torch.no_grad():
        black, white = reference_logits(policy, inputs, bins)
        score = policy(inputs, {"bins": bins})
    assert (black - white).abs().amax(-1).min() > 0.1, "every token's distribution differs"
    assert (score.log_prob[0] - score.log_prob[1]).abs().max() > 0.1
    assert (score.value[0] - score.value[1]).abs() > 0.01


@pytest.mark.parametrize("model", MODELS)
def test_other_instructions_are_told_apart(make_policy, model):
    policy = make_policy(model)
    obs = observation(1).select([0, 0])
    inputs = policy.prepare(type(obs)(images=obs.images, state=obs.state, instructions=list(INSTRUCTIONS[:2])))
    with torch.no_grad():
        score = policy(inputs, {"bins": torch.zeros(2, len(policy.unit_step), dtype=torch.int64)})
    assert (score.log_prob[0] - score.log_prob[1]).abs().max() > 0.01


@pytest.mark.parametrize("model", MODELS)
def test_vision_runs_once_per_act_and_once_per_score(make_policy, model):
    policy = make_policy(model)
    runs = []
    policy.model.vision_backbone.register_forward_hook(lambda *_: runs.append(1))
    sample = acts(policy, observation(3))
    assert len(runs) == 1
    policy(policy.prepare(observation(3)), sample.trace)
    assert len(runs) == 2


def test_prepared_inputs_are_compact_and_deterministic(make_policy):
    policy = make_policy("openvla")
    first, second = (policy.prepare(observation(3)) for _ in range(2))
    assert {name: x.dtype for name, x in first.items()} == {
        "images": torch.uint8, "input_ids": torch.int64, "attention_mask": torch.int64,
    }  # fmt: skip
    assert first["images"].shape == (3, 1, 3, 32, 32)
    assert all(torch.equal(first[name], x) for name, x in second.items())


def test_a_missing_camera_is_refused_by_name(make_policy):
    policy = make_policy("openvla")
    policy.cameras = ("front",)
    with pytest.raises(ValueError, match=r"takes 1 image.*cameras wrist.*--env\.options cameras"):
        policy.prepare(observation(1))


def test_two_cameras_and_the_robot_state_reach_the_model(tmp_path):
    statistics = tabletop_statistics(proprio_low=[-0.5] * 8, proprio_high=[0.5] * 8)
    folder = make_tiny_openvla(
        tmp_path / "rich", decoding="parallel", chunk=2, image_size=32, vision_dims=(32, 32), vision_depth=2,
        hidden=32, intermediate=64, num_images=2, use_proprio=True, use_film=True, statistics=statistics,
        dtype=torch.float32,
    )  # fmt: skip
    policy = load_policy("openvla-oft", OFTPolicyConfig(path=str(folder)))
    obs = observation(2)
    obs.images["front"] = observation(2, seed=5).images["wrist"]
    inputs = policy.prepare(obs)
    torch.testing.assert_close(inputs["proprio"], torch.from_numpy(2.0 * obs.state), rtol=0, atol=1e-6)
    trace = acts(policy, obs).trace

    def log_prob(**changes):
        with torch.no_grad():
            return policy({**inputs, **changes}, trace).log_prob

    plain = log_prob()
    for camera in (0, 1):
        images = inputs["images"].clone()
        images[:, camera] = 0
        assert not torch.allclose(log_prob(images=images), plain, atol=1e-4), camera
    assert not torch.allclose(log_prob(proprio=-inputs["proprio"]), plain, atol=1e-5)
