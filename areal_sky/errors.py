"""One error tree, named by what the caller can do about it.

    ArealSkyError                something went wrong; the message says what and what to do
    |-- SpecError                fix the YAML (carries every mistake found, each with its position)
    |-- InvalidInput             fix an argument of this call or command
    |-- Refused                  a guard said no (budget, never-fitting gang, fixed group): change the ask
    |-- NotFound                 no such cluster, group, replica or task
    |-- AlreadyExists            the name is taken: attach to it, or choose another
    |-- NoCapacity               nothing to be had here now: try another offer, or later
    |   `-- QuotaExceeded        the cloud would have it, but not for this account: ask for more, or go elsewhere
    |-- Unreachable              the head, controller or API server does not answer: try again
    |-- Unauthorized             a token is missing or lacks the right
    `-- StateError               local state cannot be read or written: the message says how to go on

Exit codes of the command line: SpecError and InvalidInput end with 2, Refused with 3, all others with 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

EXIT_FAILED = 1
EXIT_WRONG_INPUT = 2
EXIT_REFUSED = 3


class ArealSkyError(Exception):
    """Base of every error that areal_sky raises on purpose. `str()` is one message fit for a user."""

    exit_code = EXIT_FAILED


@dataclass(frozen=True, slots=True)
class Mistake:
    """One thing wrong in a file. `line` and `column` count from 1."""

    file: str
    line: int
    column: int
    what: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}:{self.column}: {self.what}"


class SpecError(ArealSkyError):
    """A spec cannot be used. `mistakes` holds every one that was found, in file order."""

    exit_code = EXIT_WRONG_INPUT

    def __init__(self, mistakes: Sequence[Mistake]):
        self.mistakes = tuple(sorted(mistakes, key=lambda m: (m.file, m.line, m.column, m.what)))
        super().__init__("\n".join(str(m) for m in self.mistakes))


class InvalidInput(ArealSkyError):
    """An argument is wrong."""

    exit_code = EXIT_WRONG_INPUT


class Refused(ArealSkyError):
    """A guard refused: the request is well formed but must not be done as asked."""

    exit_code = EXIT_REFUSED


class NotFound(ArealSkyError):
    """No such cluster, group, replica or task."""


class AlreadyExists(ArealSkyError):
    """The name is taken."""


class NoCapacity(ArealSkyError):
    """Nothing to be had here now."""


class QuotaExceeded(NoCapacity):
    """The account may not have more of it."""


class Unreachable(ArealSkyError):
    """A process that we need does not answer."""


class Unauthorized(ArealSkyError):
    """A token is missing or lacks the right for this call."""


class StateError(ArealSkyError):
    """Local state cannot be read or written."""
