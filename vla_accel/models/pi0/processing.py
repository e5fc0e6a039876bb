"""What surrounds a PI0 model: frames, robot state and instruction in; normalised actions back to the robot's units.

Not here: file formats (`files.py`), the arithmetic of pixels (`images.py`) and of scaling (`normalization.py`).
Usage: `inputs = processor.prepare(frames, state, instructions)`, then `processor.model_inputs(inputs)` on the device.

`prepare` keeps frames as uint8 and is what a rollout stores; `model_inputs` makes floats of them where the model is.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from vla_accel.models.pi0.configuration import ACTION_KEY, IMAGE_PREFIX, STATE_KEY, Pi0Config
from vla_accel.models.pi0.files import Pipelines, Statistics, find_norm_stats, read_norm_stats, read_pipelines
from vla_accel.models.pi0.files import write_pipelines as _write_pipelines
from vla_accel.models.pi0.images import channels_first, resize_with_pad, to_float, to_model
from vla_accel.models.pi0.normalization import Scaler
from vla_accel.models.reading import read_tokenizer

IMAGE_KEY = "image."


class Pi0Processor:
    """Turns observations into model inputs and model outputs into actions.

    Args:
        config: of the model.
        tokenizer: a transformers tokenizer that puts its begin token in front and no end token behind.
        pipelines: statistics and what else LeRobot's files say.
        constant_dims: of `Scaler`.

    Attributes:
        state_scaler: of the robot state; None without statistics.
        action_scaler: of actions; None without statistics.

    Raises:
        ValueError: statistics that do not fit the model, or a tokenizer with ids that the model has no rows for.
    """

    def __init__(
        self, config: Pi0Config, tokenizer: Any, *, pipelines: Pipelines | None = None, constant_dims: str = "error"
    ):
        self.config, self.tokenizer = config, tokenizer
        self.pipelines = pipelines or Pipelines()
        self.norm_map = dict(self.pipelines.norm_map or config.normalization_mapping)
        if self.norm_map.get("VISUAL", "IDENTITY") != "IDENTITY":
            raise ValueError(f"norm_map: VISUAL must be IDENTITY for PI0, but is {self.norm_map['VISUAL']!r}.")
        self.max_length = self.pipelines.max_length or config.tokenizer_max_length
        self.state_scaler = self._scaler("STATE", STATE_KEY, config.state_dim, constant_dims)
        self.action_scaler = self._scaler("ACTION", ACTION_KEY, config.action_dim, constant_dims)
        # Tokens added later, such as PaliGemma's `<image>`, may lie beyond the model's rows; no prompt has them.
        if tokenizer is not None and tokenizer.vocab_size > config.vocab_size:
            raise ValueError(_foreign(tokenizer.vocab_size, config.vocab_size))

    def _scaler(self, kind: str, key: str, dim: int, constant_dims: str) -> Scaler | None:
        mode, stats = self.norm_map.get(kind, "IDENTITY"), self.pipelines.statistics.get(key)
        if stats is None and mode != "IDENTITY":
            return None
        options = {"rule": self.config.norm_rule, "eps": self.pipelines.eps, "constant_dims": constant_dims}
        scaler = Scaler(mode, stats or {}, name=key, **options)
        if scaler.dim not in (None, dim):
            raise ValueError(
                f"The statistics of {key} have {scaler.dim} entries, but the checkpoint's feature has {dim}."
            )
        return scaler

    def check_statistics(self) -> None:
        """Raise a `ValueError` unless states and actions can be scaled."""
        if self.action_scaler is None or self.state_scaler is None:
            raise ValueError(
                "The checkpoint has no statistics of state and actions, so its actions have no units. Choose one that "
                "was trained on a robot; a base model must be fine-tuned first."
            )

    @property
    def statistics(self) -> Statistics:
        """Feature -> statistic -> float32 `[dim]`."""
        return self.pipelines.statistics

    def normalize_state(self, state: Any) -> Tensor:
        """Normalise a robot state `[N, state_dim]` and pad it with zeros: float32 `[N, max_state_dim]`."""
        state = torch.as_tensor(np.asarray(state) if not isinstance(state, Tensor) else state).float()
        dim, padded = self.config.state_dim, self.config.max_state_dim
        if state.shape[-1] != dim:
            raise ValueError(f"{STATE_KEY} must have {dim} entries as in the checkpoint, but has {state.shape[-1]}.")
        return F.pad(_need(self.state_scaler, STATE_KEY).forward(state), (0, padded - dim))

    def normalize_actions(self, actions: Tensor) -> Tensor:
        """Normalise actions `[..., action_dim]` and pad them with zeros: float32 `[..., max_action_dim]`."""
        scaled = _need(self.action_scaler, ACTION_KEY).forward(actions.float())
        return F.pad(scaled, (0, self.config.max_action_dim - actions.shape[-1]))

    def unnormalize_actions(self, actions: Tensor) -> Tensor:
        """Model actions `[..., max_action_dim]` to robot units: float32 `[..., action_dim]`."""
        return _need(self.action_scaler, ACTION_KEY).inverse(actions[..., : self.config.action_dim].float())

    def prompts(self, instructions: list[str], state: Tensor) -> list[str]:
        """Write the prompts.

        Args:
            instructions: N strings.
            state: normalised `[N, >= state_dim]`; read where the state is part of the prompt.
        """
        if self.config.clean_prompt or self.config.variant == "pi05":
            instructions = [text.strip().replace("_", " ").replace("\n", " ") for text in instructions]
        if self.config.variant == "pi05" and self.config.state_in_prompt:
            bins = np.linspace(-1, 1, 257)[:-1]
            levels = np.digitize(state[:, : self.config.state_dim].cpu().numpy(), bins=bins) - 1
            return [
                f"Task: {text}, State: {' '.join(map(str, row))};\nAction: "
                for text, row in zip(instructions, levels, strict=True)
            ]
        return [text if text.endswith("\n") else text + "\n" for text in instructions]

    def tokenize(self, prompts: list[str]) -> tuple[Tensor, Tensor]:
        """Prompts to ids: int64 `[N, L]`, padded right with the pad id, and bool `[N, L]`, True = a real token."""
        if self.tokenizer is None:
            raise ValueError("This processor has no tokenizer: load it with tokenizer=<local folder>.")
        rows = self.tokenizer(prompts, add_special_tokens=True, padding=False)["input_ids"]
        if (highest := max(map(max, rows))) >= self.config.vocab_size:
            raise ValueError(_foreign(highest + 1, self.config.vocab_size))
        longest = max(len(row) for row in rows)
        if longest > self.max_length:
            warnings.warn(
                f"A prompt has {longest} tokens and is cut to the checkpoint's tokenizer_max_length of "
                f"{self.max_length}.",
                stacklevel=2,
            )
        tokens = torch.full((len(rows), self.max_length), self.tokenizer.pad_token_id or 0, dtype=torch.int64)
        mask = torch.zeros(len(rows), self.max_length, dtype=torch.bool)
        for index, row in enumerate(rows):
            row = row[: self.max_length]
            tokens[index, : len(row)] = torch.tensor(row)
            mask[index, : len(row)] = True
        return tokens, mask

    def prepare(self, frames: dict[str, Any], state: Any, instructions: list[str]) -> dict[str, Tensor]:
        """Turn N observations into compact tensors, on the CPU and always the same way.

        Args:
            frames: camera of `config.cameras` (with or without `observation.images.`, or a name of the checkpoint's
                rename map) -> uint8 or float [0, 1], `[N, h, w, 3]` or `[N, 3, h, w]`. Absent cameras are masked.
            state: `[N, state_dim]` in the robot's units.
            instructions: N strings.

        Returns:
            `image.<camera>` `[N, 3, h, w]` for each camera given, `tokens` int64 `[N, L]`, `token_mask` bool `[N, L]`
            and `state` float32 `[N, max_state_dim]`, normalised.
        """
        inputs = {IMAGE_KEY + self._camera(name): self._frame(frame) for name, frame in frames.items()}
        if not inputs:
            raise ValueError(f"No camera was given; the checkpoint knows {', '.join(self.config.cameras)}.")
        scaled = self.normalize_state(state)
        tokens, mask = self.tokenize(self.prompts(list(instructions), scaled))
        return {**inputs, "tokens": tokens, "token_mask": mask, "state": scaled}

    def camera_of(self, name: str) -> str | None:
        """The checkpoint's name of a camera that is called by it or by a name of its rename map; None for others."""
        name = self.pipelines.rename_map.get(IMAGE_PREFIX + name, self.pipelines.rename_map.get(name, name))
        name = name.removeprefix(IMAGE_PREFIX)
        return name if name in self.config.cameras else None

    def _camera(self, name: str) -> str:
        if (known := self.camera_of(name)) is None:
            raise ValueError(f"Camera must be one of {', '.join(self.config.cameras)}, but is {name!r}.")
        return known

    def _frame(self, frame: Any) -> Tensor:
        frame = channels_first(torch.as_tensor(frame)).clone(
            memory_format=torch.contiguous_format
        )  # not the simulator's
        if self.config.image_resize == "bilinear":
            return frame
        if frame.dtype != torch.uint8:
            frame = (frame.float() * 255).round().clamp(0, 255).to(torch.uint8)
        return resize_with_pad(frame, self.config.image_size, antialias=True)

    def model_inputs(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """Finish what `prepare` began, on the tensors' device.

        Returns:
            `images` float32 `[N, C, 3, P, P]` in [-1, 1], `image_mask` bool `[N, C]`, `tokens`, `token_mask`, `state`:
            the arguments of `Pi0Model.prefix_cache` and `sample_actions`.
        """
        size, state = self.config.image_size, inputs["state"]
        count, device = len(state), state.device
        images, present = [], []
        for camera in self.config.cameras:
            frame = inputs.get(IMAGE_KEY + camera)
            present.append(frame is not None)
            if frame is None:
                images.append(torch.full((count, 3, size, size), -1.0, device=device))
            else:
                images.append(to_model(resize_with_pad(to_float(frame), size)))
        return {
            "images": torch.stack(images, 1),
            "image_mask": torch.tensor(present, device=device).expand(count, -1),
            **{key: inputs[key] for key in ("tokens", "token_mask", "state")},
        }

    def save_pretrained(self, save_directory: str | Path) -> None:
        """Write LeRobot's pipeline files, the statistics and a `tokenizer/` folder."""
        folder = Path(save_directory)
        folder.mkdir(parents=True, exist_ok=True)
        _write_pipelines(folder, self.config, self.pipelines)
        if self.tokenizer is not None:
            self.tokenizer.save_pretrained(folder / "tokenizer")

    @classmethod
    def from_pretrained(
        cls,
        folder: str | Path,
        *,
        config: Pi0Config,
        tokenizer: Any = None,
        statistics: Statistics | None = None,
        asset_id: str | None = None,
        constant_dims: str = "error",
    ) -> Pi0Processor:
        """Read the files beside a checkpoint.

        Args:
            folder: of the checkpoint.
            config: of the model.
            tokenizer: a tokenizer, a folder with one, or a hub name. None: `tokenizer/` of the folder, or the folder.
            statistics: feature -> statistic -> `[dim]`, instead of the checkpoint's.
            asset_id: openpi only, which of several statistics.
            constant_dims: of `Scaler`.
        """
        folder = Path(folder)
        pipelines = read_pipelines(folder)
        found = find_norm_stats(folder, asset_id)
        if found is not None and not pipelines.statistics:
            pipelines.statistics = read_norm_stats(found[1])
        if statistics is not None:
            pipelines.statistics = {
                feature: {name: torch.as_tensor(value).float() for name, value in stats.items()}
                for feature, stats in statistics.items()
            }
        return cls(
            config,
            load_tokenizer(folder, tokenizer, pipelines.tokenizer_name),
            pipelines=pipelines,
            constant_dims=constant_dims,
        )


def load_tokenizer(folder: Path, tokenizer: Any, name: str) -> Any:
    """Find a tokenizer: the one given, or one that lies in the checkpoint's folder.

    The network is only asked for a hub name that the caller gave.

    Raises:
        ValueError: there is none that can be read.
    """
    from transformers import AutoTokenizer

    if tokenizer is not None and not isinstance(tokenizer, (str, Path)):
        return tokenizer
    for candidate in (folder / "tokenizer", folder) if tokenizer is None else (Path(tokenizer),):
        if any((candidate / file).is_file() for file in ("tokenizer.json", "tokenizer.model")):
            return read_tokenizer(AutoTokenizer, candidate)
    if tokenizer is not None and not Path(tokenizer).exists() and str(tokenizer).count("/") == 1:
        try:
            return AutoTokenizer.from_pretrained(str(tokenizer), trust_remote_code=False)
        except Exception as error:  # the hub's clients raise many kinds
            raise ValueError(
                "--policy.tokenizer (tokenizer=) must be a folder with a tokenizer or a hub name that can be loaded, "
                f"but is {str(tokenizer)!r} ({type(error).__name__}). Download it and give its folder."
            ) from error
    where = "tokenizer/" if tokenizer is None else repr(str(tokenizer))
    raise ValueError(
        f"The checkpoint {folder.name} needs a tokenizer ({name}), but there is no tokenizer.json or tokenizer.model "
        f"in {where}. Copy it into a tokenizer/ folder beside the weights or pass tokenizer=<folder or hub name> "
        "(--policy.tokenizer)."
    )


def _foreign(count: int, rows: int) -> str:
    return f"The tokenizer has {count} tokens, but the model has rows for {rows}: it belongs to another checkpoint."


def _need(scaler: Scaler | None, key: str) -> Scaler:
    if scaler is None:
        raise ValueError(
            f"The checkpoint has no statistics of {key} (a base model has none): pass statistics= of the data at hand."
        )
    return scaler
