"""How a model comes into being under DeepSpeed: a layer at a time, from the initial values of any layout."""

import os
from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest import mock

import deepspeed
import pytest
import torch

from megatron.model import layer_params, trained_parameters
from megatron.model.init import initial_rows, parameters_with_specs, stage_parameters
from megatron.mpu import unshard
from megatron.training.deepspeed.attach import name_device
from megatron.training.deepspeed.engine import DeepSpeedEngine
from megatron.training.engine import Engine
from megatron.training.setup import build_engine
from tests.live_bytes import LiveBytes
from tests.model.stages import Weights, groups_of, small
from tests.pool import run_ranks

PIECE = 1024


def construct(values: dict[str, Any], world_size: int) -> tuple[Engine, int]:
    """An engine, and the most bytes at any time before DeepSpeed was given the model."""
    args = small(**values, train_micro_batch_size_per_gpu=1, gradient_accumulation_steps=1).for_world(world_size)
    live, peaks = LiveBytes(), list[int]()
    initialize: Callable[..., Any] = deepspeed.initialize

    def recorded_initialize(**keys: Any) -> Any:
        peaks.append(live.peak)
        return initialize(**keys)

    with mock.patch("deepspeed.initialize", recorded_initialize), mock.patch("megatron.model.init._PIECE", PIECE), live:
        engine = build_engine(args, groups_of(args, world_size), engine=DeepSpeedEngine)
    return engine, peaks[0]


def measured(rank: int, world_size: int, layouts: list[dict[str, Any]]) -> list[tuple[int, int, int]]:
    """For the pool: the peak, the number of elements of this rank's part, and of its largest layer."""
    results = []
    for layout in layouts:
        engine, peak = construct({"num_layers": 8, "hidden_size": 64, "precision": "bfloat16", **layout}, world_size)
        sizes = Counter[int]()
        for layer, _, _, spec in parameters_with_specs(engine.stage, engine.args):
            sizes[layer] += torch.Size(spec.local_shape(engine.groups.size("tensor"))).numel()
        results.append((peak, sum(sizes.values()), max(sizes.values())))
        engine.close()
    return results


def test_no_rank_holds_more_than_its_part_and_a_layer() -> None:
    pieces = 3 * 2 * PIECE * 4  # one that is drawn, and two to come: of up to twice the size, in fp32
    layouts = [{"zero_optimization": {"stage": 3}}, {"model_parallel_size": 2}]
    for (peak, part, layer), (tensor_peak, tensor_part, _) in run_ranks(measured, 2, layouts):
        assert part // 2 * 2 < peak < 1.05 * (part // 2 + layer) * 2 + pieces < part * 2, "in 2 bytes, over 2 ranks"
        assert tensor_part * 2 < tensor_peak < 1.05 * tensor_part * 2 + pieces < tensor_part * 4


def initial(rank: int, world_size: int, layouts: list[dict[str, Any]]) -> list[tuple[int, Weights, Weights]]:
    """For the pool: tensor rank, weights and master weights of fresh engines."""
    results = []
    for layout in layouts:
        engine, _ = construct(layout, world_size)
        shared = {name: param for layer, name, param in stage_parameters(engine.stage) if layer == 0}
        head = engine.stage.layers[str(engine.args.num_layers + 4)]
        assert head.word_embeddings.weight is shared["word_embeddings.weight"]  # type: ignore[union-attr]
        results.append((engine.groups.rank("tensor"), engine.weights(), engine.weights(master=True)))
        engine.close()
    return results


def test_master_weights_are_the_initial_values_before_rounding() -> None:
    """Tied, frozen in part, and with parameters that data ranks cannot cut evenly."""
    model = {"norm": "scalenorm", "pos_emb": "rpe", "precision": "bfloat16"}
    model |= {"trainable": {"last_layers": 1, "head": True}}
    zero = [{"stage": 1}, {"stage": 2}, {"stage": 3}, {"stage": 3, "offload_param": {"device": "cpu"}}]
    layouts = [{**model, "zero_optimization": keys} for keys in zero] + [{**model, "model_parallel_size": 2}]
    for layout, *ranks in zip(layouts, *run_ranks(initial, 2, layouts), strict=True):
        args, parts = small(**layout), {rank: weights_and_master for rank, *weights_and_master in ranks}
        for layer, specs in layer_params(args).items():
            for spec in specs:
                expected = torch.cat([rows for _, rows in initial_rows(spec, layer, args, torch.device("cpu"))])
                held = [[parts[rank][i][layer][spec.name] for rank in sorted(parts)] for i in (0, 1)]
                weights, master = (unshard(rank_parts, spec) for rank_parts in held)
                assert torch.equal(weights, expected.bfloat16()), (layout, layer, spec.name)
                trained = (layer, spec.name) in trained_parameters(args)
                assert torch.equal(master, expected if trained else weights), (layout, layer, spec.name)


@pytest.mark.parametrize(("device", "number"), [("cuda:0", "0"), ("cuda:2", "2"), ("cpu", "3")])
def test_deepspeed_takes_the_gpu_that_a_task_sees(device: str, number: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setenv("OMPI_COMM_WORLD_LOCAL_RANK", "3")
    name_device(torch.device(device))
    assert os.environ["LOCAL_RANK"] == os.environ["OMPI_COMM_WORLD_LOCAL_RANK"] == number
