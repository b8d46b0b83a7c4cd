"""Pictures, texts, histograms and tables of any form arrive at the loggers in one, and other things are refused."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.messages import raises_recorded
from trainer import CheckpointError, ConfigError, Logger
from trainer.data.media_state import media_of, state_of
from trainer.metrics.media import Histogram, Images, Media, Table, as_images, png


class Kept(Logger):
    def __init__(self) -> None:
        self.media: list[tuple[str, Media, int]] = []

    def log_media(self, key: str, media: Media, step: int) -> None:
        self.media.append((key, media, step))

    @property
    def last(self) -> Any:
        return self.media[-1][1]


def picture() -> torch.Tensor:
    return torch.arange(2 * 3 * 3, dtype=torch.uint8).reshape(3, 2, 3)  # channels, height, width


FORMS = {
    "tensor": picture(),
    "tensor from 0 to 1": picture() / 255,
    "tensor in bfloat16": (picture() / 255).bfloat16(),
    "array": picture().permute(1, 2, 0).numpy(),
    "array from 0 to 1": picture().permute(1, 2, 0).numpy() / 255,
    "batch": picture()[None],
    "list": [picture()],
    "strided": picture().permute(1, 2, 0).contiguous().permute(2, 0, 1),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_picture_of_any_form(form: str) -> None:
    logger = Kept()
    logger.log_image("a", FORMS[form], caption="one")
    assert isinstance(logger.last, Images)
    assert logger.last.captions == ["one"]
    (array,) = logger.last.arrays
    assert array.dtype == np.uint8
    assert np.array_equal(array, picture().permute(1, 2, 0).numpy())


def test_a_picture_of_pil_and_a_file() -> None:
    Image = pytest.importorskip("PIL.Image")  # noqa: N806

    array = picture().permute(1, 2, 0).numpy()
    Image.fromarray(array).save("x.png")
    for image in (Image.open("x.png"), "x.png", Path("x.png")):
        assert np.array_equal(as_images(image, None, {}).arrays[0], array)


@pytest.mark.parametrize("channels", [1, 3, 4])
def test_our_png_is_what_pil_reads(channels: int) -> None:
    Image = pytest.importorskip("PIL.Image")  # noqa: N806

    array = np.random.default_rng(0).integers(0, 255, (5, 7, channels), dtype=np.uint8)
    assert np.array_equal(np.asarray(Image.open(io.BytesIO(png(array)))), array.squeeze())


def test_a_grey_picture_and_values_out_of_range() -> None:
    array = as_images(torch.tensor([[-1.0, 0.5], [2.0, float("nan")]]), None, {}).arrays[0]
    assert array[..., 0].tolist() == [[0, 128], [255, 0]]


def test_the_tensor_may_change_afterwards() -> None:
    logger, image, values = Kept(), picture(), torch.zeros(3)
    logger.log_image("a", image)
    image.zero_()
    assert logger.last.arrays[0].any()
    logger.log_histogram("b", values)
    values.fill_(7)
    assert not logger.last.values.any()


def test_text_table_histogram_and_figure() -> None:
    logger = Kept()
    logger.log_table("b", columns=["x", "y"], data=[[1, torch.tensor(2.0)], ["a|b", None]], step=6)
    assert logger.media[-1] == ("b", Table(["x", "y"], [[1, 2.0], ["a|b", None]]), 6)
    assert logger.last.markdown().splitlines() == ["| x | y |", "| --- | --- |", "| 1 | 2.0 |", "| a\\|b | None |"]
    logger.log_text(key="c", columns=["x"], data=[["hello"]])  # as Lightning's WandbLogger takes it
    assert logger.media[-1] == ("c", Table(["x"], [["hello"]]), 0)
    logger.log_histogram("d", torch.tensor([[0.0, 1.0], [1.0, float("nan")]], requires_grad=True), bins=2)
    assert isinstance(logger.last, Histogram)
    assert logger.last.counts() == ([1, 2], [0.0, 0.5, 1.0])
    figure = pytest.importorskip("matplotlib.figure").Figure(figsize=(1, 1), dpi=50)
    logger.log_figure("e", figure)
    assert logger.last.arrays[0].shape == (50, 50, 4)


class Frame:
    """The part of pandas' data frame that is used."""

    columns = ("x", "y")
    values = np.array([[1, 2], [3, 4]])


def test_a_data_frame() -> None:
    logger = Kept()
    logger.log_table("a", dataframe=Frame())
    assert logger.last == Table(["x", "y"], [[1, 2], [3, 4]])


WRONG: dict[str, Any] = {
    "shape": lambda log: log.log_image("a", torch.zeros(5, 4, 4)),
    "object": lambda log: log.log_image("a", object()),
    "captions": lambda log: log.log_image("a", picture(), caption=["a", "b"]),
    "options": lambda log: log.log_image("a", picture(), masks=3),
    "row": lambda log: log.log_table("a", ["x"], [[1], [1, 2]]),
    "nothing finite": lambda log: log.log_histogram("a", torch.full((3,), torch.nan)),
    "empty": lambda log: log.log_histogram("a", []),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_no_picture_and_the_like_is_refused(case: str) -> None:
    with raises_recorded(ConfigError):
        WRONG[case](Kept())


def test_the_state_of_a_medium_is_checked() -> None:
    text = media_of({"kind": "Text", "text": "words"})
    assert media_of(state_of(text)) == text
    for state in ({}, {"kind": "Film"}, {"kind": ["Text"]}, {"kind": "Text"}, {"kind": "Text", "text": 1}):
        with pytest.raises(CheckpointError):
            media_of(state)
