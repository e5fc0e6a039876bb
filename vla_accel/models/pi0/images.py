"""Pixels: frames of any size to the square images in [-1, 1] that the tower reads.

Not here: which camera goes where (`processing.py`).
Usage: `images = to_model(resize_with_pad(frames, 224))`.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def resize_with_pad(images: Tensor, size: int, *, antialias: bool = False) -> Tensor:
    """Fit images into a square, keeping their proportions; the rest is black, one pixel more at the bottom and right.

    Args:
        images: `[N, 3, h, w]`; float in [0, 1], or uint8 with antialiasing.
        size: side of the square.
        antialias: shrink by area as image libraries do (openpi's clients) instead of by point samples (LeRobot).

    Returns:
        `[N, 3, size, size]` in the same dtype.
    """
    height, width = images.shape[-2:]
    if (height, width) == (size, size):
        return images
    ratio = max(width / size, height / size)
    new = (int(height / ratio), int(width / ratio))
    resized = F.interpolate(images, size=new, mode="bilinear", align_corners=False, antialias=antialias)
    if images.is_floating_point():
        resized = resized.clamp(0.0, 1.0)
    top, left = (size - new[0]) // 2, (size - new[1]) // 2
    return F.pad(resized, (left, size - new[1] - left, top, size - new[0] - top))


def to_float(frames: Tensor) -> Tensor:
    """Frames `[N, h, w, 3]` or `[N, 3, h, w]`, uint8 0..255 or float [0, 1], to float32 `[N, 3, h, w]` in [0, 1].

    Raises:
        ValueError: another shape or dtype.
    """
    frames = channels_first(frames)
    if frames.dtype == torch.uint8:
        return frames.float() / 255.0
    if not frames.is_floating_point():
        raise ValueError(f"Images must be uint8 (0..255) or float ([0, 1]), but are {frames.dtype}.")
    return frames.float()


def channels_first(frames: Tensor) -> Tensor:
    """Frames with their three channels last or first to `[N, 3, h, w]`.

    Raises:
        ValueError: neither has three channels.
    """
    if frames.dim() == 4 and frames.shape[1] == 3:
        return frames
    if frames.dim() == 4 and frames.shape[-1] == 3:
        return frames.permute(0, 3, 1, 2)
    raise ValueError(f"Images must be [N, height, width, 3] or [N, 3, height, width], but are {list(frames.shape)}.")


def to_model(images: Tensor) -> Tensor:
    """[0, 1] to the [-1, 1] that the tower reads."""
    return images * 2.0 - 1.0
