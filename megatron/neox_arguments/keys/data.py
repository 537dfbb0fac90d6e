"""Keys of the data and of the tokenizer."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from megatron.neox_arguments.keys.declaration import key, new_key
from megatron.neox_arguments.keys.sections import SeqCurriculum, WeightSchedule


@dataclass(frozen=True)
class DataKeys:
    """The sets of a run, how they are blended, and how documents become samples."""

    data_path: str | None = key(None, "Prefix of the one .bin/.idx pair that `split` divides")
    train_epochs: int | None = key(
        None,
        "Passes over the training data, instead of train_iters",
        ge=1,
        differs="over several sets GPT-NeoX draws from all alike, so small ones come again",
    )
    split: str = key(
        "969, 30, 1",
        "Shares of training, validation and test documents of data_path; where it is written, also of each of "
        "train_data_paths without valid_data_paths and test_data_paths, with their labels and rewards",
        differs="GPT-NeoX reads it with data_path only",
    )
    train_data_paths: tuple[str, ...] | None = key(None, "Prefixes of the training data; several are blended")
    valid_data_paths: tuple[str, ...] | None = key(None, "Prefixes of the validation data; several are blended")
    test_data_paths: tuple[str, ...] | None = key(None, "Prefixes of the test data; several are blended")
    train_data_weights: tuple[float, ...] | None = key(
        None, "Share of the samples that each of train_data_paths gives, in any unit; unset: equal"
    )
    valid_data_weights: tuple[float, ...] | None = key(None, "As train_data_weights, of valid_data_paths")
    test_data_weights: tuple[float, ...] | None = key(None, "As train_data_weights, of test_data_paths")
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
        "Exponent of weight_by and weight_by_num_documents, 1 / temperature; below 1 small sets are seen more often, "
        "0: all sets alike",
        ge=0,
    )
    train_data_weight_schedule: Mapping[str, Any] | None = new_key(
        None, "Weights of train_data_paths that change while training", section=WeightSchedule
    )
    seq_curriculum: Mapping[str, Any] | None = new_key(
        None,
        "Short sequences first: the same samples, cut into rows of seq_len; a step's tokens stay as many",
        section=SeqCurriculum,
    )
    compat_weight_by_num_documents: bool = new_key(
        False, "Multiply these weights by 1 - n / N, as GPT-NeoX does (two sets with alpha 1 always get half each)"
    )
    data_impl: Literal["mmap", "infer", "cached"] = key(
        "mmap",
        "Format of .bin/.idx files: mmap (MMIDIDX), cached (TNTIDX, of cached and lazy), infer: what the file says; a "
        "folder of .npy rows is a data path too",
        differs="GPT-NeoX's infer finds no data",
    )
    pack_impl: Literal["packed", "pack_until_overflow", "unpacked", "best_fit"] = key(
        "packed",
        "How documents become samples: packed: windows of their joined tokens; of whole documents: pack_until_overflow "
        "(in random order, until one does not fit), best_fit (the least padding; TRL's bfd), unpacked (one each)",
        differs="GPT-NeoX's whole documents ignore the split, bring the next one's first token, and train padding: "
        "compat_pack_impl",
    )
    dataset_impl: Literal["gpt2", "pairwise", "online"] = key(
        "gpt2",
        "Kind of dataset; pairwise: pos_..._data_paths and neg_..._data_paths, for train_impl dpo, kto and rm; online: "
        "rollout.prompts, answered while the model trains, for train_impl reinforce and dpo",
    )
    allow_chopped: bool = key(
        True, "Samples of whole documents: cut those longer than seq_length + 1 tokens; false: leave them out"
    )
    truncate_documents: int | None = new_key(None, "Use only this many tokens of each document", ge=1)
    drop_last: bool | None = new_key(
        None,
        "packed: cut the documents, in their order, into blocks of seq_length tokens that do not overlap (group_texts "
        "of HuggingFace); the rest that fills no block is left out (true) or padded (false). Unset: GPT-NeoX's windows",
    )
    compat_group_texts_batch: int | None = new_key(
        None, "With drop_last: blocks of so many documents by themselves, 1000 in HuggingFace", ge=1
    )
    compat_pack_impl: bool = new_key(
        False, "pack_until_overflow and unpacked as GPT-NeoX's, with its order and its errors"
    )
    reset_attention_mask: bool = new_key(
        False,
        "Attention stays inside documents of a sample (Megatron), and none of their first tokens is predicted from the "
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
    num_workers: int = key(2, "Processes that load data on each rank; 0: none", ge=0)
    char_level_ppl: bool = key(False, "Validation also reports the perplexity per character")
    eod_mask_loss: bool = key(False, "No loss where the input is the end-of-document token")
    loss_mask_token_ids: tuple[int | str, ...] | None = new_key(
        None,
        "Tokens that are never trained, nor counted in validation: no loss where one is the label; each an id, or text "
        "that is one token",
        ge=0,
    )
    mmap_warmup: bool = key(False, "Read the data once at start", no_effect="the page cache does this")


@dataclass(frozen=True)
class TokenizerKeys:
    """The tokenizer."""

    tokenizer_type: Literal[
        "GPT2BPETokenizer", "HFTokenizer", "HFGPT2Tokenizer", "SPMTokenizer", "CharLevelTokenizer", "TiktokenTokenizer"
    ] = key(
        "GPT2BPETokenizer",
        "Kind of tokenizer",
    )
    vocab_file: str | None = key(
        None,
        "The tokenizer's file; GPT2BPETokenizer: its vocab.json; TiktokenTokenizer: the name of an encoding; "
        "HFGPT2Tokenizer: a folder or a name on the Hub, unset: gpt2",
    )
    merge_file: str | None = key(None, "GPT2BPETokenizer: its merges.txt")
    eod_token: str | None = new_key(
        None, "Name of the token that ends documents; unset: <|endoftext|>, else the tokenizer's own EOS"
    )
