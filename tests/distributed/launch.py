"""Start a worker script on several ranks and read back, check by check, what each rank found.

A worker writes one JSON file per rank: `{"check name": "ok" or the traceback}`. A hang, an abort or a segmentation
fault shows as a check that never ran, with the rank's last words.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@dataclass
class Outcome:
    """What became of a launch: exit codes, seconds and output per rank, and the checks."""

    codes: list[int | None]
    seconds: list[float]
    outputs: list[str]
    checks: dict[str, list[str]] = field(default_factory=dict)

    def require(self, name: str) -> None:
        found = self.checks.get(name, [])
        bad = [f"rank {rank}: {text}" for rank, text in enumerate(found) if text != "ok"]
        assert not bad, f"{name} failed\n" + "\n".join(bad)
        assert len(found) == len(self.codes), (
            f"{name} ran on {len(found)} of {len(self.codes)} ranks; exit codes {self.codes}\n"
            + "\n".join(f"--- rank {rank}\n{text[-3000:]}" for rank, text in enumerate(self.outputs))
        )


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def clean_env(**extra: str) -> dict[str, str]:
    """This environment without what another launcher may have left in it."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_"))}
    paths = [str(ROOT), *filter(None, [env.get("PYTHONPATH")])]
    return env | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths), "TQDM_DISABLE": "1"} | extra


def launch(script: str, *args: str, ranks: int = 2, timeout_s: float = 120.0, lost: int | None = None) -> Outcome:
    """Run `tests/distributed/<script>` on `ranks` processes.

    Whatever is left after `timeout_s` is killed, and so is the rank `lost` once the others are done.
    """
    port = str(free_port())
    with tempfile.TemporaryDirectory() as folder:
        logs = [open(Path(folder) / f"{rank}.log", "w+b") for rank in range(ranks)]  # noqa: SIM115
        started = time.monotonic()
        processes = [
            subprocess.Popen(
                [sys.executable, str(ROOT / "tests" / "distributed" / script), *args],
                stdout=logs[rank],
                stderr=subprocess.STDOUT,
                env=clean_env(
                    RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks),
                    MASTER_ADDR="127.0.0.1", MASTER_PORT=port, CHECKS_FILE=str(Path(folder) / f"{rank}.json"),
                ),
                start_new_session=True,
            )
            for rank in range(ranks)
        ]  # fmt: skip
        codes, seconds = _wait(processes, started, timeout_s, lost)
        outcome = Outcome(codes=codes, seconds=seconds, outputs=[])
        for rank, log in enumerate(logs):
            log.seek(0)
            outcome.outputs.append(log.read().decode(errors="replace"))
            log.close()
            found = Path(folder) / f"{rank}.json"
            for name, text in json.loads(found.read_text()).items() if found.exists() else ():
                outcome.checks.setdefault(name, []).append(text)
        return outcome


def _wait(
    processes: list[subprocess.Popen], started: float, timeout_s: float, lost: int | None
) -> tuple[list[int | None], list[float]]:
    codes: list[int | None] = [None] * len(processes)
    seconds = [timeout_s] * len(processes)
    while (
        any(code is None for rank, code in enumerate(codes) if rank != lost) and time.monotonic() - started < timeout_s
    ):
        for rank, process in enumerate(processes):
            if codes[rank] is None and (code := process.poll()) is not None:
                codes[rank], seconds[rank] = code, time.monotonic() - started
        time.sleep(0.05)
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return codes, seconds


class Checks:
    """The worker's side: run named checks, go on after a failure, and keep the result on disk."""

    def __init__(self) -> None:
        self._file = Path(os.environ["CHECKS_FILE"])
        self._found: dict[str, str] = {}

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        try:
            yield
            self._found[name] = "ok"
        except Exception:
            self._found[name] = traceback.format_exc()
        self._file.write_text(json.dumps(self._found))
