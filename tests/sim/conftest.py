"""Simulators choose their way to draw when they are imported, so the choice comes first."""

from vla_accel.envs.graphics import prepare_graphics

prepare_graphics(required=False)
