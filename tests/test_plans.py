"""If these fail, look in fsdp_tp/plans/: patterns, styles and the automatic plan."""

import pytest
from torch import nn

from fsdp_tp.plans import STYLES, match_plan


def _model():
    return nn.ModuleDict(
        {"layers": nn.ModuleList(nn.ModuleDict({"wq": nn.Linear(2, 2), "wo": nn.Linear(2, 2)}) for _ in range(12))}
    )


def test_a_star_is_one_component():
    assert match_plan(_model(), {"layers.*.wq": "column"}) == {f"layers.{i}.wq": "column" for i in range(12)}
    assert match_plan(_model(), {"layers.11.w*": "row"}) == {"layers.11.wq": "row", "layers.11.wo": "row"}
    with pytest.raises(ValueError, match="matches no module"):
        match_plan(_model(), {"*.wq": "column"})


def test_a_dot_is_a_dot():
    with pytest.raises(ValueError, match="matches no module"):
        match_plan(_model(), {"layers.1.w.": "column"})


def test_a_pattern_that_matches_nothing_names_the_closest():
    with pytest.raises(ValueError, match=r"pattern 'layers.\*.attn.wq' matches no module .* layers.\*.wq"):
        match_plan(_model(), {"layers.*.attn.wq": "column"})


def test_an_unknown_style_lists_the_legal_ones():
    with pytest.raises(ValueError, match="'diagonal' is not a style; legal: column, .*row, vocab, replicate, sequence"):
        match_plan(_model(), {"layers.*.wq": "diagonal"})
    assert {"column", "row", "vocab", "replicate", "sequence"} <= set(STYLES)


def test_patterns_may_overlap_only_in_agreement():
    assert match_plan(_model(), {"layers.*.wq": "column", "layers.0.wq": "column"})["layers.0.wq"] == "column"
    with pytest.raises(ValueError, match="gives 'layers.0.wq' two styles: 'column' and 'row'"):
        match_plan(_model(), {"layers.*.wq": "column", "layers.0.wq": "row"})
