"""One-shot pruning of a trained run: compared with an independent implementation, resumed, and refused."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import prune

from dirprune.lab.plots import save
from dirprune.lab.progress import Progress
from dirprune.lab.records import checkpoint
from dirprune.lab.records.tables import OtherSettings, read_rows
from dirprune.lab.studies.direction import scoring
from dirprune.lab.studies.direction.figures import score_figure
from dirprune.lab.studies.direction.scoring import ScoreRow, SpectrumRow, directional_pruner, score, smallest_pruner
from dirprune.lab.studies.direction.spectrum import Lanczos, curvature_of
from dirprune.lab.studies.direction.surgeon import surgeon_pruner, surgeon_steps, whole
from dirprune.lab.training import recipes, runs
from dirprune.lab.training.experiment import conduct
from dirprune.lab.training.runs import Run
from dirprune.lab.training.surroundings import Surroundings

CPU = torch.device("cpu")
QUICK = Lanczos(examples=300, batch_size=100)
GRID = (0.0, 0.3, 0.6)


def tiny(classes: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, classes))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    recipe = recipes.get("digits").but(model="test_scoring:tiny", epochs=2, optimizer="sgd")
    made = runs.create(tmp_path_factory.mktemp("runs") / "sgd", recipe)
    list(conduct(made, Surroundings(CPU)))
    return made


def measure(run: Run, out: Path, **options: object) -> list[ScoreRow]:
    given = {"ks": (0, 5), "sparsities": GRID, "samples": 20, "lanczos": QUICK, "device": CPU, **options}
    return rows_of(score(run, out, **given))


def rows_of(events: Iterator[Progress | ScoreRow]) -> list[ScoreRow]:
    return [event for event in events if isinstance(event, ScoreRow)]


def trained(run: Run) -> nn.Module:
    bench = curvature_of(run.recipe, QUICK, device=CPU)
    bench.load(runs.weights_of(run)[1])
    return bench.model.eval()


def test_weights_of_another_network_are_refused(run: Run) -> None:
    bench = curvature_of(run.recipe, QUICK, device=CPU)
    with pytest.raises(ValueError, match=r"in the network of config.json but not in there: these are different"):
        bench.load({"weight": torch.zeros(3)}, "there")


def losses(run: Run, model: nn.Module) -> tuple[float, float]:
    """Return training loss and test accuracy, each computed in one batch."""
    bench = curvature_of(run.recipe, Lanczos(batch_size=2000), device=CPU)
    (train,), (test,) = bench.train, bench.test
    with torch.no_grad():
        right = (model(test[0]).argmax(1) == test[1]).double().mean()
        return float(cross_entropy(model(train[0]), train[1])), 100 * float(right)


def test_magnitude_pruning_is_torchs_own(run: Run, tmp_path: Path) -> None:
    rows = [row for row in measure(run, tmp_path, ks=(0,)) if row.method == "magnitude"]
    assert [row.wanted for row in rows] == list(GRID)
    for row in rows:
        model = trained(run)
        targets = [(m, name) for m in model.modules() for name, _ in m.named_parameters(recurse=False)]
        count = math.ceil(row.wanted * sum(p.numel() for p in model.parameters()) - 1e-6)
        prune.global_unstructured(targets, prune.L1Unstructured, amount=count)
        train_loss, test_accuracy = losses(run, model)
        assert row.train_loss == pytest.approx(train_loss, rel=1e-4)
        assert row.test_accuracy == pytest.approx(test_accuracy)
        assert row.sparsity == pytest.approx(row.wanted, abs=0.01)


def test_without_eigenvectors_it_is_soft_thresholding(run: Run, tmp_path: Path) -> None:
    rows = [row for row in measure(run, tmp_path, ks=(0,)) if row.method == "directional"]
    for row in rows:
        model = trained(run)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(nn.functional.softshrink(parameter, row.lam))
        assert row.train_loss == pytest.approx(losses(run, model)[0], rel=1e-3)
        assert row.sparsity == pytest.approx(row.wanted, abs=0.01)


def test_all_methods_agree_on_the_unpruned_network_and_eigenvectors_lower_the_loss(run: Run, tmp_path: Path) -> None:
    rows = measure(run, tmp_path, ks=(0, 5, 40), lanczos=replace(QUICK, examples=None, tolerance=1e-6))
    assert len({row.train_loss for row in rows if row.wanted == 0}) == 1
    directional = {row.k: row.train_loss for row in rows if row.method == "directional" and row.wanted == 0.3}
    assert directional[40] < directional[0]
    spectrum = read_rows(tmp_path / "eigenvalues.csv", SpectrumRow)
    assert len(spectrum) == 40
    assert all(row.converged for row in spectrum)
    assert [row.eigenvalue for row in spectrum] == sorted((row.eigenvalue for row in spectrum), reverse=True)
    assert 0 < sum(row.sign_share for row in spectrum) < 1


def test_brain_damage_prunes_by_the_loss_that_a_weight_costs() -> None:
    """For a quadratic loss with a diagonal Hessian the saliency is the exact rise of the loss."""
    w, h = torch.tensor([1.0, -2.0, 0.5, 3.0]), torch.tensor([4.0, 0.1, 8.0, 0.1])
    lam, pruned = smallest_pruner(w, h * w.square() / 2)(0.5)
    rises = {
        pair: sum(float(h[i] * w[i] ** 2 / 2) for i in pair) for pair in ((a, b) for a in range(4) for b in range(a))
    }
    assert tuple(sorted(min(rises, key=rises.__getitem__))) == tuple((pruned == 0).nonzero().flatten().tolist())
    assert lam == pytest.approx(0.45)


def quadratic(size: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return weights and a Hessian of this rank."""
    draw = partial(torch.randn, generator=torch.Generator().manual_seed(size), dtype=torch.float64)
    factor = draw(size, rank)
    return draw(size), factor @ factor.T / rank


def test_the_surgeon_leaves_the_best_weights_that_a_quadratic_loss_allows() -> None:
    """Given which weights are zero, the others must solve the normal equations of the loss; the rises add up to it."""
    w, h = quadratic(8, 12)
    before, risen = w, 0.0
    for count, (_, now) in enumerate(surgeon_steps(w, torch.linalg.inv(h)), start=1):
        zero = now == 0
        assert int(zero.sum()) == count
        best = w.clone()
        best[zero] = 0
        if count < len(w):
            best[~zero] += torch.linalg.solve(h[~zero][:, ~zero], h[~zero][:, zero] @ w[zero])
        torch.testing.assert_close(now, best)
        # Of all weights that could have been next, it took the one with the least rise.
        loss = float((now - w) @ h @ (now - w)) / 2
        for j in (before != 0).nonzero().flatten().tolist():
            also = (before == 0) | (torch.arange(len(w)) == j)
            other = torch.linalg.lstsq(h[~also][:, ~also], h[~also] @ w).solution if count < len(w) else w.new_empty(0)
            moved = w.clone().masked_fill(also, 0)
            moved[~also] = other
            assert loss <= float((moved - w) @ h @ (moved - w)) / 2 + 1e-9
        assert loss >= risen - 1e-12
        before, risen = now, loss


def test_the_surgeon_prunes_for_nothing_where_the_loss_is_flat() -> None:
    w, h = quadratic(12, 5)
    prune, whole_loss = surgeon_pruner(w, h), float(w @ h @ w)
    for sparsity in (0.0, 0.25, 7 / 12):  # a kernel of dimension 7 leaves 7 weights free
        _, pruned = prune(sparsity)
        assert float((pruned == 0).double().mean()) == pytest.approx(sparsity)
        assert float((pruned - w) @ h @ (pruned - w)) < 1e-3 * whole_loss
    assert torch.equal(prune(7 / 12)[1], pruned)
    rise, further = prune(10 / 12)
    assert float((further - w) @ h @ (further - w)) > 1e-2 * whole_loss
    assert rise > 1e-3 * whole_loss


def test_where_nothing_is_curved_the_surgeon_prunes_by_magnitude() -> None:
    w, h = quadratic(12, 5)
    for sparsity in (0.25, 0.75):
        expected = smallest_pruner(w, w.abs())(sparsity)[1]
        torch.testing.assert_close(surgeon_pruner(w, torch.zeros_like(h))(sparsity)[1], expected)


def test_the_surgeon_beats_what_moves_no_other_weight(run: Run, tmp_path: Path) -> None:
    rows = {(row.method, row.wanted): row for row in measure(run, tmp_path, ks=(0,), sparsities=(0.0, 0.5))}
    surgeon = rows["brain-surgeon", 0.5]
    assert surgeon.sparsity == pytest.approx(0.5, abs=0.01)
    assert surgeon.train_loss < min(rows[other, 0.5].train_loss for other in ("magnitude", "brain-damage"))
    assert rows["brain-surgeon", 0.0].train_loss == rows["magnitude", 0.0].train_loss


def test_the_whole_hessian_is_that_of_single_products(run: Run) -> None:
    bench = curvature_of(run.recipe, QUICK, device=CPU)
    bench.load(runs.weights_of(run)[1])
    found = []

    def kept() -> Iterator[object]:
        found.append((yield from whole(bench.hessian)))

    list(kept())
    v = torch.randn(bench.hessian.size, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(found[0] @ v, bench.hessian @ v, rtol=1e-3, atol=1e-4)


def test_a_hessian_that_does_not_fit_leaves_the_surgeon_out(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scoring, "FITS", 100)
    methods = dict.fromkeys(row.method for row in measure(run, tmp_path, ks=(0,)))
    assert list(methods) == ["magnitude", "brain-damage", "directional"]


def test_a_sparsity_out_of_reach_is_said_and_not_measured() -> None:
    w, s = torch.tensor([1.0, 2.0, -1.0, 4.0]), torch.tensor([1.0, 0.5, -0.5, -0.1])
    to = directional_pruner(w, s)
    assert to(0.5)[0] == pytest.approx(4.0)
    lam, pruned = to(0.75)
    assert math.isinf(lam)
    assert (pruned == 0).tolist() == [True, True, False, False]


def test_products_are_kept_until_all_is_measured(run: Run, tmp_path: Path) -> None:
    options = {"ks": (5,), "sparsities": GRID, "samples": 20, "lanczos": QUICK, "device": CPU}
    events = score(run, tmp_path, **options)
    while next(events).done < 4:
        pass
    events.close()
    kept = {path: path.stat().st_mtime_ns for path in (tmp_path / "products").glob("*.pt")}
    assert len(kept) == 4
    events = score(run, tmp_path, **options)
    while next(events).done < 6:
        pass
    assert {path: path.stat().st_mtime_ns for path in kept} == kept  # read, not computed again
    assert rows_of(events) == measure(run, tmp_path / "whole", ks=(5,))
    assert not (tmp_path / "products").exists()


def test_initial_weights_are_pruned_on_request_alone(run: Run, tmp_path: Path) -> None:
    young = runs.create(tmp_path / "young", run.recipe)
    checkpoint.save(young.checkpoints, 0, {"epoch": 0, "model": runs.weights_of(run)[1]})
    with pytest.raises(ValueError, match="young has only its initial weights; train it, or give --epoch 0"):
        measure(young, tmp_path / "out")
    assert measure(young, tmp_path / "out", ks=(0,), epoch=0)


def test_finished_rows_are_kept_and_missing_ones_added(run: Run, tmp_path: Path) -> None:
    first = measure(run, tmp_path)
    again = list(score(run, tmp_path, ks=(0, 5), sparsities=GRID, samples=20, lanczos=QUICK, device=CPU))
    assert [step for step in again if isinstance(step, ScoreRow)] == first
    assert {step.what for step in again if isinstance(step, Progress)} == {"pruned networks"}  # no product was needed
    more = measure(run, tmp_path, sparsities=(*GRID, 0.5))
    assert [row for row in more if row.wanted != 0.5] == first
    assert {(row.method, row.k) for row in more if row.wanted == 0.5} == {(row.method, row.k) for row in first}
    assert len(read_rows(tmp_path / "score.csv", ScoreRow)) == len(more)
    with pytest.raises(OtherSettings, match="samples=20, not samples=30"):
        measure(run, tmp_path, samples=30)


def test_batchnorm_statistics_are_estimated_anew_on_request(run: Run, tmp_path: Path) -> None:
    plain, anew = (measure(run, tmp_path / str(on), ks=(0,), recalibrate=on) for on in (False, True))
    assert [row.sparsity for row in plain] == [row.sparsity for row in anew]
    harshest = [rows[-1].train_loss for rows in (plain, anew)]
    assert harshest[1] < harshest[0]


def test_bad_requests_are_refused(run: Run, tmp_path: Path) -> None:
    for options, message in (
        ({"ks": ()}, "ks="),
        ({"ks": (-1,)}, "ks="),
        ({"sparsities": (0.5, 90)}, "sparsities="),
        ({"samples": 0}, "samples=0"),
    ):
        with pytest.raises(ValueError, match=message):
            measure(run, tmp_path, **options)
    with pytest.raises(FileNotFoundError):
        measure(run, tmp_path, epoch=7)


def test_figure_draws_every_method(run: Run, tmp_path: Path) -> None:
    rows = measure(run, tmp_path)
    lost = replace(rows[0], method="directional", k=5, wanted=0.99, lam=math.inf, train_loss=math.nan)
    figure = score_figure([*rows, lost])
    loss, _ = figure.axes
    lines = {str(line.get_label()): line for line in loss.get_lines()}
    others = {"magnitude", "optimal brain damage", "optimal brain surgeon"}
    assert set(lines) == others | {"directional, k = 0", "directional, k = 5"}
    assert len(lines["directional, k = 5"].get_xdata()) == len(GRID)
    assert save(figure, tmp_path / "figure.png").stat().st_size > 1000
    with pytest.raises(ValueError, match="no measured row"):
        score_figure([lost])


def test_rows_of_another_network_of_the_same_name_are_never_taken_for_ours(run: Run, tmp_path: Path) -> None:
    other = runs.create(tmp_path / "sgd", replace(run.recipe, seed=7))
    list(conduct(other, Surroundings(CPU)))
    measure(run, tmp_path / "out", ks=(0,))
    with pytest.raises(OtherSettings, match="another file as epoch 2 of sgd"):
        measure(other, tmp_path / "out", ks=(0,))


def test_eigenvalues_that_are_known_stay_when_fewer_are_asked_for(run: Run, tmp_path: Path) -> None:
    measure(run, tmp_path, ks=(5,))
    measure(run, tmp_path, ks=(3,))
    rows = read_rows(tmp_path / "eigenvalues.csv", SpectrumRow)
    assert [row.index for row in rows] == [1, 2, 3, 4, 5]
