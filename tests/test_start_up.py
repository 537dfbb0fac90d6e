"""Commands import nothing heavy before they need it: torch takes seconds, at any --help or mistyped key."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
# Also what only some commands need: no --help of any does.
HEAVY = ("torch", "numpy", "deepspeed", "transformers", "tokenizers", "datasets", "pyarrow", "pandas", "safetensors")
# Runs each command line in a fork of an interpreter that knows what all of them need, and prints a line of
# JSON each.
RUNNER = """\
import contextlib, io, json, os, runpy, sys
import megatron.launch, megatron.neox_arguments
leave, os._exit = os._exit, sys.exit
for line, words in json.loads(sys.argv[1]).items():
    if child := os.fork():
        os.waitpid(child, 0)
        continue
    sys.argv, said = words, io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            runpy.run_path(words[0], run_name="__main__")
            code = 0
        except SystemExit as end:
            code = end.code or 0
    print(json.dumps((line, (code, said.getvalue(), [name for name in HEAVY if name in sys.modules]))), flush=True)
    leave(0)
"""
SIZES = {"num_layers": 2, "hidden_size": 8, "num_attention_heads": 2, "seq_length": 8, "max_position_embeddings": 8}
TRAINING_KEYS = {"train_batch_size": 8, "train_iters": 1, "data_path": "data", "tokenizer_type": "CharLevelTokenizer"}
MODEL = "".join(f"{key}: {value}\n" for key, value in {**SIZES, **TRAINING_KEYS}.items())
COMMANDS = ("train.py", "generate.py", "eval.py", "tools/serve.py")
NAMES = {path.stem for path in (ROOT / "tools" / "ckpts").glob("*.py") if not path.is_symlink()} - {"__init__", "flags"}
TOOLS = [f"tools/{name}.py" for name in ("ask", "new_config", "plot_metrics", *(f"ckpts/{n}" for n in sorted(NAMES)))]
HELP = [
    *COMMANDS, *TOOLS, "deepy.py", "deepy.py train.py", "deepy.py generate.py", "deepy.py eval.py",
    "huggingface/convert_hf_gptneox_to_neox.py",
]  # fmt: skip
Results = dict[str, tuple[int, str, list[str]]]


def python(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", *words], cwd=ROOT, capture_output=True, text=True, timeout=120)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Returns for each command line its exit code, its output, and the heavy modules it imported."""
    folder = tmp_path_factory.mktemp("start_up")
    (folder / "good.yml").write_text(MODEL)
    (folder / "unknown.yml").write_text(MODEL + "hidden_dropuot: 0.1\n")
    (folder / "refused.yml").write_text(MODEL + "precision: fp16\nzero_optimization: {stage: 7}\n")
    lines = {f"{line} --help": [*line.split(), "--help"] for line in HELP}
    for name in ("unknown", "refused"):
        for script in COMMANDS:
            lines[f"{script} {name}"] = [script, str(folder / f"{name}.yml")]
            lines[f"deepy.py {script} {name}"] = ["deepy.py", script, str(folder / f"{name}.yml")]
    lines["deepy.py train.py --dry-run"] = ["deepy.py", "train.py", str(folder / "good.yml"), "--dry-run"]
    done = python(f"HEAVY = {HEAVY!r}\n{RUNNER}", json.dumps(lines))
    assert done.returncode == 0, done.stderr
    return dict(json.loads(line) for line in done.stdout.splitlines())


@pytest.mark.parametrize("line", HELP)
def test_help_imports_nothing_heavy(line: str, results: Results) -> None:
    code, output, heavy = results[f"{line} --help"]
    assert (code, heavy) == (0, []) and output.startswith("usage: "), output


@pytest.mark.parametrize("script", COMMANDS)
@pytest.mark.parametrize(("name", "key"), [("unknown", "hidden_dropuot"), ("refused", "stage")])
def test_a_configuration_error_imports_nothing_heavy(script: str, name: str, key: str, results: Results) -> None:
    for line, command in ((script, Path(script).name), (f"deepy.py {script}", "deepy.py")):
        code, output, heavy = results[f"{line} {name}"]
        assert (code, heavy) == (1, []), output
        assert output.startswith(f"{command}: error: ") and key in output and "Traceback" not in output


def test_a_launcher_counts_gpus_without_torch(results: Results) -> None:
    code, output, heavy = results["deepy.py train.py --dry-run"]
    assert (code, heavy) == (0, []) and "(1 rank" in output, output


def test_nothing_imports_the_compiler() -> None:
    """torch._dynamo takes 1.7 s of CPU; a run that does not compile gets to its optimizer without."""
    code = (
        "import sys, megatron.training, megatron.generation, megatron.evaluation\n"
        "print([name for name in ('torch._dynamo', 'torch._inductor', 'transformers', 'pandas', 'pyarrow', 'datasets', "
        "'matplotlib', 'tensorboard', 'lm_eval') if name in sys.modules])"
    )
    done = python(code)
    assert done.stdout.strip().splitlines()[-1:] == ["[]"], done.stdout + done.stderr
