"""Chooses the engine of a run: by the `engine` key, the run that it resumes, or what is best on this
machine."""

from dataclasses import dataclass

from megatron.neox_arguments import ConfigError, NeoXArgs
from megatron.training.engine import Engine
from megatron.training.native.limits import limits, native_only_feature


@dataclass(frozen=True)
class EngineChoice:
    """The name of an engine, `native` or `deepspeed`, and the reason in words for the log."""

    name: str
    reason: str

    def load(self) -> type[Engine]:
        """Returns the engine's class. DeepSpeed takes seconds to import, so only its own runs import it.

        Raises ConfigError for a name from a checkpoint that this program does not know.
        """
        if self.name == "native":
            from megatron.training.native.engine import NativeEngine

            return NativeEngine
        if self.name == "deepspeed":
            from megatron.training.deepspeed.engine import DeepSpeedEngine

            return DeepSpeedEngine
        raise ConfigError([f"engine {self.name} ({self.reason}) is not known here; write engine: native or deepspeed"])


def choose_engine(args: NeoXArgs, on_gpu: bool, recorded: str | None = None) -> EngineChoice:
    """Returns the engine of a run whose world size is known.

    recorded: the engine of the checkpoint that the run resumes; `auto` keeps it.
    """
    if args.engine != "auto":
        return EngineChoice(args.engine, args.origin("engine"))
    if recorded is not None:
        return EngineChoice(recorded, "auto: that of the run it goes on from")
    native_feature = native_only_feature(args)
    limit = next(limits(args), None) if native_feature is None else None
    if limit is not None:
        return EngineChoice("deepspeed", f"auto: {limit.key} ({args.origin(limit.key)}) {limit.reason}")
    if native_feature is not None:
        return EngineChoice("native", f"auto: {native_feature} is its own")
    if on_gpu and args.world_size != 1:
        return EngineChoice("deepspeed", "auto: on several GPUs, where the native engine has not been measured")
    return EngineChoice("native", "auto: on one GPU" if on_gpu else "auto: on CPUs")
