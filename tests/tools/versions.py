"""Which versions of Python and of the dependencies pass: each in an environment of its own, made for it.

    python -m tests.tools.versions --folder /somewhere/large

For every interpreter of :data:`PYTHONS` that is at hand (``python3.12``, or one of pyenv's) the versions that
``constraints.txt`` names, and for the oldest one the lowest that ``pyproject.toml`` allows, are installed, and the core of the
tests is run. One line per environment goes to ``benchmarks/results/versions/versions.jsonl``, from which
``python -m benchmarks report`` makes the table of the documentation. Torch for another Python comes with its CUDA packages: a
few gigabytes per environment, which is removed when it has been tested. The exit code is 1 if any failed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "versions" / "versions.jsonl"
PYTHONS = ("3.10", "3.11", "3.12", "3.13")
DEPENDENCIES = ("torch", "gpytorch", "linear-operator", "numpy")

# Without the tests that need BoTorch, whose newest version asks for more than our lowest ones.
TESTS = (
    "tests/equations",
    "tests/contract",
    "tests/training/test_natural.py",
    "--ignore=tests/contract/test_botorch.py",
    "--ignore=tests/contract/test_paths.py",
)


def lowest() -> list[str]:
    """The lowest versions that ``pyproject.toml`` allows."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    (line,) = re.findall(r"^dependencies = \[(.*)\]$", text, re.MULTILINE)
    return [requirement.replace(">=", "==") for requirement in re.findall(r'"([^"]+)"', line)]


def tested() -> list[str]:
    """The versions that ``constraints.txt`` names; numpy's is free, since the newest asks for a newer Python than 3.10."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = dict(line.lower().replace("_", "-").split("==") for line in lines if line)
    return [f"{name}=={pins[name]}" for name in DEPENDENCIES if name != "numpy"] + ["numpy"]


def interpreter(version: str) -> str | None:
    """An interpreter of this version: on the path, or pyenv's."""
    root = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    candidates = [shutil.which(f"python{version}"), *sorted(root.glob(f"versions/{version}.*/bin/python"))]
    for candidate in filter(None, candidates):
        shown = subprocess.run([str(candidate), "--version"], capture_output=True, text=True, check=False)
        if shown.returncode == 0 and shown.stdout.startswith(f"Python {version}."):
            return str(candidate)
    return None


def try_versions(python: str, requirements: list[str], folder: Path) -> dict[str, object]:
    """Install the requirements for an interpreter, run the tests, and say how they ended."""
    with tempfile.TemporaryDirectory(dir=folder) as name:
        environment = Path(name)
        subprocess.run([python, "-m", "venv", str(environment)], check=True)
        run = [str(environment / "bin" / "python"), "-m"]
        pip = [*run, "pip", "install", "--quiet", "--disable-pip-version-check"]
        done = subprocess.run(
            [*pip, *requirements, "hypothesis", "pytest", "scikit-learn", "scipy"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            return {"outcome": "cannot be installed", "error": done.stderr.strip()[-2000:]}
        started = time.perf_counter()
        done = subprocess.run(
            [*run, "pytest", *TESTS, "-p", "no:cacheprovider", "-o", "filterwarnings=default", "--tb=line"],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
        seconds = time.perf_counter() - started
        last = (done.stdout.strip().splitlines() or [""])[-1]
        counts = {word: int(number) for number, word in re.findall(r"(\d+) (passed|failed|skipped|errors?)", last)}
        listed = subprocess.run([*run, "pip", "list", "--format", "json"], capture_output=True, text=True, check=True)
        installed = {one["name"].lower().replace("_", "-"): one["version"] for one in json.loads(listed.stdout)}
        shown = subprocess.run([run[0], "--version"], capture_output=True, text=True, check=True)
        return {
            "python": shown.stdout.split()[1],
            "versions": {name: installed[name] for name in DEPENDENCIES},
            "outcome": "passed" if done.returncode == 0 else "failed",
            "counts": counts,
            "seconds": round(seconds, 1),
            **({} if done.returncode == 0 else {"error": (done.stdout + done.stderr)[-4000:]}),
        }


def main(argv: list[str] | None = None) -> int:
    """Try all of them, or those that are named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="where to make environments (default: that of temporary files)")
    parser.add_argument("--python", nargs="+", default=PYTHONS, metavar="X.Y", help="versions of Python")
    parser.add_argument("--only", choices=("tested", "lowest"), help="one of the two sets of versions")
    parser.add_argument("--requirements", nargs="+", metavar="NAME==X", help="other versions; nothing is written")
    parser.add_argument("--out", type=Path, default=RESULTS, help="default: %(default)s")
    args = parser.parse_args(argv)
    plans = [(python, "tested", tested()) for python in args.python]
    plans.append((args.python[0], "lowest", lowest()))
    if args.requirements:
        plans = [(python, "chosen", args.requirements) for python in args.python]
    elif args.only:
        plans = [plan for plan in plans if plan[1] == args.only]
    folder = args.folder or Path(tempfile.gettempdir())
    folder.mkdir(parents=True, exist_ok=True)
    all_passed = True
    for version, which, requirements in plans:
        python = interpreter(version)
        if python is None:
            print(f"Python {version}: not found", flush=True)
            continue
        result = {"experiment": "versions", "which": which, "python": version, "requirements": requirements}
        result.update(try_versions(python, requirements, folder))
        print(json.dumps(result, indent=1).encode().decode("unicode_escape"), flush=True)
        all_passed &= result["outcome"] == "passed"
        if which != "chosen":
            _write(args.out, result)
    return 0 if all_passed else 1


def _write(path: Path, result: dict[str, object]) -> None:
    """In place of the line for the same versions of Python and the same set."""
    minor = lambda one: (one["which"], *str(one["python"]).split(".")[:2])
    result = {name: value for name, value in result.items() if name not in ("error", "requirements")}
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    kept = [one for one in map(json.loads, lines) if minor(one) != minor(result)]
    order = lambda one: (one["which"] == "lowest", [int(part) for part in str(one["python"]).split(".")])
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(one) + "\n" for one in sorted([*kept, result], key=order)), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
