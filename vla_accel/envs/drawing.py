"""A small software renderer: shaded boxes on a table, seen through a pinhole camera, drawn with Pillow polygons.

Not here: physics, tasks, or anything that knows what the boxes are.
Usage: `draw(Camera.look_at(eye, target, fov=50), size, table=Table(...), shadows=[...], boxes=[...])`.

Frame: x forward (away from the viewer of the front camera), y left, z up, metres; the table top is the plane z = 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageDraw

Color = tuple[int, int, int]
_FLOOR: Color = (58, 62, 72)
_OVERSAMPLED = 160  # images up to this side are drawn at twice the size, for smooth edges


@dataclass(frozen=True)
class Camera:
    """A pinhole camera.

    Attributes:
        eye: float64 `[3]`, position, metres.
        axes: float64 `[3, 3]`, rows right, down, forward: unit vectors in the world frame.
        zoom: cotangent of half the field of view.
    """

    eye: np.ndarray
    axes: np.ndarray
    zoom: float

    @classmethod
    def look_at(cls, eye: Sequence[float], target: Sequence[float], *, fov: float) -> Camera:
        """A camera at `eye` that looks at `target`, upright, with a field of view of `fov` degrees."""
        eye = np.asarray(eye, dtype=np.float64)
        forward = np.asarray(target) - eye
        forward = forward / np.linalg.norm(forward)
        right = np.cross(forward, (0.0, 0.0, 1.0))
        right = right / np.linalg.norm(right)
        return cls(eye, np.stack([right, np.cross(forward, right), forward]), 1 / math.tan(math.radians(fov) / 2))

    @classmethod
    def look_down(cls, eye: Sequence[float], *, fov: float) -> Camera:
        """A camera at `eye` that looks straight down: up in the image is +x, left is +y."""
        axes = np.array([(0.0, -1.0, 0.0), (-1.0, 0.0, 0.0), (0.0, 0.0, -1.0)])
        return cls(np.asarray(eye, dtype=np.float64), axes, 1 / math.tan(math.radians(fov) / 2))

    def project(self, points: np.ndarray, size: int) -> np.ndarray:
        """Map world points `[V, 3]` in front of the camera to pixel coordinates `[V, 2]` of a `size` x `size` image."""
        local = (points - self.eye) @ self.axes.T
        return (local[:, :2] * (self.zoom / local[:, 2:]) + 1) * (size / 2)


@dataclass(frozen=True)
class Table:
    """A square table top, centred at the origin.

    Attributes:
        half: half its side, metres.
        color: of the top.
        grooves: x positions of thin darker lines across the table, metres.
    """

    half: float
    color: Color
    grooves: tuple[float, ...]


@dataclass(frozen=True)
class Box:
    """A box that stands upright.

    Attributes:
        center: x, y, z, metres.
        half: half of its sides along its own axes, metres.
        yaw: rotation about z, radians.
        color: of its top; the sides are darker.
    """

    center: tuple[float, float, float]
    half: tuple[float, float, float]
    yaw: float
    color: Color


_CORNERS = np.array([(x, y, z) for z in (-1, 1) for x, y in ((1, 1), (-1, 1), (-1, -1), (1, -1))], dtype=np.float64)
# Corner indices of each face, its outward normal in the box's frame, and its brightness.
_FACES = (
    ((4, 5, 6, 7), (0, 0, 1), 1.0),
    ((0, 1, 5, 4), (0, 1, 0), 0.72),
    ((1, 2, 6, 5), (-1, 0, 0), 0.82),
    ((2, 3, 7, 6), (0, -1, 0), 0.62),
    ((3, 0, 4, 7), (1, 0, 0), 0.55),
)


def draw(
    camera: Camera,
    size: int,
    *,
    table: Table,
    shadows: Sequence[tuple[np.ndarray, float]],
    boxes: Sequence[Box],
    light: float = 1.0,
) -> np.ndarray:
    """Draw a scene, far things first.

    Args:
        camera: from where.
        size: P, side of the image in pixels.
        table: the table top.
        shadows: outlines `[4, 2]` on the table (metres), each with its brightness, 1 for no shadow.
        boxes: what stands on or above the table.
        light: factor on all brightness.

    Returns:
        A new uint8 array `[P, P, 3]`, RGB.
    """
    scale = 2 if size <= _OVERSAMPLED else 1
    boxes = sorted(boxes, key=lambda box: -math.dist(box.center, camera.eye))
    ground = _ground_outlines(table, shadows)
    corners = [_corners(box) for box in boxes]
    pixels = camera.project(np.concatenate(ground + corners), size * scale)
    flat = [tuple(point) for point in pixels.tolist()]
    image = Image.new("RGB", (size * scale, size * scale), _shade(_FLOOR, light))
    pen = ImageDraw.Draw(image)
    tones = [1.0] + [0.9] * len(table.grooves) + [tone for _, tone in shadows]
    for index, tone in enumerate(tones):
        pen.polygon(flat[4 * index : 4 * index + 4], fill=_shade(table.color, light * tone))
    start = 4 * len(tones)
    for box in boxes:
        _draw_box(pen, box, flat[start : start + 8], camera, light)
        start += 8
    return np.array(image.reduce(scale) if scale > 1 else image)


def _draw_box(pen: ImageDraw.ImageDraw, box: Box, corners: list[tuple[float, float]], camera: Camera, light: float):
    """Draw the faces that point at the camera; of a convex body these never hide one another."""
    ex, ey, ez = camera.eye.tolist()
    cos, sin = math.cos(box.yaw), math.sin(box.yaw)
    dx, dy, dz = ex - box.center[0], ey - box.center[1], ez - box.center[2]
    view = (cos * dx + sin * dy, cos * dy - sin * dx, dz)
    for face, normal, tone in _FACES:
        toward = sum(n * (v - n * h) for n, v, h in zip(normal, view, box.half, strict=True))
        if toward > 0:
            pen.polygon([corners[index] for index in face], fill=_shade(box.color, light * tone))


def _corners(box: Box) -> np.ndarray:
    """Corners `[8, 3]` of a box: the lower four, then the upper four."""
    local = _CORNERS * box.half
    if box.yaw:
        cos, sin = math.cos(box.yaw), math.sin(box.yaw)
        local[:, :2] = local[:, :2] @ np.array([(cos, sin), (-sin, cos)])
    return local + box.center


def _ground_outlines(table: Table, shadows: Sequence[tuple[np.ndarray, float]]) -> list[np.ndarray]:
    """Outlines `[4, 3]` on the plane z = 0, in drawing order: table, grooves, shadows."""
    half, thin = table.half, 0.0015
    rectangles = [(-half, half)] + [(x - thin, x + thin) for x in table.grooves]
    outlines = [np.array([(a, -half, 0), (b, -half, 0), (b, half, 0), (a, half, 0)]) for a, b in rectangles]
    outlines += [np.concatenate([outline, np.zeros((4, 1))], axis=1) for outline, _ in shadows]
    return outlines


def _shade(color: Color, tone: float) -> Color:
    return tuple(min(255, int(channel * tone + 0.5)) for channel in color)
