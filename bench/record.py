"""The JSON line of one measurement: its fields, the facts about the machine, writing and reading."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm

import lily_mlx
from lily_mlx.errors import UsageError
from lily_mlx.launch import backend

FILE = "measurements.jsonl"

Record = dict[str, Any]

_Text, _Number, _Whole = (str,), (int, float), (int,)
FIELDS: dict[str, tuple[type, ...]] = {
    "run": _Text,
    "time": _Text,
    "phase": _Text,
    "length": _Whole,
    "arm": _Text,
    "round": _Whole,
    "order": _Whole,
    "tokens": _Whole,
    "seconds": _Number,
    "tokens_per_second": _Number,
    "peak_memory_bytes": _Whole,
    "switches": (dict,),
    "gate": (dict,),
    "model": _Text,
    "prefill_step_size": _Whole,
    "work": (dict,),
    "command": _Text,
    "device": _Text,
    "backend": _Text,
    "chip": _Text,
    "cores": (dict,),
    "memory_bytes": (int, type(None)),
    "os": _Text,
    "python": _Text,
    "mlx": _Text,
    "mlx_lm": _Text,
    "lily_mlx": _Text,
    "commit": (str, type(None)),
    "nax": (bool, type(None)),
    "nax_why": _Text,
    "bandwidth": _Number,
    "matrix_peak": _Number,
}
"""Every field of a line and the types it may have.

``run`` is the same for all lines of one ``--output``. ``order`` counts the arms of a round from 0. ``work``
has the ``flops`` and ``bytes`` that the measurement takes at least. ``nax`` says whether the matrix
accelerators were in use, null if that is not known, and ``nax_why`` how it is. ``bandwidth`` (bytes a second,
of a copy) and ``matrix_peak`` (FLOP a second, of a bfloat16 product) were measured by the same process.
"""

PHASES = ("prefill", "decode")


def check(record: Any, where: str) -> Record:
    """The record, if it is one.

    Raises:
        UsageError: a field is missing or has another type.
    """
    if not isinstance(record, dict):
        raise UsageError(f"{where}: a measurement is a JSON object, not {type(record).__name__}")
    for name, types in FIELDS.items():
        if name not in record:
            raise UsageError(f"{where}: the measurement has no {name!r}; lily-mlx bench writes it")
        value = record[name]
        if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
            raise UsageError(f"{where}: {name} is {value!r}; it must be {_names(types)}")
    if record["phase"] not in PHASES:
        raise UsageError(f"{where}: phase is {record['phase']!r}; it must be one of {', '.join(PHASES)}")
    for name in ("seconds", "tokens_per_second", "length", "tokens", "bandwidth", "matrix_peak"):
        if not 0 < record[name] < float("inf"):
            raise UsageError(f"{where}: {name} is {record[name]!r}; it must be above 0")
    for name in ("flops", "bytes"):
        value = record["work"].get(name)
        if not isinstance(value, int | float) or not 0 < value < float("inf"):
            raise UsageError(f"{where}: {name} of the work is {value!r}; it must be a number above 0")
    return record


def _names(types: tuple[type, ...]) -> str:
    if types == _Number:
        return "a number"
    known = {str: "text", int: "a whole number", dict: "an object", bool: "true or false", type(None): "null"}
    return " or ".join(known[t] for t in types)


def append(path: Path, record: Record) -> None:
    """Add a line and hand it to the operating system: what is measured survives an interruption."""
    line = json.dumps(check(record, "this measurement"))
    with path.open("a", encoding="utf-8") as file:
        file.write(line + "\n")


def read(path: Path) -> Iterator[Record]:
    """The measurements of a file, or of the folder that ``--output`` named.

    A last line without an end, from a run that was killed while it wrote, is left out.

    Raises:
        UsageError: the file is missing or empty, or a line is not a measurement.
    """
    file = path / FILE if path.is_dir() else path
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not text"
        raise UsageError(f"{file} cannot be read: {reason}; give a {FILE} or a folder with one") from None
    lines = text.split("\n")[:-1]
    if not lines:
        raise UsageError(f"{file} holds no measurement")
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise UsageError(f"{file}:{number}: not JSON: {error}") from None
        yield check(record, f"{file}:{number}")


def drop_partial_line(path: Path) -> None:
    """Cut a last line without an end off a file, so that lines can be appended."""
    data = path.read_bytes()
    path.write_bytes(data[: data.rfind(b"\n") + 1])


def environment(commit: str | None = None) -> Record:
    """Facts about the machine and the software, the same for every measurement of a process.

    Args:
        commit: Lily's, where there is no repository to ask.
    """
    info = mx.device_info(mx.default_device())
    nax, why = backend.neural_accelerators()
    return {
        "device": str(mx.default_device()),
        "backend": backend.resolve(),
        "chip": _chip(info),
        "cores": {"cpu": os.cpu_count(), "gpu": _gpu_cores()},
        "memory_bytes": _memory(info),
        "os": _os(),
        "python": platform.python_version(),
        "mlx": mx.__version__,
        "mlx_lm": mlx_lm.__version__,
        "lily_mlx": lily_mlx.__version__,
        "commit": commit or _commit(),
        "nax": nax,
        "nax_why": why,
    }


def _output(*command: str) -> str | None:
    """What a command prints; None if it is absent or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, cwd=Path(__file__).parent)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _commit() -> str | None:
    commit = _output("git", "rev-parse", "--short=12", "HEAD")
    # In a wheel, the repository around site-packages, if any, is another one.
    if not commit or _output("git", "ls-files", "record.py") != "record.py":
        return None
    return f"{commit}-dirty" if _output("git", "status", "--porcelain", "-uno") else commit


def _chip(info: dict[str, Any]) -> str:
    name = info.get("device_name") or info.get("architecture")
    if platform.system() == "Darwin":
        name = _output("sysctl", "-n", "machdep.cpu.brand_string") or name
    return str(name or platform.machine())


@cache
def _gpu_cores() -> int | None:
    if platform.system() != "Darwin":
        return None
    found = re.search(
        r"sppci_cores\"\s*:\s*\"(\d+)\"", _output("system_profiler", "-json", "SPDisplaysDataType") or ""
    )
    return int(found[1]) if found else None


def _memory(info: dict[str, Any]) -> int | None:
    for key in ("memory_size", "total_memory"):
        if key in info:
            return int(info[key])
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return None


def _os() -> str:
    if platform.system() == "Darwin":
        return f"macOS {platform.mac_ver()[0]} ({_output('sw_vers', '-buildVersion') or 'unknown build'})"
    return platform.platform()
