"""The commands as a user types them: what they print, write, refuse and leave unchanged."""

from __future__ import annotations

import errno
import io
import json
import math
import os
import shutil
import subprocess
import sys
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from rich.console import Console
from rich.progress import Progress
from rich.text import Text
from typer.testing import CliRunner, Result

import dirprune
from dirprune.deploy import NoKernels, load_sparse
from dirprune.lab.cli import app as cli
from dirprune.lab.cli import console, follow
from dirprune.lab.cli.output import Output
from dirprune.lab.data import download
from dirprune.lab.records import checkpoint
from dirprune.lab.studies.bench import work as bench
from dirprune.lab.studies.connectivity import work as connectivity
from dirprune.lab.studies.direction import figures as direction_plots
from dirprune.lab.studies.report import figures as report_figures
from dirprune.lab.studies.report import report
from dirprune.lab.studies.theorem import work as theory_report
from dirprune.lab.training import recipes, runs
from dirprune.lab.training.experiment import assemble
from dirprune.lab.training.recipe import Recipe
from dirprune.zeros import LayerSparsity

MODULE = """
from torch import nn

def linear(num_classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, num_classes))

def fading(num_classes):
    # any threshold is past the weights of all layers but the first
    layers = [nn.Linear(64, 64), *(nn.Linear(64, 64) for _ in range(3)), nn.Linear(64, num_classes)]
    for layer in layers[1:]:
        nn.init.constant_(layer.weight, 1e-6)
    return nn.Sequential(nn.Flatten(), *layers)
"""
LINEAR = "cli_networks:linear"
ROOT = Path(__file__).parent.parent


def call(*words: object) -> Result:
    """Run a command in this process; raise errors that are not shown to the user as a message."""
    result = CliRunner().invoke(cli.app, [str(word) for word in words])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def objects(result: Result) -> list[dict[str, Any]]:
    """Return the JSON objects that a command printed, one per line and nothing else."""
    assert result.exit_code == 0, result.stderr
    return [json.loads(line) for line in result.stdout.splitlines()]


def test_texts_of_others_are_shown_as_they_are_and_command_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    output, text = Output(), "[red]x[/blue][/] :smile: \x1b]0;title\x07\ud800"
    output.table(text, (text,), [(text,)])
    output.tell(text)
    console.say(text)
    shown = "[red]x[/blue][/] :smile: �]0;title��"
    said = capsys.readouterr()
    assert said.out.count(shown) == 4
    assert said.err == shown + "\n"
    with Progress(*console._columns(80), console=Console(file=(drawn := io.StringIO()), force_terminal=True)) as bar:
        bar.add_task("[/blue] run", total=1, note="", unit="")
    assert "[/blue] run" in drawn.getvalue()


def flat(options: dict[str, Any]) -> list[Any]:
    return [word for pair in options.items() for word in pair]


def tree(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module", autouse=True)
def networks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Write a user's own module, with networks so small that their runs take no time."""
    folder = tmp_path_factory.mktemp("networks")
    (folder / "cli_networks.py").write_text(MODULE)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        yield


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DIRPRUNE_DATA", raising=False)
    monkeypatch.delenv("DIRPRUNE_TRACEBACK", raising=False)
    monkeypatch.setenv("COLUMNS", "80")  # wherever the tests run


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, networks: None) -> dict[str, tuple[Path, Result]]:
    """Runs of two epochs with every checkpoint kept, and what training them printed."""
    folder = tmp_path_factory.mktemp("trained")
    common = ("--model", LINEAR, "--epochs", 2, "--keep", "0,1,2")
    made = {}
    for name, options in {
        "sgd": ("--optimizer", "sgd"),
        "grda": ("--c", 0.02, "--tensorboard"),
        "seed1": ("--c", 0.02, "--seed", 1),
        "held-out": ("--c", 0.02, "--validation", 0.2),
    }.items():
        result = call("train", "digits", *common, *options, "--json", "--out", folder / name)
        made[name] = (folder / name, result)
    return made


# Starting, help and output


def test_the_commands_are_there_without_torch_numpy_or_matplotlib() -> None:
    code = "import sys, dirprune.lab.cli.app; print(*{'torch', 'numpy', 'matplotlib', 'sklearn'} & set(sys.modules))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == ""


@pytest.mark.parametrize(
    ("redirection", "said"),
    [
        (">/dev/full", "cannot write to stdout (No space left on device)"),
        pytest.param(">&-", "", marks=pytest.mark.soak),
        pytest.param("|true", "", marks=pytest.mark.soak),
    ],
)
def test_that_nobody_takes_the_results_stops_nothing(redirection: str, said: str) -> None:
    command = f"{sys.executable} -m dirprune recipes {redirection}"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, check=True)
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_a_terminal_of_few_letters_is_told_what_it_can_show(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONIOENCODING": "latin-1"}
    command = [sys.executable, "-m", "dirprune", "train", "--help"]
    done = subprocess.run(command, capture_output=True, check=True, env=environment)
    assert b"--mu" in done.stdout
    assert b"strength, >= 0." in done.stdout


def test_version() -> None:
    assert call("--version").stdout == f"dirprune {dirprune.__version__}\n"


@pytest.mark.parametrize(
    ("verb", "default"),
    [
        ("demo", "(60)"),
        ("train", "(a new one under runs/)"),
        ("train", "($DIRPRUNE_DATA or ~/.cache/dirprune)"),
        ("report", "RUN/figures; runs/report"),
        ("tune", ".501 .51 .55"),
        ("tune", "runs/tune-RECIPE"),
        ("compare", "runs/compare-RECIPE"),
        ("score", "RUN/score"),
        ("resume", "(where the last session found them)"),
        ("score", "(the newest)"),
        ("connect", "(that of run A)"),
    ],
)
def test_help_says_what_happens_by_default(verb: str, default: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("typer.rich_utils.MAX_WIDTH", 300)
    assert default in call(verb, "--help").stdout


# demo


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Result]:
    folder = tmp_path_factory.mktemp("demo") / "out"
    return folder, call("demo", "--epochs", 2, "--json", "--out", folder)


def test_demo_gives_machines_one_object_and_a_figure(demo: tuple[Path, Result]) -> None:
    folder, result = demo
    (found,) = objects(result)
    assert Path(found["figure"]) == folder / "demo.png"
    assert (folder / "demo.png").read_bytes().startswith(b"\x89PNG")
    for name, row in zip(("dense", "sparse"), found["rows"], strict=True):
        run, file = runs.load(folder / name), folder / f"{name}.safetensors"
        assert row["test_accuracy"] == run.records()[-1].test_accuracy
        assert row["weights_left"] == 1 - run.records()[-1].weight_sparsity
        assert row["file_bytes"] == file.stat().st_size
        weights = [p for p in load_sparse(file).values() if p.dim() > 1]
        zeros = sum(int((p == 0).sum()) for p in weights)
        assert zeros == (round(0.9 * sum(p.numel() for p in weights)) if name == "sparse" else 0)
    assert [row["macs_left"] == 1 for row in found["rows"]] == [True, False]
    assert result.stderr == "" or "No time is measured" in result.stderr


def test_a_demo_without_a_compiler_shows_the_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: object, **__: object) -> None:
        raise NoKernels("install gcc")

    monkeypatch.setattr("dirprune.lab.studies.deployment.speed.saved", none)
    result = call("demo", "--epochs", 1, "--out", tmp_path / "out", "--json")
    assert "No time is measured: install gcc" in result.stderr
    (found,) = objects(result)
    assert [row["microseconds"] for row in found["rows"]] == [None, None]
    assert Path(found["figure"]).exists()


def test_a_demo_that_is_stopped_says_how_to_see_it_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(*arguments: object, **options: object) -> None:
        raise typer.Exit(console.INTERRUPTED)

    monkeypatch.setattr("dirprune.lab.cli.follow.follow", stopped)
    result = call("demo", "--out", tmp_path / "out")
    assert result.exit_code == console.INTERRUPTED
    assert "run `dirprune demo` again" in result.stderr


def test_demo_trains_both_from_the_same_weights(demo: tuple[Path, Result]) -> None:
    folder, _ = demo
    made = assemble(replace(recipes.get("digits"), seed=0), device=torch.device("cpu"), root=None).model.state_dict()
    for name in ("dense", "sparse"):
        started = checkpoint.load(folder / name / "checkpoints" / "epoch-0000.pt")["model"]
        assert all(torch.equal(started[key], value) for key, value in made.items())


def test_demo_for_people_and_a_second_time(demo: tuple[Path, Result]) -> None:
    folder, _ = demo
    before = tree(folder)
    text = call("demo", "--epochs", 1, "--out", folder).stdout
    assert tree(folder) == before
    again = folder.with_name("out-2")
    lines = text.splitlines()
    assert max(map(len, lines)) <= 110
    for name, label in (("dense", "dense (SGD)"), ("sparse", "90% zeros (gRDA)")):
        (line,) = [line for line in lines if line.strip().startswith(label)]
        assert f"{runs.load(again / name).records()[-1].test_accuracy:.2f}" in line
    assert [line for line in lines if line.startswith("conv2.weight")]
    assert f"Figure: {again / 'demo.png'}" in lines
    assert (again / "demo.png").exists()


# train, resume, report


def test_train_prints_its_records_and_nothing_else(trained: dict[str, tuple[Path, Result]]) -> None:
    folder, result = trained["grda"]
    assert objects(result) == [record.to_dict() for record in runs.load(folder).records()]
    assert [record["epoch"] for record in objects(result)] == [1, 2]


def test_event_files_hold_the_records(trained: dict[str, tuple[Path, Result]]) -> None:
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    folder, result = trained["grda"]
    events = event_accumulator.EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    for name in ("test_accuracy", "sparsity", "lr"):
        read = [(event.step, event.value) for event in events.Scalars(name)]
        written = [(record["epoch"], pytest.approx(record[name], rel=1e-6)) for record in objects(result)]
        assert read == written
    assert not (trained["sgd"][0] / "tensorboard").exists()


def test_kept_checkpoints_stay(trained: dict[str, tuple[Path, Result]]) -> None:
    assert checkpoint.epochs(trained["grda"][0] / "checkpoints") == [0, 1, 2]


def test_a_validation_share_is_held_out_and_reported_on(trained: dict[str, tuple[Path, Result]]) -> None:
    folder, result = trained["held-out"]
    assert "validation accuracy" in call("resume", folder).stdout  # which has nothing left to train
    parts = assemble(runs.load(folder).recipe, device=torch.device("cpu"), root=None)
    assert parts.loaders.validation is not None
    parts.model.load_state_dict(runs.weights_of(runs.load(folder))[1])
    ((inputs, targets),) = list(parts.loaders.validation)
    right = (parts.model(inputs).argmax(1) == targets).sum()
    assert len(targets) + parts.loaders.train.examples == 1438
    assert objects(result)[-1]["test_accuracy"] == pytest.approx(100 * right.item() / len(targets))


def test_every_override_reaches_the_configuration(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    given: dict[str, Any] = {}

    def only_make(run: Any, **options: Any) -> None:
        run()
        given.update(options)

    monkeypatch.setattr(follow, "follow", only_make)
    words = "--c .25 --mu .75 --lr .5 --epochs 7 --batch-size 9 --seed 11 --model resnet18"
    words += " --validation .125 --keep 3,5 --precision float32 --no-compile --data d --device cpu --save-every 4"
    words += " --minutes 9 --lean --momentum .5 --nesterov --weight-decay .01 --schedule cosine:warmup=2 --no-augment"
    words += " --exempt bias,head.*"
    call("train", "vgg16-cifar10", *words.split(), "--tensorboard", "--out", "run")
    found, plain = json.loads(Path("run/config.json").read_text()), recipes.get("vgg16-cifar10").to_dict()
    changed = {key: value for key, value in found.items() if json.loads(json.dumps(plain[key])) != value}
    execution, on_cpu = changed.pop("cuda"), changed.pop("cpu")
    assert changed == {
        "optimizer": {
            **{"name": "grda", "c": 0.25, "mu": 0.75, "lr": 0.5, "exempt": ["bias", "head.*"]},
            **{"momentum": 0.5, "nesterov": True, "weight_decay": 0.01},
        },
        "task": {**plain["task"], "validation": 0.125, "augment": False},
        "schedule": {"kind": "cosine", "after": [], "every": 0, "warmup": 2.0},
        **{"epochs": 7, "batch_size": 9, "seed": 11, "model": "resnet18", "keep": [3, 5]},
    }
    assert execution == {**plain["cuda"], "precision": "float32", "compile": False, "lean": True}
    assert on_cpu == {**plain["cpu"], "lean": True}
    assert given == {
        "device": "cpu",
        "root": Path("d"),
        "save_every": 4,
        "minutes": 9.0,
        "keep_going": False,
        "tensorboard": True,
        "output": Output(),
    }


def test_a_share_of_zeros_is_met() -> None:
    words = ("--model", LINEAR, "--epochs", 2, "--batch-size", 200)
    result = call("train", "digits", *words, "--sparsity", 0.75, "--out", "run")
    assert result.exit_code == 0, result.stderr
    assert runs.load(Path("run")).records()[-1].weight_sparsity == 0.75  # of 640 weights, without the biases
    for other in (("--c", 0.1), ("--optimizer", "sgd"), ("--mu", 0.6), ("--macs", 0.5)):
        assert call("train", "digits", "--sparsity", 0.75, *other, "--out", "other").exit_code == 1
    assert not Path("other").exists()


def test_a_share_of_the_multiplications_is_left() -> None:
    result = call("train", "digits", "--epochs", 2, "--batch-size", 200, "--macs", 0.2, "--out", "run")
    assert result.exit_code == 0, result.stderr
    assert "--macs 1.5 is not a share" in call("train", "digits", "--macs", 1.5, "--out", "other").stderr
    uses = {"conv1": 64, "conv2": 64, "conv3": 16, "fc1": 1, "fc2": 1}  # positions of the 8 × 8 images, halved twice
    weights = {layer.name.removesuffix(".weight"): layer for layer in runs.load(Path("run")).outcome().zeros.layers}
    whole, saved = (sum(uses[name] * number(weights[name]) for name in uses) for number in (_total, _zeros))
    assert saved / whole == pytest.approx(0.8, abs=64 / whole)  # to the costliest weight


def _total(layer: LayerSparsity) -> int:
    return layer.total


def _zeros(layer: LayerSparsity) -> int:
    return layer.zeros


def test_options_of_another_optimizer_are_refused() -> None:
    result = call("train", "digits", "--optimizer", "sgd", "--c", 0.02, "--out", "run")
    assert result.exit_code == 1
    assert "--c 0.02 cannot be used; sgd takes lr, weight_decay, momentum, nesterov" in result.stderr
    assert not Path("run").exists()


def test_without_out_the_run_is_named_after_its_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follow, "follow", lambda run, **_: run())
    call("train", "digits", "--c", 0.5, "--seed", 3)
    assert runs.load(Path("runs/digits-grda-c0.5-mu0.7-s3")).recipe.optimizer.value == 0.5


def test_resuming_trains_what_is_missing_and_no_more(trained: dict[str, tuple[Path, Result]], tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(trained["grda"][0], folder)
    whole = checkpoint.load(folder / "checkpoints" / "epoch-0002.pt")
    for path in (folder / "checkpoints").glob("epoch-0002*"):
        path.unlink()
    again = objects(call("resume", folder, "--json"))
    assert [record["epoch"] for record in again] == [2]
    resumed = checkpoint.load(folder / "checkpoints" / "epoch-0002.pt")
    assert all(torch.equal(resumed["model"][name], value) for name, value in whole["model"].items())
    assert objects(call("resume", folder, "--json")) == []


def test_a_damaged_checkpoint_is_told_in_one_line(trained: dict[str, tuple[Path, Result]], tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(trained["grda"][0], folder)
    with (folder / "checkpoints" / "epoch-0002.pt").open("ab") as file:
        file.write(b"x")
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        result = call("resume", folder, "--json")
    assert [record["epoch"] for record in objects(result)] == [2]
    first = result.stderr.splitlines()[0]
    assert first.startswith("dirprune: going back to")
    assert "epoch-0001.pt" in first
    assert ".py" not in result.stderr


def test_report_of_seeds_for_machines(trained: dict[str, tuple[Path, Result]]) -> None:
    (found,) = objects(call("report", *(trained[name][0] for name in ("sgd", "seed1", "grda")), "--json"))
    by_optimizer = {row["optimizer"]: row for row in found["rows"]}
    values = [objects(trained[name][1])[-1]["test_accuracy"] for name in ("grda", "seed1")]
    spread = by_optimizer["grda"]["test_accuracy"]
    assert by_optimizer["grda"]["seeds"] == [0, 1]
    assert spread["mean"] == pytest.approx(sum(values) / 2)
    assert spread["std"] == pytest.approx(abs(values[0] - values[1]) / 2**0.5)
    assert by_optimizer["sgd"]["test_accuracy"]["std"] is None
    assert [Path(path) for path in found["figures"]] == [
        Path(f"runs/report/{n}.png") for n in ("curves", "signs", "layers")
    ]
    assert all(Path(path).exists() for path in found["figures"])


@pytest.mark.parametrize("columns", ["60", "80", "200"])
def test_report_loses_nothing_at_a_narrow_terminal(
    columns: str, trained: dict[str, tuple[Path, Result]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setattr(report_figures, "draw", lambda *_: [Path("curves.png")])
    text = call("report", trained["sgd"][0], trained["grda"][0]).stdout
    for word in ("gRDA", "c=0.02", "SGD", "accuracy", "weight", "s/epoch", "figure: curves.png"):
        assert word in text
    for name in ("sgd", "grda"):
        last = objects(trained[name][1])[-1]
        assert f"{last['test_accuracy']:.2f}" in text
        assert f"{last['test_loss']:.4f}" in text
    assert "…" not in text


def test_report_of_one_run_at_a_terminal(trained: dict[str, tuple[Path, Result]], tmp_path: Path) -> None:
    text = call("report", trained["held-out"][0], "--out", tmp_path / "figures")
    assert "epoch 2:" in text.stdout
    assert "validation" in text.stdout
    assert "test accuracy" not in text.stdout
    assert "1.weight" in text.stdout
    assert "20% held out" in text.stdout
    assert (tmp_path / "figures" / "curves.png").exists()


# Errors and warnings


def test_an_existing_out_is_refused_and_untouched(trained: dict[str, tuple[Path, Result]]) -> None:
    folder = trained["sgd"][0]
    before = tree(folder)
    result = call("train", "digits", "--out", folder)
    assert result.exit_code == 1
    assert f"dirprune resume {folder}" in result.stderr
    assert tree(folder) == before


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("train vgg-cifar", "Did you mean 'vgg16-cifar10'? Known: digits,"),
        ("train digits --c=-1", "--c -1 cannot be used"),
        ("train digits --c nan", "--c nan"),
        ("train digits --mu 0", "--mu 0 cannot"),
        ("train digits --lr 0", "--lr 0 cannot"),
        ("train digits --epochs 0", "--epochs 0 cannot be used; give a whole number of at least 1"),
        ("train digits --batch-size 0", "--batch-size 0 cannot"),
        ("train digits --validation 1", "--validation 1 cannot"),
        ("train digits --keep some", "--keep 'some'"),
        ("train digits --keep 0,99 --epochs 1", "names epoch 99, but the run ends after epoch 1"),
        ("train digits --device cuda", "torch finds no CUDA device here; give --device cpu"),
        ("train digits --device gpu", "give cpu, cuda or auto"),
        ("train digits --model smal", "Did you mean 'small'?"),
        (
            "train digits --model no_such.module:net",
            "No module named 'no_such'; name a callable as package.module:name",
        ),
        (f"train digits --model {LINEAR}ly", "has no attribute 'linearly'"),
        ("train vgg16-cifar10", "`dirprune data cifar10 --to "),
        ("train wrn28x10-cifar100 --data nowhere", "`dirprune data cifar100 --to nowhere`"),
        ("train resnet50-imagenet --data nowhere", "nowhere"),
        ("resume nowhere", "nowhere does not exist"),
        ("report nowhere", "nowhere does not exist"),
        ("tune digit", "Did you mean 'digits'?"),
        ("tune digits --rule paper --mu .6 --mu=-1", "--mu -1 cannot"),
        ("tune digits --mu .6", "belongs to --rule paper"),
        ("tune digits --rule paper --trials 3", "--trials 3 belongs to --rule target"),
        ("tune digits --between .9,.5", "--between 0.9,0.5 holds no target"),
        ("tune digits --between .9", "give two fractions"),
        ("tune digits --validation 1", "--validation 1 cannot"),
        ("tune digits --tolerance=-1", "--tolerance -1 cannot be used"),
        ("tune digits-short --rule paper --epochs 6", "1 to 5 epochs"),
        ("bench nothing", "vgg16, wrn28x10, resnet50, small"),
        ("project nowhere nowhere", "nowhere does not exist"),
        ("score nowhere", "nowhere does not exist"),
        ("connect nowhere nowhere", "nowhere does not exist"),
    ],
)
def test_errors_are_one_line_and_come_before_any_work(
    words: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("DIRPRUNE_DATA", str(tmp_path / "none"))
    result = call(*words.split())
    assert result.exit_code == 1
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("dirprune: ")
    assert told in line
    assert [path for path in tmp_path.rglob("*") if path.name != "runs"] == []


def test_a_folder_that_cannot_be_made_is_told_before_any_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(theory_report, "study", None)
    Path("file").write_text("")
    result = call("theory", "--out", "file")
    assert result.exit_code == 1
    assert result.stderr == "dirprune: File exists: file; choose another folder\n"


@pytest.mark.parametrize(
    ("number", "message"),
    [
        (errno.ENOSPC, "No space left on device: a/b; make room, or choose another folder"),
        (errno.EROFS, "Read-only file system: a/b; choose another folder"),
        (errno.EIO, "Input/output error: a/b"),
    ],
)
def test_what_a_disk_refuses_is_told_with_the_remedy(
    number: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(typer.Exit), console.clear_errors():
        raise OSError(number, os.strerror(number), "a/b")
    assert capsys.readouterr().err == f"dirprune: {message}\n"
    with pytest.raises(typer.Exit), console.clear_errors():
        raise OSError(number, "nothing was saved; do this and that", "a/b")  # this message has a remedy already
    assert capsys.readouterr().err == "dirprune: nothing was saved; do this and that: a/b\n"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--tolerance nan", "tolerance=nan cannot be used; give a finite number ≥ 0"),
        ("--tolerance=-1", "tolerance=-1.0"),
        ("--epochs 0,1", "epochs=0: the initial weights are the same"),
    ],
)
def test_a_projection_that_makes_no_sense_is_refused(
    words: str, told: str, trained: dict[str, tuple[Path, Result]]
) -> None:
    result = call("project", trained["sgd"][0], trained["grda"][0], *words.split(), "--out", "projected")
    assert result.exit_code == 1
    assert told in result.stderr
    assert not Path("projected").exists()


def test_options_that_do_nothing_here_are_told(trained: dict[str, tuple[Path, Result]]) -> None:
    result = call("train", "digits", "--model", LINEAR, "--epochs", 1, "--lean", "--out", "lean")
    assert result.exit_code == 0
    assert "--lean has no effect in float32; add --precision bfloat16." in result.stderr
    runs_ = [trained[name][0] for name in ("sgd", "grda")]
    result = call("project", *runs_, "--k", 1, "--examples", 100, "--epochs", 1, "--precision", "tf32", "--out", "p")
    assert result.exit_code == 0
    assert "tf32 needs a GPU; using float32 here." in result.stderr


def test_layers_without_a_weight_left_are_told_with_the_remedy() -> None:
    words = ["train", "digits", "--model", "cli_networks:fading", "--epochs", 1, "--device", "cpu"]
    result = call(*words, "--c", 0.25, "--out", "gone")
    assert 0.7 < runs.load(Path("gone")).records()[0].weight_sparsity < 1
    names = "2.weight, 3.weight, 4.weight and 1 more"
    assert f"No weight is left in {names}: such a layer passes nothing on, unless" in result.stderr
    assert "If the accuracy has suffered, lower --c (0.25) or --lr (0.1)." in result.stderr
    result = call(*words, "--optimizer", "sgd", "--out", "dense")
    assert "No weight is left" not in result.stderr


def test_a_network_without_a_weight_left_is_told_with_the_remedy_and_its_metrics_are_json() -> None:
    result = call("train", "digits", "--model", LINEAR, "--epochs", 1, "--c", 500, "--out", "gone", "--json")
    assert "Every weight is zero: the threshold grew past all of them. Lower --c (500) or --lr (0.1)." in result.stderr
    (line,) = Path("gone/metrics.jsonl").read_text().splitlines()
    for text in (result.stdout, line):
        assert json.loads(text, parse_constant=pytest.fail)["norm_ratio"] is None
    assert math.isnan(runs.load(Path("gone")).records()[0].norm_ratio)


def test_a_run_that_cannot_recover_stops_and_goes_on_if_told_to() -> None:
    result = call("train", "digits", "--batch-size", 512, "--epochs", 5, "--c", 100, "--out", "dead")
    assert (result.exit_code, result.stdout) == (1, "")
    (line,) = (line for line in result.stderr.splitlines() if line.startswith("dirprune: since"))
    assert "Stopped after epoch 2 of 5, which is saved. Try a smaller --lr (now 0.1), --c (now 100.0)" in line
    (words,) = (part for part in line.split("`") if part.startswith("dirprune resume"))
    assert runs.load(Path("dead")).saved == 2
    assert call(*words.split()[1:]).exit_code == 0
    assert len(runs.load(Path("dead")).records()) == 5


def test_a_traceback_comes_on_demand_and_for_our_own_bugs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DIRPRUNE_TRACEBACK", "1")
    with pytest.raises(ValueError, match="no recipe"):
        call("train", "vgg-cifar")
    monkeypatch.delenv("DIRPRUNE_TRACEBACK")

    def broken(name: str) -> None:
        raise KeyError(name)

    monkeypatch.setattr(recipes, "get", broken)
    with pytest.raises(KeyError):
        call("train", "digits")


def test_a_foreign_warning_stays_a_warning() -> None:
    with pytest.warns(UserWarning, match="not ours"), console.clear_errors():
        warnings.warn("not ours", UserWarning, stacklevel=1)


@pytest.mark.parametrize(("verb", "says"), [("tune", "Stopped."), ("score", "run the same command to continue")])
def test_ctrl_c_is_answered(
    verb: str, says: str, trained: dict[str, tuple[Path, Result]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(follow, "device_of", interrupted)
    result = call(verb, "digits" if verb == "tune" else trained["sgd"][0])
    assert result.exit_code == console.INTERRUPTED
    assert says in result.stderr


# tables and bars


@pytest.mark.parametrize(
    ("rows", "columns", "across"),
    # Too wide, so the table is turned; too wide as well, but wider still if turned; not too wide.
    [(2, 12, False), (15, 10, True), (20, 3, True)],
)
def test_a_table_takes_the_narrower_way(
    rows: int, columns: int, across: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    header = [f"n{number}" for number in range(columns)]
    Output().table("a title", header, [[f"{row}.{column:06}" for column in range(columns)] for row in range(rows)])
    lines = capsys.readouterr().out.splitlines()
    assert (lines[1].count("┃") == columns - 1) == across
    if not across or columns < 9:
        assert max(map(len, lines)) <= 80
    text = " ".join(lines)
    assert all(f"{row}.{column:06}" in text for row in range(rows) for column in range(columns))  # no cell is cut


SENTENCE = "a sentence that is much too long for the eighty columns of a terminal, with a well-known-hyphen at its end."


class Stream(io.TextIOWrapper):
    """A stream over bytes, as real ones are: typer.echo would bypass sys.stderr with it, but not with a StringIO."""

    def __init__(self, terminal: bool = True) -> None:
        super().__init__(io.BytesIO(), encoding="utf-8")
        self.terminal = terminal

    def isatty(self) -> bool:
        return self.terminal

    def text(self) -> str:
        self.seek(0)
        return self.read()


@pytest.mark.parametrize("terminal", [True, False])
def test_sentences_are_wrapped_at_a_terminal_alone(terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys, "stderr", told := Stream(terminal))
    command = f"    dirprune resume {'a/' * 40}"
    console.say(f"{SENTENCE}\n{command}")
    console.say(f"  cost: {SENTENCE}")
    lines = told.text().splitlines()
    if not terminal:
        assert lines == [SENTENCE, command, f"  cost: {SENTENCE}"]
        return
    assert [line for line in lines if len(line) > 80] == [command]
    assert " ".join(lines[:2]) == SENTENCE
    assert [len(line) - len(line.lstrip()) for line in lines[3:]] == [2, 4]


def test_an_error_is_wrapped_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys, "stderr", told := Stream())
    with pytest.raises(typer.Exit), console.clear_errors():
        raise ValueError(SENTENCE)
    assert max(map(len, told.text().splitlines())) <= 80


def test_what_is_said_beside_a_bar_has_a_line_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # makes rich treat the stream as a terminal
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys, "stderr", told := Stream())
    with console.bar("digits", total=60) as advance:
        advance(5, note="32.1% zero")
        console.say("Stopping after this epoch.")
    assert "Stopping after this epoch." in Text.from_ansi(told.text()).plain.splitlines()


def test_a_table_goes_without_what_is_empty_the_same_or_spare(capsys: pytest.CaptureFixture[str]) -> None:
    columns = ("name", "same", "none", "much", "little", "kept")
    rows = [(f"setting {n} of the experiment", "60/60", "–", 20 * str(n), 18 * str(n), 16 * str(n)) for n in range(5)]
    Output().table("all", columns, rows, left=1, spare=("little", "much"))
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert [word.strip() for word in lines[1].split("┃")] == ["name", "much", "kept"]
    assert " ".join(map(str.strip, lines[-2:])).endswith("The same in all rows: same 60/60. With --json only: little.")
    assert [line.split("│")[0].strip() for line in lines[3:8]] == [row[0] for row in rows]  # names are not wrapped


def test_a_table_of_nothing_is_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    Output().table("all", ("name", "value"), [("–", "–")])
    Output().table("none", ("name", "value"), [])
    assert capsys.readouterr().out.count("name") == 2


def test_a_terminal_without_a_width_hears_what_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "0")
    assert console.wrapped("some words that are long enough").split() == [
        "some",
        "words",
        "that",
        "are",
        "long",
        "enough",
    ]


def test_a_report_of_many_settings_fits_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    spreads = [report.Spread(n / 10, 0.01) for n in range(4, 9)]
    cells = [
        report.ReportRow(
            *("vgg16-cifar10", f"gRDA c=0.0005 μ={one.mean}", "grda", 5e-4, one.mean, 600, 600, (0, 1, 2)),
            *(one, one, one, one, one, one.mean, 7500 * one.mean),
        ).cells()
        for one in spreads
    ]
    Output().rows("Runs", cells, left=2, spare=report.SPARE)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    for one, line in zip(spreads, lines[-7:-2], strict=True):
        for words in (f"gRDA c=0.0005 μ={one.mean}", one.text(2), one.text(2, scale=100)):
            assert words in line
    assert "recipe vgg16-cifar10" in " ".join(lines)


def test_a_bar_keeps_its_numbers_at_a_narrow_terminal() -> None:
    narrow = Console(file=io.StringIO(), force_terminal=True, width=80)
    progress = Progress(*console._columns(narrow.width), console=narrow)
    note = "accuracy 67.97%, 31.1% of weights zero"
    progress.add_task("[12/57] variational-dropout beta=0.1", total=60, completed=7, note=note, unit="epochs")
    with narrow.capture() as captured:
        narrow.print(progress.get_renderable())
    (line,) = Text.from_ansi(captured.get()).plain.splitlines()
    for words in ("[12/57] variational-dropout beta=0.1", "7/60", "epochs", "left"):
        assert words in line


def test_a_bar_that_restarts_keeps_its_unit_until_it_is_given_another(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(console, "QUIET", 0.0)
    with console.bar("one", total=3, unit="epochs") as advance:
        advance(1, note="fine")
        advance(1, restart="two")
        advance(0, restart="three", unit="batches", total=5)
        advance(2)
    assert capsys.readouterr().err.splitlines() == [
        "one: 1/3 epochs, fine",
        "two: 1/3 epochs",
        "three: 0/5 batches",
        "three: 2/5 batches",
    ]


def test_lines_tell_the_sixteenths_of_a_long_epoch_apart(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(console, "QUIET", 0.0)
    with console.bar("long", total=200, unit="epochs") as advance:
        for _ in range(3):
            advance(1 / follow.TICKS)
    told = capsys.readouterr().err.splitlines()
    assert told == ["long: 0.06/200 epochs", "long: 0.12/200 epochs", "long: 0.19/200 epochs"]


def test_a_dumb_terminal_hears_lines_because_it_shows_no_bar(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(console, "QUIET", 0.0)
    monkeypatch.setenv("TTY_COMPATIBLE", "1")  # makes rich treat the stream as a terminal
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "dumb")
    with console.bar("one", total=3, unit="epochs") as advance:
        advance(1)
    assert capsys.readouterr().err == "one: 1/3 epochs\n"


def test_a_wrong_word_is_a_usage_error() -> None:
    assert call("train", "digits", "--optimizer", "adam").exit_code == 2
    assert call("demo", "--epochs", 0).exit_code == 2


# recipes and data


def test_recipes_for_machines() -> None:
    found = [Recipe.from_dict(values) for values in objects(call("recipes", "--json"))]
    assert found == [recipes.get(name) for name in recipes.names()]


@pytest.mark.parametrize("columns", ["60", "80", "160"])
def test_recipes_can_be_read_at_a_terminal(columns: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    lines = call("recipes").stdout.splitlines()
    for name in recipes.names():
        (line,) = [line for line in lines if line.split()[:1] == [name]]
        assert [word.strip() for word in line.split("│")][2] == str(recipes.get(name).epochs)
    assert columns == "60" or "0.501 0.55 0.6 0.65" in " ".join(lines)
    assert max(map(len, lines)) <= int(columns)


def test_a_recipe_can_be_looked_at() -> None:
    assert [values["name"] for values in objects(call("recipes", "digits", "--json"))] == ["digits"]
    assert "Did you mean 'digits'?" in call("recipes", "digit").stderr
    cells = [[word.strip() for word in line.split("│")] for line in call("recipes", "digits").stdout.splitlines()]
    for row in (["batch_size", "32"], ["schedule", "kind constant-linear-constant"], ["exempt", "–"]):
        assert row in cells


@pytest.mark.parametrize("source", ["present", "archive", "download"])
def test_data(source: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def fetch(name: str, to: Path) -> download.Fetched:
        seen.append((name, to))
        return download.Fetched(to / "set", source)

    monkeypatch.setattr(download, "fetch", fetch)
    result = call("data", "cifar100", "--to", "there", "--json")
    assert objects(result) == [{"folder": "there/set", "source": source}]
    assert seen == [("cifar100", Path("there"))]
    assert "Use it with --data there" in call("data", "cifar100", "--to", "there").stdout


def test_data_that_cannot_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    def fetch(*_: Any, **__: Any) -> None:
        raise download.DownloadError("no network; put the file there")

    monkeypatch.setattr(download, "fetch", fetch)
    result = call("data", "cifar10")
    assert (result.exit_code, result.stderr) == (1, "dirprune: no network; put the file there\n")


# bench, theory, project, score, connect, reproduce


@pytest.fixture
def _quick_bench(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(bench.WORKLOADS, "small", replace(bench.WORKLOADS["small"], examples=64))


@pytest.mark.usefixtures("_quick_bench")
def test_bench(tmp_path: Path) -> None:
    found = objects(call("bench", "small", "--device", "cpu", "--out", "bench.csv", "--json"))
    assert [cost["optimizer"] for cost in found] == ["sgd", "grda"]
    assert all(cost["ms"] > 0 for cost in found)
    assert [cost["ratio_to_sgd"] for cost in found] == [1.0, found[1]["ms"] / found[0]["ms"]]
    lines = Path("bench.csv").read_text().splitlines()
    assert len(lines) == 3
    assert "hardware" in lines[0]


@pytest.mark.usefixtures("_quick_bench")
def test_ctrl_c_in_bench_shows_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = bench.bench

    def interrupted(name: str, **options: Any) -> Iterator[bench.StepCost]:
        yield next(whole(name, **options))
        raise KeyboardInterrupt

    monkeypatch.setattr(bench, "bench", interrupted)
    result = call("bench", "small", "--device", "cpu")
    assert result.exit_code == console.INTERRUPTED
    assert "÷ SGD" in result.stdout
    assert "Stopped; 1 of 2 measurements are complete." in result.stderr


@pytest.mark.usefixtures("_quick_bench")
def test_bench_at_a_terminal() -> None:
    text = call("bench", "small", "--device", "cpu").stdout
    assert "÷ SGD" in text
    assert "MiB" not in text  # memory is not measured on a CPU
    assert "–" not in text
    assert "1.000" in text


def test_theory(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = theory_report.study

    def first(**options: Any) -> Iterator[Any]:
        assert options == {"problems": 1, "runs": 2, "seed": 4}
        yield next(finding for finding in whole(**options) if isinstance(finding, theory_report.Finding))

    monkeypatch.setattr(theory_report, "study", first)
    options = {"--problems": 1, "--runs": 2, "--seed": 4, "--out": "numbers", "--figures": "pictures"}
    (row,) = objects(call("theory", *flat(options), "--json"))
    assert row["gamma"] > 0
    assert "numbers, pictures" in call("theory", *flat(options)).stdout
    assert [path.name for folder in ("numbers", "pictures") for path in Path(folder).iterdir()] == [
        "theory.csv",
        "theory-theorem.png",
    ]


def test_project(trained: dict[str, tuple[Path, Result]]) -> None:
    sgd, grda = trained["sgd"][0], trained["grda"][0]
    options = {"--k": 2, "--epochs": "1,2", "--examples": 100, "--max-iterations": 30, "--out": "out"}
    rows = objects(call("project", sgd, grda, *flat(options), "--json"))
    assert [row["epoch"] for row in rows] == [1, 2]
    assert all(0 < row["share"] <= 1 for row in rows)
    for name in ("projection.csv", "eigenvalues.csv", "projection.png"):
        assert Path("out", name).exists()


def test_score(trained: dict[str, tuple[Path, Result]]) -> None:
    options = {"--k": "0,2", "--samples": 2, "--examples": 100, "--max-iterations": 60, "--tolerance": 0.01}
    rows = objects(call("score", trained["sgd"][0], *flat(options), "--out", "out", "--json"))
    assert {row["method"] for row in rows} >= {"directional", "magnitude"}
    assert {row["k"] for row in rows if row["method"] == "directional"} >= {2}
    for name in ("score.csv", "score.png"):
        assert Path("out", name).exists()


def test_score_shows_also_what_earlier_commands_measured(
    trained: dict[str, tuple[Path, Result]], monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[Any] = []
    whole = direction_plots.score_figure
    monkeypatch.setattr(direction_plots, "score_figure", lambda rows: (drawn.append(rows), whole(rows))[1])
    options = {"--samples": 2, "--examples": 100, "--max-iterations": 60, "--tolerance": 0.01, "--out": "out"}
    for k in (2, 0):
        result = call("score", trained["sgd"][0], "--k", k, *flat(options))
    ks = [row.k for row in drawn[-1] if row.method == "directional"]
    assert ks == sorted(ks)
    assert set(ks) == {0, 2}
    cells = [[word.strip() for word in line.split("│")][:2] for line in result.stdout.splitlines()]
    assert {("directional", "0"), ("directional", "2")} < {tuple(cell) for cell in cells}


@pytest.mark.parametrize(("verb", "of"), [("project", ("sgd", "grda")), ("score", ("sgd",))])
def test_more_eigenvectors_than_weights_are_refused_and_leave_no_folder(
    verb: str, of: tuple[str, ...], trained: dict[str, tuple[Path, Result]]
) -> None:
    result = call(verb, *(trained[name][0] for name in of), "--k", "100000", "--out", "out")
    assert result.exit_code == 1
    assert "k=100000: the network has 650 weights; give at most as many" in result.stderr
    assert not Path("out").exists()


def test_connect_and_its_table_at_a_terminal(
    trained: dict[str, tuple[Path, Result]], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"--epochs": 1, "--points": 3, "--grid": 3, "--plane-examples": 32, "--epoch-b": 1, "--out": "out"}
    command = ("connect", trained["grda"][0], trained["sgd"][0], *flat(options))
    (found,) = objects(call(*command, "--json"))
    assert (found["config"]["epoch_a"], found["config"]["epoch_b"]) == (2, 1)
    assert found["distance"] > 0
    for name in ("profile.csv", "plane.csv", "summary.json", "figures/profile.png", "figures/plane.png"):
        assert Path("out", name).exists()

    def nothing_left(*_: Any, **__: Any) -> Iterator[Any]:
        yield from ()

    monkeypatch.setattr(connectivity, "connect", nothing_left)
    monkeypatch.setattr("dirprune.lab.studies.connectivity.figures.draw", lambda out: None)
    text = call(*command).stdout
    assert "straight line" in text
    assert max(map(len, text.splitlines())) <= 80


def test_reproduce(trained: dict[str, tuple[Path, Result]]) -> None:
    command = ("reproduce", trained["grda"][0], "--results", "results")
    result = call(*command)
    assert objects(call(*command, "--json")) == []  # the paper has no results for digits
    assert "0 of 450 published cells" in result.stdout
    assert "digits" in result.stderr
    assert "has no ledger.csv" not in result.stderr
    assert len(Path("results/trajectories.csv").read_text().splitlines()) == 3
    assert Path("results/ledger.csv").exists()


def test_reproduce_for_machines_and_people() -> None:
    command = ("reproduce", "--results", ROOT / "results")
    cells = objects(call(*command, "--json"))
    (cell,) = [
        cell
        for cell in cells
        if (cell["published"]["setting"]["optimizer"], cell["published"]["metric"]) == ("sgd", "test_accuracy")
        and cell["published"]["epoch"] == 600
    ]
    assert cell["published"]["paper"]["mean"] == pytest.approx(90.818, abs=1e-3)
    assert cell["mean"] == pytest.approx(sum(cell["ours"]) / len(cell["ours"]))
    for name, against in (("deviation", "paper"), ("comparable_deviation", "comparable")):
        theirs = cell["published"][against]
        assert cell[name] == pytest.approx((cell["mean"] - theirs["mean"]) / theirs["std"])
    assert "missing: wrn28x10-cifar100, gRDA μ=0.65: no run yet" in call(*command).stdout
    shown = call(*command)
    assert f"{len(cells)} of 450 published cells" in shown.stdout
    assert "vgg16-cifar10, gRDA μ=0.6" in shown.stdout
    assert max(len(line) for line in shown.stdout.splitlines() if "│" in line) <= 80
    lost = call("reproduce", "--results", "nowhere")
    assert lost.exit_code == 1
    assert "nowhere has no ledger.csv; give --results" in lost.stderr


def test_the_studies_at_a_terminal(trained: dict[str, tuple[Path, Result]]) -> None:
    sgd, grda = trained["sgd"][0], trained["grda"][0]
    small = ("--examples", 100, "--max-iterations", 40, "--out")
    assert "random" in call("project", sgd, grda, "--k", 1, "--epochs", 2, *small, "p").stdout
    scores = [line.split("│") for line in call("score", sgd, "--k", 0, "--samples", 1, *small, "s").stdout.splitlines()]
    ks = {(words[0].strip(), words[1].strip()) for words in scores if len(words) > 1}
    assert ks == {("magnitude", "–"), ("brain-damage", "–"), ("brain-surgeon", "–"), ("directional", "0")}
