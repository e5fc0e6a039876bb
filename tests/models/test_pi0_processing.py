"""Frames, states, instructions and actions around PI0, against LeRobot's and openpi's numbers and rules."""

import json

import numpy as np
import pytest
import torch
from pi0_golden import DATA, SIZES, policy_folder
from safetensors.torch import load_file, save_file

from vla_accel.models.pi0 import Pi0Config, Pi0Processor, load_pi0
from vla_accel.models.pi0.files import Pipelines, read_pipelines
from vla_accel.models.pi0.images import resize_with_pad, to_float, to_model
from vla_accel.models.pi0.normalization import Scaler
from vla_accel.models.pi0.tiny import range_statistics, tiny_pi0_tokenizer

RESIZED, SCALED = load_file(DATA / "resize.safetensors"), load_file(DATA / "normalization.safetensors")
UNIT = range_statistics(state=([-1.0] * 8, [1.0] * 8), action=([-1.0] * 7, [1.0] * 7))


def close(actual, expected, atol=1e-6):
    torch.testing.assert_close(actual, expected, atol=atol, rtol=1e-6)


def stats_of(feature):
    names = {"state": "observation.state", "action": "action"}
    prefix = f"stats.{names[feature]}."
    found = {key.removeprefix(prefix): x for key, x in SCALED.items() if key.startswith(prefix)}
    return found or {key.rsplit(".", 1)[1]: x for key, x in SCALED.items() if key.startswith(f"stats.{feature}.")}


def make(variant="pi0", *, statistics=UNIT, **options):
    config = Pi0Config(
        variant=variant,
        image_size=56,
        vocab_size=512,
        input_features={
            **{f"observation.images.{name}": {"type": "VISUAL", "shape": [3, 56, 56]} for name in ("front", "wrist")},
            "observation.state": {"type": "STATE", "shape": [8]},
        },
        output_features={"action": {"type": "ACTION", "shape": [7]}},
        **options,
    )
    return Pi0Processor(config, tiny_pi0_tokenizer(), pipelines=Pipelines(statistics=statistics))


@pytest.fixture(scope="module")
def end_to_end(tmp_path_factory):
    """A checkpoint with LeRobot's processor files, its raw observation and what LeRobot made of it."""
    net, processor = load_pi0(policy_folder(tmp_path_factory.mktemp("policy")), **SIZES)
    io = load_file(DATA / "policy" / "io.safetensors")
    prefix = "raw.observation.images."
    frames = {key.removeprefix(prefix): x[None] for key, x in io.items() if key.startswith(prefix)}
    task = json.loads((DATA / "policy" / "task.json").read_text())["task"]
    return net, processor, io, processor.prepare(frames, io["raw.observation.state"][None], [task])


def test_words_and_state_match_lerobot(end_to_end):
    _, _, io, inputs = end_to_end
    assert torch.equal(inputs["tokens"], io["pre.tokens"])
    assert torch.equal(inputs["token_mask"], io["pre.attention_mask"])
    close(inputs["state"], io["model.state32"])


def test_pixels_match_lerobot_and_the_absent_camera_is_masked(end_to_end):
    _, processor, io, inputs = end_to_end
    made = processor.model_inputs(inputs)
    close(made["images"], io["model.images"])
    assert torch.equal(made["image_mask"], io["model.img_masks"])
    assert not made["image_mask"][0, 2]


def test_raw_observation_to_action_matches_lerobot(end_to_end):
    net, processor, io, inputs = end_to_end
    actions = net.sample_actions(**processor.model_inputs(inputs), noise=io["noise"])
    torch.testing.assert_close(actions[..., :7], io["normalized_actions"], atol=1e-5, rtol=0)
    torch.testing.assert_close(processor.unnormalize_actions(actions), io["actions"], atol=1e-5, rtol=0)


@pytest.mark.parametrize("tag", ["wide", "square_down"])
def test_resizing_matches_lerobot(tag):
    frame = RESIZED[f"{tag}.in_uint8"][None]
    close(to_model(resize_with_pad(to_float(frame), 56))[0], RESIZED[f"{tag}.lerobot_model_input"])


@pytest.mark.parametrize(("tag", "levels"), [("wide", 1), ("square_down", 0)])
def test_antialiased_resizing_matches_openpi_s_client(tag, levels):
    """The client uses Pillow, which rounds between its two passes: at most one level of 255 apart."""
    ours = resize_with_pad(RESIZED[f"{tag}.in_uint8"][None], 56, antialias=True)[0]
    theirs = RESIZED[f"{tag}.openpi_client_pil_uint8"]
    assert (ours.int() - theirs.int()).abs().max() <= levels
    plain = resize_with_pad(to_float(RESIZED[f"{tag}.in_uint8"][None]), 56)[0] * 255
    if tag == "square_down":  # without antialiasing a shrunk picture is another picture
        assert (plain - theirs).abs().max() > 10


@pytest.mark.parametrize("mode", ["MEAN_STD", "MIN_MAX", "QUANTILES", "QUANTILE10"])
@pytest.mark.parametrize("feature", ["state", "action"])
def test_scaling_matches_lerobot(mode, feature):
    scaler = Scaler(mode, stats_of(feature), name=feature, constant_dims="exact")
    expected = SCALED[f"lerobot.{mode}.{feature}"]
    torch.testing.assert_close(scaler.forward(SCALED[feature]), expected, atol=1e-5, rtol=1e-5)
    if feature == "action":
        close(scaler.inverse(SCALED["action"]), SCALED[f"lerobot.{mode}.unnorm_of_input_action"], 1e-5)


@pytest.mark.parametrize(("mode", "theirs"), [("MEAN_STD", "MEAN_STD"), ("QUANTILES", "QUANTILE")])
@pytest.mark.parametrize("feature", ["state", "action"])
def test_scaling_matches_openpi(mode, theirs, feature):
    scaler = Scaler(mode, stats_of(feature), name=feature, rule="openpi", constant_dims="exact")
    torch.testing.assert_close(
        scaler.forward(SCALED[feature]), SCALED[f"openpi.{theirs}.{feature}"], atol=1e-5, rtol=1e-5
    )
    if feature == "action":
        close(scaler.inverse(SCALED["action"]), SCALED[f"openpi.{theirs}.unnorm_of_padded32_action"][..., :7], 1e-5)


@pytest.mark.parametrize("mode", ["MEAN_STD", "QUANTILES"])
def test_dimensions_that_never_moved_are_refused_or_left_in_their_scale(mode):
    stats = {"mean": [1.0, 2.0], "std": [0.5, 0.0], "q01": [0.0, 2.0], "q99": [2.0, 2.0]}
    stats = {name: torch.tensor(values) for name, values in stats.items()}
    with pytest.raises(ValueError, match=r'observation.state have .* of 0 in dimensions \[1\].*constant_dims="unit"'):
        Scaler(mode, stats, name="observation.state")
    x = torch.tensor([[1.5, 2.25], [1.0, 2.0]])
    scaler = Scaler(mode, stats, name="observation.state", constant_dims="unit")
    torch.testing.assert_close(scaler.forward(x)[:, 1], torch.tensor([0.25, 0.0]), atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(scaler.inverse(scaler.forward(x)), x)
    exact = Scaler(mode, stats, name="observation.state", constant_dims="exact")
    assert exact.forward(x)[0, 1] > 1e6


@pytest.mark.parametrize(
    ("stats", "message"),
    [
        ({"mean": [0.0]}, "must have 'std' for MEAN_STD, but have"),
        ({"mean": [0.0], "std": [float("nan")]}, "must be finite"),
        ({"mean": [0.0], "std": [-1.0]}, r"std must not be negative, but it is not in dimensions \[0\]"),
    ],
)
def test_broken_statistics_are_refused(stats, message):
    stats = {name: torch.tensor(values) for name, values in stats.items()}
    with pytest.raises(ValueError, match=message):
        Scaler("MEAN_STD", stats, name="action")


def test_crossed_quantiles_are_refused():
    stats = {"q01": torch.tensor([0.0, 1.0]), "q99": torch.tensor([1.0, 0.0])}
    with pytest.raises(ValueError, match=r"q99 must be >= q01.*\[1\]"):
        Scaler("QUANTILES", stats, name="action")
    with pytest.raises(ValueError, match="constant_dims must be one of error, unit, exact, but is 'skip'"):
        Scaler("IDENTITY", {}, name="action", constant_dims="skip")


def test_statistics_of_another_robot_are_refused():
    statistics = range_statistics(state=([0.0] * 9, [1.0] * 9), action=([0.0] * 7, [1.0] * 7))
    with pytest.raises(ValueError, match="observation.state have 9 entries, but the checkpoint's feature has 8"):
        make(statistics=statistics)
    with pytest.raises(ValueError, match="observation.state must have 8 entries as in the checkpoint, but has 6"):
        make().normalize_state(np.zeros((1, 6)))


def test_base_models_without_statistics_ask_for_them():
    processor = make(statistics={})
    with pytest.raises(ValueError, match="no statistics of action .*pass statistics="):
        processor.unnormalize_actions(torch.zeros(1, 10, 32))


def test_actions_are_padded_and_come_back():
    processor = make()
    actions = torch.rand(2, 10, 7) * 2 - 1
    padded = processor.normalize_actions(actions)
    assert padded.shape == (2, 10, 32)
    assert not padded[..., 7:].any()
    torch.testing.assert_close(processor.unnormalize_actions(padded), actions)


def test_pi0_prompt_only_ends_its_line():
    processor = make()
    assert processor.prompts(["pick_up it", "done\n"], torch.zeros(2, 8)) == ["pick_up it\n", "done\n"]


def test_openpi_prompt_is_cleaned_first():
    processor = make(clean_prompt=True)
    assert processor.prompts([" pick_up\nit "], torch.zeros(1, 8)) == ["pick up it\n"]


def test_pi05_prompt_holds_the_binned_state():
    """256 bins of [-1, 1): -1 is 0, 0 is 128, 1 and more is 255, and what lies below is -1."""
    state = torch.tensor([[-1.5, -1.0, -0.9999, 0.0, 0.0078125, 0.999, 1.0, 3.0] + [0.0] * 24])
    prompt = make("pi05").prompts([" pick_up\nit "], state)
    assert prompt == ["Task: pick up it, State: -1 0 0 128 129 255 255 255;\nAction: "]
    assert make("pi05", state_in_prompt=False).prompts(["pick_up"], state) == ["pick up\n"]


def test_prompts_are_padded_right_and_cut_with_a_warning():
    processor = make(tokenizer_max_length=6)
    tokens, mask = processor.tokenize(["reach the\n"])
    assert mask.tolist() == [[True] * 4 + [False] * 2]
    assert tokens[0, 0] == processor.tokenizer.bos_token_id
    assert tokens[0, 4:].tolist() == [0, 0]
    with pytest.warns(UserWarning, match="8 tokens and is cut to .* 6"):
        tokens, mask = processor.tokenize(["reach the red block the red\n"])
    assert mask.all()


def test_frames_may_be_uint8_or_float_and_channels_first_or_last():
    processor = make()
    frame = torch.randint(0, 256, (2, 56, 56, 3), dtype=torch.uint8)
    versions = [frame, frame.numpy(), frame.permute(0, 3, 1, 2), frame.float() / 255]
    images = [
        processor.model_inputs(processor.prepare({"wrist": x}, torch.zeros(2, 8), ["a", "b"]))["images"]
        for x in versions
    ]
    for other in images[1:]:
        assert torch.equal(images[0], other)
    torch.testing.assert_close(images[0][:, 1], frame.permute(0, 3, 1, 2) / 127.5 - 1)
    assert (images[0][:, 0] == -1).all()


def test_prepared_frames_do_not_share_memory_with_the_simulator():
    for shape in ((1, 40, 60, 3), (1, 3, 40, 60)):
        frame = np.zeros(shape, np.uint8)
        inputs = make().prepare({"front": frame}, torch.zeros(1, 8), ["a"])
        frame[:] = 255
        assert not inputs["image.front"].any()


def test_prepared_frames_stay_uint8():
    frame = np.zeros((1, 40, 60, 3), np.uint8)
    assert make().prepare({"front": frame}, torch.zeros(1, 8), ["a"])["image.front"].dtype == torch.uint8
    antialiased = make(image_resize="antialias").prepare({"front": frame}, torch.zeros(1, 8), ["a"])["image.front"]
    assert (antialiased.dtype, antialiased.shape) == (torch.uint8, (1, 3, 56, 56))


@pytest.mark.parametrize(
    ("frames", "message"),
    [
        ({}, "No camera was given; the checkpoint knows front, wrist"),
        ({"top": np.zeros((1, 56, 56, 3), np.uint8)}, "Camera must be one of front, wrist, but is 'top'"),
        (
            {"front": np.zeros((1, 56, 56, 4), np.uint8)},
            r"\[N, height, width, 3\] or .*but are \[1, 56, 56, 4\]",
        ),
    ],
)
def test_wrong_cameras_are_refused(frames, message):
    with pytest.raises(ValueError, match=message):
        make().prepare(frames, torch.zeros(1, 8), ["a"])


def test_frames_of_other_types_are_refused():
    with pytest.raises(ValueError, match="must be uint8 .* or float .* but are torch.int64"):
        to_float(torch.zeros(1, 3, 8, 8, dtype=torch.int64))


def test_missing_tokenizer_is_one_clear_sentence(tmp_path):
    path = policy_folder(tmp_path)
    for file in (path / "tokenizer").iterdir():
        file.unlink()
    with pytest.raises(ValueError, match="needs a tokenizer .google/paligemma-3b.*pass tokenizer=<folder or hub"):
        load_pi0(path, **SIZES)
    _, processor = load_pi0(path, tokenizer=DATA / "policy" / "tokenizer", **SIZES)
    assert len(processor.tokenizer) == 19


def test_tokenizer_of_another_model_is_refused():
    config = Pi0Config(vocab_size=64)
    with pytest.raises(ValueError, match="tokens, but the model has rows for 64"):
        Pi0Processor(config, tiny_pi0_tokenizer())


def test_tokens_added_beyond_the_model_s_rows_are_refused_only_in_a_prompt():
    """PaliGemma's own tokenizer has one more token, `<image>`, than the model has rows."""
    tokenizer = tiny_pi0_tokenizer()
    config = Pi0Config(vocab_size=tokenizer.vocab_size)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    assert len(tokenizer) == config.vocab_size + 1
    processor = Pi0Processor(config, tokenizer)
    tokens, _ = processor.tokenize(["reach the red block\n"])
    assert tokens.max() < config.vocab_size
    with pytest.raises(ValueError, match=f"tokens, but the model has rows for {config.vocab_size}"):
        processor.tokenize(["reach <image>\n"])


class TestPipelineFiles:
    """LeRobot's JSON pipelines."""

    def edit(self, path, index, name="policy_preprocessor", **changes):
        policy_folder(path)
        file = path / f"{name}.json"
        record = json.loads(file.read_text())
        record["steps"][index] = {**record["steps"][index], **changes}
        file.write_text(json.dumps(record))

    def test_name_of_the_state_file_is_read(self, tmp_path):
        """Older files number the step differently."""
        self.edit(tmp_path, 6, state_file="policy_preprocessor_step_5_normalizer_processor.safetensors")
        file = tmp_path / "policy_preprocessor_step_6_normalizer_processor.safetensors"
        file.rename(tmp_path / "policy_preprocessor_step_5_normalizer_processor.safetensors")
        assert "mean" in read_pipelines(tmp_path).statistics["observation.state"]

    def test_missing_state_file_is_refused(self, tmp_path):
        self.edit(tmp_path, 6, state_file="gone.safetensors")
        with pytest.raises(ValueError, match="lacks gone.safetensors"):
            read_pipelines(tmp_path)

    @pytest.mark.parametrize(
        ("name", "index", "changes", "message"),
        [
            ("policy_preprocessor", 5, {"config": {"enabled": True}}, "relative_actions_processor is enabled"),
            ("policy_postprocessor", 1, {"config": {"enabled": True}}, "absolute_actions_processor is enabled"),
            ("policy_preprocessor", 1, {"registry_name": "blur"}, "step 'blur' is not supported"),
        ],
    )
    def test_steps_that_are_not_implemented_are_refused(self, name, index, changes, message, tmp_path):
        self.edit(tmp_path, index, name, **changes)
        with pytest.raises(ValueError, match=message):
            load_pi0(tmp_path, **SIZES)

    def test_pipelines_that_disagree_are_refused(self, tmp_path):
        policy_folder(tmp_path)
        file = tmp_path / "policy_postprocessor_step_0_unnormalizer_processor.safetensors"
        tensors = load_file(file)
        save_file({**tensors, "action.mean": tensors["action.mean"] + 1}, file)
        with pytest.raises(ValueError, match="different statistics action.mean"):
            read_pipelines(tmp_path)

    def test_renamed_cameras_reach_their_slot(self, tmp_path):
        self.edit(tmp_path, 0, config={"rename_map": {"observation.images.eye": "observation.images.left_wrist_0_rgb"}})
        _, processor = load_pi0(tmp_path, **SIZES)
        inputs = processor.prepare({"eye": np.zeros((1, 56, 56, 3), np.uint8)}, torch.zeros(1, 8), ["pick"])
        assert "image.left_wrist_0_rgb" in inputs
        assert processor.model_inputs(inputs)["image_mask"].tolist() == [[False, True, False]]

    def test_other_statistics_can_be_given(self, tmp_path):
        _, processor = load_pi0(policy_folder(tmp_path), statistics=UNIT, **SIZES)
        assert processor.statistics["action"]["mean"].abs().max() == 0
