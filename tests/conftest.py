"""Fixtures shared by all tests: the tiny trained checkpoint, loaded by either engine."""

import os
import subprocess
import sys
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported: tests never reach the network
os.environ["MLX_ENABLE_TF32"] = "0"  # on CUDA MLX's fp32 products are TF32 otherwise, 1e-3 off a reference

import mlx.core as mx
import numpy as np
import pytest

ROOT = Path(__file__).parents[1]
TINY = ROOT / "examples" / "tiny-qwen3_6-moe-4bit"
DATA = ROOT / "tests" / "data"


@pytest.fixture(scope="session")
def stock():
    """(model, tokenizer) of the tiny checkpoint as stock mlx-lm loads it."""
    import mlx_lm

    return mlx_lm.load(str(TINY))


@pytest.fixture(scope="session")
def lily():
    """(model, tokenizer) of the tiny checkpoint as Lily loads it."""
    import lily_mlx

    return lily_mlx.load(TINY)


@pytest.fixture(scope="session")
def reference():
    """Hugging Face's fp32 tokens [4, 192] and logits [4, 192, 4096] for the unquantised weights."""
    with np.load(DATA / "reference.npz") as file:
        return file["tokens"], file["logits"].astype(np.float32)


@pytest.fixture
def run_cli():
    """Run a command in a fresh interpreter of this environment; returns CompletedProcess with text output.

    The first word may be a console script (``mlx_lm.generate``), or ``python``.
    """

    def run(*words, env=None, stdin=None, stdout=subprocess.PIPE, timeout=300, cwd=None):
        program = sys.executable if words[0] == "python" else str(Path(sys.executable).parent / words[0])
        return subprocess.run(
            [program, *map(str, words[1:])],
            env={**os.environ, "COLUMNS": "120", **(env or {})},
            input=stdin,
            stdout=stdout,
            stderr=subprocess.PIPE,
            text=True,
            timeout=timeout,
            cwd=cwd,
        )

    return run


@pytest.fixture
def same():
    """Assert that two arrays are equal to the bit, NaN included."""

    def check(a: mx.array, b: mx.array):
        assert a.dtype == b.dtype
        assert a.shape == b.shape
        raw = {2: mx.uint16, 4: mx.uint32}[a.dtype.size]
        different = mx.sum(a.view(raw) != b.view(raw)).item()
        assert different == 0, f"{different} of {a.size} values differ"

    return check
