"""Labels of conversations and pairs against TRL 1.16's own preparation of data sets, on a tokenizer trained
here."""

from types import SimpleNamespace

import numpy as np
import pytest

from megatron.data import DataError, build_datasets, train_loader
from megatron.data.conversations.messages import shared_prompt
from megatron.data.preprocessing.chat_documents import encode_rows
from megatron.data.preprocessing.chat_options import ChatOptions
from megatron.data.preprocessing.chat_rows import prepare
from megatron.neox_arguments import NeoXArgs
from tests.data.preprocessing.chat_tokenizers import CHATML, GENERATION, LLAMA3, PLAIN, chat_tokenizer, fast_tokenizer
from tests.data.samples import jsonl
from tools.datasets.preprocess_data_with_chat_template import main as preprocess_main

trl = pytest.importorskip("trl", reason="pip install trl==1.16.0")
datasets = pytest.importorskip("datasets")


def _says(role: str, text: str) -> dict[str, str]:
    return {"role": role, "content": text}


MESSAGES = [
    [_says("user", "What does the lantern cost?"), _says("assistant", "Nine coins, or ten.")],
    [
        *(_says("system", "The harbour trades copper."), _says("user", "silk")),
        *(_says("assistant", " It costs 9\n\ncoins é 🏮 "), _says("user", "in winter?"), _says("assistant", "salt")),
    ],
]
PAIRS = [
    {"prompt": prompt, "chosen": [_says("assistant", chosen)], "rejected": [_says("assistant", rejected)]}
    for prompt, chosen, rejected in (
        (MESSAGES[1][:-1], "The salt", "They say nine"), (MESSAGES[0][:1], "\n\nNine", "\nTen\n"),
    )
]  # fmt: skip
SIDES = ("chosen", "rejected")
INSIDE = [{side: pair["prompt"] + pair[side] for side in SIDES} for pair in PAIRS]


def ours(rows, keys, template, scope=None, **special):
    chat = chat_tokenizer(template, **special)
    options = ChatOptions(keys=keys, scope=scope)
    documents, _ = encode_rows([prepare(row, chat, options) for row in rows], chat, options)
    return [[(list(d.ids), list(d.labels)) for (d,) in row.documents] for row in documents]


def trl_sft(rows, template, assistant_only=False, **special):
    hf = fast_tokenizer(template, **special)
    trainer = SimpleNamespace(_tokenizer=hf, chat_template=None, completion_only_loss=True)
    args = SimpleNamespace(
        dataset_num_proc=None, dataset_text_field="text", assistant_only_loss=assistant_only, max_length=None,
        shuffle_dataset=False,
    )  # fmt: skip
    prepared = trl.SFTTrainer._prepare_dataset(
        trainer, datasets.Dataset.from_list(rows), hf, args, packing=False, formatting_func=None, dataset_name="x"
    )
    return [[(row["input_ids"], row["labels"])] for row in prepared]


def trl_dpo(rows, template, **special):
    hf = fast_tokenizer(template, **special)
    args = SimpleNamespace(dataset_num_proc=None, max_length=None)
    prepared = trl.DPOTrainer._prepare_dataset(
        SimpleNamespace(_tokenizer=hf), datasets.Dataset.from_list(rows), hf, args, dataset_name="x"
    )
    sides = []
    for row in prepared:
        masked = [-100] * len(row["prompt_ids"])
        sides.append([(row["prompt_ids"] + row[s], masked + row[s]) for s in ("chosen_ids", "rejected_ids")])
    return sides


def trl_kto(rows, template, micro_batch, **special):
    """(ids, labels, judgement, ids and labels of the answer to another prompt) of each example."""
    hf = fast_tokenizer(template, **special)
    trainer = SimpleNamespace(
        _tokenizer=hf, calculate_KL=True, desirable_weight=1.0, undesirable_weight=1.0, args=SimpleNamespace()
    )
    args = SimpleNamespace(dataset_num_proc=None, max_length=None, per_device_train_batch_size=micro_batch)
    prepared = trl.KTOTrainer._prepare_dataset(trainer, datasets.Dataset.from_list(rows), hf, args, dataset_name="x")
    examples = []
    for row in prepared:
        masked = [-100] * len(row["prompt_ids"])
        both = [(row["prompt_ids"] + row[s], masked + row[s]) for s in ("completion_ids", "KL_completion_ids")]
        examples.append((both[0], row["label"], both[1]))
    return examples


LLAMA = {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"}
# Of the training templates that TRL ships, those whose tokens the tokenizer has
FAMILIES = ("llama3", "qwen2_5", "qwen3", "gemma", "phi3")


def bundled(name):
    from importlib.resources import files

    return (files("trl") / "chat_templates" / name).read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["generation", *FAMILIES])
def test_assistant_only_loss(name):
    template = GENERATION if name == "generation" else bundled(f"{name}_training.jinja")
    special = LLAMA if name == "llama3" else {"bos_token": "<|begin_of_text|>"}
    rows = [{"messages": messages} for messages in MESSAGES]
    if name == "gemma":  # takes no system message
        rows = [{"messages": [m for m in messages if m["role"] != "system"]} for messages in MESSAGES]
    assert ours(rows, ("messages",), template, **special) == trl_sft(rows, template, assistant_only=True, **special)


@pytest.mark.parametrize("blank", ["", " "])
def test_an_answer_without_words(blank):
    rows = [{"messages": [*MESSAGES[0][:1], {"role": "assistant", "content": blank}, *MESSAGES[1][3:]]}]
    assert ours(rows, ("messages",), GENERATION) == trl_sft(rows, GENERATION, assistant_only=True)


def test_template_without_generation_trains_the_same_answers():
    """By comparing renders, ChatML trains what the tagged template does, and the newline behind each stop
    token."""
    rows = [{"messages": messages} for messages in MESSAGES]
    tagged = trl_sft(rows, GENERATION, assistant_only=True)
    newline = chat_tokenizer().encode(["\n"])[0][0][0]
    for ((ids, labels),), ((_, tagged_labels),) in zip(ours(rows, ("messages",), CHATML), tagged, strict=True):
        differ = [i for i, (a, b) in enumerate(zip(labels, tagged_labels, strict=True)) if a != b]
        assert differ and all(ids[i] == labels[i] == newline and tagged_labels[i - 1] == ids[i - 1] for i in differ)


@pytest.mark.parametrize("template, special", [(CHATML, {}), (LLAMA3, LLAMA), (GENERATION, {})])
def test_prompt_and_completion(template, special):
    rows = [{"prompt": messages[:-1], "completion": messages[-1:]} for messages in MESSAGES]
    assert ours(rows, ("completion",), template, **special) == trl_sft(rows, template, **special)


def test_plain_prompt_and_completion():
    rows = [{"prompt": "The lantern", "completion": " costs nine."}, {"prompt": "It ", "completion": "costs<|im_end|>"}]
    assert ours(rows, ("completion",), None) == trl_sft(rows, None)


@pytest.mark.parametrize("template, special", [(CHATML, {}), (LLAMA3, LLAMA), (GENERATION, {})])
def test_pairs(template, special):
    assert ours(PAIRS, SIDES, template, **special) == trl_dpo(PAIRS, template, **special)


def test_judged_answers_from_jsonl(tmp_path):
    """prompt, completion, label in a file -> the tool -> the batches of a run, against what TRL trains on."""
    rows = [{"prompt": pair["prompt"], "completion": pair[side], "label": side == "chosen"}
            for pair in PAIRS for side in ("chosen", "rejected")]  # fmt: skip
    source, prefix = jsonl(tmp_path / "rows.jsonl", rows), str(tmp_path / "kto")
    fast_tokenizer(CHATML).save_pretrained(tmp_path / "tokenizer")
    preprocess_main(
        ["--input", str(source), "--output-prefix", prefix, "--tokenizer-path", str(tmp_path / "tokenizer"),
         "--jsonl-keys", "completion", "--reward-key", "label", "--binary-reward"]
    )  # fmt: skip
    args = NeoXArgs.from_dict({
        "num_layers": 1, "hidden_size": 8, "num_attention_heads": 1, "seq_length": 128, "max_position_embeddings": 128,
        "train_impl": "kto", "pack_impl": "unpacked", "kto_kl": "rotated", "train_iters": 1,
        "eval_iters": 0, "dpo_reference": "on_the_fly",
        "train_micro_batch_size_per_gpu": 4, "num_workers": 0, "padded_vocab_size": 1024,
        "tokenizer_type": "CharLevelTokenizer", "index_cache_dir": str(tmp_path / "cache"),
        "train_data_paths": [f"{prefix}_completion_document"],
        "train_label_data_paths": [f"{prefix}_completion_label_document"],
        "train_reward_data_paths": [f"{prefix}_completion_reward_document"],
        "optimizer": {"type": "Adam", "params": {"lr": 1e-3}},
    }).for_world(1)  # fmt: skip
    dataset = build_datasets(args, train_batch_size=4, once=lambda work: work()).train
    ((batch,),) = train_loader(dataset, args, data_rank=0, data_size=1)

    def answers(of):
        token_label_pairs = []
        for number in range(4):
            places = of.response_ids[number] == number
            labels = np.where(of.loss_weights[number] > 0, of.labels[number], -100)[places]
            token_label_pairs.append((of.tokens[number][places].tolist(), [-100, *labels[:-1].tolist()]))
        return token_label_pairs

    got = list(zip(answers(batch), batch.preference_labels.tolist(), answers(batch.kl_batch), strict=True))
    order = [next(i for i, row in enumerate(trl_kto(rows, CHATML, 4)) if row[0] == item[0]) for item in got]
    trl_rows = trl_kto([rows[i] for i in order], CHATML, 4)
    assert got == [(row[0], 1.0 if row[1] else -1.0, row[2]) for row in trl_rows] and sorted(order) == [0, 1, 2, 3]


@pytest.mark.parametrize("given", [PAIRS, INSIDE])
def test_scopes_of_pairs(given):
    """all_assistant: each side is a conversation of its own, in which every answer is trained."""
    alone = [trl_sft([{"messages": row[side]} for row in INSIDE], GENERATION, True) for side in SIDES]
    expected = [[chosen, rejected] for (chosen,), (rejected,) in zip(*alone, strict=True)]
    assert ours(given, SIDES, GENERATION, "all_assistant") == expected
    both = ours(given, SIDES, GENERATION)
    assert both == ours(given, SIDES, GENERATION, "completion") != expected
    # Both pairs end in one answer: the last turn is the completion
    assert ours(given, SIDES, GENERATION, "last_turn") == both


def test_scopes_that_cannot_be():
    rows = [{"messages": MESSAGES[0]}, {"prompt": "The lantern", "completion": " costs nine."}]
    with pytest.raises(DataError, match="has no prompt before it: --loss-scope completion"):
        ours(rows[:1], ("messages",), CHATML, "completion")
    with pytest.raises(DataError, match="plain text: --loss-scope all_assistant is for conversations"):
        ours(rows[1:], ("completion",), None, "all_assistant")


def test_pairs_with_their_prompt_inside():
    assert ours(INSIDE, SIDES, CHATML) == trl_dpo(INSIDE, CHATML) == ours(PAIRS, SIDES, CHATML)
    text = [{"chosen": "The lantern costs nine", "rejected": "The lantern costs ten"}]
    assert ours(text, SIDES, None) == trl_dpo(text, None)


def test_pairs_whose_answer_merges_with_the_prompt():
    """The blank before the answer and its first word are one token: TRL drops the prompt's end, and so do we.

    The end-of-text token behind it is ours: TRL only warns that a template without one teaches no end.
    """
    answers = {"chosen": [_says("assistant", "lantern silk")], "rejected": [_says("assistant", "costs")]}
    pair = {"prompt": MESSAGES[0][:1], **answers}
    got = ours([pair], SIDES, PLAIN)
    chat = chat_tokenizer(PLAIN)
    assert got == [[(ids + [chat.eos], labels + [chat.eos]) for ids, labels in row] for row in trl_dpo([pair], PLAIN)]
    ((ids, labels), _) = got[0]
    blank = chat.encode(["[assistant] "])[0][0][-1]
    trained = [i for i in labels if i >= 0]
    assert chat.hf.decode(trained) == " lantern silk\n<|im_end|>" and ids[-len(trained) - 1] != blank


def test_shared_prompt():
    for chosen, rejected in (("a b", "a c"), ("ab", "ac"), ("a  b", "a  c"), ("ab c", "ab cd"), ([1, 2], [1, 3])):
        trl_parts = trl.extract_prompt({"chosen": chosen, "rejected": rejected})
        assert shared_prompt(chosen, rejected) == tuple(trl_parts[key] for key in ("prompt", "chosen", "rejected"))


def test_an_answer_that_ends_in_several_tokens_of_one_character():
    """transformers 5.23 marks only the first of the tokens of a span's last character; all are trained
    here."""
    template = GENERATION.replace("m['content'] + '<|im_end|>'", "m['content']").replace(
        "endgeneration %}{{ '\\n' }}", "endgeneration %}"
    )
    row = {"messages": [{"role": "user", "content": "silk"}, {"role": "assistant", "content": "salt é🏮"}]}
    ((ids, labels),) = ours([row], ("messages",), template)[0]
    ((their_ids, theirs),) = trl_sft([row], template, assistant_only=True)[0]
    assert ids[:-1] == their_ids
    trained = np.array(labels[:-1]) >= 0
    assert trained[-4:].all() and chat_tokenizer().hf.decode([i for i in labels if i >= 0][:-1]) == "salt é🏮"
    assert (np.array(theirs) >= 0).sum() == trained.sum() - 3
