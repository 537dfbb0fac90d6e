"""Finding tasks: shipped, own, of lm-eval; what cannot be fetched is told."""

import http.server
import re
import sys
import threading
from pathlib import Path
from typing import Any, ClassVar

import lm_eval.tasks
import pytest
from huggingface_hub import constants
from lm_eval.tasks import TaskManager

from megatron.evaluation import task_loading
from megatron.evaluation.results import LoadedTasks
from megatron.evaluation.task_loading import find_in_hub_or_cache, load_tasks
from megatron.neox_arguments import ConfigError, NeoXArgs, require_lm_eval
from megatron.tokenizer import CharLevelTokenizer
from tests.evaluation.runs import make_tasks
from tests.marks import with_more

MODEL = {"num_layers": 2, "hidden_size": 8, "num_attention_heads": 2, "seq_length": 8, "max_position_embeddings": 8,
         "tokenizer_type": "CharLevelTokenizer"}  # fmt: skip


def find(*tasks: str, **values) -> LoadedTasks:
    return load_tasks(NeoXArgs.from_dict({**MODEL, "eval_tasks": list(tasks), **values}), CharLevelTokenizer())


@pytest.fixture(scope="module")
def own_folder(tmp_path_factory) -> str:
    return make_tasks(tmp_path_factory.mktemp("tasks"))


def test_shipped_tasks_need_no_network_and_no_working_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    loaded_tasks = find("shipped", "shipped_choice")
    tasks = {name: list(loaded["tasks"]) for name, loaded in loaded_tasks.tasks.items()}
    shipped = ("shipped_arithmetic", "shipped_choice", "shipped_cloze", "shipped_perplexity")
    assert tasks == {name: [name] for name in shipped}, "a tag is its tasks, each once"
    assert loaded_tasks.failures == {}
    assert min(len(loaded_tasks.tasks[name]["tasks"][name].test_docs()) for name in shipped) >= 10
    choice = loaded_tasks.tasks["shipped_choice"]["tasks"]["shipped_choice"].test_docs()
    assert {row["answer"] for row in choice} == {0, 1, 2, 3}, "no place of the right answer can be learned"


def test_own_tasks_by_name_pattern_group_and_file(own_folder):
    loaded_tasks = find("own_g*", "own_text", f"{own_folder}/own_choice.yaml", eval_include_path=own_folder)
    assert {name: list(loaded["tasks"]) for name, loaded in loaded_tasks.tasks.items()} == {
        "own_group": ["own_choice"], "own_text": ["own_text"], f"{own_folder}/own_choice.yaml": ["own_choice"],
    }  # fmt: skip
    assert list(loaded_tasks.tasks["own_group"]["groups"]) == ["own_group"]
    few_shot = find("own_choice", eval_include_path=[own_folder], eval_num_fewshot=3)
    assert few_shot.tasks["own_choice"]["tasks"]["own_choice"].config.num_fewshot == 3


def test_folders_that_the_fork_finds_by_itself(tmp_path, monkeypatch):
    """Folders next to the package, as `lm_eval_tasks/deep_ignorance` there, come before the working folder;
    a named folder comes before both."""
    package, working_folder, named_folder = (tmp_path / name for name in ("package", "here", "named"))
    (tmp_path / "rows.jsonl").write_text('{"a": 1}\n')
    folders = [
        package / "lm_eval_tasks/deep_ignorance/wmdp",
        working_folder / "lm_eval_tasks",
        working_folder / "eval_tasks",
        named_folder,
    ]
    for number, folder in enumerate(folders):
        folder.mkdir(parents=True)
        for task in ("wmdp", f"only_{number}"):
            (folder / f"{task}.yaml").write_text(
                f"task: {task}\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: {tmp_path}/rows.jsonl}}}}\n"
                "test_split: test\noutput_type: multiple_choice\n"
                f"doc_to_text: of folder {number}\ndoc_to_choice: [a, b]\ndoc_to_target: 0\nmetadata: {{version: 1}}\n"
            )
    (package / "megatron/evaluation").mkdir(parents=True)
    monkeypatch.setattr(task_loading, "SHIPPED", package / "megatron/evaluation/tasks")
    monkeypatch.chdir(working_folder)

    def text_of(name: str, **values: Any) -> str:
        return find(name, **values).tasks[name]["tasks"][name].config.doc_to_text

    assert text_of("wmdp") == "of folder 0" and text_of("wmdp", eval_include_path=str(named_folder)) == "of folder 3"
    assert [text_of(f"only_{number}") for number in range(3)] == [f"of folder {number}" for number in range(3)]
    args = NeoXArgs.from_dict({**MODEL, "eval_include_path": str(named_folder)})
    present, absent = task_loading.searched_folders(args).split("; ")
    order = [
        str(named_folder),
        f"{package}/lm_eval_tasks",
        f"{working_folder}/lm_eval_tasks",
        f"{working_folder}/eval_tasks",
    ]
    assert [place for place in re.findall(r"[\w/-]+", present) if place.startswith(str(tmp_path))] == order
    assert f"{package}/eval_tasks" in absent


@pytest.mark.parametrize("several", with_more([True, False], product=[False]))
def test_names_of_lm_eval_tags_and_what_is_missing_offline(several, own_folder, tmp_path, monkeypatch):
    """One look through lm-eval's own tasks, which are thousands, or through some of its folders alone."""
    (tmp_path / "broken.yaml").write_text("task: broken\n  doc_to_text: [")
    managers: list[TaskManager] = []
    lm_eval_folder = Path(lm_eval.tasks.__file__).parent

    def make_once(**wishes):
        if not wishes.get("include_defaults", True):
            return TaskManager(**wishes)
        if several:
            wishes["include_path"] = [*wishes["include_path"],
                                      *(str(lm_eval_folder / name) for name in ("lambada", "hellaswag"))]  # fmt: skip
        if not managers:
            managers.append(TaskManager(**wishes, **({"include_defaults": False} if several else {})))
        return managers[0]

    monkeypatch.setattr(task_loading, "TaskManager", make_once)
    with pytest.raises(ConfigError) as refused:
        find("lambada", "hellaswag", "helaswag", "own_group", eval_include_path=[own_folder, str(tmp_path)])
    task_problem, file_problem = refused.value.problems
    assert re.search("eval_tasks: .*helaswag; .*hellaswag", task_problem) and own_folder in task_problem, (
        "that is not an error of its own"
    )
    assert f"{tmp_path}/broken.yaml: " in file_problem and "line 2" in file_problem
    loaded_tasks = find("lambada", "hellaswag", "own_group", eval_include_path=own_folder)
    assert list(loaded_tasks.tasks) == ["own_group"]
    assert "(EleutherAI/lambada_openai default)" in loaded_tasks.failures["lambada_openai"]
    assert "(cimec/lambada)" in loaded_tasks.failures["lambada_standard"], "each of a tag by itself"
    assert "Rowan/hellaswag" in loaded_tasks.failures["hellaswag"] and "HF_HOME" in loaded_tasks.failures["hellaswag"]


class Hub(http.server.BaseHTTPRequestHandler):
    """Answers the second request, that there is no such thing, and hangs up on all others."""

    requested_paths: ClassVar[list[str]] = []

    def do_HEAD(self) -> None:
        Hub.requested_paths.append(self.path)
        self.close_connection = True
        if len(Hub.requested_paths) == 2:
            self.send_error(404)

    do_GET = do_HEAD

    def log_message(self, *args: object) -> None:
        pass


def test_without_a_network_tasks_of_the_hub_end_at_once(tmp_path, monkeypatch, own_folder):
    """With a network, the Hub is asked, even if it fails once."""
    (tmp_path / "far.yaml").write_text(
        "task: far\ndataset_path: nobody/nothing\noutput_type: multiple_choice\ntest_split: test\n"
        "doc_to_text: a\ndoc_to_choice: [a, b]\ndoc_to_target: 0\nmetadata: {version: 1}\n"
    )
    log_lines: list[str] = []

    def look(*tasks: str) -> LoadedTasks:
        folders = [str(tmp_path), own_folder]
        args = NeoXArgs.from_dict({**MODEL, "eval_tasks": list(tasks), "eval_include_path": folders})
        return load_tasks(args, CharLevelTokenizer(), log_lines.append)

    with http.server.HTTPServer(("127.0.0.1", 0), Hub) as server:
        endpoint = f"http://127.0.0.1:{server.server_port}"
        monkeypatch.setattr(constants, "ENDPOINT", endpoint)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with find_in_hub_or_cache(log_lines.append):
            assert len(Hub.requested_paths) == 2 and not constants.HF_HUB_OFFLINE and log_lines == []
        loaded_tasks = look("far", "own_text")
        assert Hub.requested_paths == ["/"] * 4, "two tries, and none of the data"
        server.shutdown()
    assert list(loaded_tasks.tasks) == ["own_text"] and "nobody/nothing" in loaded_tasks.failures["far"]
    assert len(log_lines) == 1 and log_lines[0].startswith(f"{endpoint} does not answer (")
    assert not constants.HF_HUB_OFFLINE, "only while tasks are loaded"
    look("own_text", "shipped_choice")
    assert len(log_lines) == 1, "these need no Hub"


def test_folders_and_prompts_that_are_not_there_are_refused(tmp_path):
    (tmp_path / "broken.yaml").write_text("task: broken\n  doc_to_text: [")
    values: dict[str, Any]
    for tasks, values, facts in (
        ([], {"eval_include_path": f"{tmp_path}/nowhere"}, "eval_include_path: .*/nowhere: no such folder"),
        (["gone.yaml"], {}, "eval_tasks: gone.yaml: no such file"),
        ([f"{tmp_path}/broken.yaml"], {}, "eval_tasks: .*/broken.yaml: .*line 2"),
        ([], {"eval_system_prompt_file": f"{tmp_path}/nothing"}, "eval_system_prompt_file: .*/nothing: "),
        ([], {"eval_limit": 2.5}, "eval_limit: .* 2.5"),
    ):
        with pytest.raises(ConfigError, match=facts):
            find("shipped_choice", *tasks, **values)


def test_without_lm_eval_a_run_that_asks_for_tasks_is_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    args = NeoXArgs.from_dict({**MODEL, "eval_tasks": ["piqa"]})
    with pytest.raises(ConfigError, match=r"eval_tasks: .*lm-eval.*neox\[eval\]"):
        require_lm_eval(args)
    require_lm_eval(NeoXArgs.from_dict(MODEL))
