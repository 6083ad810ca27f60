"""Where a rank's part of an activation lies, told from shapes, and what hooks see of a model."""

import pytest
import torch
from torch import nn

import fsdp_tp
from fsdp_tp.locate import Place, Rows, locate
from fsdp_tp.parity import trace
from fsdp_tp.parity.observe import Observer, probe_shapes
from tests import models
from tests.ranks import run

ALL, HALF = Rows(0, 8, 8), Rows(4, 4, 8)


@pytest.mark.parametrize(
    "local, whole, rows, tensor_rank, tensor_size, expected",
    [
        ((8, 6, 4), (8, 6, 4), ALL, 1, 2, Place((0, 0, 0), 0, 1)),  # whole on every rank of the axis
        ((4, 6, 4), (8, 6, 4), HALF, 0, 1, Place((4, 0, 0), None, 0)),  # rows
        ((24, 4), (48, 4), HALF, 0, 1, Place((24, 0), None, 0)),  # rows of flattened tokens
        ((4, 3, 4), (8, 6, 4), HALF, 1, 2, Place((4, 3, 0), None, 0)),  # and a slice of the sequence
        ((8, 6, 1), (8, 6, 4), ALL, 3, 4, Place((0, 0, 3), 0, 0)),
        ((8, 6, 2), (8, 6, 4), ALL, 3, 4, Place((0, 0, 2), 0, 1)),  # two ranks share a part
        ((8, 3, 4), (8, 7, 4), ALL, 1, 2, Place((0, 4, 0), 0, 0)),  # uneven, as torch.chunk splits
        ((1, 6, 4), (1, 6, 4), HALF, 0, 1, Place((0, 0, 0), 1, 0)),  # the same for all rows
        ((8, 3, 2), (8, 6, 4), ALL, 0, 2, None),  # two dims split
        ((8, 5, 4), (8, 6, 4), ALL, 0, 2, None),
        ((6, 4, 4), (6, 8, 4), HALF, 1, 2, None),  # rows in the second dim, or a slice of the tensor axis
        ((24, 4), (48, 4), ALL, 1, 2, None),  # a slice of every sequence, with tokens flattened
        ((8, 6), (8, 6, 4), ALL, 0, 2, None),
    ],
)
def test_locate(local, whole, rows, tensor_rank, tensor_size, expected):
    data_rank = 1 if rows is HALF else 0
    assert locate(local, whole, rows, data_rank, tensor_rank, tensor_size) == expected


class Reused(nn.Module):
    """Calls one layer twice, and one whose gradient never comes."""

    def __init__(self):
        super().__init__()
        self.layer, self.unused = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        self.unused(x)
        return self.layer(self.layer(x))


def test_calls_are_counted_and_inputs_traced(one_process):
    model, mesh = Reused(), fsdp_tp.init_mesh()
    observer = Observer(model, mesh, 0, None)
    observer.start(Rows(0, 3, 3))
    model(torch.randn(3, 4)).sum().backward()
    events, sketches, _ = observer.take()
    assert [event for event in events if not event.startswith("output gradient")] == [
        "input:", "input:unused", "output:unused", "input:layer", "output:layer", "input:layer#1", "output:layer#1",
        "output:",
    ]  # fmt: skip
    assert observer.sources["input:layer#1"] == "output:layer"
    assert observer.shapes["output:layer#1"] == (3, 4)
    gradient = sketches[events.index("output gradient:layer#1")]
    assert gradient[-1] == pytest.approx(12), "ones, twelve of them"
    assert not observer.take()[0]


def _observed(replicas_of):
    mesh = fsdp_tp.init_mesh(tensor_parallel_degree=2)
    model = models.hugging_face("llama")
    fsdp_tp.initialize(model, seed=1)
    fsdp_tp.wrap(model, mesh)
    shapes, notes = probe_shapes(lambda: models.hugging_face("llama"), _loss, models.batch())
    assert not notes
    observer = Observer(model, mesh, mesh.device_mesh.get_rank(), shapes)
    observer.parameters(trace.WEIGHT)
    observer.start(Rows(0, 8, 8))
    model(models.batch()[:, :-1])
    events, _, replicas = observer.take()
    return [replica for event, replica in zip(events, replicas, strict=True) if event == replicas_of]


def _loss(model, batch, mesh, layout):
    return model(batch[:, :-1]).logits.sum()


def test_replicas_are_told_apart_and_parts_of_one_are_not():
    """Shapes come from a forward without memory, for references that no single process can run."""
    assert run(2, _observed, "weight:model.norm.weight") == [[0], [1]]
    assert run(2, _observed, "weight:model.layers.0.mlp.up_proj.weight") == [[0], [0]]
    assert run(2, _observed, "output:model.layers.0.mlp.up_proj") == [[0], [0]]
    assert run(2, _observed, "output:model.layers.0.mlp") == [[0], [1]]
