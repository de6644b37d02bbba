"""Break the mathematics in many small ways and see whether a test notices: ``python -m tests.tools.mutation --count 80``.

Each mutant is a copy of the repository in which one expression of one file is changed: a sign, an operator, a constant,
a dropped square or transpose, a condition turned round. It is killed if a test fails: one of the file's own, or, where
those pass, one of the others but for long ones. Error messages, annotations and
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
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[2]

# The files that are broken, and the tests that must notice, the quickest first: paths below tests/.
_STRATEGIES = (
    "strategies/test_tighter_variational_strategy",
    "test_golden",
    "strategies/test_conformance",
    "strategies/test_solve_gp_variational_strategy",
)
TARGETS = {
    "maths/bounds.py": ("maths/test_bounds", "test_golden", "conditionals/test_blocks", "mlls/test_tighter_elbo"),
    "maths/moments.py": ("maths/test_moments", "test_golden", "test_full_data", "maths/test_solve_gp"),
    "maths/fused.py": ("maths/test_fused", "maths/test_linalg", "maths/test_solve_gp", "test_golden"),
    "maths/linalg.py": ("maths/test_linalg", "maths/test_moments", "test_golden", "training/test_survival"),
    "maths/solve_gp.py": ("maths/test_solve_gp", "strategies/test_solve_gp_variational_strategy", "test_full_data"),
    "maths/collapsed.py": ("maths/test_bounds", "collapsed/test_collapsed_gp", "test_golden", "gplvm/test_collapsed"),
    "maths/natural.py": ("training/test_natural", "training/test_natural_gradients"),
    "likelihoods/slopes.py": ("test_slopes", "conditionals/test_optimal", "training/test_natural"),
    "prior/kernels.py": ("prior/test_kernels", "prior/test_precision", "test_golden"),
    "prior/precision.py": ("prior/test_precision", "prior/test_kernels", "training/test_survival"),
    "prior/projector.py": (
        "prior/test_projector",
        "test_posterior",
        "prior/test_precision",
        *_STRATEGIES,
        "training/test_survival",
    ),
    "conditionals/base.py": ("conditionals/test_conditionals", "conditionals/test_blocks", "mlls/test_tighter_elbo"),
    "conditionals/blocks.py": ("conditionals/test_blocks",),
    "conditionals/learned.py": ("conditionals/test_conditionals", "test_state"),
    "conditionals/optimal.py": ("conditionals/test_optimal", "mlls/test_tighter_elbo"),
    "carrier.py": ("test_carrier", "test_carrier_conformance", "strategies/test_wrappers"),
    "strategies/base.py": (
        *_STRATEGIES,
        "test_full_data",
        "training/test_natural_gradients",
        "training/test_survival",
        "test_state",
        "conditionals/test_blocks",
    ),
    "strategies/solve_gp_variational_strategy.py": (
        "strategies/test_solve_gp_variational_strategy",
        "strategies/test_solve_gp_wrappers",
        "strategies/test_solve_gp_training",
        "strategies/test_solve_gp_state",
        "maths/test_solve_gp",
    ),
    "mlls/tighter_elbo.py": ("mlls/test_tighter_elbo", "test_golden", "strategies/test_deep_gp"),
    "mlls/data_terms.py": (
        "mlls/test_tighter_elbo",
        "test_golden",
        "conditionals/test_optimal",
        "strategies/test_wrappers",
    ),
    "mlls/wrapped.py": ("strategies/test_wrappers", "strategies/test_deep_gp", "mlls/test_tighter_elbo"),
    "collapsed/sums.py": ("collapsed/test_collapsed_gp", "test_full_data", "test_diagnostics"),
    "collapsed/collapsed_gp.py": ("collapsed/test_collapsed_gp", "training/test_collapsed"),
    "kernels/tighter_inducing_point_kernel.py": (
        "kernels/test_tighter_inducing_point_kernel",
        "test_golden",
        "conditionals/test_blocks",
        "test_silent_errors",
    ),
    "predictions/latent.py": ("predictions/test_latent", "test_golden", "test_posterior", "test_predict_everything"),
    "predictions/given_f.py": ("predictions/test_observations", "predictions/test_log_density"),
    "predictions/marginals.py": ("predictions/test_observations", "predictions/test_log_density"),
    "predictions/distribution.py": ("predictions/test_observations", "predictions/test_log_density", "test_arrays"),
    "training/guard.py": ("training/test_guard", "training/test_survival"),
    "training/steps.py": (
        "training/test_optimizers",
        "training/test_loop",
        "training/test_natural_gradients",
        "training/test_guard",
        "training/test_survival",
    ),
    "training/batches.py": ("training/test_batches", "training/test_loaders"),
    "training/validation.py": ("training/test_validation",),
}
# Mutants that survive for a reason, given beside them: file, statement, expression, what replaces it.
EQUIVALENT: tuple[tuple[str, str, str, str], ...] = (
    # What is made of the factor has a backward pass of its own, which gives it no gradient: a graph would only cost memory.
    (
        "prior/projector.py",
        "matrix = inducing_covar.detach().to(dtype, copy=True)",
        "inducing_covar.detach()",
        "inducing_covar",
    ),
    # The number is compared with zero, whatever its sign.
    (
        "prior/projector.py",
        "both = factor.diagonal(dim1=-1, dim2=-2).sum(-1) * 0 + info",
        "factor.diagonal(dim1=-1, dim2=-2).sum(-1) * 0 + info",
        "factor.diagonal(dim1=-1, dim2=-2).sum(-1) * 0 - info",
    ),
)

OPERATORS = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult}
DROPPED_CALLS = {"square", "sqrt", "reciprocal", "clamp_min", "detach", "sum", "tril", "log1p", "log"}
DROPPED_ATTRIBUTES = {"mT"}

# What it takes to start pytest, and to import all it needs, on a busy machine.
_START_SECONDS = 30.0

# Folders and files of tests that take long, or are about other things than the package.
_LEFT_OUT = {
    "accelerator",
    "benchmarks",
    "docs",
    "export",
    "test_architecture",
    "test_compiled",
    "test_compiling",
    "test_concurrency",
    "test_distributed",
    "test_inductor",
    "test_integrations",
    "test_packaging",
    "test_paths",
    "test_security",
    "test_tools",
    "test_torchrun",
}


class Mutant(NamedTuple):
    """One change.

    :param file: Below ``tighter_gp``.
    :param line: Where.
    :param statement: What it is in, the first line of it.
    :param before: The expression.
    :param after: What it became.
    :param source: The whole file, changed.
    """

    file: str
    line: int
    statement: str
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
    places: list[tuple[ast.AST, str, int | None, str]] = []

    def visit(node: ast.AST, statement: str = "") -> None:
        if isinstance(node, (ast.Raise, ast.JoinedStr)):
            return
        if isinstance(node, ast.stmt):
            statement = ast.unparse(node).partition("\n")[0]
        for name, value in ast.iter_fields(node):
            if name in ("annotation", "returns", "decorator_list", "bases"):
                continue
            if isinstance(node, (ast.If, ast.While)) and name == "test":
                places.append((node, name, None, statement))
            for position, child in enumerate(value) if isinstance(value, list) else [(None, value)]:
                if isinstance(child, ast.AST):
                    if isinstance(child, ast.expr):
                        places.append((node, name, position, statement))
                    visit(child, statement)

    visit(tree)
    found = []
    for parent, name, position, statement in places:
        value = getattr(parent, name)
        original = value if position is None else value[position]
        changes = list(_changes(original))
        if isinstance(parent, (ast.If, ast.While)) and name == "test" and not changes:
            changes = [ast.UnaryOp(ast.Not(), original)]
        for change in changes:
            _put(parent, name, position, change)
            source = ast.unparse(ast.fix_missing_locations(copy.deepcopy(tree)))
            texts = ast.unparse(original), ast.unparse(change)
            found.append(Mutant(file, original.lineno, statement, *texts, source))
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


@contextmanager
def copied_repository(mutant: Mutant | None = None) -> Iterator[Path]:
    """A copy of what tests need, with a mutant in place."""
    with tempfile.TemporaryDirectory() as folder:
        copied = Path(folder)
        for name in ("tighter_gp", "tests", "benchmarks"):
            ignored = shutil.ignore_patterns("__pycache__", "results")
            shutil.copytree(ROOT / name, copied / name, ignore=ignored)
        shutil.copy(ROOT / "pyproject.toml", copied)
        if mutant is not None:
            (copied / "tighter_gp" / mutant.file).write_text(mutant.source, encoding="utf-8")
        yield copied


def run_tests(copied: Path, names: Sequence[str], *options: str, seconds: float | None = None) -> bool:
    """Whether all tests of some files pass; ``subprocess.TimeoutExpired`` if they take longer than that."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-p", "no:randomly", *options]
    command += [f"tests/{name}.py" for name in names]
    environment = {**os.environ, "PYTHONPATH": str(copied), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=copied, env=environment, capture_output=True, timeout=seconds, check=False)
    if done.returncode not in (0, 1, 2):
        raise RuntimeError(f"pytest ended with {done.returncode}: {done.stdout.decode()[-500:]}")
    return done.returncode == 0


def all_tests() -> list[str]:
    """The tests that are tried, those of broken files first."""
    own = dict.fromkeys(name for tests in TARGETS.values() for name in tests)
    found = (path.relative_to(ROOT / "tests").with_suffix("") for path in (ROOT / "tests").rglob("test_*.py"))
    others = (
        path.as_posix() for path in sorted(found) if path.parts[0] not in _LEFT_OUT and path.name not in _LEFT_OUT
    )
    return list(dict.fromkeys((*own, *others)))


def seconds_without(workers: int) -> dict[str, float]:
    """How long the tests of each file take with nothing broken; they must pass."""
    names = all_tests()
    with copied_repository() as copied:
        report = copied / "report.xml"
        if not run_tests(copied, names, f"--junitxml={report}", f"--numprocesses={workers}"):
            raise RuntimeError("The tests fail without a mutant.")
        found: dict[str, float] = dict.fromkeys(names, 0.0)
        for case in ElementTree.parse(report).iter("testcase"):
            place = case.attrib["classname"].removeprefix("tests.").replace(".", "/")
            name = next(name for name in names if place == name or place.startswith(f"{name}/"))
            found[name] += float(case.attrib["time"])
    return found


def outcome(mutant: Mutant, seconds: dict[str, float], patience: float) -> str:
    """``"survived"`` if every test passes with the mutant in place, else ``"killed"`` or ``"timed out"``.

    :param seconds: What the tests of each file take without it.
    :param patience: How many times as long they may take.
    """
    own = TARGETS[mutant.file]
    with copied_repository(mutant) as copied:
        try:
            for names in (own, [name for name in seconds if name not in own]):
                limit = patience * (_START_SECONDS + sum(seconds[name] for name in names))
                if not run_tests(copied, names, seconds=limit):
                    return "killed"
        except subprocess.TimeoutExpired:
            return "timed out"
    return "survived"


def main() -> int:
    """Draw mutants, try each, print the survivors."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=80)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--patience", type=float, default=5.0, help="a mutant may take this many times as long as none")
    parser.add_argument("--out", type=Path, help="file for one JSON line per mutant, as they are done")
    args = parser.parse_args()
    chosen = draw(args.count, args.seed)
    seconds = seconds_without(args.workers)

    def attempt(mutant: Mutant) -> tuple[Mutant, str]:
        return mutant, outcome(mutant, seconds, args.patience)

    ends: dict[str, list[Mutant]] = {"killed": [], "timed out": [], "equivalent": [], "survived": []}
    with ThreadPoolExecutor(args.workers) as pool:
        for mutant, end in pool.map(attempt, chosen):
            if end == "survived" and (mutant.file, *mutant[2:5]) in EQUIVALENT:
                end = "equivalent"
            ends[end].append(mutant)
            print(f"{end:10} {mutant.file}:{mutant.line}: {mutant.before}  ->  {mutant.after}", flush=True)
            if args.out is not None:
                with args.out.open("a", encoding="utf-8") as file:
                    file.write(json.dumps({**mutant._asdict(), "source": None, "end": end}) + "\n")
    print(f"\nOf {len(chosen)} mutants: " + ", ".join(f"{len(found)} {end}" for end, found in ends.items()) + ".")
    return int(len(ends["survived"]) > 0.05 * len(chosen))


if __name__ == "__main__":
    sys.exit(main())
