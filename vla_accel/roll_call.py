"""Which ranks are here: agreement through the process group's store, without a collective.

A collective that one rank does not join hangs; a store can be asked who is missing.

Not here: sums and decisions over ranks, which are collectives (`distributed.py`).
Usage: `meet("enter rollout_mode", timeout_s=60)`.
"""

from __future__ import annotations

import itertools
import time

import torch.distributed as dist

_MEETINGS = itertools.count()


def meet(event: str, *, timeout_s: float) -> None:
    """Wait until every rank is about to do `event`, without a collective.

    Uses the process group's store, so a rank that is elsewhere gives an error instead of a hang. A no-op in a single
    process. Call on every rank.

    Raises:
        RuntimeError: ranks that do not come within `timeout_s` seconds, or that are about to do something else.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    store, rank, size = dist.distributed_c10d._get_default_store(), dist.get_rank(), dist.get_world_size()
    meeting = next(_MEETINGS)
    keys = [f"vla_accel/meeting/{meeting}/{other}" for other in range(size)]
    store.set(keys[rank], event)
    deadline, pause = time.monotonic() + timeout_s, 0.001
    while not store.check(keys):
        if time.monotonic() > deadline:
            missing = [other for other, key in enumerate(keys) if not store.check([key])]
            raise RuntimeError(
                f"Rank {rank} waited {timeout_s:g} s to {event}, but ranks {missing} did not come. "
                "Call it on every rank."
            )
        time.sleep(pause)
        pause = min(2 * pause, 0.05)
    others = {other: store.get(key).decode() for other, key in enumerate(keys)}
    if set(others.values()) != {event}:
        elsewhere = {other: what for other, what in others.items() if what != event}
        raise RuntimeError(f"Rank {rank} is about to {event}, but others do something else: {elsewhere}.")
    if meeting:
        store.delete_key(f"vla_accel/meeting/{meeting - 1}/{rank}")
