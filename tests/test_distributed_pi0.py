"""PI0 on two ranks: the numbers of one process, with its language model frozen or trained."""

import pytest

from tests.distributed.launch import launch
from tests.distributed.pi0_worker import CHECKS
from tests.helpers.pi0 import make_folder

WRAPPERS = ("fsdp1", "fsdp2", "ddp")

pytestmark = pytest.mark.dist


@pytest.fixture(scope="module")
def outcome(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pi0")
    make_folder(folder / "pi0")
    return launch("pi0_worker.py", str(folder), *WRAPPERS, ranks=2, timeout_s=280)


@pytest.mark.parametrize("title", CHECKS)
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_on_two_ranks(outcome, wrapper, title):
    outcome.require(f"{wrapper}: {title}")
