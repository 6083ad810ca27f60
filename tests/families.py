"""The Hugging Face families of the README's table, at toy size.

``python -m tests.families`` runs them all and writes the table.
"""

from __future__ import annotations

import functools
import re
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fsdp_tp.parity import Report, assert_parity
from fsdp_tp.plans import families
from tests import models
from tests.ranks import stop, workers

STEPS = 5
LAYOUTS = ("tensor=2", "tensor=2,sequence_parallel", "tensor=2,shard=2")
NO_SEQUENCE_PARALLEL = ("opt",)
README = Path(__file__).parents[1] / "README.md"
BEGIN, END = "<!-- families: written by python -m tests.families -->", "<!-- end of families -->"

_IN_VOCABULARY = dict(pad_token_id=0, bos_token_id=1, eos_token_id=2)
_GEMMA = {**models.SIZES, **_IN_VOCABULARY, "head_dim": 8}
_HEADS = {name: value for name, value in models.SIZES.items() if name != "num_key_value_heads"}
_NO_DROPOUT = dict(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)

SIZES = {
    "qwen3": {**models.SIZES, "head_dim": 8},
    "gemma": _GEMMA,
    "gemma2": {**_GEMMA, "query_pre_attn_scalar": 8},
    "gemma3_text": {**_GEMMA, "query_pre_attn_scalar": 8},
    "cohere": {**models.SIZES, **_IN_VOCABULARY, "logit_scale": 1.0},
    "phi": _HEADS,
    "phi3": {**models.SIZES, **_IN_VOCABULARY, "resid_pdrop": 0.0},
    "gpt2": dict(
        vocab_size=models.VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=64, use_cache=False, **_IN_VOCABULARY,
        **_NO_DROPOUT,
    ),
    "falcon": dict(
        vocab_size=models.VOCABULARY, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, use_cache=False,
        ffn_hidden_size=48, **_IN_VOCABULARY,
    ),
    "bloom": dict(
        vocab_size=models.VOCABULARY, hidden_size=32, n_layer=2, n_head=4, use_cache=False, **_IN_VOCABULARY,
    ),
    "mixtral": {**models.SIZES, "num_local_experts": 4, "head_dim": 8},
    "qwen3_moe": {
        **models.SIZES, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 8,
    },
    "bert": dict(
        vocab_size=models.VOCABULARY, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48,
        max_position_embeddings=64, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, pad_token_id=0,
    ),
    "t5": dict(
        vocab_size=models.VOCABULARY, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, dropout_rate=0.0,
        decoder_start_token_id=0,
    ),
    "gpt_neox": _HEADS,
    "gptj": dict(
        vocab_size=models.VOCABULARY, n_embd=32, n_layer=2, n_head=4, rotary_dim=4, n_positions=64, use_cache=False,
        **_IN_VOCABULARY, **_NO_DROPOUT,
    ),
    "opt": dict(
        vocab_size=models.VOCABULARY, hidden_size=32, ffn_dim=48, num_hidden_layers=2, num_attention_heads=4,
        word_embed_proj_dim=32, max_position_embeddings=64, use_cache=False, dropout=0.0, **_IN_VOCABULARY,
    ),
    "gpt_neo": dict(
        vocab_size=models.VOCABULARY, hidden_size=32, intermediate_size=48, num_layers=2, num_heads=4, window_size=4,
        attention_types=[[["global", "local"], 1]], max_position_embeddings=64, use_cache=False, **_IN_VOCABULARY,
    ),
}  # fmt: skip


SIZES["roberta"] = SIZES["bert"]


def build(family: str, **overrides: Any) -> nn.Module:
    """A toy model of a family that plan "auto" knows."""
    import transformers

    kind = {"bert": "MaskedLM", "roberta": "MaskedLM", "t5": "Seq2SeqLM"}.get(family, "CausalLM")
    config = transformers.AutoConfig.for_model(family, **{**SIZES.get(family, models.SIZES), **overrides})
    model: nn.Module = getattr(transformers, f"AutoModelFor{kind}").from_config(config)
    return model


def sequence_to_sequence_loss(model: nn.Module, batch: torch.Tensor, mesh: object, layout: object) -> torch.Tensor:
    """The decoder tells the next token of what the encoder reads backwards."""
    logits = model(input_ids=batch.flip(1), decoder_input_ids=batch[:, :-1]).logits
    return nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten(), reduction="sum")


def steep_adamw(model: nn.Module, mesh: object) -> torch.optim.Optimizer:
    """Ten times the usual rate: five steps are then enough to see whether the job learns."""
    return torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)


def compare(family: str) -> Report:
    """fp32, under every layout that it can do, against one process; raises where a family differs."""
    layouts = [each for each in LAYOUTS if "sequence" not in each or family not in NO_SEQUENCE_PARALLEL]
    return assert_parity(
        functools.partial(build, family),
        [models.batch(step) for step in range(STEPS)],
        layouts=layouts,
        optimizer=steep_adamw,
        workers=workers,
        **({"loss": sequence_to_sequence_loss} if family == "t5" else {}),
    )


def row(family: str, report: Report) -> str:
    gaps = {each.layout: f"{each.comparison.first_gradient_gap:.1e}" for each in report.results if each.comparison}
    return f"| {family} | {' | '.join(gaps.get(layout, 'not offered') for layout in LAYOUTS)} |"


def write(rows: list[str]) -> None:
    head = ["| family | tensor 2 | and sequence parallel | tensor 2 x shard 2 |", "|---|---|---|---|"]
    text = README.read_text()
    assert BEGIN in text
    table = "\n".join([BEGIN, *head, *rows, END])
    README.write_text(re.sub(f"{re.escape(BEGIN)}.*{re.escape(END)}", lambda _: table, text, flags=re.DOTALL))


def main() -> int:
    rows = []
    for family in families():
        rows.append(row(family, compare(family)))
        print(rows[-1], flush=True)
    write(rows)
    stop()
    return 0


if __name__ == "__main__":
    from tests import families as this  # so that other processes can import what they are sent

    sys.exit(this.main())
