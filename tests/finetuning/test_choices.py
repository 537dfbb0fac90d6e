"""Choices for a model, its data and a machine."""

from typing import Any

import pytest

from benchmarks.adapter_bytes import DATA_RANKS, bytes_of, counts, with_lora
from megatron.finetuning.choices import GIB, Choices, Device, Documents, choose, with_defaults
from megatron.finetuning.formats import CHATS, JUDGED, PAIRS, TEXTS
from megatron.neox_arguments import ConfigError, load
from megatron.planning.estimate import Layout, MemoryEstimator
from megatron.tokenizer import CharLevelTokenizer
from tests.launch.runs import ROOT

SMALL: dict[str, Any] = {
    "num_layers": 4, "hidden_size": 256, "num_attention_heads": 4, "max_position_embeddings": 2048,
    "pos_emb": "rotary",
}  # fmt: skip
LARGE = {**SMALL, "num_layers": 32, "hidden_size": 4096, "num_attention_heads": 32}  # 6.4e9 parameters
CHAT = Documents([100] * 400)
CPU = Device("the CPU", 1, 16 * GIB, False, False)


def gpu(memory: float, ranks: int = 1, has_bf16: bool = True) -> Device:
    return Device("a GPU", ranks, int(memory * GIB), True, has_bf16)


def chosen(model: dict[str, Any], device: Device, keys_set: dict[str, Any] | None = None, kind: str = CHATS,
           train: Documents = CHAT) -> Choices:  # fmt: skip
    return choose(model, CharLevelTokenizer(), kind, train, Documents([100] * 20), device, keys_set or {})


@pytest.mark.parametrize(("memory", "ranks", "lora", "stage"), [
    (141, 1, None, 0),
    (24, 1, {"r": 16}, 0),
    (12, 1, {"r": 16, "quantization": "nf4"}, 0),
    (80, 8, None, 1),
    (24, 8, None, 3),
    (15.5, 8, {"r": 16}, 3),
])  # fmt: skip
def test_the_best_that_fits(memory: float, ranks: int, lora: dict[str, Any] | None, stage: int) -> None:
    keys = chosen(LARGE, gpu(memory, ranks)).keys
    assert keys["zero_optimization"] == {"stage": stage} and keys["precision"] == "bfloat16"
    assert (keys["lora"] is None) == (lora is None)
    assert (keys["lora"] or {}).get("quantization") == (lora or {}).get("quantization")
    assert keys["optimizer"]["params"]["lr"] == (2e-5 if lora is None else 2e-4)


def test_nothing_fits() -> None:
    with pytest.raises(ConfigError, match=r"1\.0 GiB on a GPU"):
        chosen(SMALL, gpu(1))


def test_a_cpu_trains_adapters_of_what_is_not_small() -> None:
    assert chosen(SMALL, CPU).keys["lora"] is None
    medium = chosen({**SMALL, "num_layers": 24, "hidden_size": 768}, CPU).keys
    assert medium["lora"]["r"] == 16 and medium["precision"] == "fp32" and medium["train_epochs"] == 2  # of 17 steps
    assert chosen(SMALL, gpu(24, has_bf16=False)).keys["precision"] == "fp16"


def test_what_is_given_stays() -> None:
    keys_set = {"lora": {"r": 4}, "optimizer": {"params": {"lr": 1.0}}, "seq_length": 512, "train_batch_size": 16}
    keys = chosen(LARGE, gpu(80), keys_set).keys
    assert keys["lora"] == {"r": 4, "alpha": 32, "dropout": 0.05, "target": "all-linear"}
    assert keys["optimizer"]["type"] == "AdamW" and keys["optimizer"]["params"]["lr"] == 1.0
    assert (keys["seq_length"], keys["train_batch_size"]) == (512, 16) and "gradient_accumulation_steps" not in keys
    assert chosen(SMALL, gpu(80), {"lora": None}).keys["lora"] is None
    quantised = chosen(LARGE, gpu(12), {"lora": {"r": 4}}).keys["lora"]
    assert (quantised["r"], quantised["quantization"]) == (4, "nf4")
    assert chosen(LARGE, gpu(80, 8), {"lora": {"quantization": "nf4"}}).keys["zero_optimization"] == {"stage": 0}
    batch = chosen(SMALL, gpu(80), {"train_micro_batch_size_per_gpu": 2}, train=Documents([200] * 1000)).keys
    assert (batch["train_micro_batch_size_per_gpu"], batch["gradient_accumulation_steps"]) == (2, 16)
    assert "save_best" not in chosen(SMALL, CPU, {"eval_iters": 0}).keys
    assert "train_epochs" not in chosen(SMALL, CPU, {"train_iters": 7}).keys
    assert "warmup" not in chosen(SMALL, CPU, {"warmup_iters": 7}).keys, "one of two keys that exclude each other"
    assert with_defaults({"a": {"b": 1}}, {"a": {"b": 2, "c": 3}, "d": 4}) == {"a": {"b": 1, "c": 3}, "d": 4}


@pytest.mark.parametrize(("kind", "lengths", "length", "method"), [
    (CHATS, [10] * 99, 256, None),
    (CHATS, [10] * 99 + [700], 768, None),
    (CHATS, [10] * 99 + [9000], 2048, None),
    (CHATS, [10] * 999 + [9000], 256, None),
    (PAIRS, [300] * 99, 384, "dpo"),
    (JUDGED, [300] * 99, 384, "kto"),
    (TEXTS, [30_000] * 99, 2048, None),
])  # fmt: skip
def test_rows_hold_the_longest_document(kind: str, lengths: list[int], length: int, method: str | None) -> None:
    files = {"pos_train_data_paths": ["a"], "neg_train_data_paths": ["b"]} if kind == PAIRS else {}
    choices = chosen({**SMALL, **files}, gpu(80), kind=kind, train=Documents(lengths))
    assert choices.keys["seq_length"] == length and choices.keys.get("train_impl") == method
    truncated = any("truncated" in reason for reason in choices.reasons)
    assert truncated == (kind == CHATS and max(lengths) > length)


def test_few_rows_are_read_several_times() -> None:
    epochs = {n: chosen(SMALL, gpu(80), train=Documents([100] * n)).keys["train_epochs"] for n in (2, 10, 300, 3000)}
    assert epochs == {2: 10, 10: 5, 300: 3, 3000: 3}


def test_every_epoch_has_steps_and_every_rank_has_rows() -> None:
    for documents in (3, 100, 3000, 100_000):
        for ranks in (1, 2, 8):
            keys = chosen(SMALL, gpu(80, ranks), train=Documents([100] * documents)).keys
            rows = keys["train_micro_batch_size_per_gpu"] * keys["gradient_accumulation_steps"]
            assert rows >= 1 and ranks <= rows * ranks <= 32
            assert keys["eval_interval"] >= 1 and keys["eval_iters"] >= 1


@pytest.mark.parametrize("method", [None, {"r": 16, "alpha": 32}])
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_memory_is_that_of_the_models_parameters(method: dict[str, Any] | None, stage: int) -> None:
    """Weights, gradients and optimizer of Llama 2 7B on 8 ranks, beside those counted from its modules."""
    keys = {"train_micro_batch_size_per_gpu": 1, "precision": "bfloat16", "zero_optimization.stage": stage}
    args = load([ROOT / "configs/llama2/7B.yml"], keys).replace(padded_vocab_size=32000)
    args = with_lora(args, method) if method else args
    expected = sum(bytes_of(counts(args, 1), stage, DATA_RANKS))
    args = args.for_world(DATA_RANKS)
    states, _ = MemoryEstimator(args).memory(Layout.configured(args))
    assert 0.95 * expected < states < 1.13 * expected  # of full weights, gradients of two blocks are counted too
