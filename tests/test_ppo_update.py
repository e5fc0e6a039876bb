"""The update on real (tiny) policies: exact ratios, gradients free of micro-batches, and steps that must not happen."""

import functools

import pytest
import torch
from helpers.decisions import batch_of, rollout_of

from vla_accel.batch import make_batch
from vla_accel.config import PPOOptions
from vla_accel.distributed import prepare_policy
from vla_accel.modes import train_mode
from vla_accel.ppo import rescore, update

MODELS = ("openvla", "openvla-oft")


def prepared(accelerator, policy, *, make_optimizer=torch.optim.AdamW, **options):
    options = {"learning_rate": 1e-3, "value_learning_rate": 1e-2, **options}
    return prepare_policy(accelerator, policy, make_optimizer=make_optimizer, **options)


def run_update(accelerator, model, optimizer, batch, *, num_minibatches=1, train_policy=True, **options):
    with train_mode(model):
        return update(
            accelerator,
            model,
            optimizer,
            batch,
            PPOOptions(**options),
            unit_step=model.unit_step,
            num_minibatches=num_minibatches,
            seed=0,
            train_policy=train_policy,
        )


def copy_of(policy):
    return {name: x.detach().clone() for name, x in policy.named_parameters()}


def moved(policy, before):
    """Names of the parameters that are no longer bit-equal."""
    return {name for name, x in policy.named_parameters() if not torch.equal(x, before[name])}


# --------------------------------------------------------------------------------------------------------------------
# The ratio before the first step
# --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.6])
@pytest.mark.parametrize("model", MODELS)
def test_the_ratio_is_1_before_the_first_step(make_policy, accelerator, model, temperature):
    policy = make_policy(model, temperature=temperature)
    policy, optimizer = prepared(accelerator, policy)
    batch = batch_of(policy)
    lengths = batch.inputs["attention_mask"].sum(1).unique()
    assert len(lengths) >= 2, "the prompts are to have several lengths"
    sampled = batch.old_log_prob.clone()
    for size in (1, 3, 64):
        batch.old_log_prob = sampled.clone()
        options = PPOOptions(micro_batch_size=size)
        with train_mode(policy):
            metrics = rescore(accelerator, policy, batch, options)
        assert metrics["ppo/rescore_gap"] < 1e-5
        # What is rescored in micro-batches of one size is the old log-probability for all other sizes.
        for other in (1, 2, 5):
            outcome = run_update(
                accelerator, policy, _no_step(optimizer), batch, epochs=1, micro_batch_size=other, value_coef=0.0
            )
            assert outcome["ppo/first_log_ratio"] < 1e-5
            assert outcome["ppo/clip_fraction"] == 0.0


def _no_step(optimizer):
    """The same optimizer at learning rate 0."""
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    return optimizer


def test_rescore_reports_how_far_the_rollout_was_off(make_policy, accelerator):
    policy = make_policy("openvla-oft")
    batch = batch_of(policy)
    truth = batch.old_log_prob.clone()
    # Off by 0.5 in one valid unit; what is masked does not count.
    row, unit = (int(x) for x in batch.unit_mask.nonzero()[0])
    batch.old_log_prob[row, unit] += 0.5
    batch.old_log_prob[~batch.unit_mask] += 9.0
    with train_mode(policy):
        metrics = rescore(accelerator, policy, batch, PPOOptions())
    assert abs(metrics["ppo/rescore_gap"] - 0.5) < 1e-5
    assert abs(metrics["ppo/rescore_kl"] - 0.5 * 0.25 / int(batch.unit_mask.sum())) < 1e-6
    torch.testing.assert_close(batch.old_log_prob, truth, rtol=0, atol=1e-5)


# --------------------------------------------------------------------------------------------------------------------
# The gradient
# --------------------------------------------------------------------------------------------------------------------


def batch_with_noise(policy):
    """Decisions whose ratios differ from 1."""
    batch = batch_of(policy)
    noise = torch.randn(batch.old_log_prob.shape, generator=torch.Generator().manual_seed(2))
    batch.old_log_prob = batch.old_log_prob + 0.1 * noise
    return batch


def parameters_after_one_step(make_policy, accelerator, model, size, level):
    """After one plain gradient step at learning rate 1 with every part of the loss in it."""
    policy = make_policy(model, value_detach=False)
    policy, optimizer = prepared(
        accelerator,
        policy,
        learning_rate=1.0,
        value_learning_rate=1.0,
        make_optimizer=functools.partial(torch.optim.SGD, lr=1.0),
    )
    batch = batch_with_noise(policy)
    outcome = run_update(
        accelerator, policy, optimizer, batch, epochs=1, micro_batch_size=size, ratio_level=level, entropy_coef=0.1,
        value_coef=0.01, max_grad_norm=0.0,
    )  # fmt: skip
    assert outcome["ppo/steps"] == 1
    return copy_of(policy), outcome


@pytest.mark.parametrize(
    ("model", "level"), [("openvla", "unit"), *(("openvla-oft", x) for x in ("unit", "step", "chunk"))]
)
def test_the_gradient_does_not_depend_on_the_micro_batch_size(make_policy, accelerator, model, level):
    whole, outcome = parameters_after_one_step(make_policy, accelerator, model, 16, level)
    tolerance = 1e-6 * outcome["ppo/grad_norm"]  # between 6 and 80
    for size in (8, 4, 2, 1):
        parts, other = parameters_after_one_step(make_policy, accelerator, model, size, level)
        for name, x in whole.items():
            torch.testing.assert_close(parts[name], x, rtol=0, atol=tolerance, msg=f"{name} at micro-batch size {size}")
        for name, x in outcome.items():
            assert abs(other[name] - x) < 1e-5 * max(1.0, abs(x)), name


def plain_loss(policy, batch, level):
    """The whole loss of a batch in one pass, written as means of lists: entropy 0.1, value 0.01, clip 0.2."""
    score = policy(batch.inputs, batch.trace)
    surrogates, entropies, errors = [], [], []
    for b, mask in enumerate(batch.unit_mask):
        units = mask.nonzero().flatten()
        steps = policy.unit_step[units]
        groups = {"unit": units[:, None], "step": [units[steps == k] for k in steps.unique()], "chunk": [units]}[level]
        for group in groups:
            ratio = (score.log_prob[b, group] - batch.old_log_prob[b, group]).sum().exp()
            advantage = batch.advantage[b]
            surrogates.append(torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage))
        entropies.append(score.entropy[b, units])
        errors.append(0.5 * (score.value[b] - batch.returns[b]) ** 2)
    parts = [-torch.stack(surrogates).mean(), torch.stack(errors).mean(), torch.cat(entropies).mean()]
    return [part.item() for part in parts], parts[0] + 0.01 * parts[1] - 0.1 * parts[2]


@pytest.mark.parametrize("level", ["unit", "step", "chunk"])
def test_the_update_follows_the_mean_over_ratios_units_and_rows(make_policy, accelerator, level):
    policy = make_policy("openvla-oft", value_detach=False)
    batch = batch_with_noise(policy)
    parts, loss = plain_loss(policy, batch, level)
    loss.backward()
    after, outcome = parameters_after_one_step(make_policy, accelerator, "openvla-oft", 5, level)
    for name, part in zip(("loss/policy", "loss/value", "loss/entropy"), parts, strict=True):
        assert abs(outcome[name] - part) < 1e-5 * max(1.0, abs(part)), name
    for name, x in policy.named_parameters():
        expected = x if x.grad is None else x - x.grad
        torch.testing.assert_close(after[name], expected, rtol=0, atol=5e-6 * outcome["ppo/grad_norm"], msg=name)


def test_actions_that_were_not_executed_have_no_part_in_the_update(make_policy, accelerator):
    """Changing the stored log-probs and bins of the units that were masked changes no parameter."""
    results = []
    for garbage in (False, True):
        policy = make_policy("openvla-oft")
        policy, optimizer = prepared(accelerator, policy)
        batch = batch_of(policy)
        if garbage:
            batch.old_log_prob[~batch.unit_mask] = float("nan")
            batch.trace["bins"][~batch.unit_mask] = 255
        run_update(accelerator, policy, optimizer, batch, epochs=2, entropy_coef=0.1)
        results.append(copy_of(policy))
    assert all(torch.equal(results[0][name], x) for name, x in results[1].items())


def test_rows_of_ended_environments_have_no_part_in_the_update(make_policy, accelerator):
    results = []
    for garbage in (False, True):
        policy = make_policy("openvla")
        policy, optimizer = prepared(accelerator, policy)
        rollout = rollout_of(policy)
        assert not rollout.valid.all()
        advantage = torch.randn(rollout.valid.shape, generator=torch.Generator().manual_seed(4))
        if garbage:
            advantage[~rollout.valid] = float("nan")
            rollout.log_prob[~rollout.valid] = float("nan")
            rollout.inputs["images"][~rollout.valid] = 77
        batch = make_batch(rollout, advantage, advantage.clone(), unit_step=policy.unit_step, first_env=0)
        run_update(accelerator, policy, optimizer, batch, epochs=1)
        results.append(copy_of(policy))
    assert all(torch.equal(results[0][name], x) for name, x in results[1].items())


def test_the_gradient_is_clipped_to_the_norm_that_is_asked_for(make_policy, accelerator):
    policy = make_policy("openvla-oft")
    before = copy_of(policy)
    policy, optimizer = prepared(
        accelerator, policy, learning_rate=1.0, value_learning_rate=1.0, make_optimizer=torch.optim.SGD
    )
    outcome = run_update(accelerator, policy, optimizer, batch_of(policy), epochs=1, max_grad_norm=0.01)
    assert outcome["ppo/grad_norm"] > 0.02, "the norm is reported as it was"
    step = torch.cat([(x.detach() - before[name]).flatten() for name, x in policy.named_parameters()])
    torch.testing.assert_close(step.double().norm().item(), 0.01, rtol=1e-3, atol=0)


# --------------------------------------------------------------------------------------------------------------------
# What must stay as it is
# --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("detach", [True, False])
def test_the_critic_warmup_moves_the_value_head_alone(make_policy, accelerator, detach):
    policy = make_policy("openvla-oft", value_detach=detach)
    before = copy_of(policy)
    policy, optimizer = prepared(accelerator, policy, weight_decay=0.1)
    run_update(accelerator, policy, optimizer, batch_of(policy), train_policy=False, epochs=2, entropy_coef=0.1)
    changed = moved(policy, before)
    assert changed == {name for name in before if name.startswith("value_head.")}


def test_after_the_warmup_everything_that_can_move_moves(make_policy, accelerator):
    policy = make_policy("openvla-oft")
    before = copy_of(policy)
    policy, optimizer = prepared(accelerator, policy)
    batch = batch_of(policy)
    run_update(accelerator, policy, optimizer, batch, train_policy=False, epochs=1)
    run_update(accelerator, policy, optimizer, batch, epochs=1)
    assert moved(policy, before) == {name for name, x in policy.named_parameters() if x.requires_grad}


def test_frozen_vision_towers_stay_bit_equal(make_policy, accelerator):
    policy = make_policy("openvla", freeze_vision=True)
    before = copy_of(policy)
    policy, optimizer = prepared(accelerator, policy, weight_decay=0.1)
    run_update(accelerator, policy, optimizer, batch_of(policy), epochs=2)
    changed = moved(policy, before)
    assert not any("vision_backbone" in name for name in changed)
    assert {"model.projector.fc1.weight", "model.language_model.lm_head.weight"} <= changed


def test_learning_rate_0_changes_nothing(make_policy, accelerator):
    policy = make_policy("openvla-oft")
    before = copy_of(policy)
    policy, optimizer = prepared(accelerator, policy, learning_rate=0.0, value_learning_rate=0.0, weight_decay=0.1)
    assert run_update(accelerator, policy, optimizer, batch_of(policy), epochs=2)["ppo/steps"] == 2
    assert moved(policy, before) == set()


def _spoil_the_first_gradient(parameter):
    """A fault: the first gradient of this parameter is not a number."""
    calls = []

    def hook(gradient):
        calls.append(1)
        return gradient * float("nan") if len(calls) == 1 else gradient

    parameter.register_hook(hook)


def test_a_step_without_a_finite_gradient_is_skipped_and_counted(make_policy, accelerator):
    policy = make_policy("openvla-oft")
    before = copy_of(policy)
    policy, optimizer = prepared(accelerator, policy)
    batch = batch_of(policy)
    _spoil_the_first_gradient(policy.model.projector.fc1.weight)
    outcome = run_update(accelerator, policy, optimizer, batch, epochs=1)
    assert (outcome["ppo/steps"], outcome["ppo/skipped"]) == (0.0, 1.0)
    assert moved(policy, before) == set()
    assert all(x == x for x in outcome.values()), "no metric is NaN"
    assert all(p.grad is None for p in policy.parameters())
    outcome = run_update(accelerator, policy, optimizer, batch, epochs=1)
    assert (outcome["ppo/steps"], outcome["ppo/skipped"]) == (1.0, 0.0)
    assert all(x.isfinite().all() for x in policy.parameters())


def test_a_loss_that_is_not_finite_skips_the_step_too(make_policy, accelerator):
    policy = make_policy("openvla")
    before = copy_of(policy)
    policy, optimizer = prepared(accelerator, policy)
    batch = batch_of(policy)
    batch.returns[0] = float("nan")
    outcome = run_update(accelerator, policy, optimizer, batch, epochs=1, num_minibatches=2)
    assert (outcome["ppo/steps"], outcome["ppo/skipped"]) == (1.0, 1.0)
    assert moved(policy, before)
    assert all(x.isfinite().all() for x in policy.parameters())


def test_the_kl_stop_ends_the_update(make_policy, accelerator):
    policy = make_policy("openvla")
    policy, optimizer = prepared(accelerator, policy)
    batch = batch_of(policy)
    with train_mode(policy):
        rescore(accelerator, policy, batch, PPOOptions())
    outcome = run_update(accelerator, policy, optimizer, batch, epochs=6, target_kl=1e-4)
    # The first step is taken at KL 0 and carries the policy past the target, which the second minibatch finds.
    assert (outcome["ppo/steps"], outcome["ppo/kl_stop"]) == (1.0, 1.0)
    assert all(p.grad is None for p in policy.parameters())
    outcome = run_update(accelerator, policy, optimizer, batch, epochs=6, target_kl=0.0)
    assert (outcome["ppo/steps"], outcome["ppo/kl_stop"]) == (6.0, 0.0)
    assert outcome["ppo/kl"] > 1e-4


def test_the_kl_stop_does_not_end_the_critic_warmup(make_policy, accelerator):
    policy = make_policy("openvla")
    policy, optimizer = prepared(accelerator, policy)
    batch = batch_of(policy)
    batch.old_log_prob = batch.old_log_prob - 1.0
    outcome = run_update(accelerator, policy, optimizer, batch, train_policy=False, epochs=3, target_kl=1e-4)
    assert (outcome["ppo/steps"], outcome["ppo/kl_stop"]) == (3.0, 0.0)


def test_the_update_makes_good_actions_likelier_and_bad_ones_less(make_policy, accelerator):
    policy = make_policy("openvla-oft")
    policy, optimizer = prepared(accelerator, policy, learning_rate=1e-5)
    batch = batch_of(policy, num_decisions=4)
    batch.advantage = torch.where(batch.env < 2, 1.0, -1.0)

    def chunk_log_prob():
        with torch.no_grad():
            log_prob = policy(batch.inputs, batch.trace).log_prob
        return torch.where(batch.unit_mask, log_prob, torch.zeros(())).sum(1)

    before = chunk_log_prob()
    run_update(accelerator, policy, optimizer, batch, epochs=4)
    change = chunk_log_prob() - before
    assert change[batch.env < 2].mean() > 0.1
    assert change[batch.env >= 2].mean() < -0.1
