"""The parts of `make gpu`: commands, time limits and required packages. No torch.

Their order here counts where the plan has no better reason (`plan.py`).
"""

from dataclasses import dataclass, field, replace
from importlib.util import find_spec

# What a part may need beside torch. Those the project itself requires: a run without them is no success.
REQUIRED = frozenset({"deepspeed"})
OUTCOMES = "outcomes.jsonl"  # what tests write as they end
PASSED = "passed.json"  # names of tests that passed in an earlier run
RESULT = "result.json"  # what the others write, and write again as they go on
FACTS = "facts"
_THROUGHPUT = "benchmarks/train_throughput.py"
_SHAPE_OF = {
    "1.4B": ("neox", "1.4B"), "7B shape": ("llama", "7B-8layers"), "OLMoE shape": ("olmoe", "OLMoE-6layers"),
}  # fmt: skip


@dataclass(frozen=True)
class Part:
    """One process of the run.

    command: words after the interpreter; `{folder}` stands for the part's own folder.
    typical_s: expected seconds; the part starts only if they are left. limit_s: seconds until it is killed.
    packages: the part is skipped without them. tests: it runs pytest and writes OUTCOMES instead of RESULT.
    baseline: name of the part to whose speed its own is compared. env: variables to set for it.
    """

    name: str
    description: str
    command: tuple[str, ...]
    typical_s: float
    limit_s: float
    packages: tuple[str, ...] = ()
    tests: bool = False
    baseline: str | None = None
    env: dict[str, str] = field(default_factory=dict)


def _tests(name: str, description: str, file: str, typical_s: float, limit_s: float) -> Part:
    """Returns a part that runs pytest. file: files or functions below tests/gpu, separated by spaces."""
    words = ("-m", "pytest", "-p", "tests.gpu.outcomes", "-m", "gpu", "-q", "--tb=short", "-p", "no:cacheprovider")
    files = [f"tests/gpu/{name}" for name in file.split()]
    command = (*words, "--outcomes", "{folder}/" + OUTCOMES, "--passed", "{folder}/" + PASSED, *files)
    return Part(name, description, command, typical_s, limit_s, ("pytest",), tests=True)


def _speed(name: str, shape: str, contestant: str, *extra_words: str, packages: tuple[str, ...] = ()) -> Part:
    """Returns a part that times a training step of one contestant, compared with bare torch."""
    style, preset = _SHAPE_OF[shape]
    command = (
        _THROUGHPUT, "--shape", preset, "--style", style, "--compile", "--only", contestant, "--zero", "1",
        "--rounds", "2", "--json", "{folder}/" + RESULT, *extra_words,
    )  # fmt: skip
    baseline = None if name == f"{shape}, bare torch" else f"{shape}, bare torch"
    return Part(name, f"a training step of the {shape}", command, 30, 120, packages, baseline=baseline)


def anatomy(shape: str) -> Part:
    """Returns the part that profiles a step of the native engine and plots it in the part's folder."""
    style, preset = _SHAPE_OF[shape]
    command = (
        "benchmarks/anatomy.py", "--shape", preset, "--style", style, "--compile", "--json", "{folder}/" + RESULT,
        "--png", "{folder}/step.png",
    )  # fmt: skip
    return Part(f"anatomy, {shape}", f"every kernel of a step of the {shape}, beside its floor", command, 30, 120)


def _dpo() -> Part:
    """Returns the part that times DPO, and TRL's DPO too if it is installed."""
    has_trl = all(map(find_spec, ("trl", "datasets", "accelerate")))
    command = (
        "benchmarks/posttrain.py", "--shape", "400M", "--trl", "best" if has_trl else "none", "--pairs", "32",
        "--rounds", "1", "--json", "{folder}/" + RESULT,
    )  # fmt: skip
    description = f"a pass of DPO over 32 pairs, {'beside TRL at its best' if has_trl else 'TRL is not installed'}"
    return Part("DPO", description, command, 95, 150, ("deepspeed", "transformers"))


_HEAD = Part(
    "head and loss", "the output layer and its loss, 16,384 x 2048 x 50304 in bf16, beside their three products",
    ("benchmarks/head_loss.py", "--shape", "1.4B", "--rounds", "5", "--json", "{folder}/" + RESULT), 15, 120,
)  # fmt: skip


_EXPERTS = Part(
    "experts", "a block of experts forwards and backwards beside transformers' and its matrix products alone",
    ("benchmarks/experts.py", "--shape", "30b", "--rounds", "3", "--json", "{folder}/" + RESULT), 12, 90,
    ("transformers",),
)  # fmt: skip


_MAMBA = Part(
    "Mamba", "mixers of Mamba and Mamba 2 forwards and backwards beside transformers' and their first and last product",
    ("benchmarks/mamba.py", "--shape", "mamba2 2.7B", "--rounds", "3", "--json", "{folder}/" + RESULT), 30, 120,
    ("transformers",),
)  # fmt: skip


_DECODING = ("benchmarks/decoding.py", "--shape", "1.4B", "--rounds", "2", "--json", "{folder}/" + RESULT)
GENERATION: tuple[Part, ...] = (
    Part(
        "generation", "tokens/s of a 1.4B Llama, 1 and 32 rows, captured steps or not, beside transformers",
        (*_DECODING, "--tokens", "64"), 30, 75, ("transformers",),
    ),
    Part(
        "RL sampling", "tokens/s drawn with log-probabilities, 64 rows; other weights by a folder",
        (*_DECODING, "--draw", "--only", "captured", "eager", "--rows", "64"), 25, 75, ("transformers",),
    ),
    Part(
        "generation, compiled", "captured steps beside transformers with a static cache, which it compiles",
        (*_DECODING, "--tokens", "64", "--only", "captured", "static", "--rows", "32"), 35, 120, ("transformers",),
    ),
    Part(
        "generation, vLLM", "captured steps beside vLLM",
        (*_DECODING, "--tokens", "64", "--only", "captured", "vllm"), 60, 150, ("transformers", "vllm"),
    ),
)  # fmt: skip


CORRECTNESS: tuple[Part, ...] = (
    Part(
        FACTS, "what the machine is; the largest rates of products and copies",
        ("-m", "benchmarks.gpu_run.facts", "{folder}/" + RESULT), 10, 60,
    ),
    _tests("device", "driver, doctor, collectives of NCCL with one rank", "test_device_gpu.py", 15, 60),
    _tests("attention", "each kernel beside the plain formula", "test_attention_gpu.py", 140, 260),
    _tests(
        "layers", "each kind of layer beside the CPU, packed beside separate documents, bf16",
        "test_layers_gpu.py", 25, 90,
    ),
    _tests("update", "AdamW in one pass beside torch's, and under the next forward", "test_update_gpu.py", 40, 120),
    _tests("training", "steps in fp32, bf16, fp16 with a dynamic scale", "test_training_gpu.py", 115, 240),
    _tests(
        "compile", "compiled blocks beside eager ones",
        "test_compile_gpu.py::test_compiled_chunk_scan_equals_the_eager_one "
        "test_compile_gpu.py::test_compiled_blocks_equal_eager_ones", 90, 150,
    ),
    _tests(
        "block-max", "compiled blocks whose kernels are chosen by trying them, beside eager ones",
        "test_compile_gpu.py::test_blocks_of_tried_kernels_equal_eager_ones", 75, 150,
    ),
    _tests(
        "checkpoints", "resumed bit for bit; written there, read on a CPU",
        "test_checkpoints_gpu.py test_host_copies_gpu.py", 80, 180,
    ),
    _tests("FP8", "casts and products beside the CPU, steps beside bf16", "test_fp8_gpu.py", 80, 180),
    _tests(
        "objectives", "DPO begins at ln 2, and text is the CPU's", "test_objectives_gpu.py", 120, 240
    ),
    _tests("captured steps", "decode steps as CUDA graphs beside plain ones", "test_generation_gpu.py", 20, 60),
    _tests(
        "packages", "flash-attn, Transformer-Engine and apex, where they are installed, beside torch",
        "test_packages_gpu.py", 15, 120,
    ),
    _tests("two GPUs", "NCCL over two ranks beside one process", "test_two_gpus.py", 15, 120),
)  # fmt: skip
_FP8, _ROWWISE = ("--set", "precision_fp8=tensorwise"), ("--set", "precision_fp8=rowwise")
_PACKED, _DEEPSPEED, _RIVAL = ("--documents", "512"), ("deepspeed",), ("transformers",)
SPEED: tuple[Part, ...] = (
    anatomy("1.4B"),
    _speed("1.4B, bare torch", "1.4B", "bare"),
    _speed("1.4B, native", "1.4B", "native"),
    _speed("1.4B, native, packed", "1.4B", "native", *_PACKED),
    _speed("1.4B, native, FP8", "1.4B", "native", *_FP8),
    _speed("1.4B, DeepSpeed", "1.4B", "deepspeed", packages=_DEEPSPEED),
    _speed("7B shape, bare torch", "7B shape", "bare"),
    _speed("7B shape, native", "7B shape", "native"),
    _speed("7B shape, native, FP8", "7B shape", "native", *_FP8),
)
MORE_SPEED: tuple[Part, ...] = (
    anatomy("7B shape"),
    replace(
        _speed("1.4B, native, 16 micro-batches", "1.4B", "native", "--micro-batches", "16", "--steps", "2"),
        typical_s=50,
    ),
    _HEAD,
    _EXPERTS,
    _MAMBA,
    _speed("1.4B, transformers", "1.4B", "transformers", packages=_RIVAL),
    _speed("7B shape, DeepSpeed", "7B shape", "deepspeed", packages=_DEEPSPEED),
    _speed("7B shape, native, FP8 rowwise", "7B shape", "native", *_ROWWISE),
    _speed("7B shape, transformers", "7B shape", "transformers", packages=_RIVAL),
    _speed("OLMoE shape, bare torch", "OLMoE shape", "bare"),
    _speed("OLMoE shape, native", "OLMoE shape", "native"),
    _speed("OLMoE shape, transformers", "OLMoE shape", "transformers", packages=_RIVAL),
)
BASE = "as it is"
_NO_EXPANDABLE = {"PYTORCH_ALLOC_CONF": "expandable_segments:False"}
# What is changed, from the engine's step as it is: configuration keys, or variables.
_ABLATIONS: dict[str, tuple[tuple[str, ...], dict[str, str]]] = {
    BASE: ((), {}),
    "compile: false": (("compile=false",), {}),
    "compile: block-max": (("compile=block-max",), {}),
    "attention_backend: flash": (("attention_backend=flash",), {}),
    "without expandable segments": ((), _NO_EXPANDABLE),
    "DeepSpeed, ZeRO 1": (("zero_optimization.stage=1",), {}),
    "DeepSpeed, ZeRO 1, overlap_comm: true": (("zero_optimization.overlap_comm=true",), {}),
    "DeepSpeed, ZeRO 2": (("zero_optimization.stage=2",), {}),
    "DeepSpeed, ZeRO 3": (("zero_optimization.stage=3",), {}),
    "DeepSpeed, ZeRO 3, overlap_comm: false": (
        ("zero_optimization.stage=3", "zero_optimization.overlap_comm=false"),
        {},
    ),
    "checkpoint_activations: true": (("checkpoint_activations=true",), {}),
    "recompute_granularity: selective": (("checkpoint_activations=true", "recompute_granularity=selective"), {}),
    "hidden_dropout: 0.1": (("hidden_dropout=0.1",), {}),
    "gradient_clipping: 0": (("gradient_clipping=0",), {}),
    "fused_update: false": (("fused_update=false",), {}),
    "optimizer_state_dtype: bf16": (("optimizer_state_dtype=bf16",), {}),
    "overlap_optimizer_with_forward: true": (("overlap_optimizer_with_forward=true",), {}),
}


def parts() -> list[Part]:
    """Returns the parts of `make gpu`: correctness, in order of dependence, then speed."""
    return [*CORRECTNESS, *SPEED, _dpo(), *GENERATION, *MORE_SPEED]


def ablations() -> list[Part]:
    """Returns parts that time the 1.4B shape's training step, each with one changed key or variable."""
    changed_parts = []
    for name, (keys, env) in _ABLATIONS.items():
        engine = "deepspeed" if "zero_optimization" in " ".join(keys) else "native"
        packages = ("deepspeed",) if engine == "deepspeed" else ()
        part = _speed(name, "1.4B", engine, *(("--set", *keys) if keys else ()), packages=packages)
        changed_parts.append(
            replace(part, baseline=None if name == BASE else BASE, description="the engine's step", env=env)
        )
    return [CORRECTNESS[0], *changed_parts]


def rehearsed(part: Part) -> Part:
    """Returns the part changed to run on a CPU with a tiny shape, without `--compile`."""
    small = {"--shape": "rehearsal", "--rounds": "1", "--pairs": "8", "--documents": "16"}
    words, command = iter(part.command), []
    for word in words:
        if word == "--compile":
            continue
        command.append(word)
        if word in small:
            next(words)
            command.append(small[word])
    if part.tests or part.name == FACTS:
        command.append("--rehearse")
    else:
        command += ["--device", "cpu"]
        command += ["--steps", "1"] if _THROUGHPUT in command and "--steps" not in command else []
    return replace(part, command=tuple(command), typical_s=part.typical_s / 4, limit_s=4 * part.limit_s)
