"""Pages of runs with experts, whose load is a map, and of runs with rewards: best and worst answers."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron.operations.report import write_report
from megatron.operations.report.figures import palette
from megatron.operations.report.router_loads import CODES, LoadMap, RouterLoad, code_of, encode, maps_of, read_load
from megatron.operations.report.run_data import MAX_GENERATIONS, read_rollouts
from megatron.process.run_files import Problems
from tests.methods.reinforcement.toy import full_run, write_task
from tests.operations.report.pages import figures, rows_of, titles, write_run
from tests.pool import run_ranks

NAMES = ("aux_loss", "z_loss", "entropy", "dropped", "max_load", "idle_experts")


def with_load(save: Path, loads: dict[int, Any], layers: list[int], extra_text: str = "") -> Path:
    """A run of as many steps, with a line of `router_load.jsonl` at each iteration."""
    write_run(save, rows_of(max(loads), lambda step: {f"train/moe_{name}": 0.25 * step for name in NAMES}))
    lines = [json.dumps({"iteration": i, "layers": layers, "load": load, "run_id": "a"}) for i, load in loads.items()]
    (save / "logs" / "router_load.jsonl").write_text("\n".join(lines) + "\n" + extra_text)
    return save


def maps(page: Path) -> list[Any]:
    return [figure for figure in figures(page) if figure.name.startswith("load-")]


def decoded(codes: Any) -> Any:
    steps = (codes.astype(np.float64) - 1) / (CODES - 1) * 6 - 3
    return np.where(codes == 0, 0.0, 2.0**steps)


def mapped(iterations: list[int]) -> LoadMap:
    """A map of two experts whose loads say which line it is: its two digits to base 200."""
    digits = np.stack(np.divmod(np.arange(len(iterations)), 200), 1)
    load = (2.0 ** (digits / (CODES - 1) * 6 - 3)).astype(np.float32)
    (load_map,) = maps_of([RouterLoad((2,), np.array(iterations), load[:, None, :])])
    return load_map


def lines_of(load_map: LoadMap) -> list[int]:
    high, low = load_map.codes[0].astype(int) - 1
    return (200 * high + low).tolist()


def test_a_page_shows_every_layer_expert_and_line(tmp_path: Path) -> None:
    loads = {step: [[0.5, 1.5, 1.0], [3.0 - step / 10, 0.0, step / 10]] for step in range(2, 21, 2)}
    page = write_report([with_load(tmp_path / "a", loads, [3, 7])])
    assert {"Load-balancing loss", "Router z-loss", "Router entropy", "Busiest expert", "Experts without a token",
            "Dropped choices"} <= set(titles(page))  # fmt: skip
    (figure,) = maps(page)
    assert figure.x_range.id == figures(page)[0].x_range.id, "zoomed with the curves"
    assert [(part.name, part.visible) for part in figure.renderers] == [("layer 3", True), ("layer 7", False)]
    for layer, part in enumerate(figure.renderers):
        data = part.data_source.data
        (image,) = data["image"]
        expected = np.array([loads[step][layer] for step in loads]).T
        assert np.allclose(decoded(image), np.where(expected > 0, np.clip(expected, 1 / 8, 8), 0), rtol=0.01)
        assert (data["x"], data["y"], data["dw"], data["dh"]) == ([1.0], [-0.5], [20.0], [3]), "a column a line"
    assert figure.x_range.start <= 1.0 and figure.x_range.end >= 21.0
    text = page.read_text()
    assert "10 logged steps; 3 experts." in text
    assert '<option value="layer 7">layer 7 (1 of 3 without a token at the end)</option>' in text
    assert '<option value="layer 3">layer 3</option>' in text


def test_colours_and_columns_of_the_map() -> None:
    codes = encode(np.array([0.0, 1e-3, 0.125, 1.0, 8.0, 100.0], np.float32)).tolist()
    assert codes[0] == 0 and codes[1:3] == [1, 1] and codes[4:] == [CODES, CODES] and code_of(1.0) == (CODES + 1) / 2
    values = np.geomspace(1 / 8, 8, 1000).astype(np.float32)
    assert np.allclose(decoded(encode(values)), values, rtol=0.01)
    colors = palette()
    brightness = [sum(int(color[i : i + 2], 16) for i in (1, 3, 5)) for color in colors]
    assert len(colors) == CODES and min(brightness) > 150, "black is for experts without a token"
    assert brightness[CODES // 2] >= max(brightness) - 2, "the mean is pale"
    assert lines_of(mapped([5])) == [0]
    assert lines_of(mapped([10, 20, 30])) == [0, 1, 2]
    gap = mapped([10, 20, 50, 60])
    assert lines_of(gap) == [0, 1, 1, 1, 2, 3] and (gap.first_iteration, gap.step) == (10, 10.0)
    closer = mapped([10, 20, 25, 30])
    assert lines_of(closer) == [0, 0, 1, 2, 3] and closer.step == 5.0
    long_map = mapped(list(range(10, 4010, 10)) + [4015])
    assert long_map.codes.shape[-1] == 400 and long_map.lines == 401
    assert long_map.first_iteration + 399 * long_map.step == pytest.approx(4015) and lines_of(long_map)[-1] == 400


@pytest.mark.more
def test_a_page_of_many_layers_and_experts_is_light(tmp_path: Path) -> None:
    layers, experts, lines = list(range(5, 63)), 256, 150
    dice = np.random.default_rng(0)
    save = write_run(tmp_path / "a", rows_of(lines))
    with (save / "logs" / "router_load.jsonl").open("w") as file:
        for step in range(1, lines + 1):
            load = dice.lognormal(0.0, 1.0, (len(layers), experts)).round(2)
            file.write(json.dumps({"iteration": 10 * step, "layers": layers, "load": load.tolist()}) + "\n")
    page = write_report([save])
    assert page.stat().st_size < 5e6
    assert "101 of 150 logged steps, evenly spaced; 256 experts" in page.read_text()
    assert page.read_text().count("<option") == len(layers)
    (figure,) = maps(page)
    assert len(figure.renderers) == len(layers) and figure.renderers[0].data_source.data["image"][0].shape == (256, 101)


def test_what_is_no_line_is_passed_over(tmp_path: Path) -> None:
    assert read_load(tmp_path, Problems()) is None
    file = tmp_path / "router_load.jsonl"
    file.write_text('{"iteration": 1}\n{"iteration": 2, "layers": [2], "load": [[1], [2]]}\n')
    assert read_load(tmp_path, Problems()) is None
    layers_and_loads = (([2], [[1.0, 1.0]]), ([2, 3], [[1.0], [1.0]]), ([2], [[2.0, 0.0]]), ([2], [["a", 0.0]]))
    rows = [{"iteration": i, "layers": layers, "load": load} for i, (layers, load) in enumerate(layers_and_loads, 1)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"iteration": 5, "lay')
    load = read_load(tmp_path, Problems())
    assert load.iterations.tolist() == [1, 3]
    assert load.load.tolist() == [[[1.0, 1.0]], [[2.0, 0.0]]]


@pytest.mark.more
def test_each_of_several_runs_has_its_map(tmp_path: Path) -> None:
    first_run = with_load(tmp_path / "one", {1: [[1.0, 1.0]], 2: [[2.0, 0.0]]}, [2], "{")
    second_run = with_load(tmp_path / "two", {5: [[1.0, 1.0, 1.0]]}, [2])
    dense = write_run(tmp_path / "dense", rows_of(3))
    page = write_report([first_run, dense, second_run], tmp_path / "all.html")
    text = page.read_text()
    assert len(maps(page)) == 2 and "Load of experts: one" in text and "Load of experts: two" in text
    assert "data-map=" not in text.replace('"[data-map]"', ""), "nothing to choose"
    assert "2 logged steps; 2 experts, layer 2 (1 of 2 without a token at the end)." in text
    assert len(maps(write_report([dense]))) == 0


def test_a_page_shows_rewards_and_answers(tmp_path: Path) -> None:
    run_ranks(full_run, 1, {**write_task(tmp_path), "save": str(tmp_path / "run"), "checkpoint_factor": 4})
    page = write_report([tmp_path / "run"])
    expected_titles = {
        "Rewards",
        "Length of answers",
        "Prompts that teach nothing",
        "Sampler and trainer",
        "Time of a step",
    }
    assert expected_titles <= set(titles(page))
    lines = [json.loads(line) for line in (tmp_path / "run/logs/rollouts.jsonl").read_text().splitlines()]
    first_step = [line for line in lines if line["iteration"] == 1]
    generations = read_rollouts(tmp_path / "run/logs", Problems())
    assert [generation.iteration for generation in generations] == [1, 2, 3, 4]
    best, worst, rewards = generations[0].best, generations[0].worst, [line["reward"] for line in first_step]
    assert (best.reward, worst.reward) == (max(rewards), min(rewards))
    assert best.completion in [line["completion"] for line in first_step]
    assert page.read_text().count('<td class="answer">') == 4 * 4, "prompt and answer, of the best and the worst"


def test_few_generations_of_many_and_damaged_lines(tmp_path: Path) -> None:
    def line(iteration: int, reward: float | None) -> str:
        answer = {"prompt": [{"role": "user", "content": "<b>"}], "completion": "x", "rewards": {"right": reward}}
        return json.dumps({"iteration": iteration, "generation": iteration, "reward": reward, **answer})

    text = "\n".join(line(i, None if i == 1 else i / 10) for i in range(1, 102) for _ in range(2))
    (tmp_path / "rollouts.jsonl").write_text(text + "\n" + '{"iteration": 7, "rew')
    generations = read_rollouts(tmp_path, Problems())
    assert len(generations) == MAX_GENERATIONS and generations[0].iteration == 1 and generations[-1].iteration == 101
    assert generations[0].best is None and generations[0].mean is None and generations[0].answers == 2
    best = generations[-1].best
    assert (best.prompt, best.rewards) == ("user: <b>", "right 10.1")
    assert read_rollouts(tmp_path / "nothing", Problems()) == []
