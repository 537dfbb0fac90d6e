"""`${NAME}` in files, and DeepSpeed's configuration file."""

import json
import re

import pytest

from megatron.neox_arguments import ConfigError, NeoXArgs, load
from tests.neox_arguments.conftest import MODEL as MODEL_KEYS
from tests.neox_arguments.conftest import TEXT, all_say

MODEL = TEXT.replace("num_layers: 2\n", "")
FROM_FILE = TEXT + "deepspeed_config_file: ds.json\n"


def test_values_come_from_the_environment_or_their_default(write, monkeypatch):
    for name, value in (("LAYERS", "3"), ("LEARNING_RATE", "3e-4"), ("EMPTY", "")):
        monkeypatch.setenv(name, value)
    text = MODEL + (
        "num_layers: ${LAYERS}\n"
        "optimizer: {type: Adam, params: {lr: ${LEARNING_RATE}}}   # not ${UNSET}\n"
        'data_path: "${DATA_DIR:-/data}/text_document"\n'
        "# ${UNSET}\n"
        "train_iters: ${EPOCHS:-12}\n"
        "log_dir: ${EMPTY:-logs}\n"
        "split: ${SPLIT:-90, 5, 5}\n"
        "save: ${OUTPUT_DIR:-out}/${LAYERS}\ncheckpoint_factor: 5\n"
    )
    args = load(write(a=text))
    assert (args.num_layers, args.lr, args.train_iters, args.split) == (3, 3e-4, 12, "90, 5, 5")
    assert (args.data_path, args.save, args.log_dir) == ("/data/text_document", "out/3", "logs")
    assert args.origin("train_iters") == "a.yml:9"
    monkeypatch.setenv("LAYERS", "4")
    assert NeoXArgs.from_json(args.to_json()).num_layers == 3, "ranks get what was read, not their own environment"


def test_json_files_take_them_too(write, monkeypatch):
    monkeypatch.setenv("EPOCHS", "7")
    text = json.dumps(MODEL_KEYS | {"save": "${OUT:-x}", "checkpoint_factor": 1})
    args = load(write(a__json=text.replace("{", '{"train_iters": ${EPOCHS},', 1)))
    assert (args.train_iters, args.save) == (7, "x")


def test_a_name_that_is_not_set_is_told_with_its_line(write, monkeypatch):
    with pytest.raises(ConfigError) as refused:
        load(write(a=MODEL + "num_layers: 2\nseed: ${NOT_SET_ANYWHERE}\nlog_dir: ${HOME-x}\n"))
    facts = ("a.yml:6: ${NOT_SET_ANYWHERE}: set ${NOT_SET_ANYWHERE:-default}", "a.yml:7: ${HOME-x}: ${NAME:-default}")
    assert all_say(refused.value.problems, facts)


def test_the_key_says_what_a_value_is(write, monkeypatch):
    """Quoted or not, in flow style or not, a number for a number and text for text."""
    for name, value in (("RUN", "123"), ("LR", "1e-4"), ("WEIGHTS", "[1, 2]"), ("FOLDER", "/data: a # b")):
        monkeypatch.setenv(name, value)
    text = MODEL + (
        "num_layers: 2\nwandb_run_name: ${RUN}\n"
        'optimizer: {"type": "Adam", "params": {"lr": "${LR}", "betas": [0.9, "${BETA:-0.95}"]}}\n'
        'train_data_paths: ["${FOLDER}/a", b]\nvalid_data_paths: [a]\ntest_data_paths: [a]\n'
        "train_data_weights: ${WEIGHTS}\nuse_wandb: ${WANDB:-false}\n"
    )
    args = load(write(a=text))
    assert (args.wandb_run_name, args.lr, args.use_wandb) == ("123", 1e-4, False)
    assert args.optimizer["params"]["betas"] == (0.9, 0.95) and args.train_data_weights == (1.0, 2.0)
    assert args.train_data_paths == ("/data: a # b/a", "b")
    monkeypatch.delenv("LR")
    assert NeoXArgs.from_json(args.to_json()) == args


DEEPSPEED = """{
 "train_batch_size": "auto",
 "gradient_clipping": 0.5,
 "zero_optimization": {
  "stage": 1,
  "overlap_comm": true
 },
 "aio": {"block_size": 1048576}
}
"""


def test_keys_of_a_deepspeed_file_become_ours(write):
    args = load(write(a=FROM_FILE, ds__json=DEEPSPEED)[:1])
    assert (args.gradient_clipping, args.zero_stage, args.train_batch_size) == (0.5, 1, None)
    assert args.origin("gradient_clipping") == "ds.json:3" and args.origin("zero_optimization.stage") == "ds.json:5"
    assert args.deepspeed_extra_args == {"aio": {"block_size": 1048576}}
    assert args.config_files["ds.json"] == DEEPSPEED
    assert NeoXArgs.from_json(args.to_json()) == args


def test_a_contradiction_names_both_places(write):
    with pytest.raises(ConfigError) as refused:
        load(write(a=FROM_FILE + "gradient_clipping: 1.0\n", ds__json=DEEPSPEED)[:1])
    assert all_say(refused.value.problems, ("ds.json:3: gradient_clipping: 0.5 a.yml:7 1.0",))
    assert load(write(a=FROM_FILE + "gradient_clipping: 0.5\n", ds__json=DEEPSPEED)[:1]).gradient_clipping == 0.5
    overridden = load(write(a=FROM_FILE, ds__json=DEEPSPEED)[:1], ["gradient_clipping=0.7"])
    assert overridden.gradient_clipping == 0.7, "an override comes last of all"


def test_what_a_contradiction_advises_mends_it(write):
    """`--set fp16=null`, where the section is the DeepSpeed file's; a null of one name in a section too."""
    files = write(a=FROM_FILE + "precision: bfloat16\n", ds__json='{"fp16": {"enabled": true}}')[:1]
    with pytest.raises(ConfigError) as refused:
        load(files)
    (problem,) = refused.value.problems
    advice = re.search(r"--set (\S+)$", problem)
    assert advice is not None and load(files, [advice[1]]).params_dtype == "bf16"
    args = load(write(a=FROM_FILE, ds__json=DEEPSPEED)[:1], ["zero_optimization.stage=null", "gradient_clipping=null"])
    assert args.zero_stage == 0 and args.zero_optimization["overlap_comm"] and args.gradient_clipping == 1.0


def test_sections_are_merged_key_by_key(write):
    text = FROM_FILE + "zero_optimization: {{reduce_bucket_size: 5, stage: {}}}\n"
    args = load(write(a=text.format(1), ds__json=DEEPSPEED)[:1])
    assert args.zero_optimization["overlap_comm"] and args.zero_optimization["reduce_bucket_size"] == 5
    with pytest.raises(ConfigError, match=r"^ds.json:5: zero_optimization.stage: 1.*a.yml:7.*2"):
        load(write(a=text.format(2), ds__json=DEEPSPEED)[:1])


def test_bad_deepspeed_files_are_refused_with_their_place(write):
    with pytest.raises(ConfigError, match=r"^a.yml:6: deepspeed_config_file: ds.json: no .*file$"):
        load(write(a=FROM_FILE))
    broken = json.dumps(json.loads(DEEPSPEED) | {"zero_optimization": {"stage": 7}}, indent=1)
    with pytest.raises(ConfigError, match=r"^ds.json:5: zero_optimization.stage: expected.* 0 .*7"):
        load(write(a=FROM_FILE, ds__json=broken)[:1])
