"""Tokenizer for SentencePiece models."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from megatron.neox_arguments.optional_packages import import_optional
from megatron.tokenizer.interface import (
    END_OF_DOCUMENT,
    PADDING,
    Tokenizer,
    TokenizerError,
    no_end,
    no_such_token,
    read_file,
)


class SPMTokenizer(Tokenizer):
    """A tokenizer from a SentencePiece `.model` file.

    eod is `eod_token`, else the piece `<|endoftext|>` (NeoX), else the model's EOS.
    """

    def __init__(self, vocab_file: str | Path, eod_token: str | None = None):
        missing = TokenizerError("SPMTokenizer needs the sentencepiece package (pip install 'neox[data]')")
        sentencepiece = import_optional("sentencepiece", missing)
        self._content = read_file(vocab_file)
        self._processor = sentencepiece.SentencePieceProcessor()
        try:
            self._processor.LoadFromSerializedProto(self._content)
        except RuntimeError as problem:
            raise TokenizerError(f"{vocab_file}: not a SentencePiece model ({problem})") from None
        model = self._processor
        self.vocab_size = model.get_piece_size()
        # piece_to_id() returns the id of the unknown piece for a missing piece
        pieces = {model.id_to_piece(i): i for i in range(self.vocab_size)}
        if eod_token is not None and eod_token not in pieces:
            raise no_such_token(vocab_file, eod_token)
        eos = model.eos_id()
        self.eod = pieces[eod_token] if eod_token is not None else pieces.get(END_OF_DOCUMENT, eos)
        if self.eod < 0:
            raise no_end(vocab_file, "no EOS token")
        self.eos = eos if eos >= 0 else self.eod
        self.bos = model.bos_id() if model.bos_id() >= 0 else None
        self.pad = pieces.get(PADDING, model.pad_id() if model.pad_id() >= 0 else None)
        self.special_tokens = {i: piece for piece, i in pieces.items() if model.is_control(i) or i == self.eod}

    def tokenize_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return self._processor.encode(list(texts), num_threads=1)

    def detokenize(self, ids: Iterable[int]) -> str:
        return self._processor.decode([int(i) for i in ids if i not in self.special_tokens])

    def files(self) -> dict[str, bytes]:
        default = self._processor.piece_to_id(END_OF_DOCUMENT)
        default = self._processor.eos_id() if default == self._processor.unk_id() else default
        end = {} if self.eod == default else {"eod_token": self.special_tokens[self.eod].encode()}
        return {"tokenizer.model": self._content, **end}
