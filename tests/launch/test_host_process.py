"""Workers: one per launching thread, none left behind, and a cache that many may use at once."""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import mlx.core as mx
import pytest

from lily_mlx.launch import host
from lily_mlx.launch.hostrt import compiler, process

SCALE = """
uint i = thread_position_in_grid.x;
out[i] = simd_sum(a[i]) * k[0];"""


def scale(factor, **options):
    kernel = host.metal_kernel("scale", ["a", "k"], ["out"], SCALE)
    return kernel(
        inputs=[mx.ones((256,)), mx.array([factor])],
        grid=(256, 1, 1),
        threadgroup=(64, 1, 1),
        output_shapes=[(256,)],
        output_dtypes=[mx.float32],
        **options,
    )[0]


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    if sys.platform == "linux":
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rsplit(")", 1)[1].split()[0] != "Z"
    return True


def wait_until(condition, seconds=10.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)


def worker_pid():
    return process.thread_worker().process_id


def test_threads_launch_at_the_same_time():
    start = threading.Barrier(4)

    def work(n):
        start.wait()
        outs = [scale(float(n * 10 + k), check=k % 2 == 0)[0].item() for k in range(20)]
        return worker_pid(), outs

    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(work, range(4)))
    assert len({pid for pid, _ in results}) == 4
    for n, (_, outs) in enumerate(results):
        assert outs == [32.0 * (n * 10 + k) for k in range(20)]


def test_a_fault_in_one_thread_leaves_the_others_alone():
    bad = host.metal_kernel("bad", ["a"], ["out"], "out[thread_position_in_grid.x + 1] = a[0];")

    def crash():
        with pytest.raises(host.OutOfBounds):
            bad(
                inputs=[mx.ones((8,))],
                grid=(8, 1, 1),
                threadgroup=(8, 1, 1),
                output_shapes=[(8,)],
                output_dtypes=[mx.float32],
            )

    with ThreadPoolExecutor(2) as pool:
        crashes = pool.submit(lambda: [crash() for _ in range(5)])
        fine = pool.submit(lambda: [scale(float(k))[0].item() for k in range(30)])
        crashes.result()
        assert fine.result() == [32.0 * k for k in range(30)]


def test_a_thread_takes_its_worker_with_it():
    pids = []
    thread = threading.Thread(target=lambda: (scale(1.0), pids.append(worker_pid())))
    thread.start()
    thread.join()
    wait_until(lambda: not alive(pids[0]))


def test_a_killed_worker_is_replaced():
    scale(1.0)
    before = worker_pid()
    os.kill(before, signal.SIGKILL)
    wait_until(lambda: not alive(before))
    assert scale(3.0)[0].item() == 96.0
    assert worker_pid() != before


PARENT = """
import sys, threading, time
import mlx.core as mx
from lily_mlx.launch import host
from lily_mlx.launch.hostrt import process
kernel = host.metal_kernel("spin", ["a"], ["out"], sys.argv[1])
def call():
    kernel(inputs=[mx.ones((8,))], grid=(8, 1, 1), threadgroup=(8, 1, 1),
           output_shapes=[(8,)], output_dtypes=[mx.float32], check=False)
def tell(worker):
    while worker.process_id is None:  # the kernel is being compiled
        time.sleep(0.05)
    time.sleep(0.5)
    print(worker.process_id, flush=True)
def work():
    threading.Thread(target=tell, args=(process.thread_worker(),)).start()
    call()
    time.sleep(60)
threading.Thread(target=work).start()
"""


@pytest.mark.parametrize("body", ["out[thread_position_in_grid.x] = a[0];", "while (true) { }"])
def test_workers_end_when_the_parent_is_killed(body):
    parent = subprocess.Popen([sys.executable, "-c", PARENT, body], stdout=subprocess.PIPE, text=True)
    try:
        worker = int(parent.stdout.readline())
        assert alive(worker)
    finally:
        parent.kill()
        parent.wait()
        parent.stdout.close()
    wait_until(lambda: not alive(worker))


FORK = """
import os, sys
import mlx.core as mx
from lily_mlx.launch import host
kernel = host.metal_kernel("twice", ["a"], ["out"], "out[thread_position_in_grid.x] = 2 * a[0];")
def call(x):
    return kernel(inputs=[mx.full((8,), x)], grid=(8, 1, 1), threadgroup=(8, 1, 1),
                  output_shapes=[(8,)], output_dtypes=[mx.float32])[0]
from lily_mlx.launch.hostrt.process import thread_worker
call(1.0)
mine = thread_worker().process_id
child = os.fork()
if child == 0:
    os._exit(0 if thread_worker().process_id != mine else 3)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert call(4.0)[0].item() == 8.0 and thread_worker().process_id == mine
"""


def test_a_forked_child_gets_its_own_worker():
    subprocess.run([sys.executable, "-c", FORK], check=True, timeout=60)


FRESH = (
    "import mlx.core as mx\nfrom lily_mlx.launch import host\n"
    "k = host.metal_kernel('fresh', ['a'], ['out'], 'out[thread_position_in_grid.x] = a[0] + 1;')\n"
    "print(k(inputs=[mx.ones((8,))], grid=(8, 1, 1), threadgroup=(8, 1, 1), output_shapes=[(8,)],"
    " output_dtypes=[mx.float32])[0].tolist())\n"
)


def test_processes_share_the_cache(tmp_path):
    """Three processes compile the same kernel into one empty cache at once."""
    environment = {**os.environ, "LILY_CACHE_DIR": str(tmp_path)}
    running = [
        subprocess.Popen([sys.executable, "-c", FRESH], env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    assert [p.communicate(timeout=120)[0].strip() for p in running] == [str([2.0] * 8)] * 3
    assert not list((tmp_path / "host").glob("build-*"))
    assert len(list((tmp_path / "host").glob("*.so"))) == 2  # the worker and the kernel


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """A cache with what FRESH compiles, which a test leaves as it was."""
    folder = tmp_path_factory.mktemp("compiled")
    assert run_in(folder, FRESH) == str([2.0] * 8)
    return folder


def run_in(cache, program):
    """What a program prints that has ``cache`` for its cache."""
    environment = {**os.environ, "LILY_CACHE_DIR": str(cache)}
    run = [sys.executable, "-c", program]
    return subprocess.run(run, env=environment, stdout=subprocess.PIPE, text=True, timeout=120).stdout.strip()


@pytest.mark.parametrize("damage", [lambda old: b"", lambda old: b"junk" * 99, lambda old: old[:1000]])
def test_a_damaged_library_in_the_cache_is_made_again(compiled, damage):
    """Each of the two at a time, the worker and the kernel."""
    made = sorted((compiled / "host").glob("*.so"))
    assert len(made) == 2
    for path in made:
        size = path.stat().st_size
        path.write_bytes(damage(path.read_bytes()))
        assert run_in(compiled, FRESH) == str([2.0] * 8)
        assert path.stat().st_size == size


def test_a_damaged_precompiled_header_in_the_cache_is_made_again(compiled, tmp_path):
    shutil.copytree(compiled, tmp_path, dirs_exist_ok=True)
    kept = [path for path in (tmp_path / "host").glob("*") if path.suffix in (".h", ".pch")]
    assert len(kept) == 2
    for path in kept:
        content = path.read_bytes()
        middle = len(content) // 2
        path.write_bytes(content[:middle] + bytes([content[middle] ^ 255]) + content[middle + 1 :])
    assert run_in(tmp_path, FRESH.replace("+ 1", "+ 2")) == str([3.0] * 8)
    for path in kept:
        digest = path.with_name(f"{path.name}.sha256").read_text()
        assert hashlib.sha256(path.read_bytes()).hexdigest() == digest


def test_a_library_that_cannot_be_loaded_is_named(tmp_path):
    path = tmp_path / "kernel.so"
    path.write_bytes(b"junk")
    with pytest.raises(process.LoadError, match=str(path)):
        process.Worker().load(path)


def test_without_a_compiler_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr(compiler.shutil, "which", lambda *args, **kwargs: None)
    compiler.find_compiler.cache_clear()
    try:
        with pytest.raises(Exception, match=r"clang 18 or newer, or the one of `pip install ziglang`"):
            compiler.find_compiler()
    finally:
        compiler.find_compiler.cache_clear()


def test_line_table_follows_the_loc_directives():
    assembly = (
        '\t.file\t1 "/folder" "scan.metal"\n\t.file\t2 "scan.h"\nf:\n\t.loc\t1 7 3 prologue_end\n\tnop\n'
        "\t.loc\t2 0 0\n\tnop\n\t.loc\t2 9 1\n\tret\n"
    )
    table = compiler.add_tables(assembly)
    assert all(table.count(f"lily_code{n}:") == 1 for n in range(3))
    assert "lily_code3" not in table
    assert '.asciz "scan.metal"\n\t.asciz "scan.h"' in table
    # File, line and column; line 0 has the line before it, and no column.
    assert ".long 0\n\t.long 7\n\t.long 3\n" in table
    assert ".long 0\n\t.long 7\n\t.long 0\n" in table
    assert ".long 1\n\t.long 9\n\t.long 1\n" in table


def cpu_seconds(process_id):
    """User and system time of a process; the time of day where /proc does not say."""
    try:
        fields = Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return time.perf_counter()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_simd_reductions_per_second():
    """One core does a million simdgroup reductions a second.

    Of several rounds the best counts, and of each the worker's own time: others may want the core too.
    """
    n, groups, launches, rounds = 400, 256, 4, 5
    kernel = host.metal_kernel(
        "speed",
        ["a"],
        ["out"],
        f"float s = a[0];\nfor (int k = 0; k < {n}; ++k) s = simd_sum(s) * 0.03125f;\n"
        "out[thread_position_in_grid.x] = s;",
    )

    def launch():
        kernel(
            inputs=[mx.ones((8,))],
            grid=(groups * 32, 1, 1),
            threadgroup=(256, 1, 1),
            output_shapes=[(groups * 32,)],
            output_dtypes=[mx.float32],
            check=False,
        )

    launch()
    worker = process.thread_worker().process_id
    times = []
    for _ in range(rounds):
        start = cpu_seconds(worker)
        for _ in range(launches):
            launch()
        times.append(cpu_seconds(worker) - start)
    rate = n * groups * launches / min(times)
    print(f"{rate / 1e6:.2f} M simdgroup reductions/s")
    assert rate >= 1e6
