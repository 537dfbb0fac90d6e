"""Mixture of experts: router, dispatch of tokens over ranks, experts, and load balancing.

router.py chooses the experts of each token. dispatch.py brings tokens to their experts and back, also over
ranks. experts.py holds and runs the experts. layer.py is the feed-forward made of these. balance.py has the
losses, and the bias, that balance the load of experts.
"""

from megatron.model.moe.balance import Balance, RoutingCounts
from megatron.model.moe.layer import MoE
from megatron.model.moe.router import RoutingSums
