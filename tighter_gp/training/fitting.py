"""The front of training: :func:`tighter_gp.fit` looks at its arguments, and starts a run."""

from __future__ import annotations

import logging
import operator
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from gpytorch.likelihoods import Likelihood
from gpytorch.mlls import MarginalLogLikelihood, VariationalELBO
from gpytorch.models.deep_gps import DeepGP
from gpytorch.variational import _NaturalVariationalDistribution
from torch import Tensor

from ..collapsed import CollapsedGP, TighterInducingPointKernel
from ..data import Rows
from ..likelihoods.family import family
from ..likelihoods.targets import check_arguments
from ..mlls import TighterELBO
from ..mlls.priors import counts_twice
from ..posterior import exact_gp_prior
from ..strategies import TighterStrategy
from . import distributed
from .batches import ArrayBatches, LoaderBatches
from .capture import compile_pays
from .checkpoint import describe
from .history import History, Progress, Step, say_how_data_are_scaled
from .initialization import initialize as start_from_data
from .lbfgs import LBFGSStep
from .natural import has_natural_step
from .problem import Problem, is_collapsed, make_objective, reference
from .recipe import Recipe
from .run import Run
from .step import GradientStep, Guard
from .validation import HeldOut

_DEFAULT_EPOCHS, _DEFAULT_ITERATIONS = 100, 200

# Arguments of earlier versions that are fields of a recipe now.
_FORMER = {"schedule", "natural_gradients", "compile", "max_failures", "validate_every", "checkpoint_every"}

log = logging.getLogger("tighter_gp")


def fit(
    model: Any,
    likelihood: Likelihood,
    x: Any = None,
    y: Any = None,
    *,
    objective: Callable[..., Any] = TighterELBO,
    epochs: int | None = None,
    steps: int | None = None,
    batch_size: int | None = 1024,
    lr: float | None = None,
    recipe: Recipe | None = None,
    validation: Sequence[Any] | None = None,
    patience: int | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    resume: bool = False,
    seed: int = 0,
    callbacks: Sequence[Callable[[Step], bool | None]] = (),
    progress: bool | None = None,
    initialize: bool = False,
    num_data: int | None = None,
    **kwargs: Any,
) -> History:
    r"""Train a model: natural gradients for q(u) and Adam for the rest on mini-batches, L-BFGS for a collapsed model.

    q(u) is moved first on each batch, in closed form, and the gradients of the rest are taken at the new q(u) with the same
    projection. Step sizes are those of :class:`~tighter_gp.Recipe`.

    The order of the batches and every random number of a step are functions of ``seed`` and the step: on a CPU two runs give
    the same numbers, and so does a run that was interrupted and resumed. The global random state is left as it was.

    A step that fails numerically is not taken, and the history and the log (``logging.getLogger("tighter_gp")``) say so. If
    the next one fails too, the last update is undone, and Adam starts anew with a quarter of the step, which grows back.

    Under ``torchrun``, or within a process group of your own, each process takes its part of every batch. The run is that of
    one process, to rounding, but for the draws of an objective that samples. Give every process the same arguments.

    :param model: An :class:`~gpytorch.models.ApproximateGP`, a deep GP, an :class:`~gpytorch.models.ExactGP` with a
        :class:`~tighter_gp.TighterInducingPointKernel`, a :class:`~tighter_gp.CollapsedGP`, or a module with one of the first
        inside, such as behind a network: ``self.gp(self.net(x))``.
    :param likelihood: Its likelihood.
    :param x: Training inputs, ``N x D`` (``... x N x D`` for a batch of models; ``N`` is ``N x 1``): a tensor, or a numpy array
        of any kind of number, perhaps memory-mapped. Or a :class:`~torch.utils.data.DataLoader` that yields ``(x, y)`` or
        ``(x, y, index)``; for a run that is to resume bit for bit, ``persistent_workers=True`` needs a sampler with a
        generator of its own. None for a latent-variable model. A collapsed model has its data.
    :param y: Training targets, ``N``, ``N x T`` or ``... x N``. NaN is refused where it does not mean a missing target.
    :param objective: ``objective(likelihood, model, num_data)`` makes the objective, to be maximised: default
        :class:`~tighter_gp.TighterELBO`, for a latent-variable model :class:`~tighter_gp.gplvm.LatentVariableELBO`, for an
        ExactGP :class:`~gpytorch.mlls.ExactMarginalLogLikelihood`.
    :param epochs: Passes over the data; default 100.
    :param steps: Steps, instead of epochs; of L-BFGS iterations, default 200.
    :param batch_size: Most points per step, over all processes; None for all. An epoch is cut evenly. A short last batch of
        a DataLoader counts by its share. Collapsed models take all.
    :param lr: Learning rate of Adam, in place of the recipe's.
    :param recipe: Step sizes, schedule and compilation, see :class:`~tighter_gp.Recipe`.
    :param validation: Held-out ``(x, y)`` or ``(x, y, {"noise": noise})``, whose mean negative log predictive density goes to the
        history, see ``validate_every`` of the recipe.
    :param patience: After this many validations without a better one the run comes to its end: the learning rate falls over
        as many steps as have been taken. It ends with the parameters of the best validation.
    :param checkpoint: File to keep the state of the run in, at any moment whole; see ``checkpoint_every`` of the recipe. It is
        also written at the end, and at Ctrl-C.
    :param resume: Continue from ``checkpoint`` if it is there. It must be of the same model, settings and data, but for the
        number of steps. A run that has ended stays ended.
    :param seed: Seed of all that is random.
    :param callbacks: Each is called with a :class:`~tighter_gp.training.Step` after every step, and may return True to end the
        run. One with ``state_dict`` and ``load_state_dict`` has its state in the checkpoint.
    :param progress: Whether to show a progress bar; default in a terminal. False: nor a line per tenth in the log.
    :param initialize: Whether to start from the data, see :func:`~tighter_gp.initialize`.
    :param num_data: Number of training points, for a DataLoader that does not visit all of its dataset.
    :param kwargs: Per-point arguments of the likelihood, ``... x N``, such as ``noise=``.
    :return: The history. The model is left in the mode it was in.

    Example:
        >>> history = tighter_gp.fit(model, likelihood, train_x, train_y, epochs=2, batch_size=32)
        >>> len(history.loss) == 2 * math.ceil(len(train_y) / 32)
        True
    """
    for name in _FORMER & kwargs.keys():
        raise TypeError(f"{name}= is gone: see tighter_gp.Recipe, fit(..., recipe=Recipe(natural=..., schedule=...)).")
    counts = {"epochs": epochs, "steps": steps, "patience": patience, "num_data": num_data, "batch_size": batch_size}
    epochs, steps, patience, num_data, batch_size = (_count(name, value) for name, value in counts.items())
    seed, collapsed, like = operator.index(seed), is_collapsed(model), reference(model, likelihood)
    recipe = recipe or Recipe()
    recipe = recipe if lr is None else replace(recipe, lr=lr)
    if epochs is not None and steps is not None:
        raise ValueError("Give epochs or steps, not both.")
    if not torch.is_grad_enabled():
        raise RuntimeError("fit needs gradients: call it outside of torch.no_grad() and torch.inference_mode().")
    if resume and checkpoint is None:
        raise ValueError("resume=True needs a checkpoint= to continue from.")
    if patience is not None and validation is None:
        raise ValueError("patience= needs held-out data: pass validation=(x, y).")
    if initialize and not (resume and os.path.exists(checkpoint or "")):
        if not isinstance(x, (Tensor, np.ndarray)):
            raise ValueError("initialize=True needs arrays: call tighter_gp.initialize with some rows before fit.")
        start_from_data(model, likelihood, x, y, seed=seed)
    with distributed.group(like.device):
        if objective is TighterELBO and x is not None:  # another may take arguments of its own
            check_arguments(likelihood, kwargs)
        source: Any
        if hasattr(x, "dataset"):
            if y is not None or kwargs or batch_size is None:
                raise ValueError("A DataLoader brings its own targets, batches and per-point arguments: pass none.")
            source = LoaderBatches(x, model, likelihood, like, seed, num_data)
        elif num_data is not None:
            raise ValueError("num_data= is for a DataLoader; arrays know how many rows they have.")
        elif collapsed:
            x, y = _own_data(model, likelihood, x, y, kwargs, like)
            source = ArrayBatches(x, y, {}, likelihood, like, None, seed)
        else:
            source = ArrayBatches(x, y, kwargs, likelihood, like, batch_size, seed)
        mll = make_objective(model, likelihood, objective, source.num_data)
        _say_what_is_odd(model, likelihood, source, mll)
        is_compared = checkpoint is not None or distributed.is_active()
        fingerprint = source.fingerprint() if is_compared else b""
        distributed.check_same(fingerprint, like.device)
        if steps is None:
            steps = (epochs or (_DEFAULT_ITERATIONS if collapsed else _DEFAULT_EPOCHS)) * source.steps_per_epoch
        problem = Problem(model, likelihood, mll, source.num_data, seed)
        step = LBFGSStep(problem) if collapsed else _gradient_step(problem, recipe, source, steps)
        if not isinstance(validation, (tuple, list, type(None))):
            raise TypeError(f"validation must be (x, y) or (x, y, kwargs); got {type(validation).__name__}.")
        held_out = None if validation is None else HeldOut(likelihood, like, *validation)
        config = {
            "seed": seed,
            "num_data": source.num_data,
            "batch_size": batch_size,
            "recipe": recipe.described(),
            "data": fingerprint.hex(),
            **describe(problem),
            "held-out data": held_out.fingerprint().hex() if held_out is not None and is_compared else "",
        }
        guard, bar = Guard(step, problem, recipe.max_failures), Progress(progress)
        run = Run(problem, source, guard, recipe, bar, steps, held_out, patience, checkpoint, callbacks, config)
        return run.train(resume)


def _count(name: str, value: Any) -> int | None:
    """A whole number above 0, also one of numpy's, or None."""
    if value is not None and operator.index(value) < 1:
        raise ValueError(f"{name} must be at least 1; got {value}.")
    return value if value is None else operator.index(value)


def _gradient_step(problem: Problem, recipe: Recipe, source: Any, steps: int) -> GradientStep:
    has_slopes = _has_natural_slopes(problem.model, problem.likelihood, problem.objective)
    if recipe.natural and not has_slopes:
        raise ValueError(
            f"Recipe(natural={recipe.natural:g}) cannot be used here: natural gradients need a Gaussian q(u) in a strategy of "
            "tighter_gp, no deep GP, and TighterELBO, or GPyTorch's for a likelihood that is not sampled."
        )
    is_natural = has_slopes and recipe.natural != 0
    for module in problem.model.modules():
        if not is_natural and isinstance(module, _NaturalVariationalDistribution):
            raise ValueError(
                f"q(u) is a {type(module).__name__}, whose gradients mean nothing to Adam: use natural gradients, or a "
                "CholeskyVariationalDistribution."
            )
    compile = recipe.compile
    if compile == "auto":  # a compiled step of Adam cannot repeat a step in another precision: only on demand
        compile = is_natural and source.batch_size > 0 and compile_pays(problem, steps, source.batch_size)
    if compile and distributed.is_active():
        log.info("steps are not compiled: several processes exchange messages on their way")
    resolved = recipe.resolved(problem.likelihood, is_natural)
    return GradientStep(problem, resolved, source.batch_size >= problem.num_data, bool(compile))


def _has_natural_slopes(model: torch.nn.Module, likelihood: Any, objective: Any) -> bool:
    """Whether the slopes of an objective show the curvature that a natural step of q(u) takes."""
    strategies = [module for module in model.modules() if isinstance(module, TighterStrategy)]
    forms = [distribution for strategy in strategies for distribution in strategy.distributions]
    is_deep = any(isinstance(module, DeepGP) for module in model.modules())  # the slopes of hidden layers are sampled
    base = TighterELBO if isinstance(objective, TighterELBO) else VariationalELBO
    if isinstance(objective, base):
        is_bound = all(getattr(type(objective), m) is getattr(base, m) for m in ("forward", "_log_likelihood_term"))
    else:
        is_bound = hasattr(objective, "is_tighter")
    has_curvature = base is TighterELBO or not family(likelihood).is_sampled
    return any(map(has_natural_step, forms)) and not is_deep and is_bound and has_curvature


def _own_data(
    model: Any, likelihood: Any, x: Any, y: Any, kwargs: dict[str, Any], like: Tensor
) -> tuple[Tensor, Tensor]:
    """The data of a collapsed model; what was passed must be the same."""
    if kwargs:
        raise TypeError(f"Got an unknown argument {min(kwargs)!r}: a {type(model).__name__} takes none.")
    if model.likelihood is not likelihood:
        raise ValueError("The likelihood is not the one that the model was built with; pass model.likelihood.")
    if isinstance(model, CollapsedGP):
        own_x, own_y = model.train_x, model.train_y
    else:
        if isinstance(getattr(model, "covar_module", None), TighterInducingPointKernel):
            exact_gp_prior(model)  # refuses a kernel that does not belong to the model
        if model.train_inputs is None or model.train_targets is None:
            raise ValueError("The model has no training data; call model.set_train_data(x, y, strict=False).")
        own_x, own_y = model.train_inputs[0], model.train_targets
    for name, given, own in (("x", x, own_x), ("y", y, own_y)):
        values = own if given is None else Rows(given, like, is_input=name == "x", name=name)[:].to(own.dtype)
        if not torch.equal(torch.nan_to_num(values), torch.nan_to_num(own)):
            raise ValueError(
                f"{name} is not what the model was built with, and {type(model).__name__} trains on its own data: leave {name} "
                "out, or build the model on these."
            )
    return own_x, own_y


def _say_what_is_odd(model: Any, likelihood: Any, source: Any, mll: Any) -> None:
    say_how_data_are_scaled(model, likelihood, source)
    own = getattr(model, "likelihood", None)
    if isinstance(own, Likelihood) and own is not likelihood:
        log.warning("model.likelihood is another likelihood, and stays as it is; pass that one, or set it to yours")
    is_stock = isinstance(mll, MarginalLogLikelihood) and type(mll).__module__.startswith("gpytorch.")
    if is_stock and counts_twice(mll):
        log.warning("%s counts a prior twice; tighter_gp.TighterELBO counts each once", type(mll).__name__)
