"""Keys of the data and of the tokenizer."""

from dataclasses import dataclass
from typing import Literal

from megatron.neox_arguments.declare import key


@dataclass(frozen=True)
class DataKeys:
    data_path: str | None = key(None, "Prefix of the one .bin/.idx pair that `split` divides")
    split: str = key("969, 30, 1", "Shares of training, validation and test documents of data_path")
    train_data_paths: tuple[str, ...] | None = key(None, "Prefix of the training data (one, in a list)")
    valid_data_paths: tuple[str, ...] | None = key(None, "Prefix of the validation data (one, in a list)")
    test_data_paths: tuple[str, ...] | None = key(None, "Prefix of the test data (one, in a list)")
    data_impl: Literal["mmap", "infer"] = key(
        "mmap", "Storage of the data", later=("cached", "lazy"), no_effect=".bin/.idx files are always memory-mapped"
    )
    pack_impl: Literal["packed"] = key(
        "packed", "How documents become samples", later=("pack_until_overflow", "unpacked")
    )
    dataset_impl: Literal["gpt2"] = key("gpt2", "Kind of dataset", later=("pairwise", "online"))
    index_cache_dir: str | None = key(None, "Folder of the index maps; unset: a cache folder of the user")
    num_workers: int = key(2, "Processes that load data on each rank; 0: none", ge=0)
    eod_mask_loss: bool = key(False, "No loss where the input is the end-of-document token")
    mmap_warmup: bool = key(False, "Read the data once at start", no_effect="the page cache does this")


@dataclass(frozen=True)
class TokenizerKeys:
    tokenizer_type: Literal["HFTokenizer", "CharLevelTokenizer"] | None = key(
        None,
        "Kind of tokenizer",
        later=("GPT2BPETokenizer", "HFGPT2Tokenizer", "SPMTokenizer", "TiktokenTokenizer"),
    )
    vocab_file: str | None = key(None, "The tokenizer's file")
