"""Derives values of keys from other keys, before the configuration is frozen."""

from collections.abc import Mapping
from typing import Any

from megatron.neox_arguments.errors import ErrorCollector, format_value
from megatron.neox_arguments.frozen import freeze
from megatron.neox_arguments.keys.declaration import Key
from megatron.neox_arguments.keys.model import DROPOUT_KEYS
from megatron.neox_arguments.keys.sections import Bf16, Fp16, Optimizer, ZeroOptimization
from megatron.neox_arguments.methods import train_impls
from megatron.neox_arguments.model_args import DELTA_BLOCKS, MAMBA_BLOCKS
from megatron.neox_arguments.validation.types import check_value, resolve_section

_ADAM: dict[str, Any] = {"betas": (0.9, 0.999), "eps": 1e-8}
_OPTIMIZERS: Mapping[str, dict[str, Any]] = {
    "Adam": _ADAM, "AdamW": _ADAM, "CPU_Adam": _ADAM, "CPU_Torch_Adam": _ADAM, "SGD": {"momentum": 0.0},
    "Lion": {"betas": (0.9, 0.99)},
    "Muon": {
        **_ADAM, "momentum": 0.95, "nesterov": True, "ns_steps": 5, "adjust_lr_fn": "match_rms_adamw",
        "per_head": False, "adamw_lr": None,
    },
}  # fmt: skip
_OVERRIDES = ("--", "program")
_LAYER_KINDS = (
    "global", "flash", "local", "sparse_fixed", "sparse_variable", "bigbird", "bslongformer", "gmlp", "amlp", "rwkv",
    *MAMBA_BLOCKS, "attention", "mlp", "moe", *DELTA_BLOCKS, "short_conv",
)  # fmt: skip


def derive(
    values: dict[str, Any], keys: Mapping[str, Key], user_values: Mapping[str, Any], problems: ErrorCollector
) -> dict[str, Any]:
    """Returns `values` with all derived values that do not depend on the world size. Contradictions are added
    to `problems`.

    values: every key with its checked value or default. user_values: the keys that the user wrote.
    """
    values = dict(values)
    _precision(values, problems)
    _optimizer(values, problems)
    if values["zero_optimization"] is None:
        values["zero_optimization"] = resolve_section(ZeroOptimization, {}, problems)
    if values["lr_decay_iters"] is None and values["train_iters"] is not None:
        values["lr_decay_iters"] = max(1, int(values["train_iters"] * (values["lr_decay_fraction"] or 1)))
    if values["precision_fp8"] is None:
        values["precision_fp8"] = "te" if values["te_fp8_mha"] else "off"
    if values["te_backend"] == "auto" and values["precision_fp8"] != "te":
        values["te_backend"] = "native"  # with te, the device and the installed packages decide
    if values["text_gen_type"] is None:
        values["text_gen_type"] = "input-file" if values["sample_input_file"] else "unconditional"
    for name in ("comms_logger", "dump_state"):
        if name in (values["deepspeed_extra_args"] or {}):
            check_value(keys[name], f"deepspeed_extra_args.{name}", values["deepspeed_extra_args"][name], problems)
    _repeated(values, keys, user_values, problems)
    values["world_size"] = None  # for_world sets it
    if values["compat_clip_one_is_off"] and values["gradient_clipping"] == 1:
        values["gradient_clipping"] = 0.0
    _dropout(values)
    if values["score_head"] is None:
        values["score_head"] = values["train_impl"] == "rm"
    values["no_weight_tying"] |= values["score_head"]  # a head of scores cannot share the embedding's weights
    if values["num_layers"] is not None:
        values["attention_config"] = _layer_kinds(values["attention_config"], values["num_layers"], problems)
        for name in ("layer_types", "no_rope_layers", "moe_layer_freq", "num_kv_heads", "intermediate_size"):
            if isinstance(values[name], tuple):
                values[name] = _each_layer(name, values[name], values["num_layers"], problems)
        for name in ("num_kv_heads", "intermediate_size"):
            if isinstance(values[name], tuple) and len(set(values[name])) == 1:
                values[name] = values[name][0]  # equal values are the same model as one number
    latent_widths = values["qk_nope_head_dim"], values["qk_rope_head_dim"]
    if values["head_dim"] is None and values["kv_lora_rank"] is not None and all(latent_widths):
        values["head_dim"] = sum(latent_widths)
    if values["head_dim"] is None and values["hidden_size"] is not None and values["num_attention_heads"]:
        values["head_dim"] = values["hidden_size"] // values["num_attention_heads"]
    return values


def _dropout(values: dict[str, Any]) -> None:
    """Sets every dropout to 0 if `disable_dropout` is true. If that key is unset, it becomes true unless
    `train_impl` trains on texts.

    Preference training compares a policy with a reference model, and both must be computed without dropout.
    """
    if values["disable_dropout"] is None:
        values["disable_dropout"] = train_impls()[values["train_impl"]].reads != "texts"
    if values["disable_dropout"]:
        values |= dict.fromkeys(DROPOUT_KEYS, 0.0)


def _repeated(
    values: dict[str, Any], keys: Mapping[str, Key], user_values: Mapping[str, Any], problems: ErrorCollector
) -> None:
    """Sets the keys that GPT-NeoX derives from others. A file may set such a key to the derived value; any
    other value is a problem."""
    for name, key in keys.items():
        if key.same_as is None:
            continue
        value, origin = _value_at(values, key.same_as), problems.origin(key.same_as)
        # An override of the original key is meant for both.
        overridden = (origin or "").startswith(_OVERRIDES) and not (problems.origin(name) or "").startswith(_OVERRIDES)
        if name in user_values and not overridden and not _equals_ignoring_case(values[name], value):
            problems.add(
                name,
                f"{format_value(values[name])} contradicts {key.same_as}, from which it is derived: "
                f"{format_value(value)}{f' ({origin})' if origin else ' by default'}; write {key.same_as} "
                f"and remove {name}",
            )
        values[name] = value


def _equals_ignoring_case(left: Any, right: Any) -> bool:
    if isinstance(left, str) and isinstance(right, str):
        return left.lower() == right.lower()
    return left == right


def _value_at(values: Any, path: str) -> Any:
    for part in path.split("."):
        values = values[part]
    return values


def _precision(values: dict[str, Any], problems: ErrorCollector) -> None:
    """Sets `precision` from the sections fp16 and bf16, or the sections from `precision`. Contradictions are
    added to `problems`."""
    for name, precision, section in (("fp16", "fp16", values["fp16"]), ("bf16", "bfloat16", values["bf16"])):
        if section is None:
            continue
        if section["enabled"] is None:
            if values["precision"] is None:
                problems.add(f"{name}.enabled", f"is required; write {name}: {{enabled: true}}")
            section = freeze({**section, "enabled": values["precision"] == precision})
            values[name] = section
        if section["enabled"] and values["precision"] not in (None, precision):
            precision_origin = problems.origin("precision")
            conflict = "bf16 and fp16 are both enabled"
            if precision_origin:
                conflict = f"is true, but precision is {values['precision']} ({precision_origin})"
            problems.add(f"{name}.enabled", f"{conflict}; remove one, as in --set {name}=null")
        elif section["enabled"]:
            values["precision"] = precision
        elif values["precision"] == precision:
            problems.add(f"{name}.enabled", f"is false, but precision is {precision}; remove one of them")
    values["precision"] = values["precision"] or "fp32"
    for name, precision, declaration in (("fp16", "fp16", Fp16), ("bf16", "bfloat16", Bf16)):
        if values["precision"] == precision and values[name] is None:
            values[name] = resolve_section(declaration, {"enabled": True}, problems)


def _optimizer(values: dict[str, Any], problems: ErrorCollector) -> None:
    """Sets unset parameters of the chosen optimizer to their defaults. A parameter that this optimizer does
    not have is a problem."""
    if values["optimizer"] is None:
        values["optimizer"] = resolve_section(Optimizer, {"params": {"lr": 1e-3}}, problems)
    kind, params = values["optimizer"]["type"], values["optimizer"]["params"]
    if params is None:
        return
    if params["weight_decay"] is not None:  # where DeepSpeed's files have it
        origin = problems.origin("weight_decay")
        if origin and values["weight_decay"] != params["weight_decay"]:
            problems.add("optimizer.params.weight_decay", f"is {params['weight_decay']}, but weight_decay is "
                f"{values['weight_decay']} ({origin}); remove one of them")  # fmt: skip
        values["weight_decay"] = params["weight_decay"]
    params = {name: value for name, value in params.items() if name != "weight_decay"}
    defaults: dict[str, Any] = _OPTIMIZERS.get(kind, params)
    for name, value in params.items():
        if value is not None and name != "lr" and name not in defaults:
            path = f"optimizer.params.{name}"
            problems.add(path, f"{kind} has no {name}, only lr, {', '.join(defaults)}; remove it (--set {path}=null)")
    filled = {name: default if params[name] is None else params[name] for name, default in defaults.items()}
    betas = filled.get("betas") or (0, 0)
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        problems.add("optimizer.params.betas", f"expected two numbers in [0, 1), got {format_value(filled['betas'])}")
    values["optimizer"] = freeze({"type": kind, "params": {"lr": params["lr"], **filled}})


def _each_layer(
    name: str, pattern: tuple[Any, ...], num_layers: int, problems: ErrorCollector
) -> tuple[Any, ...] | None:
    """Returns a value for each layer, by repeating the pattern. If it is empty or longer than num_layers,
    adds a problem and returns None.

    name: the key of the pattern.
    """
    if not 0 < len(pattern) <= num_layers:
        problems.add(name, f"has {len(pattern)} values, but num_layers is {num_layers}; write 1 to that many")
        return None
    return tuple(pattern[i % len(pattern)] for i in range(num_layers))


def _layer_kinds(config: Any, num_layers: int, problems: ErrorCollector) -> tuple[str, ...]:
    """Returns the kind of each layer, such as "flash". config: `attention_config`, either a list of kinds or
    `[[[KIND, ...], COUNT], ...]`, in which COUNT may be `all`."""
    if config is None:
        return ("global",) * num_layers
    if all(isinstance(item, str) for item in config):
        kinds = list(config)
    else:
        kinds = []
        for item in config:
            if not (isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], tuple) and item[0]):
                problems.add(
                    "attention_config",
                    f"expected items like [[flash], 12] or [[mamba2, mlp], all], got {format_value(item)}",
                )
                return ("global",) * num_layers
            pattern, count = item
            if count == "all":
                kinds = [pattern[i % len(pattern)] for i in range(num_layers)]
            elif isinstance(count, int) and not isinstance(count, bool) and count > 0:
                kinds += list(pattern) * min(count, num_layers + 1)
            else:
                problems.add("attention_config", f'expected a count or "all", got {format_value(count)}')
                return ("global",) * num_layers
    for kind in dict.fromkeys(kinds):
        if kind not in _LAYER_KINDS:
            problems.add(
                "attention_config",
                f"expected global, flash, {', '.join((*DELTA_BLOCKS, 'short_conv', *MAMBA_BLOCKS))}, attention, mlp or "
                f"moe, got {format_value(kind)}",
            )
    if len(kinds) != num_layers:
        problems.add(
            "attention_config", f"describes {len(kinds)} layers, but num_layers is {num_layers}; correct one of them"
        )
    return tuple(kinds)
