"""Mixers that correct a state of fixed size by the delta rule: Gated DeltaNet, Kimi Delta Attention.

mixer.py holds the modules. rule.py computes its recurrence with torch operations. The short convolution, and
the inputs besides hidden states, are Mamba's.
"""

from megatron.model.delta.mixer import GatedDeltaNet, KimiDeltaAttention
