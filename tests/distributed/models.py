"""A small policy of the shape real ones have: frozen tower, repeated layers, dropout, checkpointing, value head."""

from __future__ import annotations

from contextlib import contextmanager

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from vla_accel.policies.base import ValueHead
from vla_accel.types import PolicySample, PolicyScore

WIDTH, VOCAB, UNITS = 32, 16, 4


class TowerBlock(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.norm, self.fc = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x):
        return x + self.fc(self.norm(x)).relu()


def add_adapters(model: nn.Module, *layers: str) -> None:
    """Freeze a model, and give linear layers with these names trainable low-rank additions that are not zero."""
    from peft import LoraConfig, inject_adapter_in_model

    model.requires_grad_(False)
    inject_adapter_in_model(LoraConfig(r=2, target_modules=list(layers), init_lora_weights=False), model)


class Block(nn.Module):
    gradient_checkpointing = False

    def __init__(self, width: int):
        super().__init__()
        self.norm1, self.mix = nn.LayerNorm(width), nn.Linear(width, width)
        self.norm2, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(0.1)
        self.register_buffer("scale", torch.linspace(0.9, 1.1, width))
        self.recomputed = 0

    def forward(self, x):
        if self.gradient_checkpointing and self.training:
            return checkpoint(self._forward, x, use_reentrant=False)
        return self._forward(x)

    def _forward(self, x):
        self.recomputed += 1
        past = x.cumsum(1) / torch.arange(1, x.shape[1] + 1, device=x.device, dtype=x.dtype)[:, None]
        x = x + self.mix(self.norm1(past) * self.scale.to(x.dtype))
        return x + self.dropout(self.down(nn.functional.gelu(self.up(self.norm2(x)))))


class TinyPolicy(nn.Module):
    shard_units = ("Block", "TowerBlock")

    def __init__(self, *, width: int = WIDTH, depth: int = 4, tower: int = 2, adapters: bool = False, units=None):
        super().__init__()
        if units is not None:
            self.shard_units = units
        self.tower = nn.Sequential(*[TowerBlock(width) for _ in range(tower)]).requires_grad_(False)
        self.embed = nn.Embedding(VOCAB, width)
        self.state_proj = nn.Linear(3, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCAB)
        self.value_head = ValueHead(width, hidden_dim=16)
        nn.init.normal_(self.value_head.out.weight, std=0.1)
        self.register_buffer("unit_step", torch.zeros(UNITS, dtype=torch.int64))
        self.seen: list[torch.dtype] = []
        if adapters:
            add_adapters(self, "up")
            self.value_head.requires_grad_(True)

    def logits(self, ids, state):
        x = self.embed(ids) + self.tower(self.state_proj(state))[:, None]
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        return self.head(x).float(), x[:, -1]

    def forward(self, inputs, trace=None, *, greedy=False):
        self.seen.append(inputs["state"].dtype)
        if trace is None:
            with torch.no_grad():
                tokens, log_probs = [], []
                ids = inputs["ids"]
                for _ in range(UNITS):
                    logits, feature = self.logits(ids, inputs["state"])
                    log_prob = logits[:, -1].log_softmax(-1)
                    token = log_prob.argmax(-1)
                    tokens.append(token)
                    log_probs.append(log_prob.gather(1, token[:, None])[:, 0])
                    ids = torch.cat([ids, token[:, None]], 1)
                tokens = torch.stack(tokens, 1)
                return PolicySample(
                    action=tokens[:, :, None].float(),
                    trace={"tokens": tokens},
                    log_prob=torch.stack(log_probs, 1),
                    value=self.value_head(feature),
                )
        ids = torch.cat([inputs["ids"], trace["tokens"]], 1)[:, :-1]
        logits, feature = self.logits(ids, inputs["state"])
        log_prob = logits[:, -UNITS:].log_softmax(-1)
        entropy = -(log_prob.exp() * log_prob).sum(-1)
        return PolicyScore(
            log_prob=log_prob.gather(2, trace["tokens"][:, :, None])[:, :, 0],
            entropy=entropy,
            value=self.value_head(feature),
        )


def batch(seed: int, rows: int = 4) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "ids": torch.randint(VOCAB, (rows, 5), generator=generator),
        "state": torch.randn(rows, 3, generator=generator),
    }


def loss_of(score: PolicyScore, weight: float = 1.0) -> torch.Tensor:
    return weight * (score.log_prob.mean() + 0.1 * score.entropy.mean() + (score.value - 1).square().mean())


@contextmanager
def raises(kind: type[BaseException], *words: str):
    """`pytest.raises` for workers: the error must name all `words`."""
    found = None
    try:
        yield
    except kind as error:
        found = str(error)
    missing = [word for word in words if word not in (found or "")]
    assert found is not None, f"no {kind.__name__} was raised"
    assert not missing, f"{missing} not in {found}"
