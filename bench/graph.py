"""``lily-mlx bench graph``: the kernels of one forward pass as Metal would run them, traced without Metal.

For stock and for Lily the report counts launches, serial stages and memory traffic of one decoded token, or
of one chunk of a prefill, and sets them beside the least that the model allows (bench/costs.py). What
counts as a launch, a stage and a byte is defined in lily_mlx/launch/trace.py and metal_costs.py. No Metal
device and, with ``--random-weights``, no checkpoint is needed, and no weight takes memory.

A decode step ends with the logits: choosing the token is left out for both engines. A prefill chunk computes,
as mlx-lm's generator asks, what the cache keeps: no output head, nothing of the last layer after its cache.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest.mock import patch

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_map_with_path

import lily_mlx
from lily_mlx import checkpoint, engine
from lily_mlx.errors import UsageError
from lily_mlx.launch import backend, trace
from lily_mlx.launch.kernel import all_kernels
from lily_mlx.layers import fusion
from lily_mlx.models import LilyModel
from lily_mlx.ops.trust import distrust
from lily_mlx.step import Turn, decode_step

from . import costs, random_weights
from .files import check_file, write_text
from .oracle import twin

__all__ = ["add_parser", "report", "run", "trace_pass", "weightless"]

BANDWIDTHS = {
    "M1 Max": 400,
    "M2 Ultra": 800,
    "M3 Max (40-core GPU)": 400,
    "M3 Ultra": 819,
    "M4 Pro": 273,
    "M4 Max (40-core GPU)": 546,
    "M5": 153,
    "M5 Pro": 307,
    "M5 Max (40-core GPU)": 614,
    "NVIDIA H200, cuMemcpy of 1 GiB, read and written": 4250,
}
"""Memory bandwidths in GB/s: Apple's published figures, and the driver's copy as it was measured."""

REFERENCE_ENGINE = {"dispatches": 795, "stages": 555}
"""What the engine that the project starts from reports for a decoded token of Qwen3.6-35B-A3B."""

REFERENCE_SHAPE = {"hidden_size": 2048, "num_hidden_layers": 40, "num_experts": 256, "vocab_size": 248320}

# MLX puts a kernel's template arguments after its name, Lily's launcher a hash of them.
_SPECIALISATION = re.compile(r"(_[0-9a-f]{16})?(__.*)?$")


# --- The model ----------------------------------------------------------------------------------------------


def weightless(model: nn.Module, dtype: mx.Dtype | None = None) -> nn.Module:
    """Replace every array of ``model`` by a constant of its shape, which takes no memory; returns ``model``.

    Args:
        model: stock's; its arrays need not be evaluated.
        dtype: of the floating-point parameters that a checkpoint stores in 16 bits; None leaves them.
    """

    def constant(name: str, array: mx.array) -> mx.array:
        if dtype is not None and mx.issubdtype(array.dtype, mx.floating) and model.cast_predicate(name):
            return _constant(array.shape, dtype)
        return _constant(array.shape, array.dtype)

    model.update(tree_map_with_path(constant, model.parameters()))
    model.eval()
    return model


def _constant(shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
    array = mx.broadcast_to(mx.zeros((), dtype), shape)
    mx.eval(array)
    return array


def _from_config(config: dict[str, Any]) -> nn.Module:
    """Stock's model of a config, its layers quantised as the config says."""
    stock = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
    model: nn.Module = stock.Model(stock.ModelArgs.from_dict(config))
    if config.get("quantization"):
        random_weights._quantize(model, config["quantization"])
    return weightless(model, mx.bfloat16)


def _from_checkpoint(path_or_repo: str) -> nn.Module:
    from mlx_lm.utils import load_model

    path = checkpoint.resolve(path_or_repo)
    checkpoint.read_checkpoint(path)
    with engine.one_line_errors(path):
        model, _ = load_model(path, lazy=True)
    return weightless(model)


def _cache(model: nn.Module, context: int, tokens: int) -> list[Any]:
    """The model's cache after ``context`` tokens, without data, with room for just ``tokens`` more."""
    cache: list[Any] = model.make_cache()
    if context == 0:
        return cache
    for layer, entry in zip(model.layers, cache, strict=True):
        if layer.is_linear:
            net = layer.linear_attn
            dtype = net.conv1d.weight.dtype
            entry[0] = _constant((1, net.conv_kernel_size - 1, net.conv_dim), dtype)
            entry[1] = _constant((1, net.num_v_heads, net.head_v_dim, net.head_k_dim), mx.float32)
        else:
            attention = layer.self_attn
            shape = (1, attention.num_key_value_heads, context + tokens, attention.head_dim)
            entry.keys, entry.values = (_constant(shape, attention.k_norm.weight.dtype) for _ in range(2))
            entry.offset = context
    return cache


def _amid_answer(model: nn.Module, cache: list[Any]) -> None:
    """Give the decode step what the token before leaves it: without that, the first copies the KV cache."""
    for entry in cache:
        if hasattr(entry, "keys") and entry.keys is not None:
            keys, values = entry.keys, entry.values
            spare = [_constant(a.shape, a.dtype) for a in (keys, values)]
            rows = [_constant((*a.shape[:2], 2, a.shape[3]), a.dtype) for a in (keys, values)]
            turn = Turn((keys, values), (spare[0], spare[1]), (rows[0], rows[1]), entry.offset)
            decode_step(model).turns[entry] = turn


def _contents(cache: list[Any]) -> list[mx.array]:
    pairs = [(e.keys, e.values) if hasattr(e, "keys") else (e[0], e[1]) for e in cache]
    return [array for pair in pairs for array in pair]


# --- Counting -----------------------------------------------------------------------------------------------


def trace_pass(model: nn.Module, phase: str, tokens: int, context: int) -> list[trace.Primitive]:
    """The primitives of one forward pass of ``model``, stock's or Lily's, on Metal.

    Args:
        model: see :func:`weightless`.
        phase: ``decode`` ends with the logits, ``prefill`` with what the cache keeps.
        tokens: of the pass, at batch 1.
        context: tokens that the cache holds before it.

    Raises:
        TraceError: the graph holds something that MLX cannot export.
    """
    cache = _cache(model, context, tokens)
    if isinstance(model, LilyModel):
        _amid_answer(model, cache)
    for kernel in all_kernels():
        distrust(kernel.stem, "metal")  # on a Mac, self-checks must not run inside the trace

    def forward(ids: mx.array) -> list[mx.array]:
        logits = model(ids, cache=cache)
        return [*_contents(cache), *([logits] if phase == "decode" else [])]

    with backend.override("metal"), _joined_without_data():
        return trace.primitives(forward, mx.zeros((1, tokens), mx.int32))


def _joined_without_data() -> AbstractContextManager[Any]:
    """While open, matrices that are joined are constants too: a copy of the model's would need its memory."""

    def in_one_buffer(arrays: Sequence[mx.array]) -> mx.array:
        return _constant((sum(array.nbytes for array in arrays) // 4,), mx.uint32)

    def part_views(_: mx.array, arrays: Sequence[mx.array]) -> list[mx.array]:
        return [_constant((array.size,), array.dtype) for array in arrays]

    return patch.multiple(fusion, in_one_buffer=in_one_buffer, part_views=part_views)


def report(
    model: nn.Module, phase: str, tokens: int, context: int, bandwidths: Mapping[str, float]
) -> dict[str, Any]:
    """Count one pass of stock and of Lily and the limit of both.

    Args:
        model: stock's model, weightless.
        phase, tokens, context: as for :func:`trace_pass`.
        bandwidths: GB/s by device.

    Returns:
        ``engines`` (``stock`` and ``lily``: the fields of :class:`~lily_mlx.launch.trace.Summary` and
        ``by_primitive``, most bytes first), ``limit`` (see bench/costs.py), ``bounds`` (tokens a second
        that the limit's bytes allow on each device) and ``reference_engine`` (None unless the shape is that
        of its model).
    """
    engines = {}
    for name, module in (("stock", model), ("lily", lily_mlx.convert(twin(model)))):
        found = trace_pass(module, phase, tokens, context)
        engines[name] = {**asdict(trace.summary(found)), "by_primitive": _by_primitive(found)}
        del engines[name]["by_name"]
    least = costs.forward(model, tokens, context, head=phase == "decode").to_dict()
    text = model.language_model.args
    same = (
        phase == "decode"
        and tokens == 1
        and all(getattr(text, key) == n for key, n in REFERENCE_SHAPE.items())
    )
    return {
        "phase": phase,
        "tokens": tokens,
        "context": context,
        "engines": engines,
        "reference_engine": REFERENCE_ENGINE if same else None,
        "limit": least,
        "bounds": [
            {"device": device, "gb_per_s": rate, "tokens_per_s": tokens * rate * 1e9 / least["bytes"]}
            for device, rate in bandwidths.items()
        ],
    }


def _by_primitive(found: list[trace.Primitive]) -> list[dict[str, Any]]:
    totals: dict[str, Counter[str]] = {}
    for p in found:
        if p.dispatches:
            name = _SPECIALISATION.sub("", p.name)
            totals.setdefault(name, Counter()).update(
                dispatches=p.dispatches, bytes_read=p.bytes_read, bytes_written=p.bytes_written
            )
    rows = [{"name": name, **counts} for name, counts in totals.items()]
    return sorted(rows, key=lambda row: -row["bytes_read"] - row["bytes_written"])


# --- The command --------------------------------------------------------------------------------------------


def add_parser(commands: Any) -> argparse.ArgumentParser:
    """Add ``graph`` to the subcommands of ``lily-mlx bench``."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "graph",
        help="launches, serial stages and bytes of a forward pass on Metal, counted on any machine",
        description="Count the kernel launches, serial stages and memory traffic of one forward pass of "
        "stock and of Lily as Metal would run it, beside the least that the model allows. Needs no Metal.",
    )
    add = parser.add_argument
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--model", help="a checkpoint folder or a Hugging Face repo")
    source.add_argument(
        "--random-weights", metavar="CONFIG", help="a config.json or a built-in name: qwen3.6-35b-a3b"
    )
    add("--phase", choices=("decode", "prefill"), default="decode", help="default: %(default)s")
    add("--tokens", type=int, help="tokens of the pass (default: 1 in decode, 2048 in prefill)")
    add("--context", type=int, help="tokens in the cache (default: 4096 in decode, 0 in prefill)")
    add("--bandwidth", type=float, metavar="GB/S", help="give the bound for this memory bandwidth instead")
    add("--top", type=int, default=15, help="primitives to list (default: %(default)s)")
    add("--json", type=Path, help="write everything to this file")
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    """Run ``lily-mlx bench graph``; returns the exit status.

    Raises:
        UsageError: an argument that cannot be used.
    """
    decode = args.phase == "decode"
    tokens = args.tokens if args.tokens is not None else (1 if decode else 2048)
    context = args.context if args.context is not None else (4096 if decode else 0)
    for name, value, low in (("tokens", tokens, 1), ("context", context, 0), ("top", args.top, 1)):
        if value < low:
            raise UsageError(f"--{name} is {value}; it must be at least {low}")
        if value > costs.MAX_LENGTH:
            raise UsageError(f"--{name} is {value}; it must be at most {costs.MAX_LENGTH}")
    if args.bandwidth is not None and not 0 < args.bandwidth < math.inf:
        raise UsageError(f"--bandwidth is {args.bandwidth}; it must be above 0 GB/s, and finite")
    if args.json:
        check_file("--json", args.json)
    engine.require_mlx()
    if args.model:
        model = _from_checkpoint(args.model)
    else:
        model = _from_config(random_weights.read_config(args.random_weights))
    bandwidths = {"this bandwidth": args.bandwidth} if args.bandwidth else BANDWIDTHS
    found = {"model": args.model or args.random_weights} | report(
        model, args.phase, tokens, context, bandwidths
    )
    if args.json:
        write_text(args.json, json.dumps(found, indent=1) + "\n")
    _print(found, args.top)
    return 0


def _print(found: Mapping[str, Any], top: int) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    stock, lily = found["engines"]["stock"], found["engines"]["lily"]
    least, reference = found["limit"], found["reference_engine"]
    what = f"{found['phase']}: {found['tokens']} token{'s' * (found['tokens'] > 1)} after {found['context']}"

    def table(title: str, *columns: str) -> Table:
        made = Table(title=title)
        for i, name in enumerate(columns):
            made.add_column(name, justify="right" if i else "left", no_wrap=True)
        return made

    totals = table(f"{found['model']}, {what}, on Metal", "", "stock", "lily", "reference engine", "limit")
    for label, key in (("kernel launches", "dispatches"), ("serial stages", "stages")):
        theirs = f"{reference[key]:,}" if reference else ""
        totals.add_row(label, f"{stock[key]:,}", f"{lily[key]:,}", theirs, "")
    for label, key in (("GB read", "bytes_read"), ("GB written", "bytes_written")):
        totals.add_row(label, f"{stock[key] / 1e9:,.3f}", f"{lily[key] / 1e9:,.3f}", "", "")
    moved = [f"{(e['bytes_read'] + e['bytes_written']) / 1e9:,.3f}" for e in (stock, lily)]
    totals.add_row("GB in all", *moved, "", f"{least['bytes'] / 1e9:,.3f}")
    totals.add_row("GFLOP", "", "", "", f"{least['flops'] / 1e9:,.1f}")
    console.print(totals)

    parts = table("primitives", "primitive", "stock", "lily", "stock MB", "lily MB")
    merged: dict[str, dict[str, tuple[int, float]]] = {}
    for name, summary in found["engines"].items():
        for row in summary["by_primitive"]:
            moved = (row["bytes_read"] + row["bytes_written"]) / 1e6
            merged.setdefault(row["name"], {})[name] = (row["dispatches"], moved)
    ordered = sorted(merged.items(), key=lambda item: -max(n for n, _ in item[1].values()))
    for name, by_engine in ordered[:top]:
        (n, mb), (m, mc) = (by_engine.get(e, (0, 0.0)) for e in ("stock", "lily"))
        parts.add_row(name, f"{n:,}", f"{m:,}", f"{mb:,.1f}", f"{mc:,.1f}")
    console.print(parts)
    if len(ordered) > top:
        console.print(f"and {len(ordered) - top} more")

    bounds = table("most tokens a second that memory allows", "memory", "GB/s", "tokens/s")
    for bound in found["bounds"]:
        bounds.add_row(bound["device"], f"{bound['gb_per_s']:,.0f}", f"{bound['tokens_per_s']:,.0f}")
    console.print(bounds)
