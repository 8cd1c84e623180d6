"""Routing of a prompt's tokens against its reference: choice, weights, grouped rows and blocks."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from comparison import assert_close

from lily_mlx.launch import backend as backends
from lily_mlx.launch import host, source
from lily_mlx.launch.kernel import host_options
from lily_mlx.ops import expert_gate_up
from lily_mlx.ops import expert_route as op
from lily_mlx.tiles import choose, table

BACKENDS = [name for name in source.BACKENDS if backends.available(name)]


def tile(tokens, simdgroups, scatter_tokens, scatter_simdgroups) -> dict:
    return {
        "tokens": tokens,
        "simdgroups": simdgroups,
        "scatter_tokens": scatter_tokens,
        "scatter_simdgroups": scatter_simdgroups,
    }


TILES = [tile(16, 4, 32, 8), tile(8, 8, 64, 2), tile(1, 1, 5, 1), tile(96, 3, 96, 1), tile(512, 8, 512, 8)]
SMALL = tile(8, 2, 16, 2)


def uniform(T, E, rng):
    return rng.normal(size=(T, E))


def one_set(T, E, rng):
    """Every token has the same experts."""
    return np.broadcast_to(rng.permutation(E).astype(float), (T, E))


def zipf(T, E, rng):
    """The expert of rank r is chosen about 1 / r times as often as the first."""
    return rng.gumbel(size=(T, E)) - np.log(1 + rng.permutation(E))


def half(T, E, rng):
    """One expert is among the chosen of every second token, before all others."""
    logits = rng.normal(size=(T, E))
    logits[::2, E // 2] = 20
    return logits


def ties(T, E, rng):
    return rng.integers(-2, 3, size=(T, E)).astype(float)


def problem(T, E, load=uniform, dtype=mx.float32, seed=0) -> mx.array:
    rng = np.random.default_rng(seed)
    logits = np.concatenate([load(T, E, rng), rng.normal(size=(T, 1))], axis=1)
    return mx.array(logits.astype(np.float32)).astype(dtype)


def check(logits, top_k, block_rows=32, *, backend, tile=None) -> op.Routing:
    assert op.supports(logits, top_k, block_rows, backend=backend) is None
    got = op.expert_route(logits, top_k, block_rows, tile=tile, backend=backend)
    want = op.expert_route_reference(logits, top_k, block_rows)
    for name in ("experts", "rows", "blocks", "count"):
        ours, theirs = getattr(got, name), getattr(want, name)
        assert ours.dtype == mx.int32
        assert ours.shape == theirs.shape, name
        assert mx.array_equal(ours, theirs), f"{name}: {np.array(ours).tolist()}"
    if mx.isfinite(want.weights).all():
        assert_close("weights", got.weights, want.weights, 1e-6)
    else:
        assert mx.array_equal(mx.isnan(got.weights), mx.isnan(want.weights))
    return got


@pytest.fixture(autouse=True)
def checked_host():
    """On the host every launch runs twice: outputs poisoned in two ways, buffers at both alignments."""
    with host_options(check=True):
        yield


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("tile", TILES, ids=lambda tile: "-".join(map(str, tile.values())))
@pytest.mark.parametrize("T", [1, 2, 63, 64, 65])
def test_every_layout(backend, tile, T):
    """Chunks of one token, of more than there are, and some that end inside a threadgroup's tokens."""
    check(problem(T, 37), 3, 8, tile=tile, backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("T", [1, 2, 63, 64, 65, 257])
@pytest.mark.parametrize(("E", "top_k"), [(256, 8), (37, 3)], ids=["Qwen3.6-35B-A3B", "odd"])
def test_tokens_with_the_tile_of_the_table(backend, T, E, top_k):
    check(problem(T, E), top_k, backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("load", [one_set, zipf, half, ties], ids=lambda load: load.__name__)
@pytest.mark.parametrize("T", [20, 129])
def test_loads(backend, load, T):
    """Groups of many blocks beside empty ones, in one launch and in two."""
    check(problem(T, 37, load), 5, 16, backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("T", "E", "top_k", "why"),
    [
        (3, 1, 1, "one expert"),
        (40, 2, 2, "all experts"),
        (35, 33, 31, "the most that are chosen; one expert more than lanes"),
        (5, 1024, 31, "the most experts: 32 a lane, fewer tokens and simdgroups than the tile's"),
        (70, 1024, 2, "likewise, in two launches"),
        (33, 128, 16, "more chosen than a lane has experts"),
    ],
)
def test_sizes(backend, T, E, top_k, why):
    check(problem(T, E), top_k, backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16], ids=str)
@pytest.mark.parametrize("T", [5, 40])
def test_dtypes(backend, dtype, T):
    check(problem(T, 37, dtype=dtype), 3, backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("block_rows", [1, 7, 16, 64, 1000])
def test_block_rows(backend, block_rows):
    """Blocks of single rows fill the map; a group of as many rows as a block is one block."""
    routing = check(problem(64, 13, one_set), 3, block_rows, tile=SMALL, backend=backend)
    assert routing.count[0].item() == 4 * -(-64 // block_rows)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_bound_on_blocks_is_reached(backend):
    """Every expert's group leaves one row over."""
    logits = mx.where(mx.arange(6) % 2 == mx.arange(33)[:, None] % 2, 1.0, 0.0)
    logits = mx.concatenate([logits, mx.zeros((33, 1))], axis=1)
    routing = check(logits, 3, 16, tile=SMALL, backend=backend)
    assert routing.count[0].item() == 6 + 3 + 3
    assert routing.blocks.shape[0] == op.max_blocks(33, 6, 3, 16) == 7 + 6 + 3


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("T", [9, 70])
def test_rows_are_a_permutation_and_blocks_cover_them(backend, T):
    """What a grouped product relies on, without the reference."""
    k, E, block_rows = 4, 19, 8
    logits = problem(T, E, zipf)
    routing = op.expert_route(logits, k, block_rows, tile=SMALL, backend=backend)
    rows, blocks, experts = (np.array(x) for x in (routing.rows, routing.blocks, routing.experts))
    assert sorted(rows.tolist()) == list(range(T * (k + 1)))
    covered = 0
    used = blocks[: routing.count[0].item()]
    for expert, first, size, zero in used.tolist():
        assert first == covered
        assert 1 <= size <= block_rows
        assert zero == 0
        for row in rows[first : first + size]:
            token, slot = divmod(int(row), k + 1)
            assert expert == (E if slot == k else experts[token, slot])
        covered += size
    assert covered == T * (k + 1)
    assert (np.diff(used[:, 0]) >= 0).all()
    assert not blocks[len(used) :].any()
    of_row = np.repeat(used[:, 0], used[:, 2])
    assert (np.diff(rows)[np.diff(of_row) == 0] > 0).all(), "tokens ascend within an expert"


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("T", [6, 40])
def test_values_that_are_no_numbers(backend, T):
    """NaN ranks below -inf, whatever its sign; indices stay in range when nothing else is left."""
    logits = problem(T, 9)
    logits[0] = mx.nan
    logits[1, :7] = -mx.nan
    logits[2, 3] = -mx.inf
    logits[2, 4:9] = mx.nan
    logits[3, 5] = mx.inf
    logits[4, ::2] = -0.0
    logits[4, 1::2] = 0.0
    routing = check(logits, 4, tile=SMALL, backend=backend)
    assert routing.experts[0].tolist() == [0, 1, 2, 3]
    assert routing.experts[1].tolist() == [0, 1, 7, 8]
    assert routing.experts[2].tolist() == [0, 1, 2, 3]
    assert routing.experts[4].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_choice_is_that_of_decode(backend):
    """The reference of the decode kernel, token by token; here experts are in the order of their indices."""
    logits = problem(11, 37, ties)
    routing = op.expert_route(logits, 7, 16, tile=SMALL, backend=backend)
    for token in range(11):
        experts, weights = expert_gate_up.route_reference(logits[token], 7)
        order = mx.argsort(experts)  # the shared expert, 37, stays last
        assert routing.experts[token].tolist() == experts[order][:-1].tolist()
        assert_close("weights", routing.weights[token], weights[order], 1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_counts_above_fifteen_bits(backend):
    """A half word of counts holds more tokens than a signed one could."""
    T = 40000
    logits = mx.broadcast_to(mx.array([0.0, 1.0, 2.0, 0.5]), (T, 4))
    with host_options(check=False):
        got = op.expert_route(mx.contiguous(logits), 2, 64, tile=tile(2048, 1, 2048, 1), backend=backend)
    want = op.expert_route_reference(logits, 2, 64)
    assert mx.array_equal(got.rows, want.rows)
    assert mx.array_equal(got.blocks, want.blocks)


@pytest.mark.parametrize("T", [6, 21])
@pytest.mark.parametrize("load", [uniform, one_set], ids=lambda load: load.__name__)
def test_no_schedule_changes_a_bit(T, load):
    logits = problem(T, 13, load)
    host.check_schedules(lambda: list(op.expert_route(logits, 3, 4, tile=SMALL, backend="host")))


@pytest.mark.parametrize("T", [6, 21])
def test_the_text_for_apple_silicon_runs_on_the_host(monkeypatch, T):
    assemble = source.assemble
    monkeypatch.setattr(source, "assemble", lambda kernel, _: assemble(kernel, "metal"))
    check(problem(T, 13), 3, tile=SMALL, backend="host")


@pytest.mark.parametrize(("T", "launches"), [(32, 1), (33, 2), (2048, 2), (16384, 2)])
def test_on_metal_nothing_but_the_kernels_runs(T, launches):
    """Traced on any machine: nothing is read on the CPU, copied or converted between the kernels."""
    names: list[str] = []

    def record(node):
        if node["type"] == "primitive":
            names.append(node["name"])

    def layer(logits):
        with backends.override("metal"):
            return list(op.expert_route(logits, 8, 32))

    mx.export_function(record, layer, mx.zeros((T, 257)))
    assert names == ["CustomKernel"] * launches


def test_reference_is_the_formula():
    """Token by token, by hand."""
    logits = problem(5, 6)
    routing = op.expert_route_reference(logits, 2, 2)
    values = np.array(logits, dtype=np.float64)
    groups: dict[int, list[int]] = {e: [] for e in range(7)}
    for token, row in enumerate(values):
        chosen = sorted(np.argsort(-row[:6])[:2].tolist())
        assert routing.experts[token].tolist() == chosen
        e = np.exp(row[chosen])
        want = [*(e / e.sum()), 1 / (1 + np.exp(-row[6]))]
        np.testing.assert_allclose(np.array(routing.weights[token]), want, rtol=1e-6)
        for slot, expert in enumerate([*chosen, 6]):
            groups[expert].append(token * 3 + slot)
    assert routing.rows.tolist() == [row for members in groups.values() for row in members]
    blocks = []
    start = 0
    for expert, members in groups.items():
        blocks += [[expert, start + i, min(2, len(members) - i), 0] for i in range(0, len(members), 2)]
        start += len(members)
    assert routing.blocks[: len(blocks)].tolist() == blocks
    assert routing.count.tolist() == [len(blocks), *[0] * 7]


def test_self_check_passes():
    assert op._self_check("host") is None


def test_self_check_can_fail(monkeypatch):
    reference = op.expert_route_reference
    monkeypatch.setattr(op, "expert_route_reference", lambda logits, *rest: reference(-logits, *rest))
    assert "experts of 7 tokens differ" in op._self_check("host")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, None),
        ({"logits": mx.zeros((65535, 5))}, None),
        ({"logits": mx.zeros((65536, 5))}, "65536 tokens; 1 to 65535"),
        ({"logits": mx.zeros((0, 5))}, "0 tokens"),
        ({"logits": mx.zeros((5,))}, "have shape (5,)"),
        ({"logits": mx.zeros((3, 5), mx.int32)}, "logits are"),
        ({"logits": mx.zeros((3, 1026))}, "of 1025 experts"),
        ({"top_k": 0}, "top 0 of 4"),
        ({"top_k": 5}, "top 5 of 4"),
        ({"logits": mx.zeros((3, 65)), "top_k": 32}, "top 32 of 64"),
        ({"block_rows": 0}, "blocks of 0 rows"),
    ],
)
def test_supports_gives_the_reason(change, reason):
    answer = op.supports(
        **{"logits": mx.zeros((3, 5)), "top_k": 2, "block_rows": 32, **change}, backend="cuda"
    )
    assert answer is None if reason is None else reason in answer


def test_supports_without_a_gpu(monkeypatch):
    monkeypatch.setenv("LILY_BACKEND", "ops")
    assert op.supports(mx.zeros((3, 5)), 2, 32) == "no GPU back-end"


def test_every_tile_of_the_table_launches():
    """A wrong tile would only show on the chip that it is for; three chunks, the last not full."""
    for choice in table("expert_route"):
        T = choice["tile"]["tokens"] * 2 + 3
        check(problem(T, 64), 8, tile=choice["tile"], backend="host")


@pytest.mark.parametrize("T", [1, 32, 33, 1024, 2048, 16384, 65535])
@pytest.mark.parametrize(("E", "top_k"), [(256, 8), (1024, 31), (1, 1)])
def test_tiles_fit(T, E, top_k):
    """Threadgroups begin where chunks do, and have memory for E experts."""
    fitting = op._fitting(E, top_k, choose("expert_route", "host", T=T))
    assert fitting["scatter_tokens"] % fitting["tokens"] == 0
    assert op._group_bytes(E, fitting["scatter_tokens"]) <= 32 * 1024
    template = op._choice_template(mx.float32, E, top_k, fitting)
    assert op.CHOOSE.threadgroup_bytes(template) <= 32 * 1024
    if fitting["tokens"] >= T:
        assert op.ROUTE.threadgroup_bytes(template) <= 32 * 1024
