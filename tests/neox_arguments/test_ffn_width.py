"""Inner width of the MLP, against the widths GPT-NeoX and its fork were seen to build (reference: neox.md 3.8)."""

import pytest

from megatron.neox_arguments import ConfigError, NeoXArgs


def width(compat, **keys):
    model = {"num_layers": 1, "num_attention_heads": 8, "seq_length": 8, "max_position_embeddings": 8}
    return NeoXArgs.from_dict(model | keys | {"compat_ffn_width": compat}).ffn_size


LLAMA2_7B = {"hidden_size": 4096, "activation": "swiglu", "intermediate_size": 32768, "mlp_multiple_of": 256}
LLAMA3_8B = {"hidden_size": 4096, "activation": "swiglu", "intermediate_size": 14336, "mlp_multiple_of": 14336}
CODELLAMA = {"hidden_size": 4096, "activation": "swiglu", "mlp_multiple_of": 256}
MISTRAL = {"hidden_size": 4096, "activation": "swiglu", "intermediate_size": 14336}
GOLDEN = {"hidden_size": 32, "activation": "swiglu", "intermediate_size": 240, "mlp_multiple_of": 16}
PLAIN = {"hidden_size": 64, "mlp_multiple_of": 24}


@pytest.mark.parametrize(
    "keys, true, upstream, fork",
    [
        (LLAMA2_7B, 32768, 11008, 32768),
        (LLAMA3_8B, 14336, 14336, 14336),
        (CODELLAMA, 11008, 5632, 5632),  # LLaMA 7B really has 11008
        (GOLDEN, 240, 80, 240),  # golden llama_pp1_mp1: down projection of 80 columns
        ({"hidden_size": 64}, 256, 256, 256),
        ({"hidden_size": 64, "intermediate_size": 100}, 100, 100, 100),
        ({"hidden_size": 64, "expansion_factor": 3.5}, 224, 224, 224),
        ({"hidden_size": 64, "activation": "geglu"}, 170, 85, 85),
    ],
)
def test_width(keys, true, upstream, fork):
    assert (width(None, **keys), width("upstream", **keys), width("fork", **keys)) == (true, upstream, fork)


def test_an_unset_width_is_rounded_up():
    assert width(None, **PLAIN) == 264


@pytest.mark.parametrize("keys", [MISTRAL, PLAIN | {"intermediate_size": 24 * 3}])
def test_what_upstream_cannot_run_is_refused(keys):
    with pytest.raises(ConfigError, match="compat_ffn_width: GPT-NeoX makes a first linear of .* which cannot run"):
        width("upstream", **keys)


def test_a_true_width_that_contradicts_its_multiple_is_refused():
    with pytest.raises(ConfigError, match="intermediate_size: 250 is the true width .* mlp_multiple_of 16; write 256"):
        width(None, **GOLDEN | {"intermediate_size": 250})


def test_the_width_must_be_divisible_by_tensor_parallel_ranks():
    with pytest.raises(ConfigError, match="width 250 is not a multiple of model_parallel_size 4"):
        width(None, hidden_size=64, intermediate_size=250, model_parallel_size=4)


def test_a_reading_that_differs_from_upstream_is_said():
    model = {"num_layers": 1, "num_attention_heads": 8, "seq_length": 8, "max_position_embeddings": 8}
    (note,) = NeoXArgs.from_dict(model | LLAMA2_7B).notes()
    assert "32768" in note and "11008" in note and "compat_ffn_width" in note
    assert NeoXArgs.from_dict(model | LLAMA2_7B | {"compat_ffn_width": "upstream"}).notes() == []
    assert NeoXArgs.from_dict(model | LLAMA3_8B).notes() == []
    assert NeoXArgs.from_dict(model | MISTRAL).notes() == []
