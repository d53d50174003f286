"""Hessian products against dense Hessians and closed forms; Lanczos against known spectra and scipy's solver."""

from __future__ import annotations

import copy
import math
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import pytest
import torch
from scipy.sparse.linalg import eigsh
from torch import Tensor, nn
from torch.func import functional_call, hessian
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.data import DataLoader, TensorDataset

from dirprune._support.batches import examples_in
from dirprune.curvature import HessianOperator, hessian_diagonal, top_eigenpairs
from dirprune.curvature.basis import inner
from dirprune.curvature.lanczos import lanczos_steps
from dirprune.curvature.operators import MatrixOperator, dense
from dirprune.weights import flatten, take, unflatten

Batches = list[tuple[Tensor, Tensor]]


def convnet() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 3, 3),
        nn.BatchNorm2d(3),
        nn.Tanh(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.5),
        nn.Linear(12, 3),
    ).double()
    model(torch.randn(20, 1, 6, 6, dtype=torch.float64))  # so that BatchNorm's statistics are not 0 and 1
    return model


def mlp() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.BatchNorm1d(5), nn.Dropout(0.3), nn.Linear(5, 3)).double()


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.attention(x, x, x, need_weights=False)[0].mean(1))


def attention() -> nn.Module:
    torch.manual_seed(2)
    return Attention().double()


def unequal_batches(*shape: int) -> Batches:
    generator = torch.Generator().manual_seed(3)
    return [
        (
            torch.randn(n, *shape, generator=generator, dtype=torch.float64),
            torch.randint(3, (n,), generator=generator),
        )
        for n in (7, 4, 1)
    ]


def dense_hessian(model: nn.Module, loss_fn: Callable[[Tensor, Tensor], Tensor], batches: Batches) -> Tensor:
    """Return the Hessian of the mean loss over all examples at once, in eval mode, on a copy of the model."""
    model = copy.deepcopy(model).eval()
    inputs, targets = (torch.cat(parts) for parts in zip(*batches, strict=True))
    weights = take(model)

    def loss(w: Tensor) -> Tensor:
        return loss_fn(functional_call(model, unflatten(w, weights), (inputs,)), targets)

    # torch.func.hessian needs forward-mode derivatives, which of attention's kernels only the plain one has.
    with sdpa_kernel(SDPBackend.MATH):
        return hessian(loss)(flatten(weights))


NETWORKS = [(convnet, (1, 6, 6)), (mlp, (4,)), (attention, (3, 4))]
both_kinds = pytest.mark.parametrize("kind", ["hessian", "gauss-newton"])
compiled_or_not = pytest.mark.parametrize("compiled", [False, True])


@pytest.mark.parametrize(("build", "shape"), NETWORKS)
def test_products_are_those_of_the_dense_hessian(build: Callable[[], nn.Module], shape: tuple[int, ...]) -> None:
    model, batches, loss_fn = build(), unequal_batches(*shape), nn.CrossEntropyLoss()
    expected = dense_hessian(model, loss_fn, batches)
    op = HessianOperator(model, loss_fn, batches)
    block = torch.randn(op.size, 3, dtype=torch.float64)
    assert op.size == len(expected)
    torch.testing.assert_close(dense(op), expected)
    torch.testing.assert_close(op @ block, expected @ block)
    torch.testing.assert_close(op @ block[:, 1], expected @ block[:, 1])


def test_softmax_regression_has_its_closed_form() -> None:
    """H = mean over examples of (diag(p) − ppᵀ) ⊗ xxᵀ, and the Gauss-Newton matrix is the same."""
    torch.manual_seed(0)
    model = nn.Linear(4, 3, bias=False).double()
    batches = unequal_batches(4)
    x = torch.cat([inputs for inputs, _ in batches])
    p = model(x).detach().softmax(1)
    blocks = torch.diag_embed(p) - p[:, :, None] * p[:, None, :]
    expected = torch.stack([torch.kron(b, torch.outer(e, e)) for b, e in zip(blocks, x, strict=True)]).mean(0)
    for kind in ("hessian", "gauss-newton"):
        torch.testing.assert_close(dense(HessianOperator(model, nn.CrossEntropyLoss(), batches, kind=kind)), expected)


def test_gauss_newton_is_the_jacobian_around_the_loss_curvature() -> None:
    model, batches = convnet(), unequal_batches(1, 6, 6)
    still = copy.deepcopy(model).eval()
    x = torch.cat([inputs for inputs, _ in batches])
    weights = take(still)
    jacobian = torch.func.jacrev(lambda w: functional_call(still, unflatten(w, weights), (x,)))(flatten(weights))
    p = still(x).detach().softmax(1)
    inner = torch.diag_embed(p) - p[:, :, None] * p[:, None, :]
    expected = torch.einsum("nci,ncd,ndj->ij", jacobian, inner, jacobian) / len(x)
    op = HessianOperator(model, nn.CrossEntropyLoss(), batches, kind="gauss-newton")
    torch.testing.assert_close(dense(op), expected)


def test_a_subset_of_parameters_is_a_block_of_the_hessian() -> None:
    model, batches, loss_fn = mlp(), unequal_batches(4), nn.CrossEntropyLoss()
    places = unflatten(torch.arange(sum(p.numel() for p in model.parameters())), take(model))
    names = ["4.weight", "0.bias"]  # the order asked for does not matter
    chosen = torch.cat([places["0.bias"].reshape(-1), places["4.weight"].reshape(-1)])
    op = HessianOperator(model, loss_fn, batches, parameters=names)
    torch.testing.assert_close(dense(op), dense_hessian(model, loss_fn, batches)[chosen][:, chosen])


@pytest.fixture
def quick_compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Let torch.compile capture and replay graphs without generating code; return what was captured, graph by graph."""
    from torch._dynamo import lookup_backend  # imported here, because it takes a second

    graphs: list[Any] = []
    compile_ = torch.compile

    def backend(graph: Any, inputs: list[Tensor]) -> Any:
        graphs.append(graph)
        return lookup_backend("aot_eager")(graph, inputs)

    monkeypatch.setattr(torch, "compile", lambda function, **options: compile_(function, backend=backend, **options))
    torch.compiler.reset()
    yield graphs
    torch.compiler.reset()


@both_kinds
@pytest.mark.parametrize(("build", "shape"), NETWORKS)
def test_forward_over_reverse_gives_the_same_products(
    build: Callable[[], nn.Module], shape: tuple[int, ...], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    model, batches, loss_fn = build(), unequal_batches(*shape), nn.CrossEntropyLoss()
    ops = [HessianOperator(model, loss_fn, batches, kind=kind, compiled=compiled) for compiled in (False, True)]
    block = torch.randn(ops[0].size, 3, dtype=torch.float64)
    torch.testing.assert_close(ops[1] @ block, ops[0] @ block)


def test_compiled_products_are_those_of_the_dense_hessian(quick_compiler: list[Any]) -> None:
    """Two batches of the common size, two of others, a block, one vector and new weights: one compilation."""
    model, batches, loss_fn = convnet(), unequal_batches(1, 6, 6), nn.CrossEntropyLoss()
    batches.append((batches[0][0].flip(0), batches[0][1]))
    places = unflatten(torch.arange(sum(p.numel() for p in model.parameters())), take(model))
    chosen = torch.cat([places[name].reshape(-1) for name in ("0.weight", "1.bias", "6.weight")])
    op = HessianOperator(model, loss_fn, batches, parameters=["0.weight", "1.bias", "6.weight"], compiled=True)
    torch.testing.assert_close(dense(op), dense_hessian(model, loss_fn, batches)[chosen][:, chosen])

    model.load_state_dict({name: 1.5 * tensor for name, tensor in model.state_dict().items()})
    vector = torch.randn(op.size, dtype=torch.float64)
    torch.testing.assert_close(op @ vector, dense_hessian(model, loss_fn, batches)[chosen][:, chosen] @ vector)
    assert len(quick_compiler) == 1


def test_the_compiler_itself_keeps_the_products() -> None:
    model, batches, loss_fn = mlp(), unequal_batches(4), nn.CrossEntropyLoss()
    op = HessianOperator(model, loss_fn, batches, parameters=["0.weight", "4.weight"], compiled=True)
    torch.testing.assert_close(dense(op), dense(HessianOperator(model, loss_fn, batches, parameters=op.names)))
    torch.compiler.reset()


@pytest.mark.usefixtures("quick_compiler")
@both_kinds
@pytest.mark.parametrize("loss_fn", [nn.MSELoss(), nn.BCEWithLogitsLoss(), nn.SmoothL1Loss()])
def test_targets_may_be_numbers(loss_fn: nn.Module, kind: str) -> None:
    model, batches = mlp(), [(inputs, torch.rand(len(inputs), 3).double()) for inputs, _ in unequal_batches(4)]
    ops = [HessianOperator(model, loss_fn, batches, kind=kind, compiled=compiled) for compiled in (False, True)]
    torch.testing.assert_close(dense(ops[1]), dense(ops[0]))


@pytest.mark.usefixtures("quick_compiler")
def test_a_loss_that_makes_its_own_numbers_is_refused_and_does_not_crash() -> None:
    def squared(outputs: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.mse_loss(outputs, nn.functional.one_hot(targets, 3).double())

    op = HessianOperator(mlp(), squared, unequal_batches(4), compiled=True)
    with pytest.raises(NotImplementedError, match="leave compiled out"):
        op @ torch.ones(op.size, dtype=torch.float64)


@pytest.mark.usefixtures("quick_compiler")
@compiled_or_not
def test_what_a_batch_writes_into_buffers_does_not_reach_the_next(compiled: bool) -> None:
    class Growing(nn.Linear):
        n: Tensor

        def forward(self, x: Tensor) -> Tensor:
            self.n += 1
            return super().forward(x) * self.n

    model = Growing(4, 3)
    model.register_buffer("n", torch.zeros(()))
    batch = (torch.randn(5, 4), torch.randint(3, (5,)))
    once, twice = (HessianOperator(model, nn.CrossEntropyLoss(), [batch] * n, compiled=compiled) for n in (1, 2))
    torch.testing.assert_close(twice @ torch.ones(15), once @ torch.ones(15))


class Tied(nn.Module):
    """A layer that is registered twice, and a tensor that two layers share."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = self.first
        self.third, self.last = nn.Linear(4, 4), nn.Linear(4, 3)
        self.third.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.third(torch.tanh(self.second(torch.tanh(self.first(x))))))


@both_kinds
@compiled_or_not
def test_shared_layers_and_tied_weights(compiled: bool, kind: str, quick_compiler: list[Any]) -> None:
    """Compare with what torch.func computes for the same network, written out as a function."""
    model, batches = Tied().double(), unequal_batches(4)
    inputs, targets = (torch.cat(parts) for parts in zip(*batches, strict=True))
    weights = take(model)
    linear = nn.functional.linear

    def outputs(w: Tensor) -> Tensor:
        w1, b1, b3, w4, b4 = unflatten(w, weights).values()
        hidden = torch.tanh(linear(torch.tanh(linear(inputs, w1, b1)), w1, b1))
        return linear(linear(hidden, w1, b3), w4, b4)

    if kind == "hessian":
        expected = hessian(lambda w: nn.functional.cross_entropy(outputs(w), targets))(flatten(weights))
    else:
        jacobian = torch.func.jacrev(outputs)(flatten(weights))
        p = outputs(flatten(weights)).softmax(1)
        curved = torch.diag_embed(p) - p[:, :, None] * p[:, None, :]
        expected = torch.einsum("nci,ncd,ndj->ij", jacobian, curved, jacobian) / len(inputs)

    before = [(name, id(p)) for name, p in model.named_parameters(remove_duplicate=False)]
    op = HessianOperator(model, nn.CrossEntropyLoss(), batches, kind=kind, compiled=compiled)
    torch.testing.assert_close(dense(op), expected)
    torch.testing.assert_close(op @ torch.ones(op.size).double(), expected.sum(1))
    assert [(name, id(p)) for name, p in model.named_parameters(remove_duplicate=False)] == before
    assert len(quick_compiler) == compiled


@pytest.mark.usefixtures("quick_compiler")
@pytest.mark.parametrize("dim", [0, 1, None])
def test_weight_norms_have_the_derivative_of_their_gradient(dim: int | None) -> None:
    """Compare with central differences of the gradient: torch's second derivative for dim=0 is not even symmetric."""
    layer = nn.utils.parametrizations.weight_norm(nn.Linear(4, 3), dim=dim)
    model = nn.Sequential(layer, nn.Tanh(), nn.Linear(3, 3)).double()
    batches, parameters = unequal_batches(4)[:1], list(model.parameters())

    def gradient() -> Tensor:
        loss = nn.functional.cross_entropy(model(batches[0][0]), batches[0][1])
        return flatten(dict(enumerate(torch.autograd.grad(loss, parameters))))

    columns, step = [], 1e-5
    for parameter in parameters:
        for entry in parameter.detach().view(-1):
            sides = []
            for change in (step, -2 * step):
                entry += change
                sides.append(gradient())
            entry += step
            columns.append((sides[0] - sides[1]) / (2 * step))
    expected, vectors = torch.stack(columns, dim=1), torch.eye(len(columns)).double()
    found = HessianOperator(model, nn.CrossEntropyLoss(), batches) @ vectors
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-8)
    op = HessianOperator(model, nn.CrossEntropyLoss(), batches, compiled=True)
    if dim is None:  # torch cannot compile the norm of all elements
        with pytest.raises(NotImplementedError, match="leave compiled out"):
            op @ vectors
    else:
        torch.testing.assert_close(op @ vectors, expected, rtol=1e-6, atol=1e-8)


class Nested(nn.Module):
    """A network with nested inputs and outputs."""

    def __init__(self, model: nn.Module, unpack: Callable[[Any], Tensor], pack: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.model, self.unpack, self.pack = model, unpack, pack

    def forward(self, inputs: Any) -> Any:
        return self.pack(self.model(self.unpack(inputs)))


@both_kinds
@pytest.mark.parametrize("form", ["dict", "tuple"])
def test_inputs_outputs_and_targets_may_be_nested(form: str, kind: str) -> None:
    key: Any = "x" if form == "dict" else 0

    def wrapped(x: Any) -> Any:
        return {"x": x} if form == "dict" else (x, x)

    model, batches, loss_fn = mlp(), unequal_batches(4), nn.CrossEntropyLoss()
    nested = Nested(model, lambda inputs: inputs[key], lambda z: {"x": z, "n": 3} if form == "dict" else (z, z.sum()))
    op = HessianOperator(
        nested, lambda z, y: loss_fn(z[key], y[key]), [(wrapped(x), wrapped(y)) for x, y in batches], kind=kind
    )
    torch.testing.assert_close(dense(op), dense(HessianOperator(model, loss_fn, batches, kind=kind)))


@pytest.mark.usefixtures("quick_compiler")
@both_kinds
def test_numbers_in_a_nesting_may_be_targets_of_compiled_products(kind: str) -> None:
    batches = [(x, {"y": torch.rand(len(x), 3).double(), "class": y}) for x, y in unequal_batches(4)]

    def loss_fn(outputs: Tensor, targets: dict[str, Tensor]) -> Tensor:
        return nn.functional.mse_loss(outputs, targets["y"]) + nn.functional.cross_entropy(outputs, targets["class"])

    model = mlp()
    ops = [HessianOperator(model, loss_fn, batches, kind=kind, compiled=compiled) for compiled in (False, True)]
    torch.testing.assert_close(dense(ops[1]), dense(ops[0]))


@pytest.mark.parametrize(
    ("targets", "words"),
    [
        ([torch.zeros(5, 4), torch.zeros(3, 4)], "parts of 3 and 5 examples"),
        ({"a": torch.zeros(2), "b": torch.zeros(4)}, "parts of 2 and 4 examples"),
        (torch.tensor(1.0), "Tensor without a length"),
        (None, "NoneType without a length"),
        ({}, "parts of no examples"),
    ],
)
def test_targets_that_do_not_tell_the_number_of_examples_are_refused(targets: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        examples_in(targets)


def test_gauss_newton_needs_outputs_that_it_can_see() -> None:
    model = Nested(mlp(), lambda inputs: inputs, lambda z: iter([z]))
    op = HessianOperator(model, lambda z, y: next(z).sum(), unequal_batches(4), kind="gauss-newton")
    with pytest.raises(ValueError, match=r"gauss-newton.*list_iterator in which there are no tensors"):
        op @ torch.ones(op.size, dtype=torch.float64)


@pytest.mark.usefixtures("quick_compiler")
@both_kinds
@compiled_or_not
@pytest.mark.parametrize(
    ("loss_fn", "words"),
    [
        (nn.CrossEntropyLoss(reduction="none"), r"loss_fn returned a tensor of shape \(7,\); .*reduction='none'"),
        (lambda z, y: 1.0, "loss_fn returned a float; it must return a tensor of one number"),
        (nn.CrossEntropyLoss(reduction="sum"), "loss_fn has reduction='sum'"),
    ],
)
def test_a_loss_that_is_no_mean_is_refused(loss_fn: Any, words: str, compiled: bool, kind: str) -> None:
    op = HessianOperator(mlp(), loss_fn, unequal_batches(4), kind=kind, compiled=compiled)
    with pytest.raises(ValueError, match=words):
        op @ torch.ones(53, dtype=torch.float64)


@both_kinds
def test_data_of_inference_mode_have_a_hessian_too(kind: str) -> None:
    model, data, v = mlp(), unequal_batches(4), torch.ones(53, dtype=torch.float64)
    with torch.inference_mode():
        copies = [(x.clone(), y.clone()) for x, y in data]
    found = HessianOperator(model, nn.CrossEntropyLoss(), copies, kind=kind) @ v
    assert torch.equal(found, HessianOperator(model, nn.CrossEntropyLoss(), data, kind=kind) @ v)


class Square(torch.autograd.Function):
    """x², with a derivative that can be differentiated again, but no forward mode."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 2 * x * gradient


class Squared(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return Square.apply(super().forward(x))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, before it raises the error
@pytest.mark.usefixtures("quick_compiler")
def test_what_cannot_be_compiled_is_told_with_the_remedy() -> None:
    model, batches, loss_fn = Squared(4, 3).double(), unequal_batches(4), nn.CrossEntropyLoss()
    vector = torch.ones(15, dtype=torch.float64)
    assert (HessianOperator(model, loss_fn, batches) @ vector).isfinite().all()
    with pytest.raises(NotImplementedError, match=r"cannot be compiled .*jvp.*; leave compiled out"):
        HessianOperator(model, loss_fn, batches, compiled=True) @ vector
    wrong = [(torch.zeros(2, 99, dtype=torch.float64), torch.zeros(2, dtype=torch.int64))]
    with pytest.raises(RuntimeError, match="cannot be multiplied"):  # the user's mistake, raised as without compiling
        HessianOperator(mlp(), loss_fn, wrong, compiled=True) @ torch.ones(53, dtype=torch.float64)


@pytest.mark.usefixtures("quick_compiler")
@both_kinds
def test_a_lower_precision_is_near_and_the_same_however_it_is_made(kind: str) -> None:
    model, loss_fn = convnet().float(), nn.CrossEntropyLoss()
    batches = [(inputs.float(), targets) for inputs, targets in unequal_batches(1, 6, 6)]
    options = ({}, {"autocast": torch.bfloat16}, {"autocast": torch.bfloat16, "compiled": True})
    ops = [HessianOperator(model, loss_fn, batches, kind=kind, **option) for option in options]
    vector = torch.randn(ops[0].size, generator=torch.Generator().manual_seed(0))
    exact, rough, fast = (op @ vector for op in ops)
    assert rough.dtype == fast.dtype == torch.float32
    assert 1e-3 < (rough - exact).norm() / exact.norm() < 0.2
    assert (fast - rough).norm() / exact.norm() < 0.02


def test_agrees_with_curvlinops() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # importing curvlinops may warn
        from curvlinops import HessianLinearOperator

    model, batches, loss_fn = convnet().float().eval(), unequal_batches(1, 6, 6), nn.CrossEntropyLoss()
    batches = [(inputs.float(), targets) for inputs, targets in batches]
    other = HessianLinearOperator(model, loss_fn, list(model.parameters()), batches, check_deterministic=False)
    op = HessianOperator(model, loss_fn, batches)
    block = torch.randn(op.size, 2)
    torch.testing.assert_close(op @ block, (other @ block).detach(), rtol=1e-4, atol=1e-5)

    values = eigsh(other.to_scipy(), k=3, which="LA", return_eigenvectors=False)[::-1].copy()
    pairs = top_eigenpairs(op, 3, tolerance=1e-5)
    torch.testing.assert_close(pairs.values, torch.from_numpy(values).float(), rtol=1e-4, atol=1e-6)


class Counting(nn.Module):
    """A module that writes to its buffer, draws random numbers, and has submodules that depend on the mode."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(1))
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 3))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        torch.rand(1)
        return self.inner(x)


@pytest.mark.usefixtures("quick_compiler")
@compiled_or_not
def test_the_model_and_the_random_state_are_left_as_found(compiled: bool) -> None:
    model = Counting().train()
    model.inner[1].eval()
    model.inner[0].weight.requires_grad_(False)
    model.inner[3].weight.grad = torch.ones(3, 4)
    data = TensorDataset(torch.randn(12, 4), torch.randint(3, (12,)))
    before = copy.deepcopy(model.state_dict()), [module.training for module in model.modules()]
    state = torch.get_rng_state()

    batches = DataLoader(data, batch_size=5, shuffle=True)
    op = HessianOperator(model, nn.CrossEntropyLoss(), batches, compiled=compiled)
    with torch.no_grad():
        product = op @ torch.ones(op.size)

    assert product.abs().sum() > 0
    assert torch.equal(torch.get_rng_state(), state)
    assert [module.training for module in model.modules()] == before[1]
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[0][name])
    assert [name for name, p in model.named_parameters() if not p.requires_grad] == ["inner.0.weight"]
    assert [name for name, p in model.named_parameters() if p.grad is not None] == ["inner.3.weight"]
    assert torch.equal(model.inner[3].weight.grad, torch.ones(3, 4))


def test_modes_come_back_after_an_error() -> None:
    model = mlp().train()
    op = HessianOperator(model, nn.CrossEntropyLoss(), [(torch.zeros(2, 99), torch.zeros(2))])
    with pytest.raises(RuntimeError):
        op @ torch.ones(op.size, dtype=torch.float64)
    assert all(module.training for module in model.modules())


@both_kinds
def test_the_graph_of_one_batch_is_gone_before_the_next(kind: str) -> None:
    seen: list[weakref.ref[Tensor]] = []

    def loss_fn(outputs: Tensor, targets: Tensor) -> Tensor:
        assert all(earlier() is None for earlier in seen)
        seen.append(weakref.ref(outputs))
        return nn.functional.cross_entropy(outputs, targets)

    op = HessianOperator(mlp(), loss_fn, unequal_batches(4), kind=kind)
    op @ torch.ones(op.size, 2, dtype=torch.float64)
    assert len(seen) == 3


def test_the_weights_are_read_at_every_product() -> None:
    model, batches, loss_fn = mlp(), unequal_batches(4), nn.CrossEntropyLoss()
    op = HessianOperator(model, loss_fn, batches)
    with torch.no_grad():
        model[0].weight.mul_(2)
    torch.testing.assert_close(dense(op), dense_hessian(model, loss_fn, batches))


@compiled_or_not
def test_flat_and_unused_weights_have_zero_curvature(compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    model = nn.ModuleDict({"used": nn.Linear(2, 1), "unused": nn.Linear(2, 1)})
    model.forward = lambda x: model["used"](x)
    for kind in ("hessian", "gauss-newton"):
        batches = [(torch.ones(3, 2), torch.ones(3, 1))]
        op = HessianOperator(model, lambda z, y: (z - y).mean(), batches, kind=kind, compiled=compiled)
        assert torch.equal(op @ torch.ones(op.size), torch.zeros(op.size))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"parameters": ["nothing"]}, "not in this model"),
        ({"parameters": "4.bias"}, r"parameters is the string '4\.bias'; give a list of names: \['4\.bias'\]"),
        ({"parameters": [mlp()[4].bias]}, r"parameters holds a Parameter; give names"),
        ({"model": nn.ReLU()}, "no parameters"),
        ({"model": nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double())}, "differ in dtype"),
        ({"batches": iter([])}, "iterator"),
        ({"batches": []}, "no examples"),
        ({"batches": [(1, 2, 0)]}, r"batches gave a tuple of 3; a batch must be a pair \(inputs, targets\)"),
        ({"batches": [{0: 1, 1: 2}]}, r"batches gave a dict of 2; a batch must be a pair \(inputs, targets\)"),
        ({"batches": [torch.ones(53)]}, r"batches gave a Tensor; a batch must be a pair \(inputs, targets\)"),
        ({"kind": "fisher"}, "kind"),
        ({"autocast": "bfloat16"}, "autocast='bfloat16' is not a dtype"),
        ({"vector": torch.ones(54, dtype=torch.float64)}, "shape"),
        ({"vector": torch.ones(53)}, "float32"),
    ],
)
def test_a_bad_operator_is_refused_with_a_reason(changes: dict[str, Any], words: str) -> None:
    given = {"model": mlp(), "loss_fn": nn.CrossEntropyLoss(), "batches": unequal_batches(4), **changes}
    vector = given.pop("vector", torch.ones(53, dtype=torch.float64))
    with pytest.raises(ValueError, match=words):
        HessianOperator(**given) @ vector


def with_spectrum(values: Tensor, seed: int = 0) -> tuple[MatrixOperator, Tensor]:
    """Return an operator with these eigenvalues, and its eigenvectors as columns."""
    generator = torch.Generator().manual_seed(seed)
    vectors, _ = torch.linalg.qr(torch.randn(len(values), len(values), generator=generator, dtype=torch.float64))
    return MatrixOperator(vectors @ torch.diag(values) @ vectors.T), vectors


BULK = torch.linspace(-0.5, 0.5, 190, dtype=torch.float64)
LEADING = torch.tensor([-9.0, -8.0, -7.0, 5.0, 4.001, 4.0, 3.0, 2.0, 1.999, 1.0], dtype=torch.float64)


@pytest.mark.parametrize("basis_size", [8, 12, None, 200])
def test_largest_are_found_beside_larger_negative_and_clustered_ones(basis_size: int | None) -> None:
    op, vectors = with_spectrum(torch.cat([LEADING, BULK]))
    pairs = top_eigenpairs(op, 6, tolerance=1e-9, basis_size=basis_size)
    expected = torch.tensor([5.0, 4.001, 4.0, 3.0, 2.0, 1.999], dtype=torch.float64)
    torch.testing.assert_close(pairs.values, expected)
    assert (pairs.residuals < 1e-8).all()
    torch.testing.assert_close((vectors[:, 3:9].T @ pairs.vectors).abs(), torch.eye(6).double(), rtol=0, atol=1e-5)
    torch.testing.assert_close(pairs.vectors.T @ pairs.vectors, torch.eye(6).double())


def test_no_eigenvalue_is_passed_over_at_a_loose_tolerance() -> None:
    """The ninth and tenth are close: one of them and the eleventh may reach 0.5% before the other one appears."""
    leading = torch.tensor([22.44, 17.98, 13.29, 9.86, 9.43, 9.21, 7.67, 7.25, 6.46, 6.27, 5.67, 4.81, 4.61]).double()
    op, vectors = with_spectrum(torch.cat([leading, 3 * torch.linspace(-1, 1, 387, dtype=torch.float64) ** 5]))
    for seed in range(10):
        pairs = top_eigenpairs(op, 10, tolerance=5e-3, seed=seed)
        cosines = torch.linalg.svdvals(vectors[:, :10].T @ pairs.vectors)
        assert cosines.min() > 0.95


def test_the_advice_is_what_helps() -> None:
    matrix = with_spectrum(torch.cat([LEADING, BULK]))[0].matrix.float()
    with pytest.warns(
        RuntimeWarning, match=r"; raise tolerance=1e-08, or work in a higher precision than torch\.float32"
    ):
        top_eigenpairs(matrix, 2, tolerance=1e-8)
    with pytest.warns(RuntimeWarning, match=r"; raise max_iterations=5, basis_size or tolerance=1e-08"):
        top_eigenpairs(matrix, 2, tolerance=1e-8, max_iterations=5)


def test_a_search_that_ends_where_a_restart_is_due_returns_what_it_found() -> None:
    op, _ = with_spectrum(BULK)
    for spent in (9, 10, 11, 12, 14):  # with k = 4 and ten vectors there are restarts after 10, 13, 16, … products
        *_, last = lanczos_steps(op, 4, basis_size=10, tolerance=0.0, max_iterations=spent)
        pairs = last.pairs(op)
        torch.testing.assert_close(pairs.values, last.values)
        torch.testing.assert_close(pairs.vectors.T @ pairs.vectors, torch.eye(4, dtype=torch.float64))


def test_magnitude_takes_both_signs() -> None:
    op, _ = with_spectrum(torch.cat([LEADING, BULK]))
    pairs = top_eigenpairs(op, 5, which="magnitude", tolerance=1e-9)
    torch.testing.assert_close(pairs.values, torch.tensor([-9.0, -8.0, -7.0, 5.0, 4.001]).double())


@pytest.mark.parametrize(
    ("spectrum", "k", "expected"),
    [
        ([3.0] * 6, 3, [3.0, 3.0, 3.0]),
        ([5.0, 5.0, 1.0, 0.0], 2, [5.0, 5.0]),
        ([5.0, 5.0, 5.0, 5.0, 1.0], 3, [5.0, 5.0, 5.0]),
        ([2.0, 1.0] + [0.0] * 40, 4, [2.0, 1.0, 0.0, 0.0]),
        ([-1.0] * 40, 2, [-1.0, -1.0]),
        ([0.0] * 5, 2, [0.0, 0.0]),
        ([4.0, 3.0, -2.0], 3, [4.0, 3.0, -2.0]),
        ([7.0], 1, [7.0]),
    ],
)
def test_repeated_eigenvalues_and_whole_spectra(spectrum: list[float], k: int, expected: list[float]) -> None:
    op, _ = with_spectrum(torch.tensor(spectrum, dtype=torch.float64))
    pairs = top_eigenpairs(op, k)
    torch.testing.assert_close(pairs.values, torch.tensor(expected).double(), rtol=1e-10, atol=1e-10)
    assert pairs.iterations <= op.size


class Diagonal:
    """An operator with these eigenvalues; it may be diagonal because Lanczos starts from a random vector."""

    def __init__(self, values: Tensor) -> None:
        self.values, self.size, self.dtype, self.device = values, len(values), values.dtype, values.device

    def __matmul__(self, vector: Tensor) -> Tensor:
        return self.values.view(-1, *[1] * (vector.ndim - 1)) * vector


def test_reported_residuals_are_the_true_ones() -> None:
    op, _ = with_spectrum(torch.cat([LEADING, BULK]))
    with pytest.warns(RuntimeWarning, match=r"of 3 eigenpairs .* after 6 products"):
        pairs = top_eigenpairs(op, 3, max_iterations=6, tolerance=1e-9)
    actual = torch.linalg.vector_norm(op.matrix @ pairs.vectors - pairs.vectors * pairs.values, dim=0)
    torch.testing.assert_close(pairs.residuals, actual)
    assert pairs.residuals.max() > 1e-3
    assert pairs.iterations == 6


def test_a_better_operator_judges_what_a_rough_one_found() -> None:
    """The rough operator sees no error in its own pairs; the exact one finds better values in their span."""
    exact, _ = with_spectrum(torch.cat([LEADING, BULK]))
    noise = torch.randn(200, 200, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    rough = MatrixOperator(exact.matrix + 2e-3 * (noise + noise.T))
    *_, last = lanczos_steps(rough, 6, tolerance=1e-9)
    own, judged = last.pairs(rough), last.pairs(exact)
    expected = torch.tensor([5.0, 4.001, 4.0, 3.0, 2.0, 1.999], dtype=torch.float64)
    assert own.residuals.max() < 1e-7
    assert (judged.residuals > 1e-3).all()
    assert (judged.values - expected).norm() < 0.5 * (own.values - expected).norm()
    actual = torch.linalg.vector_norm(exact.matrix @ judged.vectors - judged.vectors * judged.values, dim=0)
    torch.testing.assert_close(judged.residuals, actual)


def test_single_precision_keeps_an_orthonormal_basis_through_restarts() -> None:
    op, _ = with_spectrum(torch.cat([LEADING, BULK]))
    pairs = top_eigenpairs(MatrixOperator(op.matrix.float()), 6, basis_size=10, tolerance=1e-5)
    assert pairs.vectors.dtype == torch.float32
    torch.testing.assert_close(pairs.vectors.T @ pairs.vectors, torch.eye(6), rtol=0, atol=1e-5)
    assert (pairs.residuals < 9e-5).all()


@pytest.mark.parametrize("power", [-100, -75, 75, 100])
def test_very_small_and_very_large_hessians_keep_their_digits(power: int) -> None:
    """Powers of two cause no rounding, so results differ only by that factor; squares would not fit in float32."""
    matrix = with_spectrum(torch.cat([LEADING, BULK]))[0].matrix.float()
    expected = top_eigenpairs(MatrixOperator(matrix), 4, basis_size=10)
    pairs = top_eigenpairs(MatrixOperator(matrix * 2.0**power), 4, basis_size=10)
    assert torch.equal(pairs.values, expected.values * 2.0**power)
    assert torch.equal(pairs.residuals, expected.residuals * 2.0**power)
    assert torch.equal(pairs.vectors, expected.vectors)
    assert pairs.iterations == expected.iterations
    torch.testing.assert_close(expected.values, torch.tensor([5.0, 4.001, 4.0, 3.0]), rtol=1e-4, atol=0)


def test_long_vectors_keep_their_digits_in_single_precision() -> None:
    """A million weights: their inner products are sums in which plain float32 loses half its digits."""
    diagonal = torch.full((1_000_000,), 0.01)
    diagonal[:4] = torch.tensor([-20.0, 10.0, 9.0, 8.0])
    pairs = top_eigenpairs(Diagonal(diagonal), 3, basis_size=6, tolerance=1e-5)
    torch.testing.assert_close(pairs.values, torch.tensor([10.0, 9.0, 8.0]), rtol=2e-6, atol=0)
    torch.testing.assert_close(inner(pairs.vectors.T, pairs.vectors), torch.eye(3).double(), rtol=0, atol=1e-6)


def test_the_seed_alone_decides_and_the_global_generator_is_not_touched() -> None:
    op, _ = with_spectrum(torch.cat([LEADING, BULK]))
    state = torch.get_rng_state()
    first, second, other = (top_eigenpairs(op, 3, seed=seed) for seed in (0, 0, 1))
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(first.vectors, second.vectors)
    assert not torch.equal(first.vectors, other.vectors)


def test_the_steps_show_the_way() -> None:
    op, _ = with_spectrum(torch.cat([LEADING, BULK]))
    steps = list(lanczos_steps(op, 4, tolerance=1e-8, basis_size=12))
    assert [step.converged for step in steps] == [False] * (len(steps) - 1) + [True]
    assert [step.iterations for step in steps] == list(range(1, 1 + len(steps)))
    assert [len(step.values) for step in steps[:5]] == [1, 2, 3, 4, 4]
    tops = torch.stack([step.values[0] for step in steps])
    assert (tops.diff() > -1e-12).all()  # Ritz values only grow, restarts included
    torch.testing.assert_close(steps[-1].bounds, steps[-1].pairs(op).residuals, rtol=1e-3, atol=1e-10)


MATRIX = torch.diag(torch.arange(10.0))


@pytest.mark.parametrize(
    ("matrix", "k", "options", "words"),
    [
        (MATRIX, 2, {"which": "smallest"}, "which"),
        *((MATRIX, 1, {"tolerance": value}, f"tolerance is {value}") for value in (math.nan, -1.0, math.inf)),
        (MATRIX, 11, {}, "k is 11"),
        (MATRIX, 2.0, {}, r"k is 2\.0"),
        (MATRIX, 5, {"basis_size": 5}, "basis_size"),
        (MATRIX, 5, {"max_iterations": 4}, "max_iterations"),
        (torch.full((4, 4), math.nan), 2, {}, "product 1 of op is not finite"),
        (torch.ones(2, 3), 1, {}, "square"),
        (torch.tensor([[1.0, 2.0], [4.0, 1.0]]), 1, {}, "apart from its transpose"),
        (torch.eye(4, dtype=torch.int64), 1, {}, "int64"),
        (MATRIX.bfloat16(), 1, {}, "too coarse"),  # the search would stop after one product
    ],
)
def test_eigenpairs_that_cannot_be_had_are_refused(matrix: Tensor, k: Any, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        top_eigenpairs(matrix if "finite" not in words else MatrixOperator(matrix), k, **options)


def test_hutchinson_estimates_the_exact_diagonal() -> None:
    model, batches, loss_fn = mlp(), unequal_batches(4), nn.CrossEntropyLoss()
    exact = dense_hessian(model, loss_fn, batches)
    op = HessianOperator(model, loss_fn, batches)
    samples = 400
    estimate = hessian_diagonal(MatrixOperator(exact), samples=samples)
    deviation = ((exact**2).sum(1) - exact.diagonal() ** 2).sqrt() / samples**0.5
    assert ((estimate - exact.diagonal()).abs() <= 4 * deviation + 1e-12).all()
    assert (estimate - exact.diagonal()).norm() > 0.3 * deviation.norm()  # an estimate, with the error it should have
    torch.testing.assert_close(hessian_diagonal(op, samples=10), hessian_diagonal(op, samples=10, block_size=3))
    with pytest.raises(ValueError, match="samples"):
        hessian_diagonal(op, samples=0)


class Cut(nn.Sequential):
    """A network whose output is cut off from its parameters."""

    def forward(self, inputs: Tensor) -> Tensor:
        with torch.no_grad():
            return super().forward(inputs)


@compiled_or_not
@both_kinds
def test_what_is_cut_off_from_the_parameters_is_refused(kind: Any, compiled: bool) -> None:
    """Otherwise its Hessian would seem to be zero."""
    data = [(torch.ones(2, 3), torch.zeros(2, 1))]
    options = {"kind": kind, "compiled": compiled}
    for model, loss in (
        (Cut(nn.Linear(3, 1)), nn.functional.mse_loss),
        (nn.Sequential(nn.Linear(3, 1)), lambda outputs, targets: nn.functional.mse_loss(outputs.detach(), targets)),
    ):
        with pytest.raises(ValueError, match="no derivative by any parameter"):
            HessianOperator(model, loss, data, **options) @ torch.ones(4)
    unused = nn.Sequential(nn.Linear(3, 1))
    unused.register_parameter("other", nn.Parameter(torch.ones(2)))
    assert not (
        HessianOperator(unused, nn.functional.mse_loss, data, parameters=["other"], kind=kind) @ torch.ones(2)
    ).any()


@pytest.mark.parametrize("around", [torch.inference_mode, torch.no_grad, lambda: torch.autocast("cpu", torch.bfloat16)])
def test_products_do_not_depend_on_the_mode_they_are_asked_for_in(around: Callable[[], Any]) -> None:
    model, data = mlp(), unequal_batches(4)
    op = HessianOperator(model.float(), nn.functional.cross_entropy, [(x.float(), y) for x, y in data])
    expected = op @ torch.ones(op.size)
    with around():
        torch.testing.assert_close(op @ torch.ones(op.size), expected, rtol=0, atol=0)
        found = top_eigenpairs(op, 1)
    torch.testing.assert_close(found.values, top_eigenpairs(op, 1).values, rtol=0, atol=0)
    torch.testing.assert_close(found.vectors, top_eigenpairs(op, 1).vectors, rtol=0, atol=0)


def test_a_dense_matrix_is_made_symmetric() -> None:
    matrix = dense(MatrixOperator(torch.tensor([[1.0, 2.0], [4.0, 1.0]])))
    assert matrix.tolist() == [[1.0, 3.0], [3.0, 1.0]]
    drawn = dense(MatrixOperator(torch.randn(50, 50, generator=torch.Generator().manual_seed(0))))
    assert torch.equal(drawn, drawn.T)


def test_in_a_lower_precision_the_loss_is_still_that_of_the_upper_one() -> None:
    seen = set()

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        seen.add(outputs.dtype)
        return nn.functional.mse_loss(outputs, targets)

    data = [(torch.ones(1, 2), torch.zeros(1, 1))]
    HessianOperator(nn.Linear(2, 1), loss, data, autocast=torch.bfloat16) @ torch.ones(3)
    assert seen == {torch.float32}


def test_in_a_lower_precision_a_network_that_begins_with_batchnorm_gets_inputs_of_its_type() -> None:
    model = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 1))
    data = [(torch.randn(4, 2, generator=torch.Generator().manual_seed(0)), torch.zeros(4, 1))]
    op = HessianOperator(model, nn.functional.mse_loss, data, autocast=torch.bfloat16)
    assert (op @ torch.ones(op.size)).isfinite().all()


def test_a_matrix_with_a_gradient_and_a_number_of_numpy_will_do() -> None:
    pairs = top_eigenpairs(torch.diag(torch.arange(5.0)).requires_grad_(), numpy.int64(1))
    assert not pairs.values.requires_grad
    torch.testing.assert_close(pairs.values, torch.tensor([4.0]))
