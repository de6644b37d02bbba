"""Sphinx: `sphinx-build -W -b html docs docs/_build/html`."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

import tighter_gp  # noqa: E402

project = "tighter_gp"
author = "the tighter_gp contributors"
version = release = tighter_gp.__version__
copyright = author

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.mathjax", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
nitpicky = True
# No network at build time, so no inventories of other projects.
nitpick_ignore_regex = [(r"py:.*", r"(torch|gpytorch|linear_operator|numpy|matplotlib)(\..*)?")]

autodoc_inherit_docstrings = False
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_typehints = "none"
napoleon_numpy_docstring = False
napoleon_use_ivar = True
python_maximum_signature_line_length = 88

myst_enable_extensions = ["amsmath", "dollarmath"]
myst_heading_anchors = 3
nb_execution_mode = "off"

# MathJax is fetched by the reader's browser; without a network the formulas are shown as TeX.
mathjax4_config = {"output": {"displayOverflow": "linebreak"}}

html_theme = "furo"
html_title = f"tighter_gp {release}"
html_static_path = ["_static"]
html_css_files = ["wide.css"]
html_theme_options = {"light_css_variables": {"code-font-size": "var(--font-size--small--3)"}}
pygments_style, pygments_dark_style = "default", "github-dark"


def _gather(app: Any) -> None:
    """Copy the notebooks."""
    target = HERE / "notebooks"
    target.mkdir(exist_ok=True)
    wanted = {path.name: path for path in (HERE.parent / "notebooks").glob("*.ipynb")}
    for old in target.glob("*.ipynb"):
        if old.name not in wanted:
            old.unlink()
    for name, path in wanted.items():
        copy = target / name
        if not copy.exists() or copy.read_bytes() != path.read_bytes():
            shutil.copyfile(path, copy)


def _skip(app: Any, what: str, name: str, value: object, skip: bool, options: Any) -> bool | None:
    """Leave out "Alias for field number 0" of the named tuples; their fields are in the class's own text."""
    return True if type(value).__name__ == "_tuplegetter" else None


# Modules that users import from the top of the package, and where they live.
ALIASES = {"tighter_gp.blocks.": "tighter_gp.conditionals.blocks.", "tighter_gp.bounds.": "tighter_gp.maths.bounds."}


def _resolve(app: Any, env: Any, node: Any, content: Any) -> Any:
    """Find a name under its alias, or at the top of the package."""
    if node.get("refdomain") != "py":
        return None
    target = node["reftarget"]
    names = [real + target.removeprefix(alias) for alias, real in ALIASES.items() if target.startswith(alias)]
    for name in (*names, f"tighter_gp.{target.rpartition('.')[2]}"):
        found = env.get_domain("py").resolve_xref(
            env, node["refdoc"], app.builder, node["reftype"], name, node, content
        )
        if found is not None:
            return found
    return None


def setup(app: Any) -> None:
    """Connect the three."""
    app.connect("missing-reference", _resolve)
    app.connect("builder-inited", _gather)
    app.connect("autodoc-skip-member", _skip)
