"""Implements `demo_prompts`: writes a model's answers before and after training to `<save>/demo_outputs`."""

import html
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron.callbacks import Callback, Step, TrainingRun
from megatron.checkpointing import replace_file
from megatron.distributed import on_rank_zero, run_on_all_ranks
from megatron.generation.batching.requests import RequestError
from megatron.generation.prompts.chat import find_shared_template
from megatron.generation.prompts.files import Prompt, system_prompt
from megatron.generation.prompts.questions import Question, all_tokens, read_questions
from megatron.generation.samples import GeneratedSample, generate_samples
from megatron.generation.stopping import looks_for_stop
from megatron.neox_arguments import NeoXArgs
from megatron.process import look_for_stop

FOLDER, COMPARISON = "demo_outputs", "comparison.md"


def demo_questions(args: NeoXArgs) -> list[Question]:
    """Reads the questions in the file `demo_prompts`. Raises ConfigError if this file or the file of the
    system prompt cannot be read."""
    system = system_prompt(args)
    try:
        return read_questions(str(args.demo_prompts), args.chat, system)
    except RequestError as problem:
        raise args.error("demo_prompts", str(problem)) from problem


class Demos(Callback):
    """A callback of training that lets the model answer `demo_prompts` before and after training.

    All ranks construct it together.
    """

    def __init__(self, run: TrainingRun) -> None:
        """Reads and tokenizes the prompts. Raises ConfigError if a prompt is invalid or too long, or if a
        prompt is a conversation and no chat template is found."""
        self.run, args = run, run.args
        self.questions = on_rank_zero(run.groups, lambda: demo_questions(args))
        template = None
        if any(question.messages for question in self.questions):
            template = find_shared_template(args, run.tokenizer, run.groups, run.companion_files)
        positions = args.max_position_embeddings - (args.opt_pos_emb_offset if args.pos_emb == "learned" else 0)
        try:
            tokens = all_tokens(self.questions, run.tokenizer, template, positions - args.maximum_tokens)
        except RequestError as problem:
            raise args.error("demo_prompts", f"{args.demo_prompts}: {problem}") from problem
        self.prompts = [
            Prompt(question.text, prompt_tokens) for question, prompt_tokens in zip(self.questions, tokens, strict=True)
        ]
        self.stop_token_ids = template.stop_token_ids if template is not None else ()

    def on_validation_end(self, run: TrainingRun, step: Step) -> None:
        """Generates answers before the first and after the last step, and writes them to
        `<save>/demo_outputs`.

        Sampling follows the configuration keys of text generation, such as `temperature`. A resumed run reads
        the answers from before training from `step0.jsonl`. Raises StopRequested if a stop signal arrives
        while answers are generated.
        """
        if step.iteration not in (0, run.args.train_iters):
            return
        with run.watchdog.phase("answering demo_prompts"), run.inference() as model:
            run_on_all_ranks(run.groups, look_for_stop)
            ends = (*model.stop_token_ids, *self.stop_token_ids)
            samples = generate_samples(model, self.prompts, run.logger, ends, looks_for_stop(run, model))
        on_rank_zero(run.groups, lambda: self._write(step.iteration, samples))

    def _write(self, iteration: int, samples: Sequence[GeneratedSample]) -> None:
        folder = Path(self.run.args.save_dir or "") / FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        lines = [
            {
                **({"messages": list(question.messages)} if question.messages else {"prompt": question.text}),
                "answer": sample.text or "", "length": sample.length, "finished": sample.finished,
                "iteration": iteration,
            }
            for question, sample in zip(self.questions, samples, strict=True)
        ]  # fmt: skip
        file = folder / f"step{iteration}.jsonl"
        replace_file(file, "".join(json.dumps(line) + "\n" for line in lines).encode())
        self.run.logger.info(f"answers to {len(lines)} demo_prompts are in {file}")
        if iteration:
            earlier = _answers(folder / "step0.jsonl")
            earlier_answers = [earlier.get(_prompt_key(line)) for line in lines]
            replace_file(folder / COMPARISON, comparison(self.questions, earlier_answers, lines, iteration).encode())


def comparison(
    questions: Sequence[Question],
    earlier_answers: Sequence[str | None],
    lines: Sequence[Mapping[str, Any]],
    iteration: int,
) -> str:
    """Returns a Markdown page that shows, below each question, the answers before and after training.

    earlier_answers: the answer before training to each question; None for a question that was not asked then.
    lines: {"answer": text, ...} with the answer after training to each question.
    iteration: number of training steps.
    """
    parts = [f"# Answers before training and after {iteration} steps\n"]
    for number, (question, old, new) in enumerate(zip(questions, earlier_answers, lines, strict=True), 1):
        old = "(was not asked)" if old is None else old
        parts.append(
            f"## {number}. {_cell(question.text)}\n\n"
            f"| before | after {iteration} steps |\n|---|---|\n| {_cell(old)} | {_cell(new['answer'])} |\n"
        )
    return "\n".join(parts)


def _cell(text: str) -> str:
    """Returns `text` escaped for a cell of a Markdown table, so that all characters are shown as they are."""
    return "<br>".join(html.escape(text, quote=False).replace("|", "\\|").splitlines())


def _prompt_key(line: Mapping[str, Any]) -> str:
    """Returns the prompt or messages of a line of an answers file as a JSON string, to find the same question
    again."""
    return json.dumps(line.get("messages", line.get("prompt")), sort_keys=True)


def _answers(file: Path) -> dict[str, str]:
    """Returns {`_prompt_key` of the question: answer} for the lines of `file`; {} if there is no such
    file."""
    if not file.is_file():
        return {}
    return {_prompt_key(line): line["answer"] for line in map(json.loads, file.read_text().splitlines())}
