"""Curves and planes through the weights of networks of one architecture."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from dirprune.weights import Weights, check_alike, check_named, flatten, unflatten


class BezierCurve(nn.Module):
    """A Bézier curve between two networks (Garipov et al. 2018, section 3); its parameters are the inner points::

        θ(t) = Σᵢ C(n, i) tⁱ (1−t)ⁿ⁻ⁱ pᵢ,   p₀ = start, pₙ = end, n = bends + 1

    One bend gives θ(t) = (1−t)²·start + 2t(1−t)·bend + t²·end; none gives the straight line. The bends begin on that
    line, bend i at the fraction i/n of it, so that the curve starts as the straight line. The endpoints never move.

    Args:
        start, end: weights of two networks of the same architecture.
        bends: number of inner control points.

    >>> curve = BezierCurve({"w": torch.zeros(2)}, {"w": torch.ones(2)})
    >>> curve.point(0.25)["w"].tolist()
    [0.25, 0.25]
    """

    _ends: Tensor

    def __init__(self, start: Mapping[str, Tensor], end: Mapping[str, Tensor], *, bends: int = 1) -> None:
        super().__init__()
        if not hasattr(bends, "__index__") or bends < 0:  # integers of any kind have it
            raise ValueError(f"bends is {bends}; give 0 for the straight line or a positive number of control points")
        check_named(start, "start")
        check_named(end, "end")
        self._like = {name: tensor.detach().to("meta") for name, tensor in start.items()}
        # Flat vectors: a point of the curve takes a few large operations, however many layers the network has. The
        # endpoints are not persistent, because they are checkpoints already: the state of the curve is its bends.
        ends = _vector(start, self._like, "start", "start"), _vector(end, self._like, "start", "end")
        for name in start:
            first, last = (f"{point[name].dtype} on {point[name].device}" for point in (start, end))
            if first != last:
                raise ValueError(f"{name!r} is {first} in start and {last} in end; bring one to the other with .to")
        self.register_buffer("_ends", torch.stack(ends), persistent=False)
        self.bends = nn.ParameterList([torch.lerp(*ends, i / (bends + 1)) for i in range(1, bends + 1)])

    def point(self, t: float | Tensor) -> Weights:
        """Return the weights θ(t), differentiable in the bends; a tensor t is not checked: that would wait."""
        if not isinstance(t, Tensor):
            if not 0 <= t <= 1:
                raise ValueError(f"t is {t}; the curve runs from t=0 (start) to t=1 (end)")
            t = torch.full((), t, dtype=torch.float64, device=self._ends.device)
        n = len(self.bends) + 1
        coefficients = [math.comb(n, i) * t**i * (1 - t) ** (n - i) for i in range(n + 1)]
        first, *inner, last = (coefficient.to(self._ends.dtype) for coefficient in coefficients)
        vector = torch.addcmul(first * self._ends[0], self._ends[1], last)
        for coefficient, bend in zip(inner, self.bends, strict=True):
            vector = torch.addcmul(vector, bend, coefficient)
        return _weights(vector, self._like)

    def control_points(self) -> list[Weights]:
        """Return copies of start, the bends, and end."""
        return [_weights(vector.detach().clone(), self._like) for vector in (self._ends[0], *self.bends, self._ends[1])]


class Plane:
    """The plane through three networks, with orthonormal axes (Garipov et al. 2018, figure 1)::

        u = (w₁ − w₀)/‖w₁ − w₀‖,   v ∝ (w₂ − w₀) − ⟨w₂ − w₀, u⟩u,   weights = w₀ + x·u + y·v

    Args:
        w0, w1, w2: weights of networks of the same architecture, not on one line; of a curve, its start, end and bend.

    >>> plane = Plane({"w": torch.zeros(3)}, {"w": torch.tensor([2.0, 0, 0])}, {"w": torch.tensor([1.0, 3, 0])})
    >>> plane.coordinates({"w": torch.tensor([1.0, 1, 0])})
    (1.0, 1.0)
    """

    def __init__(self, w0: Mapping[str, Tensor], w1: Mapping[str, Tensor], w2: Mapping[str, Tensor]) -> None:
        for i, w in enumerate((w0, w1, w2)):
            check_named(w, f"w{i}")
        self._like = {name: tensor.detach().to("meta") for name, tensor in w0.items()}
        vectors = [_vector(w, self._like, "w0", f"w{i}") for i, w in enumerate((w0, w1, w2))]
        # In float64, because x and y are small differences of long vectors.
        self._origin, second, third = (vector.double() for vector in vectors)
        across, beyond = second - self._origin, third - self._origin
        rounding = 4 * torch.finfo(vectors[0].dtype).eps * max(v.norm().item() for v in (self._origin, across, beyond))
        if across.norm() <= rounding:
            raise ValueError("w0 and w1 are the same point; a plane needs three networks that differ")
        self._u = across / across.norm()
        rest = beyond - (beyond @ self._u) * self._u
        if rest.norm() <= rounding:
            raise ValueError("w2 is on the line through w0 and w1; give a third network off it, or fit the curve first")
        self._v = rest / rest.norm()
        self.corners = tuple(self.coordinates(w) for w in (w0, w1, w2))

    def coordinates(self, weights: Mapping[str, Tensor]) -> tuple[float, float]:
        """Return (x, y) of the weights' orthogonal projection on the plane."""
        offset = _vector(weights, self._like, "the plane", "weights").to(self._origin) - self._origin
        return (offset @ self._u).item(), (offset @ self._v).item()

    def point(self, x: float, y: float) -> Weights:
        """Return the weights w₀ + x·u + y·v."""
        return _weights(torch.add(self._origin, self._u, alpha=x).add_(self._v, alpha=y), self._like)

    def grid(self, grid: int = 21, margin: float = 0.2) -> list[tuple[float, float]]:
        """Return grid × grid places (x, y), x fastest, over the networks' box and ``margin`` of it on each side."""
        if grid < 2 or not 0 <= margin < math.inf:
            raise ValueError(f"grid is {grid} and margin {margin}; give at least 2 points per side and a margin ≥ 0")
        steps = [(1 + 2 * margin) * i / (grid - 1) - margin for i in range(grid)]
        xs, ys = zip(*self.corners, strict=True)
        return [(min(xs) + a * (max(xs) - min(xs)), min(ys) + b * (max(ys) - min(ys))) for b in steps for a in steps]


def _vector(weights: Mapping[str, Tensor], like: Weights, like_is: str, weights_is: str) -> Tensor:
    """Return the weights as one vector in the order of ``like``; raise if they belong to another network."""
    check_alike(like, weights, like_is, weights_is)
    if other := next((name for name, tensor in weights.items() if not tensor.is_floating_point()), None):
        raise ValueError(
            f"{other!r} in {weights_is} is {weights[other].dtype}, not a weight; give take(model), not state_dict()"
        )
    return flatten({name: weights[name] for name in like})


def _weights(vector: Tensor, like: Weights) -> Weights:
    return {name: piece.to(like[name].dtype) for name, piece in unflatten(vector, like).items()}
