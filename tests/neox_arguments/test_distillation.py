"""What goes with `distillation`, and what is refused beside it."""

from typing import Any

import pytest

from megatron.neox_arguments import ConfigError, NeoXArgs
from tests.neox_arguments.conftest import MODEL

BASE: dict[str, Any] = {
    **MODEL, "train_batch_size": 8, "train_iters": 10, "eval_iters": 0, "tokenizer_type": "HFTokenizer",
    "vocab_file": "t.json",
}  # fmt: skip
LABELLED = {"train_data_paths": ["d"], "train_label_data_paths": ["l"], "pack_impl": "unpacked"}
ON_POLICY = {"lmbda": 0.5}


def args_of(section: dict[str, Any], **more: Any) -> NeoXArgs:
    return NeoXArgs.from_dict({**BASE, **more, "distillation": {"teacher": "checkpoints/teacher", **section}})


def test_defaults_are_the_forward_divergence_alone() -> None:
    section = args_of({}).distillation
    assert section == {
        "teacher": "checkpoints/teacher", "beta": 0.0, "temperature": 1.0, "weight": 1.0, "top_k": None,
        "cache": False, "cache_dir": None, "lmbda": 0.0, "max_new_tokens": 128,
    }  # fmt: skip
    assert args_of({**ON_POLICY, "max_new_tokens": 8}, **LABELLED).distillation["lmbda"] == 0.5  # type: ignore[index]


@pytest.mark.parametrize(
    ("section", "more", "message"),
    [
        ({"beta": 1.5}, {}, "distillation.beta"),
        ({"weight": 0.0}, {}, "distillation.weight"),
        ({"alpha": 0.5}, {}, "alpha"),
        ({}, {"sft_loss_type": "dft"}, "sft_loss_type: the labels' part of the loss is their negative"),
        ({}, {"z_loss": 1e-4}, "z_loss: the loss has no such term"),
        ({}, {"train_impl": "kto"}, "goes with train_impl: normal"),
        ({"teacher": "s3://bucket/teacher"}, {}, "distillation.teacher: is remote"),
        ({"cache": True}, {}, "distillation.cache: keeps the most likely tokens; set top_k"),
        ({"cache": True, "top_k": 8}, {"use_shared_fs": False}, "needs use_shared_fs: true"),
        ({"cache_dir": "x"}, {}, "distillation.cache_dir: only cache: true reads it"),
        ({"max_new_tokens": 8}, {}, "distillation.max_new_tokens: only steps on policy read it"),
        (ON_POLICY, {}, "distillation.lmbda: prompts are what stands before the first trained token"),
        (ON_POLICY, {**LABELLED, "pack_impl": "packed"}, "distillation.lmbda: answers need the rest of a row"),
        ({**ON_POLICY, "cache": True, "top_k": 8}, LABELLED, "holds nothing of answers"),
        ({"lmbda": 1.0, "weight": 0.5}, LABELLED, "every step is on policy"),
    ],
)
def test_what_is_refused_is_named(section: dict[str, Any], more: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as problem:
        args_of(section, **more)
    assert message in str(problem.value)
