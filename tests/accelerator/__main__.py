"""``python -m tests.accelerator`` prints the table of docs/gpus.md; with ``--write`` it puts it there."""

from __future__ import annotations

import sys

from tests.accelerator.table import PAGE, table, with_table

if sys.argv[1:] == ["--write"]:
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
else:
    print(table())
