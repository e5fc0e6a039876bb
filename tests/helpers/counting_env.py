"""An environment whose every number can be predicted: rewards count the steps, the state names the episode."""

import gymnasium as gym
import numpy as np


class CountingEnv(gym.Env):
    """The reward of step n of an episode is n; the state is `[task_id, state_id, steps done]`.

    Task 0 is solved after `state_id % 10` steps, task 1 never.
    """

    vectorization = "sync"

    def __init__(self):
        self.instructions = ["finish", "go on and on"]
        self.state_ids = {"train": range(100, 200), "eval": range(100)}
        self.max_episode_steps = 5
        self.observation_space = gym.spaces.Dict(
            {
                "images": gym.spaces.Dict({"top": gym.spaces.Box(0, 255, (4, 4, 3), np.uint8)}),
                "state": gym.spaces.Box(-1000.0, 1000.0, (3,), np.float32),
                "task_id": gym.spaces.Discrete(2),
            }
        )
        self.action_space = gym.spaces.Box(-1.0, 1.0, (2,), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.task_id, self.state_id, self.steps = options["task_id"], options["state_id"], 0
        return self._observe(), {"success": False}

    def step(self, action):
        self.steps += 1
        solved = self.task_id == 0 and self.steps == self.state_id % 10
        return self._observe(), float(self.steps), solved, False, {"success": solved}

    def _observe(self):
        return {
            "images": {"top": np.full((4, 4, 3), self.steps, np.uint8)},
            "state": np.array([self.task_id, self.state_id, self.steps], dtype=np.float32),
            "task_id": np.int64(self.task_id),
        }
