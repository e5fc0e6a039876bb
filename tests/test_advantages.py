"""Generalised advantages and their normalisation, against numbers worked out by hand."""

import pytest
import torch

from vla_accel.advantages import gae, group_relative, normalize

REWARD, VALUE, NEXT_VALUE = [1.0, 2.0, 4.0, 8.0], [1.0, 2.0, 3.0, 4.0], [2.0, 3.0, 4.0, 6.0]
NAN = float("nan")


def column(numbers, dtype=torch.float32):
    return torch.tensor(numbers, dtype=dtype)[:, None]


def estimate(*, reward=REWARD, value=VALUE, next_value=NEXT_VALUE, ends=(), cuts=(), lost=(), gae_lambda=0.5):
    """One environment at gamma 0.5; `ends`, `cuts`, `lost`: decisions that are terminated, truncated, invalid."""

    def flags(places):
        return column([t in places for t in range(4)], torch.bool)

    advantage, returns = gae(
        column(reward),
        column(value),
        next_value=column(next_value),
        terminated=flags(ends),
        truncated=flags(cuts),
        valid=~flags(lost),
        gamma=0.5,
        gae_lambda=gae_lambda,
    )
    return advantage[:, 0], returns[:, 0]


def test_gae_sums_the_discounted_errors_of_a_running_episode():
    advantage, returns = estimate()
    # Errors r + 0.5 V' - V: 1 + 1 - 1 = 1, 2 + 1.5 - 2 = 1.5, 4 + 2 - 3 = 3, 8 + 3 - 4 = 7.
    # From the end, times 0.5 * 0.5: 7; 3 + 7 / 4 = 4.75; 1.5 + 4.75 / 4 = 2.6875; 1 + 2.6875 / 4 = 1.671875.
    torch.testing.assert_close(advantage, torch.tensor([1.671875, 2.6875, 4.75, 7.0]), rtol=0, atol=0)
    torch.testing.assert_close(returns, torch.tensor([2.671875, 4.6875, 7.75, 11.0]), rtol=0, atol=0)


def test_gae_gives_a_terminated_episode_no_future():
    # The value after the end is never looked at, whatever it says: 2 - 2 = 0, then 1 + 0 / 4 = 1.
    advantage, _ = estimate(ends=[1], next_value=[2.0, 100.0, 4.0, 6.0])
    torch.testing.assert_close(advantage, torch.tensor([1.0, 0.0, 4.75, 7.0]), rtol=0, atol=0)


def test_gae_bootstraps_a_truncated_episode_with_its_own_last_observation():
    # The final observation is worth 5; the next episode's first, worth VALUE[2] = 3, has no part in it.
    # 2 + 0.5 * 5 - 2 = 2.5, then 1 + 2.5 / 4 = 1.625.
    advantage, returns = estimate(cuts=[1], next_value=[2.0, 5.0, 4.0, 6.0])
    torch.testing.assert_close(advantage, torch.tensor([1.625, 2.5, 4.75, 7.0]), rtol=0, atol=0)
    torch.testing.assert_close(returns, torch.tensor([2.625, 4.5, 7.75, 11.0]), rtol=0, atol=0)


@pytest.mark.parametrize("end", ["ends", "cuts"])
def test_gae_lets_nothing_flow_over_the_end_of_an_episode(end):
    first, _ = estimate(**{end: [1]})
    other, _ = estimate(**{end: [1]}, reward=[1.0, 2.0, -50.0, 30.0], value=[1.0, 2.0, 9.0, -9.0])
    assert torch.equal(first[:2], other[:2])


def test_gae_with_lambda_0_is_the_one_step_error():
    advantage, returns = estimate(gae_lambda=0.0)
    torch.testing.assert_close(advantage, torch.tensor([1.0, 1.5, 3.0, 7.0]), rtol=0, atol=0)
    # Returns r + 0.5 V': 1 + 1, 2 + 1.5, 4 + 2, 8 + 3.
    torch.testing.assert_close(returns, torch.tensor([2.0, 3.5, 6.0, 11.0]), rtol=0, atol=0)


def test_gae_with_lambda_1_is_the_discounted_sum_of_rewards():
    advantage, returns = estimate(gae_lambda=1.0)
    # From the end: 8 + 6 / 2 = 11; 4 + 11 / 2 = 9.5; 2 + 9.5 / 2 = 6.75; 1 + 6.75 / 2 = 4.375.
    torch.testing.assert_close(returns, torch.tensor([4.375, 6.75, 9.5, 11.0]), rtol=0, atol=0)
    torch.testing.assert_close(advantage, torch.tensor([3.375, 4.75, 6.5, 7.0]), rtol=0, atol=0)


def test_gae_with_lambda_1_sums_each_episode_for_itself():
    _, returns = estimate(gae_lambda=1.0, ends=[1], cuts=[2])
    # Last episode: 8 + 6 / 2 = 11. Truncated at once: 4 + 4 / 2 = 6. Terminated: 2, before it 1 + 2 / 2 = 2.
    torch.testing.assert_close(returns, torch.tensor([2.0, 2.0, 6.0, 11.0]), rtol=0, atol=0)


def test_gae_gives_invalid_rows_nothing_and_takes_nothing_from_them():
    advantage, returns = estimate(
        ends=[1], lost=[2, 3], reward=[1.0, 2.0, NAN, 5.0], value=[1.0, 2.0, NAN, NAN], next_value=[2.0, 0.0, NAN, 1.0]
    )
    torch.testing.assert_close(advantage, torch.tensor([1.0, 0.0, 0.0, 0.0]), rtol=0, atol=0)
    torch.testing.assert_close(returns, torch.tensor([2.0, 2.0, 0.0, 0.0]), rtol=0, atol=0)


def test_gae_bootstraps_a_row_before_an_invalid_one():
    # An episode that was lost at decision 2: the row before it keeps its own next value, 2 + 1.5 - 2 = 1.5.
    advantage, _ = estimate(lost=[2], reward=[1.0, 2.0, NAN, 8.0])
    torch.testing.assert_close(advantage, torch.tensor([1.375, 1.5, 0.0, 7.0]), rtol=0, atol=0)


def test_gae_treats_environments_apart():
    both = [torch.tensor([[a, 10.0 * a] for a in numbers]) for numbers in (REWARD, VALUE, NEXT_VALUE)]
    flags = torch.zeros(4, 2, dtype=torch.bool)
    ends = flags.clone()
    ends[1, 1] = True
    advantage, _ = gae(
        both[0],
        both[1],
        next_value=both[2],
        terminated=ends,
        truncated=flags,
        valid=~flags,
        gamma=0.5,
        gae_lambda=0.5,
    )
    torch.testing.assert_close(advantage[:, 0], estimate()[0])
    torch.testing.assert_close(advantage[:, 1], 10.0 * estimate(ends=[1])[0])


def alone(*numbers):
    """The sum over processes where there is but one."""
    return numbers


def test_normalize_brings_valid_entries_to_mean_0_and_deviation_1():
    # Of 1, 2, 3, 6: mean 3, variance (4 + 1 + 0 + 9) / 4 = 3.5.
    result = normalize(torch.tensor([[1.0, 2.0], [3.0, 6.0]]), torch.ones(2, 2, dtype=torch.bool), global_sum=alone)
    torch.testing.assert_close(result, torch.tensor([[-2.0, -1.0], [0.0, 3.0]]) / 3.5**0.5)


def test_normalize_ignores_whatever_stands_in_invalid_entries():
    valid = torch.tensor([True, False, True, False, True])
    garbage = torch.tensor([1.0, NAN, 2.0, float("inf"), 6.0])
    # Of 1, 2, 6: mean 3, variance (4 + 1 + 9) / 3.
    expected = torch.tensor([-2.0, 0.0, -1.0, 0.0, 3.0]) / (14 / 3) ** 0.5
    torch.testing.assert_close(normalize(garbage, valid, global_sum=alone), expected)


@pytest.mark.parametrize("advantage", [[5.0, NAN, NAN], [0.1, 0.1, 0.1], [-7.3e4, -7.3e4, NAN]])
def test_normalize_gives_0_where_there_is_nothing_to_compare(advantage):
    advantage = torch.tensor(advantage)
    assert normalize(advantage, ~advantage.isnan(), global_sum=alone).tolist() == [0.0, 0.0, 0.0]


def test_normalize_gives_0_where_nothing_is_valid():
    assert normalize(torch.full((2, 2), NAN), torch.zeros(2, 2, dtype=torch.bool), global_sum=alone).sum() == 0.0


def test_normalize_uses_the_sums_of_all_processes():
    whole = torch.tensor([1.0, 2.0, 3.0, 6.0, NAN])
    valid = ~whole.isnan()
    # Over both processes: 4 valid entries that sum to 12; squares around their mean 3 sum to 14.
    common = {2: (4.0, 12.0), 1: (14.0,)}
    said = {2: [], 1: []}

    def over_both(*numbers):
        said[len(numbers)].append(numbers)
        return common[len(numbers)]

    results = [normalize(whole[part], valid[part], global_sum=over_both) for part in (slice(0, 1), slice(1, 5))]
    assert said == {2: [(1.0, 1.0), (3.0, 11.0)], 1: [(4.0,), (10.0,)]}
    torch.testing.assert_close(torch.cat(results), normalize(whole, valid, global_sum=alone))


# --------------------------------------------------------------------------------------------------------------------
# Groups
# --------------------------------------------------------------------------------------------------------------------


def compare(rewards, lengths, *, ended=None, group_size=3):
    """Episodes of these lengths, each with its reward at its last decision."""
    place, lengths = torch.arange(3)[:, None], torch.tensor(lengths)
    last = place == lengths - 1
    return group_relative(
        torch.where(last, torch.tensor(rewards), torch.zeros(3, 1)),
        ended=last if ended is None else last & torch.tensor(ended),
        valid=place < lengths,
        group_size=group_size,
    )


def test_an_episode_is_compared_with_its_own_group():
    advantage, used = compare([4.0, 1.0, 1.0, 7.0, 7.0, 1.0], [1, 2, 3, 3, 1, 1])
    # First group: mean 2, deviation sqrt((4 + 1 + 1) / 3) = sqrt 2. Second: mean 5, deviation sqrt((4 + 4 + 16) / 3).
    high, low = 2**0.5, -(0.5**0.5)
    expected = [[high, low, low, -low, -low, -high], [0, low, low, -low, 0, 0], [0, 0, low, -low, 0, 0]]
    torch.testing.assert_close(advantage, torch.tensor(expected), rtol=1e-6, atol=0)
    assert torch.equal(used, torch.tensor(expected) != 0)


def test_a_group_that_agrees_says_nothing():
    advantage, used = compare([1.0, 1.0, 1.0, 0.0, 1.0, 0.0], [2, 3, 1, 3, 1, 3])
    assert not advantage[:, :3].any()
    assert used.any(0).tolist() == [False] * 3 + [True] * 3


def test_an_episode_that_was_broken_off_counts_nowhere():
    # Without the last, the first group has mean 2 and deviation 1; the second is left with one episode.
    advantage, used = compare([3.0, 1.0, 99.0, 5.0, 1.0, 2.0], [1] * 6, ended=[True, True, False, True, False, False])
    assert advantage[0].tolist() == [1.0, -1.0, 0.0, 0.0, 0.0, 0.0]
    assert used[0].tolist() == [True, True, False, False, False, False]


def test_an_episode_begun_again_counts_nowhere():
    valid = torch.tensor([[True, True], [False, True], [True, True]])  # its second decision was lost
    ended = torch.tensor([[False, False], [False, False], [True, True]])
    advantage, used = group_relative(torch.eye(3)[:, [0, 2]], ended=ended, valid=valid, group_size=2)
    assert not advantage.any()
    assert not used.any()
