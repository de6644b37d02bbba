"""Break the mathematics in many small ways and see whether a test notices: ``python -m tests.mutation --count 80``.

Each mutant is a copy of the repository in which one expression of one file is changed: a sign, an operator, a constant,
a dropped square or transpose, a condition turned round. It is killed if a test fails. Error messages, annotations and
docstrings are left alone. Mutants are drawn with a seed, the same number from each file.
"""

from __future__ import annotations

import argparse
import ast
import copy
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]

# The files that are broken, and the tests that must notice, the quickest first.
TARGETS = {
    "moments.py": ("fused_moments", "moments", "golden", "solve_gp", "collapsed", "full_data"),
    "bounds.py": ("bounds", "golden", "blocks", "tighter_elbo", "solve_gp"),
    "conditionals.py": ("conditionals", "curvature", "blocks", "tighter_elbo", "state"),
    "strategies/_tighter_strategy.py": (
        "tighter_variational_strategy",
        "golden",
        "conformance",
        "solve_gp",
        "full_data",
        "natural_gradients",
        "survival",
        "state",
        "blocks",
    ),
    "strategies/solve_gp_variational_strategy.py": ("solve_gp", "golden", "full_data"),
    "mlls/tighter_elbo.py": ("tighter_elbo", "golden", "wrappers", "curvature", "deep_gp", "conformance"),
}
# Mutants that survive for a reason: file, expression, what replaces it; the reason in a comment beside it.
EQUIVALENT: tuple[tuple[str, str, str], ...] = ()

OPERATORS = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult}
DROPPED_CALLS = {"square", "sqrt", "reciprocal", "clamp_min", "detach", "sum", "tril", "log1p", "log"}
DROPPED_ATTRIBUTES = {"mT"}


class Mutant(NamedTuple):
    """One change.

    :param file: Below ``tighter_gp``.
    :param line: Where.
    :param before: The expression.
    :param after: What it became.
    :param source: The whole file, changed.
    """

    file: str
    line: int
    before: str
    after: str
    source: str


def _changes(node: ast.AST) -> Iterator[ast.expr]:
    """What one expression may become."""
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        yield ast.BinOp(node.left, OPERATORS[type(node.op)](), node.right)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub) and not isinstance(node.operand, ast.Constant):
        yield node.operand
    elif isinstance(node, ast.Constant) and type(node.value) is float:
        yield ast.Constant(2 * node.value + 1)
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in DROPPED_CALLS:
        yield node.func.value
    elif isinstance(node, ast.Attribute) and node.attr in DROPPED_ATTRIBUTES:
        yield node.value
    elif isinstance(node, ast.IfExp):
        yield ast.IfExp(node.test, node.orelse, node.body)


def mutants(file: str) -> list[Mutant]:
    """All mutants of a file."""
    tree = ast.parse((ROOT / "tighter_gp" / file).read_text(encoding="utf-8"))
    places: list[tuple[ast.AST, str, int | None]] = []

    def visit(node: ast.AST) -> None:
        if isinstance(node, (ast.Raise, ast.JoinedStr)):
            return
        for name, value in ast.iter_fields(node):
            if name in ("annotation", "returns", "decorator_list", "bases"):
                continue
            if isinstance(node, (ast.If, ast.While)) and name == "test":
                places.append((node, name, None))
            for position, child in enumerate(value) if isinstance(value, list) else [(None, value)]:
                if isinstance(child, ast.AST):
                    if isinstance(child, ast.expr):
                        places.append((node, name, position))
                    visit(child)

    visit(tree)
    found = []
    for parent, name, position in places:
        value = getattr(parent, name)
        original = value if position is None else value[position]
        changes = list(_changes(original))
        if isinstance(parent, (ast.If, ast.While)) and name == "test" and not changes:
            changes = [ast.UnaryOp(ast.Not(), original)]
        for change in changes:
            _put(parent, name, position, change)
            source = ast.unparse(ast.fix_missing_locations(copy.deepcopy(tree)))
            found.append(Mutant(file, original.lineno, ast.unparse(original), ast.unparse(change), source))
            _put(parent, name, position, original)
    return list({mutant.source: mutant for mutant in found}.values())


def _put(parent: ast.AST, name: str, position: int | None, node: ast.AST) -> None:
    if position is None:
        setattr(parent, name, node)
    else:
        getattr(parent, name)[position] = node


def draw(count: int, seed: int) -> list[Mutant]:
    """As many mutants, shared among the files."""
    generator, chosen = random.Random(seed), []
    for i, file in enumerate(TARGETS):
        candidates = mutants(file)
        share = count * (i + 1) // len(TARGETS) - count * i // len(TARGETS)
        chosen += generator.sample(candidates, min(share, len(candidates)))
    return chosen


def is_killed(mutant: Mutant, seconds: float) -> bool:
    """Whether a test fails with the mutant in place; one that never ends is killed too."""
    with tempfile.TemporaryDirectory() as folder:
        copied = Path(folder)
        for name in ("tighter_gp", "tests", "benchmarks"):
            ignored = shutil.ignore_patterns("__pycache__", "results")
            shutil.copytree(ROOT / name, copied / name, ignore=ignored)
        shutil.copy(ROOT / "pyproject.toml", copied)
        (copied / "tighter_gp" / mutant.file).write_text(mutant.source, encoding="utf-8")
        tests = [f"tests/test_{name}.py" for name in TARGETS[mutant.file]]
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-p", "no:randomly", *tests]
        environment = {**os.environ, "PYTHONPATH": str(copied), "OMP_NUM_THREADS": "1"}
        try:
            done = subprocess.run(
                command, cwd=copied, env=environment, capture_output=True, timeout=seconds, check=False
            )
        except subprocess.TimeoutExpired:
            return True
        if done.returncode not in (0, 1, 2):
            raise RuntimeError(f"pytest ended with {done.returncode}: {done.stdout.decode()[-500:]}")
        return done.returncode != 0


def main() -> int:
    """Draw mutants, try each, print the survivors."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=80)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=600.0, help="for one mutant; longer counts as killed")
    parser.add_argument("--out", type=Path, help="file for a JSON line a mutant, as they are done")
    args = parser.parse_args()
    chosen = draw(args.count, args.seed)
    known = {(file, before, after) for file, before, after in EQUIVALENT}
    survivors, killed = [], 0

    def attempt(mutant: Mutant) -> tuple[Mutant, bool]:
        return mutant, is_killed(mutant, args.seconds)

    with ThreadPoolExecutor(args.workers) as pool:
        for mutant, dead in pool.map(attempt, chosen):
            killed += dead
            if not dead:
                survivors.append(mutant)
            text = f"{mutant.file}:{mutant.line}: {mutant.before}  ->  {mutant.after}"
            print(f"{'killed  ' if dead else 'SURVIVED'} {text}", flush=True)
            if args.out is not None:
                with args.out.open("a", encoding="utf-8") as file:
                    file.write(json.dumps({**mutant._asdict(), "source": None, "killed": dead}) + "\n")
    print(f"\n{killed} of {len(chosen)} mutants killed ({killed / len(chosen):.1%}).")
    unexplained = [m for m in survivors if (m.file, m.before, m.after) not in known]
    return int(len(unexplained) > 0.05 * len(chosen))


if __name__ == "__main__":
    sys.exit(main())
