"""Milliseconds of a GPflow SVGP training step. Runs in GPflow's own environment."""

import json
import statistics
import sys
import time

import gpflow
import numpy as np
import tensorflow as tf

gpflow.config.set_default_float(np.float32)
gpflow.config.set_default_jitter(1e-4)


def median_step(num_inducing: int, batch_size: int) -> float:
    """Matérn-3/2 ARD in 8 dimensions, whitened, Adam inside one tf.function, float32."""
    rng = np.random.default_rng(0)
    z = rng.random((num_inducing, 8), dtype=np.float32)
    x = tf.constant(rng.random((batch_size, 8), dtype=np.float32))
    y = tf.constant(rng.standard_normal((batch_size, 1), dtype=np.float32))
    model = gpflow.models.SVGP(
        gpflow.kernels.Matern32(lengthscales=np.ones(8, dtype=np.float32)),
        gpflow.likelihoods.Gaussian(),
        gpflow.inducing_variables.InducingPoints(z),
        mean_function=gpflow.functions.Constant(np.zeros(1, dtype=np.float32)),
        num_data=100_000,
    )
    optimizer = tf.keras.optimizers.Adam(1e-3)
    variables = model.trainable_variables
    optimizer.build(variables)

    @tf.function
    def step():
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(variables)
            loss = -model.elbo((x, y))
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return loss

    times = []
    for _ in range(4):
        step()
    for _ in range(30 if num_inducing <= 512 else 8):
        start = time.perf_counter()
        step().numpy()
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times)


for inducing, batch in json.loads(sys.argv[1]):
    result = {"num_inducing": inducing, "batch_size": batch, "milliseconds": median_step(inducing, batch)}
    print(json.dumps(result), flush=True)
