"""The whole layout table: every layout with every model, optimizer, tying and micro-batch size."""

from itertools import product

import pytest

from tests.pool import run_ranks
from tests.training.runs import curves, full_curve, furthest
from tests.training.test_layouts import LAYOUTS, MODELS, OPTIMIZERS, cell_config

pytestmark = pytest.mark.product


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.timeout(1800)
def test_layout_equals_one_process(name: str) -> None:
    ranks, layout = LAYOUTS[name]
    for model, optimizer, tied in product(MODELS, OPTIMIZERS, (False, True)):
        one_process = cell_config(model, optimizer, tied, 8, {})
        reference = full_curve([run_ranks(curves, 1, [one_process], timeout=120)[0][0]], one_process)
        configs = [
            cell_config(model, optimizer, tied, micro_batch, layout)
            for micro_batch in (1, 2, 4)
            if not (micro_batch == 4 and name.startswith("dp4"))
        ]
        everyone = run_ranks(curves, ranks, configs, timeout=600)
        for i, values in enumerate(configs):
            loss, norm, weights = furthest(full_curve([parts[i] for parts in everyone], values), reference)
            assert max(loss, norm) <= 1e-5 and weights <= 1e-4, (model, optimizer, tied, values)
