"""The picture of the data flow on the contributor's page, as SVG. `python docs/dataflow.py` prints it.

Every box names the function that does the work; a test looks each of them up.
"""

from __future__ import annotations

from typing import NamedTuple
from xml.sax.saxutils import escape


class Box(NamedTuple):
    """What is computed, and where.

    :param text: Lines of text.
    :param where: ``path:function`` below ``tighter_gp/``; empty for GPyTorch's own part.
    :param instead: Whether it takes the place of all above it.
    """

    text: tuple[str, ...]
    where: str
    instead: bool = False


class Column(NamedTuple):
    """A path through the package, from top to bottom."""

    title: str
    boxes: tuple[Box, ...]


STRATEGY = "strategies/_tighter_strategy.py:_TighterStrategy"
ELBO = "mlls/tighter_elbo.py:TighterELBO"
KERNEL = "kernels/tighter_inducing_point_kernel.py"

COLUMNS = (
    Column(
        "Training, q(u) explicit",
        (
            Box(("model(x): prior at Z and x", "K_ZZ, K_ZX, k_nn"), f"{STRATEGY}._prior_blocks"),
            Box(("L = chol(K_ZZ + εI), once",), f"{STRATEGY}._factorized_prior"),
            Box(("mean μ, explained s,", "residual d of each point"), "moments.py:fused_moments"),
            Box(("learned scales m, if any",), "conditionals.py:Conditional.scale"),
            Box(("q(f), whose covariance", "carries s, d and m"), "operators.py:ResidualLinearOperator"),
            Box(("GPyTorch's wrappers:", "multitask, LMC, deep GP"), ""),
            Box(("the objective finds s, d", "in the tree of operators"), "operators.py:iter_residuals"),
            Box(("best m for the likelihood,", "and its price"), "conditionals.py:Conditional.optimum"),
            Box(("E log p at s + m·d, less price", "and KL[q(u)], per datum"), f"{ELBO}.forward"),
        ),
    ),
    Column(
        "Training, q(u) collapsed",
        (
            Box(("model(x): A = L⁻¹K_ZX", "for all training points"), f"{KERNEL}:TighterInducingPointKernel.forward"),
            Box(("residual d, or its blocks",), f"{KERNEL}:TighterInducingPointKernel._penalty_term"),
            Box(("the price ½ Σ log(1 + d/σ²)", "as an added loss term"), f"{KERNEL}:CollapsedAddedLossTerm.loss"),
            Box(("GPyTorch's exact MLL:", "log N(y; μ, AᵀA + σ²I) + price"), ""),
            Box(
                ("the same in chunks, for more", "rows than memory holds"), "collapsed.py:collapsed_bound", instead=True
            ),
        ),
    ),
    Column(
        "Prediction",
        (
            Box(("model.eval(); model(x):", "GPyTorch's own SVGP path"), f"{STRATEGY}.forward"),
            Box(("predict(model, x): one view", "of every kind of model"), "latent.py:latent_gp", instead=True),
            Box(("A and d at the test points",), "latent.py:LatentGP.projected"),
            Box(("mean, and variance s + d",), "latent.py:LatentGP.moments"),
            Box(("if asked for, the last term:", "less rᵀVr, r = D at (X, x)"), "predictive.py:_Reducer.__call__"),
            Box(("q(f) at the test points,", "for the likelihood"), "predictive.py:predict"),
        ),
    ),
)

WIDTH, GAP, MARGIN = 256, 22, 10
LINE, SMALL, PAD, SPACE, TOP = 17, 13, 9, 20, 44
# Widths of a character, to see that a line fits its box.
TEXT_WIDTH, CODE_WIDTH = 6.6, 6.1


def lines_of(box: Box) -> tuple[list[str], list[str]]:
    """Text, and the place broken before the function's name."""
    path, _, function = box.where.partition(":")
    return list(box.text), [path.rpartition("/")[2], function] if function else []


def height_of(box: Box) -> int:
    """Height of a box."""
    text, code = lines_of(box)
    return 2 * PAD + LINE * len(text) + SMALL * len(code)


def _draw(box: Box, left: float, top: float) -> list[str]:
    text, code = lines_of(box)
    middle, outside = left + WIDTH / 2, "" if code else ' stroke-dasharray="5 4"'
    parts = [
        f'<rect x="{left}" y="{top}" width="{WIDTH}" height="{height_of(box)}" rx="6" fill="none" '
        f'stroke="currentColor" stroke-opacity="0.55"{outside}/>'
    ]
    y = top + PAD + LINE - 5
    for line in text:
        parts.append(f'<text x="{middle}" y="{y}" font-size="13">{escape(line)}</text>')
        y += LINE
    y -= LINE - SMALL - 2
    for line in code:
        parts.append(f'<text x="{middle}" y="{y}" font-size="10" class="code">{escape(line)}</text>')
        y += SMALL
    return parts


def svg() -> str:
    """The picture; colours are those of the page around it."""
    width = 2 * MARGIN + len(COLUMNS) * WIDTH + (len(COLUMNS) - 1) * GAP
    height, parts = 0.0, []
    for number, column in enumerate(COLUMNS):
        left, y = MARGIN + number * (WIDTH + GAP), float(TOP)
        middle = left + WIDTH / 2
        parts.append(
            f'<text x="{middle}" y="{TOP - 18}" font-size="14" font-weight="600">{escape(column.title)}</text>'
        )
        for box in column.boxes:
            if box.instead:
                parts.append(f'<text x="{middle}" y="{y - 6}" font-size="13" font-style="italic">or</text>')
            elif y > TOP:
                path = f"M{middle} {y - SPACE + 2}V{y - 4}"
                parts.append(f'<path d="{path}" stroke="currentColor" marker-end="url(#tip)"/>')
            parts += _draw(box, left, y)
            y += height_of(box) + SPACE
        height = max(height, y - SPACE + MARGIN)
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height:g}" role="img" fill="currentColor" '
            'text-anchor="middle" font-family="sans-serif">',
            "<title>Data flow in training and in prediction</title>",
            "<style>.code{font-family:ui-monospace,monospace;fill-opacity:.75}</style>",
            '<defs><marker id="tip" viewBox="0 0 8 8" refX="6" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
            '<path d="M0 0L8 4L0 8z" fill="currentColor"/></marker></defs>',
            *parts,
            "</svg>",
        ]
    )


if __name__ == "__main__":
    print(svg())
