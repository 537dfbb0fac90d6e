"""Dropout is a function of its seed and leaves the generators alone."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from megatron.mpu import dropout, fork_seed, mix_seed, seed_tensor

CPU = torch.device("cpu")


def test_same_seed_same_mask_and_the_generator_is_untouched() -> None:
    torch.manual_seed(5)
    x, state = torch.ones(1000), torch.get_rng_state()
    dropped = dropout(x, 0.3, seed_tensor(11), training=True)
    assert torch.equal(torch.get_rng_state(), state)
    torch.rand(7)
    assert torch.equal(dropout(x, 0.3, seed_tensor(11), training=True), dropped)
    assert not torch.equal(dropout(x, 0.3, seed_tensor(12), training=True), dropped)


def test_mask_has_its_share_and_scale_and_is_the_gradients() -> None:
    x = torch.ones(100_000, requires_grad=True)
    dropped = dropout(x, 0.25, seed_tensor(1), training=True)
    is_retained = dropped != 0
    # Standard error of the share is sqrt(0.25 * 0.75 / 1e5) = 0.0014.
    assert abs(float(is_retained.float().mean()) - 0.75) < 0.007
    torch.testing.assert_close(dropped[is_retained], torch.full((int(is_retained.sum()),), 1 / 0.75))
    (gradient,) = torch.autograd.grad(dropped.sum(), x)
    assert torch.equal(gradient, dropped)
    assert dropout(x, 0.5, seed_tensor(1), training=False) is dropout(x, 0.0, seed_tensor(1), training=True) is x


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_code_draws_what_eager_code_draws(dtype: torch.dtype) -> None:
    """In one graph, which is compiled once for all seeds."""
    torch.compiler.reset()
    graphs = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(lambda x, seed: dropout(x, 0.3, seed, True) * 2, backend=graphs, fullgraph=True)
    for seed in range(5):
        x = torch.randn(4, 6, dtype=dtype).t().requires_grad_()
        out, eager = compiled(x, seed_tensor(seed)), dropout(x, 0.3, seed_tensor(seed), True) * 2
        assert torch.equal(out, eager)
        assert torch.equal(*(torch.autograd.grad(y, x, torch.full_like(y, 3.0))[0] for y in (out, eager)))
    assert graphs.frame_count == 1


def test_generator_returns_after_an_error() -> None:
    state = torch.get_rng_state()
    with pytest.raises(RuntimeError), fork_seed(3, CPU):
        torch.rand(3)
        raise RuntimeError
    assert torch.equal(torch.get_rng_state(), state)


def test_seeds_are_apart_and_valid() -> None:
    seeds = {mix_seed(s, layer, place) for s in range(10) for layer in range(10) for place in range(3)}
    assert len(seeds) == 300 and all(0 <= seed < 2**63 for seed in seeds)
    assert mix_seed(1, 23) != mix_seed(12, 3) and mix_seed("a", 1) == mix_seed("a", 1)
    with fork_seed(2**63 - 1 + 64, CPU):  # the largest seed with a tensor rank added
        torch.rand(1)
