"""What a family of policies wants of a simulator: conventions that belong to how its checkpoints were trained.

Not here: the conventions themselves, which are options of the simulators.
Usage: `config.env = for_model(config.env, "openvla")` before anything is built.
"""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

from vla_accel.config import EnvConfig
from vla_accel.envs.make import find_factory

OPTIONS: dict[str, dict[str, str]] = {
    "openvla": {"gripper": "openvla"},
    "openvla-oft": {"gripper": "openvla"},
}
"""Model name -> options that a simulator gets where it has them and the user does not say otherwise.

OpenVLA's checkpoints say 1 for an open gripper and 0 for a closed one; PI0's speak as the simulators do.
"""


def for_model(config: EnvConfig, model: str) -> EnvConfig:
    """The configuration with the options that the model's family wants added."""
    wanted = {key: value for key, value in OPTIONS.get(model, {}).items() if key not in config.options}
    known: Any = inspect.signature(find_factory(config.name)).parameters if wanted else {}
    added = {key: value for key, value in wanted.items() if key in known}
    return dataclasses.replace(config, options={**config.options, **added}) if added else config
