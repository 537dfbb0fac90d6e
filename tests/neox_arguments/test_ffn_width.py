"""Inner width of the MLP, against those that GPT-NeoX and its fork build (reference: neox.md 3.8)."""

import re

import pytest

from megatron.neox_arguments import ConfigError, NeoXArgs
from tests.neox_arguments.conftest import ELEUTHER


def args_of(**keys):
    model = {"num_layers": 1, "num_attention_heads": 8, "seq_length": 8, "max_position_embeddings": 8}
    return NeoXArgs.from_dict(model | keys)


def width(compat, **keys):
    return args_of(**keys, compat_ffn_width=compat).ffn_size


def refusal(**keys):
    return args_of(**keys).refusals()


LLAMA2_7B = {"hidden_size": 4096, "activation": "swiglu", "intermediate_size": 32768, "mlp_multiple_of": 256}
LLAMA3_8B = {"hidden_size": 4096, "activation": "swiglu", "intermediate_size": 14336, "mlp_multiple_of": 14336}
CODELLAMA = {"hidden_size": 4096, "activation": "swiglu", "mlp_multiple_of": 256}
MISTRAL = {"hidden_size": 4096, "activation": "swiglu", "intermediate_size": 14336}
GOLDEN = {"hidden_size": 32, "activation": "swiglu", "intermediate_size": 240, "mlp_multiple_of": 16}
UNSET_WIDTH = {"hidden_size": 64, "mlp_multiple_of": 24}


@pytest.mark.parametrize("keys, true, upstream, fork", [
    (LLAMA2_7B, 32768, 11008, 32768),
    (LLAMA3_8B, 14336, 14336, 14336),
    (CODELLAMA, 11008, 5632, 5632),  # LLaMA 7B really has 11008
    (GOLDEN, 240, 80, 240),  # golden llama_pp1_mp1: down projection of 80 columns
    ({"hidden_size": 64}, 256, 256, 256),
    ({"hidden_size": 64, "intermediate_size": 100}, 100, 100, 100),
    ({"hidden_size": 64, "expansion_factor": 3.5}, 224, 224, 224),
    ({"hidden_size": 64, "activation": "geglu"}, 170, 85, 85),
])  # fmt: skip
def test_width(keys, true, upstream, fork):
    assert (width(None, **keys), width("upstream", **keys), width("fork", **keys)) == (true, upstream, fork)


@pytest.mark.parametrize("keys", [MISTRAL, UNSET_WIDTH | {"intermediate_size": 24 * 3}])
def test_what_upstream_cannot_run_is_refused(keys):
    message = refusal(**keys, compat_ffn_width="upstream")["compat_ffn_width"]
    assert "GPT-NeoX" in message and "cannot run" in message


def test_a_true_width_that_contradicts_its_multiple_is_refused():
    message = refusal(**GOLDEN | {"intermediate_size": 250}, compat_ffn_width="none")["compat_ffn_width"]
    assert "250" in message and "mlp_multiple_of 16" in message and "256" in message
    contradiction = {"hidden_size": 64, "intermediate_size": 100, "mlp_multiple_of": 64}
    message = refusal(**contradiction)["intermediate_size"]
    assert "128 in GPT-NeoX" in message and "100 in " in message


def test_the_width_must_be_divisible_by_tensor_parallel_ranks():
    with pytest.raises(ConfigError, match="250 .*model_parallel_size 4"):
        width(None, hidden_size=64, intermediate_size=250, model_parallel_size=4)


@pytest.mark.parametrize("keys, key, widths, line, width_with_it", [
    (LLAMA2_7B, "intermediate_size", (32768, 11008), "compat_ffn_width: upstream", 11008),
    (CODELLAMA, "activation", (11008, 5632), "compat_ffn_width: none", 11008),
    (LLAMA2_7B | {"intermediate_size": 11008, "mlp_multiple_of": 1}, "intermediate_size", (11008, 3669),
     "compat_ffn_width: none", 11008),
    (GOLDEN, "intermediate_size", (240, 80), "compat_ffn_width: none", 240),
])  # fmt: skip
def test_readings_that_differ_are_told_with_the_line_to_add(keys, key, widths, line, width_with_it):
    ((path, message),) = refusal(**keys).items()
    assert path == key and all(str(width) in message for width in widths) and f"`{line}`" in message
    compat = line.split(": ")[1]
    assert width(compat, **keys) == width_with_it and refusal(**keys, compat_ffn_width=compat) == {}


def test_files_with_one_reading_need_no_line():
    for keys in (LLAMA3_8B, MISTRAL, UNSET_WIDTH, {"hidden_size": 64}, {"hidden_size": 64, "intermediate_size": 100}):
        assert refusal(**keys) == {}
    assert width(None, **UNSET_WIDTH) == 264, "an unset width is rounded up"


def test_shipped_files_come_out_at_their_published_widths():
    """The golden llama, mistral and codellama files, with the line that the refusal proposes."""
    published = {"llama/7B": 11008, "llama/13B": 13824, "llama/30B": 17920, "llama/65B": 22016, "llama2/7B": 11008,
                 "llama2/13B": 13824, "llama2/70B": 28672, "llama2/codellama_7B": 11008, "llama2/codellama_34B": 22016,
                 "mistral/7B": 14336}  # fmt: skip
    for name, expected in published.items():
        values = ELEUTHER["loaded"][f"configs/{name}.yml + overlay"]["values"]
        line = re.search(r"`compat_ffn_width: (\w+)`", " ".join(NeoXArgs.from_dict(values).refusals().values()))
        compat_keys = {"compat_ffn_width": line[1]} if line else {}
        args = NeoXArgs.from_dict(values | compat_keys | {"tokenizer_type": "HFTokenizer"})
        assert (args.ffn_size, args.refusals()) == (expected, {}), name


@pytest.mark.parametrize("fork_key", [{"norm_placement": "olmo3"}, {"norm_placement": "pre"}, {"gd_mode": False}])
def test_a_key_that_only_the_fork_has_makes_its_reading_certain(fork_key):
    """There intermediate_size is the true width, whatever mlp_multiple_of says."""
    keys = GOLDEN | {"intermediate_size": 250} | fork_key
    assert refusal(**keys) == {} and width(None, **keys) == 250
    assert width("upstream", **GOLDEN | fork_key) == 80  # a line that says otherwise holds
    assert list(refusal(**CODELLAMA | fork_key)) == ["activation"]
