"""Gathered logits add log(tensor degree) to the loss; token counts are local (Megatron#7452).

Look in fsdp_tp/layers/loss.py, the loss in fsdp_tp/parallelize.py, and fsdp_tp/loss.py.
"""

import pytest
import torch
import torch.nn.functional as F

import fsdp_tp
from tests import models
from tests.ranks import run


def _losses(vocabulary):
    """One process, gathered logits, split logits; each data rank ignores another number of tokens."""
    mesh = fsdp_tp.init_mesh(tensor_parallel_degree=2)
    ids = models.batch()
    labels = ids[:, 1:].clone()
    labels[0, :7] = labels[6, 3:] = -100
    labels[1, 0], labels[2, 0] = vocabulary - 1, (vocabulary + 1) // 2  # the last class, and the second rank's first
    losses = []
    for loss_parallel in (None, False, True):
        model = fsdp_tp.initialize(models.hugging_face("llama", vocab_size=vocabulary))
        if loss_parallel is None:
            losses.append(F.cross_entropy(model(ids[:, :-1]).logits.flatten(0, 1), labels.flatten()).item())
            continue
        fsdp_tp.wrap(model, mesh, loss_parallel=loss_parallel)
        inputs, mine = (whole.chunk(mesh.data_size)[mesh.data_rank] for whole in (ids[:, :-1], labels))
        logits = model(inputs).logits
        if loss_parallel:
            total = fsdp_tp.vocab_parallel_cross_entropy(logits, mine, mesh=mesh, reduction="sum")
        else:
            total = F.cross_entropy(logits.flatten(0, 1), mine.flatten(), reduction="sum")
        losses.append(fsdp_tp.global_mean(total, (mine != -100).sum(), mesh).item())
    return losses


@pytest.mark.parametrize("vocabulary", [models.VOCABULARY, models.VOCABULARY + 3])
def test_one_loss_however_the_logits_are_spread(vocabulary):
    assert torch.log(torch.tensor(2.0)) > 0.5, "what the fault would add"
    for expected, gathered, split in run(4, _losses, vocabulary):
        assert gathered == pytest.approx(expected, rel=1e-6)
        assert split == pytest.approx(expected, rel=1e-6)
