"""Query and key preparation against its fp32 reference and against MLX's own norm and rope."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from comparison import assert_close, with_both_widths

from lily_mlx.launch import backend as backends
from lily_mlx.launch import host, source
from lily_mlx.launch.kernel import host_options
from lily_mlx.ops import qk_prepare as op
from lily_mlx.tiles import table

BACKENDS = [name for name in source.BACKENDS if backends.available(name)]

# Hq, Hk, D, rotary: unequal everywhere, so that a swapped axis cannot go unseen.
SMALL = (6, 3, 96, 24)


TILES = [
    {"heads": 4, "simdgroups": 4},
    {"heads": 5, "simdgroups": 2},
    {"heads": 1, "simdgroups": 1},
]


def problem(shape, dtype=mx.float32, position=5, B=1, T=1, seed=0) -> dict:
    """Batch row b starts at ``position + 7 b``; what lies past the batch rows in position is not read."""
    Hq, Hk, D, rotary = shape
    rng = np.random.default_rng(seed)

    def normal(*axes, scale=1.0, shift=0.0):
        return mx.array((rng.normal(size=axes) * scale + shift).astype(np.float32)).astype(dtype)

    return {
        "projected": normal(B, T, 2 * (Hq + Hk) * D),
        "q_weight": normal(D, scale=0.2, shift=1.0),
        "k_weight": normal(D, scale=0.2, shift=1.0),
        "frequencies": op.rope_frequencies(rotary, 1e7),
        "position": mx.array([*(position + 7 * b for b in range(B)), *[-99] * 7], dtype=mx.int32),
        "Hq": Hq,
        "Hk": Hk,
        "offsets": (0, 2 * Hq * D, (2 * Hq + Hk) * D),
    }


def before(arguments: dict, seed=1) -> tuple[mx.array, mx.array]:
    """The last two rows of a cache, the first of them NaN, because it is not read."""
    D = arguments["q_weight"].size
    rows = mx.random.normal((2, 1, arguments["Hk"], 2, D), key=mx.random.key(seed))
    rows[:, :, :, 0] = mx.nan
    return tuple(rows.astype(arguments["projected"].dtype))


def check(
    arguments: dict, backend: str, angle_error: float = 0.0, tile=None
) -> tuple[mx.array, mx.array, mx.array]:
    assert op.supports(**{k: v for k, v in arguments.items() if k != "eps"}, backend=backend) is None
    q, k, v = op.qk_prepare(**arguments, tile=tile, backend=backend)
    want_q, want_k, want_v = op.qk_prepare_reference(**{k: v for k, v in arguments.items() if k != "q_dtype"})
    assert q.dtype == arguments.get("q_dtype", mx.float32)
    assert k.dtype == arguments["projected"].dtype
    assert_close("q", q, want_q, 1e-5 + angle_error)
    assert_close("k", k, want_k, 1e-5 + angle_error)
    assert mx.array_equal(v, want_v), "v is copied, not computed"
    return q, k, v


@pytest.fixture(autouse=True)
def checked_host():
    """On the host every launch runs twice: outputs poisoned in two ways, buffers at both alignments."""
    with host_options(check=True):
        yield


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("shape", "why", "dtype"),
    with_both_widths(
        [
            ((16, 2, 256, 64), "Qwen3.6-35B-A3B"),
            ((8, 1, 256, 64), "the tiny checkpoint"),
            (SMALL, "pairs in different lanes; three elements a lane, read one by one"),
            ((2, 1, 64, 64), "all of a head is rotated; as many pairs as lanes"),
            ((2, 2, 128, 96), "more pairs than lanes, and not a multiple of them"),
            ((1, 1, 32, 2), "the smallest"),
        ]
    ),
)
def test_shapes(backend, dtype, shape, why):
    check(problem(shape, dtype), backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("T", [1, 2, 3, 63, 64, 65])
@pytest.mark.parametrize("tile", TILES, ids=lambda tile: "-".join(map(str, tile.values())))
def test_every_layout_and_length(backend, tile, T):
    check(problem((2, 1, 64, 24), B=2, T=T), backend, (T + 12) * 2.0**-24, tile)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("tile", TILES, ids=lambda tile: "-".join(map(str, tile.values())))
@pytest.mark.parametrize("shape", [SMALL, (2, 1, 64, 24)])
def test_the_row_before_comes_first(backend, tile, shape):
    arguments = problem(shape, mx.bfloat16)
    rows = before(arguments)
    q, k, v = check({**arguments, "before": rows}, backend, tile=tile)
    assert mx.array_equal(k[:, :, :1], rows[0][:, :, 1:])
    assert mx.array_equal(v[:, :, :1], rows[1][:, :, 1:])
    alone = op.qk_prepare(**arguments, backend=backend)
    assert all(mx.array_equal(x, y) for x, y in zip((q, k[:, :, 1:], v[:, :, 1:]), alone, strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16, mx.float32], ids=str)
def test_queries_in_the_activation_type(backend, dtype):
    check({**problem(SMALL, dtype, T=17), "q_dtype": dtype}, backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_qwens_heads_with_the_prefill_tile(backend):
    check({**problem((16, 2, 256, 64), mx.bfloat16, T=18), "q_dtype": mx.bfloat16}, backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_token_is_the_same_in_any_sequence(backend):
    """In a prompt, in a batch and alone, at the same position: the same bits, by any tile."""
    arguments = problem(SMALL, mx.bfloat16, B=2, T=20)
    together = op.qk_prepare(**arguments, backend=backend)
    token = {"projected": arguments["projected"][1:, 18:19]}
    position = mx.array([5 + 7 + 18] * 8, dtype=mx.int32)
    alone = op.qk_prepare(**{**arguments, **token, "position": position}, backend=backend)
    assert all(mx.array_equal(x[1:, :, 18:19], y) for x, y in zip(together, alone, strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
def test_positions_below_zero(backend):
    """What stock's batched caches give to the padding on the left."""
    check(problem(SMALL, position=-4, B=2, T=6), backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("position", [0, 1, 255, 4096, 131071])
def test_positions(backend, position):
    # The angle is rounded to fp32 before its sine is taken; both sides round the same product.
    check(problem(SMALL, position=position), backend, angle_error=position * 2.0**-24)


@pytest.mark.parametrize("backend", BACKENDS)
def test_without_rotation(backend):
    check({**problem(SMALL), "frequencies": mx.zeros((8,))}, backend)
    q, k, _ = op.qk_prepare(**problem(SMALL, position=0), backend=backend)
    unrotated = op.qk_prepare(**{**problem(SMALL), "frequencies": mx.zeros((12,))}, backend=backend)
    assert mx.array_equal(q, unrotated[0])
    assert mx.array_equal(k, unrotated[1])


@pytest.mark.parametrize("backend", BACKENDS)
def test_columns_in_another_order(backend):
    """With NaN between and around them; the gate is not read."""
    Hq, _, D, _ = SMALL
    arguments = problem(SMALL, mx.bfloat16)
    want = op.qk_prepare(**arguments, backend=backend)
    q_raw, k_raw, v_raw = mx.split(arguments["projected"], arguments["offsets"][1:], axis=-1)
    gap = mx.full((1, 1, 8), mx.nan, mx.bfloat16)
    queries = q_raw.reshape(Hq, 2, D)
    queries = mx.stack([queries[:, 0], mx.full((Hq, D), mx.nan, mx.bfloat16)], axis=1).reshape(1, 1, -1)
    parts = [gap, v_raw, gap, queries, gap, k_raw, gap]
    starts = np.cumsum([0] + [part.size for part in parts]).tolist()
    other = {"projected": mx.concatenate(parts, axis=-1), "offsets": (starts[3], starts[5], starts[1])}
    got = op.qk_prepare(**{**arguments, **other}, backend=backend)
    assert all(mx.array_equal(x, y) for x, y in zip(got, want, strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("position", [0, 7, 2000])
def test_the_same_as_mlx(backend, position):
    """mx.fast.rms_norm and mx.fast.rope as stock calls them, in fp32."""
    Hq, Hk, D, rotary = SMALL
    arguments = problem(SMALL, position=position)
    q, k, _ = op.qk_prepare(**arguments, backend=backend)
    q_raw, k_raw, _ = mx.split(arguments["projected"], arguments["offsets"][1:], axis=-1)
    queries = q_raw.reshape(1, 1, Hq, 2 * D)[..., :D]
    keys = k_raw.reshape(1, 1, Hk, D)
    for name, got, raw in (("q", q, queries), ("k", k, keys)):
        normal = mx.fast.rms_norm(raw, arguments[f"{name}_weight"], 1e-6).transpose(0, 2, 1, 3)
        want = mx.fast.rope(normal, rotary, traditional=False, base=1e7, scale=1.0, offset=position)
        assert_close(name, got, want, 1e-5 + position * 2.0**-22)


@pytest.mark.parametrize("backend", BACKENDS)
def test_epsilon_of_the_norms(backend):
    arguments = {**problem(SMALL), "eps": 0.5}
    check(arguments, backend)


def test_no_schedule_changes_a_bit():
    arguments = problem((2, 1, 64, 24), T=3)
    tile = {"heads": 3, "simdgroups": 4}
    host.check_schedules(lambda: op.qk_prepare(**arguments, tile=tile, backend="host"))


def test_the_text_for_apple_silicon_runs_on_the_host(monkeypatch):
    assemble = source.assemble
    monkeypatch.setattr(source, "assemble", lambda kernel, _: assemble(kernel, "metal"))
    check(problem(SMALL, mx.bfloat16), "host")


@pytest.mark.parametrize(("T", "has_before", "inputs"), [(1, False, 5), (1, True, 7), (70, False, 6)])
def test_on_metal_it_is_one_dispatch(T, has_before, inputs):
    """Traced on any machine: nothing is copied, padded or converted around the kernel."""
    arguments = problem((2, 1, 64, 32), mx.bfloat16, T=T)
    rows = before(arguments) if has_before else ()
    heads = {name: arguments.pop(name) for name in ("Hq", "Hk", "offsets")}
    found: list[tuple[str, int]] = []

    def record(node):
        if node["type"] == "primitive":
            found.append((node["name"], len(node["inputs"])))

    def layer(*values):
        with backends.override("metal"):
            return op.qk_prepare(*values[:5], **heads, before=values[5:] or None)

    mx.export_function(record, layer, *arguments.values(), *rows)
    assert found == [("CustomKernel", inputs)]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, None),
        ({"q_weight": mx.zeros((80,))}, "D must be a multiple of 32"),
        ({"k_weight": mx.zeros((64,))}, "k_weight has shape"),
        ({"Hk": 0}, "no heads"),
        ({"Hq": 10}, "q needs 1920 columns from 0, projected has 1728"),
        ({"offsets": (0, 1160, 1448)}, "v needs 288 columns from 1448"),
        ({"offsets": (0, 1152, 1436)}, "not multiples of 8"),
        ({"projected": mx.zeros((1, 1, 1732))}, "not multiples of 8"),
        ({"projected": mx.zeros((1728,))}, "not [B, T, columns]"),
        ({"before": (mx.zeros((1, 3, 1, 96)),) * 2}, "not (1, 3, 2, 96) for one token"),
        ({"before": (mx.zeros((1, 3, 2, 96), mx.float16),) * 2}, "k_before is mlx.core.float16"),
        ({"q_dtype": mx.float16}, "q cannot be mlx.core.float16"),
        ({"k_weight": mx.zeros((96,), mx.float16)}, "k_weight is mlx.core.float16"),
        ({"projected": mx.zeros((1, 1, 1728), mx.int32)}, "projected is mlx.core.int32"),
        ({"frequencies": mx.zeros((49,))}, "not float32 of 1 to 48"),
        ({"frequencies": mx.zeros((0,))}, "not float32 of 1 to 48"),
        ({"position": mx.zeros((8,))}, "not int32 of at least 1"),
        ({"position": mx.zeros((), mx.int32)}, "not int32 of at least 1"),
    ],
)
def test_supports_gives_the_reason(change, reason):
    answer = op.supports(**{**problem(SMALL), **change}, backend="cuda")
    assert answer is None if reason is None else reason in answer


def test_supports_without_a_gpu(monkeypatch):
    monkeypatch.setenv("LILY_BACKEND", "ops")
    assert op.supports(**problem(SMALL)) == "no GPU back-end"


def test_every_tile_of_the_table_launches():
    """A wrong tile would only show on the chip that it is for."""
    for choice in table("qk_prepare"):
        check(problem((16, 2, 256, 64), mx.bfloat16, T=2), "host", tile=choice["tile"])


def test_the_self_check_passes_and_can_fail(monkeypatch):
    assert op._self_check("host") is None
    reference = op.qk_prepare_reference
    monkeypatch.setattr(op, "qk_prepare_reference", lambda *a, **k: reference(*a, **{**k, "eps": 0.5}))
    assert "q is" in op._self_check("host")
