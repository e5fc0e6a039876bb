"""Fixtures of the policies' tests."""

import pytest


@pytest.fixture(scope="session")
def pi0_folders(tmp_path_factory):
    """Variant -> folder of a tiny checkpoint, not to be written to."""
    from helpers.pi0 import make_folder

    root = tmp_path_factory.mktemp("pi0")
    return {variant: make_folder(root / variant, variant) for variant in ("pi0", "pi05")}


@pytest.fixture
def make(pi0_folders):
    """Make a policy: variant and options of its config."""
    from helpers.pi0 import make_policy

    return lambda variant="pi0", **options: make_policy(pi0_folders[variant], variant, **options)
