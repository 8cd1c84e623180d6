"""Rules of the Metal Shading Language that a C++ compiler does not know, checked on tokens.

The input is preprocessed source, so that what a macro hides is seen too and what ``#if`` leaves out is not.
The rules follow Apple's compiler for Metal 3.1 (macOS 14), which is C++14 with ``if constexpr``, structured
bindings and fold expressions; where specification and compiler differ, what the compiler accepts is accepted.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from .msl import INCLUDE_DIR

SPACES = frozenset({"device", "constant", "threadgroup", "thread"})
MAX_THREADS = 1024

Version = tuple[int, int]

RULES = {
    "address-space": "a pointer or reference names its address space, and keeps it",
    "atomic-float": "atomic floats live in device memory",
    "atomic-64": "64-bit atomics need Metal 4 or an M3",
    "aggregate": "a struct without constructors is initialised in braces",
    "atomic-space": "atomics are in device or threadgroup memory",
    "atomic-type": "atomics are int, uint, bool or float, and few functions take the last two",
    "attribute": "a parameter of a kernel has an attribute that says where it comes from, and fits it",
    "attribute-type": "positions and sizes are ushort or uint, indices in a group scalars",
    "bfloat": "nothing but an explicit conversion makes a float a bfloat",
    "buffer-index": "buffers have indices of their own, from 0 to 30",
    "compile": "it does not compile",
    "constant-init": "a constant at program scope has a value",
    "cxx-version": "Metal is C++14",
    "double": "there is no double",
    "exceptions": "there are no exceptions",
    "goto": "there is no goto",
    "include": "only Metal's own headers exist",
    "inline-asm": "there is no inline assembly",
    "kernel-call": "a kernel is not called",
    "kernel-return": "a kernel returns void",
    "keyword": "a word of the language is no name",
    "lambda": "lambdas need Metal 3.2",
    "literal": "a literal has one of Metal's suffixes",
    "long-long": "there is no long long; long has 64 bits",
    "matrix-pointer": "simdgroup matrices are loaded from device or threadgroup memory, and stored there",
    "main": "no function is called main",
    "metal-version": "a newer Metal has it",
    "new-delete": "there is no heap",
    "overload": "the types of the arguments fit one function of Metal's library best",
    "program-scope": "a variable outside functions is constant",
    "read-only": "what is constant or const is not written",
    "recursion": "a function does not call itself",
    "rtti": "types are not known at run time",
    "simd-type": "simd functions take integers and reals of up to 32 bits, no bool",
    "static-local": "a variable inside a function is not static",
    "std-namespace": "the C++ standard library does not exist",
    "storage-class": "register and thread_local do not exist",
    "swizzle": "a swizzle names components of the vector, each once where it is assigned",
    "thread-reference": "a thread reference or pointer does not take an object of another address space",
    "threadgroup-init": "threadgroup memory has no initial value",
    "threadgroup-memory": "a threadgroup has 32 KB of memory",
    "threadgroup-variable": "threadgroup variables are declared in kernels",
    "threads": "a threadgroup has at most 1,024 threads",
    "type": "a type is one of Metal's",
    "undeclared": "Metal's library does not have it",
    "undefined": "a function that is called has a body",
    "vector-element": "an element of a vector has no address, and no reference",
    "virtual": "there are no virtual functions",
    "vla": "an array's size is known to the compiler",
}


@dataclass(frozen=True, order=True)
class Diagnostic:
    """An error in a Metal source: file and line as ``#line`` names them, rule (of RULES), what is wrong."""

    file: str
    line: int
    rule: str
    message: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.rule}: {self.message}"


class Token(NamedTuple):
    """A token of preprocessed source; ``start`` and ``end`` are positions in its text."""

    kind: str
    text: str
    file: str
    line: int
    start: int
    end: int


@dataclass
class Function:
    """A function of the source, by positions in the token list. ``body`` is empty for a declaration."""

    name: int
    head: range
    parameters: list[range]
    body: range
    is_kernel: bool
    template: tuple[str, ...]
    scope: str = ""


_TOKEN = re.compile(
    r"""
    (?P<space> [ \t\r\f\v\n]+ | \\\n )
  | (?P<string> "(?:\\.|[^"\\\n])*" )
  | (?P<char> '(?:\\.|[^'\\\n])*' )
  | (?P<number> (?:0[xX][0-9a-fA-F']+(?:\.[0-9a-fA-F]*)?(?:[pP][+-]?\d+)?
                 | (?:\d[\d']*\.?\d*|\.\d+)(?:[eE][+-]?\d+)?) \w* )
  | (?P<word> [A-Za-z_]\w* )
  | (?P<mark> ::|->\*?|\+\+|--|<=>|<<=|>>=|<=|>=|==|!=|&&|\|\||[-+*/%&|^]=|\.\.\.|<<|\[\[|\]\]|. )
    """,
    re.VERBOSE,
)
LINE_MARK = re.compile(r'[ \t]*#[ \t]*(?:line[ \t]+)?(\d+)(?:[ \t]+"([^"]*)")?')
INCLUDE_PRAGMA = "#pragma lily_include "
"""What stands for ``#include <...>`` in preprocessed source, which the headers are not in, and for a
quoted one that finds no file."""

_CLOSING = {"(": ")", "[": "]", "{": "}", "[[": "]]"}


def tokenize(text: str, file: str) -> list[Token]:
    """Tokens of preprocessed text; line markers set file and line, other directives are skipped."""
    tokens = []
    number, position = 1, 0
    for line in text.splitlines(keepends=True):
        if line.lstrip().startswith("#"):
            if mark := LINE_MARK.match(line):
                number, file = int(mark[1]) - 1, mark[2] or file
        else:
            for match in _TOKEN.finditer(line):
                if match.lastgroup != "space":
                    start = position + match.start()
                    end = position + match.end()
                    tokens.append(Token(match.lastgroup or "", match[0], file, number, start, end))
        number += 1
        position += len(line)
    return tokens


class Source:
    """Preprocessed Metal source and what can be told about its tokens.

    Attributes:
        tokens: without attributes ``[[...]]``, which are in :attr:`attributes`.
        attributes: (text, first token), by position of the token that they follow.
        functions: every function, members too.
        scopes: for each token the kind of its innermost braces: ``namespace``, ``class``, ``enum``,
            ``function``, ``kernel``, ``values``.
        owner: for each token the function that it is in.
    """

    def __init__(self, text: str, file: str) -> None:
        self.text = text
        self.attributes: dict[int, list[tuple[str, Token]]] = {}
        self.tokens = self._without_attributes(tokenize(text, file))
        self._texts = [token.text for token in self.tokens]
        self._closing = self._pair_brackets()
        self.functions: list[Function] = []
        self.scopes: list[str] = []
        self.owner: list[Function | None] = []
        self._parse()

    def _without_attributes(self, tokens: Iterable[Token]) -> list[Token]:
        kept: list[Token] = []
        inside: list[Token] | None = None
        for token in tokens:
            if inside is not None:
                if token.text == "]]" and inside:
                    text = " ".join(t.text for t in inside)
                    self.attributes.setdefault(len(kept) - 1, []).append((text, inside[0]))
                    inside = None
                else:
                    inside.append(token)
            elif token.text == "[[":
                inside = []
            elif token.text == "]]":  # of a[b[i]]
                kept += [Token("mark", "]", token.file, token.line, token.start, token.end - 1)]
                kept += [Token("mark", "]", token.file, token.line, token.end - 1, token.end)]
            else:
                kept.append(token)
        return kept

    def _pair_brackets(self) -> dict[int, int]:
        """The position of the closing bracket by that of the opening one, the last token without any."""
        opened: dict[str, list[int]] = {closing: [] for closing in _CLOSING.values()}
        pairs: dict[int, int] = {}
        for i, text in enumerate(self._texts):
            if text in _CLOSING:
                opened[_CLOSING[text]].append(i)
            elif opened.get(text):
                pairs[opened[text].pop()] = i
        for rest in opened.values():
            pairs.update(dict.fromkeys(rest, len(self.tokens) - 1))
        return pairs

    def word(self, i: int) -> str:
        """Text of token i, empty outside the source."""
        return self._texts[i] if 0 <= i < len(self._texts) else ""

    def kind(self, i: int) -> str:
        return self.tokens[i].kind if 0 <= i < len(self.tokens) else ""

    def closing(self, i: int) -> int:
        """Position of the bracket that closes the one at i."""
        return self._closing[i]

    def after_angles(self, i: int) -> int:
        """Position after the template list that opens at i; i itself if it is not one."""
        depth, j = 0, i
        while j < len(self.tokens):
            text = self.word(j)
            if text in _CLOSING:
                j = self.closing(j)
            elif text in (";", "{", "}"):
                return i
            depth += (text == "<") - (text == ">") - 2 * (text == ">>")
            j += 1
            if depth <= 0:
                return j
        return i

    def split(self, first: int, last: int) -> list[range]:
        """The parts between commas of tokens first..last-1, not looking into brackets or template lists."""
        parts, start, i = [], first, first
        while i < last:
            if self.word(i) in _CLOSING:
                i = self.closing(i)
            elif self.word(i) == "<" and self.kind(i - 1) == "word":
                i = max(i, self.after_angles(i) - 1)
            elif self.word(i) == ",":
                parts.append(range(start, i))
                start = i + 1
            i += 1
        if last > first:
            parts.append(range(start, last))
        return parts

    def statement(self, i: int) -> range:
        """Tokens of the declaration or statement that token i belongs to, without its body."""
        start = i
        while start > 0 and self.word(start - 1) not in (";", "{", "}"):
            start -= 1
        end = i
        while end < len(self.tokens) and self.word(end) not in (";", "{", "}"):
            end = self.closing(end) + 1 if self.word(end) in ("(", "[") else end + 1
        return range(start, end)

    def _parse(self) -> None:
        """Find functions, and for each token its scope and function."""
        stack: list[tuple[str, Function | None]] = [("namespace", None)]
        start = i = 0  # start: of the current declaration
        skip = -1  # the last token of something that has no scope of its own
        while i < len(self.tokens):
            kind, function = stack[-1]
            self.scopes.append(kind)
            self.owner.append(function)
            text = self.word(i)
            if i <= skip:
                pass
            elif text == "{":
                stack.append(self._opened(start, i, kind, function))
                start = i + 1
            elif text == "}":
                if len(stack) > 1:
                    stack.pop()
                start = i + 1
            elif text == ";":
                if kind in ("namespace", "class"):
                    self._declared(start, i, range(i, i), kind)
                start = i + 1
            elif text in ("(", "[") and kind in ("namespace", "class"):
                skip = self.closing(i)
            elif text == ":" and kind == "class" and self.word(i - 1) in ("public", "private", "protected"):
                start = i + 1
            elif text == ":" and kind in ("namespace", "class") and self.word(i - 1) == ")":
                skip = self._initialisers_end(i)
            i += 1

    def _initialisers_end(self, colon: int) -> int:
        """The last token before a constructor's body."""
        i = colon + 1
        while i < len(self.tokens) and self.word(i) not in (";",):
            if self.word(i) == "{" and self.kind(i - 1) != "word" and self.word(i - 1) != ">":
                return i - 1
            i = self.closing(i) + 1 if self.word(i) in _CLOSING else i + 1
        return i - 1

    def _opened(
        self, start: int, brace: int, kind: str, function: Function | None
    ) -> tuple[str, Function | None]:
        """The scope that the brace opens."""
        words = [self.word(j) for j in range(start, brace)]
        if kind in ("function", "kernel"):
            if set(words) & {"struct", "union", "enum"} and "(" not in words:
                return ("enum" if "enum" in words else "class"), function
            return ("values" if self.word(brace - 1) in ("=", ",", "return") else kind), function
        if kind in ("values", "enum"):
            return kind, function
        if "namespace" in words or (words[:1] == ["extern"] and "(" not in words):
            return "namespace", function
        if "enum" in words:
            return "enum", function
        declared = self._declared(start, brace, range(brace + 1, self.closing(brace)), kind)
        if declared is not None:
            return ("kernel" if declared.is_kernel else "function"), declared
        if set(words) & {"struct", "class", "union"}:
            return "class", function
        return "values", function

    def _declared(self, start: int, end: int, body: range, scope: str) -> Function | None:
        """Record the function that tokens start..end declare, if they do."""
        template: list[str] = []
        i = start
        while self.word(i) == "template" and self.word(i + 1) == "<":
            after = self.after_angles(i + 1)
            template += [self.word(part.stop - 1) for part in self._type_parameters(i + 2, after - 1)]
            i = max(after, i + 2)
        if self.word(i) == "template":  # an explicit instantiation
            return None
        head = i
        while i < end:
            text = self.word(i)
            if text == "=" or text in ("using", "typedef", "static_assert", "friend"):
                return None
            if text == "operator":
                i += 3 if self.word(i + 1) == "(" else 2
                while i < end and self.word(i) != "(":
                    i += 1
                break
            if text == "<" and self.kind(i - 1) == "word":
                i = max(i, self.after_angles(i) - 1)
            elif text in ("decltype", "alignas", "__attribute__", "explicit") and self.word(i + 1) == "(":
                i = self.closing(i + 1)
            elif text == "(":
                break
            i += 1
        if (
            i >= end
            or self.word(i) != "("
            or (self.kind(i - 1) != "word" and "operator" not in self._words(head, i))
        ):
            return None
        if i - head < 2 and scope == "namespace":  # a macro call, not a function: it has no type
            return None
        before = [a for j in range(start - 1, i) for a in self.attributes.get(j, ())]
        kernel = "kernel" in self._words(head, i) or any("kernel" in a.split() for a, _ in before)
        parameters = self.split(i + 1, self.closing(i))
        function = Function(i - 1, range(head, i), parameters, body, kernel, tuple(template), scope)
        self.functions.append(function)
        return function

    def _type_parameters(self, first: int, last: int) -> Iterator[range]:
        for part in self.split(first, last):
            if self.word(part.start) in ("typename", "class"):
                names = [j for j in part if self.word(j) == "="]
                yield range(part.start, names[0] if names else part.stop)

    def _words(self, first: int, last: int) -> list[str]:
        return [self.word(j) for j in range(first, last)]


# --- The rules ----------------------------------------------------------------------------------------------

_BANNED = {
    "double": ("double", "'double' is not supported in Metal"),
    "virtual": ("virtual", "'virtual' is not supported in Metal"),
    "throw": ("exceptions", "'throw' is not supported in Metal"),
    "try": ("exceptions", "'try' is not supported in Metal"),
    "catch": ("exceptions", "'catch' is not supported in Metal"),
    "new": ("new-delete", "'new' is not supported in Metal"),
    "goto": ("goto", "'goto' is not supported in Metal"),
    "dynamic_cast": ("rtti", "'dynamic_cast' is not supported in Metal"),
    "typeid": ("rtti", "'typeid' is not supported in Metal"),
    "asm": ("inline-asm", "inline assembly is not supported in Metal"),
    "__asm": ("inline-asm", "inline assembly is not supported in Metal"),
    "__asm__": ("inline-asm", "inline assembly is not supported in Metal"),
    "thread_local": ("storage-class", "'thread_local' is not supported in Metal"),
    "register": ("storage-class", "'register' is not supported in Metal"),
    "concept": ("cxx-version", "concepts are C++20; Metal is C++14"),
    "requires": ("cxx-version", "'requires' is C++20; Metal is C++14"),
    "consteval": ("cxx-version", "'consteval' is C++20; Metal is C++14"),
    "constinit": ("cxx-version", "'constinit' is C++20; Metal is C++14"),
    "co_await": ("cxx-version", "coroutines are C++20; Metal is C++14"),
    "co_yield": ("cxx-version", "coroutines are C++20; Metal is C++14"),
    "co_return": ("cxx-version", "coroutines are C++20; Metal is C++14"),
    "<=>": ("cxx-version", "'<=>' is C++20; Metal is C++14"),
    "__int128": ("type", "'__int128' is not supported in Metal"),
    "__int128_t": ("type", "'__int128_t' is not supported in Metal"),
    "__uint128_t": ("type", "'__uint128_t' is not supported in Metal"),
    "wchar_t": ("type", "'wchar_t' is not supported in Metal"),
}

# Words that C++ takes for names; those of _FUNCTION_WORDS only stand before a function at namespace scope.
_FUNCTION_WORDS = frozenset({"kernel", "vertex", "fragment"})
_KEYWORDS = SPACES | _FUNCTION_WORDS | {"half", "bfloat", "ray_data", "object_data"}

# Functions of a group of threads, and how many arguments they take at most.
_GROUP_FUNCTIONS = (
    (
        re.compile(
            r"(?:simd|quad)_(?:broadcast_first|sum|product|min|max|and|or|xor|all|any|ballot"
            r"|prefix_(?:in|ex)clusive_(?:sum|product))"
        ),
        1,
    ),
    (re.compile(r"(?:simd|quad)_(?:shuffle(?:_xor|(?:_rotate)?_(?:up|down))?|broadcast)"), 2),
    (re.compile(r"simdgroup_multiply"), 3),
    (re.compile(r"(?:simd|quad)_shuffle_and_fill_(?:up|down)|simdgroup_multiply_accumulate"), 4),
    (re.compile(r"simdgroup_(?:load|store)"), 5),
)
# Names of Metal's library, what must follow them to be that name, and the version that brought them.
_NEWER: dict[str, tuple[tuple[str, ...], Version]] = {
    "atomic_thread_fence": (("(",), (3, 2)),
    "memory_order_acquire": ((), (3, 2)),
    "memory_order_release": ((), (3, 2)),
    "memory_order_acq_rel": ((), (3, 2)),
    "memory_order_seq_cst": ((), (3, 2)),
    "thread_scope_thread": ((), (3, 2)),
    "thread_scope_simdgroup": ((), (3, 2)),
    "thread_scope_threadgroup": ((), (3, 2)),
    "thread_scope_device": ((), (3, 2)),
    "thread_scope_system": ((), (3, 2)),
    "coherent": (("(",), (3, 2)),
    "os_log_default": ((), (3, 2)),
    "os_log": ((), (3, 2)),
    "tensor": (("<",), (4, 0)),
    "cooperative_tensor": (("<",), (4, 0)),
    "tensor_ops": (("::",), (4, 0)),
    "matmul2d": (("<",), (4, 0)),
    "matmul2d_descriptor": ((), (4, 0)),
    "mpp": (("::",), (4, 0)),
}
# What describes the grid: scalars or vectors, all vectors of one size.
_GRID_ATTRIBUTES = frozenset(
    {
        "dispatch_threads_per_threadgroup",
        "grid_origin",
        "grid_size",
        "thread_position_in_grid",
        "thread_position_in_threadgroup",
        "threadgroup_position_in_grid",
        "threadgroups_per_grid",
        "threads_per_grid",
        "threads_per_threadgroup",
    }
)
# What gives a scalar to a kernel's parameter.
_INDEX_ATTRIBUTES = frozenset(
    {
        "dispatch_quadgroups_per_threadgroup",
        "dispatch_simdgroups_per_threadgroup",
        "quadgroup_index_in_threadgroup",
        "quadgroups_per_threadgroup",
        "simdgroup_index_in_threadgroup",
        "simdgroups_per_threadgroup",
        "thread_execution_width",
        "thread_index_in_quadgroup",
        "thread_index_in_simdgroup",
        "thread_index_in_threadgroup",
        "threads_per_simdgroup",
    }
)
_INPUT_ATTRIBUTES = _GRID_ATTRIBUTES | _INDEX_ATTRIBUTES | {"stage_in"}
_NEWER_HEADERS: dict[str, Version] = {
    "metal_logging": (3, 2),
    "metal_tensor": (4, 0),
    "metal_cooperative_tensor": (4, 0),
}
# Apple's headers, besides those that the stand-ins of msl have: sources that include them are only linted.
_OTHER_HEADERS = frozenset(
    {
        "metal_command_buffer",
        "metal_curves",
        "metal_function_pointers",
        "metal_graphics",
        "metal_imageblocks",
        "metal_interpolate",
        "metal_mesh",
        "metal_raytracing",
        "metal_tessellation",
        "metal_visible_function_table",
        *(f"simd/{name}.h" for name in ("simd", "types", "base", "packed", "vector", "vector_types")),
        *(f"simd/{name}.h" for name in ("vector_make", "matrix", "matrix_types", "math", "common", "logic")),
        *(f"simd/{name}.h" for name in ("geometry", "quaternion", "conversion", "reduce")),
    }
)
_LITERAL = re.compile(
    r"(?:0[xX][\da-fA-F']+(?:\.[\da-fA-F]*)?(?:[pP][+-]?\d+)?|0[bB][01']+"
    r"|(?:\d[\d']*\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)(?:[uU]?[lL]{0,2}|[lL]{1,2}[uU]|[fFhH]|bf|BF)"
)
_LONG_ATOMICS = frozenset({"long", "ulong", "int64_t", "uint64_t", "size_t", "ptrdiff_t"})
_UNSIGNED = re.compile(r"(?:u(?:short|int)|uint(?:16|32)_t)([23]?)")
_ATTRIBUTE = re.compile(r"(\w+)(?: \( ([^()]*) \))?")
MAX_BUFFERS = 31
_VALUE = re.compile(r"(?:bool|u?char|u?short|u?int|u?long|half|float|bfloat)[234]?")
# fmt: off
_QUALIFIERS = frozenset((
    "const", "constexpr", "volatile", "static", "inline", "extern", "mutable", "typename", "struct", "class",
    "union", "unsigned", "signed", "METAL_FUNC",
))
_NOT_A_TYPE = frozenset((
    "return", "case", "goto", "break", "continue", "else", "do", "delete", "new", "throw", "if", "while",
    "for", "switch", "using", "typedef", "template", "namespace", "public", "private", "protected",
    "operator", "sizeof", "static_assert", "default", "friend", "enum",
))
# fmt: on


def lint(source: Source, own: Iterable[str], version: Version) -> list[Diagnostic]:
    """Every breach of a rule in ``source``, one a line and rule.

    Args:
        source: preprocessed Metal.
        own: files to report about; the others are only read.
        version: of Metal, as (3, 1).
    """
    files = set(own)
    found: dict[tuple[str, int, str], Diagnostic] = {}
    for where, rule, message in _all(source, version):
        token = source.tokens[where] if isinstance(where, int) else where
        if token.file in files:
            diagnostic = Diagnostic(token.file, token.line, rule, message)
            found.setdefault((token.file, token.line, rule), diagnostic)
    return sorted(found.values())


def lint_includes(text: str, own: Iterable[str], version: Version) -> list[Diagnostic]:
    """Headers that Metal does not have, by the :data:`INCLUDE_PRAGMA` lines of preprocessed source."""
    files, found = set(own), []
    for file, number, header in includes(text):
        needs = (4, 0) if header.startswith("MetalPerf") else _NEWER_HEADERS.get(header, (1, 0))
        if header.startswith('"'):  # of what is not there no file can be left out
            found.append(Diagnostic(file, number, "include", f"there is no {header}"))
        elif file not in files:
            continue
        elif not is_header(header):
            found.append(Diagnostic(file, number, "include", f"<{header}> does not exist in Metal"))
        elif needs > version:
            message = f"<{header}> needs Metal {needs[0]}.{needs[1]}"
            found.append(Diagnostic(file, number, "metal-version", message))
    return found


def is_header(name: str) -> bool:
    """Whether ``#include <name>`` finds one of Apple's headers."""
    name = name.removeprefix("metal/")
    return name in _OTHER_HEADERS or (INCLUDE_DIR / name).is_file()


def includes(text: str) -> Iterator[tuple[str, int, str]]:
    """(file, line, header) of each :data:`INCLUDE_PRAGMA` line."""
    for number, file, line in numbered(text, ""):
        if line.startswith(INCLUDE_PRAGMA):
            yield file, number, line.removeprefix(INCLUDE_PRAGMA).strip()


def numbered(text: str, file: str) -> Iterator[tuple[int, str, str]]:
    """(number, file, line) of each line of ``text``, as its line directives say."""
    number = 1
    for line in text.splitlines():
        if mark := LINE_MARK.match(line):
            number, file = int(mark[1]), mark[2] or file
        else:
            yield number, file, line
            number += 1


# A token or its position, a rule and a message.
Finding = tuple[int | Token, str, str]


def _all(source: Source, version: Version) -> Iterator[Finding]:
    yield from _words(source, version)
    yield from _keywords(source)
    yield from _lambdas(source, version)
    yield from _pointers(source)
    yield from _variables(source)
    yield from _kernels(source)
    yield from _recursion(source)
    yield from _calls(source)
    yield from _group_calls(source)
    yield from _automatic(source, version)


def _words(s: Source, version: Version) -> Iterator[Finding]:
    for i, token in enumerate(s.tokens):
        text, after = token.text, s.word(i + 1)
        if text in _BANNED and s.word(i - 1) not in (".", "->", "::"):
            yield i, *_BANNED[text]
        elif text == "delete" and s.word(i - 1) != "=":
            yield i, "new-delete", "'delete' is not supported in Metal"
        elif text == "long" and after == "long":
            yield i, "long-long", "'long long' is not supported in Metal; 'long' has 64 bits"
        elif (
            token.kind == "number" and re.search(r"ll$|ll[uU]$", text, re.IGNORECASE) and "x" not in text[2:]
        ):
            yield i, "long-long", f"{text!r} is a long long, which Metal does not have"
        elif (
            token.kind == "number"
            and re.fullmatch(r"[\d.]+(?:e[+-]?\d+)?l", text, re.IGNORECASE)
            and _is_real(text)
        ):
            yield i, "double", f"{text!r} is a long double, which Metal does not have"
        elif token.kind == "number" and not _LITERAL.fullmatch(text):
            yield i, "literal", f"{text!r} has a suffix that Metal does not know"
        elif text == "noexcept" and after == "(" and s.kind(i - 1) == "mark" and s.word(i - 1) != ")":
            yield i, "exceptions", "the operator 'noexcept' is not supported in Metal"
        elif text == "std" and (after == "::" or s.word(i - 1) == "namespace"):
            yield i, "std-namespace", "the C++ standard library does not exist in Metal"
        elif (
            text in _NEWER and version < _NEWER[text][1] and (not _NEWER[text][0] or after in _NEWER[text][0])
        ):
            if not _is_declared(s, i):
                needs = _NEWER[text][1]
                yield i, "metal-version", f"'{text}' needs Metal {needs[0]}.{needs[1]}"
        elif text == "atomic_ulong" or (text == "atomic" and after == "<" and s.word(i + 2) in _LONG_ATOMICS):
            if version < (4, 0):
                yield i, "atomic-64", "64-bit atomics are not available on every chip of Metal 3"
        elif text == "atomic_float" or (text == "atomic" and after == "<" and s.word(i + 2) == "float"):
            before = {s.word(j) for j in range(max(0, i - 4), i)}
            if "threadgroup" in before:
                yield i, "atomic-float", "an atomic float cannot be in threadgroup memory"


def _keywords(s: Source) -> Iterator[Finding]:
    """Where a word of the language is declared as a name: behind a type, and before what follows a name."""
    parameters = {j for function in s.functions for part in function.parameters for j in part}
    for i, token in enumerate(s.tokens):
        if token.text not in _KEYWORDS:
            continue
        before, after = s.word(i - 1), s.word(i + 1)
        if token.text in _FUNCTION_WORDS:
            in_place = s.scopes[i] == "namespace" and i not in parameters and s.kind(i + 1) == "word"
            declared = not in_place and (s.kind(i - 1) == "word" or before in ("*", "&", ">", ","))
            declared = declared and before not in _NOT_A_TYPE - {"enum", "namespace", "using"}
        else:
            declared = bool(_VALUE.fullmatch(before) or before == "auto")
            declared = declared and after in ("=", ";", ",", ")", "[", "{", ":")
        if declared:
            yield i, "keyword", f"'{token.text}' is a word of the language and cannot be a name"


def _is_real(number: str) -> bool:
    return "." in number or "e" in number.lower()


def _in_metal(s: Source, i: int) -> bool:
    """Whether the name at i may be one of Metal's: it is not a member of something else."""
    return s.word(i - 1) not in (".", "->") and (s.word(i - 1) != "::" or s.word(i - 2) in ("metal", "mpp"))


def _is_text(s: Source, i: int) -> bool:
    """Whether the string at i is meant for the compiler."""
    j = i - 1
    while s.kind(j) == "string":
        j -= 1
    if s.word(j) in ("extern", "_Pragma"):
        return True
    return any(s.word(k) in ("static_assert", "__attribute__", "_Pragma") for k in s.statement(i))


def _is_declared(s: Source, i: int) -> bool:
    """Whether the source itself declares the name at i: as a variable, parameter, type or function."""
    name = s.word(i)
    return any(
        s.word(j) == name
        and (s.word(j - 1) in ("struct", "class", "typename", "using", "enum") or s.kind(j - 1) == "word")
        and s.word(j - 1) not in ("return", "const")
        for j in range(len(s.tokens))
    )


def _lambdas(s: Source, version: Version) -> Iterator[Finding]:
    if version >= (3, 2):
        return
    for i, token in enumerate(s.tokens):
        starts = s.word(i - 1) in ("=", "(", ",", "return", "{", ";", "?", ":", "&&", "||", "}")
        if token.text == "[" and starts and (s.scopes[i] != "namespace" or s.word(i - 1) == "="):
            after = s.closing(i) + 1
            if s.word(after) == "(":
                after = s.closing(after) + 1
                while s.word(after) in ("mutable", "const", "thread") or s.word(after) == "->":
                    after += 1 if s.word(after) != "->" else 2
            if s.word(after) == "{":
                yield i, "lambda", "lambda expressions need Metal 3.2"


# Pointers and references.

_BARE = "{} type must have an explicit address space qualifier"


def _pointers(s: Source) -> Iterator[Finding]:
    for function in s.functions:
        for parameter in function.parameters:
            yield from _bare_declarator(s, parameter)
        yield from _bare_declarator(s, range(function.head.start, function.name))
    for i, token in enumerate(s.tokens):
        if s.word(i - 1) in (";", "{", "}", "") or (s.word(i - 1) == "(" and s.word(i - 2) == "for"):
            if s.scopes[i] in ("class", "function", "kernel", "namespace"):
                yield from _bare_local(s, i)
        elif s.word(i - 1) == ":" and s.word(i - 2) in ("public", "private", "protected"):
            yield from _bare_local(s, i)
        if token.text in ("static_cast", "reinterpret_cast", "const_cast") and s.word(i + 1) == "<":
            yield from _bare_declarator(s, range(i + 2, s.after_angles(i + 1) - 1))
        elif token.text == "(" and (cast := pointer_cast(s, i)):
            yield from _bare_declarator(s, cast)
        elif token.text in ("using", "typedef"):
            statement = s.statement(i)
            first = next((j + 1 for j in statement if s.word(j) == "="), i + 1)
            if token.text == "typedef" or first > i + 1:
                yield from _bare_declarator(s, range(first, statement.stop))


def _bare_declarator(s: Source, tokens: range) -> Iterator[Finding]:
    """A declarator with more pointers and references than address spaces."""
    marks, spaces, i = [], 0, tokens.start
    while i < tokens.stop:
        text = s.word(i)
        if text == "=":
            break
        if text in ("decltype", "sizeof", "alignas", "__attribute__") and s.word(i + 1) == "(":
            i = s.closing(i + 1)
        elif text == "<" and s.kind(i - 1) == "word":
            i = max(i, s.after_angles(i) - 1)
        elif text == "(" and s.word(i + 1) not in ("*", "&"):
            return  # a function type
        elif text == "(" and s.word(s.closing(i) + 1) == "(":
            return  # a pointer to a function
        elif text in ("[", "auto"):
            if text == "auto":
                return  # deduced, with the space of what it is deduced from
            i = s.closing(i)
        elif text in SPACES:
            spaces += 1
        elif text in ("*", "&", "&&"):
            marks.append(i)
        i += 1
    if len(marks) > 1 and s.word(marks[-1]) == "&" and s.word(marks[-2]) == "*":
        marks.pop()  # a reference to a pointer, which itself is a thread's
    if len(marks) > spaces:
        yield marks[-1], "address-space", _BARE.format("pointer" if s.word(marks[-1]) == "*" else "reference")


def _bare_local(s: Source, i: int) -> Iterator[Finding]:
    """A variable or member whose declaration starts at i."""
    first = i
    while s.word(i) in _QUALIFIERS or s.word(i) in SPACES:
        i += 1
    if s.kind(i) != "word" or s.word(i) in _NOT_A_TYPE or s.word(i) == "auto":
        return
    while s.kind(i) == "word" and s.word(i) not in SPACES:
        i += 1
        if s.word(i) == "<":
            i = s.after_angles(i)
        if s.word(i) != "::":
            break
        i += 1
    while s.word(i) in ("const", "volatile") or s.word(i) in SPACES:
        i += 1
    if s.word(i) not in ("*", "&", "&&"):
        return
    end = i
    while s.word(end) in ("*", "&", "&&", "const", "volatile", "restrict") or s.word(end) in SPACES:
        end += 1
    if s.kind(end) == "word" and s.word(end + 1) in ("=", ";", ",", "[", "{", ":", ")"):
        yield from _bare_declarator(s, range(first, end))


def pointer_cast(s: Source, i: int) -> range | None:
    """The type of the C-style cast to a pointer that the parenthesis at i opens."""
    last = s.closing(i)
    inner = range(i + 1, last)
    if s.word(last - 1) != "*" or (
        s.kind(i - 1) == "word" and s.word(i - 1) not in ("return", "else", "case")
    ):
        return None
    if s.word(i - 1) in (")", "]", ">"):
        return None
    plain = {"const", "volatile", "*", "::", "unsigned", "signed", "typename", "struct"} | SPACES
    names = [j for j in inner if s.word(j) not in plain]
    if not all(s.kind(j) == "word" or s.word(j) in ("<", ">", ",") or s.kind(j) == "number" for j in names):
        return None
    follows = s.kind(last + 1) in ("word", "number") or s.word(last + 1) in ("(", "&", "*", "-", "!", "~")
    return inner if names and follows and s.kind(i + 1) == "word" else None


# Variables.


def _variables(s: Source) -> Iterator[Finding]:
    for i, token in enumerate(s.tokens):
        scope = s.scopes[i]
        if token.text == "static" and scope in ("function", "kernel"):
            yield i, "static-local", "variables in function scope cannot be declared static"
        if token.text == "threadgroup" and (name := _variable_name(s, i)) is not None:
            if scope == "function":
                message = "threadgroup variables can be declared in kernel functions only"
                yield i, "threadgroup-variable", message
            elif scope in ("namespace", "class"):
                yield (
                    i,
                    "threadgroup-variable",
                    "a threadgroup variable can be declared in a kernel function only",
                )
            elif scope == "kernel" and "=" in [s.word(j) for j in s.statement(name)]:
                yield (
                    i,
                    "threadgroup-init",
                    "variable in threadgroup address space cannot have an initial value",
                )
    for first, end, is_class in _declarations(s):
        yield from _global(s, first, end, is_class)


def _variable_name(s: Source, i: int) -> int | None:
    """Position of the name, if the address space at i is that of a variable, not of what one points to."""
    if s.scopes[i] in ("values", "enum") or s.word(i - 1) in ("(", ","):
        return None
    j = i + 1
    while s.word(j) in _QUALIFIERS or s.word(j) in SPACES:
        j += 1
    if s.kind(j) != "word" or s.word(j) in _NOT_A_TYPE:
        return None
    while s.kind(j) == "word":
        j += 1
        if s.word(j) == "<":
            j = s.after_angles(j)
        if s.word(j) != "::":
            break
        j += 1
    while s.word(j) in ("const", "volatile"):
        j += 1
    return j if s.kind(j) == "word" and s.word(j + 1) in ("[", ";", ",", "=", "{") else None


def _declarations(s: Source) -> Iterator[tuple[int, int, bool]]:
    """(first, end, in a class) of declarations outside functions that end in a semicolon."""
    start = 0
    for i in range(len(s.tokens)):
        text, scope = s.word(i), s.scopes[i]
        if text in ("{", "}"):
            opens_value = text == "{" and i + 1 < len(s.scopes) and s.scopes[i + 1] == "values"
            if not opens_value and not (text == "}" and scope == "values"):
                start = i + 1
        elif text == ";" and scope in ("namespace", "class"):
            yield start, i, scope == "class"
            start = i + 1
        elif text == ":" and s.word(i - 1) in ("public", "private", "protected"):
            start = i + 1


def _global(s: Source, first: int, end: int, in_class: bool) -> Iterator[Finding]:
    """A variable outside functions must be constant, and have a value."""
    while s.word(first) == "template" and s.word(first + 1) == "<":
        first = max(first + 1, s.after_angles(first + 1))
    words = [s.word(j) for j in range(first, end)]
    stop = words.index("=") if "=" in words else len(words)
    head = words[:stop]
    if (
        not head
        or set(head) & _NOT_A_TYPE
        or set(head) & {"struct", "class", "union", "namespace", "concept"}
    ):
        return
    if "(" in head or s.kind(first) != "word" or len([w for w in head if re.match(r"[A-Za-z_]", w)]) < 2:
        return
    if in_class and "static" not in head:
        return
    if "sampler" in head or "threadgroup" in head:
        return
    if "constant" not in head:
        where = "a static member" if in_class else "a program scope variable"
        yield first, "program-scope", f"{where} must reside in the constant address space"
    elif (
        not in_class and stop == len(words) and words[-1] != "}" and not _has_function_constant(s, first, end)
    ):
        yield first, "constant-init", "a variable in the constant address space must be initialized"


def _has_function_constant(s: Source, first: int, end: int) -> bool:
    return any("function_constant" in a for j in range(first, end) for a, _ in s.attributes.get(j, ()))


def plain_constants(s: Source) -> set[tuple[str, int]]:
    """(file, line) of the constants outside functions that are scalars, vectors or arrays of them."""
    found = set()
    for first, end, _ in _declarations(s):
        stop = next((j for j in range(first, end) if s.word(j) in ("=", "[", "{", "(")), end)
        types = [s.word(j) for j in range(first, stop - 1) if s.word(j) not in _QUALIFIERS]
        if "constant" in types and all(w == "constant" or _VALUE.fullmatch(w) for w in types):
            found.add((s.tokens[stop - 1].file, s.tokens[stop - 1].line))
    return found


# Kernels and calls.


def _kernels(s: Source) -> Iterator[Finding]:
    for attributes in s.attributes.values():
        for attribute, token in attributes:
            match = re.search(r"max_total_threads_per_threadgroup \( (\d+) \)", attribute)
            if match and int(match[1]) > MAX_THREADS:
                message = f"{match[1]} threads in a threadgroup; at most {MAX_THREADS} are possible"
                yield token, "threads", message
    for function in s.functions:
        head = [s.word(j) for j in range(function.head.start, function.name)]
        name = s.word(function.name)
        if name == "main" and function.scope == "namespace":
            yield function.name, "main", "a function cannot be called 'main'"
        if not function.is_kernel:
            continue
        if "void" not in head:
            yield function.name, "kernel-return", f"a kernel returns void, '{name}' does not"
        for parameter in function.parameters:
            yield from _kernel_parameter(s, parameter)
        yield from _positions(s, function)
        yield from _indices(s, function)


def _attributes(s: Source, parameter: range) -> dict[str, str]:
    """The attributes of a parameter and their arguments."""
    texts = [a for j in parameter for a, _ in s.attributes.get(j, ())]
    return {match[1]: match[2] or "" for text in texts for match in _ATTRIBUTE.finditer(text)}


def _type_of(s: Source, parameter: range) -> str:
    """The type of a parameter that is passed by value, if it is a single name."""
    words = [s.word(j) for j in parameter]
    types = [w for w in words[:-1] if w not in _QUALIFIERS and w not in SPACES]
    return "".join(types) if len(types) != 1 or "unsigned" not in words else f"u{types[0]}"


def _kernel_parameter(s: Source, parameter: range) -> Iterator[Finding]:
    words = [s.word(j) for j in parameter]
    name = words[-1] if words else ""
    attributes = _attributes(s, parameter)
    if "*" in words or "&" in words or "[" in words:
        if "thread" in words and not {"device", "constant", "threadgroup"} & set(words):
            message = "a kernel's buffer is in the device, constant or threadgroup address space"
            yield parameter.start, "address-space", message
        in_threadgroup = "threadgroup" in words and not {"device", "constant"} & set(words)
        wrong = "buffer" if in_threadgroup else "threadgroup"
        if wrong in attributes:
            space = "threadgroup" if in_threadgroup else "device or constant"
            yield parameter.start, "attribute", f"'{name}' is in {space} memory, '{wrong}' is not for that"
        for attribute in sorted(attributes.keys() & (_GRID_ATTRIBUTES | _INDEX_ATTRIBUTES)):
            yield parameter.start, "attribute", f"'{attribute}' is a value, '{name}' is none"
        return
    kind = _type_of(s, parameter)
    if "buffer" in attributes:
        yield parameter.start, "attribute", f"a buffer is a pointer or a reference, '{name}' is a value"
    elif (_VALUE.fullmatch(kind) or kind in structs(s)) and not attributes.keys() & _INPUT_ATTRIBUTES:
        has = f"the unknown attribute '{min(attributes)}'" if attributes else "no attribute"
        yield parameter.start, "attribute", f"'{name}' is passed by value and has {has} to say what it is"
    for attribute in sorted(attributes.keys() & (_GRID_ATTRIBUTES | _INDEX_ATTRIBUTES)):
        unsigned, is_index = _UNSIGNED.fullmatch(kind), attribute in _INDEX_ATTRIBUTES
        if _VALUE.fullmatch(kind) and (not unsigned or (unsigned[1] and is_index)):
            allowed = "ushort or uint" + ("" if is_index else ", or a vector of 2 or 3")
            yield parameter.start, "attribute-type", f"'{attribute}' is {allowed}, not '{kind}'"


def structs(s: Source) -> dict[str, list[int]]:
    """Names of classes that the source defines, and where."""
    found: dict[str, list[int]] = {}
    for i, token in enumerate(s.tokens):
        defines = token.text in ("struct", "class", "union") and s.word(i + 2) in ("{", ":")
        if defines and s.kind(i + 1) == "word" and s.word(i - 1) not in ("enum", "<", ","):
            found.setdefault(s.word(i + 1), []).append(i + 1)
    return found


def _positions(s: Source, function: Function) -> Iterator[Finding]:
    """Vectors that describe the grid have one size."""
    first = ""
    given: dict[str, range] = {}
    for parameter in function.parameters:
        attributes = _attributes(s, parameter)
        given.update(dict.fromkeys(attributes, parameter))
        match = _UNSIGNED.fullmatch(_type_of(s, parameter))
        if not match or not match[1] or not attributes.keys() & _GRID_ATTRIBUTES:
            continue
        first = first or match[1]
        if match[1] != first:
            message = f"positions and sizes have as many components as each other, {first} or {match[1]}"
            yield parameter.start, "attribute-type", message
    if {"thread_execution_width", "threads_per_simdgroup"} <= given.keys():
        message = "'thread_execution_width' and 'threads_per_simdgroup' are the same input"
        yield given["threads_per_simdgroup"].start, "attribute", message


def _indices(s: Source, function: Function) -> Iterator[Finding]:
    """Indices of buffers and of threadgroup memory: each once, and in range."""
    taken: set[tuple[str, int]] = set()
    buffers = 0
    for parameter in function.parameters:
        words = {s.word(j) for j in parameter}
        attributes = _attributes(s, parameter)
        buffers += bool({"device", "constant"} & words)
        if buffers == MAX_BUFFERS + 1 and "buffer" not in attributes and {"device", "constant"} & words:
            yield parameter.start, "buffer-index", f"a kernel has at most {MAX_BUFFERS} buffers"
        for kind in ("buffer", "threadgroup"):
            if not re.fullmatch(r"\d+", attributes.get(kind, "")):
                continue
            index = int(attributes[kind])
            if index >= MAX_BUFFERS:
                message = f"'{kind}' has indices from 0 to {MAX_BUFFERS - 1}, not {index}"
                yield parameter.start, "buffer-index", message
            # Of those that function constants choose from, one may be there at a time.
            elif (kind, index) in taken and "function_constant" not in attributes:
                yield parameter.start, "buffer-index", f"'{kind}({index})' is taken by another parameter"
            if "function_constant" not in attributes:
                taken.add((kind, index))


def _calls(s: Source) -> Iterator[Finding]:
    """Calls of kernels, of functions without a body, and parentheses where an aggregate needs braces."""
    namespace = [f for f in s.functions if f.scope == "namespace"]
    kernels = {s.word(f.name) for f in namespace if f.is_kernel}
    kernels -= {s.word(f.name) for f in namespace if not f.is_kernel}
    # A declaration ends in a semicolon, where its body would be.
    bodies = {s.word(f.name) for f in s.functions if s.word(f.body.start) != ";"}
    declared = {
        name: f
        for f in namespace
        if (name := s.word(f.name)) not in bodies
        and not f.template
        and "extern" not in [s.word(j) for j in f.head]
        and not s.attributes.keys() & set(f.head)
    }
    makers = {s.word(f.name) for f in s.functions if f.scope == "class"}
    aggregates = {
        name
        for name, places in structs(s).items()
        if len(places) == 1 and name not in makers and s.word(places[0] + 1) == "{"
    }
    for i in range(len(s.tokens)):
        name = s.word(i)
        if s.scopes[i] not in ("function", "kernel") or s.word(i - 1) in (".", "->", "::", "~"):
            continue
        after = s.after_angles(i + 1) if s.word(i + 1) == "<" else i + 1
        if s.word(after) == "(" and _is_call(s, i):
            if name in kernels:
                yield i, "kernel-call", f"'{name}' is a kernel, which cannot be called"
            elif name in declared and after == i + 1:
                yield declared[name].name, "undefined", f"'{name}' is called and has no body"
                del declared[name]
        if name in aggregates:
            opening = i + 2 if s.kind(i + 1) == "word" else after
            if s.word(opening) == "(" and len(s.split(opening + 1, s.closing(opening))) > 1:
                yield i, "aggregate", f"'{name}' has no constructor; {name}{{...}} initialises it"


def _group_calls(s: Source) -> Iterator[Finding]:
    """Simd and quad functions that are given more than they take, such as a second value to compare."""
    own = {s.word(function.name) for function in s.functions}
    for i, token in enumerate(s.tokens):
        if s.word(i + 1) != "(" or token.text in own or not _in_metal(s, i):
            continue
        for names, takes in _GROUP_FUNCTIONS:
            if names.fullmatch(token.text):
                given = len(s.split(i + 2, s.closing(i + 1)))
                if given > takes:
                    yield i, "overload", f"'{token.text}' takes {takes}, not {given} arguments"


def _automatic(s: Source, version: Version) -> Iterator[Finding]:
    """``auto`` where C++14 has no place for it."""
    for function in s.functions:
        for parameter in function.parameters:
            if s.word(parameter.start) in ("auto", "const") and "auto" in [s.word(j) for j in parameter]:
                yield parameter.start, "cxx-version", "'auto' parameters are C++20; Metal is C++14"
    for i, token in enumerate(s.tokens):
        if [s.word(i - 2), s.word(i - 1), token.text] == ["template", "<", "auto"] and version < (4, 0):
            yield i, "cxx-version", "'auto' template parameters are C++17; Metal is C++14"


def _recursion(s: Source) -> Iterator[Finding]:
    """Functions that reach themselves. Of overloaded names nothing is known, so they are left out."""
    bodies = [f for f in s.functions if len(f.body)]
    scopes = _scope_names(s)
    keys = [(scopes[f.name], s.word(f.name)) for f in bodies]
    names = [name for _, name in keys]
    single = {key: f for key, f in zip(keys, bodies, strict=True) if keys.count(key) == 1}
    alone = {key[1]: key for key in single if names.count(key[1]) == 1}
    calls: dict[tuple[str, str], dict[tuple[str, str], int]] = {}
    for key, function in single.items():
        called = calls[key] = {}
        for i in function.body:
            callee = _callee(s, i, key[0], function, alone)
            if callee in single:
                called.setdefault(callee, i)
    for key in single:
        stack, seen = [(callee, at) for callee, at in calls[key].items()], {key}
        while stack:
            callee, at = stack.pop()
            if callee == key:
                name = "operator()" if key[1] == ")" else key[1]
                yield calls[key].get(key, at), "recursion", f"'{name}' calls itself"
                break
            if callee not in seen:
                seen.add(callee)
                stack += calls[callee].items()


def _callee(
    s: Source, i: int, scope: str, caller: Function, alone: dict[str, tuple[str, str]]
) -> tuple[str, str]:
    """(scope, name) of what is called at token i of a function that is in ``scope``; ("", "") if nothing is.

    A call with template arguments counts if they are the caller's own: others need not come back to it.
    ``alone`` are the functions whose names are in one scope only.
    """
    name, before = s.word(i), s.word(i - 1)
    if name == ")":  # the name of operator()
        is_own = [s.word(j) for j in range(i - 3, i + 2)] == ["(", "*", "this", ")", "("]
        return (scope, name) if is_own else ("", "")
    if s.kind(i) != "word" or before in (".", "~") or not _is_call(s, i):
        return "", ""
    if s.word(i + 1) == "<" and s.word(caller.head.start - 1) == ">":
        after = s.after_angles(i + 1)
        arguments = [s.word(j) for j in range(i + 2, after - 1) if s.word(j) != ","]
        if s.word(after) != "(" or arguments != _template_names(s, caller):
            return "", ""
    elif s.word(i + 1) != "(":
        return "", ""
    if before == "->":
        return (scope, name) if s.word(i - 2) == "this" else ("", "")
    if before == "::":
        return (s.word(i - 2) if s.kind(i - 2) == "word" else "", name)
    if caller.scope == "class" and name not in alone:
        return scope, name
    return alone.get(name, ("", ""))


def _template_names(s: Source, function: Function) -> list[str]:
    """The names in the template list before a function: of types and of values."""
    start = end = function.head.start - 1
    while start > 0 and s.word(start) != "template":
        start -= 1
    parts = [[s.word(j) for j in part] for part in s.split(start + 2, end)]
    return [part[part.index("=") - 1 if "=" in part else -1] for part in parts]


def _scope_names(s: Source) -> dict[int, str]:
    """The name of the namespace or class that each function is in, by the position of the function's name."""
    names: dict[int, str] = {}
    functions = {function.name for function in s.functions}
    stack = [""]
    for i, token in enumerate(s.tokens):
        if token.text == "{":
            name, j = stack[-1], i - 1
            inside = s.scopes[i + 1] if i + 1 < len(s.scopes) else ""
            while inside in ("namespace", "class") and j > 0 and s.word(j) not in (";", "{", "}"):
                if s.word(j) in ("namespace", "struct", "class", "union") and s.word(j - 1) not in ("<", ","):
                    name = s.word(j + 1)
                    break
                j -= 1
            stack.append(name)
        elif token.text == "}" and len(stack) > 1:
            stack.pop()
        if i in functions:
            names[i] = stack[-1]
    return names


def _is_call(s: Source, i: int) -> bool:
    """Whether a name before a parenthesis is called, not declared: a declaration has its type in front."""
    return s.kind(i - 1) != "word" or s.word(i - 1) in ("return", "else", "do", "case")


def edits(s: Source) -> list[tuple[int, int, str]]:
    """(start, end, text) to put into the source so that a C++ compiler sees what it would miss.

    A C-style cast between pointers becomes a call that compares address spaces; a template function that
    takes ``thread T&`` or ``thread T*`` asserts that T brings no space of its own; after each threadgroup
    variable of a kernel an assertion adds up what the kernel has. A call around what may be an element of
    a vector asserts that it is none where its address is taken or a reference bound. A string becomes a
    constant array, and the first of several constructors that differ only in the space of the object stands
    for all.
    """
    makers = (
        _cast_edits,
        _element_edits,
        _thread_edits,
        _memory_edits,
        _string_edits,
        _constructor_edits,
    )
    return sorted(edit for maker in makers for edit in maker(s))


def _cast_edits(s: Source) -> Iterator[tuple[int, int, str]]:
    for i, token in enumerate(s.tokens):
        if token.text == "(" and s.scopes[i] in ("function", "kernel") and pointer_cast(s, i):
            last = s.closing(i)
            end = _operand_end(s, last + 1)
            if end > last + 1:
                yield token.start, token.end, "lily_strict::cast<"
                yield s.tokens[last].start, s.tokens[last].end, ">("
                yield s.tokens[end - 1].end, s.tokens[end - 1].end, ")"


def _element_edits(s: Source) -> Iterator[tuple[int, int, str]]:
    """Around what must not be an element of a vector: behind &, and where a reference is bound to it."""
    operators = {*"(,={};?:+-<>!", "return", "==", "!=", "&&", "||"}
    references = _reference_parameters(s)
    for i, token in enumerate(s.tokens):
        if s.scopes[i] not in ("function", "kernel", "values"):
            continue
        before = s.word(i - 1)
        if token.text == "&" and s.kind(i + 1) == "word" and s.word(i + 2) == "=":
            declaration = {s.word(j) for j in range(s.statement(i).start, i)}
            first = i + 3
            last = _operand_end(s, first)
            if s.word(last) in (";", ",") and not declaration & {"const", "constant", "using"}:
                yield from _element_edit(s, first, first, last, "bound")
        elif token.text == "&" and (before in operators or (before == ")" and _ends_cast(s, i - 1))):
            yield from _element_edit(s, i, i + 1, _operand_end(s, i + 1), "address")
        elif token.text in references and s.word(i + 1) == "(" and _is_call(s, i):
            arguments = s.split(i + 2, s.closing(i + 1))
            for position in references[token.text] & set(range(len(arguments))):
                part = arguments[position]
                if s.kind(part.start) == "word" and _operand_end(s, part.start) == part.stop:
                    yield from _element_edit(s, part.start, part.start, part.stop, "bound")


def _element_edit(s: Source, start: int, first: int, end: int, call: str) -> Iterator[tuple[int, int, str]]:
    """A call around tokens start..end-1, if what begins with ``first`` ends with a component or an index."""
    outer = end
    while s.word(first) == "(" and s.closing(first) == end - 1:
        first, end = first + 1, end - 1
    if end - first < 2:
        return
    if s.word(end - 2) in (".", "->") and re.fullmatch("[xyzwrgba]", s.word(end - 1)):
        arrow, last = "*" if s.word(end - 2) == "->" else "", end - 2
    elif s.word(end - 1) == "]":
        arrow, last = "", end - 1
        depth = 0
        while last > first:
            depth += (s.word(last) == "]") - (s.word(last) == "[")
            if depth == 0:
                break
            last -= 1
    else:
        return
    whole = arrow + " ".join(s.word(j) for j in range(first, last))
    yield s.tokens[start].start, s.tokens[start].start, f"lily_strict::{call}<decltype(({whole}))>("
    yield s.tokens[outer - 1].end, s.tokens[outer - 1].end, ")"


def _ends_cast(s: Source, i: int) -> bool:
    opening = next((j for j in range(i, -1, -1) if s.word(j) == "(" and s.closing(j) == i), None)
    return opening is not None and pointer_cast(s, opening) is not None


def _reference_parameters(s: Source) -> dict[str, set[int]]:
    """Functions, and the positions at which every overload takes a reference to what it may change."""
    found: dict[str, set[int]] = {"modf": {1}, "frexp": {1}, "sincos": {1}}
    for function in s.functions:
        if function.scope != "namespace" or "operator" in (s.word(function.name), s.word(function.name - 1)):
            continue
        words = [{s.word(j) for j in parameter} for parameter in function.parameters]
        taken = {i for i, each in enumerate(words) if "&" in each and not each & {"const", "constant", "["}}
        name = s.word(function.name)
        found[name] = found[name] & taken if name in found else taken
    return found


def _string_edits(s: Source) -> Iterator[tuple[int, int, str]]:
    for i, token in enumerate(s.tokens):
        if token.kind == "string" and not _is_text(s, i):
            yield token.start, token.end, "lily_strict::text"


def _constructor_edits(s: Source) -> Iterator[tuple[int, int, str]]:
    seen: set[tuple[str, ...]] = set()
    for function in s.functions:
        head = {s.word(j) for j in range(function.head.start, function.name)}
        if function.scope != "class" or not head <= {"constexpr", "inline", "explicit", "METAL_FUNC"}:
            continue
        after = s.closing(function.name + 1) + 1
        key = tuple(s.word(j) for j in range(function.name, after))
        if s.word(after) in SPACES and key not in seen:
            yield s.tokens[after].start, s.tokens[after].end, ""
        seen.add(key)


def _operand_end(s: Source, i: int) -> int:
    """Position after the operand of a cast that starts at i."""
    while s.word(i) in ("&", "*", "-", "!", "~"):
        i += 1
    if s.word(i) == "(":
        i = s.closing(i) + 1
    elif s.kind(i) in ("word", "number"):
        i += 1
    else:
        return i
    while True:
        if s.word(i) in ("(", "["):
            i = s.closing(i) + 1
        elif s.word(i) in (".", "->", "::") and s.kind(i + 1) == "word":
            i += 2
        elif s.word(i) in ("++", "--"):
            i += 1
        else:
            return i


def _thread_edits(s: Source) -> Iterator[tuple[int, int, str]]:
    for function in s.functions:
        if not len(function.body):
            continue
        bound = []
        for parameter in function.parameters:
            words = [s.word(j) for j in parameter]
            if "thread" in words and ("&" in words or "*" in words):
                bound += [
                    w for w in words if w in function.template and words[words.index(w) + 1 :][:1] != ["<"]
                ]
        if bound:
            at = s.tokens[function.body.start - 1].end
            text = "".join(
                f'static_assert(lily_strict::plain<{t}>, "lily thread-reference");' for t in set(bound)
            )
            yield at, at, text


def _memory_edits(s: Source) -> Iterator[tuple[int, int, str]]:
    known: dict[int, list[str]] = {}
    for i, token in enumerate(s.tokens):
        owner = s.owner[i]
        if token.text != "threadgroup" or owner is None or s.scopes[i] != "kernel":
            continue
        name = _variable_name(s, i)
        if name is None:
            continue
        end = s.statement(name).stop
        if s.word(end) != ";":
            continue
        names = [s.word(part.start) for part in s.split(name, end)]
        depth = sum((s.word(j) == "{") - (s.word(j) == "}") for j in range(owner.body.start, i))
        outer = known.setdefault(id(owner), [])
        total = " + ".join(f"sizeof({n})" for n in [*outer, *names])
        if depth == 0:
            outer += names
        at = s.tokens[end].end
        yield at, at, f' static_assert({total} <= 32768, "lily threadgroup-memory");'


def apply(text: str, changes: Sequence[tuple[int, int, str]]) -> str:
    """``text`` with each (start, end, new) replaced."""
    parts, position = [], 0
    for start, end, new in changes:
        parts += [text[position:start], new]
        position = end
    return "".join([*parts, text[position:]])
