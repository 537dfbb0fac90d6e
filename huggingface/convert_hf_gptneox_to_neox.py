"""Converts a HuggingFace model to a checkpoint, with Transformer-Engine's names of weights by default.

    python huggingface/convert_hf_gptneox_to_neox.py --hf-model EleutherAI/pythia-70m --iteration 0

It does the same as tools/ckpts/convert_hf_to_neox.py --transformer-engine --save-tokenizer, under the name of
this command in the geodesic fork. --no-transformer-engine writes GPT-NeoX's names.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.process import run_command  # noqa: E402
from tools.ckpts.convert_hf_to_neox import run  # noqa: E402


def main(argv: Sequence[str] | None = None) -> None:
    run("convert_hf_gptneox_to_neox.py", argv, "te")


if __name__ == "__main__":
    run_command(main)
