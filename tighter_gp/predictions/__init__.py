"""From a trained model to answers: q(f) and p(y) at new inputs."""

from .distribution import PredictiveDistribution, distribution_of_y, log_density
from .latent import predict
from .observations import predict_y

__all__ = ["PredictiveDistribution", "distribution_of_y", "log_density", "predict", "predict_y"]
