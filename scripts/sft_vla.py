"""Teach a vision-language-action policy by imitating demonstrations.

accelerate launch scripts/sft_vla.py --model openvla --policy.path CHECKPOINT --env.name tabletop
"""

from vla_accel.cli import run
from vla_accel.config import SFTConfig

if __name__ == "__main__":
    run(SFTConfig, "vla_accel.sft:finetune")
