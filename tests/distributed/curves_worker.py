"""Train twice under the launcher's preset, and write what each optimizer update reports: `curves_worker.py FOLDER`."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

from accelerate.state import AcceleratorState, GradientState, PartialState

from vla_accel.cli import parse_args
from vla_accel.config import PPOConfig
from vla_accel.train import train

ppo = importlib.import_module("vla_accel.ppo")

RUNS = {
    "default options": ("--run.iterations=1",),
    "low rates": (
        "--run.iterations=5", "--rollout.num_decisions=8", "--env.num-envs=8", "--ppo.minibatch-size=32",
        "--ppo.micro_batch_size=16", "--ppo.learning-rate=3e-5", "--ppo.value-learning-rate=1e-4",
    ),
}  # fmt: skip
"""One iteration has 8 updates of the same data by default, 4 in the other run."""


def main() -> None:
    folder, means, curves = Path(sys.argv[1]), ppo._global_means, {}
    for name, words in RUNS.items():
        for state in (AcceleratorState, GradientState, PartialState):
            state._shared_state.clear()
        rows = curves[name] = []

        def noted(*args, rows=rows):
            rows.append(means(*args))
            return rows[-1]

        ppo._global_means = noted
        common = ("--model=openvla", "--run.eval-episodes=0", "--run.video_episodes=0", "--run.trackers=none")
        train(parse_args(PPOConfig, [*common, *words, f"--run.output_dir={folder / name.replace(' ', '-')}"]))
    if PartialState().is_main_process:
        (folder / "curves.json").write_text(json.dumps(curves))


if __name__ == "__main__":
    main()
