"""``lily-mlx bench numerics``: how far each engine is from stock and from the truth, position by position.

Every engine reads the same tokens (teacher forcing: its own choices are never fed back), over the same
weights on the same device:

| engine | what |
| --- | --- |
| stock | mlx-lm's model; on CUDA, unless refused, with two parts replaced (bench/oracle.py says how) |
| lily | the same modules with Lily's classes |
| oracle | the same weights dequantised, fp32 arithmetic, always through prefill |
| hf | Hugging Face transformers in fp32 on the CPU, or logits stored from it |

Figures are KL divergences in nats of the next-token distributions, agreement of their most probable tokens,
and perplexity on the text. Log-softmax and sums are float64.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx import nn

import lily_mlx
from lily_mlx import checkpoint, engine
from lily_mlx.counters import counts
from lily_mlx.errors import LilyError, UsageError

from .files import check_file, write_text
from .oracle import bridged_scan, fp32_oracle, mended_products, require_fp32_products, twin
from .record import environment

__all__ = ["add_parser", "compare", "measure", "run", "teacher_forced"]

HELDOUT = Path(__file__).parents[1] / "tests" / "data" / "heldout.txt"
"""Text that the tiny checkpoint never saw; only a checkout has it."""

PAIRS = (
    ("stock", "lily"),
    ("oracle", "stock"),
    ("oracle", "lily"),
    ("hf", "stock"),
    ("hf", "lily"),
    ("hf", "oracle"),
)
"""(truth, candidate): the divergence is KL(truth || candidate)."""

# Logits turned into float64 at a time: a few arrays of this size are alive.
BLOCK_ELEMENTS = 1 << 22

Advance = Callable[[int], None]
Engine = Callable[[np.ndarray, Sequence[int], Advance], np.ndarray]
"""(tokens [T], lengths of the passes, what to tell of positions done) -> logits [T, V] float32."""


# --- The library --------------------------------------------------------------------------------------------


def teacher_forced(
    model: nn.Module, tokens: Any, step: int | Sequence[int], advance: Advance = lambda positions: None
) -> np.ndarray:
    """Logits of every position of ``tokens``, read through one prompt cache.

    Args:
        model: any mlx-lm model.
        tokens: [T] or [B, T] integers.
        step: tokens a forward pass (1 decodes token by token), or the length of each pass.
        advance: called with the positions of each pass that is done.

    Returns:
        [T, V] or [B, T, V] float32: entry t is the distribution of token t + 1.
    """
    from mlx_lm.models.cache import make_prompt_cache

    tokens = np.asarray(tokens)
    rows = mx.array(np.atleast_2d(tokens))
    length = rows.shape[1]
    lengths = chunks(length, step) if isinstance(step, int) else step
    if sum(lengths) != length:
        raise ValueError(f"passes of {list(lengths)} tokens do not add up to {length}")
    cache = make_prompt_cache(model)
    parts, start = [], 0
    for n in lengths:
        logits = model(rows[:, start : start + n], cache=cache).astype(mx.float32)
        mx.eval(logits, [entry.state for entry in cache])
        parts.append(np.array(logits))
        start += n
        advance(n)
    result = np.concatenate(parts, axis=1)
    return result if tokens.ndim == 2 else result[0]


def compare(logits_a: np.ndarray, logits_b: np.ndarray) -> dict[str, Any]:
    """Distance of two engines' logits [..., V] over the same tokens.

    Returns:
        ``mean_kl`` and ``worst_kl``, KL(a || b) in nats; ``worst_position``, the index of the worst on
        the leading axes; ``top1_agreement`` between 0 and 1; ``positions``, how many were compared.

    Raises:
        UsageError: the shapes differ.
    """
    return _summary(*_divergence(logits_a, logits_b))


def _summary(kl: np.ndarray, same: np.ndarray) -> dict[str, Any]:
    worst = np.unravel_index(int(kl.argmax()), kl.shape)
    return {
        "mean_kl": float(kl.mean()),
        "worst_kl": float(kl[worst]),
        "worst_position": [int(i) for i in worst],
        "top1_agreement": float(same.mean()),
        "positions": int(kl.size),
    }


def _divergence(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(KL(a || b), whether the most probable token is the same), a number each for every position."""
    if a.shape != b.shape:
        raise UsageError(
            f"logits of shapes {a.shape} and {b.shape} cannot be compared: not the same vocabulary"
        )
    kl, same = [], []
    for x, y in zip(_blocks(a), _blocks(b), strict=True):
        p, q = _log_softmax(x), _log_softmax(y)
        kl.append((np.exp(p) * (p - q)).sum(-1))
        same.append(x.argmax(-1) == y.argmax(-1))
    return np.concatenate(kl).reshape(a.shape[:-1]), np.concatenate(same).reshape(a.shape[:-1])


def _blocks(logits: np.ndarray) -> Iterator[np.ndarray]:
    """Rows [n, V] of ``logits``, a few at a time."""
    rows = logits.reshape(-1, logits.shape[-1])
    n = max(1, BLOCK_ELEMENTS // rows.shape[1])
    return (rows[i : i + n] for i in range(0, len(rows), n))


def _log_softmax(x: np.ndarray) -> np.ndarray:
    x = x.astype(np.float64)
    x -= x.max(-1, keepdims=True)
    x -= np.log(np.exp(x).sum(-1, keepdims=True))
    return x


def _surprise(logits: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Negative log-likelihood [T] of the token after each position; NaN at the last, which has none."""
    found, start = [], 0
    for rows in _blocks(logits[:-1]):
        following = tokens[start + 1 : start + 1 + len(rows), None]
        found.append(-np.take_along_axis(_log_softmax(rows), following, -1)[:, 0])
        start += len(rows)
    return np.concatenate([*found, [np.nan]])


def chunks(length: int, step: int) -> list[int]:
    """``length`` in parts of ``step``, the last one smaller."""
    return [min(step, length - start) for start in range(0, length, step)]


# --- Measuring ----------------------------------------------------------------------------------------------


@dataclass
class _Record:
    """Figures [S, T] of every position, sequence by sequence."""

    pairs: Sequence[tuple[str, str]]
    surprise: dict[str, list[np.ndarray]] = field(default_factory=dict)
    kl: dict[tuple[str, str], list[np.ndarray]] = field(default_factory=dict)
    same: dict[tuple[str, str], list[np.ndarray]] = field(default_factory=dict)

    def add(self, tokens: np.ndarray, logits: Mapping[str, np.ndarray]) -> None:
        for name, values in logits.items():
            self.surprise.setdefault(name, []).append(_surprise(values, tokens))
        for pair in self.pairs:
            if pair[0] in logits and pair[1] in logits:
                kl, same = _divergence(logits[pair[0]], logits[pair[1]])
                self.kl.setdefault(pair, []).append(kl)
                self.same.setdefault(pair, []).append(same)

    def figures(self, part: slice) -> dict[str, Any]:
        """Perplexities and distances over the positions ``part`` of every sequence."""
        first = part.start or 0
        perplexity = {
            name: float(np.exp(np.nanmean([row[part] for row in rows])))
            for name, rows in self.surprise.items()
        }
        distances = []
        for truth, candidate in self.kl:
            kl, same = (np.stack(rows[truth, candidate])[:, part] for rows in (self.kl, self.same))
            entry = _summary(kl, same)
            sequence, position = entry.pop("worst_position")
            entry |= {"worst_sequence": sequence, "worst_position": first + position}
            distances.append({"truth": truth, "candidate": candidate, **entry})
        return {"perplexity": perplexity, "distances": distances, "nearer": self._nearer(part)}

    def _nearer(self, part: slice) -> dict[str, float] | None:
        """How much farther lily is from the oracle than stock: the mean over positions, its 95 % interval.

        The interval takes positions as independent.
        """
        if ("oracle", "stock") not in self.kl:
            return None
        stock, lily = (np.stack(self.kl["oracle", name])[:, part].ravel() for name in ("stock", "lily"))
        difference = lily - stock
        spread = 1.96 * float(difference.std(ddof=1)) / math.sqrt(difference.size)
        mean = float(difference.mean())
        return {"mean_difference": mean, "low": mean - spread, "high": mean + spread}


def measure(
    engines: Mapping[str, Engine],
    sequences: np.ndarray,
    passes: Mapping[str, Sequence[int]],
    parts: Sequence[slice] = (),
    advance: Advance = lambda positions: None,
    pairs: Sequence[tuple[str, str]] = PAIRS,
) -> dict[str, Any]:
    """Run every engine over every sequence and compare them position by position.

    Args:
        engines: by name; the names in ``pairs`` are compared with one another.
        sequences: tokens [S, T].
        passes: lengths of the forward passes of each engine.
        parts: positions to report on their own (the turns of a chat), besides the whole.
        advance: called with the positions that an engine has done.
        pairs: (truth, candidate) by name; those that are not among the engines are left out.

    Returns:
        ``perplexity`` by engine, ``distances`` (a dict each pair: :func:`compare`'s figures with the worst
        position and its sequence), ``nearer`` (None without the oracle), ``turns``: the same for each part.

    Raises:
        LilyError: an engine's logits are not finite, which is a fault of it, not a distance.
    """
    record = _Record(pairs)
    for number, tokens in enumerate(sequences):
        logits = {}
        for name, run_engine in engines.items():
            logits[name] = run_engine(tokens, passes[name], advance)
            if not np.isfinite(logits[name]).all():
                at = int(np.argwhere(~np.isfinite(logits[name]))[0, 0])
                raise LilyError(f"{name}: the logits of sequence {number}, position {at} are not finite")
        record.add(tokens, logits)
    return {**record.figures(slice(None)), "turns": [record.figures(part) for part in parts]}


# --- The command --------------------------------------------------------------------------------------------


def add_parser(commands: Any) -> argparse.ArgumentParser:
    """Add ``numerics`` to the subcommands of ``lily-mlx bench``."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "numerics",
        help="perplexity, KL divergence and top-1 agreement of stock, Lily and an fp32 oracle",
        description="Teacher-forced comparison of stock MLX-LM and Lily over the same weights, each also "
        "against an fp32 oracle: the same weights dequantised, fp32 arithmetic.",
    )
    add = parser.add_argument
    add("--model", required=True, help="a checkpoint folder or a Hugging Face repo")
    add("--text", type=Path, help="text to read (default in a checkout: tests/data/heldout.txt)")
    add("--sequences", type=int, default=8, help="pieces of the text, spread over it (default: %(default)s)")
    add("--positions", type=int, default=192, help="tokens of a piece (default: %(default)s)")
    add("--prefill-step-size", type=int, default=2048, help="tokens of a prefill pass (default: %(default)s)")
    add(
        "--against-steps",
        type=_steps,
        default=(),
        metavar="N,N",
        help="read with these prefill steps too: each engine's divergence from itself at --prefill-step-size",
    )
    add(
        "--mode",
        choices=("prefill", "decode"),
        default="prefill",
        help="read a piece in prefill passes, or token by token through the cache (default: %(default)s)",
    )
    add("--turns", type=int, help="read chats of this many turns through one cache, with figures a turn")
    add(
        "--turn-tokens",
        type=int,
        default=256,
        help="tokens of a turn; in decode mode its second half is decoded",
    )
    add(
        "--oracle-device",
        choices=("same", "cpu", "none"),
        default="same",
        help="where the fp32 oracle runs; none leaves it out (default: %(default)s)",
    )
    add("--against", choices=("hf",), help="compare with Hugging Face transformers too")
    add(
        "--hf-model",
        type=Path,
        help="for --against hf: a folder in Hugging Face layout, run in fp32 on the CPU",
    )
    add("--reference", type=Path, help="for --against hf: an .npz file of tokens [S, T] and logits [S, T, V]")
    add(
        "--stock-bridged",
        action=argparse.BooleanOptionalAction,
        help="on CUDA run mlx-lm's packed recurrent kernel, where mlx-lm loops in Python, and spell out the "
        "products over 64 inputs, which MLX gets wrong (default: on CUDA)",
    )
    add("--commit", help="Lily's commit, for the file, where there is no repository to ask")
    add("--json", type=Path, help="write everything to this file")
    parser.set_defaults(run=run)
    return parser


def _steps(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(step) for step in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of numbers of tokens, as 64,512 is") from None


def run(args: argparse.Namespace) -> int:
    """Run ``lily-mlx bench numerics``; returns the exit status.

    Raises:
        UsageError: an argument that cannot be used.
        LilyError: an engine's logits are not finite.
    """
    _check(args)
    engine.require_mlx()
    if args.oracle_device == "same":
        require_fp32_products()
    bridged = mx.cuda.is_available() if args.stock_bridged is None else args.stock_bridged
    if bridged and not mx.cuda.is_available():
        raise UsageError("--stock-bridged needs a CUDA device; elsewhere stock has what it needs")
    model, tokenizer = _load(args.model)
    reference = _reference(args.reference) if args.reference else None
    sequences = reference[0] if reference else _sequences(args, tokenizer)
    if reference:
        sequences = sequences[: args.sequences, : args.positions]
    engines = _engines(args, model, bridged, reference)

    prefill, lengths, parts = _passes(args, sequences.shape[1])
    passes = {name: lengths if name in ("stock", "lily") else prefill for name in engines}
    pairs = list(PAIRS)
    for step in args.against_steps:
        for name in ("lily", "stock"):
            again = f"{name}, step {step}"
            engines[again], passes[again] = engines[name], chunks(sequences.shape[1], step)
            pairs.append((name, again))
    counts.clear()
    try:
        with _progress(sequences.size * len(engines)) as advance:
            found = measure(engines, sequences, passes, parts, advance, pairs)
    except KeyboardInterrupt:
        print("interrupted: nothing was written")
        return 130
    found |= {"settings": _settings(args, sequences, bridged), "about": _about(args.commit)}
    for entry in found["distances"]:
        row, at = entry["worst_sequence"], entry["worst_position"]
        entry["worst_after"] = tokenizer.decode(sequences[row, max(0, at - 11) : at + 1].tolist())
    if args.json:
        write_text(args.json, json.dumps(found, indent=1) + "\n")
    _print(found)
    return 0


def _check(args: argparse.Namespace) -> None:
    least = {"sequences": 1, "positions": 2, "prefill_step_size": 1, "turns": 1, "turn_tokens": 2}
    for name, low in least.items():
        value = getattr(args, name)
        if value is not None and value < low:
            raise UsageError(f"--{name.replace('_', '-')} is {value}; it must be at least {low}")
    if args.against_steps and (args.turns or args.mode == "decode"):
        raise UsageError(
            "--against-steps compares prefills of whole pieces; leave out --turns and --mode decode"
        )
    for step in args.against_steps:
        if step < 1 or step == args.prefill_step_size:
            raise UsageError(
                f"--against-steps has {step}; "
                f"it must be at least 1 and not --prefill-step-size, {args.prefill_step_size}"
            )
    if args.hf_model and args.reference:
        raise UsageError(
            "--hf-model and --reference are both given; Hugging Face's logits come from one of them"
        )
    if args.against and not (args.hf_model or args.reference):
        raise UsageError(
            "--against hf needs --hf-model, a folder in Hugging Face layout, or --reference, stored logits"
        )
    if args.reference and (args.text or args.turns):
        raise UsageError("--reference brings its own tokens; leave out --text and --turns")
    if args.text and not args.text.is_file():
        raise UsageError(f"--text {str(args.text)!r} is not a file")
    if not (args.text or args.reference or HELDOUT.is_file()):
        raise UsageError(
            "--text FILE is needed, a text to read; only a checkout has a default, tests/data/heldout.txt"
        )
    if args.json:
        check_file("--json", args.json)


def _load(path_or_repo: str) -> tuple[nn.Module, Any]:
    """Stock's model and the tokenizer, after Lily's checks of the checkpoint."""
    import mlx_lm

    path = checkpoint.resolve(path_or_repo)
    engine.check(path)
    with engine.one_line_errors(path):
        model, tokenizer = mlx_lm.load(str(path))[:2]
    return model, tokenizer


def _reference(file: Path) -> tuple[np.ndarray, np.ndarray]:
    """(tokens [S, T] int, logits [S, T, V]) of an ``.npz`` file."""
    try:
        with np.load(file) as stored:
            tokens, logits = stored["tokens"], stored["logits"]
    except (OSError, ValueError, KeyError) as error:
        raise UsageError(f"--reference {file} is not an .npz file of tokens and logits: {error}") from None
    if tokens.ndim != 2 or logits.ndim != 3 or logits.shape[:2] != tokens.shape:
        raise UsageError(
            f"--reference {file} has tokens {tokens.shape} and logits {logits.shape}; "
            "they must be [S, T] and [S, T, V]"
        )
    return tokens.astype(np.int64), logits


def _sequences(args: argparse.Namespace, tokenizer: Any) -> np.ndarray:
    """Pieces [S, T] of the text's tokens, evenly spread, none overlapping another."""
    file = args.text or HELDOUT
    tokens = np.array(tokenizer.encode(file.read_text(encoding="utf-8", errors="replace")))
    length = args.turns * args.turn_tokens if args.turns else args.positions
    if len(tokens) < args.sequences * length:
        raise UsageError(
            f"{file} has {len(tokens)} tokens; "
            f"{args.sequences} sequences of {length} need {args.sequences * length}"
        )
    starts = np.linspace(0, len(tokens) - length, args.sequences).astype(int)
    return np.stack([tokens[start : start + length] for start in starts])


def _passes(args: argparse.Namespace, length: int) -> tuple[list[int], list[int], list[slice]]:
    """(passes of a prefill, passes of the engines under test, positions of each turn)."""
    step, decode = args.prefill_step_size, args.mode == "decode"
    if not args.turns:
        prefill = chunks(length, step)
        return prefill, [1] * length if decode else prefill, []
    size = args.turn_tokens
    answer = size // 2 if decode else 0
    turn = chunks(size - answer, step) + [1] * answer
    parts = [slice(start, start + size) for start in range(0, length, size)]
    return chunks(size, step) * args.turns, turn * args.turns, parts


def _engines(
    args: argparse.Namespace,
    model: nn.Module,
    bridged: bool,
    reference: tuple[np.ndarray, np.ndarray] | None,
) -> dict[str, Engine]:
    bridge, mend = (bridged_scan, mended_products) if bridged else (contextlib.nullcontext,) * 2

    def stock(tokens: np.ndarray, lengths: Sequence[int], advance: Advance) -> np.ndarray:
        with bridge(), mend():
            return teacher_forced(model, tokens, lengths, advance)

    lily_model = lily_mlx.convert(twin(model))

    def lily(tokens: np.ndarray, lengths: Sequence[int], advance: Advance) -> np.ndarray:
        return teacher_forced(lily_model, tokens, lengths, advance)

    engines: dict[str, Engine] = {"stock": stock, "lily": lily}
    if args.oracle_device != "none":
        exact = fp32_oracle(model)

        def oracle(tokens: np.ndarray, lengths: Sequence[int], advance: Advance) -> np.ndarray:
            with _device(args.oracle_device), bridge():
                return teacher_forced(exact, tokens, lengths, advance)

        engines["oracle"] = oracle
    if reference:
        tokens, logits = reference
        rows = {row.tobytes(): i for i, row in enumerate(tokens[:, : args.positions])}

        def stored(tokens: np.ndarray, lengths: Sequence[int], advance: Advance) -> np.ndarray:
            advance(len(tokens))
            return logits[rows[tokens.tobytes()], : len(tokens)].astype(np.float32)

        engines["hf"] = stored
    elif args.hf_model:
        engines["hf"] = _hugging_face(args.hf_model)
    return engines


@contextlib.contextmanager
def _device(name: str) -> Iterator[None]:
    before = mx.default_device()
    if name == "cpu":
        mx.set_default_device(mx.cpu)
    try:
        yield
    finally:
        mx.set_default_device(before)


def _hugging_face(path: Path) -> Engine:
    """Transformers' model of a folder, fp32, eager attention, on the CPU."""
    try:
        import torch
        from transformers import AutoModelForCausalLM
    except ImportError as error:
        raise UsageError(
            f"--hf-model needs torch and transformers ({error}): "
            "pip install torch, or give --reference instead"
        ) from None
    if not (path / "config.json").is_file():
        raise UsageError(f"--hf-model {str(path)!r} has no config.json; give a folder in Hugging Face layout")
    try:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    except (OSError, ValueError, KeyError) as error:
        raise UsageError(
            f"--hf-model {path} cannot be loaded: {' '.join(str(error).split())[:300]}"
        ) from error

    def logits(tokens: np.ndarray, lengths: Sequence[int], advance: Advance) -> np.ndarray:
        with torch.no_grad():
            result = model(torch.from_numpy(tokens[None].astype(np.int64))).logits[0]
        advance(len(tokens))
        return np.asarray(result.numpy(), dtype=np.float32)

    return logits


@contextlib.contextmanager
def _progress(total: int) -> Iterator[Advance]:
    """A bar of positions done with the time left, on stderr."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("positions"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=total)
        yield lambda positions: bar.update(task, advance=positions)


def _settings(args: argparse.Namespace, sequences: np.ndarray, bridged: bool) -> dict[str, Any]:
    source = args.reference or args.text or HELDOUT
    return {
        "model": args.model,
        "tokens_from": source.name,
        "sequences": sequences.shape[0],
        "positions": sequences.shape[1],
        "mode": args.mode,
        "prefill_step_size": args.prefill_step_size,
        "against_steps": list(args.against_steps),
        "turns": args.turns,
        "turn_tokens": args.turn_tokens if args.turns else None,
        "stock_bridged": bridged,
        "oracle_device": args.oracle_device,
    }


def _about(commit: str | None) -> dict[str, Any]:
    kernels = {name: n for name, n in sorted(counts.items()) if name.startswith("op.")}
    return {**environment(commit), "lily_kernels": kernels}


def _print(found: Mapping[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    settings, about = found["settings"], found["about"]
    console.print(
        f"{settings['sequences']} sequences of {settings['positions']} tokens "
        f"from {settings['tokens_from']}, {settings['mode']}; {about['chip']}, "
        f"back-end {about['backend']}, mlx {about['mlx']}, mlx-lm {about['mlx_lm']}"
        + (
            "; stock's recurrence bridged, products over 64 inputs spelt out"
            if settings["stock_bridged"]
            else ""
        )
    )
    kernels = ", ".join(f"{name} {n}" for name, n in about["lily_kernels"].items())
    console.print(f"Lily's kernels: {kernels or 'none ran'}")

    perplexity = Table(title="perplexity")
    for name in ("engine", "perplexity", "against stock"):
        perplexity.add_column(name, justify="left" if name == "engine" else "right")
    base = found["perplexity"]["stock"]
    for name, value in found["perplexity"].items():
        perplexity.add_row(name, f"{value:.4f}", f"{value / base - 1:+.3%}" if name != "stock" else "")
    console.print(perplexity)

    table = Table(title="distance of next-token distributions, KL in nats")
    for name in ("from", "to", "mean KL", "worst KL", "worst at", "same top-1"):
        table.add_column(name, justify="left" if name in ("from", "to", "worst at") else "right")
    for entry in found["distances"]:
        table.add_row(
            entry["truth"],
            entry["candidate"],
            f"{entry['mean_kl']:.3e}",
            f"{entry['worst_kl']:.3e}",
            f"{entry['worst_sequence']}:{entry['worst_position']}",
            f"{entry['top1_agreement']:.2%}",
        )
    console.print(table)
    if found["turns"]:
        turns = Table(title="turn by turn: mean KL, same top-1")
        turns.add_column("turn", justify="right")
        for entry in found["distances"]:
            turns.add_column(f"{entry['truth']}, {entry['candidate']}", justify="right")
        for number, turn in enumerate(found["turns"], 1):
            cells = (f"{d['mean_kl']:.2e} {d['top1_agreement']:.1%}" for d in turn["distances"])
            turns.add_row(str(number), *cells)
        console.print(turns)
    if (entry := found["distances"][0])["worst_kl"] > 0:
        console.print(
            f"Worst between {entry['truth']} and {entry['candidate']}: sequence {entry['worst_sequence']}, "
            f"position {entry['worst_position']}, after {entry['worst_after']!r}",
            markup=False,
        )
    if nearer := found["nearer"]:
        console.print(_verdict(nearer))


def _verdict(nearer: Mapping[str, float]) -> str:
    interval = (
        f"KL(oracle || lily) - KL(oracle || stock) = {nearer['mean_difference']:+.2e}, "
        f"95 % interval {nearer['low']:+.2e} to {nearer['high']:+.2e}"
    )
    if nearer["high"] < 0:
        return f"Lily is nearer to the fp32 oracle: {interval}"
    if nearer["low"] > 0:
        return f"Stock is nearer to the fp32 oracle: {interval}"
    return f"Neither is measurably nearer to the fp32 oracle: {interval}"
