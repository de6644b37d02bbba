"""The look that all figures share: colours that survive colour blindness, sizes that survive shrinking."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

# Okabe and Ito's palette.
BLUE, VERMILION, GREEN, SKY, ORANGE, PURPLE = "#0072B2", "#D55E00", "#009E73", "#56B4E9", "#E69F00", "#CC79A7"
INK, GREY = "#222222", "#7F7F7F"

RC = {
    "axes.edgecolor": GREY,
    "axes.grid": True,
    "axes.labelsize": 12,
    "axes.prop_cycle": mpl.cycler(color=[BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY]),
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 12,
    "font.size": 11,
    "grid.alpha": 0.25,
    "legend.fontsize": 10.5,
    "legend.frameon": False,
    "lines.linewidth": 2.0,
}


@contextmanager
def style() -> Iterator[None]:
    """Draw inside this block."""
    with mpl.rc_context(RC):
        yield


def new_figure(width: float, height: float) -> Figure:
    """An empty figure in inches that arranges itself; it needs no display."""
    return Figure(figsize=(width, height), layout="constrained")


def save(figure: Figure, path: Path, dpi: int = 130) -> None:
    """Write a PNG whose bytes depend on the picture alone."""
    figure.savefig(path, dpi=dpi, metadata={"Software": None})


def method_style(method: str) -> dict[str, Any]:
    """Line and colour of a method: the tighter ones (``T-...``) solid vermilion, the others dashed blue."""
    if method.startswith("T-"):
        return {"color": VERMILION, "linestyle": "-"}
    return {"color": BLUE, "linestyle": (0, (5, 1.5))}


def fit_bands(axes: Axes, x: Any, mean: Any, latent_stddev: Any, noise: float, color: str) -> None:
    """A predictive mean with bands of two standard deviations, dark without and light with the noise.

    :param latent_stddev: Standard deviation of f.
    :param noise: Noise variance.
    """
    mean, latent_stddev = np.asarray(mean), np.asarray(latent_stddev)
    noisy_stddev = np.sqrt(latent_stddev**2 + noise)
    for stddev, alpha, label in ((noisy_stddev, 0.16, "y, ±2 std"), (latent_stddev, 0.40, "f, ±2 std")):
        axes.fill_between(x, mean - 2 * stddev, mean + 2 * stddev, color=color, alpha=alpha, linewidth=0, label=label)
    axes.plot(x, mean, color=color, label="mean")
