"""SigLIP's image tower (arXiv 2303.15343) without its pooling head, as PI0 uses it.

Not here: the projector behind it and the preparation of pixels. Plain torch; parameter names are the checkpoints'.
Usage: `features = SiglipTower(VisionSizes(), image_size=224)(images)`.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from vla_accel.models.pi0.configuration import VisionSizes
from vla_accel.models.pi0.layers import NORM_EPS, by_rows, gelu


class SiglipAttention(nn.Module):
    """Full attention with biases."""

    def __init__(self, sizes: VisionSizes):
        super().__init__()
        self.num_heads = sizes.num_heads
        for name in ("k_proj", "v_proj", "q_proj", "out_proj"):
            setattr(self, name, nn.Linear(sizes.width, sizes.width))

    def forward(self, x: Tensor) -> Tensor:
        """Map `[M, n, width]` to the same shape."""
        query, key, value = (
            project(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        return self.out_proj(F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(-2))


class SiglipMLP(nn.Module):
    """Two layers with the tanh form of GELU."""

    def __init__(self, sizes: VisionSizes):
        super().__init__()
        self.fc1 = nn.Linear(sizes.width, sizes.mlp_dim)
        self.fc2 = nn.Linear(sizes.mlp_dim, sizes.width)

    def forward(self, x: Tensor) -> Tensor:
        """Map `[M, n, width]` to the same shape."""
        return by_rows(lambda rows: self.fc2(gelu(self.fc1(rows))), x)


class SiglipLayer(nn.Module):
    """One pre-norm block."""

    def __init__(self, sizes: VisionSizes):
        super().__init__()
        self.layer_norm1 = nn.LayerNorm(sizes.width, eps=NORM_EPS)
        self.self_attn = SiglipAttention(sizes)
        self.layer_norm2 = nn.LayerNorm(sizes.width, eps=NORM_EPS)
        self.mlp = SiglipMLP(sizes)

    def forward(self, x: Tensor) -> Tensor:
        """Map `[M, n, width]` to the same shape."""
        x = x + self.self_attn(self.layer_norm1(x))
        return x + self.mlp(self.layer_norm2(x))


class SiglipTower(nn.Module):
    """SigLIP without its pooling head: images to patch features."""

    def __init__(self, sizes: VisionSizes, image_size: int):
        super().__init__()
        patch, count = sizes.patch_size, (image_size // sizes.patch_size) ** 2
        self.embeddings = nn.Module()
        self.embeddings.patch_embedding = nn.Conv2d(3, sizes.width, patch, stride=patch)
        self.embeddings.position_embedding = nn.Embedding(count, sizes.width)
        self.encoder = nn.Module()
        self.encoder.layers = nn.ModuleList(SiglipLayer(sizes) for _ in range(sizes.depth))
        self.post_layernorm = nn.LayerNorm(sizes.width, eps=NORM_EPS)
        self.gradient_checkpointing = False

    def forward(self, images: Tensor) -> Tensor:
        """Encode float images `[M, 3, P, P]` in [-1, 1] to `[M, patches, width]`, patches row by row."""
        patches = self.embeddings.patch_embedding
        x = patches(images.to(patches.weight.dtype)).flatten(2).transpose(1, 2)
        x = x + self.embeddings.position_embedding.weight
        for layer in self.encoder.layers:
            if self.gradient_checkpointing and torch.is_grad_enabled():
                x = checkpoint(layer, x, use_reentrant=False)
            else:
                x = layer(x)
        return self.post_layernorm(x)
