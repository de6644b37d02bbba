"""Sphinx: `sphinx-build -W -b html docs docs/_build/html`."""

from __future__ import annotations

import html
import re
import shutil
import sys
import unicodedata
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

import latex2mathml.converter  # noqa: E402
from docutils import nodes  # noqa: E402
from sphinx.errors import ExtensionError  # noqa: E402
from sphinx.util import logging  # noqa: E402

import tighter_gp  # noqa: E402

logger = logging.getLogger(__name__)

project = "tighter_gp"
author = "the tighter_gp contributors"
version = release = tighter_gp.__version__
copyright = author

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
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

# Formulas become MathML when the pages are built, which every browser renders by itself, without a network.
html_math_renderer = "mathml"

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
ALIASES = {
    "tighter_gp.blocks.": "tighter_gp.conditionals.blocks.",
    "tighter_gp.maths.bounds.": "tighter_gp.maths.bounds.",
}


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


# What the browsers' common core of MathML lacks: letters by their variant, and the space after a function's name.
VARIANTS = {"script": "SCRIPT CAPITAL", "double-struck": "DOUBLE-STRUCK CAPITAL"}


def _core(mathml: str) -> str:
    """MathML with what browsers leave out."""

    def letter(match: re.Match[str]) -> str:
        names = (f"MATHEMATICAL {VARIANTS[match[1]]} {match[2]}", f"{VARIANTS[match[1]]} {match[2]}")
        return f"<mi>{next(unicodedata.lookup(name) for name in names if _is_letter(name))}</mi>"

    mathml = re.sub(r'<mi mathvariant="(script|double-struck)">([A-Z])</mi>', letter, mathml)
    thin, name = '<mspace width="0.167em" />', "(<mi>(?:log|exp|max|min)</mi>)"
    mathml = re.sub(rf"(</(?:mstyle|mfrac|mi|mn|msub|msup|munder)>){name}", rf"\1{thin}\2", mathml)
    mathml = re.sub(rf"{name}(?=<(?:mi|mn|mo|msub|mfrac)>)", rf"\1{thin}", mathml)
    return re.sub(r">\\([{}])<", r">\1<", mathml)


def _is_letter(name: str) -> bool:
    try:
        return bool(unicodedata.lookup(name))
    except KeyError:
        return False


def _formula(writer: Any, node: Any) -> None:
    """A formula as MathML; what cannot be converted is a warning, and so an error."""
    display = "block" if isinstance(node, nodes.math_block) else "inline"
    text = node.astext()
    try:
        mathml = _core(latex2mathml.converter.convert(text, display=display))
    except Exception as error:
        mathml = f"<code>{html.escape(text)}</code>"
        logger.warning("cannot convert %r: %r", text, error, location=node)
    if "\\" in mathml:
        logger.warning("not all of %r was understood", text, location=node)
    writer.body.append(f'<div class="formula">{mathml}</div>' if display == "block" else mathml)
    raise nodes.SkipNode


def _offline(app: Any, error: Exception | None) -> None:
    """Pages that fetch something from the network are an error."""
    for page in Path(app.outdir).rglob("*.html") if error is None else ():
        found = re.search(
            r'<(?:script|link|img|iframe)\b[^>]*?(?:src|href)="(?:https?:)?//[^"]*"', page.read_text("utf-8")
        )
        if found:
            raise ExtensionError(f"{page.name} needs the network: {found[0]}")


def setup(app: Any) -> None:
    """Connect the five."""
    app.connect("build-finished", _offline)
    app.add_html_math_renderer("mathml", (_formula, None), (_formula, None))
    app.connect("missing-reference", _resolve)
    app.connect("builder-inited", _gather)
    app.connect("autodoc-skip-member", _skip)
