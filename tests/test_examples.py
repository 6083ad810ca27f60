"""The scripts that users copy. If these fail, look in examples/."""

from __future__ import annotations

import difflib
from pathlib import Path

from tests.commands import torchrun

EXAMPLES = Path(__file__).parents[1] / "examples"


def _losses(script: str, processes: int) -> list[str]:
    with torchrun(processes, EXAMPLES / script) as process:
        printed, _ = process.communicate(timeout=280)
    assert process.returncode == 0, printed
    return [line.split("loss ")[1] for line in printed.splitlines() if line.startswith("step")]


def test_the_script_with_three_lines_changed_prints_the_same_curve():
    before, after = _losses("fsdp2.py", 2), _losses("fsdp2_tensor_parallel.py", 2)
    assert len(before) == len(after) == 20
    # Printed to six decimals of losses from 4.2 to 0.02; fp32 rounding in 20 AdamW steps.
    assert all(abs(float(a) - float(b)) < 1e-4 for a, b in zip(before, after, strict=True))
    assert float(after[-1]) < 0.1


def test_only_those_lines_differ():
    old, new = ((EXAMPLES / name).read_text().splitlines() for name in ("fsdp2.py", "fsdp2_tensor_parallel.py"))
    added = [line[2:].strip() for line in difflib.ndiff(old, new) if line.startswith("+ ") and line[2:].strip()]
    assert added[1:] == [
        "import fsdp_tp",
        "mesh = fsdp_tp.init_mesh(tensor_parallel_degree=2, hybrid_shard_degree=0)",
        "rank, world_size = mesh.data_rank, mesh.data_size",
        "model = fsdp_tp.wrap(model, mesh)",
        "norm = fsdp_tp.clip_grad_norm_(model.parameters(), 1.0)",
    ]


def test_a_custom_module_gives_one_curve_on_every_world():
    one, four = _losses("custom_module.py", 2), _losses("custom_module.py", 4)
    pairs = [(float(a.split()[0]), float(b.split()[0])) for a, b in zip(one, four, strict=True)]
    assert all(abs(a - b) < 1e-4 for a, b in pairs)
    assert pairs[-1][1] < 0.5
