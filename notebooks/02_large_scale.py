# %% [markdown]
"""
# Large data: mini-batches, placement, natural gradients

This notebook trains a tighter SVGP on more data than an exact GP could take. It shows where to put the inducing points,
how to train in mini-batches with early stopping and checkpoints, how natural gradients compare with Adam, and how to
compile a step. The notes at the end are about GPUs and several processes.
"""

# %%
import shutil
import tempfile
import time
from pathlib import Path

import gpytorch
import matplotlib.pyplot as plt
import numpy as np
import torch

import tighter_gp

from shared import BLUE, DATA, ORANGE, QUICK, VERMILION, device

# %% [markdown]
# ## Data
#
# A nonlinear function of a few inputs plus noise. The inputs come in clumps of different size, as real inputs do. With
# `TIGHTER_GP_DATA` set to a folder that holds `uci/kin40k/data.csv.gz` (last column the target), that set is used.


# %%
def make_data(num_rows, num_inputs=4, num_clumps=30):
    """Clumps of inputs, and a smooth function of them with noise."""
    random = np.random.RandomState(0)
    centres = random.standard_normal((num_clumps, num_inputs))
    share = random.dirichlet(np.ones(num_clumps))
    x = centres[random.choice(num_clumps, num_rows, p=share)] + 0.35 * random.standard_normal((num_rows, num_inputs))
    directions = random.standard_normal((num_inputs, 3))
    y = np.sin(1.5 * x @ directions).sum(-1) + 0.2 * random.standard_normal(num_rows)
    return np.column_stack([x, y])


source = Path(DATA) / "uci" / "kin40k" / "data.csv.gz" if DATA else None
if source is not None and source.is_file():
    table = np.loadtxt(source, delimiter=",", max_rows=720 if QUICK else None)
    table = table[np.random.RandomState(0).permutation(len(table))]
else:
    table = make_data(720 if QUICK else 24_000)

num_test = len(table) // 12
mean, std = table[2 * num_test :].mean(0), table[2 * num_test :].std(0)
scaled = torch.from_numpy((table - mean) / std).to(device, torch.float32)
test_x, test_y = scaled[:num_test, :-1], scaled[:num_test, -1]
valid_x, valid_y = scaled[num_test : 2 * num_test, :-1], scaled[num_test : 2 * num_test, -1]
train_x, train_y = scaled[2 * num_test :, :-1].contiguous(), scaled[2 * num_test :, -1].clone()
print(
    f"{len(train_y)} training, {len(valid_y)} validation and {len(test_y)} test points in {train_x.size(-1)} dimensions"
)
print(f"on {train_x.device.type} in {str(train_x.dtype).removeprefix('torch.')}")

# %% [markdown]
# ## The model
#
# Any `ApproximateGP`; the tighter strategy is the only new word. It computes in the dtype and on the device of its inputs.


# %%
class MyGP(gpytorch.models.ApproximateGP):
    """A tighter SVGP with one lengthscale an input."""

    def __init__(self, inducing_points, form=gpytorch.variational.CholeskyVariationalDistribution):
        """`form` is the form of q(u)."""
        strategy = tighter_gp.TighterVariationalStrategy(self, inducing_points, form(inducing_points.size(0)))
        super().__init__(strategy)
        self.mean_module = gpytorch.means.ConstantMean()
        self.covar_module = gpytorch.kernels.ScaleKernel(
            gpytorch.kernels.MaternKernel(1.5, ard_num_dims=inducing_points.size(-1))
        )

    def forward(self, x):
        """The prior."""
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


lengthscale = tighter_gp.inducing.median_lengthscale(train_x)


def make(inducing_points, **kwargs):
    """A model and its likelihood with sensible first values."""
    model = MyGP(inducing_points, **kwargs).to(train_x)
    likelihood = gpytorch.likelihoods.GaussianLikelihood().to(train_x)
    model.covar_module.base_kernel.lengthscale = lengthscale
    likelihood.noise = 0.1
    return model, likelihood


def scores(model, likelihood):
    """RMSE and mean negative log predictive density on test points; lower is better."""
    q = tighter_gp.predict(model, test_x)
    with torch.no_grad():
        density = likelihood.log_marginal(test_y, q).mean().item()
    return (q.mean - test_y).square().mean().sqrt().item(), -density


# %% [markdown]
# ## Where to put the inducing points
#
# `tighter_gp.inducing` has three ways. k-means looks at the inputs only. `"greedy"` takes the inputs where the prior
# variance left by the points before them is largest, and so looks at the kernel too. A random subset is the cheapest.
#
# To compare them before any training, put q(u) at its optimum for each and look at the bound.

# %%
sizes = (4, 8) if QUICK else (16, 32, 64, 128)
methods = {"kmeans": VERMILION, "greedy": BLUE, "random": ORANGE}
placed = {}
print(f"{'method':8s} {'M':>4s} {'seconds':>8s} {'bound':>8s}")
for method in methods:
    for size in sizes:
        model, likelihood = make(train_x[:size])
        started = time.perf_counter()
        points = tighter_gp.inducing.allocate(train_x, size, method, kernel=model.covar_module)
        seconds = time.perf_counter() - started
        model, likelihood = make(points)
        tighter_gp.set_optimal_q(model, likelihood, train_x, train_y)
        bound = tighter_gp.evaluate_bound(model, likelihood, train_x, train_y).item() / len(train_y)
        placed[method, size] = bound
        print(f"{method:8s} {size:4d} {seconds:8.2f} {bound:8.4f}")

figure, ax = plt.subplots(figsize=(6, 3.5), layout="constrained")
for (method, colour), marker in zip(methods.items(), "os^", strict=True):
    ax.plot(sizes, [placed[method, size] for size in sizes], color=colour, marker=marker, label=method)
ax.set_xscale("log", base=2)
ax.set_xticks(sizes, labels=[str(size) for size in sizes])
ax.set(title="Bound before training, q(u) at its optimum", xlabel="inducing points", ylabel="bound per datum")
ax.legend()
plt.show()

# %% [markdown]
# Greedy points go to the rim of the data first, where the largest residuals are. k-means and random points follow the
# density, which suits clumps. Which is best depends on the data and on the first lengthscale; training moves the points
# anyway. The rest of this notebook starts from k-means.
#
# ## Mini-batches and early stopping
#
# `fit` draws batches by index on the device of the data. `validation=` is held out; after `patience` validations without
# a better one the run stops, and it ends with the best parameters in any case. `checkpoint=` keeps the state of the run in
# a file, and `resume=True` continues from there with the same numbers as if nothing had happened.

# %%
num_inducing = 8 if QUICK else 64
batch_size, epochs = (128, 2) if QUICK else (512, 12)
points = tighter_gp.inducing.kmeans(train_x, num_inducing)
settings = {"batch_size": batch_size, "epochs": epochs, "lr": 0.05, "validation": (valid_x, valid_y)}

histories, trained = {}, {}
for name, objective in {"SVGP": gpytorch.mlls.VariationalELBO, "T-SVGP": tighter_gp.TighterELBO}.items():
    model, likelihood = make(points)
    histories[name] = tighter_gp.fit(model, likelihood, train_x, train_y, objective=objective, patience=3, **settings)
    trained[name] = model, likelihood

print(f"{'':8s}{'bound':>9s}{'noise':>9s}{'RMSE':>9s}{'NLPD':>9s}{'ms/step':>9s}   end")
for name, (model, likelihood) in trained.items():
    objective = tighter_gp.TighterELBO if name.startswith("T-") else gpytorch.mlls.VariationalELBO
    bound = tighter_gp.evaluate_bound(model, likelihood, train_x, train_y, objective=objective).item() / len(train_y)
    history = histories[name]
    milliseconds = 1000 * history.seconds / history.steps
    numbers = (bound, likelihood.noise.item(), *scores(model, likelihood), milliseconds)
    print(
        f"{name:8s}"
        + "".join(f"{value:9.4f}" for value in numbers)
        + f"   {history.stopped or 'all steps done'}, best {history.best_step}"
    )

# %% [markdown]
# A step of the tighter model costs what a step of SVGP costs, up to the noise of the clock. Now let a run die halfway and
# resume it: the losses are those of a run in one go.


# %%
def die_halfway(step):
    """A callback of `fit`, called after every step."""
    if step.step == 6:
        raise RuntimeError("power cut")


with tempfile.TemporaryDirectory() as folder:
    checkpoint = {"checkpoint": Path(folder) / "run.pt", "recipe": tighter_gp.Recipe(checkpoint_every=4)}
    few = {"batch_size": batch_size, "steps": 10, "seed": 1}

    model, likelihood = make(points)
    whole = tighter_gp.fit(model, likelihood, train_x, train_y, **few)

    model, likelihood = make(points)
    try:
        tighter_gp.fit(model, likelihood, train_x, train_y, callbacks=[die_halfway], **checkpoint, **few)
    except RuntimeError as error:
        print("the run ended with:", error)
    model, likelihood = make(points)  # a new process would start here
    resumed = tighter_gp.fit(model, likelihood, train_x, train_y, resume=True, **checkpoint, **few)

print("losses are the same:", whole.loss == resumed.loss)

# %% [markdown]
# ## Natural gradients
#
# q(u) is a Gaussian, and a step along its natural gradient often needs fewer iterations than Adam. `fit` takes it by default,
# whatever the form of q(u), and Adam trains the rest; `Recipe(natural=0)` leaves all to Adam. Both runs see the same batches.

# %%
recipes = {"Adam": tighter_gp.Recipe(natural=0), "natural gradients": tighter_gp.Recipe()}
curves = {}
for name, recipe in recipes.items():
    model, likelihood = make(points)
    options = {**settings, "epochs": max(2, epochs // 2), "recipe": recipe}
    curves[name] = tighter_gp.fit(model, likelihood, train_x, train_y, **options)

figure, axes = plt.subplots(1, 2, figsize=(10, 3.5), layout="constrained")
for (name, history), colour, line in zip(curves.items(), (BLUE, VERMILION), ("-", "--"), strict=True):
    window = np.ones(5) / 5
    smooth = np.convolve(history.loss, window, mode="valid")
    axes[0].plot(np.arange(len(smooth)), -smooth, color=colour, linestyle=line, label=name)
    step, nlpd = zip(*history.validation, strict=True)
    axes[1].plot(step, nlpd, color=colour, linestyle=line, marker="o", label=name)
axes[0].set(title="Tighter bound, mean of a few batches", xlabel="step", ylabel="bound per datum")
axes[1].set(title="Validation", xlabel="step", ylabel="mean NLPD")
for ax in axes:
    ax.legend()
plt.show()
for name, history in curves.items():
    print(
        f"{name:18s} {1000 * history.seconds / history.steps:6.2f} ms per step, last NLPD {history.validation[-1][1]:.4f}"
    )

# %% [markdown]
# With Gaussian noise there is also the closed form: `set_optimal_q` puts q(u) at its optimum for the current
# hyperparameters in one pass over the data. It is a cheap last step after any training.

# %%
model, likelihood = trained["T-SVGP"]
before = tighter_gp.evaluate_bound(model, likelihood, train_x, train_y).item() / len(train_y)
tighter_gp.set_optimal_q(model, likelihood, train_x, train_y)
after = tighter_gp.evaluate_bound(model, likelihood, train_x, train_y).item() / len(train_y)
print(f"tighter bound per datum: {before:.4f} before, {after:.4f} after")

# %% [markdown]
# ## Would more points help?
#
# `diagnose` compares the bounds of the trained model and says in a line what to try next. On this many points it leaves
# out the exact evidence and gives an upper bound instead.

# %%
print(tighter_gp.diagnose(model, likelihood, train_x, train_y))

# %% [markdown]
# ## Compiled steps
#
# With small batches much of a step is overhead of Python. In long runs on a CPU with a C++ compiler `fit` compiles its steps
# by itself; `Recipe(compile=...)` decides it for you. The first step then takes seconds.

# %%
can_compile = not QUICK and any(map(shutil.which, ("g++", "clang++", "cl")))
steps = 2 if QUICK else 150
for name, is_compiled in {"eager": False, "compiled": can_compile}.items():
    model, likelihood = make(points)
    times = [time.perf_counter()]
    tighter_gp.fit(
        model,
        likelihood,
        train_x,
        train_y,
        steps=steps,
        batch_size=batch_size,
        recipe=tighter_gp.Recipe(compile=is_compiled),
        callbacks=[lambda state, times=times: times.append(time.perf_counter())],
    )
    took = np.diff(times)
    print(f"{name:9s} first step {took[0]:5.2f} s, then {1000 * np.median(took[1:]):6.2f} ms each")

# %% [markdown]
# ## GPUs and several processes
#
# *CUDA.* Move model, likelihood and data to the device, as this notebook does with `device`; nothing else changes. Keep the
# data there if they fit: `fit` draws batches by index on the device. A numpy memory map also works as `x` and `y`, and only
# a batch of it is in memory at a time. Development and tests ran on CPUs.
#
# *torchrun.* Inside a process group, `fit` gives each process its part of every batch and sums the gradients; the result is
# that of one process, up to rounding. Save this as `train.py`, fill in the model, and start it with
# `torchrun --nproc_per_node=2 train.py`:
#
# ```python
# import torch, tighter_gp
#
# device = tighter_gp.training.distributed.start("cuda" if torch.cuda.is_available() else "cpu")
# model, likelihood, train_x, train_y = ...  # the same in every process, on `device`
# tighter_gp.fit(model, likelihood, train_x, train_y, batch_size=8192, checkpoint="run.pt", resume=True)
# tighter_gp.training.distributed.stop()
# ```
#
# *All data at once.* `tighter_gp.CollapsedGP` trains the collapsed bound with q(u) integrated out, a chunk of rows at a
# time, so memory does not grow with the number of rows.
