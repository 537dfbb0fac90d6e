"""Chooses a run's engine: by the `engine` key, else as in the resumed checkpoint, else native if it can run
it."""

from dataclasses import dataclass
from importlib.util import find_spec

from megatron.neox_arguments import ConfigError, NeoXArgs
from megatron.neox_arguments.validation.deepspeed_versions import MISSING
from megatron.training.engine import Engine
from megatron.training.native.limits import limits, native_only_feature


@dataclass(frozen=True)
class EngineChoice:
    """The name of an engine, `native` or `deepspeed`, and the reason in words for the log."""

    name: str
    reason: str

    def load(self) -> type[Engine]:
        """Returns the engine's class. It imports DeepSpeed, which takes seconds, only for that engine.

        Raises ConfigError if the name, which may come from a checkpoint, is unknown, or if DeepSpeed is
        needed and not installed.
        """
        if self.name == "native":
            from megatron.training.native.engine import NativeEngine

            return NativeEngine
        if self.name == "deepspeed":
            if find_spec("deepspeed") is None:
                raise ConfigError([f"engine deepspeed ({self.reason}) needs {MISSING}"])
            from megatron.training.deepspeed.engine import DeepSpeedEngine

            return DeepSpeedEngine
        raise ConfigError([f"engine {self.name} ({self.reason}) is unknown; write engine: native or deepspeed"])


def choose_engine(args: NeoXArgs, recorded: str | None = None) -> EngineChoice:
    """Returns the engine that a run uses, and the reason.

    args: with the world size resolved. recorded: the engine of the checkpoint that the run resumes, which
    `engine: auto` keeps; None for a new run.
    """
    if args.engine != "auto":
        return EngineChoice(args.engine, args.origin("engine"))
    if recorded is not None:
        return EngineChoice(recorded, "auto: the engine of the run that is resumed")
    native_feature = native_only_feature(args)
    limit = next(limits(args), None) if native_feature is None else None
    if limit is not None:
        return EngineChoice("deepspeed", f"auto: {limit.key} ({args.origin(limit.key)}) {limit.reason}")
    if native_feature is not None:
        return EngineChoice("native", f"auto: only the native engine supports {native_feature}")
    return EngineChoice("native", "auto")
