"""One way to train every model of this package: what :func:`tighter_gp.fit` is asked, and who does it."""

from __future__ import annotations

import logging
import math
import operator
import os
from collections.abc import Callable, Sequence
from numbers import Integral
from typing import Any

import numpy as np
import torch
from gpytorch.likelihoods import GaussianLikelihood, Likelihood
from torch import Tensor

from ..checks import describe_hyperparameters
from ..likelihoods.targets import check_arguments
from ..mlls import TighterELBO
from ..strategies import TighterStrategy
from . import distributed
from .advice import say_how_inputs_spread, say_how_targets_spread
from .checkpoint import plain
from .compiling import compile_pays
from .constraints import enforced_constraints
from .guard import Guard
from .history import History, Step
from .initialization import initialize as start_from_data
from .natural_steps import NaturalStep, refusal
from .optimizers import Optimizers, make_schedule, refuse_adam, refuse_natural
from .problem import Problem
from .progress import Progress
from .recipe import Recipe
from .run import Plan, train
from .sources import is_collapsed, make_objective, make_source, reference
from .steps import AdamStep, LBFGSStep
from .steps import Step as KindOfStep
from .structure import describe, describe_schedule
from .validation import held_out_data

_DEFAULT_EPOCHS, _DEFAULT_ITERATIONS = 100, 200

_MOST_VALIDATIONS = 50  # of a run whose validate_every is not given

# Jitter over noise from which on fit says so.
_DEAR_JITTER = 0.1

# Values that ask for nothing.
_DEFAULTS = {"lr": (None,), "schedule": ("recipe",), "batch_size": (1024, None)}

# Learning rate of Adam for q(u), and for parameters that are none of a GP.
_ADAM_LR = 0.01

log = logging.getLogger("tighter_gp")


def fit(
    model: Any,
    likelihood: Likelihood,
    x: Tensor | np.ndarray | Any | None = None,
    y: Tensor | np.ndarray | None = None,
    *,
    objective: Callable[..., Any] = TighterELBO,
    epochs: int | None = None,
    steps: int | None = None,
    batch_size: int | None = 1024,
    lr: float | None = None,
    schedule: str | Callable[[float], float] | None = "recipe",
    optimizer: str | None = None,
    natural_gradients: bool | float | None = None,
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
    compile: bool | str = "auto",
    initialize: bool = False,
    num_data: int | None = None,
    **kwargs: Any,
) -> History:
    r"""Train a model: natural gradients for q(u) and Adam for the rest on mini-batches, L-BFGS for a collapsed model.

    With nothing else given the step sizes are those of :class:`~tighter_gp.training.recipe.Recipe`, chosen by experiment:
    q(u) is moved first on each batch, in closed form, and the gradients of the rest are taken at the new q(u) with the same
    projection.

    Batches are drawn by index on the device of the data. The order of the batches and every random number of a step
    are functions of ``seed`` and the step, so that on a CPU two runs give the same numbers, and so does a run that was
    interrupted and resumed; the global random state is left as it was.

    A step whose Cholesky factorisation fails, or whose loss or gradient is not finite, is not taken: parameters and
    optimizer stay as they were, and the history and the log (``logging.getLogger("tighter_gp")``) say so. If the next
    step fails too, it was the last update that led astray: it is undone, and Adam starts anew from where it was with a
    quarter of the step, which grows back as steps succeed. After ``max_failures`` failures in a row, or if no step of the
    run succeeded, the error is raised. An iteration of L-BFGS that is interrupted leaves the parameters it started from.

    Under ``torchrun``, or within a process group of your own, each process takes its part of every batch and gradients
    are summed with the parts' weights: the run is that of one process, to rounding, but for the draws of an objective
    that samples. Without a group ``fit`` starts one, and ends it. L-BFGS takes all data in each process. Give every
    process the same arguments; different data are refused. Only the first process writes.

    While it runs there is a progress bar in a terminal, or a line per tenth of the run in the log, at level ``INFO``; at
    the end a line with steps, seconds and scores. Ctrl-C writes a checkpoint, if there is a path for one, before the
    ``KeyboardInterrupt`` continues.

    :param model: An :class:`~gpytorch.models.ApproximateGP`, a deep GP, an :class:`~gpytorch.models.ExactGP` with a
        :class:`~tighter_gp.TighterInducingPointKernel`, or a :class:`~tighter_gp.CollapsedGP`.
    :param likelihood: Its likelihood.
    :param x: Training inputs, ``N x D`` (``... x N x D`` for a batch of models; ``N`` is ``N x 1``): a tensor on the
        model's device, or a numpy array, perhaps memory-mapped and of any kind of number, of which only a batch is in
        memory at a time. Or a :class:`~torch.utils.data.DataLoader` that yields ``(x, y)`` or ``(x, y, index)``; the
        training points are those that its sampler visits, and :class:`~gpytorch.likelihoods.FixedNoiseGaussianLikelihood`,
        :class:`~tighter_gp.PerPoint` and :class:`~tighter_gp.Blocks` alone look at the index. For a run that is to resume bit
        for bit, ``persistent_workers=True`` needs a sampler with a generator of its own. None for a latent-variable model,
        whose objective is called with the rows' positions in place of q(f). A collapsed model has its data: leave out
        ``x`` and ``y``, or give the same.
    :param y: Training targets, ``N``, ``N x T`` or ``... x N``; None with a DataLoader. NaN and infinity are refused,
        in ``x`` too, but for NaN that means a missing observation; so are labels and counts that the likelihood cannot
        produce.
    :param objective: ``objective(likelihood, model, num_data)`` makes the objective, to be maximised: by default
        :class:`~tighter_gp.TighterELBO`, for a latent-variable model :class:`~tighter_gp.gplvm.LatentVariableELBO`; or
        :class:`~gpytorch.mlls.VariationalELBO` or a function. A collapsed model uses
        :class:`~gpytorch.mlls.ExactMarginalLogLikelihood`, or its own bound. Its own parameters are trained too.
    :param epochs: Passes over the data; default 100.
    :param steps: Steps, instead of epochs; for L-BFGS iterations, at most, default 200.
    :param batch_size: Points per step, over all processes, at most: an epoch is cut evenly. A short last batch of a DataLoader
        counts by its share. None for all. L-BFGS and collapsed models take all.
    :param lr: Learning rate of Adam. Default 0.2 for the hyperparameters beside natural gradients, a quarter of it for
        inducing points, and 0.01 for what is no part of a GP, such as a network's weights; without natural gradients 0.01
        for all.
    :param schedule: How it falls: ``"recipe"`` (with natural gradients constant, then linear to zero over the last half;
        else as a cosine), ``"cosine"`` to zero, ``"exponential"`` to a hundredth, ``"linear"`` to zero, ``"constant"``, or
        a function of the fraction of the run done that returns a factor.
    :param optimizer: ``"adam"`` or ``"lbfgs"``, which takes all data at once; default by model. Parameters with sparse
        gradients, such as those of :class:`~tighter_gp.PerPoint`, get :class:`~torch.optim.SparseAdam`. L-BFGS takes no
        q(u) in natural form.
    :param natural_gradients: Natural gradients for q(u) in closed form, with Adam for the rest: default wherever q(u) is
        Gaussian, in any form, and the objective an evidence lower bound. A number is the size of their step, in place
        of the recipe's, see :class:`~tighter_gp.training.recipe.Recipe`. False: Adam for all.
    :param validation: Held-out inputs and targets, tensors or arrays, whose mean negative log predictive density per point,
        ``-predict_y(...).log_prob(y).nanmean()``, goes to the history, and if need be a dict of per-point arguments of the
        likelihood: ``(x, y, {"noise": noise})`` for :class:`~gpytorch.likelihoods.FixedNoiseGaussianLikelihood`. One that
        fails numerically is NaN and never the best.
    :param validate_every: Steps between validations; default an epoch, or a fiftieth of the run where that is longer.
    :param patience: After this many validations in a row without a better one the run comes to its end: where the learning
        rate is still to fall, it does so over as many steps as have been taken, since much of the gain comes then, and
        where it has, the run stops. In any case it ends with the parameters of the best. None: never stop, end with the last.
    :param checkpoint: File to keep the state of the run in; at any moment it is whole.
    :param checkpoint_every: Steps between checkpoints; default an epoch, and at least 100. The end has one too.
    :param resume: Continue from ``checkpoint`` if it is there. It must be of the same model, settings and data, but for the
        number of steps. A run that has ended, also one that a callback or early stopping ended, stays ended.
    :param seed: Seed of all that is random.
    :param callbacks: Each is called with a :class:`~tighter_gp.training.Step` after every step, and may return ``True``, and
        nothing else, to end the run. One with ``state_dict`` and ``load_state_dict`` has its state in the checkpoint.
    :param progress: Whether to show a progress bar; default in a terminal, if tqdm is installed. False: nor lines in the
        log, but for the last.
    :param max_failures: Failed steps in a row before the error is raised.
    :param compile: Whether steps are compiled, with their natural gradients, see :class:`~tighter_gp.CompiledStep`. It takes
        some ten seconds at the start, twice if batches have two sizes, and two where the same model has been compiled before,
        in any process. The short last batch of a DataLoader is taken eagerly, and so is a step that fails. By default natural
        gradients on a CPU are compiled if the run is long enough for it to pay, by a rule of shapes and steps alone; the log
        says so.
    :param initialize: Whether to start from the data, see :func:`~tighter_gp.initialize`; not where a run is resumed.
    :param num_data: Number of training points, for a DataLoader whose sampler or dataset cannot tell.
    :param kwargs: Per-point arguments of the likelihood or the objective; a tensor or array, such as ``noise=``, has one
        value per point, ``... x N``.
    :return: The history. The model is left in the mode it was in.

    Example:
        >>> history = tighter_gp.fit(model, likelihood, train_x, train_y, epochs=2, batch_size=32)
        >>> len(history.loss) == 2 * math.ceil(len(train_y) / 32)
        True
    """
    like, collapsed = reference(model, likelihood), is_collapsed(model)
    # Numbers of numpy, as of a sweep, are none for a checkpoint.
    lr, seed = None if lr is None else float(lr), operator.index(seed)
    if not isinstance(natural_gradients, bool | None):
        natural_gradients = plain(natural_gradients)
    optimizer = optimizer or ("lbfgs" if collapsed else "adam")
    if not isinstance(optimizer, str):
        raise TypeError(
            f"optimizer= is a name, 'adam' or 'lbfgs'; got {type(optimizer).__name__}. See lr= and schedule=."
        )
    if optimizer not in ("adam", "lbfgs"):
        raise ValueError(f"Unknown optimizer {optimizer!r}; choose 'adam' or 'lbfgs'.")
    if not isinstance(callbacks, Sequence) or not all(map(callable, callbacks)):
        raise TypeError(
            f"callbacks= is a list of functions; got {type(callbacks).__name__}. Pass one as callbacks=[function]."
        )
    if epochs is not None and steps is not None:
        raise ValueError("Give epochs or steps, not both.")
    counts = {
        "epochs": epochs,
        "steps": steps,
        "patience": patience,
        "max_failures": max_failures,
        "validate_every": validate_every,
        "checkpoint_every": checkpoint_every,
        "num_data": num_data,
        "batch_size": batch_size,
    }
    for name, count in counts.items():
        if count is not None and (not isinstance(count, Integral) or isinstance(count, bool)):
            raise TypeError(f"{name} must be a whole number; got {count!r}.")
        if count is not None and count < 1:
            raise ValueError(f"{name} must be at least 1; got {count}.")
    numbers: Any = (None if count is None else int(count) for count in counts.values())
    epochs, steps, patience, max_failures, validate_every, checkpoint_every, num_data, batch_size = numbers
    if not torch.is_grad_enabled():
        raise RuntimeError("fit needs gradients: call it outside of torch.no_grad() and torch.inference_mode().")
    if lr is not None and not 0 < lr < math.inf:
        raise ValueError(f"lr must be positive and finite; got {lr}.")
    if resume and checkpoint is None:
        raise ValueError("resume=True needs a checkpoint= to continue from.")
    if compile not in (True, False, "auto"):
        raise ValueError(f"compile must be True, False or 'auto'; got {compile!r}.")
    if compile is True and (optimizer == "lbfgs" or collapsed or x is None):
        raise ValueError("compile=True is for Adam's steps on an approximate GP.")
    if patience is not None and validation is None:
        raise ValueError("patience= needs held-out data: pass validation=(x, y).")
    if optimizer == "lbfgs":
        refuse_natural(model, natural_gradients)
        if x is None and not collapsed:
            raise ValueError(
                "L-BFGS needs an objective without draws, and that of a latent-variable model draws x: use Adam, or train a "
                "CollapsedBayesianGPLVM with torch.optim.LBFGS."
            )
    is_size = natural_gradients is not None and not isinstance(natural_gradients, bool)
    if is_size and not 0 < float(natural_gradients) <= 1:  # type: ignore[arg-type]
        raise ValueError(f"natural_gradients= is the size of a step, above 0 and at most 1; got {natural_gradients}.")
    is_loader = hasattr(x, "dataset")
    _say_what_is_unused(optimizer, collapsed, is_loader, lr=lr, schedule=schedule, batch_size=batch_size)
    if collapsed or is_loader:
        for name in kwargs:  # neither has a place for them
            raise TypeError(
                f"Got an unknown argument {name!r}: a {type(model if collapsed else x).__name__} takes none."
            )

    if initialize:
        if not isinstance(x, (Tensor, np.ndarray)) or not isinstance(y, (Tensor, np.ndarray)):
            raise ValueError(
                "initialize=True needs x and y as tensors or arrays. Before fit, with some rows of the data, call "
                "tighter_gp.initialize(model, likelihood, some_x, some_y)."
            )
        if not (resume and os.path.exists(checkpoint or "")):
            start_from_data(model, likelihood, x, y, seed=seed)
    with enforced_constraints(model, likelihood), distributed.group(like.device):
        source = make_source(
            model,
            likelihood,
            x,
            y,
            batch_size=None if collapsed or optimizer == "lbfgs" else batch_size,
            seed=seed,
            is_split=optimizer == "adam" and not collapsed,
            num_data=num_data,
        )
        mll = make_objective(model, likelihood, objective, source.num_data)
        if objective is None and x is not None:
            check_arguments(likelihood, kwargs)
        source.add_arguments(kwargs)
        say_how_targets_spread(likelihood, source)
        say_how_inputs_spread(model, source)
        _say_what_stays(model, likelihood, kwargs)
        # A look at all data, where somebody compares them.
        is_compared = checkpoint is not None or distributed.is_active()
        fingerprint = source.fingerprint() if is_compared else b""
        distributed.check_same(fingerprint, like.device)
        if steps is None:
            default = _DEFAULT_ITERATIONS if optimizer == "lbfgs" else _DEFAULT_EPOCHS
            steps = (default if epochs is None else epochs) * source.steps_per_epoch
        problem = Problem(model, likelihood, mll, source.num_data, seed)
        batch = source.batch_size or -(-source.num_data // source.steps_per_epoch)
        if compile == "auto" and (x is None or not compile_pays(problem, steps, batch)):
            compile = False
        step, settings = _make_step(problem, optimizer, lr, schedule, natural_gradients, compile, batch)
        held_out = None if validation is None else held_out_data(likelihood, validation, like)
        plan = Plan(
            total=steps,
            validation=held_out,
            validate_every=validate_every or max(source.steps_per_epoch, steps // _MOST_VALIDATIONS),
            patience=patience,
            falls=optimizer == "adam" and schedule not in (None, "constant"),
            checkpoint=checkpoint,
            checkpoint_every=checkpoint_every or max(100, source.steps_per_epoch),
            resume=resume,
            callbacks=callbacks,
            config={
                "optimizer": step.name,
                "seed": seed,
                "num_data": source.num_data,
                "batch_size": source.most_rows or source.batch_size,
                "data": fingerprint.hex(),
                **({"held-out data": held_out.fingerprint().hex()} if held_out is not None and is_compared else {}),
                **settings,
                "arguments": sorted(kwargs),
                "parameters": {name: list(parameter.shape) for name, parameter in problem.parameters.items()},
                "modules": describe(problem.modules),
            },
        )
        guard = Guard(step, problem.parameters, max_failures, lambda error: _hyperparameters(problem, error))
        history = train(problem, source, guard, plan, Progress(progress, steps))
        _say_what_jitter_costs(model, likelihood)
        return history


def _say_what_is_unused(optimizer: str, is_collapsed: bool, is_loader: bool, **arguments: Any) -> None:
    """A step size of L-BFGS, and a size of batches where each step takes all data or batches come as they are."""
    for name, value in arguments.items():
        if value in _DEFAULTS[name]:
            continue
        if optimizer == "lbfgs" or (is_collapsed and name == "batch_size"):
            use = "Adam on mini-batches" if name == "batch_size" else "Adam"
        elif is_loader and name == "batch_size":
            use = "arrays, where a DataLoader has its own"
        else:
            continue
        log.warning("%s= is for %s, and is not used here", name, use)


def _say_what_stays(model: Any, likelihood: Likelihood, kwargs: dict[str, Any]) -> None:
    """A noise that is not trained, although a prediction may use it."""
    own = getattr(model, "likelihood", None)
    if isinstance(own, Likelihood) and own is not likelihood:
        log.warning("model.likelihood is another likelihood, and stays as it is; pass that one, or set it to yours")
    if "noise" in kwargs and isinstance(likelihood, GaussianLikelihood):
        log.warning(
            "noise= takes the place of the likelihood's own noise, which stays as it is; pass noise= to predict_y too, or use "
            "FixedNoiseGaussianLikelihood"
        )


def _say_what_jitter_costs(model: Any, likelihood: Likelihood) -> None:
    """The jitter counts as variance of q(f), which is dear beside a small noise."""
    strategies = [module for module in model.modules() if isinstance(module, TighterStrategy)]
    if not strategies or not isinstance(likelihood, GaussianLikelihood):
        return
    jitter, noise = max(strategy.jitter_val for strategy in strategies), float(likelihood.noise.detach().min())
    if jitter > _DEAR_JITTER * noise:
        log.warning(
            "the noise, %.2g, is near the jitter, %.2g, which counts as variance of f: intervals may be too wide; train in "
            "float64, or with gpytorch.settings.variational_cholesky_jitter(float_value=1e-6)",
            noise,
            jitter,
        )


def _make_step(
    problem: Problem,
    optimizer: str,
    lr: float | None,
    schedule: str | Callable[[float], float] | None,
    natural_gradients: bool | float | None,
    compile: bool | str,
    batch_size: int,
) -> tuple[KindOfStep, dict[str, Any]]:
    """One way to train, and the settings that tell it from another."""
    if optimizer == "lbfgs":
        return LBFGSStep(problem), {}
    reason = refusal(problem.model, problem.likelihood, problem.objective)
    if natural_gradients and reason:
        raise ValueError(
            f"natural_gradients cannot be used here: {reason}. Leave them out, or pass natural_gradients=False."
        )
    if compile and distributed.is_active() and not reason and natural_gradients is not False:
        log.info("steps are not compiled: natural gradients of several processes exchange messages on their way")
        compile = False
    settings = {"lr": lr, "schedule": describe_schedule(schedule), "natural_gradients": natural_gradients}
    if natural_gradients is not False and not reason:
        recipe = Recipe.for_likelihood(problem.likelihood)
        if lr is not None:
            recipe = recipe._replace(lr=lr, inducing_lr=recipe.inducing_lr * lr / recipe.lr)
        if natural_gradients is not None and natural_gradients is not True:
            size = float(natural_gradients)
            recipe = recipe._replace(natural=size, natural_full=size)
        factor = None if schedule == "recipe" else make_schedule(schedule)
        return NaturalStep(problem, recipe, factor, batch_size, _ADAM_LR if lr is None else lr, compile), settings
    refuse_adam(problem.model)
    rates = {"all": _ADAM_LR if lr is None else lr}

    def make_optimizers(sparse: set[str]) -> Optimizers:
        return Optimizers(problem.parameters, sparse, dict.fromkeys(problem.parameters, "all"), rates)

    factor = make_schedule("cosine" if schedule == "recipe" else schedule)
    # A compiled step of Adam cannot change to a wider precision: only for those who ask for it.
    return AdamStep(problem, factor, make_optimizers, batch_size if compile is True else None), settings


def _hyperparameters(problem: Problem, error: Exception) -> str:
    """What an error does not say itself."""
    said = "Hyperparameters: " in str(error)
    return describe_hyperparameters(*([problem.likelihood] if said else [problem.model, problem.likelihood]))
