"""Replay: the rows of a past step, their loss to the last bit, and where texts were read."""

import json
import logging
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from megatron import Run
from megatron.data import DataState, IndexedDataset, build_datasets
from megatron.experiments import find_text as text_search
from megatron.experiments import sightings as sighting
from megatron.experiments.branch import plan_branch
from megatron.experiments.branch_command import write_branch
from megatron.experiments.data_order import write_order
from megatron.experiments.errors import RunError
from megatron.experiments.find_report import find_text
from megatron.experiments.find_text import Occurrence, TextSearch
from megatron.experiments.past_run import Span
from megatron.experiments.replay import TokenLosses, token_losses
from megatron.experiments.replay_report import describe_step, step_lines
from megatron.experiments.run_data import RunData, check_samples, packed_members
from megatron.experiments.sightings import sightings
from megatron.launch import process_info
from megatron.mpu import ParallelGroups
from megatron.neox_arguments import NeoXArgs
from megatron.process.progress import ProgressBar
from megatron.tokenizer import CharLevelTokenizer, make_tokenizer
from megatron.training.method import find_method
from megatron.training.setup import with_length
from tests.pool import run_ranks
from tests.training.runs import GOLDEN, NEOX, TABLE, config, run_to_end
from tools import replay

SOURCES = [str(GOLDEN / "dataset" / f"corpus{name}_text_document") for name in "AB"]
SMALL = config(
    NEOX, num_layers=2, seq_length=32, train_iters=4, train_batch_size=8, train_micro_batch_size_per_gpu=2,
    checkpoint_factor=1, extra_save_iters=[0], data_path=None, split=None, index_cache_dir=None,
    train_data_paths=SOURCES, train_data_weights=[2.0, 1.0],
)  # fmt: skip


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four steps on two ranks, with dropout and a blend."""
    save = tmp_path_factory.mktemp("replay") / "run"
    run_ranks(run_to_end, 2, {**SMALL, "save": str(save), "hidden_dropout": 0.1, "attention_dropout": 0.1})
    return save


def losses(rank: int, world_size: int, save: Path, step: int, checkpoint: str | None = None) -> TokenLosses:
    """For the pool: the losses of a step's tokens."""
    return token_losses(Run.load(save), step, process_info(), checkpoint)


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_loss_of_a_step_is_the_logged_one_to_the_last_bit(saved: Path, ranks: int) -> None:
    logged = {row["iteration"]: row["train/lm_loss"] for row in Run.load(saved).metrics}
    for step in (1, 2, 3, 4) if ranks == 1 else (1, 3):
        result = run_ranks(losses, ranks, saved, step)[0]
        assert (result.mean, result.logged) == (logged[step], logged[step])
        assert result.checkpoint == saved / f"global_step{step - 1}" and result.has_weights
        assert result.is_exact and len(result.rows) == 8
        values, weights = (np.concatenate(parts) for parts in zip(*result.rows.values(), strict=True))
        assert (values * weights).sum() / weights.sum() == pytest.approx(result.mean, rel=1e-6)


@pytest.mark.more
@pytest.mark.parametrize("layout", TABLE)
def test_the_loss_has_the_logged_bits_in_every_layout(layout: str, tmp_path: Path) -> None:
    ranks, keys = TABLE[layout]
    values = {**SMALL, **keys, "save": str(tmp_path), "hidden_dropout": 0.1, "train_iters": 3}
    run_ranks(run_to_end, ranks, values, timeout=290)
    result = run_ranks(losses, ranks, tmp_path, 3, timeout=290)[0]
    assert (result.mean, result.is_exact) == (result.logged, True)
    single = run_ranks(losses, 1, tmp_path, 3)[0]
    assert single.mean == pytest.approx(result.mean, rel=1e-2)  # other ranks may have other dropout


def test_other_weights_give_another_loss(saved: Path) -> None:
    result = run_ranks(losses, 1, saved, 2, "4")[0]
    assert (result.checkpoint.name, result.has_weights, result.is_exact) == ("global_step4", False, False)
    assert result.mean < result.logged


def test_a_step_of_a_branch(saved: Path, tmp_path: Path) -> None:
    """The branch has keys that need a folder to write to, and begins from another run's checkpoint."""
    keys = {"save": str(tmp_path), "train_iters": 7, "lr_decay_iters": 7, "log_spikes_above_sigma": 6.0}
    planned = plan_branch(f"{saved}@4", [(key, value, "new.yml") for key, value in keys.items()])
    write_branch(planned)
    run_ranks(run_to_end, 2, json.loads(planned.args.to_json())["given"])
    result = run_ranks(losses, 2, tmp_path, 6)[0]
    assert result.mean == result.logged and result.is_exact
    with pytest.raises(RunError, match="its steps are 5 to 7"):
        Run.load(tmp_path).batch(4)
    bar = ProgressBar("order", 7, "step", logging.getLogger("order"), visible=False)
    assert write_order(Run.load(tmp_path), tmp_path / "order.npy", None, bar) == (5, 7)
    assert sorted(set(np.load(tmp_path / "order.npy")["step"])) == [5, 6, 7]
    facts = json.loads((tmp_path / "order.json").read_text())
    assert (facts["first_step"], facts["last_step"]) == (5, 7)
    for step in (4, 8):
        with pytest.raises(RunError, match="its steps are 5 to 7"):
            write_order(Run.load(tmp_path), tmp_path / "none.npy", step, bar)


def test_steps_that_the_checkpoints_do_not_tell(saved: Path, tmp_path: Path) -> None:
    """A later start read other batches, or was longer, and has saved nothing; a split step has other sums."""
    for name in ("other", "longer"):
        shutil.copytree(saved, tmp_path / name, ignore=shutil.ignore_patterns("global_step4", "global_step3"))
        (tmp_path / name / "latest").write_text("global_step2")
    changed, longer = Run.load(tmp_path / "other"), Run.load(tmp_path / "longer")
    for row in changed.metrics:
        row["consumed_samples"] += 4 * (row["iteration"] > 2)
    with pytest.raises(RunError, match="has no step 3: its steps are 1 to 2"):
        changed.batch(3)
    assert Run.load(tmp_path / "longer").batch(4).tokens.shape[0] == 8
    data = longer.data(4)
    with pytest.raises(RunError, match="step 900 reads samples up to"):
        check_samples(longer, 900, range(7192, 7200), data.dataset)
    (tmp_path / "longer" / "split_steps.json").write_text(json.dumps({"run_id": "", "steps": [2]}))
    exact = [run_ranks(losses, 2, tmp_path / "longer", step)[0].is_exact for step in (1, 2)]
    assert exact == [True, False]


def test_losses_belong_to_sources(saved: Path) -> None:
    result = run_ranks(losses, 1, saved, 3)[0]
    data = Run.load(saved).data(3)
    step = describe_step(data, 3, result)
    sums = {source: np.zeros(2) for source in SOURCES}
    for row in step["rows"]:
        values, weights = result.rows[row["sample"]]
        assert row["losses"] == [value if weight else None for value, weight in zip(values, weights, strict=True)]
        (source,) = {piece["source"] for piece in row["pieces"]}
        sums[source] += (values * weights).sum(), weights.sum()
    for source, (total, labels) in sums.items():
        facts = step["sources"][source]
        assert (facts["labels"], facts["loss"]) == (labels, pytest.approx(total / labels))
    lines = list(step_lines(step))
    assert f"loss {result.mean!r} under the weights of {saved}/global_step2 (logged: {result.mean!r})" in lines


def test_weights_of_an_earlier_step_are_needed(saved: Path, tmp_path: Path) -> None:
    shutil.copytree(saved / "global_step4", tmp_path / "global_step4")
    shutil.copytree(saved / "logs", tmp_path / "logs")
    run = Run.load(tmp_path)
    assert run.span_of(2).samples(2) == range(8, 16)
    with pytest.raises(RunError, match="no checkpoint from before step 2, the first is 4"):
        run.weights_before(2)


def test_rows_name_their_documents(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert replay.main([str(saved), "--step", "3", "--json"]) == 0
    step = json.loads(capsys.readouterr().out)
    datasets = {source: IndexedDataset(source) for source in SOURCES}
    assert [row["rank"] for row in step["rows"]] == [0, 0, 1, 1, 0, 0, 1, 1]
    assert set(step["sources"]) == set(SOURCES)
    for row in step["rows"]:
        parts = [datasets[p["source"]].get(p["document"], p["offset"], p["tokens"]) for p in row["pieces"]]
        assert np.concatenate(parts).tolist() == row["tokens"]
    batch = Run.load(saved).batch(3)
    assert batch.tokens.tolist() == [row["tokens"][:-1] for row in step["rows"]]
    assert replay.main([str(saved), "--step", "3", "--rank", "1"]) == 0
    output = capsys.readouterr().out
    assert output.count("\nrow ") == 4 and "rank 0" not in output
    assert step["rows"][2]["pieces"][0]["text"] in output


def test_a_text_is_found_where_it_was_read(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = Run.load(saved)
    row = next(row for row in run.data(3).rows(3) if len(row.pieces) == 1)
    text = run.data(3).tokenizer.detokenize(row.tokens[4:20].tolist())
    assert replay.main([str(saved), "--find", text, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    steps = [(row["step"], row["row"], row["place"]) for place in result["places"] for row in place["seen"]]
    assert (3, row.row, 4) in steps and result["complete"]
    assert replay.main([str(saved), "--find", text]) == 0
    assert f"step 3, row {row.row}, from place 4" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words",
    [
        ["--step", "9"], ["--step", "2", "--rank", "2"], ["--step", "1", "--loss", "--checkpoint", "7"],
        ["--step", "1", "--loss", "--checkpoint", "latest"], ["--find", ""],
    ],
)  # fmt: skip
def test_bad_input_gets_one_line(saved: Path, words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert replay.main([str(saved), *words]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("replay.py: error: ")


def test_changed_data_is_refused(saved: Path, tmp_path: Path) -> None:
    text = (saved / "global_step4" / "manifest.json").read_text()
    run = Run.load(saved)
    manifest = run.manifest(4)
    run._manifests[4] = type(manifest)(**{**vars(manifest), "data": {**manifest.data, "consumed_sha256": "0"}})
    with pytest.raises(RunError, match="read"):
        run.batch(4)
    assert (saved / "global_step4" / "manifest.json").read_text() == text


def test_every_token_of_an_epoch_is_found_once(tmp_path: Path) -> None:
    values = {**SMALL, "save": str(tmp_path), "train_iters": None, "train_epochs": 1, "train_data_weights": None}
    run_ranks(run_to_end, 1, {**values, "limit_samples": 8, "checkpoint_factor": 5})
    run = Run.load(tmp_path)
    result = run_ranks(losses, 1, tmp_path, 6)[0]
    assert result.mean == result.logged and result.is_exact
    data, sighted = run.data(run.last_step), Counter[tuple[int, int, int]]()
    special = set(data.tokenizer.special_tokens)
    documents = {(source, document): member.indexed.get(document).tolist()
                 for source, member in enumerate(data.members) for document in range(8)}  # fmt: skip
    texts = {key: [token for token in ids if token not in special] for key, ids in documents.items()}
    for (source, document), tokens in texts.items():
        places = find_text(run, data.tokenizer.detokenize(tokens), 100, logging.getLogger("test"))["places"]
        names = (data.sources[source], document, 0)
        (place,) = [p for p in places if (p["source"], p["document"], p["offset"]) == names]
        assert place["tokens"] == len(tokens)
        for row in place["seen"]:
            for n in range(row["count"]):
                sighted[source, document, row["skipped"] + n] += 1
    left_over = {
        (p.source, p.document, p.offset + n)
        for sample in range(run.last_step * 8, len(data.dataset))  # of an incomplete batch
        for p in data.pieces(sample)
        for n in range(p.count)
    }
    expected = {(*key, n) for key, tokens in texts.items() for n in range(len(tokens))} - left_over
    assert set(sighted.values()) == {1} and len(expected) > 1000
    assert len(expected - set(sighted)) < 2 * 32  # the last tokens of each source, which fill no row


# -- searching -----------------------------------------------------------------------------------------------

PACKINGS: dict[str, dict[str, Any]] = {
    "windows": {}, "best_fit": {"pack_impl": "best_fit"}, "unpacked": {"pack_impl": "unpacked"},
    "next_fit": {"pack_impl": "pack_until_overflow"}, "blocks": {"drop_last": False},
}  # fmt: skip


def opened(tmp_path: Path, **keys: Any) -> RunData:
    """The training set of a run that was never started."""
    args = NeoXArgs.from_dict({**SMALL, "train_iters": 80, "index_cache_dir": str(tmp_path), **keys}).for_world(1)
    epochs, method = args.train_epochs, find_method(args)
    args = with_length(args, method, ParallelGroups.single(), DataState(), lambda line: None)
    dataset = build_datasets(args, train_batch_size=8, on_one_rank=lambda work: work(), epochs=epochs).train
    assert dataset is not None
    run: Any = SimpleNamespace(spans=[Span(1, 5, 0, 8, 0), Span(6, 200, 40, 4, 0)])
    return RunData(run, args, method, CharLevelTokenizer(), DataState(), dataset, packed_members(dataset))


def read_tokens(data: RunData) -> Iterator[tuple[int, int, int, int, int]]:
    """(source, document, token, sample, place) of all inputs, and of labels that are no row's input."""
    windows = data.members[0].packing.windows
    for sample in range(len(data.dataset)):
        for piece in data.pieces(sample):
            for n in range(piece.count):
                if not windows or piece.place + n < data.args.seq_length:
                    yield piece.source, piece.document, piece.offset + n, sample, piece.place + n


@pytest.mark.parametrize("name", PACKINGS)
def test_every_token_is_found_once_where_it_was_read(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sighting, "_CHUNK", 50)
    epochs = {"train_iters": None, "train_epochs": 2, "train_data_weights": None} if name == "blocks" else {}
    data = opened(tmp_path, **PACKINGS[name], **epochs)
    read: Counter[tuple[int, int, int, int, int]] = Counter(read_tokens(data))
    sighted: Counter[tuple[int, int, int, int, int]] = Counter()
    for source, member in enumerate(data.members):
        documents = [Occurrence(document, 0, int(size)) for document, size in enumerate(member.indexed.sizes)]
        for document, rows in enumerate(sightings(data, source, documents, 200)):
            for row in rows:
                assert (row.step, row.row) == (
                    (1 + row.sample // 8, row.sample % 8)
                    if row.sample < 40
                    else (6 + (row.sample - 40) // 4, (row.sample - 40) % 4)
                )
                for n in range(row.count):
                    sighted[source, document, row.skipped + n, row.sample, row.place + n] += 1
    if name == "windows":  # the last token of an order is a label alone, of a row that may not be drawn
        extra = sighted - read
        assert all(place == 32 for *_, place in extra) and len(extra) <= 2
        sighted -= extra
    assert sighted == read and max(read.values()) == 1


def count_places(text: str, indexed: IndexedDataset, tokenizer: Any) -> Iterator[tuple[int, int]]:
    """(document, number of places) by decoding full_text documents."""
    for document in range(len(indexed)):
        full_text = tokenizer.detokenize(indexed[document].tolist())
        places = sum(full_text.startswith(text, start) for start in range(len(full_text)))
        if places:
            yield document, places


@pytest.mark.parametrize(
    "text",
    [
        "the",
        "The",
        " the ",
        "e",
        "istle",
        "whistle counts",
        "北京",
        "京 and 東",
        "…",
        "é",
        "7",
        "zzz",
        "s. The",
        ".The",
    ],
)
def test_a_search_finds_what_documents_decode_to(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = make_tokenizer("HFTokenizer", str(GOLDEN / "dataset" / "tokenizer.json"))
    search = TextSearch(text, tokenizer)
    for source in (*SOURCES, SOURCES[0].replace("A_", "A_noeod_")):
        indexed = IndexedDataset(source)
        expected = dict(count_places(text, indexed, tokenizer))
        for chunk in (1 << 22, 37):
            monkeypatch.setattr(text_search, "_CHUNK", chunk)
            places = list(search.occurrences(indexed))
            assert places == sorted(places, key=lambda place: (place.document, place.offset))
            if len(text) > 1:  # a token may have the text several times
                assert Counter(place.document for place in places) == expected
            assert {place.document for place in places} == set(expected)
            for place in places:
                ids = indexed.get(place.document, place.offset, place.count).tolist()
                assert text in tokenizer.detokenize(ids)
                assert place.count == 1 or text not in tokenizer.detokenize(ids[1:])
                assert place.count == 1 or text not in tokenizer.detokenize(ids[:-1])
