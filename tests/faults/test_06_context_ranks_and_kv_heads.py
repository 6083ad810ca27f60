"""Two key/value heads on four context ranks: an all-to-all of heads cuts them (LlamaFactory PR 10794).

No layer uses the context axis yet: its ranks must say so, read the same batch, and train as one process does. A
layer that does use it has to keep heads whole, and this test with it. Look in fsdp_tp/wrap.py and fsdp_tp/mesh.py.
"""

import pytest
import torch.nn.functional as F

import fsdp_tp
from tests import models
from tests.faults import assert_gradients_equal, gradients
from tests.ranks import run


def _loss(model, ids, mesh):
    total = F.cross_entropy(model(ids[:, :-1]).logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="sum")
    return fsdp_tp.global_mean(total, ids[:, 1:].numel(), mesh)


def _train(degrees):
    mesh = fsdp_tp.init_mesh(**degrees)
    ids = models.batch()
    model = fsdp_tp.initialize(models.hugging_face("llama", num_key_value_heads=2))
    expected = F.cross_entropy(model(ids[:, :-1]).logits.flatten(0, 1), ids[:, 1:].flatten())
    expected.backward()
    of_one = gradients(model)
    model.zero_grad()
    size = mesh.context_size
    with pytest.warns(UserWarning, match=f"no layer uses the context axis yet: its {size} ranks repeat the same work"):
        fsdp_tp.wrap(model, mesh)
    loss = _loss(model, ids.chunk(mesh.data_size)[mesh.data_rank], mesh)
    loss.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    # fp32: some hundred sums in another order. A batch counted four times, or half a head, is O(1).
    assert_gradients_equal(gradients(model), of_one, 1e-5)
    return mesh.data_rank


@pytest.mark.parametrize(
    ("degrees", "data_ranks"),
    [
        ({"context_parallel_degree": 4}, [0, 0, 0, 0]),
        ({"context_parallel_degree": 2}, [0, 0, 1, 1]),
        ({"context_parallel_degree": 2, "tensor_parallel_degree": 2}, [0, 0, 0, 0]),
    ],
)
def test_context_ranks_repeat_whole_sequences_and_whole_heads(degrees, data_ranks):
    assert run(4, _train, degrees) == data_ranks
