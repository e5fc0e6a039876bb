"""Prompts and processor folders, against the ids that the original processor returned and by hand."""

import json
import re
from pathlib import Path

import pytest
import torch
from PIL import Image
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from vla_accel.models.openvla.images import PrismaticImageProcessor
from vla_accel.models.openvla.processing import PROMPTS, SPACE, PrismaticProcessor
from vla_accel.models.tiny import tiny_tokenizer

DATA = Path(__file__).parents[1] / "data" / "openvla"
PROMPT_IDS = json.loads((DATA / "prompts.json").read_text())
SETTINGS = json.loads((DATA / "preprocessor_config.json").read_text())


def picture(name):
    return Image.open(DATA / "images" / f"{name}.png")


def image_processor(size=56):
    return PrismaticImageProcessor(**{**SETTINGS, "input_sizes": [[3, size, size]] * 2})


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


def test_a_prompt_that_ends_in_a_space_already_gets_no_second_space_piece(processor, monkeypatch):
    expected = processor.encode(["lift it"])
    monkeypatch.setitem(PROMPTS, "openvla", PROMPTS["openvla"] + " ")
    torch.testing.assert_close(processor.encode(["lift it"]), expected)


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
