"""Recipes, compared with the published settings."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from levers import LEVERS, planned

from dirprune import GRDA
from dirprune.lab.methods import MethodSpec
from dirprune.lab.names import unknown
from dirprune.lab.tasks import Images
from dirprune.lab.training import recipes
from dirprune.lab.training.execution import Execution
from dirprune.lab.training.optimizers import Grda, Sgd, TargetGrda
from dirprune.lab.training.recipe import Recipe, differing
from dirprune.lab.training.schedules import Schedule

CIFAR: dict[str, Any] = {"batch_size": 128, "lr": 0.1, "schedule": Schedule("constant-linear-constant")}
VGG: dict[str, Any] = CIFAR | {
    "model": "vgg16",
    "epochs": 600,
    "statistics": "imagenet",
    "published": {(5e-4, mu) for mu in (0.4, 0.51, 0.6, 0.7)},
}
WRN: dict[str, Any] = CIFAR | {
    "model": "wrn28x10",
    "epochs": 200,
    "statistics": "cifar",
    "published": {(1e-3, mu) for mu in (0.501, 0.55, 0.6, 0.65)},
}
IMAGENET: dict[str, Any] = {
    "data": "imagenet",
    "model": "resnet50",
    "batch_size": 256,
    "lr": 0.1,
    "statistics": "imagenet",
}
# For ImageNet, the settings are those of the paper's figure with a constant rate and of its table with drops.
PUBLISHED: dict[str, dict[str, Any]] = {
    "vgg16-cifar10": VGG | {"data": "cifar10"},
    "wrn28x10-cifar10": WRN | {"data": "cifar10"},
    "wrn28x10-cifar100": WRN | {"data": "cifar100"},
    "resnet50-imagenet": IMAGENET
    | {
        "epochs": 147,
        "schedule": Schedule("constant"),
        "published": {(0.005, 0.501), (0.005, 0.51), (0.005, 0.55), (0.01, 0.4)},
    },
    "resnet50-imagenet-drop140": IMAGENET
    | {
        "epochs": 153,
        "schedule": Schedule("drop", after=(140,)),
        "published": {(0.01, 0.4)} | {(0.005, mu) for mu in (0.501, 0.51, 0.55, 0.6, 0.65, 0.7)},
    },
    "resnet50-imagenet-every30": IMAGENET
    | {
        "epochs": 120,
        "schedule": Schedule("drop", every=30),
        "published": {(0.005, mu) for mu in (0.65, 0.7, 0.75, 0.8, 0.85)}
        | {(0.004, mu) for mu in (0.65, 0.7, 0.75)}
        | {(0.003, 0.7), (0.003, 0.75), (0.002, 0.75)},
    },
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_recipes_hold_the_published_values(name: str) -> None:
    recipe, expected = recipes.get(name), PUBLISHED[name]
    values = recipe.values()
    found = {key: values[key] for key in expected}
    assert found | {"published": set(recipe.published)} == expected
    assert len(set(recipe.published)) == len(recipe.published)
    assert (values["c"], values["mu"]) in recipe.published
    assert recipe.method is None
    rest = {"optimizer": "grda", "momentum": 0.0, "nesterov": False, "weight_decay": 0.0}
    rest |= {"exempt": ()}  # biases and BatchNorm are thresholded too
    rest |= {"augment": True, "validation": 0.0}  # trained on the whole training set, reported on the whole test set
    assert rest.items() <= values.items()


@pytest.mark.parametrize("data", ["cifar10", "cifar100"])
@pytest.mark.parametrize(
    ("name", "model", "epochs", "lr", "c"),
    [
        ("resnet18-{}", "resnet18", 60, 0.1, 8e-5),
        ("wrn28x10-{}-modern", "wrn28x10", 200, 0.1, 8e-5),
        ("vgg16-{}-modern", "vgg16", 60, 0.03, 1.2e-4),
    ],
)
def test_modern_recipes_differ_in_network_length_and_rate_alone(
    name: str, model: str, epochs: int, lr: float, c: float, data: str
) -> None:
    recipe = recipes.get(name.format(data))
    assert recipe.task == Images(data, statistics="cifar")
    assert (recipe.model, recipe.epochs) == (model, epochs)
    assert recipe.optimizer == Grda(
        lr=lr, c=c, mu=0.8, momentum=0.9, nesterov=True, weight_decay=5e-4, exempt=("bias", "norm")
    )
    assert recipe.schedule == Schedule("cosine", warmup=1)
    assert recipe.schedule.factor(1, epochs, 0.5) == 0.5  # in the middle of the warm-up
    assert recipe.schedule.factor(epochs, epochs, 1.0) == pytest.approx(0)


def test_the_modern_digits_recipe_optimizes_as_the_modern_ones_do() -> None:
    modern, digits = recipes.get("digits-modern"), recipes.get("digits")
    optimization = {"lr", "c", "mu", "momentum", "nesterov", "weight_decay", "exempt", "schedule"}
    assert set(differing(modern, digits, free={"name", "about"})) == optimization
    others = set(differing(modern, recipes.get("resnet18-cifar10"), free={"lr", "c"})) & optimization
    assert others == set()


def test_a_method_trains_with_an_optimizer_that_does_not_prune() -> None:
    digits = recipes.get("digits")
    with pytest.raises(ValueError, match="optimizer='grda' cannot be used; rigl prunes by itself; train with sgd"):
        digits.but(method=MethodSpec.of("rigl", sparsity=0.9))
    with pytest.raises(ValueError, match="Did you mean 'rigl'"):
        MethodSpec.of("rigel")


@pytest.mark.parametrize("options", [{"density": 0.1, "sparsity": 0.5}, {}])
def test_options_that_do_not_make_the_method_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"cannot be used; rigl takes sparsity, alpha, every, until, seed"):
        MethodSpec.of("rigl", **options)


def flat(recipe: Recipe) -> dict[str, Any]:
    """Return a recipe as files held it before it had parts: every option side by side."""
    values: dict[str, Any] = recipe.values()
    return json.loads(json.dumps(values | {name: vars(values[name]) for name in ("schedule", "cpu", "cuda")}))


@pytest.mark.parametrize(
    "name", [name for name in recipes.names() if name != "pictures" and not name.startswith("gpt")]
)
def test_files_from_before_recipes_had_parts_are_read(name: str) -> None:
    recipe = recipes.get(name)
    assert Recipe.from_dict(flat(recipe)) == recipe
    from_before_methods = {key: value for key, value in flat(recipe).items() if key not in ("method", "options")}
    assert Recipe.from_dict(from_before_methods) == recipe
    dense = recipe.but(optimizer="sgd")
    assert Recipe.from_dict(flat(recipe) | {"optimizer": "sgd"}) == dense  # c, mu and exempt meant nothing there
    rda = flat(recipe) | {"method": "rda", "options": [["lam", 0.001]]}  # a method that took the place of gRDA's c
    assert Recipe.from_dict(rda) == recipe.but(optimizer="rda", lam=0.001)
    rigl = flat(recipe) | {"optimizer": "sgd", "method": "rigl", "options": [["sparsity", 0.9]]}
    assert Recipe.from_dict(rigl) == dense.but(method=MethodSpec.of("rigl", sparsity=0.9))


def test_every_published_data_set_has_a_short_recipe_for_the_cpu() -> None:
    names = recipes.names()
    assert set(PUBLISHED) | {"digits"} < set(names)
    short = [recipes.get(name) for name in names if name.endswith("-short")]
    assert {recipe.task.data for recipe in short} == {"digits", "cifar10", "cifar100"}
    assert all(recipe.epochs <= 5 for recipe in short)
    assert all(recipe.published == () for recipe in short)  # nothing published is claimed for them


@pytest.mark.parametrize("name", recipes.names())
def test_a_recipe_survives_json(name: str) -> None:
    recipe = recipes.get(name)
    assert recipe.name == name
    assert Recipe.from_dict(json.loads(json.dumps(recipe.to_dict()))) == recipe


def test_a_recipe_with_every_field_changed_survives_json() -> None:
    """Every field differs from that of digits, so a field that the round trip loses would show."""
    plain = recipes.get("digits")
    changed = Recipe(
        name="own",
        about="all else than digits",
        task=Images("synthetic", statistics="cifar", augment=False, validation=0.25, size=64),
        model="vgg16",
        epochs=7,
        batch_size=9,
        optimizer=Sgd(lr=0.3, momentum=0.9, nesterov=True, weight_decay=1e-4),
        method=MethodSpec.of("magnitude", sparsity=0.9, allocation="global"),
        schedule=Schedule("drop", after=(2, 4), every=3, warmup=1.5),
        seed=3,
        start="weights.pt",
        keep=(1, 5),
        published=((0.1, 0.2),),
        cpu=Execution(precision="bfloat16", compile=True),
        cuda=Execution(channels_last=True),
    )
    ours, theirs = plain.values(), changed.values()
    assert set(ours) - set(theirs) == {"c", "mu", "exempt"}
    assert [name for name in theirs if ours[name] == theirs[name]] == []
    assert set(differing(plain, changed)) == set(theirs)
    assert Recipe.from_dict(json.loads(json.dumps(changed.to_dict()))) == changed
    target = plain.but(optimizer="grda-target", sparsity=0.7)
    assert target.optimizer == TargetGrda(lr=0.1, sparsity=0.7, exempt=("bias", "norm"))
    assert Recipe.from_dict(json.loads(json.dumps(target.to_dict()))) == target
    rest = plain.but(lr=0.3, mu=0.9, c=0.0, exempt=("bias",), momentum=0.1, nesterov=True, weight_decay=1e-4)
    assert Recipe.from_dict(json.loads(json.dumps(rest.to_dict()))) == rest


def test_an_unknown_name_lists_the_known_ones_and_the_nearest() -> None:
    with pytest.raises(ValueError, match="no recipe 'vgg-cifar10'") as caught:
        recipes.get("vgg-cifar10")
    assert "Did you mean 'vgg16-cifar10'?" in str(caught.value)
    assert str(caught.value).endswith(", ".join(recipes.names()))


@pytest.mark.parametrize("name", ["§", "mynet", "vit", "", "lenet"])
def test_only_a_misspelling_is_guessed(name: str) -> None:
    with pytest.raises(ValueError, match=rf"no recipe '{name}'\. Known: digits"):
        recipes.get(name)
    assert "Did you mean" not in str(unknown("model", name, ["resnet18", "resnet50", "small", "vgg16", "wrn28x10"]))


def test_a_configuration_of_another_version_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"^dropout=0\.5: this version .* remove it, or use the version that wrote it$"
    ):
        Recipe.from_dict(recipes.get("digits").to_dict() | {"dropout": 0.5})


BAD = [
    ("method", "rigl"),
    ("sparsity", 0.9),
    ("seed", -1),
    ("epochs", 1.5),
    ("epochs", "many"),
    ("c", "abc"),
    ("keep", (-1,)),
    ("epochs", 0),
    ("batch_size", 0),
    ("lr", 0.0),
    ("lr", math.nan),
    ("c", -1e-4),
    ("c", math.inf),
    ("mu", 0.0),
    ("mu", math.nan),
    ("momentum", 1.0),
    ("nesterov", True),
    ("weight_decay", -1e-4),
    ("validation", 1.0),
    ("statistics", "mnist"),
]


@pytest.mark.parametrize(("name", "value"), BAD)
def test_bad_values_are_refused_by_name(name: str, value: Any) -> None:
    changes: dict[str, Any] = {name: value}
    with pytest.raises(ValueError, match="^" + re.escape(f"{name}={value!r} cannot be used; ")):
        recipes.get("digits").but(**changes)


OWN = """
from dirprune.lab.methods import MethodSpec
from dirprune.lab.tasks import Images
from dirprune.lab.training.optimizers import Sgd
from dirprune.lab.training.recipe import Recipe

def recipe():
    method = MethodSpec.of("rigl", sparsity=0.5)
    return Recipe("mine", Images("digits"), "small", epochs=2, optimizer=Sgd(), method=method)
"""


def test_a_recipe_may_come_from_a_file_of_the_users_own(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(OWN)
    assert recipes.find(str(file)).setting == "rigl sparsity=0.5"
    file.write_text(OWN + "recipe = recipe()")
    assert recipes.find(str(file)).name == "mine"
    assert recipes.find("digits") == recipes.get("digits")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "raised KeyError: 'recipe'; it must define recipe"),
        ("recipe = 3", "returned a int; it must return a Recipe"),
        ("def recipe(): return 1 / 0", "raised ZeroDivisionError"),
        (OWN.replace("epochs=2", "epochs=0"), "epochs=0 cannot be used"),
        (OWN.replace("Sgd()", "'sgd'"), r"optimizer='sgd' cannot be used; give a part of a recipe, e.g. .*Grda"),
        (None, "does not exist; name a Python file"),
    ],
)
def test_a_file_that_makes_no_recipe_is_refused(tmp_path: Path, text: str | None, words: str) -> None:
    if text is not None:
        (tmp_path / "mine.py").write_text(text)
    with pytest.raises((ValueError, FileNotFoundError), match=words):
        recipes.find(str(tmp_path / "mine.py"))


def test_a_schedule_is_read_as_users_type_it() -> None:
    digits = recipes.get("digits")
    assert digits.but(schedule="drop:every=30").schedule == Schedule("drop", every=30)
    for text in ("cosinus", "cosine:warmup=-1", "drop:after=a", "drop:from=3"):
        with pytest.raises(ValueError, match="cannot be used"):
            digits.but(schedule=text)


def test_the_device_decides_how_steps_run() -> None:
    recipe = recipes.get("vgg16-cifar10")
    fast = Execution(precision="bfloat16", channels_last=True, compile=True, capture=True, lean=True)
    assert recipe.execution("cuda") == fast
    assert recipe.execution("cpu") == Execution(channels_last=True)
    with pytest.raises(ValueError, match="precision='float16' is not known; take one of float32, bfloat16"):
        Execution(precision="float16")


def test_the_optimizer_is_made_as_the_recipe_says() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    recipe = recipes.get("digits").but(momentum=0.9, nesterov=True, weight_decay=5e-4)
    shared = {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 5e-4}

    sgd = recipe.but(optimizer="sgd").optimizer.make(model)
    assert type(sgd) is torch.optim.SGD
    assert shared.items() <= sgd.param_groups[0].items()

    grda = recipe.optimizer.make(model)
    assert type(grda) is GRDA
    [group] = grda.param_groups  # all parameters are thresholded alike
    assert (shared | {"c": 0.016, "mu": 0.7}).items() <= group.items()
    assert len(group["params"]) == 4

    exempting = recipe.but(exempt=("bias", "norm")).optimizer.make(model)
    thresholded = [p for group in exempting.param_groups if group["c"] for p in group["params"]]
    assert len(thresholded) == 1
    assert thresholded[0] is model[0].weight


@pytest.mark.parametrize("lever", LEVERS)
def test_every_lever_of_the_benchmark_changes_one_thing(lever: str) -> None:
    usual, changed = (planned("resnet-small-cifar10-16", 0.95, 200, name) for name in ("default", lever))
    assert changed.task.validation == 0.2
    assert differing(usual, changed) == [option for option in LEVERS[lever] if option != "optimizer"] or (
        changed.pruner.name != usual.pruner.name
    )
