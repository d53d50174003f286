"""Curvature of the training loss: products with its Hessian, its leading eigenpairs, its diagonal."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, get_args

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from dirprune._support.batches import Loss, examples_in, mean_loss, moved, pairs, refuse_iterator
from dirprune._support.modes import eval_mode
from dirprune.curvature.lanczos import Eigenpairs, Which, lanczos_steps
from dirprune.curvature.operators import SymmetricOperator, operator_of
from dirprune.curvature.products import (
    Kind,
    PlainWeightNorm,
    check_derivative,
    forward_product,
    has_graph,
    outputs_of,
    reverse_product,
)
from dirprune.weights import Weights, stateless, unflatten

__all__ = ["Eigenpairs", "HessianOperator", "hessian_diagonal", "top_eigenpairs"]


class _Batch(NamedTuple):
    """A batch on the model's device, its number of examples, and whether it has the common size."""

    inputs: Any
    targets: Any
    examples: int
    common: bool


class HessianOperator:
    """The Hessian of the mean loss over all examples, as an operator with exact products with vectors::

        H v = Σ_b n_b ∇²f_b(w) v / Σ_b n_b,    n_b examples in batch b, f_b their mean loss

    Vectors are flat, in the order of ``model.named_parameters()``, and have the parameters' dtype and device. The
    weights are read at every product. The model is evaluated in eval mode and left exactly as it was found; one batch
    is held at a time. Uncompiled, a block of vectors costs less than its vectors one by one. (On CUDA, convolutions
    round to TF32 unless ``torch.backends.cudnn.allow_tf32`` is False, which limits how small residuals can get.)

    Args:
        model: any module; attention and weight norms use their plain formulas, which can be differentiated twice.
        loss_fn: ``loss_fn(model(inputs), targets)``, a mean over the examples of the batch. Batches are weighted by
            their number of targets. If that mean is itself weighted, as by class, H depends on the batches.
        batches: pairs (inputs, targets), tensors in any nesting. They are iterated for every product and must always
            hold the same examples. The length of the targets is a batch's number of examples. Tensors are moved to the
            model's device.
        parameters: names of the parameters to differentiate by; all others stay fixed. None means all.
        kind: "hessian", or "gauss-newton" for Jᵀ(∇²loss)J, its positive semidefinite part when the loss is convex.
        compiled: `torch.compile` the products, for batches as large as the first; others run uncompiled. On a GPU a
            product takes half the time, after a minute or so of compiling. Every op needs a forward-mode derivative.
        autocast: a lower precision for the forward pass, such as ``torch.bfloat16``: faster, but inexact.

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
            # A copy: compiled code expects one layout, and an inference tensor cannot be differentiated.
            columns = vector.detach().reshape(self.size, -1).T.clone(memory_format=torch.contiguous_format)
            totals = torch.zeros_like(columns)
            weights = {name: parameter.detach() for name, parameter in self.model.named_parameters()}
            buffers = dict(self.model.named_buffers())
            for inputs, targets in pairs(self.batches, "batches"):
                count = examples_in(targets)
                # Only the common shape is compiled: another compilation costs more than the short last batch ever will.
                common = common or count
                batch = _Batch(moved(inputs, self.device), moved(targets, self.device), count, count == common)
                self._add_products(batch, weights, buffers, columns, totals)
                examples += count
        if not examples:
            raise ValueError("batches holds no examples; give at least one (inputs, targets) pair")
        return (totals / examples).T.reshape(vector.shape)

    def _add_products(self, batch: _Batch, weights: Weights, buffers: Weights, columns: Tensor, totals: Tensor) -> None:
        """Add one batch's products to the totals; its graph is freed on return, before the next batch is read."""
        product = (self._forwards if self.compiled else self._backwards)(batch, weights, buffers)
        chosen = {name: weights[name] for name in self.names}
        for column, total in zip(columns, totals, strict=True):
            pieces = product(unflatten(column, chosen))
            with torch.no_grad():  # torch 2.6 forbids in-place changes to split views while gradients are recorded
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
                if not self._tried:  # what fails uncompiled has crashed the compiler, and the process with it
                    self._check_graph(batch, weights, buffers)
                    self._forward(weights, vector, buffers, batch.inputs, batch.targets)
                    self._tried = True
                return forward(weights, vector, buffers, batch.inputs, batch.targets)
            except Exception as error:
                self._backwards(batch, weights, buffers)(vector)  # raises an error that compiling did not cause
                why = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
                raise NotImplementedError(
                    f"compiled=True, but products of this model cannot be compiled ({why}); leave compiled out"
                ) from error

        return product

    def _check_graph(self, batch: _Batch, weights: Weights, buffers: Weights) -> None:
        """Raise if the model or the loss is cut off from the parameters: H would seem to be zero."""
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
    """Suspend the caller's inference mode, no_grad and autocast, and use attention that differentiates twice."""
    precision = torch.autocast(device.type, enabled=False)
    with torch.inference_mode(False), torch.enable_grad(), precision, sdpa_kernel(SDPBackend.MATH):
        yield


@contextmanager
def _undisturbed(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Put the model in eval mode, and restore its modes and the random state afterwards."""
    # Iterating a DataLoader draws from torch's generator, shuffling or not.
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), eval_mode(model):
        yield


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
    """Return the k largest eigenvalues of a symmetric operator and their eigenvectors, by thick-restart Lanczos::

        H v_i = λ_i v_i,    ‖H v_i − λ_i v_i‖ ≤ tolerance · max|λ|

    It ends when k + 1 pairs have converged. An operator that fits into the basis is decomposed in full. In a larger
    one, an eigenvalue that occurs several times is found once, and several within the tolerance may be taken for one.
    To follow a long run, iterate `lanczos_steps`.

    Args:
        op: a `HessianOperator`, a symmetric matrix, or anything with size, dtype, device and @.
        which: "largest" for the largest λ, however large the negative ones are, or "magnitude" for the largest ``|λ|``.
        tolerance: a bound on the residuals, relative to the largest ``|λ|`` seen; a RuntimeWarning says if not met.
        max_iterations: the maximum number of products, not counting the k for the final residuals.
        seed: of the first vector.
        basis_size: the number of vectors of length d to hold in memory; None means 3k + 20. More save products.

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
        # If the bounds were met but the true residuals are not, the rest is round-off.
        more = "" if last.converged else f"max_iterations={max_iterations}, basis_size or "
        warnings.warn(
            f"{missed} of {k} eigenpairs have a residual above {goal:.2g} after {pairs.iterations} products (worst "
            f"{float(pairs.residuals.max()):.2g}); raise {more}tolerance={tolerance:g}, or work in a higher precision "
            f"than {pairs.vectors.dtype}",
            RuntimeWarning,
            stacklevel=2,
        )
    return pairs


def hessian_diagonal(
    op: SymmetricOperator | Tensor, *, samples: int = 100, seed: int = 0, block_size: int = 8
) -> Tensor:
    """Return Hutchinson's estimate of the diagonal: the mean of z ⊙ Hz over random signs z::

        E[z ⊙ Hz]_j = H_jj,    with variance Σ_{i≠j} H_ij² / samples

    Args:
        op: a `HessianOperator`, a symmetric matrix, or anything with size, dtype, device and @.
        samples: the number of products.
        seed: of the random signs.
        block_size: the number of products made at once; more cost memory and save time. The estimate is the same.

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
