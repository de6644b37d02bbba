"""What the notebooks share: the look of their figures, and what the environment says about the run.

``TIGHTER_GP_QUICK=1`` asks for a short run, to see that everything works. ``TIGHTER_GP_DATA`` may name a folder of data.
"""

from __future__ import annotations

import os

import matplotlib.pyplot as plt
import torch

QUICK = os.environ.get("TIGHTER_GP_QUICK") == "1"
DATA = os.environ.get("TIGHTER_GP_DATA")
device = "cuda" if torch.cuda.is_available() else "cpu"

# Okabe and Ito's colours, which colour-blind readers can tell apart.
BLUE, VERMILION, GREEN, PURPLE, ORANGE, GREY = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#7F7F7F"

plt.rcParams.update(
    {
        "axes.grid": True,
        "axes.prop_cycle": plt.cycler(color=[BLUE, VERMILION, GREEN, PURPLE, ORANGE]),
        "axes.titlelocation": "left",
        "figure.dpi": 80,
        "grid.alpha": 0.25,
        "legend.frameon": False,
    }
)
