"""Images and prompts against what the original processor and TensorFlow returned."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from vla_accel.models.openvla.eval_images import center_crop, jpeg_round_trip, resize_lanczos3
from vla_accel.models.openvla.images import PrismaticImageProcessor
from vla_accel.models.openvla.processing import PROMPTS, SPACE, PrismaticProcessor
from vla_accel.models.tiny import tiny_tokenizer

DATA = Path(__file__).parents[1] / "data" / "openvla"
PIXELS = load_file(DATA / "preprocess.safetensors")
PROMPT_IDS = json.loads((DATA / "prompts.json").read_text())
SETTINGS = json.loads((DATA / "preprocessor_config.json").read_text())


def picture(name):
    return Image.open(DATA / "images" / f"{name}.png")


def rgb(name, folder="images"):
    return np.array(Image.open(DATA / folder / f"{name}.png").convert("RGB"))


def image_processor(strategy="resize-naive", *, interpolations=("bicubic", "bicubic"), fused=True, size=56, **kwargs):
    towers = slice(0 if fused else 1, 2)
    return PrismaticImageProcessor(
        fused,
        image_resize_strategy=strategy,
        input_sizes=[[3, size, size]] * len(SETTINGS["means"][towers]),
        interpolations=list(interpolations)[towers],
        means=SETTINGS["means"][towers],
        stds=SETTINGS["stds"][towers],
        **kwargs,
    )


# ---------------------------------------------------------------------------------------------------------- images


@pytest.mark.parametrize("case", sorted(PIXELS))
def test_pixel_values_equal_the_original_bit_for_bit(case):
    kind, strategy, name = case.split("/")
    filters = ("bilinear",) * 2 if kind.endswith("bilinear") else ("bicubic",) * 2
    processor = image_processor(strategy, interpolations=filters, fused=kind.startswith("fused"))
    pixels = processor(picture(name))["pixel_values"]
    torch.testing.assert_close(pixels, PIXELS[case].unsqueeze(0), rtol=0, atol=0)


def test_every_strategy_filter_and_kind_of_image_is_among_the_fixtures():
    kinds, strategies, names = (set(parts) for parts in zip(*(case.split("/") for case in PIXELS), strict=True))
    assert strategies == {"resize-naive", "resize-crop", "letterbox"}
    assert kinds == {"fused56", "fused56-bilinear", "siglip56"}
    assert {picture(name).mode for name in names} == {"RGB", "RGBA", "L"}
    assert {np.sign(picture(name).width - picture(name).height) for name in names} == {-1, 0, 1}


def test_an_image_of_the_models_size_is_only_normalised():
    pixels = image_processor(size=224)(picture("square_224"))["pixel_values"][0]
    expected = (rgb("square_224") / 255.0 - [0.485, 0.456, 0.406]) / [0.229, 0.224, 0.225]
    np.testing.assert_allclose(pixels[:3].permute(1, 2, 0).numpy(), expected, rtol=0, atol=1e-6)
    expected = rgb("square_224") / 127.5 - 1.0
    np.testing.assert_allclose(pixels[3:].permute(1, 2, 0).numpy(), expected, rtol=0, atol=1e-6)


def test_arrays_and_pictures_give_the_same_pixels():
    processor = image_processor("resize-crop")
    images = [rgb("wide_160x96"), rgb("tall_90x150")]
    resized = processor.resize(images)
    assert resized.dtype == torch.uint8
    assert resized.shape == (2, 3, 56, 56)
    torch.testing.assert_close(resized, processor.resize([picture("wide_160x96"), picture("tall_90x150")]))


def test_a_stacked_array_is_a_batch():
    processor = image_processor()
    stack = np.stack([rgb("square_256"), rgb("square_256")[::-1]])
    torch.testing.assert_close(processor.resize(stack), processor.resize(list(stack)))
    assert processor(stack)["pixel_values"].shape == (2, 6, 56, 56)


def test_towers_with_different_filters_keep_their_own_bytes():
    mixed = image_processor(interpolations=("bicubic", "bilinear"))
    resized = mixed.resize([picture("square_256")])
    assert resized.shape == (1, 6, 56, 56)
    pixels = mixed.normalize(resized)[0]
    torch.testing.assert_close(pixels[:3], PIXELS["fused56/resize-naive/square_256"][:3], rtol=0, atol=0)
    torch.testing.assert_close(pixels[3:], PIXELS["fused56-bilinear/resize-naive/square_256"][3:], rtol=0, atol=0)


def test_several_images_are_concatenated_on_channels_in_order():
    processor = image_processor()
    pixels = processor([[picture("square_256"), picture("small_40")], [picture("rgba_64"), picture("gray_70x64")]])
    expected = [
        torch.cat([PIXELS[f"fused56/resize-naive/{name}"] for name in row])
        for row in (("square_256", "small_40"), ("rgba_64", "gray_70x64"))
    ]
    torch.testing.assert_close(pixels["pixel_values"], torch.stack(expected), rtol=0, atol=0)


def test_normalising_keeps_leading_dimensions_and_its_input():
    processor = image_processor()
    stored = torch.randint(0, 256, (2, 4, 3, 56, 56), dtype=torch.uint8)
    before = stored.clone()
    pixels = processor.normalize(stored)
    assert pixels.shape == (2, 4, 6, 56, 56)
    assert pixels.dtype == torch.float32
    torch.testing.assert_close(pixels.flatten(0, 1), processor.normalize(stored.flatten(0, 1)), rtol=0, atol=0)
    torch.testing.assert_close(stored, before)


@pytest.mark.parametrize("name", ["preprocessor_config.json", "preprocessor_config_7b.json"])
def test_the_original_settings_are_read_and_written_back_unchanged(name):
    original = json.loads((DATA / name).read_text())
    written = json.loads(PrismaticImageProcessor(**original).to_json_string())
    original.pop("processor_class", None)
    assert written == original


def test_derived_settings_are_recomputed_and_unknown_ones_kept():
    settings = {**SETTINGS, "tvf_do_letterbox": None, "image_resize_strategy": "letterbox", "note": "mine"}
    written = PrismaticImageProcessor(**settings).to_dict()
    assert written["tvf_do_letterbox"] is True
    assert written["tvf_letterbox_fill"] == [127, 127, 127]
    assert written["tvf_resize_params"][0]["size"] == 56
    assert written["note"] == "mine"


@pytest.mark.parametrize(
    "image", [np.zeros((8, 8, 3), np.float32), np.zeros((8, 8), np.uint8), np.zeros((8, 8, 4), np.uint8), "a.png"]
)
def test_what_is_no_picture_of_bytes_is_refused(image):
    with pytest.raises(ValueError, match="an image must be a uint8 array"):
        image_processor().resize([image])


def test_no_images_are_refused():
    with pytest.raises(ValueError, match="at least one image"):
        image_processor().resize([])


def test_rows_with_different_numbers_of_images_are_refused():
    with pytest.raises(ValueError, match="same number of images"):
        image_processor()([[picture("small_40")] * 2, [picture("small_40")]])


@pytest.mark.parametrize("images", [torch.zeros(1, 3, 8, 8), torch.zeros(1, 4, 8, 8, dtype=torch.uint8)])
def test_normalising_refuses_floats_and_odd_channels(images):
    with pytest.raises(ValueError, match="normalize takes uint8"):
        image_processor().normalize(images)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"image_resize_strategy": "stretch"}, "image_resize_strategy must be one of"),
        ({"input_sizes": [[3, 56, 56], [3, 64, 64]]}, "one S for all towers"),
        ({"input_sizes": [[3, 56, 48], [3, 56, 48]]}, "one S for all towers"),
        ({"means": [[0.5, 0.5, 0.5]]}, "one entry per vision tower"),
        ({"use_fused_vision_backbone": False}, "one entry per vision tower"),
        ({"interpolations": ["bicubic", "cubic"]}, "interpolations must be among"),
    ],
)
def test_impossible_settings_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        PrismaticImageProcessor(**{**SETTINGS, **change})


def test_call_options_that_would_be_ignored_are_refused():
    with pytest.raises(ValueError, match="no per-call options, got do_resize"):
        image_processor()(picture("small_40"), do_resize=False)
    with pytest.raises(ValueError, match="return_tensors"):
        image_processor()(picture("small_40"), return_tensors="np")


# -------------------------------------------------------------------------------------------------- LIBERO evaluation


@pytest.mark.parametrize(
    ("folder", "name", "cropped"),
    [
        ("images", "square_224", "square_224__center_crop"),
        ("eval_images", "square_256__jpeg_lanczos224", "square_256__jpeg_lanczos224__center_crop"),
    ],
)
def test_centre_crop_equals_tensorflow_bit_for_bit(folder, name, cropped):
    np.testing.assert_array_equal(center_crop(rgb(name, folder)), rgb(cropped, "eval_images"))


def test_centre_crop_of_everything_changes_nothing():
    image = rgb("square_224")
    np.testing.assert_array_equal(center_crop(image, area=1.0), image)


def test_centre_crop_of_a_ramp_by_hand():
    # Rows 0..255 hold their own index; a quarter of the area is half a side, so output row i samples 63.75 + i / 2.
    ramp = np.repeat(np.arange(256, dtype=np.uint8)[:, None, None], 256, axis=1).repeat(3, axis=2)
    expected = np.floor((63.75 + np.arange(256) / 2) / 255 * 255.5 + 1e-4)
    np.testing.assert_array_equal(center_crop(ramp, area=0.25)[:, 0, 0], expected)


@pytest.mark.parametrize("name", ["wide_160x96", "square_256"])
def test_lanczos_resize_equals_tensorflow_within_one_level_in_rare_pixels(name):
    difference = np.abs(
        resize_lanczos3(rgb(name), 224).astype(int) - rgb(f"{name}__lanczos224_nojpeg", "eval_images").astype(int)
    )
    assert difference.max() <= 1
    assert (difference > 0).mean() < 5e-4


def test_pillows_lanczos_is_not_good_enough():
    pillow = np.array(Image.fromarray(rgb("square_256")).resize((224, 224), Image.Resampling.LANCZOS)).astype(int)
    assert (pillow != rgb("square_256__lanczos224_nojpeg", "eval_images")).mean() > 0.05


def test_jpeg_round_trip_equals_tensorflow_up_to_the_decoder():
    difference = np.abs(
        jpeg_round_trip(rgb("wide_160x96")).astype(int) - rgb("wide_160x96__jpeg_only", "eval_images").astype(int)
    )
    assert difference.mean() < 1.0
    assert difference.max() <= 14


@pytest.mark.parametrize("step", [center_crop, jpeg_round_trip, lambda image: resize_lanczos3(image, 8)])
def test_evaluation_steps_refuse_what_is_no_picture_of_bytes(step):
    with pytest.raises(ValueError, match="uint8 array"):
        step(np.zeros((8, 8, 3), np.float32))


@pytest.mark.parametrize("area", [0.0, 1.5])
def test_centre_crop_refuses_impossible_areas(area):
    with pytest.raises(ValueError, match="area must lie in"):
        center_crop(rgb("small_40"), area=area)


# --------------------------------------------------------------------------------------------------------- prompts


SPLITS = {  # how Llama-2 spells the words of the recorded tasks that it has no single token for
    "bowl": "bow l",
    "ramekin": "r ame kin",
    "drawer": "dra wer",
    "tomato": "tom ato",
    "sauce": "sau ce",
    "stove": "st ove",
    "moka": "m oka",
    "bbq": "b b q",
    "mug": "m ug",
    "plate,": "plate ,",
}


def recorded_tokenizer():
    """A tokenizer of just the pieces in the recorded prompts, with Llama-2's ids, normaliser and post-processor.

    Llama-2's own vocabulary can't be shipped. Pieces are matched longest first instead of by merges.
    """
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2}
    for row in PROMPT_IDS["prompts"]:
        if row["template"] == "openvla_trailing_space":
            pieces = [f"{SPACE}In", ":"]
            for word in f"What action should the robot take to {row['task'].lower()}".split(" "):
                first, *rest = SPLITS.get(word, word).split(" ")
                pieces += [SPACE + first, *rest]
            pieces += ["?", "\n", "Out", ":", SPACE]
            for piece, index in zip(pieces, row["input_ids"][1:], strict=True):
                assert vocab.setdefault(piece, index) == index
    pattern = "|".join(re.escape(piece) for piece in sorted(vocab, key=len, reverse=True))
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)])
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), "isolated")
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", None, [("<s>", 1)])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>")
    fast.add_special_tokens({"pad_token": AddedToken("<PAD>")})
    return fast


@pytest.fixture(scope="module")
def processor():
    return PrismaticProcessor(image_processor(size=48), tiny_tokenizer(["lift it", "reach the red block now please"]))


def test_prompts_equal_the_recorded_texts():
    tokenizer = tiny_tokenizer()
    styles = {"openvla": "openvla", "v01": "openvla-v01"}
    for row in PROMPT_IDS["prompts"]:
        if row["template"] in styles:
            processor = PrismaticProcessor(image_processor(), tokenizer, prompt_style=styles[row["template"]])
            assert processor.prompt(row["task"]) == row["text"]


def test_prompts_change_nothing_of_a_task_but_its_case(processor):
    task = " Put {it} THERE,\tnow "
    assert processor.prompt(task) == f"In: What action should the robot take to {task.lower()}?\nOut:"


def test_encoded_prompts_equal_the_recorded_ids_with_one_space_piece_at_the_end():
    processor = PrismaticProcessor(image_processor(), recorded_tokenizer())
    assert processor.space_id == 29871
    for row in PROMPT_IDS["prompts"]:
        if row["template"] == "openvla_trailing_space":
            input_ids, attention_mask = processor.encode([row["task"]])
            assert input_ids.tolist() == [row["input_ids"]]
            assert attention_mask.all()


def test_calling_with_text_returns_the_recorded_ids_unchanged():
    processor = PrismaticProcessor(image_processor(), recorded_tokenizer())
    for row in PROMPT_IDS["prompts"]:
        if row["template"] != "v01":
            inputs = processor(row["text"], picture("small_40"))
            assert inputs["input_ids"].tolist() == [row["input_ids"]], row["template"]


def test_a_batch_is_padded_on_the_right_like_the_recorded_one():
    tokenizer = recorded_tokenizer()
    processor = PrismaticProcessor(image_processor(), tokenizer)
    texts = [row["text"] for row in PROMPT_IDS["prompts"] if row["template"] == "openvla"][:3]
    inputs = processor(texts, [picture("small_40")] * 3)
    recorded = torch.tensor(PROMPT_IDS["padded_batch_right"]["input_ids"])
    recorded[recorded == 32000] = tokenizer.pad_token_id
    assert inputs["input_ids"].tolist() == recorded.tolist()
    assert inputs["attention_mask"].tolist() == PROMPT_IDS["padded_batch_right"]["attention_mask"]


def test_an_encoded_prompt_by_hand(processor):
    input_ids, attention_mask = processor.encode(["Lift IT"])
    words = ["What", "action", "should", "the", "robot", "take", "to", "lift", "it"]
    pieces = ["<s>", f"{SPACE}In", ":", *(SPACE + word for word in words), "?", "<0x0A>", "Out", ":", SPACE]
    assert processor.tokenizer.convert_ids_to_tokens(input_ids[0].tolist()) == pieces
    assert (input_ids.dtype, attention_mask.dtype) == (torch.int64, torch.int64)


def test_every_row_of_a_batch_ends_in_one_space_piece_before_its_padding(processor):
    input_ids, attention_mask = processor.encode(["lift it", "reach the red block now please"])
    lengths = attention_mask.sum(1)
    assert lengths.tolist() == [17, 21]
    assert input_ids.shape == (2, 21)
    for row, length in zip(input_ids, lengths, strict=True):
        assert row[length - 2 : length].tolist() == [processor.tokenizer.convert_tokens_to_ids(":"), processor.space_id]
        assert (row[length:] == processor.tokenizer.pad_token_id).all()


def test_a_fixed_length_pads_and_refuses_longer_prompts(processor):
    input_ids, attention_mask = processor.encode(["lift it"], length=24)
    assert input_ids.shape == (1, 24)
    assert attention_mask.sum() == 17
    with pytest.raises(ValueError, match=r"length must hold the longest prompt \(17 tokens\), got 16"):
        processor.encode(["lift it"], length=16)


@pytest.mark.parametrize("tasks", [[], "lift it"])
def test_encoding_needs_a_list_of_tasks(processor, tasks):
    with pytest.raises(ValueError, match="list of at least one task"):
        processor.encode(tasks)


def test_calling_returns_what_the_model_takes(processor):
    texts = [processor.prompt("lift it"), processor.prompt("reach the red block now please")]
    inputs = processor(texts, [picture("small_40"), picture("rgba_64")]).to(torch.bfloat16)
    assert list(inputs) == processor.model_input_names
    assert inputs["pixel_values"].dtype == torch.bfloat16
    assert inputs["input_ids"].dtype == torch.int64
    assert inputs["pixel_values"].shape == (2, 6, 48, 48)


def test_calling_refuses_unequal_numbers_and_unpadded_batches(processor):
    texts = [processor.prompt("lift it"), processor.prompt("reach the red block now please")]
    with pytest.raises(ValueError, match="one image .* per prompt, got 2 and 1"):
        processor(texts, picture("small_40"))
    with pytest.raises(ValueError, match="need padding=True"):
        processor(texts, [picture("small_40")] * 2, padding=False)


def test_unknown_prompt_style_is_refused():
    with pytest.raises(ValueError, match="prompt_style must be one of openvla, openvla-v01"):
        PrismaticProcessor(image_processor(), tiny_tokenizer(), prompt_style="v02")


def test_a_tokenizer_without_the_space_piece_or_padding_is_refused():
    plain = Tokenizer(models.WordLevel({"<unk>": 0, "a": 1}, unk_token="<unk>"))
    with pytest.raises(ValueError, match="has no piece"):
        PrismaticProcessor(image_processor(), PreTrainedTokenizerFast(tokenizer_object=plain))
    spaced = Tokenizer(models.WordLevel({"<unk>": 0, SPACE: 1}, unk_token="<unk>"))
    with pytest.raises(ValueError, match="no padding token"):
        PrismaticProcessor(image_processor(), PreTrainedTokenizerFast(tokenizer_object=spaced))


# ----------------------------------------------------------------------------------------------------------- folders


def test_a_saved_processor_loads_and_does_the_same(processor, tmp_path):
    written = processor.save_pretrained(tmp_path / "one")
    assert {Path(path).name for path in written} >= {
        "tokenizer.json",
        "preprocessor_config.json",
        "processor_config.json",
    }
    loaded = PrismaticProcessor.from_pretrained(tmp_path / "one")
    tasks = ["lift it", "Hello W\u00f6rld \u65e5\u672c"]
    torch.testing.assert_close(loaded.encode(tasks), processor.encode(tasks))
    image = picture("tall_90x150")
    torch.testing.assert_close(
        loaded.image_processor(image)["pixel_values"], processor.image_processor(image)["pixel_values"], rtol=0, atol=0
    )


def test_original_tokenizer_files_are_written_back_byte_for_byte(processor, tmp_path):
    source, copy = tmp_path / "source", tmp_path / "copy"
    processor.save_pretrained(source)
    settings = json.loads((source / "tokenizer_config.json").read_text())
    (source / "tokenizer_config.json").write_text(json.dumps({**settings, "tokenizer_class": "LlamaTokenizer"}))
    (source / "tokenizer.model").write_bytes(b"sentencepiece")
    (source / "processor_config.json").write_text('{ "processor_class":"PrismaticProcessor" }')
    PrismaticProcessor.from_pretrained(source).save_pretrained(copy)
    assert sorted(path.name for path in copy.iterdir()) == sorted(path.name for path in source.iterdir())
    for path in source.iterdir():
        assert (copy / path.name).read_bytes() == path.read_bytes(), path.name


def test_a_vicuna_checkpoint_is_asked_with_its_own_prompt(processor, tmp_path):
    processor.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"llm_backbone_id": "vicuna-v15-7b"}')
    assert PrismaticProcessor.from_pretrained(tmp_path).prompt_style == "openvla-v01"
    assert PrismaticProcessor.from_pretrained(tmp_path, prompt_style="openvla").prompt_style == "openvla"
    (tmp_path / "config.json").write_text('{"llm_backbone_id": "llama2-7b-pure"}')
    assert PrismaticProcessor.from_pretrained(tmp_path).prompt_style == "openvla"


@pytest.mark.parametrize("missing", ["tokenizer.json", "preprocessor_config.json"])
def test_a_missing_file_is_named(processor, tmp_path, missing):
    processor.save_pretrained(tmp_path)
    (tmp_path / missing).unlink()
    with pytest.raises(ValueError, match=rf"has no {missing}.*copy"):
        PrismaticProcessor.from_pretrained(tmp_path)


def test_what_is_no_folder_is_refused_without_asking_the_network(tmp_path):
    with pytest.raises(ValueError, match="is not a folder"):
        PrismaticProcessor.from_pretrained("openvla/openvla-7b")


def test_templates_are_the_only_place_of_the_prompt():
    assert PROMPTS["openvla"].endswith("Out:"), "the space piece is appended as an id, not as text"
