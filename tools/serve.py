#!/usr/bin/env python
"""Serves a model over HTTP with OpenAI's API.

    python tools/serve.py -d configs a.yml --port 8000      # on one rank
    python deepy.py tools/serve.py a.yml                    # on several ranks

With `--hf-model DIR` it serves a HuggingFace model without a configuration."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.process import (  # noqa: E402
    begin_process,
    end_process,
    outlive_readers,
    run_command,
    show_stacks_on_signal,
)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the server on this rank until it is stopped. Returns 0, or 1 after an error."""
    from megatron.launch import enter

    show_stacks_on_signal()  # before anything slow is imported
    from megatron.neox_arguments import UserError, parse_script

    try:
        args = parse_script(argv, "serve.py", hf_model_keys).check_serving()
        outlive_readers()
        process = enter(args)
        from megatron.generation.serving import serve

        serve(args, process)
    except UserError as problem:
        sys.stderr.write(problem.error_lines("serve.py"))
        return 1
    return 0


def hf_model_keys(name: str) -> Mapping[str, object]:
    """Returns the configuration keys of the HuggingFace model that `--hf-model` names."""
    from megatron.generation.from_huggingface import hf_model_keys

    return hf_model_keys(name)


if __name__ == "__main__":
    begin_process("serve.py")
    run_command(lambda: end_process(main()))
