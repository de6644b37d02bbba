# %% [markdown]
"""
# Regression: two changed lines

A sparse GP summarises the data in a few inducing points. With too few of them the standard bound on the log
evidence is loose. Training then does strange things to the hyperparameters: it inflates the noise and shrinks the
kernel, because that makes the bound less loose. The tighter bound charges less for what the inducing points miss, at the
same cost per step.

This notebook fits one small data set in four ways and then looks at the reason.
"""

# %%
from pathlib import Path

import gpytorch
import matplotlib.pyplot as plt
import numpy as np
import torch

import tighter_gp

from shared import BLUE, DATA, GREEN, GREY, ORANGE, QUICK, VERMILION

torch.set_default_dtype(torch.float64)
torch.manual_seed(0)

# %% [markdown]
# ## Data
#
# A smooth function with two frequencies, seen through a little noise. If the environment variable `TIGHTER_GP_DATA` names
# a folder with `snelson.csv`, Snelson's well-known set is used instead.


# %%
def toy_function(x):
    """The function without noise."""
    return np.sin(2 * x) + 0.5 * np.cos(3 * x + 1)


if DATA and (Path(DATA) / "snelson.csv").is_file():
    table = torch.from_numpy(np.loadtxt(Path(DATA) / "snelson.csv", delimiter=","))
    table = table[torch.randperm(len(table))]
    table[:, 1] -= table[:, 1].mean()
    test, train = table[: len(table) // 4], table[len(table) // 4 :]
    true_noise = None
else:
    random, stddev = np.random.RandomState(0), 0.1
    x = random.uniform(0, 6, 1200)
    table = torch.from_numpy(np.stack([x, toy_function(x) + stddev * random.standard_normal(1200)], -1))
    train, test = table[:200], table[200:]
    true_noise = stddev**2

train_x, train_y, test_x, test_y = train[:, :1], train[:, 1], test[:, :1], test[:, 1]
grid = torch.linspace(train_x.min() - 0.5, train_x.max() + 0.5, 200).unsqueeze(-1)

num_inducing = 5
inducing_points = tighter_gp.inducing.kmeans(train_x, num_inducing)
print(f"{len(train_y)} training points, {len(test_y)} test points, {num_inducing} inducing points")
if true_noise:
    print(f"noise variance the data were made with: {true_noise:.3f}")

# %% [markdown]
# ## The models
#
# First a sparse variational GP (SVGP), as in GPyTorch's tutorial. The argument `strategy` is where the first of the two
# lines changes: `gpytorch.variational.VariationalStrategy` becomes `tighter_gp.TighterVariationalStrategy`.


# %%
class SVGP(gpytorch.models.ApproximateGP):
    """GPyTorch's sparse variational GP; the strategy is what changes."""

    def __init__(self, inducing_points, strategy):
        """A constant mean and a squared exponential kernel."""
        q = gpytorch.variational.CholeskyVariationalDistribution(inducing_points.size(0))
        super().__init__(strategy(self, inducing_points, q))
        self.mean_module = gpytorch.means.ConstantMean()
        self.covar_module = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())

    def forward(self, x):
        """The prior."""
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


# %% [markdown]
# The second line is the objective: `gpytorch.mlls.VariationalELBO` becomes `tighter_gp.TighterELBO`. Everything else
# stays. Here is one evaluation of each, with the same parameters.

# %%
likelihood = gpytorch.likelihoods.GaussianLikelihood()

standard = SVGP(inducing_points, gpytorch.variational.VariationalStrategy)
standard_mll = gpytorch.mlls.VariationalELBO(likelihood, standard, num_data=len(train_y))

tighter = SVGP(inducing_points, tighter_gp.TighterVariationalStrategy)
tighter_mll = tighter_gp.TighterELBO(likelihood, tighter, num_data=len(train_y))

standard(train_x), tighter(train_x)  # the first call initialises q(u)
tighter.load_state_dict(standard.state_dict())
print(f"standard bound per datum: {standard_mll(standard(train_x), train_y).item():.4f}")
print(f"tighter bound per datum:  {tighter_mll(tighter(train_x), train_y).item():.4f}")
print("same parameters in both models:", set(tighter.state_dict()) == set(standard.state_dict()))

# %% [markdown]
# The state dict of one loads into the other. With Gaussian noise the tighter model has no parameter of its own.
#
# With few data and Gaussian noise one can also integrate q(u) out (SGPR). There a single line changes, the kernel of an
# `ExactGP`. `bound="titsias"` gives back GPyTorch's own bound, which the next cell checks.


# %%
class SGPR(gpytorch.models.ExactGP):
    """Collapsed sparse GP regression; the kernel is what changes."""

    def __init__(self, likelihood, make_kernel):
        """A constant mean and a squared exponential kernel behind inducing points."""
        super().__init__(train_x, train_y, likelihood)
        self.mean_module = gpytorch.means.ConstantMean()
        base = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())
        self.covar_module = make_kernel(base, inducing_points.clone(), likelihood)

    def forward(self, x):
        """The prior."""
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


def standard_kernel(base, points, likelihood):
    """GPyTorch's bound."""
    return tighter_gp.TighterInducingPointKernel(base, points, likelihood, bound="titsias")


for name, make_kernel in {
    "gpytorch.kernels.InducingPointKernel": gpytorch.kernels.InducingPointKernel,
    "TighterInducingPointKernel, bound='titsias'": standard_kernel,
    "TighterInducingPointKernel": tighter_gp.TighterInducingPointKernel,
}.items():
    model = SGPR(likelihood, make_kernel)
    bound = tighter_gp.evaluate_bound(model, likelihood, train_x, train_y) / len(train_y)
    print(f"{name:45s} bound per datum {bound.item():.6f}")

# %% [markdown]
# ## Four fits
#
# `tighter_gp.fit` trains any of these models. Your own loop works just as well; the objective is called as before,
# `-mll(model(x), y)`. All four start from the same place. Adam's learning rate was chosen, among a few, so that both
# uncollapsed models end where their collapsed counterparts do.

# %%
steps = 10 if QUICK else 300


def start(model, likelihood):
    """The same first hyperparameters for all."""
    kernel = getattr(model.covar_module, "base_kernel", model.covar_module)
    kernel = kernel if isinstance(kernel, gpytorch.kernels.ScaleKernel) else model.covar_module
    kernel.outputscale, kernel.base_kernel.lengthscale, likelihood.noise = 1.0, 1.0, 0.1
    return kernel


def inducing_points_of(model):
    """They belong to the kernel of an SGPR and to the strategy of an SVGP."""
    return (model.covar_module if isinstance(model, SGPR) else model.variational_strategy).inducing_points


def train_one(name):
    """Train one of the four and collect what the table and the figures need."""
    likelihood = gpytorch.likelihoods.GaussianLikelihood()
    is_tighter = name.startswith("T-")
    objective = tighter_gp.TighterELBO if is_tighter else gpytorch.mlls.VariationalELBO
    if name.endswith("SGPR"):
        model = SGPR(likelihood, tighter_gp.TighterInducingPointKernel if is_tighter else standard_kernel)
        kernel = start(model, likelihood)
        tighter_gp.fit(model, likelihood, train_x, train_y, steps=steps)
        bound = tighter_gp.evaluate_bound(model, likelihood, train_x, train_y)
    else:
        # The tighter strategy under VariationalELBO is plain SVGP, and lets us evaluate both bounds afterwards.
        model = SVGP(inducing_points, tighter_gp.TighterVariationalStrategy)
        kernel = start(model, likelihood)
        tighter_gp.set_optimal_q(model, likelihood, train_x, train_y)
        tighter_gp.fit(
            model, likelihood, train_x, train_y, objective=objective, batch_size=None, steps=5 * steps, lr=0.05
        )
        bound = tighter_gp.evaluate_bound(model, likelihood, train_x, train_y, objective=objective)
    prediction = tighter_gp.predict(model, test_x)
    return {
        "model": model,
        "likelihood": likelihood,
        "kernel": kernel,
        "inducing_points": inducing_points_of(model).detach(),
        "bound": bound.item() / len(train_y),
        "exact": tighter_gp.diagnose(model, likelihood, train_x, train_y).evidence / len(train_y),
        "noise": likelihood.noise.item(),
        "variance": kernel.outputscale.item(),
        "rmse": (prediction.mean - test_y).square().mean().sqrt().item(),
        "nlpd": -likelihood.log_marginal(test_y, prediction).mean().item(),
    }


results = {name: train_one(name) for name in ("SGPR", "T-SGPR", "SVGP", "T-SVGP")}

columns = ("bound", "exact", "noise", "variance", "rmse", "nlpd")
print("".join(f"{column:>10s}" for column in ("", *columns)))
for name, result in results.items():
    print(f"{name:>10s}" + "".join(f"{result[column]:10.4f}" for column in columns))

# %% [markdown]
# *bound* is the trained lower bound per datum and *exact* the log evidence per datum of the full GP at the learnt
# hyperparameters. The gap between them is what the approximation costs. *noise* is the learnt noise variance and
# *variance* that of the kernel; RMSE and NLPD are on test points, and lower is better.
#
# Compare the pairs. The tighter fits have the higher bound, less noise and a larger kernel variance, and the evidence
# at their hyperparameters is higher. SGPR and SVGP train one and the same bound, with q(u) integrated out or optimised, and
# so do T-SGPR and T-SVGP: within a pair the numbers agree when both find the same optimum.

# %%
figure, axes = plt.subplots(2, 2, figsize=(10, 5.5), sharex=True, sharey=True, layout="constrained")
for ax, (name, result) in zip(axes.flat, results.items(), strict=True):
    colour = VERMILION if name.startswith("T-") else BLUE
    q = tighter_gp.predict(result["model"], grid)
    error = 2 * (q.variance + result["noise"]).sqrt()
    ax.plot(train_x, train_y, ".", color=GREY, markersize=4, label="data")
    ax.plot(grid, q.mean, color=colour, label="mean")
    ax.fill_between(grid[:, 0], q.mean - error, q.mean + error, color=colour, alpha=0.2, label="mean ± 2 std of y")
    for point in result["inducing_points"]:
        ax.axvline(point.item(), color="black", linewidth=0.8, linestyle=":")
    ax.set_title(f"{name}: noise variance {result['noise']:.4f}")
axes[0, 0].legend(loc="lower left", fontsize="small")
for ax in axes[1]:
    ax.set_xlabel("x  (dotted: inducing points)")
for ax in axes[:, 0]:
    ax.set_ylabel("y")
plt.show()

# %% [markdown]
# Near the inducing points, where only the noise is left, the bands of the tighter fits are narrower. The means hardly
# differ: with this much data the mean is easy, and it is the hyperparameters and the error bars that suffer from a loose
# bound.
#
# ## Why the scales are below one
#
# Inducing variables *u* leave a part of the prior variance of each point unexplained, the residual $d_n$. SVGP takes
# q(f|u) = p(f|u), so every training point keeps the whole of $d_n$, although its own observation says a good deal about
# it. The tighter family lets q(f|u) be narrower: the variance becomes $s_n + m_n d_n$ with $s_n$ from q(u), and the best
# scale for Gaussian noise is
#
# $$m_n = \frac{\sigma^2}{\sigma^2 + d_n}.$$
#
# The next cell computes all of this at the hyperparameters of the tighter fit.

# %%
result = results["T-SVGP"]
model, likelihood, kernel = result["model"], result["likelihood"], result["kernel"]

with torch.no_grad():
    order = train_x[:, 0].argsort()
    x, y, noise = train_x[order], train_y[order], likelihood.noise
    z = model.variational_strategy.inducing_points.detach()
    tighter_gp.set_optimal_q(model, likelihood, x, y)
    jitter = 1e-8 * torch.eye(len(z))
    projection = tighter_gp.maths.linalg.project(
        tighter_gp.maths.linalg.cholesky(kernel(z).to_dense() + jitter), kernel(z, x).to_dense()
    )
    residual = tighter_gp.maths.linalg.residual_variance(kernel(x, diag=True), projection)
    scale = tighter_gp.maths.bounds.optimal_scale(residual, 1 / noise)
    q = tighter_gp.maths.moments.optimal_whitened(projection, y - model.mean_module(x), noise.expand_as(y))
    explained = tighter_gp.maths.moments.explained_variance(projection, q)
    covariance = kernel(x).to_dense()
    gain = torch.linalg.solve(covariance + noise * torch.eye(len(x)), covariance)
    exact = (covariance - covariance @ gain).diagonal()

figure, axes = plt.subplots(3, 1, figsize=(9, 7.5), sharex=True, layout="constrained")
axes[0].plot(x, residual, color=ORANGE, label=r"residual $d_n$")
axes[0].axhline(noise.item(), color="black", linestyle="--", linewidth=1, label=r"noise variance $\sigma^2$")
axes[0].set(title=r"What the inducing points leave: $d_n$", ylabel="variance")
axes[1].plot(x, scale, color=GREEN, label=r"$m_n = \sigma^2/(\sigma^2 + d_n)$")
axes[1].axhline(1.0, color=BLUE, linestyle="--", linewidth=1, label="SVGP: 1")
axes[1].set(title=r"The best scale: $m_n$", ylabel=r"$m_n$", ylim=(0, 1.08))
axes[2].semilogy(x, explained + residual, color=BLUE, label=r"SVGP: $s_n + d_n$")
axes[2].semilogy(x, explained + scale * residual, color=VERMILION, label=r"tighter: $s_n + m_n d_n$")
axes[2].semilogy(x, exact, color="black", linestyle="--", linewidth=1, label="exact GP")
axes[2].set(title="Variance of f at the training points", ylabel="variance", xlabel="x  (triangles: inducing points)")
for ax in axes:
    ax.plot(z, torch.zeros(len(z)), "^", color="black", transform=ax.get_xaxis_transform(), clip_on=False)
    ax.legend(fontsize="small", loc="center left", bbox_to_anchor=(1.0, 0.5))
plt.show()

print(f"mean variance at the training points, SVGP:    {(explained + residual).mean():.5f}")
print(f"mean variance at the training points, tighter: {(explained + scale * residual).mean():.5f}")
print(f"mean variance at the training points, exact:   {exact.mean():.5f}")

# %% [markdown]
# Where an inducing point is near, the residual vanishes, $m_n$ is one and nothing changes. In between the residual is about
# as large as the noise, towards the ends it is larger, and SVGP believes f to be far less certain than the exact GP does.
# The scale takes a good part of that back.
#
# A narrower q(f|u) is not free: it costs $\tfrac12 (m_n - 1 - \log m_n)$ nats per point. At the best $m_n$ the two together
# come to $\tfrac12 \log(1 + d_n/\sigma^2)$, where SVGP pays $\tfrac12 d_n/\sigma^2$.

# %%
ratio = torch.linspace(0, 5, 100)
one = torch.ones(())
pay = lambda penalty: [penalty(value.view(1), one).item() for value in ratio]

figure, ax = plt.subplots(figsize=(6, 3.5), layout="constrained")
ax.plot(ratio, pay(tighter_gp.maths.bounds.trace_penalty), color=BLUE, label=r"SVGP, SGPR: $\frac{1}{2} d/\sigma^2$")
ax.plot(
    ratio,
    pay(tighter_gp.maths.bounds.log_penalty),
    color=VERMILION,
    label=r"tighter: $\frac{1}{2}\log(1 + d/\sigma^2)$",
)
ax.set(title="Price of the residual of one point", xlabel=r"$d_n / \sigma^2$", ylabel="nats")
ax.legend()
plt.show()

total = {
    "SVGP": tighter_gp.maths.bounds.trace_penalty(residual, noise).item() / len(x),
    "tighter": tighter_gp.maths.bounds.log_penalty(residual, noise).item() / len(x),
}
for name, price in total.items():
    print(f"{name:8s} pays {price:.4f} nats per point on these data, at the same parameters")

# %% [markdown]
# The standard price grows in proportion to $d_n/\sigma^2$. The cheapest way out is to raise $\sigma^2$ and to lower the
# kernel variance, and that is what the table showed. The logarithm is milder, so training has less reason to.
#
# ## Predictions
#
# In eval mode a tighter model predicts exactly as SVGP does at the same parameters. The narrower q(f|u) also has something
# to say about test points near training points. `predict` adds that term if asked: `"exact"` costs a factorisation of the
# training covariance once, `"subset"` looks at a few training points for each test point.

# %%
choices = {"drop": (BLUE, "-"), "subset": (ORANGE, "--"), "exact": (VERMILION, "-")}
figure, ax = plt.subplots(figsize=(9, 3.2), layout="constrained")
for last_term, (colour, line) in choices.items():
    arguments = {} if last_term == "drop" else {"likelihood": likelihood, "train_x": train_x}
    q = tighter_gp.predict(model, grid, last_term, **arguments)
    ax.semilogy(grid, q.variance.sqrt(), color=colour, linestyle=line, label=last_term)
    q = tighter_gp.predict(model, test_x, last_term, **arguments)
    print(f"{last_term:8s} mean NLPD on test points {-likelihood.log_marginal(test_y, q).mean().item():.4f}")
ax.set(title="Predictive standard deviation of f", xlabel="x", ylabel="std of f")
ax.legend(title="last_term")
plt.show()

# %% [markdown]
# ## What to remember
#
# - Two lines change for an SVGP, one for an SGPR.
# - The bound is higher at the same parameters, always. How much depends on $d_n/\sigma^2$: with many inducing points or
#   much noise there is little to gain. `06_tightness` looks at that, and `tighter_gp.diagnose` tells for your model.
# - This data set was chosen to make the effect visible.
