"""A broken checkpoint folder is one sentence that names the file, before any weight is read."""

import json
import shutil

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoTokenizer

from vla_accel.config import OFTPolicyConfig, Pi0PolicyConfig, PolicyConfig
from vla_accel.policies import load_policy, peek_policy

KINDS = {"openvla": PolicyConfig, "openvla-oft": OFTPolicyConfig, "pi0": Pi0PolicyConfig, "pi05": Pi0PolicyConfig}
WEIGHTS, PRE, CONFIG, SCALES = "model.safetensors", "policy_preprocessor.json", "config.json", "dataset_statistics.json"
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 14467165872\n"
HINT = r"\(an unfinished download or a git-lfs pointer\?\)"
FAMILIES = {model: "pi0" if model.startswith("pi0") else "openvla" for model in KINDS}


@pytest.fixture
def copy(tiny_openvla, tiny_openvla_oft, pi0_folders, tmp_path):
    """Copy the tiny checkpoint of a model, to damage."""
    sources = {"openvla": tiny_openvla, "openvla-oft": tiny_openvla_oft, **pi0_folders}
    return lambda model: shutil.copytree(sources[model], tmp_path / model)


def refused(model, folder, message, **options):
    with pytest.raises(ValueError, match=message) as caught:
        peek_policy(model, KINDS[model](path=str(folder), **options), suite="tabletop")
    assert str(caught.value).startswith("--policy.")
    assert "\n" not in str(caught.value).strip()


def edit_json(file, edit):
    data = json.loads(file.read_text())
    file.write_text(json.dumps(data if (changed := edit(data)) is None else changed))


def point(file):
    file.write_text(POINTER)


def cut(file):
    content = file.read_bytes() if file.exists() else (file.parent / WEIGHTS).read_bytes()
    file.write_bytes(content[: len(content) // 2])


@pytest.mark.parametrize("damage", [point, cut])
@pytest.mark.parametrize("model", KINDS)
def test_a_tensor_file_that_is_not_whole_is_named(copy, model, damage):
    names = [WEIGHTS, "value_head.safetensors"]
    if FAMILIES[model] == "pi0":
        names += ["policy_preprocessor_step_*_normalizer_processor.safetensors"]
    for pattern in names:
        folder = copy(model)
        file = next(folder.glob(pattern), folder / pattern)
        damage(file)
        refused(model, folder, f"{file.name} is not a whole safetensors file {HINT}")
        shutil.rmtree(folder)


@pytest.mark.parametrize("damage", [point, cut])
@pytest.mark.parametrize("model", KINDS)
def test_a_json_file_that_is_not_whole_is_named(copy, model, damage):
    own = ["vla_accel.json", PRE] if FAMILIES[model] == "pi0" else [SCALES, "preprocessor_config.json"]
    for name in [CONFIG, *own]:
        folder = copy(model)
        if not (folder / name).exists():
            shutil.copyfile(folder / CONFIG, folder / name)
        damage(folder / name)
        refused(model, folder, rf"{name} is not a whole JSON file {HINT}")
        shutil.rmtree(folder)


@pytest.mark.parametrize("model", KINDS)
def test_a_config_that_is_a_list_is_refused(copy, model):
    folder = copy(model)
    (folder / CONFIG).write_text("[1]")
    refused(model, folder, r"config.json must hold a table .* but holds \[1\]")


@pytest.mark.parametrize("model", KINDS)
def test_an_index_that_names_no_files_is_refused(copy, model):
    folder = copy(model)
    (folder / WEIGHTS).unlink()
    for content in ("{}", '{"weight_map": {}}', '{"weight_map": {"a": 1}}'):
        (folder / f"{WEIGHTS}.index.json").write_text(content)
        refused(model, folder, "weight_map of .*model.safetensors.index.json must")


@pytest.mark.parametrize("model", KINDS)
def test_tokenizer_files_that_cannot_be_read_are_refused(copy, model):
    folder = copy(model)
    next(folder.rglob("tokenizer.json")).write_text("{")
    refused(model, folder, f"The tokenizer files in .* cannot be read {HINT}")


def test_a_head_without_its_weights_is_refused(copy):
    folder = copy("pi0")
    save_file({"other": torch.zeros(1)}, folder / "value_head.safetensors")
    refused("pi0", folder, "value_head.safetensors is no value head: it has no fc1.weight")


@pytest.mark.parametrize(
    ("statistics", "message"),
    [
        ([1], r"dataset_statistics.json must hold a table .* but holds \[1\]"),
        ({}, "no action statistics"),
        ({"a": [1]}, r"norm_stats\['a'\] must hold a table"),
        ({"a": {}}, r"norm_stats\['a'\] has no \"action\" statistics"),
        ({"a": {"action": [1]}}, "action must hold a table"),
        ({"a": {"action": {"q01": 1, "q99": 2}}}, "q01, q99 and mask must be lists of one length"),
        ({"a": {"action": {"q01": ["x"], "q99": [1]}}}, r"q01 must be lists of finite numbers, got \['x'\]"),
        ({"a": {"action": {"q01": [0], "q99": [float("nan")]}}}, "q99 must be lists of finite numbers"),
        ({"a": {"action": {"q01": [0], "q99": [1], "min": [0, 0], "max": [1]}}}, "min and max must have 1 entries"),
    ],
)
@pytest.mark.parametrize("model", ["openvla", "openvla-oft"])
def test_broken_statistics_of_openvla_are_refused(copy, model, statistics, message):
    folder = copy(model)
    (folder / SCALES).write_text(json.dumps(statistics))
    refused(model, folder, message)


@pytest.mark.parametrize("model", ["openvla", "openvla-oft"])
def test_the_statistics_chosen_say_how_many_dimensions_an_action_has(copy, model):
    folder = copy(model)

    def two_robots(statistics):
        action = statistics["tabletop"]["action"]
        statistics["arm"] = {"action": {name: values[:6] for name, values in action.items()}}

    edit_json(folder / SCALES, two_robots)
    for key, width in (("arm", 6), ("tabletop", 7)):
        options = KINDS[model](path=str(folder), unnorm_key=key)
        policy = load_policy(model, options)
        assert peek_policy(model, options).action_dim == policy.action_dim == width
        assert policy.model.config.num_action_tokens == policy.chunk_size * width == len(policy.unit_step)
    edit_json(folder / CONFIG, lambda data: data | {"action_dim": 8})
    refused(model, folder, r"^--policy.unnorm_key must name statistics of 8 action .*have 6\)", unnorm_key="arm")


@pytest.mark.parametrize("model", ["openvla", "openvla-oft"])
def test_towers_that_do_not_exist_or_take_other_images_are_refused(copy, model):
    folder = copy(model)
    config = json.loads((folder / CONFIG).read_text())
    near = config["timm_model_ids"][0]
    edit_json(folder / CONFIG, lambda data: data | {"timm_model_ids": ["nonsense", *data["timm_model_ids"][1:]]})
    refused(model, folder, "timm_model_ids must name models that timm .* has, not 'nonsense'")
    edit_json(folder / CONFIG, lambda data: data | {"timm_model_ids": [near + "x", *data["timm_model_ids"][1:]]})
    refused(model, folder, "Did you mean vit_")
    (folder / CONFIG).write_text(json.dumps(config))
    side = config["image_sizes"][0]

    def larger(data):
        data["input_sizes"] = [[3, side + 16, side + 16] for _ in data["input_sizes"]]
        data.pop("tvf_crop_params", None)
        data.pop("tvf_resize_params", None)

    edit_json(folder / "preprocessor_config.json", larger)
    refused(model, folder, rf"preprocessor_config.json makes images of side \[{side + 16}.*for \[{side}")


def test_a_text_config_that_is_a_list_is_refused(copy):
    folder = copy("openvla")
    edit_json(folder / CONFIG, lambda data: {**data, "text_config": [1]})
    refused("openvla", folder, r"text_config must hold a table .* but holds \[1\]")


def step(kind, **changes):
    """Change the step of a pipeline whose name begins so."""

    def edit(data):
        next(step for step in data["steps"] if step["registry_name"].startswith(kind)).update(changes)

    return edit


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda data: data.pop("steps") and data, "policy_preprocessor.json must have a list 'steps', but has None"),
        (lambda data: {**data, "steps": [1]}, "A step of .*policy_preprocessor.json must hold a table"),
        (step("relative", registry_name=["x"]), r"the processing step \['x'\] is not supported"),
        (step("relative", config=[1]), "config of relative_actions_processor in .* must hold a table"),
        (step("rename", config={"rename_map": [1]}), "rename_map in policy_preprocessor.json .* must hold a table"),
        (step("tokenizer", config={"max_length": 0}), "max_length .* must be a whole number of at least 1, but is 0"),
        (step("normalizer", config={"norm_map": "FOO"}), "norm_map in policy_preprocessor.json .* must hold a table"),
        (step("normalizer", config={"eps": "x"}), "eps in .* must be a number of at least 0, but is 'x'"),
        (
            step("normalizer", config={"norm_map": {"ACTION": "FOO"}}),
            "normalization mode of action must be one of IDENTITY, MEAN_STD, .* but is 'FOO'",
        ),
        (step("normalizer", state_file=5), "lacks 5, the statistics"),
    ],
)
def test_a_broken_pipeline_of_pi0_is_refused(copy, edit, message):
    folder = copy("pi0")
    edit_json(folder / PRE, edit)
    refused("pi0", folder, message)


def test_a_step_without_options_has_their_defaults(copy):
    folder = copy("pi0")
    edit_json(folder / PRE, lambda data: step("relative", config=None)(data))
    assert peek_policy("pi0", Pi0PolicyConfig(path=str(folder))).action_dim == 7


def test_a_base_model_without_statistics_is_refused_before_its_weights_are_read(copy, monkeypatch):
    folder = copy("pi0")
    for file in [*folder.glob("policy_preprocessor*"), *folder.glob("policy_postprocessor*")]:
        file.unlink()
    refused("pi0", folder, "^--policy.path .* no statistics of state and actions")
    monkeypatch.setattr("vla_accel.models.pi0.loading.load_model", None)
    with pytest.raises(ValueError, match="no statistics of state and actions"):
        load_policy("pi0", Pi0PolicyConfig(path=str(folder)))


def test_a_tokenizer_that_the_hub_does_not_give_is_refused(copy, monkeypatch):
    def fail(*args, **kwargs):
        raise OSError("nobody/nothing is not a local folder")

    folder = copy("pi0")
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", fail)
    message = r"^--policy.tokenizer .* must be a folder .*but is 'nobody/nothing' \(OSError\)\. Download it and give"
    refused("pi0", folder, message, tokenizer="nobody/nothing")
