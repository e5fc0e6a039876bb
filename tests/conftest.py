"""Fixtures for every test: tiny untrained checkpoints on disk, and one process's accelerator.

Both checkpoints are made once per session and must not be written to. Nothing here touches the network.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest


@pytest.fixture(scope="session", autouse=True)
def _one_thread():
    """Tiny models are faster on one thread, and sums come out the same each time."""
    import torch

    torch.set_num_threads(1)


def _tiny(folder, **options):
    import torch

    from vla_accel.models.tiny import make_tiny_openvla

    return make_tiny_openvla(
        folder,
        image_size=32,
        vision_dims=(32, 32),
        vision_depth=2,
        hidden=32,
        intermediate=64,
        layers=2,
        dtype=torch.float32,
        **options,
    )


@pytest.fixture(scope="session")
def tiny_openvla(tmp_path_factory):
    """Folder of an autoregressive OpenVLA: one step per decision, 7 tokens."""
    return _tiny(tmp_path_factory.mktemp("tiny") / "openvla")


@pytest.fixture(scope="session")
def tiny_openvla_oft(tmp_path_factory):
    """Folder of an OpenVLA-OFT: 4 steps per decision, 28 tokens."""
    return _tiny(tmp_path_factory.mktemp("tiny") / "openvla-oft", decoding="parallel", chunk=4)


@pytest.fixture(scope="session")
def make_policy(tiny_openvla, tiny_openvla_oft):
    """Load either checkpoint as a policy that is far from uniform and whose values differ from 0.

    Call with a model name and options of its policy config.
    """
    import torch

    from vla_accel.config import OFTPolicyConfig, PolicyConfig
    from vla_accel.policies import load_policy

    def make(model, **options):
        folder, kind = {
            "openvla": (tiny_openvla, PolicyConfig),
            "openvla-oft": (tiny_openvla_oft, OFTPolicyConfig),
        }[model]
        with torch.random.fork_rng():
            torch.manual_seed(0)
            policy = load_policy(model, kind(path=str(folder), value_hidden=16, **options), suite="tabletop")
            with torch.no_grad():
                # Small embeddings let pictures and words count alike; a large head makes actions far from uniform.
                torch.nn.init.normal_(policy.model.get_input_embeddings().weight, std=0.02)
                torch.nn.init.normal_(policy.model.get_output_embeddings().weight, std=0.2)
                torch.nn.init.normal_(policy.value_head.out.weight, std=0.5)
        return policy

    return make


@pytest.fixture
def accelerator():
    """Accelerate for one process on the CPU."""
    from vla_accel.distributed import make_accelerator

    return make_accelerator(cpu=True)
