"""`deepy.py compare` on runs that are written here: keys, common points, tests of scores, and bad input."""

import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import special

import deepy
from megatron.experiments.comparison.significance import holm, mcnemar_test, paired_t_test, z_test
from tests.operations.report.pages import Row, figures, titles, write_run
from tests.training.runs import LLAMA, config

MODEL = {**LLAMA, "checkpoint_factor": 100}


def make_run(
    save: Path, steps: int = 40, shift: float = 0.0, tokens: int = 256, interval: int = 10, status: str = "finished",
    start: int = 1, extra_rows: Sequence[Row] = (), **keys: Any,
) -> Path:  # fmt: skip
    """A run whose losses are linear in tokens: 5 + shift - tokens / 10,000; validated every so many steps."""
    rows = []
    for step in range(start, steps + 1):
        loss = 5.0 + shift - step * tokens / 10_000
        rows.append({"iteration": step, "consumed_tokens": step * tokens, "train/lm_loss": loss,
                     "runtime/tokens_per_sec": 100.0 * step, "run_id": "a"})  # fmt: skip
        if step % interval == 0:
            rows[-1]["validation/lm_loss"] = loss + 1.0
    values = config(MODEL, save=str(save), **keys)
    return write_run(save, [*rows, *extra_rows], values, {"status": status, "iteration": steps, "train_iters": 40})


def evaluate(folder: Path, save: Path, scores: Sequence[float], metric: str = "acc", iteration: int | None = 40,
             prompts: str = "asked", samples: bool = True, value: float | None = None, stderr: float | str = 0.1,
             task: str = "quiz", version: float = 1.0) -> None:  # fmt: skip
    """Result files as eval.py writes them, of a task whose documents have these scores."""
    folder.mkdir(exist_ok=True)
    name = f"{save.name}_eval_results_{task}-{metric}-{iteration}.json"
    mean = sum(scores) / len(scores) if value is None else value
    results = {
        "results": {task: {"alias": task, f"{metric},none": mean, f"{metric}_stderr,none": stderr}},
        "versions": {task: version}, "task_hashes": {task: prompts}, "higher_is_better": {task: {metric: True}},
        "config": {"model_args": {"load": str(save), "iteration": iteration}}, "date": 1.7e9,
    }  # fmt: skip
    (folder / name).write_text(json.dumps(results))
    if samples:
        lines = [
            {"doc_id": i, "doc_hash": f"hash {i}", "filter": kind, metric: x if kind == "none" else 1.0}
            for i, x in enumerate(scores)
            for kind in ("none", "strict")
        ]
        file = name.replace("results_", f"samples_{task}_").replace(".json", ".jsonl")
        (folder / file).write_text("".join(json.dumps(line) + "\n" for line in lines))


def compare(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    code = deepy.main(["compare", *map(str, words)])
    output, problems = capsys.readouterr()
    return code, output, problems


def compared(capsys: pytest.CaptureFixture[str], *words: object) -> dict[str, Any]:
    code, output, problems = compare(capsys, *words, "--json")
    assert (code, problems) == (0, "")
    answer: dict[str, Any] = json.loads(output)
    return answer


def scipys_t_test(changes: Sequence[float]) -> float:
    error = np.std(changes, ddof=1) / len(changes) ** 0.5
    return float(2 * special.stdtr(len(changes) - 1, -abs(np.mean(changes) / error)))


def test_p_values_are_scipys_and_published_ones() -> None:
    sleep = [1.2, 2.4, 1.3, 1.3, 0.0, 1.0, 1.8, 0.8, 4.6, 1.4]  # Student (1908): t = 4.0621 with 9 degrees of freedom
    assert paired_t_test(sleep) == pytest.approx(0.002833, abs=5e-7)
    series = [[math.sin(17 * i) + shift for i in range(1, count)] for count in (4, 9, 2000) for shift in (0, 0.1, 2)]
    for changes in series:
        assert paired_t_test(changes) == pytest.approx(scipys_t_test(changes), rel=1e-8)
    assert paired_t_test([0.5, 0.5]) is None and paired_t_test([1.0]) is None
    for counts in ((0, 0), (3, 9), (6, 6), (140, 100), (4000, 4300)):
        expected = min(1.0, 2 * special.bdtr(min(counts), sum(counts), 0.5))
        assert mcnemar_test(*counts) == pytest.approx(expected, rel=1e-9)
    assert z_test(-1.959964, 1.0) == pytest.approx(0.05, rel=1e-6)
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02]), "Holm's own example"


def test_keys_that_differ_and_those_that_do_not_count(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = make_run(tmp_path / "a", load=str(tmp_path / "a"), log_interval=1)
    changed = make_run(tmp_path / "b", load=str(tmp_path / "b"), log_interval=2, lr_decay_iters=7,
                      optimizer={"type": "Adam", "params": {"lr": 2e-3, "eps": 1e-6}})  # fmt: skip
    partly_changed = make_run(tmp_path / "c", lr_decay_iters=7)
    keys = compared(capsys, base, changed, partly_changed)["differing_keys"]
    assert keys["values"] == {"lr_decay_iters": ["10", "7", "7"], "optimizer.params.lr": ["0.001", "0.002", "0.001"]}
    assert keys["derived"] == ["lr"] and set(keys["places"]) == {"save", "load", "log_interval"}
    every_key = compared(capsys, base, changed, partly_changed, "--all")["differing_keys"]
    assert {"save", "load", "log_interval", "lr"} < every_key["values"].keys() and not every_key["places"]
    other_weights = make_run(tmp_path / "d", load=str(tmp_path / "b"), finetune=True)
    assert {"load", "finetune"} <= compared(capsys, base, other_weights)["differing_keys"]["values"].keys()


def test_long_values_are_shown_where_they_differ(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [f"corpus/part{i}_text_document" for i in range(9)]
    runs = [make_run(tmp_path / name, data_path=None, train_data_paths=[*paths, f"corpus/{name}"]) for name in "ab"]
    output = compare(capsys, *runs)[1]
    (line,) = (line for line in output.splitlines() if "train_data_paths" in line)
    assert len(line) < 160 and '"corpus/a"]' in line and '"corpus/b"]' in line


def test_values_at_common_points_are_logged_or_between_two_logged_ones(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [make_run(tmp_path / "a"), make_run(tmp_path / "b", shift=0.5, steps=25, status="running"),
            make_run(tmp_path / "c", tokens=512, interval=7), make_run(tmp_path / "d", start=18)]  # fmt: skip
    answer = compared(capsys, *runs)
    validation, training = answer["curves"]
    assert [validation["metric"], training["metric"]] == ["validation/lm_loss", "train/lm_loss"]
    assert validation["points"][:2] == [10, 14] or 10 in validation["points"]
    for curve, bounds in (
        (validation, [(10, 40), (10, 20), (7, 35), (20, 40)]),
        (training, [(1, 40), (1, 25), (1, 40), (18, 40)]),
    ):
        for point, values in zip(curve["points"], curve["values"], strict=True):
            for run, (value, (start, end)) in enumerate(zip(values, bounds, strict=True)):
                assert (value is None) == (not start <= point <= end)
                if value is not None:
                    tokens, added = point * (512 if run == 2 else 256), (0.5 * (run == 1)) + (curve is validation)
                    assert value["value"] == pytest.approx(5.0 + added - tokens / 10_000)
                    logged = curve is training or point % (7 if run == 2 else 10) == 0
                    assert value["interpolated"] is not logged
    assert [end[0] for end in validation["ends"]] == [40, 20, 35, 40]
    assert answer["notes"] == ["b is still running (step 25 of 40): only its rows up to now are compared"]
    token_answer = compared(capsys, *runs, "--by", "tokens", "--metric", "train/*")
    (curve,) = token_answer["curves"]
    assert curve["points"][-1] == 40 * 256, "the farthest that two runs reach"
    for values in curve["values"]:  # of the same number of tokens
        assert values[2]["value"] == pytest.approx(values[0]["value"])
    code, output, _ = compare(capsys, *runs)
    assert code == 0 and re.search(r"^ +10 .* ~\d\.\d{4} ", output, re.M) and "between two logged points" in output


def test_flops_are_those_of_the_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [make_run(tmp_path / "a"), make_run(tmp_path / "b", hidden_size=64, intermediate_size=96)]
    code, _, problems = compare(capsys, *runs, "--by", "flops")
    assert code == 1 and problems == (
        "deepy.py compare: error: a: has no checkpoint with the size of its vocabulary, so the FLOPs of a token are "
        "unknown; use --by tokens\n"
    )
    for run in runs:
        (run / "global_step40").mkdir()
        (run / "global_step40" / "manifest.json").write_text(json.dumps({"config": {"padded_vocab_size": 384}}))
    answer = compared(capsys, *runs, "--by", "flops", "--metric", "train/lm_loss")
    for end, hidden, mlp in zip(answer["curves"][0]["ends"], (32, 64), (48, 96), strict=True):
        # LLAMA with half as many heads for keys and values, in 4 layers; attention over half of 32 tokens.
        weights = 4 * (hidden * 2 * hidden + hidden * hidden + 3 * hidden * mlp) + 384 * hidden
        attention = 4 * 2 * hidden * 32 / 2
        assert end[0] == pytest.approx(6 * (weights + attention) * 40 * 256, rel=0.02)


def test_scores_and_their_tests(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [make_run(tmp_path / name) for name in "abc"]
    base_answers, new_answers = [1.0] * 10 + [0.0] * 10, [1.0] * 19 + [0.0]
    real = [[math.sin(i) + 0.3 * shift * math.cos(3 * i) + 0.2 * shift for i in range(12)] for shift in range(2)]
    for save, answers, numbers in zip(runs[:2], (base_answers, new_answers), real, strict=True):
        evaluate(save, save, [0.0] * 20, iteration=10)  # of older weights
        evaluate(save, save, answers)
        evaluate(tmp_path / "scores", save, numbers, "f1")
        evaluate(tmp_path / "scores", save, answers, task="unpaired", samples=False)
        evaluate(tmp_path / "scores", save, answers, task="other", prompts=save.name)
        evaluate(tmp_path / "scores", save, answers, task="old", stderr="N/A", samples=False)
        evaluate(tmp_path / "scores", save, answers, task="ppl", value=17.0 + len(numbers))  # no mean of documents
    evaluate(tmp_path / "scores", tmp_path / "elsewhere", base_answers)
    answer = compared(capsys, *runs, "--scores", tmp_path / "scores")
    assert answer["scores"][2] == {} and answer["scores"][0]["quiz_acc"]["value"] == 0.5
    assert answer["scores"][1]["quiz_acc"]["iteration"] == 40
    items = {item["name"]: item for item in answer["score_differences"]}
    tests = {name: item["test"] for name, item in items.items()}
    assert tests == {"quiz_acc": "McNemar", "quiz_f1": "paired t", "unpaired_acc": "z", "ppl_acc": "z",
                     "other_acc": "none: other documents or prompts", "old_acc": "none: no standard error"}  # fmt: skip
    assert items["quiz_acc"]["difference"] == pytest.approx(0.45)
    assert items["quiz_acc"]["p"] == pytest.approx(2 / 2**9)
    changes = [new - base for base, new in zip(*real, strict=True)]
    assert items["quiz_f1"]["p"] == pytest.approx(scipys_t_test(changes))
    assert items["quiz_f1"]["stderr"] == pytest.approx(np.std(changes, ddof=1) / 12**0.5)
    assert items["unpaired_acc"]["p"] == pytest.approx(2 * special.ndtr(-0.45 / math.hypot(0.1, 0.1)))
    tested = [item for item in items.values() if item["p"] is not None]
    assert [item["corrected_p"] for item in tested] == pytest.approx(holm([item["p"] for item in tested]))
    assert len(tested) == 4 and items["other_acc"]["corrected_p"] is None
    output = compare(capsys, *runs, "--scores", tmp_path / "scores")[1]
    assert "corrected for the 4 tests of this table" in output
    assert re.search(r"quiz_acc +b +40 +0\.9500 ± 0\.1000 +\+0\.45 ± 0\.1141 +0\.0039 +0\.0117\* +McNemar", output)


def test_scores_of_metrics_jsonl_have_no_test(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"iteration": 40 + i, "consumed_tokens": 1, "run_id": "a", "eval_tasks/quiz_acc": 0.25 * i} for i in (1, 2)]
    runs = [make_run(tmp_path / "a", extra_rows=rows[:1]), make_run(tmp_path / "b", extra_rows=rows)]
    (item,) = compared(capsys, *runs)["score_differences"]
    assert (item["difference"], item["p"], item["test"]) == (0.25, None, "none: no standard error (of steps 41 and 42)")


def test_notes_on_runs_of_other_text_or_without_configuration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nan = {"iteration": 50, "consumed_tokens": 1, "run_id": "a", "train/lm_loss": None}
    base, shorter = (
        make_run(tmp_path / "a"),
        make_run(tmp_path / "b", extra_rows=[nan], seq_length=16, train_batch_size=4),
    )
    (base / "bad_eval_results_1.json").write_text('{"results": {"quiz": 3}}')
    code, output, problems = compare(capsys, base, shorter, "--metric", "train/lm_loss", "--metric", "valid*/lm_loss")
    assert code == 0 and "b: 1 NaN or infinite values are left out" in output
    (note,) = re.findall("not of the same text or tokens, because of other values of (.*)", output)
    assert set(note.split(", ")) == {"seq_length", "train_batch_size"}
    assert problems.count("\n") == 1 and "bad_eval_results_1.json: holds no results of lm-eval" in problems
    unreadable = make_run(tmp_path / "c")
    next((unreadable / "logs").glob("neox_args*")).write_text("{}")
    code, output, _ = compare(capsys, base, unreadable)
    assert code == 0 and "c has no configuration that this version can read: keys are not compared" in output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["a"], "a: a comparison needs two runs or more; name another one"),
        (["a", "."], r".*: holds no run: neither status.json nor metrics.jsonl is in it; .*"),
        (["a", "a/logs/metrics.jsonl"], r".*this run is given twice .*"),
        (["a", "b", "--metric", "train/loss"],
         "--metric train/loss: no run has logged it; common ones are train/lm_loss, validation/lm_loss"),
        (["a", "rewards", "--metric", "*/lm_loss"], r"--metric \*/lm_loss: only a has logged it; common ones are x"),
        (["a", "rewards"], "a and rewards: no loss is logged by two of these runs; .*: --metric x"),
        (["a", "empty"], r".*empty/logs/metrics.jsonl: has no metrics yet, and there are no common scores; .*"),
        (["a", "b", "--scores", "none"], "--scores none: no such folder; name one with result files of eval.py"),
        (["a", "b", "--html", "nowhere/c.html"], "--html nowhere/c.html: No such file or directory; name another file"),
    ],
)  # fmt: skip
def test_bad_input_is_a_line(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in "ab":
        make_run(tmp_path / name, extra_rows=[{"iteration": 41, "x": 1.0}])
    write_run(tmp_path / "rewards", [{"iteration": 1, "x": 2.0}])
    write_run(tmp_path / "empty", [])
    code, output, problems = compare(capsys, *words)
    assert (code, output) == (1, "")
    assert re.fullmatch(f"deepy.py compare: error: {message}\n", problems), problems


def test_the_page_has_the_tables_and_the_curves(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [make_run(tmp_path / "a"), make_run(tmp_path / "b", shift=0.5), make_run(tmp_path / "<c>", tokens=512)]
    page = tmp_path / "page.html"
    code, output, _ = compare(capsys, *runs, "--by", "tokens", "--html", page)
    text = page.read_text()
    assert code == 0 and titles(page) == ["Loss: training", "Loss: validation", "Tokens per second"]
    cells = re.findall(r"<t[dh][^>]*>(.*?)</t", text)
    assert {"end", "train/lm_loss by tokens", "&lt;c&gt; - a"} <= {*cells, *re.findall("<h2>(.*?)</h2>", text)}
    printed = re.findall(r"(?<= )[~+-]?\d\.\d{4}", output)
    assert len(printed) > 40 and set(printed) <= set(cells)
    loss = figures(page)[0]
    curves = [part.data_source.data for part in loss.renderers if part.data_source.name == "curve"]
    assert [curve["x"].max() for curve in curves[::2]] == [40 * 256, 40 * 256, 40 * 512]
    assert loss.xaxis[0].axis_label == "tokens" and "<c>" not in re.sub("<script.*?</script>", "", text, flags=re.S)
