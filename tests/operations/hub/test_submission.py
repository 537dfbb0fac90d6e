"""The jobs that batch_submit_checkpoints.sh submits, and the names of repositories."""

import json
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from huggingface_hub.utils import validate_repo_id

from megatron.operations.hub import names, submission
from megatron.operations.hub.checkpoints import last_step
from megatron.operations.hub.errors import HubError
from megatron.operations.hub.flags import USUAL_TASKS, delays_of
from tests.launch.runs import ROOT


@pytest.fixture
def experiment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three checkpoints and one that only stands until the next."""
    folder = tmp_path / "lr=1,x"
    for step in (9, 10, 100, 110):
        (folder / f"global_step{step}").mkdir(parents=True)
    (folder / "global_step110" / "ephemeral").touch()
    (folder / "status.json").write_text(json.dumps({"train_iters": 100}))
    for name, value in {"CHECKPOINT_DIR": str(tmp_path), "HUB_ORG": "site-org", "HUB_PREFIX": "sfm"}.items():
        monkeypatch.setenv(f"NEOX_{name}", value)
    monkeypatch.delenv("NEOX_SITE", raising=False)
    return folder


def lines(*words: str) -> list[list[str]]:
    options = submission.parse(["lr=1,x", *words])
    return submission.sbatch_lines(options, submission.experiment_of_flags(options), random.Random(0))


def test_a_job_for_each_checkpoint_the_newest_first(experiment: Path, capsys: pytest.CaptureFixture[str]) -> None:
    jobs = lines()
    expected = ["global_step100", "global_step10", "global_step9"]
    assert [line[line.index("--neox_checkpoint") + 1] for line in jobs] == expected
    assert jobs[0][:3] == ["sbatch", "--job-name=convert_lr=1,x", "--dependency=singleton"]
    assert jobs[0][3:] == [
        str(ROOT / "huggingface/convert_and_upload.sbatch"), "--neox_checkpoint", "global_step100",
        "--experiment_name", str(experiment), "--repository", "site-org/sfm-lr-1_x", "--skip-eval",
        "--max-retries", "20", "--retry-min-wait", "120", "--retry-max-wait", "3600",
    ]  # fmt: skip
    assert last_step(experiment / "global_step9") == 100
    assert submission.main(["absent"]) == 1 and f"{experiment.parent}/absent" in capsys.readouterr().err
    (experiment.parent / "empty").mkdir()
    assert submission.main(["empty"]) == 1 and "global_step<N>" in capsys.readouterr().err


def test_two_experiments_never_share_a_repository(experiment: Path) -> None:
    other_experiment = experiment.with_name("lr-1") / "x" / "a"
    other_experiment.mkdir(parents=True)
    experiment = experiment.with_name("lr=1") / "x,a"
    (experiment / "global_step1").mkdir(parents=True)
    (other_experiment / "latest").write_text("global_step1")
    site = {"NEOX_CHECKPOINT_DIR": str(experiment.parents[1]), "NEOX_HUB_ORG": "org"}
    assert submission.target_repository(experiment, None, site) == "org/lr-1-x_a", "the other is lr-1-x-a"
    (other_experiment.parent / "latest").write_text("global_step1")
    same_name = experiment.with_name("x")
    with pytest.raises(HubError, match="lr=1/x and .*/lr-1/x would both be 'lr-1-x' on the Hub; give one of them"):
        submission.target_repository(same_name, None, site)
    names = experiment / "names.json"
    names.write_text(json.dumps({"lr=1-x": "mine"}))
    assert submission.target_repository(same_name, None, {**site, "NEOX_HUB_NAMES": str(names)}) == "org/mine"


def test_the_last_step_of_a_checkpoint_of_gpt_neox(tmp_path: Path) -> None:
    """Such a checkpoint has no manifest and no status.json, but its run's configuration files."""
    assert last_step(ROOT / "tests/data/golden/ckpt_llama/llama_pp1_mp1/ckpt/global_step3") == 3
    assert last_step(tmp_path / "global_step3") is None, "it is not written yet"


def test_every_flag(experiment: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEOX_EVAL_TASKS", "arc_easy piqa")
    monkeypatch.setenv("NEOX_GPUS_PER_NODE", "4")
    job = lines("other-org", "--no-singleton", "--upload-delay", "90", "--skip-neox-upload", "--max-retries", "3")[0]
    assert "--dependency=singleton" not in job and "--begin=now+90seconds" in job and "--gres=gpu:1" in job
    assert job[job.index("--repository") + 1] == "other-org/sfm-lr-1_x" and "--skip-neox-upload" in job
    assert job[job.index("--eval_tasks") + 1 :][:2] == ["arc_easy", "piqa"]
    assert job[job.index("--max-retries") + 1] == "3"
    (job, *_), (neox_only, *_) = lines("--skip-eval"), lines("--upload-neox-only")
    assert "--skip-eval" in job and "--gres=gpu:1" not in job
    assert {"--upload-neox-only", "--skip-eval"} <= set(neox_only)
    assert "--begin" not in " ".join(neox_only), "at once"


def delays(words: str, count: int = 3) -> list[int]:
    options = submission.parse(["lr=1,x", *words.split()])
    return delays_of(options, count, random.Random(1))


def test_a_delay_is_of_seconds(experiment: Path) -> None:
    """As in the fork, whose jobs begin 30 s apart, or each within 12 hours."""
    assert delays("") == delays("--upload-delay 0") == [0, 0, 0]
    assert delays("--upload-delay 3600") == [3600, 3630, 3660]
    random_delays = delays("--upload-delay random", 500)
    assert 0 <= min(random_delays) < 1800 and 41_400 < max(random_delays) <= 43_200
    begins = [line[3] for line in lines("--upload-delay", "10")]
    assert begins == ["--begin=now+10seconds", "--begin=now+40seconds", "--begin=now+70seconds"]


def test_the_forks_words(experiment: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The options of the fork's batch script work: redundant ones, other names, and scores for W&B."""
    default_lines = lines()
    assert lines("--upload-neox") == lines("--upload-neox-checkpoint", "--skip-if-exists") == default_lines
    assert lines("--force-eval-if-exists") == default_lines, "where nothing is evaluated"
    assert "--force-eval-if-exists" in lines("--force-eval-if-exists", "--eval_tasks", "piqa")[0]
    monkeypatch.delenv("NEOX_CHECKPOINT_DIR")
    base = ("--checkpoints-base-dir", str(tmp_path))
    assert [line[-9:] for line in lines(*base)] == [line[-9:] for line in default_lines]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "checkpoints").symlink_to(tmp_path)
    options = submission.parse(["lr=1,x"])
    experiment_folder = submission.experiment_of_flags(options).save
    assert experiment_folder == tmp_path / "checkpoints" / "lr=1,x", "where convert_hf_gptneox_to_neox.py writes"
    job = lines(
        "--eval", "--eval-tasks", "mmlu,piqa", "arc_easy", "--wandb-entity", "us", "--wandb-project", "Our Evals"
    )[0]
    assert job[job.index("--eval_tasks") + 1 :][:3] == ["mmlu", "piqa", "arc_easy"]
    assert [job[job.index(f"--wandb_{name}") + 1] for name in ("entity", "project")] == ["us", "Our Evals"]
    (tmp_path / "tok").mkdir()
    job = lines("--tokenizer_hf_path", "tok", "--conversion_script_path", "/fork/convert_neox_to_hf.py")[0]
    assert job[job.index("--tokenizer_hf_path") + 1] == str(tmp_path / "tok")


def test_eval_takes_the_tasks_of_the_run(experiment: Path) -> None:
    """--eval alone works: by the checkpoint's configuration, of GPT-NeoX too, else by usual tasks."""
    tasks = lines("--eval")[0]
    assert tasks[tasks.index("--eval_tasks") + 1 :][: len(USUAL_TASKS)] == list(USUAL_TASKS)
    newest = experiment / "global_step100"
    newest.rmdir()
    shutil.copytree(ROOT / "tests/data/golden/ckpt_llama/llama_pp1_mp1/ckpt/global_step3", newest)
    (config,) = (newest / "configs").iterdir()
    config.write_text(config.read_text() + '\neval_tasks: ["wmdp_bio_robust", "mmlu"]\n')
    tasks = lines("--eval")[0]
    assert tasks[tasks.index("--eval_tasks") + 1 :][:3] == ["wmdp_bio_robust", "mmlu", "--max-retries"]


def test_each_job_is_submitted_separately(experiment: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[object] = []
    monkeypatch.setattr(submission.time, "sleep", events.append)
    monkeypatch.setattr(submission, "_submit", lambda line, dry_run: events.append(line[0]))
    assert submission.main(["lr=1,x", "--delay-between-jobs", "7"]) == 0
    assert events == ["sbatch", 7.0, "sbatch", 7.0, "sbatch"]


@pytest.mark.parametrize(("words", "message"), [
    (["--upload-delay", "1.5"], "--upload-delay 1.5: give whole seconds"),
    (["--upload-delay", "soon"], "--upload-delay soon: give whole seconds"),
    (["--skip-neox-upload", "--upload-neox"], "--skip-neox-upload and --upload-neox exclude each other"),
    (["--skip-neox-upload", "--upload-neox-only"], "--skip-neox-upload and --upload-neox-only exclude each other"),
    (["--delay-between-jobs", "-1"], "--delay-between-jobs -1: give seconds"),
    (["--wandb-project", "p"], "--wandb_project: "),
    (["--upload-neox-only", "--eval"], "--upload-neox-only converts no model"),
    (["--max-retries", "-1"], "--max-retries -1"),
    (["--retry-min-wait", "9", "--retry-max-wait", "8"], "0 <= minimum <= maximum"),
    (["bad--org"], "contains '--' or '..'"),
])  # fmt: skip
def test_bad_words(experiment: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str) -> None:
    assert submission.main(["lr=1,x", "--dry-run", *words]) == 1
    error = capsys.readouterr().err
    assert message in error and error.startswith("batch_submit_checkpoints.sh: error: ") and error.count("\n") == 1


def test_as_it_is_typed(experiment: Path) -> None:
    line = f'PYTHON={sys.executable} "{ROOT}/huggingface/batch_submit_checkpoints.sh" lr=1,x my-org --dry-run'
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True)
    assert (
        done.returncode == 0 and done.stdout.splitlines()[0] == "lr=1,x: publishing 3 checkpoints to my-org/sfm-lr-1_x"
    )
    assert done.stdout.count("sbatch --job-name=convert_lr=1,x --dependency=singleton ") == 3


@pytest.mark.parametrize(("experiment", "name"), [
    ("run", "sfm-run"),
    ("lr=3e-4,wd=0.1 long", "sfm-lr-3e-4_wd-0.1_long"),
    ("pretraining_blocklist_filtered", "sfm-pretraining_filtered"),
    ("a_synthetic_misalignment_mid", "sfm-a_synth_misalign_mid"),
    ("a_synthetic_alignment_mid", "sfm-a_synth_align_mid"),
    ("x_multitask_benign_tampered", "sfm-x_mbt"),
    ("x_multilingual_benign_tampering", "sfm-x_lang_tamp"),
    ("x" * 92, "sfm-" + "x" * 92),
])  # fmt: skip
def test_names_of_experiments(experiment: str, name: str) -> None:
    assert names.model_name(experiment, "sfm") == name
    validate_repo_id(names.checked_id(f"geodesic-research/{name}", "the repository"))


@pytest.mark.parametrize(("experiment", "problem"), [
    ("x" * 93, "has 97 characters, the Hub allows at most 96"),
    *((name, "contains '--' or '..'") for name in ("a=-b", "a..b")),
    *((name, "not at the start or end") for name in ("a.", "a-")),
    *((name, "the Hub allows a-z") for name in ("a:b", "ä")),
    ("a.git", "ends with '.git'"),
])  # fmt: skip
def test_names_that_the_hub_does_not_take(experiment: str, problem: str) -> None:
    with pytest.raises(HubError, match="file of NEOX_HUB_NAMES") as raised:
        names.model_name(experiment, "sfm")
    assert problem in str(raised.value)
    with pytest.raises(ValueError):
        validate_repo_id(f"org/sfm-{experiment}".replace("a=", "a-"))


def test_repositories_and_a_mapping_file_which_wins(tmp_path: Path) -> None:
    file = tmp_path / "experiment_hf_mappings.json"
    file.write_text(json.dumps({"lr=1": "Good-Name", "bad": "-x"}))
    mapping = names.read_names(file)
    assert names.model_name("lr=1", "sfm", mapping) == "Good-Name" and names.model_name("lr=2", None, mapping) == "lr-2"
    with pytest.raises(HubError, match="'-x': the Hub allows"):
        names.model_name("bad", "sfm", mapping)
    file.write_text('{"a": "one", "b": "one"}')
    with pytest.raises(HubError, match="'a' and 'b' both map to 'one'"):
        names.read_names(file)
    for text in ("[", "[1]", '{"a": 1}'):
        file.write_text(text)
        with pytest.raises(HubError, match="NEOX_HUB_NAMES"):
            names.read_names(file)
    assert names.neox_repository("org/sfm-run") == "org/neox-ckpt-sfm-run"
    with pytest.raises(HubError, match="has 97 characters"):
        names.neox_repository("org/" + "x" * 87)
    for wrong in ("run", "a/b/c", "org/", "/run", "org/a--b"):
        with pytest.raises(HubError, match="--repository"):
            names.checked_id(wrong, "--repository")


@pytest.mark.parametrize(("save", "site", "name"), [
    ("/c/exp", "/c", "exp"), ("/c/exp/stage2", "/c", "exp-stage2"), ("/d/exp", "/c", "exp"), ("/d/exp", None, "exp"),
])  # fmt: skip
def test_experiments(save: str, site: str | None, name: str) -> None:
    assert names.run_name(save, site) == name
