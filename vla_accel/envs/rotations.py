"""Rotations as the simulators' robot states have them.

Not here: which entries of a state they are; each simulator says so.
Usage: `axis_angle(np.array([0.0, 0.0, 0.0, 1.0]))`.
"""

from __future__ import annotations

import math

import numpy as np


def axis_angle(quaternion: np.ndarray) -> np.ndarray:
    """A rotation as axis times angle, `[3]`, from a quaternion x, y, z, w; no choice between q and -q is made."""
    w = float(np.clip(quaternion[3], -1.0, 1.0))
    sine = math.sqrt(1.0 - w * w)
    if math.isclose(sine, 0.0):
        return np.zeros(3)
    return np.asarray(quaternion[:3]) * (2.0 * math.acos(w) / sine)
