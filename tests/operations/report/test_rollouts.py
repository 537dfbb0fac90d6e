"""A page of a run that was trained with rewards: its curves, and the best and worst answers."""

import json
from pathlib import Path

from megatron.operations.report import write_report
from megatron.operations.report.rollout_rows import SHOWN, read_rollouts
from tests.operations.report.pages import titles
from tests.pool import run_ranks
from tests.rollouts.toy import whole_run, write_task


def test_a_page_shows_rewards_and_answers(tmp_path: Path) -> None:
    values = {**write_task(tmp_path), "save": str(tmp_path / "run"), "checkpoint_factor": 4}
    run_ranks(whole_run, 1, values)
    page = write_report([tmp_path / "run"])
    assert {
        "Rewards",
        "Length of answers",
        "Prompts that teach nothing",
        "Sampler and trainer",
        "Time of a step",
    } <= set(titles(page))
    lines = [json.loads(line) for line in (tmp_path / "run/logs/rollouts.jsonl").read_text().splitlines()]
    first = [line for line in lines if line["iteration"] == 1]
    shown = read_rollouts(tmp_path / "run/logs")
    assert [generation.iteration for generation in shown] == [1, 2, 3, 4]
    best, worst = shown[0].best, shown[0].worst
    assert best is not None and worst is not None
    assert best.reward == max(line["reward"] for line in first) and worst.reward == min(
        line["reward"] for line in first
    )
    assert best.completion in [line["completion"] for line in first]
    assert page.read_text().count('<td class="answer">') == 4 * 4, "prompt and answer, of the best and the worst"


def test_few_generations_of_many_and_damaged_lines(tmp_path: Path) -> None:
    def line(iteration: int, reward: float | None) -> str:
        answer = {"prompt": [{"role": "user", "content": "<b>"}], "completion": "x", "rewards": {"right": reward}}
        return json.dumps({"iteration": iteration, "generation": iteration, "reward": reward, **answer})

    text = "\n".join(line(i, None if i == 1 else i / 10) for i in range(1, 102) for _ in range(2))
    (tmp_path / "rollouts.jsonl").write_text(text + "\n" + '{"iteration": 7, "rew')
    shown = read_rollouts(tmp_path)
    assert len(shown) == SHOWN and shown[0].iteration == 1 and shown[-1].iteration == 101
    assert shown[0].best is None and shown[0].mean is None and shown[0].answers == 2
    assert (
        shown[-1].best is not None and shown[-1].best.prompt == "user: <b>" and shown[-1].best.rewards == "right 10.1"
    )
    assert read_rollouts(tmp_path / "nothing") == []
