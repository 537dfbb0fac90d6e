"""A checkpoint as a torch module of one process, from token ids to logits."""

import logging
from pathlib import Path

import torch
from torch import Tensor, nn

from megatron.data import Batch
from megatron.generation.chat_model import chat_model_args
from megatron.generation.model import Model, load_model
from megatron.mpu import ParallelGroups
from megatron.tokenizer import build_tokenizer


class TokenModel(nn.Module):
    """Maps token ids `[batch, seq]` to logits `[batch, seq, vocabulary]`, each text from its position 0.

    Column i is the logit of token i; columns above the tokenizer's vocabulary are left out.
    model: the loaded model, for the functions of `megatron.generation`. tokenizer: of the run.
    """

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.stage, self.model, self.tokenizer = model.stage, model, model.tokenizer
        self._columns = model.columns or model.tokenizer.vocab_size
        self.eval()

    def forward(self, tokens: Tensor) -> Tensor:
        """Returns the logits of all positions."""
        tokens = tokens.to(self.model.groups.device)
        unused = torch.zeros_like(tokens)
        logits = self.stage(None, Batch(tokens, unused, unused))
        return logits.transpose(0, 1)[..., : self._columns]


def load_token_model(save: Path, step: int, device: str | torch.device, logger: logging.Logger) -> TokenModel:
    """Loads the checkpoint of a step; adapters that it holds are merged into the weights."""
    args = chat_model_args(str(save), step).for_inference(1)
    model = load_model(args, ParallelGroups.single(device), build_tokenizer(args), logger)
    return TokenModel(model)
