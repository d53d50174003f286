"""Data sets in memory: what is read, what is held out, and that a pass depends on (seed, epoch) alone."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from dirprune.lab.data import (
    CIFAR_STATISTICS,
    DIGITS_STATISTICS,
    IMAGENET_STATISTICS,
    Loader,
    Normalization,
    Synthetic,
    data_root,
    load,
    stratified_split,
)
from dirprune.lab.data.cifar import LAYOUTS, read_records
from dirprune.lab.data.download import ARCHIVES
from dirprune.lab.data.loader import Batch, Batching
from dirprune.lab.data.resident import Crops, ResidentLoader, draw_crop_flip

GREY = Normalization((0.0,), (1.0,))


def numbered(examples: int, **batching: int) -> ResidentLoader:
    """Return a loader of examples whose target is their index, so that the targets show the order of a pass."""
    images = torch.randint(256, (examples, 1, 6, 5), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    return ResidentLoader(images, torch.arange(examples), Batching(**{"seed": 0, **batching}), GREY, padding=2)


def same(a: list[Batch], b: list[Batch]) -> bool:
    pairs = zip(a, b, strict=True)
    return all(torch.equal(x, u) and torch.equal(y, v) for (x, y), (u, v) in pairs)


def crop_flip_reference(image: Tensor, draw: Tensor, padding: int) -> Tensor:
    """Crop and flip pixel by pixel: take the source of each output pixel, or black outside the image."""
    top, left, flip = draw.tolist()
    height, width = image.shape[1:]
    out = torch.zeros_like(image)
    for y in range(height):
        for x in range(width):
            across = width - 1 - x if flip else x
            row, column = y + top - padding, across + left - padding
            if 0 <= row < height and 0 <= column < width:
                out[:, y, x] = image[:, row, column]
    return out


def write_cifar(root: Path, name: str, records: int = 20) -> dict[str, bytes]:
    """Write a tiny set in the official layout, with random pixels; return each file's content."""
    layout = LAYOUTS[name]
    source = torch.Generator().manual_seed(7)
    (root / layout.folder).mkdir(parents=True)
    contents = {}
    for file in (*layout.train, *layout.test):
        rows = torch.randint(256, (records, layout.label_bytes + 3072), dtype=torch.uint8, generator=source)
        rows[:, layout.label_bytes - 1] = torch.arange(records) % layout.classes
        contents[file] = bytes(rows.flatten().tolist())
        (root / layout.folder / file).write_bytes(contents[file])
    return contents


def test_batched_augmentation_equals_one_image_at_a_time() -> None:
    source = torch.Generator().manual_seed(3)
    images = torch.randint(1, 256, (40, 3, 7, 6), dtype=torch.uint8, generator=source)
    draws = draw_crop_flip(40, 4, source)
    expected = [crop_flip_reference(image, draw, padding=4) for image, draw in zip(images, draws, strict=True)]
    rows = torch.cat([torch.arange(40).unsqueeze(1), draws], dim=1)
    assert torch.equal(Crops(images, 4)(rows), torch.stack(expected))


def test_draws_are_uniform_over_offsets_and_orientations() -> None:
    draws = draw_crop_flip(81_000, 4, torch.Generator().manual_seed(0))
    counts = torch.bincount(draws[:, 0] * 18 + draws[:, 1] * 2 + draws[:, 2], minlength=162)
    chi_squared = ((counts - 500.0) ** 2 / 500).sum().item()
    assert 161 - 4 * 18 < chi_squared < 161 + 4 * 18  # 161 degrees of freedom, standard deviation √322


def test_training_pass_is_the_augmented_permutation_then_normalised() -> None:
    batching = Batching(batch_size=8, seed=5)
    images = numbered(20, batch_size=8).images
    statistics = Normalization((0.3,), (0.2,))
    loader = ResidentLoader(images, torch.arange(20), batching, statistics, padding=2)
    source = batching.generator(4)
    order, draws = torch.randperm(20, generator=source), draw_crop_flip(20, 2, source)
    for at, (x, y) in enumerate(zip(*map(torch.cat, zip(*loader.epoch(4), strict=True)), strict=True)):
        cut = crop_flip_reference(images[order[at]], draws[at], padding=2)
        assert y == order[at]
        torch.testing.assert_close(x, (cut / 255 - 0.3) / 0.2)


def test_chunks_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    loader = numbered(23, batch_size=4)
    whole = list(loader.epoch(0))
    monkeypatch.setattr(
        "dirprune.lab.data.resident.CHUNK_BYTES", 2 * 4 * 4 * 30
    )  # two batches of 4 images of 30 floats
    assert same(whole, list(loader.epoch(0)))
    monkeypatch.setattr("dirprune.lab.data.resident.CHUNK_BYTES", 1)
    assert same(whole, list(loader.epoch(0)))


def test_every_example_comes_once_and_the_last_batch_is_short() -> None:
    loader = numbered(23, batch_size=5)
    for batches in (list(loader), list(loader.epoch(0)), list(loader.epoch(1))):
        assert [len(targets) for _, targets in batches] == [5, 5, 5, 5, 3]
        assert torch.cat([targets for _, targets in batches]).sort().values.tolist() == list(range(23))
    assert len(loader) == 5
    assert loader.examples == 23


def test_plain_pass_is_in_order_and_unaugmented() -> None:
    loader = numbered(9, batch_size=4)
    torch.testing.assert_close(torch.cat([x for x, _ in loader]), loader.images / 255)
    assert torch.cat([y for _, y in loader]).tolist() == list(range(9))


def test_the_next_pass_is_drawn_ahead_and_is_the_same() -> None:
    fresh = lambda: numbered(23, batch_size=7)  # noqa: E731
    loader = fresh()
    for epoch in (1, 2, 3, 7, 8, 8, 2):
        passes = [[torch.cat(part) for part in zip(*of.epoch(epoch), strict=True)] for of in (loader, fresh())]
        torch.testing.assert_close(*passes, rtol=0, atol=0)
        assert list(loader._plans) == [epoch + 1]
    next(loader.epoch(3))  # a pass that is not finished
    torch.testing.assert_close(list(loader.epoch(3)), list(fresh().epoch(3)), rtol=0, atol=0)


def test_pass_is_a_pure_function_of_seed_and_epoch() -> None:
    loader = numbered(23, batch_size=5)
    first = list(loader.epoch(3))
    list(loader.epoch(4))
    assert same(first, list(numbered(23, batch_size=5).epoch(3)))
    orders = {
        tuple(torch.cat([y for _, y in numbered(23, batch_size=5, seed=seed).epoch(epoch)]).tolist())
        for seed in range(3)
        for epoch in range(3)
    }
    assert len(orders) == 9


def test_order_does_not_depend_on_batch_size_or_augmentation() -> None:
    batching = Batching(batch_size=7, seed=0)
    plain = ResidentLoader(numbered(23, batch_size=7).images, torch.arange(23), batching, GREY)
    orders = [torch.cat([y for _, y in loader.epoch(2)]) for loader in (plain, numbered(23, batch_size=5))]
    assert torch.equal(*orders)


def test_global_random_state_is_untouched() -> None:
    before = torch.get_rng_state()
    data = load("synthetic", batch_size=16, seed=0, validation=0.25, synthetic=Synthetic(examples=64))
    list(data.train.epoch(0))
    list(data.test)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("world_size", [2, 3])
def test_shares_reassemble_to_the_global_batch(world_size: int) -> None:
    alone = numbered(13, batch_size=4)  # the last batch holds one example: some shares are empty
    ranks = [numbered(13, batch_size=4, rank=rank, world_size=world_size) for rank in range(world_size)]

    def check(whole: list[Batch], shares: list[list[Batch]]) -> None:
        for at, (x, y) in enumerate(whole):
            for rank, share in enumerate(shares):
                assert torch.equal(share[at][0], x[rank::world_size])
                assert torch.equal(share[at][1], y[rank::world_size])

    check(list(alone.epoch(1)), [list(loader.epoch(1)) for loader in ranks])
    check(list(alone), [list(loader) for loader in ranks])
    assert {(loader.examples, len(loader), loader.batch_size) for loader in ranks} == {(13, 4, 4)}


def test_batches_are_float32_and_int64_and_may_be_written_to() -> None:
    data = load("synthetic", batch_size=8, seed=0, synthetic=Synthetic(shape=(2, 5, 7), classes=3, examples=20))
    before = list(data.train)
    for inputs, targets in data.train:
        assert inputs.dtype == torch.float32
        assert targets.dtype == torch.int64
        inputs.zero_()
        targets.zero_()
    assert same(before, list(data.train))
    assert data.shape == (2, 5, 7)
    assert data.classes == 3
    assert data.test.examples == 4


def test_augment_false_only_shuffles() -> None:
    data = load("synthetic", batch_size=8, seed=0, augment=False, synthetic=Synthetic(examples=20))

    def pixels(batches: list[Batch]) -> set[bytes]:
        return {image.numpy().tobytes() for inputs, _ in batches for image in inputs}

    assert pixels(list(data.train.epoch(0))) == pixels(list(data.train))
    augmented = load("synthetic", batch_size=8, seed=0, synthetic=Synthetic(examples=20))
    assert pixels(list(augmented.train.epoch(0))) != pixels(list(augmented.train))


def test_stratified_split_holds_out_the_fraction_of_each_class() -> None:
    targets = torch.arange(1000) % 7
    kept, held = stratified_split(targets, 0.3)
    assert torch.cat([kept, held]).sort().values.tolist() == list(range(1000))
    for label in range(7):
        assert (targets[held] == label).sum() == round(0.3 * int((targets == label).sum()))


def test_validation_is_part_of_train_shared_by_all_seeds(tmp_path: Path) -> None:
    write_cifar(tmp_path, "cifar10")

    def images(loader: Loader | None) -> list[bytes]:
        assert loader is not None
        return [image.numpy().tobytes() for inputs, _ in loader for image in inputs]

    full = load("cifar10", batch_size=16, seed=0, root=tmp_path)
    first, second = (load("cifar10", batch_size=16, seed=seed, root=tmp_path, validation=0.2) for seed in (0, 1))
    assert full.validation is None
    assert images(first.validation) == images(second.validation)
    assert len(images(first.validation)) == 20
    assert sorted(images(first.train) + images(first.validation)) == sorted(images(full.train))
    assert images(first.test) == images(full.test)
    assert first.validation is not None
    assert torch.bincount(torch.cat([y for _, y in first.validation])).tolist() == [2] * 10


@pytest.mark.parametrize("name", ["cifar10", "cifar100"])
def test_cifar_is_read_from_the_official_layout(name: str, tmp_path: Path) -> None:
    contents = write_cifar(tmp_path, name)
    layout = LAYOUTS[name]
    data = load(name, batch_size=7, seed=0, root=tmp_path)
    assert (data.classes, data.shape) == (layout.classes, (3, 32, 32))
    for loader, files in ((data.train, layout.train), (data.test, layout.test)):
        record = layout.label_bytes + 3072
        raw = b"".join(contents[file] for file in files)
        x, y = (torch.cat(parts) for parts in zip(*loader, strict=True))
        assert len(x) == len(raw) // record
        for index in (0, 13, len(x) - 1):
            row = raw[index * record : (index + 1) * record]
            assert y[index] == row[layout.label_bytes - 1]
            for channel, line, column in ((0, 0, 0), (1, 4, 9), (2, 31, 30)):
                value = row[layout.label_bytes + channel * 1024 + line * 32 + column] / 255
                expected = (value - CIFAR_STATISTICS.mean[channel]) / CIFAR_STATISTICS.std[channel]
                assert x[index, channel, line, column].item() == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("name", ["cifar10", "cifar100"])
def test_the_folder_of_the_files_themselves_may_be_given(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_cifar(tmp_path, name)
    monkeypatch.chdir(tmp_path / LAYOUTS[name].folder)
    for root in (tmp_path / LAYOUTS[name].folder, Path()):
        assert load(name, batch_size=16, seed=0, root=root).test.examples > 0


def test_cifar_reader_and_downloader_name_the_same_files() -> None:
    for name, layout in LAYOUTS.items():
        archive = ARCHIVES[name]
        assert archive.folder == layout.folder
        assert set(archive.files) == {*layout.train, *layout.test}
        assert sum(archive.files[file].size for file in layout.train) == 50_000 * (layout.label_bytes + 3072)
        assert sum(archive.files[file].size for file in layout.test) == 10_000 * (layout.label_bytes + 3072)


def test_damaged_cifar_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "train.bin"
    for content in (b"", bytes(3073 + 1)):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"train\.bin: .* 3073-byte records"):
            read_records(path, label_bytes=1, classes=10)
    path.write_bytes(bytes(3073) + b"\x0a" + bytes(3072))
    with pytest.raises(ValueError, match=r"train\.bin: record 1 has label 10"):
        read_records(path, label_bytes=1, classes=10)


def test_missing_data_says_what_where_and_how(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_cifar(tmp_path, "cifar10")
    (tmp_path / "cifar-10-batches-bin" / "data_batch_3.bin").unlink()
    monkeypatch.setenv("DIRPRUNE_DATA", str(tmp_path))
    with pytest.raises(FileNotFoundError) as error:
        load("cifar10", batch_size=8, seed=0)
    message = str(error.value)
    assert "no data_batch_3.bin in" in message
    assert f"dirprune data cifar10 --to {tmp_path}" in message
    assert f"--data {tmp_path}" in message


def test_data_root_prefers_argument_then_environment_then_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DIRPRUNE_DATA", "/elsewhere")
    assert data_root(Path("/here")) == Path("/here")
    assert data_root() == Path("/elsewhere")
    monkeypatch.delenv("DIRPRUNE_DATA")
    assert data_root() == Path.home() / ".cache" / "dirprune"


def test_digits_are_split_by_class_and_normalised() -> None:
    from sklearn.datasets import load_digits

    data = load("digits", batch_size=64, seed=0)
    (x, y), (u, v) = ([torch.cat(parts) for parts in zip(*part, strict=True)] for part in (data.train, data.test))
    assert (data.classes, data.shape, len(x), len(u)) == (10, (1, 8, 8), 1438, 359)
    assert x.mean().item() == pytest.approx(0, abs=1e-3)
    assert x.std().item() == pytest.approx(1, abs=1e-3)
    shares = torch.bincount(v) / torch.bincount(torch.cat([y, v]))
    assert shares.min() > 0.195
    assert shares.max() < 0.205
    statistics = DIGITS_STATISTICS
    pixels = (torch.cat([x, u]) * statistics.std[0] + statistics.mean[0]) * 16
    restored = sorted(tuple(image.round().int().flatten().tolist()) for image in pixels)
    assert restored == sorted(tuple(row) for row in load_digits().data.astype(int).tolist())
    # The split itself is pinned: if it changed, published numbers would no longer be comparable.
    assert v[:12].tolist() == [4, 1, 4, 2, 8, 1, 3, 5, 2, 1, 6, 5]


def test_published_statistics_are_the_defaults(tmp_path: Path) -> None:
    write_cifar(tmp_path, "cifar10")
    for given, used in ((None, CIFAR_STATISTICS), (IMAGENET_STATISTICS, IMAGENET_STATISTICS)):
        data = load("cifar10", batch_size=200, seed=0, root=tmp_path, normalization=given)
        inputs, _ = next(iter(data.train))
        pixels = inputs * torch.tensor(used.std).view(3, 1, 1) + torch.tensor(used.mean).view(3, 1, 1)
        torch.testing.assert_close(pixels * 255, (pixels * 255).round(), atol=1e-3, rtol=0)
    assert (CIFAR_STATISTICS.mean, CIFAR_STATISTICS.std) == ((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010))
    assert (IMAGENET_STATISTICS.mean, IMAGENET_STATISTICS.std) == ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "mnist"}, "name='mnist'.*digits, cifar10"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"validation": 1.0}, r"validation=1\.0"),
        ({"validation": 1e-9}, "leaves 2048 examples to train and 0 to validate"),
        ({"rank": 2, "world_size": 2}, "rank=2, world_size=2"),
        ({"normalization": GREY}, "the images have 3 channels"),
        ({"name": "imagenet", "workers": -1}, "workers=-1"),
    ],
)
def test_bad_arguments_are_refused_by_name(options: dict[str, object], message: str) -> None:
    arguments: dict[str, object] = {"name": "synthetic", "batch_size": 8, "seed": 0, **options}
    with pytest.raises(ValueError, match=message):
        load(**arguments)  # type: ignore[arg-type]


def test_bad_constants_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="one value per channel"):
        Normalization((0.5, 0.5), (1.0,))
    with pytest.raises(ValueError, match=r"std=\(0\.0,\)"):
        Normalization((0.5,), (0.0,))
    with pytest.raises(ValueError, match="must be positive"):
        Synthetic(examples=0)


def test_small_images_of_cifar_are_means_over_squares_of_pixels(tmp_path: Path) -> None:
    write_cifar(tmp_path, "cifar10")
    as_stored = Normalization((0.0,) * 3, (1 / 255,) * 3)
    whole, half = (
        load("cifar10", batch_size=8, seed=0, root=tmp_path, size=size, normalization=as_stored) for size in (0, 16)
    )
    assert half.shape == (3, 16, 16)
    (large, targets), (small, again) = next(iter(whole.test)), next(iter(half.test))
    expected = large.reshape(*large.shape[:2], 16, 2, 16, 2).mean((3, 5))
    assert float((small - expected).abs().max()) <= 0.5 + 1e-3  # whole numbers are stored
    torch.testing.assert_close(targets, again)
    assert next(half.train.epoch(1))[0].shape == (8, 3, 16, 16)
    with pytest.raises(ValueError, match=r"--image-size 20: the side of the images, 32, is no multiple of it"):
        load("cifar10", batch_size=8, seed=0, root=tmp_path, size=20)
