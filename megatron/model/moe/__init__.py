"""Mixture of experts: `router.py` chooses the experts of each token, `dispatch.py` brings tokens to experts
and back, over ranks too, `experts.py` holds and runs them, `layer.py` is the feed-forward of a block made of
these, and `balance.py` the losses and the bias that keep experts equally busy."""

from megatron.model.moe.balance import Balance, RoutingCounts
from megatron.model.moe.layer import MoE
from megatron.model.moe.router import Router, RoutingSums

__all__ = ["Balance", "MoE", "Router", "RoutingCounts", "RoutingSums"]
