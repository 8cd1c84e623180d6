"""Gated DeltaNet scan: the recurrence of a linear-attention layer over a sequence.

    S_t = g_t S_{t-1} + beta_t (v_t - g_t S_{t-1} k_t) k_t^T
    y_t = S_t q_t

| array | shape | dtype |
| --- | --- | --- |
| q, k | [B, T, Hk, Dk] | bfloat16, float16 or float32; normalised, the readout scale folded into q |
| v | [B, T, Hv, Dv] | as q |
| g | [B, T, Hv] | float32, the decay, between 0 and 1 |
| beta | [B, T, Hv] | as q, or float32 |
| state | [B, Hv, Dv, Dk] | float32 |
| mask | [B, T] or None | bool; a token where it is false leaves the state as it is |
| y (result) | [B, T, Hv, Dv] | as q; zero where the mask is false |
| state (result) | [B, Hv, Dv, Dk] | float32 |

Value head h reads key head h // (Hv // Hk).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

import mlx.core as mx

from ..launch import backend as backends
from ..launch.kernel import Buffer, Kernel, Variant, declare, launch
from ..tiles import choose, of_chip, stock_kernel
from .trust import off_reference, self_check

ACTIVATION_DTYPES = (mx.bfloat16, mx.float16, mx.float32)


def _variant(dtype: mx.Dtype, sizes: Mapping[str, int], tile: Mapping[str, int], has_mask: bool) -> Variant:
    template = _template(dtype, dtype, sizes["Dk"], sizes["Dv"], sizes["Hk"], sizes["Hv"], tile, has_mask)
    grid, threadgroup = _threads(sizes["B"], sizes["Hv"], sizes["Dv"], tile)
    return Variant(template, {"B": sizes["B"], "T": sizes["T"]}, grid, threadgroup)


def _template(
    dtype: mx.Dtype,
    beta_dtype: mx.Dtype,
    Dk: int,
    Dv: int,
    Hk: int,
    Hv: int,
    tile: Mapping[str, int],
    has_mask: bool,
) -> dict[str, int | bool | mx.Dtype]:
    return {
        "InT": dtype,
        "BetaT": beta_dtype,
        "Dk": Dk,
        "Dv": Dv,
        "Hk": Hk,
        "Hv": Hv,
        "LANES": tile["lanes"],
        "ROWS": tile["rows"],
        "AHEAD": tile["ahead"],
        "HAS_MASK": has_mask,
    }


def _threads(
    B: int, Hv: int, Dv: int, tile: Mapping[str, int]
) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """Grid and threadgroup: x the lanes, y the simdgroups along Dv, z batch row and value head."""
    blocks = Dv // rows_per_simdgroup(tile)
    simdgroups = tile["simdgroups"]
    while blocks % simdgroups:
        simdgroups //= 2
    return (32, blocks, B * Hv), (32, simdgroups, 1)


def rows_per_simdgroup(tile: Mapping[str, int]) -> int:
    """Rows of the state that one simdgroup of 32 lanes holds."""
    return 32 // tile["lanes"] * tile["rows"]


_QWEN = {"B": 1, "T": 70, "Hk": 16, "Hv": 32, "Dk": 128, "Dv": 128}
_SMALL = {"B": 2, "T": 5, "Hk": 2, "Hv": 4, "Dk": 96, "Dv": 64}

KERNEL = declare(
    Kernel(
        stem="gated_delta_scan",
        inputs=(
            Buffer("q", "B T Hk Dk", "InT"),
            Buffer("k", "B T Hk Dk", "InT"),
            Buffer("v", "B T Hv Dv", "InT"),
            Buffer("g", "B T Hv", "float32"),
            Buffer("beta", "B T Hv", "BetaT"),
            Buffer("state_in", "B Hv Dv Dk", "float32"),
            Buffer("mask", "B T", "bool", optional=True),
            Buffer("sizes", "8", "int32"),
        ),
        outputs=(Buffer("y", "B T Hv Dv", "InT"), Buffer("state_out", "B Hv Dv Dk", "float32")),
        template=("InT", "BetaT", "Dk", "Dv", "Hk", "Hv", "LANES", "ROWS", "AHEAD", "HAS_MASK"),
        variants=(
            _variant(mx.bfloat16, _QWEN, {"lanes": 8, "rows": 2, "ahead": 4, "simdgroups": 4}, False),
            _variant(mx.float16, _QWEN, {"lanes": 8, "rows": 2, "ahead": 1, "simdgroups": 2}, False),
            _variant(mx.float32, _SMALL, {"lanes": 32, "rows": 1, "ahead": 1, "simdgroups": 4}, True),
        ),
    )
)


def supports(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    g: mx.array,
    beta: mx.array,
    state: mx.array,
    mask: mx.array | None = None,
    *,
    backend: str | None = None,
) -> str | None:
    """None if the kernel takes these arrays on the back-end (by default the one in use), else the reason."""
    if (backend or backends.resolve()) == "ops":
        return "no GPU back-end"
    if q.ndim != 4 or v.ndim != 4:
        return f"q and v must have 4 axes, not {q.ndim} and {v.ndim}"
    B, T, Hk, Dk = q.shape
    Hv, Dv = v.shape[2:]
    expected = {
        "k": (k, (B, T, Hk, Dk)),
        "v": (v, (B, T, Hv, Dv)),
        "g": (g, (B, T, Hv)),
        "beta": (beta, (B, T, Hv)),
        "state": (state, (B, Hv, Dv, Dk)),
    }
    if mask is not None:
        expected["mask"] = (mask, (B, T))
    for name, (array, shape) in expected.items():
        if array.shape != shape:
            return f"{name} has shape {array.shape}, not {shape}"
    if min(B, T, Hk, Hv) == 0:
        return f"an axis of length zero: B={B} T={T} Hk={Hk} Hv={Hv}"
    if Dk == 0 or Dv == 0 or Dk % 32 or Dv % 32:
        return f"Dk={Dk} and Dv={Dv} must be multiples of 32"
    if Hv % Hk:
        return f"Hv={Hv} is not a multiple of Hk={Hk}"
    if q.dtype not in ACTIVATION_DTYPES:
        return f"q is {q.dtype}"
    if k.dtype != q.dtype or v.dtype != q.dtype:
        return f"q, k and v differ in dtype: {q.dtype}, {k.dtype}, {v.dtype}"
    if beta.dtype not in (q.dtype, mx.float32):
        return f"beta is {beta.dtype}"
    if g.dtype != mx.float32 or state.dtype != mx.float32:
        return f"g and state must be float32, not {g.dtype} and {state.dtype}"
    if mask is not None and mask.dtype != mx.bool_:
        return f"mask is {mask.dtype}, not bool"
    if faster := faster_stock_kernel(q, v, mask, backend=backend):
        return f"the tile table takes {faster} for {T} tokens on this chip"
    return None


def faster_stock_kernel(
    q: mx.array, v: mx.array, mask: mx.array | None = None, *, backend: str | None = None
) -> str | None:
    """The stock kernel that the tile table takes for these arrays, None where it takes this one.

    Either ``mlx-lm``, the kernel that its models run, or ``mx.fast.gated_delta_update``, which has no mask.
    MLX has both on Metal only.
    """
    backend = backend or backends.resolve()
    if backend != "metal":
        return None
    faster = stock_kernel("gated_delta_scan", backends.chip(backend), **_shape(q, v))
    return faster if mask is None or faster == "mlx-lm" else None


def _shape(q: mx.array, v: mx.array) -> dict[str, int]:
    """The axes that the tile table may ask for."""
    (B, T, _, Dk), (Hv, Dv) = q.shape, v.shape[2:]
    return {"B": B, "T": T, "Hv": Hv, "Dk": Dk, "Dv": Dv}


def gated_delta_scan_reference(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    g: mx.array,
    beta: mx.array,
    state: mx.array,
    mask: mx.array | None = None,
) -> tuple[mx.array, mx.array]:
    """The recurrence token by token in plain MLX, in float32; y is float32 too."""
    heads = v.shape[2] // q.shape[2]
    q, k = (mx.repeat(x.astype(mx.float32), heads, axis=2) for x in (q, k))
    v, g, beta, state = (x.astype(mx.float32) for x in (v, g, beta, state))
    readouts = []
    for t in range(q.shape[1]):
        decayed = g[:, t, :, None, None] * state
        recalled = (decayed * k[:, t, :, None, :]).sum(-1)
        delta = beta[:, t, :, None] * (v[:, t] - recalled)
        after = decayed + delta[..., None] * k[:, t, :, None, :]
        readout = (after * q[:, t, :, None, :]).sum(-1)
        if mask is not None:
            keep = mask[:, t, None, None]
            after = mx.where(keep[..., None], after, state)
            readout = mx.where(keep, readout, 0)
        state = after
        readouts.append(readout)
    return mx.stack(readouts, axis=1), state


@lru_cache(maxsize=256)
def _sizes(T: int) -> mx.array:
    return mx.array([T, 0, 0, 0, 0, 0, 0, 0], dtype=mx.int32)


def gated_delta_scan(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    g: mx.array,
    beta: mx.array,
    state: mx.array,
    mask: mx.array | None = None,
    *,
    tile: Mapping[str, int] | None = None,
    backend: str | None = None,
) -> tuple[mx.array, mx.array]:
    """Run the scan on the GPU (or the host back-end).

    Args:
        q, k, v, g, beta, state, mask: see the module's table; :func:`supports` must answer None.
        tile: ``lanes``, ``rows``, ``ahead`` and ``simdgroups``; by default from the tile table.
        backend: ``metal``, ``cuda`` or ``host``; by default the one in use.

    Returns:
        (y, state).

    Raises:
        ValueError: the arrays do not fit the kernel.
    """
    B, T, Hk, Dk = q.shape
    Hv, Dv = v.shape[2:]
    backend = backend or backends.resolve()
    if tile is None:
        tile = choose("gated_delta_scan", backends.chip(backend), **_shape(q, v))
    grid, threadgroup = _threads(B, Hv, Dv, tile)
    y, state = launch(
        KERNEL,
        [q, k, v, g, beta, state, mask, _sizes(T)],
        template=_template(q.dtype, beta.dtype, Dk, Dv, Hk, Hv, tile, mask is not None),
        grid=grid,
        threadgroup=threadgroup,
        output_shapes=[v.shape, state.shape],
        output_dtypes=[q.dtype, mx.float32],
        backend=backend,
    )
    return y, state


@self_check("gated_delta_scan")
def _self_check(backend: str) -> str | None:
    """Nine tokens of two value heads of the real size, masked at one, against the reference."""
    B, T, Hk, Hv, D = 1, 9, 1, 2, 128
    keys = mx.random.split(mx.random.key(0), 6)

    def normal(key: mx.array, *shape: int) -> mx.array:
        return mx.random.normal(shape, key=key).astype(mx.bfloat16)

    q, k = (normal(key, B, T, Hk, D) * D**-0.5 for key in keys[:2])
    v = normal(keys[2], B, T, Hv, D)
    g = mx.sigmoid(mx.random.normal((B, T, Hv), key=keys[3]) + 2)
    beta = mx.sigmoid(normal(keys[4], B, T, Hv))
    state = mx.random.normal((B, Hv, D, D), key=keys[5])
    mask = mx.arange(T)[None] != 4
    want = gated_delta_scan_reference(q, k, v, g, beta, state, mask)
    for tile in of_chip("gated_delta_scan", backends.chip(backend)):
        got = gated_delta_scan(q, k, v, g, beta, state, mask, tile=tile, backend=backend)
        # bfloat16 rounds y once, by at most 2^-8 of a value; the state is float32 throughout.
        for name, ours, theirs, bound in zip(("y", "state"), got, want, (2**-7, 1e-5), strict=True):
            if off := off_reference(ours, theirs, bound):
                return f"{name} is {off}, with {tile}"
    return None
