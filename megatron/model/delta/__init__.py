"""Gated DeltaNet: a mixer that corrects a state of fixed size by the delta rule (arXiv 2412.06464).

mixer.py holds the module. rule.py computes its recurrence with torch operations. The short convolution, and
the inputs besides hidden states, are Mamba's.
"""

from megatron.model.delta.mixer import GatedDeltaNet
