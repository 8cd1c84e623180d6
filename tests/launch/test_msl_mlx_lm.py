"""Every Metal kernel of the installed mlx-lm, unmodified, on the CPU, against plain fp32 MLX.

The modules are executed afresh with ``mx.fast.metal_kernel`` replaced: nothing of them is copied.
``mlx_lm/tuner/losses.py`` is not here: its sums overwrite shared maxima that other simdgroups may still have
to read, and docs/metal-without-a-mac.md shows the race.
"""

from __future__ import annotations

import importlib.util
from types import ModuleType
from typing import Any
from unittest.mock import patch

import mlx.core as mx
import mlx.nn as nn
import pytest

from lily_mlx.launch import host

# Relative RMS error of one result that was rounded to the type once.
TOLERANCE = {mx.float32: 2e-6, mx.float16: 5e-4, mx.bfloat16: 4e-3}


def load(name: str) -> ModuleType:
    """A fresh mlx_lm.<name> whose kernels run on the CPU."""
    spec = importlib.util.find_spec(f"mlx_lm.{name}")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    real = mx.fast.metal_kernel

    def on_host(*args: Any, **options: Any) -> host.HostKernel:
        with patch.object(mx.fast, "metal_kernel", real):  # which the launcher itself calls
            return host.metal_kernel(*args, **options)

    with (
        patch.object(mx.metal, "is_available", lambda: True),
        patch.object(mx, "default_device", lambda: mx.gpu),
        patch.object(mx.fast, "metal_kernel", on_host),
    ):
        spec.loader.exec_module(module)
    return module


def relative_rms(got: mx.array, want: mx.array) -> float:
    assert got.shape == want.shape
    got, want = got.astype(mx.float32), want.astype(mx.float32)
    return (mx.sqrt(mx.mean((got - want) ** 2)) / mx.sqrt(mx.mean(want**2))).item()


def agree(got: mx.array, want: mx.array, factor: float = 1.0) -> None:
    assert relative_rms(got, want) < factor * TOLERANCE[got.dtype]


def normal(*shape: int, seed: int, scale: float = 1.0, dtype: mx.Dtype = mx.float32) -> mx.array:
    return (scale * mx.random.normal(shape, key=mx.random.key(seed))).astype(dtype)


# ------------------------------------------------------------------------------------- gated delta


@pytest.fixture(scope="module")
def gated_delta() -> ModuleType:
    return load("models.gated_delta")


def delta_inputs(
    B: int, T: int, Hk: int, Hv: int, Dk: int, Dv: int, dtype: mx.Dtype, vector_gate: bool
) -> tuple[mx.array, ...]:
    q = normal(B, T, Hk, Dk, seed=1, scale=Dk**-0.5).astype(dtype)
    k = normal(B, T, Hk, Dk, seed=2, scale=Dk**-0.5).astype(dtype)
    v = normal(B, T, Hv, Dv, seed=3).astype(dtype)
    gate = (B, T, Hv, Dk) if vector_gate else (B, T, Hv)
    g = mx.random.uniform(0.5, 1.0, gate, key=mx.random.key(4))
    beta = mx.random.uniform(0.0, 1.0, (B, T, Hv), key=mx.random.key(5)).astype(dtype)
    state = normal(B, Hv, Dv, Dk, seed=6)
    return q, k, v, g, beta, state


def delta_reference(
    q: mx.array, k: mx.array, v: mx.array, g: mx.array, beta: mx.array, state: mx.array, mask: mx.array | None
) -> tuple[mx.array, mx.array]:
    q, k, v, beta = (x.astype(mx.float32) for x in (q, k, v, beta))
    _, T, Hk, _ = q.shape
    repeat = v.shape[2] // Hk
    q, k = mx.repeat(q, repeat, 2), mx.repeat(k, repeat, 2)
    outputs = []
    for t in range(T):
        decay = g[:, t, :, None, :] if g.ndim == 4 else g[:, t, :, None, None]
        new = state * decay
        delta = (v[:, t] - (new * k[:, t, :, None, :]).sum(-1)) * beta[:, t, :, None]
        new = new + delta[..., None] * k[:, t, :, None, :]
        y = (new * q[:, t, :, None, :]).sum(-1)
        if mask is not None:  # a masked step leaves the state and writes zeros
            keep = mask[:, t, None, None]
            y, new = mx.where(keep, y, 0), mx.where(keep[..., None], new, state)
        outputs.append(y)
        state = new
    return mx.stack(outputs, 1), state


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("vector_gate", [False, True])
def test_gated_delta(gated_delta: ModuleType, vector_gate: bool, masked: bool) -> None:
    inputs = delta_inputs(2, 5, 2, 4, 64, 8, mx.bfloat16, vector_gate)
    mask = mx.array([[1, 1, 0, 1, 1], [0, 1, 1, 1, 0]], mx.bool_) if masked else None
    y, state = gated_delta.gated_delta_kernel_unpacked(*inputs, mask)
    want_y, want_state = delta_reference(*inputs, mask)
    agree(y, want_y)
    agree(state, want_state)


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float32])
def test_packed_gated_delta_is_bitwise_the_explicit_tree(gated_delta: ModuleType, dtype: mx.Dtype) -> None:
    # Dk = 128 is the packed kernel's only size; Dv differs from it and from the head counts.
    inputs = delta_inputs(1, 3, 2, 4, 128, 16, dtype, False)
    y, state = gated_delta.gated_delta_kernel(*inputs)
    tree_y, tree_state = gated_delta.gated_delta_kernel_xtree(*inputs)
    plain_y, plain_state = gated_delta.gated_delta_kernel_unpacked(*inputs)
    for got, want in ((y, tree_y), (state, tree_state), (y, plain_y), (state, plain_state)):
        assert mx.array_equal(got, want)
    want_y, want_state = delta_reference(*inputs, None)
    agree(y, want_y)
    agree(state, want_state)


# ------------------------------------------------------------------------------ mlx_lm/kernels/*.py


def rms(x: mx.array, eps: float) -> mx.array:
    return x * mx.rsqrt(mx.mean(x * x, axis=-1, keepdims=True) + eps)


def query_and_key(qkvg: mx.array, HQ: int, HK: int, D: int) -> tuple[mx.array, mx.array]:
    x = qkvg.astype(mx.float32)
    q, k, _ = mx.split(x, [HQ * D, (HQ + HK) * D], axis=-1)
    return q.reshape(*q.shape[:-1], HQ, D), k.reshape(*k.shape[:-1], HK, D)


@pytest.mark.parametrize("D", [64, 40])  # a multiple of the simdgroup, and not
def test_qk_norm(D: int) -> None:
    HQ, HK = 4, 2
    x = normal(2, 3, 2 * (HQ + HK) * D, seed=7, dtype=mx.bfloat16)
    q, k = load("kernels.qk_norm").qk_norm(
        x, n_heads=HQ, n_kv_heads=HK, head_dim=D, eps=1e-5, query_scale=0.3
    )
    want_q, want_k = query_and_key(x, HQ, HK, D)
    agree(q, 0.3 * rms(want_q, 1e-5))
    agree(k, rms(want_k, 1e-5))


@pytest.mark.parametrize("offset", [11, [3, 17]])
def test_qk_norm_rope(offset: int | list[int]) -> None:
    HQ, HK, D, base = 4, 2, 64, 1e4
    x = normal(2, 3, 2 * (HQ + HK) * D, seed=8, dtype=mx.float16)
    q, k = load("kernels.qk_norm_rope").qk_norm_rope(
        x,
        n_heads=HQ,
        n_kv_heads=HK,
        head_dim=D,
        eps=1e-5,
        query_scale=0.3,
        rope_base=base,
        offset=mx.array(offset) if isinstance(offset, list) else offset,
    )
    starts = mx.broadcast_to(mx.array(offset).reshape(-1, 1), (2, 1))
    positions = (starts + mx.arange(3)).astype(mx.float32)
    theta = positions[..., None, None] * mx.power(base, -mx.arange(D // 2) / (D / 2))

    def rotate(x: mx.array) -> mx.array:
        a, b = x[..., 0::2], x[..., 1::2]
        c, s = mx.cos(theta), mx.sin(theta)
        return mx.stack([a * c - b * s, a * s + b * c], -1).reshape(x.shape)

    want_q, want_k = query_and_key(x, HQ, HK, D)
    agree(q, rotate(0.3 * rms(want_q, 1e-5)), 2)
    agree(k, rotate(rms(want_k, 1e-5)), 2)


def test_expert_routing() -> None:
    T, E, K = 5, 40, 4
    logits, bias = normal(T, E, seed=9), normal(E, seed=10, scale=0.1)
    inds, weights = load("kernels.expert_routing").expert_routing(
        logits, bias, top_k=K, multiplier=1.3, score_eps=1e-6, route_scale=2.5
    )
    scores = mx.sigmoid(1.3 * logits)
    want = mx.argsort(-(scores + bias), axis=-1)[:, :K].astype(mx.uint32)
    chosen = mx.take_along_axis(scores, want, -1)
    assert mx.array_equal(inds, want)
    agree(weights, 2.5 * chosen / (chosen.sum(-1, keepdims=True) + 1e-6))


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("D", [48, 520])  # one simdgroup, and two with a remainder
def test_norm_add_norm(D: int, scaled: bool) -> None:
    module = load("kernels.norm_add_norm")
    branch, stream = normal(3, D, seed=11, dtype=mx.bfloat16), normal(3, D, seed=12)
    alpha, beta, post = normal(D, seed=13), normal(D, seed=14), normal(D, seed=15)
    norm = nn.RMSNorm(D)
    norm.weight = normal(D, seed=16)
    arguments = {"alpha": alpha, "beta": beta, "post_weight": post if scaled else None, "post_eps": 1e-5}
    new, normed = module.norm_add_norm(branch, stream, **arguments, next_norm=norm)
    alone, none = module.norm_add_norm(branch, stream, **arguments, next_norm=None)
    x = branch.astype(mx.float32) * (post if scaled else 1)
    want = alpha * stream + beta * rms(x, 1e-5)
    assert relative_rms(new, want) < TOLERANCE[mx.bfloat16]  # the branch is rounded on the way
    agree(normed, rms(new, norm.eps) * norm.weight)
    assert none is None
    assert mx.array_equal(new, alone)
    assert mx.array_equal(normed, module.pre_norm(new, norm, dtype=mx.bfloat16))


@pytest.mark.parametrize("D", [40, 1030])
def test_post_expert_norm_combine(D: int) -> None:
    K = 3
    experts = normal(2, 2, K, D, seed=17, dtype=mx.float16)
    weights, norm = mx.random.uniform(shape=(2, 2, K), key=mx.random.key(18)), normal(D, seed=19)
    got = load("kernels.post_expert_norm_combine").post_expert_norm_combine(
        experts, weights, norm_weight=norm, eps=1e-5
    )
    want = (rms(experts.astype(mx.float32) * norm, 1e-5) * weights[..., None]).sum(-2)
    agree(got, want, 2)  # rounded after each of the K experts


def test_rms_norm_sigmoid_gate() -> None:
    B, H, L, D = 2, 3, 5, 40
    x = normal(B, L, H, D, seed=20, dtype=mx.bfloat16).transpose(0, 2, 1, 3)  # strides matter here
    gate = normal(B, L, H * D, seed=21, dtype=mx.bfloat16)
    got = load("kernels.rms_norm_sigmoid_gate").rms_norm_sigmoid_gate(x, gate, eps=1e-5)
    want = rms(x.astype(mx.float32), 1e-5).transpose(0, 2, 1, 3).reshape(B, L, H * D)
    agree(got, want * mx.sigmoid(gate.astype(mx.float32)))


# ------------------------------------------------------------------------------ mlx_lm/models/*.py


def test_ssm() -> None:
    n, h, dh, groups, ds = 2, 4, 8, 2, 64
    x = normal(n, 1, h, dh, seed=22, dtype=mx.bfloat16)
    A_log, D = normal(h, seed=23), normal(h, seed=24)
    B, C = (normal(n, 1, groups, ds, seed=s, dtype=mx.bfloat16) for s in (25, 26))
    dt, dt_bias = normal(n, 1, h, seed=27), normal(h, seed=28)
    state = normal(n, h, dh, ds, seed=29)
    out, new = load("models.ssm").ssm_update_kernel(x, A_log, B, C, D, dt, dt_bias, state, (0.001, 100.0))
    step = mx.clip(nn.softplus(dt + dt_bias), 0.001, 100.0).reshape(n, h, 1, 1)
    u = x.astype(mx.float32).reshape(n, h, dh, 1)
    B, C = (mx.repeat(y.astype(mx.float32).reshape(n, groups, 1, ds), h // groups, 1) for y in (B, C))
    want = mx.exp(-mx.exp(A_log).reshape(1, h, 1, 1) * step) * state + u * step * B
    agree(new, want)
    agree(out.reshape(n, h, dh), (want * C).sum(-1) + u[..., 0] * D[None, :, None])


def test_wkv7() -> None:
    B, T, H, D = 1, 3, 2, 32
    r, w, k, v, a, b = (normal(B, T, H, D, seed=30 + i, scale=0.3) for i in range(6))
    state = normal(B, H, D, D, seed=36)
    y, new = load("models.rwkv7").wkv7_kernel(r, w, k, v, a, b, state)
    outputs = []
    for t in range(T):
        sa = (state * a[:, t, :, None, :]).sum(-1, keepdims=True)
        state = (
            state * w[:, t, :, None, :] + v[:, t, ..., None] * k[:, t, :, None, :] + sa * b[:, t, :, None, :]
        )
        outputs.append((state * r[:, t, :, None, :]).sum(-1))
    agree(y, mx.stack(outputs, 1))
    agree(new, state)


def test_attention_residual_mix() -> None:
    K, N, D = 3, 4, 600
    module = load("models.kimi_k3")
    raw, partial = (
        normal(K, N, D, seed=40, dtype=mx.bfloat16),
        normal(N, D, seed=41, dtype=mx.bfloat16),
    )
    w = normal(D, seed=42, scale=0.1)
    inv_rms = mx.rsqrt(mx.mean(raw.astype(mx.float32) ** 2, -1) + 1e-5)
    (got,) = module._attn_res_kernel(
        inputs=[raw, inv_rms, partial, w, mx.array([1e-5]), N],
        template=[("InT", mx.bfloat16), ("K", K), ("D", D), ("THREADS", 512)],
        grid=(512, N, 1),
        threadgroup=(512, 1, 1),
        output_shapes=[(N, D)],
        output_dtypes=[mx.bfloat16],
    )
    rows = mx.concatenate([raw, partial[None]]).astype(mx.float32)
    weights = mx.softmax((rms(rows, 1e-5) * w).sum(-1), axis=0)
    agree(got, (weights[..., None] * rows).sum(0))


def test_sinkhorn() -> None:
    HC, ITERS = 4, 5
    comb = mx.random.uniform(0.1, 1.0, (7, HC, HC), key=mx.random.key(43))
    (got,) = load("models.deepseek_v41")._sinkhorn_kernel(
        inputs=[comb, mx.array([1e-6])],
        template=[("HC", HC), ("ITERS", ITERS)],
        grid=(7, 1, 1),
        threadgroup=(7, 1, 1),
        output_shapes=[comb.shape],
        output_dtypes=[mx.float32],
    )
    want = comb / (comb.sum(-2, keepdims=True) + 1e-6)
    for _ in range(ITERS - 1):
        want = want / (want.sum(-1, keepdims=True) + 1e-6)
        want = want / (want.sum(-2, keepdims=True) + 1e-6)
    agree(got, want)


@pytest.mark.parametrize("invert", [False, True])
def test_bitlinear(invert: bool) -> None:
    rows, inner, outer = 3, 160, 24
    layer = load("models.bitlinear_layers").BitLinear(inner, outer, bias=False, invert_weight_scales=invert)
    layer.weight_scale = mx.array([1.7], mx.bfloat16)
    ternary = mx.random.randint(-1, 2, (outer, inner), key=mx.random.key(44))
    packed = (ternary + 1).reshape(4, outer // 4, inner).astype(mx.uint8)
    layer.weight = packed[0] | packed[1] << 2 | packed[2] << 4 | packed[3] << 6
    x = normal(rows, inner, seed=45, dtype=mx.bfloat16)
    scale = layer.weight_scale.astype(mx.float32)
    want = x.astype(mx.float32) @ ternary.astype(mx.float32).T * (1 / scale if invert else scale)
    agree(layer.execute_matmul_kernel(x, layer.weight), want)
