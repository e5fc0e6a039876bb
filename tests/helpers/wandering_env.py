"""A tabletop whose outcomes differ for any policy that moves, trained or not."""

import math

from vla_accel.envs.tabletop import Tabletop


class Wandering(Tabletop):
    """Ends 6 to 24 cm away from the start; solved on one side of it, which depends on the initial state.

    Args:
        reward: of a solved task.
        **options: of the tabletop.
    """

    def __init__(self, *, reward: float = 1.0, **options):
        super().__init__(**options)
        self.reward = reward

    def reset(self, **options):
        obs, info = super().reset(**options)
        self.start, self.state_id = list(self.world.tip), options["options"]["state_id"]
        return obs, info

    def step(self, action):
        obs, *_ = super().step(action)
        over = math.dist(self.start, self.world.tip) > 0.06 * (1 + self.state_id % 4)
        solved = over and (self.world.tip[0] > self.start[0]) == (self.state_id % 2 == 0)
        self._running = True
        return obs, self.reward * solved, over, False, {"success": solved}
