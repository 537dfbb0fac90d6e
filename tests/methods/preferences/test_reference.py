"""The reference of preference training: ln 2 at first, what is computed and found again, runs that go on."""

import io
import logging
import math
import re
import shutil
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from megatron.data.preferences.reference_scores import SCORES
from megatron.launch import process_info
from megatron.model import layer_params
from megatron.model.norm_functions import NormFunctions
from megatron.neox_arguments import ConfigError, NeoXArgs
from megatron.neox_arguments.keys.architectures import DeltaRuleKeys, MambaKeys
from megatron.neox_arguments.keys.declaration import keys_of
from megatron.neox_arguments.keys.model import ModelKeys
from megatron.training import start
from megatron.training.reference.cache import _INDEPENDENT, add_scores, forward_keys, read_scores
from megatron.training.reference.model import _ReferenceCache
from tests.methods.preferences.test_pairs_train import pairs, pairwise
from tests.pool import run_ranks
from tests.stand_ins import installed
from tests.training.batches import batches_of
from tests.training.checkpoint.test_resume import as_stopped_at, losses, refused
from tests.training.runs import ADAMW, LAYOUTS, LLAMA, begin_each, bit_equal, cells, config, run_to_end

PADDED, PACKED = {"pack_impl": "unpacked"}, {"pack_impl": "best_fit"}
FLY = {"dpo_reference": "on_the_fly"}


def preferences(folder: Path, *parts: dict[str, Any], count: int = 40, **overrides: Any) -> dict[str, Any]:
    """More pairs only add to the first ones."""
    sets = folder / f"{count} pairs"
    sets.mkdir(exist_ok=True)
    paths = {key: value for key, value in pairs(sets, count).items() if "train" in key}
    common = {"train_micro_batch_size_per_gpu": 2, "train_iters": 12, "eval_interval": 12, "num_layers": 2}
    common["index_cache_dir"] = str(folder / "index_cache")
    values = pairwise(paths, common, {"reference_cache_dir": str(folder / "references")}, *parts, **overrides)
    if values.get("dpo_reference") == "on_the_fly":
        values.pop("reference_cache_dir", None)
    return values


def first_losses(rank: int, world_size: int, runs: list[dict[str, Any]]) -> list[float]:
    """For the pool."""
    return [float(training.engine.train_step(next(batches_of(training)), 0.0).loss) for training in begin_each(runs)]


def reference_logs_of(rank: int, world_size: int, runs: list[dict[str, Any]]) -> list[str]:
    """For the pool: of its reference, each run up to its first step."""
    reference_logs = []
    for values in runs:
        with redirect_stdout(io.StringIO()) as output:
            training = start(NeoXArgs.from_dict(values), process_info())
        logging.getLogger("megatron").handlers = []
        next(batches_of(training))
        training.engine.close()
        reference_logs.append("\n".join(re.findall(r"reference: .*", output.getvalue())))
    return reference_logs


def test_ln_2_at_the_first_step(tmp_path: Path) -> None:
    """KTO's first loss is 0.5: the KL of answers to other prompts is 0 then."""
    layouts = {**LAYOUTS, "tp2 pp2": (4, {"model_parallel_size": 2, "pipe_parallel_size": 2})}
    ways = {"plain": PADDED, "dp2": PADDED, "tp2": PACKED | FLY, "pp2": PADDED, "zero1": PACKED | FLY}
    ways |= {"zero2": PADDED, "zero3": PACKED | FLY, "tp2 pp2": PADDED}
    looks = [(*layouts[name], look_keys, 1e-6) for name, look_keys in ways.items()]
    looks += [(*LAYOUTS["plain"], PACKED | FLY, 1e-6), (*LAYOUTS["pp2"], PACKED | FLY, 1e-6)]
    looks += [(1, {"precision": "bfloat16"}, look_keys | FLY, 1e-6) for look_keys in (PADDED, PACKED)]
    looks += [(1, {"hidden_dropout": 0.1, "attention_dropout": 0.1}, PADDED, 1e-6)]  # which the policy leaves out
    looks += [(*LAYOUTS[name], PACKED, 2e-5) for name in ("plain", "zero3")]  # rows are packed otherwise there
    kto = {"train_impl": "kto", "kto_desirable_weight": 1.0}
    looks += [(2, kto, look_keys, 2e-5) for look_keys in (PADDED, PACKED, PADDED | FLY)]
    for size in (1, 2, 4):
        size_looks = [look for look in looks if look[0] == size]
        runs = [
            preferences(tmp_path, layout, look_keys, reference_cache_dir=str(tmp_path / f"{size} {i}"))
            for i, (_, layout, look_keys, _) in enumerate(size_looks)
        ]
        for rank_losses in run_ranks(first_losses, size, runs):
            for loss, (_, layout, look_keys, tolerance) in zip(rank_losses, size_looks, strict=True):
                assert loss == pytest.approx(0.5 if layout is kto else math.log(2), abs=tolerance), (layout, look_keys)


def losses_with_other_norms(rank: int, world_size: int, runs: list[dict[str, Any]]) -> list[float]:
    """For the pool: where the norms of apex do next to nothing."""
    halves = NormFunctions(lambda x, *_: x / 2, lambda x, *_: x / 2)
    works = mock.patch("megatron.training.apex.apex_problem", lambda device: None)
    with installed("apex"), works, mock.patch("megatron.training.apex.apex_norms", lambda: halves):
        return first_losses(rank, world_size, runs)


def test_a_copy_has_the_norms_of_the_policy(tmp_path: Path) -> None:
    values = preferences(tmp_path, PADDED | FLY, engine="native", apex="auto")
    assert run_ranks(losses_with_other_norms, 1, [values])[0] == pytest.approx([math.log(2)], abs=1e-6)


def test_the_cost_of_a_copy_is_reported(tmp_path: Path) -> None:
    values = preferences(tmp_path, PADDED | FLY, LAYOUTS["zero3"][1], hidden_size=1024, no_weight_tying=True)
    log = run_ranks(reference_logs_of, 2, [values])[0][0]
    match = re.search(r"on_the_fly\): ([\d.]+) GiB .*ZeRO 3.*dpo_reference: cache", log)
    args = NeoXArgs.from_dict({**values, "padded_vocab_size": 320})
    count = sum(math.prod(spec.shape) for specs in layer_params(args).values() for spec in specs)
    assert match and 0 < float(match[1]) == pytest.approx(4 * count / 2**30, abs=0.005)


def test_dropout_where_it_is_asked_for(tmp_path: Path) -> None:
    names = ("hidden_dropout", "attention_dropout")
    runs = [preferences(tmp_path, PADDED, {name: 0.3, "disable_dropout": False}) for name in names]
    for loss in run_ranks(first_losses, 1, runs)[0]:
        assert abs(loss - math.log(2)) > 1e-4


def test_only_new_rows_are_computed(tmp_path: Path) -> None:
    padded, larger = preferences(tmp_path, PADDED), preferences(tmp_path, PACKED, count=45)
    reordered, window = {**padded, "data_seed": 7, **PACKED}, {**padded, "sliding_window_width": 3}
    seed = {**padded, "seed": 99, "data_seed": 1234}
    reference_logs = run_ranks(reference_logs_of, 2, [padded, reordered, larger, padded, seed, window])[0]
    assert counts(reference_logs) == [(80, 0), (0, 80), (10, 80), (0, 80), (80, 0), (80, 0)]
    checked = [re.search(r"reference: checked \d+ cached", text) is not None for text in reference_logs]
    assert checked == [False, True, True, True, False, False]
    assert len(list((tmp_path / "references").iterdir())) == 3


def counts(logs: list[str]) -> list[tuple[int, ...]]:
    matches = [re.search(r"scored (\d+) answers, found (\d+)", text) for text in logs]
    return [tuple(map(int, match.groups())) for match in matches if match]


def sets_read(rank: int, world_size: int, values: dict[str, Any]) -> tuple[int, str]:
    """For the pool: how many sets a start reads whole for its reference, and what it says of that."""
    with mock.patch.object(_ReferenceCache, "_fill_one", autospec=True, side_effect=_ReferenceCache._fill_one) as fill:
        (reference_log,) = reference_logs_of(rank, world_size, [values])
    return fill.call_count, reference_log


def test_a_set_is_read_once(tmp_path: Path) -> None:
    values = preferences(tmp_path, PADDED)

    def start_run() -> tuple[int, tuple[int, ...]]:
        ((read, reference_log),) = run_ranks(sets_read, 1, values)
        return read, counts([reference_log])[0]

    assert start_run() == (1, (80, 0))
    assert start_run() == (0, (0, 80)) == start_run()
    tokens = tmp_path / "40 pairs" / "pos.bin"
    content = bytearray(tokens.read_bytes())
    content[-4] ^= 1  # the last token of the last answer
    tokens.write_bytes(content)
    assert start_run() == (1, (1, 79)), "the same labels and lengths, another token"
    assert start_run() == (0, (0, 80))
    next((tmp_path / "references").glob("*/rows-*")).unlink()
    read, (computed, cached) = start_run()
    assert read == 1 and computed > 0 and computed + cached == 80, "rows that are lost are rebuilt"


def spoil(folder: Path, amount: float) -> np.ndarray:
    """The rows of a cache, in one file, with other log-probabilities."""
    rows = read_scores(folder)
    for file in folder.glob("rows-*"):
        file.unlink()
    rows["sum"] -= amount * rows["count"]
    add_scores(folder, {}, rows)
    return rows


def test_a_cache_of_another_model_is_refused(tmp_path: Path) -> None:
    values = preferences(tmp_path, PACKED)
    run_ranks(first_losses, 1, [values])
    (folder,) = (tmp_path / "references").iterdir()
    rows = spoil(folder, 0.01)
    assert len(rows) == 80 and rows["count"].min() >= 2 and rows.dtype == SCORES
    (message,) = refused(values)
    match = re.search(r"answer of (\d+) .*-probability (-[\d.]+), .* (-[\d.]+),", message)
    assert match, message
    count, cached, now = match.groups()
    assert float(now) - float(cached) == pytest.approx(0.01 * int(count), abs=2e-4)
    (file,) = folder.glob("rows-*")
    file.write_bytes(file.read_bytes()[:-8])
    assert all(str(file) in message and "damaged" in message for message in refused(values))
    np.save(file, rows[:1])
    assert all(str(file) in message and "damaged" in message for message in refused(values))


@pytest.mark.parametrize(("model", "changes", "is_same"), [
    ({}, {"sliding_window_width": 5}, False),
    ({}, {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, False),
    ({}, {"query_pre_attn_scalar": 3}, False),
    ({}, {"seq_length": 24}, True),
    ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 16}},
     {"seq_length": 24}, False),
    ({}, {"attention_backend": "math", "hidden_dropout": 0.1, "checkpoint_activations": True}, True),
], ids=str)  # fmt: skip
def test_what_changes_the_forward_pass_is_another_reference(model: Any, changes: Any, is_same: bool) -> None:
    baseline, changed = (
        forward_keys(NeoXArgs.from_dict(config(LLAMA, model, overrides))) for overrides in ({}, changes)
    )
    assert (baseline == changed) is is_same


def test_keys_said_not_to_change_the_forward_pass_are_keys() -> None:
    assert set(_INDEPENDENT) <= {*keys_of(ModelKeys), *keys_of(MambaKeys), *keys_of(DeltaRuleKeys)}


RUNS = {"cache": PACKED | LAYOUTS["zero2"][1], "cache lost": PADDED | LAYOUTS["zero3"][1]}
RUNS["on the fly"] = PADDED | FLY | LAYOUTS["pp2"][1]


@pytest.mark.parametrize("name", cells(["cache"], ["on the fly"], ["cache lost"]))
def test_runs_go_on_against_the_weights_they_began_with(name: str, tmp_path: Path) -> None:
    ranks, changes = 2, RUNS[name]
    earlier, uninterrupted, resumed = (tmp_path / run for run in ("earlier", "through", "resumed"))
    run_ranks(run_to_end, 1, config(LLAMA, ADAMW, num_layers=2, train_iters=2, checkpoint_factor=2, save=str(earlier)))
    valid = {key: value for key, value in pairs(tmp_path).items() if "valid" in key}
    common = preferences(tmp_path, changes, valid, load=str(earlier), finetune=True, train_iters=6, checkpoint_factor=3,
                         eval_iters=1, eval_interval=6)  # fmt: skip
    full_weights = run_ranks(run_to_end, ranks, {**common, "save": str(uninterrupted)})
    as_stopped_at(3, uninterrupted, resumed)
    if name == "cache lost":
        shutil.rmtree(tmp_path / "references")
    stopped = {**common, "save": str(resumed)}
    went_on = run_ranks(run_to_end, ranks, stopped)
    expected = losses(uninterrupted)
    assert len(expected) == 6 and losses(resumed) == {step: expected[step] for step in (4, 5, 6)}
    assert expected[1] == pytest.approx(math.log(2), abs=2e-5) != expected[6]
    assert all(bit_equal(a[1], b[1]) for a, b in zip(full_weights, went_on, strict=True))
    if name == "cache":
        longer = {**stopped, "train_iters": 8}
        base, window = refused({**longer, "load": None}, {**longer, "sliding_window_width": 3})
        assert re.search(r"load: null \(default\), .*reference.json", base)
        assert re.search(r"sliding_window_width: 3 \(program\), .* null", window)
        (folder,) = (tmp_path / "references").iterdir()
        spoil(folder, 1)
        assert "log-probability" in refused(longer)[0], "checked here too"
        (resumed / "reference.json").unlink()
        assert f"{resumed / 'reference.json'} is missing" in refused(longer)[0]


@pytest.mark.parametrize(("changes", "message"), [
    ({"dpo_loss_type": "simpo", **FLY}, "dpo_reference: "),
    ({"precompute_model_name": "base", **FLY}, "dpo_reference: .*precompute_model_name"),
    ({"reference_cache_dir": "x", **FLY}, "reference_cache_dir: .*dpo_reference: cache"),
    ({"train_impl": "kto", "kto_kl": "rotated", **PADDED}, "kto_kl: rotated "),
    ({"load": "s3://bucket/run", "save": "out"}, "load: .*reference"),
])  # fmt: skip
def test_keys_that_contradict_each_other(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    values = preferences(tmp_path, PACKED, reference_cache_dir=None)
    with pytest.raises(ConfigError, match=message):
        NeoXArgs.from_dict(values | changes)
