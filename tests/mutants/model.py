"""A mutant, and how it is applied to a copy of the package."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

PACKAGE = "airflow_kafka_spark"


class NotApplicable(ValueError):
    """The text that a mutant replaces does not occur exactly once in its file."""


@dataclass(frozen=True)
class Mutant:
    """A deliberate fault: one replacement in one file of the provider.

    :param name: unique; its first word names the part of the provider.
    :param path: the file, relative to ``provider/airflow_kafka_spark``.
    :param old: the text that is replaced; it occurs exactly once in the file.
    :param new: the text that takes its place.
    :param breaks: one sentence: the guarantee that no longer holds.
    :param tests: pytest node ids of the cheapest tests that have to fail.
    """

    name: str
    path: str
    old: str
    new: str
    breaks: str
    tests: tuple[str, ...]

    def mutated(self, package: Path) -> str:
        """Return the text of the mutated file.

        :param package: the directory of the package ``airflow_kafka_spark``.
        :raises NotApplicable: the file is missing, or ``old`` does not occur exactly once in it.
        """
        file = package / self.path
        if not file.is_file():
            raise NotApplicable(f"there is no {self.path}")
        text = file.read_text(encoding="utf-8")
        if (count := text.count(self.old)) != 1:
            raise NotApplicable(f"the text to replace occurs {count} times in {self.path}, not once")
        return text.replace(self.old, self.new)

    def apply(self, package: Path) -> None:
        """Write the mutated file.

        :param package: a copy of the package.
        :raises NotApplicable: see :meth:`mutated`.
        """
        (package / self.path).write_text(self.mutated(package), encoding="utf-8")
