"""The root of the hierarchy."""

from __future__ import annotations


class KafkaSparkError(Exception):
    """Base of all errors of this package.

    :param found: what was found, a whole sentence without its full stop.
    :param expected: what was expected instead.
    :param action: what the reader can do about it.
    """

    retryable: bool = False

    def __init__(self, found: str, *, expected: str = "", action: str = "") -> None:
        self.found = found
        self.expected = expected
        self.action = action
        sentences = [found, f"Expected {expected}" if expected else "", action]
        super().__init__(" ".join(f"{s.rstrip('.')}." for s in sentences if s))

    def __reduce__(self) -> tuple:
        # Subclasses take facts rather than sentences: without this, an error raised in a Spark task could not travel.
        return _rebuild, (type(self), self.args, self.__dict__)


def _rebuild(cls: type[KafkaSparkError], args: tuple, facts: dict) -> KafkaSparkError:
    error = cls.__new__(cls)
    error.args = args
    error.__dict__.update(facts)
    return error
