"""Mixture of experts: the layer, its gates, and the routings they make (§9.4 §9.12)."""

from ds_lite.moe.experts import Experts
from ds_lite.moe.gate import TopKGate, top1gating, top2gating, topkgating
from ds_lite.moe.gating import Agree, load_balancing_loss, route_top1, route_top2, route_topk
from ds_lite.moe.layer import MoE
from ds_lite.moe.noise import Purpose, TokenNoise
from ds_lite.moe.queues import expert_capacity
from ds_lite.moe.routing import Routing

__all__ = [
    "Agree",
    "Experts",
    "MoE",
    "Purpose",
    "Routing",
    "TokenNoise",
    "TopKGate",
    "expert_capacity",
    "load_balancing_loss",
    "route_top1",
    "route_top2",
    "route_topk",
    "top1gating",
    "top2gating",
    "topkgating",
]
