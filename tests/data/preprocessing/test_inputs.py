"""Meanings of `--input`, `--split` and `--subset`: folders of `datasets` and the hub, globs, names."""

import gzip
import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import datasets
import pyarrow
import pytest
from datasets.utils.metadata import MetadataConfigs
from huggingface_hub import DatasetCard, DatasetCardData
from pyarrow import parquet

from megatron.data import DataError
from megatron.data.preprocessing import EncodeJob, shards
from megatron.data.preprocessing.inputs import resolve, split_names
from megatron.data.preprocessing.job_runner import preprocess
from megatron.tokenizer import make_tokenizer
from tests.data.preprocessing.test_readers import arrow_of, read
from tests.data.samples import ROOT, TOKENIZER, jsonl
from tools.datasets import convert

TEXTS = [f"row {i}, of several" for i in range(20)]
ALL_ROWS = datasets.Dataset.from_list([{"text": text, "n": i} for i, text in enumerate(TEXTS)])
SPLITS = {"train": range(13), "validation": range(13, 15), "test": range(15, 20)}


def refused(message: str, *inputs: Path | str, **options) -> str:
    """Returns the error message, which is one line that matches."""
    with pytest.raises(DataError, match=message) as problem:
        read(*inputs, **options)
    assert "\n" not in str(problem.value)
    return str(problem.value)


def texts(split: str) -> list[str]:
    return [TEXTS[i] for i in SPLITS[split]]


def in_files(folder: Path, suffix: str = "parquet", name_prefix: str = "", **options) -> None:
    """Each split in a file that its name ends."""
    folder.mkdir(exist_ok=True)
    for split, rows in SPLITS.items():
        getattr(ALL_ROWS.select(rows), f"to_{suffix}")(folder / f"{name_prefix}{split}.{suffix}", **options)


def as_pushed(folder: Path, subsets: dict[str, str], shards: int = 2) -> Path:
    """As `Dataset.push_to_hub` lays it out. subsets: the folder of each configuration in its README.md."""
    for data_dir in subsets.values():
        (folder / data_dir).mkdir(parents=True)
        for split, rows in SPLITS.items():
            part, count = ALL_ROWS.select(rows), shards if split == "train" else 1
            for i in range(count):
                name = f"{split}-{i:05d}-of-{count:05d}.parquet"
                # As the hub: several row groups in a file
                part.shard(count, i, contiguous=True).to_parquet(folder / data_dir / name, batch_size=4)
    card = DatasetCardData(license="mit")
    MetadataConfigs({
        name: {"data_files": [{"split": split, "path": f"{data_dir}/{split}-*"} for split in SPLITS]}
        for name, data_dir in subsets.items()
    }).to_dataset_card_data(card)  # fmt: skip
    sizes = [datasets.SplitInfo(split, 100, len(rows)) for split, rows in SPLITS.items()]
    splits = datasets.splits.SplitDict({size.name: size for size in sizes})
    info = {"features": ALL_ROWS.features, "splits": splits}
    infos = {name: datasets.DatasetInfo(config_name=name, **info) for name in subsets}
    datasets.info.DatasetInfosDict(infos).to_dataset_card_data(card)
    DatasetCard(f"---\n{card}\n---\n\n# A card\n").save(folder / "README.md")
    return folder


@pytest.fixture(scope="module")
def pushed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return as_pushed(tmp_path_factory.mktemp("hub") / "pushed", {"default": "data"})


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf_cache")


@pytest.mark.parametrize("split", [
    "train", "test", "validation", "train+test", "train[:10%]", "train[-3:]", "train[4:5]", "train[50%:]",
    "train[:3]+test[-1:]", "train[33%:34%](pct1_dropremainder)", "all",
])  # fmt: skip
def test_a_split_is_what_datasets_says(split: str, pushed: Path):
    """Inputs are a clone, its folder of files, and the files by a glob."""
    if "pct1" in split:
        refused(r'--split train\[33%:34%\]\(pct1_dropremainder\): Using "pct1.*13 rows', pushed, split=split)
        return
    expected = datasets.load_dataset(str(pushed), split=split)["text"]
    assert read(pushed, split=split) == list(expected)
    # `all` of a mere folder is in the order of its names: test, train, validation
    for place in (pushed / "data", f"{pushed}/data/*.parquet"):
        texts_read = read(place, split=split)
        assert texts_read == list(expected) if split != "all" else sorted(texts_read) == sorted(expected)


def test_several_splits_are_never_merged_by_themselves(pushed: Path, tmp_path: Path):
    saved = tmp_path / "saved"
    datasets.DatasetDict({name: ALL_ROWS.select(rows) for name, rows in SPLITS.items()}).save_to_disk(saved)
    for place in (pushed, pushed / "data", f"{pushed}/data/*.parquet", f"{pushed}/**/*.parquet", saved):
        message = refused("several splits .*--split", place)
        assert str(place) in message and all(name in message for name in SPLITS)
        refused(r"no split dev; there are .*validation.* \(--split\)", place, split="dev")
    assert read(f"{pushed}/data/train-*.parquet") == texts("train")
    assert read(*sorted((pushed / "data").glob("t*.parquet"))) == texts("test") + texts("train")  # named one by one


def test_subsets_are_chosen_by_name(tmp_path: Path):
    folder = as_pushed(tmp_path / "several", {"default": "data", "small": "small"})
    for split in (None, "train"):
        refused(r"several subsets .*default, small.*--subset", folder, split=split)
    refused(r"no subset large.*default, small", folder, subset="large", split="train")
    refused(r"several splits .*train, validation, test", folder, subset="small")
    assert read(folder, subset="small", split="test") == texts("test")
    files = resolve([folder], split="test", subset="small")
    assert [file.path for file in files] == [folder / "small" / "test-00000-of-00001.parquet"]
    single_subset = as_pushed(tmp_path / "one", {"only": "elsewhere"})
    assert read(single_subset, split="test") == read(single_subset, split="test", subset="only") == texts("test")
    refused("--subset small: .*README.md", folder / "small", split="test", subset="small")


def test_without_a_readme_names_and_folders_tell_splits(tmp_path: Path):
    """As for `datasets`, which is asked: nothing but the layout says what is what."""
    in_files(tmp_path / "files", "csv", "my_")
    for split, rows in SPLITS.items():
        (tmp_path / "folders" / split).mkdir(parents=True)
        ALL_ROWS.select(rows).to_json(tmp_path / "folders" / split / "part.jsonl")
    for name in ("folders", "files"):
        refused("holds several splits", tmp_path / name)
        assert read(tmp_path / name, split="validation") == texts("validation")
        assert read(tmp_path / name, split="test+train") == texts("test") + texts("train")
    refused(r"folders/\*/\*: holds several splits", f"{tmp_path}/folders/*/*")
    assert read(f"{tmp_path}/folders/t*/*", split="train[1:]") == texts("train")[1:]
    assert read(f"{tmp_path}/folders/test/*") == read(tmp_path / "folders" / "test") == texts("test")


def test_what_a_clone_says_of_itself_is_no_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """dataset_infos.json lay in every dataset of the hub. Other JSON beside `data` is not read, and named."""
    warnings: list[str] = []
    monkeypatch.setattr(logging.getLogger("megatron"), "warning", warnings.append)
    in_files(tmp_path / "data")
    for name in ("dataset_infos.json", "stats.json"):
        (tmp_path / name).write_text('{"default": {"splits": {}}}')
    (tmp_path / "README.md").write_text("---\nlicense: mit\n---\n# A set\n")
    refused("holds several splits", tmp_path)
    assert read(tmp_path, split="train") == texts("train")
    ALL_ROWS.select(range(2)).to_parquet(tmp_path / "data" / "more.parquet")
    warnings.clear()
    assert read(tmp_path, split="train") == texts("train")
    (warning,) = warnings
    assert warning.startswith(f"{tmp_path}: more.parquet, stats.json: ") and "not read" in warning


def test_other_kinds_are_read_by_datasets(tmp_path: Path):
    """Files other than Parquet, Arrow and JSON are converted first: a separator that only the card tells."""
    in_files(tmp_path / "data", "csv", sep=";")
    files = "".join(f"\n  - split: {split}\n    path: data/{split}.csv" for split in SPLITS)
    card = f'---\nconfigs:\n- config_name: default\n  sep: ";"\n  data_files:{files}\n---\n'
    (tmp_path / "README.md").write_text(card)
    assert read(tmp_path, split="validation+test[1:]") == texts("validation") + texts("test")[1:]
    (tmp_path / "README.md").write_text(card.replace("data/test.csv", "data/none.csv"))
    refused("datasets package", tmp_path, split="test")


def test_plain_folders_stay_what_they_were(tmp_path: Path):
    """In order of names, however many: names that tell no split, and one split alone."""
    for name in ("b.jsonl", "a.jsonl", "c.jsonl.gz", "latest.jsonl", "my_training.jsonl"):
        line = json.dumps({"text": name}).encode()
        (tmp_path / name).write_bytes(gzip.compress(line) if name.endswith("gz") else line)
    (tmp_path / "README.md").write_text("---\nlicense: mit\n---\nno data")
    expected = ["a.jsonl", "b.jsonl", "c.jsonl.gz", "latest.jsonl", "my_training.jsonl"]
    assert read(tmp_path) == expected
    assert read(tmp_path, split="train") == ["my_training.jsonl"]
    (tmp_path / "my_training.jsonl").unlink()
    assert read(tmp_path) == read(tmp_path, split="train") == expected[:-1]
    assert read(tmp_path, split="train[1:3]") == expected[1:3]
    assert read(tmp_path / "b.jsonl", split="train") == ["b.jsonl"]
    for place in (tmp_path, tmp_path / "b.jsonl"):
        refused(r"no split test; there are train \(--split\)", place, split="test")
    refused(r"\*\.parquet: no such file", f"{tmp_path}/*.parquet")


def test_shards_of_any_name_are_splits_where_a_card_lies_beside_data(tmp_path: Path):
    (tmp_path / "data").mkdir()
    for language in ("de", "en"):
        ALL_ROWS.select(range(2)).to_parquet(tmp_path / "data" / f"{language}-00000-of-00001.parquet")
    assert len(read(tmp_path / "data")) == 4
    (tmp_path / "README.md").write_text("# a card")
    for place in (tmp_path, tmp_path / "data"):
        refused(r"holds several splits \(de, en\)", place)
        assert read(place, split="en") == TEXTS[:2]


SLICES = ("train[3:11]", "train[:1]", "train[-1:]", "train[45%:55%]", "train[2:3]+train[7:9]")
KINDS = ("jsonl", "csv", "parquet", "arrow")


@pytest.mark.parametrize(("kind", "split", "chunk"), [  # each pair of a kind and a slice, and of either and a chunk
    (kind, split, (40, 1 << 20)[(i + j) % 2]) for i, kind in enumerate(KINDS) for j, split in enumerate(SLICES)
])  # fmt: skip
def test_slices_of_every_kind(kind: str, split: str, chunk: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(shards, "CHUNK_BYTES", chunk)
    for i, rows in enumerate((range(9), range(9, 20))):
        file, part = tmp_path / f"{i}.{kind}", ALL_ROWS.select(rows)
        if kind == "arrow":
            file.write_bytes(arrow_of(pyarrow.ipc.new_stream, part.to_list(), 3))
        else:
            options = {"batch_size": 4} if kind == "parquet" else {}
            getattr(part, f"to_{kind.removesuffix('l')}")(file, **options)
    spans = [datasets.ReadInstruction.from_spec(part).to_absolute({"train": 20})[0] for part in split.split("+")]
    assert read(tmp_path, split=split) == [text for span in spans for text in TEXTS[span.from_ : span.to]]


def test_a_slice_is_a_job_of_its_own(tmp_path: Path):
    """Metadata tells a slice from the full set; and a bad row of it is named by its place in the file."""
    source, notes = tmp_path / "a.jsonl", tmp_path / "meta.json"
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS) + "{bad\n")
    job = EncodeJob(make_tokenizer, ("HFTokenizer", str(TOKENIZER)))
    result = preprocess(resolve([source], "train[5:20]"), [tmp_path / "out"], job, metadata_file=notes)
    assert result.outputs[0].documents == 15 and 0 < result.progress.total_bytes < source.stat().st_size
    assert [entry["rows"] for entry in json.loads(notes.read_text())["inputs"]] == [[5, 20]]
    with pytest.raises(DataError, match=r"a\.jsonl:21: not valid JSON"):
        preprocess(resolve([source], "train[20:]"), [tmp_path / "bad"], job)


def test_a_pointer_of_git_lfs_is_no_data(pushed: Path, tmp_path: Path):
    (tmp_path / "data").mkdir()
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
    (tmp_path / "data" / "train-00000-of-00001.parquet").write_text(pointer)
    (tmp_path / "README.md").write_text((pushed / "README.md").read_text().split("  - split: validation")[0] + "---\n")
    refused(r"train-00000-of-00001\.parquet: is a git-lfs pointer.*git lfs pull", tmp_path)


def test_the_tools_take_the_flags(pushed: Path, tmp_path: Path):
    target = tmp_path / "a.parquet"
    with pytest.raises(SystemExit, match=r"^convert.py: error: .*holds several splits"):
        convert.main([str(pushed), str(target)])
    convert.main([str(pushed), str(target), "--split", "test", "--subset", "default"])
    assert parquet.read_table(target)["text"].to_pylist() == texts("test")


def test_folders_that_were_saved(tmp_path: Path):
    """`save_to_disk` writes them; a selection of rows is saved as such."""
    ALL_ROWS.select([3, 1, 2]).save_to_disk(tmp_path / "chosen")
    assert read(tmp_path / "chosen") == read(tmp_path / "chosen", split="train") == [TEXTS[3], *TEXTS[1:3]]
    assert read(tmp_path / "chosen", split="train[1:]") == TEXTS[1:3]
    splits = datasets.DatasetDict({"train": ALL_ROWS, "test": ALL_ROWS.select([5])})
    splits.save_to_disk(tmp_path / "both", num_shards={"train": 3, "test": 1})
    assert read(tmp_path / "both", split="train") == TEXTS
    assert read(tmp_path / "both", split="test") == [TEXTS[5]]
    assert read(tmp_path / "both", split="train[5:12]+test") == [*TEXTS[5:12], TEXTS[5]]
    refused(r"both: no split valid; there are train, test \(--split\)", tmp_path / "both", split="valid")
    datasets.Dataset.from_dict({"text": TEXTS}, split="test").save_to_disk(tmp_path / "test")
    assert read(tmp_path / "test") == read(tmp_path / "test", split="test") == TEXTS
    refused(r"no split train; there are test \(--split\)", tmp_path / "test", split="train")
    refused("chosen: --subset small: .*README.md", tmp_path / "chosen", subset="small")


def test_a_hub_dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The network is not there: `datasets` is asked for whole splits, rows are cut out of what it gives."""
    ALL_ROWS.to_parquet(tmp_path / "a.parquet")
    requests = []

    def load(name: str, subset: str | None, *, split: str) -> datasets.Dataset:
        requests.append((name, subset, split))
        return datasets.Dataset.from_parquet(str(tmp_path / "a.parquet"), cache_dir=str(tmp_path / "cache"))

    monkeypatch.setattr(datasets, "load_dataset", load)
    assert read("some/name", subset="small", split="test") == TEXTS
    assert read("some/name", split="train_sft[:10%]") == TEXTS[:2]
    assert requests == [("some/name", "small", "test"), ("some/name", None, "train_sft")]
    monkeypatch.setattr(datasets, "get_dataset_split_names", lambda name, subset: ["train", "test"])
    refused("some/name: .*several splits .*train, test.*--split", "some/name")
    monkeypatch.setattr(datasets, "get_dataset_split_names", lambda name, subset: ["only"])
    assert read("some/name") == TEXTS and requests[-1] == ("some/name", None, "only")


def test_a_hub_name_offline_says_so():
    words = [sys.executable, "-c", "from megatron.data.preprocessing.inputs import resolve; resolve(['some/name'])"]
    done = subprocess.run(words, cwd=ROOT, env=os.environ | {"HF_HUB_OFFLINE": "1"}, capture_output=True, text=True)
    last = done.stderr.strip().splitlines()[-1]
    assert "some/name: no such file here, and https://huggingface.co/datasets/some/name cannot be fetched" in last
    assert "Offline" in last


def test_a_comma_in_a_name_separates_nothing(tmp_path: Path):
    names = [str(tmp_path / name) for name in ("a, b.jsonl", "c.jsonl", "d,e,f.jsonl")]
    for name in names[:1] + names[2:]:
        jsonl(Path(name), [{"text": "a"}])
    assert split_names(",".join(names)) == names and split_names("x,hf://org/name") == ["x", "hf://org/name"]


def test_a_cache_that_cannot_be_written_is_no_missing_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def unwritable(*args: object) -> None:
        try:
            (tmp_path / "file").write_text("")
            (tmp_path / "file" / "cache").mkdir()
        except OSError as problem:
            raise ConnectionError("cannot be fetched") from problem

    monkeypatch.setattr(datasets, "get_dataset_split_names", unwritable)
    with pytest.raises(DataError, match=rf"org/name: .*cache .*{tmp_path}/file/cache: .*HF_HOME"):
        resolve(["org/name"])
