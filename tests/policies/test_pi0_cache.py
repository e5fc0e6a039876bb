"""What a frozen vision-language model leaves of a rollout is reused by the update, and that is exact."""

import copy
import warnings

import pytest
import torch
from helpers.decisions import batch_of, rollout_of
from helpers.pi0 import KINDS

from vla_accel.batch import join_rows, make_batch
from vla_accel.config import PPOOptions
from vla_accel.distributed import prepare_policy
from vla_accel.envs import make_vector_env, training_jobs
from vla_accel.modes import train_mode
from vla_accel.ppo import rescore, update
from vla_accel.rollout import collect, start

ROW_BYTES = 2 * 2 * 16 * 4
"""Keys and values of one token: two, in two layers, 16 float32 each."""


class Spy:
    """Counts forwards of the two parts that a kept prefix makes unnecessary."""

    def __init__(self, policy):
        self.count = {"tower": 0, "language": 0}
        parts = {"tower": policy.model.vision_tower, "language": policy.model.language_model}
        for name, part in parts.items():
            part.register_forward_hook(lambda *_, name=name: self.add(name))

    def add(self, name):
        self.count[name] += 1


def run(accelerator, policy, batch, *, rate=1.0, **options):
    """One plain gradient step over the whole batch, and its metrics."""
    model, optimizer = prepare_policy(accelerator, policy, learning_rate=rate, make_optimizer=torch.optim.SGD)
    options = PPOOptions(**{"epochs": 1, "micro_batch_size": 4, "max_grad_norm": 0.0, **options})
    with train_mode(model):
        metrics = rescore(accelerator, model, batch, options)
        metrics |= update(
            accelerator, model, optimizer, batch, options, unit_step=policy.unit_step, num_minibatches=1, seed=0
        )
    return metrics


def without_kept(batch):
    """The same decisions, of which nothing was kept."""
    batch = copy.copy(batch)
    batch.kept, batch.spare = [], copy.copy(batch.spare)
    batch.spare.kept = []
    return batch


@pytest.mark.parametrize("variant", ["pi0", "pi05"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_gradient_of_an_update_is_that_of_computing_the_prefix_again(make, accelerator, kind, variant):
    steps, metrics = [], []
    for reuse in (True, False):
        policy = make(variant, **KINDS[kind])
        before = {name: p.detach().clone() for name, p in policy.named_parameters() if p.requires_grad}
        batch = batch_of(policy)
        spy = Spy(policy)
        metrics.append(run(accelerator, policy, batch if reuse else without_kept(batch)))
        assert (spy.count["tower"], spy.count["language"]) == ((0, 0) if reuse else (6, 6))  # 3 micro-batches, twice
        after = dict(policy.named_parameters())
        steps.append({name: after[name].detach() - x for name, x in before.items()})
    norm = metrics[0]["ppo/grad_norm"]
    difference = sum(float((steps[0][name] - x).square().sum()) for name, x in steps[1].items()) ** 0.5
    assert 0 < norm < 1e4
    # The step itself is rounded to the weights' float32, hence a little more than the gradients differ by.
    assert difference < 2e-6 * norm
    for name in ("ppo/first_log_ratio", "ppo/rescore_gap"):
        assert metrics[0][name] < 1e-5, name
        assert metrics[1][name] < 1e-5, name


def test_gradients_agree_to_a_millionth_of_their_norm(make):
    policy = make(noise_steps="all")
    batch = batch_of(policy)
    grads = []
    for kept in (join_rows(batch.kept, "cpu"), {}):
        policy.zero_grad()
        score = policy(batch.inputs | kept, batch.trace)
        (score.log_prob.mean() + score.value.mean()).backward()
        grads.append(torch.cat([p.grad.flatten() for p in policy.parameters() if p.grad is not None]).double())
    assert float((grads[0] - grads[1]).norm() / grads[1].norm()) < 1e-6
    assert float(grads[1].norm()) > 0.1


@pytest.mark.parametrize("freeze", [True, False])
def test_gradient_checkpointing_changes_no_update(make, accelerator, freeze):
    after = []
    for recompute in (False, True):
        policy = make(freeze_vlm=freeze, gradient_checkpointing=recompute)
        batch = batch_of(policy)
        spy = Spy(policy)
        run(accelerator, policy, batch, rate=1e-3)
        assert (spy.count["language"] == 0) == freeze
        assert policy.model.expert.gradient_checkpointing == recompute
        after.append({name: p.detach().clone() for name, p in policy.named_parameters()})
    for name, x in after[0].items():
        torch.testing.assert_close(after[1][name], x, rtol=1e-5, atol=1e-5)


def test_each_denoising_step_reports_its_share_of_clipped_ratios(make, accelerator):
    policy = make()
    batch = batch_of(policy)
    late = batch.trace["step"][:, 0] == 3
    assert 0 < late.sum() < len(batch)
    batch.advantage = torch.ones(len(batch))
    model, optimizer = prepare_policy(accelerator, policy, learning_rate=0.0, make_optimizer=torch.optim.SGD)
    batch.old_log_prob[late] -= 1.0  # ratios of e, which a good action clips
    with train_mode(model):
        metrics = update(
            accelerator, model, optimizer, batch, PPOOptions(epochs=2), unit_step=policy.unit_step, num_minibatches=2,
            seed=0,
        )  # fmt: skip
    shares = [metrics[f"ppo/clip_fraction/step_{step}"] for step in range(4)]
    assert shares == [0.0, 0.0, 0.0, 1.0]


def test_decisions_with_prompts_of_different_lengths_are_joined_exactly(make):
    policy = make()
    batch = batch_of(policy)
    inputs, trace = ({name: x[:4] for name, x in part.items()} for part in (batch.inputs, batch.trace))
    rows = []
    for row in range(4):
        policy.seed(0, first_env=row, num_envs=1)
        kept = policy({name: x[row : row + 1] for name, x in inputs.items()}).kept
        rows.append({name: x[0] for name, x in kept.items()})
    assert len({len(row["prefix.mask"]) for row in rows}) > 1
    joined, again = policy(inputs | join_rows(rows, "cpu"), trace), policy(inputs, trace)
    torch.testing.assert_close(joined.log_prob, again.log_prob, atol=1e-5, rtol=0)
    torch.testing.assert_close(joined.value, again.value, atol=1e-6, rtol=0)


@pytest.mark.parametrize("num_groups", [1, 2])
def test_what_is_kept_lies_in_the_order_of_the_rollout(make, num_groups):
    policy, cpu = make(), torch.device("cpu")
    streams = [{"stream": number, "num_streams": 4, "seed": 0} for number in range(4)]
    jobs = [training_jobs(task_ids=range(4), state_ids=range(1000, 1100), **stream) for stream in streams]
    envs = make_vector_env(
        "tabletop", num_envs=4, chunk_size=3, jobs=jobs, env_options={"image_size": 32}, num_groups=num_groups
    )
    policy.seed(0, first_env=0, num_envs=4)
    try:
        rollout = collect(policy, policy, envs, start(envs), num_decisions=3, device=cpu)
    finally:
        envs.close()
    zeros = torch.zeros(3, 4)
    batch = make_batch(rollout, zeros, zeros, unit_step=policy.unit_step, first_env=0)
    again = policy(batch.inputs, batch.trace)
    orders = (batch.kept, [*batch.kept[1:], batch.kept[0]])
    right, wrong = (policy(batch.inputs | join_rows(rows, cpu), batch.trace) for rows in orders)
    torch.testing.assert_close(right.log_prob, again.log_prob, atol=1e-5, rtol=0)
    torch.testing.assert_close(right.value, again.value, atol=1e-6, rtol=0)
    assert (wrong.value - again.value).abs().min() > 1e-5


def test_rows_are_padded_at_their_ends():
    rows = [{"x": torch.tensor([[1.0, 2.0]])}, {"x": torch.tensor([[3.0], [4.0]])}]
    assert join_rows(rows, "cpu")["x"].tolist() == [[[1, 2], [0, 0]], [[3, 0], [4, 0]]]


def test_the_budget_is_for_the_whole_rollout_and_all_or_nothing(make):
    """Measured on the tensors themselves: what is needed is kept, one byte less keeps nothing and says so."""
    policy = make()
    rollout = rollout_of(policy, num_decisions=3)
    decisions = [rollout.kept[4 * t : 4 * t + 4] for t in range(3)]
    needed = [sum(x.numel() * x.element_size() for row in rows for x in row.values()) for rows in decisions]
    assert len(set(needed)) == 1
    tokens = sum(len(row["prefix.mask"]) for row in decisions[0])
    assert needed[0] == tokens * (ROW_BYTES + 1) + 4 * 32 * 4  # keys and values, mask, mean output
    policy.keep_bytes = sum(needed)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(rollout_of(policy, num_decisions=3).kept) == 12
    policy.keep_bytes -= 1
    with pytest.warns(UserWarning, match=r"--policy\.prefix_cache_gb"):
        assert rollout_of(policy, num_decisions=3).kept == []


def test_what_is_kept_in_the_memory_of_the_host_is_the_same(make):
    """Here device and host are one; the copies between them are for a GPU."""
    kept = [rollout_of(make(prefix_cache_place=place)).kept for place in ("device", "host")]
    for there, here in zip(*kept, strict=True):
        torch.testing.assert_close(there, here, rtol=0, atol=0)
        assert all(x.device.type == "cpu" for x in here.values())


@pytest.mark.parametrize("options", [{"prefix_cache_gb": 0.0}, {"freeze_vlm": False}])
def test_nothing_is_kept_where_the_budget_is_0_or_the_prefix_is_trained(make, options):
    policy = make(**options)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert rollout_of(policy).kept == []


def test_greedy_decisions_keep_nothing(make):
    policy = make()
    inputs = {name: x[0] for name, x in rollout_of(policy).inputs.items()}
    assert policy(inputs, greedy=True).kept == {}


def test_a_rank_without_valid_decisions_runs_the_spare_row_from_what_was_kept(make, accelerator):
    policy = make()
    rollout = rollout_of(policy)
    rollout.valid[:] = False
    zeros = torch.zeros(rollout.valid.shape)
    batch = make_batch(rollout, zeros, zeros, unit_step=policy.unit_step, first_env=0)
    assert len(batch.kept) == len(batch) == 0
    assert len(batch.spare.kept) == 1


def test_scores_in_bfloat16_start_near_a_ratio_of_1_and_exactly_there_after_rescoring(make, accelerator):
    for reuse in (True, False):
        policy = make()
        batch = batch_of(policy)  # acted in float32, scored in bfloat16
        with torch.autocast("cpu", dtype=torch.bfloat16):
            metrics = run(accelerator, policy, batch if reuse else without_kept(batch))
        assert 1e-5 < metrics["ppo/rescore_gap"] < 1.0
        assert metrics["ppo/first_log_ratio"] < 1e-5
