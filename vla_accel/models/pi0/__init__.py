"""PI0 and PI0.5: configuration, model, processor and checkpoints. Knows nothing of reinforcement learning.

Not here: the policy around the model (`policies/pi0.py`) and its maths (`policies/flow.py`).
Usage: `model, processor = load_pi0(folder)`; `register()` makes the Auto classes of transformers know the model.
"""

from __future__ import annotations

from vla_accel.models.pi0.configuration import Pi0Config
from vla_accel.models.pi0.loading import load_model, load_pi0, read_config, save_model
from vla_accel.models.pi0.modeling import Pi0Model, denoising_times
from vla_accel.models.pi0.prefix import PrefixCache
from vla_accel.models.pi0.processing import Pi0Processor

__all__ = [
    "Pi0Config",
    "Pi0Model",
    "Pi0Processor",
    "PrefixCache",
    "denoising_times",
    "load_model",
    "load_pi0",
    "read_config",
    "register",
    "save_model",
    "save_pi0",
]


def register() -> None:
    """Make `AutoConfig` and `AutoModel` know the model type `vla_pi0`; transformers' own `pi0` is left as it is.

    Calling it again changes nothing. LeRobot's `config.json` cannot name a model type, so for such folders pass the
    configuration: `AutoModel.from_pretrained(folder, config=Pi0Config.from_pretrained(folder))`.
    """
    from transformers import AutoConfig, AutoModel

    AutoConfig.register(Pi0Config.model_type, Pi0Config, exist_ok=True)
    AutoModel.register(Pi0Config, Pi0Model, exist_ok=True)


def save_pi0(folder: str, model: Pi0Model, processor: Pi0Processor) -> None:
    """Write a checkpoint folder that `load_pi0` and LeRobot load: weights, configuration, statistics, tokenizer."""
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
