"""The registered data files: where they come from, and how to tell that they are right.

A checksum is ``sha256:`` of the file, ``git:`` its git blob id, sha1("blob " + size + NUL + content), or ``content:``
the sha256 of what is inside a gzipped file, however it was compressed.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple


class Source(NamedTuple):
    """A file.

    :param url: Where to download it.
    :param checksum: See above.
    """

    url: str
    checksum: str


# Rows and inputs of the regression sets; the target is the last column of the file.
SHAPES = {
    "wine": (1599, 11),
    "solar": (1066, 10),
    "pumadyn32nm": (8192, 32),
    "elevators": (16599, 18),
    "bike": (17379, 17),
    "pol": (15000, 26),
    "kin40k": (40000, 8),
    "protein": (45730, 9),
    "keggdirected": (48827, 20),
    "keggundirected": (63608, 27),
    "3droad": (434874, 3),
    "song": (515345, 90),
    "buzz": (583250, 77),
    "houseelectric": (2049280, 11),
    "tamielectric": (45781, 3),
    "airfoil": (1503, 5),
    "concrete": (1030, 8),
    "energy": (768, 8),
    "yacht": (308, 6),
}

# The eight sets of the paper's large-scale experiment.
PAPER = ("kin40k", "protein", "keggdirected", "keggundirected", "3droad", "song", "buzz", "houseelectric")

# Sets whose rows are in more than one file.
PARTS = {"song": ("data.csv.gz", "data1.csv.gz")}

# GitHub treforevans/uci_datasets, MIT licence.
_UCI = (
    "https://raw.githubusercontent.com/treforevans/uci_datasets/f0737523712fe66a1640e4b980b927e8490b58eb/uci_datasets/"
)
_MNIST = "https://ossci-datasets.s3.amazonaws.com/mnist/"
_OIL_FLOW = (
    "https://raw.githubusercontent.com/cornellius-gp/gpytorch/73a98a5798b1627b4ebd67ddf8305f714722087c/examples/"
)
_SNELSON = (
    "https://raw.githubusercontent.com/thangbui/tighter_sparse_gp/8572e24cd33e84bbd853bedf51799e1512493c36/example/"
)

# GitHub vega/vega-datasets, BSD-3-Clause; the records of the US Bureau of Transportation Statistics.
_VEGA = "https://raw.githubusercontent.com/vega/vega-datasets/v3.2.1/data/"

_ADDRESSES = {
    "uci": lambda name: f"{_UCI}{name}",
    "mnist": lambda name: f"{_MNIST}{name}",
    "oil_flow": lambda name: f"{_OIL_FLOW}045_GPLVM/{name}",
    "flights3m": lambda name: f"{_VEGA}{name}",
    "snelson.csv": lambda name: f"{_SNELSON}snelson.csv",
}


def _sources() -> Iterator[tuple[str, Source]]:
    for line in Path(__file__).with_name("checksums.txt").read_text(encoding="utf-8").splitlines():
        checksum, name = line.split()
        folder, _, rest = name.partition("/")
        yield name, Source(_ADDRESSES[folder](rest), checksum)


FILES = dict(_sources())
