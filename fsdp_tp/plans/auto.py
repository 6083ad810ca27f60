"""Plan "auto": where the parts of a known Hugging Face decoder stand, as a plan.

No import of transformers: only attributes of the model.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fsdp_tp.config import divisors
from fsdp_tp.plans.families import FAMILIES, Family
from fsdp_tp.plans.hugging_face import has_plan, hugging_face_plan
from fsdp_tp.plans.suggest import suggestion

_HEAD_COUNTS = ("num_attention_heads", "num_key_value_heads", "num_heads")


def families() -> tuple[str, ...]:
    """The Hugging Face ``model_type`` names that plan "auto" knows."""
    return tuple(FAMILIES)


def auto_plan(model: Any, axis: DeviceMesh, *, family: str = "auto", sequence_parallel: bool = False) -> dict[str, str]:
    """The plan of a Hugging Face decoder, as patterns for :func:`fsdp_tp.plans.match_plan`.

    Of a family outside the table it is made from the config's ``base_model_tp_plan``, with a warning.

    Args:
        model: the model with its head (``LlamaForCausalLM``) or without (``LlamaModel``).
        axis: the tensor axis; the plan is checked against its size.
        family: take the model for this one of :func:`families`; ``"auto"`` reads its config.

    Raises:
        ValueError: the family is unknown, the axis does not divide the heads, or the family cannot
            do ``sequence_parallel``.
    """
    if family == "auto" and _model_type(model) not in FAMILIES and has_plan(model):
        return hugging_face_plan(model, axis.size(), sequence_parallel=sequence_parallel)
    known = _family(model, family)
    if sequence_parallel and known.no_sequence_parallel:
        raise ValueError(
            f"sequence_parallel=True is not possible for {type(model).__name__}: {known.no_sequence_parallel}"
        )
    _check_heads(model.config, axis)
    prefix = f"{model.base_model_prefix}." if hasattr(model, model.base_model_prefix) else ""
    block = f"{prefix}{known.blocks}.*."
    mlp = block if known.mlp is None else f"{block}{known.mlp}."
    plan = {
        _path_of(model, model.get_input_embeddings()): "vocab",
        # Not already at the embedding: these models derive positions and masks from the shape
        # of its output, which must stay whole.
        f"{prefix}{known.blocks}.0": "split_sequence",
        f"{block}{known.attention}": "shared_input",
        f"{block}{known.attention}.{known.row}": "row",
        f"{mlp}{known.mlp_row}": "row",
        f"{prefix}{known.last_norm}": "sequence_gather",
    }
    plan |= {f"{block}{known.attention}.{name}": "column" for name in known.columns}
    plan |= {f"{block}{known.attention}.{name}": "per_head" for name in known.per_head}
    plan |= {f"{mlp}{name}": "column" for name in known.mlp_columns}
    if known.mlp is not None:
        plan[f"{block}{known.mlp}"] = "shared_input"
    plan |= {f"{block}{name}": "sequence" for name in known.norms}
    plan |= {f"{prefix}{path}": style for path, style in known.whole.items()}
    head = model.get_output_embeddings()
    if isinstance(head, nn.Linear):
        plan[_path_of(model, head)] = "column_gather"
    return plan


def share_head_counts(model: Any, axis: DeviceMesh, *, family: str = "auto") -> None:
    """Tells attention modules that count their heads by themselves how many this rank has."""
    if family == "auto" and _model_type(model) not in FAMILIES:
        return  # Hugging Face's own plans are of models that read the number from shapes
    known = _family(model, family)
    for path, module in model.named_modules():
        if f".{path}".endswith(f".{known.attention}"):
            for name in known.head_counts:
                setattr(module, name, getattr(module, name) // axis.size())


def _model_type(model: Any) -> str | None:
    return getattr(getattr(model, "config", None), "model_type", None)


def _family(model: Any, family: str) -> Family:
    model_type = _model_type(model) if family == "auto" else family
    if model_type not in FAMILIES:
        raise ValueError(
            f"plan='auto' does not know {type(model).__name__}"
            + (f" (model_type {model_type!r})" if model_type else "")
            + f"; it knows the Hugging Face families {', '.join(FAMILIES)}, and others whose config has a "
            f"base_model_tp_plan. {suggestion(model)}"
        )
    return FAMILIES[model_type]


def _path_of(model: nn.Module, wanted: nn.Module) -> str:
    return next(path for path, module in model.named_modules() if module is wanted)


def _check_heads(config: Any, axis: DeviceMesh) -> None:
    for name in _HEAD_COUNTS:
        heads = getattr(config, name, None)
        if heads is not None and heads % axis.size():
            legal = ", ".join(map(str, divisors(heads)))
            raise ValueError(
                f"tensor_parallel_degree={axis.size()} does not divide {name}={heads}; legal values: {legal}"
            )
