"""The small checkpoints that ship with the package: complete, small, stored in bfloat16, and usable as they are."""

import math

import pytest
from safetensors import safe_open

from vla_accel.config import MODELS, default_policy
from vla_accel.policies import peek_policy
from vla_accel.policies.folders import EMBEDDED


@pytest.mark.parametrize("model", MODELS)
def test_a_shipped_checkpoint_is_small_and_stored_in_bfloat16(model):
    with safe_open(EMBEDDED / model / "model.safetensors", framework="pt") as file:
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - not a dictionary
    kept = {"F32"} if model.startswith("pi0") else set()  # PI0 keeps some of its weights in float32, as LeRobot does
    assert {x.get_dtype() for x in slices.values()} == {"BF16"} | kept
    assert 1e5 < sum(math.prod(x.get_shape()) for x in slices.values()) <= 3e6
    assert sum(file.stat().st_size for file in (EMBEDDED / model).iterdir()) < 8e6


@pytest.mark.parametrize("model", MODELS)
def test_a_shipped_checkpoint_is_whole_and_fits_the_embedded_simulator(model):
    spec = peek_policy(model, default_policy(model), suite="tabletop")
    assert spec.embedded
    assert spec.action_dim == 7
    assert (spec.chunk_size > 1) == (model != "openvla")


def test_nothing_else_ships():
    assert sorted(folder.name for folder in EMBEDDED.iterdir()) == sorted(MODELS)
