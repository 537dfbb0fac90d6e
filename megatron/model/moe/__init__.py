"""Mixture of experts: router, dispatch over ranks, experts, balance. `router.py` chooses the experts of
each token, `dispatch.py` brings tokens to experts and back, over ranks too, `experts.py` holds and runs
them, `layer.py` is the feed-forward made of these, `balance.py` the losses and the bias for equal load of
experts."""

from megatron.model.moe.balance import Balance, RoutingCounts
from megatron.model.moe.layer import MoE
from megatron.model.moe.router import RoutingSums
