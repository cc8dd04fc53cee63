"""Each mutant still fits the provider, and the tests that have to find it are there. Starts nothing."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

from tests.mutants.catalog import MUTANTS
from tests.mutants.model import PACKAGE, Mutant, NotApplicable

ROOT = Path(__file__).parents[2]
PROVIDER = ROOT / "provider" / PACKAGE


def test_names_are_unique_and_there_are_at_least_twenty():
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) >= 20


def test_no_two_mutants_make_the_same_change():
    assert len({(mutant.path, mutant.old, mutant.new) for mutant in MUTANTS}) == len(MUTANTS)


def test_each_replaced_text_occurs_once_and_each_mutated_file_compiles():
    for mutant in MUTANTS:
        assert mutant.old != mutant.new, mutant.name
        compile(mutant.mutated(PROVIDER), mutant.path, "exec")


def test_the_named_tests_exist():
    for mutant in MUTANTS:
        assert mutant.tests, mutant.name
        for test in mutant.tests:
            file, *names = test.partition("[")[0].split("::")
            assert (ROOT / file).is_file(), test
            assert names and set(names) <= defined(ROOT / file), test
            assert names[-1].startswith("test_"), test


def test_each_broken_guarantee_is_one_sentence():
    texts = [mutant.breaks for mutant in MUTANTS]
    assert not [text for text in texts if not text.endswith(".") or ". " in text or "\n" in text]


def test_a_mutant_whose_text_is_missing_or_there_twice_is_not_applied(tmp_path: Path):
    (tmp_path / "module.py").write_text("a = 1\nb = 1\n")
    for path, old in (("other.py", "a"), ("module.py", "c = 1"), ("module.py", "= 1")):
        with pytest.raises(NotApplicable):
            Mutant("name", path, old, "", "", ()).apply(tmp_path)
    assert (tmp_path / "module.py").read_text() == "a = 1\nb = 1\n"
    Mutant("name", "module.py", "a = 1", "a = 2", "", ()).apply(tmp_path)
    assert (tmp_path / "module.py").read_text() == "a = 2\nb = 1\n"


@cache
def defined(file: Path) -> frozenset[str]:
    """Return the names of functions and classes of a test file, those of the test modules that it imports among them."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    names = {node.name for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tests."):
            imported = ROOT / f"{str(node.module).replace('.', '/')}.py"
            names |= defined(imported) if imported.is_file() else set()
    return frozenset(names)
