"""Gated DeltaNet decode step: one token, from the input projections to the input of the output projection.

    x = silu(conv(last 4 tokens of qkv));  q, k, v = split(x)
    q = q / sqrt(|q|^2 + 1e-6) / sqrt(Dk);  k = k / sqrt(|k|^2 + 1e-6)
    g = exp(-exp(A_log) softplus(a + dt_bias));  beta = sigmoid(b)
    S = g S + beta (v - g S k) k^T
    y = silu(z) * norm_weight * rmsnorm(S q)

| array | shape | dtype |
| --- | --- | --- |
| projected | any: qkv, z, b and a, each from its element of ``offsets`` on | bfloat16, float16, float32 |
| conv_weight | [C, 4, 1], oldest token first | as projected |
| conv_state | [1, 3, C], oldest token first | as projected |
| A_log | [Hv] | any of the three |
| dt_bias | [Hv] | as projected |
| norm_weight | [Dv] | as projected |
| state | [1, Hv, Dv, Dk] | float32 |
| y (result) | [1, 1, Hv Dv] | as projected |
| conv_state (result) | [1, 3, C] | as projected, the values given |
| state (result) | [1, Hv, Dv, Dk] | float32 |

qkv is C = 2 Hk Dk + Hv Dv elements (all of q, k, v), z Hv Dv, b and a Hv each. Value head h reads key head
h // (Hv // Hk). Everything between the inputs and the results is float32.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx

from ..launch import backend as backends
from ..launch.kernel import Buffer, Kernel, TemplateValue, Variant, declare, launch
from ..tiles import choose, of_chip
from .packed import float_bits, in_one_buffer
from .trust import off_reference, self_check

ACTIVATION_DTYPES = (mx.bfloat16, mx.float16, mx.float32)
CONV_WIDTH = 4
QK_NORM_EPS = 1e-6  # added to the sum of squares, as in the model's own code


def _template(
    dtype: mx.Dtype,
    a_log_dtype: mx.Dtype,
    sizes: Mapping[str, int],
    offsets: Sequence[int],
    eps: float,
    tile: Mapping[str, int],
) -> dict[str, TemplateValue]:
    return {
        "InT": dtype,
        "ALogT": a_log_dtype,
        **{axis: sizes[axis] for axis in ("Dk", "Dv", "Hk", "Hv")},
        "QKV_OFFSET": offsets[0],
        "Z_OFFSET": offsets[1],
        "B_OFFSET": offsets[2],
        "A_OFFSET": offsets[3],
        "EPS_BITS": float_bits(eps),
        "LANES": tile["lanes"],
        "SIMDGROUPS": _simdgroups(sizes["Dv"], tile),
    }


def _parts(Hk: int, Hv: int, Dv: int, Dk: int) -> dict[str, int]:
    """Elements of each part of the projection, in the order of ``offsets``."""
    return {"qkv": 2 * Hk * Dk + Hv * Dv, "z": Hv * Dv, "b": Hv, "a": Hv}


def _simdgroups(Dv: int, tile: Mapping[str, int]) -> int:
    """Simdgroups of a threadgroup: the tile's, or as many as leave each a whole number of rows."""
    rows_at_once, simdgroups = 32 // tile["lanes"], tile["simdgroups"]
    while Dv % (rows_at_once * simdgroups):
        simdgroups //= 2
    return simdgroups


def _variant(dtype: mx.Dtype, a_log_dtype: mx.Dtype, sizes: Mapping[str, int], **tile: int) -> Variant:
    channels = 2 * sizes["Hk"] * sizes["Dk"] + sizes["Hv"] * sizes["Dv"]
    template = _template(dtype, a_log_dtype, sizes, (0, 0, 0, 0), 1e-6, tile)
    threads = 32 * _simdgroups(sizes["Dv"], tile)
    return Variant(
        template,
        {"C": channels, "N": sizes["Hv"] * sizes["Dv"]},
        (threads * sizes["Hv"], 1, 1),
        (threads, 1, 1),
    )


_QWEN = {"Hk": 16, "Hv": 32, "Dk": 128, "Dv": 128}
_SMALL = {"Hk": 4, "Hv": 12, "Dk": 96, "Dv": 64}

KERNEL = declare(
    Kernel(
        stem="gated_delta_step",
        inputs=(
            Buffer("projected", "*", "InT"),
            Buffer("conv_state", "1 3 C", "InT"),
            Buffer("constants", "*", "uint32"),
            Buffer("state", "1 Hv Dv Dk", "float32"),
        ),
        outputs=(
            Buffer("y", "1 1 N", "InT"),
            Buffer("conv_out", "1 3 C", "InT"),
            Buffer("state_out", "1 Hv Dv Dk", "float32"),
        ),
        template=(
            "InT",
            "ALogT",
            "Dk",
            "Dv",
            "Hk",
            "Hv",
            "QKV_OFFSET",
            "Z_OFFSET",
            "B_OFFSET",
            "A_OFFSET",
            "EPS_BITS",
            "LANES",
            "SIMDGROUPS",
        ),
        variants=(
            _variant(mx.bfloat16, mx.float32, _QWEN, lanes=8, simdgroups=16),
            _variant(mx.bfloat16, mx.bfloat16, _QWEN, lanes=4, simdgroups=8),
            _variant(mx.float16, mx.float32, _QWEN, lanes=8, simdgroups=8),
            _variant(mx.bfloat16, mx.float32, _QWEN, lanes=16, simdgroups=16),
            _variant(mx.bfloat16, mx.float32, _QWEN, lanes=16, simdgroups=8),
            _variant(mx.float32, mx.float32, _SMALL, lanes=8, simdgroups=4),
        ),
        threadgroup_bytes=lambda values: 4 * (2 * values["Dk"] + 2 * values["Dv"]),
    )
)


def supports(
    projected: mx.array,
    conv_weight: mx.array,
    conv_state: mx.array,
    A_log: mx.array,
    dt_bias: mx.array,
    norm_weight: mx.array,
    state: mx.array,
    *,
    Hk: int,
    offsets: Sequence[int],
    backend: str | None = None,
) -> str | None:
    """None if the kernel takes these arrays on the back-end (by default the one in use), else the reason."""
    if (backend or backends.resolve()) == "ops":
        return "no GPU back-end"
    if state.ndim != 4 or state.shape[0] != 1:
        return f"state has shape {state.shape}, not [1, Hv, Dv, Dk]"
    _, Hv, Dv, Dk = state.shape
    if min(Hk, Hv, Dv, Dk) < 1 or Dk % 32 or Dv % 32:
        return f"Dk={Dk} and Dv={Dv} must be multiples of 32"
    if Hv % Hk:
        return f"Hv={Hv} is not a multiple of Hk={Hk}"
    C = 2 * Hk * Dk + Hv * Dv
    expected = {
        "conv_weight": (conv_weight, (C, CONV_WIDTH, 1)),
        "conv_state": (conv_state, (1, CONV_WIDTH - 1, C)),
        "A_log": (A_log, (Hv,)),
        "dt_bias": (dt_bias, (Hv,)),
        "norm_weight": (norm_weight, (Dv,)),
    }
    for name, (array, shape) in expected.items():
        if array.shape != shape:
            return f"{name} has shape {array.shape}, not {shape}"
    for (name, size), offset in zip(_parts(Hk, *state.shape[1:]).items(), offsets, strict=True):
        if not 0 <= offset <= projected.size - size:
            return f"projected has {projected.size} elements; {name} needs {size} from {offset}"
    if projected.dtype not in ACTIVATION_DTYPES:
        return f"projected is {projected.dtype}"
    same = {
        "conv_weight": conv_weight,
        "conv_state": conv_state,
        "dt_bias": dt_bias,
        "norm_weight": norm_weight,
    }
    for name, array in same.items():
        if array.dtype != projected.dtype:
            return f"{name} is {array.dtype}, projected is {projected.dtype}"
    if A_log.dtype not in ACTIVATION_DTYPES:
        return f"A_log is {A_log.dtype}"
    if state.dtype != mx.float32:
        return f"state is {state.dtype}, not float32"
    return None


def gated_delta_step_reference(
    projected: mx.array,
    conv_weight: mx.array,
    conv_state: mx.array,
    A_log: mx.array,
    dt_bias: mx.array,
    norm_weight: mx.array,
    state: mx.array,
    *,
    Hk: int,
    offsets: Sequence[int],
    eps: float = 1e-6,
) -> tuple[mx.array, mx.array, mx.array]:
    """The step in plain MLX, in float32; y is float32 too, the conv state has the dtype given."""
    _, Hv, Dv, Dk = state.shape
    f32 = mx.float32

    newest, *gates = (
        projected.reshape(-1)[offset : offset + size]
        for size, offset in zip(_parts(Hk, Hv, Dv, Dk).values(), offsets, strict=True)
    )
    z, b, a = (gate.astype(f32) for gate in gates)
    window = mx.concatenate([conv_state[0], newest[None]])
    mixed = (window.astype(f32) * conv_weight[..., 0].T.astype(f32)).sum(0)
    mixed = mixed * mx.sigmoid(mixed)
    q, k, v = mx.split(mixed, [Hk * Dk, 2 * Hk * Dk])
    q, k = (mx.repeat(x.reshape(Hk, Dk), Hv // Hk, axis=0) for x in (q, k))
    q, k = (x * mx.rsqrt((x * x).sum(-1, keepdims=True) + QK_NORM_EPS) for x in (q, k))
    q = q * Dk**-0.5
    v = v.reshape(Hv, Dv)

    g = mx.exp(-mx.exp(A_log.astype(f32)) * mx.logaddexp(a + dt_bias.astype(f32), 0.0))
    beta = mx.sigmoid(b)
    decayed = g[:, None, None] * state[0]
    delta = beta[:, None] * (v - (decayed * k[:, None]).sum(-1))
    after = decayed + delta[..., None] * k[:, None]
    readout = (after * q[:, None]).sum(-1)
    normalised = readout * mx.rsqrt((readout * readout).mean(-1, keepdims=True) + eps)
    y = normalised.reshape(-1) * mx.tile(norm_weight.astype(f32), Hv) * z * mx.sigmoid(z)
    return y[None, None], window[None, 1:], after[None]


def gated_delta_step(
    projected: mx.array,
    conv_weight: mx.array,
    conv_state: mx.array,
    A_log: mx.array,
    dt_bias: mx.array,
    norm_weight: mx.array,
    state: mx.array,
    *,
    Hk: int,
    offsets: Sequence[int],
    eps: float = 1e-6,
    constants: mx.array | None = None,
    tile: Mapping[str, int] | None = None,
    backend: str | None = None,
) -> tuple[mx.array, mx.array, mx.array]:
    """Run the step on the GPU (or the host back-end).

    Args:
        projected ... state: see the module's table; :func:`supports` must answer None.
        Hk: key heads.
        offsets: first element of qkv, z, b and a in ``projected``.
        eps: of the RMSNorm of the readout.
        constants: :func:`~lily_mlx.ops.packed.in_one_buffer` of conv_weight, A_log, dt_bias and norm_weight;
            made here, at the price of a copy, if it is not given.
        tile: ``lanes`` and ``simdgroups``; by default from the tile table.
        backend: ``metal``, ``cuda`` or ``host``; by default the one in use.

    Returns:
        (y, conv_state, state).

    Raises:
        ValueError: the arrays do not fit the kernel.
    """
    _, Hv, Dv, Dk = state.shape
    backend = backend or backends.resolve()
    if tile is None:
        tile = choose("gated_delta_step", backends.chip(backend), Hv=Hv, Dk=Dk, Dv=Dv)
    if constants is None:
        constants = in_one_buffer([conv_weight, A_log, dt_bias, norm_weight])
    sizes = {"Hk": Hk, "Hv": Hv, "Dk": Dk, "Dv": Dv}
    template = _template(projected.dtype, A_log.dtype, sizes, offsets, eps, tile)
    threads = 32 * _simdgroups(Dv, tile)
    y, conv_state, state = launch(
        KERNEL,
        [projected, conv_state, constants, state],
        template=template,
        grid=(threads * Hv, 1, 1),
        threadgroup=(threads, 1, 1),
        output_shapes=[(1, 1, Hv * Dv), conv_state.shape, state.shape],
        output_dtypes=[projected.dtype, projected.dtype, mx.float32],
        backend=backend,
    )
    return y, conv_state, state


@self_check("gated_delta_step")
def _self_check(backend: str) -> str | None:
    """Two value heads of the real size, against the reference."""
    Hk, Hv, Dk, Dv = 1, 2, 128, 128
    parts = _parts(Hk, Hv, Dv, Dk)
    C, N, _, _ = parts.values()
    keys = mx.random.split(mx.random.key(0), 6)
    projected, conv_weight, conv_state, dt_bias = (
        mx.random.normal(shape, key=key).astype(mx.bfloat16)
        for shape, key in zip(((1, 1, C + N + 2 * Hv), (C, 4, 1), (1, 3, C), (Hv,)), keys[:4], strict=True)
    )
    norm_weight = mx.random.uniform(0.5, 1.5, (Dv,), key=keys[4]).astype(mx.bfloat16)
    state = mx.random.normal((1, Hv, Dv, Dk), key=keys[5])
    weights = (mx.array([-4.0, 1.0]), dt_bias, norm_weight)
    operands = (projected, conv_weight, conv_state, *weights, state)
    heads: dict[str, Any] = {"Hk": Hk, "offsets": (0, C, C + N, C + N + Hv)}
    want = gated_delta_step_reference(*operands, **heads)
    # bfloat16 rounds y once, by at most 2^-8 of it; the conv state is copied; the state stays float32.
    bounds = {"y": 2**-7, "the conv state": 0.0, "the state": 1e-5}
    for tile in of_chip("gated_delta_step", backends.chip(backend)):
        got = gated_delta_step(*operands, **heads, tile=tile, backend=backend)
        for (name, bound), ours, theirs in zip(bounds.items(), got, want, strict=True):
            if off := off_reference(ours, theirs, bound):
                return f"{name} is {off}, with {tile}"
    return None
