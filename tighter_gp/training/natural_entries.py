"""What natural gradients remember of a distribution: its natural parameters, and what was last written to it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from gpytorch.variational import _VariationalDistribution
from torch import Tensor

from ..checks import same_values
from ..maths.natural import NaturalParameters
from .natural_forms import init_natural, vector_and_matrix


class Entry:
    """One distribution, its natural parameters and what was last written to it.

    :param distribution: The distribution.

    Example:
        >>> entry = tighter_gp.training.natural_entries.Entry(gpytorch.variational.CholeskyVariationalDistribution(2))
        >>> entry.current().linear
        tensor([0., 0.], dtype=torch.float64)
    """

    def __init__(self, distribution: _VariationalDistribution) -> None:
        self.distribution = distribution
        self.q: NaturalParameters | None = None
        self.written: tuple[Tensor, ...] = ()
        self.versions: list[tuple[int, int]] = []
        self.probe: Tensor | None = None  # leading direction of a mean-field q's curvature
        self.previous: tuple[NaturalParameters, tuple[Tensor, ...], Tensor | None] | None = None
        self.is_given = False

    def current(self) -> NaturalParameters:
        """The natural parameters, rebuilt if q(u) was changed by anybody else."""
        if self.is_given:
            assert self.q is not None
            return self.q
        parameters = vector_and_matrix(self.distribution)
        is_known = self.q is not None and self._is_written(parameters)
        if not is_known:
            self.q, self.written = init_natural(self.distribution), _copies(parameters)
            self.versions = _versions(parameters)
        assert self.q is not None
        return self.q

    def accept(self, q: NaturalParameters, probe: Tensor | None) -> None:
        """Take over a step that was written to the distribution."""
        assert self.q is not None
        self.previous = self.q, self.written, self.probe
        parameters = vector_and_matrix(self.distribution)
        self.q, self.written, self.versions = q, _copies(parameters), _versions(parameters)
        self.probe = probe

    # -- in and out of a graph ----------------------------------------------------------------------------------------

    def give(self, q: NaturalParameters, probe: Tensor | None) -> None:
        """Take these for the natural parameters, without a look at the distribution's own."""
        self.q, self.probe, self.is_given = q, probe, True

    def tensors(self) -> list[Tensor]:
        """All that a step changes: the distribution's parameters, the natural ones, and the probe of a mean-field q."""
        assert self.q is not None
        return [*vector_and_matrix(self.distribution), *self.q, *([] if self.probe is None else [self.probe])]

    @torch.no_grad()
    def take(self, tensors: Sequence[Tensor]) -> None:
        """Accept what a graph made of :meth:`tensors`."""
        vector, matrix, precision, linear, *probe = tensors
        for parameter, value in zip(vector_and_matrix(self.distribution), (vector, matrix), strict=True):
            parameter.copy_(value)
        self.accept(NaturalParameters(precision, linear), probe[0] if probe else None)

    def known_probe(self) -> Tensor | None:
        """The leading direction of a mean-field q's curvature, or where to start from; None for another q."""
        q = self.current()
        if q.is_mean_field and self.probe is None:
            self.probe = torch.ones_like(self.written[1]) / q.linear.size(-1) ** 0.5
        return self.probe

    def _is_written(self, parameters: Sequence[Tensor]) -> bool:
        """Whether these are what was written last: by value, or by version where a value would have to be waited for."""
        if _versions(parameters) == self.versions and parameters[0].device.type != "cpu":
            return True
        return all(map(same_values, self.written, (parameter.detach() for parameter in parameters)))

    @torch.no_grad()
    def undo(self) -> None:
        """Return to before the last step, once."""
        if self.previous is not None:
            self.q, self.written, self.probe = self.previous
            self.previous = None
            parameters = vector_and_matrix(self.distribution)
            for parameter, value in zip(parameters, self.written, strict=True):
                parameter.copy_(value)
            self.versions = _versions(parameters)


def _copies(tensors: Iterable[Tensor]) -> tuple[Tensor, ...]:
    return tuple(tensor.detach().clone() for tensor in tensors)


def _versions(tensors: Iterable[Tensor]) -> list[tuple[int, int]]:
    return [(tensor.data_ptr(), tensor._version) for tensor in tensors]
