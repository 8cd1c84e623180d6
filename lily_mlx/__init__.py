"""lily-mlx: custom Metal kernels for Qwen3.5/3.6-MoE in mlx-lm.

``load``, ``register``, ``unregister`` and ``convert`` are imported on first use, so that ``import lily_mlx``
needs no GPU and builds no kernel. The start-up hook imports this file too: it imports nothing itself.
"""

__version__ = "0.1.0"

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .engine import convert, load, register, unregister

__all__ = ["__version__", "convert", "load", "register", "unregister"]


def __getattr__(name: str):  # type: ignore[no-untyped-def]
    if name in __all__:
        from . import engine

        return getattr(engine, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
