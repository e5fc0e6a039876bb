"""Tiny PI0 checkpoints: like real ones on disk, the same bytes each time, and able to learn."""

import runpy
import sys
from pathlib import Path

import pytest
import torch

from vla_accel.models import load_vla
from vla_accel.models.pi0 import load_pi0
from vla_accel.models.pi0.tiny import make_tiny_pi0, tiny_pi0_tokenizer
from vla_accel.optim import MuonWithAdamW, hidden_matrices

SMALL = {"layers": 2, "width": 32, "mlp_dim": 64, "expert_width": 32, "expert_mlp_dim": 64, "vision_width": 32}


@pytest.mark.parametrize("variant", ["pi0", "pi05"])
def test_same_arguments_give_the_same_bytes(variant, tmp_path):
    folders = [make_tiny_pi0(tmp_path / name, variant=variant, **SMALL) for name in ("a", "b")]
    files = [sorted(p.relative_to(f) for p in f.rglob("*") if p.is_file()) for f in folders]
    assert files[0] == files[1]
    assert all((folders[0] / name).read_bytes() == (folders[1] / name).read_bytes() for name in files[0])
    other = make_tiny_pi0(tmp_path / "c", variant=variant, seed=1, **SMALL)
    assert (other / "model.safetensors").read_bytes() != (folders[0] / "model.safetensors").read_bytes()


def test_making_one_leaves_the_global_generator_alone(tmp_path):
    before = torch.get_rng_state()
    make_tiny_pi0(tmp_path, **SMALL)
    assert torch.equal(torch.get_rng_state(), before)


def test_default_sizes_stay_below_a_million_parameters(tmp_path):
    net, _ = load_pi0(make_tiny_pi0(tmp_path, variant="pi05"))
    assert sum(p.numel() for p in net.parameters()) < 1e6


def test_tokenizer_knows_its_tasks_and_every_state_number():
    tokenizer = tiny_pi0_tokenizer(["stack two cups"])
    ids = tokenizer("Task: stack two cups, State: -1 0 255;\nAction: ")["input_ids"]
    assert tokenizer.unk_token_id not in ids
    assert ids[0] == tokenizer.bos_token_id
    assert len(ids) == 1 + 2 + 3 + 1 + 2 + 3 + 1 + 1 + 2
    assert tokenizer.unk_token_id in tokenizer("zebra")["input_ids"]


def test_near_numbers_start_with_near_embeddings(tmp_path):
    net, processor = load_pi0(make_tiny_pi0(tmp_path, variant="pi05", **SMALL))
    ids = processor.tokenizer.convert_tokens_to_ids(["100", "101", "130", "230"])
    rows = net.get_input_embeddings().weight[ids]
    torch.testing.assert_close(rows.norm(dim=1), torch.ones(4))
    near, far, farther = (rows[0] @ rows[1:].T).tolist()
    assert near > 0.99
    assert max(abs(far), abs(farther)) < 0.5


def test_the_usual_statistics_are_the_embedded_simulators(tmp_path):
    _, processor = load_pi0(make_tiny_pi0(tmp_path, **SMALL))
    slow = torch.tensor([0.3, -0.3, 0.0, 0.0, 0.0, 0.0, -1.0])
    torch.testing.assert_close(processor.normalize_actions(slow)[:7], torch.tensor([1.0, -1, 0, 0, 0, 0, -1]) * 3**0.5)


def test_the_script_makes_both_families(tmp_path, monkeypatch):
    script = str(Path(__file__).parents[2] / "scripts" / "make_tiny.py")
    for name, words in (("pi05", "--model pi0 --variant pi05"), ("openvla", "")):
        folder = tmp_path / name
        monkeypatch.setattr(sys, "argv", [script, "--folder", str(folder), *words.split()])
        runpy.run_path(script, run_name="__main__")
        assert load_vla(folder)[0].config.model_type == {"pi05": "vla_pi0", "openvla": "openvla"}[name]


def test_bfloat16_checkpoint_keeps_norms_in_float32(tmp_path):
    net, _ = load_pi0(make_tiny_pi0(tmp_path, dtype=torch.bfloat16, **SMALL))
    assert net.language_model.norm.weight.dtype == torch.float32
    assert net.language_model.compute_dtype == torch.bfloat16


def test_options_reach_the_checkpoint(tmp_path):
    net, processor = load_pi0(
        make_tiny_pi0(
            tmp_path,
            chunk=6,
            cameras=("front",),
            rename={"eye": "front"},
            state_dim=3,
            action_dim=4,
            num_steps=5,
            prompt_length=9,
            min_time=0.25,
            time_alpha=5.0,
            **SMALL,
        )
    )
    config = net.config
    assert (config.chunk_size, config.cameras, config.state_dim, config.action_dim) == (6, ["front"], 3, 4)
    assert (config.num_inference_steps, config.tokenizer_max_length) == (5, 9)
    times = net.sample_time(1000, generator=torch.Generator().manual_seed(0))
    assert 0.25 < times.min() < 0.7
    assert times.mean().item() == pytest.approx(0.875, abs=0.01)  # 1/4 + 3/4 of the mean of Beta(5, 1), which is 5/6
    frames = torch.zeros(1, 48, 48, 3, dtype=torch.uint8)
    assert "image.front" in processor.prepare({"eye": frames}, torch.zeros(1, 3), ["reach"])


def test_sizes_are_checked(tmp_path):
    with pytest.raises(ValueError, match="vision_width must be a multiple of vision_heads"):
        make_tiny_pi0(tmp_path, vision_width=30)


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["pi0", "pi05"])
def test_flow_matching_learns_which_way_the_named_colour_lies(variant, tmp_path):
    """Two coloured halves and an instruction: the action is +1 or -1. Picture or words alone leave it a coin flip."""
    net, processor = load_pi0(make_tiny_pi0(tmp_path, variant=variant, cameras=("front",), chunk=4, **SMALL))
    generator = torch.Generator().manual_seed(0)

    def batch(count):
        left_red, ask_red = torch.randint(0, 2, (2, count), generator=generator).bool()
        frames = torch.zeros(count, 48, 48, 3, dtype=torch.uint8)
        for row in range(count):
            first, second = (0, 2) if left_red[row] else (2, 0)
            frames[row, :, :24, first] = frames[row, :, 24:, second] = 255
        words = [f"reach the {'red' if red else 'blue'} block" for red in ask_red]
        inputs = processor.model_inputs(processor.prepare({"front": frames}, torch.zeros(count, 8), words))
        side = torch.where(left_red == ask_red, -1.0, 1.0)
        return inputs, side[:, None, None].expand(count, 4, 7)

    trained = [
        {
            "params": [p for p in net.parameters() if p.requires_grad],
            "lr": 1e-3,
            "initial_lr": 1e-3,
            "weight_decay": 0.0,
        }
    ]
    optimizer = MuonWithAdamW(trained, matrices=hidden_matrices(net), muon_lr=0.02)
    for step in range(300):
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"] * (1 - step / 300)
        inputs, actions = batch(32)
        state = inputs.pop("state")
        loss = net(net.prefix_cache(**inputs), state, processor.normalize_actions(actions), generator=generator)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    inputs, actions = batch(64)
    sampled = processor.unnormalize_actions(net.sample_actions(**inputs, num_steps=4, generator=generator))
    assert (sampled.sign() == actions.sign()).float().mean() > 0.95
