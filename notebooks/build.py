"""Run the notebooks and write them with their outputs: ``python notebooks/build.py [NAME ...]``.

Each ``NN_name.py`` is the source, in jupytext's percent format; ``NN_name.ipynb`` beside it is made from it here.
"""

from __future__ import annotations

import base64
import io
import os
import sys
import time
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent
METADATA = {
    "jupytext": {"formats": "ipynb,py:percent"},
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
}


def sources(names: list[str]) -> list[Path]:
    """The scripts asked for, or all."""
    found = sorted(FOLDER.glob("[0-9][0-9]_*.py"))
    unknown = set(names) - {path.stem for path in found}
    if unknown:
        raise SystemExit(f"no such notebook: {', '.join(sorted(unknown))}")
    return [path for path in found if not names or path.stem in names]


def build(path: Path, timeout: int = 600) -> Path:
    """Run one script as a notebook and write it beside the script."""
    import jupytext
    import nbformat
    from nbclient import NotebookClient

    notebook = jupytext.read(path, fmt="py:percent")
    notebook.metadata = nbformat.from_dict(METADATA)
    NotebookClient(notebook, timeout=timeout, kernel_name="python3", resources={"metadata": {"path": FOLDER}}).execute()
    for number, cell in enumerate(notebook.cells):
        _tidy(cell, number)
    notebook.metadata = nbformat.from_dict(METADATA)
    target = path.with_suffix(".ipynb")
    nbformat.validate(notebook)
    nbformat.write(notebook, target)
    return target


def _tidy(cell: Any, number: int) -> None:
    """Keep the file small, and free of what differs between two runs and says nothing."""
    cell["id"] = f"cell-{number:02d}"
    cell["metadata"] = {}
    outputs: list[Any] = []
    for output in cell.get("outputs", []):
        if output["output_type"] == "display_data" and "image/png" in output["data"]:
            output["data"] = {"image/png": _small(output["data"]["image/png"])}
        previous = outputs[-1] if outputs else {}
        if output["output_type"] == "stream" and previous.get("name") == output["name"]:
            previous["text"] += output["text"]  # one stream that came in pieces
        else:
            outputs.append(output)
    if cell["cell_type"] == "code":
        cell["outputs"] = outputs


def _small(png: str) -> str:
    """A figure has few colours: keep a palette of them."""
    from PIL import Image

    written = io.BytesIO()
    image = Image.open(io.BytesIO(base64.b64decode(png))).convert("RGB")
    image.quantize(255, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE).save(written, "PNG", optimize=True)
    return base64.b64encode(written.getvalue()).decode()


def main() -> None:
    """Build what the command line names."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # matrices this small are slower to share between threads
    os.environ.pop("MPLBACKEND", None)  # figures belong into the notebook
    for path in sources(sys.argv[1:]):
        started = time.perf_counter()
        target = build(path)
        size = target.stat().st_size / 1024
        print(f"{target.name}: {time.perf_counter() - started:.0f} s, {size:.0f} KB", flush=True)


if __name__ == "__main__":
    main()
