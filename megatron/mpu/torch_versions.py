"""Names that differ between the releases of torch this runs on, 2.11 and 2.13: the one place that knows
both."""

import torch.distributed as dist

# torch 2.13 renames these and warns of the old names; 2.11 knows only those.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
