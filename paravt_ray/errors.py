"""The errors that are meant for people: one sentence with the cause and the way out, shown without a traceback."""

from __future__ import annotations

from typing import ClassVar


class UserError(Exception):
    """Something outside the code went wrong (a cluster too small, a full disk, a server gone); the message says what.

    The message is one or more whole sentences: what happened to what, and what can be done about it.
    """

    exit_code: ClassVar[int] = 1
    """What the command line ends with."""


class InputError(UserError):
    """What the user gave cannot be used: a configuration, a file, a path, an argument."""

    exit_code: ClassVar[int] = 2
