"""Building accelerators and what ranks share: alone here, on several ranks in `distributed/`."""

import contextlib
import functools
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils.launch import prepare_multi_gpu_env

from tests.distributed.distributed_worker import CHECKS
from tests.distributed.launch import ROOT, clean_env, free_port, launch
from tests.distributed.models import TinyPolicy
from vla_accel import distributed
from vla_accel.distributed import global_sum, make_accelerator, policy_of, prepare_policy, rank_seed, seed_weights
from vla_accel.roll_call import meet

PRESETS = sorted((ROOT / "accelerate_configs").glob("*.yaml"))
WRAPPERS = ("fsdp1", "fsdp2", "ddp")


@functools.cache
def outcome(ranks):
    return launch("distributed_worker.py", *WRAPPERS, ranks=ranks, timeout_s=120)


CLAIMS = [(wrapper, title) for wrapper in WRAPPERS for title, (_, own) in CHECKS.items() if wrapper in own]


@pytest.mark.dist
@pytest.mark.parametrize(("wrapper", "title"), CLAIMS)
def test_on_two_ranks(wrapper, title):
    outcome(2).require(f"{wrapper}: {title}")


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize(("wrapper", "title"), CLAIMS)
def test_on_three_ranks(wrapper, title):
    outcome(3).require(f"{wrapper}: {title}")


# How a rank may be lost, what the others say of it, and within how many seconds after their start-up.
LOSSES = [
    pytest.param("kill", 1, "rank 1 (", id="killed"),
    pytest.param("stop", 1, "rank 1 (", id="stopped", marks=pytest.mark.slow),
    pytest.param("raise", 1, "ended by ValueError: the simulator broke", id="raised", marks=pytest.mark.slow),
    pytest.param("leave", 1, "finished", id="left", marks=pytest.mark.slow),
    pytest.param("kill", 0, "rank 0 or its launcher", id="first-killed", marks=pytest.mark.slow),
]


@pytest.mark.dist
@pytest.mark.parametrize(("how", "victim", "words"), LOSSES)
def test_a_lost_rank_ends_the_others_in_time_and_by_name(how, victim, words):
    lost = launch("loss_worker.py", how, str(victim), ranks=3, timeout_s=60, lost=victim)
    for rank in {0, 1, 2} - {victim}:
        assert lost.codes[rank] not in (0, None), lost.outputs[rank]
        assert words in lost.outputs[rank], lost.outputs[rank]
        assert f"rank {victim} (" in lost.outputs[rank] or victim == 0, lost.outputs[rank]
        # The limit is 8 s from the loss on; start-up took a part of the rest.
        assert lost.seconds[rank] < 45, lost.seconds


@pytest.fixture
def fresh(monkeypatch):
    """No accelerator yet, no launcher's variables; put back what was there."""
    states = (AcceleratorState, GradientState, PartialState)
    before = [dict(state._shared_state) for state in states]
    for key in list(os.environ):
        if key.startswith(("ACCELERATE_", "FSDP_")) or key in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
            monkeypatch.delenv(key)
    for state in states:
        state._shared_state.clear()
    yield monkeypatch
    for state, content in zip(states, before, strict=True):
        state._shared_state.clear()
        state._shared_state.update(content)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def fsdp(monkeypatch, **extra):
    settings = {
        "ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    }  # fmt: skip
    for key, value in (settings | extra).items():
        monkeypatch.setenv(key, value)


def test_one_process_needs_no_group(fresh):
    accelerator = make_accelerator(cpu=True)
    assert not torch.distributed.is_initialized()
    assert global_sum(accelerator, 2, torch.ones(2))[0] == 2.0
    meet("do something", timeout_s=0.0)
    model, optimizer = prepare_policy(accelerator, TinyPolicy(), learning_rate=1e-3)
    assert policy_of(model) is model
    assert [group["name"] for group in optimizer.param_groups] == ["policy", "value"]
    assert {group["lr"] for group in optimizer.param_groups} == {1e-3}


@pytest.mark.parametrize("version", ["1", "2"])
def test_one_process_can_shard_by_itself(fresh, version):
    fsdp(fresh, FSDP_VERSION=version, FSDP_USE_ORIG_PARAMS="true")
    accelerator = make_accelerator(cpu=True)
    model, _ = prepare_policy(accelerator, TinyPolicy(), learning_rate=1e-3)
    assert "FSDP" in type(model).__name__ or "FullySharded" in type(model).__name__
    assert accelerator.num_processes == 1


def test_flattened_parameters_are_refused_with_what_to_set(fresh):
    fsdp(fresh, FSDP_VERSION="1", FSDP_USE_ORIG_PARAMS="false")
    with pytest.raises(ValueError, match="fsdp_use_orig_params: true"):
        make_accelerator(cpu=True)


def test_offloading_under_fsdp1_is_refused_with_what_to_set(fresh):
    fsdp(fresh, FSDP_VERSION="1", FSDP_USE_ORIG_PARAMS="true", FSDP_OFFLOAD_PARAMS="true")
    with pytest.raises(ValueError, match="fsdp_version: 2"):
        make_accelerator(cpu=True)


@pytest.mark.parametrize("kind", ["tp", "cp", "sp"])
def test_layers_split_over_processes_are_refused(fresh, kind):
    fsdp(fresh, **{f"PARALLELISM_CONFIG_{kind.upper()}_SIZE": "2"})
    with pytest.raises(ValueError, match=f"parallelism_config_{kind}_size must be 1, but is 2"):
        make_accelerator(cpu=True)


def test_accumulation_steps_from_elsewhere_are_refused(fresh):
    fresh.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4")
    with pytest.raises(ValueError, match=r"gradient_accumulation_steps is 2 but Accelerate runs with 4"):
        make_accelerator(cpu=True, gradient_accumulation_steps=2)


def test_processes_that_do_not_know_each_other_are_refused(fresh):
    fresh.setenv("WORLD_SIZE", "2")
    with pytest.raises(RuntimeError, match="2 processes were launched but this one sees 1"):
        make_accelerator(cpu=False)


@pytest.mark.parametrize("precision", ["fp16", "fp8"])
def test_precisions_that_need_loss_scaling_are_refused(fresh, precision):
    fresh.setenv("ACCELERATE_MIXED_PRECISION", precision)
    with pytest.raises(ValueError, match=f"got '{precision}'"):
        make_accelerator(cpu=True)


@pytest.mark.parametrize(
    ("has_bf16", "argument", "expected"),
    [(True, None, "bf16"), (False, None, "no"), (False, "bf16", "bf16"), (True, "no", "no")],
)
def test_a_cpu_without_bf16_units_runs_float32_unless_told(fresh, caplog, has_bf16, argument, expected):
    fresh.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    fresh.setattr(distributed, "_cpu_has_bf16", lambda: has_bf16)
    assert make_accelerator(cpu=True, mixed_precision=argument).mixed_precision == expected
    assert ("float32" in caplog.text) == (not has_bf16 and argument is None)


def test_weight_decay_is_for_matrices(fresh):
    policy = TinyPolicy()
    _, optimizer = prepare_policy(make_accelerator(cpu=True), policy, learning_rate=1e-3, weight_decay=0.1)
    decayed = {id(p) for group in optimizer.param_groups if group["weight_decay"] == 0.1 for p in group["params"]}
    kept = {id(p) for group in optimizer.param_groups if group["weight_decay"] == 0.0 for p in group["params"]}
    assert id(policy.head.weight) in decayed
    assert {id(policy.head.bias), id(policy.norm.weight), id(policy.value_head.norm.weight)} <= kept


def test_nothing_to_train_is_refused(fresh):
    with pytest.raises(ValueError, match="no trainable parameter"):
        prepare_policy(make_accelerator(cpu=True), TinyPolicy().requires_grad_(False), learning_rate=1e-3)


def test_the_optimizer_can_be_chosen(fresh):
    make = functools.partial(torch.optim.SGD, momentum=0.5)
    _, optimizer = prepare_policy(make_accelerator(cpu=True), TinyPolicy(), learning_rate=1e-3, make_optimizer=make)
    assert {group["momentum"] for group in optimizer.param_groups} == {0.5}


def test_seeds_differ_by_seed_rank_and_stream_and_repeat():
    seeds = {(s, r, n): rank_seed(s, r, n) for s in range(3) for r in range(4) for n in ("rollout", "eval")}
    assert len(set(seeds.values())) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds.values())
    assert rank_seed(1, 2) == seeds[1, 2, "rollout"]
    seed_weights(4)
    first = TinyPolicy()
    seed_weights(4)
    for left, right in zip(first.parameters(), TinyPolicy().parameters(), strict=True):
        torch.testing.assert_close(left, right, rtol=0, atol=0)


def test_all_presets_are_there():
    assert {path.stem for path in PRESETS} == {
        "cpu", "cpu_fsdp1", "cpu_fsdp2", "single_gpu", "ddp", "fsdp1", "fsdp2", "fsdp2_offload", "hsdp_multi_node",
        "cpu_hsdp_multi_node",
    }  # fmt: skip


@pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.stem)
def test_a_preset_parses_and_says_when_to_use_it(path):
    lines = path.read_text().splitlines()
    assert 5 <= len(lines) <= 15
    assert lines[0].startswith("# ")
    assert lines[0].endswith(".")
    config = load_config_from_file(str(path))
    assert config.num_processes >= 1
    known = vars(launch_command_parser().parse_args(["script.py"]))
    for name in [*(config.fsdp_config or {}), *(config.parallelism_config or {})]:
        assert name in known, f"accelerate launch has no option {name}"


def test_the_documentation_says_to_torchrun_what_the_preset_says_to_the_launcher():
    text = (ROOT / "docs" / "distributed.md").read_text()
    assert all(f"`{path.stem}`" in text for path in PRESETS)
    shell = text[text.index("### torchrun") :]
    said = dict(word.split("=") for line in re.findall(r"^export (.*)$", shell, re.M) for word in line.split())
    assert len(said) == 9
    path = str(ROOT / "accelerate_configs" / "hsdp_multi_node.yaml")
    options = ["--config_file", path, "--machine_rank", "1", "--main_process_ip", "10.0.0.1", "script.py"]
    args, _, _ = _validate_launch_command(launch_command_parser().parse_args(options))
    env = prepare_multi_gpu_env(args)
    assert said == {name: env[name] for name in said}


def start_preset(name, folder, *options):
    command = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch"]
    command += ["--config_file", str(ROOT / "accelerate_configs" / f"{name}.yaml"), *options]
    command += [str(ROOT / "tests" / "distributed" / "preset_worker.py"), str(folder)]
    return subprocess.Popen(
        command, env=clean_env(), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def reports(folder, *processes):
    for process in processes:
        try:
            text, _ = process.communicate(timeout=100)
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        assert process.returncode == 0, text[-4000:]
    return [path.read_text().split() for path in sorted(Path(folder).iterdir())]


# Preset, options that make it fit this machine, and what must really run: class, FSDP units, processes.
# Accelerate's FSDP2 makes the final norm a unit too.
RUNS = [
    pytest.param("cpu", [], ("TinyPolicy", "1", "1"), id="cpu"),
    pytest.param("cpu_fsdp1", [], ("FullyShardedDataParallel", "7", "2"), id="cpu_fsdp1"),
    pytest.param("cpu_fsdp2", [], ("FSDPTinyPolicy", "8", "2"), id="cpu_fsdp2"),
    pytest.param("single_gpu", [], ("TinyPolicy", "1", "1"), id="single_gpu"),
    pytest.param("ddp", ["--num_processes", "2"], ("DistributedDataParallel", "1", "2"), id="ddp"),
    pytest.param("fsdp1", ["--num_processes", "2"], ("FullyShardedDataParallel", "7", "2"), id="fsdp1"),
    pytest.param("fsdp2", ["--num_processes", "2"], ("FSDPTinyPolicy", "8", "2"), id="fsdp2"),
    pytest.param("fsdp2_offload", [], ("FSDPTinyPolicy", "8", "2"), id="fsdp2_offload"),
]


@functools.cache
def plain_loss():
    """What the worker's last loss must be, whatever the preset: the same training in this process."""
    torch.manual_seed(0)
    from tests.distributed.models import batch, loss_of

    policy = TinyPolicy().eval()
    optimizer = torch.optim.AdamW([p for p in policy.parameters() if p.requires_grad], lr=1e-2, weight_decay=0.0)
    for step in range(2):
        loss = loss_of(policy(batch(step), {"tokens": torch.ones(4, 4, dtype=torch.int64)}))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return loss.item(), sum(p.numel() for p in policy.parameters())


def assert_report(report, what):
    loss, size = plain_loss()
    assert tuple(report[:3]) == what
    # bf16 has 8 bits, so a loss near 3 is good to about 1e-2.
    assert math.isclose(float(report[4]), loss, rel_tol=1e-5 if report[3] == "no" else 1e-2)
    assert int(report[5]) == size


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize(("name", "options", "what"), RUNS)
def test_a_preset_runs_what_it_says(name, options, what, tmp_path):
    found = reports(tmp_path, start_preset(name, tmp_path, "--main_process_port", "0", *options))
    assert len(found) == int(what[2])
    for report in found:
        assert_report(report, what)


@pytest.mark.dist
@pytest.mark.slow
def test_two_machines_run_the_multi_node_preset(tmp_path):
    """Two launchers with machine ranks 0 and 1 over loopback; the preset's twin for CPUs."""
    port = str(free_port())
    options = ["--main_process_ip", "127.0.0.1", "--main_process_port", port]
    machines = [
        start_preset("cpu_hsdp_multi_node", tmp_path, "--machine_rank", str(machine), *options) for machine in (1, 0)
    ]
    found = reports(tmp_path, *machines)
    assert len(found) == 4
    for report in found:
        assert_report(report, ("FSDPTinyPolicy", "8", "4"))


def test_the_cpu_twin_differs_from_the_multi_node_preset_in_size_only():
    real, twin = (load_config_from_file(str(ROOT / "accelerate_configs" / name)) for name in
                  ("hsdp_multi_node.yaml", "cpu_hsdp_multi_node.yaml"))  # fmt: skip
    assert real.fsdp_config == twin.fsdp_config
    assert real.num_machines == twin.num_machines == 2
    for config in (real, twin):
        sizes = config.parallelism_config
        product = sizes["parallelism_config_dp_replicate_size"] * sizes["parallelism_config_dp_shard_size"]
        assert product == config.num_processes
