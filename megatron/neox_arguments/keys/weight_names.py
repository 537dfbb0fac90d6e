"""Lists the naming schemes with which commands can write weights, for commands that have not read a
checkpoint.

`megatron.checkpointing.parameter_names` knows the parameter names of each scheme.
"""

WEIGHT_NAMINGS = {
    "neox": "GPT-NeoX's (linear1, linear2)",
    "te": "Transformer-Engine's",
    "legacy": "GPT-NeoX's before mid-2024 (dense_h_to_4h)",
    "llama": "of llama conversions (w1, w2, w3)",
}
