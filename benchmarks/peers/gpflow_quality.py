"""Test scores of GPflow's SVGP against seconds of training. Runs in GPflow's own environment.

Natural gradients of size .1 for q(u), then Adam for the rest on the same batch, as GPflow's page on natural gradients does it,
at .05 with a cosine to zero; all of a step is inside one ``tf.function``, and its compilation is not counted.
"""

import json
import sys
import time

import gpflow
import numpy as np
import tensorflow as tf

path, epochs, batch_size, dtype = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
gpflow.config.set_default_float(np.dtype(dtype).type)
gpflow.config.set_default_jitter(1e-6 if dtype == "float64" else 1e-4)

data = {name: values.astype(dtype) for name, values in np.load(path).items()}
train_x, train_y = data["train_x"], data["train_y"][:, None]
test_x, test_y = data["test_x"], data["test_y"][:, None]
num_data, dim = train_x.shape
model = gpflow.models.SVGP(
    gpflow.kernels.Matern32(lengthscales=np.full(dim, np.log(2), dtype=dtype), variance=np.log(2)),
    gpflow.likelihoods.Gaussian(np.log(2)),
    gpflow.inducing_variables.InducingPoints(data["points"]),
    mean_function=gpflow.functions.Constant(np.zeros(1, dtype=dtype)),
    num_data=num_data,
)
total = epochs * -(-num_data // batch_size)
rate = tf.keras.optimizers.schedules.CosineDecay(0.05, total)
natural, adam = gpflow.optimizers.NaturalGradient(gamma=0.1), tf.keras.optimizers.Adam(rate)
gpflow.set_trainable(model.q_mu, False)
gpflow.set_trainable(model.q_sqrt, False)
variables = model.trainable_variables
adam.build(variables)


@tf.function
def step(x, y):
    """q(u) first, then the rest."""
    natural.minimize(lambda: -model.elbo((x, y)), [(model.q_mu, model.q_sqrt)])
    with tf.GradientTape(watch_accessed_variables=False) as tape:
        tape.watch(variables)
        loss = -model.elbo((x, y))
    adam.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))


@tf.function
def scores(x, y):
    """Sums of squared errors and of log densities."""
    mean, _ = model.predict_y(x)
    return tf.reduce_sum((mean - y) ** 2), tf.reduce_sum(model.predict_log_density((x, y)))


start = [(variable, variable.numpy()) for variable in (*model.variables, *adam.variables)]
rest = num_data % batch_size
for size in (batch_size, rest) if rest else (batch_size,):
    step(tf.constant(train_x[:size]), tf.constant(train_y[:size]))  # compiles for this shape
for variable, value in start:
    variable.assign(value)

rng, seconds = np.random.default_rng(0), 0.0
for _ in range(epochs):
    started = time.perf_counter()
    order = rng.permutation(num_data)
    for first in range(0, num_data, batch_size):
        rows = order[first : first + batch_size]
        step(tf.constant(train_x[rows]), tf.constant(train_y[rows]))
    model.likelihood.variance.numpy()  # waits for the last step
    seconds += time.perf_counter() - started
    parts = [scores(test_x[i : i + 4096], test_y[i : i + 4096]) for i in range(0, len(test_y), 4096)]
    error, density = (sum(float(part[k]) for part in parts) / len(test_y) for k in (0, 1))
    print(json.dumps([round(seconds, 3), -density, error**0.5]), flush=True)
