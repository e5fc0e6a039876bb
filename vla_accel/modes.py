"""The two states of a sharded model: rollout mode, with every parameter at hand, and train mode, sharded.

Sharded training gathers each layer for each forward, on all ranks in step. A rollout cannot keep step: episodes end
when they end. `rollout_mode` gathers everything once, in the dtype forwards compute in, and keeps it until the end.

Not here: preparing models (`distributed.py`), how they are gathered (`gathering.py`) and what is put back afterwards
(`restoring.py`), collecting a rollout (`rollout.py`).
Usage: `with rollout_mode(model): sample = model(inputs)`; always call the prepared model itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from weakref import WeakKeyDictionary

import torch
from torch import nn

from vla_accel.gathering import full_precision, gathered, kind_of, reshard
from vla_accel.restoring import checkpointing, own_random_stream, restored_buffers, restored_flags
from vla_accel.roll_call import meet, say_busy

_open: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()
"""Models inside one of the contexts below, and which."""


@contextmanager
def rollout_mode(model: nn.Module, *, timeout_s: float = 60.0) -> Iterator[nn.Module]:
    """Act with a model that may be sharded: no gradients, eval mode, and no collective until the context ends.

    Entering gathers one full copy of the parameters in compute dtype (bf16 under bf16 mixed precision) beside the
    shards; leaving frees it. Inside, each rank may run as many forwards as it likes. Everything is put back on the way
    out, also after an exception: each submodule's train/eval flag, gradient checkpointing, buffers, and torch's global
    random state, of which the rollouts of each rank have a stream of their own. Entering again inside changes nothing.

    What is written to parameters inside is lost where they are sharded, and an error where they are not.

    Collective on entry, not on leaving: call on every rank.

    Args:
        model: prepared as FSDP1, FSDP2 or DDP, or a plain module.
        timeout_s: seconds to wait on entry for other ranks, not counting those that are still in a rollout.

    Raises:
        RuntimeError: a rank that does not enter, or a parameter that was written to.
        ValueError: a wrapper that cannot be gathered this way.
    """
    if _open.get(model) == "rollout_mode":
        yield model
        return
    kind = kind_of(model)
    _check_closed(model, "rollout_mode")
    if kind != "plain":
        meet("enter rollout_mode", timeout_s=timeout_s, busy="rollout")
    with ExitStack() as stack:
        if kind != "plain":
            stack.callback(say_busy, "")
        stack.enter_context(restored_flags(model))
        stack.enter_context(restored_buffers(model))
        stack.enter_context(own_random_stream(model))
        stack.enter_context(torch.no_grad())
        model.eval()
        for module in checkpointing(model):
            module.gradient_checkpointing = False  # type: ignore[assignment]
        stack.enter_context(gathered(model))
        stack.enter_context(_opened(model, "rollout_mode"))
        yield model


@contextmanager
def train_mode(model: nn.Module) -> Iterator[nn.Module]:
    """Score and update: gradients on, parameters sharded, dropout off, gradient checkpointing as configured.

    Dropout stays off because old and new log-probs must come from the same function: then PPO's ratio is 1 before the
    first step. Layers that checkpoint only in train mode are put into it; what is inside them is not. Flags are put
    back on leaving, and what a forward without a backward left gathered is freed.

    Raises:
        RuntimeError: entered inside `rollout_mode` or `full_params` of the same model, where nothing is sharded.
    """
    _check_closed(model, "train_mode")
    with restored_flags(model), torch.enable_grad():
        model.eval()
        model.training = True
        for module in checkpointing(model):
            module.training = True
        yield model
    reshard(model)


@contextmanager
def full_params(model: nn.Module) -> Iterator[nn.Module]:
    """Show the raw, full-precision parameters of a model that may be sharded, to read: export, folding, copies.

    For reading `named_parameters()`, not for forwards (`rollout_mode`) and not for `state_dict()`, which FSDP
    overrides. Holds a full copy in the parameters' own dtype on every rank; what is written to it is lost where
    parameters are sharded. Collective: call on every rank.

    Raises:
        RuntimeError: entered inside `rollout_mode` of the same sharded model.
        ValueError: a wrapper that cannot be gathered this way.
    """
    kind = kind_of(model)
    if kind in ("plain", "ddp") or _open.get(model) == "full_params":
        yield model
        return
    _check_closed(model, "full_params")
    with full_precision(model), _opened(model, "full_params"):
        yield model


def _check_closed(model: nn.Module, entering: str) -> None:
    if model in _open:
        raise RuntimeError(f"{entering} was entered inside {_open[model]} of the same model; leave that first.")


@contextmanager
def _opened(model: nn.Module, name: str) -> Iterator[None]:
    _open[model] = name
    try:
        yield
    finally:
        del _open[model]
