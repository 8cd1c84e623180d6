"""What the compiled steps ask of stock's caches, which stay the storage."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache, BatchKVCache, KVCache

_whole: WeakKeyDictionary[BatchKVCache, mx.array] = WeakKeyDictionary()
"""Of batches' caches without padding the offset that they had when that was seen.

Stock replaces it whenever it writes, by ``offset = offset + n``; ``+=`` would keep the object.
"""


def is_kv(cache: Any) -> bool:
    """Whether a cache holds the keys and values of whole rows in stock's plain arrays."""
    return type(cache) is KVCache or type(cache) is BatchKVCache


def length(cache: Any) -> int:
    """The tokens that a cache of keys and values holds, padding included."""
    tokens: int = cache._idx if type(cache) is BatchKVCache else cache.offset
    return tokens


def why_not(caches: Sequence[Any]) -> str | None:
    """None if no row of the caches is padded and all are of types that the steps know, else the reason.

    A batch's generator gives every row a padding, which is zero, or has been passed, where a row is alone or
    all are of one length. It is read, and waited for, when a batch's cache is new or others have written to
    it; a linear layer's, once passed, is taken away, as no mask depends on it.
    """
    for cache in caches:
        if type(cache) is ArraysCache:
            if cache.lengths is not None or _padded(cache):
                return "a linear layer's cache holds padded rows"
            if (cache[0] is None) != (cache[1] is None):
                return "a linear layer's cache is half empty"
        elif type(cache) is BatchKVCache:
            if _has_padding(cache):
                return "an attention layer's cache holds padded rows"
        elif type(cache) is not KVCache:
            return f"a layer's cache is {type(cache).__name__}"
    return None


def put(cache: Any, keys: mx.array, values: mx.array) -> None:
    """Put arrays that hold one token more in the place of a cache's, which has one row.

    Args:
        cache: for which :func:`is_kv` holds.
        keys, values: [1, Hk, capacity, D].
    """
    cache.keys, cache.values = keys, values
    if type(cache) is BatchKVCache:
        cache._idx += 1
        cache.offset = _whole[cache] = mx.array([cache._idx], dtype=mx.int32)
    else:
        cache.offset += 1


def _padded(cache: ArraysCache) -> bool:
    """Whether tokens to come are padding; what has been passed is forgotten, as no mask depends on it."""
    if cache.left_padding is None:
        return False
    if _most(cache.left_padding) > 0:
        return True
    cache.left_padding = None
    return False


def _has_padding(cache: BatchKVCache) -> bool:
    if getattr(cache, "_right_padding", None) is not None:  # a reloaded cache has no such attribute
        return True
    if _whole.get(cache) is not cache.offset:
        if _most(cache.left_padding) > 0:
            return True
        _whole[cache] = cache.offset
    return False


def _most(padding: mx.array) -> int:
    rows: Any = padding.tolist()
    return int(max(rows))
