"""Arguments that nobody uses are errors: which per-point arguments an objective and its likelihood know."""

from __future__ import annotations

import dis
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from difflib import get_close_matches
from functools import lru_cache
from types import CodeType
from typing import Any

from gpytorch import likelihoods
from gpytorch.likelihoods import Likelihood
from gpytorch.likelihoods.gaussian_likelihood import _GaussianLikelihoodBase
from gpytorch.likelihoods.multitask_gaussian_likelihood import _MultitaskGaussianLikelihoodBase
from torch.nn import Module

__all__ = ["argument_names", "check_arguments"]

# What other libraries call it.
_SYNONYMS = {
    "alpha": "lr",
    "bs": "batch_size",
    "callback": "callbacks",
    "iterations": "steps",
    "learning_rate": "lr",
    "loss": "objective",
    "max_epochs": "epochs",
    "max_iter": "steps",
    "maxiter": "steps",
    "mll": "objective",
    "n_iter": "steps",
    "noise_variance": "noise",
    "num_iterations": "steps",
    "random_state": "seed",
    "scheduler": "schedule",
    "sigma": "noise",
    "sigma2": "noise",
    "tqdm": "progress",
    "val_data": "validation",
    "variances": "noise",
    "verbose": "progress",
    "yerr": "noise",
    "yvar": "noise",
}

# The methods of a likelihood, or an objective, that are given per-point arguments.
_METHODS = ("forward", "expected_log_prob", "log_marginal", "marginal", "_shaped_noise_covar", "_log_likelihood_term")


def argument_names(likelihood: Any, objective: Any = None) -> set[str]:
    r"""The per-point arguments that a likelihood and an objective use.

    Gaussian likelihoods take ``noise=``, variances that replace their own, and
    :class:`~gpytorch.likelihoods.HadamardGaussianLikelihood` takes ``tasks=``. Of classes that are neither GPyTorch's nor
    ours these are the named arguments of their methods, and the names under which they look into ``**kwargs``. A class
    that hands ``**kwargs`` on to something else says what it takes with an attribute ``argument_names``, a tuple of
    strings.

    :param likelihood: The likelihood.
    :param objective: The objective: a module, or a function of q(f) and targets.

    Example:
        >>> tighter_gp.arguments.argument_names(gpytorch.likelihoods.GaussianLikelihood())
        {'noise'}
        >>> tighter_gp.arguments.argument_names(gpytorch.likelihoods.BernoulliLikelihood())
        set()
    """
    found: set[str] = set()
    objectives = objective.modules() if isinstance(objective, Module) else [objective]
    model = getattr(objective, "model", None)
    of_model = {id(module) for module in model.modules()} if isinstance(model, Module) else set()
    for part in (likelihood, *objectives):
        if part is None or id(part) in of_model - {id(likelihood)}:
            continue
        found |= set(getattr(part, "argument_names", ()))
        if isinstance(part, Likelihood):
            found |= _of_gaussian(part)
        if isinstance(part, Module):
            for method in _own_methods(type(part)):
                found |= _used(method)
        elif callable(part):
            found |= _used(part)
    return found


def check_arguments(
    arguments: Mapping[str, Any] | Iterable[str],
    likelihood: Any,
    objective: Any = None,
    *,
    function: Callable[..., Any] | None = None,
    allowed: Iterable[str] | None = None,
    owner: str | None = None,
) -> None:
    """Raise if an argument is one that nobody would use, and name the nearest that somebody would.

    :param arguments: The arguments, or their names.
    :param likelihood: The likelihood that they are for.
    :param objective: The objective, if there is one.
    :param function: The function that was called, whose own arguments may have been meant.
    :param allowed: The per-point arguments to allow; default :func:`argument_names`.
    :param owner: Who takes them, for the message; default the class of the likelihood.
    :raises TypeError: If one is unknown.

    Example:
        >>> tighter_gp.arguments.check_arguments({"noise": 0.1}, gpytorch.likelihoods.GaussianLikelihood())
        >>> tighter_gp.fit(model, likelihood, train_x, train_y, learning_rate=0.1)
        Traceback (most recent call last):
            ...
        TypeError: fit() got an unknown argument 'learning_rate'; did you mean 'lr'? GaussianLikelihood takes per point: noise.
    """
    legal = argument_names(likelihood, objective) if allowed is None else set(allowed)
    unknown = [name for name in arguments if name not in legal]
    if not unknown:
        return
    parameters = [] if function is None else [p.name for p in inspect.signature(function).parameters.values()]
    called = "an objective" if function is None else f"{function.__name__}()"
    own = [name for name in parameters if name != "kwargs"]
    name = unknown[0]
    nearest = _nearest(name, [*own, *sorted(legal)])
    owner = owner or type(likelihood).__name__
    per_point = f"{owner} takes per point: {', '.join(sorted(legal)) or 'nothing'}."
    raise TypeError(f"{called} got an unknown argument {name!r}{nearest} {per_point}")


def _nearest(name: str, known: list[str]) -> str:
    meant = _SYNONYMS.get(name.lower())
    close = [meant] if meant in known else get_close_matches(name.lower(), known, n=1, cutoff=0.6)
    contained = [other for other in known if len(other) > 3 and (other in name or name in other)]
    if found := close or contained:
        return f"; did you mean {found[0]!r}?"
    return f"; known are {', '.join(known)}." if known else "."


def _of_gaussian(likelihood: Any) -> set[str]:
    """``noise=``, where GPyTorch's own classes look for it, or ``tasks=``, on which it depends."""
    if isinstance(likelihood, _MultitaskGaussianLikelihoodBase):
        return set()
    if isinstance(likelihood, getattr(likelihoods, "HadamardGaussianLikelihood", ())):
        return {"tasks"}
    return {"noise"} if isinstance(likelihood, _GaussianLikelihoodBase) else set()


def _own_methods(cls: type) -> Iterator[Callable[..., Any]]:
    """Methods that are given per-point arguments, of a class and its bases, without GPyTorch's, which look at few."""
    for base in cls.__mro__:
        for name in _METHODS:
            if name in vars(base) and not base.__module__.startswith("gpytorch."):
                yield vars(base)[name]


@lru_cache(maxsize=256)  # an objective asks in every step
def _used(function: Callable[..., Any]) -> set[str]:
    """Names of keyword arguments: those in the signature, and those under which ``**kwargs`` is looked into."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return set()
    positional = [p for p in parameters if p.kind == p.POSITIONAL_OR_KEYWORD]
    named = {p.name for p in positional if p.default is not p.empty} | {
        p.name for p in parameters if p.kind == p.KEYWORD_ONLY
    }
    rest = next((p.name for p in parameters if p.kind == p.VAR_KEYWORD), None)
    code = getattr(inspect.unwrap(function), "__code__", None)
    return named | (_looked_up(code, rest) if rest is not None and isinstance(code, CodeType) else set())


def _looked_up(code: CodeType, variable: str) -> set[str]:
    """Strings in an instruction soon after one that loads a variable: ``kwargs["name"]``, ``kwargs.get("name")``; or soon
    before: ``"name" in kwargs``.
    """
    steps = [step for step in dis.get_instructions(code) if step.opname not in ("CACHE", "PUSH_NULL", "PRECALL")]
    found = set()
    for place, step in enumerate(steps):
        if _loads(step, variable):
            near = steps[max(0, place - 1) : place + 4]
            found |= {s.argval for s in near if s.opname == "LOAD_CONST" and isinstance(s.argval, str)}
    return {name for name in found if name.isidentifier()}


def _loads(step: dis.Instruction, variable: str) -> bool:
    names = step.argval if isinstance(step.argval, tuple) else (step.argval,)
    return step.opname.startswith("LOAD_") and variable in names
