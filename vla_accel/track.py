"""What a run leaves behind and shows: JSON lines, a progress bar, curves, videos, the closing table.

Not here: the numbers themselves. Usage: `log = RunLog(folder, enabled=accelerator.is_main_process)`.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from vla_accel.distributed import broadcast_object
from vla_accel.rules import check

if TYPE_CHECKING:
    from accelerate import Accelerator


def make_output_dir(path: str | None, *, default: str, resume: bool = False) -> Path:
    """Create the output folder and prove that it can be written.

    Args:
        path: what the user asked for; None: a new folder `runs/<default>-<time>`.
        default: stem of the folder's name.
        resume: whether the folder may already hold a run.

    Raises:
        ValueError: when it is a file, cannot be written, or holds another run.
    """
    folder = Path(path) if path else _unused(Path("runs") / f"{default}-{time.strftime('%Y%m%d-%H%M%S')}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ValueError(
            f"--run.output_dir must be a folder that can be written, but {str(folder)!r} is not "
            f"({error.strerror}). Name another folder."
        ) from None
    if (folder / "metrics.jsonl").exists() and not resume:
        raise ValueError(
            f"--run.output_dir must be new, but {str(folder)!r} holds a run. "
            "Name another folder, or go on with that run by --run.resume."
        )
    return folder


def _unused(folder: Path) -> Path:
    """The folder, or the first of `<folder>-2`, `<folder>-3`, ... that does not exist."""
    number = 1
    while (free := folder if number == 1 else folder.with_name(f"{folder.name}-{number}")).exists():
        number += 1
    return free


def agree_on_folder(accelerator: Accelerator, folder: Path) -> Path:
    """The main process's output folder, in place of the one that each process has just made under its own clock.

    Collective: call on every rank.
    """
    shared = Path(broadcast_object(accelerator, str(folder)))
    if shared != folder:
        folder.rmdir()
        shared.mkdir(parents=True, exist_ok=True)
    return shared


def new_folder(path: str, *, option: str) -> Path:
    """Check that a folder can be created, or is there and empty; it is not created yet.

    Raises:
        ValueError: naming the option.
    """
    folder = Path(path)
    check_writable(folder, option=option)
    free = not folder.exists() or (folder.is_dir() and not any(folder.iterdir()))
    check(free, option, "must be a new or an empty folder", path, "Name another one.")
    return folder


def check_writable(path: Path, *, option: str) -> None:
    """Prove that a file or folder can be created under this name, by a file beside it; missing parents are created.

    Raises:
        ValueError: naming the option.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        check(False, option, "must be a path that can be written", str(path), f"({error.strerror})")


def write_json(path: Path, content: object) -> None:
    """Write JSON so that a reader never finds half of it: to a file beside, then renamed."""
    temporary = path.with_name(path.name + ".part")
    with temporary.open("w", encoding="utf-8") as file:
        json.dump(content, file, indent=2)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


class RunLog:
    """Metrics as JSON lines, one per iteration. On other ranks than the main one it writes nothing.

    Args:
        folder: the run's output folder.
        enabled: False makes every method a no-op.
    """

    def __init__(self, folder: Path, *, enabled: bool = True):
        self.path = folder / "metrics.jsonl"
        self.enabled = enabled
        self.rows: list[dict[str, Any]] = []

    def load(self, iteration: int) -> None:
        """Take up the lines of an earlier run that came before `iteration`, and drop the later ones."""
        if not self.enabled or not self.path.exists():
            return
        lines = self.path.read_text(encoding="utf-8").splitlines()
        rows = [row for row in map(_parse, lines) if row is not None]
        self.rows = [row for row in rows if row["iteration"] < iteration]
        self.path.write_text("".join(json.dumps(row) + "\n" for row in self.rows), encoding="utf-8")

    def write(self, iteration: int, metrics: Mapping[str, float]) -> None:
        """Append one line."""
        row = {"iteration": iteration, **metrics}
        self.rows.append(row)
        if self.enabled:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")

    def plot(self, names: Sequence[str]) -> None:
        """Draw the curves of some metrics to `curves.png`, one panel each."""
        names = [name for name in names if any(name in row for row in self.rows)]
        if not self.enabled or not names:
            return
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        columns = min(3, len(names))
        lines = -(-len(names) // columns)
        figure = Figure(figsize=(4.2 * columns, 2.8 * lines), layout="constrained")
        FigureCanvasAgg(figure)
        for position, name in enumerate(names):
            axes = figure.add_subplot(lines, columns, position + 1)
            points = [(row["iteration"], row[name]) for row in self.rows if name in row]
            axes.plot(*zip(*points, strict=True), marker="o" if len(points) < 8 else None, linewidth=1.5)
            axes.set_title(name, fontsize=10)
            axes.grid(alpha=0.3)
        figure.savefig(self.path.with_name("curves.png"), dpi=110)


def _parse(line: str) -> dict[str, Any] | None:
    try:
        return json.loads(line)
    except json.JSONDecodeError:  # the last line of a run that was killed while writing it
        return None


class _Lines:
    """Standard error for a progress bar that ends up in a file: each state of the bar is a line of its own."""

    def write(self, text: str) -> None:
        text = text.strip("\r\n ")
        if text:
            sys.stderr.write(text + "\n")

    def flush(self) -> None:
        sys.stderr.flush()


def _columns() -> int:
    """Width of the terminal behind standard error; 0 where it does not tell."""
    try:
        return os.get_terminal_size(sys.stderr.fileno()).columns
    except (OSError, ValueError):
        return 0


class Progress:
    """A progress bar on standard error with the newest figures beside it; silent on other ranks.

    Where standard error is no terminal, it is a line every ten seconds.
    """

    def __init__(self, total: int, *, start: int = 0, enabled: bool = True):
        from tqdm import tqdm

        screen, sized = sys.stderr.isatty(), _columns() > 0
        self.bar = tqdm(
            total=total,
            initial=start,
            disable=not enabled,
            unit="it",
            dynamic_ncols=screen and sized,
            ncols=80 if screen and not sized else None,
            nrows=24 if screen and not sized else None,
            mininterval=0.1 if screen else 10.0,
            file=sys.stderr if screen else _Lines(),
        )

    def step(self, **figures: str) -> None:
        """Move on by one."""
        self.bar.set_postfix(figures, refresh=False)
        self.bar.update(1)

    def close(self) -> None:
        """Leave the bar as it stands."""
        self.bar.close()


def check_trackers(names: Sequence[str]) -> None:
    """Check that the packages of Accelerate's trackers are installed; Accelerate itself drops those that are not.

    Raises:
        ValueError: naming the package.
    """
    for name in names:
        found = name == "none" or importlib.util.find_spec(name) is not None
        check(found, "run.trackers", "must name installed packages", name, f"Install it: pip install {name}.")


def write_video(path: Path, frames: Sequence[np.ndarray], *, fps: int = 10) -> None:
    """Write uint8 frames `[P, P, 3]` as an MP4 (H.264), or nothing when there are none; parents are created."""
    if not frames:
        return
    import imageio.v2 as imageio

    path.parent.mkdir(parents=True, exist_ok=True)
    # H.264 halves the resolution of colour: sides must be even, and are stretched where they are not.
    imageio.mimwrite(path, list(frames), fps=fps, macro_block_size=2, quality=8)


def closing_table(before: Mapping[str, Any] | None, after: Mapping[str, Any] | None) -> str:
    """The table "success before -> after" from two `Evaluation.to_dict()`."""
    if before is None or after is None:
        return "No evaluation (--run.eval_episodes 0)."
    names = [*after["tasks"], "all"]
    title = "held-out success"
    width = max(len(name) for name in [title, *names])
    lines = [f"{title:<{width}}   {'before':<18}      {'after':<18}  {'n':>5}"]
    for name in names:
        old, new = (side if name == "all" else side["tasks"][name] for side in (before, after))
        lines.append(f"{name:<{width}}   {_rate(old)}  ->  {_rate(new)}  {new['n']:5d}")
    return "\n".join(lines)


def _rate(side: Mapping[str, Any]) -> str:
    low, high = side["interval_95"]
    return f"{side['success']:6.1%} [{low:.0%}, {high:.0%}]".ljust(18)
