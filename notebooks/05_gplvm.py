# %% [markdown]
"""
# Latent variables: the Bayesian GPLVM

A GPLVM explains every column of a table by a GP of a few latent inputs, which it infers along with everything else. The
tighter bound applies to it as to regression (TV-BGPLVM). This notebook trains one, looks at the latent space, places new
rows in it and fills in missing entries.
"""

# %%
import io
import tarfile
from pathlib import Path

import gpytorch
import matplotlib.pyplot as plt
import numpy as np
import torch

import tighter_gp
from tighter_gp import gplvm

from shared import BLUE, DATA, GREEN, QUICK, VERMILION, device

torch.set_default_dtype(torch.float64)

# %% [markdown]
# ## Data
#
# Rows on three noisy curves in twelve dimensions, in the manner of the oil-flow data: which curve a row is on is the label,
# and the model does not see it. If `TIGHTER_GP_DATA` names a folder with `oil_flow/3PhData.tar.gz`, the oil flow itself is
# used.


# %%
def make_phases(num_rows, seed):
    """Three curves: rows and labels."""
    random = np.random.RandomState(seed)
    labels = np.arange(num_rows) % 3
    position = random.uniform(-1, 1, (num_rows, 1))
    column, phase = np.arange(12.0), labels[:, None]
    rows = np.sin(position * (1 + phase / 2) + column * (1 + phase)) + 0.7 * np.cos(column * phase)
    return torch.from_numpy(rows + 0.05 * random.standard_normal(rows.shape)), torch.from_numpy(labels)


archive = Path(DATA) / "oil_flow" / "3PhData.tar.gz" if DATA else None
if archive is not None and archive.is_file():
    with tarfile.open(archive) as files:
        read = lambda name: torch.from_numpy(np.loadtxt(io.TextIOWrapper(files.extractfile(name), "ascii")))
        train, labels = read("DataTrn.txt"), read("DataTrnLbls.txt").argmax(-1)
        test, test_labels = read("DataTst.txt"), read("DataTstLbls.txt").argmax(-1)
else:
    train, labels = make_phases(300, seed=0)
    test, test_labels = make_phases(90, seed=1)
if QUICK:
    train, labels, test, test_labels = train[:60], labels[:60], test[:15], test_labels[:15]

mean, std = train.mean(0), train.std(0)
train, test = ((rows - mean) / std for rows in (train, test))
train, test = train.to(device), test.to(device)
print(f"{len(train)} training rows and {len(test)} new rows of {train.size(-1)} columns")

# %% [markdown]
# ## Two bounds
#
# `BayesianGPLVM.from_data` starts from the principal components. `fit` trains in mini-batches; for a latent-variable model
# its inputs are `None`, and the objective gets the positions of the rows instead.
#
# Both bounds continue from a common warm start with the standard one. `objective=gpytorch.mlls.VariationalELBO` gives the
# standard bound (V-BGPLVM), the default the tighter one.

# %%
latent_dim, num_inducing = (3, 6) if QUICK else (5, 12)
epochs = 2 if QUICK else 200


def standard_elbo(likelihood, model, num_data):
    """V-BGPLVM."""
    return gplvm.LatentVariableELBO(likelihood, model, num_data, objective=gpytorch.mlls.VariationalELBO)


def start():
    """A model at the principal components, with q(u) at its optimum there."""
    generator = torch.Generator().manual_seed(0)
    model = gplvm.BayesianGPLVM.from_data(train, latent_dim, num_inducing, generator=generator)
    model.likelihood.noise = 0.05
    tighter_gp.set_optimal_q(model, model.likelihood, model.latents.q().mean.detach(), train.mT)
    return model


def train_rows(model, objective, epochs, lr):
    """Mini-batches of rows; the rate falls to zero."""
    return tighter_gp.fit(
        model, model.likelihood, None, train, objective=objective, epochs=epochs, batch_size=100, lr=lr
    )


warm = start()
histories = {"warm start": train_rows(warm, standard_elbo, epochs // 2, lr=0.05)}

models = {}
for name, objective in {"V-BGPLVM": standard_elbo, "TV-BGPLVM": gplvm.LatentVariableELBO}.items():
    models[name] = start()
    models[name].load_state_dict(warm.state_dict())
    histories[name] = train_rows(models[name], objective, epochs, lr=0.05)

print(f"{'':10s}{'standard':>10s}{'tighter':>10s}{'noise':>10s}")
for name, model in models.items():
    bounds = []
    for objective in (standard_elbo, gplvm.LatentVariableELBO):
        torch.manual_seed(0)  # the same draws of the latents for all
        bounds.append(objective(model.likelihood, model, len(train)).evaluate(train, num_samples=20).item())
    numbers = (*bounds, model.likelihood.noise.item())
    print(f"{name:10s}" + "".join(f"{number:10.4f}" for number in numbers))

# %% [markdown]
# Each row is a trained model, the first two columns are the two bounds at its parameters, in nats per row of data, and
# *noise* is the learnt noise variance. Along a row the tighter bound is the higher one, always. From row to row the order
# is not certain: each training ends at its own optimum, and the bounds are estimated with samples of the latents.

# %%
figure, ax = plt.subplots(figsize=(7, 3.5), layout="constrained")
offset = histories["warm start"].steps
for name, colour, line in (("V-BGPLVM", BLUE, "-"), ("TV-BGPLVM", VERMILION, "-")):
    loss = np.array(histories[name].loss)
    window = max(1, len(loss) // 40)
    smooth = np.convolve(-loss, np.ones(window) / window, mode="valid")
    ax.plot(offset + np.arange(len(smooth)), smooth, color=colour, linestyle=line, label=name)
ax.set(title="Each model's own bound, smoothed", xlabel="step", ylabel="nats per row")
ax.legend()
plt.show()

# %% [markdown]
# ## The latent space
#
# `relevance` sorts the latent dimensions by how much they matter to the kernel. Dimensions that the model does not need
# have a long lengthscale or no spread. `plot_latents` draws the two that matter most; darker is less certain.

# %%
for name, model in models.items():
    print(name)
    print(gplvm.relevance(model), "\n")

figure, axes = plt.subplots(1, 2, figsize=(10, 4.2), layout="constrained")
for ax, (name, model) in zip(axes, models.items(), strict=True):
    gplvm.plot_latents(model, labels, resolution=20 if QUICK else 60, ax=ax)
    ax.set_title(name)
plt.show()


# %% [markdown]
# How well the labels separate can be put in a number: the share of rows whose nearest neighbour in the two most relevant
# dimensions has another label.


# %%
def neighbour_error(model):
    """Leave-one-out error of one nearest neighbour in the two most relevant dimensions."""
    chosen = gplvm.relevance(model).order[:2]
    position = model.latents.q().mean.detach()[:, chosen]
    distance = torch.cdist(position, position).fill_diagonal_(torch.inf)
    return (labels[distance.argmin(-1).cpu()] != labels).double().mean().item()


for name, model in models.items():
    print(f"{name:10s} nearest-neighbour error {neighbour_error(model):.4f}")

# %% [markdown]
# ## New rows
#
# `infer_latents` finds q(x) of rows that were not in the training data, with the rest of the model frozen. `reconstruct`
# goes the other way, from latents to the table.

# %%
model = models["TV-BGPLVM"]


def infer(model, rows, **kwargs):
    """q(x) of new rows, with the same random numbers at each call."""
    return model.infer_latents(rows, num_steps=10 if QUICK else 150, seed=0, **kwargs)


q_x = infer(model, test)
reconstruction = model.reconstruct(q_x)
error = (reconstruction.mean - test).square().mean().sqrt().item()
print(f"root mean squared error of the reconstruction: {error:.4f} (the columns have unit variance)")

first, second = gplvm.relevance(model).order[:2].tolist()
figure, ax = plt.subplots(figsize=(6, 4.5), layout="constrained")
gplvm.plot_latents(model, labels, resolution=20 if QUICK else 60, ax=ax)
where = q_x.mean[:, [first, second]].cpu()
for label, colour in zip(range(3), (BLUE, VERMILION, GREEN), strict=True):
    rows = test_labels == label
    ax.scatter(*where[rows].T, marker="^", s=45, color=colour, edgecolors="black", label=f"new rows, {label}")
ax.set_title("New rows in the latent space")
ax.legend(fontsize="small", loc="center left", bbox_to_anchor=(1.0, 0.5))
plt.show()

# %% [markdown]
# ## Missing entries
#
# Mark what is missing with NaN, or pass a mask. Hide a quarter of the entries of the new rows, infer the latents from the
# rest, and predict what was hidden.

# %%
generator = torch.Generator().manual_seed(0)
hidden = (torch.rand(test.shape, generator=generator) < 0.25).to(device)
with_gaps = torch.where(hidden, torch.nan, test)
print(f"{int(hidden.sum())} of {hidden.numel()} entries hidden")

print(f"{'':12s}{'RMSE':>8s}{'log density':>13s}")
for name, one in models.items():
    objective = gpytorch.mlls.VariationalELBO if name == "V-BGPLVM" else None
    q_x = infer(one, with_gaps, objective=objective)
    filled = one.reconstruct(q_x)
    rmse = (filled.mean - test)[hidden].square().mean().sqrt().item()
    density = one.log_density(test, q_x, mask=hidden).nanmean().item()
    print(f"{name:12s}{rmse:8.4f}{density:13.4f}")
print(f"{'column mean':12s}{test[hidden].square().mean().sqrt().item():8.4f}")

# %%
row = int(hidden.sum(-1).argmax())
columns = np.arange(test.size(-1))
gap = hidden[row].cpu().numpy()
predicted, error = filled.mean[row].cpu().numpy(), 2 * filled.variance[row].sqrt().cpu().numpy()

figure, ax = plt.subplots(figsize=(9, 3.5), layout="constrained")
ax.errorbar(columns, predicted, error, fmt="s", color=VERMILION, capsize=3, label="model, mean ± 2 std")
ax.plot(columns[~gap] + 0.2, test[row].cpu()[~gap], "o", color=BLUE, label="seen")
ax.plot(columns[gap] + 0.2, test[row].cpu()[gap], "X", color="black", markersize=8, label="hidden")
ax.set(title="One row with gaps", xlabel="column", ylabel="value, in standard deviations", xticks=columns)
ax.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
plt.show()

# %% [markdown]
# Training rows may have gaps too. `from_data` and the objective take NaN as they are; nothing has to be filled in first.

# %%
train_hidden = (torch.rand(train.shape, generator=generator) < 0.2).to(device)
train_with_gaps = torch.where(train_hidden, torch.nan, train)
gappy = gplvm.BayesianGPLVM.from_data(
    train_with_gaps, latent_dim, num_inducing, generator=torch.Generator().manual_seed(0)
)
gappy.likelihood.noise = 0.05
tighter_gp.fit(
    gappy,
    gappy.likelihood,
    None,
    train_with_gaps,
    objective=gplvm.LatentVariableELBO,
    epochs=epochs,
    batch_size=100,
    lr=0.05,
)
filled = gappy.reconstruct(gappy.latents.q())
rmse = (filled.mean - train)[train_hidden].square().mean().sqrt().item()
mean_rmse = train[train_hidden].square().mean().sqrt().item()
print(f"{int(train_hidden.sum())} hidden entries: RMSE {rmse:.4f}, against {mean_rmse:.4f} for the column means")

# %% [markdown]
# ## More
#
# - A subclass of `Latents` makes q(x) as you like, such as from the row by a network.
# - `CollapsedBayesianGPLVM` has q(u) integrated out, for L-BFGS on tables that fit into memory.
# - A likelihood other than Gaussian works too, as in `03_classification`.
