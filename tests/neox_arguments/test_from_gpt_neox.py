"""docs/from-gpt-neox.md: what it lists as refused, not built or acting differently is so, and is all."""

import inspect
import re
from fnmatch import fnmatchcase

from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.keys.declaration import Key, keys_of
from tests.neox_arguments.conftest import ROOT

PAGE = (ROOT / "docs/from-gpt-neox.md").read_text()
SECTIONS = dict(re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL))
KEYS = keys_of(NeoXArgs)


def names_in_column(section: str, column: int) -> list[str]:
    """Returns a column's text in backticks: a key, a pattern of keys, or KEY: VALUE."""
    rows = [line.strip("|").split(" | ") for line in SECTIONS[section].splitlines() if line.startswith("| ")]
    return [word for row in rows[1:] for word in re.findall(r"`([^`]+)`", row[column])]


def test_what_is_said_not_to_be_built_is_not_and_nothing_is_left_out() -> None:
    words = names_in_column("Not built yet", 1)
    listed_keys = {name for name in KEYS for word in words if fnmatchcase(name, word)}
    assert listed_keys == {name for name, key in KEYS.items() if key.standing == "later"}
    values = {f"{name}: {value}" for name, key in KEYS.items() for value in key.not_built_values}
    assert {word for word in words if ":" in word} == values


def key_of(path: str) -> Key | None:
    *sections, name = path.split(".")
    keys = KEYS
    for section in sections:
        declared = keys[section].section if section in keys else None
        if declared is None:
            return None
        keys = keys_of(declared)
    return keys.get(name)


def test_what_is_said_to_be_refused_is() -> None:
    listed_keys = {word: key for word in names_in_column("Refused", 0) if (key := key_of(word)) is not None}
    assert len(listed_keys) > 40
    assert not [word for word, key in listed_keys.items() if key.standing != "refused" and not key.refuse_values]


def test_every_key_that_acts_differently_or_is_refused_is_named() -> None:
    words = {word for text in re.findall(r"`([^`\n]+)`", PAGE) for word in re.split(r"[:=, ]+", text)}
    rows = PAGE.partition("## Keys that act differently")[2].splitlines()
    acting = set(re.findall(r"[\w.]+", " ".join(row.split("|")[1] for row in rows if "|" in row)))
    assert {name for name, key in KEYS.items() if key.differs} <= acting
    assert {name for name in KEYS if name.startswith("compat_")} <= words
    refused = [name for name, key in KEYS.items() if key.standing in ("refused", "later")]
    assert [name for name in refused if not any(fnmatchcase(name, word) for word in words)] == []


# Found by a scan of its code (ea7aefd8), which read the names of all keys and looked for each.
UNREAD = """
use_bias_in_norms no_save_optim num_unique_layers param_sharing_style weight_server_port te_fp8_margin mup_attn_temp
mup_output_temp moe_lbl_in_fp32 clip_grad hysteresis loss_scale_window min_scale loss_scale dynamic_loss_scale
zero_reduce_scatter zero_contiguous_gradients zero_reduce_bucket_size zero_allgather_bucket_size short_seq_prob
deepscale deepscale_config adlr_autoresume adlr_autoresume_interval
"""


def test_every_key_that_gpt_neox_never_reads_has_a_row_and_a_verdict() -> None:
    assert {name for name, key in KEYS.items() if key.unread} == set(UNREAD.split())
    followed = {
        name for name in UNREAD.split() if KEYS[name].standing.startswith("honoured") and not KEYS[name].same_as
    }
    assert followed == {"use_bias_in_norms", "te_fp8_margin", "weight_server_port"}, "each of them may harm"
    assert set(re.findall(r"^\| `(\w+)` \|", PAGE.partition("<!-- unread")[2].partition("<!-- end")[0], re.M)) == set(
        UNREAD.split()
    )


def test_every_named_key_exists() -> None:
    values = {value for key in KEYS.values() for value in key.choices} | {"a_b", "madgrad_wd", "all_config"}
    words = set(re.findall(r"`([a-z0-9]+_[a-z0-9_]+)(?:: [^`]*)?`", PAGE))
    methods = {*dir(NeoXArgs), *inspect.signature(NeoXArgs.consume_neox_args).parameters}
    assert words - set(KEYS) - values - methods == set()
