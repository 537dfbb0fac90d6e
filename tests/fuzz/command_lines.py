"""Command lines of deepy.py and the scripts it starts."""

import json
from functools import cache
from pathlib import Path

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn

import deepy
from megatron.launch import install_root
from megatron.launch.command import DEEPY
from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.keys.declaration import keys_of
from megatron.neox_arguments.reading.command_line import parse_script
from megatron.planning import command as planning
from tests.fuzz.campaign import Kind, command
from tests.fuzz.cases import Case
from tests.fuzz.mutations import texts

_ROOT = Path(__file__).parents[2]
_LINES = (
    "train.py -d configs quickstart local_setup", "train.py configs/125M.yml configs/local_setup.yml --num_gpus 2",
    "--hostfile hosts --include a:2,3@b train.py configs/quickstart.yml",
    "--num_nodes 2 --node_rank 1 --master_addr 10.0.0.1 --include localhost:2,3 train.py configs/quickstart.yml",
    "generate.py -d configs quickstart text_generation -i prompts.txt -o out.jsonl", "eval.py configs/quickstart.yml "
    "--eval_tasks piqa --eval_limit 3", "train.py configs/quickstart.yml --hosts a:0,1 b=2 --node_rank 0",
    "train.py configs/quickstart.yml --set model_parallel_size=1 optimizer.params.lr=1e-3 fp16=null",
    "train.py configs/quickstart.yml --diff-config configs/quickstart.yml configs/125M.yml,configs/local_setup.yml",
    "train.py --help-config lr_*", "tools/serve.py configs/quickstart.yml --port 8000 --host ::1",
    "train.py --neox-args resolved.json", "train.py configs/quickstart.yml --print-schedule --iteration 3",
    "train.py configs/quickstart.yml --launcher slurm --max-restarts 2 --fp8 --adapter a=0.5 --wandb_group x",
)  # fmt: skip


@cache
def _settings() -> list[str]:
    return list(keys_of(NeoXArgs))


@st.composite
def _cases(draw: DrawFn) -> Case:
    words = draw(st.sampled_from(_LINES)).split()
    for _ in range(draw(st.integers(1, 3))):
        place = draw(st.integers(0, len(words)))
        match draw(st.sampled_from(["put", "insert", "drop", "double", "set", "swap"])):
            case "put" if place < len(words):
                words[place] = draw(texts)
            case "insert":
                words.insert(place, draw(texts))
            case "drop":
                del words[place : place + 1]
            case "double":
                words[place:place] = words[place : place + 2]
            case "set":
                words += ["--set", f"{draw(st.sampled_from(_settings()))}={draw(texts)}"]
            case "swap":
                words = words[place:] + words[:place]
    words = [word.replace("\0", "").encode(errors="surrogatepass").decode(errors="surrogateescape") for word in words]
    script = draw(st.sampled_from(["deepy", "deepy", "deepy", "train", "plan"]))
    return {f"{script}.json": json.dumps(words).encode(), "hosts": b"a slots=8\nb slots=8\n"}


def _run(folder: Path) -> None:
    (script,) = (name for name in ("deepy", "train", "plan") if (folder / f"{name}.json").exists())
    words = [
        str(folder / word) if word == "hosts" else word for word in json.loads((folder / f"{script}.json").read_bytes())
    ]
    if script == "deepy":
        if words[:1] and words[0] in DEEPY:
            words = words[1:]
        command(deepy.main, *words, "--dry-run")
    elif script == "train":
        command(lambda argv: print(parse_script(argv, "train.py", deepy.hf_model_keys)), *words[1:])
    else:
        command(lambda argv: planning.main(argv, install_root()), *words[1:], "--gpus", 8)


KIND = Kind("command_lines", _cases(), _run)
