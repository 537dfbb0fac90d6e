"""Names tokens whose embeddings are zero when training begins, such as chat tokens that a model lacks."""

from megatron.callbacks import Callback, TrainingRun
from megatron.data import Batch
from megatron.distributed import run_on_all_ranks

_MAX_NAMES = 20


class ZeroEmbeddings(Callback):
    """Warns before the first step if its tokens include some with zero embeddings in the loaded weights.

    zero_tokens: token ids with zero embeddings, among the rows that this rank has loaded.
    padding: the id of the padding token, which may have a zero embedding; None: there is none.
    """

    def __init__(self, zero_tokens: frozenset[int], padding: int | None) -> None:
        self.zero_tokens, self.padding, self.is_done = zero_tokens, padding, False

    def on_step_start(self, run: TrainingRun, batches: list[Batch]) -> None:
        """Compare the tokens of the first step with the zero rows, over all ranks."""
        if self.is_done:
            return
        self.is_done = True
        local = {token for batch in batches for token in batch.tokens.unique().tolist()} & self.zero_tokens
        tokens = sorted(set[int]().union(*run_on_all_ranks(run.groups, lambda: local)) - {self.padding})
        if tokens:
            names = ", ".join(f"{run.tokenizer.detokenize([token])!r} ({token})" for token in tokens[:_MAX_NAMES])
            rest_text = f" and {len(tokens) - _MAX_NAMES} more" if len(tokens) > _MAX_NAMES else ""
            run.logger.warning(
                f"the loaded weights have zero embeddings for tokens of the first step: {names}{rest_text}; the model "
                "cannot tell these tokens apart yet. Give them values first, such as the mean of all embeddings "
                "(transformers: resize_token_embeddings)"
            )
