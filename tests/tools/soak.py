"""Hours in minutes: training in float32 on badly conditioned problems, for as long as one likes.

    python -m tests.tools.soak --minutes 20

Each run takes one of the 64 settings of :mod:`tests.tools.adversarial`, a form of the model, other data and other batches, and
trains it through ``fit``. Along the way it is checked that

- every parameter is finite (else a *corruption*),
- the bound is not above the exact evidence, in float64 and by dense algebra that shares no code with the package, and the
  bound in float32 is near that of a float64 copy (else a *wrong value*),
- nothing is raised (else an *exception*).

Then the property tests and, in a run of ten minutes or more, the survival tests follow at their full length. The exit
code is 1 if anything was found.
"""

from __future__ import annotations

import argparse
import collections
import copy
import dataclasses
import logging
import math
import os
import random
import subprocess
import sys
import time
import traceback
import warnings
from pathlib import Path

import gpytorch
import torch
from gpytorch.mlls import VariationalELBO

import tighter_gp
from tests.tools import adversarial
from tests.tools.adversarial import Problem, Setting
from tests.tools.audit import covariance

# The same jitter in both precisions, so that they can be compared.
JITTER = 1e-4
CHECK_EVERY = 50


# ---------------------------------------------------------------------------------------------------------------------
# Forms of the model
# ---------------------------------------------------------------------------------------------------------------------


def tighter(**options):
    return lambda *args, **kwargs: tighter_gp.TighterVariationalStrategy(*args, **{**kwargs, **options})


def with_form(distribution):
    """Another form of q(u)."""

    def strategy(model, z, q, **kwargs):
        return tighter_gp.TighterVariationalStrategy(model, z, distribution(len(z)), **kwargs)

    return strategy


def solve_gp(model, z, q, **kwargs):
    size = len(z) // 2
    first, second = (gpytorch.variational.CholeskyVariationalDistribution(n) for n in (size, len(z) - size))
    return tighter_gp.SolveGPVariationalStrategy(model, z[:size], z[size:], first, second, **kwargs)


class Form:
    """How a model is built and trained."""

    def __init__(self, strategy, objective=tighter_gp.TighterELBO, **options):
        self.strategy, self.objective, self.options = strategy, objective, options


FORMS = {
    "tighter SVGP": Form(tighter()),
    "beta": Form(tighter(conditional="beta")),
    "scalar": Form(tighter(conditional="scalar")),
    "curvature": Form(tighter(conditional="optimal")),
    "standard bound": Form(tighter(), VariationalELBO),
    "mean-field q(u)": Form(with_form(gpytorch.variational.MeanFieldVariationalDistribution)),
    "natural form": Form(with_form(gpytorch.variational.TrilNaturalVariationalDistribution)),
    "SOLVE-GP": Form(solve_gp),
}


# ---------------------------------------------------------------------------------------------------------------------
# What must be true of a value
# ---------------------------------------------------------------------------------------------------------------------


def wrong_values(problem: Problem, setting: Setting, objective) -> list[str]:
    """What is wrong with the bound at the current parameters; empty if nothing is."""
    narrow, likelihood, x, y = problem
    wide, wide_likelihood = copy.deepcopy(narrow).double(), copy.deepcopy(likelihood).double()
    both = problem, (wide, wide_likelihood, x.double(), y.double())
    bounds = [float(tighter_gp.evaluate_bound(*parts, objective=objective)) for parts in both]
    x, y = both[1][2:]
    with torch.no_grad():
        variance, noise = wide.covar_module.outputscale, wide_likelihood.noise.squeeze()
        targets = y - wide.mean_module(x)
        prior = covariance(wide.covar_module, x, x)
        values, vectors = torch.linalg.eigh(prior + noise * torch.eye(len(y), dtype=x.dtype))
    values = values.clamp_min(float(noise))  # which they are, but for rounding
    quadratic = ((vectors.mT @ targets).square() / values).sum()
    evidence = float(-0.5 * (len(y) * math.log(2 * math.pi) + values.log().sum() + quadratic))

    # Rounding: of float64 in the eigenvalues of the reference, of float32 in variances and means of the model.
    ratio, num_data = float(variance / noise), len(y)
    exact = 1e-6 * (num_data + abs(bounds[1])) + 1e-15 * num_data * ratio * (num_data + float(quadratic))
    rounded = exact + 1e-2 * (num_data + abs(bounds[1])) + 1e-5 * num_data * ratio
    found = []
    if not all(map(math.isfinite, bounds)):
        # An infinite value is no lie where float32 cannot hold the true one.
        if abs(bounds[1]) < 1e37 or math.isnan(bounds[0]):
            found.append(f"a bound of {bounds[0]} in float32 and {bounds[1]} in float64")
        return found
    if bounds[1] > evidence + exact:
        found.append(f"a bound of {bounds[1]:.9g} in float64 above the evidence, {evidence:.9g}")
    if bounds[0] > evidence + rounded:
        found.append(f"a bound of {bounds[0]:.9g} in float32 above the evidence, {evidence:.9g}")
    # Where it is highest: with the best q(u) of its form.
    tighter_gp.set_optimal_q(wide, wide_likelihood, x, y)
    best = float(tighter_gp.evaluate_bound(wide, wide_likelihood, x, y, objective=objective))
    if best > evidence + exact:
        found.append(f"a bound of {best:.9g} at the best q(u) above the evidence, {evidence:.9g}")
    if best < bounds[1] - rounded:
        found.append(f"a bound of {best:.9g} at the best q(u) below another, {bounds[1]:.9g}")
    if abs(bounds[0] - bounds[1]) > rounded:
        found.append(f"a bound of {bounds[0]:.9g} in float32 and of {bounds[1]:.9g} in float64")
    return found


# ---------------------------------------------------------------------------------------------------------------------
# Runs
# ---------------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Count:
    """What happened to a form of the model."""

    runs: int = 0
    steps: int = 0
    skipped: int = 0
    undone: int = 0
    checks: int = 0
    corruptions: int = 0
    wrong_values: int = 0
    exceptions: int = 0

    @property
    def is_clean(self) -> bool:
        return not (self.corruptions or self.wrong_values or self.exceptions)


def one_run(name: str, setting: Setting, seed: int, count: Count) -> None:
    """Train once and add to the count; what is found is printed with what it takes to see it again."""
    form, draw = FORMS[name], random.Random(seed)
    torch.manual_seed(seed)
    problem = adversarial.build(setting, form.strategy, seed=seed, jitter_val=JITTER)
    where = f"{name}, {setting}, seed {seed}"

    def check(state) -> bool:
        if not adversarial.all_finite(problem):
            count.corruptions += 1
            print(f"CORRUPTION: {where}, step {state.step}", flush=True)
            return True
        if state.step % CHECK_EVERY == 0:
            count.checks += 1
            for found in wrong_values(problem, setting, form.objective):
                count.wrong_values += 1
                print(f"WRONG VALUE: {where}, step {state.step}: {found}", flush=True)
        return False

    count.runs += 1
    try:
        history = tighter_gp.fit(
            *problem,
            objective=form.objective,
            steps=draw.choice((100, 200, 400)),
            batch_size=draw.choice((None, 20, 7)),
            recipe=tighter_gp.Recipe(lr=setting.lr, schedule=draw.choice(("constant", "cosine"))),
            seed=seed,
            callbacks=[check],
            progress=False,
            **form.options,
        )
    except Exception:
        count.exceptions += 1
        print(f"EXCEPTION: {where}\n{traceback.format_exc()}", flush=True)
        return
    count.steps += history.steps
    count.skipped += len(history.skipped)
    count.undone += sum("undone" in reason for _, reason in history.skipped)


def table(counts: dict[str, Count]) -> str:
    fields = [field.name for field in dataclasses.fields(Count)]
    rows = [["form", *(name.replace("_", " ") for name in fields)]]
    rows += [[name, *(f"{getattr(count, field):,}" for field in fields)] for name, count in counts.items()]
    rows += [["all", *(f"{sum(getattr(count, field) for count in counts.values()):,}" for field in fields)]]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)


def soak(minutes: float, seed: int) -> dict[str, Count]:
    """Run after run until the time is up; at least one of each form."""
    counts: dict[str, Count] = collections.defaultdict(Count)
    started, number = time.monotonic(), 0
    order = [(name, setting) for setting in adversarial.SETTINGS for name in FORMS]
    random.Random(seed).shuffle(order)
    reported = started
    while number < len(FORMS) or time.monotonic() - started < 60 * minutes:
        # The first of each form, then all pairs in their order, again and again with other seeds.
        name, setting = order[number % len(order)] if number >= len(FORMS) else (list(FORMS)[number], order[number][1])
        one_run(name, setting, seed + number, counts[name])
        number += 1
        if time.monotonic() - reported > 60:
            reported = time.monotonic()
            print(f"{(reported - started) / 60:.0f} minutes, {number} runs", flush=True)
    return counts


def run_tests(minutes: float) -> int:
    """The property tests, and the survival tests in a long run, each at the length of a soak."""
    files = ["tests/equations/test_every_problem.py", *(["tests/training/test_survival.py"] if minutes >= 10 else [])]
    environment = {**os.environ, "TIGHTER_GP_SOAK": "1", "TIGHTER_GP_EXAMPLES": str(int(max(20, 25 * minutes)))}
    command = [sys.executable, "-m", "pytest", "-q", "--numprocesses", "0", *files]
    root = Path(__file__).resolve().parents[2]
    return subprocess.run(command, env=environment, cwd=root, check=False).returncode


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=20.0, help="how long to train; the tests follow (default 20)")
    parser.add_argument("--seed", type=int, default=0, help="of the order and the data (default 0)")
    parser.add_argument("--no-tests", action="store_true", help="leave the tests out")
    args = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("tighter_gp").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*was not positive definite")
        counts = soak(args.minutes, args.seed)
    print(table(counts))
    failed = 0 if args.no_tests else run_tests(args.minutes)
    return int(bool(failed) or not all(count.is_clean for count in counts.values()))


if __name__ == "__main__":
    sys.exit(main())
