"""Plans of known Hugging Face encoders, and of encoder-decoders."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fsdp_tp.layers.heads import HeadLayout
from fsdp_tp.layers.split import Split
from fsdp_tp.plans.parts import Heads, path_of
from fsdp_tp.plans.plan import Plan


def bert(model: Any, axis: DeviceMesh) -> Plan:
    """BERT (arXiv 1810.04805) and RoBERTa (arXiv 1907.11692), with or without a head."""
    base = getattr(model, model.base_model_prefix, model)
    prefix = "" if base is model else f"{model.base_model_prefix}."
    config = base.config
    layer = f"{prefix}encoder.layer.*."
    heads = config.num_attention_heads
    attention = Heads(HeadLayout(heads, heads, axis.size()), config.hidden_size // heads, axis.get_local_rank())
    plan = attention.attention(
        f"{layer}attention.self",
        base.encoder.layer[0].attention.self,
        ("query", "key", "value"),
        f"{layer}attention.output.dense",
    )
    last = len(base.encoder.layer) - 1
    styles = {
        f"{prefix}embeddings.word_embeddings": "vocab",
        f"{prefix}encoder.layer.0": "split_sequence",
        f"{layer}attention.output.LayerNorm": "sequence",
        f"{layer}intermediate": "shared_input",
        f"{layer}intermediate.dense": "column",
        f"{layer}output.dense": "row",
        f"{prefix}encoder.layer.{last}.output.LayerNorm": "sequence_gather",
    }
    styles |= {f"{prefix}encoder.layer.{number}.output.LayerNorm": "sequence" for number in range(last)}
    # Embeddings of positions and types, the pooler, and all that a head computes on whole activations.
    return plan | _head(model, axis.size()) | Plan(styles=_whole(model, (f"{prefix}encoder.", *styles)) | styles)


def _whole(model: nn.Module, known: tuple[str, ...]) -> dict[str, str]:
    head: Any = model.get_output_embeddings()  # type: ignore[operator]
    return {
        path: "replicate"
        for path, module in model.named_modules()
        if any(True for _ in module.parameters(recurse=False))
        and path != ""
        and not any(path == each or path.startswith(each) for each in known)
        and module is not head
        and not _owns_only(module, getattr(head, "bias", None))
    }


def _head(model: Any, ranks: int) -> Plan:
    """The output projection; and its bias, which these models have under a second name."""
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear):
        return Plan(styles={})
    chunks = Split.chunks(head.out_features, ranks)
    names = [
        name for name, _ in model.named_parameters(remove_duplicate=False) if model.get_parameter(name) is head.bias
    ]
    path = path_of(model, head)
    return Plan(
        styles={path: "column_gather"}, parameters={name: (chunks, 0) for name in names if name != f"{path}.bias"}
    )


def _owns_only(module: nn.Module, parameter: nn.Parameter | None) -> bool:
    return all(own is parameter for own in module.parameters(recurse=False))


def t5(model: Any, axis: DeviceMesh) -> Plan:
    """T5 (arXiv 1910.10683): both stacks, with the relative positions of each rank's heads."""
    heads = model.config.num_heads
    attention = Heads(HeadLayout(heads, heads, axis.size()), model.config.d_kv, axis.get_local_rank())
    plan = Plan(
        styles={
            path: "vocab"
            for path, module in model.named_modules()
            if isinstance(module, nn.Embedding) and module.num_embeddings == model.config.vocab_size
        }
    )
    if isinstance(head := model.get_output_embeddings(), nn.Linear):
        plan |= Plan(styles={path_of(model, head): "column_gather"})
    for stack in ("encoder", "decoder"):
        if hasattr(model, stack):
            plan |= _t5_stack(getattr(model, stack), stack, attention, is_last=stack == "decoder")
    return plan


def _t5_stack(stack: Any, name: str, heads: Heads, *, is_last: bool) -> Plan:
    layer = f"{name}.block.*.layer."
    self_attention = f"{layer}0.SelfAttention"
    parts = [
        heads.attention(self_attention, stack.block[0].layer[0].SelfAttention, ("q", "k", "v"), f"{self_attention}.o")
    ]
    feed_forward = f"{layer}1.DenseReluDense"
    if stack.is_decoder:
        cross = f"{layer}1.EncDecAttention"
        parts.append(heads.attention(cross, stack.block[0].layer[1].EncDecAttention, ("q", "k", "v"), f"{cross}.o"))
        # Once for all layers: one all-reduce of its gradient.
        parts.append(Plan(styles={}, shared_arguments={name: ("encoder_hidden_states",)}))
        feed_forward = f"{layer}2.DenseReluDense"
    gated = hasattr(stack.block[0].layer[-1].DenseReluDense, "wi_0")
    styles = {f"{feed_forward}.{column}": "column" for column in (("wi_0", "wi_1") if gated else ("wi",))}
    styles |= {
        feed_forward: "shared_input",
        f"{feed_forward}.wo": "row",
        f"{layer}*.layer_norm": "sequence",
        f"{name}.block.0": "split_sequence",
        f"{name}.final_layer_norm": "sequence_gather",
    }
    bias = f"{name}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
    parts.append(Plan(styles=styles, parameters={bias: (heads.layout.queries, 1)}))
    plan = parts[0]
    for part in parts[1:]:
        plan |= part
    return plan


BUILDERS: dict[str, Callable[[Any, DeviceMesh], Plan]] = {"bert": bert, "roberta": bert, "t5": t5}
