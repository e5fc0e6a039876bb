"""Simulators behind one contract, and how to run many of them; see `base.py`.

Importing this imports no simulator.
"""

from vla_accel.envs.base import (
    ActionChunk,
    EpisodeQueue,
    StepInfo,
    check_env,
    read_idle,
    read_step,
    stack_final,
    to_observation,
)
from vla_accel.envs.jobs import deal, evaluation_jobs, training_jobs
from vla_accel.envs.make import make_env, make_vector_env

__all__ = [
    "ActionChunk",
    "EpisodeQueue",
    "StepInfo",
    "check_env",
    "deal",
    "evaluation_jobs",
    "make_env",
    "make_vector_env",
    "read_idle",
    "read_step",
    "stack_final",
    "to_observation",
    "training_jobs",
]
