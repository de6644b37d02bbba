r"""Predictions near the exact GP's: a sparse GP that looks at the training rows around each point.

What the inducing variables leave unexplained, :math:`D = K - A^\top A`, is local: a few training rows :math:`c` near a
point know most of it. With :math:`q(w) = \mathcal N(m, S)` of the whitened inducing variables and noise :math:`\Sigma`,

.. math::
    v = (D_{cc} + \Sigma_c)^{-1} D_{c*}, \quad b = a_* - A_c v, \quad
    f_* \sim \mathcal N\bigl(\mu_* + b^\top m + v^\top (y_c - \mu_c),\; d_* - v^\top D_{c*} + b^\top S b\bigr).

Without neighbours this is the prediction of the sparse GP; with all rows, and :math:`q(w)` in proportion to
:math:`p(w)\, \mathcal N(y; \mu + A^\top w, D + \Sigma)`, that of the exact one. Here :math:`q(w)` has the diagonal of D.
"""

from __future__ import annotations

import copy
import math
from typing import Any, NamedTuple

import numpy as np
import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.likelihoods import FixedNoiseGaussianLikelihood, GaussianLikelihood
from linear_operator.operators import DiagLinearOperator
from torch import Tensor

from .collapsed.core import DataSums, data_sums, sums_of
from .data import reference
from .likelihoods.expectations import expected_slopes
from .likelihoods.family import family, gaussian_noise, scale_noise
from .likelihoods.targets import check_targets
from .maths.collapsed import collapse
from .maths.linalg import full_precision
from .modes import chunks
from .nearest import RowSearch, as_rows
from .posterior import posterior_of

_GAUSSIAN = (GaussianLikelihood, FixedNoiseGaussianLikelihood)
_ASIDE = 1000  # rows left aside when refining


class Stop(NamedTuple):
    """A point on the way of refining: how well rows left aside are predicted there, and all that is needed to return."""

    density: float
    squared: Tensor  # standard residuals
    state: dict[str, Tensor]


class NeighbourGP(RowSearch):
    r"""A trained sparse GP that also looks at the training rows near each point it predicts.

    Use it wherever a model makes predictions: :func:`~tighter_gp.predict`, :func:`~tighter_gp.predict_y`, BoTorch. It
    starts from the hyperparameters of the sparse model and refines them for a few steps by the density of training rows
    given their neighbours, each without itself. Of what it tries, and the model's own prediction, it keeps what
    predicts best some rows that it left aside. It is no bound on the evidence.

    :param model: A trained model of one output, which is copied: an :class:`~gpytorch.models.ApproximateGP` on a
        strategy of this package, or a :class:`~tighter_gp.CollapsedGP`.
    :param likelihood: Its :class:`~gpytorch.likelihoods.GaussianLikelihood` or
        :class:`~gpytorch.likelihoods.FixedNoiseGaussianLikelihood`. For a log-concave likelihood of one function, Bernoulli or
        Poisson, pseudo-targets :math:`\mu_n + g_n/\lambda_n` of noise :math:`1/\lambda_n` take the place of targets, and nothing
        is refined.
    :param x: Training inputs, ``N x D`` or ``N``: a tensor or an array, perhaps memory-mapped. They are not copied.
    :param y: Training targets, ``N``.
    :param num_neighbours: Training rows for each point.
    :param steps: Steps of refining. Zero for none, and neighbours in any case.
    :param seed: Of the rows for refining.
    :param noise: Noise variances of the training rows, for fixed noise that the likelihood does not have.
    :param chunk_size: Columns of A in memory at a time, ``M`` numbers each; a point needs one for itself and one per
        neighbour. The search takes another 128 numbers per column.
    :param save_rows: Whether ``state_dict`` and pickle have the rows. If not, set ``x`` and ``y`` again after unpickling.
    :ivar likelihood: The likelihood with the refined noise.
    :ivar noise_factor: By what refining has multiplied the noise: for ``noise=`` of new points under fixed noise.
    :ivar num_neighbours: Zero if neighbours did not help.

    Example:
        >>> near = tighter_gp.NeighbourGP(model, likelihood, train_x, train_y, num_neighbours=10, steps=5)
        >>> low, high = tighter_gp.predict_y(near, near.likelihood, test_x).interval(0.95)
        >>> near.add(test_x, test_y)
    """

    noise: Tensor
    noise_factor: Tensor
    scale: Tensor
    gram: Tensor
    linear: Tensor

    def __init__(
        self,
        model: Any,
        likelihood: Any,
        x: Tensor | np.ndarray,
        y: Tensor | np.ndarray,
        num_neighbours: int = 30,
        steps: int = 40,
        seed: int = 0,
        *,
        noise: Tensor | np.ndarray | None = None,
        chunk_size: int = 32768,
        save_rows: bool = True,
    ) -> None:
        super().__init__()
        kind, is_gaussian = family(likelihood), type(likelihood) in _GAUSSIAN
        if not is_gaussian and (kind.is_gaussian or not (kind.is_log_concave and kind.has_one_function)):
            raise TypeError(f"Neighbours need a Gaussian or log-concave likelihood; got {type(likelihood).__name__}.")
        like = reference(model)
        self.model, self.likelihood = copy.deepcopy((model, likelihood))
        self.eval().requires_grad_(False)
        x, y = as_rows("x", x), as_rows("y", y).to(like)
        x = x.unsqueeze(-1) if x.dim() == 1 else x
        if x.dim() != 2 or y.shape != x.shape[:1]:
            raise ValueError(f"Expected x of shape N x D and y of shape N; got {tuple(x.shape)} and {tuple(y.shape)}.")
        check_targets(likelihood, y)
        self.num_neighbours, self.chunk_size, self.save_rows = num_neighbours, chunk_size, save_rows
        self.register_buffer("x", x, persistent=save_rows)
        self.register_buffer("y", y, persistent=save_rows)
        given = {} if noise is None else {"noise": as_rows("noise", noise).to(y)}
        with full_precision(y.device.type):
            posterior = posterior_of(self.model)
            self.jitter = posterior.jitter
            for name in ("noise", "noise_factor", "scale"):
                self.register_buffer(name, y.new_ones(()))
            for name, value in sums_of(posterior.q).items():
                self.register_buffer(name, value)
            self.sort_rows()
            if not is_gaussian:
                self.y, self.noise = self._pseudo_targets(x, y)
                return
            noise = gaussian_noise(likelihood, torch.Size(), y.shape, **given)
            self.noise = noise.detach().reshape(-1).to(y)  # [1] or [N]
            if self.num_neighbours:
                self._refine(steps, torch.Generator().manual_seed(seed))

    def _pseudo_targets(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        r""":math:`\mu_n + g_n / \lambda_n` and their noise variances :math:`1 / \lambda_n`, at q(f) without neighbours."""
        q = self.forward(x, num_neighbours=0)
        slopes = expected_slopes(self.likelihood, y, q)
        curvature = slopes.curvature.clamp_min(1e-4)
        return (q.mean + slopes.slope / curvature).to(y), curvature.reciprocal().to(y)

    # -- predictions --------------------------------------------------------------------------------------------------

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> MultivariateNormal:
        """The distribution of f at inputs ``... x B x D``, each point by itself; arguments as of :meth:`f_at`."""
        mean, variance = self.f_at(x, *args, **kwargs)
        return MultivariateNormal(mean, DiagLinearOperator(variance))

    def f_at(
        self, x: Tensor, own: Tensor | None = None, in_q: bool = False, num_neighbours: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """Mean and variance of f at inputs ``... x B x D``, shaped ``... x B``.

        :param own: For training rows: their positions, ``B``. Each is then predicted without itself.
        :param in_q: Whether q(w) still knows of it.
        :param num_neighbours: Default that of the model; 0 for the sparse GP's own prediction.
        """
        x = x.unsqueeze(-1) if x.dim() == 1 else x
        rows = x.reshape(-1, x.size(-1))
        near, parts = self.nearest(rows, own, num_neighbours=num_neighbours), []
        with full_precision(x.device.type):
            for part in chunks(len(rows), max(1, self.chunk_size // (1 + near.size(-1)))):
                parts.append(self._moments(rows[part], near[part], None if own is None or in_q else own[part]))
        mean, variance = (torch.cat(values).view(x.shape[:-1]) for values in zip(*parts, strict=True))
        return mean, variance * self.scale

    def _moments(self, x: Tensor, near: Tensor, own: Tensor | None) -> tuple[Tensor, Tensor]:
        """Mean and variance of f at points ``B x D``, from training rows ``B x k``."""
        distinct, place = torch.unique(near, return_inverse=True)  # points share neighbours: one column for each row
        size, inputs = len(x), torch.cat([x, self.rows(distinct)])
        sets = torch.cat([torch.arange(size, device=x.device).unsqueeze(-1), size + place], -1)  # [B, 1 + k]
        prior = self.prior
        p = prior(inputs)  # A  [M, B + distinct] and d
        D = prior.residual_within(p, inputs, sets).double()  # [B, 1 + k, 1 + k]
        columns = p.matrix.mT[sets]  # [B, 1 + k, M]
        a, A = columns[:, 0], columns[:, 1:]
        noisy = D[:, 1:, 1:] + torch.diag_embed(self._noise(near)).to(D)
        # No neighbours where rounding leaves no factor: an input so far off that no row is near.
        is_usable = (torch.linalg.cholesky_ex(noisy.detach()).info == 0).view(-1, 1, 1)
        # chol(D_cc + Sigma_c)  [B, k, k]
        factor = torch.linalg.cholesky(torch.where(is_usable, noisy, torch.eye(near.size(-1)).to(D)))
        cross = torch.where(is_usable, D[:, 1:, :1], 0.0)  # [B, k, 1]
        seen = torch.linalg.solve_triangular(factor, cross, upper=False)
        v = torch.linalg.solve_triangular(factor.mT, seen, upper=True).to(A)  # [B, k, 1]
        # d_* - D_*c (D_cc + Sigma_c)^-1 D_c*  [B]
        residual = (D[:, 0, 0] - seen.square().sum((-2, -1))).clamp_min(0).to(a)
        b = a - (A.mT @ v).squeeze(-1)  # [B, M]: what is left for q(w)
        q = collapse(self.gram.double(), self.linear.double())
        weights, root = q.weights.to(a), q.root.to(a)  # m  [M] and S = R R'  [M, M]
        mean = p.mean[:size] + b @ weights + (v.squeeze(-1) * (self.y[near] - p.mean[size:][place])).sum(-1)
        explained = (b @ root).square().sum(-1) + self.jitter
        if own is not None:  # without row n in q(w), in closed form
            noise_q = p.residual[:size] + self._noise(own)
            gain = a @ root @ root.mT / noise_q.unsqueeze(-1)  # [B, M]: S a_n / noise
            # a'S a / noise and a'S b / noise: leverages of row n
            h, h_b = (gain * a).sum(-1).clamp_max(0.95), (gain * b).sum(-1)
            mean = mean - h_b * (self.y[own] - p.mean[:size] - a @ weights) / (1 - h)
            explained = explained + h_b.square() * noise_q / (1 - h)
        return mean, residual + explained

    # -- rows -----------------------------------------------------------------------------------------------------------

    def _noise(self, rows: Tensor | slice) -> Tensor:
        """Noise variances of training rows."""
        return self.noise.expand(len(self.y))[rows]

    @torch.no_grad()
    def _sums(self, start: int = 0) -> DataSums:
        r"""Sums over the rows from ``start`` on that make q(w), with noise :math:`d_n + \sigma_n^2`."""
        rows = torch.arange(start, len(self.y), device=self.y.device).split(min(self.chunk_size, 4096))
        noisy = lambda p, part: (p, self.y[part], (p.residual + self._noise(part)).reciprocal())
        return data_sums(noisy(self.prior(self.rows(part)), part) for part in rows)

    def _set_q(self) -> None:
        """The best q(w) at the present hyperparameters."""
        self.gram, self.linear, _ = self._sums()

    def add(self, x: Tensor | np.ndarray, y: Tensor | np.ndarray, noise: Tensor | np.ndarray | None = None) -> None:
        """Take in new observations, at the present hyperparameters.

        :param x: Inputs, ``B x D``.
        :param y: Targets, ``B``.
        :param noise: Under fixed noise: their noise variances, which are multiplied by ``noise_factor``.
        """
        start, x, y = len(self.y), as_rows("x", x), as_rows("y", y).reshape(-1)
        x = x.reshape(len(x), -1)
        if x.size(-1) != self.x.size(-1) or len(x) != len(y):
            raise ValueError(
                f"Expected x of shape B x {self.x.size(-1)} and y of shape B; got {tuple(x.shape)} and {tuple(y.shape)}."
            )
        if not bool(torch.isfinite(x).all()):
            raise ValueError("The new rows hold NaN or infinity; leave them out.")
        check_targets(self.likelihood, y)
        if type(self.likelihood) not in _GAUSSIAN:
            y, noise = self._pseudo_targets(x.to(self.x), y.to(self.y))
        elif isinstance(self.likelihood, FixedNoiseGaussianLikelihood):
            if noise is None or as_rows("noise", noise).shape != y.shape:
                raise ValueError(f"Under fixed noise pass noise=, a variance for each of the {len(y)} new rows.")
            noise = as_rows("noise", noise).to(self.y) * self.noise_factor / self.scale
        elif noise is not None:
            raise TypeError("noise= is for fixed noise: new rows have the noise of the likelihood.")
        if noise is not None:
            self.noise = torch.cat([self.noise.expand(start), noise])
        self.x, self.y = torch.cat([self.x, x.to(self.x)]), torch.cat([self.y, y.to(self.y)])
        sums = self._sums(start)
        self.gram, self.linear = self.gram + sums.gram, self.linear + sums.linear
        self.sort_rows()

    def __getstate__(self) -> dict[str, Any]:
        without = {} if self.save_rows else {"x": None, "y": None}
        return {**self.__dict__, "_buffers": {**self._buffers, **without}}

    def get_extra_state(self) -> Tensor:
        """What ``state_dict`` has beside parameters and buffers."""
        return torch.tensor([self.num_neighbours, len(self.y)])

    def set_extra_state(self, state: Tensor) -> None:
        """The same, from a ``state_dict``."""
        self.num_neighbours, num_rows = state.tolist()
        if num_rows != len(self.y):
            raise ValueError(
                f"The state is of {num_rows} rows, this object has {len(self.y)}: make it with the same rows."
            )

    def load_state_dict(self, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        """As of any module, with any number of rows."""
        for name in {"x", "y", "noise"} & state_dict.keys():
            setattr(self, name, state_dict[name].to(getattr(self, name), copy=True))
        found = super().load_state_dict(state_dict, *args, **kwargs)
        self.sort_rows()
        return found

    # -- refining -------------------------------------------------------------------------------------------------------

    def _refine(self, steps: int, generator: torch.Generator) -> None:
        """Adam on the logarithms of noise and positive hyperparameters, from the trained values; the best stop is kept."""
        count = len(self.y)
        aside, pool = torch.randperm(count, generator=generator).tensor_split([min(_ASIDE, count // 2)])
        if not steps or not len(aside):
            self._set_q()
            return
        usual = self._stop(aside, num_neighbours=0)
        self._set_q()
        stops = [usual, self._stop(aside)]
        constrained = [(name, p, c) for name, p, c in self.named_parameters_and_constraints() if c is not None]
        tuned = {name: (p, c) for name, p, c in constrained if "noise" not in name and bool((c.lower_bound >= 0).all())}
        logs = {name: c.transform(p).log() for name, (p, c) in tuned.items()}
        logs["noise"], trained = torch.zeros_like(self.noise_factor), self.noise  # the noise has a factor
        rates = {name: 0.25 if name.endswith(("noise", "outputscale")) else 0.1 for name in logs}
        adam = torch.optim.Adam([{"params": [log.requires_grad_()], "lr": rates[name]} for name, log in logs.items()])
        schedule = torch.optim.lr_scheduler.MultiStepLR(adam, [max(1, steps // 2)], 0.4)

        def values() -> dict[str, Tensor]:
            found = {name: c.inverse_transform(logs[name].exp()) for name, (_, c) in tuned.items()}
            return {**found, "noise": trained * logs["noise"].exp()}

        batch = min(len(pool), 100 if count > 10_000 else 60)
        for step in range(1, steps + 1):
            rows = pool[torch.randint(len(pool), (batch,), generator=generator)]
            adam.zero_grad()
            (-self._at_rows(rows, values(), in_q=True)[0]).backward()  # a better way than without, to a worse end
            adam.step()
            schedule.step()
            with torch.no_grad():
                logs["noise"].clamp_(min=math.log(3e-3))
                for name, (_, c) in tuned.items():
                    low, high = 1.001 * c.lower_bound, 0.999 * c.upper_bound
                    logs[name].copy_(logs[name].exp().maximum(low).minimum(high).log())
                if step % 10 == 0 or step == steps:
                    self.load_state_dict({**self._state(), **values()}, strict=False)
                    self._set_q()
                if step % 20 == 0 or step == steps:
                    stops.append(self._stop(aside))
            if step == 20 and max(stops, key=lambda stop: stop.density) is usual:
                break
        self._take(max(stops, key=lambda stop: stop.density), usual)
        self.noise_factor = self.noise[0] / trained[0] * self.scale
        scale_noise(self.likelihood, self.noise_factor)

    def _at_rows(
        self, rows: Tensor, values: dict[str, Tensor], in_q: bool = False, num_neighbours: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """Mean log density of training rows, each without itself, and their squared standard residuals.

        :param values: Parameters and noise to use in place of the present ones.
        :param in_q: Whether q(w) still knows of each.
        """
        rows = rows.to(self.y.device)
        arguments = self.rows(rows), rows, in_q, num_neighbours
        f = torch.func.functional_call(self, values, arguments, tie_weights=False)
        variance = f.lazy_covariance_matrix.diagonal() + values.get("noise", self.noise).expand(len(self.y))[rows]
        squared = (self.y[rows] - f.mean).square() / variance
        return -0.5 * (squared + (2 * torch.pi * variance).log()).mean(), squared

    @torch.no_grad()
    def _stop(self, aside: Tensor, num_neighbours: int | None = None) -> Stop:
        density, squared = self._at_rows(aside, {}, num_neighbours=num_neighbours)
        return Stop(density.item(), squared, self._state())

    def _state(self) -> dict[str, Tensor]:
        """What refining changes."""
        state = {**dict(self.named_parameters()), **dict(self.named_buffers())}
        return {name: value.detach().clone() for name, value in state.items() if name not in ("x", "y")}

    @torch.no_grad()
    def _take(self, best: Stop, usual: Stop) -> None:
        """Take the best stop; if it is not the usual prediction, with variances scaled to cover the rows left aside."""
        self.load_state_dict(best.state, strict=False)
        if best is usual:
            self.num_neighbours = 0
            return
        squared, gain = best.squared, best.density - usual.density
        error = 1.5 * (0.95 * 0.05 / len(squared)) ** 0.5  # of the share of rows within their 95 % intervals
        low, high = (squared.quantile(share) / 1.96**2 for share in (0.95 - error, min(1.0, 0.96 + error)))
        full = torch.minimum(low.clamp_min(1), high)
        for share in (1.0, 0.8, 0.6, 0.4, 0.2):  # as far as it leaves half of what was gained
            scale = full.pow(share)
            cost = 0.5 * (squared.mean() * (1 / scale - 1) + scale.log())
            if cost < 0.5 * gain:
                self.scale = scale
                break
