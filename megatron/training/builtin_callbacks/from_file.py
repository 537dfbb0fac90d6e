"""A user's own callbacks: classes in Python files that `callbacks` names."""

import importlib.util
import inspect
import sys
from pathlib import Path
from types import ModuleType

from megatron.callbacks import Callback
from megatron.neox_arguments import NeoXArgs


def load_callbacks(args: NeoXArgs) -> list[Callback]:
    """Returns one instance of each class that `callbacks` names (`FILE.py:CLASS`), in that order.

    A file is imported once, even for several classes. Raises ConfigError if a file is missing or cannot be
    imported, or if a class is missing, is no Callback or fails.
    """
    modules: dict[Path, ModuleType] = {}
    loaded = []
    for entry in args.callbacks:
        file_name, _, class_name = entry.rpartition(":")
        if not file_name or not class_name.isidentifier():
            raise args.error("callbacks", f"{entry}: expected FILE.py:CLASS")
        path = Path(file_name).expanduser().resolve()
        if path not in modules:
            modules[path] = _import_file(args, entry, path, len(modules))
        loaded.append(_make_callback(args, entry, getattr(modules[path], class_name, None)))
    return loaded


def _import_file(args: NeoXArgs, entry: str, path: Path, number: int) -> ModuleType:
    if not path.is_file():
        raise args.error("callbacks", f"{entry}: {path}: no such file")
    name = f"user_callbacks_{number}_{path.stem}"  # two folders may have files of one name
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise args.error("callbacks", f"{entry}: {path}: is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickles of the file look for it there
    try:
        spec.loader.exec_module(module)
    except Exception as problem:
        reason = f"{type(problem).__name__}: {problem}".splitlines()[0]
        raise args.error("callbacks", f"{entry}: {path} cannot be imported ({reason})") from problem
    return module


def _make_callback(args: NeoXArgs, entry: str, callback_class: object) -> Callback:
    class_name = entry.rpartition(":")[2]
    if callback_class is None:
        raise args.error("callbacks", f"{entry}: the file has no class {class_name}")
    if not inspect.isclass(callback_class) or not issubclass(callback_class, Callback):
        raise args.error("callbacks", f"{entry}: {class_name} is not a subclass of megatron.callbacks.Callback")
    try:
        return callback_class()
    except Exception as problem:
        reason = f"{type(problem).__name__}: {problem}".splitlines()[0]
        raise args.error("callbacks", f"{entry}: {class_name}() failed ({reason})") from problem
