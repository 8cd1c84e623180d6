"""The strict compile pass: errors in Metal sources that a machine without Metal can find.

Two layers. :mod:`lily_mlx.launch.lints` checks on tokens what C++ would let through. Then a C++ compiler
reads the source with real address spaces over the headers of :mod:`lily_mlx.launch.msl`, every template
instantiated; a source with lint errors does not get that far, because one wrong pointer type would be
reported again at every use. Where ``xcrun metal`` exists, :func:`main_check` also asks Apple's compiler.

Sources are checked for Metal 3.1 (macOS 14, M1), unless a comment asks for more: ``// requires: metal 4.0``.
"""

from __future__ import annotations

import atexit
import functools
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import mlx.core as mx

from ..errors import UsageError
from . import kernel, lints, source
from .hostrt.compiler import find_compiler
from .lints import INCLUDE_PRAGMA, LINE_MARK, MAX_THREADS, RULES, Diagnostic, Version, numbered
from .msl import INCLUDE_DIR
from .msl.rewrite import translate

__all__ = [
    "RULES",
    "Diagnostic",
    "check",
    "check_file",
    "check_kernels",
    "check_text",
    "check_tree",
    "main_check",
]

OLDEST_METAL: Version = (3, 1)

_REQUIRES = re.compile(r"//\s*requires:\s*metal\s+(\d+)\.(\d+)", re.IGNORECASE)
_INCLUDE = re.compile(r'[ \t]*#[ \t]*(?:include|import)[ \t]*(?:"([^"]+)"|<([^>]+)>)')

# Types of Metal that the headers of msl do not have: sources that use them are not compiled.
_NO_STAND_IN = re.compile(
    r"(?:texture|depth)(?:1d|2d|3d|cube|_buffer)\w*|sampler|imageblock|\w+_function_table|\w+_acceleration_structure"
)

# What the edits of lints.edits call. Its errors are told apart by their texts.
_PROLOGUE = """\
namespace lily_strict {
extern LILY_AS_constant char text[64];
template <typename T>
constexpr bool plain = metal::is_same_v<T, metal::remove_addrspace_t<T>>;
template <typename T>
struct space { static constexpr int value = 0; };
template <typename T>
struct space<LILY_AS_device T> { static constexpr int value = 1; };
template <typename T>
struct space<LILY_AS_constant T> { static constexpr int value = 2; };
template <typename T>
struct space<LILY_AS_threadgroup T> { static constexpr int value = 3; };
template <typename To>
struct cast_to {};
template <typename To>
struct cast_to<To*> {
  template <typename From>
  static To* from(From* p) {
    static_assert(space<To>::value == space<From>::value, "lily cast");
    return (To*)p;
  }
  static To* from(unsigned long p) { return (To*)p; }
};
template <typename To, typename From>
To cast(From value) { return cast_to<To>::from(value); }
template <typename Of, typename Address>
constexpr Address address(Address p) {
  static_assert(!lily::Vector<Of>, "lily vector-element");
  return p;
}
template <typename Of, typename T>
constexpr T&& bound(T&& x) {
  static_assert(!lily::Vector<Of>, "lily vector-element");
  return static_cast<T&&>(x);
}
}
"""

_FLAGS = (
    "-std=c++23",
    "-DLILY_STRICT",
    "-ffreestanding",
    "-fno-exceptions",
    "-fno-rtti",
    "-Wno-everything",
    "-Werror=vla",
    "-Werror=return-type",
    "-Werror=c++11-narrowing",
    "-Werror=global-constructors",
    "-Werror=implicit-float-conversion",
    "-Wno-implicit-int-float-conversion",
    "-ferror-limit=0",
    "-fno-color-diagnostics",
    "-fno-caret-diagnostics",
    "-fno-diagnostics-fixit-info",
    "-ftemplate-backtrace-limit=0",
)
# Before Metal 4, which is C++17.
_OLDER_FLAGS = ("-Werror=pre-c++17-compat", "-Werror=pre-c++20-compat")


def check(name: str, source: str, header: str = "", **signature: Any) -> list[Diagnostic]:
    """Check a custom kernel as ``mx.fast.metal_kernel`` would compile it.

    Args:
        name: the kernel's name; lines of ``header`` and ``source`` are reported as in ``<name>.h`` and
            ``<name>.metal``, unless they carry ``#line`` directives.
        source: the body of the kernel function, or without a ``signature`` complete Metal source.
        header: what stands before the function.
        signature: the arguments that ``mx.fast.metal_kernel`` and the kernel it returns take:
            ``input_names``, ``output_names``, ``inputs`` (arrays, whose values do not matter),
            ``output_shapes``, ``output_dtypes``, and where needed ``template``, ``threadgroup`` and the rest.

    Returns:
        The errors, in order of file and line; empty for a source that passes.

    Raises:
        BackendUnavailableError: there is no C++ compiler.
    """
    if not signature:
        return check_text(_marked_header(name, header) + _labelled(source, f"{name}.metal"), f"{name}.metal")
    found = _check_threads(name, signature)
    return sorted(found + check_text(_complete(name, source, header, signature), f"{name}.signature"))


def _check_threads(name: str, signature: dict[str, Any]) -> list[Diagnostic]:
    threads = _product(signature.get("threadgroup", (1, 1, 1)))
    if threads <= MAX_THREADS:
        return []
    message = f"{threads} threads in a threadgroup; at most {MAX_THREADS} are possible"
    return [Diagnostic(f"{name}.metal", 1, "threads", message)]


def check_text(
    text: str,
    file: str,
    *,
    folders: Sequence[Path] = (),
    metal: str | None = None,
    report_includes: bool = False,
) -> list[Diagnostic]:
    """Check complete Metal source.

    Args:
        text: the source; ``#line`` directives name other files and lines.
        file: what to call it.
        folders: where ``#include "..."`` looks, besides MLX's headers.
        report_includes: whether to report about included files too.
        metal: the version to check for, such as "4.0", instead of what the source asks for.

    Raises:
        BackendUnavailableError: there is no C++ compiler.
        UsageError: ``metal`` is not a version.
    """
    version = _version(metal, text)
    inlined = f'#line 1 "{file}"\n' + _inline(text, file, [*folders, _mlx_include()], set())
    own = {file, *(name for _, name, _ in numbered(inlined if report_includes else text, file))}
    preprocessed, found = _preprocess(inlined, own, version)
    found += lints.lint_includes(preprocessed, own, version)
    if found:
        return found
    parsed = lints.Source(preprocessed, file)
    return lints.lint(parsed, own, version) or _compile(parsed, own, version)


def check_file(path: Path | str, *, metal: str | None = None) -> list[Diagnostic]:
    """Check a Metal file: one of Lily's kernels in every variant, or a file that stands for itself.

    Args:
        path: a ``.metal`` file or a header. Includes are looked up from its folder and in MLX's headers.
        metal: see :func:`check_text`.

    Raises:
        UsageError: the file does not exist.
    """
    path = Path(path)
    if not path.is_file():
        raise UsageError(f"{path}: no such file")
    if path.resolve().parent == source.KERNELS.resolve():
        return check_kernels([path.stem])
    return check_text(path.read_text(encoding="utf-8"), str(path), folders=[path.parent], metal=metal)


def check_kernels(stems: Sequence[str] | None = None) -> list[Diagnostic]:
    """Check kernels of Lily, by default all, in every variant that their declarations name."""
    found: set[Diagnostic] = set()
    # By stem and what stands before the kernel functions: texts, as their functions by name. Variants have
    # names of their own, so that one text can hold them all. MLX writes them, in one thread only.
    sources: dict[tuple[str, str], list[dict[str, str]]] = {}
    for stem, header, body, call in _kernel_calls(stems):
        found.update(_check_threads(stem, call))
        before, mark, function = _complete(stem, body, header, call).rpartition(
            f'#line 1 "{stem}.signature"\n'
        )
        name = function[: function.index("(")].split()[-1]
        texts = sources.setdefault((stem, before), [])
        if not any(text.setdefault(name, mark + function) == mark + function for text in texts):
            texts.append({name: mark + function})
    whole = [
        ("".join([before, *functions.values()]), f"{stem}.signature")
        for (stem, before), texts in sources.items()
        for functions in texts
    ]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return sorted(found.union(*pool.map(check_text, *zip(*whole, strict=True))))


def _kernel_calls(stems: Sequence[str] | None = None) -> Iterator[tuple[str, str, str, dict[str, Any]]]:
    """(stem, header, body, signature) of each variant of Lily's kernels, or of those named."""
    for each in kernel.all_kernels():
        if stems is not None and each.stem not in stems:
            continue
        header, body = source.assemble(each, "metal")
        for variant in each.variants_on("metal"):
            call = each.example(variant)
            call["template"] = list(call["template"].items())
            call["input_names"] = [buffer.name for buffer in each.inputs]
            call["output_names"] = [buffer.name for buffer in each.outputs]
            yield each.stem, header, body, call


def check_tree(path: Path | str) -> list[Diagnostic]:
    """Check a folder: Lily's kernels if it is theirs, otherwise every ``.metal`` file below it.

    Raises:
        UsageError: there is nothing to check.
    """
    path = Path(path)
    if path.resolve() == source.KERNELS.resolve():
        return check_kernels()
    files = sorted(path.rglob("*.metal"))
    if not files:
        raise UsageError(f"{path}: no .metal files")
    return [diagnostic for file in files for diagnostic in check_file(file)]


def main_check(paths: Sequence[str] = ()) -> int:
    """``lily-mlx kernels check [PATH ...]``: print errors as ``file:line: rule: message``.

    Args:
        paths: files and folders; without any, Lily's own kernels.

    Returns:
        The exit status: 0 if there are no errors, 1 if there are.
    """
    found: list[Diagnostic] = []
    for path in paths or [str(source.KERNELS)]:
        found += check_tree(path) if Path(path).is_dir() else check_file(path)
    found += _apple(paths)
    for diagnostic in found:
        print(diagnostic)
    if not found:
        print("no errors")
    return 1 if found else 0


# --- Preparing the text -------------------------------------------------------------------------------------


def _labelled(text: str, file: str) -> str:
    return text if LINE_MARK.match(text) else f'#line 1 "{file}"\n{text}'


def _marked_header(name: str, header: str) -> str:
    return _labelled(header, f"{name}.h") + f'\n#line 1 "{name}.signature"\n' if header else ""


def _product(numbers: Iterable[int]) -> int:
    return functools.reduce(lambda a, b: a * b, numbers, 1)


def _complete(name: str, source: str, header: str, signature: dict[str, Any]) -> str:
    """The source that MLX would compile: what its export says about a call of the kernel."""
    built = {"ensure_row_contiguous", "atomic_outputs", "compile_options", "input_names", "output_names"}
    make = {key: value for key, value in signature.items() if key in built}
    call = {key: value for key, value in signature.items() if key not in built}
    call = {"grid": (32, 1, 1), "threadgroup": (32, 1, 1), **call}
    inputs = call.pop("inputs")
    source, header = _labelled(source, f"{name}.metal"), _marked_header(name, header)
    function: Any = mx.fast.metal_kernel(name=name, source=source, header=header, **make)
    events: list[dict[str, Any]] = []

    def traced(*arrays: mx.array) -> list[mx.array]:
        given = iter(arrays)
        return function(inputs=[next(given) if isinstance(x, mx.array) else x for x in inputs], **call)

    mx.export_function(events.append, traced, *(x for x in inputs if isinstance(x, mx.array)))
    (text,) = [event["arguments"][1] for event in events if event.get("name") == "CustomKernel"]
    return f'#include "mlx/backend/metal/kernels/utils.h"\n#line 1 "{name}.signature"\n{text}'


def _version(metal: str | None, text: str) -> Version:
    if metal is None:
        asked = [(int(major), int(minor)) for major, minor in _REQUIRES.findall(text)]
        return max([OLDEST_METAL, *asked])
    match = re.fullmatch(r"(\d+)\.(\d+)", metal)
    if not match:
        raise UsageError(f"{metal!r} is not a version of Metal, such as 3.1")
    return int(match[1]), int(match[2])


def _inline(text: str, file: str, folders: Sequence[Path], seen: set[Path]) -> str:
    """Put quoted includes in their place, each once, and a pragma for Metal's. Lines keep their numbers."""
    lines = []
    number = 1
    for line in text.splitlines():
        include, mark = _INCLUDE.match(line), LINE_MARK.match(line)
        if include and include[1]:
            path = next((p for folder in folders if (p := (folder / include[1]).resolve()).is_file()), None)
            if path is None:
                lines.append(f'{INCLUDE_PRAGMA}"{include[1]}"')
            elif path not in seen:
                seen.add(path)
                inner = _inline(path.read_text(encoding="utf-8"), include[1], [path.parent, *folders], seen)
                lines.append(f'#line 1 "{include[1]}"\n{inner}')
            if path is not None:
                lines.append(f'#line {number + 1} "{file}"')
        elif include:
            lines.append(f"{INCLUDE_PRAGMA}{include[2]}")
        elif line.strip() == "#pragma once":
            lines.append("")
        else:
            lines.append(line)
        number = int(mark[1]) if mark else number + 1
        file = mark[2] or file if mark else file
    return "\n".join(lines) + "\n"


@functools.cache
def _mlx_include() -> Path:
    return Path(mx.__file__).parent / "include"


# --- Compiling ----------------------------------------------------------------------------------------------


def _run(flags: Iterable[str], source: Path) -> tuple[str, str]:
    """(output, errors) of the compiler for a C++ source.

    Raises:
        RuntimeError: the compiler failed and named no error in the source.
    """
    command = [*find_compiler().command, "-x", "c++", *flags, str(source)]
    environment = {name: str(source.parent) for name in ("ZIG_GLOBAL_CACHE_DIR", "ZIG_LOCAL_CACHE_DIR")}
    environment = {**os.environ, **environment}
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", env=environment)
    if done.returncode and not _MESSAGE.search(done.stderr):
        raise RuntimeError(f"the C++ compiler failed ({done.returncode}): {done.stderr.strip()}")
    return done.stdout, done.stderr


def _run_text(flags: Iterable[str], text: str) -> tuple[str, str]:
    with tempfile.TemporaryDirectory(prefix="lily-strict-") as folder:
        path = Path(folder) / "strict.cpp"
        path.write_text(text)
        return _run(flags, path)


_precompiling = threading.Lock()


def _library(headers: str, version: Version) -> Path:
    """Metal's library and the prologue as a precompiled header, which this process makes once."""
    with _precompiling:
        return _precompiled(headers, version)


@functools.cache
def _precompiled(headers: str, version: Version) -> Path:
    folder = Path(tempfile.mkdtemp(prefix="lily-strict-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    source, target = folder / "library.h", folder / "library.pch"
    source.write_text(headers + _PROLOGUE)
    flags = [*_FLAGS, *_defines(version), "-I", str(INCLUDE_DIR), "-x", "c++-header", "-o", str(target)]
    _run(flags, source)
    return target


def _defines(version: Version) -> list[str]:
    bfloat = ["-D__HAVE_BFLOAT__=1"] if version >= (3, 1) else []
    number = f"{version[0]}{version[1]}0"
    return [f"-D__METAL_VERSION__={number}", "-D__METAL__=1", "-D__METAL_MACOS__=1", *bfloat]


def _preprocess(text: str, own: set[str], version: Version) -> tuple[str, list[Diagnostic]]:
    """The text with macros expanded and conditions decided, without the headers of Metal."""
    out, errors = _run_text(["-E", "-std=c++20", "-undef", "-nostdinc", "-w", *_defines(version)], text)
    return out, list(_diagnostics(errors, own))


def _compile(parsed: lints.Source, own: set[str], version: Version) -> list[Diagnostic]:
    """What a compiler with address spaces says."""
    translated = translate(lints.apply(parsed.text, lints.edits(parsed)), mode="strict")
    names = dict.fromkeys(["metal_stdlib", *(name for _, _, name in lints.includes(parsed.text))])
    known = all((INCLUDE_DIR / name).is_file() for name in names if not name.startswith("simd/"))
    if not known or any(_NO_STAND_IN.fullmatch(token.text) for token in parsed.tokens):
        return []
    headers = "".join(f"#include <{name}>\n" for name in names if not name.startswith("simd/"))
    library = ["-include-pch", str(_library(headers, version))]
    flags = [*_FLAGS, *(_OLDER_FLAGS if version < (4, 0) else ()), *_defines(version)]
    _, errors = _run_text([*flags, "-fsyntax-only", *library], translated)
    qualified_this = re.search(r"\)\s*(?:const\s+)?(?:device|constant|threadgroup)\b", parsed.text)
    # The classes of the translation are no constants: of them nothing can be said.
    constants = lints.plain_constants(parsed)
    structs = frozenset(lints.structs(parsed))
    found = set(
        _diagnostics(
            errors, own, skip_object_parameter=bool(qualified_this), structs=structs, compiled=translated
        )
    )
    return sorted(d for d in found if d.rule != "constant-init" or (d.file, d.line) in constants)


_NEWER_CXX = "class template argument deduction|non-type template parameter"
_MESSAGE = re.compile(r"(?m)^(.*?):(\d+):\d+: (fatal error|error|note|warning): (.*)$")
_SPACE = re.compile(r"LILY_AS_(?:device|constant|threadgroup)|__attribute__\(\(address_space\(([123])\)\)\)")
_SPACE_NAME = {"1": "device", "2": "constant", "3": "threadgroup"}


def _diagnostics(
    text: str,
    own: set[str],
    *,
    skip_object_parameter: bool = False,
    structs: frozenset[str] = frozenset(),
    compiled: str = "",
) -> Iterator[Diagnostic]:
    """Errors in clang's output. An error inside a header counts where the source led there.

    ``structs`` are the classes of the source, and ``compiled`` is what clang read.
    """
    blocks: list[list[re.Match[str]]] = []
    for match in _MESSAGE.finditer(text):
        if "error" in match[3]:
            blocks.append([match])
        elif blocks:
            blocks[-1].append(match)
    # An aggregate in braces that is copied out of an address space is taken for its first member, and what
    # follows for the next ones.
    copied = _copied_members((error for error, *_ in blocks), structs, compiled)
    lines = set()
    for error, *notes in blocks:
        message = error[4]
        if _is_copy(message, notes) or (
            (error[1], error[2]) in copied and re.search("narrow|excess|no viable|cannot init", message)
        ):
            continue
        # C++ has no address space on `this`; the translation keeps one version of such members.
        if skip_object_parameter and "object parameter" in message and "LILY_AS_" in message:
            continue
        # Of the conversions that lose something Metal forbids those to bfloat.
        if "implicit conversion" in message and not re.search(r"to '[^']*(?:bfloat|__bf16)", message):
            continue
        # Most of newer C++ compiles in C++14 too, with a warning.
        if "incompatible with C++" in message and not re.search(_NEWER_CXX, message):
            continue
        rule, text = _rule(message, notes)
        places = [error] if "lily thread-reference" not in message else []
        places += [note for note in notes if re.search(r"requested here|in instantiation", note[4])]
        place = next((p for p in places if p[1] in own), None)
        if place is None:
            outside = f"{Path(error[1]).name}:{error[2]}: "
            yield Diagnostic(min(own), 0, rule, outside + text)
        elif (place[1], place[2]) not in lines:
            lines.add((place[1], place[2]))
            yield Diagnostic(place[1], int(place[2]), rule, text)


def _is_copy(message: str, notes: Sequence[re.Match[str]]) -> bool:
    """Whether clang misses the constructor that copies an aggregate out of an address space."""
    missing = "no matching (?:constructor for initialization of|conversion for )"
    crossing = "(the implicit copy constructor) not viable: cannot bind reference in address space"
    return bool(re.match(missing, message)) and any(crossing in note[4] for note in notes)


def _copied_members(
    errors: Iterable[re.Match[str]], structs: frozenset[str], text: str
) -> set[tuple[str, str]]:
    """(file, line) where a member is to be made of one of ``structs`` in an address space.

    Not where a variable is: there the type stands before the place of the error.
    """
    found = []
    for error in errors:
        source = re.match(
            r"(?:no viable conversion from|cannot initialize an? (?:member|array) .* of type) '([^']*)'",
            _plain(error[4]),
        )
        words = re.findall(r"\w+", re.sub("<.*", "", source[1])) if source else []
        if words and words[-1] in structs and lints.SPACES & set(words):
            found.append(error)
    if not found:
        return set()
    lines = {(file, str(number)): line for number, file, line in numbered(text, "")}

    def is_variable(error: re.Match[str]) -> bool:
        column = int(error[0].removeprefix(f"{error[1]}:{error[2]}:").split(":")[0])
        return bool(re.search(r"[\w>]\s+$", lines.get((error[1], error[2]), "")[: column - 1]))

    return {(error[1], error[2]) for error in found if not is_variable(error)}


# Rule and message of the assertions in the headers and edits, by their texts.
_ASSERTIONS = {
    "atomic-float": ("atomic-float", "an atomic float cannot be in threadgroup memory"),
    "atomic-space": ("atomic-space", "an atomic object must be in device or threadgroup memory"),
    "atomic-type": ("atomic-type", "this atomic does not exist for the type"),
    "cast": ("address-space", "a cast cannot change the address space"),
    "matrix-pointer": (
        "matrix-pointer",
        "a simdgroup matrix is loaded from device or threadgroup memory, and stored there",
    ),
    "swizzle-size": ("swizzle", "the vector has fewer components than the swizzle names"),
    "swizzle-twice": ("swizzle", "a swizzle that is assigned cannot name a component twice"),
    "thread-reference": (
        "thread-reference",
        "a thread reference or pointer cannot take an object of another address space",
    ),
    "vector-element": ("vector-element", "an element of a vector has no address and takes no reference"),
}


def _rule(message: str, notes: Sequence[re.Match[str]]) -> tuple[str, str]:
    """The rule that an error of clang's breaks, and the error in Metal's terms."""
    details = [note[4] for note in notes]
    if "lily threadgroup-memory" in message:
        size = re.search(r"'(\d+) <= 32768'", " ".join(details))
        amount = f"{size[1]} bytes" if size else "more than 32,768 bytes"
        return "threadgroup-memory", f"the kernel's threadgroup variables take {amount}; the limit is 32,768"
    if assertion := re.search("lily type: (.*)", message):
        return "type", assertion[1]
    if assertion := re.search(r"lily ([\w-]+)\W*$", message):
        return _ASSERTIONS[assertion[1]]
    plain = _plain(message)
    if "variable length array" in message:
        return "vla", "the size of an array must be known to the compiler"
    if "undeclared identifier" in message or "no member named" in message:
        return "undeclared", plain
    if newer := re.match(f"({_NEWER_CXX}).* incompatible with C\\+\\+", message):
        subject = newer[1] if "class" in newer[1] else "a template parameter that is a class or a real"
        return "cxx-version", f"{subject} is newer C++; Metal is C++14"
    if "read-only variable" in message or "const-qualified" in message:
        return "read-only", plain
    if "implicit conversion" in message or re.match("(?:cannot initialize|assigning).*'bfloat'", message):
        return "bfloat", "a float does not become a bfloat without an explicit conversion"
    if "global constructor" in message:
        return "constant-init", "the value of a constant must be known to the compiler"
    if any("Fills" in detail for detail in details):
        return "overload", f"{plain}: what fills up is of another type"
    if re.search("no matching function for call to '(?:simd|quad)_", message):
        return "simd-type", f"{plain}: it takes integers and reals of up to 32 bits"
    candidates = [Path(note[1]) for note in notes if note[4].startswith("candidate")]
    of_library = bool(candidates) and all(path.is_relative_to(INCLUDE_DIR) for path in candidates)
    if "is ambiguous" in message or (of_library and message.startswith("no matching function")):
        return "overload", plain
    if any("address space" in part or _spaces_differ(part) for part in (message, *details)):
        return "address-space", plain
    return "compile", plain


def _plain(message: str) -> str:
    """The message with address spaces as Metal names them."""
    return _SPACE.sub(lambda m: _SPACE_NAME[m[1]] if m[1] else m[0].removeprefix("LILY_AS_"), message)


def _spaces_differ(message: str) -> bool:
    """Whether the message is about two pointers, or objects to refer to, in different address spaces."""
    types = re.findall(r"'([^']*)'", re.sub(r" \(aka '[^']*'\)", "", _plain(message)))[-2:]
    refers = re.search("object parameter|deduce|conflicting types", message)
    if len(types) < 2 or not (refers or all("*" in t or "[" in t for t in types)):
        return False
    spaces = [re.search(r"\b(device|constant|threadgroup)\b", t) for t in types]
    return len({space[1] if space else "thread" for space in spaces}) == 2


# --- Apple's compiler ---------------------------------------------------------------------------------------


def _apple(paths: Sequence[str]) -> list[Diagnostic]:
    """What ``xcrun metal`` says, where it exists."""
    if sys.platform != "darwin" or not shutil.which("xcrun"):
        return []
    if subprocess.run(["xcrun", "--find", "metal"], capture_output=True).returncode:
        return []
    found = []
    for file, text in _complete_sources(paths):
        version = _version(None, text)
        with tempfile.TemporaryDirectory(prefix="lily-metal-") as folder:
            target = Path(folder) / "kernel.metal"
            target.write_text(text)
            command = ["xcrun", "metal", f"-std=metal{version[0]}.{version[1]}", "-fno-color-diagnostics"]
            command += [
                "-I",
                str(_mlx_include()),
                "-I",
                str(Path(file).parent),
                "-c",
                str(target),
                "-o",
                os.devnull,
            ]
            errors = subprocess.run(command, capture_output=True, text=True).stderr
        errors = errors.replace(str(target), file)
        found += [
            Diagnostic(match[1], int(match[2]), "compile", f"xcrun metal: {match[4]}")
            for match in _MESSAGE.finditer(errors)
            if "error" in match[3]
        ]
    return found


def _complete_sources(paths: Sequence[str]) -> Iterator[tuple[str, str]]:
    """(name, text) of all sources that :func:`main_check` checks."""
    for path in map(Path, paths or [str(source.KERNELS)]):
        if path.is_dir() and path.resolve() == source.KERNELS.resolve():
            for stem, header, body, call in _kernel_calls():
                yield stem, _complete(stem, body, header, call)
        else:
            for file in sorted(path.rglob("*.metal")) if path.is_dir() else [path]:
                yield str(file), file.read_text(encoding="utf-8")
