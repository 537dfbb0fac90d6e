"""eval.py as people type it: files, table, trackers, cache, comparison, errors."""

import json
import os
import re
import statistics
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megatron.evaluation.task_loading import SHIPPED
from megatron.process.run_files import Problems
from megatron.process.score_files import read_samples, samples_file, score_rows
from tests.evaluation.runs import lm_eval_command, make_model, make_tasks, on_terminal
from tests.generation.runs import run_script
from tests.marks import with_more
from tests.pool import run_ranks
from tests.training.runs import NEOX, config, run_to_end

ROOT = Path(__file__).resolve().parents[2]
run = partial(run_script, script="eval.py")


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return make_model(tmp_path_factory.mktemp("model"))


def assert_close_to_hf(output: str) -> None:
    compared = re.search(r"largest difference to lm-eval's hf backend: (\S+)", output)
    assert compared and float(compared[1]) < 1e-4, output


@pytest.mark.more
def test_results_table_samples_trackers_and_the_hf_backend(model, tmp_path):
    out = tmp_path / "results"
    code, output, problems = run("--hf-model", model, "--eval_tasks", "shipped_choice", "shipped_perplexity",
                                 "--eval_output_dir", out, "--eval_results_prefix", "tiny", "--eval_limit", 4,
                                 "--compare-hf", "--set", "eval_log_samples=true",
                                 f"tensorboard_dir={tmp_path}/board")  # fmt: skip
    assert code == 0, problems
    assert "Running evaluation harness on 2 tasks: shipped_choice, shipped_perplexity" in output
    assert re.search(r"^Running evaluation harness: 100%\|#+\| \d+/\d+ \[", output, re.MULTILINE), "as people look for"
    assert re.search(r"^\| shipped_choice +\| 1.0 +\| 0 +\| none +\| acc ↑ +\| [\d.]+ +\| ± 0\.\d{4} +\|$", output,
                     re.MULTILINE)  # fmt: skip
    assert_close_to_hf(output)
    assert not re.search("error|exception|traceback", output + problems, re.IGNORECASE), "a healthy log"
    (file,) = out.glob("tiny_eval_results_*.json")
    assert re.fullmatch(r"tiny_eval_results_\d\d-\d\d-\d{4}-\d\d-\d\d-\d\d\.json", file.name)
    results = json.loads(file.read_text())
    assert results["n-samples"]["shipped_choice"] == {"original": 32, "effective": 4}
    assert results["config"]["limit"] == 4 and "samples" not in results and results["failures"] == {}
    (samples,) = out.glob("tiny_eval_samples_shipped_choice_*.jsonl")
    assert len(samples.read_text().splitlines()) == 4
    board = EventAccumulator(str(tmp_path / "board")).Reload()
    (event,) = board.Scalars("eval/shipped_choice_acc")
    assert event.value == pytest.approx(results["results"]["shipped_choice"]["acc,none"])


_STATES: dict[str, dict[str, Any]] = {
    "Mamba": {"state_size": 8},
    "FalconMamba": {"state_size": 8, "time_step_rank": 4},
    "Mamba2": {"num_heads": 8, "head_dim": 16, "n_groups": 2, "state_size": 8},
    "NemotronH": {
        "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"], "num_attention_heads": 4,
        "head_dim": 16, "num_key_value_heads": 2, "mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 2,
        "ssm_state_size": 8,
        "intermediate_size": 128, "moe_intermediate_size": 32, "moe_shared_expert_intermediate_size": 32,
    },
}  # fmt: skip


@pytest.mark.parametrize("family", with_more(_STATES, product=["FalconMamba", "Mamba", "Mamba2"]))
def test_scores_of_models_with_states_are_those_of_the_hf_backend(family: str, tmp_path: Path) -> None:
    import torch
    import transformers

    folder = make_model(tmp_path / "model")
    torch.manual_seed(1)
    config = getattr(transformers, f"{family}Config")(
        vocab_size=500, hidden_size=64, num_hidden_layers=4, initializer_range=0.3, eos_token_id=0, bos_token_id=None,
        pad_token_id=None, **_STATES[family],
    )  # fmt: skip
    getattr(transformers, f"{family}ForCausalLM")(config).save_pretrained(folder)
    code, output, problems = run("--hf-model", folder, "--eval_tasks", "shipped_choice", "shipped_perplexity",
                                 "--eval_output_dir", tmp_path, "--eval_limit", 4, "--compare-hf")  # fmt: skip
    assert code == 0, problems
    assert_close_to_hf(output)


@pytest.mark.product
def test_results_equal_those_of_lm_evals_own_command(model, tmp_path):
    """The same keys, and the same values where both mean the same."""
    code, _, problems = run("--hf-model", model, "--eval_tasks", "shipped_choice", "--eval_output_dir",
                            tmp_path / "ours", "--eval_limit", 3, "--set", "eval_apply_chat_template=true",
                            "eval_system_prompt=Be brief.", "precision=fp32")  # fmt: skip
    assert code == 0, problems
    argv = ["run", "--model", "hf", "--model_args", f"pretrained={model},dtype=float32", "--device", "cpu", "--limit",
            "3", "--tasks", "shipped_choice", "--include_path", str(SHIPPED), "--output_path",
            str(tmp_path / "theirs"), "--apply_chat_template", "--fewshot_as_multiturn", "true",
            "--system_instruction", "Be brief.", "--log_samples"]  # fmt: skip
    run_ranks(lm_eval_command, 1, argv, init=False, timeout=600)
    actual, expected = (json.loads(next((tmp_path / side).rglob("*results_*.json")).read_text())
                        for side in ("ours", "theirs"))  # fmt: skip
    assert actual.keys() - expected.keys() == {"failures", "too_long"} and expected.keys() <= actual.keys()
    assert expected["config"].keys() <= actual["config"].keys()
    assert list(expected["task_hashes"]) == ["shipped_choice"] and expected["chat_template_sha"]
    for key in ("task_hashes", "versions", "n-shot", "n-samples", "higher_is_better", "group_subtasks", "git_hash",
                "upper_git_hash", "transformers_version", "lm_eval_version", "eot_token_id", "max_length",
                "tokenizer_eos_token", "tokenizer_bos_token", "system_instruction", "system_instruction_sha",
                "chat_template", "chat_template_sha", "fewshot_as_multiturn", "model_name",
                "model_name_sanitized"):  # fmt: skip
        assert actual[key] == expected[key], key
    for key in ("model_num_parameters", "model_dtype", "device", "limit", "random_seed", "numpy_seed", "fewshot_seed"):
        assert actual["config"][key] == expected["config"][key], key
    assert actual["model_source"] == "neox" and actual["pretty_env_info"].startswith("PyTorch version")
    assert abs(actual["date"] - expected["date"]) < 86_400, "when it began, in seconds"


def test_bars_and_lines_do_not_glue_together(model, tmp_path):
    """Standard errors that are bootstrapped, and the hf backend, have bars of their own."""
    argv = ["--hf-model", model, "--eval_tasks", "shipped_cloze", "shipped_choice", "--eval_limit", "2",
            "--eval_output_dir", str(tmp_path), "--compare-hf"]  # fmt: skip
    lines = run_ranks(on_terminal, 1, argv, init=False, timeout=600, env={"COLUMNS": "120"})[0]
    bars = [line for line in lines if "%|" in line]
    assert len(bars) == 1 and re.fullmatch(r"Running evaluation harness: 100%\|█+\| 10/10 \[[^]]*\]", bars[0]), lines
    assert not [line for line in lines if "bootstrapping" in line]
    assert any(line.startswith("eval_batch_size: auto chose") for line in lines), "said while the bar stands"


def cached(rank: int, world: int, argv: list[str], other_argv: list[str]) -> list[tuple[int, int]]:
    """For the pool: (code, requests scored) of an evaluation interrupted, twice again, of another model."""
    import eval as script
    from megatron.evaluation import language_model, model_operations

    language_model._FIRST_PART, outcomes = 8, []
    real, counts = model_operations.score, [0]

    def counting_score(model: Any, requests: Any, **options: Any) -> Any:
        if not outcomes and counts[0] >= 16:
            raise KeyboardInterrupt
        counts[0] += len(requests)
        return real(model, requests, **options)

    model_operations.score = counting_score
    for arguments in (argv, argv, argv, other_argv):
        counts[0] = 0
        try:
            code = script.main(arguments)
        except KeyboardInterrupt:
            code = 130
        outcomes.append((code, counts[0]))
    return outcomes


def test_an_interrupted_evaluation_goes_on_and_a_cache_serves_only_its_model(model, tmp_path):
    other_model = make_model(tmp_path / "other", seed=1)
    flags = ["--eval_tasks", "shipped_choice", "--eval_output_dir", str(tmp_path), "--eval_limit", "12", "--set",
             f"eval_cache={tmp_path}/cache"]  # fmt: skip
    runs = run_ranks(
        cached, 1, ["--hf-model", model, *flags], ["--hf-model", other_model, *flags], init=False, timeout=600
    )[0]
    (broken, num_before), (resumed, num_resumed), (repeated, num_repeated), (foreign, num_foreign) = runs
    assert (broken, resumed, repeated, foreign) == (130, 0, 0, 0)
    assert num_before >= 16 and num_before + num_resumed == num_foreign == 48 and num_repeated == 0
    files = sorted(tmp_path.glob("eval_results_*.json"), key=lambda file: file.stat().st_mtime_ns)
    results = [json.loads(file.read_text())["results"] for file in files]
    assert len(results) == 3 and results[0] == results[1], "none replaces another of the same second"


@pytest.mark.parametrize("use_deepy", [False, pytest.param(True, marks=pytest.mark.product)])
def test_a_checkpoint_in_two_layouts_as_typed(use_deepy, tmp_path):
    """`python deepy.py eval.py -d configs config.yml --eval_tasks ...` on two ranks."""
    make_tasks(tmp_path)
    values = config(NEOX, train_iters=2, max_position_embeddings=64, save=str(tmp_path / "save"), checkpoint_factor=2)
    run_ranks(run_to_end, 1, values)
    (tmp_path / "a.yml").write_text(yaml.safe_dump(values))
    layout = {"model_parallel_size": 2, "eval_limit": 6, "eval_log_samples": True,
              "load": os.path.relpath(tmp_path / "save", ROOT)}  # fmt: skip
    (tmp_path / "tp.yml").write_text(yaml.safe_dump(layout))
    argv = ["-d", str(tmp_path), "a.yml", "tp", "--eval_tasks", "shipped_choice", "own_text", "--eval_include_path",
            str(tmp_path), "--eval_output_dir", str(tmp_path), "--compare-hf"]  # fmt: skip
    if use_deepy:
        argv = [sys.executable, "deepy.py", "--num_gpus", "2", "eval.py", *argv]
        done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=600)
        code, output, problems = done.returncode, done.stdout, done.stderr
    else:
        code, output, problems = run(*argv, ranks=2)
    assert code == 0, output + problems
    assert_close_to_hf(output)
    (file,) = tmp_path.glob("eval_results_*.json")
    results = json.loads(file.read_text())
    assert set(results["results"]) == {"shipped_choice", "own_text"}
    model = results["config"]["model_args"]
    assert (model["load"], model["iteration"]) == (str(tmp_path / "save"), 2), "by which `compare` finds the run"
    rows = {row.name: row for row in score_rows(results)}
    samples = read_samples(samples_file(file, "shipped_choice"), "acc", "none", problems := Problems())
    assert len(samples) == 6 and problems.lines() == []
    accuracy = rows["shipped_choice_acc"]
    assert statistics.fmean(samples.values()) == pytest.approx(accuracy.value)
    assert statistics.stdev(samples.values()) / 6**0.5 == pytest.approx(accuracy.stderr)


def test_what_is_wrong_is_said_in_a_line(model, tmp_path):
    code, _, errors = run("--hf-model", model, "--eval_tasks", "gone.yaml", "--eval_output_dir", tmp_path)
    assert code == 1 and re.fullmatch("eval.py: error: .*eval_tasks: gone.yaml: .*\n", errors)
    code, _, errors = run("--hf-model", tmp_path, "--eval_tasks", "shipped_choice")
    assert code == 1 and errors.startswith("eval.py: error: --hf-model: ")
    (tmp_path / "file").touch()
    code, _, errors = run("--hf-model", model, "--eval_tasks", "x", "--eval_output_dir", tmp_path / "file" / "there")
    assert code == 1 and "eval_output_dir: " in errors and f"{tmp_path}/file" in errors
    code, _, errors = run("--hf-model", model)
    assert code == 1 and "eval_tasks: is required" in errors


def test_a_task_without_scores_makes_the_command_fail_but_not_the_others(model, tmp_path):
    make_tasks(tmp_path)
    (tmp_path / "gone.yaml").write_text((tmp_path / "own_text.yaml").read_text().replace("own.jsonl", "gone.jsonl"))
    tasks = ("--eval_tasks", str(tmp_path / "gone.yaml"), "shipped_choice")
    code, output, _ = run("--hf-model", model, *tasks, "--eval_output_dir", tmp_path, "--eval_limit", 2, ranks=2)
    assert code == 1 and "gone.yaml has no scores" in output and "| shipped_choice" in output
    code, _, output = run("--hf-model", model, *tasks[:2], "--eval_output_dir", tmp_path / "no")
    assert code == 1 and "eval.py: error: " in output and "eval_tasks: " in output and "gone.jsonl" in output
    assert not list((tmp_path / "no").glob("*.json")), "no results where nothing could be run"
