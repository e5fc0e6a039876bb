"""Tiny untrained PI0 and PI0.5 checkpoints, and policies of them that depend on everything they see."""

import torch

from vla_accel.config import Pi0PolicyConfig
from vla_accel.models.pi0.tiny import make_tiny_pi0, range_statistics
from vla_accel.policies import load_policy

SMALL = {
    "layers": 2, "width": 32, "mlp_dim": 64, "expert_width": 32, "expert_mlp_dim": 64, "vision_width": 32,
    "num_heads": 4, "image_size": 32, "chunk": 3, "state_dim": 8,
}  # fmt: skip
KINDS = {
    "one step": {},
    "all steps": {"noise_steps": "all"},
    "learned": {"noise": "learned"},
    "learned, all": {"noise": "learned", "noise_steps": "all"},
}


def make_folder(folder, variant="pi0", **options):
    """Write the checkpoint."""
    statistics = range_statistics(state=([-1.0] * 8, [1.0] * 8), action=([-2.0] * 7, [1.0] * 7))
    return make_tiny_pi0(folder, variant=variant, statistics=statistics, **SMALL, **options)


def make_policy(folder, variant="pi0", **options):
    """Load it and give it heads that are not 0."""
    torch.manual_seed(0)
    policy = load_policy(variant, Pi0PolicyConfig(path=str(folder), value_hidden=8, **options))
    with torch.no_grad():
        heads = [policy.model.action_out_proj, policy.value_head.out]
        for head in heads + ([policy.noise_head.out] if policy.noise_head else []):
            torch.nn.init.normal_(head.weight, std=0.3)
    return policy
