"""OpenVLA and OpenVLA-OFT (discrete tokens): images and a prompt in, distributions over action tokens out.

The parameter names are those of the original checkpoints. The language model is the library's Llama; the towers are
timm's. Every method is plain submodule calls and tensor operations, so it runs under any sharding whose root calls it.
Not here: sampling, log-probabilities and values (`policies/`), action bins and statistics (`actions.py`).
Usage: `model, processor = load_vla(folder)`, then `model.decode_actions(..., lambda logits: logits.argmax(-1))`.

Sequence: `BOS | patches | [state] | pads | prompt | action tokens [| stop]`. Pads sit inside, after the patches, so
that the token every row predicts next is in the last column and positions count real tokens only.
"""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import DynamicCache, LlamaForCausalLM, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.llama.modeling_llama import LlamaModel

from vla_accel.models.openvla.configuration import OpenVLAConfig
from vla_accel.models.openvla.layout import after_first, append, pads_after_first
from vla_accel.models.openvla.vision import PatchProjector, ProprioProjector, VisionBackbone

_IGNORED = -100  # label of a position without a target
# The library renamed this argument; both spellings are in use among the versions we support.
_CACHE = "cache" if "cache" in inspect.signature(LlamaModel.forward).parameters else "past_key_values"


class OpenVLAForActionPrediction(PreTrainedModel):
    """A vision-language model whose last `n_action_bins` real vocabulary entries are action tokens.

    Attributes:
        vision_backbone: images to patch features.
        projector: patch features to the language model's width.
        language_model: the Llama.
        proprio_projector: robot state to one token; only with `use_proprio`.
    """

    config_class = OpenVLAConfig
    config: OpenVLAConfig
    main_input_name = "pixel_values"
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _supports_flash_attn = True
    _no_split_modules = ["LlamaDecoderLayer", "VisionBlock"]  # noqa: RUF012

    def __init__(self, config: OpenVLAConfig):
        super().__init__(config)
        config.check_options()
        hidden_size = config.text_config.hidden_size
        self.vision_backbone = VisionBackbone(config)
        self.projector = PatchProjector(
            self.vision_backbone.embed_dim, hidden_size, fused=config.use_fused_vision_backbone
        )
        self.language_model = LlamaForCausalLM(config.text_config)
        if config.use_proprio:
            self.proprio_projector = ProprioProjector(config.proprio_dim, hidden_size)
        self.post_init()

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        """See `PreTrainedModel.from_pretrained`, which thaws what it loads; `load_vla` is the strict way."""
        loaded = super().from_pretrained(*args, **kwargs)
        model = loaded[0] if isinstance(loaded, tuple) else loaded  # a tuple with `output_loading_info`
        model.vision_backbone.freeze_inert()
        return loaded

    @property
    def norm_stats(self) -> dict[str, Any]:
        """Statistics of the action and state spaces, per data set."""
        return self.config.norm_stats or {}

    def get_input_embeddings(self) -> nn.Module:
        """The language model's token embedding."""
        return self.language_model.model.embed_tokens

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Replace the language model's token embedding."""
        self.language_model.model.embed_tokens = value

    def get_output_embeddings(self) -> nn.Module:
        """The language model's head."""
        return self.language_model.lm_head

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        """Replace the language model's head."""
        self.language_model.lm_head = new_embeddings

    def gradient_checkpointing_enable(
        self, gradient_checkpointing_kwargs: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        """Recompute the Llama's layers and the towers' blocks in the backward pass instead of storing them.

        Args:
            gradient_checkpointing_kwargs: of `torch.utils.checkpoint.checkpoint`; None for `use_reentrant=False`,
                the variant that works where the inputs need no gradient (LoRA, frozen embeddings).
            **kwargs: passed on to the library.
        """
        # Newer releases warn about this method's name; the one behind it is the same.
        enable = getattr(self, "_activation_checkpointing_enable", super().gradient_checkpointing_enable)
        enable(gradient_checkpointing_kwargs or {"use_reentrant": False}, **kwargs)

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        pixel_values: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        proprio: torch.Tensor | None = None,
        output_hidden_states: bool = False,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Logits over the whole vocabulary, and the loss of supervised fine-tuning.

        With parallel decoding the sequence contains the action tokens (and the stop token); their embeddings are
        zeroed, here as in `action_states`. They are found by `labels`, or without labels by their ids.

        Args:
            input_ids: int64 `[B, L]`, column 0 is BOS, padded on the right.
            attention_mask: int64 `[B, L]`, 1 = token, 0 = pad; None for no pads.
            pixel_values: float `[B, 3 * towers * images, P, P]`.
            labels: int64 `[B, L]`, -100 where there is no target; shifted by one inside.
            proprio: float `[B, proprio_dim]`, normalised; exactly with `use_proprio`.
            output_hidden_states: whether to return the hidden states of every layer.
            **kwargs: passed on to the Llama, e.g. `logits_to_keep`.

        Returns:
            `loss` (with labels), `logits` `[B, images * M + (1 with proprio) + L, vocabulary]` with the image tokens
            after column 0, and `hidden_states`.

        Raises:
            ValueError: a row starts with a pad, or the images or the state do not fit the configuration.
        """
        attention_mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        if not bool(attention_mask[:, 0].all()):
            raise ValueError("attention_mask must be 1 in column 0: forward takes sequences padded on the right.")
        text = self.get_input_embeddings()(input_ids)
        language_mask = attention_mask.bool()
        if self.config.is_parallel:
            is_action = self._is_action_token(input_ids if labels is None else labels)
            text = text.masked_fill(is_action.unsqueeze(-1), 0.0)
            language_mask = language_mask & ~is_action
        image = self._image_tokens(pixel_values, proprio, language=self._language(text, language_mask))
        kept = torch.ones(image.shape[:2], dtype=attention_mask.dtype, device=attention_mask.device)
        if labels is not None:
            labels = after_first(labels, kept.to(labels.dtype) * _IGNORED)
        with self._recomputing_layers(cached=False):
            return self.language_model(
                inputs_embeds=after_first(text, image),
                labels=labels,
                output_hidden_states=output_hidden_states,
                use_cache=False,
                **self._attention(after_first(attention_mask, kept), text.dtype),
                **kwargs,
            )

    def action_states(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        pixel_values: torch.Tensor,
        *,
        action_ids: torch.Tensor | None = None,
        proprio: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Hidden states that predict each action token, in one pass.

        Args:
            input_ids: int64 `[B, L]`, prompts that start with BOS and end with the token before the first action.
            attention_mask: int64 `[B, L]`, 1 = token, 0 = pad; pads may be on either side.
            pixel_values: float `[B, 3 * towers * images, P, P]`.
            action_ids: int64 `[B, U]` vocabulary ids. Autoregressive: the actions to score, required.
                Parallel: not used, the prediction does not depend on them.
            proprio: float `[B, proprio_dim]`, normalised; exactly with `use_proprio`.

        Returns:
            `[B, U, hidden]`, after the final norm, with gradient; unit `u` predicts action token `u`.

        Raises:
            ValueError: autoregressive without `action_ids`, or images or state that do not fit the configuration.
        """
        embeds, mask = self._prefix(input_ids, attention_mask, pixel_values, proprio)
        last = embeds.shape[1] - 1
        if self.config.is_parallel:
            num_units = self.config.num_action_tokens
            embeds, mask = append(embeds, mask, self._placeholders(embeds))
        elif action_ids is None:
            raise ValueError("action_ids must be given to score actions of a model that decodes autoregressively.")
        else:
            num_units = action_ids.shape[1]
            embeds, mask = append(embeds, mask, self.get_input_embeddings()(action_ids[:, :-1]))
        return self._hidden(embeds, mask)[:, last : last + num_units]

    def action_logits(self, states: torch.Tensor) -> torch.Tensor:
        """Scores of the action tokens; no other row of the head is computed.

        Args:
            states: `[..., hidden]`, from `action_states` or `decode_actions`.

        Returns:
            float32 `[..., n_action_bins]`; column `i` is vocabulary id `config.action_token_begin + i`.
        """
        begin = self.config.action_token_begin
        rows = slice(begin, begin + self.config.n_action_bins)
        head = self.language_model.lm_head
        if not isinstance(head, nn.Linear):  # wrapped, e.g. by an adapter: its rows alone are not its output
            return head(states)[..., rows].float()
        # In float32 whatever the weights are: bfloat16 would round a score of 20 to the nearest 0.125.
        with torch.autocast(states.device.type, enabled=False):
            return nn.functional.linear(states.float(), head.weight[rows].float())

    def decode_actions(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        pixel_values: torch.Tensor,
        choose: Callable[[torch.Tensor], torch.Tensor],
        *,
        proprio: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Pick the action tokens of one decision; images and prompt are computed once.

        Args:
            input_ids: int64 `[B, L]`, as in `action_states`.
            attention_mask: int64 `[B, L]`.
            pixel_values: float `[B, 3 * towers * images, P, P]`.
            choose: from logits, float32 `[B, n_action_bins]` per step (autoregressive) or `[B, U, n_action_bins]`
                once (parallel), to bin indices, int64 `[B]` or `[B, U]`.
            proprio: float `[B, proprio_dim]`, normalised; exactly with `use_proprio`.

        Returns:
            The hidden states `[B, U, hidden]` that predicted the tokens, and the tokens' vocabulary ids,
            int64 `[B, U]`.
        """
        begin = self.config.action_token_begin
        if self.config.is_parallel:
            states = self.action_states(input_ids, attention_mask, pixel_values, proprio=proprio)
            return states, begin + choose(self.action_logits(states))
        embeds, mask = self._prefix(input_ids, attention_mask, pixel_values, proprio)
        cache = DynamicCache(config=self.config.text_config)
        states, ids = [], []
        for _ in range(self.config.num_action_tokens):
            if ids:
                embeds, mask = append(None, mask, self.get_input_embeddings()(ids[-1].unsqueeze(1)))
            states.append(self._hidden(embeds, mask, cache=cache)[:, -1])
            ids.append(begin + choose(self.action_logits(states[-1])))
        return torch.stack(states, dim=1), torch.stack(ids, dim=1)

    def save_pretrained(self, save_directory: str | os.PathLike, **kwargs: Any) -> None:
        """Write weights and configuration in the original form; see `PreTrainedModel.save_pretrained`."""
        text = self.config.text_config
        text.dtype = self.dtype
        super().save_pretrained(save_directory, **kwargs)
        if kwargs.get("is_main_process", True):
            ids = {"bos_token_id": text.bos_token_id, "eos_token_id": text.eos_token_id}
            content = {"_from_model_config": True, **ids, "pad_token_id": self.config.pad_token_id}
            path = Path(save_directory) / "generation_config.json"
            path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")

    def _is_action_token(self, ids: torch.Tensor) -> torch.Tensor:
        begin = self.config.action_token_begin
        return (ids >= begin) & (ids < begin + self.config.n_action_bins)

    def _stop_embedding(self, batch: int) -> torch.Tensor | None:
        """The stop token's embedding `[B, 1, hidden]`, None where the sequence has none."""
        if not (self.config.is_parallel and self.config.append_stop_token):
            return None
        embedding = self.get_input_embeddings()
        stop = torch.full((batch, 1), self.config.text_config.eos_token_id, device=embedding.weight.device)
        return embedding(stop)

    def _placeholders(self, like: torch.Tensor) -> torch.Tensor:
        """What parallel decoding appends to the prompt, `[B, U (+ 1), hidden]`: zeros, then the stop token."""
        batch, _, width = like.shape
        zeros = like.new_zeros(batch, self.config.num_action_tokens, width)
        stop = self._stop_embedding(batch)
        return zeros if stop is None else torch.cat([zeros, stop.to(zeros.dtype)], dim=1)

    def _language(self, text: torch.Tensor, mask: torch.Tensor) -> torch.Tensor | None:
        """Mean embedding of the real tokens that are no actions, `[B, hidden]`; None without FiLM."""
        if not self.config.use_film:
            return None
        weight = mask.unsqueeze(-1).float()
        return ((text.float() * weight).sum(1) / weight.sum(1)).to(text.dtype)

    def _image_tokens(
        self, pixel_values: torch.Tensor, proprio: torch.Tensor | None, *, language: torch.Tensor | None
    ) -> torch.Tensor:
        """Projected patches of all images, then the projected state: `[B, images * M (+ 1), hidden]`."""
        if pixel_values is None:
            raise ValueError("pixel_values must be given: an OpenVLA model does not run on text alone.")
        if (proprio is not None) != self.config.use_proprio:
            raise ValueError(
                f"proprio must be {'given' if self.config.use_proprio else 'None'} with "
                f"use_proprio={self.config.use_proprio}."
            )
        tokens = self.projector(self.vision_backbone(pixel_values, language))
        if proprio is None:
            return tokens
        return torch.cat([tokens, self.proprio_projector(proprio).to(tokens.dtype)], dim=1)

    def _prefix(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        pixel_values: torch.Tensor,
        proprio: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Embeddings `[B, S, hidden]` and mask `[B, S]` of everything before the actions, pads after the images."""
        order = pads_after_first(attention_mask)
        input_ids, attention_mask = input_ids.gather(1, order), attention_mask.gather(1, order)
        text = self.get_input_embeddings()(input_ids)
        stop = self._stop_embedding(text.shape[0])
        spoken = (text, attention_mask) if stop is None else append(text, attention_mask, stop)
        image = self._image_tokens(pixel_values, proprio, language=self._language(spoken[0], spoken[1].bool()))
        kept = torch.ones(image.shape[:2], dtype=attention_mask.dtype, device=attention_mask.device)
        return after_first(text, image), after_first(attention_mask, kept)

    def _hidden(self, embeds: torch.Tensor, mask: torch.Tensor, *, cache: DynamicCache | None = None) -> torch.Tensor:
        """Final-norm hidden states of `embeds` `[B, S, hidden]`; `mask` `[B, cached + S]` covers the cache too."""
        positions = (mask.long().cumsum(1) - 1).clamp(min=0)[:, -embeds.shape[1] :]
        options = self._attention(mask, embeds.dtype)
        if cache is not None:
            options[_CACHE] = cache
        with self._recomputing_layers(cached=cache is not None):
            return self.language_model.model(
                inputs_embeds=embeds, position_ids=positions, use_cache=cache is not None, **options
            ).last_hidden_state

    def _attention(self, mask: torch.Tensor, dtype: torch.dtype) -> dict[str, Any]:
        """The Llama's arguments that say who sees whom; `mask` int64 `[B, S]`, 1 = token.

        Autoregressive: every token sees the tokens before it. Parallel: every token sees every token. Only flash
        attention follows `is_causal` in every supported release; the others are given the whole mask.
        """
        if not self.config.is_parallel:
            return {"attention_mask": mask}
        kind = self.language_model.config._attn_implementation
        if kind in ("sdpa", "eager"):
            mask = mask.bool()[:, None, None, :].expand(-1, 1, mask.shape[1], -1)
        if kind == "eager":
            mask = torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(~mask, torch.finfo(dtype).min)
        return {"attention_mask": mask, "is_causal": False}

    @contextmanager
    def _recomputing_layers(self, *, cached: bool) -> Iterator[None]:
        """Let activation checkpointing follow the gradient instead of the training flag.

        The library's layers recompute only in training mode, and drop the cache when they do. A policy that is
        trained with dropout off is in evaluation mode, and must keep its cache when it acts.
        """
        layers = self.language_model.model.layers
        before = [layer.training for layer in layers]
        recompute = torch.is_grad_enabled() and not cached
        for layer in layers:
            layer.training = recompute and getattr(layer, "gradient_checkpointing", False)
        try:
            yield
        finally:
            for layer, training in zip(layers, before, strict=True):
                layer.training = training
