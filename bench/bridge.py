"""mlx-lm's packed gated-delta kernel on back-ends for which mlx-lm has none.

On CUDA stock MLX-LM loops over tokens in Python. The text of its Metal kernel, taken from the installed
package, is compiled through prelude/cuda.h instead, so that stock can be measured at its best.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any
from unittest.mock import patch

import mlx.core as mx
from mlx_lm.models import gated_delta as stock

from lily_mlx.launch import source

Scan = Callable[..., tuple[mx.array, mx.array]]

_CUDA_HEADER = """
template <typename T>
__device__ T simd_shuffle_xor(T x, int lane_mask) {
  return lily_shuffle_xor(x, u32(lane_mask));
}
"""


@cache
def packed_scan(backend: str) -> Scan:
    """mlx-lm's packed kernel: as it is on Metal, elsewhere its text through another launcher.

    Args:
        backend: ``metal``, ``cuda`` or ``host``.

    Returns:
        A function of q, k [B, T, Hk, 128], v [B, T, Hv, Dv], g [B, T, Hv] float32, beta [B, T, Hv] and state
        [B, Hv, Dv, 128] float32 that returns y, like v, and the new state. Dv is a multiple of 8.
    """
    if backend == "metal":
        return lambda q, k, v, g, beta, state: stock.gated_delta_kernel(q, k, v, g, beta, state)
    with (
        patch.object(mx.metal, "is_available", lambda: True),
        patch.object(mx.fast, "metal_kernel", lambda **description: description),
    ):
        description: dict[str, Any] = stock._make_gated_delta_packed_kernel()
    if backend == "cuda":
        # A scalar is a pointer here.
        description["input_names"] = [f"{n}_pointer" if n == "T" else n for n in description["input_names"]]
        description["source"] = "const int T = T_pointer[0];\n" + description["source"]
        description["header"] = source.prelude("cuda") + _CUDA_HEADER
        description["name"] += "_bridged"
        kernel: Any = mx.fast.cuda_kernel(**description)
    else:
        from lily_mlx.launch import host

        kernel = host.metal_kernel(**description)

    def call(
        q: mx.array, k: mx.array, v: mx.array, g: mx.array, beta: mx.array, state: mx.array
    ) -> tuple[mx.array, mx.array]:
        B, T, Hk, Dk = q.shape
        Hv, Dv = v.shape[2:]
        y, state = kernel(
            inputs=[q, k, v, g, beta, state, mx.array(T)],
            template=[("InT", q.dtype), ("StT", state.dtype), ("Dk", Dk), ("Dv", Dv), ("Hk", Hk), ("Hv", Hv)],
            grid=(32, Dv // 8, B * Hv),
            threadgroup=(32, 2, 1),
            output_shapes=[v.shape, state.shape],
            output_dtypes=[q.dtype, state.dtype],
        )
        return y, state

    return call
