"""Base class of the errors, and names and commands in their messages."""

from __future__ import annotations

import shlex
from collections.abc import Iterable

RETRY = "The task may simply be retried: the window is unchanged"
"""The advice for an error that a retry ends."""
SMALLER_WINDOW = (
    "An open window keeps its records: `airflow kafka-spark reset <pipeline> --to committed:<group> --discard-open --why ...` "
    'gives up what is not committed of it, and the next window begins there (not with `atomic="split"`, whose committed splits '
    "would be moved again)"
)
"""The way out of a window that is too large, for a pipeline that reads topics."""


class KafkaSparkError(Exception):
    """Base class of all errors that this package raises.

    The message consists of three sentences: what was found, what was expected, and what to do.

    :param found: what was found, a sentence without its full stop.
    :param expected: what was expected instead, as the object of "Expected".
    :param action: what the user can do.
    """

    retryable: bool = False
    """True if the same task may succeed on a retry without any change by the user."""

    def __init__(self, found: str, *, expected: str = "", action: str = "") -> None:
        self.found = found
        self.expected = expected
        self.action = action
        super().__init__(found)

    def __str__(self) -> str:
        # The code that raises the error may have replaced a sentence since the error was made.
        sentences = [self.found, f"Expected {self.expected}" if self.expected else "", self.action]
        # A list of lines ends with a line end, not with a full stop.
        return "".join(s if s.endswith("\n") else f"{s.rstrip('.')}. " for s in sentences if s).rstrip()

    def __reduce__(self) -> tuple:
        # Subclasses take facts instead of sentences. Without this, an error raised in a Spark task could not be unpickled.
        return _rebuild_error, (type(self), self.args, self.__dict__)


def _rebuild_error(cls: type[KafkaSparkError], args: tuple, facts: dict) -> KafkaSparkError:
    error = cls.__new__(cls)
    error.args = args
    error.__dict__.update(facts)
    return error


def format_command(action: str, pipeline: str, *arguments: object) -> str:
    """Return a command of this package as a user may paste it into a shell, in backquotes.

    :param action: the command.
    :param pipeline: name of the pipeline, which may contain blanks.
    :param arguments: further words. Placeholders, as ``<group>``, stay as they are.
    """
    words = [action, *(word if word.startswith("<") else shlex.quote(word) for word in map(str, (pipeline, *arguments)))]
    return f"`airflow kafka-spark {' '.join(words)}`"


def find_similar_name(name: str, known: Iterable[str], *, likeness: float = 0.75) -> str:
    """Return the known name that is most like another name, for a message; "" if none is.

    :param likeness: the least likeness of two names, as :func:`difflib.get_close_matches` measures it; 1 for equal names.
    """
    from difflib import get_close_matches

    return next(iter(get_close_matches(name, sorted(known), 1, likeness)), "")


def quote_names(names: Iterable[str]) -> str:
    """Return names for a message: in backticks, separated by commas."""
    return ", ".join(f"`{name}`" for name in names)
