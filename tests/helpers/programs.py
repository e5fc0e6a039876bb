"""Programs run in this process as from a command line."""

import sys

from vla_accel.cli import run


def start(capsys, kind, target, *words):
    """Run `target` with the words of a command line; gives the exit code and what was written to standard error."""
    capsys.readouterr()  # what came before is not the program's
    argv, sys.argv = sys.argv, ["program.py", *map(str, words)]
    code = 0
    try:
        run(kind, target)
    except SystemExit as end:
        code = end.code
    finally:
        sys.argv = argv
    return code, capsys.readouterr().err
