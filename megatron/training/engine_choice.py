"""Which engine trains a run: the `engine` key, the run it goes on from, or what this machine does best."""

from dataclasses import dataclass

from megatron.neox_arguments import ConfigError, NeoXArgs
from megatron.training.engine import Engine
from megatron.training.native.limits import limits, native_alone


@dataclass(frozen=True)
class EngineChoice:
    """name: `native` or `deepspeed`; reason: in words, for the log."""

    name: str
    reason: str

    def load(self) -> type[Engine]:
        """The class. DeepSpeed takes seconds to import and is imported for its own runs alone. Raises
        ConfigError for a name that a checkpoint has and this program does not."""
        if self.name == "native":
            from megatron.training.native.engine import NativeEngine

            return NativeEngine
        if self.name == "deepspeed":
            from megatron.training.deepspeed.engine import DeepSpeedEngine

            return DeepSpeedEngine
        raise ConfigError([f"engine {self.name} ({self.reason}) is not known here; write engine: native or deepspeed"])


def choose_engine(args: NeoXArgs, on_gpu: bool, recorded: str | None = None) -> EngineChoice:
    """args: of a run that knows its world. recorded: the engine of the checkpoint that the run goes on from;
    `auto` keeps it."""
    if args.engine != "auto":
        return EngineChoice(args.engine, args.origin("engine"))
    if recorded is not None:
        return EngineChoice(recorded, "auto: that of the run it goes on from")
    alone = native_alone(args)
    limit = next(limits(args), None) if alone is None else None
    if limit is not None:
        return EngineChoice("deepspeed", f"auto: {limit.key} ({args.origin(limit.key)}) {limit.why}")
    if alone is not None:
        return EngineChoice("native", f"auto: {alone} is its own")
    if on_gpu and args.world_size != 1:
        return EngineChoice("deepspeed", "auto: on several GPUs, where the native engine has not been measured")
    return EngineChoice("native", "auto: on one GPU" if on_gpu else "auto: on CPUs")
