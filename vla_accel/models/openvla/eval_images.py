"""Image steps of the original LIBERO evaluation, in numpy: camera image -> what the image processor was trained on.

Not here: the image processor itself (`images.py`) and the rotation by 180 degrees, which is the simulator's.
Usage: `center_crop(resize_lanczos3(jpeg_round_trip(image), 224))`, in this order, before `PrismaticImageProcessor`.

The original runs these in TensorFlow. `center_crop` repeats it bit for bit, `resize_lanczos3` up to one level in one
value of 100,000, and `jpeg_round_trip` up to the decoder's rounding: Pillow decodes with the accurate inverse transform
and TensorFlow with the fast one, about one level apart on average.
"""

from __future__ import annotations

import io

import numpy as np
from PIL import Image


def center_crop(image: np.ndarray, area: float = 0.9) -> np.ndarray:
    """Keep the central part of an image and stretch it to the old size.

    For checkpoints that were trained with random crops of this area. Samples bilinearly at
    `offset (H - 1) + i s (H - 1) / (H - 1)` with `s = sqrt(area)`, in float32, and truncates `255.5 v`.

    Args:
        image: uint8 `[H, W, 3]`.
        area: share of the area to keep, in (0, 1].

    Returns:
        uint8 `[H, W, 3]`.

    Raises:
        ValueError: the image is not uint8 `[H, W, 3]`, or `area` is out of range.
    """
    _check(image)
    if not 0.0 < area <= 1.0:
        raise ValueError(f"area must lie in (0, 1], got {area}")
    side = np.sqrt(np.float32(area))
    offset = (np.float32(1.0) - side) / np.float32(2.0)
    pixels = image.astype(np.float32) * np.float32(1.0 / 255.0)
    low, high, weight = _sampling(image.shape[0], offset, side)
    rows_low, rows_high, row_weight = low, high, weight[:, None, None]
    low, high, weight = _sampling(image.shape[1], offset, side)
    weight = weight[None, :, None]
    top = pixels[rows_low][:, low] + (pixels[rows_low][:, high] - pixels[rows_low][:, low]) * weight
    bottom = pixels[rows_high][:, low] + (pixels[rows_high][:, high] - pixels[rows_high][:, low]) * weight
    out = np.clip(top + (bottom - top) * row_weight, 0.0, 1.0)
    return (out * np.float32(255.5)).astype(np.uint8)


def resize_lanczos3(image: np.ndarray, size: int) -> np.ndarray:
    """Resize to `size` x `size` with an antialiased Lanczos kernel of radius 3.

    Unlike Pillow's filter of that name nothing is rounded between the vertical and the horizontal pass; Pillow's
    result differs in about one value of eight, by up to 10 levels.

    Args:
        image: uint8 `[H, W, 3]`.
        size: side of the result in pixels.

    Returns:
        uint8 `[size, size, 3]`.

    Raises:
        ValueError: the image is not uint8 `[H, W, 3]`, or `size` is below 1.
    """
    _check(image)
    if size < 1:
        raise ValueError(f"size must be at least 1 pixel, got {size}")
    out = _filtered(image.astype(np.float32), size)
    out = _filtered(out.transpose(1, 0, 2), size).transpose(1, 0, 2)
    return np.clip(np.round(out), 0, 255).astype(np.uint8)


def jpeg_round_trip(image: np.ndarray, quality: int = 95) -> np.ndarray:
    """Encode as JPEG (chroma halved both ways) and decode again, as the training data sets were stored.

    Args:
        image: uint8 `[H, W, 3]`.
        quality: 1..95.

    Returns:
        uint8 `[H, W, 3]`.

    Raises:
        ValueError: the image is not uint8 `[H, W, 3]`.
    """
    _check(image)
    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, format="JPEG", quality=quality, subsampling=2)
    return np.array(Image.open(buffer))


def _check(image: np.ndarray) -> None:
    if not isinstance(image, np.ndarray) or image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3:
        got = f"{image.dtype} {image.shape}" if isinstance(image, np.ndarray) else type(image).__name__
        raise ValueError(f"an image must be a uint8 array [H, W, 3], got {got}")


def _sampling(length: int, offset: np.float32, side: np.float32) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Lower and upper source index and the upper one's weight for every output position, in float32."""
    last = np.float32(length - 1)
    step = ((offset + side) - offset) * last / np.float32(max(length - 1, 1))
    position = offset * last + np.arange(length, dtype=np.float32) * step
    low = np.floor(position)
    high = np.minimum(np.ceil(position), last)
    return low.astype(np.int64), high.astype(np.int64), position - low


def _filtered(image: np.ndarray, target: int) -> np.ndarray:
    """Resize dimension 0 of a float32 array; the kernel's taps are added one after the other, in float32."""
    index, weights = _lanczos3(len(image), target)
    out = np.zeros((target, *image.shape[1:]), dtype=np.float32)
    for tap in range(index.shape[1]):
        out += weights[:, tap, None, None] * image[index[:, tap]]
    return out


def _lanczos3(source: int, target: int) -> tuple[np.ndarray, np.ndarray]:
    """Source index and weight of every tap of every output pixel, `[target, taps]`, half-pixel centres, all float32."""
    ratio = np.float32(1.0) / (np.float32(target) / np.float32(source))
    stretch = max(ratio, np.float32(1.0))
    center = (np.arange(target) + np.float32(0.5)).astype(np.float32) * ratio
    reach = np.float32(3.0) * stretch
    first = np.maximum(np.ceil(center - reach - np.float32(0.5)), 0).astype(np.int64)
    last = np.minimum(np.floor(center + reach - np.float32(0.5)), source - 1).astype(np.int64)
    index = first[:, None] + np.arange((last - first).max() + 1)
    x = np.abs((index.astype(np.float32) + np.float32(0.5) - center[:, None]) * (np.float32(1.0) / stretch))
    pi, radius = np.float32(np.pi), np.float32(3.0)
    near = x <= np.float32(1e-3)
    square = np.where(near, np.float32(1.0), pi * pi * x * x)
    bell = radius * np.sin(pi * x) * np.sin(pi * x / radius) / square
    weights = np.where(near, np.float32(1.0), np.where((x < radius) & (index <= last[:, None]), bell, np.float32(0.0)))
    total = np.cumsum(weights, axis=1, dtype=np.float32)[:, -1:]
    return np.minimum(index, source - 1), weights * (np.float32(1.0) / total)
