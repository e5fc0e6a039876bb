"""Measure a part of vla_accel on this machine and print a table.

Each part is a file in `scripts/benchmarks/` with a docstring that says what it measures and a `main(argv)`.
Usage: `python scripts/benchmark.py modes`; `python scripts/benchmark.py modes --help` for its options.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

PARTS = Path(__file__).parent / "benchmarks"


def main(argv: list[str]) -> None:
    """Run the part named first."""
    parts = sorted(path.stem for path in PARTS.glob("*.py") if not path.stem.startswith("_"))
    if not argv or argv[0] not in parts:
        print(f"{__doc__}\nParts: {', '.join(parts)}")
        sys.exit(0 if argv and argv[0] in ("-h", "--help") else 2)
    importlib.import_module(f"benchmarks.{argv[0]}").main(argv[1:])


if __name__ == "__main__":
    main(sys.argv[1:])
