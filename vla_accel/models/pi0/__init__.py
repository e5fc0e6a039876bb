"""PI0 and PI0.5: configuration, model, processor and checkpoints. Knows nothing of reinforcement learning.

Not here: the policy around the model (`policies/pi0.py`) and its maths (`policies/flow.py`).
Usage: `model, processor = load_pi0(folder)`; `register()` makes the Auto classes of transformers know the model.
"""

from __future__ import annotations

from vla_accel.models.pi0.auto import register
from vla_accel.models.pi0.configuration import Pi0Config
from vla_accel.models.pi0.loading import load_model, load_pi0, peek_pi0, read_config, save_model, save_pi0
from vla_accel.models.pi0.modeling import Pi0Model
from vla_accel.models.pi0.prefix import PrefixCache, denoising_times
from vla_accel.models.pi0.processing import Pi0Processor

__all__ = [
    "Pi0Config",
    "Pi0Model",
    "Pi0Processor",
    "PrefixCache",
    "denoising_times",
    "load_model",
    "load_pi0",
    "peek_pi0",
    "read_config",
    "register",
    "save_model",
    "save_pi0",
]
