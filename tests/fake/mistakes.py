"""Mistakes that are put in one at a time, each to be seen by a check."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import MappingProxyType
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn

import megatron.data.batch
import megatron.model.embedding
import megatron.model.init
import megatron.model.stage
import megatron.mpu.initialize
import megatron.mpu.layers
from megatron.data.batch import Documents
from megatron.model import Stage
from megatron.model.attention import AttentionBackends
from megatron.mpu import ParallelGroups
from megatron.planning.fake_cuda.streams import FakeStream
from megatron.training.engine import StepLoss
from megatron.training.native import update_schedule
from megatron.training.native.pipeline import Links
from megatron.training.native.update_schedule import UpdateSchedule


@contextlib.contextmanager
def patched(owner: Any, name: str, change: Callable[..., Any]) -> Iterator[None]:
    """`owner.name(..)` becomes `change(original, ..)`."""
    original = getattr(owner, name)
    with mock.patch.object(owner, name, lambda *args, **kwargs: change(original, *args, **kwargs)):
        yield


def made_on_cpu(original: Any, *args: Any) -> Tensor:
    x = original(*args)
    return x + torch.ones(x.shape[-1], dtype=x.dtype).to(x.device)


def item_in_loss(original: Any, loss: StepLoss, head: Any, batch: Any) -> Tensor:
    value = original(loss, head, batch)
    return value if value.item() < 1e9 else value * 0


def swapped(original: Any, **sizes: Any) -> ParallelGroups:
    groups = original(**sizes)
    handles = {**groups.handles, "tensor": groups.handles["data"], "data": groups.handles["tensor"]}
    return replace(groups, handles=MappingProxyType(handles))


def skipped_on_odd_ranks(original: Any, summand: Tensor, *args: Any) -> Tensor:
    return summand if torch.distributed.get_rank() % 2 == 1 else original(summand, *args)


def layer_missing_on_second_stage(original: Any, args: Any, stages: int) -> Any:
    parts = original(args, stages)
    return [parts[0], parts[1][1:], *parts[2:]] if torch.distributed.get_rank() > 0 else parts


def not_received_by_second_stage(original: Any, links: Any, buffer: Tensor, sender: int) -> Any:
    return None if links._rank == 1 and buffer.dim() > 1 else original(links, buffer, sender)


def sent_in_fp32(original: Any, links: Any, tensor: Tensor, receiver: int) -> Any:
    return original(links, tensor.float() if links._rank == 0 and tensor.dim() > 1 else tensor, receiver)


def left_out_on_odd_ranks(original: Any, *args: Any, **keywords: Any) -> Any:
    return mock.Mock() if torch.distributed.get_rank() % 2 == 1 else original(*args, **keywords)


def swapped_experts(original: Any, **sizes: Any) -> ParallelGroups:
    groups = original(**sizes)
    handles = {**groups.handles, "expert": groups.handles["expert_data"], "expert_data": groups.handles["expert"]}
    return replace(groups, handles=MappingProxyType(handles))


def one_more_on_odd_ranks(original: Any, **sizes: Any) -> ParallelGroups:
    rank = torch.distributed.get_rank()
    if rank % 2 == 1:
        torch.distributed.new_group([rank], use_local_synchronization=True)
    return original(**sizes)


def wide_starts(original: Any, *args: Any) -> Any:
    inputs = original(*args)
    return inputs._replace(cu_seqlens=inputs.cu_seqlens.long())


def padded_starts(original: Any, begins: np.ndarray) -> Documents:
    documents = original(begins)
    starts = torch.nn.functional.pad(
        documents.cu_seqlens, (0, begins.size + 1 - len(documents.cu_seqlens)), value=begins.size
    )
    return replace(documents, cu_seqlens=starts)


def cast_later(original: Any, stage: Stage, dtype: torch.dtype, *arguments: Any) -> Stage:
    original(stage, torch.float32, *arguments)
    for module in stage.modules():
        for name, param in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(param.detach().to(dtype)))
    return stage


MISTAKES: dict[str, Callable[[], contextlib.AbstractContextManager[None]]] = {
    "tensor on the cpu": lambda: patched(megatron.model.embedding.Embedding, "forward", made_on_cpu),
    "item in the loss": lambda: patched(StepLoss, "scaled_loss", item_in_loss),
    "swapped groups": lambda: patched(megatron.mpu.initialize, "build_groups", swapped),
    "skipped collective": lambda: patched(megatron.mpu.layers, "sum_over_ranks", skipped_on_odd_ranks),
    "odd stage split": lambda: patched(megatron.model.stage, "partition_layers", layer_missing_on_second_stage),
    "missing receive": lambda: patched(Links, "receive", not_received_by_second_stage),
    "wrong dtype": lambda: patched(Links, "send", sent_in_fp32),
    "no sum over data ranks": lambda: patched(torch.distributed, "all_reduce", left_out_on_odd_ranks),
    "swapped experts": lambda: patched(megatron.mpu.initialize, "build_groups", swapped_experts),
    "one more group": lambda: patched(megatron.mpu.initialize, "build_groups", one_more_on_odd_ranks),
    "int64 cu_seqlens": lambda: patched(Stage, "attention_inputs", wide_starts),
    "documents by tokens": lambda: patched(megatron.data.batch, "document_starts", padded_starts),
    "mask of seq x seq": lambda: patched(AttentionBackends, "form", lambda original, *args: None),
    "update without a wait": lambda: patched(UpdateSchedule, "_wait_for", lambda original, *args: None),
    "update of what gathers reads": lambda: patched(update_schedule, "all_gather_streams", lambda original, stage: ()),
    "update before gradients": lambda: patched(FakeStream, "wait_stream", lambda original, *args: None),
    "whole stage at construction": lambda: patched(megatron.model.init, "materialize", cast_later),
}
