"""Models, data and losses that the command line is told to import."""

from __future__ import annotations

import functools
import os

import torch
from torch import nn

from tests import families, models

llama = functools.partial(models.hugging_face, "llama")


def data(step):
    return models.batch(step)


def other_data(step):
    """Other batches on every call."""
    torch.seed()
    return torch.randint(0, models.VOCABULARY, (models.ROWS, models.SEQUENCE + 1))


def dies_on_two_ranks():
    """A process of any world of two ends without a word."""
    if os.environ.get("WORLD_SIZE") == "2" and os.environ.get("RANK") == "1":
        os._exit(9)
    return llama()


def with_dropout():
    model = llama()
    model.model.layers[1].mlp = nn.Sequential(model.model.layers[1].mlp, nn.Dropout(0.1))
    return model


def without_seed():
    """Other initial weights on every call."""
    torch.seed()
    return llama()


class Unliftable(nn.Module):
    """Rounds to float32 in a way that no cast shows: through memory of that type."""

    def forward(self, x):
        return torch.empty(x.shape, dtype=torch.float32).copy_(x).to(x.dtype)


def unliftable():
    model = llama()
    model.model.layers[0].mlp.act_fn = nn.Sequential(model.model.layers[0].mlp.act_fn, Unliftable())
    return model


def plain_sgd(model, mesh):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def broken():
    one, two = [1]
    return one, two


def no_data(step):
    raise KeyError("nothing here")


def fails_in_brackets(*args):
    raise RuntimeError("[/pytorch/unbound_buffer.cc:129] Timed out")


def opt():
    """It cannot do sequence parallelism."""
    return families.build("opt")
