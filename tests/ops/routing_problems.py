"""Routings for the tests of the grouped products, made in plain Python."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

LOADS = ("uniform", "single", "skewed")


def chosen_experts(rng: np.random.Generator, T: int, E: int, top_k: int, load: str) -> np.ndarray:
    """Experts [T, top_k] of each token, all different: any, the first top_k only, or mostly the first few."""
    if load == "single":
        return np.tile(np.arange(top_k), (T, 1))
    weights = np.ones(E) if load == "uniform" else 1 / np.arange(1, E + 1) ** 2
    weights /= weights.sum()
    return np.array([rng.choice(E, top_k, replace=False, p=weights) for _ in range(T)])


def routing_reference(experts: np.ndarray, E: int, block_rows: int) -> tuple[mx.array, mx.array, mx.array]:
    """(rows, blocks, count) of the experts [T, top_k] that each token has chosen; the shared expert is E.

    The blocks that are not used come last, and nobody may look at what they say.
    """
    T, top_k = experts.shape
    rows: list[int] = []
    blocks: list[list[int]] = []
    for expert in range(E + 1):
        slots = np.full((T, 1), top_k) if expert == E else np.argwhere(experts == expert)[:, 1:]
        tokens = np.arange(T)[:, None] if expert == E else np.argwhere(experts == expert)[:, :1]
        members = (tokens * (top_k + 1) + slots).ravel().tolist()
        for first in range(0, len(members), block_rows):
            blocks.append([expert, len(rows) + first, min(block_rows, len(members) - first), 0])
        rows += members
    count = [len(blocks), *[0] * 7]
    unused = [[-1, -1, -1, -1]] * 3
    return tuple(mx.array(values, dtype=mx.int32) for values in (rows, blocks + unused, count))
