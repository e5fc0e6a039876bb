"""Score a checkpoint on held-out initial states: success per task with a 95 % interval.

accelerate launch scripts/eval_vla.py --model openvla --policy.path runs/RUN/policy --output result.json --video films
"""

from vla_accel.cli import run
from vla_accel.config import EvalConfig

if __name__ == "__main__":
    run(EvalConfig, "vla_accel.commands:run_evaluation")
