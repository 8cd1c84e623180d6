"""Errors that a user can act on."""

from __future__ import annotations


class LilyError(Exception):
    """Base of Lily's own errors. The message is one line that names the value and what would be right."""


class UsageError(LilyError, ValueError):
    """An argument, a variable or a file that cannot be used; the command line ends with status 2."""


class UnsupportedModelError(UsageError):
    """The model type has no Lily class."""


class BackendUnavailableError(UsageError):
    """The back-end that was asked for does not exist on this machine."""
