"""Stock's shard() works on Lily's class: two processes, each with half of the heads and experts."""

import json
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.generate import generate_step
from mlx_lm.models import qwen3_5_moe

from tests.conftest import TINY
from tests.plugin.test_cases import small_moe
from tests.plugin.test_server import free_port


def test_tensor_parallel_ring_gives_the_same_tokens(tmp_path):
    mx.random.seed(5)
    config = small_moe()
    model = qwen3_5_moe.Model(qwen3_5_moe.ModelArgs.from_dict(config))
    mx.save_safetensors(str(tmp_path / "model.safetensors"), dict(tree_flatten(model.parameters())))
    (tmp_path / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((TINY / name).read_bytes())
    expected = [int(token) for token, _ in generate_step(mx.array([3, 1, 4, 1, 5]), model, max_tokens=8)]

    launch = Path(sys.executable).parent / "mlx.launch"
    words = [launch, "-n", "2", "--backend", "ring", "--starting-port", str(free_port())]
    script = [sys.executable, "-m", "tests.plugin.sharded", str(tmp_path)]
    result = subprocess.run(
        [*words, *script],
        cwd=TINY.parents[1],
        capture_output=True,
        text=True,
        timeout=120,
        stdin=subprocess.DEVNULL,
    )
    assert f"ranks=2 tokens={expected}" in result.stdout, result.stdout + result.stderr
