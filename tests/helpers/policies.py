"""Policies that need no model: one whose numbers can be predicted, and one that solves the tabletop by eye."""

import numpy as np
import torch

from vla_accel.envs.tabletop import COLORS
from vla_accel.policies.base import Policy
from vla_accel.types import PolicySample

HALF_VIEW = np.tan(np.radians(33.0))
"""Of the tabletop's wrist camera: half its picture's width, at distance 1."""


class CountingPolicy(Policy):
    """For `CountingEnv`: the value of an observation is `100 * state_id + steps`; each forward is counted."""

    action_dim = 2

    def __init__(self, chunk_size):
        super().__init__()
        self.chunk_size = chunk_size
        self.calls = 0
        self.register_buffer("unit_step", torch.arange(chunk_size).repeat_interleave(2), persistent=False)

    def prepare(self, obs):
        return {"state": torch.from_numpy(obs.state)}

    def forward(self, inputs, trace=None, *, greedy=False):
        self.calls += 1
        state = inputs["state"]
        return PolicySample(
            action=torch.zeros(len(state), self.chunk_size, 2),
            trace={"call": torch.full((len(state),), self.calls)},
            log_prob=torch.full((len(state), 2 * self.chunk_size), -1.0),
            value=100.0 * state[:, 1] + state[:, 2],
        )


class ColorSeeker(Policy):
    """Steers towards the pixels of the colour that the instruction names; stands still where it sees none.

    Deterministic, and each row depends on its own observation only.
    """

    action_dim = 7
    chunk_size = 1

    def __init__(self):
        super().__init__()
        self.seen = []
        self.register_buffer("unit_step", torch.zeros(7, dtype=torch.int64), persistent=False)

    def prepare(self, obs):
        self.seen.append(obs)
        error = [self._error(*row) for row in zip(obs.images["wrist"], obs.state, obs.instructions, strict=True)]
        return {"error": torch.tensor(np.array(error), dtype=torch.float32)}

    def forward(self, inputs, trace=None, *, greedy=False):
        assert greedy
        error = inputs["error"]
        action = torch.zeros(len(error), 1, 7)
        action[:, 0, :3] = (error / 0.05).clamp(-1.0, 1.0)
        return PolicySample(action=action, trace={}, log_prob=torch.zeros(len(error), 7), value=torch.zeros(len(error)))

    @staticmethod
    def _error(image, state, instruction):
        """Metres to go in x, y and z."""
        wanted = [np.array(rgb) for color, rgb in COLORS.items() if color in instruction.split()]
        if not wanted:
            return 0.0, 0.0, 0.0
        hue = image / np.maximum(image.sum(-1, keepdims=True, dtype=np.float64), 1.0)
        rows, columns = np.nonzero(np.abs(hue - wanted[0] / wanted[0].sum()).sum(-1) < 0.12)
        if len(rows) == 0:
            return 0.0, 0.0, 0.0
        scale = HALF_VIEW * (state[2] + 0.2) / (len(image) / 2)
        x, y = (len(image) / 2 - rows.mean()) * scale, (len(image) / 2 - columns.mean()) * scale
        return x, y, 0.02 - state[2] if np.hypot(x, y) < 0.03 else 0.0
