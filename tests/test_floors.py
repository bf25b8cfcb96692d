"""The floors of docs/architecture.md: a package imports only from packages below its own."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
OURS = ("paravt_ray", "tool_workers")
FILES = [file for package in OURS for file in sorted((ROOT / package).rglob("*.py"))]


def floors() -> dict[str, int]:
    """The page's table; a file in it that has a floor of its own comes as `package.module`."""
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d+) \| (.+) \|$", page, re.MULTILINE)
    named = [(name, int(floor)) for floor, names in rows for name in re.findall(r"`([\w./]+)`", names)]
    return {name.removesuffix(".py").replace("/", "."): floor for name, floor in named}


def name_of(file: Path) -> str:
    return ".".join(file.relative_to(ROOT).with_suffix("").parts)


def package_of(module: str, known: dict[str, int]) -> str:
    """The table's name for what holds a module: `rollout` for `paravt_ray.rollout.agent`."""
    parts = module.removeprefix("paravt_ray.").split(".")
    names = [".".join(parts[:length]) for length in range(len(parts), 0, -1)]
    return next((name for name in names if name in known), parts[0])


def imported(file: Path) -> Iterator[str]:
    """What a file imports anywhere in it, with dots down to the name."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, f"{file} imports relatively"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_every_package_has_its_floor() -> None:
    tops = {path.stem for path in (ROOT / "paravt_ray").iterdir() if path.suffix == ".py" or any(path.glob("*.py"))}
    listed = {name for name in floors() if "." not in name}
    assert listed == tops - {"__init__"} | {"tool_workers"}


def test_packages_import_only_from_floors_below() -> None:
    known = floors()
    upwards = set()
    for file in FILES:
        here = package_of(name_of(file), known)
        for module in imported(file):
            there = package_of(module, known)
            if module.split(".")[0] in OURS and there != here and known[there] >= known[here]:
                upwards.add(f"{here} ({known[here]}) imports {there} ({known[there]}) in {file.name}")
    assert sorted(upwards) == []


def test_the_algorithm_needs_torch_and_numpy_alone() -> None:
    files = [file for file in FILES if file.parent.name == "algorithm"]
    used = {module.split(".")[0] for file in files for module in imported(file)}
    assert files and used - sys.stdlib_module_names == {"numpy", "torch", "paravt_ray"}
