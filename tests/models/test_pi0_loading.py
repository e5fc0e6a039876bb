"""PI0 checkpoints: every layout in use loads strictly, everything else is refused by name, and saving loses nothing."""

import json

import pytest
import torch
from pi0_golden import DATA, SIZES, folder, heads, load, model, policy_folder, same, sizes, weights
from safetensors.torch import load_file, save_file

from vla_accel.models.pi0 import (
    Pi0Config,
    load_model,
    load_pi0,
    peek_pi0,
    read_config,
    save_model,
    save_pi0,
)
from vla_accel.models.pi0.loading import EMBEDDING, EXPERT_HEAD, VLM_HEAD

OLD_NORM = "paligemma_with_expert.paligemma.language_model.model.norm.weight"
K_PROJ = "paligemma_with_expert.gemma_expert.model.layers.1.self_attn.k_proj.weight"


def edit_config(path, **changes):
    file = path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    return path


@pytest.mark.parametrize("variant", ["pi0", "pi05"])
@pytest.mark.parametrize("layout", ["lerobot", "base", "openpi"])
def test_every_layout_gives_the_same_weights(variant, layout, tmp_path):
    net = load(folder(tmp_path, variant, layout=layout), layout=layout)
    assert same(net, variant)
    assert net.config.variant == variant
    assert not net.training


def test_tower_without_vision_model_in_its_names_loads(tmp_path):
    def edit(tensors):
        for name in [name for name in tensors if ".vision_model." in name]:
            tensors[name.replace(".vision_model.", ".")] = tensors.pop(name)

    assert same(load(folder(tmp_path, edit=edit)))


def test_old_names_of_the_time_mlp_load(tmp_path):
    def edit(tensors):
        for name in [name for name in tensors if "action_time_mlp" in name]:
            tensors[name.replace("action_time_mlp", "time_mlp")] = tensors.pop(name)

    assert same(load(folder(tmp_path, edit=edit)))


def test_sharded_checkpoint_loads(tmp_path):
    folder(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    names, weight_map = sorted(tensors), {}
    for index, part in enumerate((names[:50], names[50:])):
        file = f"model-0000{index + 1}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, tmp_path / file)
        weight_map |= dict.fromkeys(part, file)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert same(load(tmp_path))


def test_embedding_wins_over_a_stale_head(tmp_path):
    """After full fine-tuning the two differ, and only the embedding was trained."""
    net = load(folder(tmp_path, edit=lambda tensors: tensors[f"model.{VLM_HEAD}"].fill_(2.0)))
    assert torch.equal(net.get_input_embeddings().weight, weights("pi0")[EMBEDDING])


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda t: t.pop(f"model.{K_PROJ}"), "1 weights are missing .*layers.1.self_attn.k_proj.*0 are left over"),
        (lambda t: t.update({"model.state_projection.weight": torch.zeros(1)}), "1 are left over .*state_projection"),
        (
            lambda t: t.update({f"model.{K_PROJ}": torch.zeros(16, 31)}),
            r"must have the shape \[16, 32\].*has \[16, 31\]",
        ),
        (lambda t: t.update({K_PROJ: torch.zeros(16, 32)}), "k_proj.weight twice"),
        (lambda t: t.update({"normalize_inputs.buffer_observation_state.mean": torch.zeros(8)}), "before October 2025"),
        (
            lambda t: t.update(
                {"model.paligemma_with_expert.paligemma.language_model.model.norm.weight": torch.zeros(1)}
            ),
            "before October 2025",
        ),
        (
            lambda t: [t.pop(name) for name in (f"model.{EMBEDDING}", f"model.{VLM_HEAD}")],
            "1 weights are missing .*embed_tokens",
        ),
    ],
    ids=["missing", "left-over", "shape", "twice", "old-normaliser", "old-language-model", "no-embedding"],
)
def test_a_file_that_does_not_fit_is_refused_by_name(edit, message, tmp_path):
    folder(tmp_path, edit=edit)
    with pytest.raises(ValueError, match=message):
        load(tmp_path)


def test_weights_of_the_other_variant_are_refused(tmp_path):
    folder(tmp_path, "pi05")
    edit_config(tmp_path, type="pi0")
    with pytest.raises(ValueError, match="does not fit a pi0 model"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"type": "smolvla"}, "type must be one of pi0, pi05, but is 'smolvla'"),
        ({"use_relative_actions": True}, "use_relative_actions is true: .*relative to the state are not supported"),
        ({"paligemma_variant": "gemma_7b"}, "paligemma_variant must be one of gemma_2b, gemma_300m, but is 'gemma_7b'"),
        ({"dtype": "float16"}, "precision must be one of float32, bfloat16, but is 'float16'"),
        ({"image_resolution": [224, 112]}, r"image_resolution must be square, but is \[224, 112\]"),
        ({"image_resolution": [50, 50]}, "image_size must be a multiple of vision.patch_size"),
        ({"normalization_mapping": {"STATE": "MEAN"}}, "must be one of IDENTITY, MEAN_STD"),
        ({"normalization_mapping": {"VISUAL": "MEAN_STD"}}, "VISUAL.* must be IDENTITY"),
        ({"max_state_dim": 7}, "observation.state.* must have at most 7 entries .* but has 8"),
        ({"max_action_dim": 6}, "action.* must have at most 6 entries .* but has 7"),
        ({"time_sampling_beta_beta": 2.0}, "time_sampling_beta_beta must be 1.0, but is 2.0"),
        ({"chunk_size": 0}, "chunk_size must be a whole number of at least 1, but is 0"),
        ({"chunk_size": "4"}, "chunk_size must be a whole number of at least 1, but is '4'"),
        ({"chunk_size": True}, "chunk_size must be a whole number of at least 1, but is True"),
        ({"n_action_steps": 51}, r"n_action_steps must be at most chunk_size \(10\), but is 51"),
        ({"num_inference_steps": 0}, "num_inference_steps must be a whole number of at least 1, but is 0"),
        ({"tokenizer_max_length": -1}, "tokenizer_max_length must be a whole number of at least 1, but is -1"),
        ({"tokenizer_max_length": 0}, "tokenizer_max_length must be a whole number of at least 1, but is 0"),
        ({"min_period": 0.0}, "min_period must be a number above 0, but is 0.0"),
        ({"max_period": "4"}, "max_period must be a number above 0, but is '4'"),
        ({"time_sampling_offset": -1}, "time_sampling_offset must be a number of at least 0, but is -1"),
        ({"image_resolution": 56}, "image_resolution must be square, but is 56"),
        ({"image_resolution": ["a", "a"]}, "image_size must be a whole number of at least 1, but is 'a'"),
        ({"normalization_mapping": ["MEAN_STD"]}, "normalization_mapping must hold a table"),
        ({"input_features": [1]}, "input_features must hold a table"),
        ({"input_features": {"a": 1}}, r"input_features\['a'\] must hold a table"),
        ({"input_features": {"a": {"shape": [3]}}}, r"input_features\['a'\]: type must be .* but is None"),
        ({"input_features": {"a": {"type": "VISUAL"}}}, r"input_features\['a'\]: shape must be .* but is None"),
        (
            {"output_features": {"action": {"type": "ACTION", "shape": []}}},
            r"output_features\['action'\]: shape must be a list of whole numbers of at least 1, but is \[\]",
        ),
        (
            {"input_features": {"observation.state": {"type": "STATE", "shape": [8]}}},
            "input_features must be a table with a camera .* but is .'observation.state'",
        ),
    ],
)
def test_a_configuration_that_asks_for_something_else_is_refused(changes, message, tmp_path):
    edit_config(folder(tmp_path), **changes)
    with pytest.raises(ValueError, match=message):
        read_config(tmp_path)


def test_stacks_must_agree_where_they_share_attention():
    with pytest.raises(ValueError, match="vlm.depth and expert.depth must be equal.*but are 18 and 17"):
        Pi0Config(expert={"depth": 17})
    with pytest.raises(ValueError, match="expert knows width, depth.*given layers"):
        Pi0Config(expert={"layers": 17})


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"vision": {"num_heads": 5}}, r"vision.width must be a multiple of vision.num_heads \(5\), but is 1152"),
        ({"expert": {"width": 33}}, "expert.width must be even, but is 33"),
        ({"vlm": {"mlp_dim": 0}}, "vlm.mlp_dim must be a whole number of at least 1, but is 0"),
        ({"vision": [1]}, "vision must hold a table"),
    ],
)
def test_sizes_that_no_model_can_have_are_refused(sizes, message):
    with pytest.raises(ValueError, match=message):
        Pi0Config(**sizes)


def test_chunks_longer_than_the_horizon_are_refused():
    config = Pi0Config(chunk_size=10)
    config.check_chunk(10)
    with pytest.raises(ValueError, match="env.chunk_size must be between 1 and the model's horizon of 10 .* but is 11"):
        config.check_chunk(11, "env.chunk_size")


def test_folders_of_other_kinds_are_refused(tmp_path):
    with pytest.raises(ValueError, match="neither"):
        load_pi0(tmp_path / "nothing")
    with pytest.raises(ValueError, match="has no config.json"):
        load_pi0(tmp_path)
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ValueError, match="LoRA adapter: merge it first"):
        load_pi0(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "pi0"}')
    with pytest.raises(ValueError, match="neither LeRobot's .* nor openpi's .* model_type is 'pi0'"):
        load_pi0(tmp_path)
    (tmp_path / "config.json").write_text((DATA / "config_pi0.json").read_text())
    with pytest.raises(ValueError, match=r"has no model.safetensors"):
        load_model(tmp_path)


def test_options_are_checked(tmp_path):
    policy_folder(tmp_path)
    with pytest.raises(ValueError, match="Unknown option 'chunk_sizes' .*chunk_size"):
        load_pi0(tmp_path, chunk_sizes=3)
    with pytest.raises(ValueError, match="dtype must be float32 or bfloat16, but is 'float16'"):
        load_pi0(tmp_path, dtype="float16", **SIZES)
    with pytest.raises(ValueError, match="relative_actions must not be true"):
        load_pi0(tmp_path, relative_actions=True)


def test_overrides_reach_the_configuration(tmp_path):
    net, processor = load_pi0(policy_folder(tmp_path), num_inference_steps=3, chunk_size=4, **SIZES)
    assert (net.config.num_inference_steps, processor.config.chunk_size) == (3, 4)


def test_expert_can_keep_float32_masters(tmp_path):
    """A learning rate of 5e-6 is lost in bfloat16 weights."""
    net = load(folder(tmp_path), dtype="bfloat16", expert_dtype="float32")
    assert {p.dtype for p in net.expert.parameters()} == {torch.float32}
    assert net.language_model.compute_dtype == torch.bfloat16
    inputs = load_file(DATA / "inputs.safetensors")
    observation = [inputs[name] for name in ("images", "img_masks", "lang_tokens", "lang_masks", "state")]
    actions = net.sample_actions(*observation, noise=inputs["noise"])
    expected = load_file(DATA / "outputs_pi0.safetensors")["sampled_actions_10"]
    assert (actions - expected).abs().max() < 0.05  # the prefix is bfloat16


class TestOpenPi:
    """Folders converted by openpi, which keep statistics under `assets/`."""

    STATS = {"mean": [0.0] * 8, "std": [1.0] * 8, "q01": [-1.0] * 8, "q99": [1.0] * 8}

    def folder(self, path, variant, *assets):
        folder(path, variant, layout="openpi")
        for asset in assets:
            place = path / "assets" / asset
            place.mkdir(parents=True)
            actions = {name: values[:7] for name, values in self.STATS.items()}
            record = {"norm_stats": {"state": self.STATS, "actions": actions}}
            (place / "norm_stats.json").write_text(json.dumps(record))
        return path

    def test_statistics_set_the_widths(self, tmp_path):
        config = read_config(self.folder(tmp_path, "pi0", "mine"), **sizes("openpi"))
        assert (config.state_dim, config.action_dim) == (8, 7)
        assert (config.norm_rule, config.image_resize, config.clean_prompt) == ("openpi", "antialias", True)
        assert config.state_in_prompt

    def test_checkpoints_with_relative_actions_are_refused(self, tmp_path):
        path = self.folder(tmp_path, "pi0", "physical-intelligence/libero")
        with pytest.raises(ValueError, match="relative to the state, which is not supported.*relative_actions=False"):
            read_config(path)
        assert read_config(path, relative_actions=False, **sizes("openpi")).action_dim == 7

    def test_pi05_libero_keeps_the_state_out_of_its_prompt(self, tmp_path):
        config = read_config(self.folder(tmp_path, "pi05", "physical-intelligence/libero"), **sizes("openpi"))
        assert (config.variant, config.state_in_prompt) == ("pi05", False)

    def test_several_statistics_must_be_chosen_from(self, tmp_path):
        path = self.folder(tmp_path, "pi0", "mine", "other/one")
        with pytest.raises(ValueError, match="statistics for mine, other/one: choose with asset_id"):
            read_config(path)
        with pytest.raises(ValueError, match="asset_id must be one of mine, other/one, but is 'trossen'"):
            read_config(path, asset_id="trossen")
        read_config(path, asset_id="other/one", **sizes("openpi"))

    @pytest.mark.parametrize(
        ("statistics", "message"),
        [
            ({}, "'state' in .*norm_stats.json must hold a table"),
            ({"norm_stats": [1]}, r"norm_stats of .* must hold a table .* but holds \[1\]"),
            ({"state": {"mean": [0.0]}}, "'actions' in .*norm_stats.json must hold a table"),
            ({"state": {}, "actions": {"mean": [0.0]}}, "'state' in .*norm_stats.json has no statistics"),
            ({"state": {"mean": 3}, "actions": {}}, "'mean' of 'state' in .* must be a list of numbers, but is 3"),
            ({"state": {"mean": ["x"]}, "actions": {}}, "'mean' of 'state' in .* must be a list of numbers"),
            (
                {"state": {"mean": [0.0], "std": [1.0, 1.0]}, "actions": {"mean": [0.0], "std": [1.0]}},
                "observation.state must have one length, but mean and std have 1 and 2",
            ),
        ],
    )
    def test_broken_statistics_are_refused(self, statistics, message, tmp_path):
        path = self.folder(tmp_path, "pi0", "mine")
        (path / "assets" / "mine" / "norm_stats.json").write_text(json.dumps(statistics))
        with pytest.raises(ValueError, match=message):
            peek_pi0(path, tokenizer=DATA / "policy" / "tokenizer", **sizes("openpi"))


def test_saved_folder_loads_bit_for_bit(tmp_path):
    net, processor = load_pi0(policy_folder(tmp_path / "in"), **SIZES)
    save_pi0(net, processor, tmp_path / "out")
    again, its_processor = load_pi0(tmp_path / "out")
    assert same(again)
    assert again.config.to_dict() == net.config.to_dict()
    for feature, stats in processor.statistics.items():
        for name, value in stats.items():
            assert torch.equal(its_processor.statistics[feature][name], value)


def test_saved_folder_has_lerobot_s_files_keys_and_settings(tmp_path):
    """The names and the JSON are those of a folder that LeRobot wrote itself."""
    source = policy_folder(tmp_path / "in")
    net, processor = load_pi0(source, **SIZES)
    save_pi0(net, processor, tmp_path / "out")
    theirs, ours = (load_file(path / "model.safetensors") for path in (source, tmp_path / "out"))
    assert {name: x.shape for name, x in ours.items()} == {name: x.shape for name, x in theirs.items()}
    for name in ("config.json", "policy_preprocessor.json", "policy_postprocessor.json"):
        assert json.loads((tmp_path / "out" / name).read_text()) == json.loads((source / name).read_text()), name
    for name in source.glob("policy_*.safetensors"):
        theirs, ours = load_file(name), load_file(tmp_path / "out" / name.name)
        assert theirs.keys() == ours.keys()
        assert all(torch.equal(theirs[key], ours[key]) for key in theirs)


@pytest.mark.parametrize("variant", ["pi0", "pi05"])
def test_a_saved_model_has_the_keys_and_settings_it_came_with(variant, tmp_path):
    net = load(folder(tmp_path / "in", variant))
    save_model(net, tmp_path / "out")
    theirs, ours = (load_file(tmp_path / name / "model.safetensors") for name in ("in", "out"))
    assert {name: x.shape for name, x in ours.items()} == {name: x.shape for name, x in theirs.items()}
    theirs, ours = (json.loads((tmp_path / name / "config.json").read_text()) for name in ("in", "out"))
    assert ours == theirs


def test_saved_head_is_the_live_embedding(tmp_path):
    save_model(model("pi0"), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    assert torch.equal(tensors[f"model.{VLM_HEAD}"], weights("pi0")[EMBEDDING])
    assert tensors[f"model.{EXPERT_HEAD}"].shape == heads("pi0")[EXPERT_HEAD].shape


def test_bfloat16_model_saves_and_loads_in_its_dtypes(tmp_path):
    net = load(folder(tmp_path / "in"), dtype="bfloat16")
    net.save_pretrained(tmp_path / "out")
    assert json.loads((tmp_path / "out/config.json").read_text())["dtype"] == "bfloat16"
    again = load_model(tmp_path / "out")
    assert all(
        torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(net.parameters(), again.parameters(), strict=True)
    )


def test_saving_other_weights_than_the_model_s_is_refused(tmp_path):
    state = {**model("pi0").state_dict(), "value_head.weight": torch.zeros(1)}
    with pytest.raises(ValueError, match="differs in value_head.weight. Merge adapters"):
        save_model(model("pi0"), tmp_path, state_dict=state)
    save_model(model("pi0"), tmp_path / "none", is_main_process=False)
    assert not (tmp_path / "none").exists()


def test_peek_checks_without_reading_weights(tmp_path):
    path = policy_folder(tmp_path)
    assert peek_pi0(path, dtype=torch.bfloat16, **SIZES).chunk_size == 10
    with pytest.raises(ValueError, match="must have the shape"):
        peek_pi0(path, **{**SIZES, "vocab_size": 500})
    with pytest.raises(ValueError, match="needs a tokenizer"):
        peek_pi0(path, tokenizer=str(tmp_path / "elsewhere"), **SIZES)
