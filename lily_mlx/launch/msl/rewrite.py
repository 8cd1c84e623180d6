"""From Metal source to C++ that clang accepts with the headers in ``include/``.

What C++ cannot express is changed token by token; lines stay where they are, so that diagnostics, debug
information and ``__builtin_LINE`` name lines of the Metal source:

- attributes in ``[[...]]`` go (the launcher reads them from the original source); a function constant
  becomes a constant whose value :func:`function_constants` sets;
- address spaces go in host mode and become real types in strict mode;
- ``threadgroup T x[n];`` becomes a static in the section that the runtime poisons;
- in host mode, functions that may reach a simd operation or a barrier are marked, and their loops that do,
  for the runtime to tell calls and turns apart;
- of definitions that differ only in address spaces the first is kept: the others would be redefinitions;
- ``static_cast<T>(x)`` and ``T(x)`` become calls that know the conversions between half and bfloat;
- swizzles become member calls, literals such as ``1.0h`` become constructor calls.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Mode = Literal["host", "strict"]

SPACES = frozenset(("device", "constant", "threadgroup", "thread"))

_TOKEN = re.compile(
    r"""
    (?P<space>  (?:[ \t\r\f\v] | \\\r?\n)+ )
  | (?P<newline> \n )
  | (?P<comment> //[^\n]* | /\*.*?\*/ )
  | (?P<string> "(?:\\.|[^"\\\n])*" | '(?:\\.|[^'\\\n])*' )
  | (?P<number> (?:0[xX][0-9a-fA-F]+(?:\.[0-9a-fA-F]*)?(?:[pP][+-]?\d+)?
                 | (?:\d+(?:'\d+)*\.?\d*|\.\d+)(?:[eE][+-]?\d+)?) \w* )
  | (?P<word> [A-Za-z_]\w* )
  | (?P<mark> ::|->\*?|\+\+|--|<<=|>>=|<=|>=|==|!=|&&|\|\||[-+*/%&|^]=|\.\.\.|\#\#|<<|. )
    """,
    re.VERBOSE | re.DOTALL,
)
_SHORT_LITERAL = re.compile(r"((?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)([hH]|bf|BF)")
_PLAIN_REAL = re.compile(r"(?:\d+\.\d*|\.\d+|\d+(?=[eE]))(?:[eE][+-]?\d+)?|0[xX].*[pP][+-]?\d+")
_SWIZZLE = re.compile(r"[xyzw]{2,4}|[rgba]{2,4}")
_MACRO = re.compile(r"[A-Z]{2,}_[A-Z_]{2,}")
_LANE = {letter: i for letters in ("xyzw", "rgba") for i, letter in enumerate(letters)}
_ASSIGNMENTS = frozenset(("=", "+=", "-=", "*=", "/=", "%=", "&=", "|=", "^=", "<<=", ">>="))
_CLOSING = {"(": ")", "[": "]", "{": "}"}
_CLOSERS = frozenset(_CLOSING.values())
_BRACKETS = _CLOSERS | _CLOSING.keys()
_MEANINGFUL = frozenset(("word", "number", "string", "mark"))
_QUALIFIERS = frozenset(
    ("const", "constexpr", "volatile", "static", "inline", "typename", "struct", "class", "union")
)
_BUILTIN_TYPES = frozenset(
    ("unsigned", "signed", "void", "bool", "char", "short", "int", "long", "float", "half", "bfloat", "auto")
)
_SCALARS = _BUILTIN_TYPES - {"auto"} | {
    *("uchar", "ushort", "uint", "ulong", "size_t", "ptrdiff_t"),
    *(f"{sign}int{bits}_t" for sign in ("", "u") for bits in (8, 16, 32, 64)),
}
# What makes lanes or threads wait for one another; ".run(" of a tensor operation does, too.
_COLLECTIVE = re.compile(
    r"(?:__metal_)?(?:simd|quad)_\w+|simdgroup_(?:barrier|load|store|multiply\w*)|threadgroup_barrier"
)
# In the tokens of what opens the scope of a class, with blanks between; `class T` may be in a template list.
_CLASS_NAME = re.compile(r"\b(?:struct|class|union) (\w+)\b(?! [,>])")
# What begins a member that is not data.
_NO_DATA = frozenset(
    ("using", "typedef", "static", "friend", "enum", "template", "static_assert", "constexpr", "inline")
)


@dataclass(slots=True)
class _Token:
    kind: str
    text: str
    directive: bool  # part of a preprocessor directive
    before: str = ""  # what a pass puts around it
    after: str = ""


def translate(source: str, *, mode: Mode = "host") -> str:
    """The C++ text of a Metal source, line for line.

    Args:
        source: Metal source without unresolved project includes (see :func:`inline_includes`).
        mode: ``host`` to run it; ``strict`` to check it with real address spaces (C++23, ``-DLILY_STRICT``).
    """
    tokens = _tokens(source)
    _expand_space_macros(tokens)
    _blank_attributes(tokens)
    if mode == "host":
        _collapse_overloads(tokens)
        _mark_calls(tokens)
    else:
        _qualify_classes(tokens)
        _decay_operands(tokens)
    _place_variables(tokens, mode)
    _rewrite_words(tokens, mode)
    return "".join(token.before + token.text + token.after for token in tokens)


def function_constants(values: Mapping[int, bool | int | float]) -> str:
    """Header text that gives function constants their values; it goes before the source that declares them.

    Args:
        values: index in ``[[function_constant(index)]]`` to value. Other constants are undefined and zero.
    """

    def literal(value: bool | int | float) -> str:
        return str(value).lower() if isinstance(value, bool) else repr(value)

    return "".join(
        f"template <> struct lily::function_constant<{index}> "
        f"{{ static constexpr bool defined = true; static constexpr auto value = {literal(value)}; }};\n"
        for index, value in values.items()
    )


def inline_includes(text: str, root: Path, *, seen: set[Path] | None = None) -> str:
    """Replace every ``#include "..."`` by the file's text, once each, so that the result is one Metal source.

    Args:
        text: Metal source.
        root: folder that the quoted paths are relative to; for MLX's kernels the wheel's include folder.
        seen: files that the source has already (resolved paths); updated.

    Raises:
        FileNotFoundError: an included file does not exist.
    """
    seen = set() if seen is None else seen

    def replace(match: re.Match[str]) -> str:
        path = (root / match[1]).resolve()
        if path in seen:
            return ""
        seen.add(path)
        return re.sub(r"(?m)^#pragma once$", "", inline_includes(path.read_text(), root, seen=seen))

    return re.sub(r'(?m)^[ \t]*#[ \t]*include[ \t]*"([^"]+)"[^\n]*', replace, text)


def _tokens(source: str) -> list[_Token]:
    tokens: list[_Token] = []
    directive = False
    fresh = True  # only blanks so far on this line
    for match in _TOKEN.finditer(source):
        kind = match.lastgroup or ""
        if kind == "newline":
            directive, fresh = False, True
        elif kind not in ("space", "comment"):
            directive = directive or (fresh and match[0] == "#")
            fresh = False
        tokens.append(_Token(kind, match[0], directive))
    return tokens


class _Code:
    """The tokens of a source that mean something, by position.

    ``words`` are their texts as the pass found them: what it writes with :meth:`put` does not change what it
    reads. Past the end, and before the start, there are empty words.
    """

    def __init__(self, tokens: list[_Token]) -> None:
        self.tokens = [t for t in tokens if t.kind in _MEANINGFUL and t.text]
        words = [token.text for token in self.tokens]
        self.words = words + [""] * 8
        # The other bracket of a pair; without one the last token, for a closing bracket itself.
        self.match = [len(words) - 1] * len(self.words)
        for i, text in enumerate(words):
            if text in _CLOSERS:
                self.match[i] = i
        self._pair_brackets()

    def __len__(self) -> int:
        return len(self.tokens)

    def put(self, i: int, text: str) -> None:
        self.tokens[i].text = text

    def blank(self, first: int, last: int) -> None:
        """Remove the tokens from first to last; the lines they span remain."""
        for i in range(first, last + 1):
            self.tokens[i].text = self.words[i] = ""

    def is_word(self, i: int) -> bool:
        return self.words[i].isidentifier()

    def _pair_brackets(self) -> None:
        outer: list[int] = []  # open brackets
        stack = outer
        branches: list[list[int]] = []  # those at the start of each #if
        for i, token in enumerate(self.tokens):
            text = token.text
            if not token.directive:
                if text not in _BRACKETS:
                    continue
                stack = outer
            elif text == "#":
                stack = []  # what a directive opens does not reach outside
                branch = self.words[i + 1]
                if branch.startswith("if"):
                    branches.append(outer.copy())
                elif branch in ("else", "elif") and branches:
                    outer[:] = branches[-1]
                elif branch == "endif":
                    del branches[-1:]
            if text in _CLOSING:
                stack.append(i)
            elif text in _CLOSERS and stack:
                self.match[i] = stack.pop()
                self.match[self.match[i]] = i

    def inside(self) -> list[str]:
        """Every token's innermost open bracket: "class" or "namespace" for such a brace, "" for none."""
        found: list[str] = []
        stack: list[tuple[int, str]] = []  # (closing position, bracket)
        for i, text in enumerate(self.words[: len(self)]):
            while stack and i > stack[-1][0]:
                stack.pop()
            within = stack[-1][1] if stack and i < stack[-1][0] else stack[-2][1] if len(stack) > 1 else ""
            found.append(within)
            if text in _CLOSING and self.match[i] > i:
                stack.append((self.match[i], self._brace(i) if text == "{" else text))
        return found

    def _brace(self, i: int) -> str:
        if self.class_name(i) is not None:
            return "class"
        i -= 1
        while self.words[i] == "::" or (self.is_word(i) and self.words[i] != "namespace"):
            i -= 1
        return "namespace" if self.words[i] == "namespace" or self.words[i][:1] == '"' else "{"

    def class_name(self, i: int) -> int | None:
        """Position of the name of the class whose members the brace at i opens; None for another brace."""
        words = self.words
        i -= 1
        while i >= 0 and words[i] not in (";", "{", "}", "="):
            if words[i] == ")":
                i = self.match[i]
                if words[i - 1] != "alignas":
                    return None
            if words[i] in ("struct", "class"):
                if words[i - 1] == "enum":
                    return None
                i += 1
                while words[i] == "alignas":
                    i = self.match[i + 1] + 1
                # Not the one of a template parameter.
                return i if self.is_word(i) and words[i + 1] not in (",", ">") else None
            i -= 1
        return None

    def after_angles(self, i: int) -> int:
        """Position after the template list that starts at i."""
        depth = 0
        while i < len(self):
            text = self.words[i]
            if text in _CLOSING:
                i = self.match[i]
            elif text == ";":
                return i
            depth += (text == "<") - (text == ">")
            i += 1
            if depth == 0:
                return i
        return i

    def statement_end(self, i: int) -> int:
        """Position of the last token of the statement that starts at i."""
        while i < len(self) and self.tokens[i].directive:
            i += 1
        text = self.words[i]
        if text == "{":
            return self.match[i]
        if text == "do":
            return self.match[self.statement_end(i + 1) + 2] + 1
        if text in ("for", "while", "switch", "if"):
            opening = i + 2 if self.words[i + 1] == "constexpr" else i + 1
            end = self.statement_end(self.match[opening] + 1)
            return self.statement_end(end + 2) if text == "if" and self.words[end + 1] == "else" else end
        while i < len(self) and self.words[i] not in (";", "}"):
            i = self.match[i] + 1 if self.words[i] in _CLOSING else i + 1
        return i

    def operand_end(self, i: int) -> int:
        """Position of what ends the operand of a conditional operator that starts at i."""
        nested = 0
        while i < len(self):
            text = self.words[i]
            if text in _CLOSING:
                i = self.match[i]
            elif text == "?":
                nested += 1
            elif text == ":" and nested:
                nested -= 1
            elif text in (":", ";", ",", ")", "]", "}"):
                return i
            i += 1
        return i


def _expand_space_macros(tokens: list[_Token]) -> None:
    """Put the address space in place of a macro that stands for one."""
    code = _Code(tokens)
    macros: dict[str, str] = {}
    for i, token in enumerate(code.tokens):
        if code.words[i] in macros and not token.directive:
            code.put(i, macros[code.words[i]])
        elif code.words[i - 1] == "define" and code.words[i + 1] in SPACES:
            ends = code.words[i + 2] in ("#", "") or not code.tokens[i + 2].directive
            if ends:  # nothing but the address space
                macros[code.words[i]] = code.words[i + 1]


def _blank_attributes(tokens: list[_Token]) -> None:
    code = _Code(tokens)
    defined: dict[str, str] = {}  # function constants: name to index
    i = 0
    while i < len(code):
        if code.words[i] == "[" and code.words[i + 1] == "[":
            last = code.match[i]
            is_constant = code.words[i + 2] == "function_constant" and code.words[last + 1] == ";"
            index = "".join(code.words[j] for j in range(i + 4, last - 2))
            code.blank(i, last)
            if is_constant:
                defined[code.words[i - 1]] = index
                code.put(i, f"= lily::function_constant_value<{index}>()")
            i = last
        elif code.words[i] == "is_function_constant_defined" and code.words[i + 2] in defined:
            code.put(i + 2, f"lily::function_constant<{defined[code.words[i + 2]]}>::defined")
            code.blank(i, i)
        i += 1


# -- definitions that differ only in address spaces ---------------------------------------------------------


@dataclass
class _Declaration:
    scope: tuple[str, ...]
    conditions: tuple[int, ...]  # the branches of #if it is in
    first: int
    end: int  # after the signature
    last: int


def _collapse_overloads(tokens: list[_Token]) -> None:
    code = _Code(tokens)
    kept: dict[tuple[str, ...], tuple[tuple[str, ...], tuple[int, ...]]] = {}
    for declaration in _declarations(code):
        words = tuple(code.words[i] for i in range(declaration.first, declaration.end))
        key = (*declaration.scope, "{", *_without_names(_without_spaces(words)))
        spaces = tuple(word for word in words if word in SPACES)
        first_spaces, conditions = kept.setdefault(key, (spaces, declaration.conditions))
        if first_spaces != spaces and declaration.conditions[: len(conditions)] == conditions:
            code.blank(declaration.first, declaration.last)


def _mark_calls(tokens: list[_Token]) -> None:
    """Mark the functions that contain a collective, or the name of a function that is marked.

    A call of an operator has no name: what mentions the class that it belongs to, or works on, may call it.
    """
    code = _Code(tokens)
    # Where it starts, its body, its names, the names that it uses.
    functions: list[tuple[int, range, set[str], set[str]]] = []
    reaching: set[str] = set()
    for declaration in _declarations(code):
        start = declaration.first
        while code.words[start] == "template" and code.words[start + 1] == "<":
            start = code.after_angles(start + 1)
        if code.words[declaration.last] != "}" or (name := _function_name(code, start)) is None:
            continue
        signature = code.words[start : declaration.end]
        body = code.words[declaration.end : declaration.last]
        names = {name} if name != "operator" else _classes_of_operator(code, declaration, start)
        functions.append((start, range(declaration.end, declaration.last), names, {*signature, *body}))
        if any(_COLLECTIVE.fullmatch(word) for word in body) or ".run(" in "".join(body):
            reaching |= names
    count = -1
    while count != len(reaching):
        count = len(reaching)
        for _, _, names, used in functions:
            if used & reaching:
                reaching |= names
    for start, inside, names, _ in functions:
        if names & reaching:
            code.tokens[start].before += "LILY_RT_CALLS "
            _mark_loops(code, inside, reaching)


def _mark_loops(code: _Code, body: range, reaching: set[str]) -> None:
    """Mark the loops of a function that may reach a collective, and where a turn of them begins."""
    tails: set[int] = set()  # each `while` behind a `do`
    for i in body:
        if code.words[i] not in ("for", "while", "do") or code.tokens[i].directive or i in tails:
            continue
        end = code.statement_end(i)
        if code.words[i] == "do":
            first = i + 1
            tails.add(code.statement_end(first) + 1)
        else:
            first = code.match[i + 1] + 1
        while first < end and code.tokens[first].directive:
            first += 1
        used = code.words[i : end + 1]
        if first < end and any(w in reaching or _COLLECTIVE.fullmatch(w) for w in used):
            code.tokens[i].before += "LILY_RT_LOOP "
            code.tokens[first].before = f"LILY_RT_TURN {code.tokens[first].before}"


def _classes_of_operator(code: _Code, declaration: _Declaration, start: int) -> set[str]:
    """The class that the operator declared at `start` is a member of, or those of its operands."""
    if declaration.scope and (match := _CLASS_NAME.search(declaration.scope[-1])):
        return {match[1]}
    opening = max(i for i in range(start, declaration.end) if code.words[i] == "(")
    template = set(code.words[declaration.first : start])
    operands = _without_names(tuple(code.words[opening : declaration.end]))
    return {w for w in operands if w.isidentifier()} - template - _BUILTIN_TYPES - _QUALIFIERS - SPACES


def _function_name(code: _Code, i: int) -> str | None:
    """The name of the function whose declaration starts at i, "operator" for operators, None for classes."""
    while i < len(code) and code.words[i] not in (";", "{", "struct", "class", "union", "requires"):
        if code.words[i] == "operator":
            return "operator"
        if code.words[i] == "(" and code.words[i - 1] not in ("__attribute__", "decltype", "alignas"):
            return code.words[i - 1]
        if code.words[i] == "<":
            i = code.after_angles(i)
        else:
            i = code.match[i] + 1 if code.words[i] in _CLOSING else i + 1
    return None


def _without_spaces(words: tuple[str, ...]) -> tuple[str, ...]:
    """The signature as host mode has it: what `constant` points to is const, other spaces are gone."""
    end = max((i for i, word in enumerate(words) if word == ")"), default=len(words))
    bare: list[str] = []
    for i, word in enumerate(words):
        plain = "const" if word == "constant" and i < end else "" if word in SPACES else word
        if plain and not (plain == "const" and bare[-1:] == ["const"]):
            bare.append(plain)
    return tuple(bare)


def _without_names(words: tuple[str, ...]) -> tuple[str, ...]:
    """The signature without the names of parameters."""

    def is_name(i: int) -> bool:
        before, word, after = words[i - 1], words[i], words[i + 1]
        return (
            after in (",", ")", "=", "[")
            and (word[0].isalpha() or word[0] == "_")
            and word not in _BUILTIN_TYPES
            and (before in ("*", "&", ">") or (before[0].isalpha() and before not in _QUALIFIERS))
        )

    inner = range(1, len(words) - 1)
    return tuple(word for i, word in enumerate(words) if i not in inner or not is_name(i))


def _declarations(code: _Code) -> Iterator[_Declaration]:
    """Functions and classes at namespace and class scope, in order."""
    scope: list[str] = []
    conditions: list[int] = []
    i = 0
    while i < len(code):
        if code.tokens[i].directive:
            if code.words[i] == "#":
                _follow_condition(code, i, conditions)
            i += 1
        elif code.words[i] in (";", ":"):
            i += 1
        elif code.words[i] == "}":
            del scope[-1:]
            i += 1
        elif code.words[i] in ("public", "private", "protected"):
            i += 1
        else:
            kind, opening, end = _signature(code, i)
            words = [code.words[j] for j in range(i, end)]
            last = code.match[opening] if code.words[opening] == "{" else opening
            if kind in ("class", "function"):
                yield _Declaration(tuple(scope), tuple(conditions), i, end, last)
            if kind in ("class", "namespace") and code.words[opening] == "{":
                scope.append(" ".join(words))
                i = opening + 1
            else:
                i = last + 1


def _follow_condition(code: _Code, i: int, conditions: list[int]) -> None:
    word = code.words[i + 1]
    if word in ("endif", "else", "elif"):
        del conditions[-1:]
    if word in ("if", "ifdef", "ifndef", "else", "elif"):
        conditions.append(i)


def _signature(code: _Code, i: int) -> tuple[str, int, int]:
    """What the declaration at i is, where its `{` or `;` stands, where its signature ends."""
    while code.words[i] == "template" and code.words[i + 1] == "<":
        i = code.after_angles(i + 1)
    first = i
    if code.is_word(i) and code.words[i + 1] == "(":
        close = code.match[i + 1]
        if code.is_word(close + 1) and code.words[close + 1] not in SPACES | {"const", "noexcept"}:
            return "macro", close, close
    end = -1  # of the signature, when it ends before the opening
    parameters = False
    while i < len(code):
        text = code.words[i]
        if text in (";", "{", "}"):
            break
        if text == "operator":
            i += 1 if code.words[i + 1] not in ("(", "[") else 2
        elif text in ("(", "["):
            parameters = parameters or text == "("
            i = code.match[i]
        elif text == "<" and code.is_word(i - 1):
            i = code.after_angles(i) - 1
        elif text == "=":
            end = i
            while i < len(code) and code.words[i] != ";":
                i = code.match[i] + 1 if code.words[i] in _CLOSING else i + 1
            break
        elif text == ":" and parameters:
            end = i
            i = _after_initialisers(code, i + 1)
            break
        i += 1
    head = {code.words[j] for j in range(first, i)}
    end = i if end < 0 else end
    if code.words[i] == "{" and ("namespace" in head or code.words[first] == "extern") and not parameters:
        return "namespace", i, end
    if parameters and code.words[i] in ("{", ";"):
        return "function", i, end
    if head & {"struct", "class", "union"} and "enum" not in head and code.words[i] == "{":
        return "class", i, end
    return "other", i, end


def _after_initialisers(code: _Code, i: int) -> int:
    """Position of a constructor's body, from its first member initialiser on."""
    while i < len(code):
        while i < len(code) and code.words[i] not in ("(", "{", ";"):
            i = code.after_angles(i) if code.words[i] == "<" else i + 1
        if code.words[i] not in ("(", "{"):
            return i
        i = code.match[i] + 1
        if code.words[i] != ",":
            return i
        i += 1
    return i


# -- classes in strict mode ---------------------------------------------------------------------------------


def _qualify_classes(tokens: list[_Token]) -> None:
    """Copies between address spaces, and members that are qualified with one.

    C++ copies an object only within the generic address space, and qualifies a member only with const: macros
    in the headers declare the other copies, and a member becomes one with an explicit object parameter.
    """
    code = _Code(tokens)
    for i, within in enumerate(code.inside()):
        if code.words[i] != "{":
            continue
        if position := code.class_name(i):
            name = code.words[position]
        elif code.words[i - 1] == "struct" and code.words[i - 2] == "typedef":
            name = f"lily_unnamed_{i}"
            code.put(i - 1, f"struct {name}")
        else:
            continue
        code.put(i, "{" + _qualify_members(code, i, name, is_local=within == "{"))


def _qualify_members(code: _Code, opening: int, name: str, is_local: bool) -> str:
    """Rewrite the members of a class; what its body is to begin with."""
    has_data = has_constructor = False
    i, end = opening + 1, code.match[opening]
    while i < end:
        if code.tokens[i].directive or code.words[i] in (";", ":", "public", "private", "protected", ""):
            i += 1
            continue
        kind, at, signature_end = _signature(code, i)
        last = code.match[at] if code.words[at] == "{" else at
        if kind == "function":
            close = max(j for j in range(i, signature_end) if code.words[j] == ")")
            start = code.match[close]
            spaces = {code.words[j] for j in range(close, signature_end)} & SPACES - {"thread"}
            is_constructor = code.words[start - 1] == name
            has_constructor = has_constructor or is_constructor
            if spaces and (is_constructor or "auto" in (code.words[j] for j in range(i, start))):
                code.blank(i, last)
            elif spaces:
                const = "const " if "const" in (code.words[j] for j in range(close, signature_end)) else ""
                comma = ", " if close > start + 1 else ""
                code.put(start, f"(this {const}LILY_AS_{spaces.pop()} {name}& lily_self{comma}")
                code.blank(close + 1, last)
                code.put(last, ";")
        elif kind == "other" and code.words[i] not in _NO_DATA and not _MACRO.fullmatch(code.words[i]):
            has_data = True
        i = last + 1
    if not has_data:
        return ""
    kind = "LOCAL_CLASS" if is_local else "CLASS" if has_constructor else "AGGREGATE"
    return f" LILY_{kind}({name})"


def _decay_operands(tokens: list[_Token]) -> None:
    """Let the operands of ?: be values where they are objects in different address spaces.

    `lily::decay{}, x` copies a class object out of its address space and leaves everything else as it is.
    """
    code = _Code(tokens)
    for i, token in enumerate(code.tokens):
        if token.text != "?" or token.directive:
            continue
        colon = code.operand_end(i + 1)
        if code.words[colon] != ":":
            continue
        last = code.operand_end(colon + 1) - 1
        for first, end in ((i + 1, colon - 1), (colon + 1, last)):
            # A > may end a template list that the operand is the last argument of.
            if not any(code.words[j].startswith(">") for j in range(first, end + 1)):
                code.tokens[first].before += "(lily::decay{}, "
                code.tokens[end].after += ")"


# -- variables in an address space --------------------------------------------------------------------------


def _place_variables(tokens: list[_Token], mode: Mode) -> None:
    """Address spaces in front of a variable, as opposed to those of what a pointer points to."""
    code = _Code(tokens)
    for i, within in enumerate(code.inside()):
        space = code.words[i]
        if space not in SPACES or within == "[":
            continue
        name = _declared_name(code, i + 1)
        if name is None:
            continue
        is_array = code.words[name + 1] == "["
        if within == "(":
            if mode == "strict" and is_array:
                # An array parameter is a pointer; clang says so only without an address space.
                code.put(name, f"(*{code.words[name]})")
                code.blank(name + 1, code.match[name + 1])
            continue
        start = i
        while start > 0 and code.words[start - 1] not in (";", "{", "}", ">", ")", "#"):
            start -= 1
        specifiers = {code.words[j] for j in range(start, name)}
        if space == "constant":
            # A class has no constructor for an address space: in strict mode it keeps none.
            is_scalar = is_array or all(
                code.words[j] in _QUALIFIERS | SPACES | _SCALARS for j in range(i + 1, name)
            )
            kept = "LILY_AS_constant " if mode == "strict" and is_scalar else ""
            code.put(i, kept + ("" if specifiers & {"const", "constexpr"} else "const"))
        elif space == "threadgroup" and mode == "host":
            code.put(i, ("" if "static" in specifiers else "static ") + "LILY_RT_THREADGROUP")
        elif space == "threadgroup":
            code.put(i, "LILY_AS_threadgroup")
            _bind_declarators(code, name)


def _declared_name(code: _Code, i: int) -> int | None:
    """Position of the variable's name if a type and a variable follow at i."""
    while code.words[i] in _QUALIFIERS or code.words[i] in SPACES:
        i += 1
    if code.words[i] == "decltype":
        i = code.match[i + 1] + 1
    elif code.words[i] in _BUILTIN_TYPES:
        while code.words[i] in _BUILTIN_TYPES:
            i += 1
    elif code.is_word(i):
        i += 1
    else:
        return None
    while code.words[i] in ("::", "<", "template"):
        i = code.after_angles(i) if code.words[i] == "<" else i + (2 if code.words[i] == "::" else 1)
    while code.words[i] in _QUALIFIERS or code.words[i] in SPACES:
        i += 1
    after = code.after_angles(i + 1) if code.words[i + 1] == "<" else i + 1
    return i if code.is_word(i) and code.words[after][:1] in ("[", ";", ",", "=", "{", "(") else None


def _bind_declarators(code: _Code, i: int) -> None:
    """Make every declarator from the name at i on a reference: C++ has no object in an address space."""
    while code.is_word(i):
        code.put(i, f"(&{code.words[i]})")
        while code.words[i + 1] == "[":
            i = code.match[i + 1]
        code.put(i + 1, f" = lily::anywhere{{}}{code.words[i + 1]}")
        if code.words[i + 1] != ",":
            return
        i += 2


# -- words ---------------------------------------------------------------------------------------------------


def _rewrite_words(tokens: list[_Token], mode: Mode) -> None:
    code = _Code(tokens)
    words = code.words
    types = {"half", "bfloat", "float16_t", "bfloat16_t"}  # whose functional cast may meet half and bfloat
    members: set[str] = set()  # class members that are named like a swizzle
    for i, within in enumerate(code.inside()):
        if words[i] in ("typename", "class", "using") and words[i + 2] in (",", ">", "="):
            types.add(words[i + 1])
        if within == "class" and words[i - 1] not in (".", "->"):
            members.add(words[i])
    for i, token in enumerate(code.tokens):
        word, before, after = words[i], words[i - 1], words[i + 1]
        if token.kind == "number":
            if literal := _SHORT_LITERAL.fullmatch(word):
                name = "half" if literal[2] in "hH" else "bfloat"
                dot = "" if "." in literal[1] or "e" in literal[1].lower() else "."
                token.text = f"{name}({literal[1]}{dot}f)"
            elif _PLAIN_REAL.fullmatch(word):
                token.text += "f"  # Metal has no double
        elif token.kind != "word":
            continue
        elif word in SPACES:
            token.text = _address_space(code, i, mode)
        elif word in ("kernel", "vertex", "fragment", "coherent"):
            token.text = ""
        elif word == "static_cast" and after == "<":
            token.text = "lily::cast"
        elif word in types and after == "(" and _is_functional_cast(code, i):
            token.text = f"lily::make<{word}>"
        elif before in (".", "->") and after != "(" and _SWIZZLE.fullmatch(word) and word not in members:
            lanes = ", ".join(str(_LANE[letter]) for letter in word)
            call = "lily_set" if after in _ASSIGNMENTS else "lily_get"
            token.text = f"{call}(lily::lanes<{lanes}>{{}})"


def _address_space(code: _Code, i: int, mode: Mode) -> str:
    space = code.words[i]
    if mode == "strict":
        return "" if space == "thread" else f"LILY_AS_{space}"
    before = i - 1
    while code.words[before] == "const":
        before -= 1
    of_this = code.words[before] == ")" and code.words[i + 1] in ("{", ";", ":", "=", "const", "noexcept")
    twice = "const" in (code.words[i - 1], code.words[i + 1])
    return "const" if space == "constant" and not (of_this or twice) else ""


def _is_functional_cast(code: _Code, i: int) -> bool:
    before = code.words[i - 1]
    if before in (".", "->", "::", "~") or code.words[i + 2] == "{":
        return False
    if code.is_word(i - 1) and before not in ("return", "else", "case", "do"):
        return False  # a declaration, operator T(), typename T
    # T (*f)(...) and T (&a)[n] are declarators.
    return not (code.words[i + 2] in ("*", "&") and code.words[code.match[i + 1] + 1] in ("(", "["))
