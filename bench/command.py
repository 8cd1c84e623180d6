"""The command line: ``lily-mlx bench`` and its subcommands."""

from __future__ import annotations

import argparse
import math
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lily_mlx import engine
from lily_mlx.errors import LilyError, UsageError

from .files import check_file, check_folder

if TYPE_CHECKING:
    from .ab import Comparison

HELP = "measure Lily against stock MLX-LM on this machine"

_GATE_TEXT = (
    "def mean(values):\n    return sum(values) / len(values)\n\nThe list is sorted before it is returned, so "
    "that a caller may rely on the order of its elements and on nothing else."
)


def add_parser(commands: Any) -> argparse.ArgumentParser:
    """Add ``bench`` and its subcommands to the commands of ``lily-mlx``. Imports MLX.

    Args:
        commands: what ``add_subparsers`` returned.

    Raises:
        BackendUnavailableError: MLX has no back-end here.
    """
    engine.require_mlx()
    from . import graph, numerics

    parser: argparse.ArgumentParser = commands.add_parser(
        "bench",
        help=HELP,
        description="Measure prefill and decode of stock MLX-LM and of Lily side by side: same weights, same "
        "prompts, arms in alternating order. Ends with a report; --output gets a JSON line a measurement.",
    )
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--model", help="a checkpoint folder or a Hugging Face repo")
    source.add_argument(
        "--random-weights",
        metavar="CONFIG",
        help="a model of this shape with random weights: a config.json, or qwen3.6-35b-a3b",
    )
    parser.add_argument(
        "--arms",
        default="stock,stock+,lily",
        help="engines, separated by commas: stock, stock+ (stock with MLX's best own ops), lily, "
        "lily-without-NAME of an op or mechanism (default: %(default)s)",
    )
    parser.add_argument("--phase", default="prefill,decode", help="prefill, decode or both (default: both)")
    parser.add_argument(
        "--lengths", help="tokens of prompt or context, separated by commas (default: 256,512,...,131072)"
    )
    parser.add_argument(
        "--rounds", type=int, default=5, help="measurements of each arm (default: %(default)s)"
    )
    parser.add_argument(
        "--output", type=Path, metavar="DIR", help="folder of the measurements and the report"
    )
    parser.add_argument("--resume", action="store_true", help="go on with what --output holds")
    parser.add_argument(
        "--prefill-step-size", type=int, default=2048, help="tokens of a prefill chunk (default: %(default)s)"
    )
    parser.add_argument(
        "--decode-tokens", type=int, default=128, help="steps of a decode measurement (default: %(default)s)"
    )
    parser.add_argument(
        "--decode-cache",
        choices=("random", "prefill"),
        default="random",
        help="what decode starts from: random keys and values, or a prefill of the prompt by the first arm, "
        "which takes its time at long contexts (default: %(default)s)",
    )
    parser.add_argument(
        "--prompt-file", type=Path, help="a text as prompt, repeated as needed; else random tokens"
    )
    parser.add_argument(
        "--cool-down", type=float, default=0.0, metavar="SECONDS", help="wait before every measurement"
    )
    parser.add_argument(
        "--time-limit",
        type=float,
        metavar="SECONDS",
        help="begin no measurement that would end later than this",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--commit", help="Lily's commit, for the lines, where there is no repository to ask")
    parser.set_defaults(run=run)

    subcommands = parser.add_subparsers(title="subcommands", metavar="SUBCOMMAND")
    _add_compare(subcommands)
    graph.add_parser(subcommands)
    numerics.add_parser(subcommands)
    return parser


def _add_compare(commands: Any) -> None:
    parser = commands.add_parser(
        "compare",
        help="tables and plots of measurements",
        description="Tables and plots of what lily-mlx bench measured. Measurements of different machines, "
        "models or versions come apart.",
    )
    parser.add_argument("files", type=Path, nargs="+", metavar="FILE|DIR", help="measurements")
    parser.add_argument(
        "--markdown", type=Path, nargs="+", default=[], metavar="FILE", help="write the tables as Markdown"
    )
    parser.add_argument("--plots", type=Path, metavar="DIR", help="draw plots there (needs matplotlib)")
    parser.add_argument("--baseline", help="the arm that ratios refer to (default: stock, else stock+)")
    parser.set_defaults(run=run_compare)


def run_compare(args: argparse.Namespace) -> int:
    """``lily-mlx bench compare``. Returns the exit status."""
    from . import compare, record

    if args.plots:
        check_folder("--plots", args.plots)
    for file in args.markdown:
        check_file("--markdown", file)
        compare.check_markdown(file)
    groups = compare.groups([line for path in args.files for line in record.read(path)], args.baseline)
    compare.print_tables(groups)
    images = _draw(groups, args.plots) if args.plots else {}
    for file in args.markdown:
        compare.write_markdown(groups, file, images)
    return 0


def _draw(groups: Any, folder: Path) -> Any:
    from . import plots

    return plots.draw(groups, folder)


def run(args: argparse.Namespace) -> int:
    """``lily-mlx bench``. Returns the exit status: 1 if an arm is wrong, 130 if interrupted."""
    from . import gate

    started = time.monotonic()
    comparison = None
    try:
        comparison, watch = _prepare(args, started)
        with watch:
            finished = comparison.run()
    except gate.GateError as error:
        print(f"lily-mlx: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        if comparison is None or not comparison.output.done:
            raise
        print(f"\ninterrupted; what is measured is in {args.output}: --resume goes on", file=sys.stderr)
        return 130
    finally:
        if comparison is not None:
            comparison.output.close()
    if not finished:
        print(f"the time limit of {args.time_limit:g} s ended the run; --resume goes on with it")
    if comparison.output.done:
        _report(args.output)
    return 0


def _prepare(args: argparse.Namespace, started: float) -> tuple[Comparison, Any]:
    _check(args)
    from . import ab, arms, record
    from .progress import Progress

    settings = ab.Settings(
        model=args.model or f"random:{args.random_weights}",
        arms=arms.parse(args.arms),
        phases=_phases(args.phase),
        lengths=_lengths(args.lengths) if args.lengths is not None else list(ab.DEFAULT_LENGTHS),
        rounds=args.rounds,
        decode_tokens=args.decode_tokens,
        prefill_step_size=args.prefill_step_size,
        decode_cache=args.decode_cache,
        prompt=str(args.prompt_file or "random"),
        seed=args.seed,
    )
    environment = record.environment(args.commit)
    output = ab.Output(args.output, settings, environment, args.resume)
    text = _prompt_text(args.prompt_file)
    model, tokenizer, vocabulary = _load(args)
    comparison = ab.Comparison(
        settings=settings,
        model=model,
        output=output,
        environment=environment,
        prompt=_prompt(args, text, tokenizer, vocabulary),
        trained=tokenizer is not None,
        gate_tokens=_gate_tokens(args, tokenizer, vocabulary),
        clock=ab.Clock(None if args.time_limit is None else args.time_limit - (time.monotonic() - started)),
        cool_down=args.cool_down,
        watcher=(watch := Progress(settings)),
    )
    return comparison, watch


def _check(args: argparse.Namespace) -> None:
    if not (args.model or args.random_weights):
        raise UsageError(
            "bench needs --model PATH, or --random-weights CONFIG for a model without a checkpoint"
        )
    if args.output is None:
        raise UsageError("bench needs --output DIR, the folder for measurements and report")
    if args.prompt_file and args.random_weights:
        raise UsageError("--prompt-file needs a tokenizer, which --random-weights does not have; use --model")
    for name, least in (("rounds", 1), ("prefill_step_size", 1), ("decode_tokens", 1), ("seed", 0)):
        if getattr(args, name) < least:
            raise UsageError(
                f"--{name.replace('_', '-')} is {getattr(args, name)}; it must be at least {least}"
            )
    for name in ("cool_down", "time_limit"):
        value = getattr(args, name)
        if value is not None and not 0 <= value < math.inf:
            raise UsageError(f"--{name.replace('_', '-')} is {value}; it must be seconds, at least 0")
    check_folder("--output", args.output)


def _phases(text: str) -> list[str]:
    from .record import PHASES

    phases = [phase.strip() for phase in text.split(",")]
    if unknown := [phase for phase in phases if phase not in PHASES]:
        raise UsageError(f"--phase names {unknown[0]!r}; it must be prefill, decode or prefill,decode")
    return [phase for phase in PHASES if phase in phases]


def _lengths(text: str) -> list[int]:
    from .costs import MAX_LENGTH

    try:
        lengths = [int(part) for part in text.split(",")]
    except ValueError:
        raise UsageError(f"--lengths is {text!r}; it must be whole numbers separated by commas") from None
    if small := [length for length in lengths if length < 2]:
        raise UsageError(f"--lengths names {small[0]}; a length is at least 2 tokens")
    if large := [length for length in lengths if length > MAX_LENGTH]:
        raise UsageError(f"--lengths names {large[0]}; a length is at most {MAX_LENGTH} tokens")
    return sorted(set(lengths))


def _load(args: argparse.Namespace) -> tuple[Any, Any, int]:
    """Stock's model, its tokenizer (None for random weights) and the size of its vocabulary."""
    from lily_mlx import checkpoint

    if args.random_weights:
        from . import random_weights

        config = random_weights.read_config(args.random_weights)
        model = random_weights.build(config, args.seed)
        return model, None, checkpoint.text_config(config)["vocab_size"]
    import mlx_lm

    path = checkpoint.resolve(args.model)
    engine.check(path)
    with engine.one_line_errors(path):
        model, tokenizer, config = mlx_lm.load(str(path), return_config=True)
    return model, tokenizer, checkpoint.text_config(config)["vocab_size"]


def _prompt_text(file: Path | None) -> str | None:
    try:
        return file.read_text(encoding="utf-8") if file else None
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise UsageError(f"--prompt-file {file} cannot be read: {reason}") from None


def _prompt(args: argparse.Namespace, text: str | None, tokenizer: Any, vocabulary: int) -> Any:
    from . import ab

    if text is None:
        return ab.random_prompt(vocabulary, args.seed)
    tokens = tokenizer.encode(text)
    if not tokens:
        raise UsageError(f"--prompt-file {args.prompt_file} is empty; it must hold at least one token")
    return ab.text_prompt(tokens)


def _gate_tokens(args: argparse.Namespace, tokenizer: Any, vocabulary: int) -> Any:
    from . import ab, gate

    if tokenizer is None:
        return ab.random_prompt(vocabulary, args.seed)(gate.TOKENS)
    return ab.text_prompt(tokenizer.encode(_GATE_TEXT))(gate.TOKENS)


def _report(folder: Path) -> None:
    """Tables on the terminal, report.md and, where matplotlib is, plots, from all lines of the folder."""
    from . import compare, plots, record

    groups = compare.groups(list(record.read(folder)), None)
    compare.print_tables(groups)
    try:
        images = plots.draw(groups, folder / "plots")
    except LilyError as error:
        print(f"no plots: {error}")
        images = {}
    compare.write_markdown(groups, folder / "report.md", images)
    print(f"report: {folder / 'report.md'}")
