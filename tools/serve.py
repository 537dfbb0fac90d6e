#!/usr/bin/env python
"""Answer OpenAI's API with a model: `python tools/serve.py -d configs a.yml --port 8000`, or on several ranks
`python deepy.py tools/serve.py a.yml`; `--hf-model DIR` takes a HuggingFace model as it is."""

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
    """Run the server on this rank; returns the exit code."""
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
    """Returns the configuration keys that `--hf-model` sets."""
    from megatron.generation.from_huggingface import hf_model_keys

    return hf_model_keys(name)


if __name__ == "__main__":
    begin_process("serve.py")
    run_command(lambda: end_process(main()))
