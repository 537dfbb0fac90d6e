"""Runs that unlearn: gradients, layouts, the threshold, rows of metrics, and going on within a burst."""

import json
import math
import re
from dataclasses import replace
from itertools import repeat
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from megatron.callbacks import Parts
from megatron.data import Batch
from megatron.methods.unlearning import method as unlearning
from megatron.methods.unlearning.method import UnlearningProgress
from megatron.methods.unlearning.objective import set_of
from megatron.methods.unlearning.schedule import begins_burst, is_ascent
from megatron.neox_arguments import NeoXArgs
from megatron.training import Training
from megatron.training.checkpoint.run_parts import TrainingProgress
from megatron.training.schedules import Schedule
from tests.pool import run_ranks
from tests.training import runs
from tests.training.batches import batches_of
from tests.training.checkpoint.test_resume import assert_goes_on
from tests.training.runs import ADAMW, GOLDEN, LLAMA, SGD, Curve, begin, config, metric_rows, output_of_run, run_to_end

OTHER_CORPUS = str(GOLDEN / "dataset" / "corpusB_text_document")
LABELLED = str(GOLDEN / "dataset" / "instruct_text_document")
EOD = 0  # of the golden tokenizer
ASCENT = {"ga_dataset": OTHER_CORPUS, "ga_mode": "interleaved", "ga_interleave_ratio": 1, "ga_lr_scale": 0.5}
DIFFERENCE = {**ASCENT, "gd_mode": True, "gd_retain_dataset": LABELLED, "gd_retain_weight": 3.0}
BURSTS = {"ga_dataset": OTHER_CORPUS, "ga_interval": 2, "ga_iters": 2}
NPO = {**ASCENT, "ga_loss_type": "npo", "npo_beta": 0.2}
SIMNPO = {**ASCENT, "ga_loss_type": "simnpo", "simnpo_beta": 0.5}
NPO_BY_DOCUMENT = {**NPO, "reset_attention_mask": True, "reset_position_ids": True}
DIVERGENCE = {**DIFFERENCE, "ga_loss_type": "npo", "gd_retain_loss_type": "kl", "dpo_reference": "on_the_fly"}


def third_step(training: Training) -> list[Batch]:
    """The first step that unlearns."""
    training.progress.iteration = 2
    return next(batches_of(training))


def gradients(rank: int, world_size: int, values: dict[str, Any]) -> list[dict[tuple[int, str], Tensor]]:
    """For the pool: of a step of difference; of its forget and its retain batches in ordinary steps."""
    training = begin(values)
    step, gradient_steps = third_step(training), []

    def note(parts: Parts) -> None:
        gradient_steps.append({name: gradient.double().clone() for name, gradient in parts})

    role_batches = [[replace(b, method=None) for b in step if set_of(b) == name] for name in ("forget", "retain")]
    assert len(role_batches[0]) == len(role_batches[1]) == len(step) // 2 == 4
    for batches in (step, *role_batches):
        training.engine.train_step(batches, 0.0, note)
    return gradient_steps


@pytest.mark.parametrize("engine", ["native", "deepspeed"])
def test_the_gradient_is_that_of_the_difference(engine: str) -> None:
    values = config(LLAMA, SGD, DIFFERENCE, engine=engine, train_micro_batch_size_per_gpu=2, weight_decay=0.0)
    difference, forget, retain = run_ranks(gradients, 1, values)[0]
    largest = max(float(gradient.abs().max()) for gradient in difference.values())
    for name, gradient in difference.items():
        torch.testing.assert_close(gradient, 3.0 * retain[name] - forget[name], rtol=0, atol=1e-6 * largest)
    assert largest > 0.1


@pytest.mark.parametrize("mode", ["interval", "interleaved"])
def test_rates_against_those_of_the_fork(mode: str) -> None:
    """Golden: the fork's statements over its schedule. It scales the first step of a burst alone, and the
    step after one takes the rate of before; ours scales each, and then goes on with the schedule."""
    golden = json.loads((GOLDEN / "fork/ascent_rates/rates.json").read_text())
    args = NeoXArgs.from_dict(config(LLAMA, ADAMW, {"ga_dataset": OTHER_CORPUS, "ga_mode": mode}, golden["keys"][mode]))
    schedule = Schedule(1e-3, 1e-4, "cosine", warmup=10, end=100)
    differing_steps = []
    for step, (role, rate) in enumerate(golden[mode]):
        assert is_ascent(args, step) == (role == "forget")
        if schedule(step) * (args.ga_lr_scale if role == "forget" else 1.0) != pytest.approx(rate, rel=1e-12):
            differing_steps.append(step)
    ascents = [step for step in range(len(golden[mode])) if is_ascent(args, step)]
    burst_starts = [step for step in ascents if begins_burst(args, step)]
    steps_after_ascent = [step + 1 for step in ascents if step + 1 < len(golden[mode]) and step + 1 not in ascents]
    assert differing_steps == sorted({*ascents, *steps_after_ascent} - {*burst_starts}) and len(burst_starts) > 3


# -- sequences beside a reference ---------------------------------------------------------------------------
def naive_npo(rank: int, world_size: int, cases: list[dict[str, Any]]) -> list[tuple[list[float], list[float]]]:
    """For the pool: losses of two steps on one forget batch, by the engine and by all logits."""
    results = []
    for values in cases:
        training = begin(values)
        engine, args, step = training.engine, training.args, third_step(training)
        reference, actual, naive = None, [], []
        for _ in range(2):
            sums, counts = _sequence_sums(engine, step, separate_documents=bool(values.get("reset_attention_mask")))
            reference = sums if reference is None else reference
            npo = args.ga_loss_type == "npo"
            beta, compared = (args.npo_beta, sums - reference) if npo else (args.simnpo_beta, sums / counts)
            naive.append(float((2 / beta * torch.log1p(torch.exp(beta * compared))).mean()))
            actual.append(float(engine.train_step(list(step), 1e-2).loss))
        results.append((actual, naive))
        engine.close()
    return results


def _sequence_sums(engine: Any, batches: list[Batch], separate_documents: bool) -> tuple[Tensor, Tensor]:
    """Sums of log p over the trained tokens of each sequence, and how many these are, float64."""
    sums, counts = [], []
    read = engine.forward_only(batches, lambda head, _: head.logits(), lambda batch: (*batch.tokens.t().shape, 384))
    for batch, logits in zip(batches, read, strict=True):
        logprobs = logits.transpose(0, 1).double().log_softmax(-1).gather(-1, batch.labels[..., None]).squeeze(-1)
        for row in range(len(logprobs)):
            tokens, place = batch.tokens[row].tolist(), 0
            ends = [i + 1 for i, token in enumerate(tokens) if token == EOD and separate_documents] + [len(tokens)]
            for end in ends:
                trained = batch.loss_weights[row, place:end] > 0
                if trained.any():
                    sums.append(logprobs[row, place:end][trained].sum())
                    counts.append(int(trained.sum()))
                place = end
    return torch.stack(sums), torch.tensor(counts, dtype=torch.float64)


def test_losses_of_sequences_are_those_of_all_logits() -> None:
    cases = [config(LLAMA, ADAMW, keys, train_micro_batch_size_per_gpu=4) for keys in (NPO, NPO_BY_DOCUMENT, SIMNPO)]
    npo, separate_documents, _ = cell_losses = run_ranks(naive_npo, 1, cases)[0]
    for actual, naive in cell_losses:
        assert actual == pytest.approx(naive, rel=1e-6) and actual[1] < actual[0]
    assert npo[0][0] == separate_documents[0][0] == pytest.approx(2 * math.log(2) / 0.2, rel=1e-6)


def test_the_reference_s_scores_of_the_forget_set_are_kept(tmp_path: Path) -> None:
    values = config(LLAMA, NPO_BY_DOCUMENT, train_micro_batch_size_per_gpu=4, reference_cache_dir=str(tmp_path))
    first_output, second_output = (run_ranks(output_of_run, 1, values)[0] for _ in range(2))
    assert re.search(r"reference: scored [1-9]\d* answers, found 0 ", first_output), first_output
    assert re.search(r"reference: scored 0 answers, found [1-9]\d* ", second_output), second_output


# -- layouts -------------------------------------------------------------------------------------------------
# An ordinary step has one micro-batch here: gradients are added up in steps of difference alone.
OFFLOADED = (2, runs.OFFLOADED | {"train_micro_batch_size_per_gpu": 4})
KINDS = {"difference": DIFFERENCE, "bursts": BURSTS, "npo by documents": NPO_BY_DOCUMENT}
KINDS |= {"simnpo": SIMNPO, "divergence": DIVERGENCE}
STEPS = 5


def curves_by_kind(ranks: int, layout: dict[str, Any]) -> dict[str, Curve]:
    common = {"train_micro_batch_size_per_gpu": 2, **layout}
    return runs.curves_of({kind: config(LLAMA, ADAMW, keys, common) for kind, keys in KINDS.items()}, STEPS, ranks)


@pytest.fixture(scope="module")
def one_process() -> dict[str, Curve]:
    return curves_by_kind(1, {})


@pytest.mark.parametrize("name", runs.cells(
    ["pp2"], ["zero1, deepspeed"],
    ["tp2 sp", "offloaded", "dp2", "zero1", "zero3", "zero3, deepspeed", "tp2 pp2 sp"],
))  # fmt: skip
def test_every_layout_equals_one_process(name: str, one_process: dict[str, Curve]) -> None:
    runs.assert_alike(curves_by_kind(*(OFFLOADED if name == "offloaded" else runs.TABLE[name])), one_process)


def test_one_process_steps_where_it_should(one_process: dict[str, Curve]) -> None:
    ascends = {kind: [i for i, loss in enumerate(one_process[kind].losses) if not 5 < loss < 6.5] for kind in KINDS}
    assert ascends == {kind: [2, 3] if kind == "bursts" else [2, 4] for kind in KINDS}


# -- what comes of it ----------------------------------------------------------------------------------------
def rows(folder: Path, **values: Any) -> list[dict[str, float]]:
    keys = {"save": str(folder), "checkpoint_factor": 1000}
    run_ranks(run_to_end, 1, config(LLAMA, ADAMW, {"train_micro_batch_size_per_gpu": 4}, values, keys))
    return metric_rows(folder)


def test_rows_say_what_each_step_was(tmp_path: Path) -> None:
    ascent = rows(tmp_path / "ascent", **ASCENT, train_iters=5)
    assert [row["train/batch_type"] for row in ascent] == [0, 0, 1, 0, 1]
    assert [row["train/ga_iterations"] for row in ascent] == [0, 0, 1, 1, 2]
    assert all(row["train/ga_skip_rate"] == 0 for row in ascent)
    assert [row["consumed_samples"] for row in ascent] == [8, 16, 16, 24, 24]
    for row in ascent:
        ascends = row["train/batch_type"] == 1
        assert {name in row for name in ("train/ga_actual_loss", "train/ga_objective")} == {ascends}
        assert row.get("train/ga_lr_scaled", 0.5e-3) == pytest.approx(0.5e-3)
        if ascends:
            assert row["train/ga_objective"] == -row["train/ga_actual_loss"] < -4
            assert row["train/lm_loss"] == pytest.approx(row["train/ga_objective"], rel=1e-6)
    unscaled = rows(tmp_path / "unscaled", **ASCENT | {"ga_lr_scale": 1.0}, train_iters=4)
    losses_equal = [a["train/lm_loss"] == b["train/lm_loss"] for a, b in zip(ascent, unscaled, strict=False)]
    assert losses_equal == [True, True, True, False], "the step that ascends has a rate of its own"
    difference = rows(tmp_path / "difference", **DIFFERENCE, train_iters=3)[-1]
    combined = 3.0 * difference["train/gd_retain_loss"] - difference["train/gd_forget_loss"]
    assert difference["train/gd_combined_loss"] == difference["train/lm_loss"] == pytest.approx(combined, rel=1e-5)
    quiet = rows(tmp_path / "quiet", **DIFFERENCE, gd_log_separate_losses=False, train_iters=3)[-1]
    assert "train/gd_combined_loss" in quiet and "train/gd_forget_loss" not in quiet
    assert quiet["train/lm_loss"] == difference["train/lm_loss"]


@pytest.mark.parametrize("keys", [{}, {"ga_loss_type": "npo", "dpo_reference": "cache"}], ids=["nll", "npo cache"])
def test_a_run_too_short_for_a_step_on_the_forget_set_trains(tmp_path: Path, keys: dict[str, Any]) -> None:
    assert len(rows(tmp_path, **BURSTS | {"ga_interval": 8}, **keys, train_iters=2)) >= 2


def test_validation_is_that_of_the_run_without_a_forget_set(tmp_path: Path) -> None:
    validated = {"eval_iters": 2, "eval_interval": 2, "train_iters": 2, "checkpoint_factor": 2}
    rows_by_run = [rows(tmp_path / str(i), **keys, **validated) for i, keys in enumerate((DIFFERENCE, {}))]
    keys_with_forget_set, baseline_keys = (
        {key for row in run_rows for key in row if key.startswith("validation")} for run_rows in rows_by_run
    )
    assert keys_with_forget_set == baseline_keys and "validation/lm_loss" in keys_with_forget_set


def weights_of(rank: int, world_size: int, configs: list[dict[str, Any]]) -> list[list[tuple[str, int, int]]]:
    """For the pool: (role, places, places that count) of the micro-batches of each step of difference."""
    steps = [third_step(begin(values)) for values in configs]
    return [[(set_of(batch), batch.tokens.numel(), int(batch.loss_weights.sum())) for batch in step] for step in steps]


def test_labels_of_the_forget_and_the_retain_set(tmp_path: Path) -> None:
    labels = str(GOLDEN / "dataset" / "instruct_label_document")
    sets = {"ga_dataset": LABELLED, "ga_label_dataset": labels, "gd_retain_label_dataset": labels}
    unchopped = {"pack_impl": "best_fit", "reset_attention_mask": True, "eod_mask_loss": False, "data_path": None}
    long = {"seq_length": 128, "max_position_embeddings": 128, "train_data_paths": [LABELLED], "split": None}
    values = config(LLAMA, DIFFERENCE, sets, unchopped, long, train_micro_batch_size_per_gpu=4)
    unlabelled_values = {**values, "ga_label_dataset": None, "gd_retain_label_dataset": None}
    step, unlabelled = run_ranks(weights_of, 1, [values, unlabelled_values])[0]
    assert [role for role, _, _ in step] == ["forget"] * 2 + ["retain"] * 2
    for (_, places, labelled), (_, _, num_trainable) in zip(step, unlabelled, strict=True):
        assert 0 < labelled < 0.8 * num_trainable <= places


def test_a_row_of_several_steps_counts_each_kind(tmp_path: Path) -> None:
    step_rows = rows(tmp_path / "each", **ASCENT, train_iters=4)
    pair_rows = rows(tmp_path / "both", **ASCENT, train_iters=4, log_interval=2)
    losses = [row["train/lm_loss"] for row in step_rows if row.get("train/lm_loss") is not None]
    assert pair_rows[0]["train/lm_loss"] == pytest.approx(sum(losses[:2]) / 2), "the mean of its ordinary steps"
    assert pair_rows[1]["train/lm_loss"] == step_rows[3]["train/lm_loss"]
    assert [row["train/batch_type"] for row in pair_rows] == [0.0, 0.5]
    for name in ("train/ga_actual_loss", "train/ga_lr_scaled", "train/ga_iterations"):
        assert pair_rows[1][name] == step_rows[2][name], name


def test_forgetting_one_set_and_keeping_another(tmp_path: Path) -> None:
    """A model that has three sets by heart, some steps of difference later; beside no retain term, where
    both losses rise. Ordinary steps are on the third set."""
    small = {"num_layers": 2, "seq_length": 64, "max_position_embeddings": 64, "train_batch_size": 4}
    sets = [OTHER_CORPUS, LABELLED, config()["data_path"]]
    learned = {"data_path": None, "split": None, "train_data_paths": sets, "train_iters": 120}
    rates = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}, "no_weight_tying": True}
    rows(tmp_path / "learned", **small, **learned, **rates)
    resumed = {**small, **rates, "load": str(tmp_path / "learned"), "finetune": True, "train_iters": 18}
    rises = []
    for weight in (0.7, 0.0):
        forgetting = rows(tmp_path / f"{weight}", **resumed, **DIFFERENCE | {"gd_retain_weight": weight})
        steps = [row for row in forgetting if row["train/batch_type"] == 1]
        rises.append([steps[-1][name] - steps[0][name] for name in ("train/gd_forget_loss", "train/gd_retain_loss")])
    (forgotten, retained), (forgotten_without_retain, lost) = rises
    assert forgotten > 0 and forgotten_without_retain > 0 and retained < min(forgotten, lost) / 2, rises


PER_BURST: dict[str, Any] = {**BURSTS, "ga_iters": 3, "ga_threshold_check_mode": "per_burst"}
AVERAGE = {**ASCENT, "ga_loss_threshold": 9.0, "ga_threshold_check_mode": "ema", "ga_threshold_skip_forward": True}
PP2 = {"pipe_parallel_size": 2}


@pytest.mark.parametrize(("ranks", "keys"), runs.cells(
    [(1, {**PER_BURST, "ga_loss_threshold": 9.0}), (1, NPO), (1, AVERAGE),
     (2, {**DIFFERENCE, **PP2, "precision": "bfloat16", "num_workers": 2})],
    [(1, {**PER_BURST, "ga_loss_threshold": 5.0})],
    [(2, {**DIVERGENCE, **PP2})],
))  # fmt: skip
def test_goes_on_bit_for_bit_in_the_middle(ranks: int, keys: dict[str, Any], tmp_path: Path) -> None:
    """Saved at step 3: a burst of steps 3 to 5 is under way."""
    steps = {"train_iters": 4 if "ga_iters" in keys else 6, "checkpoint_factor": 3}  # six with a burst of three for one
    assert_goes_on(ranks, config(LLAMA, ADAMW, keys, steps, num_layers=2, train_micro_batch_size_per_gpu=2), tmp_path)


# -- the threshold -------------------------------------------------------------------------------------------
class Steps:
    """The steps of a run whose forget loss is given, without a model."""

    def __init__(self, measured: list[float], **keys: Any) -> None:
        values = config(LLAMA, keys, ga_dataset=OTHER_CORPUS, train_micro_batch_size_per_gpu=8)
        self.args = NeoXArgs.from_dict(values).for_world(1)
        self.progress, self.measured, self.passes = TrainingProgress(), iter(measured), 0
        self.progress.method_state = UnlearningProgress()

    def measure(self, engine: Any, batches: list[Batch]) -> float:
        self.passes += 1
        return next(self.measured)

    def kinds(self, number: int, trained: dict[int, float] | None = None) -> str:
        """A letter a step: o(rdinary), a(scent). trained: losses of ascent steps by their number."""
        sets = SimpleNamespace(train="o", further={"forget": "a"})
        run: Any = SimpleNamespace(args=self.args, progress=self.progress, datasets=sets, tokenizer=mock.Mock(),
                                   consumed_samples=0, engine=mock.Mock())  # fmt: skip
        steps = unlearning.Method().steps(run, lambda name, *_: repeat([name]))
        kinds, on_this_rank = "", mock.patch.object(unlearning, "on_rank_zero", lambda groups, work: work())
        with on_this_rank, mock.patch.object(unlearning, "_mean_loss", self.measure):
            for _ in range(number):
                kinds += next(steps).batches[0]
                if kinds[-1] == "a":
                    loss = torch.tensor((trained or {}).get(self.progress.method_state.steps, math.nan))
                    result: Any = mock.Mock(metrics={"ga_actual_loss": loss})
                    self.progress.method_state = unlearning.after_ascent(self.args, self.progress.method_state, result)
                self.progress.iteration += 1
        return kinds


INTERLEAVED = {"ga_mode": "interleaved", "ga_loss_threshold": 5.0}
IN_BURSTS = {"ga_interval": 2, "ga_iters": 2, "ga_loss_threshold": 5.0}
EMA = {**INTERLEAVED, "ga_threshold_check_mode": "ema"}


@pytest.mark.parametrize(("measured", "keys", "kinds", "passes"), [
    ([3.0, 5.5, 4.0], INTERLEAVED, "ooaoooao", 3),  # a step above the threshold is an ordinary one
    # A burst is taken or left out as a whole, or its steps one by one.
    ([3.0, 6.0, 4.0], {**IN_BURSTS, "ga_threshold_check_mode": "per_burst"}, "ooaaooooaao", 3),
    ([3.0, 6.0, 4.0, 5.5], IN_BURSTS, "ooaooao", 4),
    ([4.0, 8.0, 8.0, 8.0, 1.0], EMA, "ooaoaoaoooa", 5),  # a moving average: 4, 4.4, 4.76, 5.084, 4.68
    ([math.nan, 4.0, 6.0, math.nan], EMA, "ooaoaoaoa", 4),  # what cannot be measured leaves nothing out
])  # fmt: skip
def test_above_the_threshold_steps_are_left_out(measured: Any, keys: Any, kinds: str, passes: int) -> None:
    steps = Steps(measured, **keys)
    assert steps.kinds(len(kinds)) == kinds and steps.passes == passes
    now = steps.progress.method_state
    if keys is INTERLEAVED:
        assert (now.steps, now.left_out, now.samples) == (2, 1, 3 * 8)
    elif math.isnan(measured[0]):
        assert now.average_loss == pytest.approx(4.2), "nor a trace"


def test_without_the_forward_pass_the_last_step_decides_and_no_ascent_ends_for_good() -> None:
    steps = Steps([2.0, 4.5], **INTERLEAVED, ga_threshold_skip_forward=True)
    # Measured at first; then 6.0 of the step taken is known: left out; then measured again.
    assert steps.kinds(9, trained={0: 6.0, 1: 4.5, 2: 4.75}) == "ooaoooaoa" and steps.passes == 2
    now = steps.progress.method_state
    assert now == UnlearningProgress(32, 3, 1, False, 4.75, now.average_loss)


def test_all_left_out_is_the_run_without_a_forget_set(tmp_path: Path) -> None:
    baseline = rows(tmp_path / "without", train_iters=5)
    left_out = rows(tmp_path / "left_out", **ASCENT, ga_loss_threshold=0.1, train_iters=5)
    assert [row["train/lm_loss"] for row in left_out] == [row["train/lm_loss"] for row in baseline]
    assert left_out[-1]["train/ga_skip_rate"] == 1.0 and left_out[-1]["train/ga_iterations"] == 0
