"""Run by test_distributed: load a checkpoint sharded over the processes and print greedy tokens on rank 0."""

import sys

import mlx.core as mx
from mlx_lm.generate import generate_step
from mlx_lm.utils import sharded_load

import lily_mlx

lily_mlx.register()
group = mx.distributed.init(strict=True, backend="ring")
model, _ = sharded_load(sys.argv[1], tensor_group=group)
assert type(model).__module__.startswith("lily_mlx.")
tokens = [int(token) for token, _ in generate_step(mx.array([3, 1, 4, 1, 5]), model, max_tokens=8)]
if group.rank() == 0:
    print(f"ranks={group.size()} tokens={tokens}", flush=True)
