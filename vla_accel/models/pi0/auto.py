"""PI0's entry in the table of model families: `register`, `peek`, `load` and `save`.

Not here: what they do (`loading.py`).
Usage: through `vla_accel.models.load_vla` and `register_vla_models`.
"""

from __future__ import annotations

from transformers import AutoConfig, AutoModel

from vla_accel.models.pi0.configuration import Pi0Config
from vla_accel.models.pi0.loading import load_pi0 as load
from vla_accel.models.pi0.loading import peek_pi0 as peek
from vla_accel.models.pi0.loading import save_pi0 as save
from vla_accel.models.pi0.modeling import Pi0Model

__all__ = ["load", "peek", "register", "save"]


def register() -> None:
    """Make `AutoConfig` and `AutoModel` know the model type `vla_pi0`; transformers' own `pi0` is left as it is.

    Calling it again changes nothing. LeRobot's `config.json` cannot name a model type, so for such folders pass the
    configuration: `AutoModel.from_pretrained(folder, config=Pi0Config.from_pretrained(folder))`.
    """
    AutoConfig.register(Pi0Config.model_type, Pi0Config, exist_ok=True)
    AutoModel.register(Pi0Config, Pi0Model, exist_ok=True)
