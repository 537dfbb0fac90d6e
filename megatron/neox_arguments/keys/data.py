"""Declares the keys of the data and of the tokenizer."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from megatron.neox_arguments.keys.declaration import key, new_key
from megatron.neox_arguments.keys.sections import SeqCurriculum, WeightSchedule


@dataclass(frozen=True)
class DataKeys:
    """Configuration keys of a run's data sets, of how they are blended, and of how documents become
    samples."""

    data_path: str | None = key(None, "Prefix of one .bin/.idx pair, divided by `split`")
    train_epochs: int | None = key(
        None,
        "Passes over the training data, instead of train_iters",
        ge=1,
        differs="over several sets GPT-NeoX draws from all alike: small ones repeat",
    )
    split: str = key(
        "969, 30, 1",
        "Shares of training, validation and test documents of data_path. If set, it also divides each of "
        "train_data_paths, with labels and rewards, unless valid_data_paths or test_data_paths is set",
        differs="GPT-NeoX reads it with data_path only",
    )
    train_data_paths: tuple[str, ...] | None = key(None, "Prefixes of the training data; several are blended")
    valid_data_paths: tuple[str, ...] | None = key(None, "Prefixes of the validation data; several are blended")
    test_data_paths: tuple[str, ...] | None = key(None, "Prefixes of the test data; several are blended")
    valid_sets: Mapping[str, Any] | None = new_key(
        None,
        "More validation sets by name, each a prefix or a list of prefixes; every set has its own loss, "
        "validation/NAME/lm_loss",
    )
    train_data_weights: tuple[float, ...] | None = key(
        None, "Share of samples from each of train_data_paths, in any unit; unset: equal"
    )
    valid_data_weights: tuple[float, ...] | None = key(None, "Like train_data_weights, for valid_data_paths")
    test_data_weights: tuple[float, ...] | None = key(None, "Like train_data_weights, for test_data_paths")
    weight_by_num_documents: bool = key(
        False,
        "Make the weights from document counts, proportional to (n / N) ^ weighted_sampler_alpha",
        differs="GPT-NeoX also multiplies by 1 - n / N: compat_weight_by_num_documents",
    )
    weight_by: Literal["documents", "tokens", "bytes"] | None = new_key(
        None, "Make the weights from the sets' sizes in this unit, (n / N) ^ weighted_sampler_alpha"
    )
    weighted_sampler_alpha: float = key(
        1.0,
        "Exponent of weight_by and weight_by_num_documents, 1 / temperature; below 1 small sets are seen more "
        "often; 0: all equally",
        ge=0,
    )
    train_data_weight_schedule: Mapping[str, Any] | None = new_key(
        None, "Change the weights of train_data_paths during training", section=WeightSchedule
    )
    seq_curriculum: Mapping[str, Any] | None = new_key(
        None,
        "Short sequences first: the same samples, split into rows of seq_len, with equal tokens per step",
        section=SeqCurriculum,
    )
    compat_weight_by_num_documents: bool = new_key(
        False,
        "Multiply the weights of weight_by_num_documents by 1 - n / N, as GPT-NeoX does (two sets with alpha 1 always "
        "get half each)",
    )
    data_impl: Literal["mmap", "infer", "cached"] = key(
        "mmap",
        "Format of .bin/.idx files: mmap (MMIDIDX), cached (TNTIDX, GPT-NeoX's cached and lazy), infer: detected. "
        "A folder of .npy rows also works",
        differs="GPT-NeoX's infer finds no data",
    )
    pack_impl: Literal["packed", "pack_until_overflow", "unpacked", "best_fit"] = key(
        "packed",
        "How documents become samples. packed: windows of their joined tokens. Whole documents: "
        "pack_until_overflow (random order, until one does not fit), best_fit (least padding; TRL's bfd), "
        "unpacked (one each)",
        differs="with whole documents GPT-NeoX ignores the split, adds the next one's first token, and trains padding: "
        "compat_pack_impl",
    )
    dataset_impl: Literal["gpt2", "pairwise", "online"] = key(
        "gpt2",
        "Kind of dataset. pairwise: pos_..._data_paths and neg_..._data_paths, for train_impl dpo, kto and rm. "
        "online: rollout.prompts, answered during training, for train_impl reinforce and dpo",
    )
    allow_chopped: bool = key(
        True, "Samples of whole documents: truncate those longer than seq_length + 1 tokens; false: leave them out"
    )
    truncate_documents: int | None = new_key(None, "Use only this many tokens of each document", ge=1)
    drop_last: bool | None = new_key(
        None,
        "packed: split the documents, in order, into blocks of seq_length tokens without overlap (HuggingFace's "
        "group_texts); drop (true) or pad (false) the incomplete last block. Unset: GPT-NeoX's windows",
    )
    compat_group_texts_batch: int | None = new_key(
        None, "With drop_last: build blocks from this many documents at a time, 1000 in HuggingFace", ge=1
    )
    compat_pack_impl: bool = new_key(
        False, "Make pack_until_overflow and unpacked as GPT-NeoX's, with its order and its errors"
    )
    reset_attention_mask: bool = new_key(
        False,
        "Keep attention inside each document of a sample (Megatron), and predict no first token from the "
        "document before",
    )
    reset_position_ids: bool = new_key(False, "Positions start anew in each document of a sample (Megatron)")
    use_shared_fs: bool = key(
        True,
        "All machines see the same files; false: each makes its own index maps",
        differs="in GPT-NeoX false has effect with data_path only (#919)",
    )
    limit_samples: int | None = new_key(
        None, "Use only this many documents, or pairs, of each set: for a first try", ge=1
    )
    data_seed: int | None = new_key(None, "Seed of shuffling and blending; unset: seed", ge=0, lt=2**32)
    index_cache_dir: str | None = new_key(
        None, "Folder of the index maps; unset: index_cache in `save`, else beside the data"
    )
    num_workers: int = key(2, "Data-loading processes per rank; 0: none", ge=0)
    char_level_ppl: bool = key(False, "Validation also reports the perplexity per character")
    eod_mask_loss: bool = key(False, "Compute no loss at positions whose input token is end-of-document")
    loss_mask_token_ids: Literal["auto"] | tuple[int | str, ...] | None = new_key(
        None,
        "Tokens never to train or validate on: labels with them have no loss. Each is an id, or the text of one token. "
        "auto: the list loss_mask_token_ids in tokenizer_config.json beside vocab_file",
        ge=0,
    )
    mmap_warmup: bool = key(False, "Read the data once at start", no_effect="the page cache does this")


@dataclass(frozen=True)
class TokenizerKeys:
    """Configuration keys of the tokenizer."""

    tokenizer_type: Literal[
        "GPT2BPETokenizer", "HFTokenizer", "HFGPT2Tokenizer", "SPMTokenizer", "CharLevelTokenizer", "TiktokenTokenizer"
    ] = key(
        "GPT2BPETokenizer",
        "Kind of tokenizer",
    )
    vocab_file: str | None = key(
        None,
        "The tokenizer's file; GPT2BPETokenizer: its vocab.json; TiktokenTokenizer: name of an encoding; "
        "HFGPT2Tokenizer: a folder or a name on the Hub, unset: gpt2",
    )
    merge_file: str | None = key(None, "GPT2BPETokenizer: its merges.txt")
    eod_token: str | None = new_key(
        None, "Name of the end-of-document token; unset: <|endoftext|>, else the tokenizer's EOS"
    )
