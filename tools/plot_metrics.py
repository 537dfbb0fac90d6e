"""Plots the losses in a run's metrics.jsonl over the tokens seen, and prints the first and last validation
loss.

For unlearning, it also plots and prints the losses on texts to forget and to retain.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.operations.loss_plot import plot, summary  # noqa: E402
from megatron.process import run_command  # noqa: E402
from megatron.process.command_parser import CommandParser  # noqa: E402
from megatron.process.metrics_file import read_metrics  # noqa: E402
from megatron.process.run_files import Problems  # noqa: E402


def main() -> int:
    parser = CommandParser(description=__doc__)
    parser.add_argument("metrics", type=Path, help="metrics.jsonl of a run, in its log folder")
    parser.add_argument("--output", type=Path, help="picture to write (default: loss.png beside metrics.jsonl)")
    options = parser.parse_args()
    try:
        rows = list(read_metrics(options.metrics, problems := Problems()))
    except OSError as problem:
        sys.stderr.write(f"plot_metrics.py: {problem}\n")
        return 1
    for line in problems.lines():
        sys.stderr.write(f"plot_metrics.py: warning: {line}\n")
    output = options.output or options.metrics.with_name("loss.png")
    plot(rows, output)
    print(f"{summary(rows)}; plot: {output}")
    return 0


if __name__ == "__main__":
    run_command(main)
