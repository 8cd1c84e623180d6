"""Output files of lily-mlx bench: refused in one line before the work, written whole or not at all."""

import pytest

from bench import files
from bench.compare import _BEGIN, _END
from lily_mlx import cli
from lily_mlx.errors import UsageError
from tests.bench.test_compare import measured, save


def test_a_file_is_written_whole_or_not_at_all(tmp_path):
    file = tmp_path / "x"
    files.write_text(file, "one")
    with pytest.raises(UnicodeEncodeError):
        files.write_text(file, "two \ud800")
    assert file.read_text() == "one"
    assert list(tmp_path.iterdir()) == [file]
    with pytest.raises(UsageError, match="cannot be written"):
        files.write_text(file / "y", "three")


def run(*words, capsys):
    with pytest.raises(SystemExit) as end:
        cli.main(["bench", *map(str, words)])
    assert end.value.code == 2
    said = capsys.readouterr().err.strip()
    assert said.startswith("lily-mlx: error: ")
    assert "\n" not in said
    return said


def test_folders_that_cannot_be_made(tmp_path, capsys):
    (tmp_path / "file").write_text("x")
    lines = save(tmp_path / "lines.jsonl", [measured("stock", 0, 1.0)])
    small = ("--random-weights", "qwen3.6-35b-a3b", "--lengths", "8")
    for folder in (tmp_path / "file" / "sub", tmp_path / "file"):
        assert "is a file" in run(*small, "--output", folder, capsys=capsys)
        assert "is a file" in run("compare", lines, "--plots", folder, capsys=capsys)


def test_a_page_is_never_lost(tmp_path, capsys):
    lines = save(tmp_path / "lines.jsonl", [measured("stock", 0, 1.0)])
    page, binary, good = tmp_path / "notes.md", tmp_path / "binary.md", tmp_path / "good.md"
    page.write_text("my notes\n")
    binary.write_bytes(b"\xff\xfe")
    for bad in (page, binary, tmp_path, tmp_path / "nope" / "x.md"):
        run("compare", lines, "--markdown", good, bad, "--plots", tmp_path / "plots", capsys=capsys)
    assert page.read_text() == "my notes\n"
    assert not good.exists()
    assert not (tmp_path / "plots").exists()
    page.write_text(f"my notes\n{_BEGIN}\n{_END}\n")
    assert cli.main(["bench", "compare", str(lines), "--markdown", str(page)]) == 0
    assert page.read_text().startswith("my notes\n")


@pytest.mark.parametrize("command", ["graph", "numerics"])
def test_json_files_are_looked_at_first(command, tmp_path, capsys):
    words = [command, "--model", "examples/tiny-qwen3_6-moe-4bit", "--json"]
    assert "is a folder" in run(*words, tmp_path, capsys=capsys)
    assert "does not exist" in run(*words, tmp_path / "nope" / "x.json", capsys=capsys)


def test_an_interrupt_before_anything_was_measured(monkeypatch, capsys, tmp_path):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("bench.command._load", interrupted)
    words = ["--random-weights", "qwen3.6-35b-a3b", "--output", str(tmp_path / "out")]
    assert cli.main(["bench", *words]) == 130
    assert capsys.readouterr().err == "\ninterrupted\n"
    assert not (tmp_path / "out").exists()
