"""A refusal to go on names the key that changed, first, with its file and line."""

import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from megatron.checkpointing import CheckpointError, Manifest, ParallelLayout, model_keys
from megatron.data import build_datasets, data_fingerprint, order_keys
from megatron.neox_arguments import load
from megatron.tokenizer import build_tokenizer, with_vocabulary
from megatron.training.checkpoint.run_parts import RunParts
from megatron.training.checkpoint.same_run import begun_of, check_same_run
from megatron.training.method import Method
from tests.training.runs import GOLDEN, NEOX, config

A, B = (str(GOLDEN / "dataset" / f"corpus{name}_text_document") for name in "AB")
LISTED_SETS = {"data_path": None, "split": None, "train_data_paths": [A, B], "train_data_weights": [7.0, 3.0]}
CHAT = {
    "data_path": None, "split": None, "train_data_paths": [str(GOLDEN / "dataset" / "chat_conversation_document")],
    "train_label_data_paths": [str(GOLDEN / "dataset" / "chat_conversation_label_document")],
    "pack_impl": "unpacked",
}  # fmt: skip
PATH = Path("ck/global_step5")


class Run:
    """The records of a run, without a model. Its configuration stands in `a.yml`, a key a line."""

    def __init__(self, folder: Path, **keys: Any) -> None:
        values = {key: value for key, value in config(NEOX, **keys).items() if value is not None}
        lines = [f"{key}: {json.dumps(value)}" for key, value in values.items()]
        self.line = {key: number for number, key in enumerate(values, 1)}
        folder.mkdir(exist_ok=True)
        (folder / "a.yml").write_text("\n".join(lines) + "\n")
        assert yaml.safe_load((folder / "a.yml").read_text()).keys() == values.keys()
        args = load([folder / "a.yml"]).for_world(1)
        self.tokenizer = build_tokenizer(args)
        self.args = with_vocabulary(args, self.tokenizer)

    def record(self, manifest: Manifest | None = None) -> dict[str, Any]:
        state = begun_of(manifest, Method())
        datasets = build_datasets(self.args, train_batch_size=8, on_one_rank=lambda work: work(), data_state=state)
        files, order = data_fingerprint(self.args), order_keys(self.args)
        parts: Any = SimpleNamespace(files=files, order=order, datasets=datasets)
        return RunParts.data_record(parts, 40)

    def manifest(self) -> Manifest:
        result = Manifest(
            "id", 5, 40, ParallelLayout(1, 1, 1, 0, "fp32", 1), model_keys(self.args), self.args.seed,
            self.tokenizer.fingerprint(), self.record(), {}, "now", json.loads(self.args.to_json())["given"],
        )  # fmt: skip
        return Manifest.from_json(result.to_json())


def check(run: Run, manifest: Manifest, record: dict[str, Any] | None = None) -> None:
    check_same_run(run.args, PATH, manifest, True, record or run.record(manifest), run.tokenizer)


@pytest.mark.parametrize(("keys", "change", "changed_key", "old_value"), [
    # keys of the saved run, keys that changed, the key that is named, its old value
    ({}, {"seed": 7}, "seed", "1234"),
    ({}, {"data_seed": 7}, "data_seed", "1234"),
    ({}, {"seq_length": 16}, "seq_length", "32"),
    ({**LISTED_SETS, "split": "80,20,0"}, {"split": None}, "split", "80,20,0"),
    (LISTED_SETS, {"split": "80,20,0"}, "split", "null"),
    ({"loss_mask_token_ids": [5]}, {"loss_mask_token_ids": [5, 7]}, "loss_mask_token_ids", r"\[5\]"),
    ({}, {"split": "80,20,0"}, "split", "90,10,0"),
    ({}, {"truncate_documents": 9}, "truncate_documents", "null"),
    ({}, {"limit_samples": 90}, "limit_samples", "null"),
    ({}, {"pack_impl": "best_fit"}, "pack_impl", "packed"),
    ({"pack_impl": "best_fit"}, {"allow_chopped": False}, "allow_chopped", "true"),
    ({}, {"data_path": B}, "data_path", "[0-9a-f]{16}"),
    ({}, LISTED_SETS, "train_data_paths", "none"),
    (LISTED_SETS, {"train_data_paths": [A, A]}, "train_data_paths", "[0-9a-f]{16}"),
    (LISTED_SETS, {"train_data_paths": [A, B, A], "train_data_weights": [7.0, 3.0, 1.0]}, "train_data_paths", "2 sets"),
    (LISTED_SETS, {"train_data_weights": [6.0, 4.0]}, "train_data_weights", "0.7"),
    (LISTED_SETS, {"train_data_weights": None, "weight_by": "tokens"}, "train_data_weights", "0.7"),
    (CHAT, {"train_label_data_paths": None}, "train_label_data_paths", "one set"),
    ({}, {"hidden_size": 64}, "hidden_size", "32"),
    ({}, {"num_layers": 5}, "num_layers", "4"),
    ({}, {"intermediate_size": 96}, "intermediate_size", "128"),
    ({}, {"num_kv_heads": 2}, "num_kv_heads", "4"),
    ({}, {"padded_vocab_size": 512}, "padded_vocab_size", "384"),
])  # fmt: skip
def test_the_key_that_changed_comes_first(
    keys: Any, change: Any, changed_key: str, old_value: str, tmp_path: Path
) -> None:
    saved_run, this_run = Run(tmp_path / "there", **keys), Run(tmp_path / "here", **{**keys, **change})
    manifest = saved_run.manifest()
    check(saved_run, manifest)
    place = f"a.yml:{this_run.line[changed_key]}" if changed_key in this_run.line else "default"
    pattern = rf"^{changed_key}: .+ \(\S*{re.escape(place)}\), .*{PATH} .*{old_value}; .*\Z"
    with pytest.raises(CheckpointError, match=pattern):
        check(this_run, manifest)


def test_how_long_a_run_is_is_none_of_them_but_the_order_itself_is_looked_at(tmp_path: Path) -> None:
    manifest = Run(tmp_path / "there").manifest()
    for change in ({"train_iters": 400, "lr_decay_iters": 400}, {"train_iters": 5}, {"eval_interval": 3}):
        check(Run(tmp_path / "here", **change), manifest)
    longer = Run(tmp_path / "here", train_iters=400)
    with pytest.raises(CheckpointError, match="global_step5: .*40 samples"):
        check(longer, manifest, longer.record())  # laid out as a new run: samples that were drawn are not the first
    check(Run(tmp_path / "here", train_iters=400, allow_changed_data=True), manifest, longer.record())


def test_what_no_key_of_the_other_run_tells(tmp_path: Path) -> None:
    """Another tokenizer, passes and not iterations, and pairs of a time when all had their prompts twice."""
    run = Run(tmp_path / "there")
    manifest, record = run.manifest(), run.record()
    passes = {**record, "order": order_keys(run.args, 2)}
    shared = {**record, "order": {**record["order"], "prefix_sharing": True}}
    for saved_manifest, this_record, message in (
        (replace(manifest, tokenizer="0" * 64), record, r"^vocab_file: \S+ \(\S+a.yml:\d+\), .* content"),
        (manifest, passes, "^train_epochs: passes.* iterations"),
        (replace(manifest, data=passes), record, r"^train_iters: iterations \(\S+a.yml:\d+\), .* passes"),
        (manifest, shared, r"^prefix_sharing: true \(\S+\), .* false"),
    ):
        with pytest.raises(CheckpointError, match=message):
            check(run, saved_manifest, this_record)
