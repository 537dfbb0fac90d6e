"""`${NAME}` in files, and DeepSpeed's configuration file."""

import json

import pytest

from megatron.neox_arguments import ConfigError, NeoXArgs, load

MODEL = "hidden_size: 64\nnum_attention_heads: 4\nseq_length: 32\nmax_position_embeddings: 32\n"


def test_values_come_from_the_environment_or_their_default(write, monkeypatch):
    monkeypatch.setenv("LAYERS", "3")
    monkeypatch.setenv("LEARNING_RATE", "3e-4")
    monkeypatch.setenv("EMPTY", "")
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
    text = '{"train_iters": ${EPOCHS}, "num_layers": 2, "save": "${OUT:-x}", "checkpoint_factor": 1,\n'
    text += '"hidden_size": 64, "num_attention_heads": 4, "seq_length": 8, "max_position_embeddings": 8}'
    args = load(write(a__json=text))
    assert (args.train_iters, args.save) == (7, "x")


def test_a_name_that_is_not_set_is_told_with_its_line(write, monkeypatch):
    with pytest.raises(ConfigError) as refused:
        load(write(a=MODEL + "num_layers: 2\nseed: ${NOT_SET_ANYWHERE}\nlog_dir: ${HOME-x}\n"))
    assert refused.value.problems == (
        "a.yml:6: ${NOT_SET_ANYWHERE}: NOT_SET_ANYWHERE is not set in the environment, or empty; export it, or write "
        "${NOT_SET_ANYWHERE:-default}",
        "a.yml:7: ${HOME-x}: only ${NAME} and ${NAME:-default} are filled in",
    )


def test_the_key_says_what_a_value_is(write, monkeypatch):
    """Quoted or not, in flow style or not, a number for a number and text for text."""
    monkeypatch.setenv("RUN", "123")
    monkeypatch.setenv("LR", "1e-4")
    monkeypatch.setenv("WEIGHTS", "[1, 2]")
    monkeypatch.setenv("FOLDER", "/data: a # b")
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
    files = write(a=MODEL + "num_layers: 2\ndeepspeed_config_file: ds.json\n", ds__json=DEEPSPEED)
    args = load(files[:1])
    assert (args.gradient_clipping, args.zero_stage, args.train_batch_size) == (0.5, 1, None)
    assert args.origin("gradient_clipping") == "ds.json:3" and args.origin("zero_optimization.stage") == "ds.json:5"
    assert args.deepspeed_extra_args == {"aio": {"block_size": 1048576}}
    assert args.config_files["ds.json"] == DEEPSPEED
    assert NeoXArgs.from_json(args.to_json()) == args


def test_a_contradiction_names_both_places(write):
    text = MODEL + "num_layers: 2\ndeepspeed_config_file: ds.json\ngradient_clipping: 1.0\n"
    with pytest.raises(ConfigError) as refused:
        load(write(a=text, ds__json=DEEPSPEED)[:1])
    assert refused.value.problems == ("ds.json:3: gradient_clipping: 0.5, but a.yml:7 says 1.0; keep one of them",)
    assert load(write(a=text.replace("1.0", "0.5"), ds__json=DEEPSPEED)[:1]).gradient_clipping == 0.5
    again = load(
        write(a=text.replace("gradient_clipping: 1.0", "seed: 1"), ds__json=DEEPSPEED)[:1], ["gradient_clipping=0.7"]
    )
    assert again.gradient_clipping == 0.7, "an override comes last of all"


def test_sections_are_merged_key_by_key(write):
    text = (
        MODEL
        + "num_layers: 2\ndeepspeed_config_file: ds.json\nzero_optimization: {{reduce_bucket_size: 5, stage: {}}}\n"
    )
    args = load(write(a=text.format(1), ds__json=DEEPSPEED)[:1])
    assert args.zero_optimization["overlap_comm"] and args.zero_optimization["reduce_bucket_size"] == 5
    with pytest.raises(ConfigError, match=r"^ds.json:5: zero_optimization.stage: 1, but a.yml:7 says 2; keep one"):
        load(write(a=text.format(2), ds__json=DEEPSPEED)[:1])


def test_bad_deepspeed_files_are_refused_with_their_place(write):
    text = MODEL + "num_layers: 2\ndeepspeed_config_file: ds.json\n"
    with pytest.raises(ConfigError, match=r"^a.yml:6: deepspeed_config_file: ds.json: no such file$"):
        load(write(a=text))
    broken = json.dumps(json.loads(DEEPSPEED) | {"zero_optimization": {"stage": 7}}, indent=1)
    with pytest.raises(ConfigError, match=r"^ds.json:5: zero_optimization.stage: expected a number at least 0"):
        load(write(a=text, ds__json=broken)[:1])
