"""Image towers and projectors of OpenVLA, under the checkpoint's own parameter names.

The towers come from timm; their blocks are `VisionBlock`, which names the layer scale as the checkpoints do, can be
modulated by language (FiLM) and can be recomputed in the backward pass.
Not here: resizing and normalising images (`processing.py`), the language model (`modeling.py`).
Usage: `VisionBackbone(config)(pixel_values)`.

`M` = patches per image, 256 at 224 pixels; `V` = channels of all towers together.
"""

from __future__ import annotations

import functools
from difflib import get_close_matches

import timm
import torch
from timm.models.vision_transformer import Block, VisionTransformer
from torch import nn

from vla_accel.models.openvla.configuration import OpenVLAConfig

_CHANNELS = 3  # of one image for one tower


class LayerScale(nn.Module):
    """Multiplies every channel by a learned factor.

    Checkpoints name the factor `scale_factor`: the usual name, `gamma`, is renamed by some loaders.
    """

    def __init__(self, dim: int, *, init_value: float = 1e-5):
        super().__init__()
        self.scale_factor = nn.Parameter(torch.full((dim,), init_value))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Scale `[..., dim]`."""
        return hidden * self.scale_factor


class VisionBlock(Block):
    """A pre-norm transformer block of a tower, optionally modulated by language.

    Args:
        dim: width of the tower.
        num_heads: attention heads.
        init_values: start of the layer scale, None for no layer scale.
        language_dim: width of the language vector that modulates the block, None for no modulation (FiLM,
            arXiv:1709.07871): between attention and MLP, `x <- x * (1 + scale(language)) + shift(language)`.
        **kwargs: what timm passes on.
    """

    gradient_checkpointing = False  # switched by `PreTrainedModel`, together with the language model's layers

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        init_values: float | None = None,
        language_dim: int | None = None,
        **kwargs,
    ):
        super().__init__(dim, num_heads, init_values=None, **kwargs)
        if init_values:
            self.ls1, self.ls2 = (LayerScale(dim, init_value=init_values) for _ in range(2))
        self.modulated = language_dim is not None
        if self.modulated:
            self.scale = nn.Linear(language_dim, dim)
            self.shift = nn.Linear(language_dim, dim)

    def forward(self, hidden: torch.Tensor, language: torch.Tensor | None = None) -> torch.Tensor:
        """Map `[B, M + prefix, dim]` to the same shape; `language` is `[B, language_dim]`, None without FiLM."""
        # Recomputation starts inside `forward`, so that sharding hooks around the module do not run twice.
        if self.gradient_checkpointing and torch.is_grad_enabled():
            return self._gradient_checkpointing_func(self._compute, hidden, language)
        return self._compute(hidden, language)

    def _compute(self, hidden: torch.Tensor, language: torch.Tensor | None) -> torch.Tensor:
        hidden = hidden + self.drop_path1(self.ls1(self.attn(self.norm1(hidden))))
        if self.modulated:
            hidden = hidden * (1 + self.scale(language).unsqueeze(1)) + self.shift(language).unsqueeze(1)
        return hidden + self.drop_path2(self.ls2(self.mlp(self.norm2(hidden))))


class VisionBackbone(nn.Module):
    """One or two towers that see the same images, each with its own normalisation.

    The features are the residual stream after the last block but one, without the final norm. The last block, the
    norm and the pooling head are part of every checkpoint and are kept, frozen, so that a saved folder is complete.
    """

    def __init__(self, config: OpenVLAConfig):
        super().__init__()
        self.num_images = config.num_images_in_input
        self.featurizer = _tower(config, 0)
        if config.use_fused_vision_backbone:
            self.fused_featurizer = _tower(config, 1)
        self.freeze_inert()

    @property
    def towers(self) -> list[VisionTransformer]:
        """The towers in the order of the channels of `pixel_values`."""
        return [self.featurizer, *([self.fused_featurizer] if hasattr(self, "fused_featurizer") else [])]

    @property
    def embed_dim(self) -> int:
        """V, channels of a patch feature."""
        return sum(tower.embed_dim for tower in self.towers)

    def freeze_inert(self) -> None:
        """Freeze the parameters that cannot influence the features: sharding and DDP must not wait for them."""
        for tower in self.towers:
            inert = [tower.blocks[-1], tower.norm, tower.fc_norm, tower.head, getattr(tower, "attn_pool", None)]
            for module in filter(None, inert):
                module.requires_grad_(False)

    def forward(self, pixel_values: torch.Tensor, language: torch.Tensor | None = None) -> torch.Tensor:
        """Turn images into patch features.

        Args:
            pixel_values: float `[B, 3 * towers * images, P, P]`: image by image, within an image tower by tower.
            language: `[B, hidden]`, the vector that modulates the blocks; None without FiLM.

        Returns:
            `[B, images * M, V]`, image by image.

        Raises:
            ValueError: the number of channels does not fit.
        """
        towers = self.towers
        per_image = _CHANNELS * len(towers)
        batch, channels, *side = pixel_values.shape
        if channels != per_image * self.num_images:
            raise ValueError(
                f"pixel_values must have {per_image * self.num_images} channels ({self.num_images} image(s) of "
                f"{per_image}), not {channels}. Set num_images_in_input to the number of cameras."
            )
        pixels = pixel_values.reshape(batch * self.num_images, per_image, *side)
        if language is not None:
            language = language.repeat_interleave(self.num_images, dim=0)
        parts = pixels.split(_CHANNELS, dim=1)
        features = torch.cat([_patches(*pair, language) for pair in zip(towers, parts, strict=True)], dim=2)
        return features.reshape(batch, -1, features.shape[-1])


def _tower(config: OpenVLAConfig, index: int) -> VisionTransformer:
    """Build tower `index` of a configuration; no weights are downloaded."""
    name = config.timm_model_ids[index]
    known = {*timm.list_models(), *timm.list_models(include_tags=True)}
    if name not in known:
        near = get_close_matches(name, known, n=1)
        hint = f" Did you mean {near[0]}?" if near else ""
        raise ValueError(f"timm_model_ids must name models that timm {timm.__version__} has, not {name!r}.{hint}")
    sizes = dict((config.timm_model_kwargs or [{}] * (index + 1))[index])
    activation = config.timm_override_act_layers[index]
    if activation is not None:
        sizes["act_layer"] = activation
    language_dim = config.text_config.hidden_size if config.use_film else None
    return timm.create_model(
        name,
        pretrained=False,
        num_classes=0,
        img_size=config.image_sizes[index],
        block_fn=functools.partial(VisionBlock, language_dim=language_dim),
        **sizes,
    )


def _patches(tower: VisionTransformer, pixels: torch.Tensor, language: torch.Tensor | None) -> torch.Tensor:
    """Patch tokens `[B, M, dim]` after the last block but one; the last block is never run."""
    hidden = tower.patch_embed(pixels.to(tower.patch_embed.proj.weight.dtype))
    hidden = tower.norm_pre(tower.patch_drop(tower._pos_embed(hidden)))
    for block in list(tower.blocks)[:-1]:
        hidden = block(hidden, language)
    return hidden[:, tower.num_prefix_tokens :]


class PatchProjector(nn.Module):
    """MLP from patch features `[..., V]` to the language model's width; three layers for two towers, else two."""

    def __init__(self, vision_dim: int, hidden_size: int, *, fused: bool):
        super().__init__()
        self.fused = fused
        if fused:
            self.fc1 = nn.Linear(vision_dim, 4 * vision_dim)
            self.fc2 = nn.Linear(4 * vision_dim, hidden_size)
            self.fc3 = nn.Linear(hidden_size, hidden_size)
        else:
            self.fc1 = nn.Linear(vision_dim, hidden_size)
            self.fc2 = nn.Linear(hidden_size, hidden_size)
        self.activation = nn.GELU()

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """Project `[B, M, V]` to `[B, M, hidden]`."""
        hidden = self.fc2(self.activation(self.fc1(features)))
        return self.fc3(self.activation(hidden)) if self.fused else hidden


class ProprioProjector(nn.Module):
    """MLP from a normalised robot state to one token of the language model."""

    def __init__(self, proprio_dim: int, hidden_size: int):
        super().__init__()
        self.fc1 = nn.Linear(proprio_dim, hidden_size)
        self.fc2 = nn.Linear(hidden_size, hidden_size)
        self.activation = nn.GELU()

    def forward(self, proprio: torch.Tensor) -> torch.Tensor:
        """Project `[B, proprio_dim]` to `[B, 1, hidden]`."""
        state = proprio.to(self.fc1.weight.dtype)
        return self.fc2(self.activation(self.fc1(state))).unsqueeze(1)
