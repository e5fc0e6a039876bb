"""Record demonstrations of an environment's scripted expert, for scripts/sft_vla.py --data.path.

python scripts/record_demos.py --out demos --data.episodes 500
"""

from vla_accel.cli import run
from vla_accel.config import RecordConfig

if __name__ == "__main__":
    run(RecordConfig, "vla_accel.commands:record_demos")
