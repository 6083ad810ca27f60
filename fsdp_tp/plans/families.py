"""Where the parts of known Hugging Face decoders stand, and how they are split."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Family:
    """Paths of the modules of one ``model_type``: of the blocks inside the base model, of parts inside a block."""

    blocks: str = "layers"
    attention: str = "self_attn"
    columns: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    """Of query, key and value, or the one that holds all three: see ``fused``."""
    fused: str = ""
    """``packed``: all queries, all keys, all values. ``interleaved``: for every key/value head its queries, key
    and value."""
    row: str = "o_proj"
    per_head: tuple[str, ...] = ()
    """Norms of single query or key heads."""
    over_heads: tuple[str, ...] = ()
    """Norms over all query heads together, and over all key heads."""
    mlp: str | None = "mlp"
    """None: its layers stand in the block itself."""
    mlp_columns: tuple[str, ...] = ("gate_proj", "up_proj")
    mlp_parts: int = 1
    """How many weights of one width are packed in each of ``mlp_columns``."""
    mlp_row: str = "down_proj"
    experts: str = ""
    """Inside ``mlp``, which then holds a router too."""
    router: str = "gate"
    norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm")
    last_norm: str = "norm"
    whole: dict[str, str] = field(default_factory=dict)
    """Other modules of the base model, with their styles."""
    head_arguments: tuple[str, ...] = ()
    """Arguments of ``attention`` that hold something for every query head."""
    counts: dict[str, str] = field(default_factory=dict)
    """Attributes of ``attention`` that say how much it has of what, beside the usual ones (see ``auto``)."""
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
    "olmo2": Family(over_heads=_PER_HEAD, norms=("post_attention_layernorm", "post_feedforward_layernorm")),
    "starcoder2": Family(mlp_columns=("c_fc",), mlp_row="c_proj"),
    "stablelm": _LLAMA,
    "phi": Family(
        row="dense",
        mlp_columns=("fc1",),
        mlp_row="fc2",
        norms=("input_layernorm",),
        last_norm="final_layernorm",
    ),
    "phi3": Family(
        columns=("qkv_proj",),
        fused="packed",
        mlp_columns=("gate_up_proj",),
        mlp_parts=2,
        counts={"config.num_attention_heads": "heads"},
    ),
    "gpt2": Family(
        blocks="h",
        attention="attn",
        columns=("c_attn",),
        fused="packed",
        row="c_proj",
        mlp_columns=("c_fc",),
        mlp_row="c_proj",
        norms=("ln_1", "ln_2"),
        last_norm="ln_f",
        whole={"wpe": "replicate"},
        counts={"split_size": "features"},
    ),
    "gpt_neox": Family(
        attention="attention",
        columns=("query_key_value",),
        fused="interleaved",
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
        mlp_columns=("c_fc",),
        mlp_row="c_proj",
        norms=("ln_1", "ln_2"),
        last_norm="ln_f",
        whole={"wpe": "replicate"},
    ),
    "falcon": Family(
        blocks="h",
        attention="self_attention",
        columns=("query_key_value",),
        fused="falcon",
        row="dense",
        mlp_columns=("dense_h_to_4h",),
        mlp_row="dense_4h_to_h",
        norms=("input_layernorm", "post_attention_layernorm", "ln_attn", "ln_mlp"),
        last_norm="ln_f",
        head_arguments=("alibi", "attention_mask"),
    ),
    "bloom": Family(
        blocks="h",
        attention="self_attention",
        columns=("query_key_value",),
        fused="interleaved",
        row="dense",
        mlp_columns=("dense_h_to_4h",),
        mlp_row="dense_4h_to_h",
        last_norm="ln_f",
        whole={"word_embeddings_layernorm": "replicate"},
        head_arguments=("alibi",),
    ),
    "opt": Family(
        blocks="decoder.layers",
        row="out_proj",
        mlp=None,
        mlp_columns=("fc1",),
        mlp_row="fc2",
        norms=("self_attn_layer_norm", "final_layer_norm"),
        last_norm="decoder.final_layer_norm",
        whole={"decoder.embed_positions": "replicate"},
        no_sequence_parallel="its blocks join the rows of a batch and their sequences into one dim",
    ),
    "mixtral": Family(experts="experts"),
    "qwen3_moe": Family(experts="experts", per_head=_PER_HEAD),
}
