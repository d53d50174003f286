"""Image-folder throughput: draft decoding with a boxed resize against full decoding, cropping and resizing.

    python benchmarks/images.py [--folder DIR] [--images 64] [--repeats 5] [--workers 2]

Without --folder it makes JPEGs of ImageNet's usual size (500 × 375) and of a camera's (2000 × 1500). It prints images
per second for each way in one process (the median of the repeats, which alternate between the two), and for the loader.
"""

import argparse
import random
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from turns import turns

from dirprune.lab.imagefolder import SIZE, ImageFolderLoader, centre_box, find_images, random_box, read_image
from dirprune.lab.loader import IMAGENET_STATISTICS, Batching

SIZES = {"500x375": (500, 375), "2000x1500": (2000, 1500)}


def make_folder(root: Path, size: tuple[int, int], images: int) -> None:
    """Write substitutes for photographs: noise at every scale, so that the JPEGs have detail to decode."""
    source = np.random.default_rng(0)
    for number in range(images):
        layers = np.zeros((size[1], size[0], 3))
        for grid in (4, 16, 64, 256):
            noise = source.integers(0, 256, (grid, grid, 3), dtype=np.uint8)
            layers += np.asarray(Image.fromarray(noise).resize(size, Image.Resampling.BICUBIC)) / grid**0.5
        picture = Image.fromarray((255 * layers / layers.max()).astype(np.uint8))
        for part in ("train", "val"):
            path = root / part / f"class{number % 2}" / f"{number}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            picture.save(path, quality=90)


def read_plainly(path: str, chance: random.Random | None) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    """Read an image as `read_image` does, but slowly: decode all of it, crop and resize."""
    with Image.open(path) as image:
        rgb = image.convert("RGB")
    left, upper, right, lower = random_box(rgb.size, chance) if chance else centre_box(rgb.size)
    crop = rgb.crop((round(left), round(upper), round(right), round(lower)))
    pixels = np.asarray(crop.resize((SIZE, SIZE), Image.Resampling.BILINEAR))
    return pixels[:, ::-1] if chance and chance.random() < 0.5 else pixels


def compare(paths: tuple[str, ...], augment: bool, repeats: int) -> tuple[float, float]:
    """Return images per second of the plain and of the fast way, with the same crops."""

    def run(read: Callable[[str, random.Random | None], object]) -> None:
        for number, path in enumerate(paths):
            read(path, random.Random(number) if augment else None)

    ms = turns({"plain": lambda: run(read_plainly), "fast": lambda: run(read_image)}, rounds=repeats)
    return 1e3 * len(paths) / ms["plain"], 1e3 * len(paths) / ms["fast"]


def report(label: str, root: Path, repeats: int, workers: int) -> None:
    images = find_images(root / "train")
    for crop, augment in (("random", True), ("centre", False)):
        plain, fast = compare(images.paths, augment, repeats)
        print(f"{label:>10}  {crop:>6}  {plain:11.0f}  {fast:10.0f}  {fast / plain:5.2f}x", flush=True)
    often = images.take(torch.arange(len(images.paths)).repeat(8))  # so that starting the workers matters little
    train = ImageFolderLoader(
        often, Batching(16, seed=0), IMAGENET_STATISTICS, torch.device("cpu"), workers, augment=True
    )
    ms = turns({"loader": lambda: sum(len(targets) for _, targets in train.epoch(0))}, rounds=repeats)
    speed = 1e3 * len(often.paths) / ms["loader"]
    print(f"{label:>10}  loader with {workers} workers, start-up included: {speed:.0f} images/s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="a real folder with train/ and val/ instead of generated pictures")
    parser.add_argument("--images", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{'images':>10}  {'crop':>6}  {'plain img/s':>11}  {'fast img/s':>10}  {'ratio':>6}")
    if options.folder:
        report(options.folder.name, options.folder, options.repeats, options.workers)
        return
    for label, size in SIZES.items():
        with tempfile.TemporaryDirectory() as folder:
            make_folder(Path(folder), size, options.images)
            report(label, Path(folder), options.repeats, options.workers)


if __name__ == "__main__":
    main()
