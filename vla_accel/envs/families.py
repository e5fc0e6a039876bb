"""What a policy wants of a simulator: its family's conventions, and no more pictures than it looks at.

Not here: the conventions themselves, which are options of the simulators.
Usage: `config.env = for_model(config.env, "openvla", num_images=1)` before anything is built.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
from typing import Any

from vla_accel.config import EnvConfig
from vla_accel.envs.make import find_factory

OPTIONS: dict[str, dict[str, str]] = {
    "openvla": {"gripper": "openvla"},
    "openvla-oft": {"gripper": "openvla"},
    "pi0": {"task_seed": "7"},
    "pi05": {"task_seed": "7"},
}
"""Model name -> options that a simulator gets where it has them and the user does not say otherwise.

OpenVLA's checkpoints say 1 for an open gripper and 0 for a closed one; PI0's speak as the simulators do. LIBERO's
fixtures stand where a seed puts them, which is 7 where PI0 is scored.
"""


def for_model(config: EnvConfig, model: str, *, num_images: int | None = None) -> EnvConfig:
    """The configuration with the options added that the policy wants and the user leaves open.

    Args:
        config: of the simulator.
        model: name of the policy's family.
        num_images: cameras that the policy reads, at most; where the simulator would draw more, it draws the first
            ones only. None: what the simulator would draw.
    """
    known: Any = inspect.signature(find_factory(config.name)).parameters
    added = {key: value for key, value in OPTIONS.get(model, {}).items() if key in known}
    drawn = known["cameras"].default if "cameras" in known else ()
    if num_images is not None and isinstance(drawn, (tuple, list)) and len(drawn) > num_images:
        added["cameras"] = json.dumps(list(drawn[:num_images]))
    added = {key: value for key, value in added.items() if key not in config.options}
    return dataclasses.replace(config, options={**config.options, **added}) if added else config
