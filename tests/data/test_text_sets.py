"""From config keys to sets."""

import json
import pickle
from pathlib import Path

import numpy as np
import pytest

from megatron.data import DataError, DataState, IndexedDataset, build_datasets, data_fingerprint, fingerprint
from megatron.data.blending import BlendedDataset
from megatron.data.packed_dataset import PackedDataset
from megatron.data.set_config import split_boundaries
from tests.data.samples import DATASET, INDEXMAPS, copy_dataset, golden_json, golden_maps, plain_args, write_dataset

A, B = str(DATASET / "corpusA_text_document"), str(DATASET / "corpusB_text_document")


def make_args(**changes):
    values = {"data_path": A, "data_impl": "infer", "split": "969,30,1", "seq_length": 64, "train_iters": 25,
              "eval_interval": 10, "eval_iters": 2, "padded_vocab_size": 380, "train_batch_size": 8}  # fmt: skip
    return plain_args(**values | changes)


def make_blend(tmp_path: Path, **changes):
    values = {"data_path": None, "train_data_paths": (A, B), "train_data_weights": (7.0, 3.0), "train_iters": 125,
              "eval_iters": 0, "index_cache_dir": str(tmp_path / "cache")}  # fmt: skip
    return make_args(**values | changes)


def build(args, batch: int = 8, epochs: int | None = None, data_state: DataState | None = None):
    return build_datasets(
        args, train_batch_size=batch, on_one_rank=lambda work: work(), epochs=epochs, data_state=data_state
    )


def build_train_blend(args) -> BlendedDataset:
    train = build(args).train
    assert isinstance(train, BlendedDataset)
    return train


def test_borders_equal_neox():
    for case, borders in golden_json("splits.json").items():
        split, size = case.split("|")
        assert list(split_boundaries(split, int(size))) == borders, case
    assert split_boundaries("0,0.5,0.5", 3) == (0, 0, 1, 3), "in range, where upstream goes below zero"


@pytest.mark.parametrize("split", ["", "a,b", "0,0,0", "-1,2", "nan", "inf"])
def test_a_split_that_is_none_is_refused(split: str):
    with pytest.raises(DataError, match="split"):
        split_boundaries(split, 10)


def test_split_sets_equal_the_golden_ones(tmp_path: Path):
    # 200 training samples, 3 evaluations of 2 batches = 48 validation samples
    sets = build(make_args(index_cache_dir=str(tmp_path)))
    golden = golden_maps("packed_split_969_30_1/train")
    np.testing.assert_array_equal(sets.train.maps.shuffle_idx, golden.shuffle_idx)
    np.testing.assert_array_equal(sets.train.maps.doc_idx, golden.doc_idx)
    assert len(sets.valid) >= 48 and set(sets.valid.maps.doc_idx) == {78, 79} and sets.test is None


@pytest.mark.parametrize("run", ["ckpt_neox/neox_pp1_mp1", "ckpt_neox/neox_pp0_mp1", "ckpt_llama/llama_pp1_mp1"])
def test_samples_of_golden_runs(run: str, tmp_path: Path):
    """The very tokens that NeoX trained its golden checkpoints on (3 steps of 2 micro-batches of 2)."""
    recorded = np.load(DATASET.parent / run / "batches_pp0_dp0_mp0.npz")
    args = make_args(train_iters=3, eval_interval=1000, eval_iters=0, index_cache_dir=str(tmp_path))
    train = build(args, batch=4).train
    samples = np.stack([train[i].tokens for i in range(12)])
    np.testing.assert_array_equal(samples[:, :-1], recorded["tokens"].reshape(12, 64))
    np.testing.assert_array_equal(samples[:, 1:], recorded["labels"].reshape(12, 64))


def test_one_set_each(tmp_path: Path):
    paths = {name: str(tmp_path / name) for name in ("train", "valid", "test")}
    for seed, path in enumerate(paths.values()):
        write_dataset(Path(path), [50] * 7 + [51], seed)
    keys = {f"{name}_data_paths": (path,) for name, path in paths.items()}
    sets = build(make_args(data_path=None, seq_length=16, **keys))
    # ceil(200 * 1.005) = 201 samples need 9 epochs of 401 tokens; 200 would need 8
    assert len(sets.train.maps.doc_idx) == 9 * 8 and len(sets.train) == (9 * 401 - 1) // 16
    assert sets.test.indexed.prefix == paths["test"]
    for train_only in ({"data_path": None, "train_data_paths": (A,)}, {"split": "100,0,0"}, {"eval_iters": 0}):
        sets = build(make_args(index_cache_dir=str(tmp_path), **train_only))
        assert sets.train is not None and sets.valid is None and sets.test is None, "nobody asks for them"


def test_a_set_smaller_than_a_batch(tmp_path: Path):
    # Validation is one document of 20 tokens: two samples an epoch, and a batch of 8
    data = write_dataset(tmp_path / "x", [40] * 19 + [20])
    valid = build(make_args(data_path=data.prefix, split="95,5,0", seq_length=8)).valid
    assert valid is not None and set(valid.maps.doc_idx) == {19} and len(valid) >= 48


@pytest.mark.parametrize(("changes", "message"), [
    ({"seq_length": 500}, r"valid .*split .*: \d+ tokens in 2 documents.* 501.*eval_iters"),
    ({"seq_length": 50000, "eval_iters": 0}, "train .*split .*: 6864 tokens in 78 documents"),
    ({"data_path": None}, "no training data.*data_path"),
    ({"data_path": None, "valid_data_paths": ("a",)}, "no training data"),
    ({"split": "0,1,0"}, "no document .*training"),
])  # fmt: skip
def test_data_that_cannot_be_used(changes: dict, message: str, tmp_path: Path):
    with pytest.raises(DataError, match=message):
        build(make_args(index_cache_dir=str(tmp_path), **changes))


def test_one_rank_builds_for_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    args = make_args(index_cache_dir=str(tmp_path))
    file_counts = []

    def run_once(work):
        file_counts.append(len(list(tmp_path.iterdir())))
        sent = []  # what another rank does meanwhile; this one leaves `work` alone
        build_datasets(args, train_batch_size=8, on_one_rank=lambda work: sent.append(work()) or sent[0])
        monkeypatch.setattr(IndexedDataset, "_check_layout", None)
        monkeypatch.setattr("megatron.data.indexed_dataset.sha256", None)
        return pickle.loads(pickle.dumps(sent[0]))

    sets = build_datasets(args, train_batch_size=8, on_one_rank=run_once)
    assert sets.train is not None and len(sets.train) == 214
    # A rank that does not build has read no whole file, and written nothing by itself
    assert file_counts == [0]


def test_where_the_cache_lies(tmp_path: Path):
    copy_dataset(A, tmp_path / "a")
    save, cache_keys = {"save": str(tmp_path / "save")}, {"index_cache_dir": str(tmp_path / "here")}
    for keys, place in (({}, "index_cache"), (save, "save/index_cache"), (save | cache_keys, "here")):
        build(make_args(data_path=str(tmp_path / "a"), **keys))
        assert len(list((tmp_path / place).iterdir())) == 2


def test_another_split_or_other_data_under_the_same_name_is_no_stale_cache(tmp_path: Path):
    """Upstream's cache names know neither."""
    args = make_args(data_path=str(tmp_path / "x"), index_cache_dir=str(tmp_path / "cache"), eval_iters=0, seq_length=8)
    for documents, split, num_used in ((10, "969,30,1", 10), (10, "5,5,0", 5), (20, "5,5,0", 10)):
        write_dataset(tmp_path / "x", [40] * documents)
        args.split = split
        assert set(build(args).train.maps.doc_idx) == set(range(num_used))


def test_a_blend_equals_the_golden_one(tmp_path: Path):
    golden = np.load(INDEXMAPS / "blending" / "blendable_A_B_total1000.npz")
    train = build_train_blend(make_blend(tmp_path))
    np.testing.assert_array_equal(train.maps.dataset_index, golden["dataset_index"][:1000])
    np.testing.assert_array_equal(train.maps.dataset_sample_index, golden["dataset_sample_index"][:1000])
    np.testing.assert_array_equal(np.stack([train[i].tokens for i in range(20)]), golden["samples_first20"])
    # Members hold as many samples as there (whose len is one short); upstream's blend then goes on to their
    # sum and takes 784 of the first one's 773: a blend ends where it was asked to
    assert [len(member) for member in train.members] == (golden["dataset_lens"] + 1).tolist() == [773, 349]
    assert len(train) == 1000 and train.maps.drawn.tolist() == [700, 300]
    draws = zip(train.maps.dataset_index, train.maps.dataset_sample_index, strict=True)
    assert len({(d, train.members[d].maps.shuffle_idx[i]) for d, i in draws}) == 1000


def test_validation_and_test_are_blended_too(tmp_path: Path):
    keys = {"valid_data_paths": (B, A), "valid_data_weights": (1.0, 3.0), "test_data_paths": (A, B)}
    train_keys = {"train_data_paths": (A,), "train_data_weights": None}
    sets = build(make_blend(tmp_path, eval_iters=2, eval_interval=100, **train_keys, **keys))
    assert isinstance(sets.train, PackedDataset)
    assert isinstance(sets.valid, BlendedDataset) and isinstance(sets.test, BlendedDataset)
    # (125 // 100 + 1) validations of 2 batches of 8; a test of 2
    assert sets.valid.maps.drawn.tolist() == [8, 24]
    # Without weights all are alike
    assert sets.test.maps.drawn.tolist() == [8, 8] and sets.test.maps.dataset_index.tolist() == [0, 1] * 8
    assert [member.indexed.prefix for member in sets.valid.members] == [B, A]


@pytest.mark.parametrize("pack_impl", ["unpacked", "best_fit", "pack_until_overflow"])
def test_a_blend_to_validate_with_repeats_no_sample(pack_impl: str, tmp_path: Path):
    keys = {"valid_data_paths": (B, A), "valid_data_weights": (1.0, 3.0), "eval_iters": 100, "eval_interval": 100}
    args = make_blend(tmp_path, train_data_paths=(A,), train_data_weights=None, pack_impl=pack_impl, **keys)
    for data_state in (None, DataState(iteration=1, consumed_samples=8, segment_ends={"valid": ((500,), (500,))})):
        valid = build(args, data_state=data_state).valid
        valid_pieces = [piece for i in range(len(valid)) for piece in valid.pieces(i)]
        assert len(set(valid_pieces)) == len(valid_pieces)
        documents = {(member, document) for member, document, *_ in valid_pieces}
        assert documents == {(m, d) for m, count in enumerate((30, 80)) for d in range(count)}


@pytest.mark.parametrize(("changes", "expected"), [
    # 80 and 30 documents: shares of 8/11 and 3/11; upstream's formula makes halves of them
    ({}, [727, 273]), ({"weighted_sampler_alpha": 0.0}, [500, 500]), ({"weighted_sampler_alpha": 0.5}, [620, 380]),
    ({"compat_weight_by_num_documents": True}, [500, 500]),
    ({"compat_weight_by_num_documents": True, "weighted_sampler_alpha": 0.3}, [335, 665]),
])  # fmt: skip
def test_weights_from_document_counts(changes: dict, expected: list[int], tmp_path: Path):
    args = make_blend(tmp_path, train_data_weights=None, weight_by_num_documents=True, **changes)
    assert build_train_blend(args).maps.drawn.tolist() == expected
    weights = [data_fingerprint(args)[f"train_{i}"]["weight"] for i in (0, 1)]
    assert weights == pytest.approx([count / 1000 for count in expected], abs=1e-3)


def test_the_order_of_a_blend_is_cached_by_content(tmp_path: Path):
    files = []
    for weights in ((7.0, 3.0), (7.0, 3.0), (7.0, 3.001)):
        train = build_train_blend(make_blend(tmp_path, train_data_weights=weights))
        assert not train.maps.dataset_sample_index.flags.owndata
        files.append(len(list((tmp_path / "cache").iterdir())))
    assert files == [1, 1, 2]


def test_fingerprint_of_a_blend_names_each_member_and_its_weight(tmp_path: Path):
    def blend_fingerprint(**changes) -> dict:
        return data_fingerprint(make_blend(tmp_path, **changes))

    blend = blend_fingerprint()
    assert blend == {"train_0": fingerprint(A) | {"weight": 0.7}, "train_1": fingerprint(B) | {"weight": 0.3}}
    assert json.loads(json.dumps(blend)) == blend
    assert blend not in (blend_fingerprint(train_data_weights=(3.0, 7.0)), blend_fingerprint(train_data_paths=(B, A)))
    # A list of one is what it was before
    assert blend_fingerprint(train_data_paths=(A,), train_data_weights=None) == {"train": fingerprint(A)}


def test_order_of_new_runs_stays_while_no_member_needs_another_epoch(tmp_path: Path):
    """Segment ends are equal exactly where the samples that both runs have are the same."""
    first_run = build(make_blend(tmp_path))
    assert first_run.segment_ends == {"train": ((773,), (349,))}
    longer = build(make_blend(tmp_path, train_iters=130))
    assert longer.segment_ends == first_run.segment_ends and len(longer.train) == 1040
    assert all((longer.train[i].tokens == first_run.train[i].tokens).all() for i in range(1000))
    # 2000 samples take more epochs of both
    longest = build(make_blend(tmp_path, train_iters=250))
    assert longest.segment_ends != first_run.segment_ends
    assert not all((longest.train[i].tokens == first_run.train[i].tokens).all() for i in range(1000))
    single_set = build(make_args(index_cache_dir=str(tmp_path)))
    assert single_set.segment_ends["train"] == ((214,),)


def test_members_that_cannot_be_used_are_named(tmp_path: Path):
    write_dataset(tmp_path / "short", [20, 30])
    write_dataset(tmp_path / "empty", [])
    for name, message in (("short", r"\(train_data_paths\): 50 tokens in 2 documents"), ("empty", "no document; take")):
        with pytest.raises(DataError, match=rf"{name}\.bin.*{message}"):
            build(make_blend(tmp_path, train_data_paths=(A, str(tmp_path / name))))


def test_sets_know_the_vocabulary(tmp_path: Path):
    """Tokens of the golden corpora go up to 379."""
    for changes in ({}, {"data_path": A, "train_data_paths": None}):
        train = build(make_blend(tmp_path, **changes)).train
        assert train is not None and max(train[i].tokens.max() for i in range(len(train))) == 379
        small = build(make_blend(tmp_path, padded_vocab_size=379, **changes)).train
        with pytest.raises(DataError, match="holds token id 379 .* the vocabulary has 379 entries"):
            for i in range(len(small)):
                small[i]


def test_fingerprint_sees_a_changed_token_and_not_the_place(tmp_path: Path):
    x = write_dataset(tmp_path / "x", [40] * 10).prefix
    original = fingerprint(x)
    (tmp_path / "sub").mkdir()
    assert fingerprint(copy_dataset(x, tmp_path / "sub" / "y")) == original
    change_byte(tmp_path / "x.bin", 5)
    changed = fingerprint(x)
    assert {key for key in original if original[key] != changed[key]} == {"bin_blocks_sha256"}
    assert data_fingerprint(make_args(data_path=x)) == {"all": changed}


def test_fingerprint_of_large_data_samples_first_and_last_block(tmp_path: Path):
    x = write_dataset(tmp_path / "x", [3_000_000]).prefix
    hashes = [fingerprint(x)["bin_blocks_sha256"]]
    for place in (0, 5_999_999):
        change_byte(tmp_path / "x.bin", place)
        hashes.append(fingerprint(x)["bin_blocks_sha256"])
    assert len(set(hashes)) == 3


def change_byte(file: Path, place: int) -> None:
    content = bytearray(file.read_bytes())
    content[place] ^= 1
    file.write_bytes(content)


def test_only_so_many_documents(tmp_path: Path):
    for keys in ({}, {"data_path": None, "train_data_paths": (A,)}):
        limited = build(make_args(index_cache_dir=str(tmp_path), limit_samples=30, **keys)).train
        assert set(limited.maps.doc_idx.tolist()) == set(range(30))


@pytest.mark.parametrize("as_list", [False, True])
def test_a_split_that_validates_with_nothing_says_so(as_list: bool, tmp_path: Path):
    paths = [str(tmp_path / name) for name in ("x", "y")]
    for path in paths:
        write_dataset(Path(path), [50] * 3)
    data = {"data_path": None, "train_data_paths": tuple(paths)} if as_list else {"data_path": paths[0]}
    small = {"seq_length": 16, "train_iters": 1, "index_cache_dir": str(tmp_path), **data}
    for num_batches, noted in ((2, True), (0, False)):
        sets = build(make_args(**small, split="95,5,0", eval_iters=num_batches, user_values={"split": "95,5,0"}))
        assert sets.valid is None and any('"95,5,0"' in line for line in sets.log_lines) == noted
