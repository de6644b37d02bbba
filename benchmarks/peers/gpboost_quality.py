"""Test scores of GPBoost's GPs with its defaults, and the seconds of the processor. Runs in GPBoost's own environment.

The last argument is its approximation: ``vecchia`` looks at near rows alone, ``vif`` at inducing points too.
"""

import json
import sys
import time

import gpboost
import numpy as np

path, _, _, dtype, approximation = sys.argv[1:6]
data = {name: values.astype("float64") for name, values in np.load(path).items()}
ones = {name: np.ones((len(data[f"{name}_x"]), 1)) for name in ("train", "test")}

started = time.process_time()
model = gpboost.GPModel(
    gp_coords=data["train_x"],
    cov_function="matern_ard",
    cov_fct_shape=1.5,
    likelihood="gaussian",
    gp_approx=approximation,
    num_parallel_threads=1,
)
model.fit(y=data["train_y"], X=ones["train"])
found = model.predict(gp_coords_pred=data["test_x"], X_pred=ones["test"], predict_var=True, predict_response=True)
seconds = time.process_time() - started
squared = (found["mu"] - data["test_y"]) ** 2
nlpd = 0.5 * np.mean(np.log(2 * np.pi * found["var"]) + squared / found["var"])
print(json.dumps([round(seconds, 3), nlpd, np.mean(squared) ** 0.5]), flush=True)
