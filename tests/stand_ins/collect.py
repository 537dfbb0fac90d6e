"""Write `tests/data/signatures/*.json` from unpacked archives of the packages; none is imported or built.

    python -m tests.stand_ins.collect FOLDER...

A folder holds a package under its import name (`flash_attn`, `mamba_ssm`, `fla`, ..) or, of
transformer-engine-torch, `csrc`. Version and file of origin are written beside each signature.
"""

import ast
import json
import re
import sys
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parents[1] / "data" / "signatures"
_DPA = "transformer_engine/pytorch/attention/dot_product_attention/dot_product_attention.py"
_FLOAT8, _MXFP8 = (f"transformer_engine/pytorch/tensor/{name}_tensor.py" for name in ("float8", "mxfp8"))
_GEMM, _QUANTIZER = (f"transformer_engine/pytorch/{name}.py" for name in ("cpp_extensions/gemm", "quantized_tensor"))
_NORM, _ADAM = "apex/normalization/fused_layer_norm.py", "apex/optimizers/fused_adam.py"
# By file of signatures: the file that says the version, then what we call: name here -> file, name there.
WANTED: dict[str, dict[str, tuple[str, str]]] = {
    "flash_attn": {
        name: ("flash_attn/flash_attn_interface.py", name) for name in ("flash_attn_func", "flash_attn_varlen_func")
    },
    "transformer_engine": {
        "DotProductAttention": (_DPA, "DotProductAttention.__init__"),
        "DotProductAttention.forward": (_DPA, "DotProductAttention.forward"),
        "general_gemm": (_GEMM, "general_gemm"),
        "Float8Quantizer": (_FLOAT8, "Float8Quantizer.__init__"),
        "Float8CurrentScalingQuantizer": (_FLOAT8, "Float8CurrentScalingQuantizer.__init__"),
        "MXFP8Quantizer": (_MXFP8, "MXFP8Quantizer.__init__"),
        "Quantizer.__call__": (_QUANTIZER, "Quantizer.__call__"),
        "Quantizer.set_usage": (_QUANTIZER, "Quantizer.set_usage"),
    },
    "transformer_engine_torch": {
        name: ("csrc/extensions/pybind.cpp", name)
        for name in ("layernorm_fwd", "layernorm_bwd", "rmsnorm_fwd", "rmsnorm_bwd")
    },
    "mamba_ssm": {
        "selective_scan_fn": ("mamba_ssm/ops/selective_scan_interface.py", "selective_scan_fn"),
        "mamba_chunk_scan_combined": ("mamba_ssm/ops/triton/ssd_combined.py", "mamba_chunk_scan_combined"),
    },
    "causal_conv1d": {"causal_conv1d_fn": ("causal_conv1d/causal_conv1d_interface.py", "causal_conv1d_fn")},
    "fla": {"chunk_simple_gla": ("fla/ops/simple_gla/chunk.py", "chunk_simple_gla")},
    "apex": {
        "FusedAdam": (_ADAM, "FusedAdam.__init__"),
        "FusedAdam.step": (_ADAM, "FusedAdam.step"),
        **{
            name: (_NORM, name)
            for name in ("fused_layer_norm", "fused_layer_norm_affine", "fused_rms_norm", "fused_rms_norm_affine")
        },
    },
}


def parameters(source: str, name: str) -> list[list[str]]:
    """`[kind, name, default]` of every parameter of a function, or of CLASS.METHOD without self; the last
    definition counts. Defaults are source text, "" for none."""
    scope: Any = ast.parse(source)
    for part in name.split("."):
        kinds = (ast.FunctionDef, ast.ClassDef)
        scope = [node for node in ast.walk(scope) if isinstance(node, kinds) and node.name == part][-1]
    args = scope.args
    plain = [*args.posonlyargs, *args.args]
    defaults = [None] * (len(plain) - len(args.defaults)) + list(args.defaults)
    kind = "POSITIONAL_OR_KEYWORD"
    rows = [[kind, one.arg, ast.unparse(d) if d else ""] for one, d in zip(plain, defaults, strict=True)]
    rows = rows[1:] if "." in name else rows
    for one, default in zip(args.kwonlyargs, args.kw_defaults, strict=True):
        rows.append(["KEYWORD_ONLY", one.arg, ast.unparse(default) if default else ""])
    if args.kwarg is not None:
        rows.append(["VAR_KEYWORD", args.kwarg.arg, ""])
    return rows


def bound_parameters(pybind: str, header: str, name: str) -> list[list[str]]:
    """As `parameters`, of a function of a C++ extension: by the names that pybind gives to its parameters,
    else in the order of the header, which are then without names for callers."""
    line = re.search(rf'm\.def\("{name}",.*?\);', pybind, re.DOTALL)
    assert line is not None, name
    names = re.findall(r'py::arg\("(\w+)"\)', line[0])
    if names:
        return [["POSITIONAL_OR_KEYWORD", one, ""] for one in names]
    declared = re.search(rf"\b{name}\((.*?)\);", header, re.DOTALL)
    assert declared is not None, name
    return [["POSITIONAL_ONLY", part.split()[-1].strip("&*"), ""] for part in declared[1].split(",")]


def collect(folder: Path) -> None:
    """Write the signatures of the package in this folder."""
    kind = next(name for name in (*WANTED, "csrc") if (folder / name).is_dir())
    name = "transformer_engine_torch" if kind == "csrc" else kind
    version, functions = _version(folder, name), dict[str, Any]()
    for ours, (file, theirs) in WANTED[name].items():
        text = (folder / file).read_text()
        if kind == "csrc":
            rows = bound_parameters(text, (folder / "csrc/extensions.h").read_text(), theirs)
        else:
            rows = parameters(text, theirs)
        functions[ours] = {"file": file, "parameters": rows}
    lines = json.dumps({"package": name, "version": version, "functions": functions}, indent=1)
    lines = re.sub(r"\[\s+(\"[^\[\]]*?\")\s+\]", lambda found: f"[{' '.join(found[1].split())}]", lines)
    (FOLDER / f"{name}.json").write_text(lines + "\n")


def _version(folder: Path, name: str) -> str:
    if name == "apex":
        return (folder / "COMMIT").read_text().strip()
    texts = [path.read_text() for path in (*folder.glob("PKG-INFO"), *folder.glob("*.dist-info/METADATA"))]
    return re.findall(r"^Version: (\S+)", texts[0], re.MULTILINE)[0]


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        collect(Path(argument))
