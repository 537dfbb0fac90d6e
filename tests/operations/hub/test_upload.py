"""Uploads by huggingface_hub's own client to a Hub on this machine."""

import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from huggingface_hub import ModelCard

from megatron.checkpointing import CheckpointError, load_checkpoint_args, load_weights
from megatron.neox_arguments import NeoXArgs, parse_script
from megatron.operations.hub.card import RunFacts, write_card
from megatron.operations.hub.conversion import convert
from megatron.operations.hub.errors import HubError
from megatron.operations.hub.journal import is_finished, open_journal
from megatron.operations.hub.repository import LocalFile, Repository, digest
from megatron.operations.hub.retrying import Patience
from megatron.operations.hub.upload import Formats, Upload, evaluate_folder, publish_checkpoint, read_scores
from tests.checkpointing.test_huggingface import TOKENIZER
from tests.launch.runs import ROOT, wait_for
from tests.operations.hub.conftest import COMMAND
from tests.operations.hub.loopback_hub import TOKEN, LoopbackHub, Repo
from tests.training.runs import LLAMA, config

Run = Callable[..., subprocess.CompletedProcess[str]]
MODEL, NEOX = "org/tiny-run", "org/neox-ckpt-tiny-run"
TAGS = [f"global_step{step}" for step in (5, 4, 3, 2, 1)]
QUICK = Patience(20, 0.05, 0.2)


def journal(save: Path, tag: str) -> list[dict]:
    return [json.loads(line) for line in (save / "hub" / f"{tag}.jsonl").read_text().splitlines()]


def converted(save: Path, tag: str, folder: Path) -> dict[str, bytes]:
    convert(save / tag, folder)
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def assert_no_token(place: Path) -> None:
    files = [path for path in place.rglob("*") if path.is_file()]
    for path in files:
        assert TOKEN.encode() not in path.read_bytes() and b"X-Signature" not in path.read_bytes(), path
    assert files


def assert_sent_once(hub: LoopbackHub) -> None:
    assert len(hub.puts) == len(set(hub.puts)) == len(hub.objects)


@pytest.fixture
def last(save: Path, client: None) -> Upload:
    return Upload(save, 5, MODEL, is_last=True, patience=QUICK)


@pytest.mark.more
def test_one_checkpoint_in_both_formats(last: Upload, save: Path, hub: LoopbackHub, tmp_path: Path) -> None:
    """Busy twice, cut within a file, an answer lost: one commit each, every object once, and then nothing."""
    messages: list[str] = []
    hub.fail(r"POST .*/commit/", 429, times=2, retry_after="0.2")
    hub.fail(r"PUT .*", "cut")
    hub.fail(r"POST .*neox-ckpt.*/commit/", "lost")
    assert publish_checkpoint(last, messages.append)
    assert sum("answered 429" in line for line in messages) == 2 and any(
        "as the Hub says (retry 2 of 20)" in li for li in messages
    )
    waited = hub.requests_matching("POST .*/commit/")
    assert waited[1].seconds - waited[0].seconds >= 0.2 and waited[2].seconds - waited[1].seconds >= 0.2
    committed = {"main": ["global_step5 of tiny=run"]}
    assert {name: repo.commits for name, repo in hub.repos.items()} == {MODEL: committed, NEOX: committed}
    files = hub.content(MODEL, "main")
    assert hub.content(MODEL, "global_step5") == files == converted(save, "global_step5", tmp_path / "again")
    neox = hub.content(NEOX, "global_step5")
    assert {name for name in neox if "/" not in name} == {"latest", "README.md"}
    assert neox["latest"] == b"global_step5\n" and neox == hub.content(NEOX, "main")
    for path in (path for path in (save / "global_step5").rglob("*") if path.is_file()):
        assert neox[path.relative_to(save).as_posix()] == path.read_bytes()
    assert_sent_once(hub)
    assert not (save / "hub" / "global_step5").exists()
    events = [line["event"] for line in journal(save, "global_step5")]
    assert events[0] == "converted" and events[-1] == "finished" and events.count("published") == 4
    assert is_finished(save, "global_step5", MODEL, "both") and not is_finished(save, "global_step5", MODEL, "hf")

    sent, commits = len(hub.puts), len(hub.requests_matching("POST .*/commit/"))
    assert publish_checkpoint(last, messages.append)
    assert messages[-1].endswith("has it already") and sum("converting" in line for line in messages) == 1
    assert (len(hub.puts), len(hub.requests_matching("POST .*/commit/"))) == (sent, commits)
    assert TOKEN not in "".join(messages)
    assert_no_token(save / "hub")
    card = ModelCard(files["README.md"].decode())
    assert card.data.library_name == "transformers" and "gpt-neox" in card.data.tags
    assert all(text in card.text for text in ("| hidden_size | 128 |", "1,280 tokens seen", "sha256", "curves.png"))
    assert files["curves.png"].startswith(b"\x89PNG")
    assert json.loads(files["training_config.json"])["train_iters"] == 5


USER_FILES = {"NOTES.md": b"mine", "data/a.bin": b"mine", "README.md": b"old", "config.json": b"same"}
SHARDS = {"model-00001-of-00002.safetensors": b"", "model.safetensors.index.json": b"{}"}
STEP_FILES = ("layer_00-model_00-model_states.pt", "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt", "manifest.json")
OLD_STEP = {f"global_step1/{name}": b"old" for name in STEP_FILES}
EXTRA_FILES = {"adapter_model.safetensors": b"mine", "mine.safetensors": b"mine", "global_step1/NOTES.md": b"mine"}


@pytest.mark.parametrize(("sent", "stale", "retained"), [
    ("model.safetensors", SHARDS, OLD_STEP),
    ("global_step2/layer_00-model_00-model_states.pt", OLD_STEP, SHARDS),
    ("adapter_config.json", {}, {**SHARDS, **OLD_STEP}),
])  # fmt: skip
def test_only_weights_of_the_format_that_is_sent_are_removed(
    hub: LoopbackHub, client: None, sent: str, stale: dict[str, bytes], retained: dict[str, bytes]
) -> None:
    """On main of a repository that people use."""
    hub.repos[MODEL] = Repo()
    user_files = {**USER_FILES, **EXTRA_FILES, **retained}
    hub.repos[MODEL].branches["main"] |= {**user_files, **stale}
    contents = {"README.md": b"new", "config.json": b"same", sent: b"new"}
    files = {name: LocalFile(content, digest(content)) for name, content in contents.items()}
    assert Repository(MODEL, QUICK, print).publish("main", files, "message", lambda name: None)
    assert hub.content(MODEL, "main") == {**user_files, **contents}
    assert ".gitattributes" in hub.repos[MODEL].branches["main"]
    assert Repository(MODEL, QUICK, print).publish("main", files, "message", lambda name: None) is None


@pytest.mark.parametrize("format", ["hf", "neox"])
def test_another_checkpoint_takes_the_place_of_the_last_one(last: Upload, hub: LoopbackHub, format: Formats) -> None:
    """main, after a run that was made longer: of the checkpoint that it was before nothing is left."""
    earlier = replace(last, step=4, formats=format)
    assert publish_checkpoint(earlier, print) and publish_checkpoint(replace(earlier, step=5), print)
    name = MODEL if format == "hf" else NEOX
    assert hub.content(name, "main") == hub.content(name, "global_step5") != hub.content(name, "global_step4")
    if format == "neox":
        assert not [file for file in hub.content(name, "main") if file.startswith("global_step4/")]


@pytest.mark.product
def test_what_differs_alone_is_sent(last: Upload, save: Path, hub: LoopbackHub) -> None:
    """Somebody has changed a revision; the upload restores it."""
    hf = replace(last, formats="hf")
    publish_checkpoint(hf, print)
    branch, original = hub.repos[MODEL].branches["global_step5"], hub.content(MODEL, "main")
    branch["config.json"], branch["model-00001-of-00002.safetensors"] = b"{}", b"over"
    sent = len(hub.puts)
    publish_checkpoint(hf, print)
    assert hub.content(MODEL, "global_step5") == original and len(hub.puts) == sent
    assert hub.repos[MODEL].commits == {branch: ["global_step5 of tiny=run"] for branch in ("main", "global_step5")}


@pytest.mark.product
def test_a_converted_folder_is_taken_if_it_is_whole(last: Upload, save: Path, hub: LoopbackHub,
                                                    monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    hf, folder = replace(last, formats="hf", patience=Patience(0, 0.0, 0.0)), save / "hub" / "global_step5"
    hub.fail("POST .*/commit/", 500)
    with pytest.raises(HubError, match="run the same command again"):
        publish_checkpoint(hf, print)
    messages: list[str] = []
    (folder / "config.json").write_text("{}")  # as after a disk was full
    hub.fail("POST .*/commit/", 500)
    with pytest.raises(HubError):
        publish_checkpoint(hf, messages.append)
    assert any("converting" in line for line in messages)
    monkeypatch.setattr("megatron.operations.hub.conversion.convert", None)
    assert publish_checkpoint(hf, messages.append) and any("converted before" in line for line in messages)
    assert_sent_once(hub)


@pytest.mark.parametrize(("create", "token", "message"), [
    (False, TOKEN, "the token may not do this .403."),
    (True, "hf_other", "rejects the token .401."),
    (True, "", "set HF_TOKEN"),
])  # fmt: skip
def test_a_token_without_rights(last: Upload, save: Path, hub: LoopbackHub, monkeypatch: pytest.MonkeyPatch,
                                create: bool, token: str, message: str) -> None:  # fmt: skip
    hub.may_create = create
    monkeypatch.setenv("HF_TOKEN", token)
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(save / "no_token"))
    with pytest.raises(HubError, match=message) as raised:
        publish_checkpoint(last, print)
    assert "\n" not in str(raised.value) and not (save / "hub" / "global_step5").exists()


def test_a_checkpoint_that_the_run_removes(last: Upload, save: Path, hub: LoopbackHub) -> None:
    """keep_last_n_checkpoints: before it is read, and while."""
    messages: list[str] = []
    assert not publish_checkpoint(replace(last, step=9), messages.append) and "does not exist" in messages[-1]

    def say(text: str) -> None:
        messages.append(text)
        if "converting" in text:
            shutil.rmtree(save / "global_step5")

    assert not publish_checkpoint(last, say) and "the run removed it during the upload" in messages[-1]
    assert journal(save, "global_step5")[-1]["event"] == "gone" and not hub.puts


def test_two_processes_never_work_on_one_checkpoint(save: Path, environment: dict[str, str]) -> None:
    code = (
        "import sys; from pathlib import Path; from megatron.operations.hub.journal import open_journal\n"
        "with open_journal(Path(sys.argv[1]), 'global_step5', lambda t: print(t, flush=True)): print('got it')"
    )
    with open_journal(save, "global_step5", print) as held:
        held.add("sent")
        words = [COMMAND[0], "-c", code, str(save)]
        second_process = subprocess.Popen(words, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
        assert "another process is publishing this checkpoint" in second_process.stdout.readline()
        time.sleep(0.3)
        assert second_process.poll() is None
    assert second_process.communicate(timeout=30)[0] == "got it\n"


def test_a_truncated_journal(save: Path) -> None:
    (save / "hub").mkdir()
    (save / "hub" / "global_step5.jsonl").write_text('{"event": "sent", "file": "a"}\n{"event": "publ')
    with open_journal(save, "global_step5", print) as truncated:
        truncated.add("finished", repository=MODEL, formats="hf")
        assert truncated.last("sent", file="a") and truncated.last("published") is None
    assert is_finished(save, "global_step5", MODEL, "hf")


def test_another_tokenizer_takes_the_place_of_the_checkpoints(save: Path, tmp_path: Path) -> None:
    """--tokenizer_hf_path: a folder, or a file of one; the weights are the same."""
    converted_files, other_tokenizer = (
        converted(save, "global_step5", tmp_path / "own"),
        shutil.copytree(TOKENIZER, tmp_path / "other"),
    )
    (other_tokenizer / "chat_template.jinja").write_text("another")
    for number, name in enumerate((other_tokenizer, other_tokenizer / "tokenizer.json")):
        folder = tmp_path / str(number)
        convert(save / "global_step5", folder, str(name))
        assert (folder / "model.safetensors").read_bytes() == converted_files["model.safetensors"]
        assert (folder / "chat_template.jinja").read_bytes() == b"another" != converted_files.get("chat_template.jinja")
        assert transformers.AutoTokenizer.from_pretrained(folder)("a lantern").input_ids
    single_file = other_tokenizer / "20B_tokenizer.json"  # beside another one, which is not meant
    single_file.write_text(
        json.dumps({**json.loads((other_tokenizer / "tokenizer.json").read_text()), "truncation": None})
    )
    convert(save / "global_step5", tmp_path / "alone", str(single_file))
    assert (tmp_path / "alone" / "tokenizer.json").read_bytes() == single_file.read_bytes()
    assert not (tmp_path / "alone" / "chat_template.jinja").exists()
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "alone")("a lantern").input_ids
    with pytest.raises(CheckpointError, match="is not a tokenizer.json"):
        convert(save / "global_step5", tmp_path / "none", str(other_tokenizer / "tokenizer_config.json"))
    with pytest.raises(CheckpointError, match="holds no tokenizer"):
        convert(save / "global_step5", tmp_path / "none", str(save))


def test_scores_go_to_weights_and_biases(last: Upload, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """eval.py reads its options, and no environment of a run that several machines share."""
    calls: list[dict[str, Any]] = []

    def run(command: list[str], **options: Any) -> Any:
        calls.append({"command": command, **options})
        results = Path(command[command.index("--eval_output_dir") + 1])
        (results / "eval_results_1.json").write_text('{"results": {"piqa": {"acc,none": 0.5}}}')
        return subprocess.CompletedProcess(command, 0, "")

    monkeypatch.setattr("megatron.operations.hub.upload.subprocess.run", run)
    monkeypatch.setenv("TOTAL_GPUS", "4")
    upload = replace(last, tasks=("piqa",), wandb_project="Our Evals", wandb_entity="us")
    assert evaluate_folder(tmp_path, upload, print) == {"piqa_acc": 0.5}
    args = parse_script(calls[0]["command"][2:], "eval.py", lambda name: config(LLAMA))
    assert (args.use_wandb, args.wandb_project, args.wandb_team) == (True, "Our Evals", "us")
    assert args.wandb_run_name == "tiny=run_global_step5" and "TOTAL_GPUS" not in calls[0]["env"]
    assert last.tracking == {}


def test_known_scores_are_made_again_only_if_forced(last: Upload, save: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A message says where Weights & Biases gets no scores."""
    evaluations: list[float] = []

    def evaluate(*arguments: Any) -> dict[str, float]:
        evaluations.append(len(evaluations) / 2)
        return {"piqa_acc": evaluations[-1]}

    monkeypatch.setattr("megatron.operations.hub.upload.evaluate_folder", evaluate)
    upload = replace(last, formats="hf", tasks=("piqa",), wandb_project="evals")
    for force, count, forced_hint in ((False, 1, False), (False, 1, True), (True, 2, False)):
        messages: list[str] = []
        assert publish_checkpoint(replace(upload, force_eval=force), messages.append)
        assert (
            len(evaluations) == count and any("--force-eval-if-exists" in line for line in messages) == forced_hint
        ), messages
    values = [line["values"] for line in journal(save, "global_step5") if line["event"] == "scores"]
    assert values == [{"piqa_acc": 0.0}, {"piqa_acc": 0.5}]


@pytest.mark.product
def test_five_checkpoints_with_a_process_killed_in_the_middle(
    save: Path, hub: LoopbackHub, upload: Run, environment: dict[str, str], tmp_path: Path
) -> None:
    """Killed while a file is on its way, and again between a commit and its answer; then the same command."""
    hub.fail(r"POST .*/commit/", 429, times=2, retry_after="1")
    hub.fail(r"PUT .*", "cut")
    hub.fail(r"PUT .*", "hang", num_skipped=6)
    hub.fail(r"POST .*/commit/global_step3", "stall")
    words = ["--experiment_name", str(save), "--hf_org", "org", "--retry-min-wait", "0.05", "--retry-max-wait", "0.2"]
    for killed in (1, 2):
        with (tmp_path / f"killed{killed}.log").open("wb") as log:
            process = subprocess.Popen([*COMMAND, *words], cwd=ROOT, env=environment, stdout=log, stderr=log)
        wait_for(lambda process=process, killed=killed: process.poll() is not None or len(hub.waiting) >= killed, 300)
        assert process.poll() is None
        assert TOKEN not in subprocess.run(["ps", "axww"], capture_output=True, text=True).stdout
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    completed = upload("--hf_org", "org")
    assert completed.returncode == 0, completed.stderr

    assert_sent_once(hub)
    for name in (MODEL, NEOX):
        repo = hub.repos[name]
        assert sorted(repo.branches) == sorted([*TAGS, "main"])
        assert repo.commits == {"main": ["global_step5 of tiny=run"], **{t: [f"{t} of tiny=run"] for t in TAGS[1:]}}
        assert hub.content(name, "main") == hub.content(name, "global_step5")
    (tmp_path / "stdout").write_text(completed.stdout + completed.stderr)
    for tag in TAGS:
        assert hub.content(MODEL, tag) == converted(save, tag, tmp_path / "again" / tag), tag
        events = [line["event"] for line in journal(save, tag)]
        assert events.count("converted") == 1 and events[-1] == "finished", (tag, events)
    folder = hub.download(MODEL, "global_step3", tmp_path / "three")  # for plain transformers
    model, info = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    args, _ = load_checkpoint_args(save / "global_step3")
    layer = load_weights(save / "global_step3", args, layers=[0], tensor_rank=0, tensor_size=1)[0]
    weights = next(iter(layer.values()))[: model.config.vocab_size]
    assert torch.equal(model.get_input_embeddings().weight, weights)
    assert transformers.AutoTokenizer.from_pretrained(folder)("a lantern").input_ids
    assert_no_token(tmp_path)


def test_the_card_has_scores_of_the_run_at_its_step_and_of_an_evaluation(tmp_path: Path) -> None:
    results = {"piqa": {"alias": "piqa", "acc,none": 0.75, "acc_stderr,none": 0.01, "em,strict": 0.5}}
    (tmp_path / "results.json").write_text(json.dumps({"results": results}))
    assert (scores := read_scores(tmp_path / "results.json")) == {"piqa_acc": 0.75, "piqa_em_strict": 0.5}
    rows = [{"iteration": step, "eval_tasks/arc_acc": step / 8, "validation/lm_loss": step} for step in (1, 2, 3)]
    rows[1]["validation/ema/lm_loss"] = 1  # of averages, which are not what is published
    (tmp_path / "README.md").write_text("---\nlicense: mit\n---\n\n# Mine\n")
    write_card(tmp_path, RunFacts(2, NeoXArgs.from_dict(config(LLAMA, ema_decay=0.9)), rows=rows, scores=scores))
    card = (tmp_path / "README.md").read_text()
    expected = {"arc_acc": 0.25, "validation/lm_loss": 2, **scores}
    card_rows = re.findall(r"^\| (\S+) \| (\S+) \|$", card.partition("## Scores")[2], re.M)[1:]
    assert card_rows == [(name, f"{value:.6g}") for name, value in expected.items()]
    assert "model-index:" in card and "license: mit" in card and "# Mine" in card


@pytest.mark.product
def test_scores_are_in_the_card(save: Path, hub: LoopbackHub, upload: Run) -> None:
    words = ("--hf_org", "org", "--neox_checkpoint", "global_step5", "--skip-neox-upload", "--eval_tasks", "shipped")
    done = upload(*words, "--eval", "--eval_limit", "2", HF_HUB_OFFLINE="0")
    assert done.returncode == 0, done.stdout + done.stderr
    values = next(line["values"] for line in journal(save, "global_step5") if line["event"] == "scores")
    card = hub.content(MODEL, "main")["README.md"].decode()
    assert values and all(f"| {name} | {value:.6g} |" in card for name, value in values.items())
    assert "model-index:" in card and hub.content(MODEL, "main") == hub.content(MODEL, "global_step5")
    second_upload = upload(*words, "--eval", "--eval_limit", "2")
    assert "has it already" in second_upload.stdout and "evaluating" not in second_upload.stdout
    assert_sent_once(hub)
