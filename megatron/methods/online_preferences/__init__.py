"""Online preference training: pairs of answers that the model writes (online DPO)."""
