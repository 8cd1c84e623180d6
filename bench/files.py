"""Output files: looked at before the work, written whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

from lily_mlx.errors import UsageError


def check_folder(option: str, folder: Path) -> None:
    """Raise UsageError unless ``folder`` is one that can be written to, or can be made."""
    existing = folder.absolute()
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    if not existing.is_dir():
        what = "which" if existing == folder.absolute() else f"but {existing}"
        raise UsageError(f"{option} is {str(folder)!r}, {what} is a file; it must be a folder or a new name")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise UsageError(f"{option} is {str(folder)!r}, but {existing} cannot be written to")


def check_file(option: str, file: Path) -> None:
    """Raise UsageError unless a file can be written at ``file``, in a folder that exists."""
    folder = file.absolute().parent
    if file.is_dir():
        raise UsageError(f"{option} is {str(file)!r}, which is a folder; it must be a file")
    if not folder.is_dir():
        raise UsageError(f"{option} is {str(file)!r}, whose folder does not exist")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UsageError(f"{option} is {str(file)!r}, whose folder cannot be written to")


def write_text(file: Path, text: str) -> None:
    """Write ``text`` into a file beside ``file`` that then takes its place.

    Raises:
        UsageError: it cannot be written.
    """
    unfinished = file.with_name(file.name + ".part")
    try:
        unfinished.write_text(text, encoding="utf-8")
        os.replace(unfinished, file)
    except OSError as error:
        raise UsageError(f"{file} cannot be written: {error.strerror}") from None
    finally:
        if unfinished.exists():
            unfinished.unlink()
