"""Joined matrices: one array for a launch, and the modules' own parameters as before."""

from __future__ import annotations

import copy
import gc

import mlx.core as mx
import numpy as np
import pytest
from mlx import nn
from mlx.utils import tree_flatten
from mlx_lm.models.switch_layers import QuantizedSwitchLinear

from lily_mlx.layers import fusion
from lily_mlx.layers.fusion import join, why_apart
from lily_mlx.layers.projection import project
from lily_mlx.ops.packed import Packed


def linear(rows: int, columns: int = 64, bits: int = 4, group_size: int = 32) -> nn.QuantizedLinear:
    layer = nn.QuantizedLinear(columns, rows, bias=False, bits=bits, group_size=group_size)
    mx.eval(layer.parameters())
    return layer


def switch(experts: int, rows: int, columns: int = 64) -> QuantizedSwitchLinear:
    layer = QuantizedSwitchLinear(columns, rows, experts, bias=False, group_size=32, bits=4)
    mx.eval(layer.parameters())
    return layer


def snapshot(modules) -> list[list[list[float]]]:
    return [getattr(m, part).astype(mx.float32).tolist() for m in modules for part in fusion._PARTS]


def test_rows_follow_one_another_and_modules_keep_theirs():
    modules = [linear(5), linear(3), linear(9)]
    before = snapshot(modules)
    packed = join(modules)
    assert packed.rows == 17
    assert snapshot(modules) == before
    want = mx.concatenate([Packed.of(m).dequantised() for m in modules])
    assert mx.array_equal(packed.dequantised(), want)
    x = mx.random.normal((1, 1, 64))
    want = mx.concatenate([m(x) for m in modules], axis=-1)
    assert mx.allclose((packed.dequantised() @ x[0, 0]), want[0, 0], atol=1e-4)


def test_a_matrix_among_experts_is_one_expert_more():
    gate, shared_gate, up, shared_up = switch(6, 8), linear(8), switch(6, 8), linear(8)
    before = snapshot([gate, shared_gate, up, shared_up])
    packed = join([gate, shared_gate, up, shared_up])
    assert packed.weight.shape[:2] == (14, 8)
    assert snapshot([gate, shared_gate, up, shared_up]) == before
    assert shared_up.weight.ndim == 2
    assert mx.array_equal(packed.weight[13], shared_up.weight)
    assert mx.array_equal(packed.scales[7:13], up.scales)


def test_it_is_done_once_and_found_again_also_by_a_copy_of_the_modules():
    modules = [linear(5), linear(3)]
    packed = join(modules)
    assert join(modules) is packed
    arrays = dict(tree_flatten([m.parameters() for m in modules])).values()
    assert join(copy.deepcopy(modules, {id(a): a for a in arrays})) is packed


@pytest.mark.parametrize("part", fusion._PARTS)
@pytest.mark.parametrize("which", [0, 1])
def test_a_replaced_parameter_is_not_overlooked(part, which):
    modules = [linear(5), linear(3)]
    packed = join(modules)
    modules[which].update({part: getattr(modules[which], part) + 1})
    again = join(modules)
    assert again is not packed
    want = mx.concatenate([getattr(m, part) for m in modules])
    assert mx.array_equal(getattr(again, part), want)


def test_nothing_is_kept_twice_and_nothing_stays_behind():
    gc.collect()  # of what tests before have left
    known = set(fusion._joined)
    modules = [linear(512, 1024), linear(512, 1024)]
    before = mx.get_active_memory()
    join(modules)
    gc.collect()
    # On the CPU small allocations are padded, so allow a page for each array.
    assert mx.get_active_memory() <= before + 3 * 16384
    del modules
    gc.collect()
    assert mx.get_active_memory() <= before - 2 * 512 * 1024 // 2
    assert set(fusion._joined) == known


def test_saved_weights_are_the_modules_own(tmp_path):
    class Holder(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = linear(5), linear(3)

    holder = Holder()
    want = {name: array.astype(mx.float32).tolist() for name, array in tree_flatten(holder.parameters())}
    join([holder.a, holder.b])
    path = str(tmp_path / "weights.safetensors")
    holder.save_weights(path)
    loaded = mx.load(path)
    assert {name: array.astype(mx.float32).tolist() for name, array in loaded.items()} == want


@pytest.mark.parametrize("rows", [1, 3, 8])
def test_the_buffer_has_the_three_parts_each_at_a_multiple_of_16_bytes(rows):
    """Three groups of float16 a row: scales that fill no whole words."""
    module = linear(rows, columns=96)
    module.set_dtype(mx.float16)
    want = [np.array(getattr(module, part)).tobytes() for part in fusion._PARTS]
    raw = np.array(join([module]).buffer).tobytes()
    start = 0
    for part in want:
        assert raw[start : start + len(part)] == part
        start += -(-len(part) // 16) * 16
    assert len(raw) == start
    assert [np.array(getattr(module, part)).tobytes() for part in fusion._PARTS] == want


@pytest.mark.parametrize(
    ("modules", "reason"),
    [
        ([linear(4), linear(4, bits=8)], "bits: 4, 8"),
        ([linear(4), linear(4, group_size=64)], "group size: 32, 64"),
        ([linear(4), linear(4, columns=96)], "columns: 64, 96"),
        ([switch(3, 8), linear(4)], "rows: 4, 8"),
    ],
    ids=["bits", "group", "columns", "rows"],
)
def test_what_differs_stays_apart(modules, reason):
    assert join(modules) is None
    assert reason in why_apart([Packed.of(m) for m in modules])


def test_projections_that_cannot_be_joined_are_multiplied_one_by_one():
    modules = [linear(4), linear(6, bits=8)]
    x = mx.random.normal((1, 1, 64))
    want = mx.concatenate([m(x) for m in modules], axis=-1)
    assert mx.array_equal(project(x, modules), want)
