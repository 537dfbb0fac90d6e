"""Position information in fp32: rotary embedding with its scalings, sinusoidal embedding, ALiBi, and T5's
relative biases."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.model.specs import RelativeSpec, RotarySpec
from megatron.mpu import ParallelGroups, ParamSpec, allocate
from megatron.neox_arguments import ModelArgs


class Rope(NamedTuple):
    """The cos and sin tables of rotary embedding for the tokens of a micro-batch.

    cos, sin: `[seq, batch, 1, rotary_dim]` fp32, cos and sin of each angle times the scaling's factor. sin is
        negated where `apply_rope` needs it.
    interleaved: dimensions 2i and 2i + 1 are rotated together; False: dimensions i and i + rotary_dim / 2.
    query_scale: `[seq, batch, 1, 1]` fp32, a factor of rotated queries; None: no factor.
    """

    cos: Tensor
    sin: Tensor
    interleaved: bool = False
    query_scale: Tensor | None = None


def _frequencies(dim: int, base: float | Tensor, device: torch.device | None = None) -> Tensor:
    """Returns the rotation frequencies in radians per position, from high to low, `[..., dim / 2]` fp32."""
    return 1.0 / base ** (torch.arange(0, dim, 2, dtype=torch.float32, device=device) / dim)


def rope_length_limit(args: ModelArgs) -> int | None:
    """Returns the text length beyond which rotary frequencies change; None if they never do.

    In longer texts, frequencies depend on the length (dynamic NTK), or are a second fixed set (LongRoPE).
    """
    scaling = args.rope_scaling
    if scaling is None or not args.rotates_by_length:
        return None
    return scaling["original_max_position_embeddings"] or args.max_position_embeddings


def rope_frequencies(rotary: RotarySpec, length: int | Tensor, device: torch.device) -> tuple[Tensor, float]:
    """Returns the scaled rotation frequencies in radians per position, `[width / 2]` fp32, and the factor of
    cos and sin.

    The formulas are HuggingFace's.

    length: number of tokens of the text, which only dynamic NTK and LongRoPE read: a number; or `[batch, 1]`
        for rows or `[batch, seq]` for tokens, and frequencies are then `[batch, 1 or seq, width / 2]`.
    """
    dim, base, scaling = rotary.width, rotary.base, rotary.scaling
    if scaling is None:
        return _frequencies(dim, base, device), 1.0
    factor = scaling["factor"]
    if scaling["rope_type"] == "proportional":  # the lower frequencies are 0
        turning = int(scaling["partial_rotary_factor"] * dim // 2)
        frequencies = _frequencies(dim, base, device) / (factor or 1.0)
        return torch.where(torch.arange(dim // 2, device=device) < turning, frequencies, 0.0), 1.0
    trained = scaling["original_max_position_embeddings"] or rotary.positions
    if scaling["rope_type"] == "dynamic":
        # Created on the device, because the host would wait for a copy.
        tokens = length if isinstance(length, Tensor) else torch.full((), length, device=device)
        stretch = factor * tokens.double().clamp(min=trained) / trained
        longer = (base * (stretch - (factor - 1)) ** (dim / (dim - 2))).float()
        return _frequencies(dim, longer.unsqueeze(-1) if longer.dim() else longer, device), 1.0
    frequencies = _frequencies(dim, base, device)
    if scaling["rope_type"] == "longrope":
        configured = scaling["attention_factor"]
        grown = longrope_factor(trained, rotary.positions) if configured is None else configured
        return _longrope(frequencies, scaling, trained, length), grown
    if scaling["rope_type"] == "linear":
        return frequencies / factor, 1.0
    if scaling["rope_type"] == "llama3":
        return _llama3(frequencies, scaling, trained), 1.0
    return _yarn(frequencies, scaling, trained, dim, base), _yarn_factor(scaling)


def _llama3(frequencies: Tensor, scaling: Mapping[str, Any], trained: int) -> Tensor:
    # Long wavelengths are stretched by the factor, short ones are kept, and those between are interpolated.
    factor, low, high = scaling["factor"], scaling["low_freq_factor"], scaling["high_freq_factor"]
    waves = 2 * math.pi / frequencies
    blend = (trained / waves - low) / (high - low)
    blended = (1 - blend) * frequencies / factor + blend * frequencies
    scaled = torch.where(waves < trained / high, frequencies, blended)
    return torch.where(waves > trained / low, frequencies / factor, scaled)


def _longrope(frequencies: Tensor, scaling: Mapping[str, Any], trained: int, length: int | Tensor) -> Tensor:
    # arXiv 2402.13753: each frequency is divided by a factor of its own, found by search. There is one list
    # of factors for texts up to the trained length, and one for longer texts.
    short, long = (
        frequencies / torch.tensor(scaling[name], dtype=torch.float32).to(frequencies.device, non_blocking=True)
        for name in ("short_factor", "long_factor")
    )
    if not isinstance(length, Tensor):
        return long if length > trained else short
    longer = length > trained
    return torch.where(longer.unsqueeze(-1) if longer.dim() else longer, long, short)


def longrope_factor(trained: int, positions: float) -> float:
    """Returns LongRoPE's attention factor, which multiplies cos and sin.

    trained: the length that the model was trained with. positions: the length to which it is extended.
    """
    return math.sqrt(1 + math.log(positions / trained) / math.log(trained)) if positions > trained else 1.0


def _yarn(frequencies: Tensor, scaling: Mapping[str, Any], trained: int, dim: int, base: float) -> Tensor:
    # arXiv 2309.00071, section 3.2. The ramp between scaled and unscaled frequencies runs over dimensions.
    # Its ends are the dimensions that make beta_fast and beta_slow full turns over the trained length.
    def dimension(turns: float) -> float:
        return dim * math.log(trained / (turns * 2 * math.pi)) / (2 * math.log(base))

    low, high = dimension(scaling["beta_fast"] or 32), dimension(scaling["beta_slow"] or 1)
    if scaling["truncate"] is not False:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    steps = torch.arange(dim // 2, dtype=torch.float32, device=frequencies.device)
    unscaled = 1 - ((steps - low) / (high - low or 0.001)).clamp(0, 1)
    stretched = 1.0 / (scaling["factor"] * base ** (2 * steps / dim))
    return stretched * (1 - unscaled) + frequencies * unscaled


def _yarn_factor(scaling: Mapping[str, Any]) -> float:
    """Returns YaRN's attention factor. It multiplies cos and sin, so attention logits are multiplied by its
    square."""

    def grown(mscale: float) -> float:
        return 0.1 * mscale * math.log(scaling["factor"]) + 1.0 if scaling["factor"] > 1 else 1.0

    if scaling["attention_factor"] is not None:
        return scaling["attention_factor"]
    if scaling["mscale"] and scaling["mscale_all_dim"]:
        return grown(scaling["mscale"]) / grown(scaling["mscale_all_dim"])
    return grown(1.0)


def rope_tables(rotary: RotarySpec, positions: Tensor, length: int | Tensor) -> Rope:
    """Returns the rotary tables for tokens at `positions` `[batch, seq]` (arXiv 2104.09864).

    length: number of tokens of the text, for scalings that depend on it (see `rope_frequencies`).
    """
    frequencies, factor = rope_frequencies(rotary, length, positions.device)
    angles = (positions.unsqueeze(-1).float() * frequencies).transpose(0, 1).unsqueeze(2)
    cos, sin = angles.cos() * factor, angles.sin() * factor
    if rotary.interleaved:
        cos, sin = cos.repeat_interleave(2, -1), torch.stack([-sin, sin], -1).flatten(-2)
    else:
        cos, sin = torch.cat([cos, cos], dim=-1), torch.cat([-sin, sin], dim=-1)
    return Rope(cos, sin, rotary.interleaved, _query_scale(rotary, positions))


def _query_scale(rotary: RotarySpec, positions: Tensor) -> Tensor | None:
    """Returns the factor of rotated queries, `[seq, batch, 1, 1]` (`Rope.query_scale`); None if the scaling
    has none.

    It grows with the position, so that attention of Llama 4 and Ministral 3 stays sharp in long texts.
    """
    beta = None if rotary.scaling is None else rotary.scaling["llama_4_scaling_beta"]
    if beta is None or rotary.scaling is None:
        return None
    turns = (positions.t() / rotary.scaling["original_max_position_embeddings"]).floor()
    return (1 + beta * torch.log(1 + turns))[..., None, None]


def apply_rope(x: Tensor, rope: Rope) -> Tensor:
    """Rotates the first `rotary_dim` dimensions of x `[seq, batch, heads, head_dim]` in fp32; the others stay
    unchanged."""
    rotary_dim = rope.cos.shape[-1]
    turning = x[..., :rotary_dim].float()
    if rope.interleaved:
        partner = turning.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    else:
        partner = turning.roll(rotary_dim // 2, -1)
    turned = (turning * rope.cos + partner * rope.sin).to(x.dtype)
    return turned if rotary_dim == x.shape[-1] else torch.cat([turned, x[..., rotary_dim:]], dim=-1)


def sinusoidal_embedding(positions: Tensor, hidden_size: int) -> Tensor:
    """Returns sinusoidal embeddings of `positions`, `[..., hidden_size]` fp32, with base 10000.

    In GPT-NeoX's order: all sines, then all cosines.
    """
    angles = positions.unsqueeze(-1).float() * _frequencies(hidden_size, 10000.0, positions.device)
    return torch.cat([angles.sin(), angles.cos()], dim=-1)


def alibi_slopes(num_heads: int) -> list[float]:
    """Returns ALiBi's slope of each head (arXiv 2108.12409).

    If the number of heads is not a power of two, slopes are interpolated as in the authors' code.
    """

    def powers(n: int) -> list[float]:
        start = 2.0 ** -(2.0 ** -(math.log2(n) - 3))
        return [start ** (i + 1) for i in range(n)]

    power = 2 ** math.floor(math.log2(num_heads))
    return powers(power) + powers(2 * power)[0::2][: num_heads - power]


def distances(seq: int, device: torch.device, queries: Tensor | None) -> Tensor:
    """Returns the column of the key minus the column of the query, `[batch or 1, 1, queries, seq]`.

    queries: the columns of the queries, `[batch, queries]`; None: all columns of seq.
    """
    keys = torch.arange(seq, device=device)
    return (keys - (keys.unsqueeze(0) if queries is None else queries).unsqueeze(2)).unsqueeze(1)


def alibi_bias(seq: int, slopes: Tensor, positions: Tensor | None = None, distance: Tensor | None = None) -> Tensor:
    """Returns ALiBi's bias of attention logits: slope * (key - query), and -inf for future keys.

    The result is `[1, heads, seq, seq]` fp32.

    slopes: `[heads]`.
    positions: `[batch, queries]`, the columns of the queries; None: all columns of seq. With it the result is
        `[batch, heads, queries, seq]`.
    distance: `[batch, 1, queries, keys]`, key - query to use instead of the difference of columns.
    """
    distance = distances(seq, slopes.device, positions) if distance is None else distance
    return (slopes.view(-1, 1, 1) * distance.float()).masked_fill(distance > 0, float("-inf"))


def relative_bucket(distance: Tensor, buckets: int, max_distance: int) -> Tensor:
    """Returns T5's bucket number of each distance query - key >= 0.

    Half of the buckets hold one distance each. The others hold ranges that grow logarithmically up to
    max_distance; longer distances are in the last bucket.
    """
    exact = buckets // 2
    growth = torch.log(distance.clamp(min=exact).float() / exact) / math.log(max_distance / exact)
    logarithmic = (exact + (growth * (buckets - exact)).long()).clamp(max=buckets - 1)
    return torch.where(distance < exact, distance, logarithmic)


class RelativePositionBias(nn.Module):
    """T5's relative position biases (arXiv 1910.10683), one table for all blocks: `weight` `[buckets, local
    heads]`.

    As in NeoX, biases are multiplied by sqrt(head_dim).
    """

    weight: nn.Parameter

    def __init__(self, spec: RelativeSpec, groups: ParallelGroups) -> None:
        super().__init__()
        self.buckets, self.max_distance = spec.buckets, spec.max_distance
        self.scale = math.sqrt(spec.head_dim)
        allocate(self, self.params(spec), groups)

    @staticmethod
    def params(spec: RelativeSpec) -> tuple[ParamSpec, ...]:
        shape, blocks = (spec.buckets, spec.heads), (spec.heads,)
        return (ParamSpec("weight", shape, 1, blocks, "xavier_normal", weight_decay=True, shared=True),)

    def forward(
        self,
        seq: int,
        positions: Tensor | None = None,
        distance: Tensor | None = None,
        heads: slice | None = None,
    ) -> Tensor:
        """Returns the bias of attention logits, -inf for future keys: `[1, heads/T, seq, seq]` fp32.

        positions: `[batch, queries]`, the columns of the queries; the result is then `[batch, heads/T,
            queries, seq]`. None: all columns of seq.
        distance: `[batch, 1, queries, keys]`, key - query to use instead of the difference of columns.
        heads: the local heads whose bias is returned; None: all.
        """
        distance = distances(seq, self.weight.device, positions) if distance is None else distance
        weight = self.weight if heads is None else self.weight[:, heads]
        bucket = relative_bucket((-distance).clamp(min=0), self.buckets, self.max_distance)
        bias = F.embedding(bucket.squeeze(1), weight.float()).permute(0, 3, 1, 2) * self.scale
        return bias.masked_fill(distance > 0, float("-inf"))
