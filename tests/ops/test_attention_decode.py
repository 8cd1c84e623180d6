"""Decode attention against its fp32 reference and against MLX's own attention."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from comparison import assert_close

from lily_mlx.launch import backend as backends
from lily_mlx.launch import host, source
from lily_mlx.launch.kernel import host_options
from lily_mlx.ops import attention_decode as op
from lily_mlx.tiles import choose, table

BACKENDS = [name for name in source.BACKENDS if backends.available(name)]


def tile(simdgroups=2, block_rows=0, threadgroups=8):
    return {"simdgroups": simdgroups, "block_rows": block_rows, "threadgroups": threadgroups}


def one_pass(simdgroups=2, heads=2, columns=32):
    return {"simdgroups": simdgroups, "heads": heads, "columns": columns}


TILES = {
    "general": tile(),
    "one simdgroup": tile(simdgroups=1, threadgroups=4),
    "four simdgroups": tile(simdgroups=4),
    "one block": tile(threadgroups=1),
    "one pass": one_pass(),
    "one pass, one simdgroup": one_pass(simdgroups=1, heads=1),
    "one pass, four simdgroups": one_pass(simdgroups=4, heads=4, columns=64),
    "one pass, eight heads": one_pass(simdgroups=3, heads=8, columns=256),
    "fixed blocks": tile(block_rows=16),
    "fixed blocks, not whole tiles": tile(block_rows=13),
    "fixed blocks of several tiles": tile(block_rows=80),
}

# Hq, Hk, D, capacity: unequal everywhere, so that a swapped axis cannot go unseen.
SMALL = (16, 2, 64, 72)
QWEN = (16, 2, 256, 48)


def problem(shape, length, dtype=mx.float32, q_dtype=mx.float32, seed=0, spread=1.0) -> dict:
    """Rows from ``length`` on are NaN."""
    Hq, Hk, D, capacity = shape
    rng = np.random.default_rng(seed)

    def normal(*axes, scale=1.0):
        return (rng.normal(size=axes) * scale).astype(np.float32)

    keys, values = normal(1, Hk, capacity, D, scale=spread), normal(1, Hk, capacity, D)
    keys[:, :, length:] = values[:, :, length:] = np.nan
    return {
        "q": mx.array(normal(1, Hq, 1, D, scale=2.0)).astype(q_dtype),
        "keys": mx.array(keys).astype(dtype),
        "values": mx.array(values).astype(dtype),
        "projected": mx.array(normal(1, 1, 2 * Hq * D)).astype(dtype),
        "position": mx.array([length - 1, capacity, *[2**30] * 6], dtype=mx.int32),
    }


def check(arguments: dict, backend: str, tile=None) -> mx.array:
    assert op.supports(**arguments, backend=backend) is None
    out = op.attention_decode(**arguments, tile=tile, backend=backend)
    assert out.dtype == arguments["keys"].dtype
    assert_close("out", out, op.attention_decode_reference(**arguments), 2e-5)
    return out


@pytest.fixture(autouse=True)
def checked_host():
    """On the host every launch runs twice: outputs poisoned in two ways, buffers at both alignments."""
    with host_options(check=True):
        yield


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", TILES)
@pytest.mark.parametrize("length", [1, 33, 72])
def test_every_layout(backend, name, length):
    """One row, which leaves most blocks without any; a cache not full; a full one."""
    check(problem(SMALL, length), backend, TILES[name])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("dtype", "q_dtype", "name"),
    [
        (mx.bfloat16, mx.float32, "general"),
        (mx.bfloat16, mx.bfloat16, "fixed blocks"),
        (mx.bfloat16, mx.float32, "one pass"),
        (mx.bfloat16, mx.bfloat16, "one pass, four simdgroups"),
        (mx.float16, mx.float32, "one pass, eight heads"),
        (mx.float16, mx.float16, "one pass, one simdgroup"),
        (mx.float32, mx.float32, "one pass, four simdgroups"),
        (mx.float16, mx.float16, "four simdgroups"),
        (mx.float32, mx.float32, "four simdgroups"),
    ],
)
def test_dtypes_at_the_real_heads(backend, dtype, q_dtype, name):
    check(problem(QWEN, 37, dtype, q_dtype), backend, TILES[name])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("D", range(64, 257, 32))
@pytest.mark.parametrize("name", ["four simdgroups", "one pass, four simdgroups"])
def test_head_sizes(backend, D, name):
    """In a dtype of either width, by turns: each layout, and each head size, meets both."""
    dtype = mx.float32 if (D // 32 + ("pass" in name)) % 2 else mx.bfloat16
    check(problem((6, 3, D, 48), 41, dtype), backend, TILES[name])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("Hq", "Hk", "names", "why"),
    [
        (8, 1, ["general", "one pass"], "the tiny checkpoint"),
        (4, 4, ["general", "one pass, eight heads"], "no groups"),
        (10, 2, ["general"], "a group of five"),
        (12, 1, ["general", "one pass, eight heads"], "a group of twelve: eight heads and four"),
        (6, 2, ["general", "one pass"], "a group of three"),
        (32, 2, ["general", "one pass, eight heads"], "a group of sixteen: eight heads, twice"),
    ],
)
def test_groups(backend, Hq, Hk, names, why):
    for name in names:
        check(problem((Hq, Hk, 128, 40), 37, mx.bfloat16), backend, TILES[name])


LENGTHS = [1, 2, 3, 15, 16, 17, 31, 32, 33, 63, 64, 65, 1023, 1024, 1025]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("name", ["general", "fixed blocks", "one pass"])
def test_lengths(backend, length, name):
    """Around a tile, a block, and a step of the cache, whose rows past the length are NaN."""
    capacity = 72 if length < 72 else 1280
    layout = {**TILES[name]}
    if capacity > 72 and name == "fixed blocks":  # fewer launches of fibers
        layout["block_rows"] *= 16
    with host_options(check=capacity == 72):
        check(problem((2, 1, 64, capacity), length, mx.bfloat16), backend, layout)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("length", [511, 512, 513, 1025])
@pytest.mark.parametrize("order", ["rising", "falling"])
def test_more_scores_than_meet_at_a_barrier(backend, length, order):
    """In one pass eight heads keep 512 rows of scores: at the next, the sums so far are rescaled."""
    arguments = problem((8, 1, 64, 1280), length, mx.bfloat16)
    ramp = mx.arange(1280) / 64 if order == "rising" else mx.arange(1280, 0, -1) / 64
    towards = ramp[:, None] * mx.sign(arguments["q"][:, :1])
    arguments["keys"] = mx.where(mx.arange(1280)[:, None] < length, towards, mx.nan).astype(mx.bfloat16)
    with host_options(check=False):
        check(arguments, backend, TILES["one pass, eight heads"])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16], ids=str)
def test_token_by_token_while_the_cache_grows(backend, dtype):
    """From 1,020 to 1,030 rows, the cache growing at 1,024: each token as attention over all rows at once."""
    whole = problem((4, 1, 64, 1030), 1030, dtype)
    room = mx.full((1, 1, 1024, 64), mx.nan, dtype)
    with host_options(check=False):
        for length in range(1020, 1031):
            capacity = 1024 if length <= 1024 else 2048
            keys, values = (
                mx.concatenate([whole[name][:, :, :length], room], axis=2)[:, :, :capacity]
                for name in ("keys", "values")
            )
            position = mx.array([length - 1, capacity, *[0] * 6], dtype=mx.int32)
            arguments = {**whole, "keys": keys, "values": values, "position": position}
            for layout in (tile(threadgroups=16), one_pass(heads=4)):
                out = check(arguments, backend, layout)
            k, v = (whole[name][:, :, :length].astype(mx.float32) for name in ("keys", "values"))
            attended = mx.fast.scaled_dot_product_attention(whole["q"], k, v, scale=64**-0.5)
            gate = whole["projected"].reshape(4, 2, 64)[:, 1].astype(mx.float32)
            want = attended.reshape(4, 64) * mx.sigmoid(gate)
            assert_close("out", out, want.reshape(1, 1, -1), 2e-5)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("length", [4095, 4096, 4097])
def test_long_lengths(backend, length):
    with host_options(check=False):
        for layout in (tile(), tile(block_rows=512), one_pass(heads=4)):
            check(problem((8, 1, 64, 4352), length, mx.bfloat16), backend, layout)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", TILES)
def test_what_lies_past_the_length_does_not_matter(backend, name):
    arguments = problem(SMALL, 21)
    want = op.attention_decode(**arguments, tile=TILES[name], backend=backend)
    exists = mx.arange(SMALL[3])[:, None] < 21  # within a tile
    for row in (0.0, mx.inf):
        for array in ("keys", "values"):
            arguments[array] = mx.where(exists, arguments[array], row)
        assert mx.array_equal(op.attention_decode(**arguments, tile=TILES[name], backend=backend), want)


@pytest.mark.parametrize(
    "name", ["general", "fixed blocks", "one block", "one pass", "one pass, four simdgroups"]
)
@pytest.mark.parametrize("length", [21, 33])
def test_arrays_that_end_at_the_length(name, length):
    """On the host they end at a page that cannot be touched: reading a row further is a fault."""
    arguments = problem((8, 1, 64, length), length)
    # No more blocks than there are without the rows past the length, so that both runs split the rows alike.
    layout = TILES[name] | ({"threadgroups": 2} if name == "general" else {})
    want = check(arguments, "host", layout)
    for array in ("keys", "values"):
        arguments[array] = mx.concatenate([arguments[array], mx.full((1, 1, 11, 64), mx.nan)], axis=2)
    arguments["position"] = mx.array([length - 1, length + 11, *[0] * 6], dtype=mx.int32)
    assert mx.array_equal(check(arguments, "host", layout), want)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["general", "fixed blocks", "one block", "one pass"])
@pytest.mark.parametrize("order", ["rising", "falling"])
def test_scores_far_apart(backend, name, order):
    """Scores of hundreds that rise with every row: the sums must be rescaled, and never overflow."""
    arguments = problem((2, 1, 64, 72), 69)
    ramp = mx.arange(72) if order == "rising" else mx.arange(72, 0, -1)
    arguments["keys"] = mx.where(
        mx.arange(72)[:, None] < 69, ramp[:, None] * mx.sign(arguments["q"][:, :1]), mx.nan
    )
    check(arguments, backend, TILES[name])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["general", "one pass"])
def test_the_gate_inside_a_larger_buffer(backend, name):
    Hq, _, D, _ = SMALL
    arguments = problem(SMALL, 9, mx.bfloat16)
    want = op.attention_decode(**arguments, tile=TILES[name], backend=backend)
    gap = mx.full((1, 1, 24), mx.nan, mx.bfloat16)
    queries = arguments["projected"].reshape(Hq, 2, D)
    queries = mx.stack([mx.full((Hq, D), mx.nan, mx.bfloat16), queries[:, 1]], axis=1).reshape(1, 1, -1)
    arguments |= {"projected": mx.concatenate([gap, queries, gap], axis=-1), "offset": 24}
    assert mx.array_equal(op.attention_decode(**arguments, tile=TILES[name], backend=backend), want)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("length", [5, 72])
@pytest.mark.parametrize("name", ["general", "one pass"])
def test_the_same_as_mlx(backend, length, name):
    """mx.fast.scaled_dot_product_attention and the gate as stock applies it, in fp32."""
    Hq, _, D, _ = SMALL
    arguments = problem(SMALL, length)
    k, v = (arguments[name][:, :, :length] for name in ("keys", "values"))
    attended = mx.fast.scaled_dot_product_attention(arguments["q"], k, v, scale=D**-0.5)
    gate = mx.split(arguments["projected"].reshape(1, 1, Hq, 2 * D), 2, axis=-1)[1]
    want = attended.transpose(0, 2, 1, 3).reshape(1, 1, -1) * mx.sigmoid(gate.reshape(1, 1, -1))
    assert_close("out", op.attention_decode(**arguments, tile=TILES[name], backend=backend), want, 2e-5)


@pytest.mark.parametrize(
    ("name", "length"),
    [
        ("general", 35),
        ("fixed blocks, not whole tiles", 35),
        ("one pass, four simdgroups", 35),
        ("one pass, eight heads", 520),  # more than the scores between two barriers
    ],
)
def test_no_schedule_changes_a_bit(name, length):
    arguments = problem((8, 1, 64, length + 5), length)
    host.check_schedules(lambda: op.attention_decode(**arguments, tile=TILES[name], backend="host"))


@pytest.mark.parametrize("name", ["general", "one pass"])
def test_the_text_for_apple_silicon_runs_on_the_host(monkeypatch, name):
    assemble = source.assemble
    monkeypatch.setattr(source, "assemble", lambda kernel, _: assemble(kernel, "metal"))
    check(problem(SMALL, 33, mx.bfloat16), "host", TILES[name])


def dispatches(arguments: dict, layout) -> list[str]:
    names: list[str] = []

    def record(node):
        if node["type"] == "primitive":
            names.append(node["name"])

    def layer(*values):
        with backends.override("metal"):
            return op.attention_decode(*values, tile=layout)

    mx.export_function(record, layer, *arguments.values())
    return names


def test_on_metal_it_is_one_dispatch_or_two():
    """Traced on any machine: nothing is copied, padded or converted around the kernels."""
    arguments = problem(SMALL, 9, mx.bfloat16)
    assert dispatches(arguments, TILES["one pass"]) == ["CustomKernel"]
    assert dispatches(arguments, TILES["general"]) == ["CustomKernel"] * 2


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, None),
        ({"q": mx.zeros((1, 16, 2, 64))}, "q has shape"),
        ({"q": mx.zeros((1, 15, 1, 64))}, "Hq=15 is not a multiple of Hk=2"),
        ({"q": mx.zeros((1, 16, 1, 64), mx.float16)}, "q is mlx.core.float16"),
        ({"keys": mx.zeros((1, 2, 40, 96))}, "keys has shape"),
        ({"values": mx.zeros((1, 2, 48, 64))}, "values has shape"),
        ({"values": mx.zeros((1, 2, 72, 64), mx.float16)}, "differ in dtype"),
        ({"keys": mx.zeros((1, 2, 72, 64), mx.int32)}, "keys is mlx.core.int32"),
        ({"offset": 1}, "projected has 2048 elements; needs 2048 from 1"),
        ({"position": mx.array([3])}, "not int32 (8,)"),
    ],
)
def test_supports_gives_the_reason(change, reason):
    answer = op.supports(**{**problem(SMALL, 9), **change}, backend="cuda")
    assert answer is None if reason is None else reason in answer


@pytest.mark.parametrize("D", [32, 80, 288])
def test_supports_refuses_head_sizes(D):
    assert f"D={D} is not" in op.supports(**problem((2, 1, D, 8), 4), backend="host")


def test_supports_without_a_gpu(monkeypatch):
    monkeypatch.setenv("LILY_BACKEND", "ops")
    assert op.supports(**problem(SMALL, 9)) == "no GPU back-end"


def chosen(capacity: int, chip: str = "host", Hk: int = 2, group: int = 8, D: int = 256):
    return choose("attention_decode", chip, capacity=capacity, Hk=Hk, group=group, D=D)


def test_every_tile_of_the_table_launches():
    """A wrong tile would only show on the chip that it is for."""
    with host_options(check=False):
        for choice in table("attention_decode"):
            check(problem((8, 1, 256, 512), 500, mx.bfloat16), "host", choice["tile"])


def test_short_caches_take_one_pass():
    for chip, longest in (("cuda-sm_90", 1280), ("metal", 1024)):
        assert op.one_pass(chosen(longest, chip))
        assert not op.one_pass(chosen(longest + 256, chip))


def test_the_layout_switches_at_32k_for_the_models_heads_only():
    assert chosen(32512)["block_rows"] == 0
    assert chosen(32768)["block_rows"] > 0
    assert chosen(32768, D=128)["block_rows"] == 0
    assert chosen(32768, group=4)["block_rows"] == 0


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("sides", [(1024, 1280), (32512, 32768)], ids=str)
def test_both_sides_of_a_switch_agree(backend, sides):
    """What the table chooses there, on the same rows."""
    arguments = problem((8, 1, 256, 1024), 1001, mx.bfloat16)
    assert chosen(sides[0]) != chosen(sides[1])
    with host_options(check=False):
        below, above = (check(arguments, backend, chosen(capacity)) for capacity in sides)
    assert mx.allclose(below, above, rtol=2.0**-7, atol=1e-4)


@pytest.mark.parametrize("backend", BACKENDS)
def test_scores_keep_more_digits_than_the_cache(backend):
    """q as one 16-bit number would be wrong in the third digit: rows differ in what its rounding loses."""
    arguments = problem((8, 1, 64, 40), 33, mx.bfloat16)
    arguments["q"] = arguments["q"] + mx.sign(arguments["q"]) * 2.0**-10
    rounded = {**arguments, "q": arguments["q"].astype(mx.bfloat16)}
    got = check(arguments, backend, TILES["general"]).astype(mx.float32)
    want, other = (op.attention_decode_reference(**a) for a in (arguments, rounded))
    assert mx.abs(got - want).sum() < 0.9 * mx.abs(got - other).sum()


@pytest.mark.parametrize(
    ("D", "wish", "want"), [(256, 4, 4), (256, 8, 8), (96, 4, 6), (224, 4, 7), (64, 8, 4), (160, 8, 10)]
)
def test_simdgroups_are_fitted_to_the_head_size(D, wish, want):
    assert op.simdgroups(D, tile(simdgroups=wish)) == want


@pytest.mark.parametrize(
    ("capacity", "group", "dtype", "layout", "want"),
    [
        (4096, 8, mx.bfloat16, tile(threadgroups=132), 66),
        (4096, 12, mx.bfloat16, tile(threadgroups=132), 33),
        (256, 8, mx.bfloat16, tile(threadgroups=132), 8),
        (256, 8, mx.float32, tile(threadgroups=132), 16),
        (256, 8, mx.bfloat16, tile(threadgroups=1), 1),
        (4097, 8, mx.bfloat16, tile(block_rows=512), 9),
    ],
)
def test_blocks_of_the_real_heads(capacity, group, dtype, layout, want):
    assert op.blocks(capacity, 2, group, dtype, layout) == want


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16, mx.float32], ids=str)
@pytest.mark.parametrize("D", range(64, 257, 32))
@pytest.mark.parametrize("wish", [1, 2, 4, 8, 16])
def test_every_head_size_fits_into_threadgroup_memory(dtype, D, wish):
    values = {"KvT": dtype, "D": D, "SIMDGROUPS": op.simdgroups(D, tile(simdgroups=wish)), "HEADS": 0}
    assert op.KERNEL.threadgroup_bytes(values) <= 32768


@pytest.mark.parametrize(
    ("D", "group", "want"), [(256, 8, (4, 128)), (96, 8, (4, 32)), (224, 3, (2, 32)), (64, 1, (1, 64))]
)
def test_a_threadgroups_part_is_fitted_to_the_shape(D, group, want):
    assert op.part(D, group, one_pass(heads=4, columns=128)) == want


def test_the_self_check_passes_and_can_fail(monkeypatch):
    assert op._self_check("host") is None
    reference = op.attention_decode_reference
    monkeypatch.setattr(op, "attention_decode_reference", lambda *a, **k: reference(*a, **k) * 1.02)
    assert "off the reference" in op._self_check("host")
