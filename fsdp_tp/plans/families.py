"""Where the parts of known Hugging Face decoders stand, and how they are split."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Family:
    """Paths of the modules of one ``model_type``: of the blocks inside the base model, of parts inside a block."""

    blocks: str = "layers"
    attention: str = "self_attn"
    columns: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    row: str = "o_proj"
    per_head: tuple[str, ...] = ()
    """Norms of single query or key heads."""
    head_counts: tuple[str, ...] = ()
    """Attributes of the attention module that say how many heads it has: each rank has its share."""
    mlp: str | None = "mlp"
    """None: its layers stand in the block itself."""
    mlp_columns: tuple[str, ...] = ("gate_proj", "up_proj")
    mlp_row: str = "down_proj"
    norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm")
    last_norm: str = "norm"
    whole: dict[str, str] = field(default_factory=dict)
    """Other modules of the base model, with their styles."""
    no_sequence_parallel: str = ""
    """Why it cannot be offered, if so."""


_LLAMA = Family()
_PER_HEAD = ("q_norm", "k_norm")
_FOUR_NORMS = (*_LLAMA.norms, "pre_feedforward_layernorm", "post_feedforward_layernorm")

FAMILIES: dict[str, Family] = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen2": _LLAMA,
    "qwen3": Family(per_head=_PER_HEAD),
    "gemma": _LLAMA,
    "gemma2": Family(norms=_FOUR_NORMS),
    "gemma3_text": Family(norms=_FOUR_NORMS, per_head=_PER_HEAD),
    "granite": _LLAMA,
    "cohere": Family(norms=("input_layernorm",)),
    "starcoder2": Family(mlp_columns=("c_fc",), mlp_row="c_proj"),
    "stablelm": Family(head_counts=("num_heads", "num_key_value_heads")),
    "phi": Family(
        row="dense",
        mlp_columns=("fc1",),
        mlp_row="fc2",
        norms=("input_layernorm",),
        last_norm="final_layernorm",
    ),
    "gpt_neox": Family(
        attention="attention",
        # Its rows are those of one head after another, query, key and value each.
        columns=("query_key_value",),
        row="dense",
        mlp_columns=("dense_h_to_4h",),
        mlp_row="dense_4h_to_h",
        last_norm="final_layer_norm",
    ),
    "gptj": Family(
        blocks="h",
        attention="attn",
        row="out_proj",
        mlp_columns=("fc_in",),
        mlp_row="fc_out",
        norms=("ln_1",),
        last_norm="ln_f",
    ),
    "gpt_neo": Family(
        blocks="h",
        attention="attn.attention",
        row="out_proj",
        head_counts=("num_heads",),
        mlp_columns=("c_fc",),
        mlp_row="c_proj",
        norms=("ln_1", "ln_2"),
        last_norm="ln_f",
        whole={"wpe": "replicate"},
    ),
    "opt": Family(
        blocks="decoder.layers",
        row="out_proj",
        head_counts=("num_heads",),
        mlp=None,
        mlp_columns=("fc1",),
        mlp_row="fc2",
        norms=("self_attn_layer_norm", "final_layer_norm"),
        last_norm="decoder.final_layer_norm",
        whole={"decoder.embed_positions": "replicate"},
        no_sequence_parallel="its blocks join the rows of a batch and their sequences into one dim",
    ),
}
