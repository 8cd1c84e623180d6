"""The ``lily-mlx`` command."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import sys
import types
from collections.abc import Sequence
from pathlib import Path

from . import __version__, engine, hook
from .commands import fail
from .errors import LilyError, UsageError
from .settings import OPS

_MLX_COMMAND_HELP = "mlx_lm.{} without the hook: --engine is lily unless given, whatever MLX_LM_ENGINE says"


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``lily-mlx``. Returns the exit status; 2 is for what the user can put right."""
    argv = list(sys.argv[1:] if argv is None else argv)
    try:
        try:
            return _run(argv)
        finally:
            print(end="", flush=True)
    except LilyError as error:
        fail(error)
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # Whoever read our output has gone. The interpreter flushes once more at its end: let it have a place.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _run(argv: Sequence[str]) -> int:
    if argv and argv[0] in hook.COMMANDS:
        return _run_mlx_command(argv[0], argv[1:])
    args = _parser(argv).parse_args(argv)
    status: int = args.run(args)
    return status


def _parser(argv: Sequence[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lily-mlx",
        description="Custom Metal kernels for Qwen3.5/3.6-MoE in mlx-lm.",
    )
    parser.add_argument("--version", action="version", version=f"lily-mlx {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    explain = commands.add_parser(
        "explain",
        help="which path every op of a model takes on this machine, and why",
        description="Show which path every op of prefill and decode takes on this machine, and why. Reads "
        "configs and headers only.",
        epilog="The variable LILY_DISABLE names ops that take the stock path, with commas between them: "
        f"{', '.join(OPS)}.",
    )
    explain.add_argument("--model", required=True, help="a checkpoint folder or a Hugging Face repo")
    explain.add_argument("--json", action="store_true", help="print JSON for machines")
    explain.set_defaults(run=_explain)

    if argv and argv[0] == "bench":
        _bench().add_parser(commands)  # its own options need MLX, the other commands' help does not
    else:
        commands.add_parser("bench", help=_bench().HELP, add_help=False)

    kernels = commands.add_parser("kernels", help="check kernel sources").add_subparsers(
        title="commands", metavar="COMMAND", required=True
    )
    check = kernels.add_parser(
        "check",
        help="find what Apple's Metal compiler would reject, on any machine",
        description="Check Metal sources with the strict pass, and with Apple's compiler where xcrun has it. "
        "Without a path: the kernels of lily-mlx, every variant.",
    )
    check.add_argument("paths", nargs="*", type=Path, help=".metal files or folders")
    check.set_defaults(run=_check_kernels)

    for name in hook.COMMANDS:
        commands.add_parser(name, help=_MLX_COMMAND_HELP.format(name), add_help=False)
    return parser


def _bench() -> types.ModuleType:
    """The benchmarks' command line: in a wheel inside this package, in a checkout beside it."""
    package = "lily_mlx.bench" if importlib.util.find_spec("lily_mlx.bench") else "bench"
    return importlib.import_module(f"{package}.command")


def _explain(args: argparse.Namespace) -> int:
    engine.require_mlx()
    from . import explain

    report = explain.explain(args.model)
    if args.json:
        print(report.to_json())
    else:
        report.print()
    return 0


def _check_kernels(args: argparse.Namespace) -> int:
    engine.require_mlx()
    from .launch import strict

    for path in args.paths:
        if not path.exists():
            raise UsageError(f"{path} does not exist; give .metal files or folders")
        if path.is_file() and path.suffix not in (".metal", ".h"):
            raise UsageError(f"{path} is not Metal source; give .metal files or folders")
    try:
        return strict.main_check(args.paths)
    except UnicodeDecodeError as error:
        raise UsageError(f"a source is not UTF-8 text: {error}") from None


def _run_mlx_command(name: str, argv: Sequence[str]) -> int:
    engine.require_mlx()
    hook.install()
    sys.argv = [f"lily-mlx {name}", *argv]
    importlib.import_module(f"mlx_lm.{name}").main()
    return 0
