"""What the modes put back when they end: flags and buffers of submodules, and torch's global random state.

Not here: the modes themselves (`modes.py`, the only user).
Usage: `with restored_flags(model): model.eval()`
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn

_rollout_random: WeakKeyDictionary[nn.Module, list[torch.Tensor]] = WeakKeyDictionary()
"""Where each model's last rollout left torch's global random state."""


def checkpointing(model: nn.Module) -> list[nn.Module]:
    """Submodules whose own gradient checkpointing is on; wrappers, which show their module's flags, are not."""
    return [
        module
        for module in model.modules()
        if vars(module).get("gradient_checkpointing", getattr(type(module), "gradient_checkpointing", False)) is True
    ]


@contextmanager
def restored_flags(model: nn.Module) -> Iterator[None]:
    """Put back each submodule's train/eval flag, and gradient checkpointing where it was on."""
    training = {module: module.training for module in model.modules()}
    checkpointed = checkpointing(model)
    try:
        yield
    finally:
        for module, flag in training.items():
            module.training = flag
        for module in checkpointed:
            module.gradient_checkpointing = True  # type: ignore[assignment]


@contextmanager
def restored_buffers(model: nn.Module) -> Iterator[None]:
    """Put back each buffer, whether it was written to or replaced."""
    places = [
        (module, name, buffer, buffer.clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    try:
        yield
    finally:
        for module, name, buffer, value in places:
            module._buffers[name] = buffer
            if not torch.equal(buffer, value):
                buffer.data.copy_(value)


@contextmanager
def own_random_stream(model: nn.Module) -> Iterator[None]:
    """Put back torch's global random state, and go on where the last rollout of this model stopped.

    Starting each rollout from training's state would give all of them the same noise if training draws none, and
    starting the first one there would give it to all ranks, which are seeded alike.
    """
    kinds = {tensor.device.type for tensor in (*model.parameters(), *model.buffers())} - {"cpu", "meta"}
    sources = [torch, *(getattr(torch, kind) for kind in sorted(kinds))]

    def state() -> list[torch.Tensor]:
        return [source.get_rng_state() for source in sources]

    def set_state(states: list[torch.Tensor]) -> None:
        for source, its_state in zip(sources, states, strict=True):
            source.set_rng_state(its_state)

    before = state()
    if model in _rollout_random:
        set_state(_rollout_random[model])
    elif dist.is_initialized() and dist.get_rank() > 0:
        seed = int(torch.randint(2**62, ())) ^ dist.get_rank()
        for source in sources:  # not torch.manual_seed, which also seeds devices that are not put back
            (torch.default_generator if source is torch else source).manual_seed(seed)
    try:
        yield
    finally:
        _rollout_random[model] = state()
        set_state(before)
