"""One training loop for every model of this package."""

from __future__ import annotations

import itertools
import logging
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any, NoReturn

import numpy as np
import torch
from gpytorch.likelihoods import FixedNoiseGaussianLikelihood, Likelihood
from gpytorch.mlls import ExactMarginalLogLikelihood
from gpytorch.models import ExactGP
from linear_operator.utils.errors import NanError
from torch import Tensor

from ..checks import NUMERICAL_ERRORS, describe_hyperparameters, first_line
from ..compiled import CompiledStep
from ..mlls import TighterELBO
from ..modes import temporary_mode
from . import checkpoint as checkpoints
from . import distributed
from .batches import ArrayBatches, Batch, BatchSource, LoaderBatches, seed_of
from .optimizers import FullBatchLBFGS, Optimizers, make_schedule, natural_parameters, refuse_natural
from .validation import HeldOut, check_finite, held_out, mean_nlpd, try_out

log = logging.getLogger("tighter_gp")

_DEFAULT_EPOCHS, _DEFAULT_ITERATIONS = 100, 200

# What a checkpoint holds.
_PARTS = ("config", "finished", "total", "model", "likelihood", "optimizer", "history", "failures", "best", "callbacks")

# Torch has one random state for all threads: those that train take turns, step by step.
_RANDOM_STATE = threading.RLock()


@dataclass
class History:
    """What happened in a run of :func:`~tighter_gp.fit`.

    :param loss: Minus the objective at each step, an estimate of minus the bound per datum; NaN for a skipped step.
    :param validation: Step and mean negative log predictive density of each validation; NaN for one that failed.
    :param skipped: Step and reason of each step that was not taken.
    :param seconds: Time spent in steps; validation, callbacks and checkpoints are not counted.
    :param best_step: Step whose parameters were kept by early stopping.
    :param stopped: Why the run ended before its last step; empty if it did not.

    Example:
        >>> history = tighter_gp.fit(model, likelihood, train_x, train_y, steps=3)
        >>> history.steps, history.skipped, history.stopped
        (3, [], '')
    """

    loss: list[float] = field(default_factory=list)
    validation: list[tuple[int, float]] = field(default_factory=list)
    skipped: list[tuple[int, str]] = field(default_factory=list)
    seconds: float = 0.0
    best_step: int | None = None
    stopped: str = ""

    @property
    def steps(self) -> int:
        """Number of steps done, skipped ones included."""
        return len(self.loss)


@dataclass(frozen=True)
class Step:
    """What a callback of :func:`~tighter_gp.fit` is given after each step.

    :param step: Number of steps done.
    :param epoch: Number of epochs done.
    :param epoch_end: Whether this step ended an epoch.
    :param loss: Minus the objective; NaN if the step was skipped.
    :param model: The model, in training mode.
    :param likelihood: The likelihood.
    :param history: The history so far.

    Example:
        >>> seen = []
        >>> def remember(step):
        ...     seen.append(step.step)
        >>> history = tighter_gp.fit(model, likelihood, train_x, train_y, steps=3, callbacks=[remember])
        >>> seen
        [1, 2, 3]
    """

    step: int
    epoch: int
    epoch_end: bool
    loss: float
    model: Any
    likelihood: Any
    history: History


def fit(
    model: Any,
    likelihood: Likelihood,
    x: Tensor | np.ndarray | Any | None,
    y: Tensor | np.ndarray | None = None,
    *,
    objective: Callable[..., Any] = TighterELBO,
    epochs: int | None = None,
    steps: int | None = None,
    batch_size: int | None = 1024,
    lr: float = 0.01,
    schedule: str | Callable[[float], float] | None = "cosine",
    optimizer: str | None = None,
    natural_gradients: bool | float = False,
    validation: tuple[Tensor, Tensor] | tuple[Tensor, Tensor, dict[str, Any]] | None = None,
    validate_every: int | None = None,
    patience: int | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    checkpoint_every: int | None = None,
    resume: bool = False,
    seed: int = 0,
    callbacks: Sequence[Callable[[Step], bool | None]] = (),
    progress: bool | None = None,
    max_failures: int = 10,
    compile: bool = False,
    **kwargs: Any,
) -> History:
    r"""Train a model: mini-batches and Adam for an approximate GP, L-BFGS on all data for a collapsed one.

    Batches are drawn by index on the device of the data. The order of the batches and every random number of a step
    are functions of ``seed`` and the step, so that on a CPU two runs give the same numbers, and so does a run that was
    interrupted and resumed; the global random state is left as it was.

    A step whose Cholesky factorisation fails, or whose loss or gradient is not finite, is not taken: parameters and
    optimizer stay as they were, and the history and the log (``logging.getLogger("tighter_gp")``) say so. If the next
    step fails too, it was the last update that led astray: it is undone, and Adam starts anew from where it was with a
    quarter of the step, which grows back as steps succeed. After ``max_failures`` failures in a row, or if no step of the
    run succeeded, the error is raised. An iteration of L-BFGS that is interrupted leaves the parameters it started from.

    Within a process group (``torchrun``) each process takes its part of every batch and gradients are summed with the
    parts' weights: the run is that of one process, to rounding, but for the draws of an objective that samples. L-BFGS
    takes all data in each process. Give every process the same arguments.

    :param model: An :class:`~gpytorch.models.ApproximateGP`, a deep GP, or an :class:`~gpytorch.models.ExactGP` with a
        :class:`~tighter_gp.TighterInducingPointKernel`.
    :param likelihood: Its likelihood.
    :param x: Training inputs, ``N x D`` (``... x N x D`` for a batch of models): a tensor on the model's device, or a
        numpy array, perhaps memory-mapped and of any kind of number, of which only a batch is in memory at a time. Or a
        :class:`~torch.utils.data.DataLoader` that yields ``(x, y)`` or ``(x, y, index)``; the training points are those
        that its sampler visits, and :class:`~gpytorch.likelihoods.FixedNoiseGaussianLikelihood` needs the index. None
        for a latent-variable model, whose objective is called with the rows' positions in place of q(f).
    :param y: Training targets, ``N``, ``N x T`` or ``... x N``; None with a DataLoader. NaN and infinity are refused,
        in ``x`` too, but for NaN that means a missing observation.
    :param objective: ``objective(likelihood, model, num_data)`` makes the objective, to be maximised:
        :class:`~tighter_gp.TighterELBO`, :class:`~gpytorch.mlls.VariationalELBO` or a function. A collapsed model uses
        :class:`~gpytorch.mlls.ExactMarginalLogLikelihood`.
    :param epochs: Passes over the data; default 100.
    :param steps: Steps, instead of epochs; for L-BFGS iterations, at most, default 200.
    :param batch_size: Points a step, over all processes; None for all.
    :param lr: Learning rate of Adam at the start.
    :param schedule: How it falls: ``"cosine"`` to zero, ``"exponential"`` to a hundredth, ``"linear"`` to zero,
        ``"constant"``, or a function of the fraction of the run done that returns a factor.
    :param optimizer: ``"adam"`` or ``"lbfgs"``, which takes all data at once; default by model. Parameters with sparse
        gradients, such as those of :class:`~tighter_gp.PerPoint`, get :class:`~torch.optim.SparseAdam`. L-BFGS takes no
        q(u) in natural form.
    :param natural_gradients: Natural gradients for q(u), which must be in natural form: True (step size 0.1) or the step
        size. Adam trains the rest.
    :param validation: Held-out inputs and targets, tensors or arrays, whose mean negative log predictive density goes to
        the history, and if need be a dict of per-point arguments of the likelihood: ``(x, y, {"noise": noise})`` for
        :class:`~gpytorch.likelihoods.FixedNoiseGaussianLikelihood`. One that fails numerically is NaN and never the best.
    :param validate_every: Steps between validations; default an epoch.
    :param patience: Stop after this many validations in a row without a better one, and in any case end with the
        parameters of the best. None: never stop, end with the last.
    :param checkpoint: File to keep the state of the run in; at any moment it is whole.
    :param checkpoint_every: Steps between checkpoints; default an epoch, and at least 100. The end has one too.
    :param resume: Go on from ``checkpoint`` if it is there. A run that has ended, also one that a callback or early stopping
        ended, stays ended.
    :param seed: Seed of all that is random.
    :param callbacks: Each is called with a :class:`~tighter_gp.training.Step` after every step, and may return True to end
        the run. One with ``state_dict`` and ``load_state_dict`` has its state in the checkpoint.
    :param progress: Whether to show a progress bar; default in a terminal, if tqdm is installed.
    :param max_failures: Failed steps in a row before the error is raised.
    :param compile: Whether Adam's steps are compiled, see :class:`~tighter_gp.CompiledStep`. It takes seconds to
        minutes at the start, once for each shape of batch. A compiled step that fails is tried again eagerly.
    :param kwargs: Arguments of the objective; a tensor, such as ``noise=``, has one value a point, ``... x N``.
    :return: The history. The model is left in the mode it was in.

    Example:
        >>> history = tighter_gp.fit(model, likelihood, train_x, train_y, epochs=2, batch_size=32)
        >>> len(history.loss) == 2 * math.ceil(len(train_y) / 32)
        True
    """
    collapsed = isinstance(model, ExactGP)
    optimizer = optimizer or ("lbfgs" if collapsed else "adam")
    if optimizer not in ("adam", "lbfgs"):
        raise ValueError(f"Unknown optimizer {optimizer!r}; choose 'adam' or 'lbfgs'.")
    if epochs is not None and steps is not None:
        raise ValueError("Give epochs or steps, not both.")
    counts = {
        "epochs": epochs,
        "steps": steps,
        "patience": patience,
        "max_failures": max_failures,
        "validate_every": validate_every,
        "checkpoint_every": checkpoint_every,
    }
    for name, count in counts.items():
        if count is not None and count < 1:
            raise ValueError(f"{name} must be at least 1; got {count}.")
    if not 0 < lr < math.inf:
        raise ValueError(f"lr must be positive and finite; got {lr}.")
    if resume and checkpoint is None:
        raise ValueError("resume=True needs a checkpoint= to go on from.")
    if compile and (optimizer == "lbfgs" or x is None):
        raise ValueError("compile=True is for Adam's steps on an approximate GP.")
    if patience is not None and validation is None:
        raise ValueError("patience= needs held-out data: pass validation=(x, y).")
    if optimizer == "lbfgs":
        refuse_natural(model, natural_gradients)

    if collapsed or optimizer == "lbfgs":
        batch_size = None
    is_split = optimizer == "adam" and not collapsed
    source = _source(model, likelihood, x, y, batch_size, seed, is_split, kwargs)
    if collapsed and objective is TighterELBO:
        mll = ExactMarginalLogLikelihood(likelihood, model)
    else:
        mll = objective(likelihood, model, source.num_data)
    if steps is None:
        default = _DEFAULT_ITERATIONS if optimizer == "lbfgs" else _DEFAULT_EPOCHS
        steps = (default if epochs is None else epochs) * source.steps_per_epoch
    trainer = _Trainer(
        model=model,
        likelihood=likelihood,
        mll=mll,
        source=source,
        total=steps,
        seed=seed,
        max_failures=max_failures,
        validation=None if validation is None else held_out(likelihood, validation, source.like),
        validate_every=validate_every or source.steps_per_epoch,
        patience=patience,
        checkpoint=checkpoint,
        checkpoint_every=checkpoint_every or max(100, source.steps_per_epoch),
        callbacks=callbacks,
    )
    if optimizer == "lbfgs":
        step: _AdamStep | _LBFGSStep = _LBFGSStep(trainer)
    else:
        step = _AdamStep(trainer, lr, make_schedule(schedule), natural_gradients, compile)
    trainer.run(step, resume, _progress_bar(progress, steps))
    return trainer.history


def _source(
    model: Any,
    likelihood: Any,
    x: Any,
    y: Any,
    batch_size: int | None,
    seed: int,
    is_split: bool,
    kwargs: dict[str, Any],
) -> BatchSource:
    like = next(
        (p for p in itertools.chain(model.parameters(), likelihood.parameters()) if p.is_floating_point()), None
    )
    if like is None:
        raise ValueError("The model has no parameters to train.")
    if like.dtype not in (torch.float32, torch.float64):
        raise TypeError(
            f"fit needs a model in float32 or float64; got {like.dtype}. Convert it, such as model.float()."
        )
    fixed = likelihood.noise_covar.noise if isinstance(likelihood, FixedNoiseGaussianLikelihood) else None
    if x is not None and not isinstance(x, (Tensor, np.ndarray)):
        if not hasattr(x, "dataset"):
            raise TypeError(f"x must be a tensor, a numpy array or a DataLoader; got {type(x).__name__}.")
        if y is not None or kwargs or batch_size is None:
            raise ValueError(
                "A DataLoader brings its own targets and batches: leave y out, pass no per-point arguments, and use "
                "arrays for full-batch training."
            )
        return LoaderBatches(x, seed, like, fixed)
    if not isinstance(y, (Tensor, np.ndarray)):
        raise TypeError(f"y must be a tensor or a numpy array; got {type(y).__name__}.")
    for name, values in {"x": x, "y": y}.items():
        if isinstance(values, Tensor) and values.device != like.device:
            raise ValueError(f"{name} is on {values.device} and the model on {like.device}; move one to the other.")
    if isinstance(x, Tensor) and x.is_floating_point() and x.dtype != like.dtype:
        raise ValueError(f"x is {x.dtype} and the model {like.dtype}; convert one, such as x.to({like.dtype}).")
    if fixed is not None:
        kwargs = {"noise": fixed, **kwargs}
    # A latent-variable model takes NaN for a missing entry, and looks at its data itself; arrays are looked at in batches.
    if isinstance(x, Tensor):
        check_finite("x", x)
    if x is not None and isinstance(y, Tensor):
        check_finite("y", y, likelihood)
    return ArrayBatches(x, y, kwargs, batch_size, seed, like, is_split)


class _Trainer:
    """The parts of a run that do not depend on the optimizer."""

    def __init__(
        self,
        *,
        model: Any,
        likelihood: Any,
        mll: Any,
        source: BatchSource,
        total: int,
        seed: int,
        max_failures: int,
        validation: HeldOut | None,
        validate_every: int,
        patience: int | None,
        checkpoint: str | os.PathLike[str] | None,
        checkpoint_every: int,
        callbacks: Sequence[Callable[[Step], bool | None]],
    ) -> None:
        self.model, self.likelihood, self.mll, self.source = model, likelihood, mll, source
        self.total, self.seed, self.max_failures = total, seed, max_failures
        self.validation, self.validate_every, self.patience = validation, validate_every, patience
        self.checkpoint, self.checkpoint_every, self.callbacks = checkpoint, checkpoint_every, callbacks
        self.history, self.failures = History(), 0
        self.error: Exception | None = None
        self.best: dict[str, Any] | None = None
        self.parameters = {
            name: parameter
            for name, parameter in _named_parameters(model=model, likelihood=likelihood, objective=mll)
            if parameter.requires_grad
        }
        if not self.parameters:
            raise ValueError(
                "No parameter of the model, the likelihood or the objective requires a gradient; call requires_grad_() on those "
                "to train."
            )
        self.needs_index = any(getattr(module, "needs_index", False) for module in model.modules())
        self.device = next(iter(self.parameters.values())).device

    # -- one step -----------------------------------------------------------------------------------------------------

    def loss(self, batch: Batch) -> Tensor:
        """Minus the objective, summed over a batch of models."""
        if batch.x is None:
            return -self.mll(batch.rows, batch.y, **batch.kwargs).sum()
        if isinstance(self.model, ExactGP):
            return -self.mll(self.model(batch.x), batch.y).sum()
        return -self.mll(self.model(batch.x, **self.positions(batch)), batch.y, **batch.kwargs).sum()

    def positions(self, batch: Batch) -> dict[str, Tensor]:
        """The argument of the model that says which training points these are, if a conditional needs it."""
        if not self.needs_index:
            return {}
        if batch.rows is None:
            raise ValueError("PerPoint and Blocks need positions: let the DataLoader yield (x, y, index).")
        return {"index": batch.rows}

    def seed_step(self, step: int) -> None:
        """Random numbers of a step, other ones in each process."""
        seed = seed_of(self.seed, step, distributed.rank())
        # torch.manual_seed would seed every kind of device, and walks the stack for those that are not there.
        torch.default_generator.manual_seed(seed)
        if self.device.type == "cuda":
            with torch.cuda.device(self.device):
                torch.cuda.manual_seed(seed)

    def failed(self, error: Exception, undo: Callable[[], bool] | None = None) -> None:
        """Note a step that was not taken, undo the last update if it is the second in a row; raise if there were too many.

        :param undo: Undoes the last update, if there is one, and says whether it did.
        """
        reason = first_line(error)
        self.failures, self.error = self.failures + 1, error
        if self.failures == 2 and undo is not None and undo():
            reason += " The last update was undone."
        step = self.history.steps
        self.history.skipped.append((step, reason))
        log.warning("step %d was skipped: %s", step, reason)
        if self.failures >= self.max_failures:
            self._give_up()

    def _give_up(self) -> NoReturn:
        unsaid = [self.likelihood] if "Hyperparameters: " in str(self.error) else [self.model, self.likelihood]
        raise RuntimeError(
            f"{self.failures} steps in a row failed, the last, step {self.history.skipped[-1][0]}, with: {self.error} "
            f"Hyperparameters: {describe_hyperparameters(*unsaid)}. The parameters are the last for which a step "
            "succeeded. A smaller lr, scaled data or float64 may help."
        ) from self.error

    # -- the run ------------------------------------------------------------------------------------------------------

    @contextmanager
    def _own_random_state(self) -> Iterator[None]:
        """To be seeded at will: the global state is found again as it was, and no other thread seeds it meanwhile."""
        devices = [self.device] if self.device.type == "cuda" else []
        with _RANDOM_STATE, torch.random.fork_rng(devices=devices):
            yield

    @contextmanager
    def _own_generators(self) -> Iterator[None]:
        """The same for generators of the batches, over the whole run."""
        states = [(generator, generator.get_state()) for generator in self.source.generators]
        try:
            yield
        finally:
            for generator, state in states:
                generator.set_state(state)

    def run(self, step: _AdamStep | _LBFGSStep, resume: bool, bar: Any) -> None:
        with (
            temporary_mode(self.model, True),
            temporary_mode(self.likelihood, True),
            self._own_generators(),
            bar,
        ):
            if self.checkpoint is not None:
                checkpoints.check_path(self.checkpoint, self.device)
            finished = self._restore(step) if resume else False
            if self.history.steps == 0:
                self._initialise()
            distributed.share_state([self.model, self.likelihood])
            bar.update(self.history.steps)
            if not finished:
                self._try_validation()
                self._loop(step, bar)
            if self.best is not None:
                self.model.load_state_dict(self.best["model"])
                self.likelihood.load_state_dict(self.best["likelihood"])
            self._save(step, finished=True)

    def _loop(self, step: _AdamStep | _LBFGSStep, bar: Any) -> None:
        batches = iter(self.source.iterate(self.history.steps))
        stop = False
        while not stop and self.history.steps < self.total:
            with self._own_random_state():
                batch = next(batches)
                stop = self._next_step(step, batch, bar)
                if stop or self.history.steps == self.total:
                    step.settle(batch)
            if stop or self.history.steps % self.checkpoint_every == 0:
                self._save(step, finished=stop)
        if self.error is not None and self.failures == self.history.steps:
            self._give_up()
        if stop:
            self.history.stopped = self.history.stopped or step.converged

    def _next_step(self, step: _AdamStep | _LBFGSStep, batch: Batch, bar: Any) -> bool:
        """One step and what follows it; whether the run should end."""
        history = self.history
        self.seed_step(history.steps)
        started = time.perf_counter()
        loss = step(batch)
        history.seconds += time.perf_counter() - started
        history.loss.append(loss)
        bar.update(1)
        if history.steps % 10 == 0:
            bar.set_postfix_str(f"loss {loss:.4f}", refresh=False)
        return self._after_step(loss) or bool(step.converged)

    def _after_step(self, loss: float) -> bool:
        """Validation and callbacks; whether the run should end."""
        history = self.history
        done, stop = history.steps, False
        if self.validation is not None and (done % self.validate_every == 0 or done == self.total):
            stop = distributed.agreed(self._validate(), self.device)
            if stop:
                history.stopped = f"no better validation in {self.patience}"
        epoch, rest = divmod(done, self.source.steps_per_epoch)
        state = Step(done, epoch, rest == 0, loss, self.model, self.likelihood, history)
        for callback in self.callbacks:
            if distributed.agreed(bool(callback(state)), self.device):
                history.stopped, stop = history.stopped or "a callback asked for it", True
        return stop

    def _validate(self) -> bool:
        history, score = self.history, self._score()
        history.validation.append((history.steps, score))
        if self.patience is None:
            return False
        if math.isfinite(score) and (self.best is None or score < self.best["score"]):
            self.best = {"score": score, "step": history.steps, **self._copy()}
            history.best_step = history.steps
        best_step = 0 if self.best is None else self.best["step"]
        return sum(step > best_step for step, _ in history.validation) >= self.patience

    def _score(self) -> float:
        assert self.validation is not None
        x, y, kwargs = self.validation
        try:
            return mean_nlpd(self.model, self.likelihood, x, y, **kwargs)
        except NUMERICAL_ERRORS as error:
            log.warning("the validation after %d steps failed: %s", self.history.steps, error)
            return math.nan

    def _try_validation(self) -> None:
        if self.validation is not None:
            with self._own_random_state():
                self.seed_step(-1)
                try_out(self.model, self.likelihood, self.validation)

    def _copy(self) -> dict[str, Any]:
        return {
            name: {key: value.detach().clone() for key, value in module.state_dict().items()}
            for name, module in {"model": self.model, "likelihood": self.likelihood}.items()
        }

    def _initialise(self) -> None:
        """GPyTorch sets q(u) at the first call, with a little noise: do it here, once for all processes."""
        with torch.no_grad(), self._own_random_state():
            self.seed_step(-1)
            batch = next(iter(self.source.iterate(0)))
            try:
                self.loss(batch)
            except NUMERICAL_ERRORS as error:
                log.debug("the first call failed: %s", error)  # the first step will fail too, and say so

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def _config(self, step: _AdamStep | _LBFGSStep) -> dict[str, Any]:
        return {
            "optimizer": step.kind,
            "seed": self.seed,
            "num_data": self.source.num_data,
            "batch_size": self.source.batch_size,
            "parameters": {name: list(parameter.shape) for name, parameter in self.parameters.items()},
        }

    def _save(self, step: _AdamStep | _LBFGSStep, finished: bool) -> None:
        if self.checkpoint is None:
            return
        checkpoints.save(
            self.checkpoint,
            {
                "config": self._config(step),
                "finished": finished,
                "total": self.total,
                "model": self.model.state_dict(),
                "likelihood": self.likelihood.state_dict(),
                "optimizer": step.state_dict(),
                "history": asdict(self.history),
                "failures": self.failures,
                "best": self.best,
                "callbacks": [c.state_dict() if hasattr(c, "state_dict") else None for c in self.callbacks],
            },
        )

    def _restore(self, step: _AdamStep | _LBFGSStep) -> bool:
        """Take over a checkpoint, if there is one; whether the run was finished."""
        assert self.checkpoint is not None
        state = checkpoints.load(self.checkpoint, self.device)
        if state is None:
            return False
        missing = [name for name in _PARTS if name not in state]
        if missing:
            raise ValueError(
                f"{self.checkpoint} is not a checkpoint of fit: it has no {', '.join(missing)}. Delete it or use another path."
            )
        config = self._config(step)
        # The first checkpoints did not say which optimizer.
        then = {"optimizer": step.kind, **state["config"]}
        different = [
            f"{name} was {then.get(name)} and is {config[name]}"
            for name in ("optimizer", "seed", "num_data", "batch_size")
            if then.get(name) != config[name]
        ]
        if then.get("parameters") != config["parameters"]:
            different.append("the model's parameters have other names or shapes")
        if different:
            raise ValueError(
                f"{self.checkpoint} belongs to another run: {'; '.join(different)}. Delete it or use another path."
            )
        self.model.load_state_dict(state["model"])
        self.likelihood.load_state_dict(state["likelihood"])
        step.load_state_dict(state["optimizer"])
        saved = state["history"]
        saved["validation"] = [tuple(entry) for entry in saved["validation"]]
        saved["skipped"] = [tuple(entry) for entry in saved["skipped"]]
        self.history.__dict__.update(saved)
        self.failures, self.best = state["failures"], state["best"]
        for callback, callback_state in zip(self.callbacks, state["callbacks"], strict=False):
            if callback_state is not None and hasattr(callback, "load_state_dict"):
                callback.load_state_dict(callback_state)
        # A run that was asked for more steps than before goes on.
        return bool(state["finished"]) and (self.total <= state["total"] or bool(self.history.stopped))


class _AdamStep:
    """A step of Adam, SparseAdam and natural gradients."""

    kind = "adam"
    converged = ""

    def __init__(
        self,
        trainer: _Trainer,
        lr: float,
        schedule: Callable[[float], float],
        natural_gradients: bool | float,
        compile: bool,
    ) -> None:
        self.trainer, self.schedule = trainer, schedule
        self.compiled = CompiledStep(trainer.mll) if compile else None
        natural = natural_parameters(trainer.model, natural_gradients)
        self._make = lambda sparse: Optimizers(
            trainer.parameters, sparse, natural, lr, natural_gradients, trainer.source.num_data
        )
        self.optimizers: Optimizers | None = None
        # What the last update started from, of tables with sparse gradients the rows it touched, and the factor on the
        # step that failures lower and successes raise.
        self.before: dict[str, Tensor] = {}
        self.rows: dict[str, tuple[Tensor, Tensor]] = {}
        self.damping = 1.0

    def __call__(self, batch: Batch) -> float:
        trainer = self.trainer
        parameters = list(trainer.parameters.values())
        for parameter in parameters:
            parameter.grad = None
        loss, error = self._backward(batch)
        joined, num_failed = distributed.sum_gradients(parameters, loss)
        for parameter in parameters:
            if parameter.grad is not None and parameter.grad.is_sparse:
                parameter.grad = parameter.grad.coalesce()  # once, for all that ask for its rows
        value, largest = (math.nan, {}) if joined is None else _read(joined, trainer.parameters)
        if not all(map(math.isfinite, (value, *largest.values()))):
            for parameter in parameters:
                parameter.grad = None
            if num_failed:
                error = error or NanError(f"{num_failed} of {distributed.world_size()} processes failed")
            trainer.failed(error or NanError(f"the loss is {value} or its gradient is not finite."), self._undo)
            distributed.share_state([trainer.model, trainer.likelihood])
            return math.nan
        trainer.failures = 0
        if self.optimizers is None:
            self.optimizers = self._make(
                {name for name, p in trainer.parameters.items() if p.grad is not None and p.grad.is_sparse}
            )
        self._keep()
        self.optimizers.scale_down(largest)
        self.optimizers.step(self.schedule(trainer.history.steps / trainer.total), self.damping)
        self.damping = min(1.0, 1.1 * self.damping)
        return value

    @torch.no_grad()
    def settle(self, batch: Batch) -> None:
        """Undo the last update of a run if the bound cannot be computed after it: no further step would notice."""
        trainer, reason = self.trainer, "the bound is not finite."
        trainer.seed_step(trainer.history.steps)
        try:
            usable = bool(torch.isfinite(trainer.loss(batch)).all())
        except NUMERICAL_ERRORS as error:
            usable, reason = False, first_line(error)
        if distributed.total(float(not usable), trainer.device) and self._undo():
            reason += " The last update was undone."
            trainer.history.skipped.append((trainer.history.steps - 1, reason))
            log.warning("after the last step: %s", reason)

    def _keep(self) -> None:
        """Remember the parameters; of tables with sparse gradients the rows that the step will touch."""
        assert self.optimizers is not None
        self.rows = {}
        for name in self.optimizers.sparse:
            table = self.trainer.parameters[name]
            if table.grad is not None:
                rows = table.grad.indices()
                self.rows[name] = rows, table.data[tuple(rows)]
        kept = {name: p.data for name, p in self.trainer.parameters.items() if name not in self.optimizers.sparse}
        if self.before.keys() != kept.keys():
            self.before = {name: torch.empty_like(value) for name, value in kept.items()}
        torch._foreach_copy_(list(self.before.values()), list(kept.values()))

    def _undo(self) -> bool:
        if not self.before and not self.rows:
            return False
        with torch.no_grad():
            for name, value in self.before.items():
                self.trainer.parameters[name].copy_(value)
            for name, (rows, value) in self.rows.items():
                self.trainer.parameters[name][tuple(rows)] = value
        # Moments that hold the gradients that led astray would lead there again.
        self.optimizers, self.before, self.rows, self.damping = None, {}, {}, 0.25 * self.damping
        return True

    def _backward(self, batch: Batch) -> tuple[Tensor | None, Exception | None]:
        if self.compiled is not None:
            assert batch.x is not None
            loss = self.compiled(batch.x, batch.y, **self.trainer.positions(batch), **batch.kwargs).sum()
            if bool(torch.isfinite(loss)):
                for parameter in self.trainer.parameters.values():
                    if batch.weight != 1.0 and parameter.grad is not None:
                        parameter.grad.mul_(batch.weight)
                return loss * batch.weight, None
            self.trainer.mll.zero_grad(set_to_none=True)
        try:
            loss = self.trainer.loss(batch)
            if batch.weight != 1.0:
                loss = loss * batch.weight
            loss.backward()
        except NUMERICAL_ERRORS as error:
            return None, error
        return loss.detach(), None

    def state_dict(self) -> dict[str, Any]:
        optimizers = None if self.optimizers is None else self.optimizers.state_dict()
        return {"optimizers": optimizers, "before": self.before, "rows": self.rows, "damping": self.damping}

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        if state is None:
            return
        self.before, self.damping = dict(state["before"]), state["damping"]
        self.rows = dict(state.get("rows", {}))  # which the first checkpoints did not have
        if state["optimizers"] is not None:
            self.optimizers = self._make(set(state["optimizers"]["sparse"]))
            self.optimizers.load_state_dict(state["optimizers"])


class _LBFGSStep:
    """An iteration of L-BFGS on all data."""

    kind = "lbfgs"

    def __init__(self, trainer: _Trainer) -> None:
        self.trainer, self.converged, self.quiet = trainer, "", 0
        self.lbfgs: FullBatchLBFGS | None = None
        self.saved: dict[str, Any] | None = None

    def __call__(self, batch: Batch) -> float:
        trainer = self.trainer
        if self.lbfgs is None:
            self.lbfgs = self._start(batch)
        lbfgs, before = self.lbfgs, self.lbfgs.loss
        try:
            loss, moved = lbfgs.step()
        except (*NUMERICAL_ERRORS, FloatingPointError) as error:
            trainer.failed(error)
            self.lbfgs = None
            return math.nan
        if lbfgs.error is not None and not moved:
            trainer.failed(lbfgs.error)
            self.lbfgs = None  # forget the curvature that led there
            return loss
        trainer.failures = 0
        self.quiet = self.quiet + 1 if abs(before - loss) <= 1e-9 * max(1.0, abs(loss)) else 0
        if not moved or self.quiet >= 3:
            self.converged = "converged"
        return loss

    def settle(self, batch: Batch) -> None:
        """Nothing: the objective was computed wherever a line search ends."""

    def _start(self, batch: Batch) -> FullBatchLBFGS:
        trainer = self.trainer

        def evaluate() -> Tensor:
            trainer.seed_step(-2)  # a sampled objective must be the same at every trial point
            loss = trainer.loss(batch)
            loss.backward()
            return loss

        lbfgs = FullBatchLBFGS(list(trainer.parameters.values()), evaluate, NUMERICAL_ERRORS)
        if self.saved is not None:
            lbfgs.load_state_dict(self.saved["lbfgs"])
            lbfgs.loss, self.saved = self.saved["loss"], None
        return lbfgs

    def state_dict(self) -> dict[str, Any] | None:
        if self.lbfgs is None:
            return None
        return {"lbfgs": self.lbfgs.state_dict(), "loss": self.lbfgs.loss, "quiet": self.quiet}

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        if state is not None:
            self.saved, self.quiet = state, state["quiet"]


def _named_parameters(**modules: Any) -> Iterator[tuple[str, Tensor]]:
    seen: set[int] = set()
    for prefix, module in modules.items():
        if isinstance(module, torch.nn.Module):
            for name, parameter in module.named_parameters():
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    yield f"{prefix}.{name}", parameter


def _read(loss: Tensor, parameters: Mapping[str, Tensor]) -> tuple[float, dict[str, float]]:
    """The loss, and the largest entry of every gradient: one read from the device."""
    largest = {
        name: torch.linalg.vector_norm(grad.values() if grad.is_sparse else grad, math.inf).double()
        for name, grad in ((name, parameter.grad) for name, parameter in parameters.items())
        if grad is not None and grad.numel()
    }
    value, *norms = torch.stack([loss.double(), *largest.values()]).tolist()
    return value, dict(zip(largest, norms, strict=True))


def _progress_bar(progress: bool | None, total: int) -> Any:
    if progress is False or distributed.rank() != 0 or (progress is None and not sys.stderr.isatty()):
        return _Bar(None)
    try:
        from tqdm import tqdm
    except ImportError:
        if progress:
            raise ImportError("progress=True needs tqdm: pip install tqdm.") from None
        return _Bar(None)
    return _Bar(tqdm(total=total, unit="step", leave=False, dynamic_ncols=True))


class _Bar:
    """A progress bar, or none."""

    def __init__(self, bar: Any) -> None:
        self.bar = bar

    def __enter__(self) -> _Bar:
        return self

    def __exit__(self, *error: Any) -> None:
        if self.bar is not None:
            self.bar.close()

    def update(self, count: int) -> None:
        if self.bar is not None:
            self.bar.update(count)

    def set_postfix_str(self, text: str, refresh: bool = True) -> None:
        if self.bar is not None:
            self.bar.set_postfix_str(text, refresh)
