"""The decode kernels that are timed alone, at the shapes of Qwen3.6-35B-A3B: one token, bfloat16."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from lily_mlx.ops import (
    attention_combine,
    attention_decode,
    expert_down,
    expert_gate_up,
    gated_delta_step,
    qmv,
)
from lily_mlx.ops.packed import in_one_buffer

from .arrays import DTYPE, TOP_K, random_matrix

Tile = dict[str, int]
Results = Sequence[mx.array]

K, M, E, VOCABULARY = 2048, 512, 256, 248320
Hq, Hk, D = 16, 2, 256
KEY_HEADS, VALUE_HEADS, HEAD = 16, 32, 128  # of Gated DeltaNet


@dataclass(frozen=True)
class Job:
    """A kernel at a shape.

    Attributes:
        name: for the table.
        op: whose kernel is timed; the call may launch another one too.
        sizes: what the op's tile table chooses by.
        call: of the op with a tile (None: the table's), on CUDA.
        want: the reference's results.
        cold: the inputs that come from memory; the op passes these very arrays to its kernel.
        nbytes: that the kernel must read, and write if it keeps a state.
        tiles: to be timed beside the table's.
    """

    name: str
    op: str
    sizes: dict[str, int]
    call: Callable[[Tile | None], Results]
    want: Callable[[], Results]
    cold: Results
    nbytes: int
    tiles: list[Tile]


def tiles(names: str, *values: tuple[int, ...]) -> list[Tile]:
    return [dict(zip(names.split(), value, strict=True)) for value in values]


def normal(*shape: int, dtype: mx.Dtype = DTYPE, scale: float = 1.0) -> mx.array:
    return (mx.random.normal(shape) * scale).astype(dtype)


def qmv_job(
    name: str,
    rows: int,
    columns: int,
    candidates: Iterable[tuple[int, ...]],
    *,
    bits: int = 4,
    norm: bool = True,
    out_dtype: mx.Dtype = DTYPE,
) -> Job:
    """With a norm before it, or else with a residual."""
    matrix, x = random_matrix(rows, columns, bits=bits), normal(1, 1, columns)
    options: dict[str, Any] = {"norm_weight": normal(columns)} if norm else {"residual": normal(1, 1, rows)}
    return Job(
        f"qmv {name}",
        "qmv",
        {"N": rows, "K": columns, "bits": bits},
        lambda tile: [qmv.qmv(x, matrix, **options, out_dtype=out_dtype, tile=tile, backend="cuda")],
        lambda: [qmv.qmv_reference(x, matrix, **options)],
        [matrix.in_one()],
        matrix.nbytes,
        tiles("rows repeat ahead simdgroups", *candidates),
    )


def expert_jobs() -> list[Job]:
    """The two halves of the experts; nine of the 257, the shared one among them, are read."""
    matrices, down = random_matrix(2 * (E + 1), M, K), random_matrix(E + 1, K, M)
    x, norm_weight, logits, residual = normal(1, 1, K), normal(K), mx.random.normal((E + 1,)), normal(1, 1, K)
    operands = (x, norm_weight, logits, matrices, TOP_K)
    experts = mx.concatenate([mx.random.permutation(E)[:TOP_K], mx.array([E])])
    weights = mx.softmax(mx.random.normal((TOP_K + 1,)))
    chosen = expert_gate_up.Chosen(mx.random.normal((TOP_K + 1, M)), experts, weights).array
    chosen_share = (TOP_K + 1) / (E + 1)
    return [
        Job(
            "expert_gate_up",
            "expert_gate_up",
            {"K": K, "M": M, "bits": 4},
            lambda tile: expert_gate_up.Chosen.of(
                expert_gate_up.expert_gate_up(*operands, tile=tile, backend="cuda"), TOP_K
            ),
            lambda: expert_gate_up.Chosen.of(expert_gate_up.expert_gate_up_reference(*operands), TOP_K),
            [matrices.in_one()],
            round(matrices.nbytes * chosen_share),
            tiles("rows ahead simdgroups", (1, 1, 9), (4, 1, 4), (2, 1, 8), (2, 2, 8)),
        ),
        Job(
            "expert_down",
            "expert_down",
            {"N": K, "M": M, "bits": 4},
            lambda tile: [expert_down.expert_down(chosen, residual, down, TOP_K, tile=tile, backend="cuda")],
            lambda: [expert_down.expert_down_reference(chosen, residual, down, TOP_K)],
            [down.in_one()],
            round(down.nbytes * chosen_share),
            tiles("rows ahead", (16, 1), (4, 1)),
        ),
    ]


def attention_job(context: int, names: str, *candidates: tuple[int, ...]) -> Job:
    """Over a full cache; where rows are in blocks, the first of two kernels."""
    q, projected = mx.random.normal((1, Hq, 1, D)), normal(1, 1, 2 * (Hq + Hk) * D)
    keys, values = normal(1, Hk, context, D), normal(1, Hk, context, D)
    operands = (q, keys, values, projected, mx.array([context - 1, context, *[0] * 6], dtype=mx.int32))
    return Job(
        f"attention_decode {context}",
        "attention_decode",
        {"capacity": context, "Hk": Hk, "group": Hq // Hk, "D": D},
        lambda tile: [attention_decode.attention_decode(*operands, tile=tile, backend="cuda")],
        lambda: [attention_decode.attention_decode_reference(*operands)],
        [keys, values],
        keys.nbytes + values.nbytes,
        tiles(names, *candidates),
    )


def combine_job(blocks: int) -> Job:
    """Nothing comes from memory: the kernel before has just written the blocks."""
    projected = normal(1, 1, 2 * (Hq + Hk) * D)
    sums = mx.random.normal((blocks * Hq * D,))
    largest_and_total = mx.random.uniform(1.0, 4.0, (Hq * blocks * 2,))
    partials = mx.concatenate([sums, largest_and_total])
    sizes = {"blocks": blocks, "Hq": Hq, "D": D}
    combine, reference = attention_combine.attention_combine, attention_combine.attention_combine_reference
    return Job(
        f"attention_combine {blocks}",
        "attention_combine",
        sizes,
        lambda tile: [combine(partials, projected, **sizes, tile=tile, backend="cuda")],
        lambda: [reference(partials, projected, **sizes)],
        [],
        partials.nbytes,
        tiles("columns simdgroups", (1, 8), (2, 16), (2, 4), (4, 8)),
    )


def step_job() -> Job:
    """The states are read and written."""
    values, channels = VALUE_HEADS * HEAD, (2 * KEY_HEADS + VALUE_HEADS) * HEAD
    projected, conv_state = normal(1, 1, channels + values + 2 * VALUE_HEADS), normal(1, 3, channels)
    state = mx.random.normal((1, VALUE_HEADS, HEAD, HEAD))
    conv_weight, A_log = normal(channels, 4, 1, scale=0.5), mx.random.uniform(-1.0, 2.7, (VALUE_HEADS,))
    dt_bias, norm_weight = normal(VALUE_HEADS), normal(HEAD)
    operands = (projected, conv_weight, conv_state, A_log, dt_bias, norm_weight, state)
    constants = in_one_buffer([conv_weight, A_log, dt_bias, norm_weight])
    b = channels + values
    where: dict[str, Any] = {"Hk": KEY_HEADS, "offsets": (0, channels, b, b + VALUE_HEADS)}
    step, reference = gated_delta_step.gated_delta_step, gated_delta_step.gated_delta_step_reference
    return Job(
        "gated_delta_step",
        "gated_delta_step",
        {"Hv": VALUE_HEADS, "Dk": HEAD, "Dv": HEAD},
        lambda tile: step(*operands, **where, constants=constants, tile=tile, backend="cuda"),
        lambda: reference(*operands, **where),
        [conv_state, constants, state],
        2 * (state.nbytes + conv_state.nbytes) + constants.nbytes,
        tiles("lanes simdgroups", (16, 16), (4, 16), (8, 8)),
    )


def all_jobs() -> list[Job]:
    """Every job; no array is computed before it is used."""
    wide = (4, 1, 1, 8), (4, 1, 2, 8), (2, 1, 1, 8), (4, 1, 1, 4), (8, 1, 1, 8)
    blocks = "simdgroups block_rows threadgroups"
    return [
        qmv_job("DeltaNet in", 2 * (KEY_HEADS + VALUE_HEADS) * HEAD + 2 * VALUE_HEADS, K, wide),
        qmv_job("attention in", 2 * (Hq + Hk) * D, K, wide),
        qmv_job("out", K, 2 * K, [(2, 1, 4, 4), (2, 1, 2, 8), (2, 1, 1, 8), (1, 1, 1, 8)], norm=False),
        qmv_job("router", E + 1, K, [(1, 1, 2, 4), (1, 1, 1, 4)], bits=8, out_dtype=mx.float32),
        qmv_job("head", VOCABULARY, K, [(4, 4, 2, 8), (8, 1, 2, 4), (4, 1, 1, 8)], out_dtype=mx.float32),
        *expert_jobs(),
        step_job(),
        attention_job(1024, "simdgroups heads columns", (16, 2, 64), (16, 1, 128)),
        attention_job(4096, blocks, (8, 0, 264), (16, 0, 132), (4, 0, 264)),
        attention_job(32768, blocks, (8, 0, 132), (8, 0, 396), (4, 0, 396)),
        attention_job(131072, blocks, (8, 0, 132)),
        combine_job(66),
    ]
