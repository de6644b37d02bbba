"""Break the mathematics in many small ways and see whether a test notices: ``python -m tests.tools.mutation --count 80``.

Each mutant is a copy of the repository in which one expression of one file is changed: a sign, an operator, a constant,
a dropped square or transpose, a condition turned round. It is killed if a test fails: one of the file's own, or, where
those pass, one of the others. Error messages, annotations and docstrings are left alone. Mutants are drawn with a seed, the
same number from each file.
"""

from __future__ import annotations

import argparse
import ast
import copy
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
E = "equations/test_"

# The files that are broken, and the tests that must notice, the quickest first: paths below tests/.
TARGETS = {
    "maths/bounds.py": (f"{E}bounds", f"{E}golden", f"{E}blocks", f"{E}neighbour_price"),
    "maths/moments.py": (f"{E}moments", f"{E}golden"),
    "maths/derivatives.py": (f"{E}derivatives", f"{E}projection"),
    "maths/linalg.py": (f"{E}linalg", f"{E}moments", f"{E}golden"),
    "maths/solve_gp.py": (f"{E}solve_gp",),
    "maths/collapsed.py": (f"{E}bounds", f"{E}collapsed", f"{E}golden"),
    "maths/natural.py": (f"{E}natural", "training/test_natural"),
    "likelihoods/expectations.py": (f"{E}slopes", f"{E}likelihoods", f"{E}optimal", f"{E}wrappers"),
    "likelihoods/family.py": (f"{E}likelihoods", f"{E}own_likelihoods", f"{E}tighter_elbo"),
    "prior/kernels.py": (f"{E}projection", f"{E}golden"),
    "prior/projection.py": (f"{E}projection", f"{E}collapsed", f"{E}golden"),
    "conditionals/blocks.py": (f"{E}blocks",),
    "conditionals/learned.py": (f"{E}conditionals", f"{E}tighter_elbo"),
    "conditionals/optimal.py": (f"{E}optimal", f"{E}best_scale", f"{E}tighter_elbo"),
    "carrier.py": ("contract/test_carrier", f"{E}wrappers"),
    "strategies/base.py": ("contract/test_strategy", f"{E}golden", "contract/test_conformance"),
    "strategies/distributions.py": (f"{E}full_data", f"{E}solve_gp", "contract/test_strategy"),
    "strategies/fantasies.py": (f"{E}fantasies",),
    "mlls/tighter_elbo.py": (f"{E}tighter_elbo", f"{E}golden", f"{E}deep_gp"),
    "mlls/data_terms.py": (f"{E}tighter_elbo", f"{E}optimal", f"{E}wrappers"),
    "mlls/wrapped.py": (f"{E}wrappers", f"{E}deep_gp"),
    "collapsed/core.py": (f"{E}collapsed", f"{E}full_data"),
    "collapsed/collapsed_gp.py": (f"{E}collapsed",),
    "collapsed/tighter_inducing_point_kernel.py": (f"{E}sgpr", f"{E}golden"),
    "predictions/last_term.py": ("predictions/test_last_term", f"{E}golden"),
    "predictions/densities.py": ("predictions/test_y",),
    "training/step.py": ("training/test_survival",),
    "training/batches.py": ("training/test_batches",),
}
# What else may notice.
OTHERS = ("tests/equations", "tests/contract", "tests/predictions", "tests/gplvm", "tests/programs/test_state.py")

OPERATORS = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult}
DROPPED_CALLS = {"square", "sqrt", "reciprocal", "clamp_min", "detach", "sum", "tril", "log1p", "log"}


class Mutant(NamedTuple):
    """One change: in which file and line, from what to what, and the whole file with it."""

    file: str
    line: int
    before: str
    after: str
    source: str


def changes(node: ast.AST, is_condition: bool) -> Iterator[ast.expr]:
    """What one expression may become."""
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        yield ast.BinOp(node.left, OPERATORS[type(node.op)](), node.right)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub) and not isinstance(node.operand, ast.Constant):
        yield node.operand
    elif isinstance(node, ast.Constant) and type(node.value) is float:
        yield ast.Constant(2 * node.value + 1)
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in DROPPED_CALLS:
        yield node.func.value
    elif isinstance(node, ast.Attribute) and node.attr == "mT":
        yield node.value
    elif isinstance(node, ast.IfExp):
        yield ast.IfExp(node.test, node.orelse, node.body)
    elif is_condition:
        yield ast.UnaryOp(ast.Not(), node)


def places(node: ast.AST) -> Iterator[tuple[ast.AST, str, int | None]]:
    """Where expressions are: in which node, field and position."""
    if isinstance(node, (ast.Raise, ast.JoinedStr)):
        return
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "bases"):
            continue
        for position, child in enumerate(value) if isinstance(value, list) else [(None, value)]:
            if isinstance(child, ast.expr):
                yield node, name, position
            if isinstance(child, ast.AST):
                yield from places(child)


def put(parent: ast.AST, name: str, position: int | None, node: ast.AST) -> None:
    if position is None:
        setattr(parent, name, node)
    else:
        getattr(parent, name)[position] = node


def mutants(file: str) -> list[Mutant]:
    """All mutants of a file."""
    tree, found = ast.parse((ROOT / "tighter_gp" / file).read_text(encoding="utf-8")), {}
    for parent, name, position in list(places(tree)):
        value = getattr(parent, name)
        original = value if position is None else value[position]
        for change in changes(original, isinstance(parent, (ast.If, ast.While)) and name == "test"):
            put(parent, name, position, change)
            source = ast.unparse(ast.fix_missing_locations(copy.deepcopy(tree)))
            found[source] = Mutant(file, original.lineno, ast.unparse(original), ast.unparse(change), source)
            put(parent, name, position, original)
    return list(found.values())


def draw(count: int, seed: int) -> list[Mutant]:
    """As many mutants, shared among the files."""
    generator, chosen = random.Random(seed), []
    for i, file in enumerate(TARGETS):
        candidates = mutants(file)
        share = count * (i + 1) // len(TARGETS) - count * i // len(TARGETS)
        chosen += generator.sample(candidates, min(share, len(candidates)))
    return chosen


@contextmanager
def copied_repository(mutant: Mutant) -> Iterator[Path]:
    """A copy of what tests need, with a mutant in place."""
    with tempfile.TemporaryDirectory() as folder:
        copied = Path(folder)
        for name in ("tighter_gp", "tests", "benchmarks"):
            shutil.copytree(ROOT / name, copied / name, ignore=shutil.ignore_patterns("__pycache__", "results"))
        shutil.copy(ROOT / "pyproject.toml", copied)
        (copied / "tighter_gp" / mutant.file).write_text(mutant.source, encoding="utf-8")
        yield copied


def passes(copied: Path, tests: Sequence[str], seconds: float) -> bool:
    """Whether tests pass; ``subprocess.TimeoutExpired`` if they take longer than that."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    environment = {**os.environ, "PYTHONPATH": str(copied), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=copied, env=environment, capture_output=True, timeout=seconds, check=False)
    if done.returncode not in (0, 1, 2):
        raise RuntimeError(f"pytest ended with {done.returncode}: {done.stdout.decode()[-500:]}")
    return done.returncode == 0


def outcome(mutant: Mutant, seconds: float) -> str:
    """``"survived"`` if every test passes with the mutant in place, else ``"killed"`` or ``"timed out"``."""
    own = [f"tests/{name}.py" for name in TARGETS[mutant.file]]
    with copied_repository(mutant) as copied:
        try:
            return "survived" if passes(copied, own, seconds) and passes(copied, OTHERS, 4 * seconds) else "killed"
        except subprocess.TimeoutExpired:
            return "timed out"


def main() -> int:
    """Draw mutants, try each, print the survivors."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=80)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=300, help="that the tests of a file may take")
    args = parser.parse_args()
    chosen = draw(args.count, args.seed)
    ends = dict.fromkeys(("killed", "timed out", "survived"), 0)
    with ThreadPoolExecutor(args.workers) as pool:
        for mutant, end in zip(chosen, pool.map(lambda mutant: outcome(mutant, args.seconds), chosen), strict=True):
            ends[end] += 1
            print(f"{end:10} {mutant.file}:{mutant.line}: {mutant.before}  ->  {mutant.after}", flush=True)
    print(f"\nOf {len(chosen)} mutants: " + ", ".join(f"{number} {end}" for end, number in ends.items()) + ".")
    return int(ends["survived"] > 0.05 * len(chosen))


if __name__ == "__main__":
    sys.exit(main())
