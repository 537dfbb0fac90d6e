"""`distillation` accepts some keys and refuses others."""

from typing import Any

import pytest

from megatron.neox_arguments import NeoXArgs
from tests.neox_arguments.conftest import MODEL, refused

BASE: dict[str, Any] = {**MODEL, "train_batch_size": 8, "train_iters": 10, "eval_iters": 0,
                        "tokenizer_type": "HFTokenizer", "vocab_file": "t.json"}  # fmt: skip
LABELLED = {"train_data_paths": ["d"], "train_label_data_paths": ["l"], "pack_impl": "unpacked"}
ON_POLICY = {"lmbda": 0.5}


def values_of(section: dict[str, Any], **overrides: Any) -> dict[str, Any]:
    return {**BASE, **overrides, "distillation": {"teacher": "checkpoints/teacher", **section}}


def test_defaults_are_only_the_forward_divergence() -> None:
    section = NeoXArgs.from_dict(values_of({})).distillation
    assert section == {"teacher": "checkpoints/teacher", "beta": 0.0, "temperature": 1.0, "weight": 1.0, "top_k": None,
                       "cache": False, "cache_dir": None, "lmbda": 0.0, "max_new_tokens": 128}  # fmt: skip
    section = NeoXArgs.from_dict(values_of({**ON_POLICY, "max_new_tokens": 8}, **LABELLED)).distillation
    assert section is not None and section["lmbda"] == 0.5


@pytest.mark.parametrize(("section", "overrides", "facts"), [
    ({"beta": 1.5}, {}, "distillation.beta: 1 1.5"),
    ({"weight": 0.0}, {}, "distillation.weight: 0 0.0"),
    ({"alpha": 0.5}, {}, "distillation.alpha: unknown"),
    ({}, {"sft_loss_type": "dft"}, "sft_loss_type: distillation"),
    ({}, {"z_loss": 1e-4}, "z_loss: distillation"),
    ({}, {"train_impl": "kto"}, "distillation: train_impl normal kto"),
    ({"teacher": "s3://bucket/teacher"}, {}, "distillation.teacher: remote"),
    ({"cache": True}, {}, "distillation.cache: top_k"),
    ({"cache": True, "top_k": 8}, {"use_shared_fs": False}, "distillation.cache: use_shared_fs"),
    ({"cache_dir": "x"}, {}, "distillation.cache_dir: distillation.cache"),
    ({"max_new_tokens": 8}, {}, "distillation.max_new_tokens: distillation.lmbda"),
    (ON_POLICY, {}, "distillation.lmbda: train_label_data_paths"),
    (ON_POLICY, {**LABELLED, "pack_impl": "packed"}, "distillation.lmbda: pack_impl unpacked packed"),
    ({**ON_POLICY, "cache": True, "top_k": 8}, LABELLED, "distillation.cache: lmbda"),
    ({"lmbda": 1.0, "weight": 0.5}, LABELLED, "distillation.weight: policy"),
])  # fmt: skip
def test_what_is_refused_is_named(section: dict[str, Any], overrides: dict[str, Any], facts: str) -> None:
    assert refused(facts, values_of(section, **overrides))
