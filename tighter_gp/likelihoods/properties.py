"""Names for what family.py and expectations.py say."""

from .expectations import *  # noqa: F403
from .expectations import (  # noqa: F401
    correlates_tasks,
    draw_samples,
    event_variance,
    expected_log_prob,
    log_prob_of_samples,
    marginal_variance,
    place_samples,
    task_covariance,
)
from .family import *  # noqa: F403
from .family import family, filled, gaussian_noise, has_own_noise, observed, signed  # noqa: F401


def is_gaussian(likelihood):
    return family(likelihood).is_gaussian


def is_sampled(likelihood):
    return family(likelihood).is_sampled


def has_gaussian_noise(likelihood):
    return family(likelihood).is_gaussian_noise


def has_one_function(likelihood):
    return family(likelihood).has_one_function


def is_log_concave(likelihood):
    return family(likelihood).is_log_concave
