"""The oil flow, and an embedded set like it."""

from __future__ import annotations

import argparse
from typing import NamedTuple

import torch
from torch import Tensor

from ..data import load_oil_flow

DATASETS = ("oil", "phases")


class Data(NamedTuple):
    """Rows of training and test data in units of the training rows' standard deviation, and labels of the former."""

    train: Tensor
    labels: Tensor
    test: Tensor
    stddev: Tensor


def load(name: str, args: argparse.Namespace) -> Data:
    """Training rows and test rows, scaled with the former's mean and standard deviation."""
    if name == "oil":
        parts = load_oil_flow(args.data_dir)
        (train, labels), (test, _) = parts["train"], parts["test"]
    else:
        train, labels = make_phases(150, seed=0)
        test, _ = make_phases(60, seed=1)
    mean, stddev = train.mean(0), train.std(0)
    scaled = [((rows - mean) / stddev).to(device=args.device, dtype=args.dtype) for rows in (train, test)]
    return Data(scaled[0], labels, scaled[1], stddev)


def make_phases(num_rows: int, seed: int) -> tuple[Tensor, Tensor]:
    """An embedded set like the oil flow: three noisy curves in twelve dimensions, and which curve a row is on."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(num_rows) % 3
    position = 2 * torch.rand(num_rows, 1, generator=generator, dtype=torch.float64) - 1
    column = torch.arange(12, dtype=torch.float64)
    phase = labels.unsqueeze(-1)
    rows = torch.sin(position * (1 + phase / 2) + column * (1 + phase)) + 0.7 * torch.cos(column * phase)
    return rows + 0.05 * torch.randn(rows.shape, generator=generator, dtype=torch.float64), labels
