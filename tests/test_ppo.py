"""PPO's loss against numbers worked out by hand, and the properties of an update that any policy must keep."""

import dataclasses
import math

import pytest
import torch

from vla_accel.batch import Batch, make_batch, minibatches, unit_mask
from vla_accel.config import PPOOptions
from vla_accel.ppo import learning_rate_factor, ppo_loss, reduce_units, set_learning_rates
from vla_accel.types import PolicyScore, Rollout, UnitGroups

NAN = float("nan")
UNIT_STEP = torch.tensor([0, 0, 1, 1])  # two environment steps of two units each


def batch(*, executed, advantage, old_log_prob=0.0, value=0.0, returns=0.0):
    """Decisions of two steps and four units."""
    num = len(executed)

    def column(x):
        return torch.as_tensor(x, dtype=torch.float32).expand(num)

    return Batch(
        inputs={},
        trace={},
        old_log_prob=torch.as_tensor(old_log_prob, dtype=torch.float32).expand(num, 4).clone(),
        unit_mask=unit_mask(UNIT_STEP, torch.tensor(executed)),
        advantage=column(advantage),
        returns=column(returns),
        value=column(value),
        row=torch.zeros(num, dtype=torch.int64),
        env=torch.arange(num),
        num_decisions=1,
    )


def score(log_prob, *, entropy=None, value=None):
    value = torch.zeros(len(log_prob)) if value is None else torch.tensor(value, requires_grad=True)
    entropy = None if entropy is None else torch.tensor(entropy, requires_grad=True)
    return PolicyScore(log_prob=log_prob, entropy=entropy, value=value)


def logs(ratios):
    return torch.tensor(ratios).log().requires_grad_()


# --------------------------------------------------------------------------------------------------------------------
# Units and levels
# --------------------------------------------------------------------------------------------------------------------


def test_unit_mask_keeps_the_units_of_executed_steps():
    mask = unit_mask(UNIT_STEP, torch.tensor([0, 1, 2]))
    assert mask.int().tolist() == [[0, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 1]]


@pytest.mark.parametrize(
    ("level", "sums", "kept"),
    [
        ("unit", [[1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 0.0, 0.0]], [[1, 1, 1, 1], [1, 1, 0, 0]]),
        ("step", [[3.0, 7.0], [11.0, 0.0]], [[1, 1], [1, 0]]),
        ("chunk", [[10.0], [11.0]], [[1], [1]]),
    ],
)
def test_reduce_units_sums_to_the_level(level, sums, kept):
    x = torch.tensor([[1.0, 2.0, 3.0, 4.0], [5.0, 6.0, NAN, 7.0]])
    reduced, mask = reduce_units(x, unit_mask(UNIT_STEP, torch.tensor([2, 1])), UNIT_STEP, level)
    assert reduced.tolist() == sums
    assert mask.int().tolist() == kept


# --------------------------------------------------------------------------------------------------------------------
# The loss
# --------------------------------------------------------------------------------------------------------------------

# Two decisions with clip range 0.8 .. 1.3: advantage 2, both steps executed; advantage -1, only the first step.
RATIOS = [[1.5, 0.5, 1.1, 1.0], [1.5, 0.5, 9.0, 0.1]]
HAND_WORKED = {
    # 2 * (1.3 + 0.5 + 1.1 + 1.0): the low side does not help a good action, the pessimist keeps 0.5.
    # -1 * (1.5 + 0.8): nor does the high side help a bad one. 1.3 < 1.5 and -0.8 < -0.5 are clipped.
    "unit": (2 * (1.3 + 0.5 + 1.1 + 1.0) - (1.5 + 0.8), 2, [1.5, 0.5, 1.1, 1.0, 1.5, 0.5]),
    # Steps: 1.5 * 0.5 = 0.75 and 1.1 * 1.0 = 1.1; 0.75, of which the bad action counts 0.8.
    "step": (2 * (0.75 + 1.1) - 0.8, 1, [0.75, 1.1, 0.75]),
    # Chunks: 0.75 * 1.1 = 0.825; 0.75.
    "chunk": (2 * 0.825 - 0.8, 1, [0.825, 0.75]),
}


@pytest.mark.parametrize("level", ["unit", "step", "chunk"])
def test_ppo_loss_equals_the_hand_worked_example(level):
    surrogate, clipped, ratios = HAND_WORKED[level]
    options = PPOOptions(clip_low=0.2, clip_high=0.3, ratio_level=level)
    sums = ppo_loss(score(logs(RATIOS)), batch(executed=[2, 1], advantage=[2.0, -1.0]), UNIT_STEP, options)
    torch.testing.assert_close(sums.policy.item(), -surrogate, rtol=1e-6, atol=0)
    torch.testing.assert_close(sums.kl.item(), sum(r - 1 - math.log(r) for r in ratios), rtol=1e-5, atol=0)
    torch.testing.assert_close(sums.log_ratio_max.item(), max(abs(math.log(r)) for r in ratios), rtol=1e-6, atol=0)
    assert sums.clipped == clipped


@pytest.mark.parametrize(
    ("ratio", "advantage", "slope"),
    [
        (1.5, 2.0, 0.0),  # good, already much likelier: no further
        (0.5, 2.0, 0.5 * 2.0),  # good, but less likely than before: back
        (1.1, 2.0, 1.1 * 2.0),
        (1.5, -2.0, 1.5 * -2.0),  # bad, but likelier than before: back
        (0.5, -2.0, 0.0),  # bad, already much less likely: no further
        (0.9, -2.0, 0.9 * -2.0),
    ],
)
def test_ppo_loss_pushes_only_where_the_clip_leaves_it(ratio, advantage, slope):
    log_prob = logs([[ratio, 1.0, 1.0, 1.0]])
    options = PPOOptions(clip_low=0.2, clip_high=0.3)
    ppo_loss(score(log_prob), batch(executed=[1], advantage=advantage), UNIT_STEP, options).policy.backward()
    # d(-rho A) / d(log rho) = -rho A
    torch.testing.assert_close(log_prob.grad[0, 0].item(), -slope, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("level", ["unit", "step", "chunk"])
def test_masked_units_get_exactly_no_gradient(level):
    log_prob = torch.tensor([[-1.0, -2.0, NAN, 300.0]], requires_grad=True)
    outcome = score(log_prob, entropy=[[1.0, 2.0, NAN, 5.0]])
    old = batch(executed=[1], advantage=1.0, old_log_prob=[[-1.1, -1.9, NAN, -300.0]])
    sums = ppo_loss(outcome, old, UNIT_STEP, PPOOptions(ratio_level=level))
    (sums.policy + sums.entropy).backward()
    assert log_prob.grad[0, 2:].tolist() == [0.0, 0.0]
    assert log_prob.grad[0, :2].abs().min() > 0
    assert outcome.entropy.grad.tolist() == [[1.0, 1.0, 0.0, 0.0]]
    assert sums.entropy.item() == 3.0


@pytest.mark.parametrize("level", ["unit", "step", "chunk"])
@pytest.mark.parametrize("log_ratio", [200.0, -200.0])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_ppo_loss_is_finite_for_a_stale_sample(level, log_ratio, advantage):
    log_prob = torch.full((1, 4), log_ratio, requires_grad=True)
    sums = ppo_loss(score(log_prob), batch(executed=[2], advantage=advantage), UNIT_STEP, PPOOptions(ratio_level=level))
    sums.policy.backward()
    assert all(getattr(sums, name).isfinite() for name in ("policy", "kl", "clipped", "log_ratio_max"))
    assert log_prob.grad.isfinite().all()


def test_the_value_loss_is_half_the_squared_error():
    outcome = score(torch.zeros(2, 4), value=[3.0, -1.0])
    sums = ppo_loss(outcome, batch(executed=[2, 2], advantage=0.0, returns=[1.0, 1.0]), UNIT_STEP, PPOOptions())
    assert sums.value.item() == 4.0  # (2^2 + 2^2) / 2
    sums.value.backward()
    assert outcome.value.grad.tolist() == [2.0, -2.0]


def test_the_value_clip_takes_the_worse_of_clipped_and_unclipped():
    outcome = score(torch.zeros(3, 4), value=[2.0, 2.0, 0.1])
    old = batch(executed=[2, 2, 2], advantage=0.0, value=0.0, returns=[1.9, -1.0, 1.0])
    sums = ppo_loss(outcome, old, UNIT_STEP, PPOOptions(value_clip=0.5))
    # Clipped to 0.5, 0.5, 0.1. Errors 0.1, 3, 0.9 against 1.4, 1.5, 0.9: the worse are 1.4, 3, 0.9.
    torch.testing.assert_close(sums.value.item(), (1.4**2 + 3.0**2 + 0.9**2) / 2, rtol=1e-6, atol=0)
    sums.value.backward()
    torch.testing.assert_close(outcome.value.grad, torch.tensor([0.0, 3.0, -0.9]))


@pytest.mark.parametrize(
    ("level", "expected"),
    [
        # Clipped are unit 0 of the first decision (1.5 > 1.3) and unit 1 of the second (0.5 < 0.8, and bad).
        ("unit", {"a": [1.0, 3.0], "b": [1.0, 3.0]}),
        # Of three steps the second decision's is clipped: 1.5 * 0.5 = 0.75 < 0.8. Each has units of both parts.
        ("step", {"a": [1.0, 3.0], "b": [1.0, 3.0]}),
        ("chunk", {"a": [1.0, 2.0], "b": [1.0, 2.0]}),
    ],
)
def test_clipped_ratios_are_counted_for_each_part_of_a_decision(level, expected):
    groups = UnitGroups(names=("a", "b"), index=torch.tensor([0, 1, 0, 1]).expand(2, 4))
    outcome = dataclasses.replace(score(logs(RATIOS)), groups=groups)
    options = PPOOptions(clip_low=0.2, clip_high=0.3, ratio_level=level)
    sums = ppo_loss(outcome, batch(executed=[2, 1], advantage=[2.0, -1.0]), UNIT_STEP, options)
    assert {name: counts.tolist() for name, counts in sums.parts.items()} == expected


# --------------------------------------------------------------------------------------------------------------------
# Batches and how they are dealt
# --------------------------------------------------------------------------------------------------------------------


def numbered_rollout(valid, *, executed=None):
    """Decision t of environment n is named `100 t + n` in inputs, trace and value."""
    valid = torch.as_tensor(valid)
    names = 100 * torch.arange(valid.shape[0])[:, None] + torch.arange(valid.shape[1])
    zeros = torch.zeros(valid.shape)
    return Rollout(
        inputs={"name": names},
        trace={"name": names.clone()},
        log_prob=names[..., None].expand(*valid.shape, 4).float(),
        value=names.float(),
        next_value=zeros,
        reward=zeros,
        executed=valid.long() * 2 if executed is None else torch.as_tensor(executed),
        terminated=zeros.bool(),
        truncated=zeros.bool(),
        valid=valid,
    )


def numbered_batch(valid, *, first_env=0, **options):
    rollout = numbered_rollout(valid, **options)
    names = rollout.value
    return make_batch(rollout, names + 0.25, names + 0.5, unit_step=UNIT_STEP, first_env=first_env)


def test_make_batch_drops_rows_that_were_not_executed_and_keeps_the_others_together():
    made = numbered_batch([[True, True], [False, True], [True, True]], executed=[[2, 1], [0, 1], [0, 2]], first_env=5)
    names = [0, 1, 101, 201]
    assert made.inputs["name"].tolist() == made.trace["name"].tolist() == made.value.int().tolist() == names
    assert made.old_log_prob[:, 0].tolist() == names
    assert made.advantage.tolist() == [x + 0.25 for x in names]
    assert made.returns.tolist() == [x + 0.5 for x in names]
    assert made.row.tolist() == [0, 0, 1, 2]
    assert made.env.tolist() == [5, 6, 6, 6]
    assert made.unit_mask.sum(1).tolist() == [4, 2, 2, 4]
    assert made.num_decisions == 3


def test_a_rank_without_a_valid_row_still_has_a_row_to_spare():
    made = numbered_batch([[False, False]])
    assert len(made) == 0
    assert len(made.spare) == 1
    assert not made.spare.unit_mask.any()


def composition(made, **options):
    """For each minibatch the set of (row, environment) in it."""
    return [{(int(made.row[i]), int(made.env[i])) for i in part} for part in minibatches(made, **options)]


@pytest.mark.parametrize(("num_rows", "num_envs", "number"), [(16, 8, 4), (3, 8, 6), (2, 8, 16), (5, 3, 1), (4, 6, 12)])
def test_minibatches_hold_each_row_once_and_are_of_one_size(num_rows, num_envs, number):
    made = numbered_batch(torch.ones(num_rows, num_envs, dtype=torch.bool))
    parts = minibatches(made, num_minibatches=number, seed=3)
    assert torch.cat(parts).sort().values.tolist() == list(range(num_rows * num_envs))
    assert {len(part) for part in parts} == {num_rows * num_envs // number}


def test_minibatches_stay_nearly_even_where_rows_are_missing():
    valid = torch.ones(16, 32, dtype=torch.bool)
    valid[13:] = False
    sizes = [len(part) for part in minibatches(numbered_batch(valid), num_minibatches=4, seed=0)]
    assert sum(sizes) == 13 * 32
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("cuts", [(0, 4, 8), (0, 3, 5, 8), (0, 1, 2, 3, 4, 5, 6, 7, 8)])
@pytest.mark.parametrize("number", [2, 8])
def test_minibatches_are_the_same_on_any_number_of_ranks(cuts, number):
    valid = torch.rand(6, 8, generator=torch.Generator().manual_seed(0)) < 0.8
    whole = composition(numbered_batch(valid), num_minibatches=number, seed=7)
    split = [set() for _ in range(number)]
    for begin, end in zip(cuts, cuts[1:], strict=False):
        rank = numbered_batch(valid[:, begin:end], first_env=begin)
        for part, own in zip(split, composition(rank, num_minibatches=number, seed=7), strict=True):
            part |= own
    assert split == whole
    assert sum(map(len, whole)) == int(valid.sum())


def test_minibatches_take_as_many_rows_from_every_environment():
    made = numbered_batch(torch.ones(8, 6, dtype=torch.bool))
    for part in minibatches(made, num_minibatches=4, seed=1):
        assert made.env[part].bincount(minlength=6).tolist() == [2] * 6


def test_minibatches_are_shuffled_by_the_seed():
    made = numbered_batch(torch.ones(8, 6, dtype=torch.bool))
    deals = [composition(made, num_minibatches=4, seed=seed) for seed in (0, 0, 1)]
    assert deals[0] == deals[1]
    assert deals[0] != deals[2]


def test_environments_are_shuffled_apart():
    # With 4 minibatches of 8 decisions, environments 0 and 4 begin at the same minibatch.
    deal = composition(numbered_batch(torch.ones(8, 5, dtype=torch.bool)), num_minibatches=4, seed=0)
    first, last = ([{row for row, env in part if env == wanted} for part in deal] for wanted in (0, 4))
    assert first != last


# --------------------------------------------------------------------------------------------------------------------
# Learning rates
# --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "factors"),
    [
        ({"lr_schedule": "constant"}, [1, 1, 1, 1, 1]),
        ({"lr_schedule": "linear", "lr_final": 0.2}, [1, 0.8, 0.6, 0.4, 0.2]),
        ({"lr_schedule": "linear", "lr_final": 0.0}, [1, 0.75, 0.5, 0.25, 0]),
        ({"lr_schedule": "cosine", "lr_final": 0.2}, [1, 0.2 + 0.4 * (1 + 0.5**0.5), 0.6, 0.6 - 0.4 * 0.5**0.5, 0.2]),
        ({"lr_schedule": "constant", "lr_warmup": 3}, [0.25, 0.5, 0.75, 1, 1]),
        ({"lr_schedule": "linear", "lr_final": 0.2, "lr_warmup": 1}, [0.5, 0.8, 0.6, 0.4, 0.2]),
    ],
)
def test_learning_rates_follow_their_schedule(options, factors):
    options = PPOOptions(**options)
    assert [learning_rate_factor(options, i, 5) for i in range(5)] == pytest.approx(factors)
    groups = [{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": rate, "initial_lr": rate} for rate in (1e-3, 1e-2)]
    optimizer = torch.optim.SGD(groups)
    for iteration in (3, 1):  # whatever came before
        set_learning_rates(optimizer, options, iteration, 5)
        rates = [group["lr"] for group in optimizer.param_groups]
        assert rates == pytest.approx([1e-3 * factors[iteration], 1e-2 * factors[iteration]])


def test_a_run_of_one_iteration_has_its_full_rate():
    assert learning_rate_factor(PPOOptions(lr_schedule="linear"), 0, 1) == 1.0
