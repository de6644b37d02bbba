# %% [markdown]
"""
# SOLVE-GP: a second set of inducing points

A sparse GP with many inducing points has a large covariance to factorise and a large q(u) to learn. SOLVE-GP (Shi,
Titsias and Mnih, 2020) splits the points into two sets that are orthogonal under the prior. Nothing larger than either
set is factorised, and q is two small Gaussians in place of a large one. This notebook shows what the second set adds,
where the tighter bound comes in, and what it all costs.
"""

# %%
import time

import gpytorch
import matplotlib.pyplot as plt
import numpy as np
import torch

import tighter_gp

from shared import BLUE, DATA, GREEN, ORANGE, QUICK, VERMILION, device

torch.set_default_dtype(torch.float64)
torch.manual_seed(0)

# %% [markdown]
# ## Data
#
# A wavy function of two inputs, so that the points can be drawn. With `TIGHTER_GP_DATA` set there are more of them.


# %%
def make_data(num_points, seed):
    """Inputs in the unit square, and targets with noise."""
    random = np.random.RandomState(seed)
    x = random.uniform(0, 1, (num_points, 2))
    y = np.sin(9 * x[:, 0]) * np.cos(7 * x[:, 1]) + x[:, 0] + 0.1 * random.standard_normal(num_points)
    return torch.from_numpy(x).to(device), torch.from_numpy(y).to(device)


train_x, train_y = make_data(300 if QUICK else 8000 if DATA else 2000, seed=0)
test_x, test_y = make_data(1000, seed=1)
centre = train_y.mean()
train_y, test_y = train_y - centre, test_y - centre

num_points = 8 if QUICK else 24
points = tighter_gp.inducing.kmeans(train_x, num_points)
first, second = tighter_gp.inducing.split_inducing_points(points)
print(f"{len(train_y)} training points; {num_points} inducing points, or {len(first)} and {len(second)}")


# %% [markdown]
# ## The model
#
# `SolveGPVariationalStrategy` takes the inducing points $Z$, the orthogonal points $O$ and a q for each. With GPyTorch's
# `VariationalELBO` it is SOLVE-GP; with `TighterELBO` it is tighter SOLVE-GP.


# %%
class SolveGP(gpytorch.models.ApproximateGP):
    """A sparse GP with one or two sets of points."""

    def __init__(self, inducing_points, orthogonal_points=None):
        """Without orthogonal points this is a (tighter) SVGP."""
        form = gpytorch.variational.CholeskyVariationalDistribution
        q_u = form(len(inducing_points))
        if orthogonal_points is None:
            strategy = tighter_gp.TighterVariationalStrategy(self, inducing_points, q_u)
        else:
            q_v = form(len(orthogonal_points))
            strategy = tighter_gp.SolveGPVariationalStrategy(self, inducing_points, orthogonal_points, q_u, q_v)
        super().__init__(strategy)
        self.mean_module = gpytorch.means.ZeroMean()
        self.covar_module = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel(ard_num_dims=2))

    def forward(self, x):
        """The prior."""
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


def make(*points):
    """A model and its likelihood with the same first hyperparameters for all."""
    model = SolveGP(*points).to(train_x)
    likelihood = gpytorch.likelihoods.GaussianLikelihood().to(train_x)
    model.covar_module.base_kernel.lengthscale, likelihood.noise = 0.25, 0.05
    return model, likelihood


standard, tighter = gpytorch.mlls.VariationalELBO, tighter_gp.TighterELBO

# %% [markdown]
# ## What the second set adds
#
# Fix the hyperparameters and put q at its optimum. Then the bounds are ordered: the first set alone, both sets with
# independent q(u) and q(v), both sets as one with a full covariance. The tighter bound is above the standard one in each row.

# %%
rows = {
    f"Z alone ({len(first)})": (first,),
    f"SOLVE-GP, Z and O ({len(first)} + {len(second)})": (first, second),
    f"SVGP, Z and O as one set ({num_points})": (points,),
}
print(f"{'':36s}{'standard':>10s}{'tighter':>10s}")
fixed = {}
for name, sets in rows.items():
    model, likelihood = make(*sets)
    tighter_gp.set_optimal_q(model, likelihood, train_x, train_y)
    fixed[name] = [
        tighter_gp.evaluate_bound(model, likelihood, train_x, train_y, objective=objective).item() / len(train_y)
        for objective in (standard, tighter)
    ]
    print(f"{name:36s}" + "".join(f"{bound:10.4f}" for bound in fixed[name]))

# %% [markdown]
# The second row is below the third, because q(u) and q(v) may not be correlated. How much that costs depends on the data.
#
# The picture shows the variance that each set of points leaves unexplained. The orthogonal points do not repeat what the
# inducing points have said; they fill in the gaps.

# %%
resolution = 30 if QUICK else 60
axis = torch.linspace(0, 1, resolution, device=device)
across, up = torch.meshgrid(axis, axis, indexing="xy")
grid = torch.stack([across.flatten(), up.flatten()], -1)

figure, axes = plt.subplots(1, 2, figsize=(10, 4), sharey=True, layout="constrained")
for ax, sets, title in ((axes[0], (first,), "left by Z alone"), (axes[1], (first, second), "left by Z and O")):
    model, _ = make(*sets)
    with torch.no_grad():
        residual = model.variational_strategy.project(grid).residual.reshape(resolution, resolution).cpu()
    if ax is axes[0]:
        largest = residual.max().item()
    image = ax.imshow(residual, extent=(0, 1, 0, 1), origin="lower", cmap="cividis", vmin=0, vmax=largest)
    ax.scatter(*first.cpu().T, marker="x", color="white", s=40, linewidths=2, label="inducing points Z")
    if len(sets) == 2:
        ax.scatter(*second.cpu().T, marker="o", facecolors="none", edgecolors=ORANGE, s=40, label="orthogonal points O")
    ax.set(title=f"Residual variance {title}", xlabel="first input")
    ax.legend(
        loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=2, fontsize="small", frameon=True, facecolor="#999999"
    )
    ax.grid(visible=False)
axes[0].set_ylabel("second input")
figure.colorbar(image, ax=axes, label=r"residual $d$")
plt.show()

# %% [markdown]
# ## Training
#
# Four methods with the same number of points in all, the same first hyperparameters, the same batches and the same number
# of steps. Each starts with q at its optimum. `fit` takes the strategy as it is.

# %%
methods = {
    "SVGP": ((points,), standard),
    "T-SVGP": ((points,), tighter),
    "SOLVE-GP": ((first, second), standard),
    "T-SOLVE-GP": ((first, second), tighter),
}
results, trained = {}, {}
for name, (sets, objective) in methods.items():
    model, likelihood = make(*sets)
    tighter_gp.set_optimal_q(model, likelihood, train_x, train_y)
    history = tighter_gp.fit(
        model,
        likelihood,
        train_x,
        train_y,
        objective=objective,
        epochs=1 if QUICK else 100,
        batch_size=200 if QUICK else 500,
        lr=0.02,
    )
    bound = tighter_gp.evaluate_bound(model, likelihood, train_x, train_y, objective=objective).item() / len(train_y)
    q = tighter_gp.predict(model, test_x)
    with torch.no_grad():
        nlpd = -likelihood.log_marginal(test_y, q).mean().item()
    results[name] = {
        "bound": bound,
        "noise": likelihood.noise.item(),
        "RMSE": (q.mean - test_y).square().mean().sqrt().item(),
        "NLPD": nlpd,
        "seconds": history.seconds,
    }
    trained[name] = model, likelihood

columns = ("bound", "noise", "RMSE", "NLPD", "seconds")
print("".join(f"{column:>12s}" for column in ("", *columns)))
for name, result in results.items():
    print(f"{name:>12s}" + "".join(f"{result[column]:12.4f}" for column in columns))

# %%
figure, ax = plt.subplots(figsize=(6, 3), layout="constrained")
colours = {"SVGP": BLUE, "T-SVGP": VERMILION, "SOLVE-GP": ORANGE, "T-SOLVE-GP": GREEN}
for name, result in results.items():
    ax.plot([result["bound"]], [name], marker="o", markersize=10, color=colours[name])
    ax.annotate(f"{result['bound']:.4f}", (result["bound"], name), (0, 9), textcoords="offset points", ha="center")
ax.margins(x=0.2, y=0.25)
ax.invert_yaxis()
ax.set(title="Trained bounds (further right is tighter)", xlabel="bound per datum")
plt.show()

# %% [markdown]
# Within a pair the tighter bound is the higher one. Between SVGP and SOLVE-GP with equal numbers of points, SVGP has
# the richer q, and SOLVE-GP gives little away.
#
# ## What it costs
#
# First the size of q. A covariance has a number of parameters that grows with the square of its size, so two halves have
# about half as many as the whole.

# %%
for name, sets in {"SVGP": (points,), "SOLVE-GP": (first, second)}.items():
    numbers = sum(len(z) + len(z) * (len(z) + 1) // 2 for z in sets)
    print(f"{name:9s} {numbers} numbers in q")

# %% [markdown]
# Then the time of a training step as the total number of points grows. Both models hold the same number of points.

# %%
batch = 100 if QUICK else 256
sizes = (8, 16) if QUICK else (64, 128, 256, 512, 1024)
x, y = train_x[:batch].float(), train_y[:batch].float()


def step_time(*sets, repeats=2 if QUICK else 5):
    """Milliseconds of a forward and backward pass, best of a few."""
    model = SolveGP(*sets).to(x)
    likelihood = gpytorch.likelihoods.GaussianLikelihood().to(x)
    model.covar_module.base_kernel.lengthscale = 0.05
    mll = tighter_gp.TighterELBO(likelihood, model, num_data=len(train_y))
    best = float("inf")
    for _ in range(repeats):
        model.zero_grad()
        started = time.perf_counter()
        (-mll(model(x), y)).backward()
        if device == "cuda":
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - started)
    return 1000 * best


times = {"T-SVGP": [], "T-SOLVE-GP": []}
print(f"{'points':>8s}" + "".join(f"{name:>14s}" for name in times) + "   (ms per step)")
for size in sizes:
    chosen = tighter_gp.inducing.random_subset(train_x, size).float()
    times["T-SVGP"].append(step_time(chosen))
    times["T-SOLVE-GP"].append(step_time(*tighter_gp.inducing.split_inducing_points(chosen)))
    print(f"{size:8d}" + "".join(f"{values[-1]:14.2f}" for values in times.values()))

figure, ax = plt.subplots(figsize=(6, 3.5), layout="constrained")
for (name, values), marker in zip(times.items(), "os", strict=True):
    ax.loglog(sizes, values, color=colours[name], marker=marker, label=name)
ax.set_xticks(sizes, labels=[str(size) for size in sizes])
ax.minorticks_off()
ax.set(title="A training step", xlabel="points in all", ylabel="milliseconds")
ax.legend()
plt.show()

# %% [markdown]
# On a single CPU core the two curves lie close together: besides the factorisations, a step evaluates the kernel and
# projects the batch, and that is the same work for both. Time your own case before you choose.
#
# A last word on diagnosis: `diagnose` works for SOLVE-GP too. It reports the bounds of one joint q over both sets, and how
# much the current, independent one gives away.

# %%
model, likelihood = trained["T-SOLVE-GP"]
print(tighter_gp.diagnose(model, likelihood, train_x, train_y, max_exact=0 if QUICK else 2000).advice)
