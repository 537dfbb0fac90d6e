"""Stand-ins for packages that need a GPU: modules under their names (`installed`).

Their functions check that calls bind to true signatures (`tests/data/signatures`), and compute with plain
torch, by the packages' documents.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from tests.stand_ins import apex, flash_attn, mamba_ssm, transformer_engine

_MODULES = {"flash_attn": flash_attn.modules, "apex": apex.modules, "mamba_ssm": mamba_ssm.modules,
            "causal_conv1d": mamba_ssm.convolution_modules, "fla": mamba_ssm.fla_modules,
            "transformer_engine": transformer_engine.modules}  # fmt: skip


@contextmanager
def installed(*packages: str) -> Iterator[None]:
    """Within: `import` of these packages gives their stand-ins."""
    contents = {name: values for package in packages for name, values in _MODULES[package]().items()}
    with modules(contents):
        yield


@contextmanager
def modules(contents: dict[str, dict[str, Any]]) -> Iterator[None]:
    """Within: modules of these names, with these attributes, stand for whatever is installed."""
    roots = {name.split(".")[0] for name in contents}
    hidden = {name: sys.modules.pop(name) for name in list(sys.modules) if name.split(".")[0] in roots}
    for name, values in contents.items():
        module = ModuleType(name)
        module.__dict__.update(values, __spec__=ModuleSpec(name, None, is_package=True), __path__=[])
        sys.modules[name] = module
    try:
        yield
    finally:
        for name in list(sys.modules):
            if name.split(".")[0] in roots:
                del sys.modules[name]
        sys.modules.update(hidden)
