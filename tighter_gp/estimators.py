"""Estimators for scikit-learn: tables in their own units in, predictions in those units out. Needs the extra ``sklearn``."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch
from gpytorch.kernels import Kernel, MaternKernel, ScaleKernel
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.utils import check_random_state
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor

from .draws import seeded
from .models import BinaryClassification, MultiClassification, Regression
from .neighbours import NeighbourGP
from .predictions import PredictiveDistribution, predict, predict_y
from .training import fit

__all__ = ["TighterGPClassifier", "TighterGPRegressor"]

_SMALL = 2000  # rows up to which everything is in float64
_SAMPLE = 32768  # rows that inducing points are placed among
_DRAWS = 512  # of the functions of a softmax


class _TighterGP(BaseEstimator):
    """What both share: scales, inducing points, training."""

    def __init__(
        self,
        num_inducing: int = 256,
        kernel: Kernel | None = None,
        steps: int | None = None,
        random_state: Any = 0,
        device: str | torch.device | None = None,
        verbose: int = 0,
    ) -> None:
        self.num_inducing, self.kernel, self.steps = num_inducing, kernel, steps
        self.random_state, self.device, self.verbose = random_state, device, verbose

    def _start(self, X: Any, y: Any, **checks: Any) -> tuple[np.ndarray, np.ndarray]:
        """Checked inputs and targets, as scikit-learn wants them checked."""
        X, y = validate_data(self, X, y, dtype=[np.float64, np.float32], ensure_min_samples=2, **checks)
        self._seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        return X, y

    def _train(self, X: np.ndarray, y: np.ndarray, make: Any) -> Tensor:
        """Scale the inputs, make a model from some of them, and train it; the scaled inputs."""
        rng = np.random.default_rng(self._seed)
        some = np.sort(rng.choice(len(X), min(len(X), _SAMPLE), replace=False))
        self._mean, self._std = X[some].mean(0, dtype=np.float64), X[some].std(0, dtype=np.float64)
        self._is_constant = self._std <= 1e-12 * np.abs(self._mean)
        self._std[self._is_constant] = 1.0
        is_shared = self.kernel is None and _is_one_unit(X[some], y[some], self._std, rng)
        if is_shared:
            self._std = np.full_like(self._std, np.sqrt(np.mean(self._std**2)))
        self._dtype = torch.float64 if len(X) <= _SMALL else torch.float32
        x = self._scaled(X)
        sample = x[some].unique(dim=0)
        with seeded(self._seed, x.device):
            kernel: Kernel | None = copy.deepcopy(self.kernel)
            if is_shared:
                kernel = ScaleKernel(MaternKernel(1.5))
                kernel.base_kernel.lengthscale = X.shape[1] ** 0.5
            model = make(sample, min(self.num_inducing, len(sample)), covar_module=kernel).to(x)
            steps = int(np.clip(15 * len(X) / 1024, 100, 3000)) if self.steps is None else self.steps
            targets, seed = torch.as_tensor(y, device=x.device), self._seed % 2**16
            fit(model, model.likelihood, x, targets, steps=steps, seed=seed, progress=bool(self.verbose))
        self.model_, self.likelihood_ = model, model.likelihood
        return x

    def _scaled(self, X: np.ndarray) -> Tensor:
        return torch.as_tensor((X - self._mean) / self._std, dtype=self._dtype, device=self.device or "cpu")

    def _inputs(self, X: Any) -> Tensor:
        """Checked and scaled inputs of a prediction."""
        check_is_fitted(self)
        return self._scaled(validate_data(self, X, dtype=[np.float64, np.float32], reset=False))

    @property
    def relevance_(self) -> np.ndarray:
        """How much each input matters, by the inverse of its lengthscale, zero for a constant. The sum is one."""
        check_is_fitted(self)
        kernels = [part for part in self.model_.modules() if getattr(part, "has_lengthscale", False)]
        scales = [kernel.lengthscale.detach().flatten(0, -2).mean(0).expand(len(self._std)) for kernel in kernels]
        inverse = (1 / torch.stack(scales)).mean(0).double().cpu().numpy()  # [D]
        inverse = np.where(self._is_constant, 0.0, inverse)
        return inverse / inverse.sum()


class TighterGPRegressor(RegressorMixin, _TighterGP):
    """A sparse GP for regression, with predictions in the units of the target.

    Inputs and target are scaled, and the model starts from the data; leave them in their own units.

    :param num_inducing: Inducing points; at most as many as there are distinct rows.
    :param kernel: A kernel of GPyTorch for scaled inputs; default Matérn-3/2.
    :param steps: Training steps; default by the number of rows.
    :param neighbours: Training rows that a prediction looks at, where that is better; see :class:`~tighter_gp.NeighbourGP`.
    :param random_state: Seed of all that is random.
    :param device: Where to train and predict; default the CPU.
    :param verbose: Whether to show progress.

    Example:
        >>> from tighter_gp.estimators import TighterGPRegressor
        >>> X, y = train_x.numpy(), train_y.numpy()
        >>> regressor = TighterGPRegressor(num_inducing=8, steps=5).fit(X, y)
        >>> mean, std = regressor.predict(X, return_std=True)
        >>> low, high = regressor.predict_interval(X, coverage=0.9)
    """

    def __init__(
        self,
        num_inducing: int = 256,
        kernel: Kernel | None = None,
        steps: int | None = None,
        neighbours: int = 30,
        random_state: Any = 0,
        device: str | torch.device | None = None,
        verbose: int = 0,
    ) -> None:
        super().__init__(num_inducing, kernel, steps, random_state, device, verbose)
        self.neighbours = neighbours

    def fit(self, X: Any, y: Any) -> TighterGPRegressor:
        """Train on a table of inputs and a target, ``N x D`` and ``N``."""
        X, y = self._start(X, y, y_numeric=True)
        y = np.asarray(y, dtype=np.float64)
        self._y_mean, self._y_std = y.mean(), y.std() or 1.0
        y = (y - self._y_mean) / self._y_std
        x = self._train(X, y.astype(np.float64 if len(X) <= _SMALL else np.float32), Regression)
        if self.neighbours:
            targets = torch.as_tensor(y, dtype=x.dtype, device=x.device)
            self.model_ = NeighbourGP(self.model_, self.likelihood_, x, targets, self.neighbours, seed=self._seed)
            self.likelihood_ = self.model_.likelihood
        return self

    def _distribution(self, X: Any) -> PredictiveDistribution:
        x = self._inputs(X)
        return predict_y(self.model_, self.likelihood_, x)

    def _to_units(self, values: Tensor) -> np.ndarray:
        return values.double().cpu().numpy() * self._y_std + self._y_mean

    def predict(self, X: Any, return_std: bool = False) -> Any:
        """Mean of the target, and its standard deviation, noise included."""
        y = self._distribution(X)
        mean = self._to_units(y.mean)
        return (mean, y.stddev.double().cpu().numpy() * self._y_std) if return_std else mean

    def predict_interval(self, X: Any, coverage: float = 0.95) -> tuple[np.ndarray, np.ndarray]:
        """Lower and upper ends of central intervals that hold the target with some probability."""
        low, high = self._distribution(X).interval(coverage)
        return self._to_units(low), self._to_units(high)

    def sample_y(self, X: Any, n_samples: int = 1, random_state: Any = 0) -> np.ndarray:
        """Draws of the target, each point by itself, ``N x n_samples``."""
        mean, std = self.predict(X, return_std=True)
        draws = check_random_state(random_state).standard_normal((len(mean), n_samples))
        return mean[:, None] + std[:, None] * draws


class TighterGPClassifier(ClassifierMixin, _TighterGP):
    """A sparse GP for two classes, logistic, or more, softmax. Labels may be anything; parameters as above.

    Example:
        >>> from tighter_gp.estimators import TighterGPClassifier
        >>> X, labels = train_x.numpy(), ["low" if value < 0 else "high" for value in train_y]
        >>> TighterGPClassifier(num_inducing=8, steps=5).fit(X, labels).predict_proba(X).shape == (len(X), 2)
        True
    """

    def fit(self, X: Any, y: Any) -> TighterGPClassifier:
        """Train on a table of inputs and labels, ``N x D`` and ``N``."""
        X, y = self._start(X, y)
        check_classification_targets(y)
        self.classes_, labels = np.unique(y, return_inverse=True)
        if len(self.classes_) < 2:
            raise ValueError(f"A classifier needs two classes at least; y has one class, {self.classes_[0]!r}.")
        several = lambda *args, **kwargs: MultiClassification(len(self.classes_), *args, **kwargs)
        self._train(X, labels, BinaryClassification if len(self.classes_) == 2 else several)
        return self

    def predict_proba(self, X: Any) -> np.ndarray:
        """Probabilities of the classes, in the order of ``classes_``."""
        x = self._inputs(X)
        if len(self.classes_) == 2:
            positive = predict_y(self.model_, self.likelihood_, x).probs.double().cpu().numpy()
            return np.stack([1 - positive, positive], -1)
        f, generator = predict(self.model_, x), torch.Generator().manual_seed(0)
        draws = torch.randn(_DRAWS, 1, len(self.classes_), generator=generator).to(x)  # the same for every point
        chunks = zip(f.mean.split(1024), f.variance.split(1024), strict=True)
        probs = [torch.softmax(mean + variance.sqrt() * draws, -1).mean(0) for mean, variance in chunks]
        return torch.cat(probs).double().cpu().numpy()

    def predict(self, X: Any) -> np.ndarray:
        """The most probable labels."""
        best = self.predict_proba(X).argmax(-1)
        return self.classes_[best]


def _is_one_unit(X: np.ndarray, y: np.ndarray, std: np.ndarray, rng: np.random.Generator) -> bool:
    """Whether one scale serves many alike inputs better, as for pixels: by the error of the nearest of some rows."""
    if len(std) < 8 or np.median(std) < 0.1 * std.max():
        return False
    rows = rng.choice(len(X), min(len(X), 1000), replace=False)
    X, y, is_label = X[rows] - X[rows].mean(0), y[rows], y.dtype.kind == "i"

    def error(X: np.ndarray) -> float:
        squares = (X**2).sum(1)
        distance = squares[:, None] + squares - 2 * X @ X.T
        np.fill_diagonal(distance, np.inf)
        nearest = y[distance.argmin(1)]
        return float((nearest != y).mean() if is_label else ((nearest - y) ** 2).mean())

    return error(X) < 0.8 * error(X / std)
