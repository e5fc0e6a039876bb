"""Lose a rank in the middle: `loss_worker.py how victim`, where how is kill, stop, raise or leave."""

from __future__ import annotations

import os
import signal
import sys
import time

from vla_accel.distributed import global_sum, make_accelerator
from vla_accel.roll_call import explain


def main() -> None:
    how, victim = sys.argv[1], int(sys.argv[2])
    accelerator = make_accelerator(timeout_s=8)
    for _ in range(3):
        global_sum(accelerator, 1.0)
    time.sleep(1.2)
    if accelerator.process_index == victim:
        if how == "raise":
            raise ValueError("the simulator broke")
        if how == "leave":
            sys.exit(0)
        os.kill(os.getpid(), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[how])
    try:
        global_sum(accelerator, 1.0)
    except RuntimeError as error:
        if accelerator.process_index == 2:  # as scripts do, which show messages instead of tracebacks
            sys.exit(explain(error) if victim == 0 or how == "leave" else 1)
        raise


if __name__ == "__main__":
    main()
