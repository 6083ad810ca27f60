"""Plan "auto": where the parts of a known Hugging Face decoder stand, as a plan.

No import of transformers: only attributes of the model.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fsdp_tp.layers.heads import HeadLayout
from fsdp_tp.layers.split import Split
from fsdp_tp.plans.encoders import BUILDERS
from fsdp_tp.plans.families import FAMILIES, Family
from fsdp_tp.plans.hugging_face import has_plan, hugging_face_plan
from fsdp_tp.plans.parts import Heads, in_features, path_of
from fsdp_tp.plans.plan import Plan
from fsdp_tp.plans.suggest import suggestion


def families() -> tuple[str, ...]:
    """The Hugging Face ``model_type`` names that plan "auto" knows."""
    return (*FAMILIES, *BUILDERS)


def auto_plan(model: Any, axis: DeviceMesh, *, family: str = "auto", sequence_parallel: bool = False) -> Plan:
    """The plan of a Hugging Face decoder.

    Of a family outside the table it is made from the config's ``base_model_tp_plan``, with a warning.

    Args:
        model: the model with its head (``LlamaForCausalLM``) or without (``LlamaModel``).
        axis: the tensor axis.
        family: take the model for this one of :func:`families`; ``"auto"`` reads its config.

    Raises:
        ValueError: the family is unknown, or cannot do ``sequence_parallel``.
    """
    model_type = _model_type(model) if family == "auto" else family
    if model_type in BUILDERS:
        return BUILDERS[model_type](model, axis)
    if family == "auto" and model_type not in FAMILIES and has_plan(model):
        return Plan(styles=hugging_face_plan(model, axis.size(), sequence_parallel=sequence_parallel))
    known = _family(model, family)
    if sequence_parallel and known.no_sequence_parallel:
        raise ValueError(
            f"sequence_parallel=True is not possible for {type(model).__name__}: {known.no_sequence_parallel}"
        )
    base = getattr(model, model.base_model_prefix, model)
    prefix = "" if base is model else f"{model.base_model_prefix}."
    parts = [
        _embedding_and_head(model, prefix, known),
        _attention(base, f"{prefix}{known.blocks}", known, axis),
        _mlp(base, f"{prefix}{known.blocks}", known, axis.size()),
    ]
    return Plan(
        **{
            name: {key: value for part in parts for key, value in getattr(part, name).items()}
            for name in vars(parts[0])
        }
    )


def _embedding_and_head(model: Any, prefix: str, known: Family) -> Plan:
    block = f"{prefix}{known.blocks}.*."
    styles = {
        path_of(model, model.get_input_embeddings()): "vocab",
        # Not already at the embedding: these models derive positions and masks from the shape
        # of its output, which must stay whole.
        f"{prefix}{known.blocks}.0": "split_sequence",
        f"{prefix}{known.last_norm}": "sequence_gather",
    }
    present = [name for name, _ in model.get_submodule(f"{prefix}{known.blocks}.0").named_modules()]
    styles |= {f"{block}{name}": "sequence" for name in known.norms if name in present}
    styles |= {f"{prefix}{path}": style for path, style in known.whole.items()}
    head = model.get_output_embeddings()
    if isinstance(head, nn.Linear):
        styles[path_of(model, head)] = "column_gather"
    return Plan(styles=styles)


def _attention(base: Any, blocks: str, known: Family, axis: DeviceMesh) -> Plan:
    fused, kv_heads = _fused_and_kv_heads(base.config, known)
    layout = HeadLayout(base.config.num_attention_heads, kv_heads, axis.size())
    path = f"{blocks}.*.{known.attention}"
    module = base.get_submodule(f"{known.blocks}.0.{known.attention}")
    row = module.get_submodule(known.row)
    heads = Heads(layout, in_features(row) // layout.num_heads, axis.get_local_rank())
    plan = heads.attention(path, module, known.columns, f"{path}.{known.row}", fused=fused, counts=known.counts)
    styles = {f"{path}.{name}": "per_head" for name in known.per_head}
    styles |= {f"{path}.{name}": "over_heads" for name in known.over_heads}
    splits = {f"{path}.{name}": split for name, split in zip(known.over_heads, heads.splits, strict=False)}
    own_heads = {path: (known.head_arguments, heads.own)} if known.head_arguments else {}
    return plan | Plan(styles=styles, splits=splits, own_heads=own_heads)


def _fused_and_kv_heads(config: Any, known: Family) -> tuple[str, int]:
    heads: int = config.num_attention_heads
    if known.fused == "falcon":
        if config.new_decoder_architecture:
            return "interleaved", config.num_kv_heads
        return ("packed", 1) if config.multi_query else ("interleaved", heads)
    return known.fused, getattr(config, "num_key_value_heads", None) or heads


def _mlp(base: Any, blocks: str, known: Family, ranks: int) -> Plan:
    styles: dict[str, str] = {}
    splits: dict[str, Split] = {}
    for number, block in enumerate(base.get_submodule(known.blocks)):
        path = f"{blocks}.{number}" if known.mlp is None else f"{blocks}.{number}.{known.mlp}"
        module = block if known.mlp is None else block.get_submodule(known.mlp)
        if known.experts and hasattr(module, known.experts):  # some blocks may have a plain mlp
            styles |= {path: "whole_sequence", f"{path}.{known.router}": "replicate"}
            styles[f"{path}.{known.experts}"] = "experts"
            continue
        if known.mlp is not None:
            styles[path] = "shared_input"
        styles |= {f"{path}.{name}": "column" for name in known.mlp_columns}
        styles[f"{path}.{known.mlp_row}"] = "row"
        if known.mlp_parts > 1:
            width = Split.even(in_features(module.get_submodule(known.mlp_row)), ranks)
            splits |= {f"{path}.{name}": Split.packed([width] * known.mlp_parts) for name in known.mlp_columns}
    return Plan(styles=styles, splits=splits)


def _model_type(model: Any) -> str | None:
    return getattr(getattr(model, "config", None), "model_type", None)


def _family(model: Any, family: str) -> Family:
    model_type = _model_type(model) if family == "auto" else family
    if model_type not in FAMILIES:
        raise ValueError(
            f"plan='auto' does not know {type(model).__name__}"
            + (f" (model_type {model_type!r})" if model_type else "")
            + f"; it knows the Hugging Face families {', '.join(families())}, and others whose config has a "
            f"base_model_tp_plan. {suggestion(model)}"
        )
    return FAMILIES[model_type]
