"""Types the commands of a recipe (docs/recipes/*.md) at small size, and writes what was seen into its page.

    python tools/real_model.py                              # a published model to stand for others, 89 MB, once
    python tools/docs/recipe_pages.py smollm2-chat          # minutes on a CPU; without a name all recipes

Small data from Python's standard library stands for published data, and SmolLM2-135M-Instruct for published
models. The page gets log lines, a plot, seconds and memory.
"""  # noqa: W505 (lines to copy)

import json
import os
import re
import resource
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from textwrap import shorten
from typing import ClassVar

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from megatron.operations.loss_plot import plot  # noqa: E402
from megatron.process import run_command  # noqa: E402
from megatron.process.command_parser import CommandParser  # noqa: E402
from megatron.process.metrics_file import read_metrics  # noqa: E402
from megatron.process.run_files import Problems  # noqa: E402

Messages = list[dict[str, str]]
PAGES = ROOT / "docs" / "recipes"
LINKS = ("configs", "post-training", "tools", *(path.name for path in ROOT.glob("*.py")))
_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LOADED = re.compile(r"load_dataset\('([^']+)'.*\.to_json\('([^']+)'\)")
_LEFT_OUT = ("elapsed", "approx", "number of", "learning rate")  # parts of an iteration line
_RESULTS = ("best model", "answers before and after", "curves", "talk to it")
_MARKERS = "<!-- small run -->", "<!-- end -->"


class CommandFailed(Exception):
    """Raised if a command of a page fails. The message has its output."""


@dataclass
class Typist:
    """Types what a page says, in a folder.

    names: local paths of published models and datasets, by name. sizes: keys of training commands, by script.
    log: collects the output of training commands. seconds: of training commands.
    chat_input: typed into `deepy.py chat`.
    """

    folder: Path
    names: Mapping[str, str]
    sizes: Mapping[str, Mapping[str, str]]
    environment: Mapping[str, str] = field(default_factory=dict)
    log: list[str] = field(default_factory=list)
    seconds: float = 0.0
    chat_input: ClassVar[str] = "What does json.dumps do?\n\n"

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        for name in LINKS:
            (self.folder / name).symlink_to(ROOT / name)

    def type_page(self, page: str) -> None:
        """Writes the files of a page and runs its commands, in order."""
        for language, text in _BLOCK.findall(page):
            if language == "yaml":
                name = text.splitlines()[0].removeprefix("# ")
                (self.folder / name).write_text(self._with_local_names(text))
            elif not language:
                for line in re.sub(r" *\\\n *", " ", text).splitlines():
                    self.type_line(line)

    def type_line(self, line: str) -> None:
        """Runs one command."""
        words = shlex.split(line, comments=True)
        if words[:2] == ["hf", "download"]:
            target = self.folder / words[words.index("--local-dir") + 1]
            shutil.copytree(self.names[words[2]], target, dirs_exist_ok=True)
        elif words[:2] == ["python", "-c"] and (loaded := _LOADED.search(words[2])):
            target = self.folder / loaded[2]
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(self.names[loaded[1]], target)
        elif words[:2] != ["pip", "install"]:
            assert words[0] == "python", line
            self._run([sys.executable, *self._small([self._with_local_names(word) for word in words[1:]])])

    def _with_local_names(self, text: str) -> str:
        for name, path in sorted(self.names.items(), key=lambda item: -len(item[0])):
            text = re.sub(rf"(?:hf://)?{re.escape(name)}(?![\w.-])", path, text)
        return text

    def _small(self, words: list[str]) -> list[str]:
        script = words[1] if words[0] == "deepy.py" else ""
        sizes = self.sizes.get(script)
        if not sizes:
            pairs = zip(["", *words], words, strict=False)
            return ["1" if earlier_word == "--workers" else word for earlier_word, word in pairs]
        start = words.index("--set") if "--set" in words else len(words)
        keys = dict(word.split("=", 1) for word in words[start + 1 :])
        return [*words[:start], "--set", *(f"{key}={value}" for key, value in {**keys, **sizes}.items())]

    def _run(self, command: list[str]) -> None:
        start = time.monotonic()
        done = subprocess.run(
            command, cwd=self.folder, input=self.chat_input, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", **self.environment},
        )  # fmt: skip
        if done.returncode:
            raise CommandFailed(f"{shlex.join(command)}\n{done.stdout}")
        if command[1:2] == ["deepy.py"] and command[2] in ("train.py", "finetune") and "--prepare-only" not in command:
            self.seconds += time.monotonic() - start
            self.log += done.stdout.splitlines()


def sizes_by_script(sizes: Mapping[str, str]) -> dict[str, Mapping[str, str]]:
    """Returns the keys that each command of a page gets.

    finetune counts its steps itself, and gets none of the keys for train.py; generate.py those of the model.
    """
    model_sizes = {key: value for key, value in sizes.items() if key in _MODEL_KEYS}
    return {
        "train.py": sizes,
        "finetune": {} if "train_iters" in sizes else sizes,
        "generate.py": model_sizes if "num_layers" in sizes else {},
    }


@dataclass(frozen=True)
class SmallRun:
    """How a recipe is run at small size.

    save: the folder of its run. series: metrics whose first and last values the page lists. sizes: keys of
    train.py and finetune. model: in words.
    """

    save: str
    series: tuple[str, ...]
    sizes: Mapping[str, str]
    model: str = "SmolLM2-135M-Instruct in the place of the model"


_MODEL_KEYS = (
    "num_layers", "hidden_size", "num_attention_heads", "num_kv_heads", "seq_length", "max_position_embeddings",
    "precision",
)  # fmt: skip
_TINY = {  # the quickstart's model
    "num_layers": "4", "hidden_size": "192", "num_attention_heads": "6", "seq_length": "256",
    "max_position_embeddings": "256", "train_batch_size": "8", "train_micro_batch_size_per_gpu": "8",
    "precision": "fp32", "train_iters": "200", "lr_decay_iters": "200", "optimizer.params.lr": "2e-3", "min_lr": "2e-4",
    "eval_interval": "50", "zero_optimization.stage": "0", "checkpoint_factor": "200", "split": "95,5,0",
}  # fmt: skip
_LOSSES = ("train/lm_loss", "validation/lm_loss")
_CPU = {"precision": "fp32", "checkpoint_activations": "false", "checkpoint_factor": "1000"}
SMALL_RUNS = {
    "smollm2-chat": SmallRun("checkpoints/smollm2-chat", _LOSSES, {}),
    "gemma-text": SmallRun("checkpoints/gemma-stories", _LOSSES, {"seq_length": "128", "optimizer.params.lr": "1e-4"}),
    "qwen-lora": SmallRun("checkpoints/qwen-dolly", _LOSSES, {"train_epochs": "1"}),
    "olmo-dpo": SmallRun(
        "checkpoints/olmo-dpo", ("train/lm_loss", "train/rewards/accuracies"), {"optimizer.params.lr": "5e-5"}
    ),
    "grpo-arithmetic": SmallRun(
        "checkpoints/grpo", ("train/reward", "train/entropy"),
        {**_CPU, "seq_length": "64", "train_iters": "20", "train_batch_size": "32", "warmup_iters": "0",
         "train_micro_batch_size_per_gpu": "32", "rollout.max_completion_length": "8", "optimizer.params.lr": "2e-5"},
    ),
    "unlearning-tofu": SmallRun(
        "checkpoints/tofu-forgotten", ("train/ga_actual_loss", "train/gd_retain_loss"),
        {**_CPU, "seq_length": "128", "train_iters": "40", "train_batch_size": "4", "warmup_iters": "2",
         "optimizer.params.lr": "2e-5"},
    ),
    "distillation": SmallRun(
        "checkpoints/distilled", ("train/divergence", "train/lm_loss"),
        {**_CPU, "seq_length": "128", "train_batch_size": "4", "optimizer.params.lr": "1e-3", "min_lr": "1e-4",
         "num_layers": "4", "load": "null", "finetune": "false"},
        "SmolLM2-135M-Instruct as the teacher of four untrained layers",
    ),
    "pretrain-125m": SmallRun("checkpoints/125M", _LOSSES, _TINY, "a model of four layers"),
    "mamba-hybrid": SmallRun(
        "checkpoints/hybrid", _LOSSES, {**_TINY, "num_layers": "8", "num_kv_heads": "2", "train_iters": "100",
                                        "lr_decay_iters": "100", "checkpoint_factor": "100"},
        "a model of eight blocks",
    ),
    "mixture": SmallRun(
        "checkpoints/mixture", _LOSSES, {**_TINY, "train_data_weight_schedule.until": "[160]"},
        "a model of four layers",
    ),
}  # fmt: skip


def small_data(folder: Path) -> dict[str, str]:
    """Writes data from Python's standard library into `folder`; returns local paths by published name."""
    for words in (
        ["tools/quickstart_data.py", "--folder", str(folder)],
        ["tools/quickstart_dialogues.py", "--corpus", str(folder / "corpus.jsonl"), "--folder", str(folder)],
    ):
        subprocess.run([sys.executable, *words], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    chats, pairs, texts = (
        [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]
        for name in ("chats", "pairs", "corpus")
    )
    return write_stand_ins(folder, [row["messages"] for row in chats], pairs, [row["text"] for row in texts])


def write_stand_ins(
    folder: Path, chats: Sequence[Messages], pairs: Sequence[Mapping[str, object]], texts: Sequence[str]
) -> dict[str, str]:
    """Writes rows in the layouts of the published datasets; returns local paths by published name.

    chats: of a question and an answer each. folder: has a `tokenizer.json`.
    """
    questions = [{"question": chat[-2]["content"], "answer": chat[-1]["content"]} for chat in chats]
    sums = [(a, b) for a in range(1, 6) for b in range(1, 5)]
    one_third, half = len(chats) // 3, len(texts) // 2
    parts: dict[str, Sequence[Mapping[str, object]]] = {
        "smoltalk/data/train-00000-of-00001.jsonl": [{"messages": chat} for chat in chats[:300]],
        "stories/data/validation-00000-of-00001.jsonl": [{"text": text[:600]} for text in texts[:200]],
        "dolly/dolly.jsonl": [
            {"instruction": row["question"], "context": "", "response": row["answer"]}
            for row in questions[one_third:][:250]
        ],
        "preferences/data/train-00000-of-00001.jsonl": pairs[:120],
        "gsm8k.jsonl": [
            {
                "question": f"Ann has {a} coins and gets {b} more. How many has she? Say only the number.",
                "answer": f"#### {a + b}",
            }
            for a, b in sums
        ],
        "tofu/forget10.json": questions[:one_third][:80],
        "tofu/retain90.json": questions[one_third:][:320],
        "fineweb/sample/10BT/000_00000.jsonl": [{"text": text} for text in texts[:half]],
        "cosmopedia/cosmopedia-v2/train-00000-of-00104.jsonl": [{"text": row["answer"]} for row in questions],
        "math/data/train-00000-of-00114.jsonl": [{"text": text} for text in texts[half:]],
    }
    for name, rows in parts.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "pythia").mkdir(exist_ok=True)
    shutil.copy(folder / "tokenizer.json", folder / "pythia")
    return {name: str(folder / place) for name, place in DATA.items()}


MODELS = (
    "HuggingFaceTB/SmolLM2-135M", "google/gemma-3-270m", "Qwen/Qwen3-0.6B-Base", "Qwen/Qwen3-1.7B",
    "allenai/OLMo-2-0425-1B-SFT", "Qwen/Qwen2.5-0.5B-Instruct", "open-unlearning/tofu_Llama-3.2-1B-Instruct_full",
)  # fmt: skip
DATA = {
    "HuggingFaceTB/smol-smoltalk": "smoltalk", "roneneldan/TinyStories": "stories",
    "databricks/databricks-dolly-15k": "dolly", "allenai/olmo-2-0425-1b-preference-mix": "preferences",
    "openai/gsm8k": "gsm8k.jsonl", "locuslab/TOFU": "tofu", "HuggingFaceFW/fineweb-edu": "fineweb",
    "HuggingFaceTB/smollm-corpus": "cosmopedia", "open-web-math/open-web-math": "math",
    "EleutherAI/pythia-160m": "pythia",
}  # fmt: skip


def write_section(name: str, typist: Typist, run: SmallRun, megabytes: float) -> None:
    """Writes what a small run showed into its page, with a plot beside it."""
    rows = list(read_metrics(typist.folder / run.save / "logs" / "metrics.jsonl", Problems()))
    if run.series == _LOSSES:
        plot(rows, PAGES / f"{name}.png")
    else:
        _plot_series(rows, run.series, PAGES / f"{name}.png")
    steps = max(int(row["iteration"]) for row in rows)
    lines = [
        f"A small run by `python tools/docs/recipe_pages.py {name}`, on {_cores()}: {steps} steps,",
        f"with {run.model} and data from Python's standard library.",
        "",
        "```text",
        *_excerpt(typist.log),
        "```",
        "",
        "| | first | last |",
        "|---|---|---|",
        *_first_and_last(rows, run.series),
        "",
        f"It took {typist.seconds / 60:.1f} minutes and {megabytes / 1000:.1f} GB of memory.",
        "",
        f"![metrics of the small run]({name}.png)",
    ]
    page = PAGES / f"{name}.md"
    head, _, old_section = page.read_text().partition(_MARKERS[0])
    tail = old_section.partition(_MARKERS[1])[2]
    page.write_text(f"{head}{_MARKERS[0]}\n" + "\n".join(lines) + f"\n{_MARKERS[1]}{tail}")


def _plot_series(rows: list[dict[str, float]], series: tuple[str, ...], output: Path) -> None:
    """Draws each metric over the steps, in a panel of its own."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.6, 3.6), layout="constrained")
    for axes, name in zip(figure.subplots(1, len(series)), series, strict=True):
        points = [(row["iteration"], row[name]) for row in rows if row.get(name) is not None]
        axes.plot(*zip(*points, strict=True), marker=".")
        axes.set(xlabel="step", title=name)
        axes.grid(alpha=0.3)
    figure.savefig(output, dpi=120)


def _cores() -> str:
    count = len(os.sched_getaffinity(0))
    return "one CPU core" if count == 1 else f"{count} CPU cores"


def _excerpt(log: list[str]) -> Iterator[str]:
    """Yields the lines of a log that a reader looks for: choices, the first and the last step, results."""
    lines = [line for line in log if line.startswith("finetune: ") and "/" not in line.split(": ")[1]]
    results = [line for line in lines if line.split(": ")[1] in _RESULTS]
    yield from (line for line in lines if line not in results)
    steps = [line for line in log if re.search(r" iteration +\d+/ +\d+ ", line)]
    for line in (steps[0], steps[-1]) if steps else ():
        parts = re.sub(r" +", " ", line[line.index("iteration") :]).split(" | ")
        yield shorten(" | ".join(part for part in parts if not part.startswith(_LEFT_OUT)), 150, placeholder=" ...")
    yield from results


def _first_and_last(rows: list[dict[str, float]], series: tuple[str, ...]) -> Iterator[str]:
    for name in series:
        values = [row[name] for row in rows if row.get(name) is not None]
        if values:
            yield f"| `{name}` | {values[0]:.3f} | {values[-1]:.3f} |"


def main() -> int:
    parser = CommandParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="RECIPE", help=f"one of {', '.join(SMALL_RUNS)}; default: all")
    parser.add_argument(
        "--model", type=Path, default=ROOT / ".cache/real/SmolLM2-135M-Instruct", help="of tools/real_model.py"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        names = dict.fromkeys(MODELS, str(options.model.resolve())) | small_data(Path(folder) / "small")
        for name in options.names or SMALL_RUNS:
            run = SMALL_RUNS[name]
            typist = Typist(Path(folder) / name, names, sizes_by_script(run.sizes))
            typist.type_page((PAGES / f"{name}.md").read_text())
            megabytes = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1000
            write_section(name, typist, run, megabytes)
            print(f"{PAGES / name}.md: {typist.seconds:.0f} s", flush=True)
    return 0


if __name__ == "__main__":
    run_command(main)
