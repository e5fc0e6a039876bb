"""Which conventions of a family of policies a simulator is told."""

import pytest

from vla_accel.config import MODELS, EnvConfig
from vla_accel.envs import make_env
from vla_accel.envs.families import OPTIONS, for_model


class Gripping:
    """A simulator with a choice of the gripper's convention."""

    def __init__(self, *, gripper="env", cameras=("front", "wrist", "top")):
        self.gripper, self.cameras = gripper, cameras


NAME = f"{__name__}:Gripping"


def test_a_family_says_how_its_checkpoints_speak_of_the_gripper():
    told = for_model(EnvConfig(name=NAME), "openvla")
    assert make_env(NAME, **told.parsed_options()).gripper == "openvla"
    assert for_model(EnvConfig(name="libero_goal", options={"image_size": "64"}), "openvla-oft").options == {
        "image_size": "64", "gripper": "openvla",
    }  # fmt: skip


@pytest.mark.parametrize("model", ["pi0", "pi05"])
def test_pi0_plays_libero_with_the_seed_it_is_scored_with(model):
    assert for_model(EnvConfig(name="libero_goal"), model).options == {"task_seed": "7"}
    config = EnvConfig(name="libero_goal", options={"task_seed": "0"})
    assert for_model(config, model) is config


def test_what_the_user_says_stands():
    config = EnvConfig(name=NAME, options={"gripper": "env"})
    assert for_model(config, "openvla") is config


def test_other_families_and_simulators_without_the_choice_are_left_alone():
    for name, model in ((NAME, "pi0"), ("tabletop", "pi05"), ("tabletop", "openvla")):
        config = EnvConfig(name=name)
        assert for_model(config, model) is config


@pytest.mark.parametrize(
    ("num_images", "cameras"), [(1, ["front"]), (2, ["front", "wrist"]), (3, ("front", "wrist", "top")), (4, None)]
)
def test_no_more_cameras_are_drawn_than_the_policy_reads(num_images, cameras):
    told = for_model(EnvConfig(name=NAME), "pi0", num_images=num_images)
    assert make_env(NAME, **told.parsed_options()).cameras == (cameras or ("front", "wrist", "top"))


def test_cameras_that_the_user_names_stand():
    config = EnvConfig(name=NAME, options={"cameras": '["wrist", "top"]'})
    assert for_model(config, "pi0", num_images=1) is config


def test_liberos_wrist_is_drawn_for_policies_of_two_images_only():
    one, two = (for_model(EnvConfig(name="libero_goal"), "openvla", num_images=n).options for n in (1, 2))
    assert one == {"gripper": "openvla", "cameras": '["agentview"]'}
    assert two == {"gripper": "openvla"}


def test_every_family_that_wants_something_exists():
    assert set(OPTIONS) <= set(MODELS)
