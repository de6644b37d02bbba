"""Milliseconds of a GPJax SVGP training step. Runs in GPJax's own environment."""

import json
import statistics
import sys
import time

import equinox as eqx
import gpjax as gpx
import jax
import jax.numpy as jnp
import numpy as np
import optax


def median_step(num_inducing: int, batch_size: int) -> float:
    """Matérn-3/2 ARD in 8 dimensions, whitened, Adam inside one jitted function, float32."""
    rng = np.random.default_rng(0)
    z = jnp.asarray(rng.random((num_inducing, 8), dtype=np.float32))
    data = gpx.Dataset(
        X=jnp.asarray(rng.random((batch_size, 8), dtype=np.float32)),
        y=jnp.asarray(rng.standard_normal((batch_size, 1), dtype=np.float32)),
    )
    prior = gpx.gps.Prior(
        mean_function=gpx.mean_functions.Constant(), kernel=gpx.kernels.Matern32(lengthscale=jnp.ones(8, jnp.float32))
    )
    model = gpx.variational_families.WhitenedVariationalGaussian(
        model=prior * gpx.likelihoods.Gaussian(), inducing_inputs=z
    )
    optimizer = optax.adam(1e-3)
    state = optimizer.init(eqx.filter(model, eqx.is_array))

    @eqx.filter_jit
    def step(model, state):
        loss, grads = eqx.filter_value_and_grad(lambda q: -gpx.objectives.elbo(q, data))(model)
        updates, state = optimizer.update(grads, state, eqx.filter(model, eqx.is_array))
        return eqx.apply_updates(model, updates), state, loss

    times = []
    for i in range(34 if num_inducing <= 512 else 12):
        start = time.perf_counter()
        model, state, loss = step(model, state)
        jax.block_until_ready(loss)
        if i >= 4:
            times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times)


for inducing, batch in json.loads(sys.argv[1]):
    result = {"num_inducing": inducing, "batch_size": batch, "milliseconds": median_step(inducing, batch)}
    print(json.dumps(result), flush=True)
