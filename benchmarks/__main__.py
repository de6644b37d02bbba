"""``python -m benchmarks NAME [options]`` runs an experiment; without a name it lists them."""

from __future__ import annotations

import argparse
import ast
import importlib
import sys
from pathlib import Path

from tighter_gp.training import distributed

from .errors import UserError

# An experiment is a module of this package with a docstring, `add_arguments(parser)` and `run(args)`.
EXPERIMENTS = (
    "demo",
    "snelson",
    "prediction",
    "uci",
    "neighbours",
    "million",
    "mnist",
    "gplvm",
    "oil_example",
    "blocks",
    "speed",
    "quality",
    "recipes",
    "report",
)


def main(argv: list[str] | None = None) -> int:
    """Run one experiment, or list them."""
    argv = sys.argv[1:] if argv is None else argv
    if not argv or argv[0] in ("-h", "--help"):
        print(__doc__, *(f"{name:12} {summary(name)}" for name in EXPERIMENTS), sep="\n")
        return 0
    name = argv[0]
    if name not in EXPERIMENTS:
        return _stop(f"error: unknown experiment {name!r}; choose from {', '.join(EXPERIMENTS)}", 2)
    try:
        module = importlib.import_module(f"benchmarks.{name}")
        parser = argparse.ArgumentParser(prog=f"python -m benchmarks {name}", description=summary(name))
        module.add_arguments(parser)
        module.run(parser.parse_args(argv[1:]))
    except UserError as error:
        return _stop(f"error: {error}", 2)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] in ("benchmarks", "tighter_gp"):
            raise
        return _stop(f"error: {name} needs {error.name}: pip install -e '.[benchmarks]'", 2)
    except KeyboardInterrupt:
        return _stop("interrupted: finished runs are kept, and --resume continues where there is one", 130)
    distributed.stop()
    return 0


def summary(name: str) -> str:
    """First line of an experiment's docstring, without importing it."""
    path = Path(__file__).with_name(name)
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").splitlines()[0]


def _stop(message: str, code: int) -> int:
    print(message, file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
