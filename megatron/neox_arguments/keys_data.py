"""Keys of the data and of the tokenizer."""

from dataclasses import dataclass
from typing import Literal

from megatron.neox_arguments.declare import key


@dataclass(frozen=True)
class DataKeys:
    data_path: str | None = key(None, "Prefix of the one .bin/.idx pair that `split` divides")
    split: str = key("969, 30, 1", "Shares of training, validation and test documents of data_path")
    train_data_paths: tuple[str, ...] | None = key(None, "Prefixes of the training data; several are blended")
    valid_data_paths: tuple[str, ...] | None = key(None, "Prefixes of the validation data; several are blended")
    test_data_paths: tuple[str, ...] | None = key(None, "Prefixes of the test data; several are blended")
    train_data_weights: tuple[float, ...] | None = key(
        None, "Share of the samples that each of train_data_paths gives, in any unit; unset: equal"
    )
    valid_data_weights: tuple[float, ...] | None = key(None, "As train_data_weights, of valid_data_paths")
    test_data_weights: tuple[float, ...] | None = key(None, "As train_data_weights, of test_data_paths")
    weight_by_num_documents: bool = key(
        False, "Make the weights from document counts, proportional to (n / N) ^ weighted_sampler_alpha"
    )
    weighted_sampler_alpha: float = key(
        1.0, "Exponent of weight_by_num_documents; below 1 small sets are seen more often, 0: all sets alike", ge=0
    )
    compat_weight_by_num_documents: bool = key(
        False, "Multiply these weights by 1 - n / N, as GPT-NeoX does (two sets with alpha 1 always get half each)"
    )
    data_impl: Literal["mmap", "infer"] = key(
        "mmap", "Storage of the data", later=("cached", "lazy"), no_effect=".bin/.idx files are always memory-mapped"
    )
    pack_impl: Literal["packed"] = key(
        "packed", "How documents become samples", later=("pack_until_overflow", "unpacked")
    )
    dataset_impl: Literal["gpt2"] = key("gpt2", "Kind of dataset", later=("pairwise", "online"))
    index_cache_dir: str | None = key(
        None, "Folder of the index maps; unset: index_cache in `save`, else beside the data"
    )
    num_workers: int = key(2, "Processes that load data on each rank; 0: none", ge=0)
    eod_mask_loss: bool = key(False, "No loss where the input is the end-of-document token")
    mmap_warmup: bool = key(False, "Read the data once at start", no_effect="the page cache does this")


@dataclass(frozen=True)
class TokenizerKeys:
    tokenizer_type: Literal["GPT2BPETokenizer", "HFTokenizer", "CharLevelTokenizer"] = key(
        "GPT2BPETokenizer", "Kind of tokenizer", later=("HFGPT2Tokenizer", "SPMTokenizer", "TiktokenTokenizer")
    )
    vocab_file: str | None = key(None, "The tokenizer's file; GPT2BPETokenizer: its vocab.json")
    merge_file: str | None = key(None, "GPT2BPETokenizer: its merges.txt")
