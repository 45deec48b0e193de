# %% [markdown]
# Compare a method of your own with SAM and ASAM, on your own data and model. The data is a pair of tensors for training
# and a pair for testing. It could also be two `Dataset`s, two `DataLoader`s, numpy arrays or a `DatasetDict` of Hugging
# Face.

# %%
import torch
from sklearn.datasets import load_digits

import steppe

x, y = (torch.tensor(array) for array in load_digits(return_X_y=True))
x = x.float() / 16
data = (x[:1000], y[:1000]), (x[1000:], y[1000:])

# %% [markdown]
# The model is a function or a class. It may take the shape of an input and the number of outputs. With the same seed,
# all methods start from the same weights.


# %%
def make_model(shape, classes):
    nn = torch.nn
    return nn.Sequential(nn.Linear(*shape, 32), nn.ReLU(), nn.Linear(32, classes))


# %% [markdown]
# A method is a class. This one evaluates the gradient on both sides of the weights and takes the mean.

# %%
from dataclasses import dataclass  # noqa: E402

from steppe import HERE, Look, Method, Number, ascent  # noqa: E402


@dataclass(frozen=True)
class TwoSided(Method):
    rho: Number = 0.05
    cost = 3

    def looks(self, ctx):
        here = yield HERE
        e = self.rho * ascent(here.grad)
        there = yield Look(e)
        behind = yield Look(-1 * e)
        return 0.5 * (there.grad + behind.grad)


# %% [markdown]
# Methods may be given as names, objects or classes. Whatever is not given has the default of `steppe compare`. In a
# notebook the result is shown as the report; here it is shown as text.

# %%
result = steppe.compare(
    data,
    make_model,
    methods=["sam", steppe.ASAM(rho=1.0), TwoSided],
    base="adamw",
    lr=0.01,
    seeds=3,
    epochs=8,
    batch=50,
    jobs=1,
    curvature=False,
    progress=False,
)
result

# %% [markdown]
# `result.table` is a pandas table with one row for each method and 95 % confidence intervals; `result.frame` has one
# row for each run.

# %%
result.table[["test_accuracy", "low", "high", "cost", "verdict"]].round(4)

# %%
print(result.best())

# %% [markdown]
# `result.plot()` draws the results against their cost, and `result.save("report.html")` writes the report.

# %%
result.save("report.html")

# %% [markdown]
# `steppe.tune` chooses the radius on held-out training data. All candidates are trained for a short time, and only the
# best ones for the whole time. The test data is not used.

# %%
tuned = steppe.tune(
    data,
    make_model,
    method="sam",
    base="adamw",
    lr=0.01,
    radius=(0.01, 0.5),
    trials=4,
    keep=2,
    seeds=3,
    epochs=8,
    batch=50,
    jobs=1,
    progress=False,
)
print(tuned)
