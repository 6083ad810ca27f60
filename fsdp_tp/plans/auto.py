"""Plan "auto": a Hugging Face decoder's own ``base_model_tp_plan``, completed.

That plan names the linears inside the blocks. What it leaves out, and what this adds: the
embedding, the output projection, the norms, where a block's column layers share one input,
and where the sequence is split. No import of transformers: only attributes of the model.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fsdp_tp.config import divisors

_TRANSLATION = {
    "colwise": "column",
    "rowwise": "row",
    "replicated_with_grad_allreduce": "per_head",
}
_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")


def families() -> tuple[str, ...]:
    """The Hugging Face ``model_type`` names that plan "auto" knows."""
    return _FAMILIES


def auto_plan(model: Any, axis: DeviceMesh, *, family: str | None = None) -> dict[str, str]:
    """The plan of a Hugging Face decoder, as patterns for :func:`fsdp_tp.plans.match_plan`.

    Args:
        model: the model with its head (``LlamaForCausalLM``) or without (``LlamaModel``).
        axis: the tensor axis; the plan is checked against its size.
        family: take the model for one of :func:`families`, whatever its config says.

    Raises:
        ValueError: the family is unknown, or the axis does not divide the heads.
    """
    config: Any = getattr(model, "config", None)
    model_type = family or getattr(config, "model_type", None)
    if model_type not in _FAMILIES:
        raise ValueError(
            f"plan='auto' does not know {type(model).__name__}"
            + (f" (model_type {model_type!r})" if model_type else "")
            + f"; it knows the Hugging Face families {', '.join(_FAMILIES)}. For another model pass a dict of "
            "module patterns to styles, such as {'layers.*.attn.wq': 'column', 'layers.*.attn.wo': 'row'}"
        )
    _check_heads(config, axis)
    prefix = f"{model.base_model_prefix}." if hasattr(model, model.base_model_prefix) else ""
    unknown = {style for style in config.base_model_tp_plan.values() if style not in _TRANSLATION}
    if unknown:
        raise ValueError(
            f"plan='auto': the base_model_tp_plan of {model_type} has the unknown styles {', '.join(sorted(unknown))}; "
            f"known: {', '.join(_TRANSLATION)}. Pass a dict plan"
        )
    plan = {prefix + path: _TRANSLATION[style] for path, style in config.base_model_tp_plan.items()}
    plan |= {
        f"{prefix}embed_tokens": "vocab",
        # Not already at the embedding: these models derive positions and masks from the shape
        # of its output, which must stay whole.
        f"{prefix}layers.0": "split_sequence",
        f"{prefix}layers.*.self_attn": "shared_input",
        f"{prefix}layers.*.mlp": "shared_input",
        f"{prefix}layers.*.input_layernorm": "sequence",
        f"{prefix}layers.*.post_attention_layernorm": "sequence",
        f"{prefix}norm": "sequence_gather",
    }
    if isinstance(getattr(model, "lm_head", None), nn.Linear):
        plan["lm_head"] = "column_gather"
    return plan


def _check_heads(config: Any, axis: DeviceMesh) -> None:
    for name in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(config, name)
        if heads % axis.size():
            legal = ", ".join(map(str, divisors(heads)))
            raise ValueError(
                f"tensor_parallel_degree={axis.size()} does not divide {name}={heads}; legal values: {legal}"
            )
