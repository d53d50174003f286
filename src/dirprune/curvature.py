"""Curvature of the training loss: products with its Hessian, and the eigenpairs that Lanczos finds with them."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from operator import index
from typing import Any, Literal, NamedTuple, Protocol, get_args

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from dirprune.basis import fresh, inner, length, orthogonalise, rotate, unit_of
from dirprune.batches import Loss, examples_in, mean_loss, moved, pairs, refuse_iterator
from dirprune.modes import eval_mode
from dirprune.products import (
    Kind,
    PlainWeightNorm,
    check_derivative,
    forward_product,
    has_graph,
    outputs_of,
    reverse_product,
)
from dirprune.weights import Weights, stateless, unflatten

Which = Literal["largest", "magnitude"]


class SymmetricOperator(Protocol):
    """What `top_eigenpairs` needs to know of a symmetric matrix: its size and its products."""

    @property
    def size(self) -> int: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def device(self) -> torch.device: ...
    def __matmul__(self, vector: Tensor, /) -> Tensor: ...


class MatrixOperator:
    """A symmetric matrix at hand, as an operator.

    >>> MatrixOperator(torch.diag(torch.tensor([1.0, 2.0]))) @ torch.ones(2)
    tensor([1., 2.])
    """

    def __init__(self, matrix: Tensor) -> None:
        if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1]:
            raise ValueError(f"matrix has shape {tuple(matrix.shape)}; a symmetric operator needs a square one")
        if not matrix.is_floating_point():
            raise ValueError(f"matrix is of {matrix.dtype}; give real numbers, e.g. matrix.double()")
        self.matrix, self.size, self.dtype, self.device = matrix, matrix.shape[0], matrix.dtype, matrix.device

    def __matmul__(self, vector: Tensor) -> Tensor:
        with torch.autocast(self.device.type, enabled=False):
            return torch.matmul(self.matrix, vector)


def operator_of(op: SymmetricOperator | Tensor) -> SymmetricOperator:
    """Return the operator, which may be given as a symmetric matrix."""
    if not isinstance(op, Tensor):
        return op
    op = op.detach()
    found = MatrixOperator(op)
    apart = float((op - op.T).abs().max()) if op.numel() else 0.0
    if apart > torch.finfo(op.dtype).eps ** 0.5 * float(op.abs().max()):
        raise ValueError(f"the matrix is up to {apart:.2g} apart from its transpose; give a symmetric one: (A + Aᵀ)/2")
    return found


class _Batch(NamedTuple):
    """A batch on the model's device, its number of examples, and whether it is of the common size."""

    inputs: Any
    targets: Any
    examples: int
    common: bool


class HessianOperator:
    """The Hessian of the mean loss over all examples, known by its exact products with vectors.

        H v = Σ_b n_b ∇²f_b(w) v / Σ_b n_b,    n_b examples in batch b, f_b their mean loss

    Vectors are flat, in the order of ``model.named_parameters()``, and have the parameters' dtype and device. The
    weights are read at every product. The model is evaluated in eval mode and left exactly as it was found; one batch
    is held at a time. Uncompiled, a block of vectors costs less than its vectors one by one. (On CUDA, convolutions
    round to TF32 unless ``torch.backends.cudnn.allow_tf32`` is False, which bounds the residuals that can be reached.)

    Args:
        model: any module; attention and weight norms are evaluated by their plain formulas, which differentiate twice.
        loss_fn: ``loss_fn(model(inputs), targets)``, a mean over the examples of the batch.
        batches: pairs (inputs, targets), tensors in any nesting, that can be iterated again and again and always hold
            the same examples; the length of the targets is a batch's number of examples. Tensors are moved to the
            model's device.
        parameters: the names to differentiate by, all others staying fixed; None means all.
        kind: "hessian", or "gauss-newton" for Jᵀ(∇²loss)J, its positive semidefinite part when the loss is convex.
        compiled: `torch.compile` the products, for batches as large as the first; others run uncompiled. On a GPU a
            product takes half the time, after a minute or so of compiling. Every op needs a forward-mode derivative.
        autocast: a lower precision for the forward pass, such as ``torch.bfloat16``: faster, and inexact.

    >>> inputs, targets = torch.tensor([[1.0, 2.0]]), torch.zeros(1, 1)
    >>> op = HessianOperator(nn.Linear(2, 1, bias=False), nn.MSELoss(), [(inputs, targets)])
    >>> op @ torch.tensor([1.0, 0.0])                                    # H = 2 x xᵀ
    tensor([2., 4.])

    Reference: Pearlmutter, Fast exact multiplication by the Hessian (1994); Schraudolph (2002) for Gauss-Newton.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Loss,
        batches: Iterable[tuple[Any, Any]],
        *,
        parameters: Iterable[str] | None = None,
        kind: Kind = "hessian",
        compiled: bool = False,
        autocast: torch.dtype | None = None,
    ) -> None:
        if kind not in get_args(Kind):
            raise ValueError(f"kind is {kind!r}; choose one of {', '.join(map(repr, get_args(Kind)))}")
        if autocast is not None and not isinstance(autocast, torch.dtype):
            raise ValueError(f"autocast={autocast!r} is not a dtype; give e.g. torch.bfloat16, or None")
        refuse_iterator(batches, "batches")
        chosen = _choose(model, parameters)
        self.model, self.loss_fn, self.batches, self.kind = model, loss_fn, batches, kind
        self.names = list(chosen)
        self.size = sum(parameter.numel() for parameter in chosen.values())
        self.compiled, self.autocast = compiled, autocast
        self._model_at = stateless(model)
        self._forward = forward_product(model, loss_fn, kind, autocast)
        self._fast = torch.compile(self._forward, dynamic=False) if compiled else self._forward
        self._tried = False

    @property
    def dtype(self) -> torch.dtype:
        return self.model.get_parameter(self.names[0]).dtype

    @property
    def device(self) -> torch.device:
        return self.model.get_parameter(self.names[0]).device

    def __matmul__(self, vector: Tensor) -> Tensor:
        """Return H v for one vector [d], or HV for a block [d, k]."""
        self._check(vector)
        examples = common = 0
        with _undisturbed(self.model, self.device), _differentiable(self.device):
            # A copy: compiled code is for one layout, and a tensor of inference mode takes no part in derivatives.
            columns = vector.detach().reshape(self.size, -1).T.clone(memory_format=torch.contiguous_format)
            totals = torch.zeros_like(columns)
            weights = {name: parameter.detach() for name, parameter in self.model.named_parameters()}
            buffers = dict(self.model.named_buffers())
            for inputs, targets in pairs(self.batches, "batches"):
                count = examples_in(targets)
                # One shape is compiled, the common one: a compilation costs more than the short last batch ever will.
                common = common or count
                batch = _Batch(moved(inputs, self.device), moved(targets, self.device), count, count == common)
                self._add_products(batch, weights, buffers, columns, totals)
                examples += count
        if not examples:
            raise ValueError("batches holds no examples; give at least one (inputs, targets) pair")
        return (totals / examples).T.reshape(vector.shape)

    def _add_products(self, batch: _Batch, weights: Weights, buffers: Weights, columns: Tensor, totals: Tensor) -> None:
        """Add one batch's share to the totals; its graph dies with this call, before the next batch comes."""
        product = (self._forwards if self.compiled else self._backwards)(batch, weights, buffers)
        chosen = {name: weights[name] for name in self.names}
        for column, total in zip(columns, totals, strict=True):
            pieces = product(unflatten(column, chosen))
            for name, part in unflatten(total, chosen).items():
                part.add_(pieces[name], alpha=batch.examples)

    def _backwards(self, batch: _Batch, weights: Weights, buffers: Weights) -> Callable[[Weights], Weights]:
        leaves = {name: weights[name].detach().requires_grad_() for name in self.names}
        outputs = self._outputs(batch, {**weights, **leaves}, buffers)
        if not has_graph(outputs):
            self._check_graph(batch, weights, buffers)
        product = reverse_product(self.kind, outputs, batch.targets, self.loss_fn, list(leaves.values()))
        return lambda vector: dict(zip(vector, product(list(vector.values())), strict=True))

    def _forwards(self, batch: _Batch, weights: Weights, buffers: Weights) -> Callable[[Weights], Weights]:
        forward = self._fast if batch.common else self._forward

        def product(vector: Weights) -> Weights:
            try:
                if not self._tried:  # what the plain function cannot do has crashed the compiler, and the process
                    self._check_graph(batch, weights, buffers)
                    self._forward(weights, vector, buffers, batch.inputs, batch.targets)
                    self._tried = True
                return forward(weights, vector, buffers, batch.inputs, batch.targets)
            except Exception as error:
                self._backwards(batch, weights, buffers)(vector)  # raises what is not the fault of this way
                why = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
                raise NotImplementedError(
                    f"compiled=True, but products of this model cannot be compiled ({why}); leave compiled out"
                ) from error

        return product

    def _check_graph(self, batch: _Batch, weights: Weights, buffers: Weights) -> None:
        """Refuse a model or loss that is cut off from the parameters: H would seem to be zero."""
        leaves = {name: w.detach().requires_grad_(w.is_floating_point()) for name, w in weights.items()}
        check_derivative(mean_loss(self.loss_fn, self._outputs(batch, leaves, buffers), batch.targets))

    def _outputs(self, batch: _Batch, weights: Weights, buffers: Weights) -> Any:
        # Copies, because a module may write to its buffers even in eval mode.
        copies = {name: buffer.clone() for name, buffer in buffers.items()}
        with PlainWeightNorm():
            return outputs_of(self._model_at, {**weights, **copies}, batch.inputs, self.autocast)

    def _check(self, vector: Tensor) -> None:
        if vector.ndim not in (1, 2) or vector.shape[0] != self.size:
            raise ValueError(f"vector has shape {tuple(vector.shape)}; give [{self.size}] or [{self.size}, k]")
        if vector.dtype != self.dtype or vector.device != self.device:
            raise ValueError(
                f"vector is {vector.dtype} on {vector.device}, the parameters are {self.dtype} on {self.device}; "
                "move the vector with .to(op.device, op.dtype), or the model for another precision"
            )


def _choose(model: nn.Module, names: Iterable[str] | None) -> dict[str, nn.Parameter]:
    """Return the named parameters, in the model's order."""
    known = dict(model.named_parameters())
    if isinstance(names, str):
        raise ValueError(f"parameters is the string {names!r}; give a list of names: [{names!r}]")
    names = None if names is None else list(names)
    if others := [name for name in names or () if not isinstance(name, str)]:
        raise ValueError(
            f"parameters holds a {type(others[0]).__name__}; give names, those of model.named_parameters()"
        )
    wanted = set(known if names is None else names)
    if unknown := wanted - known.keys():
        raise ValueError(f"parameters names {sorted(unknown)}, not in this model; it has {list(known)}")
    chosen = {name: parameter for name, parameter in known.items() if name in wanted}
    if not chosen:
        raise ValueError("there are no parameters to differentiate by; name at least one in parameters")
    kinds = {(parameter.dtype, parameter.device) for parameter in chosen.values()}
    if len(kinds) > 1:
        raise ValueError(f"the parameters differ in dtype or device: {sorted(map(str, kinds))}; move them to one")
    return chosen


@contextmanager
def _differentiable(device: torch.device) -> Iterator[None]:
    """Leave what the caller may be in: a mode without derivatives, or a lower precision than was asked for."""
    precision = torch.autocast(device.type, enabled=False)
    with torch.inference_mode(False), torch.enable_grad(), precision, sdpa_kernel(SDPBackend.MATH):
        yield


@contextmanager
def _undisturbed(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Evaluate the model in eval mode, and give back its modes and the random state as they were."""
    # Iterating a DataLoader draws from torch's generator, shuffling or not.
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), eval_mode(model):
        yield


@dataclass(frozen=True)
class Eigenpairs:
    """Eigenvalues [k], eigenvectors as columns [d, k], true residuals ‖Hv − λv‖ [k], and the products they took.

    ``names`` are those of the parameters that the eigenvectors run over, in that order, where the operator has names.
    """

    values: Tensor
    vectors: Tensor
    residuals: Tensor
    iterations: int
    names: tuple[str, ...] | None = None


@dataclass(frozen=True)
class LanczosStep:
    """Where Lanczos stands after one product: the wanted Ritz values, best first, and bounds of their residuals.

    ``basis`` is the solver's own memory: it holds these Ritz vectors only until the next step.
    """

    values: Tensor
    bounds: Tensor
    scale: float
    iterations: int
    converged: bool
    basis: Tensor
    coefficients: Tensor
    which: Which

    def pairs(self, op: SymmetricOperator | Tensor) -> Eigenpairs:
        """Return the best eigenpairs of ``op`` in the span of those found, with true residuals: a product for each.

        ``op`` may be the operator in a higher precision, for a lower one does not see its own error.
        """
        with torch.autocast(self.basis.device.type, enabled=False):  # a caller's own
            vectors = (self.coefficients.to(self.basis).T @ self.basis).T
            products = operator_of(op) @ vectors
            unit = unit_of(products)
            products = products / unit
            overlaps = inner(vectors.T, products).cpu()
            values, turn = _ritz((overlaps + overlaps.T) / 2, self.which)
            values, turn = values.to(vectors), turn.to(vectors)
            vectors, products = vectors @ turn, products @ turn
            residuals = torch.linalg.vector_norm(products - vectors * values, dim=0)
        names = getattr(operator_of(op), "names", None)  # of the operator: a torch.Tensor has `names` of another kind
        return Eigenpairs(values * unit, vectors, residuals * unit, self.iterations, names and tuple(names))


def top_eigenpairs(
    op: SymmetricOperator | Tensor,
    k: int,
    *,
    which: Which = "largest",
    tolerance: float = 1e-4,
    max_iterations: int = 500,
    seed: int = 0,
    basis_size: int | None = None,
) -> Eigenpairs:
    """Return the k greatest eigenvalues of a symmetric operator and their eigenvectors, by thick-restart Lanczos.

        H v_i = λ_i v_i,    ‖H v_i − λ_i v_i‖ ≤ tolerance · max|λ|

    Like every method that starts from one vector, it may see an exactly repeated eigenvalue fewer times than it occurs.
    To follow a long run, drive `lanczos_steps` instead.

    Args:
        op: a `HessianOperator`, a symmetric matrix, or anything with size, dtype, device and @.
        which: "largest" on the real line, however large the negative ones are, or "magnitude" for the largest |λ|.
        tolerance: what the residuals are held to, relative to the largest |λ| seen; a RuntimeWarning tells if not.
        max_iterations: the number of products to spend (the k of the final residuals not counted).
        basis_size: the vectors of length d to hold in memory; None means 3k + 20. More need fewer products.

    >>> top_eigenpairs(torch.diag(torch.tensor([-5.0, 1.0, 2.0, 3.0])), 2).values.round(decimals=3)
    tensor([3., 2.])

    Reference: Wu and Simon, Thick-restart Lanczos method for large symmetric eigenvalue problems (2000).
    """
    steps = lanczos_steps(
        op, k, which=which, tolerance=tolerance, max_iterations=max_iterations, seed=seed, basis_size=basis_size
    )
    for step in steps:
        last = step
    pairs = last.pairs(op)
    goal = tolerance * last.scale
    if missed := int((pairs.residuals > goal).sum()):
        warnings.warn(
            f"{missed} of {k} eigenpairs have a residual above {goal:.2g} after {pairs.iterations} products (worst "
            f"{float(pairs.residuals.max()):.2g}); raise max_iterations={max_iterations}, basis_size or "
            f"tolerance={tolerance:g}, or work in a higher precision",
            RuntimeWarning,
            stacklevel=2,
        )
    return pairs


def lanczos_steps(
    op: SymmetricOperator | Tensor,
    k: int,
    *,
    which: Which = "largest",
    tolerance: float = 1e-4,
    max_iterations: int = 500,
    seed: int = 0,
    basis_size: int | None = None,
) -> Iterator[LanczosStep]:
    """Yield the state of `top_eigenpairs` after every product; before the k-th it has fewer than k Ritz values.

    >>> op = MatrixOperator(torch.diag(torch.arange(50.0)))
    >>> for step in lanczos_steps(op, 2):
    ...     pass                                   # show step.iterations, step.values, step.bounds.max()
    >>> step.pairs(op).values.round(decimals=2)
    tensor([49., 48.])
    """
    op, k = operator_of(op), _whole(k)
    size = min(op.size, 3 * k + 20 if basis_size is None else basis_size)
    _check_request(op, k, which, size, tolerance, max_iterations)
    generator = torch.Generator(op.device).manual_seed(seed)
    # Rows are basis vectors. The operator projected on them is small: float64, on the host.
    basis = torch.zeros(size, op.size, dtype=op.dtype, device=op.device)
    projected = torch.zeros(size, size, dtype=torch.float64)
    basis[0] = fresh(basis[:0], generator)
    count, scale, unit, alone = 0, 0.0, 0.0, True
    for iteration in range(1, max_iterations + 1):
        product = op @ basis[count]
        unit = unit or unit_of(product)  # what follows is of the operator divided by it
        new, overlaps = orthogonalise(product / unit, basis[: count + 1])
        column, rest = overlaps.cpu(), length(new)
        if not math.isfinite(rest):
            raise ValueError(f"product {iteration} of op is not finite; are the weights and the loss?")
        projected[count, : count + 1] = projected[: count + 1, count] = column
        count += 1
        values, vectors = _ritz(projected[:count, :count], which)
        scale = max(scale, float(values.abs().max()))
        # Below this the rest is round-off: the basis spans an invariant space, and another vector must lead out of it.
        closed = rest <= 100 * torch.finfo(op.dtype).eps * scale or count == op.size
        bounds = (0.0 if closed else rest) * vectors[-1].abs()

        # A random vector whose product leads nowhere new is an eigenvector. It had a part in every direction that
        # remained, so all of them must share its eigenvalue: there is nothing left to look for.
        beaten = bool(_merit(column[-1], which) <= _merit(values[:k][-1], which) + 1e-6 * scale)
        rest_known = count == op.size or (closed and alone and beaten)
        # Pair k + 1 must have settled too. At a loose tolerance a great eigenvalue may not have shown up yet, and a
        # smaller one would be returned in its place.
        small = bool((bounds[: k + 1] <= tolerance * scale).all())
        done = small and (count >= k if rest_known else count > k and not closed)
        found = values[:k] * unit, bounds[:k] * unit, scale * unit
        yield LanczosStep(*found, iteration, done, basis[:count], vectors[:, :k], which)
        if done:
            return
        if count == size:
            kept = k + (size - k) // 2
            rotate(basis, vectors[:, :kept])
            projected.zero_()
            projected.diagonal()[:kept] = values[:kept]
            count = kept
        basis[count] = fresh(basis[:count], generator) if closed else new / rest
        alone = closed


def _check_request(op: SymmetricOperator, k: int, which: str, size: int, tolerance: float, max_iterations: int) -> None:
    if which not in ("largest", "magnitude"):
        raise ValueError(f"which is {which!r}; choose 'largest' or 'magnitude'")
    if torch.finfo(op.dtype).bits < 32:
        raise ValueError(
            f"op is of {op.dtype}, too coarse for an orthonormal basis; give the model or matrix in float32, e.g. "
            "model.float(), and for speed HessianOperator(…, autocast=torch.bfloat16)"
        )
    if not 1 <= k <= op.size:
        raise ValueError(f"k is {k}; an operator of size {op.size} has 1 to {op.size} eigenpairs")
    if size < min(k + 2, op.size):
        raise ValueError(f"basis_size is {size}; {k} eigenpairs need at least {k + 2}")
    if not 0 <= tolerance < math.inf:
        raise ValueError(
            f"tolerance is {tolerance}; give the greatest residual to accept, relative to max|λ|: e.g. 1e-4"
        )
    if max_iterations < k:
        raise ValueError(f"max_iterations is {max_iterations}; {k} eigenpairs need at least {k}")


def _whole(k: Any) -> int:
    """Return a whole number of any kind, numpy's too."""
    try:
        return index(k)
    except TypeError:
        raise ValueError(f"k is {k}; give a whole number of eigenpairs") from None


def _ritz(projected: Tensor, which: str) -> tuple[Tensor, Tensor]:
    """Return the eigenpairs of the small matrix, best first."""
    values, vectors = torch.linalg.eigh(projected)
    order = _merit(values, which).argsort(descending=True)
    return values[order], vectors[:, order]


def _merit(values: Tensor, which: str) -> Tensor:
    return values if which == "largest" else values.abs()


def dense(op: SymmetricOperator | Tensor) -> Tensor:
    """Return the whole matrix [d, d], made exactly symmetric, of an operator small enough for it."""
    op = operator_of(op)
    matrix = op @ torch.eye(op.size, dtype=op.dtype, device=op.device)
    return torch.lerp(matrix, matrix.T, 0.5)


def hessian_diagonal(
    op: SymmetricOperator | Tensor, *, samples: int = 100, seed: int = 0, block_size: int = 8
) -> Tensor:
    """Return Hutchinson's estimate of the diagonal: the mean of z ⊙ Hz over random signs z.

        E[z ⊙ Hz]_j = H_jj,    with variance Σ_{i≠j} H_ij² / samples

    Args:
        samples: the number of products.
        block_size: products made at once, which costs memory and saves time; it does not change the estimate.

    >>> hessian_diagonal(torch.diag(torch.tensor([1.0, 2.0])), samples=1)
    tensor([1., 2.])

    Reference: Bekas, Kokiopoulou and Saad, An estimator for the diagonal of a matrix (2007).
    """
    if samples < 1 or block_size < 1:
        raise ValueError(f"samples is {samples} and block_size {block_size}; both must be at least 1")
    op = operator_of(op)
    generator = torch.Generator(op.device).manual_seed(seed)
    total = torch.zeros(op.size, dtype=op.dtype, device=op.device)
    for start in range(0, samples, block_size):
        rows = min(block_size, samples - start)
        bits = [torch.randint(2, (op.size,), generator=generator, device=op.device) for _ in range(rows)]
        signs = 2 * torch.stack(bits, dim=1).to(op.dtype) - 1
        total += (signs * (op @ signs)).sum(1)
    return total / samples
