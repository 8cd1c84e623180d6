"""Errors that a user can act on."""

from __future__ import annotations


class LilyError(Exception):
    """Base of Lily's own errors. The message is one line that names the value and what would be right."""


class UsageError(LilyError, ValueError):
    """An argument, a variable or a file that cannot be used; the command line ends with status 2."""


class UnsupportedModelError(UsageError):
    """Lily has no class for the model type, or the model is beyond a limit of Lily's; stock may run it."""


class BackendUnavailableError(UsageError):
    """The back-end that was asked for does not exist on this machine."""


def in_one_line(error: BaseException, limit: int = 300) -> str:
    """What an exception says, on one line of at most ``limit`` characters; its type if it says nothing."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= limit else text[:limit] + " ..."
