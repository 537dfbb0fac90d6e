"""The scaling law that is fitted to the cells of a sweep."""

import json
import math

import numpy as np
import pytest

from megatron.experiments.errors import RunError
from megatron.experiments.scaling import Point, fit_scaling
from tests.experiments.small_sweep import finish, in_process, write_sweep

LAW = {"E": 1.69, "A": 406.4, "alpha": 0.34, "B": 410.7, "beta": 0.28}  # Hoffmann et al. 2022


def planted(noise: float = 0.0, law: dict[str, float] = LAW, outliers: int = 0) -> list[Point]:
    generator = np.random.default_rng(1)
    points = []
    for n in (10**7, 3 * 10**7, 10**8, 3 * 10**8, 10**9):
        for d in (2 * 10**8, 10**9, 5 * 10**9, 25 * 10**9):
            loss = law["E"] + law["A"] / n ** law["alpha"] + law["B"] / d ** law["beta"]
            points.append(Point(f"{n} {d}", n, d, loss * math.exp(noise * generator.standard_normal())))
    return [point._replace(loss=point.loss * 1.1) if i < outliers else point for i, point in enumerate(points)]


@pytest.mark.parametrize("law", [LAW, {"E": 2.5, "A": 30.0, "alpha": 0.2, "B": 2e4, "beta": 0.5}])
def test_planted_numbers_are_recovered(law):
    fit = fit_scaling(planted(law=law), resamples=5)
    assert {name: getattr(fit, name) for name in law} == pytest.approx(law, rel=1e-3)
    assert fit.largest_error < 1e-6


def test_planted_exponents_are_recovered_from_noisy_losses():
    """Within 2 % at a noise of 0.1 % in the loss; the intervals have the planted numbers."""
    fit = fit_scaling(planted(noise=1e-3))
    assert (fit.alpha, fit.beta) == pytest.approx((LAW["alpha"], LAW["beta"]), rel=0.02)
    for name, (low, high) in fit.intervals.items():
        assert low < LAW[name] < high and low < getattr(fit, name) < high, name


def test_a_run_that_failed_to_learn_hardly_moves_the_fit():
    fit = fit_scaling(planted(outliers=1), resamples=5)
    assert (fit.alpha, fit.beta) == pytest.approx((LAW["alpha"], LAW["beta"]), rel=0.02)


def test_more_noise_means_wider_intervals():
    narrow, wide = (fit_scaling(planted(noise=noise), resamples=50).intervals["alpha"] for noise in (1e-4, 1e-2))
    assert wide[1] - wide[0] > 5 * (narrow[1] - narrow[0])


def test_the_best_size_has_the_lowest_loss_of_its_compute():
    fit = fit_scaling(planted(), resamples=5)
    n, d = fit.best_size(1e20)
    assert 6 * n * d == pytest.approx(1e20)
    assert all(fit.loss(n, d) < fit.loss(n * factor, d / factor) for factor in (0.9, 1.1))


@pytest.mark.parametrize(
    "points, names",
    [
        (planted()[:7], "7 cells"),
        ([point for point in planted() if point.n < 5 * 10**7], "N"),
        ([point._replace(d=10**9 + i % 3) for i, point in enumerate(planted())], "D"),
        ([point._replace(d=20 * point.n) for point in planted()], "N and D"),
    ],
)
def test_points_that_cannot_determine_the_law_are_refused(points, names):
    with pytest.raises(RunError, match=names):
        fit_scaling(points)


def test_the_command_fits_finished_cells_and_writes_the_fit(tmp_path):
    """The losses, parameters and tokens are those of the runs' own files."""
    points = [point for i, point in enumerate(planted()) if i % 3]
    file = write_sweep(tmp_path, runs=[{"name": f"r{i}", "seed": i} for i in range(len(points))])
    assert in_process("status", file, "--fit", "scaling").code == 1  # nothing has finished
    for i, point in enumerate(points):
        finish(tmp_path / "sweep", f"r{i}", point.loss, point.d, point.n)
        (tmp_path / f"sweep/r{i}/sweep_run.json").write_text('{"status": "finished"}')
    done = in_process("status", file, "--fit", "scaling")
    fit = json.loads((tmp_path / "sweep/scaling.json").read_text())
    assert done.code == 0 and {name: fit[name] for name in LAW} == pytest.approx(LAW, rel=1e-3)
    assert f"{fit['alpha']:.5g}" in done.out and len(fit["cells"]) == len(points)
    assert (tmp_path / "sweep/scaling.png").read_bytes()[:4] == b"\x89PNG"
