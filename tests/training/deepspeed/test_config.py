"""What DeepSpeed is told, what is refused before it, and that honoured keys leave the numbers of one
process."""

from typing import Any

import pytest

from megatron.neox_arguments import ConfigError, NeoXArgs
from megatron.training.deepspeed.config import deepspeed_config
from tests.pool import run_ranks
from tests.training.runs import LLAMA, SGD, begin, config, curves, furthest, whole

CPU = {"device": "cpu"}


def extra(**keys: Any) -> dict[str, Any]:
    return {"deepspeed_extra_args": keys}


def zero(stage: int, **keys: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage, **keys}}


def told(**more: Any) -> dict[str, Any]:
    return deepspeed_config(NeoXArgs.from_dict(config(**more)).for_world(2))


def test_only_what_is_set_is_passed() -> None:
    off = {"device": "cpu", "pin_memory": False}
    zero = told(zero_optimization={"stage": 3, "offload_optimizer": off, "offload_param": {"device": "cpu"}})
    assert zero["zero_optimization"]["offload_optimizer"] == off
    assert zero["zero_optimization"]["offload_param"] == {"device": "cpu"}
    old = told(zero_optimization={"stage": 1, "cpu_offload": True})["zero_optimization"]
    assert old["offload_optimizer"] == {"device": "cpu"} and "cpu_offload" not in old
    none = told(zero_optimization={"stage": 1, "cpu_offload": False, "offload_optimizer": {"device": "none"}})
    assert not [key for key in none["zero_optimization"] if "offload" in key]


def test_gradients_are_reduced_during_backward_where_buckets_stay_the_same() -> None:
    """In stage 3; and there, and in the others on two ranks, the same numbers come out."""
    overlapped = [told(**zero(stage))["zero_optimization"]["overlap_comm"] for stage in (1, 2, 3)]
    assert overlapped == [False, False, True]
    assert told(**zero(3, overlap_comm=False))["zero_optimization"]["overlap_comm"] is False
    pairs = [[config(**zero(stage, overlap_comm=overlap)) for overlap in (False, True)] for stage in (2, 3)]
    for parts in run_ranks(curves, 2, [values for pair in pairs for values in pair], 3):
        for plain, during in zip(parts[::2], parts[1::2], strict=True):
            assert (plain.losses, plain.norms) == (during.losses, during.norms)


def test_what_has_no_effect_is_not_passed() -> None:
    assert "load_from_fp32_weights" not in told(**zero(1, load_from_fp32_weights=False))["zero_optimization"]


def test_gradients_travel_in_fp32_unless_told() -> None:
    assert told()["communication_data_type"] == "fp32" == told(precision="bfloat16")["communication_data_type"]
    assert told(communication_data_type="bf16")["communication_data_type"] == "bf16"


@pytest.mark.parametrize(
    ("more", "extra"),
    [
        ({"precision": "bfloat16"}, {"bf16": {"enabled": True}}),
        ({}, {"bf16": {"enabled": False}}),
        ({"gradient_clipping": 0.5}, {"gradient_clipping": 0.5}),  # although ours clips this one itself
        ({"precision": "bfloat16"}, {"zero_optimization": {"stage": 0}}),  # although it runs as stage 1
        ({}, {"train_batch_size": 8, "communication_data_type": "fp32"}),
        ({"dump_state": True}, {"dump_state": True}),
    ],
)
def test_extra_args_may_repeat(more: dict[str, Any], extra: dict[str, Any]) -> None:
    assert told(**more, deepspeed_extra_args=extra) == told(**more)


def test_extra_args_add() -> None:
    section = {"enabled": True, "verbose": True, "prof_all": True, "debug": False}  # as 19M.yml has it
    assert told(deepspeed_extra_args={"comms_logger": section})["comms_logger"] == section


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (extra(bf16={"enabled": True}), r"\.bf16\.enabled: True contradicts precision \(program\)"),
        (extra(train_batch_size=4), r"4 contradicts train_batch_size \(program\): 8"),
        (extra(prescale_gradients=True), r"True contradicts prescale_gradients \(default\): False"),
        (extra(zero_optimization={"stage": 2}), r"zero_optimization.stage: 2 contradicts"),
        (extra(zero_optimization={"zero_quantized_weights": True}), "quantized_weights: True contradicts"),
        (extra(elasticity={"enabled": True}), "elasticity: DeepSpeed 0.19.8 no longer has it"),
        (extra(scheduler={"type": "WarmupLR"}), "scheduler: write lr_decay_style"),
        (extra(seed=3), "write `seed` outside deepspeed_extra_args"),
        (extra(bfloat={}), "bfloat: DeepSpeed 0.19.8 has no such key"),
        (extra(comms_logger={"enabled": True, "prof": True}), r"deepspeed_extra_args.comms_logger.prof: unknown key"),
        (zero(0, offload_optimizer=CPU), "offload_optimizer: needs .*stage 1 or more, not 0"),
        (zero(2, offload_param=CPU), "offload_param: needs .*stage 3, not 2"),
        (zero(3, offload_optimizer={"device": "cpu", "ratio": 0.5}), "ratio: 0.5"),
        (zero(1, cpu_offload=True, offload_optimizer=CPU), "says it too"),
        ({"use_bnb_optimizer": True, **zero(1, cpu_offload=True)}, "its state stays on the GPU"),
        ({"prescale_gradients": True, **zero(2)}, "only when zero_optimization.reduce_scatter is false"),
        ({"gradient_predivide_factor": 2.0, **zero(3, reduce_scatter=False)}, "wrong gradients"),
        ({"gradient_predivide_factor": 2.0, "prescale_gradients": True}, "leaves it no effect; remove one"),
    ],
)
def test_refused(more: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        told(**more)
    assert len(caught.value.problems) == 1


KEYS: list[tuple[dict[str, Any], float]] = [
    ({"prescale_gradients": True}, 1e-6),
    ({"gradient_predivide_factor": 2.0}, 1e-6),
    ({"gradient_predivide_factor": 4.0, "precision": "bfloat16"}, 1e-6),
    ({"prescale_gradients": True, **zero(2, reduce_scatter=False)}, 1e-6),
    ({"gradient_predivide_factor": 2.0, **zero(2, reduce_scatter=False)}, 1e-6),
    ({"prescale_gradients": True, **zero(3, reduce_scatter=False)}, 1e-6),
    ({"communication_data_type": "fp16"}, 2**-11),
    ({"communication_data_type": "bf16", "zero_optimization": {"stage": 1}}, 2**-8),
    ({"communication_data_type": "bf16", "zero_optimization": {"stage": 3}}, 2**-8),
]


def test_two_ranks_are_one_process() -> None:
    """Tolerance: the rounding of the type that gradients travel in, which must show, too."""
    values = [config(LLAMA, SGD, keys, train_micro_batch_size_per_gpu=2) for keys, _ in KEYS]
    plain = [config(LLAMA, SGD, train_micro_batch_size_per_gpu=2, precision=v["precision"]) for v in values]
    ones = run_ranks(curves, 1, plain, steps=3, timeout=120)[0]
    parts = run_ranks(curves, 2, values, steps=3, timeout=120)
    for i, (keys, limit) in enumerate(KEYS):
        apart = max(furthest(whole([rank[i] for rank in parts], values[i]), whole([ones[i]], plain[i])))
        assert apart < limit, keys
        assert apart > 1e-6 or limit == 1e-6, keys


def test_logs_of_deepspeed() -> None:
    """dump_state prints DeepSpeed's configuration, comms_logger a table of its collectives at the end."""
    [default_log] = run_ranks(_one_step, 1, config(LLAMA, SGD, train_micro_batch_size_per_gpu=8))
    assert "gradient_predivide_factor" not in default_log and "all_reduce" not in default_log
    asked = {"dump_state": True, "comms_logger": {"enabled": True, "prof_all": True}}
    logs = run_ranks(_one_step, 2, config(LLAMA, SGD, asked, train_micro_batch_size_per_gpu=4))
    assert "gradient_predivide_factor" in logs[0] and "all_reduce" in logs[0] and "Comm. Op" in logs[0]
    assert logs[1] == ""


def _one_step(rank: int, world_size: int, values: dict[str, Any]) -> str:
    """For the pool: what the rank's output says."""
    import io
    from contextlib import redirect_stdout

    import deepspeed

    from tests.training.runs import batches_of

    out = io.StringIO()
    for handler in deepspeed.utils.logger.handlers:
        handler.setStream(out)
    training = begin(values)
    with redirect_stdout(out):
        training.engine.train_step(next(batches_of(training)), 0.1)
        training.engine.close()
    return out.getvalue()
