"""Camera images to OpenVLA's pixel values: the original image processor's numbers, with Pillow and torch only.

Not here: text (`processing.py`) and the camera steps of the LIBERO evaluation (`eval_images.py`).
Usage: `PrismaticImageProcessor(True, ...)`; `resize(images)` while collecting, `normalize(uint8)` on the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import BatchFeature
from transformers.image_processing_utils import BaseImageProcessor

RESIZE_STRATEGIES = ("resize-naive", "resize-crop", "letterbox")
INTERPOLATIONS = {
    "nearest": Image.Resampling.NEAREST,
    "bilinear": Image.Resampling.BILINEAR,
    "bicubic": Image.Resampling.BICUBIC,
    "lanczos": Image.Resampling.LANCZOS,
}


class PrismaticImageProcessor(BaseImageProcessor):
    """Images to pixel values, equal to the original processor's bit for bit, with Pillow and torch.

    Works in two stages, so that images can be stored as bytes: `resize` (Pillow, CPU) and `normalize` (torch, any
    device). `__call__` is both.

    Args:
        use_fused_vision_backbone: two vision towers, each with its own three channels of `pixel_values`.
        image_resize_strategy: `"resize-naive"` (squeeze to a square), `"resize-crop"` (shorter side, centre crop) or
            `"letterbox"` (pad to a square).
        input_sizes: `(3, S, S)` of each tower.
        interpolations: Pillow filter of each tower.
        means: channel means of each tower, on a scale of 0..1.
        stds: channel standard deviations of each tower.
        kwargs: other entries of preprocessor_config.json, kept and written back; the derived `tvf_*` entries are
            recomputed.

    Raises:
        ValueError: unknown strategy or interpolation, towers of different sizes, or lists of different lengths.
    """

    model_input_names = ["pixel_values"]

    def __init__(
        self,
        use_fused_vision_backbone: bool = False,
        *,
        image_resize_strategy: str = "letterbox",
        input_sizes: Sequence[Sequence[int]] | None = None,
        interpolations: Sequence[str] | None = None,
        means: Sequence[Sequence[float]] | None = None,
        stds: Sequence[Sequence[float]] | None = None,
        **kwargs: Any,
    ):
        super().__init__(
            **{k: v for k, v in kwargs.items() if not k.startswith("tvf_") and k != "image_processor_type"}
        )
        self.use_fused_vision_backbone = use_fused_vision_backbone
        self.image_resize_strategy = image_resize_strategy
        self.input_sizes = [list(size) for size in (((3, 224, 224),) if input_sizes is None else input_sizes)]
        self.interpolations = list(["bicubic"] * self.num_backbones if interpolations is None else interpolations)
        self.means = [list(mean) for mean in (((0.5,) * 3,) * self.num_backbones if means is None else means)]
        self.stds = [list(std) for std in (((0.5,) * 3,) * self.num_backbones if stds is None else stds)]
        self._check()

    def _check(self) -> None:
        if self.image_resize_strategy not in RESIZE_STRATEGIES:
            raise ValueError(
                f"image_resize_strategy must be one of {', '.join(RESIZE_STRATEGIES)}, "
                f"got {self.image_resize_strategy!r}"
            )
        lengths = {len(x) for x in (self.input_sizes, self.interpolations, self.means, self.stds)}
        if lengths != {2 if self.use_fused_vision_backbone else 1}:
            raise ValueError(
                "input_sizes, interpolations, means and stds must have one entry per vision tower "
                f"(use_fused_vision_backbone={self.use_fused_vision_backbone}), got lengths {sorted(lengths)}"
            )
        if (
            any(size != [3, size[-1], size[-1]] for size in self.input_sizes)
            or len({s[-1] for s in self.input_sizes}) > 1
        ):
            raise ValueError(f"input_sizes must be (3, S, S) with one S for all towers, got {self.input_sizes}")
        for name in self.interpolations:
            if name not in INTERPOLATIONS:
                raise ValueError(f"interpolations must be among {', '.join(INTERPOLATIONS)}, got {name!r}")

    @property
    def num_backbones(self) -> int:
        """Number of vision towers."""
        return len(self.input_sizes)

    @property
    def size(self) -> int:
        """S, the side of the model's images in pixels."""
        return self.input_sizes[0][-1]

    def resize(self, images: Sequence[Image.Image | np.ndarray] | np.ndarray) -> torch.Tensor:
        """First stage: bring images to the model's size.

        Args:
            images: N images, uint8 arrays `[H, W, 3]` (or `[N, H, W, 3]`) or Pillow images of any mode. Transparency
                is dropped, grey becomes RGB.

        Returns:
            uint8 `[N, 3, S, S]`, shared by all towers; `[N, 3 * num_backbones, S, S]` where the towers interpolate
            differently. On the CPU.

        Raises:
            ValueError: no image, or one that is no picture of bytes.
        """
        if len(images) == 0:
            raise ValueError("resize needs at least one image, got none")
        filters = list(dict.fromkeys(self.interpolations)) if self._one_filter else self.interpolations
        rows = []
        for image in images:
            picture = _to_rgb(image)
            if self.image_resize_strategy == "letterbox":
                picture = _letterbox(picture, self._letterbox_fill)
            rows.append(np.concatenate([self._fit(picture, INTERPOLATIONS[name]) for name in filters], axis=-1))
        return torch.from_numpy(np.stack(rows)).permute(0, 3, 1, 2).contiguous()

    def normalize(self, images: torch.Tensor) -> torch.Tensor:
        """Second stage: bytes to pixel values, `(x / 255 - mean) / std` for each tower, in float32.

        Args:
            images: uint8 `[..., 3, S, S]` as `resize` returned (or with `3 * num_backbones` channels), any device.

        Returns:
            float32 `[..., 3 * num_backbones, S, S]`, towers in order (DINOv2, then SigLIP), same device.

        Raises:
            ValueError: not uint8, or another number of channels.
        """
        channels = 3 * self.num_backbones
        if images.dtype != torch.uint8 or images.ndim < 3 or images.shape[-3] not in (3, channels):
            raise ValueError(
                f"normalize takes uint8 [..., 3 or {channels}, S, S] as resize returns it, "
                f"got {images.dtype} {tuple(images.shape)}"
            )
        mean, std = (
            torch.tensor(x, dtype=torch.float32, device=images.device).view(self.num_backbones * 3, 1, 1)
            for x in (self.means, self.stds)
        )
        pixels = images.to(torch.float32).div_(255)
        if pixels.shape[-3] != channels:
            pixels = torch.cat([pixels] * self.num_backbones, dim=-3)
        return pixels.sub_(mean).div_(std)

    def preprocess(self, images: Any, return_tensors: str | None = "pt", **kwargs: Any) -> BatchFeature:
        """Turn images into `pixel_values`, both stages in one.

        Args:
            images: one image, a list of B images, or a list of B lists of `n` images each (several cameras), whose
                pixel values are concatenated on the channels.
            return_tensors: `"pt"` or None (both give torch), as Hugging Face processors take it.
            kwargs: refused: this processor has no per-call options.

        Returns:
            `{"pixel_values": float32 [B, n * 3 * num_backbones, S, S]}`.

        Raises:
            ValueError: unequal numbers of images, an unknown option, or tensors of another framework.
        """
        if kwargs:
            raise ValueError(f"PrismaticImageProcessor has no per-call options, got {', '.join(sorted(kwargs))}")
        if return_tensors not in ("pt", None):
            raise ValueError(f"return_tensors must be 'pt' or None, got {return_tensors!r}")
        rows = _as_rows(images)
        if len({len(row) for row in rows}) > 1:
            raise ValueError(f"every row needs the same number of images, got {sorted({len(row) for row in rows})}")
        pixels = self.normalize(self.resize([image for row in rows for image in row]))
        return BatchFeature({"pixel_values": pixels.unflatten(0, (len(rows), -1)).flatten(1, 2)})

    def to_dict(self) -> dict[str, Any]:
        """What preprocessor_config.json holds, the original's derived `tvf_*` entries included."""
        naive = self.image_resize_strategy == "resize-naive"
        derived = {
            "tvf_resize_params": [
                {
                    "antialias": True,
                    "interpolation": int(INTERPOLATIONS[name]),
                    "max_size": None,
                    "size": [self.size, self.size] if naive else self.size,
                }
                for name in self.interpolations
            ],
            "tvf_crop_params": [{"output_size": size[1:]} for size in self.input_sizes],
            "tvf_normalize_params": [
                {"inplace": False, "mean": np.float32(mean).tolist(), "std": np.float32(std).tolist()}
                for mean, std in zip(self.means, self.stds, strict=True)
            ],
            "tvf_do_letterbox": self.image_resize_strategy == "letterbox",
            "tvf_letterbox_fill": list(self._letterbox_fill) if self.image_resize_strategy == "letterbox" else None,
        }
        return {**super().to_dict(), **derived}

    @property
    def _one_filter(self) -> bool:
        return len(set(self.interpolations)) == 1

    @property
    def _letterbox_fill(self) -> tuple[int, ...]:
        """Grey level of the padding: the last tower's mean, for all towers, as in the original."""
        return tuple(int(x * 255) for x in self.means[-1])

    def _fit(self, picture: Image.Image, resample: Image.Resampling) -> np.ndarray:
        """Resize and crop one RGB picture to uint8 `[S, S, 3]`."""
        side, (width, height) = self.size, picture.size
        if self.image_resize_strategy == "resize-naive":
            target = (side, side)
        elif width <= height:
            target = (side, int(side * height / width))
        else:
            target = (int(side * width / height), side)
        if target != picture.size:
            picture = picture.resize(target, resample)
        left, top = (round((length - side) / 2.0) for length in target)
        return np.asarray(picture)[top : top + side, left : left + side]


def _to_rgb(image: Image.Image | np.ndarray) -> Image.Image:
    if isinstance(image, Image.Image):
        return image.convert("RGB")
    if not isinstance(image, np.ndarray) or image.dtype != np.uint8 or image.ndim != 3 or image.shape[-1] != 3:
        got = f"{image.dtype} {image.shape}" if isinstance(image, np.ndarray) else type(image).__name__
        raise ValueError(f"an image must be a uint8 array [H, W, 3] with values 0..255, or a Pillow image; got {got}")
    return Image.fromarray(image)


def _letterbox(picture: Image.Image, fill: tuple[int, ...]) -> Image.Image:
    """Pad to a square, rounding the margins down: an odd difference leaves one pixel, as in the original."""
    width, height = picture.size
    side = max(width, height)
    left, top = (side - width) // 2, (side - height) // 2
    padded = Image.new("RGB", (width + 2 * left, height + 2 * top), fill)
    padded.paste(picture, (left, top))
    return padded


def _as_rows(images: Any) -> list[list[Any]]:
    """One image, B images or B lists of images, as B lists."""
    if isinstance(images, Image.Image) or (isinstance(images, np.ndarray) and images.ndim == 3):
        return [[images]]
    return [list(row) if isinstance(row, (list, tuple)) else [row] for row in images]
