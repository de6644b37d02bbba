"""``python -m tests.accelerator`` prints the tables of docs/gpus.md."""

from tests.accelerator.table import markdown

print(markdown())
