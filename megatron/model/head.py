"""The last layers: the final norm, and the output projection to this tensor rank's part of the vocabulary, or
to scores."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from megatron.model.embedding import copied, word_embeddings
from megatron.model.norms import NORMS, build_norm
from megatron.model.specs import FinalNormSpec, HeadSpec, ScoreSpec
from megatron.mpu import (
    Linear,
    LinearSpec,
    OutputLayer,
    ParallelGroups,
    ParamSpec,
    PlainProduct,
    Product,
    VocabParallelEmbedding,
    allocate,
    compiled_kernels,
    linear,
    plain_kernels,
    scores_of,
    with_prefix,
)


class FinalNorm(nn.Module):
    """The norm after the last block; its parameters are named `norm.*`, as in GPT-NeoX."""

    def __init__(self, spec: FinalNormSpec, groups: ParallelGroups, sequence_parallel: bool = False) -> None:
        super().__init__()
        self.multiplier = spec.multiplier
        self.norm = build_norm(spec.norm, groups, sequence_parallel)

    @staticmethod
    def params(spec: FinalNormSpec) -> tuple[ParamSpec, ...]:
        return with_prefix("norm", NORMS[spec.norm.kind].params(spec.norm))

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        return x if self.multiplier == 1.0 else x * self.multiplier


class OutputProjection(nn.Module):
    """The base of all output layers: computes logits, or passes hidden states and an `OutputLayer` to a
    function.

    softcap: c; logits x become c tanh(x / c). None: no cap.
    """

    softcap: float | None = None

    def __init__(self, groups: ParallelGroups, sequence_parallel: bool) -> None:
        super().__init__()
        self.group, self.sequence_parallel = groups.group("tensor"), sequence_parallel
        self.kernels = self.plain_kernels = plain_kernels()

    def compile_kernels(self) -> None:
        """Compiles the functions that compute a chunk of logits. Passes without gradients keep the uncompiled
        functions."""
        self.kernels = compiled_kernels()

    def projection(self) -> tuple[Tensor, Product]:
        """Returns the weight `[vocab/T, hidden]`, and the `Product` that multiplies hidden states by it."""
        raise NotImplementedError

    def forward(self, x: Tensor, use: Callable[[Tensor, OutputLayer], Any] | None = None) -> Any:
        """Returns the logits `[..., vocab/T]` of x `[..., hidden]`, or the result of `use`.

        use: called with x and the `OutputLayer`. If the weight is sharded over data ranks (ZeRO 3), it is
            available only within this call.
        """
        weight, product = self.projection()
        if use is None:
            logits = linear(x, weight, None, product)
            return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)
        kernels = self.kernels if torch.is_grad_enabled() else self.plain_kernels
        return use(x, OutputLayer(weight, product, kernels, self.softcap))


class Head(OutputProjection):
    """The output projection with a weight of its own, `final_linear.weight` (not tied to the embedding).

    With adapters, a copy of the weight may be trained and used instead (`final_linear.modules_to_save`).
    """

    def __init__(self, spec: HeadSpec, groups: ParallelGroups, sequence_parallel: bool = False) -> None:
        super().__init__(groups, sequence_parallel)
        self.final_linear = Linear(self._linear(spec), groups)
        self.final_linear.group = None  # the stage has already applied `copy_to_tensor` to its input
        allocate(self.final_linear, self._copies(spec), groups, "modules_to_save")
        self.adapters_on, self.softcap = spec.copied, spec.softcap

    @staticmethod
    def _linear(spec: HeadSpec) -> LinearSpec:
        assert spec.vocab is not None
        return LinearSpec(spec.hidden, spec.vocab, "column", bias=False)

    @classmethod
    def params(cls, spec: HeadSpec) -> tuple[ParamSpec, ...]:
        """Returns the specs of the parameters; () if the head is tied, since its weight is then the
        embedding's."""
        return () if spec.tied else (*with_prefix("final_linear", cls._linear(spec).params()), *cls._copies(spec))

    @classmethod
    def _copies(cls, spec: HeadSpec) -> tuple[ParamSpec, ...]:
        weight = with_prefix("final_linear", cls._linear(spec).params())[0]
        return (copied(weight),) if spec.copied else ()

    def projection(self) -> tuple[Tensor, Product]:
        weight = self.final_linear.modules_to_save if self.adapters_on else self.final_linear.weight
        return weight, self.final_linear.product  # type: ignore[return-value]


class ScoreHead(OutputProjection):
    """The output layer of a reward model: computes one score per token from `HeadInput.hidden_states`.

    Its parameter `rm_linear.weight`, `[1, hidden]`, is sharded along its input features as in GPT-NeoX: each
    rank computes a part of the sum.
    """

    def __init__(self, spec: ScoreSpec, groups: ParallelGroups, sequence_parallel: bool = False) -> None:
        super().__init__(groups, sequence_parallel)
        self.rm_linear = nn.Module()
        allocate(self.rm_linear, self.params(spec), groups)

    @staticmethod
    def params(spec: ScoreSpec) -> tuple[ParamSpec, ...]:
        """Returns the spec of the weight. It is initialised as in transformers (normal, deviation
        `init_method_std`)."""
        shape, blocks = (1, spec.hidden), (spec.hidden,)
        return (ParamSpec("rm_linear.weight", shape, 1, blocks, "normal", weight_decay=True),)

    def projection(self) -> tuple[Tensor, Product]:
        return self.rm_linear.weight, PlainProduct()  # type: ignore[return-value]

    def forward(self, x: Tensor, use: Callable[[Tensor, OutputLayer], Any] | None = None) -> Any:
        """Returns the scores `[..., 1]` of x `[..., hidden]`, full on every tensor rank, or the result of
        `use`.

        use: called with x and the `OutputLayer`.
        """
        if use is None:
            return scores_of(x, self.projection()[0], self.group).unsqueeze(-1)
        return super().forward(x, use)


class TiedHead(OutputProjection):
    """The output projection with the embedding's weight; with adapters, with the embedding's trained copy if
    there is one.

    If the embedding is on the same stage, the head uses its parameter. Otherwise the head has a copy, whose
    gradient is summed with the first stage's.

    product: computes the matrix products.
    """

    product: Product

    def __init__(
        self, spec: HeadSpec, groups: ParallelGroups, sequence_parallel: bool, embedding: VocabParallelEmbedding | None
    ) -> None:
        super().__init__(groups, sequence_parallel)
        self.product = PlainProduct()
        self.word_embeddings = nn.Module()
        weight = word_embeddings(spec)
        specs = (weight, copied(weight)) if spec.copied else (weight,)
        if embedding is None:
            allocate(self.word_embeddings, specs, groups, "modules_to_save")
        else:
            self.word_embeddings.weight = embedding.weight
            self.word_embeddings.register_parameter("modules_to_save", embedding.modules_to_save)
        self.adapters_on, self.softcap = spec.copied, spec.softcap

    def projection(self) -> tuple[Tensor, Product]:
        embedding = self.word_embeddings
        return embedding.modules_to_save if self.adapters_on else embedding.weight, self.product  # type: ignore[return-value]
