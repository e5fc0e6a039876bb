"""PI0 as a policy: scores that match samples, values, masks, storage, and whole runs of the scripts."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.pi0 import KINDS, SMALL
from safetensors.torch import load_file, save_file

from vla_accel.batch import unit_mask
from vla_accel.cli import parse_args
from vla_accel.config import EnvConfig, Pi0PolicyConfig, PolicyConfig, PPOConfig, PPOOptions, SFTConfig
from vla_accel.envs.tabletop import Tabletop
from vla_accel.evaluate import evaluate
from vla_accel.models.pi0.tiny import make_tiny_pi0
from vla_accel.policies import load_policy, peek_policy
from vla_accel.policies.pi0 import Pi0Policy
from vla_accel.sft import finetune
from vla_accel.train import check_run
from vla_accel.types import Observation

ROOT = Path(__file__).parents[2]


def observe(rows, seed=0):
    rng = np.random.default_rng(seed)
    return Observation(
        images={"wrist": rng.integers(0, 256, (rows, 40, 40, 3), dtype=np.uint8)},
        state=rng.uniform(-1, 1, (rows, 8)).astype(np.float32),
        instructions=[("reach the red block", "push the very blue block")[i % 2] for i in range(rows)],
    )


def act(policy, rows=4, seed=3):
    inputs = policy.prepare(observe(rows))
    policy.seed(seed, first_env=0, num_envs=rows)
    return inputs, policy(inputs)


def rows_of(tensors, rows):
    return {name: x[rows] for name, x in tensors.items()}


def test_cameras_known_by_name_keep_their_places_and_others_take_those_left(tmp_path):
    make_tiny_pi0(tmp_path, **SMALL, cameras=("base_0_rgb", "left_wrist_0_rgb", "right_wrist_0_rgb"))
    policy = load_policy("pi0", Pi0PolicyConfig(path=str(tmp_path)))
    shades = {"new": 1, "base_0_rgb": 2, "more": 3}
    images = {name: np.full((1, 40, 40, 3), shade, np.uint8) for name, shade in shades.items()}
    inputs = policy.prepare(dataclasses.replace(observe(1), images=images))
    shades = {name: int(x.float().mean()) for name, x in inputs.items() if name.startswith("image.")}
    assert shades == {"image.base_0_rgb": 2, "image.left_wrist_0_rgb": 1, "image.right_wrist_0_rgb": 3}


def test_the_last_block_runs_only_where_the_value_is_read(make, accelerator):
    policy = make()
    block = policy.model.language_model.layers[-1]
    ran = []
    block.mlp.register_forward_hook(lambda *_: ran.append(1))
    inputs = policy.prepare(observe(3))
    policy.seed(0, first_env=0, num_envs=3)
    wanted = policy(inputs, greedy=True)
    assert len(ran) == 1
    with policy.acting_only():
        found = policy(inputs, greedy=True)
        assert torch.equal(found.action, wanted.action)
        assert found.value.tolist() == [0.0] * 3
        assert found.kept == {}
    config = EnvConfig(num_envs=4, max_episode_steps=8, options={"image_size": "40"})
    evaluate(accelerator, policy, policy, config, episodes=4)
    assert len(ran) == 1
    assert not torch.equal(policy(inputs).value, found.value)
    assert len(ran) == 2


# --------------------------------------------------------------------------------------------------------------------
# Samples and scores
# --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", ["pi0", "pi05"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_fresh_sample_scores_as_it_was_drawn_in_any_micro_batch(make, kind, variant):
    policy = make(variant, **KINDS[kind])
    inputs, sample = act(policy)
    assert sample.log_prob.shape == (4, len(policy.unit_step))
    for size in (1, 2, 3, 4):
        for rows in torch.arange(4).split(size):
            score = policy(rows_of(inputs, rows), rows_of(sample.trace, rows))
            torch.testing.assert_close(score.log_prob, sample.log_prob[rows], atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(score.value, sample.value[rows], atol=1e-5, rtol=0)


def test_log_probabilities_are_those_of_the_recorded_transition(make):
    policy = make(noise_level=0.4)
    inputs, sample = act(policy, rows=8)
    step = sample.trace["step"][:, 0]
    assert len(step.unique()) > 1  # each decision draws its own
    cache, state, *_ = policy._observe(inputs)
    x, x_next = sample.trace["x"][:, 0], sample.trace["x_next"][:, 0]
    time = 1 - step / 4
    velocity = policy.model.velocity(cache, state, x, time.float())
    for row in range(8):
        k, t = int(step[row]), float(time[row])
        sigma = 0.4 * (t / ((1 - t) if k else 0.25)) ** 0.5
        x0, e = x[row] - t * velocity[row], x[row] + (1 - t) * velocity[row]
        mean = x0 * (1 - t + 0.25) + e * (t - 0.25 - sigma**2 * 0.25 / (2 * t))
        expected = torch.distributions.Normal(mean, sigma * 0.5).log_prob(x_next[row])[:, :7]
        torch.testing.assert_close(sample.log_prob[row], expected.flatten(), atol=2e-5, rtol=0)


@pytest.mark.parametrize(("kind", "count"), [("one step", 1), ("all steps", 4)])
def test_units_are_the_real_dimensions_of_each_step_of_the_chunk(make, kind, count):
    policy = make(**KINDS[kind])
    _, sample = act(policy)
    assert policy.unit_step.tolist() == [k for k in range(3) for _ in range(7)] * count
    assert sample.trace["x"].shape == (4, count, 3, 32)
    mask = unit_mask(policy.unit_step, torch.tensor([2, 0, 3, 1]))
    assert mask.sum(1).tolist() == [14 * count, 0, 21 * count, 7 * count]


@pytest.mark.parametrize("kind", KINDS)
def test_padding_columns_do_not_count(make, kind):
    policy = make(**KINDS[kind])
    inputs, sample = act(policy)
    moved = {**sample.trace, "x_next": sample.trace["x_next"].clone()}
    moved["x_next"][..., 7:] += 1.0
    torch.testing.assert_close(policy(inputs, moved).log_prob, policy(inputs, sample.trace).log_prob, atol=0, rtol=0)


def test_what_an_environment_samples_does_not_depend_on_its_neighbours(make):
    policy = make(noise_steps="all")
    whole, sample = act(policy)
    policy.seed(3, first_env=2, num_envs=1)
    alone = policy(rows_of(whole, [2]))
    torch.testing.assert_close(alone.action[0], sample.action[2], atol=1e-5, rtol=0)
    torch.testing.assert_close(alone.value[0], sample.value[2], atol=1e-5, rtol=0)


def test_another_seed_samples_other_actions(make):
    policy = make()
    assert not torch.allclose(act(policy, seed=1)[1].action, act(policy, seed=2)[1].action, atol=1e-2)


def test_greedy_actions_repeat_need_no_streams_and_follow_the_model_s_own_sampler(make):
    policy = make()
    inputs = policy.prepare(observe(3))
    first, second = policy(inputs, greedy=True), policy(inputs, greedy=True)
    assert torch.equal(first.action, second.action)
    start = policy.greedy_start.expand(3, -1, -1)
    plain = policy.model.sample_actions(**policy.processor.model_inputs(inputs), noise=start, num_steps=4)
    torch.testing.assert_close(first.action, policy.processor.unnormalize_actions(plain), atol=1e-5, rtol=0)


def test_sampling_without_streams_says_what_to_call(make):
    policy = make()
    with pytest.raises(RuntimeError, match=r"2 environments are to sample, but there are 0 streams"):
        policy(policy.prepare(observe(2)))


def test_only_learned_noise_has_an_entropy(make):
    inputs, sample = act(make())
    assert make()(inputs, sample.trace).entropy is None
    policy = make(noise="learned", noise_level=0.2)
    inputs, sample = act(policy)
    entropy = policy(inputs, sample.trace).entropy.detach()
    low, high = (0.5 * np.log(2 * np.pi * np.e * s**2) for s in (0.1, 0.2))
    assert entropy.shape == sample.log_prob.shape
    assert low < float(entropy.min()) < float(entropy.max()) < high


@pytest.mark.parametrize("every_step", [False, True])
def test_without_noise_log_probs_and_gradients_are_0_and_not_nan(make, every_step):
    made = make()
    policy = Pi0Policy(made.model, made.processor, noise_level=0.0, every_step=every_step)
    inputs, sample = act(policy)
    score = policy(inputs, sample.trace)
    (score.log_prob.sum() + score.value.sum()).backward()
    assert not sample.log_prob.any()
    assert not score.log_prob.any()
    assert not any(p.grad.any() for p in policy.model.parameters() if p.grad is not None)
    assert sample.action.isfinite().all()


def test_the_value_depends_on_picture_and_state(make):
    policy = make()
    inputs = policy.prepare(observe(2))
    value = policy(inputs, greedy=True).value
    for name in ("image.base_0_rgb", "state"):
        changed = {**inputs, name: inputs[name].flip(0)}
        assert not torch.allclose(policy(changed, greedy=True).value, value, atol=1e-4)


# --------------------------------------------------------------------------------------------------------------------
# Learning and storage
# --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("freeze", [True, False])
def test_a_frozen_vlm_stays_bit_equal_and_the_rest_learns(make, freeze):
    policy = make(freeze_vlm=freeze, noise="learned")
    before = {name: x.clone() for name, x in policy.state_dict().items()}
    inputs, sample = act(policy)
    optimizer = torch.optim.AdamW([p for p in policy.parameters() if p.requires_grad], lr=1e-2, weight_decay=0.1)
    score = policy(inputs, sample.trace)
    (score.log_prob.mean() + score.entropy.mean() + score.value.mean()).backward()
    assert all(p.grad is not None for p in policy.parameters() if p.requires_grad)
    optimizer.step()
    same = {name for name, x in policy.state_dict().items() if torch.equal(x, before[name])}
    frozen = {name for name, p in policy.named_parameters() if not p.requires_grad}
    vlm = {name for name in before if ".paligemma." in name}
    assert frozen <= same
    assert (vlm <= same) == freeze
    assert not [name for name in same - vlm if "gemma_expert" in name and name.endswith("proj.weight")]


@pytest.mark.parametrize("noise", ["sde", "learned"])
def test_an_exported_policy_loads_bit_equal(make, tmp_path, noise):
    policy = make(noise=noise)
    policy.save(str(tmp_path / "out"), policy.state_dict())
    again = load_policy("pi0", Pi0PolicyConfig(path=str(tmp_path / "out"), noise=noise))
    theirs = again.state_dict()
    assert theirs.keys() == policy.state_dict().keys()
    assert all(torch.equal(x, theirs[name]) for name, x in policy.state_dict().items())
    assert torch.equal(act(again)[1].action, act(policy)[1].action)


@pytest.mark.parametrize("repeats", [1, 3])
def test_a_demonstration_scores_as_flow_matching_at_each_of_its_points(make, repeats):
    policy = make()
    inputs = policy.prepare(observe(4))
    actions = torch.rand(4, 3, 7) * 3 - 2
    trace = policy.encode_demonstration(actions, repeats=repeats)
    observed = policy.processor.model_inputs(inputs)
    state = observed.pop("state")
    target = policy.processor.normalize_actions(actions)
    cache = policy.model.prefix_cache(**observed)
    score = policy(inputs, trace).log_prob.view(4, repeats, 3 * 7)
    for point in range(repeats):
        loss = policy.model(cache, state, target, noise=trace["noise"][:, point], time=trace["time"][:, point])
        torch.testing.assert_close(-2 * score[:, point].mean(), loss, atol=1e-6, rtol=1e-5)
    assert len(trace["time"].unique()) == 4 * repeats
    with pytest.raises(ValueError, match=r"--sft\.smoothing must be 0 "):
        policy.encode_demonstration(actions, smoothing=1.0)


# --------------------------------------------------------------------------------------------------------------------
# Options and checkpoints that cannot work
# --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_steps", 0),
        ("num_steps", 1.5),
        ("noise", "cps"),
        ("noise_level", 0.0),
        ("noise_level", float("nan")),
        ("noise_steps", "two"),
        ("prefix_cache_gb", -1.0),
        ("prefix_cache_gb", float("nan")),
        ("prefix_cache_place", "disk"),
        ("constant_dims", "zero"),
        ("value_detach", False),
        ("value_hidden", 0),
        ("dtype", "float16"),
    ],
)
def test_a_bad_option_is_refused_by_name_rule_and_value(name, value):
    with pytest.raises(ValueError, match=rf"^--policy\.{name} must .*but is {value!r}\."):
        Pi0PolicyConfig(**{name: value})


def test_a_prefix_that_is_trained_cannot_be_kept():
    with pytest.raises(ValueError, match=r"^--policy\.prefix_cache_gb must be 0 .*--policy\.freeze_vlm.*but is 2\.0"):
        Pi0PolicyConfig(freeze_vlm=False, prefix_cache_gb=2.0)
    assert Pi0PolicyConfig(freeze_vlm=False, prefix_cache_gb=0.0).prefix_cache_gb == 0


def test_an_option_of_tokens_is_not_an_option_of_flows(capsys):
    with pytest.raises(SystemExit):
        parse_args(PPOConfig, ["--model", "pi0", "--policy.temperature", "0.5"])
    assert "--policy.temperature is an option of openvla, openvla-oft, not of the" in capsys.readouterr().err


def test_the_checkpoint_must_be_of_the_model_chosen(pi0_folders):
    with pytest.raises(ValueError, match=r"^--model must be pi05, as the checkpoint .* is, but is 'pi0'\."):
        peek_policy("pi0", Pi0PolicyConfig(path=str(pi0_folders["pi05"])))


def test_an_openvla_checkpoint_is_not_a_pi0(tiny_openvla):
    with pytest.raises(ValueError, match="pi0|tokenizer|constant_dims"):
        peek_policy("pi0", Pi0PolicyConfig(path=str(tiny_openvla)))


@pytest.mark.parametrize("model", ["pi0", "pi05"])
def test_the_shipped_checkpoint_heads_for_the_block_that_the_words_name(model):
    policy, env = load_policy(model, Pi0PolicyConfig()), Tabletop()
    frames, expected = [], []
    for row in range(16):
        frames.append(env.reset(options={"task_id": row % 4, "state_id": 1000 + row})[0])
        expected.append(env.expert_action()[:2])
    seen = Observation(
        images={"wrist": np.stack([frame["images"]["wrist"] for frame in frames])},
        state=np.stack([frame["state"] for frame in frames]),
        instructions=[env.instructions[row % 4] for row in range(16)],
    )
    moves = policy(policy.prepare(seen), greedy=True).action[:, 0, :2]
    alike = torch.cosine_similarity(moves, torch.from_numpy(np.stack(expected)))
    assert (alike > 0.9).float().mean() > 0.9


def test_a_missing_tokenizer_is_one_sentence_and_a_given_one_is_read(pi0_folders, tmp_path):
    make_tiny_pi0(tmp_path / "bare", **SMALL)
    (tmp_path / "bare" / "tokenizer").rename(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match=r"needs a tokenizer .* tokenizer/ folder"):
        peek_policy("pi0", Pi0PolicyConfig(path=str(tmp_path / "bare")))
    given = Pi0PolicyConfig(path=str(tmp_path / "bare"), tokenizer=str(tmp_path / "elsewhere"))
    assert peek_policy("pi0", given).chunk_size == 3


def test_flat_statistics_are_refused_unless_told_what_to_do(tmp_path):
    folder = str(make_tiny_pi0(tmp_path, **SMALL))
    (file,) = tmp_path.glob("*_normalizer_processor.safetensors")
    statistics = load_file(file)
    statistics["observation.state.std"][2] = 0
    save_file(statistics, file)
    with pytest.raises(ValueError, match="standard deviation of 0"):
        peek_policy("pi0", Pi0PolicyConfig(path=folder))
    assert peek_policy("pi0", Pi0PolicyConfig(path=folder, constant_dims="unit")).action_dim == 7


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--env.chunk_size", "4"], r"^--env\.chunk_size must be at most the policy's chunk, 3, but is 4"),
        (["--ppo.entropy_coef", "0.1"], r"^--ppo\.entropy_coef must be 0, since pi0's entropy .*but is 0\.1"),
    ],
)
def test_what_cannot_work_with_the_checkpoint_is_refused_before_loading(pi0_folders, words, message):
    config = parse_args(PPOConfig, ["--model", "pi0", "--policy.path", str(pi0_folders["pi0"]), *words])
    with pytest.raises(ValueError, match=message):
        check_run(config)


def test_learned_noise_may_have_an_entropy_bonus(pi0_folders):
    policy = Pi0PolicyConfig(path=str(pi0_folders["pi0"]), noise="learned")
    assert check_run(PPOConfig(model="pi0", policy=policy, ppo=PPOOptions(entropy_coef=0.1))).has_entropy


def test_policy_options_of_a_token_model_are_refused():
    with pytest.raises(ValueError, match=r"^--policy must be a Pi0PolicyConfig for pi0"):
        SFTConfig(model="pi0", policy=PolicyConfig())


# --------------------------------------------------------------------------------------------------------------------
# Whole runs
# --------------------------------------------------------------------------------------------------------------------

RUN = (
    "--env.name tabletop --env.options image_size 32 --env.num_envs 2 --env.max_episode_steps 12 --run.eval_episodes 2 "
)


def run_script(name, words, output):
    command = [sys.executable, str(ROOT / "scripts" / name), *words.split(), "--run.output_dir", str(output)]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    return output


def test_two_iterations_of_ppo_run_and_their_policy_loads(pi0_folders, tmp_path):
    words = (
        f"--model pi0 --policy.path {pi0_folders['pi0']} {RUN} --rollout.num_decisions 4 --ppo.minibatch_size 4 "
        "--run.iterations 2 --run.video_episodes 0 --run.trackers none --policy.value_hidden 8"
    )
    output = run_script("ppo_vla.py", words, tmp_path / "run")
    metrics = (output / "metrics.jsonl").read_text().splitlines()
    assert len(metrics) == 2
    assert peek_policy("pi0", Pi0PolicyConfig(path=str(output / "policy"))).chunk_size == 3


def test_smoothing_is_refused_before_anything_is_loaded(pi0_folders, monkeypatch):
    monkeypatch.setattr("vla_accel.sft.load_policy", lambda *_, **__: pytest.fail("it was loaded"))
    words = f"--model pi0 --policy.path {pi0_folders['pi0']} --sft.smoothing 1.0"
    with pytest.raises(ValueError, match=r"^--sft\.smoothing must be 0, since pi0's .*but is 1\.0"):
        finetune(parse_args(SFTConfig, words.split()))


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["pi0", "pi05"])
def test_imitation_runs_by_the_same_script(pi0_folders, tmp_path, variant):
    words = (
        f"--model {variant} --policy.path {pi0_folders[variant]} --policy.freeze_vlm False {RUN} "
        "--data.episodes 4 --sft.steps 3 --sft.batch_size 4"
    )
    output = run_script("sft_vla.py", words, tmp_path / "run")
    assert peek_policy(variant, Pi0PolicyConfig(path=str(output / "policy"))).chunk_size == 3
