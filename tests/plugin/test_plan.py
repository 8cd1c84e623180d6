"""`lily-mlx explain` says what the layers do: its decisions against the kernels that a real step launches."""

import platform
from pathlib import Path

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache

from lily_mlx.checkpoint import read_checkpoint
from lily_mlx.cli import main
from lily_mlx.counters import counts
from lily_mlx.launch import backend
from lily_mlx.launch.kernel import all_kernels
from lily_mlx.ops import choice, gated_delta_scan
from lily_mlx.plan import plan
from lily_mlx.settings import OPS
from tests.conftest import TINY

SECOND_KERNELS = {"attention_combine", "expert_choose", "expert_scatter"}
"""Parts of attention_decode and expert_route, no ops of their own."""

PRODUCTS = {"qmm", "expert_gemm_gate_up", "expert_gemm_down"}


@pytest.fixture
def chip(monkeypatch):
    """Makes this machine look like a Mac with a chip and a macOS."""

    def look_like(architecture, macos):
        monkeypatch.setattr(mx.metal, "is_available", lambda: True)
        monkeypatch.setattr(mx, "device_info", lambda *_: {"architecture": architecture})
        monkeypatch.setattr(platform, "mac_ver", lambda: (macos, ("", "", ""), "arm64"))
        monkeypatch.setattr(backend, "_wheel_macos", lambda: 26)
        monkeypatch.setattr(choice, "distrust", lambda op, backend: None)
        backend.neural_accelerators.cache_clear()

    with backend.override("metal"):
        yield look_like
    backend.neural_accelerators.cache_clear()


@pytest.mark.parametrize("disabled", ["", "expert_gemm_down", "expert_route"])
def test_plan_is_what_runs(lily, monkeypatch, disabled):
    """Also where one op off takes others along (the grouped products), or does not (the routing)."""
    monkeypatch.setenv("LILY_BACKEND", "host")
    monkeypatch.setenv("LILY_DISABLE", disabled)
    model, _ = lily
    planned = [op for op in plan(read_checkpoint(TINY), "host") if op.path == "host"]
    for phase, tokens in (("prefill", [[1, 2, 3]]), ("decode", [[4]])):
        if phase == "prefill":
            cache = make_prompt_cache(model)
        counts.clear()
        mx.eval(model(mx.array(tokens), cache=cache))
        ran = {name.removeprefix("op.") for name in counts if name.startswith("op.")}
        ran.discard("attention_combine")  # attention's second pass, not an op of its own in the plan
        assert {op.why.removeprefix("kernel ") for op in planned if op.phase == phase} == ran


def test_a_switched_off_op_is_named(monkeypatch):
    monkeypatch.setenv("LILY_DISABLE", "expert_down")
    found = {op.op: op for op in plan(read_checkpoint(TINY), "host") if op.phase == "decode"}
    assert found["expert down"].path == "stock"
    assert "LILY_DISABLE names expert_down" in found["expert down"].why


def test_reasons_come_from_the_shapes(monkeypatch):
    monkeypatch.setenv("LILY_BACKEND", "host")
    checkpoint = read_checkpoint(TINY)
    checkpoint.config["quantization"] = {"mode": "mxfp4", "bits": 4, "group_size": 32}
    found = {op.op: op for op in plan(checkpoint, "host") if op.phase == "decode"}
    assert "mxfp4" in found["DeltaNet projections"].why
    assert found["attention"].path == "host"


def test_a_stock_kernel_that_the_table_takes_is_named(chip, monkeypatch):
    chip("applegpu_g16s", "26.2")
    monkeypatch.setattr(gated_delta_scan, "stock_kernel", lambda op, chip, **_: "mlx-lm")
    found = {op.op: op for op in plan(read_checkpoint(TINY), "metal") if op.phase == "prefill"}
    assert found["DeltaNet recurrence"].path == "stock"
    assert "the tile table takes mlx-lm" in found["DeltaNet recurrence"].why


def test_a_tokens_block_with_a_wider_shared_expert_is_stocks_as_a_whole(monkeypatch):
    monkeypatch.setenv("LILY_BACKEND", "host")
    checkpoint = read_checkpoint(TINY)
    checkpoint.config["text_config"]["shared_expert_intermediate_size"] *= 2
    found = {op.op: op for op in plan(checkpoint, "host") if op.phase == "decode"}
    for op in ("router", "routing, gate and up", "expert down"):
        assert found[op].path == "stock"
        assert "the matrices differ in" in found[op].why
    assert found["output head"].path == "host"


@pytest.mark.parametrize("architecture", ["applegpu_g17s", "applegpu_g18p"])
def test_neural_accelerators_keep_stocks_products(chip, architecture):
    chip(architecture, "26.2")
    found = list(plan(read_checkpoint(TINY), "metal"))
    by_op = {op.op: op for op in found if op.phase == "prefill"}
    for op in ("DeltaNet projections", "attention projections", "experts' gate and up", "experts' down"):
        assert by_op[op].path == "stock"
        assert "neural accelerators" in by_op[op].why
    for op in ("routing", "experts' sum"):  # needed by those products only
        assert by_op[op].path == "stock"
    running = {op.why.removeprefix("kernel ") for op in found if op.path == "metal"}
    assert {"gated_delta_scan", "qmv", "expert_gate_up", "expert_down"} <= running
    assert not running & PRODUCTS


@pytest.mark.parametrize(
    ("architecture", "macos"),
    [("applegpu_g16s", "26.2"), ("applegpu_g17p", "26.2"), ("applegpu_g17s", "26.1")],
)
def test_without_neural_accelerators_the_products_are_ours(chip, architecture, macos):
    chip(architecture, macos)
    running = {op.why.removeprefix("kernel ") for op in plan(read_checkpoint(TINY), "metal")}
    assert running >= PRODUCTS | {"expert_route", "expert_combine"}


@pytest.mark.parametrize("op", ["expert_gemm_gate_up", "expert_gemm_down"])
def test_a_block_with_a_product_off_is_stocks_as_a_whole(monkeypatch, op):
    monkeypatch.setenv("LILY_BACKEND", "host")
    monkeypatch.setenv("LILY_DISABLE", op)
    found = [op for op in plan(read_checkpoint(TINY), "host") if op.phase == "prefill"]
    block = [op for op in found if op.op.startswith("experts'") or op.op in ("router", "routing")]
    assert len(block) == 5
    for row in block:
        assert row.path == "stock"
        assert f"LILY_DISABLE names {op}" in row.why


def test_a_block_whose_routing_is_not_trusted_is_stocks_as_a_whole(monkeypatch):
    """Stock's block routes on the GPU; ours would read every layer's logits on the CPU."""
    monkeypatch.setenv("LILY_BACKEND", "host")
    failed = "failed its self-check on this GPU: y is wrong"
    monkeypatch.setattr(choice, "distrust", lambda op, backend: failed if op == "expert_route" else None)
    found = [op for op in plan(read_checkpoint(TINY), "host") if op.phase == "prefill"]
    block = [op for op in found if op.op.startswith("experts'") or op.op in ("router", "routing")]
    assert len(block) == 5
    for row in block:
        assert row.path == "stock"
        assert failed in row.why


def test_every_op_can_be_named(monkeypatch):
    monkeypatch.setenv("LILY_BACKEND", "host")
    assert set(OPS) == {kernel.stem for kernel in all_kernels()} - SECOND_KERNELS
    planned = {op.why.removeprefix("kernel ") for op in plan(read_checkpoint(TINY), "host")}
    assert set(OPS) <= planned


def test_help_and_readme_name_every_op(capsys):
    with pytest.raises(SystemExit):
        main(["explain", "--help"])
    shown = "".join(capsys.readouterr().out.split())  # argparse breaks lines at will
    assert f"{','.join(OPS)}." in shown
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    (row,) = (line for line in readme.splitlines() if line.startswith("| `LILY_DISABLE` |"))
    assert row.endswith(f"{', '.join(f'`{op}`' for op in OPS)} |")
