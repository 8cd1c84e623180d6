"""A model of any shape with random weights, quantised as its checkpoint would be, without a download.

Quantised matrices are made as they are stored (words, scales, biases), so that the unquantised matrix never
exists and 20 GB take seconds on a GPU. Magnitudes are those of a trained network: products keep the size of
their input, what a layer adds to the residual stream shrinks with depth, and the DeltaNet's decay rates are
drawn as for training.
"""

from __future__ import annotations

import importlib
import json
import math
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten

from lily_mlx.checkpoint import check_supported
from lily_mlx.errors import UsageError

CONFIGS = Path(__file__).parent / "configs"


def read_config(name: str) -> dict[str, Any]:
    """A model's config by built-in name (``qwen3.6-35b-a3b``) or by the path of a ``config.json``.

    Raises:
        UsageError: it is neither, or Lily has no class for it.
    """
    path = CONFIGS / f"{name}.json"
    if not path.is_file():
        path = Path(name).expanduser()
        path = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError:
        known = ", ".join(sorted(file.stem for file in CONFIGS.glob("*.json")))
        raise UsageError(
            f"--random-weights is {name!r}; it must be a config.json, a folder with one, or one of: {known}"
        ) from None
    except ValueError as error:
        raise UsageError(f"{path} is not JSON: {error}") from None
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise UsageError(f"{path} has no model_type; it must be a model's config")
    check_supported(config, path)
    return config


def build(config: dict[str, Any], seed: int = 0) -> nn.Module:
    """Stock's model for a config, with random weights in bfloat16 or quantised; evaluated.

    Args:
        config: as :func:`read_config` returns it; quantised where ``quantization`` says so.
        seed: of the weights.

    Returns:
        An ``mlx_lm`` model. Equal configs and seeds give equal bytes on one device.
    """
    stock = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
    model: nn.Module = stock.Model(stock.ModelArgs.from_dict(config))
    quantization = config.get("quantization")
    if quantization:
        _quantize(model, quantization)
    mx.random.seed(seed)
    depth = len(model.layers)
    weights: dict[str, mx.array] = {}
    for path, module in model.named_modules():
        own = {k: v for k, v in tree_flatten(module.parameters()) if isinstance(module.get(k), mx.array)}
        for name, value in _random(path, module, own, depth).items():
            weights[f"{path}.{name}" if path else name] = value
    model.update(tree_unflatten(list(weights.items())))
    # One tensor at a time: a single graph of all would hold the random words and their sources at once.
    for value in weights.values():
        mx.eval(value)
    model.eval()
    return model


def _quantize(model: nn.Module, quantization: dict[str, Any]) -> None:
    """Give the model quantised layers. MLX is lazy: their contents are replaced before they are computed."""
    rule = model.quant_predicate

    def predicate(path: str, module: nn.Module) -> Any:
        if path in quantization:
            return quantization[path]
        if not hasattr(module, "to_quantized") or module.weight.shape[-1] % quantization["group_size"]:
            return False
        return rule(path, module) if rule else True

    nn.quantize(
        model,
        quantization["group_size"],
        quantization["bits"],
        mode=quantization.get("mode", "affine"),
        class_predicate=predicate,
    )


def _random(path: str, module: nn.Module, own: dict[str, mx.array], depth: int) -> dict[str, mx.array]:
    """Random values for a module's own arrays, by name."""
    gain = _gain(path, depth)
    if "scales" in own:
        return _quantized(module, own, gain)
    values = {}
    for name, value in own.items():
        if name == "A_log":
            values[name] = mx.log(mx.random.uniform(1, 16, value.shape))
        elif name == "dt_bias":  # softplus(dt_bias) is a time step between 0.001 and 0.1
            step = mx.exp(mx.random.uniform(math.log(1e-3), math.log(1e-1), value.shape))
            values[name] = (step + mx.log(-mx.expm1(-step))).astype(mx.bfloat16)
        elif value.ndim == 1:
            values[name] = mx.random.uniform(0.8, 1.2, value.shape).astype(mx.bfloat16)
        else:
            fan_in = (
                value.shape[-1] if value.shape[-1] > 1 else math.prod(value.shape[1:])
            )  # conv1d: [C, K, 1]
            values[name] = (gain * fan_in**-0.5 * mx.random.normal(value.shape)).astype(mx.bfloat16)
    return values


def _gain(path: str, depth: int) -> float:
    """How much larger than its input's size a matrix makes its output."""
    if path.endswith(("o_proj", "out_proj", "down_proj")):
        return float((2 * depth) ** -0.5)
    if path.endswith("mlp.gate"):
        return 2.0  # a router that prefers some experts clearly
    return 1.0


def _quantized(module: nn.Module, own: dict[str, mx.array], gain: float) -> dict[str, mx.array]:
    if module.mode != "affine" or "biases" not in own:
        raise UsageError(f"quantization mode is {module.mode!r}; random weights are made for 'affine' only")
    levels = 2**module.bits
    inputs = own["scales"].shape[-1] * module.group_size
    # Codes are uniform in 0 .. levels-1; an embedding's rows are inputs themselves, of size 1.
    size = 1.0 if isinstance(module, nn.QuantizedEmbedding) else gain * inputs**-0.5
    step = size / math.sqrt((levels**2 - 1) / 12)
    scales = (step * mx.random.uniform(0.7, 1.3, own["scales"].shape)).astype(mx.bfloat16)
    return {
        "weight": _random_words(own["weight"].shape),
        "scales": scales,
        "biases": (scales.astype(mx.float32) * (-(levels - 1) / 2)).astype(mx.bfloat16),
    }


def _random_words(shape: tuple[int, ...]) -> mx.array:
    """Random uint32; by halves, because MLX makes integers from floats of 24 bits."""
    halves = mx.random.randint(0, 1 << 16, (*shape[:-1], 2 * shape[-1]), dtype=mx.uint16)
    return halves.view(mx.uint32)
