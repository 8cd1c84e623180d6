"""What ``--engine`` means once an mlx_lm command has parsed its arguments."""

from __future__ import annotations

import argparse
import functools
import io
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

from . import checkpoint, counters, engine
from .errors import LilyError, UnsupportedModelError, UsageError
from .settings import ENGINES, default_engine, settings

_LEAST = {
    "max_tokens": 1,
    "prefill_step_size": 1,
    "max_kv_size": 1,
    "batch_size": 1,
    "prompt_tokens": 1,
    "generation_tokens": 1,
    "num_trials": 1,
    "sequence_length": 1,
    "decode_concurrency": 1,
    "prompt_concurrency": 1,
    # zero has a meaning of its own: from the first token on, draft nothing, keep nothing, a seed
    "quantized_kv_start": 0,
    "num_draft_tokens": 0,
    "prompt_cache_size": 0,
    "seed": 0,
}
_CHOICES = {"kv_bits": (1, 2, 3, 4, 5, 6, 8), "kv_group_size": (32, 64, 128)}  # those of mx.quantize

_in_place = ExitStack()
"""Undoes what :func:`start` has put in the place of something else."""


def require_mlx() -> None:
    """End the command with status 2 and one line if MLX cannot be imported here."""
    try:
        engine.require_mlx()
    except LilyError as error:
        fail(error)


def show(error: LilyError, program: str) -> None:
    """Print the error as one line on stderr."""
    print(f"{program}: error: {' '.join(str(error).splitlines())}", file=sys.stderr, flush=True)


def fail(error: LilyError, program: str = "lily-mlx") -> NoReturn:
    """Print the error as one line and end the process with status 2."""
    show(error, program)
    raise SystemExit(2)


def add_engine_argument(parser: argparse.ArgumentParser) -> None:
    """Add ``--engine`` to the parser of an mlx_lm command. Idempotent."""
    if "--engine" in parser._option_string_actions:
        return
    if _is_lily_mlx():
        default, shown = "lily", "lily"
    else:
        default = default_engine() or "mlx"
        shown = f"{default}; MLX_LM_ENGINE sets it"
    parser.add_argument(
        "--engine",
        choices=ENGINES,
        default=default,
        help="what runs the model: mlx is stock MLX-LM, lily its drop-in from lily-mlx, auto lily where it "
        f"supports the model and else mlx (default: {shown})",
    )


def start(args: argparse.Namespace, command: str, module: Mapping[str, Any]) -> None:
    """Put the chosen engine in place, instead of what an earlier call put there.

    Ends the process with status 2 and one line on stderr where an argument, the checkpoint or the machine
    does not allow what was asked for.

    Args:
        args: what the command parsed; ``engine`` is taken out, the rest belongs to the command.
        command: its name, such as ``generate``.
        module: the names in its module.
    """
    restore()
    chosen = args.engine
    del args.engine
    if chosen == "mlx":
        return
    program = sys.argv[0] if _is_lily_mlx() else f"mlx_lm.{command}"
    try:
        if chosen not in ENGINES:  # argparse checks the flag's value, but not the default's
            raise UsageError(f"MLX_LM_ENGINE is {chosen!r}; it must be one of {', '.join(ENGINES)}")
        engine.check_settings()
        _check_values(args)
        if getattr(args, "model", None):
            _check_model(args.model, auto=chosen == "auto")
        _read_prompt(args)
    except LilyError as error:
        fail(error, program)
    if settings().stats:
        counters.report_at_exit()
    _replace_loading(auto=chosen == "auto", draft=getattr(args, "draft_model", None))
    _show_errors_in_one_line(program, module)


def restore() -> None:
    """Undo what :func:`start` did: the process is stock mlx-lm's again. Idempotent."""
    _in_place.close()


def _is_lily_mlx() -> bool:
    return sys.argv[0].startswith("lily-mlx ")


def _check_values(args: argparse.Namespace) -> None:
    given = {name: value for name, value in vars(args).items() if value is not None}
    for name, value in given.items():
        flag = f"--{name.replace('_', '-')}"
        if name in _LEAST and value < _LEAST[name]:
            raise UsageError(f"{flag} is {value}; it must be at least {_LEAST[name]}")
        if name in _CHOICES and value not in _CHOICES[name]:
            raise UsageError(f"{flag} is {value}; it must be one of {', '.join(map(str, _CHOICES[name]))}")
    if given.get("prompt") == "":
        raise UsageError("--prompt is empty; give at least one character, or - to read standard input")


def _check_model(model: str, auto: bool) -> None:
    """Check the model that the command line names, before anything large is downloaded.

    A command that names none (a prompt cache may name it, a request to the server) is checked on load.
    """
    path = checkpoint.resolve(model, allow_patterns=["*.json"])
    try:
        engine.check(path, weights=path == Path(model))
    except UnsupportedModelError:
        if not auto:
            raise


def _read_prompt(args: argparse.Namespace) -> None:
    """Read the prompt that comes from standard input, and hand it on."""
    if getattr(args, "prompt", None) != "-":
        return
    try:
        text = sys.stdin.read() if sys.stdin else ""
    except UnicodeDecodeError as error:
        raise UsageError(f"--prompt is -, but standard input is not text: {error}") from None
    if not text:
        raise UsageError("--prompt is -, but standard input is empty; give it at least one character")
    sys.stdin = io.StringIO(text)


def _replace(owner: Any, name: str, value: Any) -> None:
    """Set an attribute until :func:`restore`, which leaves alone what somebody else has set since."""
    before = getattr(owner, name)

    def put_back() -> None:
        if getattr(owner, name) is value:
            setattr(owner, name, before)

    setattr(owner, name, value)
    _in_place.callback(put_back)


def _replace_loading(auto: bool, draft: str | None) -> None:
    """Make mlx-lm check a checkpoint before it loads it as Lily's class, and say in one line what fails."""
    from mlx_lm import utils

    stock: Callable[..., Any] = utils.load_model

    @functools.wraps(stock)
    def load_model(model_path: Path, *args: Any, **kwargs: Any) -> Any:
        # sharded_load passes strict=False while the weights are still being fetched
        whole = kwargs.get("strict") is not False
        try:
            engine.check(model_path, weights=whole)
            kwargs.setdefault("get_model_classes", engine.classes)
        except UnsupportedModelError as error:
            if auto:
                print(f"lily-mlx: {error}; running stock MLX-LM", file=sys.stderr)
            elif not (draft and model_path == checkpoint.resolve(draft)):
                raise
        with engine.one_line_errors(model_path):
            return stock(model_path, *args, **kwargs)

    def in_one_line(name: str, position: int, what: str) -> None:
        function: Callable[..., Any] = getattr(utils, name)

        @functools.wraps(function)
        def replacement(*args: Any, **kwargs: Any) -> Any:
            with engine.one_line_errors(f"{what} {args[position]}"):
                return function(*args, **kwargs)

        _replace(utils, name, replacement)

    _replace(utils, "_download", checkpoint.resolve)
    _replace(utils, "load_model", load_model)
    in_one_line("load_tokenizer", 0, "the tokenizer of")
    in_one_line("load_adapters", 1, "the adapter")


def _show_errors_in_one_line(program: str, module: Mapping[str, Any]) -> None:
    """Let a LilyError that ends the process do so with status 2 and one line instead of a traceback."""
    previous = sys.excepthook

    def excepthook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if isinstance(error, LilyError):
            fail(error, program)  # SystemExit out of an excepthook sets the exit status
        previous(kind, error, trace)

    _replace(sys, "excepthook", excepthook)

    if provider := module.get("ModelProvider"):  # the server's; its thread would log an error and serve on
        load = provider.load_default

        def load_default(self: Any) -> None:
            try:
                load(self)
            except LilyError as error:
                show(error, program)
                os._exit(2)  # sys.exit would end the thread only

        _replace(provider, "load_default", load_default)
