"""Seconds of operations on a machine, by hand."""

import pytest

from megatron.launch.gpus import read_gpus
from megatron.planning.machines import Link, Machine, Reached, read_links, read_reached
from megatron.planning.operations import Operation, merged

REACHED = Reached(product=0.5, fp8_product=0.5, grouped=0.5, attention=0.4, attention_backward=0.2, copy=0.5,
                  launch=0.0, host=0.0, overlap=0.0, tensor=1.0)  # fmt: skip
LOCAL, NETWORK = Link(400.0, 0.0, ""), Link(50.0, 0.0, "")
MACHINE = Machine(read_gpus()["h100"], REACHED, LOCAL, NETWORK, 8)
PEAK = 989.4e12


def product(rows: int, columns: int, length: int, *groups: int, dtype: str = "bfloat16") -> Operation:
    kind = "grouped" if groups else "product"
    return Operation(kind, "", 2.0 * rows * columns * length, 0, (rows, columns, length, *groups), dtype)


def test_tiles_that_do_not_fill_the_gpu() -> None:
    """132 multiprocessors with a tile of 128 x 256 each. A row more needs three rounds of tiles half as
    large."""
    full = product(132 * 128, 256, 4096)
    assert MACHINE.seconds(full) == pytest.approx(full.flops / (PEAK * 0.5))
    larger = product(132 * 128 + 1, 256, 4096)
    assert MACHINE.seconds(larger) == pytest.approx(1.5 * MACHINE.seconds(full))
    assert MACHINE.seconds(product(132 * 128, 256, 4096, dtype="float8_e4m3fn")) == pytest.approx(
        full.flops / (1978.9e12 * 0.5)
    )


def test_products_of_experts() -> None:
    """132 groups of 128 rows fill as many multiprocessors; groups of 64 rows take as long."""
    full, half = product(132 * 128, 256, 4096, 132), product(132 * 64, 256, 4096, 132)
    assert MACHINE.seconds(full) == pytest.approx(full.flops / (PEAK * 0.25))
    assert MACHINE.seconds(half) == pytest.approx(MACHINE.seconds(full))


def test_attention_and_memory() -> None:
    """Causality leaves half of attention's square."""
    forward = Operation("attention", "", 1e12, 0)
    assert MACHINE.seconds(forward) == pytest.approx(0.5e12 / (PEAK * 0.4))
    assert MACHINE.seconds(forward._replace(kind="attention_backward")) == pytest.approx(0.5e12 / (PEAK * 0.2))
    assert MACHINE.seconds(Operation("memory", "", 0.0, 3352e9)) == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("kind", "ranks", "seconds"),
    [
        ("all_gather", range(8), 7 / 8 * 8e9 / 400e9),
        ("all_reduce", range(8), 2 * 7 / 8 * 8e9 / 400e9),
        ("all_gather", range(16), 15 / 16 * 8e9 / 400e9),  # eight links leave each machine
        ("all_gather", range(0, 128, 8), 15 / 16 * 8e9 / 50e9),  # one
        ("all_gather", range(0, 16, 2), 7 / 8 * 8e9 / 200e9),  # four
        ("all_to_all", range(16), 8 / 16 * 8e9 / 50e9),
        ("send", (0, 8), 8e9 / 50e9),
        ("send", (0, 1), 8e9 / 400e9),
        ("barrier", range(8), 0.0),
        ("all_gather", (0,), 0.0),
    ],
)
def test_collectives(kind: str, ranks: range | tuple[int, ...], seconds: float) -> None:
    assert MACHINE.collective_seconds(kind, 8e9, tuple(ranks)) == pytest.approx(seconds)


def test_the_tables_name_each_other() -> None:
    links = read_links()
    for name, gpu in read_gpus().items():
        assert {gpu.link, gpu.network} <= set(links), name
        shares = read_reached(gpu.generation)
        assert all(0.0 < share <= 1.0 for share in shares), name
    assert all(link.source and link.bandwidth > 0 for link in links.values())


def test_equal_operations_are_counted() -> None:
    small = product(8, 8, 8)
    moved = [Operation("memory", name, 0.0, size) for name, size in (("a", 10), ("b", 30))]
    assert merged([small, *moved, small, product(8, 8, 9)]) == (
        small._replace(times=2),
        product(8, 8, 9),
        Operation("memory", "", 0.0, 20.0, times=2),
    )
    assert merged(merged([small, *moved, small])) == merged([small, *moved, small])
