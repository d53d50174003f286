"""The Hessian of a run's training loss, and its leading eigenpairs with progress reports."""

from __future__ import annotations

import os
import warnings
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from dirprune.curvature import HessianOperator
from dirprune.curvature.lanczos import Eigenpairs, lanczos_steps
from dirprune.curvature.operators import SymmetricOperator
from dirprune.lab.data import stratified_split
from dirprune.lab.data.imagefolder import ImageFolderLoader
from dirprune.lab.data.loader import Loader
from dirprune.lab.data.resident import ResidentLoader
from dirprune.lab.progress import Progress
from dirprune.lab.ranges import COUNT, NOT_NEGATIVE, BadValue, check
from dirprune.lab.records import checkpoint
from dirprune.lab.records.provenance import environment
from dirprune.lab.records.tables import measuring
from dirprune.lab.training.execution import Execution
from dirprune.lab.training.experiment import assemble
from dirprune.lab.training.recipe import Recipe
from dirprune.lab.training.runs import Run
from dirprune.weights import check_alike

PRECISIONS = ("float32", "tf32", "bfloat16")
COMPILED_FROM = 40
"""Compile Hessian products from this many batches on: it takes a minute, and saves about 30 ms per batch in 50
products."""


@dataclass(frozen=True)
class Lanczos:
    """How eigenpairs of a training Hessian are computed: in eval mode, on plain data without augmentation.

    Attributes:
        examples: the size of a fixed stratified subset of the training set; None means all of it.
        batch_size: examples in memory at a time; it affects only speed and memory.
        precision: "float32"; "tf32" for convolutions on the tensor cores of a GPU: several times faster, with residuals
            that stay near 1e-3 of the largest eigenvalue; or "bfloat16" for Lanczos in mixed precision, faster again,
            with residuals that stay near 2e-2. These are measured in tf32: bfloat16 would not see its own error.
        tolerance: the largest residual to accept, relative to the largest |eigenvalue|.
        max_iterations: the maximum number of Hessian products for one set of eigenpairs.
        seed: seed of the first Lanczos vector.
    """

    examples: int | None = None
    batch_size: int = 500
    precision: str = "float32"
    tolerance: float = 1e-3
    max_iterations: int = 300
    seed: int = 0

    def __post_init__(self) -> None:
        check(vars(self), examples=COUNT, tolerance=NOT_NEGATIVE)
        if self.precision not in PRECISIONS:
            raise BadValue("precision", self.precision, f"take one of {', '.join(PRECISIONS)}")


@dataclass(frozen=True)
class Curvature:
    """A network with the Hessian of its training loss, at the weights that were loaded last.

    ``hessian`` is the operator for Lanczos; ``exact`` is the same matrix in a precision that gives reliable residuals.
    ``curved`` holds the examples in both Hessians, ``train`` and ``test`` the whole sets; ``lanczos`` says how the
    eigenpairs are computed.
    """

    model: nn.Module
    hessian: SymmetricOperator
    exact: SymmetricOperator
    curved: Loader
    train: Loader
    test: Loader
    lanczos: Lanczos

    def load(self, state: Mapping[str, Any], source: str = "the checkpoint") -> None:
        """Load the weights and buffers of ``source``; raise unless they are those of this network."""
        check_alike(self.model.state_dict(), state, "the network of config.json", source)
        self.model.load_state_dict(state)

    def eigenpairs(self, k: int, products: Path, *, what: str) -> Generator[Progress, None, tuple[Eigenpairs, float]]:
        """Do as `leading_eigenpairs`, with the products saved in a folder until the caller removes it."""
        journal = Journal(self.hessian, products)
        return (yield from leading_eigenpairs(journal, k, self.lanczos, what=what, exact=self.exact))


def curvature_of(recipe: Recipe, lanczos: Lanczos, *, device: torch.device, root: Path | None = None) -> Curvature:
    """Build the recipe's network and the Hessian of its loss on its training data.

    On a GPU, tensor cores are faster with channels_last, plain float32 convolutions with the default format.
    """
    execution = Execution(channels_last=device.type == "cuda" and lanczos.precision != "float32")
    plain = recipe.but(batch_size=lanczos.batch_size, augment=False, cpu=execution, cuda=execution)
    parts = assemble(plain, device=device, root=root)
    curved = part_of(parts.loaders.train, lanczos.examples)
    hessian, exact = _operators(parts.model, curved, lanczos)
    return Curvature(parts.model, hessian, exact, curved, parts.loaders.train, parts.loaders.test, lanczos)


@contextmanager
def measuring_runs(
    out: Path,
    table: str,
    settings: Mapping[str, Any],
    lanczos: Lanczos,
    device: torch.device,
    checkpoints: Iterable[tuple[Run, int]],
) -> Iterator[None]:
    """Hold a folder of rows that are measured in one way from these checkpoints, each a run and an epoch."""
    files = {
        f"epoch {epoch} of {run.folder.name}": checkpoint.checksum(run.checkpoints, epoch) for run, epoch in checkpoints
    }
    with measuring(out, {**settings, **asdict(lanczos)}, environment(device), table=table, files=files):
        yield


def _operators(model: nn.Module, curved: Loader, lanczos: Lanczos) -> tuple[Guarded, Guarded]:
    """Return the Hessian on these examples for Lanczos, and the one for the residuals.

    On a GPU, products over many batches are compiled, except those for the residuals alone, which are few.
    """
    low = torch.bfloat16 if lanczos.precision == "bfloat16" else None
    tensor_cores = lanczos.precision != "float32"
    compiled = next(model.parameters()).is_cuda and len(curved) >= COMPILED_FROM
    op = HessianOperator(model, cross_entropy, curved, compiled=compiled, autocast=low)
    hessian = exact = Guarded(op, tensor_cores)
    if low:
        exact = Guarded(HessianOperator(model, cross_entropy, curved), tensor_cores)
    return hessian, exact


def part_of(loader: Loader, examples: int | None) -> Loader:
    """Return a loader over a fixed subset with the same fraction of every class; None means all examples.

    The number of examples is approximate, because it is rounded in each class.
    """
    if examples is None or examples == loader.examples:
        return loader
    if examples > loader.examples:
        raise ValueError(f"examples={examples}, but the training set has {loader.examples}; ask for fewer, or for all")
    targets = loader.images.targets if isinstance(loader, ImageFolderLoader) else _resident(loader).targets.cpu()
    rows = stratified_split(targets, examples / loader.examples)[1]
    if not len(rows):
        raise ValueError(f"examples={examples}: the same fraction of every class rounds to no examples; ask for more")
    return chosen(loader, rows)


def chosen(loader: Loader, rows: Tensor) -> Loader:
    """Return a loader over only these examples."""
    if isinstance(loader, ImageFolderLoader):
        return replace(loader, images=loader.images.take(rows.cpu()))
    resident = _resident(loader)
    rows = rows.to(resident.targets.device)
    return replace(resident, images=resident.images[rows], targets=resident.targets[rows])


def _resident(loader: Loader) -> ResidentLoader:
    if not isinstance(loader, ResidentLoader):
        raise ValueError(f"a {type(loader).__name__} cannot be divided; use all examples")
    return loader


class Guarded:
    """An operator whose products run in a fixed precision, independently of the global settings.

    If the products cannot be compiled for this network, this warns once and runs them uncompiled from then on.
    """

    def __init__(self, op: HessianOperator, tf32: bool) -> None:
        self._op, self._tf32 = op, tf32
        self.size, self.dtype, self.device = op.size, op.dtype, op.device

    def __matmul__(self, vector: Tensor) -> Tensor:
        with conv_precision(tf32=self._tf32):
            try:
                return self._op @ vector
            except NotImplementedError as error:
                if not self._op.compiled:
                    raise
                warnings.warn(
                    f"Hessian products run uncompiled, which is slower: {error}", RuntimeWarning, stacklevel=2
                )
                self._op.compiled = False
                return self._op @ vector


class NotKept(UserWarning):
    """Hessian products could not be saved, so an interruption would lose them."""


class Journal:
    """An operator that saves its products in a folder, so that Lanczos can be resumed after an interruption.

    A saved product is used if its vector was the same, judged by a sample of its elements. Products with blocks, which
    come at the end of a computation, are not saved.
    """

    def __init__(self, op: SymmetricOperator, folder: Path) -> None:
        self._op, self._folder, self._count, self._keeps = op, folder, 0, True
        self.size, self.dtype, self.device = op.size, op.dtype, op.device

    def __matmul__(self, vector: Tensor) -> Tensor:
        if vector.ndim > 1:
            return self._op @ vector
        self._count += 1
        sample = vector[:: 1 + self.size // 4096].cpu()
        product = self._kept(sample)
        if product is None:
            product = self._op @ vector
            self._keep({"sample": sample, "product": product.cpu()})
        return product

    def _keep(self, entry: dict[str, Tensor]) -> None:
        """Save a product; if the disk is full, warn and continue without saving."""
        try:
            if self._keeps:
                checkpoint.save(self._folder, self._count, entry)
        except OSError as error:
            self._keeps = False
            warnings.warn(
                f"{self._folder}: {os.strerror(error.errno or 0)}; products are no longer kept; after a stop they are "
                "computed again",
                NotKept,
                stacklevel=3,
            )

    def _kept(self, sample: Tensor) -> Tensor | None:
        with suppress(FileNotFoundError, checkpoint.CorruptCheckpoint):
            kept = checkpoint.load(checkpoint.path_of(self._folder, self._count), map_location=self.device)
            if torch.dist(kept["sample"].cpu(), sample) <= 1e-4 * sample.norm():
                return torch.as_tensor(kept["product"])
        return None


@contextmanager
def conv_precision(*, tf32: bool) -> Iterator[None]:
    """Allow or forbid TF32 in CUDA convolutions, and forbid it in matrix products; restore the settings afterwards.

    The products of a Hessian repeat the same shapes, so cuDNN's search for the fastest kernels is worthwhile.
    """
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    before = matmul.allow_tf32
    with cudnn.flags(enabled=cudnn.enabled, benchmark=True, deterministic=cudnn.deterministic, allow_tf32=tf32):
        try:
            matmul.allow_tf32 = False
            yield
        finally:
            matmul.allow_tf32 = before


def leading_eigenpairs(
    op: SymmetricOperator, k: int, lanczos: Lanczos, *, what: str, exact: SymmetricOperator
) -> Generator[Progress, None, tuple[Eigenpairs, float]]:
    """Yield progress; return the leading eigenpairs and the largest residual that counts as converged.

    Eigenvalues and residuals are those of ``exact``: the same matrix in a precision that makes them reliable.
    """
    if k > op.size:
        raise ValueError(f"k={k}: the network has {op.size:,} weights; give at most as many")
    steps = lanczos_steps(op, k, tolerance=lanczos.tolerance, max_iterations=lanczos.max_iterations, seed=lanczos.seed)
    for step in steps:
        worst = float(step.bounds.max()) / step.scale if step.scale else 0.0
        yield Progress(what, step.iterations, lanczos.max_iterations, f"residual {worst:.1e}", "products")
    yield Progress(f"{what}, true residuals", 0, k, unit="products")
    pairs = step.pairs(exact)
    yield Progress(f"{what}, true residuals", k, k, unit="products")
    return pairs, lanczos.tolerance * step.scale
