"""Images against what the original image processor and TensorFlow returned."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from vla_accel.models.openvla.eval_images import center_crop, jpeg_round_trip, resize_lanczos3
from vla_accel.models.openvla.images import PrismaticImageProcessor

DATA = Path(__file__).parents[1] / "data" / "openvla"
PIXELS = load_file(DATA / "preprocess.safetensors")
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


def test_letterbox_of_an_odd_difference_stays_one_pixel_short_of_a_square():
    # 7 x 4: margins int(3 / 2) = 1 above and below give 7 x 6; the shorter side fits, the crop starts at round(0.5).
    image = np.random.default_rng(0).integers(0, 256, (4, 7, 3), dtype=np.uint8)
    resized = image_processor("letterbox", size=6).resize([image])[0].permute(1, 2, 0).numpy()
    assert (resized[[0, 5]] == 127).all()
    np.testing.assert_array_equal(resized[1:5], image[:, :6])


@pytest.mark.parametrize("shape", [(3, 5, 3), (5, 3, 3)])
def test_fractions_of_the_longer_side_are_cut_off(shape):
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8))
    resized = image_processor("resize-crop", size=1).resize([image])[0, :, 0, 0]  # 1 * 5 / 3 = 1.67 gives 1 pixel
    assert tuple(resized.tolist()) == image.resize((1, 1), Image.Resampling.BICUBIC).getpixel((0, 0))


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
def test_lanczos_resize_equals_tensorflow_but_for_a_level_in_the_rarest_values(name):
    expected = rgb(f"{name}__lanczos224_nojpeg", "eval_images").astype(int)
    difference = np.abs(resize_lanczos3(rgb(name), 224) - expected)
    assert difference.max() <= 1
    assert (difference > 0).mean() < 5e-5


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
