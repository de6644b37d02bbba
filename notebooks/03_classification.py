# %% [markdown]
"""
# Classification

Without Gaussian noise the best scales of q(f|u) have no closed form. `tighter_gp` offers several ways to choose them.
This notebook compares them on two classes in the plane, where one can look at them, and then on handwritten digits with
a softmax. On the way it says which of the objectives are strict lower bounds on the log evidence.
"""

# %%
import gzip
import math
import warnings
from pathlib import Path

import gpytorch
import matplotlib.pyplot as plt
import numpy as np
import torch
from sklearn.datasets import load_digits

import tighter_gp
from tighter_gp.conditionals import BetaConditional

from shared import BLUE, DATA, GREEN, ORANGE, PURPLE, QUICK, VERMILION, device

torch.set_default_dtype(torch.float64)

# %% [markdown]
# ## Two classes in the plane
#
# Two interleaved arcs with noise, made by a formula.


# %%
def make_arcs(num_points, seed):
    """Inputs and labels 0 and 1."""
    random = np.random.RandomState(seed)
    label = np.arange(num_points) % 2
    angle = math.pi * random.uniform(0, 1, num_points)
    x = np.stack([np.cos(angle), np.sin(angle)], -1) * np.where(label, -1, 1)[:, None]
    x += np.stack([label - 0.5, 0.25 * np.where(label, 1, -1)], -1) + 0.3 * random.standard_normal((num_points, 2))
    return torch.from_numpy(x).to(device), torch.from_numpy(label).to(device, torch.float64)


train_x, train_y = make_arcs(100 if QUICK else 300, seed=0)
test_x, test_y = make_arcs(500, seed=1)
num_inducing = 6
points = tighter_gp.inducing.kmeans(train_x, num_inducing)
print(f"{len(train_y)} training points, {num_inducing} inducing points")


# %% [markdown]
# The model is the usual one. `conditional=` says who chooses the scales $m_n$:
#
# | `conditional` | scales | parameters |
# | --- | --- | --- |
# | `"scalar"` | one $m$ for all points | one, learned |
# | `"beta"` | $m_n = \beta / (\beta + d_n)$ | one, learned |
# | `"optimal"` | $m_n = 1/(1 + \lambda_n d_n)$, the best at the current q | none |
# | `PerPoint(N)` | one $m_n$ per training point | one per point, learned |
#
# Here $d_n$ is the variance that the inducing points leave unexplained, and $\lambda_n$ the expected curvature of
# $-\log p(y_n|f)$, which plays the part of $1/\sigma^2$. SVGP has $m_n = 1$.
#
# The best $\beta$ is about one over the curvature, and grows by orders of magnitude as the classes part; it is learned on a
# log scale.


# %%
class Classifier(gpytorch.models.ApproximateGP):
    """An SVGP for one latent function."""

    def __init__(self, inducing_points, strategy=tighter_gp.TighterVariationalStrategy, **kwargs):
        """`kwargs` go to the strategy."""
        q = gpytorch.variational.CholeskyVariationalDistribution(inducing_points.size(0))
        super().__init__(strategy(self, inducing_points, q, **kwargs))
        self.mean_module = gpytorch.means.ConstantMean()
        self.covar_module = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())

    def forward(self, x):
        """The prior."""
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


likelihood = tighter_gp.likelihoods.BernoulliLogitLikelihood().to(device)
steps = 8 if QUICK else 400


def fit_binary(inducing_points, conditional, steps=steps, learn=True):
    """Train one classifier on all points at each step; returns model and bound per datum."""
    torch.manual_seed(0)
    if conditional is None:
        model = Classifier(inducing_points, gpytorch.variational.VariationalStrategy, learn_inducing_locations=learn)
        objective = gpytorch.mlls.VariationalELBO
    else:
        model = Classifier(inducing_points, conditional=conditional, learn_inducing_locations=learn)
        objective = tighter_gp.TighterELBO
    model.to(train_x).covar_module.outputscale = 4.0
    history = tighter_gp.fit(
        model, likelihood, train_x, train_y, objective=objective, batch_size=None, steps=steps, lr=0.05
    )
    return model, -history.loss[-1]


def beta_from(start, batch_shape=torch.Size()):
    """The conditional "beta", starting where all classes are equally likely."""
    conditional = BetaConditional(batch_shape)
    conditional.beta = start
    return conditional


choices = {
    "SVGP": (None, BLUE),
    "scalar": ("scalar", PURPLE),
    "beta": (beta_from(4.0), ORANGE),
    "optimal": ("optimal", VERMILION),
    "PerPoint": (tighter_gp.PerPoint(len(train_y)), GREEN),
}
binary = {name: fit_binary(points, conditional) for name, (conditional, _) in choices.items()}

# An inducing point at every input leaves nothing unexplained: what variational inference can reach without sparsity.
_, dense_bound = fit_binary(train_x, None, steps=steps // 4, learn=False)

print(f"{'':10s}{'bound':>9s}{'error':>9s}{'NLPD':>9s}{'kernel variance':>17s}")
for name, (model, bound) in binary.items():
    model.eval()
    with torch.no_grad():
        q = model(test_x)
        density = likelihood.log_marginal(test_y, q).mean().item()
        error = ((q.mean > 0) != (test_y > 0.5)).double().mean().item()
    print(f"{name:10s}{bound:9.4f}{error:9.4f}{-density:9.4f}{model.covar_module.outputscale.item():17.3f}")
print(f"{'all inputs':10s}{dense_bound:9.4f}   (SVGP with an inducing point at every input)")

# %% [markdown]
# *bound* is per datum, *error* is the share of test points on the wrong side, and NLPD the mean negative log predictive
# density. `"optimal"` has nothing to learn and takes the best scale of each point at each step. `PerPoint` has to learn
# the same scales one by one. `"scalar"` and `"beta"` fit one number to all points; which of them is better depends on the
# data. All of them can reach SVGP's bound, since $m_n = 1$ is among their choices.

# %%
margin = 0.5
low, high = train_x.min(0).values - margin, train_x.max(0).values + margin
resolution = 30 if QUICK else 60
across, up = torch.meshgrid(
    *(torch.linspace(low[i].item(), high[i].item(), resolution, device=device) for i in range(2)), indexing="xy"
)
grid = torch.stack([across.flatten(), up.flatten()], -1)

figure, axes = plt.subplots(1, 2, figsize=(10, 4), sharex=True, sharey=True, layout="constrained")
for ax, name in zip(axes, ("SVGP", "optimal"), strict=True):
    model, _ = binary[name]
    with torch.no_grad():
        probability = likelihood(model(grid)).probs.reshape(resolution, resolution).cpu()
    extent = (low[0].item(), high[0].item(), low[1].item(), high[1].item())
    image = ax.imshow(probability, extent=extent, origin="lower", aspect="auto", cmap="PuOr", vmin=0, vmax=1, alpha=0.7)
    for label, colour, marker in ((0, ORANGE, "o"), (1, PURPLE, "s")):
        rows = (train_y == label).cpu()
        ax.scatter(
            *train_x.cpu()[rows].T, s=9, color=colour, edgecolors="black", linewidths=0.3, marker=marker, label=label
        )
    z = model.variational_strategy.inducing_points.detach().cpu()
    ax.scatter(*z.T, marker="x", color="black", s=45, linewidths=2, label="inducing points")
    ax.contour(across.cpu(), up.cpu(), probability, levels=[0.1, 0.5, 0.9], colors="black", linewidths=[0.6, 1.6, 0.6])
    ax.set(title=name, xlabel="first input", xlim=extent[:2], ylim=extent[2:])
    ax.grid(visible=False)
axes[0].set_ylabel("second input")
axes[0].legend(loc="lower left", fontsize="small", frameon=True)
figure.colorbar(image, ax=axes, label="probability of class 1")
plt.show()

# %% [markdown]
# The contours are at probabilities of one tenth, a half and nine tenths.
#
# ## The scales
#
# Take the model trained with `"optimal"` and look at its scales beside those that the other rules would choose for the
# same residuals. The curvature of the logistic likelihood is $p(1-p)$, in expectation over q(f); the conditional solves
# for the $m_n$ that is consistent with the q(f) it leads to.

# %%
model, _ = binary["optimal"]
strategy = model.variational_strategy
with torch.no_grad():
    prior_mean, projection, residual = strategy.project(train_x)
    (q,) = strategy.q()
    mean = prior_mean + tighter_gp.maths.moments.projected_mean(projection, q)
    explained = tighter_gp.maths.moments.explained_variance(projection, q)

    def curvature(scale):
        """Expected p (1 - p) under q(f) with these scales."""
        variance = explained + scale * residual
        q_f = torch.distributions.Normal(mean, variance.sqrt())
        return likelihood.quadrature(lambda f: torch.sigmoid(f) * torch.sigmoid(-f), q_f)

    scales = strategy.conditional.solve(residual, curvature)
    beta = binary["beta"][0].variational_strategy.conditional.beta
    m = binary["scalar"][0].variational_strategy.conditional.m

figure, axes = plt.subplots(1, 2, figsize=(10, 3.8), layout="constrained")
d = torch.linspace(0, residual.max().item(), 100, device=device)
axes[0].scatter(residual.cpu(), scales.cpu(), s=10, color=VERMILION, label="optimal, one dot per point")
axes[0].plot(d.cpu(), (beta / (beta + d)).detach().cpu(), color=ORANGE, label=f"beta: β = {beta.item():.2f}")
axes[0].axhline(m.item(), color=PURPLE, linestyle="--", label=f"scalar: m = {m.item():.3f}")
axes[0].axhline(1.0, color=BLUE, linestyle=":", label="SVGP")
axes[0].set(title="Scale against residual", xlabel=r"residual $d_n$", ylabel=r"$m_n$")
axes[0].legend(fontsize="small")
image = axes[1].scatter(*train_x.cpu().T, c=scales.cpu(), s=16, cmap="cividis")
axes[1].scatter(*strategy.inducing_points.detach().cpu().T, marker="x", color="black", s=45, label="inducing points")
axes[1].set(title="Scales of the training points", xlabel="first input", ylabel="second input")
axes[1].legend(fontsize="small", frameon=True)
figure.colorbar(image, ax=axes[1], label=r"$m_n$")
plt.show()

# %% [markdown]
# Points with the same residual get different scales: where the class is clear the likelihood is flat, its curvature is
# small and there is little to gain from a narrower q(f|u). Near the boundary it pays. `"beta"` draws one curve through
# them.
#
# ## What is a strict bound?
#
# For a log-concave likelihood (Bernoulli, Poisson with the exponential link, Laplace, softmax) every one of these
# objectives is a lower bound on the log evidence. For other likelihoods only `"scalar"` is, and the objective says so when
# it is made. Student-t is the usual example.

# %%
student = gpytorch.likelihoods.StudentTLikelihood().to(device)
for conditional in ("beta", "scalar"):
    model = Classifier(points, conditional=conditional).to(device)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        tighter_gp.TighterELBO(student, model, num_data=len(train_y))
    print(f"{conditional}: {said[0].message if said else 'strict, no warning'}\n")

# %% [markdown]
# Other mistakes are refused, such as the closed form for Gaussian noise under a Bernoulli likelihood, or a learned
# conditional under an objective that would forget to charge for it:

# %%
model = Classifier(points).to(device)
try:
    tighter_gp.TighterELBO(likelihood, model, num_data=len(train_y))
except TypeError as error:
    print(error, "\n")

model = Classifier(points, conditional="beta").to(device)
try:
    gpytorch.mlls.VariationalELBO(likelihood, model, num_data=len(train_y))(model(train_x), train_y)
except TypeError as error:
    print(error)

# %% [markdown]
# ## Ten classes: digits
#
# scikit-learn's small digits, or MNIST if `TIGHTER_GP_DATA` names a folder that holds `mnist/*.gz`. Ten latent functions
# share inducing points and kernel, GPyTorch's own multitask wrapper goes around the tighter strategy, and a softmax makes
# probabilities of them.


# %%
def read_idx(path):
    """An array of MNIST's format."""
    content = gzip.decompress(path.read_bytes())
    shape = np.frombuffer(content, ">i4", content[3], offset=4)
    return np.frombuffer(content, np.uint8, offset=4 + 4 * content[3]).reshape(shape)


folder = Path(DATA) / "mnist" if DATA else None
if folder is not None and folder.is_dir() and not QUICK:
    pixels = np.concatenate([read_idx(folder / f"{part}-images-idx3-ubyte.gz") for part in ("train", "t10k")]) / 255
    labels = np.concatenate([read_idx(folder / f"{part}-labels-idx1-ubyte.gz") for part in ("train", "t10k")])
    num_train = 60_000
else:
    pixels, labels = load_digits(return_X_y=True)
    pixels, num_train = pixels / 16, 1500

x = torch.from_numpy(pixels.reshape(len(pixels), -1)).to(device, torch.float32)
y = torch.from_numpy(labels.astype(np.int64)).to(device)
digits_x, digits_y, digits_test_x, digits_test_y = x[:num_train], y[:num_train], x[num_train:], y[num_train:]
num_classes, num_digit_points = 10, 10 if QUICK else 40
if QUICK:
    digits_x, digits_y = digits_x[:300], digits_y[:300]
digit_points = tighter_gp.inducing.kmeans(digits_x[:10_000], num_digit_points)
print(f"{len(digits_y)} training and {len(digits_test_y)} test images, {num_digit_points} inducing points")


class DigitGP(gpytorch.models.ApproximateGP):
    """Ten latent functions with one kernel."""

    def __init__(self, inducing_points, conditional):
        """`conditional` as above; with one parameter per class where it has any."""
        batch_shape = torch.Size([num_classes])
        q = gpytorch.variational.CholeskyVariationalDistribution(len(inducing_points), batch_shape=batch_shape)
        strategy = tighter_gp.TighterVariationalStrategy(self, inducing_points, q, conditional=conditional)
        super().__init__(gpytorch.variational.IndependentMultitaskVariationalStrategy(strategy, num_tasks=num_classes))
        self.mean_module = gpytorch.means.ConstantMean()
        self.covar_module = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())

    def forward(self, x):
        """The prior."""
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


# %% [markdown]
# The softmax has no closed expectation, so it is estimated by sampling, in training and in the table. For `"beta"` there is
# one $\beta$ a class.


# %%
def make_conditional(name):
    """The three to compare; "optimal" under VariationalELBO is plain SVGP."""
    if name == "beta":
        return beta_from(num_classes**2 / (num_classes - 1), torch.Size([num_classes]))
    return "optimal"


def class_probabilities(model, x):
    """Mean softmax over samples of the latent functions of each image."""
    model.eval()
    parts = []
    with torch.no_grad():
        for chunk in x.split(500):
            q = model(chunk)
            draws = torch.randn(64, *q.mean.shape).to(q.mean)
            parts.append((q.mean + q.variance.sqrt() * draws).softmax(-1).mean(0))
    return torch.cat(parts)


digit_results = {}
with gpytorch.settings.num_likelihood_samples(10):
    for name in ("SVGP", "beta", "optimal"):
        torch.manual_seed(0)
        softmax = gpytorch.likelihoods.SoftmaxLikelihood(num_classes=num_classes, mixing_weights=False)
        model = DigitGP(digit_points, make_conditional(name)).to(digits_x)
        model.covar_module.outputscale = 5.0
        model.covar_module.base_kernel.lengthscale = 0.5 * tighter_gp.inducing.median_lengthscale(digits_x)
        objective = gpytorch.mlls.VariationalELBO if name == "SVGP" else tighter_gp.TighterELBO
        history = tighter_gp.fit(
            model,
            softmax.to(device),
            digits_x,
            digits_y,
            objective=objective,
            epochs=1 if QUICK else 30,
            batch_size=250,
            lr=0.05,
        )
        torch.manual_seed(1)
        bound = tighter_gp.evaluate_bound(model, softmax, digits_x, digits_y, batch_size=250, objective=objective)
        probabilities = class_probabilities(model, digits_test_x)
        digit_results[name] = {
            "bound": bound.item() / len(digits_y),
            "error": (probabilities.argmax(-1) != digits_test_y).double().mean().item(),
            "NLPD": -probabilities.gather(-1, digits_test_y.unsqueeze(-1)).log().mean().item(),
            "seconds": history.seconds,
            "probabilities": probabilities,
        }

columns = ("bound", "error", "NLPD", "seconds")
print("".join(f"{column:>10s}" for column in ("", *columns)))
for name, result in digit_results.items():
    print(f"{name:>10s}" + "".join(f"{result[column]:10.4f}" for column in columns))

# %% [markdown]
# Softmax is log-concave, so these are strict bounds up to the noise of sampling. Compare the bounds first: that is what the
# method improves. One $\beta$ has to serve clear and unclear images of a class alike, and may gain little or nothing; the
# scales of `"optimal"` differ from image to image. Test errors of so few images differ by single digits, so do not read
# much into them.
#
# Last, the images that the tighter model is least sure about.

# %%
probabilities = digit_results["optimal"]["probabilities"].cpu()
hardest = probabilities.max(-1).values.argsort()[:8]
side = math.isqrt(digits_test_x.size(-1))
figure, axes = plt.subplots(1, len(hardest), figsize=(10, 1.9), layout="constrained")
for ax, row in zip(axes, hardest.tolist(), strict=True):
    ax.imshow(digits_test_x[row].cpu().reshape(side, side), cmap="Greys")
    guess = int(probabilities[row].argmax())
    ax.set_title(f"is {int(digits_test_y[row])}\nsays {guess}: {probabilities[row, guess]:.2f}", fontsize="small")
    ax.set_axis_off()
plt.show()
