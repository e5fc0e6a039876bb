"""Which ranks are here: agreement and signs of life through the process group's store, without a collective.

A collective that one rank does not join hangs or fails with the address of a socket; a store can be asked who is
missing. `meet` gathers the ranks before they depend on each other, and a `Watch` notices those that are gone.

Not here: sums and decisions over ranks, which are collectives (`distributed.py`).
Usage: `meet("enter rollout_mode", timeout_s=60)`; `Watch.start(timeout_s=1800)` once per process.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from types import TracebackType
from typing import Any, ClassVar

import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

BEAT_S = 1.0
"""Seconds between a rank's signs of life."""

_held: list[str] = []
"""The meetings that all ranks came to."""


def meet(event: str, *, timeout_s: float, busy: str = "") -> None:
    """Wait until every rank is about to do `event`, without a collective.

    A rank that is elsewhere gives an error instead of a hang; one that is busy (`say_busy`) is waited for, at most for
    torch's default timeout. A no-op in a single process. Call on every rank.

    Args:
        event: what comes next, in words: `"enter rollout_mode"`.
        timeout_s: seconds to wait for ranks that are not busy.
        busy: what to enter as this rank's occupation once all have come; see `say_busy`.

    Raises:
        RuntimeError: ranks that do not come, or that are about to do something else.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    store, rank, size = dist.distributed_c10d._get_default_store(), dist.get_rank(), dist.get_world_size()
    meeting = len(_held)
    keys = [f"vla_accel/meeting/{meeting}/{other}" for other in range(size)]
    store.set(keys[rank], event)
    start = time.monotonic()
    deadline, look_at, pause = start + timeout_s, start + timeout_s / 10, 0.001
    while not store.check(keys):
        now = time.monotonic()
        if now > look_at:
            look_at = now + timeout_s / 10
            missing = [other for other, key in enumerate(keys) if not store.check([key])]
            idle = [other for other in missing if not _occupation(store, other)]
            if not idle and now - start < default_pg_timeout.total_seconds():
                deadline = now + timeout_s
            elif now > deadline:
                store.delete_key(keys[rank])  # who comes later is not to find a rank that has left; it may try again
                raise RuntimeError(
                    f"Rank {rank} waited {now - start:.0f} s to {event}, but ranks {idle or missing} did not come. "
                    "Call it on every rank."
                )
        time.sleep(pause)
        pause = min(2 * pause, 0.05)
    _held.append(event)
    events = {other: store.get(key).decode() for other, key in enumerate(keys)}
    elsewhere = {other: what for other, what in events.items() if what != event}
    if elsewhere:
        raise RuntimeError(f"Rank {rank} is about to {event}, but ranks are elsewhere: {elsewhere}.")
    if meeting:
        store.delete_key(f"vla_accel/meeting/{meeting - 1}/{rank}")
    say_busy(busy)


def say_busy(occupation: str) -> None:
    """Tell the others why this rank may not come to a meeting for long; an empty string ends it. No-op if alone."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        store = dist.distributed_c10d._get_default_store()
        with contextlib.suppress(RuntimeError):  # the rank that keeps the store may have ended
            store.set(f"vla_accel/busy/{dist.get_rank()}", occupation)


def _occupation(store: dist.Store, rank: int) -> str:
    key = f"vla_accel/busy/{rank}"
    return store.get(key).decode() if store.check([key]) else ""


def explain(error: BaseException) -> str:
    """Which ranks were gone when `error` ended this one, in a sentence; empty if none, or if nobody watches.

    Also tells the others why this rank ends. An uncaught exception is explained without being asked; a script that
    turns errors into messages calls this. Takes a few seconds after a failed collective.
    """
    return Watch._running.explain(error) if Watch._running else ""


class Watch:
    """Signs of life of all ranks, on a thread with its own connection to the store.

    An uncaught exception on this rank is told to the others, and a failed collective is followed by a message that
    names the ranks which are gone (`explain`). A rank that gives no sign for `timeout_s` seconds, killed or stopped,
    ends this process too, whatever its main thread waits for.
    """

    _running: ClassVar[Watch | None] = None

    @classmethod
    def start(cls, *, timeout_s: float) -> Watch | None:
        """Start watching, once per process; None where there is nothing to watch."""
        if cls._running is None and dist.is_initialized() and dist.get_world_size() > 1:
            store = dist.distributed_c10d._get_default_store()
            while isinstance(store, dist.PrefixStore):
                store = store.underlying_store
            if isinstance(store, dist.TCPStore):
                cls._running = cls(store.host, store.port, timeout_s)
        return cls._running

    def __init__(self, host: str, port: int, timeout_s: float):
        self.rank, self.timeout_s = dist.get_rank(), timeout_s
        self.others = [rank for rank in range(dist.get_world_size()) if rank != self.rank]
        self._store = dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=10))
        self._beats = {rank: ("", time.monotonic()) for rank in self.others}
        self._ends: dict[int, str] = {}
        self._store_lost_at: float | None = None
        self._closing = threading.Event()
        self._write("where", f"{socket.gethostname()}, process {os.getpid()}")
        self._next_hook, sys.excepthook = sys.excepthook, self._on_exception
        atexit.register(self._at_exit)
        self._thread = threading.Thread(target=self._run, name="vla_accel-watch", daemon=True)
        self._thread.start()

    def gone(self) -> list[str]:
        """The ranks that failed or give no sign of life, in words. Takes a few seconds if there are any."""
        self._look()
        start = time.monotonic()
        silent = set(self.others)
        while silent and time.monotonic() < start + 3.5 * BEAT_S and self._store_lost_at is None:
            time.sleep(BEAT_S / 4)
            self._look()
            silent = {rank for rank, (_, seen) in self._beats.items() if seen < start and rank not in self._ends}
        return [self._describe(rank) for rank in self.others if rank in silent or rank in self._ends]

    def _at_exit(self) -> None:
        """Tell the others; and say who is gone, in case this exit is the end of a script that hides tracebacks."""
        if not self._closing.is_set():
            self._write("end", "finished")
            gone = [words for words in self.gone() if not words.endswith("finished)")]
            self._close("finished")
            if gone and self._store_lost_at is None:
                self._say(f"rank {self.rank} ended when these were gone: {'; '.join(gone)}.")
                self._linger()

    def _run(self) -> None:
        # Looking takes a request per rank, so a large job looks less often than it gives signs.
        look_every = max(1, min(int(self.timeout_s / 8), len(self.others)))
        for beat in itertools.count():
            if self._closing.wait(BEAT_S):
                return
            self._write("beat", str(beat))
            if beat % look_every == 0:
                self._look()
            since = time.monotonic() - self.timeout_s
            silent = [r for r, (_, seen) in self._beats.items() if seen < since and self._ends.get(r) != "finished"]
            if self._store_lost_at is not None and self._store_lost_at < since:
                silent = [0]
            if silent and not self._closing.is_set():
                names = "; ".join(self._describe(rank) for rank in silent)
                self._say(f"rank {self.rank} ends: no sign of life for {self.timeout_s:g} s from {names}.")
                self._linger()
                os._exit(1)

    def _look(self) -> None:
        for rank in self.others:
            if end := self._read("end", rank):
                self._ends[rank] = end
            elif (beat := self._read("beat", rank)) != self._beats[rank][0]:
                self._beats[rank] = (beat, time.monotonic())

    def _describe(self, rank: int) -> str:
        return f"rank {rank} ({self._read('where', rank) or '?'}; {self._ends.get(rank, 'no sign of life')})"

    def explain(self, error: BaseException) -> str:
        """See the function of this name."""
        # A collective fails with a RuntimeError; with any other error this rank is the cause, not the victim.
        gone = self.gone() if isinstance(error, RuntimeError) and not self._closing.is_set() else []
        if gone and self._store_lost_at is not None:
            gone = [f"rank 0 or its launcher, which keeps the store at {self._store.host}"]
        reason = str(error).partition("\n")[0][:200]
        self._close(f"ended by {type(error).__name__}: {reason}")
        return f"rank {self.rank} ended when these were gone: {'; '.join(gone)}." if gone else ""

    def _on_exception(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        self._next_hook(kind, error, trace)
        if words := self.explain(error):
            self._say(words)
            self._linger()

    def _close(self, how: str) -> None:
        if not self._closing.is_set():
            self._closing.set()
            # A thread inside the store's code when Python shuts down would abort the process.
            self._thread.join(timeout=10)
            self._write("end", how)

    def _linger(self) -> None:
        """Give the others time to find out what happened, if the store ends with this process."""
        if self.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
            time.sleep(3 * BEAT_S)

    def _write(self, what: str, text: str) -> None:
        self._ask(lambda: self._store.set(_key(what, self.rank), text))

    def _read(self, what: str, rank: int) -> str:
        key = _key(what, rank)
        return self._ask(lambda: self._store.get(key).decode() if self._store.check([key]) else "") or ""

    def _ask(self, request: Callable[[], Any]) -> Any:
        """Run a request; the store goes with the process that keeps it."""
        try:
            answer = request()
        except RuntimeError:
            self._store_lost_at = self._store_lost_at or time.monotonic()
            return None
        self._store_lost_at = None
        return answer

    @staticmethod
    def _say(message: str) -> None:
        print(f"vla_accel: {message}", file=sys.stderr, flush=True)  # noqa: T201


def _key(what: str, rank: int) -> str:
    return f"vla_accel/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{what}/{rank}"
