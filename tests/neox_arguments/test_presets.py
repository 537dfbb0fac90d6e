"""The presets of configs/: they load, run as they are, and are the models they are named after."""

import re
from math import prod

import pytest

from megatron.model import layer_params
from megatron.neox_arguments import NeoXArgs, load
from megatron.neox_arguments.keys.declaration import keys_of
from megatron.tokenizer import padded_vocab_size
from tests.neox_arguments.conftest import ELEUTHER, ROOT

CONFIGS = ROOT / "configs"
GOLDEN = ELEUTHER["loaded"]
NEOX, LLAMA, LLAMA3 = 50277, 32000, 128256  # entries of the published tokenizers


def model_size(tokens: int, embeddings: str, **parameters: float) -> dict[str, tuple[int, float, str]]:
    return {name: (tokens, count, embeddings) for name, count in parameters.items()}


# preset: (tokens, parameters, which of the embeddings they count). Whole numbers are exact: those of the
# model cards on huggingface.co, of transformers' model of the published config, and of the fork. Millions are
# rounded: GPT-3's (arXiv 2005.14165, table D.1; one embedding) and those that GPT-NeoX's own files are named
# after (none).
PUBLISHED = {
    **model_size(NEOX, "none", **{"19M": 19e6, "49M": 49e6, "800M": 800e6}),
    **model_size(NEOX, "one", **{
        "125M": 125e6, "350M": 356e6, "760M": 760e6, "1-3B": 1320e6, "2-7B": 2650e6, "6-7B": 6660e6, "13B": 12850e6,
        "175B": 174600e6,
    }),
    **model_size(NEOX, "all", **{
        "20B": 20_554_567_680, "neox_7b": 6.85e9, "llama_7b_gqa": 7.39e9, "pythia/14M": 14_067_712,
        "pythia/31M": 30_494_720, "pythia/70M": 70_426_624, "pythia/160M": 162_322_944, "pythia/410M": 405_334_016,
        "pythia/1B": 1_011_781_632, "pythia/1-4B": 1_414_647_808, "pythia/2-8B": 2_775_208_960,
        "pythia/6-9B": 6_857_302_016, "pythia/12B": 11_846_072_320,
        "125M-dmoe": 559e6,  # in every block 8 feed-forwards in the place of 125M's one
    }),
    **model_size(LLAMA, "all", **{
        "llama/7B": 6_738_415_616, "llama/13B": 13_015_864_320, "llama/30B": 32_528_943_616,
        "llama/65B": 65_285_660_672, "llama2/7B": 6_738_415_616, "llama2/13B": 13_015_864_320,
        "llama2/70B": 68_976_648_192, "mistral/7B": 7_241_732_096,
    }),
    **model_size(LLAMA3, "all", **{
        "llama3/8B": 8_030_261_248, "llama3/70B": 70_553_706_496, "llama3-1/8B": 8_030_261_248,
        "llama3-1/8B-128k": 8_030_261_248,
        "llama3-1/70B": 70_553_706_496,
    }),
    **model_size(50280, "all", **{"olmo/1B": 1_176_764_416, "olmo/7B": 6_888_095_744, "olmoe/1B-7B": 6_919_161_856}),
    **model_size(100278, "all", **{"olmo2/7B": 7_298_617_344}),
}  # fmt: skip
ENVIRONMENT = {"local_setup", "hosts_setup", "slurm_setup", "text_generation"}  # go after a model
OTHER_PRESETS = {"quickstart"}
# What GPT-NeoX's files have otherwise than the published models, or not in the same unit.
NOT_PUBLISHED = dict.fromkeys(("llama2/7B", "llama2/13B"), {"use_bias_in_mlp"})
NOT_PUBLISHED["llama2/70B"] = {"use_bias_in_mlp", "rotary_emb_base"}
SHAPE = (
    "num_layers", "hidden_size", "num_attention_heads", "num_kv_heads", "seq_length", "max_position_embeddings",
    "norm", "layernorm_epsilon", "pos_emb", "rotary_pct", "rotary_emb_base", "gpt_j_residual", "gpt_j_tied",
    "no_weight_tying", "activation", "bias_gelu_fusion", "use_bias_in_attn_linear", "use_bias_in_mlp", "init_method",
    "output_layer_init_method", "sliding_window_width",
)  # fmt: skip
OPTIMIZATION = ("min_lr", "weight_decay", "gradient_clipping", "train_iters", "lr_decay_style", "warmup")


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch):
    for name in ("DATA_DIR", "OUTPUT_DIR", "MODEL", "EPOCHS", "BATCH_SIZE", "LEARNING_RATE", "HOSTFILE", "MINUTES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(ROOT)


def preset(name):
    return load([f"configs/{name}.yml", "configs/local_setup.yml"])


def golden(name):
    """Returns GPT-NeoX's values of its own file of that name; None where it has none."""
    for overlay in ("", " + configs/llama/train_config.yml"):
        if f"configs/{name}.yml{overlay}" in GOLDEN:
            return GOLDEN[f"configs/{name}.yml{overlay}"]["values"]
    return None


def test_every_file_is_known():
    config_names = {str(path.relative_to(CONFIGS).with_suffix("")) for path in CONFIGS.rglob("*.yml")}
    # Those of pipelines are read in tests/pipelines.
    pipeline_names = {name for name in config_names if name.startswith("pipelines/") or name == "promotion_gates"}
    assert config_names - pipeline_names == set(PUBLISHED) | ENVIRONMENT | OTHER_PRESETS | {"container_setup"}


@pytest.mark.parametrize("name", sorted({*PUBLISHED, *OTHER_PRESETS}))
def test_a_preset_runs_as_it_is(name):
    args = preset(name).check_training()
    assert args.refusals() == {} and args.startup_notes() == []  # nor does a key stand there that has no effect
    assert args.compat_ffn_width in (None, "none")
    assert args.save.startswith("checkpoints/")
    for nodes in (1, 8):
        world = args.for_world(nodes * args.pp * args.tp * args.context_parallel_size)
        assert world.data_parallel_size == nodes and world.gradient_accumulation_steps >= 1


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_a_preset_has_as_many_parameters_as_published(name):
    vocab, published, embeddings = PUBLISHED[name]
    args = preset(name)
    args = args.replace(padded_vocab_size=padded_vocab_size(vocab, args.make_vocab_size_divisible_by, args.tp))
    count = sum(prod(spec.shape) for layer in layer_params(args).values() for spec in layer)
    embedding = args.padded_vocab_size * args.hidden_size
    not_counted = {"all": 0, "one": args.no_weight_tying, "none": 1 + args.no_weight_tying}[embeddings]
    count -= not_counted * embedding
    assert count == published if isinstance(published, int) else count == pytest.approx(published, rel=0.011)


@pytest.mark.parametrize("name", sorted(name for name in PUBLISHED if golden(name)))
def test_a_preset_is_the_model_of_the_same_name(name):
    args, values = preset(name), golden(name)
    keys = keys_of(NeoXArgs)
    if name.startswith("mistral"):
        # GPT-NeoX's file is no model that runs; and its window does not count the token itself, as the
        # published does
        assert {key for key in SHAPE if getattr(args, key) != values.get(key, keys[key].default)} == {
            "max_position_embeddings", "sliding_window_width", "use_bias_in_mlp", "init_method",
            "output_layer_init_method",
        }  # fmt: skip
        return
    published = {key: values.get(key, keys[key].default) for key in SHAPE}
    assert {key for key in SHAPE if getattr(args, key) != published[key]} == NOT_PUBLISHED.get(name, set())
    width = {key: values[key] for key in ("activation", "intermediate_size", "mlp_multiple_of") if key in values}
    shape = {key: published[key] for key in SHAPE[:6]} | width | {"compat_ffn_width": "upstream"}
    assert args.ffn_size == NeoXArgs.from_dict(shape).ffn_size
    if args.norm == "rmsnorm":
        assert args.rms_norm_epsilon == values["rms_norm_epsilon"]
    if not name.startswith("llama"):  # whose recipe is the paper's, not that of fine-tuning
        assert {key for key in OPTIMIZATION if getattr(args, key) != values.get(key, keys[key].default)} == set()
        optimizer_params = dict(args.optimizer["params"])
        assert optimizer_params | {"betas": list(optimizer_params["betas"])} == values["optimizer"]["params"]


def test_environment_files_go_after_any_preset():
    for name in sorted(ENVIRONMENT):
        files = ["configs/pythia/1-4B.yml", f"configs/{name}.yml"]
        args = load(files + ["configs/local_setup.yml"] * (name == "text_generation")).check_training()
        assert args.refusals() == {} and args.startup_notes() == []
        assert args.data_path and args.vocab_file


def test_a_container_is_configured_by_its_environment(monkeypatch):
    args = load(["configs/container_setup.yml"]).check_training()
    assert args.refusals() == {} and args.startup_notes() == [] and (args.train_epochs, args.lr) == (4, 5e-5)
    assert (args.train_micro_batch_size_per_gpu, args.save) == (8, "/shared/models")
    assert args.train_data_paths == ("/shared/data/chat_messages_document",)
    values = {"DATA_DIR": "/d", "OUTPUT_DIR": "/o", "EPOCHS": "3", "BATCH_SIZE": "2", "MODEL": "/m"}
    for name, value in (values | {"LEARNING_RATE": "3e-4"}).items():
        monkeypatch.setenv(name, value)
    args = load(["configs/container_setup.yml"]).for_world(4)
    assert args.train_data_paths == ("/d/chat_messages_document",)
    assert args.valid_data_paths == ("/d/chat-valid_messages_document",)
    assert (args.load, args.vocab_file, args.save) == ("/m", "/m/tokenizer.json", "/o")
    assert (args.train_epochs, args.train_micro_batch_size_per_gpu, args.train_batch_size) == (3, 2, 16)
    assert args.lr == 3e-4 and args.lr_scaling == "linear"
    assert preset("125M").save == "/o/125M"


def test_the_container_says_how_a_preset_takes_these():
    text = (CONFIGS / "container_setup.yml").read_text()
    documented = re.findall(r"(\w[\w.]*)=(\S+)", "".join(re.findall(r"#  +--set.*\n(?:#  +.*\n)*", text)))
    assert len(documented) == 7
    values = {"$MODEL": "/m", "$OUTPUT_DIR": "/o", "$BATCH_SIZE": "2", "$LEARNING_RATE": "1e-4", "$EPOCHS": "2"}
    texts = [f"{key}={re.sub(r'[$][A-Z_]+', lambda match: values[match.group()], value)}" for key, value in documented]
    args = load(["configs/pythia/70M.yml", "configs/local_setup.yml"], texts).check_training()
    assert (args.train_epochs, args.train_iters, args.lr, args.lr_scaling) == (2, None, 1e-4, "linear")
    assert (args.load, args.save, args.train_micro_batch_size_per_gpu) == ("/m", "/o", 2)
