"""Labels of conversations and pairs against TRL 1.16's own, on a tokenizer trained here."""

from importlib.resources import files
from types import SimpleNamespace

import numpy as np
import pytest

from megatron.data import DataError, build_datasets, train_loader
from megatron.data.conversations.messages import shared_prompt
from megatron.data.preferences.responses import batch_responses
from megatron.neox_arguments import NeoXArgs
from tests.data.preprocessing.chat_tokenizers import BRACKETED, CHATML, GENERATION, LLAMA3, chat_tokenizer, encoded
from tests.data.preprocessing.chat_tokenizers import fast_tokenizer as fast
from tests.data.samples import jsonl
from tools.datasets.preprocess_data_with_chat_template import main as preprocess_main

trl = pytest.importorskip("trl", reason="pip install trl==1.16.0")
datasets = pytest.importorskip("datasets")


def _message(text: str, role: str = "assistant") -> list[dict[str, str]]:
    return [{"role": role, "content": text}]


def _pair(prompt: list, chosen: str, rejected: str) -> dict[str, list]:
    return {"prompt": prompt, "chosen": _message(chosen), "rejected": _message(rejected)}


MESSAGES = [
    _message("What does the lantern cost?", "user") + _message("Nine coins, or ten."),
    _message("The harbour trades copper.", "system") + _message("silk", "user") + _message(" It costs 9\n\ncoins é 🏮 ")
    + _message("in winter?", "user") + _message("salt"),
]  # fmt: skip
PAIRS = [_pair(MESSAGES[1][:-1], "The salt", "They say nine"), _pair(MESSAGES[0][:1], "\n\nNine", "\nTen\n")]
SIDES = ("chosen", "rejected")
JOINED = [{side: pair["prompt"] + pair[side] for side in SIDES} for pair in PAIRS]


def megatron_rows(rows, keys, template, scope=None, **special):
    documents, _ = encoded(rows, chat_tokenizer(template, **special), keys=keys, scope=scope)
    return [[(list(d.ids), list(d.labels)) for (d,) in row.documents] for row in documents]


def trl_prepared(trainer, rows, hf, state, args, **options):
    """Returns rows as a trainer of TRL prepares them. state: what its preparation reads of itself."""
    args = SimpleNamespace(dataset_num_proc=None, max_length=None, **args)
    its_self, dataset = SimpleNamespace(_tokenizer=hf, **state), datasets.Dataset.from_list(rows)
    return trainer._prepare_dataset(its_self, dataset, hf, args, dataset_name="x", **options)


def both_sides(row, *keys):
    """(ids, labels) of the prompt with each of two answers."""
    masked = [-100] * len(row["prompt_ids"])
    return [(row["prompt_ids"] + row[key], masked + row[key]) for key in keys]


def trl_sft(rows, template, assistant_only=False, **special):
    state = {"chat_template": None, "completion_only_loss": True}
    args = {"dataset_text_field": "text", "assistant_only_loss": assistant_only, "shuffle_dataset": False}
    options = {"packing": False, "formatting_func": None}
    prepared = trl_prepared(trl.SFTTrainer, rows, fast(template, **special), state, args, **options)
    return [[(row["input_ids"], row["labels"])] for row in prepared]


def trl_dpo(rows, template, **special):
    prepared = trl_prepared(trl.DPOTrainer, rows, fast(template, **special), {}, {})
    return [both_sides(row, "chosen_ids", "rejected_ids") for row in prepared]


def trl_kto(rows, template, micro_batch, **special):
    """(ids, labels, judgement, ids and labels of the answer to another prompt) of each example."""
    state = {"calculate_KL": True, "desirable_weight": 1.0, "undesirable_weight": 1.0, "args": SimpleNamespace()}
    size = {"per_device_train_batch_size": micro_batch}
    prepared = trl_prepared(trl.KTOTrainer, rows, fast(template, **special), state, size)
    prepared_sides = [both_sides(row, "completion_ids", "KL_completion_ids") for row in prepared]
    return [
        (answer, row["label"], kl_answer) for row, (answer, kl_answer) in zip(prepared, prepared_sides, strict=True)
    ]


LLAMA = {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"}


@pytest.mark.parametrize("name", ["generation", "llama3", "qwen2_5", "qwen3", "gemma", "phi3"])
def test_assistant_only_loss(name):
    """The templates are those of TRL's training templates whose tokens the tokenizer has."""
    bundled = files("trl") / "chat_templates" / f"{name}_training.jinja"
    template = GENERATION if name == "generation" else bundled.read_text(encoding="utf-8")
    special = LLAMA if name == "llama3" else {"bos_token": "<|begin_of_text|>"}
    rows = [{"messages": messages} for messages in MESSAGES]
    if name == "gemma":  # takes no system message
        rows = [{"messages": [m for m in messages if m["role"] != "system"]} for messages in MESSAGES]
    assert megatron_rows(rows, ("messages",), template, **special) == trl_sft(
        rows, template, assistant_only=True, **special
    )


@pytest.mark.parametrize("blank", ["", " "])
def test_an_answer_without_words(blank):
    rows = [{"messages": MESSAGES[0][:1] + _message(blank) + MESSAGES[1][3:]}]
    assert megatron_rows(rows, ("messages",), GENERATION) == trl_sft(rows, GENERATION, assistant_only=True)


def test_template_without_generation_trains_the_same_answers():
    """By comparing renders, ChatML trains what the tagged one does, and the newline behind stop tokens."""
    rows = [{"messages": messages} for messages in MESSAGES]
    tagged = trl_sft(rows, GENERATION, assistant_only=True)
    newline = chat_tokenizer().encode(["\n"])[0][0][0]
    for ((ids, labels),), ((_, tagged_labels),) in zip(megatron_rows(rows, ("messages",), CHATML), tagged, strict=True):
        differ = [i for i, (a, b) in enumerate(zip(labels, tagged_labels, strict=True)) if a != b]
        assert differ and all(ids[i] == labels[i] == newline and tagged_labels[i - 1] == ids[i - 1] for i in differ)


@pytest.mark.parametrize("template, special", [(CHATML, {}), (LLAMA3, LLAMA), (GENERATION, {})])
def test_prompt_and_completion(template, special):
    rows = [{"prompt": messages[:-1], "completion": messages[-1:]} for messages in MESSAGES]
    assert megatron_rows(rows, ("completion",), template, **special) == trl_sft(rows, template, **special)


def test_plain_prompt_and_completion():
    rows = [{"prompt": "The lantern", "completion": " costs nine."}, {"prompt": "It ", "completion": "costs<|im_end|>"}]
    assert megatron_rows(rows, ("completion",), None) == trl_sft(rows, None)


@pytest.mark.parametrize("template, special", [(CHATML, {}), (LLAMA3, LLAMA), (GENERATION, {})])
def test_pairs(template, special):
    assert megatron_rows(PAIRS, SIDES, template, **special) == trl_dpo(PAIRS, template, **special)


def test_judged_answers_from_jsonl(tmp_path):
    """prompt, completion, label in a file -> the tool -> the batches of a run, against what TRL trains on."""
    rows = [{"prompt": pair["prompt"], "completion": pair[side], "label": side == "chosen"}
            for pair in PAIRS for side in SIDES]  # fmt: skip
    source, prefix = jsonl(tmp_path / "rows.jsonl", rows), f"{tmp_path}/kto"
    fast(CHATML).save_pretrained(tmp_path / "tokenizer")
    flags = "--jsonl-keys completion --reward-key label --binary-reward"
    path_flags = f"--input {source} --output-prefix {prefix} --tokenizer-path {tmp_path}/tokenizer"
    preprocess_main(f"{path_flags} {flags}".split())
    names = {"data": "document", "label_data": "label_document", "reward_data": "reward_document"}
    args = NeoXArgs.from_dict({
        "num_layers": 1, "hidden_size": 8, "num_attention_heads": 1, "seq_length": 128, "max_position_embeddings": 128,
        "train_impl": "kto", "pack_impl": "unpacked", "kto_kl": "rotated", "train_iters": 1, "eval_iters": 0,
        "dpo_reference": "on_the_fly", "train_micro_batch_size_per_gpu": 4, "num_workers": 0, "padded_vocab_size": 1024,
        "tokenizer_type": "CharLevelTokenizer", "index_cache_dir": str(tmp_path / "cache"),
        "optimizer": {"type": "Adam", "params": {"lr": 1e-3}},
        **{f"train_{kind}_paths": [f"{prefix}_completion_{name}"] for kind, name in names.items()},
    }).for_world(1)  # fmt: skip
    dataset = build_datasets(args, train_batch_size=4, on_one_rank=lambda work: work()).train
    ((batch,),) = train_loader(dataset, args, data_rank=0, data_size=1)

    def answers(part):
        for number in range(4):
            places = batch_responses(part).response_ids[number] == number
            labels = np.where(part.loss_weights[number] > 0, part.labels[number], -100)[places]
            yield part.tokens[number][places].tolist(), [-100, *labels[:-1].tolist()]

    judgements, kl_batch = batch_responses(batch).preference_labels, batch_responses(batch).kl_batch
    actual = list(zip(answers(batch), judgements.tolist(), answers(kl_batch), strict=True))
    order = [next(i for i, row in enumerate(trl_kto(rows, CHATML, 4)) if row[0] == item[0]) for item in actual]
    trl_rows = trl_kto([rows[i] for i in order], CHATML, 4)
    assert actual == [(row[0], 1.0 if row[1] else -1.0, row[2]) for row in trl_rows] and sorted(order) == [0, 1, 2, 3]


@pytest.mark.parametrize("pairs", [PAIRS, JOINED])
def test_scopes_of_pairs(pairs):
    """all_assistant: each side is a conversation of its own, in which every answer is trained."""
    side_rows = [trl_sft([{"messages": row[side]} for row in JOINED], GENERATION, True) for side in SIDES]
    expected = [[chosen, rejected] for (chosen,), (rejected,) in zip(*side_rows, strict=True)]
    assert megatron_rows(pairs, SIDES, GENERATION, "all_assistant") == expected
    completion_rows = megatron_rows(pairs, SIDES, GENERATION)
    assert completion_rows == megatron_rows(pairs, SIDES, GENERATION, "completion") != expected
    # Both pairs end in one answer: the last turn is the completion
    assert megatron_rows(pairs, SIDES, GENERATION, "last_turn") == completion_rows


def test_scopes_that_cannot_be():
    rows = [{"messages": MESSAGES[0]}, {"prompt": "The lantern", "completion": " costs nine."}]
    with pytest.raises(DataError, match="has no prompt before it: --loss-scope completion"):
        megatron_rows(rows[:1], ("messages",), CHATML, "completion")
    with pytest.raises(DataError, match="plain text, but --loss-scope all_assistant is only for conversations"):
        megatron_rows(rows[1:], ("completion",), None, "all_assistant")


def test_pairs_with_their_prompt_inside():
    assert megatron_rows(JOINED, SIDES, CHATML) == trl_dpo(JOINED, CHATML) == megatron_rows(PAIRS, SIDES, CHATML)
    text = [{"chosen": "The lantern costs nine", "rejected": "The lantern costs ten"}]
    assert megatron_rows(text, SIDES, None) == trl_dpo(text, None)


def test_pairs_whose_answer_merges_with_the_prompt():
    """The blank before the answer and its first word are one token: TRL drops the prompt's end, and so do we.
    The end-of-text token behind it is ours: TRL only warns that a template without one teaches no end."""
    pair = _pair(MESSAGES[0][:1], "lantern silk", "costs")
    actual, chat = megatron_rows([pair], SIDES, BRACKETED), chat_tokenizer(BRACKETED)
    assert actual == [
        [(ids + [chat.eos], labels + [chat.eos]) for ids, labels in row] for row in trl_dpo([pair], BRACKETED)
    ]
    ((ids, labels), _) = actual[0]
    blank = chat.encode(["[assistant] "])[0][0][-1]
    trained = [i for i in labels if i >= 0]
    assert chat.hf.decode(trained) == " lantern silk\n<|im_end|>" and ids[-len(trained) - 1] != blank


def test_shared_prompt():
    for chosen, rejected in (("a b", "a c"), ("ab", "ac"), ("a  b", "a  c"), ("ab c", "ab cd"), ([1, 2], [1, 3])):
        trl_parts = trl.extract_prompt({"chosen": chosen, "rejected": rejected})
        assert shared_prompt(chosen, rejected) == tuple(trl_parts[key] for key in ("prompt", "chosen", "rejected"))


def test_an_answer_that_ends_in_several_tokens_of_one_character():
    """transformers 5.23 marks only the first token of a span's last character; here all are trained."""
    template = GENERATION.replace("m['content'] + '<|im_end|>'", "m['content']")
    template = template.replace("endgeneration %}{{ '\\n' }}", "endgeneration %}")
    row = {"messages": _message("silk", "user") + _message("salt é🏮")}
    ((ids, labels),) = megatron_rows([row], ("messages",), template)[0]
    ((trl_ids, trl_labels),) = trl_sft([row], template, assistant_only=True)[0]
    assert ids[:-1] == trl_ids
    trained = np.array(labels[:-1]) >= 0
    assert trained[-4:].all() and chat_tokenizer().hf.decode([i for i in labels if i >= 0][:-1]) == "salt é🏮"
    assert (np.array(trl_labels) >= 0).sum() == trained.sum() - 3
