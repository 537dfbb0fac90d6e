"""`text_gen_type: score` and `precompute` as they are typed, against transformers and whole forwards."""

import json
import math
import re
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from megatron.checkpointing.huggingface import HFFolder, import_hf
from megatron.data import IndexedDataset, IndexedDatasetWriter
from megatron.data.indexed_dataset import data_path, index_path
from megatron.data.preferences.pairwise import check_reference
from megatron.generation.scoring import logprobs as scoring
from megatron.generation.scoring import precompute as precomputing
from megatron.generation.scoring import score_file
from megatron.tokenizer import HFTokenizer
from tests.generation.runs import LAYOUTS, command
from tests.generation.runs import lines as rows
from tests.generation.runs import run_script as run
from tests.generation.serving.server import FOLDER, NAME, make_model
from tests.pool import run_ranks

POSITIONS = 48
LONG = "It is a truth universally acknowledged, that a single man in possession of a good fortune. " * 4
LINES: list[dict[str, str]] = [{"text": "one two three"}, {"prompt": "The sky is", "completion": " blue and far"},
                               {"text": LONG}, {"prompt": "", "completion": "a beginning"},
                               {"prompt": "The sky is ", "completion": "green"},
                               {"prompt": LONG, "completion": " That is all."}]  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hf")
    make_model(folder, POSITIONS)
    return folder / NAME


reference = cache(transformers.AutoModelForCausalLM.from_pretrained)


def expected(model: Path, context: list[int], tokens: list[int]) -> list[float]:
    """Log-probabilities of the tokens under transformers, read in the windows that lm-eval reads."""
    full, logprobs = context + tokens, []
    for i in range(len(tokens)):
        end = len(context) + i
        # All before it, or what its window leaves: windows end where POSITIONS tokens are predicted.
        last = min(i - i % POSITIONS + POSITIONS, len(tokens))
        begin = max(0, (last if len(context) == 1 else len(full) - 1) - POSITIONS)
        with torch.no_grad():
            logits = reference(model)(torch.tensor([full[begin:end]])).logits[0, -1]
        logprobs.append(float(logits.double().log_softmax(-1)[full[end]]))
    return logprobs


def argv(model: Path, folder: Path, kind: str, *words: str) -> list[str]:
    return ["--hf-model", str(model), "--set", f"text_gen_type={kind}", f"log_dir={folder}/logs", *words]


def test_lines_in_and_out(model: Path, tmp_path: Path) -> None:
    """No file of configuration: a HuggingFace folder, in one process and on four ranks."""
    input_file = tmp_path / "in.jsonl"
    input_file.write_text("\n".join(json.dumps(line) for line in LINES) + "\n")
    code, out, err = run(*argv(model, tmp_path, "score", "-i", str(input_file)))
    assert code == 0 and f"6 lines of scores are in {input_file}.scores.jsonl" in out, err
    scores = rows(Path(f"{input_file}.scores.jsonl"))
    tokenizer = HFTokenizer(FOLDER)
    begin, texts = [tokenizer.eod], [line.get("prompt", "") + line.get("completion", "") for line in LINES]
    sky, long = tokenizer.tokenize("The sky is"), tokenizer.tokenize(LONG.rstrip())
    requests = [(begin, tokenizer.tokenize(LINES[0]["text"])), (sky, tokenizer.tokenize(texts[1])[len(sky) :]),
                (begin, tokenizer.tokenize(LONG)), (begin, tokenizer.tokenize(texts[3])),
                (sky, tokenizer.tokenize(texts[4])[len(sky) :]),
                (long, tokenizer.tokenize(texts[5])[len(long) :])]  # fmt: skip
    assert len(requests[2][1]) > 2 * POSITIONS
    for row, (context, tokens) in zip(scores, requests, strict=True):
        assert row["tokens"] == tokens
        assert row["logprobs"] == pytest.approx(expected(model, context, tokens), abs=1e-4)
        assert row["sum"] == pytest.approx(sum(row["logprobs"]), abs=1e-4)
        assert row["perplexity"] == pytest.approx(math.exp(-row["sum"] / len(tokens)))
    excess = len(long) + len(requests[5][1]) - 1 - POSITIONS
    assert [row["message"] for row in scores[:5]] == [None] * 5 and f"first {excess} tokens" in scores[5]["message"]
    texts_run = 5 + math.ceil(len(requests[2][1]) / POSITIONS)
    assert re.search(f"eval_overlong: of {texts_run} texts, 1 .* 48 positions", out)

    ranks, layout = LAYOUTS["tp2 x pp2"]
    layout_words = [f"{key}={value}" for key, value in layout.items()] + ["-o", f"{tmp_path}/four.jsonl"]
    assert run(*argv(model, tmp_path, "score", *layout_words, "-i", str(input_file)), ranks=ranks)[0] == 0
    for single_rank, four in zip(scores, rows(tmp_path / "four.jsonl"), strict=True):
        assert single_rank["tokens"] == four["tokens"] and single_rank["greedy"] == four["greedy"]
        assert four["logprobs"] == pytest.approx(single_rank["logprobs"], abs=2e-5)
    # Imported as a checkpoint, its vocabulary is padded to 384 rows, which share out no probability.
    import_hf(HFFolder(model), tmp_path / "imported")
    words = [str(tmp_path / "imported/global_step0/configs/hf_model.yml"), "--set", f"vocab_file={FOLDER}"]
    words += ["tokenizer_type=HFTokenizer", "text_gen_type=score", f"load={tmp_path}/imported", f"log_dir={tmp_path}/l"]
    assert run(*words, "-i", str(input_file), "-o", f"{tmp_path}/imported.jsonl")[0] == 0
    for single_rank, imported in zip(scores, rows(tmp_path / "imported.jsonl"), strict=True):
        assert imported["logprobs"] == pytest.approx(single_rank["logprobs"], abs=2e-5)
    assert not list(tmp_path.glob(".*")), "nothing unfinished stays"


def killed(rank: int, world_size: int, words: list[str], chunks: int) -> None:
    """For the pool: generate.py that ends without warning while it writes."""
    score_file._LINES_AT_ONCE, precomputing._TOKENS_AT_ONCE = 2, 64  # type: ignore[misc] # a throw-away fork
    real, calls = scoring.score, []

    class Kill(BaseException):
        pass

    def dying(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        if len(calls) > chunks:
            raise Kill
        return real(*args, **kwargs)

    scoring.score = dying
    with pytest.raises(Kill):
        command(rank, world_size, words)


@pytest.mark.more
def test_an_interrupted_file_goes_on(model: Path, tmp_path: Path) -> None:
    input_file = tmp_path / "in.jsonl"
    input_file.write_text("\n".join(json.dumps(line) for line in LINES) + "\n\n")
    scores_file, words = Path(f"{input_file}.scores.jsonl"), argv(model, tmp_path, "score", "-i", str(input_file))
    assert run(*words)[0] == 0
    at_once = rows(scores_file)
    scores_file.unlink()
    run_ranks(killed, 1, words, 2, init=False)
    (growing,) = tmp_path.glob(".in.jsonl.scores.jsonl.*.partial")
    assert len(rows(growing)) == 4 and not scores_file.exists()
    with open(growing, "a") as file:
        file.write('{"tokens": [1')
    code, out, _ = run(*words)
    assert code == 0 and "going on after 4 of 6 lines" in out and not growing.exists()
    for resumed, uninterrupted in zip(rows(scores_file), at_once, strict=True):
        assert resumed["tokens"] == uninterrupted["tokens"] and resumed["message"] == uninterrupted["message"]
        assert resumed["logprobs"] == pytest.approx(uninterrupted["logprobs"], abs=1e-5)  # of other batches
    # Another input, or another model, has nothing to do with what was begun.
    run_ranks(killed, 1, words, 1, init=False)
    input_file.write_text(json.dumps(LINES[1]) + "\n")
    code, out, _ = run(*words)
    assert code == 0 and "going on" not in out and len(rows(scores_file)) == 1
    assert not list(tmp_path.glob(".*.partial"))


@pytest.mark.parametrize(("content", "message"), [
    ('{"text": "a"}\n{"text": 3}\n', 'in.jsonl:2: expected {"text": '),
    ("[1]\n", "in.jsonl:1: expected"),
    ('{"prompt": "a"}\n', "in.jsonl:1: expected"),
    ('{"prompt": "a", "completion": ""}\n', "in.jsonl:1: completion is empty"),
    ("hello\n", "in.jsonl:1: is not valid JSON"),
    ("\n\n", "in.jsonl: holds no texts"),
    (None, "No such file"),
])  # fmt: skip
def test_bad_lines(content: str | None, message: str, model: Path, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "in.jsonl").write_text(content)
    code, _, err = run(*argv(model, tmp_path, "score", "-i", str(tmp_path / "in.jsonl")))
    assert code == 1 and message in err and "sample_input_file" in err and len(err.splitlines()) == 1
    assert not list(tmp_path.glob("*scores*"))


def write(prefix: Path, documents: list[list[int]]) -> str:
    with IndexedDatasetWriter(prefix, np.uint16) as writer:
        for document in documents:
            writer.add_document(document)
    return str(prefix)


def random_documents(seed: int, *lengths: int) -> list[list[int]]:
    draw = np.random.RandomState(seed)
    return [draw.randint(1, 380, length).tolist() for length in lengths]


def test_precomputed_references(model: Path, tmp_path: Path) -> None:
    """Scores are written next to pairs, as training reads them; a killed run goes on."""
    pos, neg = random_documents(0, 9, 30, 1, 100, 0, 47, 49, 5), random_documents(1, 7, 8, 1, 3, 0, 40, 13, 11)
    paths = write(tmp_path / "pos", pos), write(tmp_path / "neg", neg)
    words = argv(model, tmp_path, "precompute", "precompute_model_name=base", "dataset_impl=pairwise", "train_impl=dpo",
                 "pack_impl=unpacked", f"pos_train_data_paths=[{paths[0]}]",
                 f"neg_train_data_paths=[{paths[1]}]")  # fmt: skip
    run_ranks(killed, 2, words, 2, init=False)
    assert not (tmp_path / "pos_base.idx").exists()
    code, out, err = run(*words, ranks=2)
    assert code == 0 and "going on after 4 of 7 documents" in out, err
    for name, documents in (("pos", pos), ("neg", neg)):
        logprobs, data = IndexedDataset(tmp_path / f"{name}_base"), IndexedDataset(tmp_path / name)
        check_reference(logprobs, data)  # as training does
        assert logprobs.dtype == np.float32
        np.testing.assert_array_equal(logprobs.sizes, data.sizes)
        np.testing.assert_array_equal(logprobs.doc_idx, data.doc_idx)
        for values, tokens in zip(logprobs, [document for document in documents if document], strict=True):
            assert values[0] == 0.0
            np.testing.assert_allclose(values[1:], expected(model, tokens[:1], tokens[1:]), atol=1e-4)
    assert not list(tmp_path.glob(".*"))

    code, out, _ = run(*words)
    assert code == 0 and "pos_base: already exists" in out
    assert json.loads((tmp_path / "pos_base.precompute.json").read_text()).keys() == {"stamp"}, "as sets of before"
    data_path(tmp_path / "pos").touch()
    code, _, err = run(*words)
    assert code == 1 and f"{index_path(tmp_path / 'pos_base')}: already exists" in err
    code, _, err = run(*argv(model, tmp_path, "precompute"))
    assert code == 1 and "precompute_model_name: is required" in err
