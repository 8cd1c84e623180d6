"""Handing work to the GPU piece by piece, so that what waits there does not fill the memory."""

from __future__ import annotations

from collections import deque

import mlx.core as mx


class Ahead:
    """Starts results in the order in which they are made and lets only some of them wait for the GPU.

    MLX takes the scratch memory of an operation when it is queued, not when it runs.

    Args:
        count: results that may wait, at least 1.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._waiting: deque[mx.array] = deque()

    def start(self, result: mx.array) -> None:
        """Queue a result's work, and wait until at most ``count`` results are unfinished.

        Inside a transformation, where nothing can be evaluated, nothing happens.
        """
        try:
            mx.async_eval(result)
        except ValueError:  # of a transformation
            return
        self._waiting.append(result)
        if len(self._waiting) > self._count:
            mx.eval(self._waiting.popleft())
