"""Checks of how documents become samples, and of the labels and rewards beside them."""

from typing import TYPE_CHECKING

from megatron.neox_arguments.errors import Problems
from megatron.neox_arguments.losses import sample_kind
from megatron.neox_arguments.validate_model import at

if TYPE_CHECKING:
    from megatron.neox_arguments.neox_args import NeoXArgs


def validate_packing(args: "NeoXArgs", problems: Problems) -> None:
    if args.drop_last is not None and args.pack_impl != "packed":
        problems.add("drop_last", f"cuts packed documents; remove it, or pack_impl {at(args, 'pack_impl')}")
    if args.compat_group_texts_batch is not None and args.drop_last is None:
        problems.add("compat_group_texts_batch", "only drop_last reads it; set drop_last: true, or remove it")
    if args.compat_pack_impl:
        if args.pack_impl not in ("pack_until_overflow", "unpacked"):
            problems.add("compat_pack_impl", "only pack_impl: pack_until_overflow and unpacked read it; remove it")
        for key in ("train_epochs", "truncate_documents"):
            if getattr(args, key) is not None:
                problems.add(key, f"GPT-NeoX has none for whole documents; remove it, or compat_pack_impl "
                             f"({args.origin('compat_pack_impl')})")  # fmt: skip
    for name in ("train", "valid", "test"):
        paths = getattr(args, f"{name}_data_paths")
        for kind in ("label", "reward"):
            key = f"{name}_{kind}_data_paths"
            beside = getattr(args, key)
            if beside is None:
                continue
            if paths is None:
                problems.add(key, f"belongs to {name}_data_paths, which is not set; set it instead of data_path")
            elif len(beside) != len(paths):
                problems.add(key, f"expected one for each of the {len(paths)} {name}_data_paths "
                             f"({args.origin(f'{name}_data_paths')}), got {len(beside)}")  # fmt: skip
            if kind == "reward" and args.pack_impl != "unpacked" and sample_kind(args) != "answers":
                problems.add(key, f"a sample has one reward; set pack_impl: unpacked (now {at(args, 'pack_impl')})")
