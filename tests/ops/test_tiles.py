"""The tile tables of a chip: self-checks run every tile of it, and Apple GPUs can launch them."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import mlx.core as mx
import pytest

from lily_mlx import tiles
from lily_mlx.launch import backend as backends
from lily_mlx.launch import trace
from lily_mlx.launch.kernel import max_threads
from lily_mlx.ops import attention_decode, expert_route
from lily_mlx.ops.trust import paired
from lily_mlx.settings import OPS

TABLES = (*OPS, "attention_combine")
NAMED = {choice["chip"] for op in TABLES for choice in tiles.table(op)}
# Of each family the chips that a table names, and one that none does.
METAL = sorted({"metal-applegpu_g13s", *(chip for chip in NAMED if chip.startswith("metal-"))})
CUDA = sorted({"cuda-sm_80", *(chip for chip in NAMED if chip.startswith("cuda-"))})
MATRICES = {"qmm": 1, "expert_gemm_gate_up": 2, "expert_gemm_down": 1}
"""Of which a lane has sums at once, in the ops over common/tile_product.h."""

MAX_SUMS = 64  # in float32, half of the registers that a thread of an Apple GPU can have


def expected(op: str, chip: str) -> list[dict[str, int]]:
    """The tiles that an op can choose on a chip, whole."""
    if op != "expert_gemm_down":
        return [dict(tile) for tile in tiles.of_chip(op, chip)]
    sizes = {tile["rows"] for tile in tiles.of_chip("expert_gemm_gate_up", chip)}
    return [{"rows": rows, **tiles.choose(op, chip, rows=rows)} for rows in sizes]


def checked(op: str, chip: str, monkeypatch) -> list[dict[str, Any]]:
    """The options and operands of every call that the op's self-check makes on a chip.

    The reference answers in the kernel's place, so that no call is the last one.
    """
    module = import_module(f"lily_mlx.ops.{op}")
    reference = getattr(module, f"{op}_reference")
    calls: list[dict[str, Any]] = []

    def call(*operands, tile, backend, combine_tile=None, **options):
        calls.append({"operands": operands, "tile": tile, "combine_tile": combine_tile, "options": options})
        return reference(*operands, **options)

    with monkeypatch.context() as patch:
        patch.setattr(module, op, call)
        patch.setattr(backends, "chip", lambda backend: chip)
        assert module._self_check(chip.split("-")[0]) is None
    return calls


@pytest.mark.parametrize("chip", [*METAL, *CUDA])
@pytest.mark.parametrize("op", OPS)
def test_a_self_check_runs_every_tile_of_the_chip(op, chip, monkeypatch):
    ran = [call["tile"] for call in checked(op, chip, monkeypatch)]
    assert all(tile in ran for tile in expected(op, chip))
    assert all(tile in expected(op, chip) for tile in ran)
    assert len(ran) <= 8, "each is compiled before the first token"


@pytest.mark.parametrize("chip", [*METAL, *CUDA])
def test_both_forms_are_checked_on_every_chip(chip, monkeypatch):
    """Attention in one pass, and in blocks with every second pass; routing in one launch and in two."""
    calls = checked("attention_decode", chip, monkeypatch)
    assert any(attention_decode.one_pass(call["tile"]) for call in calls)
    second = [call["combine_tile"] for call in calls if not attention_decode.one_pass(call["tile"])]
    assert all(tile in second for tile in tiles.of_chip("attention_combine", chip))
    launches = set()
    for call in checked("expert_route", chip, monkeypatch):
        T, E = call["operands"][0].shape
        tile = expert_route._fitting(E - 1, call["operands"][1], call["tile"])
        launches.add(1 if tile["tokens"] >= T else 2)
    assert launches == {1, 2}


@pytest.mark.parametrize("chip", METAL)
@pytest.mark.parametrize("op", OPS)
def test_apple_gpus_can_launch_every_tile(op, chip, monkeypatch):
    """As a Mac would launch it: within the threads and registers that an M1 has for certain."""
    run = getattr(import_module(f"lily_mlx.ops.{op}"), op)
    for call in checked(op, chip, monkeypatch):
        options = {**call["options"], "tile": call["tile"], "backend": "metal"}
        if call["combine_tile"]:
            options["combine_tile"] = call["combine_tile"]
        with backends.override("metal"):
            found = trace.primitives(
                lambda _, call=call, options=options: run(*call["operands"], **options), ONE
            )
        threads = [p.threadgroup for p in found if p.source is not None]
        assert threads
        assert all(x * y * z <= 384 == max_threads("metal") for x, y, z in threads)
        if op in MATRICES:
            assert MATRICES[op] * call["tile"]["rows"] * call["tile"]["cols"] // 32 <= MAX_SUMS


ONE = mx.zeros((8,))


@pytest.mark.parametrize("chip", METAL)
def test_apple_gpus_can_launch_attention_of_any_head_size(chip):
    """Where columns do not divide among the tile's simdgroups, a threadgroup has more of them."""
    for D in range(64, attention_decode.MAX_HEAD_SIZE + 1, 32):
        for Hk, group in ((2, 8), (1, 1), (2, 16)):
            for capacity in (256, 1024, 1280, 8192, 1 << 17):
                tile = tiles.choose("attention_decode", chip, capacity=capacity, Hk=Hk, group=group, D=D)
                sizes = (mx.float32, mx.bfloat16, Hk, group, D, capacity, 0)
                _, _, threadgroup, _ = attention_decode._call(*sizes, tile)
                assert threadgroup[0] <= max_threads("metal")


def test_tiles_of_a_chip_are_those_that_it_can_choose(monkeypatch):
    def choice(chip, when, tile):
        return {"chip": chip, "when": when, "tile": {"rows": tile}, "because": ""}

    rows = (
        choice("cuda-sm_90", {"T": [1, 2]}, 1),
        choice("cuda", {"T": [3, 4]}, 2),
        choice("cuda-sm_90", {}, 1),
        choice("cuda", {}, 3),
        choice("", {"T": [1, 2]}, 4),
        choice("", {}, 5),
    )
    monkeypatch.setattr(tiles, "table", lambda op: rows)
    for chip, want in (("cuda-sm_90", [1, 2]), ("cuda-sm_80", [2, 3]), ("metal", [4, 5])):
        assert [tile["rows"] for tile in tiles.of_chip("op", chip)] == want


def test_pairs_have_each_of_both():
    assert paired("ab", (1, 2, 3)) == [("a", 1), ("b", 2), ("a", 3)]
    assert paired("abc", (1,)) == [("a", 1), ("b", 1), ("c", 1)]


def test_a_table_can_take_a_stock_kernel(monkeypatch):
    """Where it was measured faster; the op's own tile stays that of the next choice that fits."""
    rows = (
        {"chip": "metal", "when": {"T": [1, 2]}, "tile": "stock", "because": ""},
        {"chip": "metal-applegpu_g17s", "when": {}, "tile": "stock", "because": ""},
        {"chip": "", "when": {}, "tile": {"rows": 1}, "because": ""},
    )
    monkeypatch.setattr(tiles, "table", lambda op: rows)
    tiles._fitting.cache_clear()
    assert tiles.stock_kernel("op", "metal", T=2) == "stock"
    assert tiles.stock_kernel("op", "metal", T=3) is tiles.stock_kernel("op", "cuda", T=2) is None
    assert tiles.choose("op", "metal", T=2) == {"rows": 1}
    for chip in ("metal", "metal-applegpu_g17s"):
        assert tiles.of_chip("op", chip) == ({"rows": 1},)
    tiles._fitting.cache_clear()


@pytest.mark.parametrize(
    ("op", "tile", "wrong"),
    [
        ("gated_delta_scan", "mlx-lm", "the last choice must be a tile"),
        ("gated_delta_scan", "mlx_lm", "it must be a tile or mlx-lm or mx.fast.gated_delta_update"),
        ("qmm", "mlx-lm", "choice 1 is 'mlx-lm'; it must be a tile"),
    ],
)
def test_a_table_names_stock_kernels_that_there_are(op, tile, wrong, monkeypatch, tmp_path):
    (tmp_path / f"{op}.toml").write_text(
        f'[[choice]]\nchip = ""\nwhen = {{}}\ntile = "{tile}"\nbecause = ""\n'
    )
    monkeypatch.setattr(tiles, "__file__", str(tmp_path / "__init__.py"))
    tiles.table.cache_clear()
    with pytest.raises(ValueError, match=wrong):
        tiles.table(op)
