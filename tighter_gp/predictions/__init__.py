"""From a trained model to answers: q(f) and p(y) at new inputs."""

from .f import predict
from .y import PredictiveDistribution, log_density, predict_y

__all__ = ["PredictiveDistribution", "log_density", "predict", "predict_y"]
