"""Gated DeltaNet preparation: from a layer's input projections to what its scan reads, for any T.

    x = silu(conv(last 4 tokens of qkv));  q, k, v = split(x)
    q = q / sqrt(|q|^2 + 1e-6) / sqrt(Dk);  k = k / sqrt(|k|^2 + 1e-6)
    g = exp(-exp(A_log) softplus(a + dt_bias));  beta = sigmoid(b)

| array | shape | dtype |
| --- | --- | --- |
| qkv | [B, T, *]; C = 2 Hk Dk + Hv Dv columns from ``offsets[0]``: q, k, v | bfloat16, float16, float32 |
| b, a | [B, T, *]; Hv columns from ``offsets[1]`` and ``offsets[2]`` | as qkv |
| conv_weight | [C, 4, 1], oldest token first | as qkv |
| conv_state | [B, 3, C], the tokens before the first, oldest first | as qkv |
| A_log | [Hv] | any of the three |
| dt_bias | [Hv] | as qkv |
| mask | [B, T] or None; where it is false, qkv counts as zero | bool |
| lengths | [B] or None; how many tokens of a row count, clipped to 0 .. T | int32 |
| q, k (results) | [B, T, Hk, Dk] | as qkv |
| v (result) | [B, T, Hv, Dv] | as qkv |
| g (result) | [B, T, Hv] | float32 |
| beta (result) | [B, T, Hv] | as qkv |
| conv_state (result) | [B, 3, C], the tokens before token ``lengths``, or T | as qkv, the values given |

The conv's input is the conv state, then qkv. qkv, b and a may be one array. Everything between the inputs and
the results is float32.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import mlx.core as mx

from ..launch import backend as backends
from ..launch.kernel import Buffer, Kernel, TemplateValue, Variant, declare, launch
from ..tiles import choose, of_chip
from .trust import off_reference, self_check

ACTIVATION_DTYPES = (mx.bfloat16, mx.float16, mx.float32)
CONV_WIDTH = 4
QK_NORM_EPS = 1e-6  # added to the sum of squares, as in the model's own code
NO_OFFSETS = (0, 0, 0)


def _template(
    dtype: mx.Dtype,
    a_log_dtype: mx.Dtype,
    sizes: Mapping[str, int],
    columns: Sequence[int],
    offsets: Sequence[int],
    tile: Mapping[str, int],
    has_mask: bool,
    has_lengths: bool,
) -> dict[str, TemplateValue]:
    return {
        "InT": dtype,
        "ALogT": a_log_dtype,
        **{axis: sizes[axis] for axis in ("Dk", "Dv", "Hk", "Hv")},
        "QKV_OFFSET": offsets[0],
        "QKV_COLUMNS": columns[0],
        "B_OFFSET": offsets[1],
        "B_COLUMNS": columns[1],
        "A_OFFSET": offsets[2],
        "A_COLUMNS": columns[2],
        "TOKENS": tile["tokens"],
        "BYTES": tile["bytes"],
        "SIMDGROUPS": tile["simdgroups"],
        "HAS_MASK": has_mask,
        "HAS_LENGTHS": has_lengths,
    }


def _lanes(dtype: mx.Dtype, D: int, tile: Mapping[str, int]) -> int:
    """Lanes that hold a head of D elements: ``lily_head_lanes`` of the kernel."""
    units = D * dtype.size // tile["bytes"]
    return min(units & -units, 32)


def _threads(
    dtype: mx.Dtype, sizes: Mapping[str, int], tile: Mapping[str, int]
) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """Grid and threadgroup: x the tokens, y blocks of channels and then the gates, z the batch row."""
    blocks = -(-2 * sizes["Hk"] * _lanes(dtype, sizes["Dk"], tile) // 32)
    blocks += -(-sizes["Hv"] * _lanes(dtype, sizes["Dv"], tile) // 32)
    threads = 32 * tile["simdgroups"]
    groups = -(-blocks // tile["simdgroups"]) + 1
    return (threads * -(-sizes["T"] // tile["tokens"]), groups, sizes["B"]), (threads, 1, 1)


def _variant(
    dtype: mx.Dtype,
    a_log_dtype: mx.Dtype,
    sizes: Mapping[str, int],
    tile: Mapping[str, int],
    has_mask: bool = False,
    has_lengths: bool = False,
) -> Variant:
    channels = _channels(sizes)
    Hv = sizes["Hv"]
    columns = [channels + Hv * sizes["Dv"] + 2 * Hv] * 3
    offsets = (0, columns[0] - 2 * Hv, columns[0] - Hv)
    template = _template(dtype, a_log_dtype, sizes, columns, offsets, tile, has_mask, has_lengths)
    named = {"B": sizes["B"], "T": sizes["T"], "C": channels}
    return Variant(template, named, *_threads(dtype, sizes, tile))


def _channels(sizes: Mapping[str, int]) -> int:
    return 2 * sizes["Hk"] * sizes["Dk"] + sizes["Hv"] * sizes["Dv"]


_QWEN = {"B": 8, "T": 70, "Hk": 16, "Hv": 32, "Dk": 128, "Dv": 128}
_SMALL = {"B": 9, "T": 5, "Hk": 4, "Hv": 12, "Dk": 96, "Dv": 64}

KERNEL = declare(
    Kernel(
        stem="gated_delta_prepare",
        inputs=(
            Buffer("qkv", "B T QKV_COLUMNS", "InT"),
            Buffer("b", "B T B_COLUMNS", "InT"),
            Buffer("a", "B T A_COLUMNS", "InT"),
            Buffer("conv_weight", "C 4 1", "InT"),
            Buffer("conv_state", "B 3 C", "InT"),
            Buffer("A_log", "Hv", "ALogT"),
            Buffer("dt_bias", "Hv", "InT"),
            Buffer("mask", "B T", "bool", optional=True),
            Buffer("lengths", "*", "int32"),
            Buffer("sizes", "8", "int32"),
        ),
        outputs=(
            Buffer("q", "B T Hk Dk", "InT"),
            Buffer("k", "B T Hk Dk", "InT"),
            Buffer("v", "B T Hv Dv", "InT"),
            Buffer("g", "B T Hv", "float32"),
            Buffer("beta", "B T Hv", "InT"),
            Buffer("conv_out", "B 3 C", "InT"),
        ),
        template=(
            "InT",
            "ALogT",
            "Dk",
            "Dv",
            "Hk",
            "Hv",
            "QKV_OFFSET",
            "QKV_COLUMNS",
            "B_OFFSET",
            "B_COLUMNS",
            "A_OFFSET",
            "A_COLUMNS",
            "TOKENS",
            "BYTES",
            "SIMDGROUPS",
            "HAS_MASK",
            "HAS_LENGTHS",
        ),
        variants=(
            _variant(mx.bfloat16, mx.float32, _QWEN, {"tokens": 8, "bytes": 16, "simdgroups": 4}),
            _variant(mx.bfloat16, mx.float32, _QWEN, {"tokens": 8, "bytes": 8, "simdgroups": 4}),
            _variant(mx.float16, mx.bfloat16, _QWEN, {"tokens": 16, "bytes": 8, "simdgroups": 8}, True, True),
            _variant(mx.float32, mx.float32, _SMALL, {"tokens": 4, "bytes": 16, "simdgroups": 2}, True),
        ),
    )
)


def supports(
    qkv: mx.array,
    b: mx.array,
    a: mx.array,
    conv_weight: mx.array,
    conv_state: mx.array,
    A_log: mx.array,
    dt_bias: mx.array,
    mask: mx.array | None = None,
    lengths: mx.array | None = None,
    *,
    Hk: int,
    Dk: int,
    Dv: int,
    offsets: Sequence[int] = NO_OFFSETS,
    backend: str | None = None,
) -> str | None:
    """None if the kernel takes these arrays on the back-end (by default the one in use), else the reason."""
    if (backend or backends.resolve()) == "ops":
        return "no GPU back-end"
    if qkv.ndim != 3 or A_log.ndim != 1:
        return f"qkv must have 3 axes and A_log one, not {qkv.ndim} and {A_log.ndim}"
    B, T, _ = qkv.shape
    Hv = A_log.size
    if min(B, T, Hk, Hv) < 1:
        return f"an axis of length zero: B={B} T={T} Hk={Hk} Hv={Hv}"
    if min(Dk, Dv) < 1 or Dk % 32 or Dv % 32:
        return f"Dk={Dk} and Dv={Dv} must be multiples of 32"
    if Hv % Hk:
        return f"Hv={Hv} is not a multiple of Hk={Hk}"
    C = 2 * Hk * Dk + Hv * Dv
    expected: dict[str, tuple[mx.array, tuple[int, ...]]] = {
        "conv_weight": (conv_weight, (C, CONV_WIDTH, 1)),
        "conv_state": (conv_state, (B, CONV_WIDTH - 1, C)),
        "dt_bias": (dt_bias, (Hv,)),
    }
    if mask is not None:
        expected["mask"] = (mask, (B, T))
    if lengths is not None:
        expected["lengths"] = (lengths, (B,))
    for name, (array, shape) in expected.items():
        if array.shape != shape:
            return f"{name} has shape {array.shape}, not {shape}"
    projections = {"qkv": (qkv, C), "b": (b, Hv), "a": (a, Hv)}
    for (name, (array, size)), offset in zip(projections.items(), offsets, strict=True):
        if array.ndim != 3 or array.shape[:2] != (B, T):
            return f"{name} has shape {array.shape}, not [{B}, {T}, columns]"
        if not 0 <= offset <= array.shape[2] - size:
            return f"{name} has {array.shape[2]} columns; needs {size} from {offset}"
    if qkv.dtype not in ACTIVATION_DTYPES:
        return f"qkv is {qkv.dtype}"
    for name, number in (("columns", qkv.shape[2]), ("offset", offsets[0])):
        if number * qkv.dtype.size % 16:
            return f"the {name} of qkv, {number}, is not a multiple of 16 bytes of {qkv.dtype}"
    same = {"b": b, "a": a, "conv_weight": conv_weight, "conv_state": conv_state, "dt_bias": dt_bias}
    for name, array in same.items():
        if array.dtype != qkv.dtype:
            return f"{name} is {array.dtype}, qkv is {qkv.dtype}"
    if A_log.dtype not in ACTIVATION_DTYPES:
        return f"A_log is {A_log.dtype}"
    if mask is not None and mask.dtype != mx.bool_:
        return f"mask is {mask.dtype}, not bool"
    if lengths is not None and lengths.dtype != mx.int32:
        return f"lengths is {lengths.dtype}, not int32"
    return None


def gated_delta_prepare_reference(
    qkv: mx.array,
    b: mx.array,
    a: mx.array,
    conv_weight: mx.array,
    conv_state: mx.array,
    A_log: mx.array,
    dt_bias: mx.array,
    mask: mx.array | None = None,
    lengths: mx.array | None = None,
    *,
    Hk: int,
    Dk: int,
    Dv: int,
    offsets: Sequence[int] = NO_OFFSETS,
) -> tuple[mx.array, mx.array, mx.array, mx.array, mx.array, mx.array]:
    """The preparation in plain MLX, in float32; all results are float32, but the conv state as given."""
    B, T, _ = qkv.shape
    Hv = A_log.size
    C = 2 * Hk * Dk + Hv * Dv
    f32 = mx.float32
    qkv = qkv[..., offsets[0] : offsets[0] + C]
    b, a = (
        array[..., offset : offset + Hv].astype(f32)
        for array, offset in zip((b, a), offsets[1:], strict=True)
    )
    if mask is not None:
        qkv = mx.where(mask[..., None], qkv, 0)
    tokens = mx.concatenate([conv_state, qkv], axis=1)
    taps = conv_weight[..., 0].T.astype(f32)
    mixed = mx.stack([tokens[:, i : i + T].astype(f32) * taps[i] for i in range(CONV_WIDTH)]).sum(0)
    mixed = mixed * mx.sigmoid(mixed)
    q, k, v = mx.split(mixed, [Hk * Dk, 2 * Hk * Dk], axis=-1)
    q, k = (x.reshape(B, T, Hk, Dk) for x in (q, k))
    q, k = (x * mx.rsqrt((x * x).sum(-1, keepdims=True) + QK_NORM_EPS) for x in (q, k))
    g = mx.exp(-mx.exp(A_log.astype(f32)) * mx.logaddexp(a + dt_bias.astype(f32), 0.0))
    ends = mx.full((B,), T) if lengths is None else mx.clip(lengths, 0, T)
    positions = ends[:, None] + mx.arange(CONV_WIDTH - 1)
    state = mx.take_along_axis(tokens, positions[..., None], axis=1)
    return q * Dk**-0.5, k, v.reshape(B, T, Hv, Dv), g, mx.sigmoid(b), state


@lru_cache(maxsize=256)
def _sizes(T: int) -> mx.array:
    return mx.array([T, 0, 0, 0, 0, 0, 0, 0], dtype=mx.int32)


def gated_delta_prepare(
    qkv: mx.array,
    b: mx.array,
    a: mx.array,
    conv_weight: mx.array,
    conv_state: mx.array,
    A_log: mx.array,
    dt_bias: mx.array,
    mask: mx.array | None = None,
    lengths: mx.array | None = None,
    *,
    Hk: int,
    Dk: int,
    Dv: int,
    offsets: Sequence[int] = NO_OFFSETS,
    tile: Mapping[str, int] | None = None,
    backend: str | None = None,
) -> tuple[mx.array, mx.array, mx.array, mx.array, mx.array, mx.array]:
    """Run the preparation on the GPU (or the host back-end).

    Args:
        qkv ... lengths: see the module's table; :func:`supports` must answer None.
        Hk, Dk, Dv: key heads, key size, value size.
        offsets: first column of qkv, b and a in their arrays; qkv's a multiple of 16 bytes.
        tile: ``tokens`` of a lane and ``simdgroups`` of a threadgroup; by default from the tile table.
        backend: ``metal``, ``cuda`` or ``host``; by default the one in use.

    Returns:
        (q, k, v, g, beta, conv_state).

    Raises:
        ValueError: the arrays do not fit the kernel.
    """
    B, T, _ = qkv.shape
    Hv = A_log.size
    backend = backend or backends.resolve()
    if tile is None:
        tile = choose("gated_delta_prepare", backends.chip(backend), T=T, Dk=Dk, Dv=Dv)
    sizes = {"B": B, "T": T, "Hk": Hk, "Hv": Hv, "Dk": Dk, "Dv": Dv}
    columns = [array.shape[2] for array in (qkv, b, a)]
    has = (mask is not None, lengths is not None)
    grid, threadgroup = _threads(qkv.dtype, sizes, tile)
    scalars = _sizes(T)
    ends = scalars if lengths is None else lengths  # a launch can leave out a bool input only
    q, k, v, g, beta, state = launch(
        KERNEL,
        [qkv, b, a, conv_weight, conv_state, A_log, dt_bias, mask, ends, scalars],
        template=_template(qkv.dtype, A_log.dtype, sizes, columns, offsets, tile, *has),
        grid=grid,
        threadgroup=threadgroup,
        output_shapes=[*[(B, T, Hk, Dk)] * 2, (B, T, Hv, Dv), *[(B, T, Hv)] * 2, conv_state.shape],
        output_dtypes=[*[qkv.dtype] * 3, mx.float32, *[qkv.dtype] * 2],
        backend=backend,
    )
    return q, k, v, g, beta, state


@self_check("gated_delta_prepare")
def _self_check(backend: str) -> str | None:
    """Eleven tokens of heads of the real size, masked at one, in one projection, against the reference."""
    B, T, Hk, Hv, D = 1, 11, 1, 2, 128
    C = 2 * Hk * D + Hv * D
    keys = mx.random.split(mx.random.key(0), 5)

    def normal(key: mx.array, *shape: int) -> mx.array:
        return mx.random.normal(shape, key=key).astype(mx.bfloat16)

    projected = normal(keys[0], B, T, C + 8)
    weights = (
        normal(keys[1], C, CONV_WIDTH, 1),
        normal(keys[2], B, CONV_WIDTH - 1, C),
        mx.random.uniform(-1, 2, (Hv,), key=keys[3]),
        normal(keys[4], Hv),
    )
    operands = (projected, projected, projected, *weights, mx.arange(T)[None] != 4)
    heads: dict[str, Any] = {"Hk": Hk, "Dk": D, "Dv": D, "offsets": (0, C, C + Hv)}
    want = gated_delta_prepare_reference(*operands, **heads)
    # bfloat16 rounds a result once, by at most 2^-8 of it; g is float32 and the conv state is copied.
    bounds = {"q": 2**-7, "k": 2**-7, "v": 2**-7, "g": 1e-5, "beta": 2**-7, "the conv state": 0.0}
    for tile in of_chip("gated_delta_prepare", backends.chip(backend)):
        got = gated_delta_prepare(*operands, **heads, tile=tile, backend=backend)
        for (name, bound), ours, theirs in zip(bounds.items(), got, want, strict=True):
            if off := off_reference(ours, theirs, bound):
                return f"{name} is {off}, with {tile}"
    return None
