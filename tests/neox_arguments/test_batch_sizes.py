"""Batch arithmetic: any two of the three sizes give the third."""

import pytest

from megatron.neox_arguments import ConfigError, NeoXArgs
from tests.neox_arguments.conftest import message_states

NAMES = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


def sizes(model, values, world_size=8, **overrides):
    keys = {name: value for name, value in zip(NAMES, values, strict=True) if value is not None}
    args = NeoXArgs.from_dict(model | keys | overrides).for_world(world_size)
    return tuple(getattr(args, name) for name in NAMES), args


@pytest.mark.parametrize("values, expected", [
    ((48, 2, 3), (48, 2, 3)), ((48, 2, None), (48, 2, 3)), ((48, None, 3), (48, 2, 3)), ((None, 2, 3), (48, 2, 3)),
    ((48, None, None), (48, 6, 1)), ((None, 2, None), (16, 2, 1)), ((None, None, None), (None, None, None)),
    ((None, None, 3), (None, None, 3)),
])  # fmt: skip
def test_every_direction_on_eight_data_parallel_ranks(model, values, expected):
    actual, args = sizes(model, values)
    assert actual == expected and args.data_parallel_size == 8


def test_model_parallel_ranks_do_not_count(model):
    actual, args = sizes(model, (None, 2, 3), pipe_parallel_size=2, model_parallel_size=2)
    assert actual == (12, 2, 3) and args.data_parallel_size == 2


def test_before_the_world_is_known_nothing_is_derived(model):
    args = NeoXArgs.from_dict(model | {"train_batch_size": 8})
    assert args.train_micro_batch_size_per_gpu is None
    with pytest.raises(ConfigError, match="for_world"):
        _ = args.data_parallel_size


def test_another_world_starts_from_what_was_given(model):
    args = NeoXArgs.from_dict(model | {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 1}).for_world(2)
    assert args.gradient_accumulation_steps == 4
    assert args.for_world(4).gradient_accumulation_steps == 2
    assert args.replace(train_batch_size=16).gradient_accumulation_steps == 8
    assert args.origin("gradient_accumulation_steps") == "derived"


@pytest.mark.parametrize("values, facts", [
    ((10, 4, None), "10 train_micro_batch_size_per_gpu 4 x 2 = 8 16"),
    ((10, None, 4), "10 gradient_accumulation_steps 4 x 2 = 8"),
    ((7, None, None), "7 gradient_accumulation_steps 1 x 2 = 6 8"),
    ((16, 2, 2), "16 train_micro_batch_size_per_gpu gradient_accumulation_steps 2 x = 8 three"),
])  # fmt: skip
def test_what_does_not_work_out_shows_the_arithmetic(model, values, facts):
    with pytest.raises(ConfigError) as caught:
        sizes(model, values, world_size=2)
    assert message_states(str(caught.value), f"train_batch_size: {facts}")


@pytest.mark.parametrize("world_size", [0, 2, 6])
def test_a_world_that_does_not_fit(model, world_size):
    args = NeoXArgs.from_dict(model | {"pipe_parallel_size": 2, "model_parallel_size": 2})
    with pytest.raises(ConfigError, match=f"{world_size} ranks .* = 4; start a multiple of 4 ranks"):
        args.for_world(world_size)
