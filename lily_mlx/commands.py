"""What ``--engine`` means once an mlx_lm command has parsed its arguments."""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

from . import checkpoint, counters, engine
from .errors import LilyError, UnsupportedModelError, UsageError
from .settings import ENGINES, default_engine, settings

_POSITIVE = (
    "max_tokens",
    "prefill_step_size",
    "kv_bits",
    "kv_group_size",
    "max_kv_size",
    "batch_size",
    "prompt_tokens",
    "generation_tokens",
    "num_trials",
    "num_samples",
    "sequence_length",
)
# Where zero already has a meaning of its own.
_NOT_NEGATIVE = ("quantized_kv_start",)


def require_mlx() -> None:
    """End the command with status 2 and one line if MLX cannot be imported here."""
    try:
        engine.require_mlx()
    except LilyError as error:
        fail(error)


def fail(error: LilyError, program: str = "lily-mlx") -> NoReturn:
    """Print the error as one line and end the process with status 2."""
    print(f"{program}: error: {error}", file=sys.stderr)
    raise SystemExit(2)


def add_engine_argument(parser: argparse.ArgumentParser, default: str) -> None:
    """Add ``--engine`` to the parser of an mlx_lm command. Idempotent."""
    if "--engine" in parser._option_string_actions:
        return
    try:
        default = default_engine() or default
    except UsageError as error:
        parser.error(str(error))
    parser.add_argument(
        "--engine",
        choices=ENGINES,
        default=default,
        help="what runs the model: mlx is stock MLX-LM, lily its drop-in from lily-mlx, auto lily where it "
        f"supports the model and else mlx (default: {default}; MLX_LM_ENGINE sets it)",
    )


def start(parser: argparse.ArgumentParser, args: argparse.Namespace, command: str) -> None:
    """Put the chosen engine in place. Takes ``engine`` out of ``args``, which belong to the command.

    Ends the process with status 2 and one line on stderr where an argument, the checkpoint or the machine
    does not allow what was asked for.
    """
    chosen = args.engine
    del args.engine
    if chosen == "mlx":
        return
    program = parser.prog if parser.prog.startswith("lily-mlx") else f"mlx_lm.{command}"
    try:
        _check_values(args)
        if settings().stats:
            counters.report_at_exit()
        if _model_is_supported(args, strict=chosen == "lily"):
            engine.register()
            _check_on_load(strict=chosen == "lily", draft=getattr(args, "draft_model", None))
            _show_errors_in_one_line(program)
    except LilyError as error:
        fail(error, program)


def _check_values(args: argparse.Namespace) -> None:
    for name in _POSITIVE + _NOT_NEGATIVE:
        value = getattr(args, name, None)
        least = 0 if name in _NOT_NEGATIVE else 1
        if value is not None and value < least:
            raise UsageError(f"--{name.replace('_', '-')} is {value}; it must be at least {least}")
    if getattr(args, "prompt", None) == "":
        raise UsageError("--prompt is empty; give at least one character, or - to read standard input")


def _model_is_supported(args: argparse.Namespace, strict: bool) -> bool:
    """Check the model that the command line names, before anything large is downloaded.

    A command that names none (a prompt cache may name it, a request to the server) is checked on load.
    """
    if getattr(args, "model", None) is None:
        return True
    path = checkpoint.resolve(args.model, allow_patterns=["*.json"])
    try:
        config = checkpoint.read_config(path)
        checkpoint.check_supported(config, args.model)
    except UsageError as error:
        if strict:
            raise
        print(f"lily-mlx: {error}; running stock MLX-LM", file=sys.stderr)
        return False
    if path == Path(args.model).expanduser():
        engine.check(path)
    return True


def _check_on_load(strict: bool, draft: str | None) -> None:
    """Make ``mlx_lm.utils.load_model`` check a checkpoint before it loads it, once a process."""
    from mlx_lm import utils

    stock: Callable[..., Any] = getattr(utils.load_model, "__wrapped__", utils.load_model)

    @functools.wraps(stock)
    def load_model(model_path: Path, *args: Any, **kwargs: Any) -> Any:
        # sharded_load passes strict=False while the weights are still being fetched
        partial = kwargs.get("strict") is False
        try:
            config = checkpoint.read_config(model_path)
            checkpoint.check_supported(config, model_path)
            if not partial:
                engine.check(model_path)
        except UnsupportedModelError:
            if strict and not (draft and model_path == checkpoint.resolve(draft)):
                raise
            return stock(model_path, *args, **kwargs)
        with engine.one_line_errors(model_path):
            return stock(model_path, *args, **kwargs)

    utils.load_model = load_model


def _show_errors_in_one_line(program: str) -> None:
    """Let a LilyError that ends the process do so with status 2 and one line instead of a traceback."""
    previous = sys.excepthook

    def excepthook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if isinstance(error, LilyError):
            fail(error, program)  # SystemExit out of an excepthook sets the exit status
        previous(kind, error, trace)

    sys.excepthook = excepthook
