"""The methods that take part in a comparison, and the runs it consists of.

All runs of a comparison share data, order of the data, initial weights (by seed), schedule and epochs. A method with a
preset sparsity is run at the requested sparsities, any other at several values of its own knob.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import torch

from dirprune.lab import models
from dirprune.lab.methods import METHODS, Method, MethodSpec, Narrow, Option, Variant
from dirprune.lab.models.weights import size
from dirprune.lab.names import unknown
from dirprune.lab.studies.comparison.origins import starting
from dirprune.lab.training import recipes
from dirprune.lab.training.costs import classes_of
from dirprune.lab.training.optimizers import OPTIMIZERS, Grda, OptimizerSpec
from dirprune.lab.training.recipe import Recipe

FACTORS = (0.5, 1.0, 2.0, 4.0)
"""A strength is swept over these multiples of a moderate one."""

BETAS = (0.03, 0.1, 0.3, 1.0)
"""The values of β over which variational dropout is swept without weight decay."""

STR_DECAY_OVER_TRAINING = 11.0
"""The value of d Σγᵢ, for STR's decay d without weight decay, that left 7% of the weights of the digits network."""

FASTEST = 0.01
"""The largest fraction of STR's s that decays in one step. With 0.04, networks were destroyed before they learned."""


CONTESTANTS: Mapping[str, type[OptimizerSpec] | Variant] = {**OPTIMIZERS, **METHODS}
"""What takes part in a comparison: every optimizer and method, by the name that users type."""


TARGETED = ("grda-target", "adamgrda")
"""gRDA at a target: whose masks are shuffled, and whose differences from the others are shown unless told otherwise."""

SHUFFLED = "shuffled"


def usual(recipe: Recipe) -> list[str]:
    """Return who takes part unless others are named: optimizers of the recipe's kind, and methods but variants.

    >>> usual(recipes.get("digits"))[:5]
    ['grda', 'grda-target', 'grda-macs', 'sgd', 'rda']
    """
    alike = [name for name, kind in OPTIMIZERS.items() if kind.dense == recipe.optimizer.dense]
    return alike + [name for name, variant in METHODS.items() if not (variant.fixed or variant.is_control)]


def contestant(name: str) -> type[OptimizerSpec] | Variant:
    """Return the contestant called ``name``; if there is none, raise an error that lists the known names."""
    if name in CONTESTANTS:
        return CONTESTANTS[name]
    raise unknown("method", name, CONTESTANTS)


def known_as(name: str) -> type[OptimizerSpec] | Variant:
    """Return the contestant called ``name``, or a placeholder for a name that occurs only in an old table."""
    return CONTESTANTS.get(name) or Variant(Method, name, "unknown")


Settings = Mapping[str, Option]
"""Options of a contestant, its own and those of the recipe that it trains under: {"lr": 0.2, "end": 0.5}."""


def enter(recipe: Recipe, name: str, value: float | None, settings: Settings | None = None) -> Recipe:
    """Return the recipe with the contestant called ``name``, its knob at ``value`` and its options as in ``settings``.

    From trained weights, an optimizer of ours has its options for fine-tuning unless ``settings`` has others.

    >>> run_name(enter(recipes.get("digits"), "magnitude-global", 0.9, {"lr": 0.2, "end": 0.5}))
    'magnitude-global-sparsity0.9-s0'
    """
    knob = contestant(name).knob
    options = dict(settings or {}) | ({} if knob is None or value is None else {knob: value})
    if name not in METHODS:
        usual = OPTIMIZERS[name].fine_tuning if recipe.start else {}
        return recipe.but(optimizer=name, method=None, **{**usual, **options})
    takes = inspect.signature(METHODS[name].kind).parameters
    own = {option: options.pop(option) for option in list(options) if option in takes}
    if METHODS[name].kind is Narrow and value is not None:
        own["of"] = recipe.model
        options |= {"model": _narrow(recipe, value), "start": ""}  # trained weights do not fit
    return recipe.but(optimizer=recipe.optimizer.dense, method=MethodSpec.of(name, **own), **options)


def _narrow(recipe: Recipe, sparsity: float) -> str:
    """Return the name of the small dense network of a recipe."""
    classes = classes_of(recipe)
    if classes is None or ":" in recipe.model:
        raise ValueError(f"narrow needs a network and data of the lab, not {recipe.model} on {recipe.task.data}")
    with torch.device("meta"):
        whole = size(models.build(recipe.model, classes))
    return models.narrower(recipe.model, classes, (1 - sparsity) * whole)


def comparable(recipe: Recipe) -> Recipe:
    """Return the recipe with the network that its runs are compared by: the wide one beside a small dense network."""
    method = recipe.method
    if method is None or method.variant.kind is not Narrow:
        return recipe
    return recipe.but(model=str(dict(method.options)["of"]))


def setting(knob: str | None, value: float | None) -> str:
    """Return a knob and its value as text: "c=8e-05", "" for dense training."""
    return "" if value is None else f"{knob}={value:g}"


def run_name(recipe: Recipe) -> str:
    """Return the name of a run's folder: "grda-c8e-05-s0"."""
    pruner = recipe.pruner
    varied = setting(pruner.knob, pruner.value).replace("=", "")
    return "-".join(filter(None, [pruner.name, varied, f"s{recipe.seed}"]))


def title(recipe: Recipe) -> str:
    """Return what people read about a run: "grda c=8e-05 seed 0"."""
    pruner = recipe.pruner
    return " ".join(filter(None, [pruner.name, setting(pruner.knob, pruner.value), f"seed {recipe.seed}"]))


def plan(
    recipe: Recipe,
    *,
    methods: Iterable[str] | None = None,
    sparsities: Sequence[float] = (0.8, 0.9, 0.95),
    seeds: int = 1,
    sweeps: Mapping[str, Sequence[float]] | None = None,
    settings: Mapping[str, Settings] | None = None,
    layers: Mapping[tuple[int, float], str] | None = None,
    source: Path | None = None,
    batches: int,
) -> list[Recipe]:
    """Return the runs of a comparison: all methods with the first seed, then all with the next.

    Args:
        recipe: what the runs share.
        methods: names of contestants; by default the `usual` ones.
        sparsities: the sparsities of methods with a preset sparsity.
        seeds: number of seeds, starting with the recipe's own.
        sweeps: values of the knob by method, instead of the sparsities or the `default_sweep`.
        settings: options by method, instead of the recipe's and its usual ones.
        batches: steps per epoch, on which the default sweeps depend.
        layers: the zeros of each layer, by seed and sparsity, of the runs whose masks are shuffled; runs of "shuffled"
            are planned for these alone.
        source: where trained weights are that the runs start from, see `starting`.

    Raises:
        ValueError: a method or a value cannot be used.

    Example:
        >>> from dirprune.lab.training import recipes
        >>> planned = plan(recipes.get("digits"), methods=("sgd", "rigl"), sparsities=(0.5, 0.9), batches=45)
        >>> [run_name(each) for each in planned]
        ['sgd-s0', 'rigl-sparsity0.5-s0', 'rigl-sparsity0.9-s0']
    """
    sweeps, settings, layers = sweeps or {}, settings or {}, layers or {}
    chosen = usual(recipe) if methods is None else list(dict.fromkeys(methods))
    if not chosen:
        raise ValueError(f"methods={methods!r} names no method; choose from {', '.join(CONTESTANTS)}")
    knobs = {name: contestant(name).knob for name in chosen}
    if idle := sorted(set(sweeps) - knobs.keys()):
        raise ValueError(f"--sweep names {idle[0]}, which is not among --methods {','.join(chosen)}; add it")
    if seeds < 1:
        raise ValueError(f"seeds={seeds}: a comparison needs at least one")
    swept: dict[str, Sequence[float | None]] = {}
    for name, knob in knobs.items():
        default = sparsities if knob == "sparsity" else default_sweep(name, recipe, batches, settings.get(name))
        swept[name] = sweeps.get(name, default) if knob else (None,)
    if SHUFFLED in chosen and not any(name in TARGETED for name in chosen):
        raise ValueError(f"{SHUFFLED} takes its masks from {' or '.join(TARGETED)}; add the one that fits the recipe")
    planned = []
    for seed in range(recipe.seed, recipe.seed + seeds):
        base = recipe.but(seed=seed)
        base = starting(base, source) if source else base
        for name, values in swept.items():
            for value in values:
                own = dict(settings.get(name, {}))
                if name == SHUFFLED:
                    if value is None or (seed, value) not in layers:
                        continue
                    own["layers"] = layers[seed, value]
                planned.append(enter(base, name, value, own))
    return planned


def default_sweep(name: str, recipe: Recipe, batches: int, settings: Settings | None = None) -> list[float]:
    """Return values of a knob that should lead from moderate to high sparsity.

    With n steps at rates γᵢ = lr · factorᵢ / (1 − momentum), and the base rate γ:

    - gRDA: around the c whose final threshold at a constant rate, c √γ (nγ)^μ, is that of the unchanged recipe.
    - ℓ₁-RDA: around the λ whose final threshold, nγλ, is the same.
    - LinBreg: around this final threshold itself.
    - STR: around `str_decay`.
    - variational dropout: β up to 1, the variational bound; smaller values with weight decay.
    """
    shared = {option: value for option, value in (settings or {}).items() if option in ("lr", "weight_decay", "mu")}
    recipe = recipe.but(optimizer="grda" if "mu" in shared else recipe.optimizer, method=None, **shared)
    rate = recipe.optimizer.effective_lr
    steps = recipe.epochs * batches
    threshold = final_threshold(recipe, batches)
    strengths: dict[str, tuple[Sequence[float], Callable[[], float]]] = {
        "grda": (FACTORS, lambda: threshold / (rate**0.5 * (steps * rate) ** _own(recipe).mu)),
        "rda": (FACTORS, lambda: threshold / (steps * rate)),
        "linbreg": (FACTORS, lambda: threshold),
        "str": (FACTORS, lambda: str_decay(recipe, batches)),
        "variational-dropout": (BETAS, lambda: weight_decay_share(recipe, exposure(recipe, batches))),
    }
    if name not in strengths:
        return []
    factors, strength = strengths[name]
    unit = strength()
    return [rounded(factor * unit) for factor in factors]


def rounded(value: float) -> float:
    """Return the value of a knob rounded to three digits, as in the name of its run."""
    return float(f"{value:.3g}")


def final_threshold(recipe: Recipe, batches: int) -> float:
    """Return gRDA's final threshold at a constant rate, with the length and rate of the registered recipe.

    c was chosen for that length and rate. If a user changes them, the sparsity should not change.
    """
    own = recipes.get(recipe.name) if recipe.name in recipes.names() else recipe
    rate, optimizer = own.optimizer.effective_lr, _own(recipe)
    return float(optimizer.c * rate**0.5 * (own.epochs * batches * rate) ** optimizer.mu)


def _own(recipe: Recipe) -> Grda:
    """Return the recipe's gRDA, with gRDA's usual c and μ if it trains with something else."""
    optimizer = recipe.but(optimizer="grda", method=None).optimizer
    assert isinstance(optimizer, Grda)
    return optimizer


def str_decay(recipe: Recipe, batches: int) -> float:
    """Return a decay d of STR's s that left 3 to 7% of the weights in runs with and without weight decay.

    Without the gradient of the loss, s would end at s₀ exp(−d Σγᵢ). Weight decay also pulls weights to the threshold.
    """
    total = exposure(recipe, batches)
    return min(
        STR_DECAY_OVER_TRAINING * weight_decay_share(recipe, total) / total, FASTEST / recipe.optimizer.effective_lr
    )


def weight_decay_share(recipe: Recipe, total: float) -> float:
    """Return the factor by which weight decay w reduces the strength that a method needs, given Σγᵢ: 1 if w = 0.

    At w Σγᵢ = 4.7, an eighth of STR's strength had the same effect; at 5.9, a tenth of variational dropout's. Larger
    values were not measured.
    """
    return float(8 ** -min(recipe.optimizer.weight_decay * total / 4.7, 1.0))


def exposure(recipe: Recipe, batches: int) -> float:
    """Return Σγᵢ, the effective learning rate summed over all steps.

    >>> from dirprune.lab.training import recipes
    >>> round(exposure(recipes.get("resnet18-cifar10"), 391) / 391, 3)  # 60 epochs at half of γ = 1, on average
    30.0
    """
    factors = (
        recipe.schedule.factor(epoch, recipe.epochs, i / batches)
        for epoch in range(1, recipe.epochs + 1)
        for i in range(batches)
    )
    return recipe.optimizer.effective_lr * sum(factors)


def read_sweeps(texts: Iterable[str]) -> dict[str, list[float]]:
    """Read options like ``grda:c=8e-5,1.6e-4``.

    >>> read_sweeps(["grda:c=8e-5,1.6e-4"])
    {'grda': [8e-05, 0.00016]}
    """
    sweeps: dict[str, list[float]] = {}
    for text in texts:
        name, _, rest = text.partition(":")
        knob, _, values = rest.partition("=")
        expected = contestant(name).knob
        if expected is None:
            raise ValueError(f"--sweep {text!r}: {name} has no option to sweep")
        try:
            sweeps[name] = list(dict.fromkeys(float(value) for value in values.split(",")))
        except ValueError:
            sweeps[name] = []
        if knob != expected or not sweeps[name]:
            raise ValueError(
                f"--sweep {text!r} cannot be read: {name} is swept over {expected}; write "
                f"--sweep {name}:{expected}=VALUE,VALUE…"
            )
    return sweeps
