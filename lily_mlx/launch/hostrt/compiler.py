"""Compiling for the host: finds a C++ compiler and keeps what it made in the cache, by content.

Two compilers will do: the system's clang from 18 on (older ones have no ``__bf16`` arithmetic), or the one
inside the ``ziglang`` package. Both are driven as plain clang, without C++ or C library headers for kernels.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import itertools
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ...errors import BackendUnavailableError, UsageError
from ...settings import settings

RUNTIME_DIR = Path(__file__).parent
DARWIN = sys.platform == "darwin"
OLDEST_CLANG = 18
OLDEST_APPLE_CLANG = 17  # made from LLVM 19

_KERNEL_FLAGS = (
    "-std=c++20",
    "-O2",
    "-fPIC",
    "-fvisibility=hidden",
    "-ffreestanding",
    "-nostdinc",  # Metal has no C or C++ library
    "-fno-exceptions",
    "-fno-rtti",
    "-fno-threadsafe-statics",
    "-fno-math-errno",
    "-fno-strict-aliasing",
    "-fno-delete-null-pointer-checks",  # so that an access through null happens, and is seen
    "-fno-finite-loops",  # a kernel's endless loop must stay one
    "-fno-omit-frame-pointer",  # the worker tells calls apart, and names lines, by the frames of a stack
    "-fno-optimize-sibling-calls",
    "-fstack-clash-protection",  # no frame may reach over the page that guards a fiber's stack
    "-ffp-contract=on",
    "-ftrivial-auto-var-init=pattern",  # fill_locals() turns the pattern into the launch's poison
    "-gdwarf-4",
    "-gline-directives-only",  # the lines of code in the assembly, for add_tables(); no more is read
    "-fno-color-diagnostics",
    "-w",
    "-Wno-reserved-user-defined-literal",  # 1.0h
    # Metal rounds half and bfloat after every operation, and reads 0.1 as a float.
    "-Xclang",
    "-ffloat16-excess-precision=none",
    "-Xclang",
    "-fbfloat16-excess-precision=none",
    "-Xclang",
    "-cl-single-precision-constant",
)
_CHECKS = "array-bounds,bool,signed-integer-overflow,unsigned-integer-overflow,integer-divide-by-zero"
# The builds of a kernel: plain runs fast, checked finds faults. An array at the end of a class has a size in
# Metal, too. What finds a bad index through a pointer works on optimised code: it is asked for there.
BUILDS = {
    "plain": ("-fwrapv",),
    "checked": (
        f"-fsanitize={_CHECKS}",
        f"-fsanitize-recover={_CHECKS}",
        "-fstrict-flex-arrays=3",
        "-DLILY_RT_CHECKED",
    ),
}
_BACKEND_FLAGS = ("-O2", "-fPIC", "-ffp-contract=on")
# What a checked build gains from unrolled loops and vectors is less than what they cost to compile.
_BACKEND_BUILDS = {
    "plain": (),
    "checked": (
        *("-fsanitize=local-bounds", "-fsanitize-trap=local-bounds"),
        *("-fno-unroll-loops", "-fno-vectorize", "-fno-slp-vectorize"),
    ),
}


class CompilerError(Exception):
    """The compiler refused a source. ``str()`` of it is all that the compiler said."""


@dataclass(frozen=True)
class Compiler:
    """A C++ compiler.

    Attributes:
        command: what runs it as clang.
        library_command: what compiles a source that includes the C library's headers.
        linker: what makes a shared library from object files.
        identity: a text that differs between compilers that may compile differently.
    """

    command: tuple[str, ...]
    library_command: tuple[str, ...]
    linker: tuple[str, ...]
    identity: str


@functools.cache
def find_compiler() -> Compiler:
    """The compiler of this machine.

    Raises:
        BackendUnavailableError: there is none.
    """
    versioned = [f"clang++-{n}" for n in range(40, OLDEST_CLANG - 1, -1)]
    for name in ("clang++", *versioned):
        path = shutil.which(name)
        if path and (found := _system_clang(path)):
            return found
    spec = importlib.util.find_spec("ziglang")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        zig = shutil.which("zig", path=folder)
        if zig:
            return _zig(zig)
    raise BackendUnavailableError(
        "no C++ compiler is here, which LILY_BACKEND=host and `lily-mlx kernels check` need: "
        f"clang {OLDEST_CLANG} or newer, or the one of `pip install ziglang`"
    )


def _system_clang(path: str) -> Compiler | None:
    try:
        text = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=30).stdout
    except (OSError, subprocess.TimeoutExpired):
        return None
    match = re.search(r"(Apple )?clang version (\d+)", text)
    if not match or int(match[2]) < (OLDEST_APPLE_CLANG if match[1] else OLDEST_CLANG):
        return None
    link = ("-shared", "-undefined", "dynamic_lookup") if DARWIN else ("-shared", "-nostdlib")
    return Compiler((path,), (path,), (path, *link), f"{path}\n{text}")


def _zig(path: str) -> Compiler:
    text = subprocess.run([path, "clang", "--version"], capture_output=True, text=True, timeout=60).stdout
    # `zig clang` and `zig ld.lld` are the bare tools: they build no C library first, as `zig cc` would.
    machine = {"arm64": "aarch64", "AMD64": "x86_64"}.get(platform.machine(), platform.machine())
    target = f"{machine}-macos" if DARWIN else f"{machine}-linux-gnu"
    link = (path, "cc", "-shared", "-Wl,-undefined,dynamic_lookup") if DARWIN else (path, "ld.lld", "-shared")
    headers = str(Path(path).parent / "lib" / "include")
    return Compiler(
        (path, "clang", "-target", target, "-isystem", headers),
        (path, "cc", "-target", target),
        link,
        f"{path}\n{text}",
    )


@functools.cache
def _cpu_flags() -> tuple[str, ...]:
    """Fused multiply-add and half conversion in hardware, which Metal has too, where this CPU has them."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return ()
    try:
        flags = set(re.search(r"^flags\s*:(.*)$", Path("/proc/cpuinfo").read_text(), re.M)[1].split())  # type: ignore[index]
    except (OSError, TypeError):
        return ()
    return ("-mfma", "-mf16c", "-mavx2") if {"fma", "f16c", "avx2"} <= flags else ()


def cache_dir() -> Path:
    return settings().cache_dir / "host"


_locks: dict[str, threading.Lock] = {}
_locks_guard = threading.Lock()


def _cached(key: str, suffix: str, make: Callable[[Path, Path], object]) -> Path:
    """The cached file for ``key``; ``make(folder, target)`` writes it when there is none.

    Threads of this process wait for one another; processes may make a file twice, and the last rename wins.
    """
    target = cache_dir() / f"{hashlib.sha256(key.encode()).hexdigest()[:40]}{suffix}"
    if _is_made(target):
        return target
    with _locks_guard:
        lock = _locks.setdefault(target.name, threading.Lock())
    with lock:
        if not _is_made(target):
            with _build_folder(target.parent) as folder:
                made = Path(folder) / f"made{suffix}"
                make(Path(folder), made)
                digest = Path(folder) / "digest"
                digest.write_text(_digest(made))
                os.replace(digest, _digest_file(target))
                os.replace(made, target)
    return target


def _is_made(target: Path) -> bool:
    """Whether the file is there as it was made: a full disk may have cut it off, a bad one changed it."""
    try:
        return _digest_file(target).read_text() == _digest(target)
    except (OSError, UnicodeDecodeError):
        return False


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _digest_file(target: Path) -> Path:
    return target.with_name(f"{target.name}.sha256")


def discard_worker() -> None:
    """Remove the compiled worker from the cache, so that the next one is made again."""
    worker_library().unlink(missing_ok=True)
    worker_library.cache_clear()


def _build_folder(parent: Path) -> tempfile.TemporaryDirectory[str]:
    try:
        parent.mkdir(parents=True, exist_ok=True)
        return tempfile.TemporaryDirectory(prefix="build-", dir=parent)
    except OSError as error:
        raise UsageError(
            f"compiled kernels cannot be kept in {parent} ({error.strerror}); "
            "set LILY_CACHE_DIR to a folder that can be written"
        ) from None


def _run(command: list[str], cwd: Path) -> None:
    environment = dict(os.environ)
    for name in ("ZIG_GLOBAL_CACHE_DIR", "ZIG_LOCAL_CACHE_DIR"):
        environment[name] = str(cache_dir() / "zig")
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, errors="replace")
    if done.returncode:
        raise CompilerError(done.stderr or done.stdout or f"{command[0]} ended with {done.returncode}")


@functools.cache
def runtime_digest() -> str:
    """A digest of everything in this folder that a compiled kernel depends on."""
    digest = hashlib.sha256()
    for path in sorted(RUNTIME_DIR.iterdir()):
        if path.suffix in (".h", ".cpp", ".py"):
            digest.update(path.read_bytes())
    return digest.hexdigest()


@functools.cache
def worker_library() -> Path:
    """The compiled worker, a shared library whose function ``lily_worker`` serves launches."""
    compiler = find_compiler()

    def make(folder: Path, target: Path) -> None:
        flags = ["-std=c++20", "-O2", "-fPIC", "-fno-exceptions", "-fno-rtti", "-fno-sanitize=all"]
        flags += ["-fno-omit-frame-pointer", "-fno-optimize-sibling-calls"]
        source = str(RUNTIME_DIR / "worker.cpp")
        _run([*compiler.library_command, "-x", "c++", *flags, "-c", source, "-o", "worker.o"], folder)
        _run([*compiler.linker, "worker.o", "-o", str(target)], folder)

    return _cached(f"worker\n{compiler.identity}\n{runtime_digest()}", ".so", make)


@dataclass(frozen=True)
class Source:
    """A C++ source.

    Attributes:
        key: stands for all that ``text()`` depends on.
        text: makes it; called when the cache has nothing made from it.
    """

    key: str
    text: Callable[[], str]


def kernel_library(prefix: Source, kernel: Source, include_dirs: tuple[Path, ...], build: str) -> Path:
    """Compile a kernel to a shared library.

    Args:
        prefix: what comes before any kernel; compiled once, to a precompiled header.
        kernel: the rest of the translation unit.
        include_dirs: searched for headers, in this order; ``prefix.key`` stands for what is in them too.
        build: a key of :data:`BUILDS`.

    Raises:
        CompilerError: the compiler refused the source.
    """
    compiler = find_compiler()
    flags = (*_KERNEL_FLAGS, *_cpu_flags(), *BUILDS[build])
    include = [part for path in (RUNTIME_DIR, *include_dirs) for part in ("-I", str(path))]
    clang = [*compiler.command, *flags, *include]
    key = "\n".join((compiler.identity, *clang, runtime_digest(), prefix.key))

    def precompile(folder: Path, target: Path) -> None:
        # By content, not by date: another process may have put the same source in its place since. What
        # the prefix needs of its templates is made here, not again for every kernel.
        options = ["-Xclang", "-fno-pch-timestamp", "-fpch-instantiate-templates"]
        _run([*clang, *options, "-x", "c++-header", str(source()), "-o", str(target)], folder)

    def source() -> Path:
        return _cached(f"source\n{key}", ".h", lambda _, file: file.write_text(prefix.text(), "utf-8"))

    def make(folder: Path, target: Path) -> None:
        source()  # a precompiled header needs it for as long as it is used
        header = _cached(f"prefix\n{key}", ".pch", precompile)
        (folder / "kernel.cpp").write_text(kernel.text(), "utf-8")
        emit = ["-S", "-emit-llvm", "-Xclang", "-disable-llvm-passes", "kernel.cpp", "-o", "kernel.ll"]
        _run([*clang, "-x", "c++", "-include-pch", str(header), *emit], folder)
        code = folder / "kernel.ll"
        code.write_text(as_metal(code.read_text("latin-1")), "latin-1")
        backend = [*_BACKEND_FLAGS, *_BACKEND_BUILDS[build]]
        _run([*compiler.command, *backend, "-S", "kernel.ll", "-o", "kernel.s"], folder)
        assembly = folder / "kernel.s"
        # Strings in it are bytes: any encoding that keeps them will do.
        assembly.write_text(add_tables(assembly.read_text("latin-1")), "latin-1")
        _run([*compiler.command, "-c", "kernel.s", "-o", "kernel.o"], folder)
        _run([*compiler.linker, "kernel.o", "-o", str(target)], folder)

    return _cached(f"kernel\n{key}\n{kernel.key}", ".so", make)


_SHIFT = re.compile(r"^( *%\S+ = (?:shl|lshr|ashr)(?: \w+)* i)(\d+) (\S+), ([^,\s]+)")
_NULL_ACCESS = re.compile(r"^( *(?:%\S+ = load|store) .*, ptr) null, align")
_THREADGROUP = re.compile(r'^(@\S+ = .*?\b)(?=global .*, section "[^"]*lily_tg")')
_AUTO_INIT = ' = !{!"auto-init"}\n'
_FILL, _NULL = "@lily_fill", "@lily_null"  # in entry.h
_WILD_POINTER = "inttoptr (i64 -40841467208998 to ptr)"  # an address that no process has


def as_metal(code: str) -> str:
    """Change in unoptimised LLVM ``code`` where Metal differs from C++, or the launcher needs it to.

    A shift uses the lowest bits of its amount, as in OpenCL C; C++ leaves larger amounts undefined. Locals
    that start with the compiler's pattern start with the launch's poison instead, and so does threadgroup
    memory, of which the optimiser must not think that it starts with zeros. An access through null is
    to crash, not to count as a bad index of an array of no elements.
    """
    counter = itertools.count()

    def mask(match: re.Match[str]) -> str:
        head, width, value, amount = match.groups()
        last = int(width) - 1
        if amount.isdigit():
            return f"{head}{width} {value}, {int(amount) & last}"
        name = f"%lily.{next(counter)}"
        return f"  {name} = and i{width} {amount}, {last}\n{head}{width} {value}, {name}"

    def fill(line: str) -> str:
        name = f"%lily.{next(counter)}"
        if store := re.match(r" *store (volatile )?(.*), ptr (\S+), align", line):
            kind = _type(store[2])
            value = _WILD_POINTER if kind == "ptr" else name
            load = "" if kind == "ptr" else f"  {name} = load {kind}, ptr {_FILL}, align 1\n"
            return f"{load}  store {store[1] or ''}{kind} {value}, ptr {store[3]}, align 1"
        call = re.match(r" *call void @llvm\.mem(?:set|cpy)\.[^(]*\((ptr [^,]*), [^,]*, i64 (\d+),", line)
        if call is None:
            return line
        load = f"  {name} = load i8, ptr {_FILL}, align 1\n"
        return f"{load}  call void @llvm.memset.p0.i64({call[1]}, i8 {name}, i64 {call[2]}, i1 false)"

    def hide_null(match: re.Match[str]) -> str:
        name = f"%lily.{next(counter)}"
        return f"  {name} = load ptr, ptr {_NULL}, align 8\n{match[1]} {name}, align"

    for shift in (" = shl ", " = lshr ", " = ashr "):
        code = _edited(code, shift, lambda line: _SHIFT.sub(mask, line))
    code = _edited(code, " null, align", lambda line: _NULL_ACCESS.sub(hide_null, line))
    code = _edited(code, 'lily_tg"', lambda line: _THREADGROUP.sub(r"\1externally_initialized ", line))
    before, found, _ = code.partition(_AUTO_INIT)
    if found:
        annotation = before.rpartition("\n")[2]
        code = _edited(code, f" !annotation {annotation}\n", fill)
        if "declare void @llvm.memset.p0.i64(" not in code:
            code += "\ndeclare void @llvm.memset.p0.i64(ptr, i8, i64, i1)\n"
    return code


def _edited(code: str, text: str, edit: Callable[[str], str]) -> str:
    """``code`` with each line that contains ``text`` as ``edit`` makes it; far quicker than a pattern."""
    parts: list[str] = []
    done = 0
    while (at := code.find(text, done)) >= 0:
        start = code.rfind("\n", done, at) + 1
        end = code.index("\n", at)
        parts += code[done:start], edit(code[start:end])
        done = end
    return "".join([*parts, code[done:]])


def _type(typed: str) -> str:
    """The type in front of an LLVM constant: ``[2 x float]`` of ``[2 x float] zeroinitializer``."""
    depth, quoted = 0, False
    for i, letter in enumerate(typed):
        quoted ^= letter == '"'
        if not quoted:
            depth += (letter in "[{<") - (letter in "]}>")
            if letter == " " and not depth:
                return typed[:i]
    return typed


_FILE = re.compile(r'\t\.file\t(\d+) "((?:[^"\\]|\\.)*)"(?: "((?:[^"\\]|\\.)*)")?')
_LOC = re.compile(
    r"^\s*\.loc\s+(\d+) (\d+) (\d+)[^\n]*\n|^[^\n]*-- Begin function [^\n]*\n|^\.?Lfunc_(end)\d+:\n", re.M
)
_SECTION = re.compile(r"^(?=\s*\.(?:section|text|data|bss)\b)", re.M)
_VARIABLE = re.compile(r"^([^\s:]+):[^\n]*\n\s*\.(?:zero|space)\s+(\d+)[^\n]*\n", re.M)
RED_ZONE_BYTES = 64  # red_zone_bytes in worker.cpp


def add_tables(assembly: str) -> str:
    """Append to a kernel's ``assembly`` what the worker needs to know of it.

    The first table has (instruction, file, line, column), made from the ``.loc`` directives, to name the line
    of a fault. Debug information itself would need a parser per object format, and macOS keeps it out of
    shared libraries. Each function starts with an entry of line 0, which those without debug information
    keep, and ends with one of line 0 and column 1. Code that the compiler gives no line has the line before
    it, and column 0.

    The second has (address, bytes) of the threadgroup variables, each of which also gets a red zone.
    """
    # What the precompiled header holds was found in a folder that is gone.
    names = {int(m[1]): re.sub(r".*\bbuild-\w+/", "", m[3] or m[2]) for m in _FILE.finditer(assembly)}
    order = {number: i for i, number in enumerate(sorted(names))}
    local = "L" if DARWIN else ".L"
    lines: list[str] = []
    before = (0, 0)  # the file and line of the code before
    variables: list[tuple[str, str]] = []

    def row(table: str, n: int, target: str, *values: int) -> str:
        fields = "".join(f"\t.long {value}\n" for value in values)
        return f"{local}lily_{table}{n}:\n\t.long {target}-{local}lily_{table}{n}\n{fields}"

    def mark_line(match: re.Match[str]) -> str:
        nonlocal before
        column = 1 if match[4] else 0
        if not match[1]:
            before = 0, 0
        elif (line := int(match[2])) and (file := order.get(int(match[1]))) is not None:
            before, column = (file, line), int(match[3])
        code = f"{local}lily_code{len(lines)}"
        lines.append(row("line", len(lines), code, *before, column))
        return f"{match[0]}{code}:\n"

    def mark_variable(match: re.Match[str]) -> str:
        place = f"{local}lily_variable{len(variables)}"
        zone = "" if variables else f"\t.zero {RED_ZONE_BYTES}\n"
        variables.append((row("array", len(variables), place, int(match[2])), _local_name(match[1])))
        return f"{zone}{place}:\n{match[0]}\t.zero {RED_ZONE_BYTES}\n"

    marked = "".join(
        _VARIABLE.sub(mark_variable, part) if "lily_tg" in part.split("\n", 1)[0] else part
        for part in _SECTION.split(_LOC.sub(mark_line, assembly))
    )
    files = [names[number] for number in sorted(names)]
    tables = {
        "lines": "".join(lines),
        "lines_end": "",
        "arrays": "".join(text for text, _ in variables),
        "arrays_end": "",
        "files": "".join(f'\t.asciz "{file}"\n' for file in files),
        "array_names": "".join(f'\t.asciz "{name}"\n' for _, name in variables),
    }
    underscore = "_" if DARWIN else ""
    section = "\t.section __DATA,__lily\n" if DARWIN else '\t.section .lily,"a",@progbits\n'
    return f"{marked}\n{section}\t.p2align 3\n" + "".join(
        f"\t.globl {underscore}lily_{name}\n{underscore}lily_{name}:\n{text}" for name, text in tables.items()
    )


def _local_name(symbol: str) -> str:
    """The name of a local variable from its mangled symbol: ``tile`` from ``_ZZ4scanvE4tile_0``."""
    for match in re.finditer(r"(?<=E)(\d+)", symbol):
        name = symbol[match.end() : match.end() + int(match[1])]
        if re.fullmatch(r"(_\d+|__\d+_)?", symbol[match.end() + int(match[1]) :]) and name:
            return name
    return symbol
