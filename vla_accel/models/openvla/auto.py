"""OpenVLA's entry in the table of model families: `register`, `peek`, `load` and `save`.

Usage: through `vla_accel.models.load_vla` and `register_vla_models`.
"""

from __future__ import annotations

import transformers
from transformers import AutoConfig, AutoImageProcessor, AutoProcessor, AutoTokenizer, PreTrainedTokenizerFast

from vla_accel.models.openvla.configuration import OpenVLAConfig
from vla_accel.models.openvla.images import PrismaticImageProcessor
from vla_accel.models.openvla.loading import load, peek, save
from vla_accel.models.openvla.modeling import OpenVLAForActionPrediction
from vla_accel.models.openvla.processing import PrismaticProcessor

__all__ = ["load", "peek", "register", "save"]


def register() -> None:
    """Make OpenVLA known to Hugging Face's auto classes; calling it again changes nothing."""
    AutoConfig.register(OpenVLAConfig.model_type, OpenVLAConfig, exist_ok=True)
    AutoImageProcessor.register(OpenVLAConfig, slow_image_processor_class=PrismaticImageProcessor, exist_ok=True)
    AutoTokenizer.register(OpenVLAConfig, fast_tokenizer_class=PreTrainedTokenizerFast, exist_ok=True)
    AutoProcessor.register(OpenVLAConfig, PrismaticProcessor, exist_ok=True)
    for name in ("AutoModelForImageTextToText", "AutoModelForVision2Seq"):  # the older name is gone in newer releases
        auto_class = getattr(transformers, name, None)
        if auto_class is not None:
            auto_class.register(OpenVLAConfig, OpenVLAForActionPrediction, exist_ok=True)
