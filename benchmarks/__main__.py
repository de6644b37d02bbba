"""``python -m benchmarks NAME [options]``: run an experiment."""

from __future__ import annotations

import argparse
import importlib
import sys
from typing import NoReturn

from tighter_gp.training import distributed

from .errors import UserError

# An experiment is a module of this package with a docstring, `add_arguments(parser)` and `run(args)`. `INTERRUPTED` says
# what is left after Ctrl-C, with the names of flags in braces.
EXPERIMENTS = (
    "demo",
    "snelson",
    "prediction",
    "uci",
    "million",
    "mnist",
    "gplvm",
    "oil_example",
    "blocks",
    "speed",
    "quality",
    "recipes",
    "report",
    "readme",
)
_KEPT = "finished runs, and the state of one that trains, are kept in {out}; the same command with --resume continues"
_EXTRAS = "pip install -e '.[benchmarks]'"


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line."""

    def error(self, message: str) -> NoReturn:
        """Without the usage, which ``--help`` has."""
        self.exit(2, f"error: {message}\n")


def main(argv: list[str] | None = None) -> int:
    """Parse the command line and run one experiment."""
    argv = sys.argv[1:] if argv is None else argv
    parser = Parser(prog="python -m benchmarks", description=__doc__)
    commands = parser.add_subparsers(dest="experiment", required=True)
    for name in EXPERIMENTS:
        try:
            module = importlib.import_module(f"benchmarks.{name}")
        except ModuleNotFoundError as error:
            if argv[:1] == [name]:
                return _stop(_missing(name, error), 2)
            commands.add_parser(name, help=f"needs {error.name}: {_EXTRAS}")
            continue
        summary = (module.__doc__ or "").strip().splitlines()[0]
        command = commands.add_parser(name, help=summary, description=summary)
        module.add_arguments(command)
        left = _KEPT if "--resume" in command.format_help() else "nothing was written"
        command.set_defaults(run=module.run, interrupted=getattr(module, "INTERRUPTED", left))
    args = parser.parse_args(argv)
    try:
        args.run(args)
    except UserError as error:
        return _stop(f"error: {error}", 2)
    except ModuleNotFoundError as error:
        return _stop(_missing(args.experiment, error), 2)
    except KeyboardInterrupt:
        return _stop(f"interrupted: {args.interrupted.format(**vars(args))}", 130)
    distributed.stop()
    return 0


def _missing(name: str, error: ModuleNotFoundError) -> str:
    """What to install, unless it is a module of ours that is missing."""
    if error.name is None or error.name.split(".")[0] in ("benchmarks", "tighter_gp"):
        raise error
    return f"error: {name} needs {error.name}: {_EXTRAS}"


def _stop(message: str, code: int) -> int:
    print(message, file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
