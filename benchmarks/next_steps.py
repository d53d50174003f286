"""How much a test accuracy depends on the very step after which it is measured.

    python benchmarks/next_steps.py RUN [--steps 16] [--examples 1000] [--data DIR] [--out results/next-steps.csv]

Continues a run of gRDA or SGD from its newest checkpoint, on the minibatches that training would take next, and
measures the first test examples after each step. The run itself is not changed. At a high learning rate BatchNorm's
running statistics lag behind the weights, and the accuracy at the end of an epoch is that of one such moment.
"""

import argparse
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch

from dirprune.lab import checkpoint, experiment, runs
from dirprune.lab.execution import PlainStep, Tally
from dirprune.lab.reward import Sample
from dirprune.lab.tables import merge_rows
from dirprune.lab.train import evaluate
from dirprune.modes import seeded
from dirprune.options import set_lr

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Row:
    """A row of the CSV file; step 0 is the checkpoint itself."""

    run: str
    epoch: int
    step: int
    examples: int
    test_loss: float
    test_accuracy: float
    hardware: str
    torch: str
    commit: str


def measured(run: runs.Run, *, steps: int, examples: int, root: Path | None, device: torch.device) -> Iterator[Row]:
    """Yield the loss and accuracy on the first test examples, of the newest checkpoint and after each further step."""
    recipe, execution = run.recipe, run.recipe.execution(device.type)
    if recipe.method:
        raise ValueError(f"{run.folder} is a run of {recipe.method}; give one of gRDA or SGD")
    parts = experiment.assemble(recipe, device=device, root=root)
    found = checkpoint.latest(run.checkpoints)
    if found is None:
        raise ValueError(f"{run.folder} has no checkpoint; train it first")
    epoch, state = found
    parts.model.load_state_dict(state["model"])
    experiment.restore(parts.optimizer, state["optimizer"])
    train_set, test_set = parts.loaders.train, parts.loaders.test
    batches = tuple(islice(test_set, -(-examples // test_set.batch_size)))
    sample = Sample(batches, sum(len(targets) for _, targets in batches), test_set.batch_size)
    step = PlainStep(parts.model, parts.optimizer, Tally(steps, device), execution)
    made = runs.environment(device)

    def row(number: int) -> Row:
        score = evaluate(parts.model, sample, execution=execution)
        where = (made["device"], made["torch"], made["commit"])
        return Row(runs.default_name(recipe), epoch, number, sample.examples, score.loss, score.accuracy, *where)

    yield row(0)
    for number, batch in enumerate(islice(train_set.epoch(epoch + 1), steps)):
        set_lr(parts.optimizer, recipe.lr * recipe.schedule.factor(epoch + 1, recipe.epochs, number / len(train_set)))
        parts.model.train()
        with seeded(number, device):  # dropout
            step(*batch)
        yield row(number + 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--examples", type=int, default=1000, help="test examples, rounded up to whole batches")
    parser.add_argument("--data", type=Path, help="folder of the data sets")
    parser.add_argument("--out", type=Path, help="also write the numbers to this CSV file, beside those of other runs")
    arguments = parser.parse_args()

    run = runs.load(arguments.run)
    device = torch.device("cuda") if torch.cuda.is_available() else CPU
    root = arguments.data or run.last_root()
    rows: list[Row] = []
    with run.recipe.execution(device.type).threading():
        for row in measured(run, steps=arguments.steps, examples=arguments.examples, root=root, device=device):
            rows.append(row)
            print(
                f"step {row.step:3}  test accuracy {row.test_accuracy:6.2f}%  test loss {row.test_loss:.3f}", flush=True
            )
    if arguments.out:
        merge_rows(arguments.out, Row, rows, key=("run", "epoch", "step", "examples", "hardware"))
    after = [row.test_accuracy for row in rows[1:]]
    if len(after) > 1:
        spread = f"{statistics.mean(after):.2f} ± {statistics.stdev(after):.2f}"
        print(f"after a step: {spread}, {min(after):.2f} to {max(after):.2f}")


if __name__ == "__main__":
    main()
