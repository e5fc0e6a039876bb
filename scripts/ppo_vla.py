"""Improve a vision-language-action policy by PPO in a simulator.

accelerate launch scripts/ppo_vla.py --model openvla
"""

from vla_accel.cli import run
from vla_accel.config import PPOConfig

if __name__ == "__main__":
    run(PPOConfig, "vla_accel.train:train")
