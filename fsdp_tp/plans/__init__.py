"""Which module becomes which layer: patterns, styles and the plans of known model families."""

from fsdp_tp.plans.auto import auto_plan, families
from fsdp_tp.plans.check import check_plan, check_sequence_is_split
from fsdp_tp.plans.plan import Plan
from fsdp_tp.plans.styles import STYLES, WHOLE_STYLES, match, match_plan

__all__ = [
    "STYLES",
    "WHOLE_STYLES",
    "Plan",
    "auto_plan",
    "check_plan",
    "check_sequence_is_split",
    "families",
    "match",
    "match_plan",
]
