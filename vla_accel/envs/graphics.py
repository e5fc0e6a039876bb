"""How simulators that draw with OpenGL find a way to do so without a screen; to be called before they are imported.

Not here: any drawing. Usage: `prepare_graphics()`, then `import mujoco`.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import warnings

PACKAGES = "libegl1 libgl1-mesa-dri libgl1 libglib2.0-0 (EGL), or libosmesa6 (OSMesa)"
"""Debian's names of what software rendering needs."""

_EGL_PLATFORM_DEVICE_EXT = 0x313F
_MAX_DEVICES = 64
_OSMESA = ("libOSMesa.so.8", "libOSMesa.so.6", "libOSMesa.so")


def prepare_graphics(*, required: bool = True) -> None:
    """Choose EGL where it works, else OSMesa, and the graphics device of this rank.

    A choice of the user's stands, but for EGL where it finds no device.

    Sets `MUJOCO_GL`, `PYOPENGL_PLATFORM`, `MUJOCO_EGL_DEVICE_ID` where GPUs or ranks are chosen, and one thread for
    drawing in software. Libraries read these when they are imported; without the device's number robosuite takes
    `CUDA_VISIBLE_DEVICES` for it, whatever that is.

    Args:
        required: whether to raise when there is no way to draw.

    Raises:
        RuntimeError: naming the packages that are missing.
    """
    load_triton()
    os.environ.setdefault("LP_NUM_THREADS", "1")
    wanted = os.environ.get("MUJOCO_GL")
    if wanted in (None, "", "egl"):
        devices = egl_devices()
        backend = "egl" if devices else "osmesa" if _has_osmesa() else None
        if backend is None:
            if required:
                raise RuntimeError(
                    f"This simulator draws with OpenGL and found none. On Debian: apt-get install {PACKAGES}"
                )
            return
        if wanted and backend != wanted:
            warnings.warn("MUJOCO_GL is egl, but EGL finds no device here: OSMesa draws instead", stacklevel=2)
            os.environ["PYOPENGL_PLATFORM"] = backend
        os.environ["MUJOCO_GL"] = backend
        if backend == "egl" and not os.environ.get("MUJOCO_EGL_DEVICE_ID"):
            device = device_of_rank(os.environ)
            if device is not None and int(device) in devices:
                os.environ["MUJOCO_EGL_DEVICE_ID"] = device
            elif "CUDA_VISIBLE_DEVICES" in os.environ or devices[0] > 0:
                os.environ["MUJOCO_EGL_DEVICE_ID"] = str(devices[0])
    if os.environ["MUJOCO_GL"] in ("egl", "osmesa"):
        os.environ.setdefault("PYOPENGL_PLATFORM", os.environ["MUJOCO_GL"])


def load_triton() -> None:
    """Load Triton, which PyTorch loads when it first needs it, before any driver that draws in software.

    Both bring an LLVM of their own; the other way round the process dies of a segmentation fault.
    """
    with contextlib.suppress(ImportError):  # PyTorch for CPUs has none
        import triton  # noqa: F401


def device_of_rank(environ: os._Environ[str] | dict[str, str]) -> str | None:
    """The graphics device for `LOCAL_RANK`, as a number, else the first GPU's; None where neither says one."""
    rank, visible = environ.get("LOCAL_RANK", ""), environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return rank if rank.isdigit() else None
    devices = [device.strip() for device in visible.split(",")]
    if not all(device.isdigit() for device in devices):
        return None
    return devices[int(rank) % len(devices) if rank.isdigit() else 0]


def egl_devices() -> list[int]:
    """Numbers of the EGL devices that can be used, asked of the library itself."""
    load_triton()
    try:
        egl = ctypes.CDLL("libEGL.so.1")
    except OSError:
        return []
    egl.eglGetProcAddress.restype = ctypes.c_void_p
    egl.eglGetProcAddress.argtypes = [ctypes.c_char_p]
    addresses = [egl.eglGetProcAddress(name) for name in (b"eglQueryDevicesEXT", b"eglGetPlatformDisplayEXT")]
    if not all(addresses):
        return []
    integer, pointer = ctypes.c_int, ctypes.c_void_p
    query = ctypes.CFUNCTYPE(integer, integer, ctypes.POINTER(pointer), ctypes.POINTER(integer))(addresses[0])
    display_of = ctypes.CFUNCTYPE(pointer, integer, pointer, pointer)(addresses[1])
    egl.eglInitialize.argtypes = [pointer, pointer, pointer]
    devices, count = (pointer * _MAX_DEVICES)(), integer()
    if not query(_MAX_DEVICES, devices, ctypes.byref(count)):
        return []
    found = []
    for number in range(count.value):
        display = display_of(_EGL_PLATFORM_DEVICE_EXT, devices[number], None)
        if display and egl.eglInitialize(display, None, None):
            found.append(number)
    return found


def _has_osmesa() -> bool:
    for name in _OSMESA:
        try:
            ctypes.CDLL(name)
        except OSError:
            continue
        return True
    return False
