"""A LoRA adapter changes Lily's output exactly as it changes stock's."""

import json

import mlx.core as mx
import mlx_lm
from mlx.utils import tree_flatten
from mlx_lm.tuner.utils import linear_to_lora_layers

import lily_mlx
from tests.conftest import TINY

LORA = {"rank": 4, "scale": 8.0, "dropout": 0.0}
LAYERS = 4  # the last four: one of them full attention


def save_random_adapter(path):
    model, _ = mlx_lm.load(str(TINY), lazy=True)
    model.freeze()
    linear_to_lora_layers(model, LAYERS, LORA)
    mx.random.seed(7)
    weights = {
        name: mx.random.normal(value.shape, scale=0.02)
        for name, value in tree_flatten(model.trainable_parameters())
    }
    assert any(name.endswith("lora_b") for name in weights)
    path.mkdir()
    mx.save_safetensors(str(path / "adapters.safetensors"), weights)
    config = {"fine_tune_type": "lora", "num_layers": LAYERS, "lora_parameters": LORA}
    (path / "adapter_config.json").write_text(json.dumps(config))


def test_adapter_changes_both_engines_alike(stock, lily, tmp_path, same):
    adapter = tmp_path / "adapter"
    save_random_adapter(adapter)
    tokens = mx.array([[21, 22, 23, 24, 25]])
    plain = lily[0](tokens)
    expected = mlx_lm.load(str(TINY), adapter_path=str(adapter))[0](tokens)
    adapted, _ = lily_mlx.load(TINY, adapter_path=str(adapter))
    assert type(adapted) is type(lily[0])
    actual = adapted(tokens)
    same(actual, expected)
    assert mx.any(actual != plain).item()
