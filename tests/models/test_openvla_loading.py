"""OpenVLA folders are read strictly, written so that the original reads them, and never run code or guess."""

import json
import types

import huggingface_hub
import pytest
import torch
import transformers
from openvla_golden import TOLERANCE, golden, prompt, weights, write_folder
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoImageProcessor, AutoProcessor, AutoTokenizer

from vla_accel.models import load_vla, peek_vla, register_vla_models, save_vla
from vla_accel.models.openvla.configuration import OpenVLAConfig
from vla_accel.models.openvla.loading import load_weights, read_config
from vla_accel.models.openvla.modeling import OpenVLAForActionPrediction
from vla_accel.models.openvla.processing import PrismaticProcessor
from vla_accel.models.tiny import make_tiny_openvla

WEIGHTS = "model.safetensors"
SMALL = {"vision_dims": (16, 16), "vision_heads": 2, "hidden": 16, "intermediate": 32, "heads": 2, "image_size": 16}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return make_tiny_openvla(tmp_path_factory.mktemp("tiny") / "checkpoint", **SMALL)


@pytest.fixture
def folder(tiny, tmp_path):
    """A copy of the tiny checkpoint to damage."""
    for file in tiny.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


def edit_weights(folder, edit):
    tensors = load_file(folder / WEIGHTS)
    edit(tensors)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})


def edit_config(folder, **changes):
    data = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**data, **changes}))


def both(folder, message, **options):
    """Loading fails with the message, and so does looking without reading the weights."""
    for function in (load_vla, peek_vla):
        with pytest.raises(ValueError, match=message):
            function(folder, **options)


def test_a_folder_of_the_original_loads_into_the_same_outputs(tmp_path):
    write_folder(tmp_path)
    model = OpenVLAForActionPrediction(read_config(tmp_path)).eval()
    load_weights(model, tmp_path, dtype=torch.float32, device="cpu")
    logits = model(**prompt(0)).logits[..., 31744:32000]
    torch.testing.assert_close(logits, golden("base/p0/forward")["logits_action"], **TOLERANCE)


@pytest.mark.parametrize("shards", [{}, {"max_shard_size": "100KB"}], ids=["one file", "shards"])
def test_saving_writes_the_folder_that_was_loaded(tmp_path, shards):
    original = write_folder(tmp_path / "original")
    model = OpenVLAForActionPrediction(read_config(original))
    load_weights(model, original, dtype=torch.bfloat16, device="cpu")
    save_vla(model, None, tmp_path / "saved", **shards)
    files = list((tmp_path / "saved").glob("*.safetensors"))
    assert (len(files) > 1) == bool(shards)
    saved = {name: tensor for file in files for name, tensor in load_file(file).items()}
    assert saved.keys() == weights().keys()
    assert all(torch.equal(saved[name].view(torch.int16), want.view(torch.int16)) for name, want in weights().items())
    for name in ("config.json", "generation_config.json", "dataset_statistics.json"):
        got, want = (json.loads((tmp_path / where / name).read_text()) for where in ("saved", "original"))
        for data in (got, want):
            data.pop("transformers_version", None)
        assert got == want, name


@pytest.mark.parametrize("shards", [{}, {"max_shard_size": "50KB"}], ids=["one file", "shards"])
def test_a_round_trip_changes_no_bit_and_no_option(tmp_path, shards):
    options = {"decoding": "parallel", "chunk": 5, "num_images": 2, "use_proprio": True, "use_film": True}
    first, processor = load_vla(make_tiny_openvla(tmp_path / "a", **SMALL, **options))
    save_vla(first, processor, tmp_path / "b", **shards)
    second, again = load_vla(tmp_path / "b")
    assert first.state_dict().keys() == second.state_dict().keys()
    for name, tensor in first.state_dict().items():
        assert torch.equal(tensor, second.get_parameter(name)), name
    assert second.config.to_dict() == first.config.to_dict()
    assert torch.equal(again.encode(["reach the red block"])[0], processor.encode(["reach the red block"])[0])


def test_a_loaded_model_is_in_evaluation_mode_in_the_asked_type_with_float32_rotary_tables(tiny):
    model, _ = load_vla(tiny, dtype=torch.bfloat16)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert not model.training
    rotary = model.language_model.model.rotary_emb.inv_freq
    assert (rotary.dtype, rotary.device.type) == (torch.float32, "cpu")
    torch.testing.assert_close(rotary, 10000 ** -(torch.arange(4) / 4))  # heads of width 8
    inert = [p for name, p in model.named_parameters() if ".blocks.2." in name]
    assert inert
    assert not any(p.requires_grad for p in inert)


def test_the_statistics_file_replaces_those_of_the_config(folder):
    stats = {"mine": {"action": {"q01": [0.0] * 5, "q99": [1.0] * 5}}}
    (folder / "dataset_statistics.json").write_text(json.dumps(stats))
    config = peek_vla(folder)
    assert (config.norm_stats, config.action_dim) == (stats, 5)
    assert load_vla(folder)[0].norm_stats == stats


def test_options_override_the_folder_and_unknown_ones_are_refused_with_the_nearest(folder):
    model, _ = load_vla(folder, action_decoding="parallel", num_actions_chunk=4)
    assert model.config.num_action_tokens == 28
    both(folder, "num_action_chunk is not an option.*Did you mean num_actions_chunk", num_action_chunk=4)
    both(folder, "num_actions_chunk must be an integer", num_actions_chunk=0)


def test_a_renamed_tensor_is_reported_as_missing_and_left_over(folder):
    edit_weights(folder, lambda t: t.update({"projector.fc9.bias": t.pop("projector.fc1.bias")}))
    both(folder, "1 missing: projector.fc1.bias; 1 left over: projector.fc9.bias")


def test_half_a_checkpoint_is_reported_with_its_first_missing_names(folder):
    def drop(tensors):
        for name in [name for name in tensors if name.startswith("language_model.")]:
            del tensors[name]

    edit_weights(folder, drop)
    both(folder, r"21 missing: language_model\.lm_head\.weight, .* and 18 more")


def test_a_wrong_shape_is_reported_with_both_shapes(folder):
    edit_weights(folder, lambda t: t.update({"projector.fc1.bias": torch.zeros(3)}))
    both(folder, r"1 of another shape: projector.fc1.bias \[3\] instead of \[128\]")


def test_a_missing_shard_is_named(folder):
    model, processor = load_vla(folder)
    (folder / WEIGHTS).unlink()
    save_vla(model, processor, folder, max_shard_size="50KB")
    lost = sorted(folder.glob("model-*.safetensors"))[1]
    lost.unlink()
    both(folder, f"lacks 1 of .* weight files: {lost.name}")


def test_a_file_cut_short_is_named(folder):
    content = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(content[: len(content) // 2])
    both(folder, "model.safetensors is not a whole safetensors file")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt"])
def test_pickled_weights_are_refused(folder, name):
    (folder / WEIGHTS).rename(folder / name)
    both(folder, f"pickled weights only .{name}.* Convert them to safetensors")


def test_a_folder_without_weights_or_config_says_so(folder):
    (folder / WEIGHTS).unlink()
    both(folder, "has neither model.safetensors nor model.safetensors.index.json")
    (folder / "config.json").unlink()
    both(folder, "has no config.json")


def test_an_unknown_kind_of_model_is_refused(folder):
    edit_config(folder, model_type="prismatic")
    both(folder, "has model_type 'prismatic'; known are")


@pytest.mark.parametrize("name", ["action_head--150000_checkpoint.pt", "action_head.safetensors"])
def test_a_regression_head_is_refused_with_an_alternative(folder, name):
    (folder / name).touch()
    both(folder, f"L1-regression action head .{name}.*without a probability.*discrete action tokens")


def test_a_config_that_says_regression_is_refused(folder):
    edit_config(folder, use_l1_regression=True)
    both(folder, "L1-regression action head .config.json")


def test_a_part_in_a_pickle_beside_the_weights_is_refused_not_ignored(folder):
    (folder / "proprio_projector--150000_checkpoint.pt").touch()
    both(folder, "proprio_projector--150000_checkpoint.pt, which is not loaded.*use_proprio=True")


def test_a_state_projector_is_read_from_the_weights_or_from_a_file_beside_them(tmp_path):
    folder = make_tiny_openvla(tmp_path / "a", **SMALL, use_proprio=True)
    want = load_vla(folder)[0].state_dict()
    tensors = load_file(folder / WEIGHTS)
    side = {f"module.{name[18:]}": tensors.pop(name) for name in list(tensors) if name.startswith("proprio_projector.")}
    assert len(side) == 4
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    both(folder, "Set use_proprio to whether")
    save_file(side, folder / "proprio_projector--5_checkpoint.safetensors")
    got = load_vla(folder)[0].state_dict()
    assert all(torch.equal(got[name], tensor) for name, tensor in want.items())


def test_extra_modules_without_their_option_are_refused_with_the_option(tmp_path):
    for option in ("use_proprio", "use_film"):
        folder = make_tiny_openvla(tmp_path / option, **SMALL, **{option: True})
        both(folder, f"left over: .*Set {option} to whether", **{option: False})


def hub_with(*names):
    """The hub's answer about a model with these files."""
    answer = types.SimpleNamespace(siblings=[types.SimpleNamespace(rfilename=name) for name in names])
    return lambda *_, **__: answer


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("action_head--150000_checkpoint.pt", "L1-regression action head .*Haozhan72"),
        ("noisy_action_projector--5_checkpoint.pt", "diffusion action head"),
        ("proprio_projector--150000_checkpoint.pt", "keeps a part of the model in proprio_projector"),
        ("vision_backbone--150000_checkpoint.pt", "load with use_film=True"),
    ],
)
def test_a_model_on_the_hub_with_parts_that_are_not_loaded_is_refused_before_its_download(monkeypatch, name, message):
    monkeypatch.setattr(huggingface_hub, "snapshot_download", None)  # what is called all the same fails
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", hub_with("config.json", "model.safetensors", name))
    for read in (peek_vla, load_vla):
        with pytest.raises(ValueError, match=rf"^owner/some-model .*{message}"):
            read("owner/some-model")


def test_only_a_hub_name_reaches_the_network(tmp_path, monkeypatch, tiny):
    asked = []

    def download(name, **kwargs):
        asked.append(name)
        return str(tiny)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", hub_with("config.json"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    for path in ("missing", "./a/b", "/a/b", "a/b/c", tmp_path / "x", "runs/missing", "../a", "https://a/b"):
        with pytest.raises(ValueError, match="is not a folder"):
            peek_vla(path)
    assert asked == []
    assert peek_vla("owner/some-model").model_type == "openvla"
    assert asked == ["owner/some-model"]


def test_a_hub_name_that_cannot_be_fetched_is_a_clear_error(monkeypatch):
    def fail(*args, **kwargs):
        raise huggingface_hub.errors.LocalEntryNotFoundError("offline")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(ValueError, match="owner/name is neither a local folder nor a model that the hub gives out"):
        load_vla("owner/name")


def test_hugging_faces_auto_classes_find_everything_offline(tiny, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    register_vla_models()
    register_vla_models()
    assert isinstance(AutoConfig.from_pretrained(tiny), OpenVLAConfig)
    assert isinstance(AutoProcessor.from_pretrained(tiny), PrismaticProcessor)
    assert type(AutoImageProcessor.from_pretrained(tiny)).__name__ == "PrismaticImageProcessor"
    assert AutoTokenizer.from_pretrained(tiny).pad_token == "<PAD>"
    model = transformers.AutoModelForImageTextToText.from_pretrained(tiny, dtype=torch.float32)
    want, _ = load_vla(tiny)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert all(torch.equal(x, want.state_dict()[name]) for name, x in model.state_dict().items())
    assert [p.requires_grad for p in model.parameters()] == [p.requires_grad for p in want.parameters()]
    rotary = [m.language_model.model.rotary_emb.inv_freq for m in (model, want)]
    assert torch.equal(*rotary)


def test_remote_code_pointers_in_an_original_folder_are_not_followed(folder):
    pointer = {"AutoConfig": "configuration_prismatic.OpenVLAConfig"}
    edit_config(folder, auto_map=pointer)
    (folder / "configuration_prismatic.py").write_text("raise RuntimeError('remote code was run')\n")
    register_vla_models()
    assert isinstance(AutoConfig.from_pretrained(folder), OpenVLAConfig)
    model, _ = load_vla(folder)
    assert model.config.auto_map == pointer


def test_saved_weights_can_be_read_by_whoever_can_read_the_configuration(tiny, tmp_path):
    save_vla(*load_vla(tiny), tmp_path / "out")
    modes = {file.stat().st_mode & 0o777 for file in (tmp_path / "out").iterdir()}
    assert len(modes) == 1
