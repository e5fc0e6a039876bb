"""Configuration of OpenVLA and OpenVLA-OFT models, in the form their original `config.json` has.

Reads a folder of the original project and writes one that it can read: old key names, unknown keys kept, our own
keys written only where they differ from the original behaviour.
Not here: the fields of the image processor (`processing.py`).
Usage: `OpenVLAConfig.from_pretrained(folder)` or `OpenVLAConfig(action_decoding="parallel", num_actions_chunk=8)`.
"""

from __future__ import annotations

from typing import Any, ClassVar

import transformers
from transformers import LlamaConfig, PretrainedConfig

from vla_accel.models.reading import table

_DINOV2, _SIGLIP = "vit_large_patch14_reg4_dinov2.lvd142m", "vit_so400m_patch14_siglip_{}"
_CLIP = "vit_large_patch14_clip_{}.openai"

# vision_backbone_id -> timm names, image side, activation overrides; in the order of the channels of `pixel_values`.
VISION_BACKBONES: dict[str, tuple[list[str], int, list[str | None]]] = {
    "clip-vit-l": ([_CLIP.format(224)], 224, ["quick_gelu"]),
    "clip-vit-l-336px": ([_CLIP.format(336)], 336, ["quick_gelu"]),
    "siglip-vit-so400m": ([_SIGLIP.format(224)], 224, [None]),
    "siglip-vit-so400m-384px": ([_SIGLIP.format(384)], 384, [None]),
    "dinov2-vit-l": ([_DINOV2], 224, [None]),
    "in1k-vit-l": (["vit_large_patch16_224.augreg_in21k_ft_in1k"], 224, [None]),
    "dinoclip-vit-l-336px": ([_DINOV2, _CLIP.format(336)], 336, [None, "quick_gelu"]),
    "dinosiglip-vit-so-224px": ([_DINOV2, _SIGLIP.format(224)], 224, [None, None]),
    "dinosiglip-vit-so-384px": ([_DINOV2, _SIGLIP.format(384)], 384, [None, None]),
}

# llm_backbone_id -> name of the language model it started from; all of the Llama family.
LLM_BACKBONES: dict[str, str] = {
    "llama2-7b-pure": "meta-llama/Llama-2-7b-hf",
    "llama2-13b-pure": "meta-llama/Llama-2-13b-hf",
    "llama2-7b-chat": "meta-llama/Llama-2-7b-chat-hf",
    "llama2-13b-chat": "meta-llama/Llama-2-13b-chat-hf",
    "vicuna-v15-7b": "lmsys/vicuna-7b-v1.5",
    "vicuna-v15-13b": "lmsys/vicuna-13b-v1.5",
}

# What an original `text_config` means by leaving a key out. Pinned: a library's default may change, a checkpoint's
# meaning may not. The epsilon is 1e-6, not Llama-2's 1e-5.
_TEXT_DEFAULTS: dict[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
}
_ROPE_THETA = 10000.0

_CHUNK = {False: 1, True: 8}  # environment steps per decision, by whether decoding is parallel

# Our own keys and the behaviour of the original base model.
_OWN_DEFAULTS: dict[str, Any] = {
    "action_decoding": "autoregressive",
    "append_stop_token": True,
    "num_images_in_input": 1,
    "use_proprio": False,
    "proprio_dim": 8,
    "use_film": False,
}


class OpenVLAConfig(PretrainedConfig):
    """What an OpenVLA checkpoint is made of and how it decodes actions.

    Args:
        vision_backbone_id: key of `VISION_BACKBONES`; fills the three `timm` fields and `image_sizes` where absent.
        llm_backbone_id: key of `LLM_BACKBONES`; fills `hf_llm_id` where absent.
        text_config: fields of the Llama; an absent field has Llama-2-7B's value, `rms_norm_eps` 1e-6.
        timm_model_kwargs: one dict per tower of sizes (`embed_dim`, `depth`, `num_heads`) that replace those of the
            `timm` name; None for the name's own.
        norm_stats: statistics of the action and state spaces, per data set.
        action_decoding: `"autoregressive"` (OpenVLA: one token after the other, causal attention) or `"parallel"`
            (OpenVLA-OFT: all tokens of a chunk in one pass, bidirectional attention).
        num_actions_chunk: K, environment steps per decision; None for 1 (autoregressive) or 8 (parallel, what
            OpenVLA-OFT is trained with on LIBERO). Original folders do not say.
        action_dim: A; None to take it from `norm_stats`, or 7 where they do not say.
        append_stop_token: parallel only: end the sequence with the end-of-sequence token, as the original does.
        num_images_in_input: cameras per observation.
        use_proprio: whether a projected robot state joins the sequence after the image patches.
        proprio_dim: Q, entries of that state.
        use_film: whether the language modulates every block of the towers.
        **kwargs: every other key of a `config.json`, kept as an attribute and written back.

    Raises:
        ValueError: for a value outside the stated range, naming the field.
    """

    model_type = "openvla"
    sub_configs: ClassVar[dict[str, Any]] = {"text_config": LlamaConfig}

    def __init__(
        self,
        vision_backbone_id: str = "dinosiglip-vit-so-224px",
        llm_backbone_id: str = "llama2-7b-pure",
        text_config: dict[str, Any] | LlamaConfig | None = None,
        *,
        arch_specifier: str = "no-align+fused-gelu-mlp",
        use_fused_vision_backbone: bool | None = None,
        timm_model_ids: list[str] | None = None,
        timm_override_act_layers: list[str | None] | None = None,
        timm_model_kwargs: list[dict[str, Any]] | None = None,
        image_sizes: list[int] | None = None,
        image_resize_strategy: str = "letterbox",
        hf_llm_id: str | None = None,
        llm_max_length: int = 2048,
        pad_token_id: int = 32000,
        pad_to_multiple_of: int = 64,
        output_projector_states: bool = False,
        norm_stats: dict[str, Any] | None = None,
        n_action_bins: int = 256,
        action_decoding: str = "autoregressive",
        num_actions_chunk: int | None = None,
        action_dim: int | None = None,
        append_stop_token: bool = True,
        num_images_in_input: int = 1,
        use_proprio: bool = False,
        proprio_dim: int = 8,
        use_film: bool = False,
        **kwargs: Any,
    ):
        names, side, activations = _vision_backbone(vision_backbone_id, timm_model_ids)
        self.vision_backbone_id = vision_backbone_id
        self.timm_model_ids = list(timm_model_ids or names)
        num_towers = len(self.timm_model_ids)
        self.timm_override_act_layers = timm_override_act_layers or activations or [None] * num_towers
        self.timm_model_kwargs = timm_model_kwargs
        self.image_sizes = list(image_sizes or [side] * num_towers)
        fused = vision_backbone_id.startswith(("dinoclip", "dinosiglip"))
        self.use_fused_vision_backbone = fused if use_fused_vision_backbone is None else use_fused_vision_backbone
        self.arch_specifier = arch_specifier
        self.image_resize_strategy = image_resize_strategy
        self.llm_backbone_id = llm_backbone_id
        self.hf_llm_id = hf_llm_id or LLM_BACKBONES.get(llm_backbone_id)
        self.llm_max_length = llm_max_length
        self.pad_to_multiple_of = pad_to_multiple_of
        self.output_projector_states = output_projector_states
        self.norm_stats = norm_stats
        self.n_action_bins = n_action_bins
        self.action_decoding = action_decoding
        self._own_chunk = num_actions_chunk
        self.append_stop_token = append_stop_token
        self.num_images_in_input = num_images_in_input
        self.use_proprio = use_proprio
        self.proprio_dim = proprio_dim
        self.use_film = use_film
        self._own_action_dim = action_dim
        self.text_config = _text_config(text_config, pad_token_id, pad_to_multiple_of)
        kwargs.pop("tie_word_embeddings", None)  # never tied; the key belongs to other kinds of model
        super().__init__(pad_token_id=pad_token_id, **kwargs)
        self.pad_token_id = pad_token_id
        self.tie_word_embeddings = False
        self.check_options()

    @property
    def action_dim(self) -> int:
        """A, action dimensions: as configured, else as the statistics say, else 7."""
        if self._own_action_dim is not None:
            return self._own_action_dim
        return _action_dim_of(self.norm_stats)

    @action_dim.setter
    def action_dim(self, value: int | None) -> None:
        self._own_action_dim = value

    @property
    def num_actions_chunk(self) -> int:
        """K, environment steps per decision: as configured, else 8 for parallel decoding, else 1."""
        return _CHUNK[self.is_parallel] if self._own_chunk is None else self._own_chunk

    @num_actions_chunk.setter
    def num_actions_chunk(self, value: int | None) -> None:
        self._own_chunk = value

    @property
    def num_action_tokens(self) -> int:
        """U = K * A, action tokens per decision."""
        return self.num_actions_chunk * self.action_dim

    @property
    def action_token_begin(self) -> int:
        """Vocabulary id of bin index 0; the `n_action_bins` ids from here on are the action tokens."""
        return self.text_config.vocab_size - self.pad_to_multiple_of - self.n_action_bins

    @property
    def is_parallel(self) -> bool:
        """Whether all action tokens of a chunk are predicted in one bidirectional pass."""
        return self.action_decoding == "parallel"

    def check_options(self) -> None:
        """Raise `ValueError` for a field whose value no model can have."""
        num_towers = len(self.timm_model_ids)
        if self.action_decoding not in ("autoregressive", "parallel"):
            raise ValueError(
                f"action_decoding must be 'autoregressive' or 'parallel', not {self.action_decoding!r}. "
                "OpenVLA decodes autoregressively, OpenVLA-OFT with discrete tokens in parallel."
            )
        if num_towers != 1 + bool(self.use_fused_vision_backbone):
            raise ValueError(
                f"timm_model_ids must name {1 + bool(self.use_fused_vision_backbone)} tower(s) with "
                f"use_fused_vision_backbone={self.use_fused_vision_backbone}, not {num_towers}: {self.timm_model_ids}."
            )
        for name in ("image_sizes", "timm_override_act_layers", "timm_model_kwargs"):
            value = getattr(self, name)
            if value is not None and len(value) != num_towers:
                raise ValueError(f"{name} must have one entry per tower ({num_towers}), not {value}.")
        for name in ("num_actions_chunk", "action_dim", "num_images_in_input", "proprio_dim", "n_action_bins"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be an integer of at least 1, not {value!r}.")
        for name in ("append_stop_token", "use_proprio", "use_film"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be true or false, not {getattr(self, name)!r}.")
        if self.action_token_begin < 0:
            raise ValueError(
                f"text_config.vocab_size must be at least pad_to_multiple_of + n_action_bins = "
                f"{self.pad_to_multiple_of + self.n_action_bins}, not {self.text_config.vocab_size}."
            )

    def to_dict(self) -> dict[str, Any]:
        """The configuration as the original `config.json` writes it."""
        derived = {"dtype", "tie_word_embeddings", "text_config"}
        data = {key: x for key, x in self.__dict__.items() if not key.startswith("_") and key not in derived}
        # Keys that only this library's base class invents are left out while they have their default.
        for key, default in PretrainedConfig().to_dict().items():
            if key in data and data[key] == default:
                del data[key]
        for key in [key for key, default in _OWN_DEFAULTS.items() if data.get(key) == default]:
            del data[key]
        if self._own_action_dim is not None and self._own_action_dim != _action_dim_of(self.norm_stats):
            data["action_dim"] = self._own_action_dim
        if self._own_chunk is not None and self._own_chunk != _CHUNK[self.is_parallel]:
            data["num_actions_chunk"] = self._own_chunk
        for key in ("norm_stats", "timm_model_kwargs"):
            if data.get(key) is None:
                data.pop(key, None)
        data["text_config"] = _short_text_config(self.text_config)
        data["model_type"] = self.model_type
        data["transformers_version"] = transformers.__version__
        if self.dtype is not None:
            data["torch_dtype"] = str(self.dtype).removeprefix("torch.")
        return data

    def to_diff_dict(self) -> dict[str, Any]:
        """Same as `to_dict`: the original form is already the short one."""
        return self.to_dict()


def _vision_backbone(name: str, timm_model_ids: list[str] | None) -> tuple[list[str], int, list[str | None]]:
    """Names, image side and activations of a backbone; a name outside the table needs explicit towers."""
    if name in VISION_BACKBONES:
        return VISION_BACKBONES[name]
    if timm_model_ids:
        return list(timm_model_ids), 224, [None] * len(timm_model_ids)
    raise ValueError(
        f"vision_backbone_id must be one of {sorted(VISION_BACKBONES)}, or timm_model_ids must name the towers; "
        f"it is {name!r}."
    )


def _action_dim_of(norm_stats: dict[str, Any] | None) -> int:
    """Action dimensions that all statistics agree on, else 7."""
    widths = {len(action["q01"]) for action in _actions_of(norm_stats) if hasattr(action.get("q01"), "__len__")}
    return widths.pop() if len(widths) == 1 else 7


def _actions_of(norm_stats: dict[str, Any] | None) -> list[dict[str, Any]]:
    """The action statistics of each data set that has some."""
    entries = [table(entry, f"norm_stats[{name!r}]") for name, entry in table(norm_stats or {}, "norm_stats").items()]
    return [table(entry["action"], "norm_stats: action") for entry in entries if entry.get("action")]


def _text_config(given: dict[str, Any] | LlamaConfig | None, pad_token_id: int, multiple: int) -> LlamaConfig:
    """The Llama configuration that a short `text_config` stands for."""
    if isinstance(given, LlamaConfig):
        return given
    given = dict(table(given or {"vocab_size": pad_token_id + multiple, "pad_token_id": pad_token_id}, "text_config"))
    kind = given.pop("model_type", "llama")
    if kind != "llama":
        raise ValueError(f"text_config.model_type must be 'llama', not {kind!r}: only Llama backbones are supported.")
    if "rope_theta" not in given and not given.get("rope_parameters"):
        given["rope_theta"] = _ROPE_THETA
    return LlamaConfig(**{**_TEXT_DEFAULTS, **given})


def _short_text_config(config: LlamaConfig) -> dict[str, Any]:
    """The fields of a Llama configuration that differ from the pinned defaults, under their original names."""
    defaults = {**LlamaConfig().to_dict(), **_TEXT_DEFAULTS}
    data = {key: value for key, value in config.to_dict().items() if key not in defaults or value != defaults[key]}
    data.pop("transformers_version", None)
    if data.get("head_dim") == config.hidden_size // config.num_attention_heads:
        del data["head_dim"]
    rope = dict(data.pop("rope_parameters", None) or {})
    theta = rope.pop("rope_theta", _ROPE_THETA)
    if theta != _ROPE_THETA:
        data["rope_theta"] = theta
    kind = rope.pop("rope_type", "default")
    if kind != "default":
        data["rope_scaling"] = {"type": kind, **rope}
    dtype = data.pop("dtype", None)
    if dtype is not None:
        data["torch_dtype"] = str(dtype).removeprefix("torch.")
    data["model_type"] = "llama"
    return data
