"""OpenVLA's configuration reads and writes the original form, and the 7B model has the original's tensors."""

import json

import pytest
import torch
from accelerate import init_empty_weights
from openvla_golden import DATA

from vla_accel.models.openvla.configuration import OpenVLAConfig
from vla_accel.models.openvla.modeling import OpenVLAForActionPrediction

TINY = json.loads((DATA / "config.json").read_text())
SEVEN_B = json.loads((DATA / "config_7b.json").read_text())


def written(config):
    """What `save_pretrained` would write, less the version, which is ours."""
    data = json.loads(config.to_json_string())
    del data["transformers_version"]
    return data


@pytest.mark.parametrize("original", [TINY, SEVEN_B], ids=["tiny", "7b"])
def test_an_original_config_is_written_back_key_for_key(original):
    want = {key: value for key, value in original.items() if key != "transformers_version"}
    assert written(OpenVLAConfig(**original)) == want


def test_a_config_survives_a_file(tmp_path):
    OpenVLAConfig(**TINY, action_decoding="parallel", num_actions_chunk=5, use_film=True).save_pretrained(tmp_path)
    again = OpenVLAConfig.from_pretrained(tmp_path)
    assert (again.is_parallel, again.num_actions_chunk, again.use_film) == (True, 5, True)
    assert again.norm_stats == TINY["norm_stats"]
    assert again.text_config.hidden_size == 64


def test_unknown_keys_are_kept_on_both_levels():
    text = {**TINY["text_config"], "my_text_key": [1]}
    extra = {"auto_map": {"AutoConfig": "configuration_prismatic.OpenVLAConfig"}, "my_key": {"a": 1}}
    data = written(OpenVLAConfig(**{**TINY, **extra, "text_config": text}))
    assert {key: data[key] for key in extra} == extra
    assert data["text_config"]["my_text_key"] == [1]


def test_an_absent_text_field_means_the_pinned_default():
    config = OpenVLAConfig(**SEVEN_B).text_config
    sizes = (config.hidden_size, config.intermediate_size, config.num_hidden_layers, config.num_attention_heads)
    assert sizes == (4096, 11008, 32, 32)
    assert (config.num_key_value_heads, config.head_dim, config.max_position_embeddings) == (32, 128, 2048)
    assert (config.rms_norm_eps, config.rope_parameters["rope_theta"]) == (1e-6, 10000.0)
    assert (config.tie_word_embeddings, config.attention_bias, config.hidden_act) == (False, False, "silu")


def test_stated_text_fields_are_honoured_and_written():
    text = {**SEVEN_B["text_config"], "rms_norm_eps": 1e-5, "rope_theta": 5e5}
    config = OpenVLAConfig(**{**SEVEN_B, "text_config": text})
    assert (config.text_config.rms_norm_eps, config.text_config.rope_parameters["rope_theta"]) == (1e-5, 5e5)
    assert written(config)["text_config"] == text


def test_the_vision_table_fills_what_a_config_leaves_out_and_the_file_wins():
    config = OpenVLAConfig("siglip-vit-so400m-384px")
    assert config.timm_model_ids == ["vit_so400m_patch14_siglip_384"]
    assert (config.image_sizes, config.use_fused_vision_backbone) == ([384], False)
    assert OpenVLAConfig("dinosiglip-vit-so-224px", image_sizes=[56, 56]).image_sizes == [56, 56]


def test_without_our_keys_a_config_means_the_original_base_model():
    config = OpenVLAConfig(**SEVEN_B)
    assert (config.action_decoding, config.num_actions_chunk, config.action_dim) == ("autoregressive", 1, 7)
    assert (config.num_images_in_input, config.use_proprio, config.use_film) == (1, False, False)
    assert (config.num_action_tokens, config.action_token_begin) == (7, 31744)
    oft = OpenVLAConfig(**SEVEN_B, action_decoding="parallel")
    assert (oft.num_actions_chunk, oft.num_action_tokens, oft.append_stop_token) == (8, 56, True)


def test_the_action_dimension_comes_from_the_statistics_unless_given():
    stats = {"robot": {"action": {"q01": [0.0] * 14, "q99": [1.0] * 14}}}
    assert OpenVLAConfig(norm_stats=stats).action_dim == 14
    assert "action_dim" not in written(OpenVLAConfig(norm_stats=stats))
    given = OpenVLAConfig(norm_stats=stats, action_dim=3)
    assert (given.action_dim, written(given)["action_dim"]) == (3, 3)
    mixed = {**stats, "other": {"action": {"q01": [0.0] * 6, "q99": [1.0] * 6}}}
    assert OpenVLAConfig(norm_stats=mixed).action_dim == 7


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"action_decoding": "diffusion"}, "action_decoding must be 'autoregressive' or 'parallel'"),
        ({"num_actions_chunk": 0}, "num_actions_chunk must be an integer of at least 1, not 0"),
        ({"action_dim": 2.5}, "action_dim must be an integer of at least 1, not 2.5"),
        ({"num_images_in_input": True}, "num_images_in_input must be an integer"),
        ({"proprio_dim": -1}, "proprio_dim must be"),
        ({"use_proprio": "yes"}, "use_proprio must be true or false, not 'yes'"),
        ({"append_stop_token": 1}, "append_stop_token must be true or false"),
        ({"vision_backbone_id": "resnet"}, "vision_backbone_id must be one of"),
        ({"image_sizes": [224]}, r"image_sizes must have one entry per tower \(2\)"),
        ({"timm_model_ids": ["a"], "image_sizes": [224]}, r"timm_model_ids must name 2 tower\(s\)"),
        ({"text_config": {"model_type": "mistral"}}, "text_config.model_type must be 'llama', not 'mistral'"),
        ({"text_config": {"vocab_size": 300}}, "text_config.vocab_size must be at least"),
    ],
)
def test_a_value_no_model_can_have_is_refused_by_name(options, message):
    with pytest.raises(ValueError, match=message):
        OpenVLAConfig(**options)


def test_the_7b_model_has_exactly_the_originals_982_tensors():
    want = json.loads((DATA / "shapes_7b.json").read_text())
    with init_empty_weights():
        model = OpenVLAForActionPrediction(OpenVLAConfig(**SEVEN_B))
    got = {name: list(tensor.shape) for name, tensor in model.state_dict().items()}
    assert len(got) == 982
    assert got == want
    assert sum(p.numel() for p in model.parameters()) == 7_541_237_184
    assert all(p.device == torch.device("meta") for p in model.parameters())
