"""Resolved values and DeepSpeed settings against GPT-NeoX's own of its shipped files (golden/configs)."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from megatron.neox_arguments import ConfigError, NeoXArgs
from megatron.neox_arguments.frozen import thaw
from megatron.neox_arguments.keys.declaration import keys_of
from megatron.training.deepspeed.config import deepspeed_config
from tests.neox_arguments.conftest import ELEUTHER, refused

GOLDEN = ELEUTHER["loaded"]
# Every documented difference: a path and why it differs. Values under `deepspeed_config` are what DeepSpeed
# is told.
DIFFERENCES = {
    "fp16.fp16": "decides nothing; `enabled` does",
    "fp16.type": "decides nothing; `enabled` does",
    "fp16.auto_cast": "inputs are token numbers",
    "bf16.bf16": "decides nothing; `enabled` does",
    **{f"bf16.{key}": "bf16 has no loss scale" for key in ("hysteresis", "initial_scale_power", "loss_scale")},
    **{f"bf16.{key}": "bf16 has no loss scale" for key in ("loss_scale_window", "min_loss_scale")},
    "zero_optimization.load_from_fp32_weights": "master weights are read with the optimizer's state",
    "deepspeed_config.fp32_allreduce": "said as communication_data_type fp32",
    "deepspeed_config.steps_per_print": "our log lines replace DeepSpeed's",
    "deepspeed_config.wall_clock_breakdown": "DeepSpeed's timers wait for the device at every layer",
    "deepspeed_config.zero_optimization.stage": "stage 0 is 1 for pipelines and 16-bit weights: DeepSpeed's 0 is wrong",
    "deepspeed_config.zero_optimization.cpu_offload": "false; DeepSpeed 0.19.8 calls it offload_optimizer",
}
DIFFERENCES |= {
    f"deepspeed_config.{path}": reason for path, reason in DIFFERENCES.items() if path.startswith(("fp", "bf"))
}
DIFFERENCES["deepspeed_config.zero_optimization.load_from_fp32_weights"] = "as above"
# Files GPT-NeoX loads and crashes with later.
REFUSED = ("configs/gmlp_small.yml", "configs/gmlp_small.yml + configs/local_setup.yml")


def unequal(actual: Any, expected: Any, path: str) -> Iterator[str]:
    """Paths of what GPT-NeoX says and we say otherwise."""
    if isinstance(expected, Mapping) and isinstance(actual, Mapping):
        for name, value in expected.items():
            yield from unequal(actual.get(name, "absent"), value, f"{path}.{name}" if path else name)
    elif actual != expected and str(actual).lower() != str(expected).lower():  # names are read without case
        yield path


def differences(entry: dict[str, Any]) -> list[str]:
    args = NeoXArgs.from_dict(entry["values"]).for_world(entry["values"]["global_num_gpus"])
    items = entry["values"].items()
    differing_paths = [path for key, value in items for path in unequal(thaw(getattr(args, key)), value, key)]
    dtype = {"torch.float16": "fp16", "torch.bfloat16": "bf16", "torch.float32": "fp32"}[entry["params_dtype"]]
    differing_paths += [] if args.params_dtype == dtype else ["params_dtype"]
    # The optimizer is handed to DeepSpeed built.
    ds_config = json.loads(json.dumps({**deepspeed_config(args), "optimizer": thaw(args.optimizer)}))
    return differing_paths + list(unequal(ds_config, entry["deepspeed_config"], "deepspeed_config"))


def test_every_file_resolves_as_in_neox_but_for_the_table():
    differing_paths = {name: set(differences(GOLDEN[name])) for name in set(GOLDEN) - set(REFUSED)}
    unexplained = {
        name: paths - set(DIFFERENCES) for name, paths in differing_paths.items() if paths - set(DIFFERENCES)
    }
    assert unexplained == {} and len(GOLDEN) == 94
    assert set.union(*differing_paths.values()) == set(DIFFERENCES), "the table holds what happens, no more"


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_done_is_refused(name):
    assert refused("optimizer.params.eps: float 1.0e_8", GOLDEN[name]["values"])


def base_values(name: str, keys: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the values of a file itself: its values with an overlay, without the overlay."""
    derived = {"batch_size", "train_batch_size", "global_num_gpus", "lr", "optimizer_type", "attention_config"}
    return {key: value for key, value in GOLDEN[name]["values"].items() if key not in keys and key not in derived}


@pytest.mark.parametrize("name", [name for name in GOLDEN if name.endswith(" + overlay")])
def test_files_without_batch_or_model_say_what_is_missing(name):
    """GPT-NeoX: `Either train_batch_size or ... needs to be provided`, or a TypeError."""
    base_name = name.removesuffix(" + overlay")
    assert base_name in ELEUTHER["failed"]
    overlay = GOLDEN[name]["overlay"]
    with pytest.raises(ConfigError) as caught:
        NeoXArgs.from_dict(base_values(name, overlay)).check_training()
    missing = [key for key in overlay if key not in ("optimizer", "train_batch_size")]
    required = [key for key in missing if keys_of(NeoXArgs)[key].required]
    text = "\n".join(caught.value.problems)
    assert all(f"{key}: is required" in text for key in required or missing), text


def test_defaults_are_those_of_neox():
    """Defaults differ only on purpose."""
    neox_defaults = ELEUTHER["defaults"]
    keys = {name: key for name, key in keys_of(NeoXArgs).items() if name in neox_defaults and not key.required}
    differs = {name for name, key in keys.items() if key.default != neox_defaults[name]["default"]}
    assert differs == {
        "data_impl",  # NeoX's `infer` never worked
        "distributed_backend",  # auto
        "git_hash",  # asked of git at start, not when a class is defined
        "gradient_accumulation_steps",  # unset, so that it can be derived
    }


def test_all_keys_of_neox_and_the_fork_are_declared():
    """318 of upstream in the golden list, 17 of the fork (neox.md 2.6)."""
    keys = keys_of(NeoXArgs)
    assert {name for name, key in keys.items() if key.source == "upstream"} == set(ELEUTHER["defaults"])
    fork = {name for name, key in keys.items() if key.source == "fork"}
    assert len(ELEUTHER["defaults"]) == 318 and len(fork) == 17
    assert {name for name in fork if not name.startswith(("ga_", "gd_"))} == {"norm_placement", "use_separate_qk_norms"}
