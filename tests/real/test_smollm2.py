"""A model that was really trained, against transformers and lm-eval. `make test-real` prints the numbers."""

import json
import shutil
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor

from megatron.data.preprocessing import EncodeJob, preprocess
from megatron.tokenizer import make_tokenizer
from tests.evaluation.runs import make_tasks, reference, scores
from tests.evaluation.test_harness import assert_same
from tests.pool import run_ranks
from tests.real.runs import END, LAYOUTS, configured, logits_and_text
from tests.training.checkpoint.test_resume import losses
from tests.training.runs import run_to_end
from tools.ckpts import convert_neox_to_hf
from tools.quickstart_data import topic_documents

pytestmark = [pytest.mark.real, pytest.mark.timeout(900)]
BOUND = 1e-4  # absolute, of logits of up to 31
ROWS, SEQ, TOKENS, STEPS = 2, 36, 32, 6
PROMPTS = ["The capital of France is", "Once upon a time, in a small village by the sea,", "def fibonacci(n):\n"]
QUESTION = [{"role": "user", "content": "What is the boiling point of water at sea level?"}]
ENGLISH = (
    "The capital of France is Paris. Water boils at one hundred degrees Celsius. The sun rises in the east and sets in "
    "the west. Computers store information as binary digits. In the year 1687 Newton published the laws of motion, and "
    "for two hundred years nobody found a body, on earth or in the sky, that did not obey them. Then came light."
)


class HFReference(NamedTuple):
    """Results of transformers before training. fp32_error: of its logits, against `logits` in fp64."""

    batch: Tensor
    logits: Tensor
    fp32_error: float
    prompts: list[list[int]]
    texts: list[list[int]]


def loaded(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """By plain transformers, which must find every tensor and no other."""
    model, loading_info = transformers.AutoModelForCausalLM.from_pretrained(  # type: ignore[misc]
        folder, dtype=dtype, output_loading_info=True
    )
    problems = ("missing_keys", "unexpected_keys", "mismatched_keys")
    assert not any(loading_info[problem] for problem in problems), loading_info
    return model.eval()


@torch.no_grad()
def exact_logits(folder: Path, batch: Tensor) -> Tensor:
    """Returns logits of transformers in fp64, with almost no rounding."""
    return loaded(folder, torch.float64)(batch).logits


@pytest.fixture(scope="module")
def tokenizer(real_model: Path) -> Any:
    return transformers.AutoTokenizer.from_pretrained(real_model)


@pytest.fixture(scope="module")
@torch.no_grad()
def hf_reference(real_model: Path, tokenizer: Any) -> HFReference:
    batch = tokenizer(ENGLISH, return_tensors="pt").input_ids[:, : ROWS * SEQ].view(ROWS, SEQ)
    exact, model = exact_logits(real_model, batch), loaded(real_model)
    fp32_difference = (model(batch).logits - exact).abs().max().item()
    prompts = [tokenizer(text).input_ids for text in PROMPTS]
    prompts.append(tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True, return_dict=False))
    texts = []
    for prompt in prompts:
        out = model.generate(torch.tensor([prompt]), max_new_tokens=TOKENS, do_sample=False)[0, len(prompt) :]
        texts.append(list(takewhile(lambda token: token != tokenizer.eos_token_id, out.tolist())))
        print(repr(tokenizer.decode(prompt)[-60:]), "->", repr(tokenizer.decode(texts[-1])))
    return HFReference(batch, exact, fp32_difference, prompts, texts)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_logits_and_greedy_text(layout: str, real_checkpoint: Path, hf_reference: HFReference) -> None:
    ranks, keys = LAYOUTS[layout]
    values = configured(real_checkpoint, **keys)
    actual = run_ranks(logits_and_text, ranks, values, hf_reference.batch, hf_reference.prompts, TOKENS, timeout=400)[0]
    assert_near(layout, actual[0], hf_reference.logits, hf_reference.fp32_error)
    assert actual[1] == hf_reference.texts


def assert_near(label: str, logits: Tensor, exact: Tensor, fp32_error: float) -> None:
    difference = (logits - exact).abs().max().item()
    print(
        f"{label}: largest difference of logits {difference:.1e}, of transformers' own fp32 {fp32_error:.1e}; "
        f"largest logit {exact.abs().max():.1f}"
    )
    assert logits.shape == exact.shape and difference <= max(
        BOUND, 2 * fp32_error
    )  # a machine may round worse than ours


def test_back_to_the_bit(real_model: Path, real_checkpoint: Path, tmp_path: Path) -> None:
    convert_neox_to_hf.main(["--input_dir", str(real_checkpoint), "--output_dir", str(tmp_path / "hf")])
    original, exported = (load_file(folder / "model.safetensors") for folder in (real_model, tmp_path / "hf"))
    assert original.keys() == exported.keys() and len(original) == 272
    assert all(torch.equal(value, exported[name]) for name, value in original.items())
    for name in ("tokenizer.json", "chat_template.jinja"):
        assert (tmp_path / "hf" / name).read_bytes() == (real_model / name).read_bytes()
    (tmp_path / "hf" / "model.safetensors").unlink()


@pytest.fixture(scope="module")
def english(real_model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Python's language reference: most of it as `.bin/.idx`, and some that is not in there."""
    folder = tmp_path_factory.mktemp("english")
    *texts, held_out = sorted((text for text in topic_documents() if len(text) > 6000), key=len)
    (folder / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    job = EncodeJob(make_tokenizer, ("HFTokenizer", str(real_model), END), append_eod=True)
    preprocess([folder / "text.jsonl"], [folder / "text"], job)
    return str(folder / "text"), held_out


def test_training_goes_on(
    real_model: Path,
    real_checkpoint: Path,
    english: tuple[str, str],
    tokenizer: Any,
    hf_reference: HFReference,
    tmp_path: Path,
) -> None:
    """From the checkpoint on one rank, from HuggingFace's folder in two stages: the same losses."""
    data, held_out = english
    recipe = {
        "data_path": data, "split": "100,0,0", "index_cache_dir": str(tmp_path / "maps"), "num_workers": 0,
        "train_batch_size": 4, "gradient_accumulation_steps": 2, "train_iters": STEPS, "eval_iters": 0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "betas": [0.9, 0.95]}}, "lr_decay_style": "constant",
        "warmup": 0.0, "gradient_clipping": 1.0, "weight_decay": 0.0, "log_interval": 1,
        "checkpoint_factor": STEPS, "compat_no_save_optim": True, "save_hf": 0,
    }  # fmt: skip
    curves, loss_before = {}, loss_of(real_model, tokenizer, held_out)
    for layout, load in (("pp2", real_model), ("tp1", real_checkpoint)):
        ranks, keys = LAYOUTS[layout]
        save = tmp_path / layout
        values = configured(real_checkpoint, **recipe, **keys) | {"save": str(save), "load": str(load)}
        run_ranks(run_to_end, ranks, values, timeout=400)
        curves[layout] = losses(save)
        print(f"{layout}: losses", *(f"{loss:.6f}" for loss in curves[layout].values()))
        if layout == "pp2":
            shutil.rmtree(save)
    furthest = max(abs(curves["pp2"][step] / loss - 1) for step, loss in curves["tp1"].items())
    print(f"largest relative difference of losses {furthest:.1e}")
    assert len(curves["tp1"]) == STEPS and furthest <= 1e-5
    hf_folder = save / "huggingface" / f"global_step{STEPS}"
    loss_after = loss_of(hf_folder, tokenizer, held_out)
    print(f"loss on text that was not trained on, by transformers: {loss_before:.4f}, then {loss_after:.4f}")
    assert loss_before < 3.5 and loss_after < loss_before - 0.05
    exact = exact_logits(hf_folder, hf_reference.batch)
    assert (exact - hf_reference.logits).abs().max() > 100 * BOUND
    values = configured(real_checkpoint, load=str(save), model_parallel_size=1)
    actual = run_ranks(logits_and_text, 1, values, hf_reference.batch, [], 0, timeout=400)[0]
    assert_near("after training", actual[0], exact, hf_reference.fp32_error)
    shutil.rmtree(save)  # of no use when all is well, and large


@torch.no_grad()
def loss_of(folder: Path, tokenizer: Any, text: str) -> float:
    tokens = tokenizer(text, return_tensors="pt").input_ids[:, :1024]
    return loaded(folder)(tokens, labels=tokens).loss.item()


def test_as_the_hf_backend_and_far_from_chance(real_model: Path, tmp_path: Path):
    task_folder, tasks = make_tasks(tmp_path), ("shipped", "own_text")
    expected = reference(str(real_model), tasks, task_folder, limit=12)
    for name, (ranks, changes) in LAYOUTS.items():
        changes = {**changes, "eval_include_path": task_folder, "eval_limit": 12}
        actual = run_ranks(scores, ranks, str(real_model), tasks, changes, timeout=400)[0]
        assert_same(actual, expected)
        print(name, {metric: round(value, 4) for metric, value in actual.metrics().items()})
    metrics = expected.metrics()
    assert metrics["shipped_choice_acc"] > 0.5 and metrics["shipped_perplexity_byte_perplexity"] < 3.0
