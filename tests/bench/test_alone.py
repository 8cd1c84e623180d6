"""bench.ops.alone, on a GPU that is made believe, and what every line of results says of the machine."""

import json
from itertools import count
from pathlib import Path

import mlx.core as mx
import pytest

import lily_mlx
from bench.ops import alone, decode_jobs, machine
from bench.ops.arrays import random_matrix
from bench.ops.cuda_driver import Function
from lily_mlx.launch import backend, cuda, kernel
from lily_mlx.ops import qmv

RESULTS = Path(__file__).parents[2] / "bench" / "results"
ABOUT = {"backend", "chip", "commit", "device", "lily_mlx", "mlx", "mlx_lm", "nax", "nax_why", "os", "python"}

# By hand: bytes of each input of the kernel, of each output, and those that count. A matrix of N rows of K
# has N K bits / 8 bytes of numbers, and N K / 64 scales and as many biases of 2 bytes.
ARGUMENTS = {
    "qmv DeltaNet in": ([4096, 14_229_504, 4096], [24_704], 14_229_504),
    "qmv attention in": ([4096, 10_616_832, 4096], [18_432], 10_616_832),
    "qmv out": ([8192, 4_718_592, 4096], [4096], 4_718_592),
    "qmv router": ([4096, 559_232, 4096], [1028], 559_232),
    "qmv head": ([4096, 286_064_640, 4096], [993_280], 286_064_640),
    # 514 matrices of 512 rows, of which 18 are read; nine times 512 numbers, an index and a weight come out
    "expert_gate_up": ([4096, 4096, 1028, 303_169_536], [18_504], 10_616_832),
    "expert_down": ([18_504, 4096, 151_584_768], [4096], 5_308_416),
    # 32 states of 128 x 128 in float32 and 3 conv inputs of 8,192 channels in and out; conv weights, A_log,
    # dt_bias and the norm's weight in
    "gated_delta_step": ([24_704, 49_152, 65_984, 2_097_152], [8192, 49_152, 2_097_152], 4_358_592),
    # one pass takes the gates too; blocks come out as 16 sums of 256, with a maximum and a total each
    "attention_decode 1024": ([16_384, 1_048_576, 1_048_576, 32, 18_432], [8192], 2_097_152),
    "attention_decode 4096": ([16_384, 4_194_304, 4_194_304, 32], [66 * 16_512], 8_388_608),
    "attention_decode 32768": ([16_384, 33_554_432, 33_554_432, 32], [132 * 16_512], 67_108_864),
    "attention_decode 131072": ([16_384, 134_217_728, 134_217_728, 32], [132 * 16_512], 268_435_456),
    "attention_combine 66": ([66 * 16_512, 18_432], [8192], 66 * 16_512),
}


@pytest.fixture
def compiled(monkeypatch, tmp_path):
    """Makes this machine look like one with an H200 whose kernels give ones; the names that are compiled."""
    names = []

    def compile_(name, text, architecture):
        names.append(name)
        return name.encode()

    def launch(*, output_shapes, output_dtypes, **_):
        return [mx.ones(*output) for output in zip(output_shapes, output_dtypes, strict=True)]

    backend.neural_accelerators()  # keeps its answer, which is to be about this machine as it is
    monkeypatch.setattr(mx.cuda, "is_available", lambda: True)
    monkeypatch.setattr(mx, "device_info", lambda *_: {"architecture": "sm_90", "device_name": "NVIDIA H200"})
    monkeypatch.setattr(mx.fast, "precompiled_cuda_kernel", launch)
    monkeypatch.setattr(cuda, "_nvcc", lambda: "nvcc")
    monkeypatch.setattr(cuda, "_compile_with_nvcc", compile_)
    monkeypatch.setenv("LILY_CACHE_DIR", str(tmp_path))
    caches = kernel._prepare, kernel._function
    for cache in caches:
        cache.cache_clear()
    yield names
    for cache in caches:
        cache.cache_clear()


class FakeDriver:
    """Counts addresses, keeps launches, and says that a run takes 1 to 7 seconds."""

    cache_bytes = 1000

    def __init__(self):
        self.addresses, self.launches, self.released = count(1), [], 0

    def allocate(self, nbytes):
        return next(self.addresses)

    def upload(self, data, copies=1):
        return [self.allocate(data.nbytes) for _ in range(copies)]

    def release(self):
        self.released += 1

    def function(self, code, name):
        assert code == name.encode()
        return Function(None, 40, 8)

    def launch(self, function, grid, block, addresses):
        self.launches.append((tuple(grid), tuple(block), addresses))

    def seconds(self, enqueue):
        enqueue()
        return [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]

    def copy_bandwidth(self):
        return 4e12


def small_job(name, value):
    """A product of 64 x 64, 2,304 bytes with scales and biases, whose result is to be ``value``."""
    matrix, x, residual = random_matrix(64, 64), mx.ones((1, 1, 64)), mx.ones((1, 1, 64))
    return decode_jobs.Job(
        name,
        "qmv",
        {"N": 64, "K": 64, "bits": 4},
        lambda tile: [qmv.qmv(x, matrix, residual=residual, tile=tile, backend="cuda")],
        lambda: [mx.full((1, 1, 64), value)],
        [matrix.in_one()],
        2304,
        decode_jobs.tiles("rows repeat ahead simdgroups", (2, 1, 1, 4)),
    )


def test_every_job_has_its_arguments():
    assert [job.name for job in decode_jobs.all_jobs()] == list(ARGUMENTS)


@pytest.mark.parametrize("job", decode_jobs.all_jobs(), ids=lambda job: job.name)
def test_arguments_and_bytes(job, compiled):
    results, launch = alone.recorded(job.op, lambda: job.call(None))
    inputs, outputs, nbytes = ARGUMENTS[job.name]
    assert [array.nbytes for array in launch.inputs] == inputs
    assert launch.output_bytes == outputs
    assert job.nbytes == nbytes
    assert {id(array) for array in job.cold} <= {id(array) for array in launch.inputs}
    # compared without broadcasting
    assert [result.shape for result in results] == [result.shape for result in job.want()]

    # the table's tile is what the op takes by itself, and each of the others is another kernel or grid
    arms = alone.arms(job, "cuda-sm_90", "all")
    launches = [alone.recorded(job.op, lambda tile=tile: job.call(tile))[1] for tile in arms]
    assert (launches[0].name, launches[0].grid) == (launch.name, launch.grid)
    assert len({(each.name, *each.grid, *each.block) for each in launches}) == len(arms) > 1
    assert alone.arms(job, "cuda-sm_90", "table") == arms[:1]


def test_kernels_are_compiled_before_their_calls(compiled, monkeypatch):
    jobs = [job for job in decode_jobs.all_jobs() if job.name in ("qmv router", "attention_decode 4096")]
    compile_ = cuda._compile_with_nvcc

    def refuse_qmv(name, text, architecture):
        code = compile_(name, text, architecture)
        if name.startswith("lily_qmv"):
            raise RuntimeError("does not compile")
        return code

    monkeypatch.setattr(cuda, "_compile_with_nvcc", refuse_qmv)
    alone.compile_together([lambda job=job: job.call(None) for job in jobs])
    stems = {name.removeprefix("lily_").rpartition("_")[0] for name in compiled}
    assert stems == {"qmv", "attention_decode", "attention_combine"}
    before = len(compiled)
    jobs[1].call(None)
    assert len(compiled) == before
    with pytest.raises(RuntimeError, match="does not compile"):
        jobs[0].call(None)


def test_what_comes_from_memory_is_read_from_every_copy_in_turn(compiled):
    driver, job = FakeDriver(), small_job("right", 1.0)
    driver.cache_bytes = 100_000
    (record,) = alone.measure(job, [job.tiles[0]], driver)
    copies = 174  # of 2,304 bytes, to be more than four times the cache
    assert record["copies"] == record["calls"] == copies
    assert (record["gpu_s"], record["gpu_low_s"]) == (4 / copies, 1 / copies)
    assert (record["errors"], record["registers"], record["local_bytes"]) == ([0.0], 40, 8)
    assert driver.released == 1
    x, matrix, residual, y = zip(*(addresses for _, _, addresses in driver.launches), strict=True)
    assert len(driver.launches) == len(set(matrix)) == copies
    assert [len(set(addresses)) for addresses in (x, residual, y)] == [1, 1, 1]
    # K = 64 is two loads of 16 bytes a row: 16 rows at once in 32 lanes, 2 in a lane, 4 simdgroups
    assert {launch[:2] for launch in driver.launches} == {((1, 1, 1), (128, 1, 1))}


def run(monkeypatch, *arguments):
    monkeypatch.setattr("sys.argv", ["alone", *arguments])
    return alone.main()


def test_a_line_for_each_arm_and_no_time_for_a_wrong_one(compiled, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(alone, "Driver", FakeDriver)
    monkeypatch.setattr(alone, "all_jobs", lambda: [small_job("right", 1.0), small_job("wrong", 1.001)])
    file = tmp_path / "lines.jsonl"
    assert run(monkeypatch, "--json", str(file), "--commit", "0123abc") == 1
    lines = [json.loads(text) for text in file.read_text().splitlines()]
    assert [(line["job"], "gpu_s" in line) for line in lines] == [
        ("right", True),
        ("right", True),
        ("wrong", False),
        ("wrong", False),
    ]
    for line in lines:
        assert line.keys() >= ABOUT
        assert (line["chip"], line["commit"], line["copy_bytes_per_s"]) == ("cuda-sm_90", "0123abc", 4e12)
    assert lines[2]["failure"].startswith("wrong: errors 1.0e-03")
    assert "wrong: errors 1.0e-03" in capsys.readouterr().out
    assert run(monkeypatch, "--jobs", "right", "--tiles", "table") == 0
    assert capsys.readouterr().out.count(" right ") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--jobs", "head,heads"], "--jobs names 'heads'; it must be part of one of qmv DeltaNet in"),
        (["--jobs", ""], "--jobs names ''"),
        (["--tiles", "best"], "invalid choice: 'best'"),
        (["--json", "no/such/folder"], "whose folder does not exist"),
        pytest.param(
            [],
            "no NVIDIA GPU",
            marks=pytest.mark.skipif(mx.cuda.is_available(), reason="this machine has CUDA"),
        ),
    ],
)
def test_bad_arguments_and_machines_end_with_a_line(monkeypatch, capsys, arguments, message):
    with pytest.raises(SystemExit) as ended:
        run(monkeypatch, *arguments)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err.splitlines()[-1]


def test_environment_names_versions_and_matrix_accelerators():
    about = machine.environment("host", "0123abc")
    assert about.keys() >= ABOUT
    assert about["lily_mlx"] == lily_mlx.__version__
    assert (about["backend"], about["chip"], about["commit"]) == ("host", "host", "0123abc")
    assert about["nax"] in (True, False, None)


@pytest.mark.parametrize("path", sorted(RESULTS.rglob("*.json*")), ids=lambda path: path.stem)
def test_every_record_names_versions_and_matrix_accelerators(path):
    texts = path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]
    for number, text in enumerate(texts, 1):
        record = json.loads(text)
        missing = ABOUT - record.get("about", record).keys()
        assert not missing, f"line {number} lacks {sorted(missing)}"
