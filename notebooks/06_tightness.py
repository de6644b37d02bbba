# %% [markdown]
"""
# How tight is tight? When it helps, and when not

For Gaussian noise and fixed hyperparameters there is a whole chain of bounds between SGPR's and the log evidence. This
notebook walks along the chain, shows what moves its links apart, and uses `diagnose` to decide what to do about a model.
"""

# %%
import gpytorch
import matplotlib.pyplot as plt
import numpy as np
import torch

import tighter_gp

from shared import BLUE, DATA, GREEN, GREY, ORANGE, PURPLE, QUICK, VERMILION, device

torch.set_default_dtype(torch.float64)
torch.manual_seed(0)

# %% [markdown]
# ## Data
#
# A draw from a GP in two dimensions, so the right hyperparameters are known and nothing but the bound is at stake. With
# `TIGHTER_GP_DATA` set there are more points.

# %%
num_data = 120 if QUICK else 1500 if DATA else 600
true_lengthscale, true_noise = 0.3, 0.02

random = torch.Generator().manual_seed(0)
all_x = torch.rand(num_data + 200, 2, generator=random)
kernel = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())
kernel.outputscale, kernel.base_kernel.lengthscale = 1.0, true_lengthscale
with torch.no_grad():
    covariance = kernel(all_x).to_dense() + 1e-6 * torch.eye(len(all_x))
    all_f = torch.linalg.cholesky(covariance) @ torch.randn(len(all_x), generator=random)
noise_draw = torch.randn(len(all_x), generator=random)


def targets(noise):
    """The function seen through noise of this variance: training and test targets."""
    y = all_f + noise**0.5 * noise_draw
    return y[:num_data].to(device), y[num_data:].to(device)


train_x, test_x = all_x[:num_data].to(device), all_x[num_data:].to(device)
train_y, test_y = targets(true_noise)
print(f"{num_data} training points, lengthscale {true_lengthscale}, noise variance {true_noise}")


# %% [markdown]
# ## The chain
#
# A collapsed model is the simplest place to look: q(u) is at its optimum by construction. `diagnose` evaluates every link
# of the chain for it.


# %%
class SGPR(gpytorch.models.ExactGP):
    """Sparse GP regression with a choice of bound."""

    def __init__(self, x, y, likelihood, inducing_points, **kwargs):
        """`kwargs` go to the kernel: `bound=`, `blocks=`."""
        super().__init__(x, y, likelihood)
        self.mean_module = gpytorch.means.ZeroMean()
        base = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())
        self.covar_module = tighter_gp.TighterInducingPointKernel(
            base, inducing_points, likelihood, jitter_val=1e-8, **kwargs
        )

    def forward(self, x):
        """The prior."""
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


def make(y, num_inducing, noise=true_noise, lengthscale=true_lengthscale, **kwargs):
    """A model at given hyperparameters."""
    likelihood = gpytorch.likelihoods.GaussianLikelihood()
    model = SGPR(train_x, y, likelihood, tighter_gp.inducing.kmeans(train_x, num_inducing), **kwargs).to(device)
    likelihood.noise, model.covar_module.base_kernel.base_kernel.lengthscale = noise, lengthscale
    model.covar_module.base_kernel.outputscale = 1.0
    return model, likelihood


model, likelihood = make(train_y, 15)
num_blocks = 6 if QUICK else 30
diagnosis = tighter_gp.diagnose(model, likelihood, train_x, train_y, blocks=num_blocks)
print(diagnosis)

# %% [markdown]
# From the top: *F1* is SGPR. *F5* has one scale for all points. *F4* is the tighter bound, with a scale for each point. *FB*
# lets points within a block be correlated under q(f|u), and *F8* all of them. What is still missing then is the log
# evidence itself, and only inducing points can close that gap. The upper bound holds for any number of points, also where
# the evidence is too expensive.
#
# The same chain for a growing number of inducing points:

# %%
counts = (4, 8, 16) if QUICK else (5, 8, 12, 18, 27, 40, 60, 90)
chain = {
    "F1, SGPR": ("titsias", BLUE, "-"),
    "F5, one scale": ("spherical", PURPLE, "--"),
    "F4, tighter": ("tighter", VERMILION, "-"),
    "FB, blocks": ("block", ORANGE, "-."),
    "F8, full": ("full", GREEN, "-"),
}
by_count = []
for count in counts:
    model, likelihood = make(train_y, count)
    by_count.append(tighter_gp.diagnose(model, likelihood, train_x, train_y, blocks=num_blocks))

figure, axes = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
for label, (field, colour, line) in chain.items():
    values = np.array([getattr(one, field) for one in by_count]) / num_data
    exact = np.array([one.evidence for one in by_count]) / num_data
    axes[0].plot(counts, values, color=colour, linestyle=line, label=label)
    axes[1].loglog(counts, exact - values, color=colour, linestyle=line, label=label)
axes[0].plot(counts, exact, color="black", linewidth=1, linestyle=":", label="log evidence")
axes[0].set(title="Bounds at the true hyperparameters", xlabel="inducing points", ylabel="nats per datum")
axes[1].set(title="Distance from the log evidence", xlabel="inducing points", ylabel="nats per datum")
axes[1].set_xticks(counts, labels=[str(count) for count in counts])
axes[1].minorticks_off()
axes[0].legend(fontsize="small")
plt.show()

# %% [markdown]
# With few points the links are far apart. With many the residual is gone and all bounds agree; then the tighter bound
# neither helps nor hurts.
#
# ## What matters: residual over noise
#
# The price of a point is $\tfrac12 d_n/\sigma^2$ in SGPR and $\tfrac12 \log(1 + d_n/\sigma^2)$ in the tighter bound. So the
# gain is a function of $d_n/\sigma^2$ alone. Change the number of points and the noise, and plot one against the other:

# %%
noises = (0.01, 0.1) if QUICK else (0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
figure, ax = plt.subplots(figsize=(6.5, 4), layout="constrained")
for count, colour, marker in zip(counts[:3] if QUICK else (8, 18, 40), (BLUE, ORANGE, GREEN), "os^", strict=True):
    found = []
    for noise in noises:
        y, _ = targets(noise)
        model, likelihood = make(y, count, noise=noise)
        found.append(tighter_gp.diagnose(model, likelihood, train_x, y, max_exact=0))
    gain = [(one.tighter - one.titsias) / num_data for one in found]
    ax.loglog([one.mean_ratio for one in found], gain, color=colour, marker=marker, label=f"{count} inducing points")
ratio = np.logspace(-4, 2.5, 100)
ax.loglog(ratio, 0.5 * (ratio - np.log1p(ratio)), color="black", linestyle=":", label=r"all $d_n$ alike")
ax.set(
    title="What the tighter bound gains",
    xlabel=r"mean of $d_n/\sigma^2$",
    ylabel="F4 − F1, nats per datum",
    ylim=(1e-7, None),
)
ax.legend(fontsize="small")
plt.show()

# %% [markdown]
# The dotted line is the gain if all residuals were the same. For small ratios the gain falls with the square of the ratio,
# so below a certain point there is nothing to have. The tighter bound is for scarce inducing points and little noise.
#
# ## Does it help after training?
#
# Everything so far was at fixed hyperparameters. In training each bound finds its own. The next cell trains both bounds
# from the same start, over several noise levels, and compares the learnt noise with the true one, and the predictions.

# %%
steps = 3 if QUICK else 60
levels = (0.01, 0.1) if QUICK else (0.003, 0.02, 0.1, 0.5)
num_inducing = 12
rows = []
print(f"{'noise':>7s}{'bound':>9s}{'bound':>9s}{'noise/true':>12s}{'noise/true':>12s}{'NLPD':>9s}{'NLPD':>9s}")
print(f"{'':7s}{'SGPR':>9s}{'T-SGPR':>9s}{'SGPR':>12s}{'T-SGPR':>12s}{'SGPR':>9s}{'T-SGPR':>9s}")
for noise in levels:
    y, held_out = targets(noise)
    row = {"noise": noise}
    for bound in ("titsias", "tighter"):
        model, likelihood = make(y, num_inducing, noise=0.1, lengthscale=0.5, bound=bound)
        tighter_gp.fit(model, likelihood, train_x, y, steps=steps)
        q = tighter_gp.predict(model, test_x)
        row[bound] = (
            tighter_gp.evaluate_bound(model, likelihood, train_x, y).item() / num_data,
            likelihood.noise.item() / noise,
            -likelihood.log_marginal(held_out, q).mean().item(),
        )
    rows.append(row)
    pairs = zip(row["titsias"], row["tighter"], strict=True)
    text = [f"{a:{w}.3f}{b:{w}.3f}" for (a, b), w in zip(pairs, (9, 12, 9), strict=True)]
    print(f"{noise:7.3f}" + "".join(text))

figure, axes = plt.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
for bound, name, colour, marker in (("titsias", "SGPR", BLUE, "o"), ("tighter", "T-SGPR", VERMILION, "s")):
    axes[0].semilogx(levels, [row[bound][1] for row in rows], color=colour, marker=marker, label=name)
difference = [row["tighter"][2] - row["titsias"][2] for row in rows]
axes[1].semilogx(levels, difference, color=GREEN, marker="^", label="T-SGPR − SGPR")
axes[0].axhline(1.0, color="black", linewidth=1, linestyle=":", label="right")
axes[1].axhline(0.0, color="black", linewidth=1, linestyle=":", label="no difference")
axes[0].set(title="Learnt noise over true noise", xlabel="true noise variance", ylabel="ratio")
axes[1].set(
    title="Test points: difference of NLPD", xlabel="true noise variance", ylabel="nats per point (below 0: better)"
)
for ax in axes:
    ax.legend(fontsize="small")
plt.show()

# %% [markdown]
# With little noise SGPR learns far too much of it, and the tighter bound somewhat less. With much noise both are right and
# there is nothing to choose between them. Predictions improve less than bounds do; a better bound does not promise a
# better NLPD on every data set.
#
# ## Blocks
#
# Where the tighter bound is not enough and more inducing points are too expensive, blocks are a third way. Near points share
# much of their residual, so they should be in one block. The bound rises as blocks are merged, from F4 with one point per
# block to F8 with all in one, and so does the cost.

# %%
block_counts = (num_data, 20, 4, 1) if QUICK else (num_data, 200, 100, 50, 25, 12, 6, 3, 1)
model, likelihood = make(train_y, 15)
near, shuffled = [], []
for count in block_counts:
    labels = tighter_gp.blocks.partition(train_x, count)
    near.append(tighter_gp.diagnose(model, likelihood, train_x, train_y, blocks=labels, max_exact=0).block / num_data)
    labels = labels[torch.randperm(num_data, device=device)]
    shuffled.append(
        tighter_gp.diagnose(model, likelihood, train_x, train_y, blocks=labels, max_exact=0).block / num_data
    )
reference = tighter_gp.diagnose(model, likelihood, train_x, train_y)

figure, ax = plt.subplots(figsize=(6.5, 4), layout="constrained")
block_sizes = [num_data / count for count in block_counts]
ax.semilogx(block_sizes, near, color=ORANGE, marker="o", label="near points in a block")
ax.semilogx(block_sizes, shuffled, color=GREY, marker="s", label="random points in a block")
ax.axhline(reference.tighter / num_data, color=VERMILION, linestyle="--", label="F4, tighter")
ax.axhline(reference.full / num_data, color=GREEN, linestyle="--", label="F8, full")
ax.set(title="Bound against size of the blocks", xlabel="points per block", ylabel="nats per datum")
ax.legend(fontsize="small", loc="center left", bbox_to_anchor=(1.0, 0.5))
plt.show()

# %% [markdown]
# In an SVGP blocks are a conditional, `TighterVariationalStrategy(..., conditional=tighter_gp.Blocks(labels))`; in a
# collapsed model they belong to the kernel, `TighterInducingPointKernel(..., bound="block", blocks=labels)`. Here is the
# latter, trained like the models above.

# %%
labels = tighter_gp.blocks.partition(train_x, num_blocks)
print(f"{num_blocks} blocks of at most {labels.bincount().max().item()} points")
for bound in ("titsias", "tighter", "block"):
    kwargs = {"blocks": labels} if bound == "block" else {}
    model, likelihood = make(train_y, num_inducing, noise=0.1, lengthscale=0.5, bound=bound, **kwargs)
    history = tighter_gp.fit(model, likelihood, train_x, train_y, steps=steps)
    value = tighter_gp.evaluate_bound(model, likelihood, train_x, train_y).item() / num_data
    nlpd = -likelihood.log_marginal(test_y, tighter_gp.predict(model, test_x)).mean().item()
    seconds = history.seconds / history.steps
    print(
        f"{bound:8s} bound {value:8.4f}  noise {likelihood.noise.item():.4f}  NLPD {nlpd:8.4f}  {seconds:.3f} s per step"
    )

# %% [markdown]
# The bound with blocks is the highest. The predictive density on test points need not be: what was improved is the bound on
# the evidence, and the prediction follows only through the hyperparameters that training learns.
#
# ## Two warnings
#
# *Adding an inducing point may lower the tighter bound.* SGPR's bound never falls when a point is added; the tighter bound
# has no such law. Take a few inputs in one dimension, targets that are noise alone, and two inducing points. The next cell
# adds a third at every place of a grid.

# %%
line = torch.linspace(0, 1, 15, device=device).unsqueeze(-1)
small_noise = torch.tensor(0.01, device=device)
only_noise = (small_noise.cpu().sqrt() * torch.randn(len(line), generator=torch.Generator().manual_seed(0))).to(device)
narrow = gpytorch.kernels.RBFKernel().to(device)
narrow.lengthscale = 0.05
base_points = torch.tensor([[0.25], [0.75]], device=device)


def bound_with(points, bound):
    """A collapsed bound per datum of the one-dimensional problem."""
    with torch.no_grad():
        value = tighter_gp.collapsed_bound(narrow, points, line, only_noise, small_noise, bound=bound, jitter_val=1e-10)
    return value.item() / len(line)


places = torch.linspace(-0.1, 1.1, 25 if QUICK else 241, device=device)
figure, axes = plt.subplots(2, 1, figsize=(8, 4.5), sharex=True, layout="constrained")
for ax, bound, name, colour in ((axes[0], "titsias", "SGPR", BLUE), (axes[1], "tighter", "T-SGPR", VERMILION)):
    before = bound_with(base_points, bound)
    change = [bound_with(torch.cat([base_points, place.view(1, 1)]), bound) - before for place in places]
    print(f"{name:7s} change from one more point: lowest {min(change):+.4f}, highest {max(change):+.4f} nats per datum")
    ax.plot(places.cpu(), change, color=colour, label=f"{name}, change")
    ax.axhline(0.0, color="black", linewidth=1)
    ax.plot(base_points.cpu(), torch.zeros(2), "x", color="black", markersize=8, label="inducing points")
    ax.plot(line.cpu(), torch.zeros(len(line)), "|", color=GREY, markersize=12, label="inputs")
    ax.set_ylabel("nats per datum")
    ax.legend(fontsize="small", loc="center left", bbox_to_anchor=(1.0, 0.5))
axes[0].set_title("Change of the bound when a point is added")
axes[1].set_xlabel("place of the new point")
plt.show()

# %% [markdown]
# Between inputs a new point may lower the tighter bound. The greedy choice, the input with the largest residual, never
# lowers it at fixed hyperparameters.
#
# *The order holds at fixed hyperparameters.* Trained bounds need not be ordered, since each training ends at its own optimum,
# and the optimum found depends on the start.
#
# ## In short
#
# `diagnose` on a trained model says which of the three to try: the tighter bound, blocks, or more inducing points.

# %%
for count, noise in ((counts[0], 0.01), (counts[-1], 0.5)):
    y, _ = targets(noise)
    model, likelihood = make(y, count, noise=noise)
    print(f"{count} inducing points, noise variance {noise}:")
    print(tighter_gp.diagnose(model, likelihood, train_x, y).advice, "\n")
