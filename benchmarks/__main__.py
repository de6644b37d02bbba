"""``python -m benchmarks NAME [options]``: run an experiment."""

from __future__ import annotations

import argparse
import importlib
import sys
from typing import NoReturn

from tighter_gp.training import distributed

from .errors import UserError

# An experiment is a module of this package with a docstring, `add_arguments(parser)` and `run(args)`.
EXPERIMENTS = ("demo", "snelson", "prediction", "uci", "mnist", "gplvm", "blocks", "speed", "report", "readme")


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line."""

    def error(self, message: str) -> NoReturn:
        """Without the usage, which ``--help`` has."""
        self.exit(2, f"error: {message}\n")


def main(argv: list[str] | None = None) -> int:
    """Parse the command line and run one experiment."""
    parser = Parser(prog="python -m benchmarks", description=__doc__)
    commands = parser.add_subparsers(dest="experiment", required=True)
    for name in EXPERIMENTS:
        module = importlib.import_module(f"benchmarks.{name}")
        summary = (module.__doc__ or "").strip().splitlines()[0]
        command = commands.add_parser(name, help=summary, description=summary)
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    args = parser.parse_args(argv)
    try:
        args.run(args)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    distributed.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
