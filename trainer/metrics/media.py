"""Media: images, texts, histograms and tables, each in the one form that loggers get."""

from __future__ import annotations

import struct
import sys
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any

import torch

from trainer.errors import ConfigError, shown

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True)
class Images:
    """Pictures as arrays of (height, width, channels), uint8, with 1, 3 or 4 channels."""

    arrays: list[np.ndarray[Any, Any]]
    captions: list[str] | None = None
    options: dict[str, Any] = field(default_factory=dict)
    """Further options of `log_image`, such as `masks=` of Weights & Biases: lists with an entry for each picture."""


@dataclass(frozen=True)
class Text:
    """A text, in which Markdown is allowed."""

    text: str

    def record(self) -> dict[str, Any]:
        """Return the text as JSON holds it."""
        return {"text": self.text}


@dataclass(frozen=True)
class Histogram:
    """Finite values in one dimension, as float32 or float64, and the number of bins to show."""

    values: np.ndarray[Any, Any]
    bins: int = 64

    def record(self) -> dict[str, Any]:
        """Return the counts and the edges of the bins, as JSON holds them."""
        counts, edges = self.counts()
        return {"counts": counts, "edges": edges}

    def counts(self) -> tuple[list[int], list[float]]:
        """Return the counts and the edges of the bins: one edge more than counts."""
        import numpy as np

        counts, edges = np.histogram(self.values.astype(np.float64), self.bins)
        return counts.tolist(), edges.tolist()


@dataclass(frozen=True)
class Table:
    """Rows of cells that JSON can hold, and the names of the columns."""

    columns: list[str]
    rows: list[list[Any]]

    def record(self) -> dict[str, Any]:
        """Return the columns and rows, as JSON holds them."""
        return {"columns": self.columns, "data": self.rows}

    def markdown(self) -> str:
        """Return the table as Markdown."""
        lines = [self.columns, ["---"] * len(self.columns), *self.rows]
        return "\n".join(f"| {' | '.join(_cell(cell) for cell in line)} |" for line in lines)


Media = Images | Text | Histogram | Table


def _cell(value: Any) -> str:
    return str(value).replace("|", "\\|").replace("\n", " ")


def as_images(images: Any, caption: str | Sequence[str] | None, options: dict[str, Any]) -> Images:
    """Convert pictures to `Images`.

    Args:
        images: one picture or a list of them. A tensor is (channels, height, width) or (height, width), or a batch of
            the former; an array is (height, width, channels) or (height, width), as in PIL. Floating
            numbers are from 0 to 1, integers from 0 to 255. A PIL image, or the path of a file, is used unchanged.
        caption: one for all pictures, or a list with one for each.

    Raises:
        ConfigError: a picture has another shape, or there are more or fewer captions than pictures.
    """
    several = list(images) if isinstance(images, (list, tuple)) else [images]
    arrays = [array for image in several for array in _arrays(image)]
    captions = [caption] * len(arrays) if isinstance(caption, str) else None if caption is None else list(caption)
    for name, values in {"caption": captions, **options}.items():
        if values is not None and (not isinstance(values, (list, tuple)) or len(values) != len(arrays)):
            raise ConfigError(
                f"log_image: {len(arrays)} images were given with {name}={shown(values)}: "
                "give a list with one for each."
            )
    return Images(arrays, captions, options)


def _arrays(image: Any) -> list[np.ndarray[Any, Any]]:
    import numpy as np

    if isinstance(image, str | Path):
        from PIL import Image

        image = Image.open(image)
    if hasattr(image, "convert"):
        return [_of_pillow(image)]
    if not isinstance(image, torch.Tensor):
        return [_bytes(np.asarray(image), image)]
    array = on_cpu(image, "log_image").numpy()
    if array.ndim > 2:
        array = np.moveaxis(array, -3, -1)
    return [_bytes(one, image) for one in (array if array.ndim == 4 else [array])]


def _of_pillow(image: Any) -> np.ndarray[Any, Any]:
    import numpy as np

    array = np.asarray(image.convert(image.mode if image.mode in ("L", "RGB", "RGBA") else "RGB"))
    return array[..., None] if array.ndim == 2 else array


def _bytes(array: np.ndarray[Any, Any], given: Any) -> np.ndarray[Any, Any]:
    import numpy as np

    array = array[..., None] if array.ndim == 2 else array
    of_numbers = array.dtype.kind in "biuf" and array.size
    if not of_numbers or array.ndim != 3 or array.shape[-1] not in (1, 3, 4):
        raise ConfigError(
            f"log_image got a {type(given).__name__} of shape {tuple(np.shape(given))}. Give a tensor of (channels, "
            "height, width), or an array of (height, width, channels), with 1, 3 or 4 channels."
        )
    if array.dtype == np.uint8:
        return array.copy()
    if np.issubdtype(array.dtype, np.integer):
        return array.clip(0, 255).astype(np.uint8)
    pixels: np.ndarray[Any, Any] = np.nan_to_num(array.astype(np.float32)).clip(0, 1) * 255
    return pixels.round().astype(np.uint8)


def as_histogram(values: Any, bins: int) -> Histogram:
    """Copy the finite numbers of a tensor, an array or a list.

    Raises:
        ConfigError: no number is finite.
    """
    import numpy as np

    array = np.asarray(on_cpu(values, "log_histogram") if isinstance(values, torch.Tensor) else values)
    array = array.astype(np.float64 if array.dtype.itemsize > 4 else np.float32).reshape(-1)
    finite = array[np.isfinite(array)]
    if not finite.size:
        raise ConfigError(f"log_histogram got {array.size} values, and none is a finite number.")
    return Histogram(finite, bins)


def figure_images(figure: Any) -> Images:
    """Render a figure of matplotlib."""
    from PIL import Image

    file = BytesIO()
    figure.savefig(file, format="png")
    file.seek(0)
    return Images([_of_pillow(Image.open(file))])


def close_figure(figure: Any) -> None:
    """Close a figure in pyplot, if pyplot is imported: it keeps figures in memory until they are closed."""
    pyplot = sys.modules.get("matplotlib.pyplot")
    if pyplot is not None:
        pyplot.close(figure)


def as_table(columns: Any, data: Any, dataframe: Any) -> Table:
    """Make a table of columns and rows, or of a data frame.

    Raises:
        ConfigError: a row has more or fewer cells than columns.
    """
    if dataframe is not None:
        columns, data = list(dataframe.columns), dataframe.values.tolist()
    rows = [[_plain(cell) for cell in row] for row in data]
    if columns is None:
        columns = range(max(map(len, rows), default=0))
    names = [*map(str, columns)]
    for number, row in enumerate(rows):
        if len(row) != len(names):
            raise ConfigError(f"log_table: row {number} has {len(row)} cells, and there are {len(names)} columns.")
    return Table(names, rows)


def _plain(cell: Any) -> Any:
    """Return a cell as a number, a text or None; other values as texts."""
    if hasattr(cell, "tolist"):  # of a tensor, or of numpy
        cell = cell.tolist()
    return cell if isinstance(cell, (int, float, str, NoneType)) else str(cell)


def on_cpu(tensor: torch.Tensor, method: str) -> torch.Tensor:
    """Return a copy in host memory, of a dtype that numpy has.

    Raises:
        ConfigError: the tensor is sharded, so this process has only a part of it.
    """
    if hasattr(tensor, "full_tensor"):
        raise ConfigError(f"{method} got a sharded tensor: log tensor.full_tensor(), gathered on all processes.")
    copy = tensor.detach().to("cpu", copy=True).resolve_conj().resolve_neg()
    return copy.float() if copy.dtype in (torch.bfloat16, torch.float16) else copy


def png(array: np.ndarray[Any, Any]) -> bytes:
    """Encode an array of `Images` as a PNG file."""
    height, width, channels = array.shape
    kind = {1: 0, 3: 2, 4: 6}[channels]
    lines = b"".join(b"\0" + row.tobytes() for row in array)

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    header = struct.pack(">IIBBBBB", width, height, 8, kind, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(lines)) + chunk(b"IEND", b"")
