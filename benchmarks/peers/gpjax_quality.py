"""Test scores of GPJax's SVGP against seconds of training. Runs in GPJax's own environment.

Natural gradients of size .1 for q(u), then Adam for the rest on the same batch, at .05 with a cosine to zero, with the functions
that GPJax's own ``fit_natgrads`` is made of, so that the clock can be stopped after each epoch; all of a step is one jitted
function, and its compilation is not counted.
"""

import json
import sys
import time

import equinox as eqx
import gpjax as gpx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from gpjax.natural_gradients import natural_gradient_step, partition_variational

path, epochs, batch_size, dtype = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
jax.config.update("jax_enable_x64", dtype == "float64")

data = {name: values.astype(dtype) for name, values in np.load(path).items()}
train_x, train_y = jnp.asarray(data["train_x"]), jnp.asarray(data["train_y"][:, None])
test_x, test_y = jnp.asarray(data["test_x"]), jnp.asarray(data["test_y"])
num_data, dim = train_x.shape
start = np.log(2).astype(dtype)
prior = gpx.gps.Prior(
    mean_function=gpx.mean_functions.Constant(),
    kernel=gpx.kernels.Matern32(lengthscale=jnp.full(dim, start), variance=jnp.asarray(start)),
    jitter=1e-6 if dtype == "float64" else 1e-4,
)
model = gpx.variational_families.WhitenedVariationalGaussian(
    model=prior * gpx.likelihoods.Gaussian(obs_stddev=jnp.asarray(np.sqrt(start))),
    inducing_inputs=jnp.asarray(data["points"]),
)
optimizer = optax.adam(optax.cosine_decay_schedule(0.05, epochs * -(-num_data // batch_size)))
variational, hyper = partition_variational(model)
state = optimizer.init(eqx.filter(hyper, eqx.is_array))


def loss(model, batch):
    """Minus the bound."""
    return -gpx.objectives.elbo(model, batch)


@eqx.filter_jit
def step(variational, hyper, state, rows):
    """q(u) first, then the rest."""
    batch = gpx.Dataset(X=train_x[rows], y=train_y[rows], n_total=num_data)
    variational, _ = natural_gradient_step(variational, hyper, batch, loss, 0.1)
    grads = eqx.filter_grad(lambda hyper: loss(eqx.combine(variational, hyper), batch))(hyper)
    updates, state = optimizer.update(grads, state, eqx.filter(hyper, eqx.is_array))
    return variational, eqx.apply_updates(hyper, updates), state


@eqx.filter_jit
def scores(variational, hyper, x, y):
    """Sums of squared errors and of log densities."""
    model = eqx.combine(variational, hyper)
    f = jax.vmap(lambda row: _moments(model, row))(x)
    mean, variance = f[0], f[1] + _noise(model)
    density = -0.5 * (jnp.log(2 * jnp.pi * variance) + (y - mean) ** 2 / variance)
    return jnp.sum((y - mean) ** 2), jnp.sum(density)


def _moments(model, row):
    q = model.predict(row[None, :])
    return jnp.squeeze(q.mean), jnp.squeeze(q.variance)


def _noise(model):
    return gpx.parameters.val(model.model.likelihood.obs_stddev) ** 2


rng, seconds = np.random.default_rng(0), 0.0
# Compiles for both shapes of a batch; several times, since the results of a step are of other types than its start.
carry = variational, hyper, state
for size in (
    batch_size,
    batch_size,
    num_data % batch_size or batch_size,
    batch_size,
    num_data % batch_size or batch_size,
):
    carry = step(*carry, jnp.asarray(rng.permutation(num_data)[:size]))
jax.block_until_ready(carry)
for _ in range(epochs):
    started = time.perf_counter()
    order = rng.permutation(num_data)
    for first in range(0, num_data, batch_size):
        rows = jnp.asarray(order[first : first + batch_size])
        variational, hyper, state = step(variational, hyper, state, rows)
    jax.block_until_ready(hyper)
    seconds += time.perf_counter() - started
    parts = [scores(variational, hyper, test_x[i : i + 256], test_y[i : i + 256]) for i in range(0, len(test_y), 256)]
    error, density = (sum(float(part[k]) for part in parts) / len(test_y) for k in (0, 1))
    print(json.dumps([round(seconds, 3), -density, error**0.5]), flush=True)
