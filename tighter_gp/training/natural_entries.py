"""What natural gradients remember of a distribution, or of several: natural parameters, and what was last written."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

import torch
from gpytorch.variational import _VariationalDistribution
from torch import Tensor

from ..checks import checks_are_deferred, passed, same_values
from ..maths.natural import NaturalParameters
from ..modes import spans
from .natural_forms import init_natural, mean_of, parameter_values, vector_and_matrix


class Entry:
    r"""Distributions that explain the same data together, their joint natural parameters and what was last written to them.

    q(u) of an SVGP is on its own. q(u) and q(v) of SOLVE-GP are independent, but the best mean of one depends on the mean of
    the other. So the natural parameters :math:`(P, h)` of both are kept, correlations included, and of all independent
    distributions those nearest to that Gaussian are written: with the joint mean :math:`P^{-1} h` and the precisions
    :math:`P_{uu}` and :math:`P_{vv}`. Moved each on its own, the means lag behind where the two are strongly coupled.

    :param distributions: The distributions, in the order of the projection's rows; several only with full covariances.

    Example:
        >>> entry = tighter_gp.training.natural_entries.Entry(gpytorch.variational.CholeskyVariationalDistribution(2))
        >>> entry.current().linear
        tensor([0., 0.], dtype=torch.float64)
    """

    def __init__(self, *distributions: _VariationalDistribution) -> None:
        self.distributions = distributions
        self.q: NaturalParameters | None = None
        self.written: tuple[Tensor, ...] = ()
        self.versions: list[tuple[int, int]] = []
        self.probe: Tensor | None = None  # leading direction of a mean-field q's curvature
        self.previous: tuple[NaturalParameters, tuple[Tensor, ...], Tensor | None] | None = None
        self.is_given = False

    def parameters(self) -> list[Tensor]:
        """A vector and a matrix per distribution, in turn."""
        return [parameter for distribution in self.distributions for parameter in vector_and_matrix(distribution)]

    def current(self) -> NaturalParameters:
        """The natural parameters, rebuilt if q(u) was changed by anybody else."""
        if self.is_given:
            assert self.q is not None
            return self.q
        parameters = self.parameters()
        is_known = self.q is not None and self._is_written(parameters)
        if not is_known:
            self.q = _joint([init_natural(distribution) for distribution in self.distributions])
            self.written, self.versions = _copies(parameters), _versions(parameters)
        assert self.q is not None
        return self.q

    def knows_data(self) -> bool:
        """Whether this is not the prior, up to the noise with which GPyTorch starts a mean."""
        q = self.current()
        noise = max(distribution.mean_init_std for distribution in self.distributions)
        diagonal = torch.ones_like(q.linear)
        identity = diagonal if q.is_mean_field else torch.diag_embed(diagonal)
        return not passed((q.precision - identity).abs().amax() <= 1e-3, q.linear.abs().amax() <= 1e-6 + 6 * noise)

    def mean(self) -> Tensor:
        """The mean as the forward pass saw it, ``... x M``."""
        if len(self.distributions) == 1:
            return mean_of(self.distributions[0], self.current)

        def block(distribution: _VariationalDistribution, rows: slice) -> NaturalParameters:
            vector, _ = vector_and_matrix(distribution)
            return NaturalParameters(self.current().precision[..., rows, rows], vector.double())

        parts = zip(self.distributions, self._rows(), strict=True)
        return torch.cat([mean_of(part[0], partial(block, *part)) for part in parts], dim=-1)

    @torch.no_grad()
    def write(self, q: NaturalParameters) -> Tensor:
        """Set the distributions' parameters if the precision is positive definite; a flag on the device says whether it is."""
        parts, ok = [q], None
        if len(self.distributions) > 1:
            factor, info = torch.linalg.cholesky_ex(q.precision)
            mean = torch.cholesky_solve(q.linear.unsqueeze(-1), factor)
            ok, parts = (info == 0).all(), []
            for rows in self._rows():
                block = q.precision[..., rows, rows]
                parts.append(NaturalParameters(block, (block @ mean[..., rows, :]).squeeze(-1)))
        values: list[Tensor] = []
        for distribution, part in zip(self.distributions, parts, strict=True):
            first, second, is_fine = parameter_values(type(distribution), part)
            values += [first, second]
            ok = is_fine if ok is None else ok & is_fine
        assert ok is not None
        is_free_to_read = ok.device.type == "cpu" and not checks_are_deferred()
        if is_free_to_read and not ok:
            return ok
        for parameter, value in zip(self.parameters(), values, strict=True):
            parameter.copy_(value if is_free_to_read else torch.where(ok, value.to(parameter.dtype), parameter))
        return ok

    def _rows(self) -> list[slice]:
        """Which rows of the projection belong to which distribution."""
        return spans(distribution.num_inducing_points for distribution in self.distributions)

    def accept(self, q: NaturalParameters, probe: Tensor | None) -> None:
        """Take over a step that was written to the distribution."""
        assert self.q is not None
        self.previous = self.q, self.written, self.probe
        parameters = self.parameters()
        self.q, self.written, self.versions = q, _copies(parameters), _versions(parameters)
        self.probe = probe

    # -- in and out of a graph ----------------------------------------------------------------------------------------

    def give(self, q: NaturalParameters, probe: Tensor | None) -> None:
        """Take these for the natural parameters, without a look at the distribution's own."""
        self.q, self.probe, self.is_given = q, probe, True

    def tensors(self) -> list[Tensor]:
        """All that a step changes: the distributions' parameters, the natural ones, and the probe of a mean-field q."""
        assert self.q is not None
        return [*self.parameters(), *self.q, *([] if self.probe is None else [self.probe])]

    @torch.no_grad()
    def take(self, tensors: Sequence[Tensor]) -> None:
        """Accept what a graph made of :meth:`tensors`."""
        parameters = self.parameters()
        precision, linear, *probe = tensors[len(parameters) :]
        for parameter, value in zip(parameters, tensors, strict=False):
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
            parameters = self.parameters()
            for parameter, value in zip(parameters, self.written, strict=True):
                parameter.copy_(value)
            self.versions = _versions(parameters)


def _copies(tensors: Iterable[Tensor]) -> tuple[Tensor, ...]:
    return tuple(tensor.detach().clone() for tensor in tensors)


def _versions(tensors: Iterable[Tensor]) -> list[tuple[int, int]]:
    return [(tensor.data_ptr(), tensor._version) for tensor in tensors]


def _joint(parts: Sequence[NaturalParameters]) -> NaturalParameters:
    """Independent Gaussians as one."""
    if len(parts) == 1:
        return parts[0]
    linear = torch.cat([part.linear for part in parts], dim=-1)
    precision = linear.new_zeros(*linear.shape, linear.size(-1))
    for part, rows in zip(parts, spans(part.linear.size(-1) for part in parts), strict=True):
        precision[..., rows, rows] = part.precision
    return NaturalParameters(precision, linear)
