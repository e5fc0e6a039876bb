"""PI0 and PI0.5 (arXiv 2410.24164, 2504.16054): a vision-language model and an action expert that share attention.

Not here: reading checkpoints (`loading.py`), pixels and words (`processing.py`), anything of reinforcement learning.
Usage: `actions = model.sample_actions(images, image_mask, tokens, token_mask, state, noise=noise, num_steps=10)`.

The observation ("prefix": cameras, then language) never sees the actions, so it runs once per decision; what the
expert reads of it, one rotated key and value per layer and token, is a `PrefixCache` of plain tensors that every
denoising step and every later scoring reuses. Masked cameras and padded words are dropped before the language model:
positions count valid tokens only, so that is exact.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from vla_accel.models.pi0.configuration import GemmaSizes, Pi0Config, VisionSizes
from vla_accel.models.pi0.layers import GemmaStack, RMSNorm
from vla_accel.models.pi0.prefix import PrefixCache, denoising_times, pack, time_embedding, visible
from vla_accel.models.pi0.vision import SiglipTower


class Pi0Model(PreTrainedModel):
    """PI0 or PI0.5, as the configuration says.

    Attributes:
        config: a `Pi0Config`.
    """

    config_class = Pi0Config
    main_input_name = "state"
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _no_split_modules = ("GemmaLayer", "SiglipLayer")

    def __init__(self, config: Pi0Config):
        super().__init__(config)
        vlm, expert = GemmaSizes(**config.vlm), GemmaSizes(**config.expert)
        vision, width = VisionSizes(**config.vision), config.expert["width"]
        self.is_pi05 = config.variant == "pi05"
        body = nn.Module()
        body.vision_tower = nn.Module()
        body.vision_tower.vision_model = SiglipTower(vision, config.image_size)
        body.multi_modal_projector = nn.Module()
        body.multi_modal_projector.linear = nn.Linear(vision.width, vlm.width)
        body.language_model = GemmaStack(vlm, vocab_size=config.vocab_size)
        self.paligemma_with_expert = nn.Module()
        self.paligemma_with_expert.paligemma = nn.Module()
        self.paligemma_with_expert.paligemma.model = body
        self.paligemma_with_expert.gemma_expert = nn.Module()
        self.paligemma_with_expert.gemma_expert.model = GemmaStack(expert, cond_dim=width if self.is_pi05 else None)
        self.action_in_proj = nn.Linear(config.max_action_dim, width)
        self.action_out_proj = nn.Linear(width, config.max_action_dim)
        if self.is_pi05:
            self.time_mlp_in, self.time_mlp_out = nn.Linear(width, width), nn.Linear(width, width)
        else:
            self.state_proj = nn.Linear(config.max_state_dim, width)
            self.action_time_mlp_in, self.action_time_mlp_out = nn.Linear(2 * width, width), nn.Linear(width, width)
        self.post_init()
        for parameter in self.output_only_parameters():
            parameter.requires_grad_(False)

    def output_only_parameters(self) -> list[nn.Parameter]:
        """Weights that only `with_output=True` reads, and so no action: all behind the last block's keys and values.

        Frozen when the model is made: no loss on actions reaches them, and data-parallel training would wait for it.
        """
        last = self.language_model.layers[-1]
        parts = (last.self_attn.q_proj, last.self_attn.o_proj, last.post_attention_layernorm, last.mlp)
        return [p for module in (*parts, self.language_model.norm) for p in module.parameters()]

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Conv2d)):
            nn.init.normal_(module.weight, std=0.02)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        elif isinstance(module, RMSNorm) and not module.adaptive:
            nn.init.zeros_(module.weight)
        elif isinstance(module, nn.LayerNorm):
            nn.init.ones_(module.weight)
            nn.init.zeros_(module.bias)

    @property
    def vision_tower(self) -> SiglipTower:
        """The image encoder."""
        return self.paligemma_with_expert.paligemma.model.vision_tower.vision_model

    @property
    def language_model(self) -> GemmaStack:
        """The prefix stack."""
        return self.paligemma_with_expert.paligemma.model.language_model

    @property
    def expert(self) -> GemmaStack:
        """The action expert."""
        return self.paligemma_with_expert.gemma_expert.model

    def get_input_embeddings(self) -> nn.Embedding:
        """The token embedding."""
        return self.language_model.embed_tokens

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str | Path, **kwargs: Any) -> Pi0Model:
        """Load a checkpoint strictly; see `loading.load_model`."""
        from vla_accel.models.pi0.loading import load_model

        return load_model(pretrained_model_name_or_path, **kwargs)

    def save_pretrained(self, save_directory: str | Path, **kwargs: Any) -> None:
        """Write a folder that LeRobot loads; see `loading.save_model`."""
        from vla_accel.models.pi0.loading import save_model

        save_model(self, save_directory, **kwargs)

    def embed_images(self, images: Tensor) -> Tensor:
        """Encode float images `[M, 3, P, P]` in [-1, 1] to tokens `[M, patches, width]`."""
        return self.paligemma_with_expert.paligemma.model.multi_modal_projector.linear(self.vision_tower(images))

    def embed_prefix(
        self, images: Tensor, image_mask: Tensor, tokens: Tensor, token_mask: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Embed cameras and words. Masked cameras are not encoded; their rows are 0.

        Args:
            images: float32 `[B, C, 3, P, P]` in [-1, 1].
            image_mask: bool `[B, C]`, True = the camera exists.
            tokens: int64 `[B, L]`.
            token_mask: bool `[B, L]`, True = a real token.

        Returns:
            Embeddings `[B, C * patches + L, width]`, cameras first, and which of them are valid, bool `[B, ...]`.
        """
        batch, cameras = image_mask.shape
        seen = self.embed_images(images[image_mask] if not image_mask.all() else images.flatten(0, 1))
        if len(seen) < batch * cameras:
            slots = seen.new_zeros(batch, cameras, *seen.shape[1:])
            seen = slots.index_put((image_mask,), seen)
        seen = seen.reshape(batch, -1, seen.shape[-1])
        words = self.language_model.embed(tokens).to(seen.dtype)
        valid = torch.cat([image_mask.repeat_interleave(seen.shape[1] // cameras, 1), token_mask.bool()], 1)
        return torch.cat([seen, words], 1), valid

    def prefix_cache(
        self, images: Tensor, image_mask: Tensor, tokens: Tensor, token_mask: Tensor, *, with_output: bool = False
    ) -> PrefixCache:
        """Run the vision-language model once over B observations.

        Args:
            images: of `embed_prefix`.
            image_mask: of `embed_prefix`.
            tokens: of `embed_prefix`.
            token_mask: of `embed_prefix`.
            with_output: also keep the language model's output. Without, its last block is not run.
        """
        seen = image_mask.any(0)  # a camera that no row has need not even be a slot
        embeds, mask = pack(*self.embed_prefix(images[:, seen], image_mask[:, seen], tokens, token_mask))
        table = self.language_model.table(torch.arange(mask.shape[1], device=mask.device).expand_as(mask))
        output, keys, values = self.language_model(embeds, table, mask=visible(mask), with_output=with_output)
        return PrefixCache(torch.stack(keys, 1), torch.stack(values, 1), mask, output)

    def _suffix(self, x: Tensor, time: Tensor) -> tuple[Tensor, Tensor | None]:
        """Action tokens `[B, H, width]` and the condition of adaptive norms, both float32."""
        config = self.config
        with torch.autocast(x.device.type, enabled=False):
            actions = self.action_in_proj(x.to(self.action_in_proj.weight.dtype))
            embedded = time_embedding(
                time.float(), actions.shape[-1], min_period=config.min_period, max_period=config.max_period
            ).to(actions.dtype)
            if self.is_pi05:
                return actions, F.silu(self.time_mlp_out(F.silu(self.time_mlp_in(embedded))))
            mixed = torch.cat([actions, embedded[:, None].expand_as(actions)], -1)
            return self.action_time_mlp_out(F.silu(self.action_time_mlp_in(mixed))), None

    def _state_token(self, state: Tensor) -> Tensor:
        with torch.autocast(state.device.type, enabled=False):
            return self.state_proj(state.to(self.state_proj.weight.dtype))[:, None]

    def _head(self, output: Tensor) -> tuple[Tensor, Tensor]:
        with torch.autocast(output.device.type, enabled=False):
            hidden = output.float()
            return self.action_out_proj(hidden.to(self.action_out_proj.weight.dtype)).float(), hidden

    def denoise(self, cache: PrefixCache, state: Tensor, x: Tensor, time: Tensor) -> tuple[Tensor, Tensor]:
        """Velocity of the flow and the features it is read from, with gradients.

        Args:
            cache: of the observations, B rows.
            state: float32 `[B, max_state_dim]`, normalised and padded; not read by PI0.5.
            x: float32 `[B, H, D]`, a point of the flow.
            time: float32 `[B]`, flow time: 1 is noise, 0 the action.

        Returns:
            velocity float32 `[B, H, D]` (noise minus action) and the expert's output float32 `[B, H, width]`.
        """
        suffix, cond = self._suffix(x, time)
        if not self.is_pi05:
            suffix = torch.cat([self._state_token(state), suffix], 1)
        count, horizon = suffix.shape[1], x.shape[1]
        table = self.expert.table(cache.lengths[:, None] + torch.arange(count, device=x.device))
        mask = visible(cache.mask, count)
        past = list(zip(cache.keys.unbind(1), cache.values.unbind(1), strict=True))
        output, _, _ = self.expert(suffix, table, mask=mask, past=past, cond=cond, blind=count - horizon)
        return self._head(output[:, -horizon:])

    def velocity(self, cache: PrefixCache, state: Tensor, x: Tensor, time: Tensor) -> Tensor:
        """The velocity alone; see `denoise`."""
        return self.denoise(cache, state, x, time)[0]

    @torch.no_grad()
    def stepper(self, cache: PrefixCache, state: Tensor) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
        """Prepare for many denoising steps of the same observations.

        The state token is run once, and each step writes its keys behind the prefix's instead of copying the cache.

        Returns:
            `step(x, time)`, which equals `denoise` without gradients.
        """
        dtype, horizon = self.expert.compute_dtype, self.config.chunk_size
        if torch.is_autocast_enabled(cache.keys.device.type):
            dtype = torch.get_autocast_dtype(cache.keys.device.type)
        fixed = 0 if self.is_pi05 else 1
        room = (0, 0, 0, fixed + horizon)
        past = [
            tuple(F.pad(part[:, index].to(dtype), room) for part in (cache.keys, cache.values))
            for index in range(cache.keys.shape[1])
        ]
        mask = visible(cache.mask, fixed + horizon)
        if fixed:
            width = cache.mask.shape[1] + 1
            until = None if mask is None else mask[:, :width]
            short = [tuple(part[:, :width] for part in pair) for pair in past]
            self.expert(
                self._state_token(state),
                self.expert.table(cache.lengths[:, None]),
                mask=until,
                past=short,
                in_place=True,
                with_output=False,
            )
        table = self.expert.table(cache.lengths[:, None] + fixed + torch.arange(horizon, device=cache.mask.device))

        @torch.no_grad()
        def step(x: Tensor, time: Tensor) -> tuple[Tensor, Tensor]:
            suffix, cond = self._suffix(x, time)
            output, _, _ = self.expert(suffix, table, mask=mask, past=past, in_place=True, cond=cond)
            return self._head(output)

        return step

    @torch.no_grad()
    def sample_actions(
        self,
        images: Tensor,
        image_mask: Tensor,
        tokens: Tensor,
        token_mask: Tensor,
        state: Tensor,
        *,
        noise: Tensor | None = None,
        num_steps: int | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Integrate the flow from noise to actions with Euler steps.

        Args:
            images: of `embed_prefix`.
            image_mask: of `embed_prefix`.
            tokens: of `embed_prefix`.
            token_mask: of `embed_prefix`.
            state: of `denoise`.
            noise: float32 `[B, H, D]`, standard normal. None: drawn.
            num_steps: Euler steps. None: the checkpoint's.
            generator: of the noise, on the state's device.

        Returns:
            float32 `[B, H, D]`: normalised actions, all padded columns included.
        """
        num_steps = self.config.num_inference_steps if num_steps is None else num_steps
        if num_steps < 1:
            raise ValueError(f"num_steps must be at least 1, but is {num_steps}.")
        shape = (len(state), self.config.chunk_size, self.config.max_action_dim)
        x = torch.randn(shape, generator=generator, device=state.device) if noise is None else noise.float()
        step = self.stepper(self.prefix_cache(images, image_mask, tokens, token_mask), state)
        for time in denoising_times(num_steps):
            x = x + (-1.0 / num_steps) * step(x, torch.full((len(x),), time, device=x.device))[0]
        return x

    def sample_time(self, count: int, *, generator: torch.Generator | None = None, device: Any = "cpu") -> Tensor:
        """Draw training times, float32 `[count]`: a Beta(alpha, 1) variable by its inverse distribution function."""
        config = self.config
        drawn = torch.rand(count, generator=generator, device=device) ** (1 / config.time_sampling_beta_alpha)
        return drawn * config.time_sampling_scale + config.time_sampling_offset

    def forward(
        self,
        cache: PrefixCache,
        state: Tensor,
        actions: Tensor,
        *,
        noise: Tensor | None = None,
        time: Tensor | None = None,
        generator: torch.Generator | None = None,
        reduction: str = "mean",
    ) -> Tensor:
        """Flow-matching loss: squared error of the velocity at a random point between noise and action.

        Args:
            cache: of the observations, B rows.
            state: of `denoise`.
            actions: float32 `[B, H, D]`, normalised and padded.
            noise: standard normal of the same shape. None: drawn.
            time: float32 `[B]`. None: drawn.
            generator: of both, on the actions' device.
            reduction: `"mean"` over the real action columns, or `"none"`.

        Returns:
            A scalar, or float32 `[B, H, D]` over all columns.
        """
        if reduction not in ("mean", "none"):
            raise ValueError(f"reduction must be mean or none, but is {reduction!r}.")
        if noise is None:
            noise = torch.randn(actions.shape, generator=generator, device=actions.device)
        if time is None:
            time = self.sample_time(len(actions), generator=generator, device=actions.device)
        x = time[:, None, None] * noise + (1 - time[:, None, None]) * actions
        error = (self.velocity(cache, state, x, time) - (noise - actions)).square()
        return error if reduction == "none" else error[..., : self.config.action_dim].mean()
