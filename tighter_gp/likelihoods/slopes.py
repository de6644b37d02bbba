from .expectations import *  # noqa: F403
from .expectations import Slopes, expected_slopes, mean_curvature, sampled_log_prob  # noqa: F401
