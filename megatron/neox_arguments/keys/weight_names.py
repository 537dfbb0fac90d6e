"""Under which names weights can be written: the kinds, which commands offer before anything reads a
checkpoint.

What is called how in each is the knowledge of `megatron.checkpointing.parameter_names`.
"""

WEIGHT_NAMINGS = {
    "neox": "GPT-NeoX's (linear1, linear2)",
    "te": "Transformer-Engine's",
    "legacy": "GPT-NeoX's before mid-2024 (dense_h_to_4h)",
    "llama": "of llama conversions (w1, w2, w3)",
}
