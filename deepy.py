#!/usr/bin/env python3
# PYTHON_ARGCOMPLETE_OK
"""Starts a script on all ranks, of this machine or of several: `python deepy.py train.py a.yml b.yml`."""

import logging
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from megatron.process import begin_process, exit_code, outlive_readers, run_command
from megatron.process.completion import is_completing, skip_word, typed_words

if TYPE_CHECKING:
    from megatron.neox_arguments import NeoXArgs
    from megatron.neox_arguments.reading.command_line import DeepyCommand


def hf_model_keys(name: str) -> Mapping[str, object]:
    """Returns the configuration keys of the HuggingFace model that `--hf-model` names."""
    from megatron.generation.from_huggingface import hf_model_keys

    return hf_model_keys(name)


def build_tokenizer(args: "NeoXArgs") -> object:
    """Builds the tokenizer of a configuration, for `deepy.py doctor`, which checks that this works."""
    from megatron.tokenizer import build_tokenizer

    return build_tokenizer(args)


def report_of_failed(args: "NeoXArgs") -> None:
    """Writes the report of `report: true` for a failed run, whose rank 0 may have ended before it could."""
    from megatron.launch.run import log_dir_of
    from megatron.operations.report import report_at_end
    from megatron.process.metrics_file import METRICS_FILE

    logs = log_dir_of(args)
    if (logs / METRICS_FILE).is_file():  # written by rank 0, which may be on another machine
        logging.basicConfig(level=logging.INFO, format="%(message)s")
        report_at_end(args, logs, logging.getLogger("deepy"))


def run_script(words: Sequence[str]) -> int:
    """Prints the words of a script, such as `tools/datasets/split.py`, and runs it in this process.

    Returns the exit code."""
    from megatron.launch import install_root

    print(f"$ python {shlex.join(words)}", flush=True)
    script, *arguments = words
    if script == "deepy.py":
        return main([str(install_root() / word) if word == "train.py" else word for word in arguments])
    return import_module(script.removesuffix(".py").replace("/", ".")).main(arguments) or 0


def carry_out(command: "DeepyCommand") -> int:
    """Starts the script of a parsed command line, or prints what is asked for. Returns the exit code."""
    from megatron.launch import dry_run, launch, set_arch_list
    from megatron.neox_arguments.reports.config_dump import print_config

    if command.print_config:
        print(print_config(command.args))
        return 0
    if command.print_schedule:
        from megatron.training.native.schedule_report import draw_schedule, schedule_lines

        print("\n".join(schedule_lines(command.args)))
        if command.schedule_picture is not None:
            draw_schedule(command.args, command.schedule_picture)
        return 0
    command.args.check_for(command.user_script)  # once, before ranks are started
    if command.dry_run:
        for line in dry_run(command.user_script, command.args, command.words, command.node_rank, command.hosts):
            print(line)
        return 0
    outlive_readers()
    if command.args.init_only and Path(command.user_script).name == "train.py":
        import train

        return train.main(command.args)
    message = set_arch_list(os.environ)
    if message:
        print(message, file=sys.stderr)
    code = launch(command.user_script, command.args, (), command.node_rank, command.hosts, command.quiet)
    if code and command.args.report and Path(command.user_script).name == "train.py":
        report_of_failed(command.args)
    return code


def main(argv: Sequence[str] | None = None) -> int:
    """argv: the words after `deepy.py`; None: those of this process."""
    if argv is None:
        argv = typed_words() if is_completing() else sys.argv[1:]
    from megatron.launch import install_root, process_info
    from megatron.launch.command import DEEPY
    from megatron.neox_arguments import UserError
    from megatron.neox_arguments.reading.command_line import parse_deepy

    try:
        if argv and argv[0] in DEEPY:
            skip_word()
        if argv[:1] == ["doctor"]:
            from megatron.launch.doctor import main as doctor

            return doctor(argv[1:], build_tokenizer)
        if argv[:1] == ["pipeline"]:
            from megatron.pipelines.command import main as pipeline

            return pipeline(argv[1:])
        if argv[:1] == ["sweep"]:
            from megatron.experiments.sweep_command import main as sweep

            return sweep(argv[1:])
        if argv[:1] == ["plan"]:
            if argv[1:2] != ["calibrate"]:  # measures the real device
                from megatron.planning.processes import prepare_forks

                prepare_forks()
            from megatron.planning.command import main as plan

            return plan(argv[1:], install_root())
        if argv[:1] == ["compare"]:
            from megatron.experiments.comparison.command import main as compare

            return compare(argv[1:])
        if argv[:1] == ["finetune"]:
            from megatron.finetuning.command import main as finetune

            return finetune(argv[1:], run_script, hf_model_keys)
        if argv[:1] == ["branch"]:
            from megatron.experiments.branch_command import main as branch

            return branch(argv[1:], install_root(), carry_out)
        if argv[:1] == ["chat"]:
            from megatron.generation.chat_command import main as chat

            return chat(argv[1:], lambda: process_info({}))
        command = parse_deepy(argv, hf_model_keys, install_root(), commands=tuple(DEEPY))
        if command.presets:
            print(
                f"deepy.py: no such files here; using presets: {', '.join(command.presets)}",
                file=sys.stderr,
            )
        return carry_out(command)
    except UserError as problem:
        sys.stderr.write(problem.error_lines("deepy.py"))
        return 1


if __name__ == "__main__":
    begin_process("deepy.py")
    run_command(lambda: exit_code(main()))
