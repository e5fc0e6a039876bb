"""Action tokens and statistics against what the original code returned, and by hand."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from vla_accel.models.openvla.actions import OFT_EPS, ActionStatistics, ActionTokenizer, resolve_unnorm_key

DATA = Path(__file__).parents[1] / "data" / "openvla"
GOLDEN = json.loads((DATA / "action_tokenizer.json").read_text())
STATISTICS = json.loads((DATA / "dataset_statistics.json").read_text())
PREDICTED = load_file(DATA / "predicted_actions.safetensors")
LLAMA = ActionTokenizer(32000)


def entry(low, high, *, mask=None, proprio=None, **more):
    action = {"q01": low, "q99": high, **more}
    if mask is not None:
        action["mask"] = mask
    return {"action": action, **({"proprio": proprio} if proprio else {})}


def test_bins_and_centers_equal_the_original():
    np.testing.assert_array_equal(LLAMA.bins, GOLDEN["bins"])
    np.testing.assert_array_equal(LLAMA.centers, GOLDEN["bin_centers"])


def test_encoding_equals_the_original_on_edges_and_outside_the_range():
    actions = np.array([case["action"] for case in GOLDEN["cases"]])
    expected = np.array([case["token_id"] for case in GOLDEN["cases"]])
    np.testing.assert_array_equal(LLAMA.encode(actions), expected)
    torch.testing.assert_close(LLAMA.encode(torch.from_numpy(actions)), torch.from_numpy(expected), rtol=0, atol=0)


def test_decoding_equals_the_original_on_action_ids_and_their_neighbours():
    ids = np.array([case["token_id"] for case in GOLDEN["decode_all"]])
    expected = np.array([case["decoded"] for case in GOLDEN["decode_all"]])
    np.testing.assert_array_equal(LLAMA.decode(ids), expected)
    decoded = LLAMA.decode(torch.from_numpy(ids))
    torch.testing.assert_close(decoded, torch.from_numpy(expected).float(), rtol=0, atol=0)


def test_encoding_a_decoded_id_returns_it_except_for_the_alias_of_the_largest_bin():
    ids = np.array(GOLDEN["reencode_of_decoded"]["tokens"])
    again = LLAMA.encode(LLAMA.decode(ids))
    np.testing.assert_array_equal(again, GOLDEN["reencode_of_decoded"]["reencoded"])
    assert ids[again != ids].tolist() == [31744]


@pytest.mark.parametrize(
    ("action", "expected"), [(1.0, 31744), (0.0, 31872), (-1.0, 31999), (7.0, 31744), (-7.0, 31999)]
)
def test_hand_computed_ids(action, expected):
    assert LLAMA.encode(np.array(action)) == expected
    assert LLAMA.encode(torch.tensor(action)) == expected


def test_both_aliases_of_the_largest_bin_decode_to_its_centre():
    np.testing.assert_allclose(LLAMA.decode(np.array([31744, 31745])), 1 - 1 / 255, rtol=0, atol=1e-15)


@pytest.mark.parametrize("shape", [(), (7,), (3, 8, 7)])
def test_numpy_and_torch_agree_on_any_shape(shape):
    actions = np.random.default_rng(0).uniform(-1.2, 1.2, shape)
    ids = LLAMA.encode(actions)
    assert ids.shape == shape
    assert ids.dtype == np.int64
    tensor_ids = LLAMA.encode(torch.tensor(actions))
    assert tensor_ids.dtype == torch.int64
    np.testing.assert_array_equal(tensor_ids.numpy(), ids)
    np.testing.assert_allclose(LLAMA.decode(tensor_ids).numpy(), LLAMA.decode(ids), rtol=0, atol=1e-7)


def test_quantisation_error_is_at_most_half_a_bin():
    actions = np.linspace(-1, 1, 10001)
    assert np.abs(LLAMA.decode(LLAMA.encode(actions)) - actions).max() <= 1 / 255 + 1e-12


def test_float32_edges_fall_into_the_same_bins_as_in_numpy():
    edges = LLAMA.bins.astype(np.float32)
    np.testing.assert_array_equal(LLAMA.encode(torch.from_numpy(edges)).numpy(), LLAMA.encode(edges))


def test_columns_and_ids_are_inverse_and_cover_the_last_ids():
    columns = np.arange(256)
    ids = LLAMA.index_to_id(columns)
    assert (ids[0], ids[-1], LLAMA.begin) == (31744, 31999, 31744)
    np.testing.assert_array_equal(LLAMA.id_to_index(ids), columns)
    assert LLAMA.is_action(np.array([31743, 31744, 31999, 32000])).tolist() == [False, True, True, False]


def test_encoding_refuses_nan():
    with pytest.raises(ValueError, match="NaN"):
        LLAMA.encode(np.array([0.0, np.nan]))


def test_number_of_bins_must_fit_the_vocabulary():
    with pytest.raises(ValueError, match="n_bins must lie in"):
        ActionTokenizer(100, 256)


@pytest.mark.parametrize("prompt", ["p0", "p1", "p2"])
@pytest.mark.parametrize("key", ["bridge_orig", "libero_spatial_no_noops"])
def test_unnormalised_actions_equal_the_original_prediction_bit_for_bit(prompt, key):
    ids = PREDICTED[f"{prompt}/generate/tokens"][0].numpy()
    actions = ActionStatistics.from_norm_stats(STATISTICS, key).unnormalize(LLAMA.decode(ids))
    np.testing.assert_array_equal(actions, PREDICTED[f"{prompt}/predict_action/{key}"].numpy())


def test_unnormalised_chunks_equal_the_original_oft_bit_for_bit():
    statistics = ActionStatistics.from_norm_stats(STATISTICS, "libero_spatial_no_noops")
    normalized = LLAMA.decode(PREDICTED["oft/given_tokens"].numpy()).reshape(3, 8, 7)
    actions = statistics.unnormalize(normalized, eps=OFT_EPS)
    np.testing.assert_array_equal(actions, PREDICTED["oft/given_actions"].numpy())
    assert np.abs(statistics.unnormalize(normalized) - actions).max() > 0, "the epsilon changes nothing"


def test_unnormalising_by_hand():
    statistics = ActionStatistics(entry([-2.0, 0.0, 5.0], [4.0, 1.0, 5.0], mask=[True, False, True]))
    np.testing.assert_allclose(statistics.unnormalize(np.array([0.5, 0.25, -0.3])), [2.5, 0.25, 5.0], rtol=0, atol=0)


def test_a_missing_mask_normalises_every_dimension():
    statistics = ActionStatistics(entry([0.0, 0.0], [2.0, 4.0]))
    assert statistics.unnormalize(np.array([1.0, 1.0])).tolist() == [2.0, 4.0]


def test_torch_and_numpy_statistics_agree_in_float64():
    statistics = ActionStatistics.from_norm_stats(STATISTICS, "libero_spatial_no_noops")
    actions = np.random.default_rng(0).uniform(-1, 1, (4, 8, 7)).astype(np.float32)
    for method in (statistics.unnormalize, statistics.normalize):
        result = method(torch.from_numpy(actions))
        assert result.dtype == torch.float64
        np.testing.assert_array_equal(result.numpy(), method(actions))


def test_normalising_inverts_unnormalising_and_clips():
    statistics = ActionStatistics.from_norm_stats(STATISTICS, "libero_spatial_no_noops")
    actions = np.random.default_rng(0).uniform(-1, 1, (100, 7))
    round_trip = statistics.normalize(statistics.unnormalize(actions, eps=OFT_EPS))
    np.testing.assert_allclose(round_trip, actions, rtol=0, atol=1e-12)
    assert statistics.normalize(np.full(7, 9.0)).tolist() == [1.0] * 6 + [9.0]


def test_dimensions_that_never_moved_normalise_to_zero_and_come_back():
    statistics = ActionStatistics(entry([3.0, -1.0], [3.0, 1.0], min=[3.0, -1.0], max=[3.0, 1.0]))
    for eps in (0.0, OFT_EPS):
        assert statistics.normalize(np.array([3.0, 1.0]), eps=eps)[0] == 0.0
        np.testing.assert_allclose(statistics.unnormalize(np.array([0.7, 0.0]), eps=eps), [3.0, 0.0], rtol=0, atol=1e-8)


@pytest.mark.parametrize("eps", [0.0, OFT_EPS])
def test_equal_quantiles_give_finite_numbers(eps):
    statistics = ActionStatistics(
        entry([0.0, 2.0], [0.0, 2.0], min=[-1.0, 2.0], max=[1.0, 2.0], proprio={"q01": [0.0], "q99": [0.0]})
    )
    for value in (-5.0, 0.0, 2.0, 5.0):
        assert np.isfinite(statistics.normalize(np.full(2, value), eps=eps)).all()
        assert np.isfinite(statistics.unnormalize(np.full(2, value), eps=eps)).all()
        assert np.isfinite(statistics.normalize_proprio(np.full(1, value), eps=eps)).all()


def test_extremes_replace_quantiles_in_min_max_mode():
    stats = {"set": entry([0.0], [1.0], min=[-1.0], max=[3.0])}
    assert ActionStatistics.from_norm_stats(stats, mode="min_max").unnormalize(np.array([1.0])).tolist() == [3.0]
    assert ActionStatistics.from_norm_stats(stats, mode="q99").unnormalize(np.array([1.0])).tolist() == [1.0]


def test_min_max_mode_reads_statistics_without_quantiles():
    only = {"action": {"min": [-1.0], "max": [3.0]}}
    assert ActionStatistics(only, mode="min_max").unnormalize(np.array([-1.0])).tolist() == [-1.0]
    with pytest.raises(ValueError, match=r"lacks q01 and q99.*min_max"):
        ActionStatistics(only)


def test_proprioception_by_hand():
    statistics = ActionStatistics(
        entry([0.0], [1.0], proprio={"q01": [-1.0, 0.0, 0.0], "q99": [3.0, 2.0, 2.0], "mask": [True, True, False]})
    )
    np.testing.assert_allclose(
        statistics.normalize_proprio(np.array([0.0, 9.0, 9.0])), [-0.5, 1.0, 9.0], rtol=0, atol=1e-8
    )


def test_missing_state_statistics_name_the_remedy():
    with pytest.raises(ValueError, match=r"'plain' have no 'proprio' entry.*dataset_statistics.json"):
        ActionStatistics(entry([0.0], [1.0]), name="plain").normalize_proprio(np.zeros(8))


@pytest.mark.parametrize("shape", [(6,), (2, 8), ()])
def test_actions_of_the_wrong_width_are_refused(shape):
    statistics = ActionStatistics.from_norm_stats(STATISTICS, "bridge_orig")
    with pytest.raises(ValueError, match="must end in 7 dimensions"):
        statistics.unnormalize(np.zeros(shape))


def test_lists_of_different_lengths_are_refused():
    with pytest.raises(ValueError, match="lists of one length"):
        ActionStatistics(entry([0.0, 0.0], [1.0]))


def test_unknown_mode_and_missing_action_entry_are_refused():
    with pytest.raises(ValueError, match="mode must be one of q99, min_max"):
        ActionStatistics(entry([0.0], [1.0]), mode="std")
    with pytest.raises(ValueError, match='has no "action" statistics; it has: proprio'):
        ActionStatistics({"proprio": {}}, name="x")


@pytest.mark.parametrize(
    ("keys", "asked", "suite", "expected"),
    [
        (["a", "b"], "b", "a", "b"),
        (["only"], None, "other", "only"),
        (["libero_spatial", "libero_spatial_no_noops"], None, "libero_spatial", "libero_spatial"),
        (["libero_spatial_no_noops", "bridge_orig"], None, "libero_spatial", "libero_spatial_no_noops"),
    ],
)
def test_key_resolution_order(keys, asked, suite, expected):
    assert resolve_unnorm_key(dict.fromkeys(keys, {}), asked, suite=suite) == expected


def test_unknown_key_lists_all_and_the_nearest():
    with pytest.raises(ValueError, match=r"Known keys: bridge_orig, libero_spatial_no_noops.*Nearest: 'bridge_orig'"):
        resolve_unnorm_key(STATISTICS, "bridge_org")


def test_unknown_key_is_refused_even_if_there_is_only_one():
    with pytest.raises(ValueError, match="unnorm_key 'b' is not among"):
        resolve_unnorm_key({"a": {}}, "b")


@pytest.mark.parametrize("suite", [None, "libero_goal"])
def test_several_keys_without_a_match_ask_for_a_choice(suite):
    with pytest.raises(ValueError, match=r"statistics of 2 data sets.*set unnorm_key.*bridge_orig"):
        resolve_unnorm_key(STATISTICS, None, suite=suite)


@pytest.mark.parametrize("nothing", [None, {}])
def test_no_statistics_name_the_file_to_add(nothing):
    with pytest.raises(ValueError, match=r"no action statistics.*dataset_statistics.json"):
        resolve_unnorm_key(nothing)
