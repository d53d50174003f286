"""The methods that take part in a comparison, and the runs it consists of.

All runs of a comparison share data, order of the data, initial weights (by seed), schedule and epochs. A method with a
preset sparsity is run at the requested sparsities, any other at several values of its own knob.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from dirprune.lab import methods
from dirprune.lab.names import unknown
from dirprune.lab.training import recipes
from dirprune.lab.training.experiment import make_method
from dirprune.lab.training.recipes import Option, Recipe

FACTORS = (0.5, 1.0, 2.0, 4.0)
"""A strength is swept over these multiples of a moderate one."""

BETAS = (0.03, 0.1, 0.3, 1.0)
"""The values of β over which variational dropout is swept without weight decay."""

PULL = 11.0
"""The value of d Σγᵢ, for STR's decay d without weight decay, that left 7% of the weights of the digits network."""

FASTEST = 0.01
"""The largest fraction of STR's s that decays in one step. With 0.04, networks were destroyed before they learned."""


@dataclass(frozen=True)
class Contestant:
    """A method as it enters a comparison.

    ``name`` is what users type and ``title`` what figures show. ``options`` are the arguments of the method other than
    its knob. ``cost`` says what the method needs in addition to the epochs that all methods have.
    """

    name: str
    title: str
    method: str
    cost: str
    options: tuple[tuple[str, Option], ...] = ()

    @property
    def knob(self) -> str | None:
        return methods.get(self.method).knob

    @property
    def is_preset(self) -> bool:
        return self.knob == "sparsity"

    @property
    def is_swept(self) -> bool:
        """Whether it is run at several values of a knob that influences the sparsity, but is not the sparsity."""
        return self.knob is not None and not self.is_preset

    def enter(self, recipe: Recipe, value: float | None) -> Recipe:
        """Return the recipe with this method, its knob at ``value``."""
        optimizer = methods.get(self.method).trains_with
        plain = replace(recipe, optimizer=optimizer, method="", options=())
        if value is None or self.knob is None:
            return plain
        if self.method == "grda":
            return replace(plain, c=value)
        return replace(plain, method=self.method, options=((self.knob, value), *self.options))


_CONTESTANTS = (
    Contestant("grda", "gRDA", "grda", "one more copy of the weights, the accumulator"),
    Contestant("sgd", "SGD (dense)", "sgd", "nothing: it does not prune"),
    Contestant("rda", "RDA (ℓ₁)", "rda", "one more copy of the weights, the accumulator"),
    Contestant("magnitude", "magnitude", "magnitude", "sorting each layer's weights, every 100 steps or more often"),
    Contestant(
        "magnitude-global",
        "magnitude, global",
        "magnitude",
        "sorting all weights, every 100 steps or more often",
        options=(("allocation", "global"),),
    ),
    Contestant(
        "magnitude-one-shot",
        "magnitude, one-shot",
        "magnitude",
        "nothing: it trains densely for the first half of the epochs, prunes once and fine-tunes for the second half",
        options=(("allocation", "global"), ("start", 0.5), ("end", 0.5)),
    ),
    Contestant(
        "variational-dropout",
        "variational dropout",
        "variational-dropout",
        "twice the parameters, and a second product per layer",
    ),
    Contestant(
        "rigl",
        "RigL",
        "rigl",
        "sorting each layer's weights twice, every 100 steps or more often; its first weights are divided by √density "
        "in networks without normalisation",
    ),
    Contestant(
        "amc",
        "AMC",
        "amc",
        "4 searches of 100 evaluations each: it trains densely for the first half of the epochs, prunes in four stages "
        "until three quarters of them and fine-tunes for the rest",
    ),
    Contestant("str", "STR", "str", "one more parameter per layer, and a threshold in every forward pass"),
)
CONTESTANTS: Mapping[str, Contestant] = {each.name: each for each in _CONTESTANTS}
DEFAULT = tuple(methods.METHODS)


def contestant(name: str) -> Contestant:
    """Return the contestant called ``name``; if there is none, raise an error that lists the known names."""
    if name in CONTESTANTS:
        return CONTESTANTS[name]
    raise unknown("method", name, CONTESTANTS)


def known_as(name: str) -> Contestant:
    """Return the contestant called ``name``, or a placeholder for a name that occurs only in an old table."""
    return CONTESTANTS.get(name) or Contestant(name, name, name, "unknown")


def setting(knob: str | None, value: float | None) -> str:
    """Return a knob and its value as text: "c=8e-05", "" for dense training."""
    return "" if value is None else f"{knob}={value:g}"


@dataclass(frozen=True)
class Trial:
    """One run of a comparison; ``value`` is that of the contestant's knob, None for dense training."""

    contestant: Contestant
    value: float | None
    recipe: Recipe

    @property
    def setting(self) -> str:
        """The knob and its value: "c=8e-05", "" for dense training."""
        return setting(self.contestant.knob, self.value)

    @property
    def name(self) -> str:
        """The name of its folder: "grda-c8e-05-s0"."""
        return "-".join(filter(None, [self.contestant.name, self.setting.replace("=", ""), f"s{self.recipe.seed}"]))

    @staticmethod
    def of(recipe: Recipe) -> Trial:
        """Return the trial that a recipe describes. The options other than the knob identify the contestant.

        >>> from dirprune.lab.training import recipes
        >>> Trial.of(replace(recipes.get("digits"), c=0.02)).name
        'grda-c0.02-s0'
        """
        method = recipe.pruner
        knob = methods.get(method).knob
        options = dict(recipe.options)
        value = recipe.c if method == "grda" else options.pop(knob, None) if knob else None
        rest = tuple(options.items())
        known = (each for each in CONTESTANTS.values() if (each.method, each.options) == (method, rest))
        words = " ".join([method, *(f"{name}={value}" for name, value in rest)])
        found = next(known, None) or Contestant(words, words, method, "unknown", rest)
        return Trial(found, None if value is None else float(value), recipe)


def plan(
    recipe: Recipe,
    *,
    methods: Iterable[str] = DEFAULT,
    sparsities: Sequence[float] = (0.8, 0.9, 0.95),
    seeds: int = 1,
    sweeps: Mapping[str, Sequence[float]] | None = None,
    batches: int,
) -> list[Trial]:
    """Return the runs of a comparison: all methods with the first seed, then all with the next.

    Args:
        recipe: what the runs share.
        methods: names of contestants.
        sparsities: the sparsities of methods with a preset sparsity.
        seeds: number of seeds, starting with the recipe's own.
        sweeps: values of the knob by method, instead of the sparsities or the `default_sweep`.
        batches: steps per epoch, on which the default sweeps depend.

    Raises:
        ValueError: a method or a value cannot be used.

    Example:
        >>> from dirprune.lab.training import recipes
        >>> trials = plan(recipes.get("digits"), methods=("sgd", "rigl"), sparsities=(0.5, 0.9), batches=45)
        >>> [trial.name for trial in trials]
        ['sgd-s0', 'rigl-sparsity0.5-s0', 'rigl-sparsity0.9-s0']
    """
    sweeps = sweeps or {}
    chosen = [contestant(name) for name in dict.fromkeys(methods)]
    if not chosen:
        raise ValueError(f"methods={methods!r} names no method; choose from {', '.join(CONTESTANTS)}")
    if idle := sorted(set(sweeps) - {each.name for each in chosen}):
        raise ValueError(
            f"--sweep names {idle[0]}, which is not among --methods {','.join(e.name for e in chosen)}; add it"
        )
    if seeds < 1:
        raise ValueError(f"seeds={seeds}: a comparison needs at least one")
    swept: dict[Contestant, Sequence[float | None]] = {}
    for each in chosen:
        default = sparsities if each.is_preset else default_sweep(each, recipe, batches)
        swept[each] = sweeps.get(each.name, default) if each.knob else (None,)
    trials = []
    for seed in range(recipe.seed, recipe.seed + seeds):
        own = replace(recipe, seed=seed)
        for each, values in swept.items():
            trials += [Trial(each, value, each.enter(own, value)) for value in values]
    for trial in trials:
        make_method(trial.recipe, lambda model: 0.0)  # raises for a bad value before anything is trained
    return trials


def default_sweep(contestant: Contestant, recipe: Recipe, batches: int) -> list[float]:
    """Return values of a knob that should lead from moderate to high sparsity.

    With n steps at rates γᵢ = lr · factorᵢ / (1 − momentum), and the base rate γ:

    - gRDA: around the c whose final threshold at a constant rate, c √γ (nγ)^μ, is that of the unchanged recipe.
    - ℓ₁-RDA: around the λ whose final threshold, nγλ, is the same.
    - STR: around `str_decay`.
    - variational dropout: β up to 1, the variational bound; smaller values with weight decay.
    """
    rate = recipe.lr / (1 - recipe.momentum)
    steps = recipe.epochs * batches
    threshold = final_threshold(recipe, batches)
    strengths: dict[str, tuple[Sequence[float], Callable[[], float]]] = {
        "grda": (FACTORS, lambda: threshold / (rate**0.5 * (steps * rate) ** recipe.mu)),
        "rda": (FACTORS, lambda: threshold / (steps * rate)),
        "str": (FACTORS, lambda: str_decay(recipe, batches)),
        "variational-dropout": (BETAS, lambda: weight_decay_share(recipe, exposure(recipe, batches))),
    }
    if contestant.method not in strengths:
        return []
    factors, strength = strengths[contestant.method]
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
    rate = own.lr / (1 - own.momentum)
    return float(recipe.c * rate**0.5 * (own.epochs * batches * rate) ** recipe.mu)


def str_decay(recipe: Recipe, batches: int) -> float:
    """Return a decay d of STR's s that left 3 to 7% of the weights in runs with and without weight decay.

    Without the gradient of the loss, s would end at s₀ exp(−d Σγᵢ). Weight decay also pulls weights to the threshold.
    """
    total = exposure(recipe, batches)
    return min(PULL * weight_decay_share(recipe, total) / total, FASTEST * (1 - recipe.momentum) / recipe.lr)


def weight_decay_share(recipe: Recipe, total: float) -> float:
    """Return the factor by which weight decay w reduces the strength that a method needs, given Σγᵢ: 1 if w = 0.

    At w Σγᵢ = 4.7, an eighth of STR's strength had the same effect; at 5.9, a tenth of variational dropout's. Larger
    values were not measured.
    """
    return float(8 ** -min(recipe.weight_decay * total / 4.7, 1.0))


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
    return recipe.lr / (1 - recipe.momentum) * sum(factors)


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
