"""Folders of images: the geometry against plain Pillow, and that a pass depends on (seed, epoch) alone."""

import multiprocessing
import random
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from dirprune.lab.data import IMAGENET_STATISTICS, imagefolder, load
from dirprune.lab.data.imagefolder import Box, centre_box, crop_resize, random_box, read_image
from dirprune.lab.data.loader import Batch, Loader

SIZES = [(500, 375), (375, 500), (1300, 900), (640, 231), (120, 90), (256, 256), (901, 1200)]


def picture(size: tuple[int, int], seed: int = 0) -> Image.Image:
    """Return a smooth coloured picture, made by enlarging noise, on which decoders and filters differ only slightly."""
    noise = np.random.default_rng(seed).integers(0, 256, (6, 8, 3), dtype=np.uint8)
    return Image.fromarray(noise).resize(size, Image.Resampling.BICUBIC)


def saved(path: Path, size: tuple[int, int], seed: int = 0) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    picture(size, seed).save(path, quality=95)
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of three classes: 5, 4 and 4 training images, and 2 test images each."""
    root = tmp_path_factory.mktemp("imagenet")
    for number, name in enumerate(["cat", "ant", "bee"]):
        for image in range(5 if name == "ant" else 4):
            saved(root / "train" / name / f"{name}_{image}.JPEG", (300 + 10 * image, 240), seed=10 * number + image)
        for image in range(2):
            saved(root / "val" / name / f"{image}.jpg", (260, 300), seed=100 + 10 * number + image)
        (root / "train" / name / "notes.txt").write_text("not an image")
    return root


def joined(batches: list[Batch]) -> tuple[torch.Tensor, torch.Tensor]:
    inputs, targets = zip(*batches, strict=True)
    return torch.cat(inputs), torch.cat(targets)


def equal(a: list[Batch], b: list[Batch]) -> bool:
    return len(a) == len(b) and all(map(torch.equal, joined(a), joined(b)))


def difference(a: Image.Image, b: Image.Image) -> float:
    return float(np.abs(np.asarray(a, dtype=float) - np.asarray(b, dtype=float)).mean())


@pytest.mark.parametrize("size", SIZES)
def test_centre_crop_equals_resize_then_crop(size: tuple[int, int], tmp_path: Path) -> None:
    path = saved(tmp_path / "a.jpg", size)
    with Image.open(path) as image:
        width, height = image.size
        if width < height:
            resized = image.resize((256, int(256 * height / width)), Image.Resampling.BILINEAR)
        else:
            resized = image.resize((int(256 * width / height), 256), Image.Resampling.BILINEAR)
        left, upper = round((resized.width - 224) / 2), round((resized.height - 224) / 2)
        expected = resized.crop((left, upper, left + 224, upper + 224))
    # On a scale of 255; a shift by one pixel gives 1 to 2.5.
    assert difference(Image.fromarray(read_image(str(path), None)), expected) < 0.4


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("suffix", ["jpg", "png"])
def test_boxed_draft_resize_equals_full_decode_crop_resize(size: tuple[int, int], suffix: str, tmp_path: Path) -> None:
    path = saved(tmp_path / f"a.{suffix}", size)
    chance = random.Random(3)
    for _ in range(4):
        box = random_box(size, chance)
        left, upper, right, lower = (int(edge) for edge in box)
        with Image.open(path) as image:
            fast = crop_resize(image, box)
        with Image.open(path) as image:
            slow = image.crop((left, upper, right, lower)).resize((224, 224), Image.Resampling.BILINEAR)
        assert fast.size == (224, 224)
        assert difference(fast, slow) < 0.4


def test_large_photographs_are_decoded_small(tmp_path: Path) -> None:
    path = saved(tmp_path / "a.jpg", (1792, 1792))
    with Image.open(path) as image:
        crop_resize(image, (0, 0, 1792, 1792))
        assert image.size == (224, 224)
    with Image.open(path) as image:
        crop_resize(image, (0, 0, 223, 223))
        assert image.size == (1792, 1792)


def test_random_boxes_lie_inside_and_have_the_published_distribution() -> None:
    chance = random.Random(0)
    boxes = [random_box((500, 500), chance) for _ in range(4000)]
    assert all(0 <= left < right <= 500 and 0 <= upper < lower <= 500 for left, upper, right, lower in boxes)
    width, height = np.array([(box[2] - box[0], box[3] - box[1]) for box in boxes]).T
    ratio, area = width / height, width * height / 500**2
    assert ratio.min() > 0.73  # 3/4, but for rounding to whole pixels
    assert ratio.max() < 1.36
    assert area.min() > 0.078
    assert area.max() <= 1.0
    assert abs(np.log(ratio).mean()) < 0.02  # symmetric about 1
    # Boxes of area up to 3/4 always fit a square, so there the area is uniform on [0.08, 0.75].
    assert np.quantile(area[area < 0.75], [0.25, 0.5, 0.75]) == pytest.approx([0.2475, 0.415, 0.5825], abs=0.03)


@pytest.mark.parametrize(
    ("size", "box"),
    [
        ((3000, 30), (1480, 0, 1520, 30)),  # wide: 4/3 of the height, in the middle
        ((30, 3000), (0, 1480, 30, 1520)),  # tall: the width over 3/4
    ],
)
def test_boxes_that_never_fit_fall_back_to_the_centre(size: tuple[int, int], box: Box) -> None:
    class Whole(random.Random):
        def uniform(self, a: float, b: float) -> float:
            return b  # always the whole area, which no box of an allowed aspect ratio has

    assert random_box(size, Whole()) == box


def test_centre_box_of_a_square_is_seven_eighths() -> None:
    assert centre_box((512, 512)) == (32, 32, 480, 480)


def test_half_of_the_images_are_mirrored(tmp_path: Path) -> None:
    """The picture gets brighter from left to right, so a mirrored crop gets darker."""
    ramp = np.tile(np.arange(256, dtype=np.uint8)[None, :, None], (256, 1, 3))
    Image.fromarray(ramp).save(tmp_path / "ramp.png")
    crops = [read_image(str(tmp_path / "ramp.png"), random.Random(seed)).astype(int) for seed in range(100)]
    mirrored = sum(bool(crop[:, -1].mean() < crop[:, 0].mean()) for crop in crops)
    assert 30 < mirrored < 70


@pytest.mark.parametrize("mode", ["L", "CMYK", "P"])
def test_other_colour_modes_become_rgb(mode: str, tmp_path: Path) -> None:
    path = tmp_path / ("a.png" if mode == "P" else "a.jpg")
    stored = picture((300, 260)).convert(mode)
    stored.save(path)
    pixels = read_image(str(path), None)
    assert pixels.shape == (224, 224, 3)
    expected = stored.convert("RGB").resize((224, 224), Image.Resampling.BILINEAR, box=centre_box((300, 260)))
    assert difference(Image.fromarray(pixels), expected) < 3.0


def test_what_is_tested_on_is_read_in_sorted_order(folder: Path) -> None:
    data = load("imagenet", batch_size=4, seed=0, root=folder, workers=0)
    assert (data.classes, data.shape, data.train.examples, data.test.examples) == (3, (3, 224, 224), 13, 6)
    inputs, targets = joined(list(data.test))
    assert targets.tolist() == [0, 0, 1, 1, 2, 2]  # ant, bee, cat
    assert inputs.dtype == torch.float32
    pixels = torch.from_numpy(read_image(str(folder / "val" / "bee" / "1.jpg"), None).copy())
    mean, std = torch.tensor(IMAGENET_STATISTICS.mean), torch.tensor(IMAGENET_STATISTICS.std)
    torch.testing.assert_close(inputs[3].permute(1, 2, 0), (pixels / 255 - mean) / std, atol=1e-5, rtol=0)


def test_plain_training_batches_mix_the_classes_and_are_the_same_for_every_seed(folder: Path) -> None:
    train, other = (load("imagenet", batch_size=5, seed=seed, root=folder, workers=0).train for seed in (0, 1))
    batches = list(train)
    assert all(len(targets.unique()) > 1 for _, targets in batches)
    assert torch.bincount(joined(batches)[1]).tolist() == [5, 4, 4]
    assert equal(batches, list(other))
    images = train.images  # type: ignore[attr-defined]
    folders = [Path(path).parent.name for path in images.paths]
    assert folders == [images.classes[target] for target in joined(batches)[1]]


def test_folder_may_lie_beside_other_sets(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "imagenet").symlink_to(folder)
    assert load("imagenet", batch_size=4, seed=0, root=tmp_path, workers=0).train.examples == 13


@pytest.mark.parametrize("late", [False, True])
def test_readers_do_not_hear_sigterm(late: bool, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal to the whole process group must not end the epoch that the training process wants to finish.

    Nor may it end a worker that has started but does not ignore it yet.
    """
    if late:
        monkeypatch.setattr(imagefolder, "_deaf", lambda worker: time.sleep(0.5 * worker))
    train = load("imagenet", batch_size=1, seed=1, root=folder, workers=2).train
    batches = train.epoch(1)
    next(batches)
    children = multiprocessing.active_children()
    assert len(children) == 2
    for child in children:
        child.terminate()
    assert 1 + sum(1 for _ in batches) == train.examples
    assert not any(child.is_alive() for child in children)


def test_pass_does_not_depend_on_workers_or_global_state(folder: Path) -> None:
    before = torch.get_rng_state(), random.getstate()
    here, there = (load("imagenet", batch_size=4, seed=1, root=folder, workers=workers) for workers in (0, 2))
    assert equal(list(here.train.epoch(2)), list(there.train.epoch(2)))
    assert equal(list(here.test), list(there.test))
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1] == random.getstate()


def test_epochs_hold_every_example_once_in_different_orders(folder: Path) -> None:
    train = load("imagenet", batch_size=4, seed=1, root=folder, workers=0).train
    epochs = [list(train.epoch(number)) for number in range(2)]
    for epoch in epochs:
        assert [len(targets) for _, targets in epoch] == [4, 4, 4, 1]
        assert torch.bincount(joined(epoch)[1]).tolist() == [5, 4, 4]
    assert len(train) == 4
    assert not torch.equal(joined(epochs[0])[1], joined(epochs[1])[1])
    assert equal(epochs[1], list(train.epoch(1)))


def test_augment_false_only_shuffles(folder: Path) -> None:
    train = load("imagenet", batch_size=4, seed=1, root=folder, workers=0, augment=False).train
    order = torch.randperm(13, generator=train.batching.generator(0))  # type: ignore[attr-defined]
    plain, shuffled = joined(list(train)), joined(list(train.epoch(0)))
    assert torch.equal(plain[0][order], shuffled[0])
    assert torch.equal(plain[1][order], shuffled[1])


def test_shares_reassemble_to_the_global_batch(folder: Path) -> None:
    def loader(rank: int, world_size: int) -> Loader:
        return load("imagenet", batch_size=4, seed=1, root=folder, workers=0, rank=rank, world_size=world_size).train

    ranks = [list(loader(rank, 2).epoch(0)) for rank in range(2)]
    for at, (inputs, targets) in enumerate(loader(0, 1).epoch(0)):
        for rank in range(2):
            assert torch.equal(ranks[rank][at][0], inputs[rank::2])
            assert torch.equal(ranks[rank][at][1], targets[rank::2])
    assert len(ranks[1][-1][1]) == 0


def test_validation_is_held_out_by_class(folder: Path) -> None:
    data = load("imagenet", batch_size=4, seed=1, root=folder, workers=0, validation=0.25)
    assert data.validation is not None
    assert torch.bincount(joined(list(data.validation))[1]).tolist() == [1, 1, 1]
    assert torch.bincount(joined(list(data.train))[1]).tolist() == [4, 3, 3]


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("damage", ["cut short", "not an image", "12,000 pixels wide and high"])
def test_corrupt_image_is_named(tmp_path: Path, workers: int, damage: str) -> None:
    for part in ("train", "val"):
        saved(tmp_path / part / "ant" / "good.jpg", (300, 300))
    bad = saved(tmp_path / "train" / "ant" / "bad.jpg", (300, 300))
    if "pixels" in damage:
        Image.new("1", (12_000, 12_000)).save(bad, "png")  # 20 kB, and 432 MB as RGB
    else:
        bad.write_bytes(bad.read_bytes()[:3000] if damage == "cut short" else b"hello")
    data = load("imagenet", batch_size=4, seed=0, root=tmp_path, workers=workers)
    with pytest.raises(ValueError, match=rf"^{bad}: not a readable image .*; replace or remove it$"):
        list(data.train.epoch(0))


def test_wrong_folders_are_explained(tmp_path: Path) -> None:
    def attempt() -> None:
        load("imagenet", batch_size=4, seed=0, root=tmp_path, workers=0)

    with pytest.raises(FileNotFoundError, match=r"no folder .*train; give --data the folder"):
        attempt()
    (tmp_path / "train").mkdir()
    with pytest.raises(ValueError, match="no class folders"):
        attempt()
    (tmp_path / "train" / "ant").mkdir()
    with pytest.raises(ValueError, match="ant: no images"):
        attempt()
    saved(tmp_path / "train" / "ant" / "0.jpg", (40, 30))
    saved(tmp_path / "val" / "bee" / "0.jpg", (40, 30))
    with pytest.raises(ValueError, match=r"2 are in only one of them: ant, bee"):
        attempt()
