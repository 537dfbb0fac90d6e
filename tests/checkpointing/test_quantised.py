"""Quantised HuggingFace folders, read as the numbers that transformers makes of them."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, Mxfp4Config
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from megatron.checkpointing import CheckpointError
from megatron.checkpointing.families.convert import from_hf
from megatron.checkpointing.huggingface import HFFolder, dequantize, export_hf
from megatron.checkpointing.huggingface.importing import import_hf, load_hf_weights, vocab_size_from_hf
from megatron.checkpointing.saved_config import load_checkpoint_args
from megatron.generation.from_huggingface import hf_model_keys
from tests.checkpointing.family_models import random_model
from tests.checkpointing.golden import fails
from tests.checkpointing.test_huggingface import same_bits, tensors_of
from tools.ckpts import convert_hf_to_neox

FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_not_convert": ["lm_head"]}
FP8_PER_TENSOR = {"quant_method": "fp8", "weight_block_size": None, "activation_scheme": "static"}
MXFP4 = {"quant_method": "mxfp4"}
SIZES = {"hidden_size": 160, "intermediate_size": 200, "num_hidden_layers": 2}


def folder_of(path: Path, tensors: dict[str, Tensor], quantization: Any, **config: Any) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    save_file({n: t.clone() for n, t in tensors.items()}, path / "model.safetensors", {"format": "pt"})
    (path / "config.json").write_text(json.dumps({"quantization_config": quantization, **config}))
    return path


def quantised(weight: Tensor, block: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """A matrix in FP8 and its scales, a block at a time."""
    scales = F.max_pool2d(weight.float().abs()[None], block, ceil_mode=True)[0] / 448
    return (weight.float() / spread(scales, block, weight.shape)).to(torch.float8_e4m3fn), scales


def spread(scales: Tensor, block: tuple[int, int], shape: torch.Size) -> Tensor:
    return scales.float().repeat_interleave(block[0], -2).repeat_interleave(block[1], -1)[..., : shape[-2], : shape[-1]]


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("shape", [(256, 384), (1536, 896), (3, 128, 256)])
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_fp8_in_blocks_is_that_of_transformers(shape: tuple[int, ...], kind: torch.dtype, tmp_path: Path) -> None:
    values = (100 * numbers(*shape)).to(torch.float8_e4m3fn)
    scales = (0.01 * numbers(*shape[:-2], shape[-2] // 128, shape[-1] // 128, seed=1)).exp().to(kind)
    folder_of(tmp_path, {"a.weight": values, "a.weight_scale_inv": scales, "b.weight": numbers(3)}, FP8)
    expected = Fp8Dequantize(None)._dequantize_one(values, scales, torch.bfloat16)
    folder = HFFolder(tmp_path)
    assert folder.shapes == {"a.weight": shape, "b.weight": (3,)}
    assert folder.dtypes == {"a.weight": torch.bfloat16, "b.weight": torch.float32}
    assert folder.quantised == "1 weights are quantised (fp8 in blocks of 128 x 128) and read as bfloat16"
    assert torch.equal(folder.get("a.weight").view(torch.int16), expected.view(torch.int16))
    wide = HFFolder(tmp_path, dtype=torch.float32)
    expected = Fp8Dequantize(None)._dequantize_one(values, scales, torch.float32)
    assert torch.equal(wide.get("a.weight"), expected) and set(wide.dtypes.values()) == {torch.float32}


@pytest.mark.parametrize(
    ("shape", "block"), [((160, 200), (128, 128)), ((129, 1), (128, 128)), ((7, 30), (2, 16)), ((8300, 130), (64, 128))]
)
def test_blocks_at_the_edges_are_what_is_left(shape: tuple[int, int], block: tuple[int, int], tmp_path: Path) -> None:
    weight = numbers(*shape)
    values, scales = quantised(weight, block)
    folder_of(tmp_path, {"a.weight": values, "a.weight_scale_inv": scales}, {**FP8, "weight_block_size": block},
              dtype="float32")  # fmt: skip
    read = HFFolder(tmp_path).get("a.weight")
    assert torch.equal(read, values.float() * spread(scales, block, weight.shape))
    torch.testing.assert_close(read, weight, rtol=2**-3, atol=0.02)


@pytest.mark.parametrize("scale", [torch.tensor(0.25), torch.tensor([0.25])])
def test_fp8_with_one_scale_leaves_those_of_activations_out(scale: Tensor, tmp_path: Path) -> None:
    """As Ministral 3 has it; of experts each has its own."""
    values, experts = numbers(40, 24).to(torch.float8_e4m3fn), numbers(3, 8, 16).to(torch.float8_e4m3fn)
    expert_scales = torch.tensor([1.0, 2.0, 4.0])
    tensors = {"q.weight": values, "q.weight_scale_inv": scale, "q.activation_scale": scale, "norm.weight": numbers(3),
               "experts.up": experts, "experts.up_scale_inv": expert_scales[:, None, None],
               "experts.up_activation_scale": scale}  # fmt: skip
    folder = HFFolder(folder_of(tmp_path, tensors, FP8_PER_TENSOR, text_config={"dtype": "float16"}))
    assert folder.shapes.keys() == {"q.weight", "norm.weight", "experts.up"}
    assert torch.equal(folder.get("q.weight"), values.half() * 0.25)
    assert torch.equal(folder.get("experts.up"), experts.half() * expert_scales[:, None, None].half())
    large = {"q.weight": values, "q.weight_scale_inv": torch.tensor(1e6)}
    folder = HFFolder(folder_of(tmp_path, large, FP8_PER_TENSOR), dtype=torch.float16)
    fails("q.weight: .* fp16", folder.get, "q.weight")


def test_mxfp4_is_that_of_transformers(tmp_path: Path) -> None:
    """Experts with their last dimensions turned, matrices as they are; large enough for several pieces."""
    generator = torch.Generator().manual_seed(0)
    experts = torch.randint(0, 256, (3, 700, 70, 16), dtype=torch.uint8, generator=generator)
    scales = torch.randint(100, 150, (3, 700, 70), dtype=torch.uint8, generator=generator)
    tensors = {"experts.up_blocks": experts, "experts.up_scales": scales, "experts.up_bias": numbers(3, 700).bfloat16(),
               "q.weight_blocks": experts[1].clone(), "q.weight_scales": scales[1].clone()}  # fmt: skip
    folder = HFFolder(folder_of(tmp_path, tensors, MXFP4, torch_dtype="bfloat16"))
    assert folder.shapes == {"experts.up": (3, 2240, 700), "experts.up_bias": (3, 700), "q.weight": (700, 2240)}
    assert set(folder.dtypes.values()) == {torch.bfloat16} and folder.quantised is not None
    expected = convert_moe_packed_tensors(experts, scales)
    assert torch.equal(folder.get("experts.up").view(torch.int16), expected.view(torch.int16))
    assert torch.equal(folder.get("q.weight").view(torch.int16), expected[1].T.contiguous().view(torch.int16))
    assert folder.get("experts.up").is_contiguous()


def in_fp8(path: Path, case: str, **sizes: int) -> dict[str, Tensor]:
    """A model whose linears are in FP8, as a folder; returns what its weights are as numbers."""
    random_model(case, torch.bfloat16, **(SIZES | sizes)).save_pretrained(path)
    config = json.loads((path / "config.json").read_text())
    tensors: dict[str, Tensor] = {}
    expected = load_file(path / "model.safetensors")
    for name, weight in list(expected.items()):
        tensors[name] = weight
        if "proj" in name or ".experts." in name:
            tensors[name], scales = quantised(weight, (128, 128))
            tensors[f"{name}_scale_inv"] = scales
            expected[name] = (tensors[name].float() * spread(scales, (128, 128), weight.shape)).bfloat16()
    folder_of(path, tensors, FP8, **config)
    return expected


def converted(place: Path, message: str, capsys: pytest.CaptureFixture[str]) -> dict[str, Tensor]:
    """`place / "hf"` by the command, and exported again. message: the command's, of its weights."""
    convert_hf_to_neox.main(["--hf-model", str(place / "hf"), "--output-dir", str(place / "neox"), "--tp", "2"])
    assert message in capsys.readouterr().out
    path = place / "neox" / "global_step0"
    args, facts = load_checkpoint_args(path)
    assert facts.dtypes == {torch.bfloat16}
    export_hf(path, args, place / "back")
    assert "quantization_config" not in json.loads((place / "back" / "config.json").read_text())
    return tensors_of(place / "back")


@pytest.mark.parametrize(("case", "sizes", "number"), [
    ("qwen 3 moe", {"moe_intermediate_size": 136}, 2 * (4 + 8 * 3)), ("mixtral", {}, 2 * (4 + 8 * 3)),
    # Attention's five linears, and of one block the experts and their shared one.
    ("deepseek 3", {"attention_bias": False}, 2 * 5 + 3 + 3 + 8 * 3),
])  # fmt: skip
def test_each_expert_has_scales_of_its_own(
    case: str, sizes: dict[str, int], number: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As in DeepSeek V3 and Qwen3-30B-A3B-FP8, but for the router. Logits are those of transformers."""
    expected = in_fp8(tmp_path / "hf", case, **sizes)
    assert same_bits(converted(tmp_path, f"{number} weights are quantised (fp8", capsys), expected)


def in_mxfp4(path: Path) -> dict[str, Tensor]:
    """gpt-oss with random experts in MXFP4, as a folder; returns what transformers makes of it."""
    random_model("gpt oss", torch.bfloat16, **(SIZES | {"intermediate_size": 96})).save_pretrained(path)
    config, tensors = json.loads((path / "config.json").read_text()), load_file(path / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, columns, rows = tensors.pop(name).shape
        groups = (experts, rows, columns // 32)
        tensors[f"{name}_blocks"] = torch.randint(0, 256, (*groups, 16), dtype=torch.uint8, generator=generator)
        tensors[f"{name}_scales"] = torch.randint(121, 125, groups, dtype=torch.uint8, generator=generator)
    not_converted = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    folder_of(path, tensors, {**MXFP4, "modules_to_not_convert": not_converted}, **config)
    options = {"attn_implementation": "eager", "quantization_config": Mxfp4Config(dequantize=True)}
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16, **options).state_dict()


def test_gpt_oss_is_imported_from_mxfp4(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the bit the weights of transformers, each dequantised once, and checked against its logits."""
    expected = in_mxfp4(tmp_path / "hf")
    back = converted(tmp_path, "4 weights are quantised (mxfp4) and read as bfloat16", capsys)
    assert same_bits(back, {name: weight.bfloat16() for name, weight in expected.items()})
    assert json.loads((tmp_path / "back" / "config.json").read_text())["model_type"] == "gpt_oss"
    shapes_read: list[tuple[int, ...]] = []
    read_rows = dequantize.Mxfp4.rows

    def rows(self: Any, values: Tensor, scales: Tensor) -> Any:
        shapes_read.append(tuple(values.shape))
        return read_rows(self, values, scales)

    monkeypatch.setattr(dequantize.Mxfp4, "rows", rows)
    folder = HFFolder(tmp_path / "hf")
    for _ in from_hf(folder.config, folder.get)[1]:
        pass
    assert shapes_read == 2 * [(8, 192, 5, 16), (8, 160, 3, 16)]


@pytest.mark.parametrize("case", ["llama 3", "qwen 3"])
def test_a_quantised_model_is_imported_and_goes_out_whole(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = in_fp8(tmp_path / "hf", case)
    message = "14 weights are quantised (fp8 in blocks of 128 x 128) and read as bfloat16"
    assert same_bits(converted(tmp_path, message, capsys), expected)
    # The same weights in the model of transformers that was never on disk
    model = random_model(case, **SIZES)
    model.load_state_dict(expected, strict=False)
    tokens = torch.arange(24)[None] % 90
    with torch.no_grad():
        expected_logits = model(tokens).logits
        exported_model = AutoModelForCausalLM.from_pretrained(
            tmp_path / "back", dtype=torch.float32, attn_implementation="eager"
        )
        assert torch.equal(exported_model(tokens).logits, expected_logits)
    run = load_checkpoint_args(tmp_path / "neox" / "global_step0")[0].replace(model_parallel_size=1)
    loaded = load_hf_weights(tmp_path / "hf", run, layers=[2], tensor_rank=0, tensor_size=1)
    assert torch.equal(loaded[2]["mlp.linear2.weight"], expected["model.layers.0.mlp.down_proj.weight"])
    assert vocab_size_from_hf(tmp_path / "hf", run, 90)[1].endswith(message)
    (tmp_path / "hf" / "tokenizer.model").write_bytes(b"")
    assert hf_model_keys(str(tmp_path / "hf"))["precision"] == "bfloat16"


def in_nvfp4(weight: Tensor, method: str, module: str) -> tuple[dict[str, Tensor], Tensor]:
    """A matrix as files hold it in NVFP4, with scales of activations; and its numbers by the formula.

    The formula (arXiv 2509.25149): the global scale maps the largest magnitude to 6 x 448, a block's scale in
    E4M3 its largest to 6, and numbers round to the nearest of E2M1.
    """
    magnitudes = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    matrix = weight.double().numpy()
    blocks = matrix.reshape(len(matrix), -1, 16)
    global_scale = np.float32(6 * 448 / np.abs(matrix).max())
    scales = torch.from_numpy(np.abs(blocks).max(2) / 6 * global_scale).float().to(torch.float8_e4m3fn)
    # In fp32, as its kernels have it: a product of numbers in fp64 would be rounded to bf16 differently.
    factor = scales.float().numpy()[..., None]
    factor = factor * (1 / global_scale) if method == "modelopt" else factor / global_scale
    codes = np.abs(np.abs(blocks / factor)[..., None] - magnitudes).argmin(-1)
    expected = np.sign(blocks).astype(np.float32) * magnitudes[codes].astype(np.float32) * factor
    codes = (codes + 8 * (blocks < 0)).reshape(len(matrix), -1)
    values = torch.from_numpy((codes[:, ::2] + 16 * codes[:, 1::2]).astype(np.uint8))
    activations = torch.ones(1)
    if method == "modelopt":
        names = {
            "weight": values,
            "weight_scale": scales,
            "weight_scale_2": torch.tensor(1 / global_scale),
            "input_scale": activations,
        }
    else:
        names = {"weight_packed": values, "weight_scale": scales, "weight_global_scale": torch.tensor([global_scale]),
                 "input_global_scale": activations}  # fmt: skip
    return {f"{module}.{name}": tensor for name, tensor in names.items()}, torch.from_numpy(
        expected.reshape(matrix.shape)
    )


NVFP4: dict[str, dict[str, Any]] = {
    "compressed-tensors": {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"},
    "modelopt": {"quant_method": "modelopt", "quant_algo": "NVFP4"},
}


@pytest.mark.parametrize("method", NVFP4)
def test_nvfp4_is_the_published_formula(method: str, tmp_path: Path) -> None:
    """A matrix large enough for several pieces; rows of very different sizes."""
    weight = numbers(900, 1280) * torch.logspace(-3, 1, 900)[:, None]
    tensors, expected = in_nvfp4(weight, method, "q")
    cache = {"k_proj.k_scale": torch.ones(1)} if method == "modelopt" else {}
    folder = HFFolder(
        folder_of(tmp_path, {**tensors, **cache, "norm.weight": numbers(3)}, NVFP4[method], dtype="float32")
    )
    assert folder.shapes == {"q.weight": (900, 1280), "norm.weight": (3,)}
    assert folder.quantised == f"1 weights are quantised (nvfp4 of {method}) and read as float32"
    assert folder.get("q.weight").equal(expected)
    large = weight.abs() > 1e-2
    assert ((expected - weight).abs() / weight.abs())[large].mean() < 0.15


@pytest.mark.parametrize(("case", "method"), [("llama 3", "compressed-tensors"), ("qwen 3 moe", "modelopt")])
def test_a_model_in_nvfp4_is_imported(
    case: str, method: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With experts of its own scales each; ModelOpt's configuration is in its own file."""
    path = tmp_path / "hf"
    sizes = {**SIZES, "intermediate_size": 192, "moe_intermediate_size": 96}
    random_model(case, torch.bfloat16, **sizes).save_pretrained(path)
    config, expected = json.loads((path / "config.json").read_text()), load_file(path / "model.safetensors")
    tensors: dict[str, Tensor] = {}
    for name, weight in list(expected.items()):
        if "proj" not in name:
            tensors[name] = weight
            continue
        parts, values = in_nvfp4(weight.float(), method, name.removesuffix(".weight"))
        tensors |= parts
        expected[name] = values.float().bfloat16()
    folder_of(path, tensors, NVFP4[method], **config)
    if method == "modelopt":
        (path / "config.json").write_text(json.dumps(config))
        (path / "hf_quant_config.json").write_text(
            json.dumps({"quantization": {"quant_algo": "NVFP4", "group_size": 16}})
        )
    back = converted(tmp_path, f"weights are quantised (nvfp4 of {method}) and read as bfloat16", capsys)
    assert same_bits(back, expected)


def test_scales_that_are_missing_or_do_not_fit_are_named(tmp_path: Path) -> None:
    values, blocks = numbers(160, 160).to(torch.float8_e4m3fn), torch.zeros(8, 2, 16, dtype=torch.uint8)
    cases: list[tuple[dict[str, Tensor], Any, str]] = [
        ({"a": values}, FP8, "a is in FP8, .*a_scale_inv .*missing"),
        ({"a": values, "a_scale_inv": numbers(2, 1)}, FP8, r"a_scale_inv: .*\(2, 1\), .*weight_block_size.* \(2, 2\)"),
        ({"a": values, "a_scale_inv": numbers(1)}, FP8, r"a_scale_inv: .*\(1,\), .* \(2, 2\)"),
        ({"a": values}, {**FP8, "weight_block_size": [128]}, r"weight_block_size: \[128\] is not a pair"),
        ({"a": values}, {**FP8, "weight_block_size": 128}, r"config\.weight_block_size: 128 is not a pair"),
        ({"a_blocks": blocks}, MXFP4, "a_blocks is in MXFP4, .*a_scales .*missing"),
        ({"a_blocks": blocks, "a_scales": blocks[..., 0, :].clone()}, MXFP4, "a_blocks .*shape"),
        ({"a": values}, {"quant_method": None, "bits": 4}, "quantised by an unnamed method "),
    ]
    packed = {"a.weight_packed": blocks[:, 0].clone()}
    nvfp4 = {**packed, "a.weight_scale": torch.ones(8, 2).to(torch.float8_e4m3fn), "a.weight_global_scale": numbers(1)}
    compressed = {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}
    cases += [
        (packed, compressed, "a.weight_packed .*NVFP4.*weight_scale.*missing"),
        (
            {**nvfp4, "a.weight_scale": torch.ones(8, 1).to(torch.float8_e4m3fn)},
            compressed,
            r"a.weight_packed .*\(8, 1\)",
        ),
        ({**nvfp4, "a.weight_global_scale": numbers(8)}, compressed, r"weight_global_scale \(8,\)"),
        ({"a": values}, {**compressed, "format": "pack-quantized"}, r"compressed-tensors \(pack-quantized\)"),
        ({"a": values}, {"quant_method": "modelopt", "quant_algo": "FP8"}, r"modelopt \(FP8\)"),
    ]
    for method in ("gptq", "awq", "bitsandbytes", "compressed-tensors"):
        cases.append(({"a": values}, {"quant_method": method, "bits": 4}, f"quantised by {method} "))
    for tensors, quantization, message in cases:
        with pytest.raises(CheckpointError, match=message):
            HFFolder(folder_of(tmp_path, tensors, quantization))
    # Without the word in config.json they are no weights
    folder = HFFolder(folder_of(tmp_path, {"a": values}, None))
    fails("a is not a floating-point tensor", folder.get, "a")
    with pytest.raises(CheckpointError):
        import_hf(folder, tmp_path / "neox")
