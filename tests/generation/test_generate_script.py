"""generate.py as it is typed: prompts, JSON lines, refusals."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.tokenizer import HFTokenizer
from tests.checkpointing.golden import RUNS
from tests.generation.runs import TOKENIZER, command, lines
from tests.generation.runs import run_script as run
from tests.pool import run_ranks

ROOT = Path(__file__).resolve().parents[2]
RUN = RUNS["llama_pp1_mp1"]
FIELDS = ["context", "text", "length", "finished", "message", "duration_seconds"]


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    (tmp_path / "model.yml").write_text((RUN / "llama_pp1_mp1.yml").read_text())
    keys = {"text_gen_type": "unconditional", "num_samples": 3, "maximum_tokens": 20, "temperature": 0.8, "top_p": 0.95}
    (tmp_path / "text_generation.yml").write_text(json.dumps({**keys, "sample_output_file": f"{tmp_path}/samples.txt"}))
    overrides = [f"vocab_file={TOKENIZER}", f"load={RUN / 'ckpt'}", "compat_ffn_width=upstream"]
    return ["-d", str(tmp_path), "model", "text_generation.yml", "--set", f"log_dir={tmp_path}/logs", *overrides]


def test_unconditional_without_an_optimizer_or_deepspeed(words: list[str], tmp_path: Path) -> None:
    check = (
        "import sys, generate\n"
        f"code = generate.main({words!r})\n"
        "heavy = ('deepspeed', 'megatron.training', 'torch._dynamo')\n"
        "print(code, [name for name in sys.modules if name.startswith(heavy)])\n"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "-c", check], env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "0 []"
    assert f"are in {tmp_path}/samples.txt" in done.stdout
    samples = lines(tmp_path / "samples.txt")
    assert [list(sample) for sample in samples] == [FIELDS] * 3
    assert len({sample["text"] for sample in samples}) == 3
    for sample in samples:
        assert sample["context"] == "" and sample["message"] is None and sample["duration_seconds"] > 0
        assert sample["finished"] == (sample["length"] < 20)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.yml", "samples.txt", "text_generation.yml"]


def test_two_ranks_write_the_file_that_one_writes(words: list[str], tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_text("Once upon a time\n\n  The cat \nA")
    argv = [*words, "text_gen_type=input-file", "-i", f"{tmp_path}/in.txt"]
    outputs = run_ranks(command, 2, [*argv, "--set", "pipe_parallel_size=2", "sample_output_file=null"], init=False)
    assert [(code, err) for code, _, err in outputs] == [(0, "")] * 2
    assert outputs[1][1] == "", "only rank 0 speaks"
    samples = lines(tmp_path / "in.txt.output.jsonl")
    assert [sample["context"] for sample in samples] == ["Once upon a time", "The cat", "A"]
    assert all(sample["text"] for sample in samples)
    assert run(*argv, "-o", f"{tmp_path}/one.jsonl")[0] == 0
    for sample in (single_rank := lines(tmp_path / "one.jsonl")) + samples:
        del sample["duration_seconds"]
    assert single_rank == samples


def test_prompt_end_and_long_contexts(words: list[str], tmp_path: Path) -> None:
    long = "the quick brown fox " * 20
    (tmp_path / "in.txt").write_text(f"two\nlines<END>{long}<END>  <END>")
    overrides = ["text_gen_type=input-file", "prompt_end=<END>", "temperature=0", "top_k=3", "maximum_tokens=60"]
    code, out, err = run(*words, *overrides, "-i", f"{tmp_path}/in.txt", "-o", f"{tmp_path}/out.jsonl")
    assert (code, err) == (0, "")
    assert "top_k" in out and "temperature 0" in out
    short_sample, long_sample = lines(tmp_path / "out.jsonl")
    tokens = len(HFTokenizer(TOKENIZER).tokenize(long.strip()))
    assert (short_sample["context"], long_sample["context"]) == ("two\nlines", long.strip()) and long_sample[
        "length"
    ] <= 60
    assert long_sample["message"].startswith("WARNING: ") and f" 4 of the context's {tokens} " in long_sample["message"]
    assert "2 of 2 prompts are too long" in out
    files = ["-i", f"{tmp_path}/in.txt", "-o", f"{tmp_path}/skipped.jsonl"]
    overrides = [*overrides, "maximum_tokens=40"]
    code, out, _ = run(*words, *overrides, "eval_overlong=skip", *files)
    assert code == 0 and "1 of 2 prompts are too long" in out and "skipped" in out
    short_sample, skipped = lines(tmp_path / "skipped.jsonl")
    assert short_sample["text"] and short_sample["message"] is None and skipped["context"] == long.strip()
    assert skipped["text"] is None and "eval_overlong: skip" in skipped["message"]
    code, _, err = run(*words, *overrides, "eval_overlong=refuse", *files)
    assert code == 1 and "sample_input_file: 1 prompts" in err and "number 2" in err


def test_batch_sizes_of_training_and_prompts_that_are_not_read_do_not_matter(words: list[str], tmp_path: Path) -> None:
    code, out, err = run(*words, "num_samples=1", "maximum_tokens=1", "train_batch_size=1024", "-i", "prompts.txt")
    assert (code, err) == (0, "") and "sample_input_file is not read" in out


@pytest.mark.parametrize(("change", "message"), [
    ("load={folder}/nothing", "{folder}/nothing: no such directory"),
    ("vocab_file={folder}/nothing", "{folder}/nothing: no such file (vocab_file"),
    ("maximum_tokens=64", "maximum_tokens: 64 "),
    ("prompt_end=''", "prompt_end: "),
    ("hidden_size=64", "hidden_size: 64 (--set)"),
    ("model_parallel_size=2", "model_parallel_size: 1 ranks"),
    ("sample_output_file={folder}", "sample_output_file: {folder}: is a folder"),
    ("sample_output_file={folder}/no/x", "there is no folder {folder}/no"),
    ("sample_input_file={folder}/no.txt", "sample_input_file: {folder}/no.txt: cannot be read (No such file"),
    ("sample_input_file={folder}/empty.txt", "empty.txt: holds no prompt"),
    ("sample_input_file={folder}/binary.txt", "is not UTF-8 text (byte 1 "),
])  # fmt: skip
def test_refused_in_one_line(words: list[str], tmp_path: Path, change: str, message: str) -> None:
    (tmp_path / "empty.txt").write_text(" \n \n")
    (tmp_path / "binary.txt").write_bytes(b"a\xff\n")
    extra = ["text_gen_type=input-file"] if change.startswith("sample_input_file") else []
    code, _, err = run(*words, change.format(folder=tmp_path), *extra)
    assert code == 1 and message.format(folder=tmp_path) in err
    assert err.startswith("generate.py: error: ") and err.count("\n") == 1
    assert not (tmp_path / "samples.txt").exists()
