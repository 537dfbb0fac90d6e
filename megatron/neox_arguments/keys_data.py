"""Keys of the data and of the tokenizer."""

from dataclasses import dataclass
from typing import Literal

from megatron.neox_arguments.declare import key


@dataclass(frozen=True)
class DataKeys:
    data_path: str | None = key(None, "Prefix of the one .bin/.idx pair that `split` divides")
    train_epochs: int | None = key(
        None,
        "Passes over the training data, instead of train_iters",
        ge=1,
        differs="over several sets GPT-NeoX draws from all alike, so small ones come again",
    )
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
        False,
        "Make the weights from document counts, proportional to (n / N) ^ weighted_sampler_alpha",
        differs="GPT-NeoX also multiplies by 1 - n / N: compat_weight_by_num_documents",
    )
    weighted_sampler_alpha: float = key(
        1.0, "Exponent of weight_by_num_documents; below 1 small sets are seen more often, 0: all sets alike", ge=0
    )
    compat_weight_by_num_documents: bool = key(
        False,
        "Multiply these weights by 1 - n / N, as GPT-NeoX does (two sets with alpha 1 always get half each)",
        source="new",
    )
    data_impl: Literal["mmap", "infer", "cached"] = key(
        "mmap",
        "Storage of the data; infer is mmap",
        no_effect=".bin/.idx files are memory-mapped, also with infer, which finds no data in GPT-NeoX",
        later_values={"cached": "reading TNTIDX files"},
    )
    pack_impl: Literal["packed", "pack_until_overflow", "unpacked"] = key(
        "packed",
        "How documents become samples",
        later_values=dict.fromkeys(("pack_until_overflow", "unpacked"), "samples of whole documents"),
    )
    dataset_impl: Literal["gpt2", "pairwise", "online"] = key(
        "gpt2", "Kind of dataset", later_values={"pairwise": "post-training", "online": "training with rewards"}
    )
    allow_chopped: bool = key(
        True, "Samples of whole documents: cut those that are too long", later="samples of whole documents"
    )
    reset_attention_mask: bool = key(
        False, "Attention stays inside documents of a packed sample (Megatron)", source="new"
    )
    reset_position_ids: bool = key(
        False, "Positions start anew in each document of a packed sample (Megatron)", source="new"
    )
    use_shared_fs: bool = key(
        True,
        "All machines see the same files; false: each makes its own index maps",
        differs="in GPT-NeoX false has effect with data_path only (#919)",
    )
    data_seed: int | None = key(None, "Seed of shuffling and blending; unset: seed", ge=0, source="new")
    index_cache_dir: str | None = key(
        None, "Folder of the index maps; unset: index_cache in `save`, else beside the data", source="new"
    )
    num_workers: int = key(2, "Processes that load data on each rank; 0: none", ge=0)
    char_level_ppl: bool = key(False, "Validation also reports the perplexity per character")
    eod_mask_loss: bool = key(False, "No loss where the input is the end-of-document token")
    mmap_warmup: bool = key(False, "Read the data once at start", no_effect="the page cache does this")


@dataclass(frozen=True)
class TokenizerKeys:
    tokenizer_type: Literal[
        "GPT2BPETokenizer", "HFTokenizer", "HFGPT2Tokenizer", "SPMTokenizer", "CharLevelTokenizer", "TiktokenTokenizer"
    ] = key(
        "GPT2BPETokenizer",
        "Kind of tokenizer",
        later_values=dict.fromkeys(("HFGPT2Tokenizer", "SPMTokenizer", "TiktokenTokenizer"), "this tokenizer"),
    )
    vocab_file: str | None = key(None, "The tokenizer's file; GPT2BPETokenizer: its vocab.json")
    merge_file: str | None = key(None, "GPT2BPETokenizer: its merges.txt")
