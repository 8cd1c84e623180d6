"""The token rewriter, by what it makes of small sources."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import pytest

from lily_mlx.launch.msl.rewrite import Mode, function_constants, inline_includes, translate

KERNELS = Path(mx.__file__).parent / "include" / "mlx/backend/metal/kernels"


def squeezed(text: str, mode: Mode = "host") -> str:
    return " ".join(translate(text, mode=mode).split())


@pytest.mark.parametrize("mode", ["host", "strict"])
@pytest.mark.parametrize("name", ["complex.h", "sdpa_vector.h", "steel/gemm/nax.h"])
def test_lines_stay_where_they_are(name: str, mode: Mode) -> None:
    source = (KERNELS / name).read_text()
    lines = translate(source, mode=mode).split("\n")
    assert len(lines) == source.count("\n") + 1
    comments = [i for i, line in enumerate(source.split("\n")) if line.strip().startswith("//")]
    assert comments
    assert all(lines[i] == source.split("\n")[i] for i in comments)


@pytest.mark.parametrize(
    ("source", "want"),
    [
        ("threadgroup float x[32];", "static LILY_RT_THREADGROUP float x[32];"),
        ("threadgroup float* p = x;", "float* p = x;"),
        ("threadgroup Tile<float, 8>& t = *q;", "Tile<float, 8>& t = *q;"),
        ("f((threadgroup T*)x, (const device uint*)w);", "f(( T*)x, (const uint*)w);"),
        ("void f(threadgroup T x[4], constant int& n);", "void f( T x[4], const int& n);"),
        ("constant float table[2] = {1, 2};", "const float table[2] = {1, 2};"),
        ("static constexpr constant int n = 4;", "static constexpr int n = 4;"),
        ("[[kernel]] void f(uint i [[thread_index_in_simdgroup]])", "void f(uint i )"),
        (
            "a[b[0]] = 1.0h + 2h + 0.5 + 1e-3 + 2.5f + 7;",
            "a[b[0]] = half(1.0f) + half(2.f) + 0.5f + 1e-3f + 2.5f + 7;",
        ),
        ("x = v.xyz; v.zy = u; v.yx == w; p->x = 1;", None),
        ('s = "threadgroup T x[4]; 1.0h";', 's = "threadgroup T x[4]; 1.0h";'),
        ("template <typename T> T f(T x) { return T(x) * static_cast<T>(2); }", None),
    ],
)
def test_host(source: str, want: str | None) -> None:
    got = squeezed(source)
    if want is not None:
        assert got == want
    elif "xyz" in source:
        assert got == (
            "x = v.lily_get(lily::lanes<0, 1, 2>{}); v.lily_set(lily::lanes<2, 1>{}) = u; "
            "v.lily_get(lily::lanes<1, 0>{}) == w; p->x = 1;"
        )
    else:
        assert got == "template <typename T> T f(T x) { return lily::make<T>(x) * lily::cast<T>(2); }"


def test_the_first_of_definitions_that_differ_in_address_space_is_kept() -> None:
    source = """
    struct S {
      S() thread : a(0) {}
      S() device : a(1) {}
      float get(const device float* p) const thread { return p[a]; }
      float get(const threadgroup float* q) const thread { return q[a]; }
      float get(device float* p) const thread { return p[0]; }
      int a;
    };
    template <typename T> struct E {};
    template <typename T> struct E<device T*> { using type = T; };
    template <typename T> struct E<thread T*> { using type = T; };
    """
    got = squeezed(source)
    assert got.count("S()") == 1
    assert got.count("float get(") == 2  # const or not is a difference
    assert got.count("struct E<") == 1


def test_definitions_in_other_branches_are_not_repetitions() -> None:
    source = "#if A\nvoid f(device int* p) {}\n#else\nvoid f(threadgroup int* p) {}\n#endif\n"
    assert squeezed(source).count("void f(") == 2


def test_function_constants() -> None:
    source = (
        "constant bool flag [[function_constant(7)]];\nint f() { return is_function_constant_defined(flag); }"
    )
    assert squeezed(source) == (
        "const bool flag = lily::function_constant_value<7>(); int f() "
        "{ return (lily::function_constant<7>::defined); }"
    )
    header = function_constants({7: True, 8: -3, 9: 0.5})
    assert header.splitlines()[0] == (
        "template <> struct lily::function_constant<7> "
        "{ static constexpr bool defined = true; static constexpr auto value = true; };"
    )
    assert "value = -3;" in header
    assert "value = 0.5;" in header


@pytest.mark.parametrize(
    ("source", "want"),
    [
        ("void f(const device T* p, thread T& x);", "void f(const LILY_AS_device T* p, T& x);"),
        ("void f(constant int s[2]);", "void f(LILY_AS_constant int (*s));"),
        (
            "threadgroup float x[4][2], y;",
            "LILY_AS_threadgroup float (&x)[4][2] = lily::anywhere{}, (&y) = lily::anywhere{};",
        ),
        ("v = ok ? p[i] : q;", "v = ok ? (lily::decay{}, p[i]) : (lily::decay{}, q);"),
        (
            "struct S { float x; float get() const device { return x; } };",
            "struct S { LILY_AGGREGATE(S) float x; float get(this const LILY_AS_device S& lily_self) ; };",
        ),
    ],
)
def test_strict(source: str, want: str) -> None:
    assert squeezed(source, "strict") == want


def test_inline_includes(tmp_path: Path) -> None:
    (tmp_path / "a.h").write_text('#pragma once\n#include "b.h"\nint a;\n')
    (tmp_path / "b.h").write_text("int b;\n")
    text = inline_includes('#include <metal_stdlib>\n#include "a.h"\n#include "b.h"\nint c;\n', tmp_path)
    assert text.split() == ["#include", "<metal_stdlib>", "int", "b;", "int", "a;", "int", "c;"]
    with pytest.raises(FileNotFoundError):
        inline_includes('#include "missing.h"', tmp_path)
