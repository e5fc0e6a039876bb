"""What every script does around its one call: read the command line, run, turn errors into one sentence.

Not here: options (`config.py`). tyro parses and writes `--help`; what is wrong with a command line is said here.
Usage: `run(PPOConfig, "vla_accel.train:train")`, or `config = parse_args(PPOConfig, ["--run.seed", "1"])`.

Every option is `--group.option value` or `--group.option=value`; hyphens and underscores both work.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import io
import json
import logging
import os
import re
import signal
import sys
import threading
import time
import types
import typing
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from vla_accel.config import MODELS, POLICY_OPTIONS, Config, PPOConfig, default_policy, default_ppo
from vla_accel.rules import did_you_mean


def run(kind: type[Config], target: str) -> None:
    """Parse the command line into a `kind` and call `target` ("module:function") with it.

    A `ValueError` (what the user gave cannot work) ends the program with one sentence and code 2, a `RuntimeError`
    (something broke on the way) with code 1, Ctrl-C (in a single process also SIGTERM) with code 130. With
    VLA_ACCEL_DEBUG=1 the whole traceback shows.

    Raises:
        SystemExit: as above.
    """
    config = parse_args(kind)
    quiet()
    module, name = target.split(":")
    try:
        with _ended_by_signals():
            getattr(importlib.import_module(module), name)(config)
    except (ValueError, RuntimeError) as error:
        if os.environ.get("VLA_ACCEL_DEBUG") == "1":
            raise
        _say_error(error)
        raise SystemExit(2 if isinstance(error, ValueError) else 1) from error
    except KeyboardInterrupt:
        if os.environ.get("RANK", "0") == "0":  # every rank is told
            sys.stderr.write("interrupted\n")
        raise SystemExit(130) from None


@contextlib.contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Let SIGTERM end a program of one process as Ctrl-C does, once: some launchers answer Ctrl-C with both.

    One of several processes dies of it at once, as it may wait for another that is already dead.
    """
    alone = os.environ.get("WORLD_SIZE", "1") == "1" and threading.current_thread() is threading.main_thread()
    if not alone:
        yield
        return

    def end(*_: Any) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise KeyboardInterrupt

    before = {number: signal.signal(number, end) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        # After a signal the program is to say that it was, and end: SIGTERM stays ignored until then.
        if signal.getsignal(signal.SIGTERM) is end:
            for number, handler in before.items():
                signal.signal(number, handler)


def quiet() -> None:
    """Keep libraries' start-up notes and loading bars off the screen; warnings and downloads still show."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    logging.getLogger("torch.distributed.elastic").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", message=".*lazy modules.*")
    from huggingface_hub.utils import are_progress_bars_disabled, enable_progress_bars
    from transformers.utils.logging import disable_progress_bar

    downloads = not are_progress_bars_disabled()
    disable_progress_bar()  # also the hub's, which show that a download of many gigabytes goes on
    if downloads:
        enable_progress_bars()


def parse_args(kind: type[Config], argv: Sequence[str] | None = None) -> Config:
    """Read a command line into a config of class `kind`.

    Args:
        kind: a root config of `config.py`, e.g. `PPOConfig`.
        argv: words of the command line without the program. None: `sys.argv[1:]`.

    Raises:
        SystemExit: with code 0 after `--help`, with code 2 after one sentence on standard error for a wrong option.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        return _parse(kind, words)
    except ValueError as error:
        if _local_rank() == 0:  # all processes were started with the same words
            _say_error(error)
        raise SystemExit(2) from None


def _parse(kind: type[Config], words: list[str]) -> Config:
    import tyro

    root: dict[str, Any] = {}
    description = str(kind.__doc__)
    if "policy" in _types(kind):
        model = _value_of("model", words, default=MODELS[0])
        root = {"model": model, "policy": default_policy(model)}
        description += f"\n\n--model is one of {', '.join(MODELS)}; the options below are those of {model}."
    arguments: dict[str, Any] = {
        "args": words,
        "prog": Path(sys.argv[0]).name,
        "description": description,
        "config": (tyro.conf.FlagConversionOff, tyro.conf.AvoidSubcommands),
    }
    if root:
        # The classes of the default's groups count, not those of the annotations: so `policy` is the model's own.
        arguments["default"] = kind(**root)
    if kind is PPOConfig:
        embedded = _value_of("policy.path", words, default="None") == "None"
        usual = "tabletop" if embedded else "finetune"
        arguments["default"] = default_ppo(root["model"], _value_of("recipe", words, default=usual))
    if "--help" in words or "-h" in words:
        return tyro.cli(kind, **arguments)
    report = io.StringIO()
    try:
        with contextlib.redirect_stdout(report), contextlib.redirect_stderr(report):
            return tyro.cli(kind, **arguments)
    except SystemExit as exit_:
        policy = type(root["policy"]) if root else None
        reason = _problem(kind, words, policy) or _own_error(exit_) or _unboxed(report.getvalue())
        raise ValueError(reason) from None


def _value_of(name: str, words: list[str], *, default: str) -> str:
    """The value of `--name value` or `--name=value`; the last one counts."""
    value = default
    for position, word in enumerate(words):
        if word.startswith(f"--{name}="):
            value = word.split("=", 1)[1]
        elif word == f"--{name}" and position + 1 < len(words):
            value = words[position + 1]
    return value


# --------------------------------------------------------------------------------------------------------------------
# What is wrong with a command line that tyro refuses
# --------------------------------------------------------------------------------------------------------------------


def _problem(kind: type, words: list[str], policy: type | None) -> str | None:
    """One sentence about the first word that cannot be right, or None if each option by itself could be."""
    known = dict(options(kind, policy=policy))
    given = set()
    for word, values in _options_given(words):
        if not word.startswith("--"):
            return f"{word!r} does not belong to an option; options have the form --group.option value."
        name = word[2:].replace("-", "_")
        given.add(name)
        if name not in known:
            return _unknown(name, known)
        problem = _wrong_values(known[name], values)
        if problem:
            return f"--{name} {problem}."
    required = [f.name for f in dataclasses.fields(kind) if _is_required(f)]
    missing = [name for name in required if name in known and name not in given and name != "model"]
    return f"--{missing[0]} is needed. See --help." if missing else None


def options(kind: type, *, policy: type | None = None, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """All options of a config class, by their dotted names, with their types.

    Args:
        kind: the class.
        policy: class of the policy's options; None: as annotated.
        prefix: of the names.
    """
    for name, annotation in _types(kind).items():
        annotation = policy if name == "policy" and policy else annotation
        if dataclasses.is_dataclass(annotation):
            yield from options(typing.cast(type, annotation), prefix=f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", annotation


def _types(kind: type) -> dict[str, Any]:
    """Field name -> resolved annotation, in the order of the fields."""
    hints = typing.get_type_hints(kind)
    return {f.name: hints[f.name] for f in dataclasses.fields(kind)}


def _is_required(f: dataclasses.Field) -> bool:
    return f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING


def _options_given(words: list[str]) -> Iterator[tuple[str, list[str]]]:
    """Each `--option` with the words after it, up to the next; a word before all options stands alone."""
    position = 0
    while position < len(words):
        word, equals, value = words[position].partition("=")
        position += 1
        values = [value] if equals else []
        while word.startswith("--") and not equals and position < len(words) and not words[position].startswith("--"):
            values.append(words[position])
            position += 1
        yield word, values


def _unknown(name: str, known: dict[str, Any]) -> str:
    group, _, option = name.rpartition(".")
    owners = [model for model, kind in POLICY_OPTIONS.items() if group == "policy" and option in _types(kind)]
    if owners:
        return f"--{name} is an option of {', '.join(owners)}, not of the --model chosen."
    longer = [full for full in known if full.startswith(name)]
    hint = did_you_mean(name, longer or known) or (f"Did you mean {longer[0]}?" if longer else "")
    if group == "env":
        hint += " Options of the environment itself are pairs after --env.options."
    return f"--{name} is not an option. {hint.strip() or 'See --help.'}"


def _wrong_values(annotation: Any, values: list[str]) -> str | None:
    """What the values of one option must be and are not, or None."""
    optional = isinstance(annotation, types.UnionType) or typing.get_origin(annotation) is typing.Union
    if optional:
        if values == ["None"]:
            return None
        (annotation,) = (part for part in typing.get_args(annotation) if part is not types.NoneType)
    origin = typing.get_origin(annotation)
    if origin is tuple:
        return None
    if origin is dict:
        odd = len(values) % 2
        return f"must be pairs of a name and a value, but is {' '.join(values)!r}" if odd else None
    if len(values) != 1:
        return f"takes one value, but is given {' '.join(values)!r}" if values else "needs a value"
    (value,) = values
    if origin is typing.Literal or annotation is bool:
        choices = ("True", "False") if annotation is bool else typing.get_args(annotation)
        if value not in choices:
            hint = did_you_mean(value, choices)
            return f"must be one of {', '.join(choices)}, but is {value!r}" + (f" ({hint})" if hint else "")
    if annotation in (int, float):
        try:
            annotation(value)
        except ValueError:
            return f"must be a {'whole ' if annotation is int else ''}number, but is {value!r}"
    return None


def _own_error(error: BaseException) -> str | None:
    """The sentence of the config that refused its values: tyro ends the program while it handles our `ValueError`."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ValueError) and str(cause).startswith("--"):
            return str(cause)
        cause = cause.__cause__ or cause.__context__
    return None


def _unboxed(report: str) -> str:
    """The parser's own message without the frame around it."""
    lines = [re.sub(r"[\u2500-\u257f]", " ", line).strip() for line in report.splitlines()]
    return " ".join(line for line in lines if line) or "the command line cannot be read. See --help."


# --------------------------------------------------------------------------------------------------------------------
# Errors
# --------------------------------------------------------------------------------------------------------------------


def _say_error(error: Exception) -> None:
    """Print `error: <sentence>`, and under a launcher, which adds tracebacks of its own, where to stop reading.

    torchrun's report quotes the sentence where it is left in the file that torchrun names.
    """
    launched = "ACCELERATE_MIXED_PRECISION" in os.environ or "TORCHELASTIC_RUN_ID" in os.environ
    note = "(The traceback below is the launcher's, which only saw the script end.)\n" if launched else ""
    sys.stderr.write(f"\nerror: {error}\n{note}\n" if launched else f"error: {error}\n")
    sys.stderr.flush()
    report = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if report:
        content = {"message": f"error: {error}", "timestamp": str(int(time.time()))}
        Path(report).write_text(json.dumps(content), encoding="utf-8")


def _local_rank() -> int:
    return int(os.environ.get("LOCAL_RANK", "0"))
