"""The files of a connectivity job: its tables, their summary, and the figures.

A job is a directory of plain files. The same command continues it; a different one is refused.

config.json         the two networks and all options
environment.json    versions, hardware, commit and command of each session that worked here
fit.csv             one row per epoch of the fit; its checkpoints are in checkpoints/
bend/               the weights of the bend, as a checkpoint
profile.csv         one row per point: path (curve or line), t, train and test loss and error
plane.csv           one row per point: x, y, train and test loss and error
points.csv          coordinates of the solutions, the bend and the curve in the plane
summary.json        barriers, best points, endpoints, and all that is needed to repeat them
figures/            the plane and the profile
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy.interpolate import RegularGridInterpolator

from dirprune.connect import CurveProfile
from dirprune.connect.landscape import Measurement
from dirprune.lab.records.columns import Percent
from dirprune.lab.records.files import as_read, read_json, taken, write_json
from dirprune.lab.records.tables import read_rows
from dirprune.lab.studies.connectivity import published
from dirprune.lab.studies.connectivity.published import PublishedCurve
from dirprune.lab.training.runs import RunExists

_NAMES = ("run_a", "run_b")  # directories may be moved; checksums of the weights identify the networks


@dataclass(frozen=True)
class Profiled:
    """A row of profile.csv: a point of a path, "curve" or "line"; errors in percent."""

    path: str
    t: float
    train_loss: float
    train_error: Percent
    test_loss: float
    test_error: Percent


@dataclass(frozen=True)
class Mapped:
    """A row of plane.csv: a point of the plane."""

    x: float
    y: float
    train_loss: float
    train_error: Percent
    test_loss: float
    test_error: Percent


@dataclass(frozen=True)
class Placed:
    """A row of points.csv: coordinates of the "start", "end", "bend" (whose t is NaN) or a point of the "curve"."""

    name: str
    t: float
    x: float
    y: float


def claim(out: Path, config: dict[str, Any]) -> None:
    """Make ``out`` the directory of this job, or check that it is; raise if it belongs to another job."""
    path = out / "config.json"
    found = read_json(path, dict, "give another --out, or delete the folder") if path.is_file() else {}
    if "weights_a" not in found:  # a training run has a config.json too
        if taken(out, path.name):
            raise RunExists(f"{out} exists and is not a job of `dirprune connect`; give another --out")
        out.mkdir(parents=True, exist_ok=True)
        write_json(path, config)
        return
    wanted = as_read(config)
    other = [key for key in wanted if key not in _NAMES and found.get(key) != wanted[key]]
    if other:
        told = [key for key in other if not key.startswith(("weights_", "published"))]  # implied by the others
        differences = ", ".join(f"{key}={found.get(key)!r} there and {wanted[key]!r} here" for key in told)
        differences = differences or "networks of these names with other weights"
        raise RunExists(f"{out} holds another job: {differences}. Give the same options, or another --out")


def profiles(out: Path) -> dict[str, CurveProfile]:
    """Return the profiles by path: "curve" and "line", or "line" alone."""
    rows = read_rows(out / "profile.csv", Profiled)
    return {
        path: CurveProfile(tuple(_measurement(row) for row in rows if row.path == path))
        for path in dict.fromkeys(row.path for row in rows)
    }


def _measurement(row: Profiled) -> Measurement:
    return Measurement((row.t,), row.train_loss, row.train_error, row.test_loss, row.test_error)


def published_curve(config: dict[str, Any]) -> PublishedCurve | None:
    """Return the published curve between such networks, in the direction of this job; None if there is none."""
    if config["published"] is None:
        return None
    c, mu, starts_at_sgd = config["published"]
    found = published.find(data=config["data"], model=config["model"], c=c, mu=mu)
    return found.reversed() if found and starts_at_sgd else found


def facts_of(profile: CurveProfile) -> dict[str, Any]:
    """Return the barriers with their positions, the best point and the endpoints of a profile, as plain values."""

    def at(point: Measurement) -> dict[str, Any]:
        values = asdict(point)
        return {"t": values.pop("place")[0], **values}

    return {
        "barrier": profile.barrier,
        "highest": at(profile.highest),
        "test_barrier": profile.test_barrier,
        "highest_test": at(profile.highest_test),
        "best": at(profile.best),
        "start": at(profile.points[0]),
        "end": at(profile.points[-1]),
    }


def table(out: Path) -> tuple[str, list[dict[str, str]]]:
    """Return title and rows of the table of a finished job's barriers, with the published ones if any."""
    summary = json.loads((out / "summary.json").read_text())
    title = "{model} on {data}: {network_a} (t=0, epoch {epoch_a}) to {network_b} (t=1, epoch {epoch_b})"
    paths = {"curve": "fitted curve", "line": "straight line", "published": "published"}
    rows = [{"": name, **_cells(summary[path])} for path, name in paths.items() if path in summary]
    return title.format_map(summary["config"]), rows


def _cells(facts: dict[str, Any]) -> dict[str, str]:
    """Return the facts of a path (`facts_of`) as text by column."""
    start, end, best = (facts[name]["test_error"] for name in ("start", "end", "best"))

    def barrier(height: float | None, t: float) -> str:
        if height is None:  # NaN and infinity are null in JSON
            return f"not finite (t={t:.3f})"
        return f"{height:.2e} (t={t:.3f})" if height else "0 (t=–)"  # without a barrier the highest point is an end

    return {
        "train barrier": barrier(facts["barrier"], facts["highest"]["t"]),
        "test barrier": barrier(facts["test_barrier"], facts["highest_test"]["t"]),
        "test error at t=0 (%)": f"{start:.2f}",
        "test error at t=1 (%)": f"{end:.2f}",
        "least test error (%)": f"{best:.2f} (t={facts['best']['t']:.3f})",
    }


def coarseness(out: Path) -> str:
    """Return a note if the plane, read between its points, shows a barrier that the curve does not have; else ""."""
    curve = [row for row in read_rows(out / "points.csv", Placed) if row.name == "curve"]
    rows = read_rows(out / "plane.csv", Mapped)
    if not rows or not curve:
        return ""
    x, y = (np.unique([getattr(row, axis) for row in rows]) for axis in ("x", "y"))
    losses = {(row.x, row.y): row.train_loss for row in rows}
    grid = np.log(np.clip([[losses[a, b] for b in y] for a in x], 1e-12, 1e12))
    read = RegularGridInterpolator((x, y), grid, bounds_error=False)([(row.x, row.y) for row in curve])
    highest, measured = float(np.exp(np.nanmax(read))), profiles(out)["curve"].highest.train_loss
    if not highest > 2 * measured:
        return ""
    return (
        f"Between its points the plane reads a train loss of up to {highest:.2g} along the curve, where the profile "
        f"measured at most {measured:.2g}: its grid is too coarse for the valley; give a larger --grid."
    )


def notes(out: Path) -> list[str]:
    """Return notes for the reader of the table and the figures."""
    summary = json.loads((out / "summary.json").read_text())
    coarse = [note] if (note := coarseness(out)) else []
    if "published" not in summary:
        return coarse
    fit = "{epochs} epochs, lr {lr}, momentum {momentum}".format_map
    return [
        *coarse,
        f"Fitted for {fit(summary['config'])}; the published curve for {fit(summary['published'])}.",
        "The published training loss was measured on augmented images, ours on plain ones.",
    ]
