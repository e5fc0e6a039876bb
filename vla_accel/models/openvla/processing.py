"""OpenVLA's processor: instructions to prompt ids, together with the image processor.

Not here: the image processor (`images.py`) and action tokens (`actions.py`).
Usage: `processor = PrismaticProcessor.from_pretrained(folder)`, then `processor.encode(tasks)` and
`processor.image_processor.resize(images)` while collecting, `image_processor.normalize(uint8)` on the device.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import BatchFeature, PreTrainedTokenizerFast

from vla_accel.models.openvla.images import PrismaticImageProcessor
from vla_accel.models.reading import read_json, read_tokenizer

PROMPTS = {
    "openvla": "In: What action should the robot take to {task}?\nOut:",
    "openvla-v01": (
        "A chat between a curious user and an artificial intelligence assistant. The assistant gives helpful, "
        "detailed, and polite answers to the user's questions. "
        "USER: What action should the robot take to {task}? ASSISTANT:"
    ),
}
"""Prompt style -> template; `task` is put in lower case."""

SPACE = "\u2581"
"""The tokenizer's space piece (29871 in Llama-2): what training text has between the prompt and the action tokens."""

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "processor_config.json",
)


class PrismaticProcessor:
    """An image processor and a tokenizer, with OpenVLA's prompt around the instruction.

    Args:
        image_processor: see `PrismaticImageProcessor`.
        tokenizer: fast tokenizer of the checkpoint, with a padding token and the space piece.
        prompt_style: `"openvla"`, or `"openvla-v01"` for the Vicuna-based first release.
        files: the checkpoint's own tokenizer files, name -> content; written back unchanged by `save_pretrained`.

    Attributes:
        space_id: id of the space piece that ends every encoded prompt.

    Raises:
        ValueError: unknown prompt style, or a tokenizer without padding token or space piece.
    """

    attributes = ["image_processor", "tokenizer"]

    def __init__(
        self,
        image_processor: PrismaticImageProcessor,
        tokenizer: PreTrainedTokenizerFast,
        *,
        prompt_style: str = "openvla",
        files: dict[str, bytes] | None = None,
    ):
        if prompt_style not in PROMPTS:
            raise ValueError(f"prompt_style must be one of {', '.join(PROMPTS)}, got {prompt_style!r}")
        self.image_processor = image_processor
        self.tokenizer = tokenizer
        self.prompt_style = prompt_style
        self._files = dict(files or {})
        self.space_id = tokenizer.get_vocab().get(SPACE)
        if self.space_id is None:
            raise ValueError(
                f"the tokenizer has no piece {SPACE!r} (29871 in Llama-2), which must stand between the prompt and the "
                "action tokens; the folder's tokenizer is not this model's"
            )
        if tokenizer.pad_token_id is None:
            raise ValueError("the tokenizer has no padding token; OpenVLA's is '<PAD>'")

    @classmethod
    def from_pretrained(
        cls, folder: str | Path, *, prompt_style: str | None = None, **kwargs: Any
    ) -> PrismaticProcessor:
        """Load from a checkpoint folder, offline.

        Args:
            folder: a local folder with preprocessor_config.json and tokenizer.json.
            prompt_style: overrides the style; None takes `"openvla-v01"` where config.json names a Vicuna model and
                `"openvla"` elsewhere.
            kwargs: what Hugging Face's `AutoProcessor` passes on; ignored, for nothing of it applies to a local folder.

        Raises:
            ValueError: the folder, the image processor's or the tokenizer's file is missing.
        """
        del kwargs
        folder = Path(folder)
        if not folder.is_dir():
            raise ValueError(f"{folder} is not a folder; download the checkpoint and give the path of its folder")
        if not (folder / "preprocessor_config.json").is_file():
            raise ValueError(f"{folder} has no preprocessor_config.json; copy it from the original checkpoint")
        if not (folder / "tokenizer.json").is_file():
            raise ValueError(
                f"{folder} has no tokenizer.json; copy the tokenizer files of the original checkpoint into it "
                f"({', '.join(TOKENIZER_FILES[:5])}). A folder with tokenizer.model alone must be converted first"
            )
        settings = read_json(folder / "preprocessor_config.json")
        tokenizer = read_tokenizer(PreTrainedTokenizerFast, folder)
        files = {name: (folder / name).read_bytes() for name in TOKENIZER_FILES if (folder / name).is_file()}
        style = prompt_style or _prompt_style(folder)
        return cls(PrismaticImageProcessor(**settings), tokenizer, prompt_style=style, files=files)

    def save_pretrained(self, folder: str | Path, **kwargs: Any) -> list[str]:
        """Write the processor's files; tokenizer files that were loaded are written back byte for byte.

        Args:
            folder: created if missing.
            kwargs: accepted for Hugging Face callers and ignored.

        Returns:
            Paths of the files written.
        """
        del kwargs
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        if "tokenizer.json" not in self._files:
            self.tokenizer.save_pretrained(folder)
            path = folder / "tokenizer_config.json"
            settings = json.loads(path.read_text(encoding="utf-8"))
            _write_json(path, {**settings, "tokenizer_class": "PreTrainedTokenizerFast"})
        for name, content in self._files.items():
            (folder / name).write_bytes(content)
        named = {"processor_class": type(self).__name__}
        if "processor_config.json" not in self._files:
            _write_json(folder / "processor_config.json", named)
        _write_json(folder / "preprocessor_config.json", {**self.image_processor.to_dict(), **named})
        return sorted(
            str(folder / name) for name in (*TOKENIZER_FILES, "preprocessor_config.json") if (folder / name).is_file()
        )

    def prompt(self, task: str) -> str:
        """The text a task is asked with, e.g. `In: What action should the robot take to lift?`, new line, `Out:`."""
        return PROMPTS[self.prompt_style].format(task=task.lower())

    def encode(self, tasks: Sequence[str], *, length: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Turn tasks into prompt ids, each ending in exactly one space piece.

        Args:
            tasks: B instructions, e.g. `"reach the red block"`.
            length: L to pad to, so that batches of different tasks can be stored together; None pads to the longest.

        Returns:
            `input_ids` int64 `[B, L]`, padded on the right with the padding token, and `attention_mask` int64
            `[B, L]`, 1 for prompt tokens.

        Raises:
            ValueError: no task, or a prompt longer than `length`.
        """
        if isinstance(tasks, str) or len(tasks) == 0:
            raise ValueError(f"encode takes a list of at least one task, got {tasks!r}")
        prompts = self._tokenize([self.prompt(task) for task in tasks])
        rows = [ids if ids[-1] == self.space_id else [*ids, self.space_id] for ids in prompts]
        longest = max(map(len, rows))
        if length is not None and longest > length:
            raise ValueError(f"length must hold the longest prompt ({longest} tokens), got {length}; raise it")
        return self._pad(rows, longest if length is None else length)

    def __call__(
        self, text: str | Sequence[str], images: Any, return_tensors: str | None = "pt", padding: bool | str = True
    ) -> BatchFeature:
        """The original processor's call: complete prompts and images to model inputs.

        The space piece is not appended here, as in the original (the model appends it where it is missing).

        Args:
            text: one prompt or B prompts, as `prompt` returns them.
            images: one image, B images, or B lists of images.
            return_tensors: `"pt"` or None (both give torch).
            padding: True or `"longest"`; False is accepted where the prompts have one length.

        Returns:
            `input_ids` and `attention_mask` int64 `[B, L]`, `pixel_values` float32 `[B, channels, S, S]`.

        Raises:
            ValueError: the numbers of prompts and images differ, or `padding` is impossible.
        """
        rows = self._tokenize([text] if isinstance(text, str) else list(text))
        pixels = self.image_processor(images, return_tensors=return_tensors)["pixel_values"]
        if len(rows) != len(pixels):
            raise ValueError(
                f"there must be one image (or list of images) per prompt, got {len(rows)} and {len(pixels)}"
            )
        if padding not in (True, "longest") and len({len(row) for row in rows}) > 1:
            raise ValueError(f"prompts of different lengths need padding=True, got padding={padding!r}")
        input_ids, attention_mask = self._pad(rows, max(map(len, rows)))
        return BatchFeature({"input_ids": input_ids, "attention_mask": attention_mask, "pixel_values": pixels})

    def decode(self, ids: Any, **kwargs: Any) -> str:
        """The tokenizer's `decode`."""
        return self.tokenizer.decode(ids, **kwargs)

    def batch_decode(self, ids: Any, **kwargs: Any) -> list[str]:
        """The tokenizer's `batch_decode`."""
        return self.tokenizer.batch_decode(ids, **kwargs)

    @property
    def model_input_names(self) -> list[str]:
        """Names of what `__call__` returns."""
        return ["input_ids", "attention_mask", "pixel_values"]

    def _tokenize(self, texts: Sequence[str]) -> list[list[int]]:
        return self.tokenizer(list(texts), padding=False, truncation=False)["input_ids"]

    def _pad(self, rows: list[list[int]], length: int) -> tuple[torch.Tensor, torch.Tensor]:
        input_ids = torch.full((len(rows), length), self.tokenizer.pad_token_id, dtype=torch.int64)
        attention_mask = torch.zeros((len(rows), length), dtype=torch.int64)
        for i, row in enumerate(rows):
            input_ids[i, : len(row)] = torch.tensor(row)
            attention_mask[i, : len(row)] = 1
        return input_ids, attention_mask


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _prompt_style(folder: Path) -> str:
    path = folder / "config.json"
    backbone = read_json(path).get("llm_backbone_id") if path.is_file() else None
    return "openvla-v01" if str(backbone).startswith("vicuna") else "openvla"
