"""Every Hugging Face family that plan "auto" knows, under every layout of the README's table.

If one fails, look at its entry in fsdp_tp/plans/families.py; the verdict names the module.
"""

import pytest

from fsdp_tp.plans import families
from tests.families import BEGIN, END, README, compare


@pytest.mark.parametrize("family", families())
def test_trains_as_one_process_does(family):
    report = compare(family)
    (level,) = report.levels
    assert level.losses[-1] < level.losses[0] - 0.1, "the reference did not learn: the curve proves nothing"
    for result in report.results:
        assert not result.comparison.missing
        assert result.comparison.first_gradient_gap <= 1e-6, result.layout


def test_the_readme_names_them_all():
    table = README.read_text().partition(BEGIN)[2].partition(END)[0]
    named = [line.split("|")[1].strip() for line in table.splitlines() if line.startswith("| ")][1:]
    assert named == list(families()), "run python -m tests.families"
