"""With division off, gradients and their norm are off by the replicate factor (torchtitan#2318).

Look in fsdp_tp/loss.py, whose scaling needs no division to be off, and fsdp_tp/fsdp.py (``reduce_by_sums``).
"""

import pytest

import fsdp_tp
from tests.faults import PLAN, Block, norm_of, rows
from tests.ranks import run


def _norms(degrees):
    """The norm for a loss that is a sum over all tokens: by the divide factor, and by global_mean."""
    mesh = fsdp_tp.init_mesh(**degrees)
    reference = Block()
    reference(rows()).square().sum().backward()
    mine = rows().chunk(mesh.data_size)[mesh.data_rank]
    norms = [norm_of([parameter.grad for parameter in reference.parameters()])]
    for by_factor in (True, False):
        model = fsdp_tp.wrap(Block(), mesh, plan=PLAN)
        if by_factor:
            model.set_gradient_divide_factor(1.0)
        total = model(mine).square().sum()
        (total if by_factor else fsdp_tp.global_mean(total, 1, mesh) * mesh.data_size).backward()
        norms.append(fsdp_tp.clip_grad_norm_(model.parameters(), 1e9).item())
    return norms


@pytest.mark.parametrize(
    "degrees", [{"hybrid_shard_degree": 2}, {"hybrid_shard_degree": 1}, {"hybrid_shard_degree": 4}]
)
def test_the_norm_of_a_sum_is_that_of_one_process(degrees):
    for expected, by_factor, by_mean in run(4, _norms, degrees):
        assert by_factor == pytest.approx(expected, rel=1e-12)
        assert by_mean == pytest.approx(expected, rel=1e-12)
