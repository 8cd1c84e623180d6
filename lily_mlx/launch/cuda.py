"""The CUDA launcher: ``mx.fast.cuda_kernel`` through prelude/cuda.h.

What differs from Metal and where it is settled:

- a launch is whole blocks, where Metal cuts the last threadgroup: ``launch`` takes whole threadgroups only;
- every input is a pointer, also a 0-d one: run-time scalars come in one int32 array on every back-end;
- threadgroup memory is ``__shared__``, static, and at most 32 KB as on Metal: prelude and ``launch``;
- MLX keeps compiled code by name, on disk too: the name holds a digest of the text.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx

from ..errors import BackendUnavailableError


def build(description: dict[str, Any]) -> Callable[..., list[mx.array]]:
    """MLX's kernel object for one variant.

    Args:
        description: name, input_names, output_names, header and source.

    Raises:
        BackendUnavailableError: MLX was built without CUDA.
    """
    if not mx.cuda.is_available():
        raise BackendUnavailableError("the cuda back-end needs MLX with CUDA and an NVIDIA GPU")
    return mx.fast.cuda_kernel(**description)
