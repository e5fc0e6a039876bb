"""What every script does around its one call: read the command line, run, turn errors into one sentence.

Not here: options (`config.py`). Usage: `run(PPOConfig, "vla_accel.train:train")`.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
import warnings

from vla_accel.config import Config, parse_args


def run(kind: type[Config], target: str) -> None:
    """Parse the command line into a `kind` and call `target` ("module:function") with it.

    A `ValueError` (what the user gave cannot work) ends the program with one sentence and code 2, a `RuntimeError`
    (something broke on the way) with code 1, Ctrl-C with code 130. With VLA_ACCEL_DEBUG=1 the whole traceback shows.

    Raises:
        SystemExit: as above.
    """
    config = parse_args(kind)
    quiet()
    module, name = target.split(":")
    try:
        getattr(importlib.import_module(module), name)(config)
    except (ValueError, RuntimeError) as error:
        if os.environ.get("VLA_ACCEL_DEBUG") == "1":
            raise
        sys.stderr.write(f"error: {error}\n")
        sys.stderr.flush()
        raise SystemExit(2 if isinstance(error, ValueError) else 1) from error
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        raise SystemExit(130) from None


def quiet() -> None:
    """Keep libraries' start-up notes off the screen; their warnings of substance still show."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    logging.getLogger("torch.distributed.elastic").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", message=".*lazy modules.*")
