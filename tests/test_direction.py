"""Definition 1 compared with its own minimisation problem, and the helpers around it with counting."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from dirprune.curvature import Eigenpairs, HessianOperator, top_eigenpairs
from dirprune.curvature.operators import MatrixOperator
from dirprune.direction import (
    directional_path,
    directional_prune,
    directional_score,
    eigenspace_share,
    lam_for_sparsity,
    nonflat_basis,
    null_projection,
)
from dirprune.weights import Weights, flatten, take, unflatten


def orthonormal(rows: int, columns: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.linalg.qr(torch.randn(rows, columns, generator=generator, dtype=torch.float64))[0]


@pytest.fixture
def weights() -> Weights:
    torch.manual_seed(0)
    return take(nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)).double())


def test_null_projection_is_the_kernel_of_a_least_squares_hessian() -> None:
    torch.manual_seed(0)
    x = torch.randn(3, 8, dtype=torch.float64)
    op = HessianOperator(nn.Linear(8, 1, bias=False).double(), nn.MSELoss(), [(x, torch.zeros(3, 1).double())])
    expected = torch.eye(8).double() - torch.linalg.pinv(x) @ x
    torch.testing.assert_close(null_projection(op), expected)
    assert nonflat_basis(op).shape == (8, 3)


def test_score_is_the_sign_times_the_projected_sign(weights: Weights) -> None:
    q = orthonormal(23, 5)
    w = flatten(weights)
    projection = torch.eye(23, dtype=torch.float64) - q @ q.T
    expected = torch.diag(w.sign()) @ projection @ w.sign()
    torch.testing.assert_close(directional_score(w, q), expected)
    by_name = directional_score(weights, q)
    assert list(by_name) == list(weights)
    assert torch.equal(flatten(by_name), directional_score(w, q))


def test_score_takes_the_flat_space_of_a_network_exactly() -> None:
    torch.manual_seed(0)
    model = nn.Linear(6, 1, bias=False).double()
    op = HessianOperator(model, nn.MSELoss(), [(torch.randn(2, 6).double(), torch.zeros(2, 1).double())])
    w = flatten(take(model))
    expected = w.sign() * (null_projection(op) @ w.sign())
    torch.testing.assert_close(directional_score(w, nonflat_basis(op)), expected)


def test_everything_flat_is_soft_thresholding() -> None:
    w = torch.randn(50, generator=torch.Generator().manual_seed(0))
    score = directional_score(w, torch.empty(50, 0))
    torch.testing.assert_close(directional_prune(w, score, 0.3), nn.functional.softshrink(w, 0.3))


def test_prune_minimises_the_penalised_distance() -> None:
    """Compare with a grid search for the minimum of ½(w − u)² + λ s|u| in each coordinate, for scores of both signs."""
    generator = torch.Generator().manual_seed(0)
    w = torch.randn(40, generator=generator, dtype=torch.float64)
    score = 1.6 * torch.rand(40, generator=generator, dtype=torch.float64) - 0.6
    lam = 0.7
    grid = torch.linspace(-5, 5, 100_001, dtype=torch.float64)
    objective = 0.5 * (w[:, None] - grid) ** 2 + lam * score[:, None] * grid.abs()
    pruned = directional_prune(w, score, lam)
    torch.testing.assert_close(pruned, grid[objective.argmin(1)], rtol=0, atol=1e-4)
    assert (pruned == 0).any()
    assert (pruned[score < 0].abs() > w[score < 0].abs()).all()


def test_the_difference_lies_in_the_flat_space_where_nothing_is_pruned() -> None:
    q = orthonormal(30, 4)
    w = torch.randn(30, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    score = directional_score(w, q)
    lam = 0.5 * float((w.abs() / score.clamp(min=1e-9)).min())
    difference = directional_prune(w, score, lam) - w
    torch.testing.assert_close(q.T @ difference, torch.zeros(4, dtype=torch.float64))
    assert difference.norm() > 0


def test_prune_by_name_is_prune_of_the_flat_vector(weights: Weights) -> None:
    score = directional_score(weights, orthonormal(23, 5))
    flat = directional_prune(flatten(weights), flatten(score), 0.2)
    by_name = directional_prune(weights, score, 0.2)
    assert {name: tensor.shape for name, tensor in by_name.items()} == {n: t.shape for n, t in weights.items()}
    assert torch.equal(flatten(by_name), flat)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("wanted", [0.0, 0.1, 0.3, 0.5])
def test_lam_reaches_the_sparsity_exactly_and_is_the_least(dtype: torch.dtype, wanted: float) -> None:
    generator = torch.Generator().manual_seed(0)
    w = torch.randn(1000, generator=generator, dtype=dtype)
    score = directional_score(w, orthonormal(1000, 50).to(dtype))
    lam = lam_for_sparsity(w, score, wanted)
    assert int((directional_prune(w, score, lam) == 0).sum()) == round(1000 * wanted)
    if wanted:
        assert int((directional_prune(w, score, lam * (1 - 1e-5)) == 0).sum()) < round(1000 * wanted)


def test_lam_counts_zeros_that_were_there_and_refuses_what_cannot_be_reached(weights: Weights) -> None:
    w, score = torch.tensor([0.0, 1.0, -2.0, 3.0]), torch.tensor([0.0, 0.5, 0.5, -0.1])
    assert lam_for_sparsity(w, score, 0.25) == 0
    assert lam_for_sparsity(w, score, 0.5) == pytest.approx(2)
    assert lam_for_sparsity(w, score, 0.75) == pytest.approx(4)
    with pytest.raises(ValueError, match=r"only 3 of 4 weights \(0.7500\)"):
        lam_for_sparsity(w, score, 0.76)
    with pytest.raises(ValueError, match="fraction"):
        lam_for_sparsity(w, score, 90)
    scores = directional_score(weights, orthonormal(23, 5))
    assert lam_for_sparsity(weights, scores, 0.4) == lam_for_sparsity(flatten(weights), flatten(scores), 0.4)


def test_the_path_grows_sparser_and_measures_what_it_is_told_to(weights: Weights) -> None:
    score = directional_score(weights, orthonormal(23, 5))
    lams = [0.0, *(lam_for_sparsity(weights, score, s) for s in (0.2, 0.4, 0.6))]
    points = list(directional_path(weights, score, lams, lambda u: {"norm": float(flatten(u).norm())}))
    assert [point.lam for point in points] == lams
    assert [point.sparsity for point in points] == [math.ceil(s * 23) / 23 for s in (0, 0.2, 0.4, 0.6)]
    for point in points:
        expected = directional_prune(weights, score, point.lam)
        assert torch.equal(flatten(point.weights), flatten(expected))
        assert point.measures == {"norm": float(flatten(expected).norm())}


def test_share_of_an_eigenspace_by_pythagoras() -> None:
    q, outside = orthonormal(200, 21).split([20, 1], dim=1)
    delta = 3 * q[:, 0] + 4 * outside[:, 0]
    assert eigenspace_share(delta, q).share == pytest.approx(0.6)
    assert eigenspace_share(q[:, 3], q).share == pytest.approx(1)
    like = {"a": torch.empty(20, 5), "b": torch.empty(100)}
    assert eigenspace_share(unflatten(delta, like), q) == eigenspace_share(delta, q)


def test_random_directions_share_what_the_level_says() -> None:
    q = orthonormal(200, 20)
    directions = torch.randn(500, 200, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    results = [eigenspace_share(direction, q) for direction in directions]
    assert results[0].random_level == pytest.approx(math.sqrt(0.1))
    assert math.sqrt(sum(r.share**2 for r in results) / 500) == pytest.approx(results[0].random_level, rel=0.03)


@pytest.mark.parametrize("scale", [2.0**-100, 2.0**100])
def test_the_share_does_not_depend_on_the_size_of_the_difference(scale: float) -> None:
    delta, q = torch.tensor([3.0, 4.0, 0.0, 0.0]), torch.eye(4)[:, :1]
    assert eigenspace_share(scale * delta, q) == eigenspace_share(delta, q)


def test_bad_input_is_refused_with_a_reason(weights: Weights) -> None:
    w, q = torch.ones(5), orthonormal(5, 2).float()
    with pytest.raises(ValueError, match="not orthonormal"):
        directional_score(w, 2 * q)
    with pytest.raises(ValueError, match="as columns"):
        directional_score(w, q.T)
    with pytest.raises(ValueError, match="flat vector"):
        directional_score(torch.ones(5, 1), q)
    with pytest.raises(ValueError, match="lam is -1"):
        directional_prune(w, w, -1)
    with pytest.raises(ValueError, match="lam is nan"):
        directional_prune(w, w, math.nan)
    with pytest.raises(ValueError, match="one score per weight"):
        directional_prune(w, w[:4], 1)
    with pytest.raises(ValueError, match="not in score"):
        directional_prune(weights, {}, 1)
    with pytest.raises(ValueError, match="direction is not defined"):
        eigenspace_share(torch.zeros(5), q)


def test_negative_curvature_is_not_flat() -> None:
    assert nonflat_basis(MatrixOperator(torch.diag(torch.tensor([0.0, 3.0, -2.0])))).shape == (3, 2)


def test_the_wanted_number_of_weights_is_pruned_whatever_is_rounded() -> None:
    w, ones = torch.arange(1.0, 101.0), torch.ones(100)
    assert 0.07 * 100 > 7
    assert int((directional_prune(w, ones, lam_for_sparsity(w, ones, 0.07)) == 0).sum()) == 7
    for seed in range(50):
        generator = torch.Generator().manual_seed(seed)
        w, score = (torch.rand(100, generator=generator) + 0.1 for _ in range(2))
        assert int((directional_prune(w, score, lam_for_sparsity(w, score, 0.5)) == 0).sum()) == 50


def test_weights_and_score_are_paired_by_name() -> None:
    w = {"a": torch.tensor([1.0]), "b": torch.tensor([4.0])}
    score = {"a": torch.tensor([1.0]), "b": torch.tensor([2.0])}
    assert lam_for_sparsity(w, dict(reversed(score.items())), 0.5) == lam_for_sparsity(w, score, 0.5)
    with pytest.raises(ValueError, match="'a'"):
        lam_for_sparsity({"a": torch.ones(2)}, {"b": torch.ones(2)}, 0.5)


def test_eigenvectors_that_are_not_numbers_are_refused() -> None:
    with pytest.raises(ValueError, match="orthonormal"):
        directional_score(torch.ones(3), torch.full((3, 1), math.nan))


def test_eigenpairs_find_the_weights_by_name_whatever_their_order() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, 2)).double()
    op = HessianOperator(model, nn.MSELoss(), [(torch.randn(9, 3).double(), torch.randn(9, 2).double())])
    pairs = top_eigenpairs(op, 3)
    assert pairs.names == tuple(op.names)
    weights = take(model)
    expected = directional_score(flatten(weights), pairs.vectors)
    turned = dict(reversed(weights.items()))
    score = directional_score(turned, pairs)
    assert list(score) == list(turned)
    torch.testing.assert_close(flatten({name: score[name] for name in weights}), expected)
    assert eigenspace_share(turned, pairs) == eigenspace_share(flatten(weights), pairs)

    part = top_eigenpairs(HessianOperator(model, nn.MSELoss(), op.batches, parameters=["2.weight", "0.bias"]), 2)
    chosen = {name: weights[name] for name in ("2.weight", "0.bias")}
    torch.testing.assert_close(
        directional_score(chosen, part)["2.weight"].reshape(-1),
        directional_score(flatten(dict(reversed(chosen.items()))), part.vectors)[2:],
    )
    with pytest.raises(ValueError, match=r"'0\.weight' is in w alone; .*eigenvectors\.names"):
        directional_score(weights, part)
    with pytest.raises(ValueError, match=r"'2\.weight' is in the eigenvectors alone"):
        directional_score({"0.bias": weights["0.bias"]}, part)


def test_a_symmetric_matrix_is_an_operator() -> None:
    matrix = torch.diag(torch.tensor([0.0, 3.0, -2.0]))
    assert torch.equal(null_projection(matrix), null_projection(MatrixOperator(matrix)))
    assert top_eigenpairs(matrix, 1).names is None


def test_what_does_not_go_together_is_refused_with_the_remedy(weights: Weights) -> None:
    w, q = flatten(weights), orthonormal(23, 2)
    with pytest.raises(
        ValueError, match=r"eigenvectors is torch\.float32 on cpu and w torch\.float64 .*\.to\(torch\.float64"
    ):
        directional_score(w, q.float())
    with pytest.raises(ValueError, match=r"eigenvectors is torch\.float64 on cpu and difference torch\.float32"):
        eigenspace_share(w.float(), q)
    for function in (directional_prune, lam_for_sparsity):
        with pytest.raises(ValueError, match="w is flat and score by name; give both"):
            function(w, weights, 0.1)
        with pytest.raises(ValueError, match="w is by name and score flat; give both"):
            function(weights, w, 0.1)
        with pytest.raises(ValueError, match="one score per weight"):
            function(w, w[:4], 0.1)


def test_results_do_not_carry_the_graph_of_the_weights(weights: Weights) -> None:
    q = orthonormal(23, 2)
    trained = {name: nn.Parameter(tensor) for name, tensor in weights.items()}
    flat = nn.Parameter(flatten(weights))
    for w in (trained, flat):
        score = directional_score(w, Eigenpairs(torch.ones(2), q, torch.zeros(2), 1))
        pruned = directional_prune(w, score, 0.1)
        for result in (score, pruned):
            tensors = result.values() if isinstance(result, dict) else [result]
            assert not any(tensor.requires_grad for tensor in tensors)
            assert all(type(tensor) is Tensor for tensor in tensors)


def test_a_model_is_not_its_weights() -> None:
    model = torch.nn.Linear(2, 1)
    with pytest.raises(ValueError, match="w is a Linear; give weights by name"):
        directional_score(model, torch.zeros(3, 0))  # type: ignore[type-var]
