"""How drawing without a screen is found, and what happens where it is not: by faults, so nothing is drawn here."""

import ctypes
import os
import subprocess
import sys

import pytest

from vla_accel.envs import graphics
from vla_accel.envs.graphics import egl_devices, prepare_graphics


@pytest.fixture
def machine(monkeypatch):
    """A machine with these EGL devices, with OSMesa or not, on which these variables are set; what is chosen there."""

    def choose(*, devices=(), osmesa=False, required=True, **environ):
        monkeypatch.setattr(os, "environ", environ)
        monkeypatch.setattr(graphics, "egl_devices", lambda: list(devices))
        monkeypatch.setattr(graphics, "_has_osmesa", lambda: osmesa)
        prepare_graphics(required=required)
        assert environ.pop("LP_NUM_THREADS") == "1"
        return environ

    return choose


def test_egl_is_taken_where_it_works(machine):
    assert machine(devices=[0], osmesa=True) == {"MUJOCO_GL": "egl", "PYOPENGL_PLATFORM": "egl"}


def test_osmesa_is_taken_where_egl_finds_no_device(machine):
    assert machine(osmesa=True) == {"MUJOCO_GL": "osmesa", "PYOPENGL_PLATFORM": "osmesa"}


def test_where_there_is_neither_the_packages_are_named(machine):
    with pytest.raises(RuntimeError, match=r"found none.*libegl1.*or libosmesa6"):
        machine()
    assert machine(required=False) == {}


@pytest.mark.parametrize("choice", ["egl", "osmesa"])
def test_the_users_choice_stands_where_it_works(machine, choice):
    chosen = machine(devices=[0], osmesa=True, MUJOCO_GL=choice)
    assert chosen == {"MUJOCO_GL": choice, "PYOPENGL_PLATFORM": choice}


def test_the_users_egl_gives_way_to_osmesa_where_it_finds_no_device(machine):
    with pytest.warns(UserWarning, match="MUJOCO_GL is egl, but EGL finds no device here: OSMesa draws instead"):
        chosen = machine(osmesa=True, MUJOCO_GL="egl", PYOPENGL_PLATFORM="egl")
    assert chosen == {"MUJOCO_GL": "osmesa", "PYOPENGL_PLATFORM": "osmesa"}
    with pytest.raises(RuntimeError, match="found none"):
        machine(MUJOCO_GL="egl")


@pytest.mark.parametrize(
    ("devices", "environ", "device"),
    [
        ([0, 1, 2, 3], {"LOCAL_RANK": "2"}, "2"),
        ([0, 1, 2, 3], {"LOCAL_RANK": "1", "CUDA_VISIBLE_DEVICES": "2,3"}, "3"),
        ([0], {"LOCAL_RANK": "2"}, None),  # one device for drawing in software, however many ranks
        ([0, 1], {}, None),
        ([0, 1], {"LOCAL_RANK": "1", "MUJOCO_EGL_DEVICE_ID": "0"}, "0"),
        # Without a number robosuite would take these variables for one.
        ([0, 1, 2, 3], {"CUDA_VISIBLE_DEVICES": "3"}, "3"),
        ([0, 1, 2, 3], {"CUDA_VISIBLE_DEVICES": "2,3"}, "2"),
        ([0], {"CUDA_VISIBLE_DEVICES": "3"}, "0"),
        ([1, 2], {"CUDA_VISIBLE_DEVICES": ""}, "1"),
        ([0, 1], {"CUDA_VISIBLE_DEVICES": "GPU-1f3a", "MUJOCO_EGL_DEVICE_ID": ""}, "0"),
        ([0], {"CUDA_VISIBLE_DEVICES": "4,5", "LOCAL_RANK": "1"}, "0"),
        ([1], {}, "1"),  # where device 0 cannot be used
    ],
)
def test_each_rank_draws_on_the_device_of_its_gpu_if_egl_has_it(machine, devices, environ, device):
    assert machine(devices=devices, **environ).get("MUJOCO_EGL_DEVICE_ID") == device


def test_without_the_library_egl_has_no_device(monkeypatch):
    def missing(name):
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    assert egl_devices() == []
    assert not graphics._has_osmesa()


def test_a_library_without_the_extensions_has_no_device(monkeypatch):
    class Address:
        def __call__(self, _):
            return None

    class Bare:
        eglGetProcAddress = Address()  # noqa: N815

    monkeypatch.setattr(ctypes, "CDLL", lambda _: Bare)
    assert egl_devices() == []


def test_a_process_that_has_drawn_can_still_compile():
    """Where EGL or Triton is missing there is nothing to clash, and nothing to see here."""
    code = "from vla_accel.envs.graphics import egl_devices; egl_devices(); import torch._dynamo"
    assert subprocess.run([sys.executable, "-c", code], timeout=120, check=False).returncode == 0
