"""Imports go one way, the maths needs torch alone, and experiments use what users can use. Reads the sources only."""

from __future__ import annotations

import ast
import functools
import graphlib
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import tighter_gp

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "tighter_gp"

# The rooms of the house, in order. A module imports from rooms above its own, or from its own.
ROOMS = {
    "tools": ("arguments", "checks", "data", "draws", "modes", "recording", "settings", "starts"),
    "maths": ("maths",),
    "prior": ("prior",),
    "family": ("carrier", "conditionals", "inducing", "labels", "likelihoods"),
    "models": ("collapsed", "kernels", "mlls", "strategies"),
    "answers": ("diagnostics", "export", "full_data", "posterior", "predictions"),
    "programs": ("compiled", "gplvm", "inductor", "models", "training"),
}
LEVEL = {name: level for level, names in enumerate(ROOMS.values()) for name in names}
RUNTIME = {"torch", "gpytorch", "linear_operator", "numpy", "tighter_gp"}


def dotted(path: Path) -> str:
    """Module name of a file below the root."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {dotted(path): path for path in sorted(PACKAGE.rglob("*.py"))}
CLIENTS = [path for folder in ("benchmarks", "notebooks") for path in sorted((ROOT / folder).rglob("*.py"))]


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def imports(nodes, module: str, is_package: bool) -> Iterator[tuple[str, str | None]]:
    """``(module, name)`` for each import among the nodes, absolute; the name is None for ``import module``."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from ((alias.name, None) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = module.split(".")
                parents = parents[: len(parents) - node.level + is_package]
                base = ".".join([*parents, *([base] if base else [])])
            yield from ((base, alias.name) for alias in node.names)


def imports_of(path: Path, *, top_level_only: bool = False) -> list[tuple[str, str | None]]:
    tree = tree_of(path)
    nodes = tree.body if top_level_only else ast.walk(tree)
    return list(imports(nodes, dotted(path), path.name == "__init__.py"))


def dependencies(module: str) -> set[str]:
    """The modules of the package that a module imports, also inside functions."""
    found = set()
    for base, name in imports_of(MODULES[module]):
        if base.split(".")[0] == "tighter_gp":
            submodule = f"{base}.{name}"
            found.add(submodule if submodule in MODULES else base)
    return found


def layer(module: str) -> str:
    """The first component below the package."""
    return module.partition(".")[2].partition(".")[0]


INNER = [module for module in MODULES if module != "tighter_gp"]


def test_sources_are_found():
    assert {"tighter_gp.maths.linalg", "tighter_gp.mlls.tighter_elbo"} <= set(INNER)
    assert any(path.parent.name == "benchmarks" for path in CLIENTS)


@pytest.mark.parametrize("module", INNER)
def test_module_has_a_place_in_the_order(module):
    assert layer(module) in LEVEL, f"give {layer(module)!r} a row in ROOMS of tests/test_architecture.py"


@pytest.mark.parametrize("module", INNER)
def test_imports_go_one_way(module):
    own = layer(module)
    for dependency in sorted(dependencies(module)):
        other = layer(dependency)
        assert other, f"{module} imports the top of the package; import the module that defines the name"
        if other != own:
            assert LEVEL.get(other, 99) <= LEVEL.get(own, -1), f"{module} imports {dependency} from a later room"


def test_no_module_imports_itself_in_a_circle():
    graph = {module: dependencies(module) - {module} for module in INNER}
    order = list(graphlib.TopologicalSorter(graph).static_order())
    assert len(order) >= len(INNER)


@pytest.mark.parametrize("module", [module for module in INNER if layer(module) == "maths"])
def test_pure_maths_needs_torch_alone(module):
    allowed = {"torch", "tighter_gp", *sys.stdlib_module_names}
    for base, _ in imports_of(MODULES[module]):
        assert base.split(".")[0] in allowed, base
    assert {layer(dependency) for dependency in dependencies(module)} <= {"maths"}


@pytest.mark.parametrize("module", INNER)
def test_no_private_name_is_imported_from_another_package(module):
    for base, name in imports_of(MODULES[module]):
        if base.startswith("tighter_gp") and base.rpartition(".")[0] != module.rpartition(".")[0]:
            assert name is None or not name.startswith("_"), f"{module} imports {name} from {base}"


@pytest.mark.parametrize(
    "module", [module for module in INNER if layer(module) in ("prior", "strategies", "collapsed")]
)
def test_no_handler_of_an_error_changes_the_algorithm(module):
    """What is caught is raised again, with more to say."""
    for node in ast.walk(tree_of(MODULES[module])):
        if isinstance(node, ast.ExceptHandler):
            assert isinstance(node.body[-1], ast.Raise), f"{module}, line {node.lineno}"
        if isinstance(node, ast.Name):
            assert node.id not in ("suppress", "functional_call"), f"{module}, line {node.lineno}: {node.id}"


@pytest.mark.parametrize("module", MODULES)
def test_package_needs_its_declared_dependencies_alone(module):
    for base, _ in imports_of(MODULES[module], top_level_only=True):
        assert base.split(".")[0] in RUNTIME | sys.stdlib_module_names, base


@pytest.mark.parametrize("module", MODULES)
def test_device_and_dtype_come_from_the_inputs(module):
    for node in ast.walk(tree_of(MODULES[module])):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            assert node.func.attr != "cuda", f"line {node.lineno}: .cuda()"
        name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
        assert not name.startswith("set_default"), f"{name} changes the user's program"


def is_public(dotted_name: str) -> bool:
    return not any(part.startswith("_") for part in dotted_name.split("."))


def is_exported(name: str) -> bool:
    """Whether ``tighter_gp.name`` is a public name or a public module."""
    return name in tighter_gp.__all__ or (is_public(name) and f"tighter_gp.{name}" in MODULES)


def chain_of(node: ast.AST) -> list[str]:
    """``["a", "b", "c"]`` for the expression ``a.b.c``, empty for anything else."""
    if isinstance(node, ast.Name):
        return [node.id]
    if isinstance(node, ast.Attribute) and (start := chain_of(node.value)):
        return [*start, node.attr]
    return []


@pytest.mark.parametrize("path", CLIENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_experiments_import_public_names_only(path):
    for base, name in imports_of(path):
        if base.split(".")[0] != "tighter_gp":
            continue
        if base == "tighter_gp" and name is not None:
            assert is_exported(name), name
        else:
            assert base in MODULES, base
            assert is_public(base if name is None else f"{base}.{name}"), f"{base}: {name}"


@pytest.mark.parametrize("path", CLIENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_experiments_use_public_attributes_of_the_package_only(path):
    for node in ast.walk(tree_of(path)):
        package, *names = chain_of(node) or [""]
        if package == "tighter_gp" and names and names != ["__version__"]:
            assert is_exported(names[0]), f"line {node.lineno}: tighter_gp.{names[0]}"
            assert is_public(".".join(names)), f"line {node.lineno}: {'.'.join(names)}"


def test_public_names_exist():
    missing = [name for name in tighter_gp.__all__ if not hasattr(tighter_gp, name)]
    assert missing == []
    assert all(is_public(name) for name in tighter_gp.__all__)


@pytest.mark.parametrize("module", [m for m, path in MODULES.items() if path.name == "__init__.py" and is_public(m)])
def test_subpackages_export_what_they_say(module):
    package = importlib.import_module(module)
    assert [name for name in package.__all__ if not hasattr(package, name)] == []


def test_oracles_share_no_code_with_the_package():
    used = {base.split(".")[0] for base, _ in imports_of(ROOT / "tests" / "tools" / "dense.py")}
    assert used <= {"torch", *sys.stdlib_module_names}
