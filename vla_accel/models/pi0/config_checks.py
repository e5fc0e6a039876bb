"""What the fields of a `Pi0Config` must be, for any model to have them.

Not here: the fields themselves (`configuration.py`).
Usage: `check_config(config)`, at the end of `Pi0Config.__init__`.
"""

from __future__ import annotations

import math
from typing import Any

from vla_accel.models.pi0.normalization import MODES
from vla_accel.models.reading import table

# Which of the fields are counts, and which are other numbers above 0.
_COUNTS = (
    "vocab_size",
    "image_size",
    "chunk_size",
    "n_action_steps",
    "max_state_dim",
    "max_action_dim",
    "num_inference_steps",
    "tokenizer_max_length",
)
_ABOVE_0 = ("time_sampling_beta_alpha", "time_sampling_scale", "min_period", "max_period")


def check_config(config: Any) -> None:
    """Raise a `ValueError` that names the field of a `Pi0Config` with which no model can be made."""
    one_of("precision", config.precision, ("float32", "bfloat16"))
    one_of("image_resize", config.image_resize, ("bilinear", "antialias"))
    one_of("norm_rule", config.norm_rule, ("lerobot", "openpi"))
    _check_numbers(config)
    _check_features(config)
    for kind, mode in config.normalization_mapping.items():
        one_of(f"normalization_mapping[{kind!r}]", mode, MODES)
    if config.normalization_mapping.get("VISUAL", "IDENTITY") != "IDENTITY":
        raise ValueError(
            "normalization_mapping['VISUAL'] must be IDENTITY (PI0 scales pixels to [-1, 1] itself), "
            f"but is {config.normalization_mapping['VISUAL']!r}."
        )
    for name in ("depth", "num_heads", "num_kv_heads", "head_dim"):
        if config.vlm[name] != config.expert[name]:
            raise ValueError(
                f"vlm.{name} and expert.{name} must be equal, because the two stacks share their attention, "
                f"but are {config.vlm[name]} and {config.expert[name]}."
            )
    vision, vlm, expert = config.vision, config.vlm, config.expert
    for name, value, divisor, of in (
        ("image_size", config.image_size, vision["patch_size"], "vision.patch_size"),
        ("vision.width", vision["width"], vision["num_heads"], "vision.num_heads"),
        ("vlm.num_heads", vlm["num_heads"], vlm["num_kv_heads"], "vlm.num_kv_heads"),
        ("vlm.head_dim", vlm["head_dim"], 2, ""),
        ("expert.width", expert["width"], 2, ""),
    ):
        rule = f"a multiple of {of} ({divisor})" if of else "even"
        _need(value % divisor == 0, name, rule, value)
    steps, chunk = config.n_action_steps, config.chunk_size
    _need(steps <= chunk, "n_action_steps", f"at most chunk_size ({chunk})", steps)
    if config.time_sampling_beta_beta != 1.0:
        raise ValueError(f"time_sampling_beta_beta must be 1.0, but is {config.time_sampling_beta_beta!r}.")
    for name, dim, limit in (
        ("input_features['observation.state']", config.state_dim, config.max_state_dim),
        ("output_features['action']", config.action_dim, config.max_action_dim),
    ):
        if dim > limit:
            raise ValueError(f"{name} must have at most {limit} entries (the padded width), but has {dim}.")


def _check_numbers(config: Any) -> None:
    counts = {name: getattr(config, name) for name in _COUNTS}
    for part in ("vision", "vlm", "expert"):
        counts |= {f"{part}.{name}": value for name, value in getattr(config, part).items()}
    for name, value in counts.items():
        _need(_is_count(value), name, "a whole number of at least 1", value)
    for name in _ABOVE_0:
        value = getattr(config, name)
        _need(_is_number(value) and value > 0, name, "a number above 0", value)
    offset = config.time_sampling_offset
    _need(_is_number(offset) and offset >= 0, "time_sampling_offset", "a number of at least 0", offset)


def _check_features(config: Any) -> None:
    for group in ("input_features", "output_features"):
        for key, feature in getattr(config, group).items():
            name = f"{group}[{key!r}]"
            kind, shape = (table(feature, name).get(entry) for entry in ("type", "shape"))
            _need(isinstance(kind, str), f"{name}: type", "VISUAL, STATE or ACTION", kind)
            fits = isinstance(shape, (list, tuple)) and len(shape) > 0 and all(map(_is_count, shape))
            _need(fits, f"{name}: shape", "a list of whole numbers of at least 1", shape)
    _need(config.cameras, "input_features", "a table with a camera (type VISUAL)", list(config.input_features))


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 1


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _need(ok: object, name: str, rule: str, value: object) -> None:
    if not ok:
        raise ValueError(f"{name} must be {rule}, but is {value!r}.")


def one_of(name: str, value: object, choices: tuple[str, ...]) -> None:
    """Raise a `ValueError` unless a value is one of the choices."""
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}, but is {value!r}.")
