"""Configuration of PI0 and PI0.5, and its translation from and to LeRobot's and openpi's `config.json`.

Not here: weights (`loading.py`) and statistics (`processing.py`).
Usage: `config = Pi0Config.from_pretrained(folder)`; `Pi0Config(variant="pi05", chunk_size=10)`.

Its model type is `vla_pi0`, so that it and transformers' own `pi0` live side by side. LeRobot refuses a `config.json`
with keys that it does not know, so what that file cannot say (the sizes of a tiny model, how images are shrunk) is
written beside it, in `vla_accel.json`, which is also the file that `AutoConfig.from_pretrained` reads.
"""

from __future__ import annotations

import copy
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig

from vla_accel.models.pi0.config_checks import check_config, one_of
from vla_accel.models.reading import table

VARIANTS = ("pi0", "pi05")
SIDE_FILE = "vla_accel.json"
CAMERAS = ("base_0_rgb", "left_wrist_0_rgb", "right_wrist_0_rgb")
IMAGE_PREFIX = "observation.images."
STATE_KEY = "observation.state"
ACTION_KEY = "action"


@dataclass(frozen=True, kw_only=True)
class VisionSizes:
    """Sizes of the SigLIP tower. The defaults are So400m/14's."""

    width: int = 1152
    depth: int = 27
    mlp_dim: int = 4304
    num_heads: int = 16
    patch_size: int = 14


@dataclass(frozen=True, kw_only=True)
class GemmaSizes:
    """Sizes of one Gemma stack. The defaults are Gemma-2B's."""

    width: int = 2048
    depth: int = 18
    mlp_dim: int = 16384
    num_heads: int = 8
    num_kv_heads: int = 1
    head_dim: int = 256


GEMMA_VARIANTS = {"gemma_2b": GemmaSizes(), "gemma_300m": GemmaSizes(width=1024, mlp_dim=4096)}

# What LeRobot's and our own names have in common: same name, same meaning, a plain JSON value.
_SHARED = (
    "paligemma_variant",
    "action_expert_variant",
    "chunk_size",
    "n_action_steps",
    "max_state_dim",
    "max_action_dim",
    "num_inference_steps",
    "time_sampling_beta_alpha",
    "time_sampling_beta_beta",
    "time_sampling_scale",
    "time_sampling_offset",
    "min_period",
    "max_period",
    "tokenizer_max_length",
    "normalization_mapping",
)
# What only the side file can say.
_OWN = ("vision", "vlm", "expert", "vocab_size", "image_resize", "clean_prompt", "state_in_prompt", "norm_rule")


class Pi0Config(PreTrainedConfig):
    """Everything that a PI0 or PI0.5 checkpoint fixes.

    Args:
        variant: `"pi0"` (a state token, time mixed into the action tokens) or `"pi05"` (the state as words of the
            prompt, time through adaptive norms).
        vision: entries of `VisionSizes`, where they differ from its defaults.
        vlm: entries of `GemmaSizes`, where they differ from `paligemma_variant`.
        expert: entries of `GemmaSizes`, where they differ from `action_expert_variant`.
        paligemma_variant: name of a size in `GEMMA_VARIANTS`.
        action_expert_variant: the same, for the action expert.
        vocab_size: rows of the token embedding.
        image_size: side of the square images that the tower reads, pixels.
        chunk_size: H, action steps that the model predicts at once.
        n_action_steps: of these, how many LeRobot executes by default.
        max_state_dim: width of the state vector after padding.
        max_action_dim: D, width of an action after padding.
        num_inference_steps: denoising steps.
        input_features: LeRobot's table of cameras and state: name -> `{"type": "VISUAL" | "STATE", "shape": [...]}`.
        output_features: the same for `action`.
        time_sampling_beta_alpha: shape of the training distribution of flow time.
        time_sampling_beta_beta: its other shape; 1.
        time_sampling_scale: factor on the drawn time.
        time_sampling_offset: added to it.
        min_period: shortest period of the time embedding.
        max_period: longest.
        tokenizer_max_length: L, prompt tokens after padding. None: 48 for PI0, 200 for PI0.5.
        normalization_mapping: `{"STATE": mode, "ACTION": mode}` with a mode of `normalization.MODES`. None: mean
            and standard deviation for PI0, quantiles for PI0.5.
        precision: `"float32"` or `"bfloat16"`, of the weights as the checkpoint says.
        image_resize: `"bilinear"` (LeRobot: no antialiasing) or `"antialias"` (openpi).
        clean_prompt: strip the instruction and turn `_` and line breaks into spaces (openpi; PI0.5 always does).
        state_in_prompt: PI0.5 only, write the normalised state into the prompt.
        norm_rule: `"lerobot"` or `"openpi"`, which small number guards the divisions.
        lerobot: further entries of the LeRobot `config.json` this came from, kept for saving.
        **kwargs: transformers' own entries.

    Raises:
        ValueError: a value breaks a rule; the message names the field.
    """

    model_type = "vla_pi0"

    def __init__(
        self,
        *,
        variant: str = "pi0",
        vision: dict[str, int] | None = None,
        vlm: dict[str, int] | None = None,
        expert: dict[str, int] | None = None,
        paligemma_variant: str = "gemma_2b",
        action_expert_variant: str = "gemma_300m",
        vocab_size: int = 257152,
        image_size: int = 224,
        chunk_size: int = 50,
        n_action_steps: int | None = None,
        max_state_dim: int = 32,
        max_action_dim: int = 32,
        num_inference_steps: int = 10,
        input_features: dict[str, Any] | None = None,
        output_features: dict[str, Any] | None = None,
        time_sampling_beta_alpha: float = 1.5,
        time_sampling_beta_beta: float = 1.0,
        time_sampling_scale: float = 0.999,
        time_sampling_offset: float = 0.001,
        min_period: float = 4e-3,
        max_period: float = 4.0,
        tokenizer_max_length: int | None = None,
        normalization_mapping: dict[str, str] | None = None,
        precision: str = "float32",
        image_resize: str = "bilinear",
        clean_prompt: bool = False,
        state_in_prompt: bool = True,
        norm_rule: str = "lerobot",
        lerobot: dict[str, Any] | None = None,
        **kwargs: Any,
    ):
        one_of("variant", variant, VARIANTS)
        one_of("paligemma_variant", paligemma_variant, tuple(GEMMA_VARIANTS))
        one_of("action_expert_variant", action_expert_variant, tuple(GEMMA_VARIANTS))
        mode = "QUANTILES" if variant == "pi05" else "MEAN_STD"
        self.variant = variant
        self.paligemma_variant = paligemma_variant
        self.action_expert_variant = action_expert_variant
        self.vision = asdict(_sizes(VisionSizes(), vision, "vision"))
        self.vlm = asdict(_sizes(GEMMA_VARIANTS[paligemma_variant], vlm, "vlm"))
        self.expert = asdict(_sizes(GEMMA_VARIANTS[action_expert_variant], expert, "expert"))
        self.vocab_size = vocab_size
        self.image_size = image_size
        self.chunk_size = chunk_size
        self.n_action_steps = chunk_size if n_action_steps is None else n_action_steps
        self.max_state_dim = max_state_dim
        self.max_action_dim = max_action_dim
        self.num_inference_steps = num_inference_steps
        self.input_features = copy.deepcopy(table(input_features or self._default_inputs(), "input_features"))
        self.output_features = copy.deepcopy(table(output_features or {}, "output_features"))
        self.input_features.setdefault(STATE_KEY, {"type": "STATE", "shape": [max_state_dim]})
        self.output_features.setdefault(ACTION_KEY, {"type": "ACTION", "shape": [max_action_dim]})
        self.time_sampling_beta_alpha = time_sampling_beta_alpha
        self.time_sampling_beta_beta = time_sampling_beta_beta
        self.time_sampling_scale = time_sampling_scale
        self.time_sampling_offset = time_sampling_offset
        self.min_period = min_period
        self.max_period = max_period
        longest = 200 if variant == "pi05" else 48
        self.tokenizer_max_length = longest if tokenizer_max_length is None else tokenizer_max_length
        mapping = table(normalization_mapping or {"STATE": mode, "ACTION": mode}, "normalization_mapping")
        self.normalization_mapping = dict(mapping)
        self.precision = precision
        self.image_resize = image_resize
        self.clean_prompt = clean_prompt
        self.state_in_prompt = state_in_prompt
        self.norm_rule = norm_rule
        self.lerobot = dict(lerobot or {})
        check_config(self)
        super().__init__(**kwargs)

    def _default_inputs(self) -> dict[str, Any]:
        shape = [3, self.image_size, self.image_size]
        return {IMAGE_PREFIX + name: {"type": "VISUAL", "shape": list(shape)} for name in CAMERAS}

    @property
    def cameras(self) -> list[str]:
        """Names of the cameras in slot order, without LeRobot's `observation.images.`."""
        keys = [key for key, feature in self.input_features.items() if feature["type"] == "VISUAL"]
        return [key.removeprefix(IMAGE_PREFIX) for key in keys]

    @property
    def state_dim(self) -> int:
        """Entries of the robot state before padding."""
        return int(self.input_features[STATE_KEY]["shape"][0])

    @property
    def action_dim(self) -> int:
        """A, entries of an action before padding."""
        return int(self.output_features[ACTION_KEY]["shape"][0])

    def check_chunk(self, num_steps: int, option: str = "chunk_size") -> None:
        """Raise a `ValueError` unless `num_steps` environment steps can be cut from one predicted chunk."""
        if not 1 <= num_steps <= self.chunk_size:
            raise ValueError(
                f"{option} must be between 1 and the model's horizon of {self.chunk_size} action steps, "
                f"but is {num_steps}. Choose a shorter chunk or a checkpoint with a longer horizon."
            )

    @classmethod
    def from_lerobot(cls, raw: dict[str, Any], side: dict[str, Any] | None = None) -> Pi0Config:
        """Translate a LeRobot `config.json`, with the side file's entries where there are any.

        Raises:
            ValueError: another policy's file, or one that asks for something not implemented (named).
        """
        raw, side = dict(raw), side or {}
        variant = raw.pop("type", None)
        one_of("config.json: type", variant, VARIANTS)
        if raw.get("use_relative_actions"):
            raise ValueError(
                "config.json: use_relative_actions is true: checkpoints that predict actions relative to the state "
                "are not supported."
            )
        values = {name: raw.pop(name) for name in _SHARED if raw.get(name) is not None}
        sides = raw.pop("image_resolution", None) or [224, 224]
        if not isinstance(sides, (list, tuple)) or len(sides) != 2 or sides[0] != sides[1]:
            raise ValueError(f"config.json: image_resolution must be square, but is {sides!r}.")
        return cls(
            variant=variant,
            image_size=sides[0],
            precision=raw.pop("dtype", None) or "float32",
            input_features=raw.pop("input_features", None),
            output_features=raw.pop("output_features", None),
            lerobot=raw,
            **values,
            **{name: side[name] for name in _OWN if name in side},
        )

    def to_lerobot(self) -> dict[str, Any]:
        """The `config.json` that LeRobot reads."""
        return {
            "type": self.variant,
            **copy.deepcopy(self.lerobot),
            "input_features": copy.deepcopy(self.input_features),
            "output_features": copy.deepcopy(self.output_features),
            "dtype": self.precision,
            "image_resolution": [self.image_size, self.image_size],
            **{name: copy.deepcopy(getattr(self, name)) for name in _SHARED},
        }

    @classmethod
    def from_openpi(cls, raw: dict[str, Any], *, variant: str, **overrides: Any) -> Pi0Config:
        """Translate the `config.json` of a checkpoint converted by openpi.

        Args:
            raw: its entries.
            variant: the file does not say which; the weights do.
            **overrides: fields of this class.
        """
        dims = {"max_state_dim": raw["action_dim"], "max_action_dim": raw["action_dim"]}
        names = ("paligemma_variant", "action_expert_variant")
        values = {
            **dims,
            **{name: raw[name] for name in names if name in raw},
            "chunk_size": raw["action_horizon"],
            "precision": raw.get("precision", "float32"),
            "image_resize": "antialias",
            "clean_prompt": True,
            "norm_rule": "openpi",
        }
        return cls(variant=variant, **{**values, **overrides})

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str | Path, **kwargs: Any) -> Pi0Config:
        """Read the configuration of a LeRobot folder (or of a side file itself); see `loading.read_config`.

        Args:
            pretrained_model_name_or_path: the folder or the file.
            **kwargs: arguments of `loading.read_config`; what the Auto classes pass on about downloads is ignored.
        """
        path = Path(pretrained_model_name_or_path)
        if path.is_dir() and (path / "config.json").is_file():
            from vla_accel.models.pi0.loading import about_the_model, read_config

            with_unused = kwargs.pop("return_unused_kwargs", False)
            config = read_config(path, **about_the_model(kwargs))
            return (config, {}) if with_unused else config
        return super().from_pretrained(pretrained_model_name_or_path, **kwargs)

    def save_pretrained(self, save_directory: str | Path, push_to_hub: bool = False, **kwargs: Any) -> None:  # noqa: ARG002, FBT001, FBT002
        """Write `config.json` for LeRobot and the side file into a folder."""
        if push_to_hub:
            raise ValueError("push_to_hub is not supported: upload the saved folder.")
        folder = Path(save_directory)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.to_lerobot(), indent=4) + "\n")
        (folder / SIDE_FILE).write_text(json.dumps(self.to_dict(), indent=2, sort_keys=True) + "\n")


def _sizes(base: Any, changes: dict[str, int] | None, name: str) -> Any:
    unknown = set(table(changes or {}, name)) - set(asdict(base))
    if unknown:
        raise ValueError(f"{name} knows {', '.join(asdict(base))}, but was given {', '.join(sorted(unknown))}.")
    return type(base)(**{**asdict(base), **(changes or {})})
