"""Keys passed to DeepSpeed, keys refused before it, and that honoured keys change no numbers."""

import io
from contextlib import redirect_stdout
from typing import Any

import deepspeed
import pytest

from megatron.neox_arguments import ConfigError, NeoXArgs
from megatron.training.deepspeed.config import deepspeed_config
from tests.pool import run_ranks
from tests.training.layout_runs import zero
from tests.training.runs import LLAMA, SGD, config, curves, curves_of, furthest

CPU, UNPINNED = {"device": "cpu"}, {"device": "cpu", "pin_memory": False}
PRESCALED, PREDIVIDED = {"prescale_gradients": True}, {"gradient_predivide_factor": 2.0}
COMMS = {"enabled": True, "verbose": True, "prof_all": True, "debug": False}  # as 19M.yml has it


def extra(**keys: Any) -> dict[str, Any]:
    return {"deepspeed_extra_args": keys}


def passed_config(**overrides: Any) -> dict[str, Any]:
    return deepspeed_config(NeoXArgs.from_dict(config(**overrides)).for_world(2))


@pytest.mark.parametrize(("overrides", "key", "value"), [
    (zero(3, offload_optimizer=UNPINNED), "offload_optimizer", UNPINNED),
    (zero(3, offload_param=CPU), "offload_param", CPU),
    (zero(1, cpu_offload=True), "offload_optimizer", CPU),
    (zero(1, cpu_offload=True), "cpu_offload", None),
    (zero(1, cpu_offload=False, offload_optimizer={"device": "none"}), "offload_optimizer", None),
    (zero(1, load_from_fp32_weights=False), "load_from_fp32_weights", None),
    # Gradients are reduced during backward where buckets stay the same.
    *((zero(stage), "overlap_comm", stage == 3) for stage in (1, 2, 3)),
    (zero(3, overlap_comm=False), "overlap_comm", False),
    ({}, "communication_data_type", "fp32"),
    ({"precision": "bfloat16"}, "communication_data_type", "fp32"),
    ({"communication_data_type": "bf16"}, "communication_data_type", "bf16"),
    (extra(comms_logger=COMMS), "comms_logger", COMMS),
])  # fmt: skip
def test_what_is_passed(overrides: dict[str, Any], key: str, value: Any) -> None:
    """value: None: not the key."""
    passed = passed_config(**overrides)
    passed |= passed["zero_optimization"]
    assert passed[key] == value if value is not None else key not in passed


@pytest.mark.parametrize(("overrides", "extra"), [
    ({"precision": "bfloat16"}, {"bf16": {"enabled": True}}),
    ({}, {"bf16": {"enabled": False}}),
    ({"gradient_clipping": 0.5}, {"gradient_clipping": 0.5}),  # although ours clips this one itself
    ({"precision": "bfloat16"}, {"zero_optimization": {"stage": 0}}),  # although it runs as stage 1
    ({}, {"train_batch_size": 8, "communication_data_type": "fp32"}),
    ({"dump_state": True}, {"dump_state": True}),
])  # fmt: skip
def test_extra_args_may_repeat(overrides: dict[str, Any], extra: dict[str, Any]) -> None:
    assert passed_config(**overrides, deepspeed_extra_args=extra) == passed_config(**overrides)


@pytest.mark.parametrize(("overrides", "message"), [
    (extra(bf16={"enabled": True}), r"\.bf16\.enabled: True .*precision \(program\)"),
    (extra(train_batch_size=4), r"4 .*train_batch_size \(program\): 8"),
    (extra(prescale_gradients=True), r"True .*prescale_gradients \(default\): False"),
    (extra(zero_optimization={"stage": 2}), "zero_optimization.stage: 2 "),
    (extra(zero_optimization={"zero_quantized_weights": True}), "quantized_weights: True "),
    (extra(elasticity={"enabled": True}), "elasticity: .* no longer"),
    (extra(scheduler={"type": "WarmupLR"}), "scheduler: write lr_decay_style"),
    (extra(seed=3), "seed.* outside deepspeed_extra_args"),
    (extra(bfloat={}), "bfloat: .*DeepSpeed"),
    (extra(comms_logger={"enabled": True, "prof": True}), r"extra_args.comms_logger.prof: unknown"),
    ({"optimizer": {"type": "Muon", "params": {"lr": 1e-3}}}, "Muon .*engine: native"),
    (zero(0, offload_optimizer=CPU), "offload_optimizer: .*stage 1 .*not 0"),
    (zero(2, offload_param=CPU), "offload_param: .*stage 3, not 2"),
    (zero(3, offload_optimizer={"device": "cpu", "ratio": 0.5}), "ratio: 0.5"),
    (zero(1, cpu_offload=True, offload_optimizer=CPU), "cpu_offload: offload_optimizer"),
    ({"use_bnb_optimizer": True, **zero(1, cpu_offload=True)}, "use_bnb_optimizer: .*GPU.*offload_optimizer"),
    (PRESCALED | zero(2), "prescale_gradients: .*ZeRO 2 .*reduce_scatter"),
    (PREDIVIDED | zero(3, reduce_scatter=False), "gradient_predivide_factor: 2.0 .*ZeRO 3"),
    (PREDIVIDED | PRESCALED, "gradient_predivide_factor: .*prescale_gradients .*remove"),
])  # fmt: skip
def test_refused(overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        passed_config(**overrides)
    assert len(caught.value.problems) == 1


KEYS: list[tuple[dict[str, Any], float]] = [
    (PRESCALED, 1e-6),
    (PREDIVIDED, 1e-6),
    (PREDIVIDED | zero(2, reduce_scatter=False), 1e-6),
    (PRESCALED | zero(3, reduce_scatter=False), 1e-6),
    ({"communication_data_type": "fp16"}, 2**-11),
    ({"communication_data_type": "bf16", **zero(1)}, 2**-8),
    ({"communication_data_type": "bf16", **zero(3)}, 2**-8),
    *((zero(stage, overlap_comm=overlap), 1e-6) for stage, overlap in ((2, True), (3, True), (3, False))),
]


def test_two_ranks_are_one_process() -> None:
    """Results differ by the rounding of the type that gradients travel in. Overlap is exact."""
    common = config(LLAMA, SGD, num_layers=2, train_micro_batch_size_per_gpu=2)
    one_process = curves_of({"": common}, 2)[""]
    run_values = {i: {**common, **keys, "engine": "deepspeed"} for i, (keys, _) in enumerate(KEYS)}
    *_, sequential, overlapped = rank_curves = list(curves_of(run_values, 2, ranks=2).values())
    for curve, (keys, limit) in zip(rank_curves, KEYS, strict=True):
        differences = furthest(curve, one_process)
        assert all(difference < limit for difference in differences) and (max(differences) > 1e-6 or limit == 1e-6), (
            keys,
            differences,
        )
    assert (overlapped.losses, overlapped.norms) == (sequential.losses, sequential.norms)


def outputs(rank: int, world_size: int, configs: list[dict[str, Any]]) -> list[str]:
    """For the pool: what a step of each run prints on this rank."""
    printed = []
    for values in configs:
        with redirect_stdout(io.StringIO()) as out:
            for handler in deepspeed.utils.logger.handlers:
                handler.setStream(out)
            curves(rank, world_size, [values], steps=1)
        printed.append(out.getvalue())
    return printed


def test_logs_of_deepspeed() -> None:
    quiet = config(LLAMA, SGD, train_micro_batch_size_per_gpu=4, engine="deepspeed")
    logging_keys = {**quiet, "dump_state": True, "comms_logger": {"enabled": True, "prof_all": True}}
    (silent, logged), (_, other_rank_output) = run_ranks(outputs, 2, [quiet, logging_keys])
    facts = ("gradient_predivide_factor", "all_reduce", "Comm. Op")
    assert all(fact in logged and fact not in silent for fact in facts) and other_rank_output == ""
