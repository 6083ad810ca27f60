"""Every Hugging Face family that plan "auto" knows, under every layout of the README's table.

If one fails, look at its entry in fsdp_tp/plans/families.py; the verdict names the module.
"""

import pytest
from torch.distributed.device_mesh import DeviceMesh

from fsdp_tp.plans import auto_plan, families
from tests.families import BEGIN, END, NO_SEQUENCE_PARALLEL, README, build, compare


@pytest.mark.parametrize("family", families())
def test_trains_as_one_process_does(family):
    report = compare(family)
    (level,) = report.levels
    assert level.losses[-1] < level.losses[0] - 0.1, "the reference did not learn: the curve proves nothing"
    for result in report.results:
        # Position biases have no rows of a batch: under sharding their shape does not tell where they lie.
        assert not [name for name in result.comparison.missing if "relative_attention_bias" not in name]
        assert result.comparison.first_gradient_gap <= 1e-6, result.layout


def test_sequence_parallelism_that_cannot_be_offered_is_refused_with_its_reason(one_process):
    mesh = DeviceMesh("cpu", [0])
    for family in NO_SEQUENCE_PARALLEL:
        with pytest.raises(ValueError, match="sequence_parallel=True is not possible for .*: its blocks"):
            auto_plan(build(family), mesh, sequence_parallel=True)


def test_the_readme_names_them_all():
    table = README.read_text().partition(BEGIN)[2].partition(END)[0]
    named = [line.split("|")[1].strip() for line in table.splitlines() if line.startswith("| ")][1:]
    assert named == list(families()), "run python -m tests.families"
