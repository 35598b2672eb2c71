"""The house: tests are found by the name of the module, rooms of tests are rooms of the library, names occur once."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

import jetplane as jp

SOURCE, TESTS = Path(jp.__file__).parent, Path(__file__).parent

# File names that stand in several rooms, each with what they mean in all of them.
SAME_MEANING = {
    "__init__": "the public names of a room",
    "__main__": "python -m",
    "traced": "the same functions without a word to the host, as a compiler takes them",
    "coverage": "which operations have rules: the function and its command",
}

# the same functions in the same order, for tensors that may not be asked for their numbers
TWINS = {SOURCE / "optim" / "step_traced.py"}


def modules() -> list[Path]:
    """The modules of the library, relative to it."""
    found = (path.relative_to(SOURCE) for path in SOURCE.rglob("*.py"))
    return sorted(path for path in found if path.stem not in ("__init__", "__main__"))


def untested(found: list[Path]) -> list[str]:
    """Modules without tests of their name: ``test_<module>``, or ``test_<room>_<module>`` where rooms share a name."""
    tests = {path.stem: path.relative_to(TESTS).parts[0] for path in TESTS.rglob("test_*.py")}
    count = Counter(path.stem for path in found)
    missing = []
    for path in found:
        name = path.stem.strip("_")
        alone = f"test_{name}" in tests and (count[path.stem] == 1 or tests[f"test_{name}"] == path.parts[0])
        if not alone and f"test_{path.parts[0]}_{name}" not in tests:
            missing.append(str(path))
    return missing


def test_the_tests_of_most_modules_are_found_by_their_name() -> None:
    found = modules()
    missing = untested(found)
    assert len(missing) <= 0.2 * len(found), f"{len(missing)} of {len(found)} have none: {', '.join(missing)}"


def test_rooms_of_tests_are_rooms_of_the_library() -> None:
    rooms = {path.relative_to(TESTS).parent for path in TESTS.rglob("test_*.py")}
    assert sorted(str(room) for room in rooms if not (SOURCE / room).is_dir()) == []


def test_a_file_name_occurs_once_or_means_the_same() -> None:
    count = Counter(path.stem for path in SOURCE.rglob("*.py"))
    assert sorted(name for name, times in count.items() if times > 1 and name not in SAME_MEANING) == []


def test_names_that_mean_the_same_are_there_several_times() -> None:
    count = Counter(path.stem for path in SOURCE.rglob("*.py"))
    assert [name for name in SAME_MEANING if not name.startswith("__") and count[name] < 2] == []


def test_a_class_name_occurs_once_but_for_the_twins_of_a_step() -> None:
    found = [(path, node) for path in SOURCE.rglob("*.py") for node in ast.parse(path.read_text()).body]
    count = Counter(node.name for path, node in found if isinstance(node, ast.ClassDef) and path not in TWINS)
    # a tile of numbers is another one in each kernel
    assert sorted(name for name, times in count.items() if times > 1) == ["Tile"]


def named_operations(source: str) -> list[str]:
    """Names in code of operations of the dispatcher, or of their namespaces; what docstrings say does not count."""
    found = [node.attr for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Attribute)]
    found += [node.id for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Name)]
    return [name for name in found if name in ("aten", "prims", "ops")]


def test_the_engine_knows_no_operation() -> None:
    """What it must know of one is a trait of its rule, or stands in a table of ``ad/rules``."""
    engine = sorted((SOURCE / "ad" / "engine").rglob("*.py"))
    assert len(engine) > 10
    assert {path.name: named_operations(path.read_text()) for path in engine} == {path.name: [] for path in engine}


def test_an_operation_by_name_is_found() -> None:
    assert sorted(named_operations("aten = torch.ops.aten\nx = aten.mul")) == ["aten", "aten", "aten", "ops"]
    assert named_operations('"""aten.detach, torch.ops"""\nx = 1') == []


def test_files_of_tests_have_names_of_their_own() -> None:
    """Without packages, pytest knows a file of tests by its name alone."""
    count = Counter(path.stem for path in TESTS.rglob("*.py"))
    assert [name for name, times in count.items() if times > 1] == []
