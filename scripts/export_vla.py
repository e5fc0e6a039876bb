"""Copy the policy that a run has trained out of the run's folder.

python scripts/export_vla.py --run runs/RUN --out my-policy
"""

from vla_accel.cli import run
from vla_accel.config import ExportConfig

if __name__ == "__main__":
    run(ExportConfig, "vla_accel.commands:export")
