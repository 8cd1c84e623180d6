"""What every line of results says of the machine."""

import json
from pathlib import Path

import pytest

import lily_mlx
from bench.ops import machine

RESULTS = Path(__file__).parents[2] / "bench" / "results"
ABOUT = {"backend", "chip", "commit", "device", "lily_mlx", "mlx", "mlx_lm", "nax", "nax_why", "os", "python"}


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
