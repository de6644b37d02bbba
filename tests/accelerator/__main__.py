"""``python -m tests.accelerator`` prints the tables of docs/gpus.md; with ``--write`` it puts them there."""

from __future__ import annotations

import sys
import warnings

from tests.accelerator.table import PAGE, tables, with_tables

warnings.filterwarnings("ignore", "Anomaly Detection")
if sys.argv[1:] == ["--write"]:
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
else:
    print("\n\n".join(tables().values()))
