"""Classes of every kind that people annotate arguments with."""

import abc
import dataclasses
import datetime as dates
import enum
import typing
from collections import deque  # noqa: F401  # of annotations that are texts
from dataclasses import InitVar, dataclass, field
from pathlib import Path
from typing import Any, Generic, NamedTuple, NewType, Protocol, TypedDict, TypeVar, runtime_checkable

import attr
import pydantic
import torch
from torch import nn
from torch.utils.data import Dataset

T = TypeVar("T")
UserId = NewType("UserId", int)
Name = NewType("Name", str)
Bound = TypeVar("Bound", bound=str)
PositiveInt = pydantic.PositiveInt
Alias = list[int]


class Color(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Num(enum.Enum):
    ONE = 1
    TWO = 2


class Token(enum.Enum):
    CLS = "[CLS]"
    ONE = "1"
    ABSENT = "null"


class IntE(enum.IntEnum):
    A = 1
    B = 2


class Act(enum.Enum):
    RELU = nn.ReLU
    PAIR = (1, 2)
    NONE = "none"


@dataclass
class Inner:
    depth: int = 2
    act: str = "relu"


@dataclass
class InnerSub(Inner):
    extra: int = 0


@dataclass
class Outer:
    name: str = "x"
    inner: Inner = field(default_factory=Inner)
    inners: list[Inner] = field(default_factory=list)
    p: Path | None = None


@dataclass
class GenDC(Generic[T]):
    item: T | None = None


class PM(pydantic.BaseModel):
    a: int
    b: list[float] = []


class TD(TypedDict, total=False):
    a: int
    b: str


class TD2(TypedDict):
    a: int
    b: str


class NT(NamedTuple):
    x: int
    y: int = 2


class Entry(TypedDict):
    text: typing.Required[str]
    place: typing.NotRequired[Path]


class Place(NamedTuple):
    path: Path


class PathModel(pydantic.BaseModel):
    path: Path
    more: list[Path] = []


@dataclass
class PathFields:
    path: Path


class Net(nn.Module):
    def __init__(self, width: int = 4, act: nn.Module | None = None) -> None:
        super().__init__()
        self.width = width
        self.act = act

    @classmethod
    def small(cls) -> "Net":
        return cls(1)


def make_net(width: int = 2) -> Net:
    return Net(width)


def make_text() -> str:
    return ""


def make_anything():  # type: ignore[no-untyped-def]
    return 3


class Base(nn.Module):
    def __init__(self, a: int = 1) -> None:
        super().__init__()
        self.a = a


class Sub(Base):
    def __init__(self, b: int = 2, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.b = b


class Kept:
    """Keeps the arguments that it does not know."""

    def __init__(self, **kwargs: Any) -> None:
        self.kwargs = kwargs
        super().__init__()

    def __repr__(self) -> str:
        return f"Kept({self.kwargs})"


class Pair:
    def __init__(self, a: int, b: int = 2) -> None:
        self.a, self.b = a, b

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.a}, {self.b})"


class Positional(Pair):
    """Gives the first argument of its base by position."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(5, **kwargs)


class Box(Generic[T]):
    def __init__(self, x: T) -> None:
        self.x = x


@runtime_checkable
class Proto(Protocol):
    def run(self) -> int: ...


class Loss(Protocol):
    def __call__(self, a: Any, b: Any) -> float: ...


class Weighted(Loss, Protocol):
    weight: float


@runtime_checkable
class RuntimeLoss(Protocol):
    def __call__(self, a: Any, b: Any) -> float: ...


class Makes(Protocol[T]):
    def __call__(self, params: Any) -> torch.optim.Optimizer: ...


class Named(Protocol):
    name: str


class HasName:
    def __init__(self, name: str = "a") -> None:
        self.name = name


class Difference:
    def __init__(self, weight: float = 1.0) -> None:
        self.weight = weight

    def __call__(self, a: Any, b: Any) -> float:
        return 0.0


def difference(a: Any, b: Any) -> float:
    return 0.0


class Impl:
    def run(self) -> int:
        return 1


class Abs(abc.ABC):
    @abc.abstractmethod
    def run(self) -> int: ...


class AbsImpl(Abs):
    def run(self) -> int:
        return 1


class DS(Dataset[int]):
    def __init__(self, n: int = 2) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> int:
        return i

    def __repr__(self) -> str:
        return f"DS({self.n})"


@dataclass
class Options:
    net: nn.Module | None = None
    sets: dict[str, Dataset[int]] = field(default_factory=dict)


class PosOnly:
    def __init__(self, a: int, /, b: int = 2) -> None:
        self.a, self.b = a, b


class NewCls:
    a: int

    def __new__(cls, a: int = 1) -> "NewCls":
        self = super().__new__(cls)
        self.a = a
        return self


@attr.define
class At:
    a: int = 0


@dataclass
class IV:
    a: int = 1
    b: InitVar[int] = 3

    def __post_init__(self, b: int) -> None:
        self.c = b


@dataclass(frozen=True, kw_only=True)
class KW:
    a: int


@dataclass
class NoInit:
    a: int = 1
    c: int = field(default=2, init=False)


class Req(nn.Module):
    def __init__(self, need: int) -> None:
        super().__init__()


class Req2(nn.Module):
    def __init__(self, first: int, second: int) -> None:
        super().__init__()


class Later:
    pass


def evaluated(annotation: str) -> Any:
    """Return an annotation from its text, in which the names of this module, of typing and of torch are known."""
    import numpy as np

    known = {
        **vars(typing),
        **vars(dates),
        "Decimal": __import__("decimal").Decimal,
        "np": np,
        "dataclasses": dataclasses,
    }
    found = eval(annotation, {**known, "Tensor": torch.Tensor, **globals()})
    return eval(found, globals()) if isinstance(found, str) else found
