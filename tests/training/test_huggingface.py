"""Runs that start from a HuggingFace folder and write one; rows that pad an imported vocabulary."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file

from megatron.checkpointing import CheckpointError, find_checkpoint, load_checkpoint_args, read_manifest
from megatron.checkpointing.adapters import compare_merged, compare_with_peft, open_with_base
from megatron.checkpointing.averaging import average
from megatron.checkpointing.families.convert import from_hf
from megatron.checkpointing.huggingface import HFFolder, export_hf, import_hf
from megatron.checkpointing.huggingface.importing import load_hf_weights
from megatron.neox_arguments import ConfigError, NeoXArgs
from tests.checkpointing.family_models import odd_model
from tests.checkpointing.family_runs import TOKENS
from tests.methods.preferences.test_pairs_train import pairs
from tests.pool import run_ranks
from tests.training.batches import batches_of
from tests.training.runs import GOLDEN, NEOX, TABLE, begin, cells, config, run_to_end
from tools.ckpts import adapter, convert_neox_to_hf, inspect_checkpoints, reshard, verify

TOKENIZER = GOLDEN / "dataset" / "hf_tokenizer"
VOCABULARY = 380  # of that tokenizer and of BASE's
MODEL = NEOX | {"no_weight_tying": True, "layernorm_epsilon": 1e-5}


def folder(path: Path, vocab: int = 384, tokenizer: bool = True, **changes: Any) -> Path:
    """A GPT-NeoX model as transformers saves it, of the shape of the tests' runs."""
    torch.manual_seed(5)
    sizes = {
        "vocab_size": vocab, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4,
        "intermediate_size": 128, "max_position_embeddings": 32, "rotary_pct": 0.25, "initializer_range": 0.2,
    }  # fmt: skip
    model = transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(**{**sizes, **changes}))
    with torch.no_grad():
        for param in model.parameters():
            param.add_(0.1 * torch.randn(param.shape))
    model.generation_config.temperature, model.generation_config.do_sample = 0.7, True
    model.save_pretrained(path)
    return shutil.copytree(TOKENIZER, path, dirs_exist_ok=True) if tokenizer else path


def run_values(save: Path, load: Path | str, model: dict[str, Any] = MODEL, **overrides: Any) -> dict[str, Any]:
    common = {"train_iters": 2, "checkpoint_factor": 2, "extra_save_iters": [0], "vocab_file": str(TOKENIZER)}
    return config(model, common, {"save": str(save), "load": str(load), **overrides})


def exported(save: Path, iteration: int | None, target: Path) -> dict[str, torch.Tensor]:
    checkpoint = find_checkpoint(save, iteration)
    export_hf(checkpoint, load_checkpoint_args(checkpoint)[0], target)
    return load_file(target / "model.safetensors")


def started_and_written(run: Path, model: Path) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The tensors that a run started from, and those that it wrote after its last step."""
    source, started = load_file(model / "model.safetensors"), exported(run, 0, run.parent / "started")
    # Before the first step every weight is the folder's, bit for bit, and comes out again.
    assert started.keys() == source.keys() and all(torch.equal(started[name], source[name]) for name in source)
    written_folder = run / "huggingface" / "global_step2"
    assert [path.name for path in written_folder.parent.iterdir()] == ["global_step2"]
    written, exported_weights = (
        load_file(written_folder / "model.safetensors"),
        exported(run, None, run.parent / "ended"),
    )
    assert written.keys() == exported_weights.keys() and all(
        torch.equal(written[name], value) for name, value in exported_weights.items()
    )
    return source, written


@pytest.mark.parametrize("layout", cells(["zero3"], ["tp2 pp2 sp"], ["plain"]))
def test_a_run_starts_from_a_folder_and_writes_one(layout: str, tmp_path: Path) -> None:
    ranks, keys = TABLE[layout]
    model = folder(tmp_path / "model", eos_token_id=7)
    (model / "additional_chat_templates").mkdir()
    for name in (extra_files := ("preprocessor_config.json", "additional_chat_templates/rag.jinja")):
        (model / name).write_text(f"{{}} {name}")
    run_ranks(run_to_end, ranks, run_values(tmp_path / "run", model, save_hf=0, **keys))
    source, written = started_and_written(tmp_path / "run", model)
    assert all(not torch.equal(written[name], source[name]) for name in source)
    written_folder = tmp_path / "run" / "huggingface" / "global_step2"
    for name in (
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
        "generation_config.json",
        *extra_files,
    ):
        assert (written_folder / name).read_bytes() == (model / name).read_bytes(), name
    loaded, loading_info = transformers.AutoModelForCausalLM.from_pretrained(written_folder, output_loading_info=True)  # type: ignore[misc]
    assert not loading_info["missing_keys"] and not loading_info["unexpected_keys"] and loaded.config.eos_token_id == 7
    assert loaded.generation_config.temperature == 0.7
    chat = [{"role": "user", "content": "hello"}]
    written_tokenizer, original_tokenizer = (
        transformers.AutoTokenizer.from_pretrained(path) for path in (written_folder, TOKENIZER)
    )
    assert written_tokenizer.apply_chat_template(chat, tokenize=False) == original_tokenizer.apply_chat_template(
        chat, tokenize=False
    )


@pytest.mark.parametrize(("ranks", "keys"), cells(
    [(4, {"expert_parallel_size": 2, "model_parallel_size": 2, "zero_optimization": {"stage": 1}})],
    [(4, {"model_parallel_size": 2, "pipe_parallel_size": 2, "moe_expert_tensor_parallel": "cut"})],
    [(2, {"expert_parallel_size": 2, "zero_optimization": {"stage": 3}})],
))  # fmt: skip
def test_a_run_with_experts_starts_from_a_folder_and_writes_one(ranks: int, keys: Any, tmp_path: Path) -> None:
    sizes = {"vocab_size": 384, "num_experts": 8, "max_position_embeddings": 32, "num_hidden_layers": 2}
    odd_model("qwen 2 moe", **sizes).save_pretrained(tmp_path / "model")
    source = HFFolder(tmp_path / "model")
    model = from_hf(source.config, source.get)[0]
    del model["padded_vocab_size"]
    run_ranks(run_to_end, ranks, run_values(tmp_path / "run", tmp_path / "model", model, save_hf=0, **keys))
    started, written = started_and_written(tmp_path / "run", tmp_path / "model")
    assert sum(not torch.equal(written[name], started[name]) for name in started) > 0.9 * len(started)


def test_biases_of_experts_begin_at_zero_on_a_folder_as_on_its_checkpoint(tmp_path: Path) -> None:
    sizes = {"vocab_size": 384, "max_position_embeddings": 32, "num_hidden_layers": 2}
    odd_model("mixtral", **sizes).save_pretrained(tmp_path / "model")
    source = HFFolder(tmp_path / "model")
    model = from_hf(source.config, source.get)[0]
    del model["padded_vocab_size"]
    import_hf(source, tmp_path / "made")
    weights_by_source = []
    for load in ("model", "made"):
        values = run_values(tmp_path / f"from_{load}", tmp_path / load, model, moe_router_bias_update_rate=0.01)
        weights_by_source.append(run_ranks(run_to_end, 1, {**values, "padded_vocab_size": None})[0][1])
    for layer, tensors in weights_by_source[0].items():
        assert all(value.equal(weights_by_source[1][layer][name]) for name, value in tensors.items())
    assert weights_by_source[0][2]["mlp.router.expert_bias"].abs().min() > 0


def test_new_tokens_get_rows_and_save_hf_every_few_steps(tmp_path: Path) -> None:
    model = folder(tmp_path / "model", vocab=350, tokenizer=False)
    run_ranks(run_to_end, 1, run_values(tmp_path / "run", model, save_hf=2, train_iters=3, checkpoint_factor=5))
    written_folder = tmp_path / "run" / "huggingface"
    assert sorted(path.name for path in written_folder.iterdir()) == ["global_step2", "global_step3"]
    rows = exported(tmp_path / "run", 0, tmp_path / "started")["gpt_neox.embed_in.weight"]
    source_rows = load_file(model / "model.safetensors")["gpt_neox.embed_in.weight"]
    assert rows.shape[0] == VOCABULARY and torch.equal(rows[:350], source_rows)
    torch.testing.assert_close(rows[350:], source_rows.mean(0).expand(30, -1))
    assert json.loads((written_folder / "global_step3" / "config.json").read_text())["vocab_size"] == VOCABULARY


def test_an_imported_adapter_leaves_the_padded_vocabulary_to_the_run(tmp_path: Path) -> None:
    model = folder(tmp_path / "model", vocab=350, tokenizer=False)
    base_model = transformers.AutoModelForCausalLM.from_pretrained(model)
    lora = {"r": 2, "lora_alpha": 4, "target_modules": ["query_key_value"], "init_lora_weights": False}
    peft.get_peft_model(base_model, peft.LoraConfig(task_type="CAUSAL_LM", **lora)).save_pretrained(
        str(tmp_path / "peft")
    )
    adapter.main(["import", "--adapter", str(tmp_path / "peft"), "--output_dir", str(tmp_path / "made")])
    manifest = read_manifest(find_checkpoint(tmp_path / "made"))
    assert manifest is not None and manifest.model["padded_vocab_size"] == 384
    keys = {"r": 2, "alpha": 4, "target": ["query_key_value"]}
    weights = run_ranks(run_to_end, 1, run_values(tmp_path / "run", tmp_path / "made", lora=keys,
                                             make_vocab_size_divisible_by=10))[0][1]  # fmt: skip
    assert len(weights[0]["word_embeddings.weight"]) == VOCABULARY
    run_ranks(run_to_end, 2, run_values(tmp_path / "cut", tmp_path / "run", lora=keys, finetune=True,
                                   padded_vocab_size=400, model_parallel_size=2))  # fmt: skip


def test_an_imported_checkpoint_starts_a_run_in_its_own_folder(tmp_path: Path) -> None:
    """`load` and `save` the same, as people have it: no run is gone on with, whatever its seed and data."""
    import_hf(HFFolder(folder(tmp_path / "model")), tmp_path / "run", tensor=2)
    run_ranks(run_to_end, 1, run_values(tmp_path / "run", tmp_path / "run", extra_save_iters=None))
    manifest = read_manifest(find_checkpoint(tmp_path / "run"))
    assert manifest is not None and manifest.iteration == 2 and manifest.data


def test_another_model_is_refused_with_every_key(tmp_path: Path) -> None:
    model = folder(tmp_path / "model")
    args = NeoXArgs.from_dict(run_values(tmp_path, model, num_layers=3, rotary_pct=0.5, padded_vocab_size=384))
    with pytest.raises(CheckpointError) as caught:
        load_hf_weights(model, args, layers=[0], tensor_rank=0, tensor_size=1)
    lines = {line.strip() for line in str(caught.value).splitlines()}
    assert {"num_layers: 4 in the model, 3 in this run", "rotary_pct: 2 in the model, 4 in this run"} <= lines
    small = NeoXArgs.from_dict(run_values(tmp_path, model, padded_vocab_size=256))
    with pytest.raises(CheckpointError, match="384.*padded_vocab_size.*256"):
        load_hf_weights(model, small, layers=[0], tensor_rank=0, tensor_size=1)


def test_only_the_stage_s_own_blocks_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, read, get = folder(tmp_path / "model"), [], HFFolder.get
    monkeypatch.setattr(HFFolder, "get", lambda self, name: read.append(name) or get(self, name))
    args = NeoXArgs.from_dict(run_values(tmp_path, model, padded_vocab_size=384))
    loaded = load_hf_weights(model, args, layers=[4, 5], tensor_rank=1, tensor_size=2)
    assert loaded.keys() == {4, 5} and loaded[4]["mlp.linear1.weight"].shape == (64, 32)
    assert not any(f".layers.{block}." in name for name in read for block in (0, 1))


def test_what_cannot_be_written_stops_the_run_before_its_first_step(tmp_path: Path) -> None:
    values = {**run_values(tmp_path / "run", "", save_hf=0, pos_emb="alibi"), "load": None}
    with pytest.raises(Exception, match="save_hf.*alibi|HuggingFace"):
        run_ranks(run_to_end, 1, values)
    with pytest.raises(ConfigError, match="save_hf: .*save"):
        NeoXArgs.from_dict({**run_values(tmp_path, ""), "save": None, "load": None, "save_hf": 1})
    with pytest.raises(Exception, match="ORG/NAME.*`hf download ORG/NAME`"):
        run_ranks(run_to_end, 1, run_values(tmp_path / "run", "hf://ORG/NAME"))


def test_a_reward_model_begins_from_a_folder_whose_logits_are_capped_or_scaled(tmp_path: Path) -> None:
    """Capping and scaling of logits belong to the output layer, which a reward model has not."""
    for case in ("gemma 2", "cohere 2"):
        odd_model(case).save_pretrained(tmp_path / case)
        source = HFFolder(tmp_path / case)
        keys = from_hf(source.config, source.get)[0]
        args = NeoXArgs.from_dict({**keys, "score_head": True, "padded_vocab_size": 96})
        loaded = load_hf_weights(tmp_path / case, args, layers=[0, 2], tensor_rank=0, tensor_size=1, new_head=True)
        assert loaded.keys() == {0, 2} and loaded[2]


# -- adapters
@pytest.mark.product
@pytest.mark.parametrize("kind", ["adapter", "both"])
def test_a_run_writes_peft_s_folders(tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    model = folder(tmp_path / "model")
    lora = {"r": 4, "alpha": 8, "dora": True, "init": False, "save": kind, "modules_to_save": ["embed_in", "embed_out"]}
    keys = {"save_hf": 0, "save_best": "validation/lm_loss", "eval_interval": 1, "eval_iters": 1, "lora": lora}
    run_ranks(run_to_end, 2, run_values(tmp_path / "run", model, model_parallel_size=2, **keys), timeout=120)
    saved_step = find_checkpoint(tmp_path / "run")
    base, (source,) = open_with_base([saved_step])
    compare_with_peft(base, source) if kind == "adapter" else compare_merged(base, source)
    for out in (tmp_path / "run" / "huggingface" / "global_step2", tmp_path / "run" / "best_model"):
        config = json.loads((out / "adapter_config.json").read_text())
        assert config["base_model_name_or_path"] == str(model) and (out / "tokenizer.json").is_file()
        base_model = transformers.AutoModelForCausalLM.from_pretrained(model, attn_implementation="eager")
        with torch.no_grad():
            base_logits = base_model(TOKENS).logits
            tuned = peft.PeftModel.from_pretrained(base_model, str(out)).eval()
            assert (tuned(TOKENS).logits - base_logits).abs().max() > 0.1
            opened_base, (opened,) = open_with_base([out])
            compare_with_peft(opened_base, opened)
        assert len(load_file(out / "adapter_model.safetensors")) == 4 * 4 * 3 + 3

    inspect_checkpoints.main([str(saved_step), "--match", "lora_A"])
    printed = capsys.readouterr().out
    assert ("base weights" in printed) == (kind == "adapter") and "q_proj" not in printed
    with pytest.raises(SystemExit, match="^0$"):
        verify.main([str(saved_step)])
    words = ["--input_dir", str(saved_step), "--output_dir", str(tmp_path / "out")]
    with pytest.raises(SystemExit, match=r"adapters .*tools/ckpts/adapter\.py merge"):
        convert_neox_to_hf.main(words)
    with pytest.raises(CheckpointError, match="adapters"):
        average([saved_step, find_checkpoint(tmp_path / "run", 0)], tmp_path / "mean")
    if kind == "adapter":
        with pytest.raises(SystemExit, match="base weights"):
            reshard.main(words)
        with pytest.raises(CheckpointError, match="base weights"):
            load_checkpoint_args(saved_step)
    else:
        reshard.main([*words, "--tp", "1"])
        base, (resharded,) = open_with_base([tmp_path / "out" / saved_step.name])
        assert all(resharded.read(2)[name].equal(value) for name, value in source.read(2).items())

    adapter.main(["merge", "--adapter", str(tmp_path / "run"), "--output_dir", str(tmp_path / "merged")])
    assert "difference between merged and unmerged logits" in capsys.readouterr().out
    merged_path = str(find_checkpoint(tmp_path / "merged"))
    convert_neox_to_hf.main(["--input_dir", merged_path, "--output_dir", str(tmp_path / "hf")])
    merged_model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", attn_implementation="eager")
    with torch.no_grad():
        assert (merged_model(TOKENS).logits - tuned(TOKENS).logits).abs().max() < 1e-5
    assert (tmp_path / "hf" / "tokenizer.json").is_file()


# -- rows that pad the vocabulary
CHAT = str(GOLDEN / "dataset" / "chat_conversation")
PADDED_COMMON: dict[str, Any] = {
    **MODEL, "make_vocab_size_divisible_by": 128, "train_batch_size": 4, "data_path": None, "weight_decay": 0.0,
    "reset_attention_mask": True, "reset_position_ids": True,
}  # fmt: skip
PADDED = {
    **PADDED_COMMON, "train_data_paths": [f"{CHAT}_document"], "train_label_data_paths": [f"{CHAT}_label_document"],
    "pack_impl": "packed", "eod_mask_loss": False,
}  # fmt: skip
TP4 = (4, {"model_parallel_size": 4})


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """600 tokens, which a run pads to 640; with four ranks the last holds 120 of its 160."""
    return folder(tmp_path_factory.mktemp("model"), vocab=600)


def first_step(rank: int, world_size: int, values: dict[str, Any]) -> tuple[float, float, list[Any], int | None, Any]:
    """For the pool: loss, gradient norm, batches, rows that count and metrics of a run's first step."""
    training = begin(values)
    batches = next(batches_of(training))
    fields = [(b.tokens, b.labels, b.loss_weights, *([] if b.positions is None else [b.positions])) for b in batches]
    result = training.engine.train_step(batches, 0.0)
    metrics = {name: float(value) for name, value in result.metrics.items()}
    assert training.args.padded_vocab_size == 640
    return float(result.loss), float(result.grad_norm or math.nan), fields, training.args.softmax_rows, metrics


def transformers_loss(model: Path, batches: list[Any]) -> tuple[float, float]:
    """Loss over the weighted tokens, and norm of its gradient; each document attended alone."""
    reference = transformers.AutoModelForCausalLM.from_pretrained(model, attn_implementation="eager")
    total, count = torch.zeros(()), 0.0
    for tokens, labels, weights, positions in batches:
        for row in range(len(tokens)):
            starts = [*(positions[row] == 0).nonzero().flatten().tolist(), tokens.shape[1]]
            for start, end in zip(starts, starts[1:], strict=False):
                logits = reference(tokens[row : row + 1, start:end]).logits[0].float()
                logprobs = logits.log_softmax(-1).gather(-1, labels[row, start:end, None]).squeeze(-1)
                total = total - (logprobs * weights[row, start:end]).sum()
        count += float(weights.sum())
    loss = total / count
    loss.backward()
    return float(loss), float(torch.stack([p.grad.norm() for p in reference.parameters() if p.grad is not None]).norm())


@pytest.mark.parametrize("layout", ["tp4", "pp2"])
def test_the_first_loss_is_that_of_the_model_as_it_came(layout: str, model: Path) -> None:
    ranks, keys = TABLE.get(layout, TP4)
    loss, norm, batches, rows, _ = run_ranks(first_step, ranks, config(PADDED, keys, load=str(model)))[0]
    assert rows == 600 and (loss, norm) == pytest.approx(transformers_loss(model, batches), rel=1e-5)


SIMPO = {"dpo_loss_type": "simpo", "dpo_beta": 2.0, "simpo_gamma": 0.5}


def pair_values(model: Path, folder: Path, *parts: dict[str, Any]) -> dict[str, Any]:
    common = {
        "train_impl": "dpo", "dataset_impl": "pairwise", "eod_mask_loss": False, "pack_impl": "unpacked",
        "train_micro_batch_size_per_gpu": 4,
    }  # fmt: skip
    values = config(PADDED_COMMON, pairs(folder), common, *parts, load=str(model))
    return {key: value for key, value in values.items() if value is not None and key != "split"}


@pytest.mark.parametrize("layout", cells(["tp4"], ["plain"]))
def test_preferences_of_an_imported_model(layout: str, model: Path, tmp_path: Path) -> None:
    """SimPO, whose first loss is not ln 2, by TRL's formula from transformers' log-probabilities."""
    ranks, keys = TABLE.get(layout, TP4)
    loss, _, batches, _, metrics = run_ranks(first_step, ranks, pair_values(model, tmp_path, SIMPO, keys))[0]
    reference, averages = transformers.AutoModelForCausalLM.from_pretrained(model), []
    with torch.no_grad():
        for tokens, labels, weights, *_ in batches:
            logprobs = reference(tokens).logits.float().log_softmax(-1).gather(-1, labels[..., None]).squeeze(-1)
            averages.append((logprobs * weights).sum(1) / weights.sum(1))
    chosen, rejected = torch.cat(averages).unflatten(0, (-1, 2)).unbind(1)
    expected = -torch.nn.functional.logsigmoid(2.0 * (chosen - rejected) - 0.5).mean()
    assert loss == pytest.approx(float(expected), rel=1e-5)
    assert metrics["logps/chosen"] == pytest.approx(float(chosen.mean()), rel=1e-5)


def answers_of(batches: list[Any]) -> list[dict[str, list[int]]]:
    """Each document with a trained token, as TRL's collators take it: ids, and labels of the same places."""
    labelled = []
    for tokens, labels, weights, *positions in batches:
        for row in range(len(tokens)):
            starts = (positions[0][row] == 0).nonzero().flatten().tolist() if positions else [0]
            for start, end in zip(starts, [*starts[1:], tokens.shape[1]], strict=True):
                trained = weights[row, start:end].nonzero().flatten().tolist()
                if trained:
                    last = start + trained[-1] + 1
                    answer = torch.where(weights[row, start:last] > 0, labels[row, start:last], -100).tolist()
                    ids = [*tokens[row, start:last].tolist(), int(labels[row, last - 1])]
                    labelled.append({"input_ids": ids, "attention_mask": [1] * len(ids), "labels": [-100, *answer]})
    return labelled


# Our keys, and TRL's trainer with its options.
TRL_CASES: dict[str, tuple[dict[str, Any], str, dict[str, Any]]] = {
    "SFT": ({}, "sft", {}),
    "SimPO": (SIMPO, "cpo", {"loss_type": "simpo", "beta": 2.0, "cpo_alpha": 0.0, "simpo_gamma": 0.5}),
    "CPO": ({"dpo_loss_type": ["sigmoid", "sft"], "dpo_loss_weights": [1.0, 0.5], "dpo_reference_free": True},
            "cpo", {"loss_type": "sigmoid", "beta": 0.1, "cpo_alpha": 0.5}),
    "DPO": ({"dpo_loss_type": "sigmoid"}, "dpo", {"beta": 0.1}),
}  # fmt: skip


@pytest.mark.product
@pytest.mark.parametrize("name", TRL_CASES)
def test_the_first_losses_are_those_of_trls_trainers(name: str, model: Path, tmp_path: Path) -> None:
    pytest.importorskip("trl", reason="pip install trl==1.16.0")
    from tests.objectives.trl_reference import first_loss

    keys, kind, options = TRL_CASES[name]
    values = config(PADDED, load=str(model)) if kind == "sft" else pair_values(model, tmp_path, keys)
    loss, _, batches, *_ = run_ranks(first_step, 1, values)[0]
    assert loss == pytest.approx(first_loss(model, tmp_path, kind, answers_of(batches), **options), rel=1e-5)


def test_what_masks_and_what_does_not(model: Path, tmp_path: Path) -> None:
    """auto leaves our own runs as GPT-NeoX has them; false brings padding in, true leaves it out of all."""
    as_it_came = run_ranks(first_step, 1, config(PADDED, load=str(model)))[0]
    padded = run_ranks(first_step, 1, config(PADDED, load=str(model), mask_padded_vocab=False))[0]
    assert padded[3] is None and padded[0] > as_it_came[0] + 1e-3
    native = {"padded_vocab_size": 640}
    assert run_ranks(first_step, 1, config(PADDED, native))[0][3] is None
    assert run_ranks(first_step, 1, config(PADDED, native, mask_padded_vocab=True))[0][3] == 380
    with pytest.raises(AssertionError, match="program: mask_padded_vocab: 379.*380"):
        run_ranks(first_step, 1, config(PADDED, native, mask_padded_vocab=379))


def test_the_number_goes_on_with_the_run(model: Path, tmp_path: Path) -> None:
    """A checkpoint of ours carries the configuration that the model came with."""
    values = config(PADDED, load=str(model), save=str(tmp_path / "run"), train_iters=1, checkpoint_factor=1)
    run_ranks(run_to_end, 1, values)
    resumed = config(PADDED, save=str(tmp_path / "run"), train_iters=2, checkpoint_factor=2, override_lr_scheduler=True)
    assert run_ranks(first_step, 1, {**resumed, "allow_changed_data": True})[0][3] == 600
    assert json.loads(NeoXArgs.from_dict(values).to_json())["given"].get("mask_padded_vocab") is None
