"""From Metal source to C++ that clang accepts with the headers in ``include/``.

What C++ cannot express is changed token by token; lines stay where they are, so that diagnostics, debug
information and ``__builtin_LINE`` name lines of the Metal source:

- attributes in ``[[...]]`` go (the launcher reads them from the original source); a function constant
  becomes a constant whose value :func:`function_constants` sets;
- address spaces go in host mode and become real types in strict mode;
- ``threadgroup T x[n];`` becomes a static in the section that the runtime poisons;
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
                 | (?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?) \w* )
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
# What begins a member that is not data.
_NO_DATA = frozenset(
    ("using", "typedef", "static", "friend", "enum", "template", "static_assert", "constexpr", "inline")
)


@dataclass
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
    _blank_attributes(tokens)
    if mode == "host":
        _collapse_overloads(tokens)
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
    """The tokens of a source that mean something, by position."""

    def __init__(self, tokens: list[_Token]) -> None:
        self.tokens = [t for t in tokens if t.kind in ("word", "number", "string", "mark") and t.text]

    def __len__(self) -> int:
        return len(self.tokens)

    def text(self, i: int) -> str:
        return self.tokens[i].text if 0 <= i < len(self.tokens) else ""

    def is_word(self, i: int) -> bool:
        return 0 <= i < len(self.tokens) and self.tokens[i].kind == "word"

    def closing(self, i: int) -> int:
        """Position of the bracket that closes the one at i, or of the last token."""
        opening = self.text(i)
        closing = _CLOSING[opening]
        depth = 0
        for j in range(i, len(self)):
            depth += (self.text(j) == opening) - (self.text(j) == closing)
            if depth == 0:
                return j
        return len(self) - 1

    def opening(self, i: int) -> int:
        """Position of the parenthesis that the one at i closes."""
        depth = 0
        while i > 0:
            depth += (self.text(i) == ")") - (self.text(i) == "(")
            if depth == 0:
                return i
            i -= 1
        return i

    def after_angles(self, i: int) -> int:
        """Position after the template list that starts at i."""
        depth = 0
        while i < len(self):
            text = self.text(i)
            if text in _CLOSING:
                i = self.closing(i)
            elif text == ";":
                return i
            depth += (text == "<") - (text == ">")
            i += 1
            if depth == 0:
                return i
        return i

    def operand_end(self, i: int) -> int:
        """Position of what ends the operand of a conditional operator that starts at i."""
        nested = 0
        while i < len(self):
            text = self.text(i)
            if text in _CLOSING:
                i = self.closing(i)
            elif text == "?":
                nested += 1
            elif text == ":" and nested:
                nested -= 1
            elif text in (":", ";", ",", ")", "]", "}"):
                return i
            i += 1
        return i

    def blank(self, first: int, last: int) -> None:
        """Remove the tokens from first to last; the lines they span remain."""
        for token in self.tokens[first : last + 1]:
            token.text = ""

    def brackets(self) -> Iterator[tuple[int, str]]:
        """Every token with its innermost open bracket, "class" or "namespace" for such a brace, "" outside.

        A preprocessor directive is a text of its own: what it opens does not reach outside.
        """
        outer: list[str] = []
        stack = outer
        for i, token in enumerate(self.tokens):
            if not token.directive:
                stack = outer
            elif token.text == "#":
                stack = []
            yield i, stack[-1] if stack else ""
            if token.text == "{":
                stack.append(self._brace(i))
            elif token.text in ("(", "["):
                stack.append(token.text)
            elif token.text in (")", "]", "}") and stack:
                stack.pop()

    def _brace(self, i: int) -> str:
        if self.class_name(i) is not None:
            return "class"
        i -= 1
        while self.text(i) == "::" or (self.is_word(i) and self.text(i) != "namespace"):
            i -= 1
        return "namespace" if self.text(i) == "namespace" or self.text(i)[:1] == '"' else "{"

    def class_name(self, i: int) -> int | None:
        """Position of the name of the class whose members the brace at i opens; None for another brace."""
        i -= 1
        while i >= 0 and self.text(i) not in (";", "{", "}", "="):
            if self.text(i) == ")":
                i = self.opening(i)
                if self.text(i - 1) != "alignas":
                    return None
            if self.text(i) in ("struct", "class"):
                i += 1
                while self.text(i) == "alignas":
                    i = self.closing(i + 1) + 1
                # Not the one of a template parameter.
                return i if self.is_word(i) and self.text(i + 1) not in (",", ">") else None
            i -= 1
        return None


def _blank_attributes(tokens: list[_Token]) -> None:
    code = _Code(tokens)
    defined: dict[str, str] = {}  # function constants: name to index
    i = 0
    while i < len(code):
        if code.text(i) == "[" and code.text(i + 1) == "[":
            last = code.closing(i)
            is_constant = code.text(i + 2) == "function_constant" and code.text(last + 1) == ";"
            index = "".join(code.text(j) for j in range(i + 4, last - 2))
            code.blank(i, last)
            if is_constant:
                defined[code.text(i - 1)] = index
                code.tokens[i].text = f"= lily::function_constant_value<{index}>()"
            i = last
        elif code.text(i) == "is_function_constant_defined" and code.text(i + 2) in defined:
            code.tokens[i + 2].text = f"lily::function_constant<{defined[code.text(i + 2)]}>::defined"
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
        words = tuple(code.text(i) for i in range(declaration.first, declaration.end))
        key = (*declaration.scope, "{", *_without_names(_without_spaces(words)))
        spaces = tuple(word for word in words if word in SPACES)
        first_spaces, conditions = kept.setdefault(key, (spaces, declaration.conditions))
        if first_spaces != spaces and declaration.conditions[: len(conditions)] == conditions:
            code.blank(declaration.first, declaration.last)


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
            if code.text(i) == "#":
                _follow_condition(code, i, conditions)
            i += 1
        elif code.text(i) in (";", ":"):
            i += 1
        elif code.text(i) == "}":
            del scope[-1:]
            i += 1
        elif code.text(i) in ("public", "private", "protected"):
            i += 1
        else:
            kind, opening, end = _signature(code, i)
            words = [code.text(j) for j in range(i, end)]
            last = code.closing(opening) if code.text(opening) == "{" else opening
            if kind in ("class", "function"):
                yield _Declaration(tuple(scope), tuple(conditions), i, end, last)
            if kind in ("class", "namespace") and code.text(opening) == "{":
                scope.append(" ".join(words))
                i = opening + 1
            else:
                i = last + 1


def _follow_condition(code: _Code, i: int, conditions: list[int]) -> None:
    word = code.text(i + 1)
    if word in ("endif", "else", "elif"):
        del conditions[-1:]
    if word in ("if", "ifdef", "ifndef", "else", "elif"):
        conditions.append(i)


def _signature(code: _Code, i: int) -> tuple[str, int, int]:
    """What the declaration at i is, where its `{` or `;` stands, where its signature ends."""
    while code.text(i) == "template" and code.text(i + 1) == "<":
        i = code.after_angles(i + 1)
    first = i
    if code.is_word(i) and code.text(i + 1) == "(":
        close = code.closing(i + 1)
        if code.is_word(close + 1) and code.text(close + 1) not in SPACES | {"const", "noexcept"}:
            return "macro", close, close
    end = -1  # of the signature, when it ends before the opening
    parameters = False
    while i < len(code):
        text = code.text(i)
        if text in (";", "{", "}"):
            break
        if text == "operator":
            i += 1 if code.text(i + 1) not in ("(", "[") else 2
        elif text in ("(", "["):
            parameters = parameters or text == "("
            i = code.closing(i)
        elif text == "<" and code.is_word(i - 1):
            i = code.after_angles(i) - 1
        elif text == "=":
            end = i
            while i < len(code) and code.text(i) != ";":
                i = code.closing(i) + 1 if code.text(i) in _CLOSING else i + 1
            break
        elif text == ":" and parameters:
            end = i
            i = _after_initialisers(code, i + 1)
            break
        i += 1
    head = {code.text(j) for j in range(first, i)}
    end = i if end < 0 else end
    if code.text(i) == "{" and ("namespace" in head or code.text(first) == "extern") and not parameters:
        return "namespace", i, end
    if parameters and code.text(i) in ("{", ";"):
        return "function", i, end
    if head & {"struct", "class", "union"} and code.text(i) == "{":
        return "class", i, end
    return "other", i, end


def _after_initialisers(code: _Code, i: int) -> int:
    """Position of a constructor's body, from its first member initialiser on."""
    while i < len(code):
        while i < len(code) and code.text(i) not in ("(", "{", ";"):
            i = code.after_angles(i) if code.text(i) == "<" else i + 1
        if code.text(i) not in ("(", "{"):
            return i
        i = code.closing(i) + 1
        if code.text(i) != ",":
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
    edits: list[tuple[int, str]] = []  # applied at the end: class_name() reads the tokens
    for i, inside in code.brackets():
        if code.text(i) != "{":
            continue
        is_local = inside == "{"
        if position := code.class_name(i):
            name = code.text(position)
        elif code.text(i - 1) == "struct" and code.text(i - 2) == "typedef":
            name = f"lily_unnamed_{i}"
            edits.append((i - 1, f"struct {name}"))
        else:
            continue
        edits.append((i, "{" + _qualify_members(code, i, name, is_local)))
    for i, text in edits:
        code.tokens[i].text = text


def _qualify_members(code: _Code, opening: int, name: str, is_local: bool) -> str:
    """Rewrite the members of a class; what its body is to begin with."""
    has_data = has_constructor = False
    i, end = opening + 1, code.closing(opening)
    while i < end:
        if code.tokens[i].directive or code.text(i) in (";", ":", "public", "private", "protected", ""):
            i += 1
            continue
        kind, at, signature_end = _signature(code, i)
        last = code.closing(at) if code.text(at) == "{" else at
        if kind == "function":
            close = max(j for j in range(i, signature_end) if code.text(j) == ")")
            start = code.opening(close)
            spaces = {code.text(j) for j in range(close, signature_end)} & SPACES - {"thread"}
            is_constructor = code.text(start - 1) == name
            has_constructor = has_constructor or is_constructor
            if spaces and (is_constructor or "auto" in (code.text(j) for j in range(i, start))):
                code.blank(i, last)
            elif spaces:
                const = "const " if "const" in (code.text(j) for j in range(close, signature_end)) else ""
                comma = ", " if close > start + 1 else ""
                code.tokens[start].text = f"(this {const}LILY_AS_{spaces.pop()} {name}& lily_self{comma}"
                code.blank(close + 1, last)
                code.tokens[last].text = ";"
        elif kind == "other" and code.text(i) not in _NO_DATA and not _MACRO.fullmatch(code.text(i)):
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
        if code.text(colon) != ":":
            continue
        last = code.operand_end(colon + 1) - 1
        for first, end in ((i + 1, colon - 1), (colon + 1, last)):
            # A > may end a template list that the operand is the last argument of.
            if not any(code.text(j).startswith(">") for j in range(first, end + 1)):
                code.tokens[first].before += "(lily::decay{}, "
                code.tokens[end].after += ")"


# -- variables in an address space --------------------------------------------------------------------------


def _place_variables(tokens: list[_Token], mode: Mode) -> None:
    """Address spaces in front of a variable, as opposed to those of what a pointer points to."""
    code = _Code(tokens)
    edits: list[tuple[int, str]] = []  # applied at the end: brackets() reads the tokens
    for i, inside in code.brackets():
        space = code.text(i)
        if space not in SPACES or inside == "[":
            continue
        name = _declared_name(code, i + 1)
        if name is None:
            continue
        is_array = code.text(name + 1) == "["
        if inside == "(":
            if mode == "strict" and is_array:
                # An array parameter is a pointer; clang says so only without an address space.
                last = code.closing(name + 1)
                edits.append((name, f"(*{code.text(name)})"))
                edits.extend((j, "") for j in range(name + 1, last + 1))
            continue
        start = i
        while start > 0 and code.text(start - 1) not in (";", "{", "}", ">", ")", "#"):
            start -= 1
        specifiers = {code.text(j) for j in range(start, name)}
        if space == "constant":
            # A class has no constructor for an address space: in strict mode it keeps none.
            is_scalar = is_array or all(
                code.text(j) in _QUALIFIERS | SPACES | _SCALARS for j in range(i + 1, name)
            )
            kept = "LILY_AS_constant " if mode == "strict" and is_scalar else ""
            edits.append((i, kept + ("" if specifiers & {"const", "constexpr"} else "const")))
        elif space == "threadgroup" and mode == "host":
            edits.append((i, ("" if "static" in specifiers else "static ") + "LILY_RT_THREADGROUP"))
        elif space == "threadgroup":
            edits.append((i, "LILY_AS_threadgroup"))
            edits.extend(_bound_declarators(code, name))
    for i, text in edits:
        code.tokens[i].text = text


def _declared_name(code: _Code, i: int) -> int | None:
    """Position of the variable's name if a type and a variable follow at i."""
    while code.text(i) in _QUALIFIERS or code.text(i) in SPACES:
        i += 1
    if code.text(i) == "decltype":
        i = code.closing(i + 1) + 1
    elif code.text(i) in _BUILTIN_TYPES:
        while code.text(i) in _BUILTIN_TYPES:
            i += 1
    elif code.is_word(i):
        i += 1
    else:
        return None
    while code.text(i) in ("::", "<", "template"):
        i = code.after_angles(i) if code.text(i) == "<" else i + (2 if code.text(i) == "::" else 1)
    while code.text(i) in _QUALIFIERS or code.text(i) in SPACES:
        i += 1
    after = code.after_angles(i + 1) if code.text(i + 1) == "<" else i + 1
    return i if code.is_word(i) and code.text(after)[:1] in ("[", ";", ",", "=", "{", "(") else None


def _bound_declarators(code: _Code, i: int) -> Iterator[tuple[int, str]]:
    """Make every declarator from the name at i on a reference: C++ has no object in an address space."""
    while code.is_word(i):
        yield i, f"(&{code.text(i)})"
        while code.text(i + 1) == "[":
            i = code.closing(i + 1)
        yield i + 1, f" = lily::anywhere{{}}{code.text(i + 1)}"
        if code.text(i + 1) != ",":
            return
        i += 2


# -- words ---------------------------------------------------------------------------------------------------


def _rewrite_words(tokens: list[_Token], mode: Mode) -> None:
    code = _Code(tokens)
    types = {"half", "bfloat", "float16_t", "bfloat16_t"}  # whose functional cast may meet half and bfloat
    members: set[str] = set()  # class members that are named like a swizzle
    for i, inside in code.brackets():
        if code.text(i) in ("typename", "class", "using") and code.text(i + 2) in (",", ">", "="):
            types.add(code.text(i + 1))
        if inside == "class" and code.text(i - 1) not in (".", "->"):
            members.add(code.text(i))
    for i, token in enumerate(code.tokens):
        before, after = code.text(i - 1), code.text(i + 1)
        if token.kind == "number":
            if literal := _SHORT_LITERAL.fullmatch(token.text):
                name = "half" if literal[2] in "hH" else "bfloat"
                token.text = f"{name}({literal[1]}{'' if '.' in literal[1] or 'e' in literal[1] else '.'}f)"
            elif _PLAIN_REAL.fullmatch(token.text):
                token.text += "f"  # Metal has no double
        elif token.kind != "word":
            continue
        elif token.text in SPACES:
            token.text = _address_space(code, i, mode)
        elif token.text in ("kernel", "coherent"):
            token.text = ""
        elif token.text == "static_cast" and after == "<":
            token.text = "lily::cast"
        elif token.text in types and after == "(" and _is_functional_cast(code, i):
            token.text = f"lily::make<{token.text}>"
        elif before in (".", "->") and _SWIZZLE.fullmatch(token.text) and token.text not in members:
            lanes = ", ".join(str(_LANE[letter]) for letter in token.text)
            call = "lily_set" if after in _ASSIGNMENTS else "lily_get"
            token.text = f"{call}(lily::lanes<{lanes}>{{}})" if after != "(" else token.text


def _address_space(code: _Code, i: int, mode: Mode) -> str:
    space = code.text(i)
    if mode == "strict":
        return "" if space == "thread" else f"LILY_AS_{space}"
    before = i - 1
    while code.text(before) == "const":
        before -= 1
    of_this = code.text(before) == ")" and code.text(i + 1) in ("{", ";", ":", "=", "const", "noexcept")
    twice = "const" in (code.text(i - 1), code.text(i + 1))
    return "const" if space == "constant" and not (of_this or twice) else ""


def _is_functional_cast(code: _Code, i: int) -> bool:
    before = code.text(i - 1)
    if before in (".", "->", "::", "~") or code.text(i + 2) == "{":
        return False
    if code.is_word(i - 1) and before not in ("return", "else", "case", "do"):
        return False  # a declaration, operator T(), typename T
    # T (*f)(...) and T (&a)[n] are declarators.
    return not (code.text(i + 2) in ("*", "&") and code.text(code.closing(i + 1) + 1) in ("(", "["))
