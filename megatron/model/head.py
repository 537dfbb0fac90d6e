"""The last layers: the final norm, and the output projection to this rank's part of the vocabulary."""

from torch import Tensor, nn

from megatron.model.embedding import word_embeddings
from megatron.model.norms import NORMS, build_norm
from megatron.model.specs import FinalNormSpec, HeadSpec
from megatron.mpu import Linear, LinearSpec, ParallelGroups, ParamSpec, allocate, with_prefix


class FinalNorm(nn.Module):
    """The norm after the last block; GPT-NeoX names its parameters `norm.*`."""

    def __init__(self, spec: FinalNormSpec, groups: ParallelGroups, sequence_parallel: bool = False) -> None:
        super().__init__()
        self.norm = build_norm(spec.norm, groups, sequence_parallel)

    @staticmethod
    def params(spec: FinalNormSpec) -> tuple[ParamSpec, ...]:
        return with_prefix("norm", NORMS[spec.norm.kind].params(spec.norm))

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x)


class Head(nn.Module):
    """Final projection of `HeadInput.hidden_states`; parameter `final_linear.weight`."""

    def __init__(self, spec: HeadSpec, groups: ParallelGroups, sequence_parallel: bool = False) -> None:
        super().__init__()
        self.group, self.sequence_parallel = groups.group("tensor"), sequence_parallel
        self.final_linear = Linear(self._linear(spec), groups)
        self.final_linear.group = None  # its input went through `copy_to_tensor` already

    @staticmethod
    def _linear(spec: HeadSpec) -> LinearSpec:
        assert spec.vocab is not None
        return LinearSpec(spec.hidden, spec.vocab, "column", bias=False)

    @classmethod
    def params(cls, spec: HeadSpec) -> tuple[ParamSpec, ...]:
        """The head's parameters: no own ones where it is tied, since its weight is the embedding's."""
        return () if spec.tied else with_prefix("final_linear", cls._linear(spec).params())

    def forward(self, x: Tensor) -> Tensor:
        return self.final_linear(x)


class TiedHead(nn.Module):
    """Final projection with the embedding's weight: the embedding's own parameter where both are on one
    stage, else a copy whose gradient is summed with the first stage's."""

    def __init__(
        self, spec: HeadSpec, groups: ParallelGroups, sequence_parallel: bool, weight: nn.Parameter | None
    ) -> None:
        super().__init__()
        self.group, self.sequence_parallel = groups.group("tensor"), sequence_parallel
        self.word_embeddings = nn.Module()
        if weight is None:
            allocate(self.word_embeddings, [word_embeddings(spec)], groups)
        else:
            self.word_embeddings.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.word_embeddings.weight)  # type: ignore[arg-type]
