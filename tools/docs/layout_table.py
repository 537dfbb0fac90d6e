"""Writes into docs/layouts.md what context parallelism combines with, as tests compare it with one process.

With --check it writes nothing, and exits with 1 if the page is out of date."""

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from megatron.process import run_command  # noqa: E402
from megatron.process.command_parser import CommandParser  # noqa: E402

BEGIN = "<!-- layouts: made by tools/docs/layout_table.py; do not edit -->\n"
END = "<!-- end of layouts -->\n"
Keys = Mapping[str, Any]


def _stage(number: int) -> Callable[[Keys], bool]:
    return lambda keys: keys.get("zero_optimization", {}).get("stage", 0) == number


ROWS: dict[str, Callable[[Keys], bool]] = {
    "tensor parallelism": lambda keys: keys.get("model_parallel_size", 1) > 1,
    "sequence parallelism": lambda keys: bool(keys.get("sequence_parallel")),
    **{
        f"pipelines, `{name}`": lambda keys, name=name: keys.get("pipe_parallel_size", 1) > 1  # type: ignore[misc]
        and keys.get("pipeline_schedule", "1f1b") == name
        for name in ("1f1b", "interleaved", "zbv")
    },
    **{f"ZeRO {number}": _stage(number) for number in (1, 2, 3)},
    "states in host memory": lambda keys: "offload_optimizer" in keys.get("zero_optimization", {}),
    "expert parallelism": lambda keys: keys.get("expert_parallel_size", 1) > 1,
    "recomputation, full": lambda keys: bool(keys.get("checkpoint_activations"))
    and keys.get("recompute_granularity") != "selective",
    "recomputation, selective": lambda keys: keys.get("recompute_granularity") == "selective",
    "packed documents": lambda keys: bool(keys.get("reset_attention_mask")),
    "sliding windows": lambda keys: "sliding_window_width" in keys,
    "one head of keys": lambda keys: keys.get("num_kv_heads") == 1,
    "soft caps and sinks": lambda keys: bool(keys.get("attention_sinks")),
    "ALiBi": lambda keys: keys.get("pos_emb") == "alibi",
    "relative positions (T5)": lambda keys: keys.get("pos_emb") == "rpe",
    "learned positions": lambda keys: keys.get("pos_emb") == "learned",
    "rows that ranks cannot share evenly": lambda keys: keys.get("seq_length", 32) % 8 != 0,
    "experts, each scope of the balancing loss": lambda keys: keys.get("moe_num_experts", 1) > 1,
    "Mamba 2, delta rules, hybrids": lambda keys: "attention_config" in keys,
    "LoRA, DoRA": lambda keys: "lora" in keys,
    "Muon": lambda keys: keys.get("optimizer", {}).get("type") == "Muon",
}
"""The rows of the table: whether the keys of a run have what a row names."""


def table() -> str:
    """Returns the table in Markdown: for each type, the number of compared runs with what a row names."""
    from tests.training.native import test_context_parallel as tests

    cells = [*tests.DEFAULT_CELLS, *tests.MORE_CELLS, *tests.PRODUCT]
    runs = [{**tests.MODELS[model], **tests.LAYOUTS[layout][1]} for layout, model in cells]
    types = ("allgather", "ring", "ulysses", "exchange of heads in pairs")
    lines = ["| with | " + " | ".join(types) + " |", "|---|" + "---:|" * len(types)]
    for row, is_of_row in ROWS.items():
        counts = [sum(is_of_row(run) and _type(run) == name for run in runs) for name in types]
        lines.append(f"| {row} | {' | '.join(map(str, counts))} |")
    return "\n".join(lines) + "\n"


def _type(keys: Keys) -> str:
    if keys.get("context_parallel_ulysses_size", 1) > 1:
        return "exchange of heads in pairs"
    return keys.get("context_parallel_type", "auto")


def main(argv: list[str] | None = None) -> int:
    command_line = CommandParser(description=__doc__)
    command_line.add_argument("--check", action="store_true", help="write nothing; exit with 1 if the page is old")
    options, page = command_line.parse_args(argv), ROOT / "docs" / "layouts.md"
    text = page.read_text()
    head, _, tail = text.partition(BEGIN)
    new = f"{head}{BEGIN}{table()}{END}{tail.partition(END)[2]}"
    if options.check and new != text:
        sys.stderr.write(f"{page} is out of date; run python tools/docs/layout_table.py\n")
        return 1
    if not options.check:
        page.write_text(new)
    return 0


if __name__ == "__main__":
    run_command(main)
