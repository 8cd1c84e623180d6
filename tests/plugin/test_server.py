"""mlx_lm.server --engine lily, asked by the real openai client: one process, and two in a ring."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import openai
import pytest

from tests.conftest import TINY

BIN = Path(sys.executable).parent
QUESTION = "Complete this function: def add(a, b):"


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


@contextlib.contextmanager
def server(log, *launcher, options=(), backend="auto"):
    """Run mlx_lm.server for the tiny checkpoint, give its port, and end it with everything it started."""
    port = free_port()
    words = [BIN / "mlx_lm.server", "--engine", "lily", "--model", TINY, "--port", port, *options]
    with log.open("w") as output:
        process = subprocess.Popen(
            [*map(str, launcher), *map(str, words)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, "LILY_STATS": "1", "LILY_BACKEND": backend},
        )
        try:
            yield port, process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)


def ask(port, process, log, tokens=30):
    """The streamed answer to QUESTION, as a list of its pieces."""
    deadline = time.monotonic() + 90
    while True:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
            break
        except ConnectionRefusedError:
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.2)
    client = openai.OpenAI(
        base_url=f"http://127.0.0.1:{port}/v1", api_key="unused", timeout=120, max_retries=0
    )
    stream = client.chat.completions.create(
        model="default_model",
        messages=[{"role": "user", "content": QUESTION}],
        max_tokens=tokens,
        temperature=0,
        stream=True,
    )
    return [c.choices[0].delta.content for c in stream if c.choices and c.choices[0].delta.content]


@pytest.fixture(scope="module")
def answer(tmp_path_factory):
    log = tmp_path_factory.mktemp("server") / "log"
    with server(log) as (port, process):
        return ask(port, process, log)


def test_streamed_chat_completion(answer):
    assert len(answer) > 5  # it came in pieces
    assert "return a + b" in "".join(answer)


def test_a_request_by_itself_decodes_in_the_step(tmp_path):
    """Though the server's generator is that of batches."""
    log = tmp_path / "log"
    with server(log, backend="host") as (port, process):
        ask(port, process, log, tokens=5)
        process.send_signal(signal.SIGINT)
        process.wait(20)
    (stats,) = [line for line in log.read_text().splitlines() if line.startswith("lily: ")]
    ran = dict(word.split("=") for word in stats.split()[1:])
    assert int(ran["op.attention_decode"]) >= 4 * 2  # of its layers two have attention


def test_ring_of_two_gives_the_same_tokens(answer, tmp_path):
    """Each process holds half of the layers."""
    ring = (BIN / "mlx.launch", "-n", 2, "--backend", "ring", "--starting-port", free_port())
    log = tmp_path / "log"
    with server(log, *ring, options=["--pipeline"]) as (port, process):
        assert ask(port, process, log) == answer


def test_unsupported_model_ends_the_server(run_cli, tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    result = run_cli("mlx_lm.server", "--engine", "lily", "--model", tmp_path, "--port", free_port())
    assert result.returncode == 2
    assert "'llama'" in result.stderr
