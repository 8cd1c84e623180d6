"""Tile tables: which layout of a kernel runs for a shape on a chip.

A table is ``<op>.toml``, a list of ``[[choice]]``:

- ``chip``: a prefix of the name that ``launch.backend.chip`` gives ("cuda-sm_90", "metal"); "" is any;
- ``when``: for each axis that matters, ``[smallest, largest]``, both included;
- ``tile``: the values chosen, or one of :data:`STOCK_KERNELS` that was measured faster there;
- ``because``: the result that chose it.

The first choice that fits is taken: a table goes from special to general, and its last choice always fits.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

STOCK_KERNELS = {"gated_delta_scan": ("mlx-lm", "mx.fast.gated_delta_update")}
"""Which stock kernels an op's table may name: those that the op's layer can run in its place."""


@lru_cache
def table(op: str) -> tuple[dict[str, Any], ...]:
    """The choices of an op, in order.

    Raises:
        ValueError: a choice lacks a field or names an unknown kernel, or the last one does not always fit.
    """
    path = Path(__file__).with_name(f"{op}.toml")
    choices = tuple(tomllib.loads(path.read_text())["choice"])
    for number, choice in enumerate(choices, start=1):
        if choice.keys() != {"chip", "when", "tile", "because"}:
            raise ValueError(f"{path.name}: choice {number} needs chip, when, tile and because, no more")
        if isinstance(choice["tile"], str) and choice["tile"] not in STOCK_KERNELS.get(op, ()):
            known = " or ".join(("a tile", *STOCK_KERNELS.get(op, ())))
            raise ValueError(f"{path.name}: choice {number} is {choice['tile']!r}; it must be {known}")
    if choices[-1]["chip"] or choices[-1]["when"] or isinstance(choices[-1]["tile"], str):
        raise ValueError(f"{path.name}: the last choice must be a tile that fits every chip and shape")
    return choices


@lru_cache(maxsize=4096)
def _fitting(op: str, chip: str, sizes: tuple[tuple[str, int], ...]) -> tuple[Mapping[str, int] | str, ...]:
    """The tiles and stock kernels of all choices that fit, in order."""
    values = dict(sizes)
    return tuple(
        choice["tile"]
        for choice in table(op)
        if chip.startswith(choice["chip"])
        and all(low <= values[axis] <= high for axis, (low, high) in choice["when"].items())
    )


def choose(op: str, chip: str, **sizes: int) -> Mapping[str, int]:
    """The tile of the op's kernel for a shape on a chip: the first of the op's table that fits."""
    return next(tile for tile in _fitting(op, chip, tuple(sizes.items())) if not isinstance(tile, str))


def stock_kernel(op: str, chip: str, **sizes: int) -> str | None:
    """The stock kernel that the op's table takes for a shape on a chip, None where it takes the op's own."""
    first = _fitting(op, chip, tuple(sizes.items()))[0]
    return first if isinstance(first, str) else None


def of_chip(op: str, chip: str) -> tuple[Mapping[str, int], ...]:
    """Every tile that :func:`choose` can give on a chip, once each, in the table's order."""
    found: list[Mapping[str, int]] = []
    for choice in table(op):
        if chip.startswith(choice["chip"]) and not isinstance(choice["tile"], str):
            if choice["tile"] not in found:
                found.append(choice["tile"])
            if not choice["when"]:
                break
    return tuple(found)
