"""Wraps functions of torch whose names or arguments differ between the supported releases, 2.11 and 2.13.

Nothing else in megatron/ depends on the version of torch.
"""

import warnings
from collections import Counter
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

# torch 2.13 has these new names and warns about the old ones; torch 2.11 has only the old names.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
PassKind = Literal["forward", "backward", "backward_input", "backward_weight"]
_RELEASE = tuple(int(part) for part in torch.__version__.split(".")[:2])


def varlen_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts: tuple[Tensor, Tensor],
    longest: tuple[int, int],
    window: tuple[int, int],
    scale: float | None,
) -> Tensor:
    """Computes causal flash attention (torch's) within each document; returns `[tokens, heads, head_dim]`.

    q, k, v: `[tokens, heads, head_dim]`, all documents one after another; k and v may have fewer heads (GQA).
    starts: of queries and of keys, `[documents + 1]` int32: the index of each document's first token, then
        the number of tokens. A document with fewer queries than keys has its last queries.
    longest: of queries and of keys, the number of tokens of the longest document.
    window: (keys before, keys after) its own position that a query sees; -1: all.
    scale: factor of the attention logits; None: 1 / sqrt(head_dim).
    """
    from torch.nn.attention import varlen

    shared = k.shape[1] != q.shape[1]
    if shared and _RELEASE < (2, 13):
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    options: dict[str, Any] = {"enable_gqa": True} if shared and _RELEASE >= (2, 13) else {}
    out = varlen.varlen_attn(q, k, v, *starts, *longest, window_size=window, scale=scale, **options)
    assert isinstance(out, Tensor)
    return out


def all_gather_streams(module: nn.Module) -> tuple[torch.cuda.Stream, ...]:
    """Returns the CUDA streams on which `fully_shard` gathers the weights of this module and its submodules.

    Make them wait for the optimizer once, so that not every gather has to. Returns () for a module without
    `fully_shard`. Call it after the first forward pass.
    """
    if not isinstance(module, FSDPModule):
        return ()
    context = module._get_fsdp_state()._comm_ctx
    return context.all_gather_copy_in_stream, context.all_gather_stream


def clear_forward_order(modules: Iterable[FSDPModule]) -> None:
    """Clears the order of forward passes that `fully_shard` records for the next backward.

    Call it after a step without a backward, or the record grows from step to step.
    """
    for module in modules:
        module._get_fsdp_state()._comm_ctx.post_forward_order.clear()
        for group in _parameter_groups(module):
            group._post_forward_indices.clear()


def _parameter_groups(module: FSDPModule) -> list[Any]:
    state: Any = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
    return [group for group in groups if group is not None]


def end_backward(root: FSDPModule) -> None:
    """Makes `fully_shard` take gradients that were added to weights outside of a backward pass.

    It does with them what it does at the end of a backward. root: the outermost module.
    """
    assert isinstance(root, nn.Module)
    for module in root.modules():
        for group in _parameter_groups(module) if isinstance(module, FSDPModule) else ():
            # In a step of one micro-batch, only gradients of an earlier pass have the dtype of sums: norms.
            if any(param.unsharded_accumulated_grad is not None for param in group.fsdp_params):
                for param in group.fsdp_params:
                    if param.unsharded_accumulated_grad is None and hasattr(param, "_unsharded_param"):
                        param.to_accumulated_grad_if_needed()
    root._get_fsdp_state()._root_post_backward_final_callback()


def torch_pipeline_tables(
    schedule: str, ranks: int, chunks: int, micro_batches: int
) -> list[list[tuple[PassKind, int, int]]]:
    """Returns (pass, stage, micro-batch) of each pipeline rank in the order of one of torch's schedules.

    interleaved: ranks run their stages in turns, each for as many micro-batches as there are ranks (arXiv
    2104.04473). zero_bubble: ZB1P of arXiv 2401.10241. zbv: its ZB-V. dualpipev: the order of DeepSeek's
    DualPipe (arXiv 2412.19437), cut in half; a forward and a backward that it runs at once come one after the
    other.
    Raises RuntimeError if this release of torch has other tables.
    """
    from torch.distributed import pipelining
    from torch.distributed.pipelining.schedules import _ComputationType as Computation

    # The constructors want torch's own stages; the tables need these numbers only.
    sizes: Any = SimpleNamespace(
        pp_group_size=ranks,
        n_local_stages=chunks,
        num_stages=ranks * chunks,
        _n_microbatches=micro_batches,
        microbatches_per_round=micro_batches // max(1, micro_batches // ranks),
    )
    schedules: dict[str, Any] = {
        "interleaved": pipelining.ScheduleInterleaved1F1B,
        "zero_bubble": pipelining.ScheduleInterleavedZeroBubble,
        "zbv": pipelining.ScheduleZBVZeroBubble,
        "dualpipev": pipelining.ScheduleDualPipeV,
    }
    kinds: dict[Computation, PassKind] = {
        Computation.FORWARD: "forward",
        Computation.FULL_BACKWARD: "backward",
        Computation.BACKWARD_INPUT: "backward_input",
        Computation.BACKWARD_WEIGHT: "backward_weight",
    }
    tables: list[list[tuple[PassKind, int, int]]] = []
    for rank in range(ranks):
        table = schedules[schedule]._calculate_single_rank_operations(sizes, rank)
        actions = [part for action in table if action for part in action.sub_actions or (action,)]
        tables.append([(kinds[a.computation_type], a.stage_index, a.microbatch_index) for a in actions])
    number = Counter(kind for table in tables for kind, _, _ in table)
    passes = ranks * chunks * micro_batches
    expected = (passes, passes - number["backward"], passes - number["backward"])
    if (number["forward"], number["backward_input"], number["backward_weight"]) != expected:
        raise RuntimeError(
            f"torch {torch.__version__} has another table for pipeline_schedule: {schedule}; write 1f1b, or use torch "
            "2.11 to 2.13"
        )
    return tables


def ignore_view_warning() -> None:
    """Hides a warning of torch 2.13's `fully_shard` about a module that returns a view of its hidden states.

    Such a view may not be changed in place. Nobody does: it is sent to the next stage.
    """
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor", category=UserWarning)


def enable_symmetric_memory(group: dist.ProcessGroup) -> None:
    """Lets the ranks of a group read each other's GPU memory (torch's symmetric memory).

    Does nothing from torch 2.13 on, where it is always enabled.
    """
    if _RELEASE < (2, 13):
        from torch.distributed._symmetric_memory import enable_symm_mem_for_group

        enable_symm_mem_for_group(group.group_name)
