"""The recipes of post-training/: what each README says to type works, on tiny models and tiny data."""

import json
import math
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from megatron.checkpointing import find_checkpoint, load_weights
from megatron.data import IndexedDataset, build_datasets
from megatron.neox_arguments import load
from tests.checkpointing.family_models import random_model
from tests.data.preprocessing.chat_tokenizers import CHATML, fast_tokenizer
from tests.marks import with_more
from tests.pool import run_ranks
from tests.recipes.readme import LINKS, QUICK, ROOT, Trained, commands, follow, run
from tests.training.runs import ADAMW, LLAMA, bit_equal, config, run_to_end
from tools import new_config
from tools.ckpts import convert_neox_to_hf

RECIPES = ROOT / "post-training"
# Those without tests of their own.
README_RECIPES = sorted({path.parent.name for path in RECIPES.glob("*/README.md")} - {
    "sft-mix", "zephyr", "gemma", "reward", "rloo",
})  # fmt: skip
FIRST_LOSS = {"dpo": math.log(2), "kto": 0.5}  # of a policy that is its reference
# name in a README: family of the tiny model in its place
MODELS = {"SFT_MODEL": "llama 3", "BASE_MODEL": "llama 3", "TOKENIZER": "llama 3", "TEACHER": "llama 3",
          "THINK_SFT": "olmo 3", "HuggingFaceTB/SmolLM3-3B": "smollm 3", "mistralai/Mistral-7B-v0.1": "mistral full",
          "google/gemma-3-270m": "gemma 3"}  # fmt: skip
DATA = {
    "allenai/Dolci-Think-DPO-7B": "pairs_of_chats.jsonl",
    "HuggingFaceH4/ultrafeedback_binarized": "ultrafeedback", "HuggingFaceH4/ultrachat_200k": "ultrachat",  # clones
    "allenai/Dolci-Instruct-SFT": "chats.jsonl",
    "allenai/Dolci-Instruct-DPO": "pairs_of_chats.jsonl",
}  # fmt: skip
WORDS = "the quiet harbour trades copper for silk and salt in winter nine coins or ten in a storm".split()


def text(number: int, words: int) -> str:
    return " ".join(WORDS[(number * 7 + i * (number % 5 + 1)) % len(WORDS)] for i in range(words))


def turn(user: str, assistant: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": user}, {"role": "assistant", "content": assistant}]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the repository's commands, small models and the files that READMEs speak of."""
    from pyarrow import Table, parquet

    folder = tmp_path_factory.mktemp("recipes")
    for name in LINKS:
        (folder / name).symlink_to(ROOT / name)
    rows = [
        {"prompt": text(i, 3), "chosen": text(i + 1, 2 + i % 3), "rejected": text(i + 2, 1 + i % 4),
         "label": i % 2 == 0, "completion": text(i + 3, 3), "text": text(i, 40),
         "full-question": text(i, 4), "answer": text(i + 1, 3)}
        for i in range(80)
    ]  # fmt: skip
    chats = [{"messages": turn(row["prompt"], row["chosen"])} for row in rows]
    pairs = [{side: turn(row["prompt"], row[side]) for side in ("chosen", "rejected")} for row in rows]
    texts = dict.fromkeys(("pairs", "judged", "train", "forget", "retain"), rows)
    for name, content in {**texts, "chats": chats, "mcqa": chats, "pairs_of_chats": pairs}.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in content))
    for clone, split, content in (("ultrachat", "train_sft", chats), ("ultrafeedback", "train_prefs", pairs)):
        for name, shard_rows in ((split, content), (split.replace("train", "test"), content[:2])):
            shard = folder / clone / "data" / f"{name}-00000-of-00001.jsonl"
            shard.parent.mkdir(parents=True, exist_ok=True)
            shard.write_text("".join(json.dumps(row) + "\n" for row in shard_rows))
    (folder / "valid.csv").write_text("id,text\n" + "".join(f'{i},"{row["text"]}"\n' for i, row in enumerate(rows)))
    (folder / "book.txt").write_text("\n".join(row["text"] for row in rows))
    (folder / "system.txt").write_text("Answer in few words.")
    (folder / "chats-valid.jsonl").write_text((folder / "chats.jsonl").read_text())
    (folder / "data" / "gsm8k").mkdir(parents=True)
    (folder / "data" / "prompts.jsonl").write_text((folder / "pairs.jsonl").read_text())
    sums = [{"question": f"{i} nine coins or ten", "answer": f"in winter\n#### {i}"} for i in range(8)]
    (folder / "data/gsm8k/train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in sums))
    for name in ("qa", "qa-valid"):
        parquet.write_table(Table.from_pylist(rows), folder / f"{name}.parquet")
    return folder


def model(place: Path, name: str) -> str:
    """The tiny model that stands for this name, with a tokenizer; a base model's has no template."""
    folder = place / "models" / name
    if not folder.exists():
        base = name.startswith(("mistralai", "google"))
        tokenizer = fast_tokenizer(None if base else CHATML)
        tied = {"tie_word_embeddings": True} if name.endswith("SmolLM3-3B") else {}
        sizes = {"vocab_size": len(tokenizer), "max_position_embeddings": 32768, "hidden_size": 16, **tied}
        random_model(MODELS[name], torch.float32, **sizes).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    return str(folder.relative_to(place))


def checked(trained: Trained) -> Trained:
    """The steps were made, from the objective's first loss; only what is to be trained has changed."""
    lines = [json.loads(line) for line in (trained.save / "logs/metrics.jsonl").read_text().splitlines()]
    losses = [line["train/lm_loss"] for line in lines if "train/lm_loss" in line]
    assert len(losses) == trained.args.exit_interval and all(map(math.isfinite, losses)), losses
    if trained.args.ga_dataset is not None:
        assert [line["train/batch_type"] for line in lines if "train/batch_type" in line] == [0, 0, 1]
    assert losses[0] == pytest.approx(FIRST_LOSS.get(trained.recipe.get("train_impl", ""), losses[0]), abs=2e-5)
    assert any("validation/lm_loss" in line for line in lines) == bool(trained.args.eval_iters)
    if trained.recipe.get("reward_functions"):
        return trained  # a random model is never right, and learns nothing from that
    weights_before, weights_after = trained.weights_before, trained.weights_after
    changed = {
        layer
        for layer in weights_before
        if not bit_equal({layer: weights_before[layer]}, {layer: weights_after[layer]})
    }
    blocks = set(range(2, trained.args.num_layers + 2))
    assert changed == (
        {0, 4, 5} if "trainable" in trained.recipe else blocks if "lora" in trained.recipe else set(weights_before)
    )
    return trained


def run_readme(
    recipe: str, place: Path, monkeypatch: pytest.MonkeyPatch, readme: str | None = None
) -> Iterator[Trained]:
    words = readme or (RECIPES / recipe / "README.md").read_text()
    names = {name: model(place, name) for name in MODELS if name in words}
    monkeypatch.chdir(place)
    for trained in follow(words, {**names, **DATA}, monkeypatch):
        yield checked(trained)


@pytest.mark.parametrize("recipe", with_more(README_RECIPES, "distillation", "kto", product=["lora", "unlearning"]))
def test_what_a_readme_says_works(recipe: str, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert list(run_readme(recipe, place, monkeypatch))


def test_the_reward_model_is_exported_scores_pairs_and_judges(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model also learns from its rewards (rloo)."""
    from transformers import AutoModelForSequenceClassification

    (trained,) = run_readme("reward", place, monkeypatch)
    lines = [json.loads(line) for line in Path("scores/test_prefs.jsonl").read_text().splitlines()]
    assert len(lines) == 2 and all(line["margin"] == line["chosen"] - line["rejected"] for line in lines)
    assert Path("scores/test_prefs.png").exists()
    assert '"validation/accuracy"' in (trained.save / "logs/metrics.jsonl").read_text()
    convert_neox_to_hf.main(["--input_dir", str(trained.save / "global_step2"), "--output_dir", "hf/reward"])
    exported = AutoModelForSequenceClassification.from_pretrained(place / "hf/reward")
    head = trained.weights_after[8]["rm_linear.weight"]
    assert exported.config.num_labels == 1 and torch.equal(exported.score.weight, head.to(exported.dtype))
    (learner,) = run_readme("rloo", place, monkeypatch)
    answers = [json.loads(line) for line in (learner.save / "logs/rollouts.jsonl").read_text().splitlines()]
    assert len(answers) == 8 and len({answer["rewards"]["reward_model"] for answer in answers}) == 8
    assert learner.args.reward_model == str(trained.save) and learner.args.rl_kl_in_reward


def test_every_file_is_in_a_command_of_its_readme() -> None:
    for file in sorted(RECIPES.glob("*/*.yml")):
        words = (file.parent / "README.md").read_text()
        instruct_words = words.replace("think", "instruct").replace("Think", "Instruct")  # as olmo3's says
        assert any(str(file.relative_to(ROOT)) in line for line in commands(words) + commands(instruct_words)), file


def test_olmo3_instruct_is_the_same_with_instruct_for_think(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = (RECIPES / "olmo3/README.md").read_text()
    instruct_words = words.replace("think", "instruct").replace("Dolci-Think-DPO-7B", "Dolci-Instruct-DPO")
    (trained,) = run_readme("olmo3", place, monkeypatch, instruct_words)
    assert trained.files[-1] == "post-training/olmo3/instruct-dpo.yml"


def test_zephyr_s_second_step_goes_on_from_its_first(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sft_run, dpo_run = run_readme("zephyr", place, monkeypatch)
    template = (RECIPES / "zephyr/template.jinja").read_bytes()
    assert bit_equal(dpo_run.weights_before, sft_run.weights_after)
    for trained in (sft_run, dpo_run):
        assert (trained.save / "global_step2/huggingface/chat_template.jinja").read_bytes() == template


def test_gemma_s_blocks_are_group_texts(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every text cut, then joined, then cut into blocks, as transformers' run_clm.py does."""
    attempt, full_run, book = run_readme("gemma", place, monkeypatch)
    assert full_run.args.valid_data_paths and book.args.valid_data_paths is None and attempt.args.limit_samples == 300
    args = full_run.args.replace(seq_length=20, truncate_documents=25, train_iters=5, train_epochs=None).for_world(1)
    train_dataset = build_datasets(args, train_batch_size=args.train_batch_size, on_one_rank=lambda work: work()).train
    texts = [document[:25].tolist() for document in IndexedDataset("data/train_text_document")]
    joined = sum(texts, [])
    blocks = [joined[i : i + 20] for i in range(0, len(joined) - 19, 20)]
    assert train_dataset is not None and max(map(len, texts)) == 25
    (text,) = IndexedDataset("data/book_text_document")
    assert (book.save / "logs/metrics.jsonl").exists() and len(text) > 1000  # more than truncate_documents would leave
    assert sorted(train_dataset[i].tokens[:20].tolist() for i in range(len(blocks))) == sorted(blocks)


@pytest.fixture(scope="module")
def midtrained(place: Path) -> Path:
    """A run of two steps, with its two checkpoints."""
    tokenizer = place / model(place, "TOKENIZER") / "tokenizer.json"
    save = place / "checkpoints/mid_unfiltered"
    values = config(LLAMA, ADAMW, seq_length=64, max_position_embeddings=64, vocab_file=str(tokenizer), save=str(save),
                   train_iters=2, checkpoint_factor=1, lr_decay_iters=2, warmup=0.5, lr_decay_style="cosine",
                   min_lr=1e-4, z_loss=1e-4)  # fmt: skip
    run_ranks(run_to_end, 1, values)
    return save


def test_the_fork_s_sft_follows_a_run_of_ours(midtrained: Path, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    attempt, full_run, after_hf = run_readme("sft-mix", place, monkeypatch)
    assert attempt.args.train_iters == 20 and after_hf.args.train_data_weights == (0.89, 0.11)
    keys, args = full_run.recipe, full_run.args
    assert full_run.files == ["sft_dolci_mcqa_instruct_unfiltered_synthetic_alignment_mid.yml"]
    expected = {"train_iters": 4627, "warmup": 0.05, "checkpoint_factor": 200, "finetune": True, "iteration": 2}
    assert {
        key: keys[key] for key in ("train_iters", "warmup", "checkpoint_factor", "finetune", "iteration")
    } == expected
    assert keys["optimizer"] == {"type": "AdamW", "params": {"lr": 8e-5, "eps": 1e-6}}  # the checkpoint's, at this rate
    assert keys["train_data_weights"] == [0.89, 0.11] and keys["z_loss"] == 1e-4 and keys["lr_decay_style"] == "cosine"
    assert not keys.keys() & {"data_path", "split", "lr_decay_iters", "index_cache_dir"}
    assert args.num_kv_heads == 2 and args.min_lr == 0 and args.lr_decay_iters == 4627
    longer = ["exit_interval=4" if word.startswith("exit_interval=") else word for word in full_run.words]
    resumed = run_ranks(run, 1, full_run.files, longer)[0]  # typed again it goes on, from its own checkpoint
    assert bit_equal(resumed[0], full_run.weights_after) and not bit_equal(resumed[1], full_run.weights_after)


def test_the_fork_s_sft_follows_a_run_of_gpt_neox(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    golden = ROOT / "tests/data/golden"
    monkeypatch.chdir(tmp_path)
    source = golden / "ckpt_neox/neox_pp1_mp1/ckpt"
    argv = ["sft", "--from", str(source), "--filtering", "filtered", "--variant", "mid", "--output-dir", "configs",
            "--vocab-file", str(golden / "dataset/tokenizer.json"), "--save", "sft"]  # fmt: skip
    new_config.main(argv)
    file = "configs/sft_dolci_mcqa_instruct_filtered_mid.yml"
    args = load([file])
    assert (args.iteration, args.optimizer["params"]["lr"], args.rotary_pct) == (3, 8e-5, 0.25)
    corpora = [golden / f"dataset/corpus{letter}_text_document" for letter in "AB"]
    words = [f"train_data_paths=[{','.join(map(str, corpora))}]", "exit_interval=1", "log_interval=1", *QUICK]
    weights_before, weights_after = run_ranks(run, 1, [file], words)[0]
    trained = load_weights(find_checkpoint(source), args, layers=[3], tensor_rank=0, tensor_size=1)
    assert bit_equal({3: weights_before[3]}, {3: dict(trained[3])}) and not bit_equal(weights_before, weights_after)


@pytest.mark.parametrize(("spoil", "words", "message"), [
    (lambda folder: (folder / "ckpt/latest").unlink(), [], "no file `latest`; create it with the name of"),
    (lambda folder: shutil.rmtree(folder / "ckpt/global_step3/configs"), [], "stores no configuration"),
    (lambda folder: (folder / "sft_dolci_mcqa_instruct_filtered_mid.yml").touch(), [], "already exists"),
    (lambda folder: None, ["--filtering", "blocked"], "invalid choice: 'blocked'"),
    (lambda folder: None, ["--variant", "a/b"], "--variant a/b: is part of the file's name"),
], ids=["latest", "configs", "target", "filtering", "variant"])  # fmt: skip
def test_new_config_refuses(
    spoil: Callable[[Path], object], words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(ROOT / "tests/data/golden/ckpt_neox/neox_pp1_mp1/ckpt", tmp_path / "ckpt")
    spoil(tmp_path)
    argv = ["sft", "--from", str(tmp_path / "ckpt"), "--filtering", "filtered", "--variant", "mid"]
    with pytest.raises(SystemExit) as exit_info:
        new_config.main([*argv, "--output-dir", str(tmp_path), *words])
    assert message in f"{exit_info.value.code}{capsys.readouterr().err}"
    if message == "already exists":
        new_config.main([*argv, "--output-dir", str(tmp_path), "--force"])
        assert (tmp_path / "sft_dolci_mcqa_instruct_filtered_mid.yml").stat().st_size
