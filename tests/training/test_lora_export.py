"""What a run with `lora` writes beside its checkpoints: peft's folders, which give the run's logits."""

import json
from pathlib import Path

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file

from megatron.checkpointing import CheckpointError, find_checkpoint, load_checkpoint_args
from megatron.checkpointing.adapters import compare_merged, compare_with_peft, open_with_base
from megatron.checkpointing.averaging import average
from tests.checkpointing.family_runs import TOKENS
from tests.pool import run_ranks
from tests.training.test_huggingface import folder, given, run_to_end
from tools.ckpts import adapter, convert_neox_to_hf, inspect_checkpoints, reshard, verify


@pytest.mark.more
@pytest.mark.parametrize("kind", ["adapter", "both"])
def test_a_run_writes_peft_s_folders(tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    model = folder(tmp_path / "model")
    lora = {"r": 4, "alpha": 8, "dora": True, "init": False, "save": kind, "modules_to_save": ["embed_in", "embed_out"]}
    keys = {"save_hf": 0, "save_best": "validation/lm_loss", "eval_interval": 1, "eval_iters": 1, "lora": lora}
    run_ranks(run_to_end, 2, given(tmp_path / "run", model, model_parallel_size=2, **keys), timeout=120)
    made = find_checkpoint(tmp_path / "run")
    base, (source,) = open_with_base([made])
    compare_with_peft(base, source) if kind == "adapter" else compare_merged(base, source)
    for out in (tmp_path / "run" / "huggingface" / "global_step2", tmp_path / "run" / "best_model"):
        config = json.loads((out / "adapter_config.json").read_text())
        assert config["base_model_name_or_path"] == str(model) and (out / "tokenizer.json").is_file()
        plain = transformers.AutoModelForCausalLM.from_pretrained(model, attn_implementation="eager")
        with torch.no_grad():
            before = plain(TOKENS).logits
            tuned = peft.PeftModel.from_pretrained(plain, str(out)).eval()
            assert (tuned(TOKENS).logits - before).abs().max() > 0.1
            one, (opened,) = open_with_base([out])
            compare_with_peft(one, opened)
    step, best = (load_file(tmp_path / "run" / place / "adapter_model.safetensors") for place in (
        "huggingface/global_step2", "best_model"
    ))  # fmt: skip
    assert step.keys() == best.keys() and len(step) == 4 * 4 * 3 + 3

    inspect_checkpoints.main([str(made), "--match", "lora_A"])
    told = capsys.readouterr().out
    assert ("adapters alone, over the weights of" in told) == (kind == "adapter") and "q_proj" not in told
    with pytest.raises(SystemExit) as ended:
        verify.main([str(made)])
    assert ended.value.code == 0
    words = ["--input_dir", str(made), "--output_dir", str(tmp_path / "out")]
    with pytest.raises(SystemExit, match=r"holds adapters .*tools/ckpts/adapter\.py merge"):
        convert_neox_to_hf.main(words)
    with pytest.raises(CheckpointError, match="holds adapters"):
        average([made, find_checkpoint(tmp_path / "run", 0)], tmp_path / "mean")
    if kind == "adapter":
        with pytest.raises(SystemExit, match="holds adapters alone, over the weights of"):
            reshard.main(words)
        with pytest.raises(CheckpointError, match="holds adapters alone"):
            load_checkpoint_args(made)
    else:
        reshard.main([*words, "--tp", "1"])
        base, (again,) = open_with_base([tmp_path / "out" / made.name])
        assert all(again.read(2)[name].equal(value) for name, value in source.read(2).items())

    adapter.main(["merge", "--adapter", str(tmp_path / "run"), "--output_dir", str(tmp_path / "merged")])
    told = capsys.readouterr().out
    assert "largest logit difference of merged to unmerged" in told and "merged weights, loaded without lora" in told
    whole = find_checkpoint(tmp_path / "merged")
    words = ["--input_dir", str(whole), "--output_dir", str(tmp_path / "hf")]
    convert_neox_to_hf.main(words)
    alone = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", attn_implementation="eager")
    with torch.no_grad():
        assert (alone(TOKENS).logits - tuned(TOKENS).logits).abs().max() < 1e-5
    assert (tmp_path / "hf" / "tokenizer.json").is_file()
