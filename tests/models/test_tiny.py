"""Tiny checkpoints: complete folders that load like real ones, act, and can learn."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForImageTextToText, AutoProcessor, AutoTokenizer

from vla_accel.models import load_vla, register_vla_models
from vla_accel.models.openvla.actions import ActionStatistics, ActionTokenizer
from vla_accel.models.openvla.modeling import OpenVLAForActionPrediction
from vla_accel.models.openvla.processing import SPACE, PrismaticProcessor
from vla_accel.models.tiny import TASK_WORDS, init_for_training, make_tiny_openvla, tabletop_statistics, tiny_tokenizer

FILES = {
    "config.json",
    "dataset_statistics.json",
    "generation_config.json",
    "model.safetensors",
    "preprocessor_config.json",
    "processor_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
}
OFT = {"decoding": "parallel", "chunk": 4, "num_images": 2, "use_proprio": True, "use_film": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_tiny_openvla(tmp_path_factory.mktemp("tiny"))


def inputs_for(model, processor, tasks):
    """Model inputs for tasks, with seeded pictures."""
    config = model.config
    rng = np.random.default_rng(0)
    count = len(tasks) * config.num_images_in_input
    pixels = processor.image_processor.normalize(
        processor.image_processor.resize(rng.integers(0, 256, (count, 64, 64, 3), dtype=np.uint8))
    )
    input_ids, attention_mask = processor.encode(tasks)
    return {
        "input_ids": input_ids,
        "attention_mask": attention_mask,
        "pixel_values": pixels.unflatten(0, (len(tasks), -1)).flatten(1, 2),
        "proprio": torch.zeros(len(tasks), config.proprio_dim) if config.use_proprio else None,
    }


def greedy(logits):
    return logits.argmax(-1)


# -------------------------------------------------------------------------------------------------------- tokenizer


def test_the_prompt_is_one_token_per_word():
    tokenizer = tiny_tokenizer()
    ids = tokenizer("In: What action should the robot take to pick up the red block?\nOut: ")["input_ids"]
    words = ["What", "action", "should", "the", "robot", "take", "to", "pick", "up", "the", "red", "block"]
    expected = ["<s>", f"{SPACE}In", ":", *(SPACE + word for word in words), "?", "<0x0A>", "Out", ":", SPACE]
    assert tokenizer.convert_ids_to_tokens(ids) == expected


@pytest.mark.parametrize("tasks", [TASK_WORDS, [], ["lift it"], ["open the drawer", "flip the quick brown fox"]])
def test_ids_are_laid_out_as_in_llama(tasks):
    tokenizer = tiny_tokenizer(tasks)
    real = tokenizer.pad_token_id
    assert real % 64 == 0
    assert len(tokenizer) == real + 1
    assert tokenizer.convert_ids_to_tokens([0, 1, 2, 3, 258, real]) == [
        "<unk>",
        "<s>",
        "</s>",
        "<0x00>",
        "<0xFF>",
        "<PAD>",
    ]
    assert (tokenizer.unk_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1, 2)
    assert tokenizer.padding_side == "right"


def test_all_action_ids_survive_a_round_trip_through_text_behind_a_prompt():
    tokenizer = tiny_tokenizer()
    ids = list(range(tokenizer.pad_token_id - 256, tokenizer.pad_token_id))
    text = "In: What action should the robot take to lift?\nOut: " + tokenizer.decode(ids) + "</s>"
    assert tokenizer(text)["input_ids"][-257:] == [*ids, tokenizer.eos_token_id]
    for index in ids:
        assert tokenizer(tokenizer.decode([index]))["input_ids"][-1] == index


@pytest.mark.parametrize("text", ["reach the red block", "Wörld 日本 🤖", "tabs\tand\nlines", "re red redd r"])
def test_any_text_survives_a_round_trip(text):
    tokenizer = tiny_tokenizer()
    assert tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"]) == text


def test_the_tokenizer_depends_on_nothing_but_its_tasks():
    tasks = ["lift it", "open the drawer"]
    first = tiny_tokenizer(tasks).backend_tokenizer.to_str()
    assert tiny_tokenizer(list(reversed(tasks)) + tasks).backend_tokenizer.to_str() == first
    assert tiny_tokenizer(["lift it"]).backend_tokenizer.to_str() != first


def test_tasks_with_action_characters_are_refused():
    with pytest.raises(ValueError, match="must not contain the characters of the action tokens"):
        tiny_tokenizer(["push 丁"])


# ----------------------------------------------------------------------------------------------------------- folder


def test_the_folder_is_complete_and_small(folder):
    assert {path.name for path in folder.iterdir()} == FILES
    assert sum(tensor.numel() for tensor in load_file(folder / "model.safetensors").values()) < 1_000_000
    assert {tensor.dtype for tensor in load_file(folder / "model.safetensors").values()} == {torch.bfloat16}


def test_the_configuration_has_the_originals_form(folder):
    config = json.loads((folder / "config.json").read_text())
    tokenizer = tiny_tokenizer()
    assert config["model_type"] == "openvla"
    assert config["architectures"] == ["OpenVLAForActionPrediction"]
    assert config["timm_model_ids"] == ["vit_large_patch14_reg4_dinov2.lvd142m", "vit_so400m_patch14_siglip_224"]
    assert config["pad_token_id"] == config["text_config"]["pad_token_id"] == tokenizer.pad_token_id
    assert config["text_config"]["vocab_size"] == tokenizer.pad_token_id + 64
    assert config["norm_stats"] == json.loads((folder / "dataset_statistics.json").read_text())


def test_it_loads_through_the_auto_classes_without_remote_code(folder):
    register_vla_models()
    assert AutoConfig.from_pretrained(folder).model_type == "openvla"
    processor = AutoProcessor.from_pretrained(folder)
    assert isinstance(processor, PrismaticProcessor)
    assert AutoTokenizer.from_pretrained(folder).pad_token == "<PAD>"
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    assert isinstance(model, OpenVLAForActionPrediction)
    stored = load_file(folder / "model.safetensors")
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, stored[name].float(), rtol=0, atol=0)


@pytest.mark.parametrize("options", [{}, {"fused": False}, OFT], ids=["fused", "siglip", "oft"])
def test_it_acts_on_two_prompts_of_different_length(tmp_path, options):
    model, processor = load_vla(make_tiny_openvla(tmp_path, **options), dtype=torch.float32)
    tasks = ["reach the red block", "pick up the green block"]
    together = inputs_for(model, processor, tasks)
    with torch.no_grad():
        _, ids = model.decode_actions(**together, choose=greedy)
        states = model.action_states(**together, action_ids=ids)
        for i, task in enumerate(tasks):
            input_ids, attention_mask = processor.encode([task])
            alone = {**together, "pixel_values": together["pixel_values"][i : i + 1]}
            alone["proprio"] = None if together["proprio"] is None else together["proprio"][i : i + 1]
            alone.update(input_ids=input_ids, attention_mask=attention_mask, action_ids=ids[i : i + 1])
            torch.testing.assert_close(model.action_states(**alone), states[i : i + 1], rtol=0, atol=1e-4)
    assert ids.shape == (2, 7 * options.get("chunk", 1))
    real = processor.tokenizer.pad_token_id
    assert ActionTokenizer(real).is_action(ids).all()
    actions = ActionTokenizer(real).decode(ids).unflatten(1, (-1, 7))
    assert ActionStatistics.from_norm_stats(model.config.norm_stats).unnormalize(actions).abs().max() <= 1.0


def test_the_prompt_decides_the_prediction_as_the_image_does(folder):
    model, processor = load_vla(folder, dtype=torch.float32)
    inputs = inputs_for(model, processor, ["reach the red block"] * 2)
    inputs["pixel_values"][1] = inputs["pixel_values"][0]
    same = model.action_states(**inputs, action_ids=torch.full((2, 7), model.config.action_token_begin))
    torch.testing.assert_close(same[0], same[1], rtol=0, atol=1e-5)
    for change in ("input_ids", "pixel_values"):
        other = {key: value for key, value in inputs.items() if key != "proprio"}
        if change == "input_ids":
            other["input_ids"] = processor.encode(["reach the red block", "reach the blue block"])[0]
        else:
            other["pixel_values"] = inputs["pixel_values"].flip(-1) * torch.tensor([0.0, 1.0]).view(2, 1, 1, 1)
        states = model.action_states(**other, action_ids=torch.full((2, 7), model.config.action_token_begin))
        assert (states[0] - states[1]).abs().max() > 1e-3, change


def test_the_same_arguments_write_the_same_bytes(folder, tmp_path):
    state = torch.random.get_rng_state()
    again = make_tiny_openvla(tmp_path / "again")
    assert torch.equal(torch.random.get_rng_state(), state), "making a checkpoint disturbs the global generator"
    for name in FILES:
        assert (again / name).read_bytes() == (folder / name).read_bytes(), name
    other = make_tiny_openvla(tmp_path / "other", seed=1)
    assert (other / "model.safetensors").read_bytes() != (folder / "model.safetensors").read_bytes()
    assert (other / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()


def test_options_reach_the_checkpoint(tmp_path):
    statistics = tabletop_statistics(key="mine", proprio_low=[0.0] * 5, proprio_high=[2.0] * 5)
    folder = make_tiny_openvla(tmp_path, **OFT, statistics=statistics, tasks=["fly"], dtype=torch.float32)
    config = json.loads((folder / "config.json").read_text())
    assert config["action_decoding"] == "parallel"
    assert config["num_actions_chunk"] == 4
    assert config["num_images_in_input"] == 2
    assert config["use_proprio"]
    assert config["use_film"]
    assert config["proprio_dim"] == 5
    assert list(config["norm_stats"]) == ["mine"]
    weights = load_file(folder / "model.safetensors")
    assert weights["proprio_projector.fc1.weight"].shape[1] == 5
    assert weights["proprio_projector.fc1.weight"].dtype == torch.float32
    assert f'"{SPACE}fly"' in (folder / "tokenizer.json").read_text()


def test_ranges_of_state_and_action_make_statistics(tmp_path):
    folder = make_tiny_openvla(tmp_path, **OFT, action_dim=4, proprio_low=(-1.0, 0.5), proprio_high=(1.0, 2.5))
    statistics = ActionStatistics.from_norm_stats(json.loads((folder / "config.json").read_text())["norm_stats"])
    assert statistics.mask.tolist() == [True] * 3 + [False]
    np.testing.assert_allclose(statistics.normalize_proprio(np.array([0.0, 2.0])), [0.0, 0.5], rtol=0, atol=1e-8)


def test_default_statistics_leave_actions_unchanged():
    statistics = ActionStatistics.from_norm_stats(tabletop_statistics())
    actions = np.linspace(-0.9, 0.9, 7)
    np.testing.assert_allclose(statistics.unnormalize(actions), actions, rtol=0, atol=1e-15)
    assert statistics.mask.tolist() == [True] * 6 + [False]
    np.testing.assert_allclose(statistics.normalize_proprio(np.full(8, 0.5)), 0.5, rtol=0, atol=1e-8)


def test_the_untrained_policy_is_close_to_uniform(folder):
    model, processor = load_vla(folder, dtype=torch.float32)
    inputs = inputs_for(model, processor, ["reach the red block"])
    with torch.no_grad():
        states, _ = model.decode_actions(**inputs, choose=greedy)
        log_prob = model.action_logits(states).log_softmax(-1)
    entropy = -(log_prob.exp() * log_prob).sum(-1)
    assert entropy.min() > 0.95 * np.log(256)


def test_film_starts_as_the_identity(tmp_path):
    model, processor = load_vla(make_tiny_openvla(tmp_path, use_film=True), dtype=torch.float32)
    inputs = inputs_for(model, processor, ["reach the red block", "reach the blue block"])
    language = torch.randn(2, model.config.text_config.hidden_size)
    features = model.vision_backbone(inputs["pixel_values"], language)
    torch.testing.assert_close(features, model.vision_backbone(inputs["pixel_values"], language.flip(0)))


def test_initialisation_scales_by_hand(folder):
    model, _ = load_vla(folder, dtype=torch.float32)
    init_for_training(model)
    block = model.vision_backbone.featurizer.blocks[0]
    assert (block.ls1.scale_factor == 1.0).all()
    assert block.mlp.fc1.weight.std().item() == pytest.approx(0.7 / 8, rel=0.05)
    assert block.attn.qkv.weight[:128].std().item() == pytest.approx(1.5 * 0.7 / 8, rel=0.05)
    assert block.attn.qkv.weight[128:].std().item() == pytest.approx(0.7 / 8, rel=0.05)
    positions = model.vision_backbone.featurizer.pos_embed[0].unflatten(0, (6, 6))
    torch.testing.assert_close(positions.square().sum(-1), torch.full((6, 6), 32.0))
    torch.testing.assert_close(positions[2, 3, :16], torch.sin(2 * 1e-2 ** (torch.arange(16) / 16)))
    torch.testing.assert_close(positions[2, 3, 16:32], torch.sin(3 * 1e-2 ** (torch.arange(16) / 16)))


def test_every_parameter_that_can_learn_gets_a_gradient(tmp_path):
    model, processor = load_vla(make_tiny_openvla(tmp_path, **OFT), dtype=torch.float32)
    inputs = inputs_for(model, processor, list(TASK_WORDS[:2]))
    inputs["proprio"] = torch.rand(2, 8)
    model.action_logits(model.action_states(**inputs))[..., :9].sum().backward()
    without = [name for name, p in model.named_parameters() if p.requires_grad and (p.grad is None or not p.grad.any())]
    assert without == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"image_size": 50}, "image_size must be a multiple of patch_size"),
        ({"vision_dims": (64, 66)}, "vision_dims must be multiples"),
        ({"hidden": 98}, "hidden must be a multiple of heads"),
        ({"decoding": "sideways"}, "action_decoding must be"),
    ],
)
def test_impossible_sizes_are_refused(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        make_tiny_openvla(tmp_path, **options)


@pytest.mark.slow
def test_a_tiny_checkpoint_learns_a_batch_by_heart(folder):
    model, processor = load_vla(folder, dtype=torch.float32)
    tasks = [f"reach the {color} block" for color in ("red", "green", "blue", "yellow")]
    inputs = inputs_for(model, processor, tasks)
    tokenizer = ActionTokenizer(processor.tokenizer.pad_token_id)
    targets = tokenizer.encode(torch.rand(4, 7, generator=torch.Generator().manual_seed(0)) * 2 - 1)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    for _ in range(50):
        logits = model.action_logits(model.action_states(**inputs, action_ids=targets))
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokenizer.id_to_index(targets).flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        _, ids = model.decode_actions(**inputs, choose=greedy)
    assert torch.equal(ids, targets)
