"""A step's arithmetic by hand for realistic modules: the weights after four steps, or a refusal in words before one."""

from __future__ import annotations

import logging
import traceback
from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from tests.helpers.processes import run_distributed
from tests.helpers.realistic_modules import LENGTH, MODULES, WIDTH, Losses, Realistic
from tests.helpers.strategy_models import VOCABULARY
from tests.helpers.strategy_runs import WAYS as ALL_WAYS
from tests.helpers.strategy_runs import Way
from tests.tiers import selected
from trainer import Trainer
from trainer.errors import ConfigError

pytestmark = pytest.mark.filterwarnings("ignore:Using backward")  # with create_graph=True, says torch

STEPS, MICRO_BATCH = 4, 4
ROUNDINGS = 8
"""Of each weight and its gradient in each step: the bound of a difference, in units of the dtype's last digit."""
WHOLE = ("single", "DDP x2", "FSDP x2", "FSDP 2x2", "ZeRO-1 x2", "ZeRO-2 x2", "ZeRO-3 x2")
SPLIT = ("TP x2", "CP x2", "PP x2")
UNUSED, BLOCKS = "DDP x2, unused", "FSDP x2, blocks"
"""DDP that looks for parameters without a gradient, and FSDP that is told the classes of the blocks."""
WAYS = {name: ALL_WAYS[name] for name in (*WHOLE, *SPLIT)} | {
    UNUSED: Way("ddp", 2, (("find_unused_parameters", True),)),
    BLOCKS: Way("fsdp", 2),
}
DTYPES = {
    "32-true": torch.float32,
    "bf16-mixed": torch.bfloat16,
    "bf16-true": torch.bfloat16,
    "16-true": torch.float16,
}
Case = tuple[str, str, str]
"""A module, a way, and a precision."""
REFUSED = {
    ("*", "ZeRO", "16-true"): "is not one of DeepSpeed's",
    ("manual", "ZeRO", "*"): "cannot do manual optimization",
    ("Backward", "ZeRO", "*"): "runs backward and step itself",
    ("BackwardTwice", "ZeRO", "*"): "runs backward and step itself",
    ("BackwardByHand", "ZeRO", "*"): "runs backward and step itself",
    ("BackwardByHandInPart", "ZeRO", "*"): "runs backward and step itself",
    ("BackwardByHand", "FSDP", "*"): "was given a gradient by hand",
    ("ByHand", "FSDP", "*"): "was given a gradient by hand",
    ("ByHand", "DDP", "*"): "found gradients that no self.manual_backward(loss) has left",
    ("BackwardWithin", "ZeRO-2", "*"): "leave loss.backward() out of training_step",
    ("BackwardWithin", "ZeRO-3", "*"): "leave loss.backward() out of training_step",
    ("LBFGS", "ZeRO", "*"): "needs full parameters",
    ("Complex", "ZeRO", "*"): "cannot train complex parameters",
    ("Sparse", "ZeRO", "*"): "cannot take the sparse gradients",
    ("SpectralNorm", "ZeRO", "bf16-mixed"): "spectral norm",
    ("Penalty", "ZeRO-3", "*"): "must be a matrix",
    ("Sparse", "FSDP", "*"): "cannot take the sparse gradients",
    ("DoubleBackward", "FSDP", "*"): "create_graph=True in the backward of a step",
    ("Sharpness", "FSDP", "*"): "create_graph=True in the backward of a step",
    ("Clamped", "FSDP", "*"): "changed within a step, while gathered",
    ("Masked", "FSDP", "*"): "hooks on parameters (register_hook), which are replaced by shards: net.head.weight",
    ("MaskedLate", "FSDP", "*"): "register_hook on a parameter that is sharded has no effect",
    ("LBFGSManual", "FSDP", "*"): "an optimizer that needs full parameters",
    ("LBFGS", "FSDP", "*"): "evaluates the loss several times a step",
    ("LBFGS", "DDP", "*"): "evaluates the loss several times a step",
    ("BackwardTwice", "DDP", "*"): "averages them in the first backward only",
    ("Heads", "DDP x2", "*"): "find_unused_parameters=True",
    ("Experts", "DDP x2", "*"): "find_unused_parameters=True",
    ("Depth", "DDP x2", "*"): "find_unused_parameters=True",
}
"""Module, the beginning of ways, and precision -> words; the first that fits. "manual": of manual optimization."""
ORDER = {("Heads", way) for way in ("FSDP x2", "FSDP 2x2", "ZeRO-1 x2", "ZeRO-2 x2", "ZeRO-3 x2")}
ORDER |= {("Experts", way) for _, way in ORDER if way != "ZeRO-2 x2"} | {
    ("HeadsManual", way) for way in ("FSDP x2", "FSDP 2x2")
}
"""Processes that call different layers are refused in words, which ends them: these have a start of their own."""
LEFT_OUT = {
    # torch has no kernel for these on the CPU, by hand either.
    *(("Recurrent", way, "bf16-mixed") for way in WAYS),
    *(("Sparse", way, "16-true") for way in WAYS),
    # It is refused before the module is there: for one of them.
    *((name, f"ZeRO-{stage} x2", "16-true") for name in MODULES for stage in (1, 2, 3) if name != "Language"),
    # ZeRO decays a weight that no process has used in a step, and moves it by its momentum.
    *(("Depth", f"ZeRO-{stage} x2", precision) for stage in (1, 2, 3) for precision in DTYPES),
    # gloo ends a process that reduces other gradients before the comparison of their order has told it.
    *(("Experts", "ZeRO-2 x2", precision) for precision in DTYPES),
    # ZeRO keeps frozen 16-bit weights in float32, and computes with what the others would round.
    *(("HalfFrozen", f"ZeRO-{stage} x2", precision) for stage in (1, 2, 3) for precision in DTYPES),
}


def refusal(case: Case) -> str:
    """Return words of the error with which a case is refused; "": it trains."""
    name, way, precision = case
    for (module, ways, in_precision), words in REFUSED.items():
        of_module = module in ("*", name) or (module == "manual" and MODULES[name].manual)
        exactly = way == ways or (way.startswith(ways) and ways != "DDP x2")
        if of_module and exactly and in_precision in ("*", precision):
            return words
    return ""


def pairwise() -> list[Case]:
    """Return cases with each pair of a module and a way, a module and a precision, and a way and a precision."""
    seen: Counter[tuple[str, str]] = Counter()
    cases = []

    def add(module: str, way: str) -> bool:
        left = [case for case in ((module, way, precision) for precision in DTYPES) if case not in LEFT_OUT]
        left = [case for case in left if case not in cases]
        if not left or (module, way) in ORDER:
            return False
        case = min(left, key=lambda case: (seen[module, case[2]], seen[way, case[2]]))
        seen.update([(way, case[2]), (module, case[2])])
        cases.append(case)
        return True

    for module in MODULES:
        for way in (*WHOLE, UNUSED, BLOCKS, *(SPLIT if module in ("Language", "Mixture") else ())):
            add(module, way)
    for way in WAYS:
        while any(not seen[way, precision] for precision in DTYPES) and add("Language", way):
            pass
    return cases


CASES = pairwise()


def readers(way: str) -> int:
    return WAYS[way].processes // WAYS[way].processes_of_a_model


def data(ranks: int, window: int) -> TensorDataset:
    """Return samples, of which each rank reads its part of a batch: of another kind on rank 1 in the first steps."""
    random, batches = torch.Generator().manual_seed(3), STEPS * window
    samples = batches * ranks * MICRO_BATCH
    kinds = torch.zeros(batches, ranks, dtype=torch.long)
    kinds[: batches // 2, 1 % ranks] = 1
    x = torch.randn(samples, WIDTH, generator=random)
    tokens = torch.randint(VOCABULARY, (samples, LENGTH), generator=random)
    return TensorDataset(x, tokens, kinds.repeat_interleave(MICRO_BATCH, 1).flatten())


def build(module: str) -> Realistic:
    torch.manual_seed(1)
    return MODULES[module]()


def trainer_of(case: Case) -> Trainer:
    kind, way, precision = MODULES[case[0]], WAYS[case[1]], case[2]
    if case[1] == BLOCKS:
        way = Way("fsdp", 2, (("auto_wrap_policy", list(kind.blocks)),))
    window: dict[str, Any] = {"accumulate_grad_batches": kind.window, "max_epochs": 1}
    return way.trainer(precision=precision, watchdog_seconds=100, seed=1, **window)


def loader(case: Case) -> DataLoader[Any]:
    return DataLoader(data(readers(case[1]), MODULES[case[0]].window), MICRO_BATCH)


def train(case: Case) -> dict[str, torch.Tensor] | str:
    """Return the full weights after `Trainer.fit`, or the words with which it is refused."""
    steps = 0
    try:
        trainer = trainer_of(case)
        try:
            trainer.fit(build(case[0]), loader(case))
        finally:
            steps = trainer.global_step
    except ConfigError as error:
        return f"after {steps} steps: {error}"
    except Exception:  # of this case alone
        return f"after {steps} steps: {traceback.format_exc()}"
    return trainer.full_state_dict(everywhere=True)


def train_uncaught(case: Case) -> None:
    trainer_of(case).fit(build(case[0]), loader(case))


def by_hand(name: str, ranks: int, precision: str) -> dict[str, torch.Tensor]:
    """Train on one process, with the micro-batches of each rank in turn, and average the gradients over the ranks."""
    module, dtype = build(name), DTYPES[precision]
    mixed, low = precision.endswith("mixed"), precision.endswith("true") and dtype is not torch.float32
    autocast = torch.autocast("cpu", torch.bfloat16, enabled=mixed, cache_enabled=False)
    if low:
        cast(module, dtype)
    x, tokens, kinds = data(ranks, module.window).tensors
    parts = list(zip(*(t.split(MICRO_BATCH) for t in (x.to(dtype) if low else x, tokens, kinds)), strict=True))
    optimizers = module.configure_optimizers()
    for step in range(STEPS):
        numbers = range(step * module.window, (step + 1) * module.window)
        buffers = [[buffer.clone() for buffer in module.buffers()] for _ in range(ranks)]

        def losses_of(rank: int, numbers: range = numbers) -> list[Losses]:
            own = [(parts[number * ranks + rank], number) for number in numbers]
            return [module.losses(x, tokens, int(kinds[0]), number) for (x, tokens, kinds), number in own]

        def closure(turn: int, numbers: range = numbers, buffers: list[Any] = buffers) -> torch.Tensor:
            gradients, total = [], torch.zeros(())
            for rank in range(ranks):
                put(module, buffers[rank])
                module.zero_grad()
                for losses in losses_of(rank):
                    with autocast:
                        loss = module.loss_by_hand(losses, turn) / len(numbers)
                    module.pull(loss)
                    total += loss.detach() / ranks
                gradients.append([parameter.grad for parameter in module.parameters()])
                buffers[rank] = [buffer.clone() for buffer in module.buffers()]
            for parameter, several in zip(module.parameters(), zip(*gradients, strict=True), strict=True):
                there = [gradient for gradient in several if gradient is not None]
                parameter.grad = sum(there[1:], there[0]) / ranks if there else None
            return total

        def together(turn: int) -> None:
            module.zero_grad()
            with autocast:
                module.gradients_by_hand([losses_of(rank) for rank in range(ranks)])

        for turn, optimizer in enumerate(optimizers):
            gradients: Any = closure if module.gradients_by_hand is None else together
            optimizer.step(lambda turn=turn, gradients=gradients: gradients(turn))
        put(module, buffers[0])
    return module.state_dict()


@torch.no_grad()
def put(module: Realistic, values: list[torch.Tensor]) -> None:
    for buffer, value in zip(module.buffers(), values, strict=True):
        buffer.copy_(value)


def cast(module: Realistic, dtype: torch.dtype) -> None:
    """Cast parameters, but not float32 ones beside 16-bit ones; and buffers of torch's own layers."""
    kinds = {parameter.dtype for parameter in module.parameters()}
    for parameter in module.parameters():
        if parameter.is_floating_point() and (parameter.dtype is not torch.float32 or torch.float16 not in kinds):
            parameter.data = parameter.data.to(dtype)
    for layer in module.modules():
        if type(layer).__module__.startswith("torch.nn."):
            for name, buffer in layer.named_buffers(recurse=False):
                setattr(layer, name, buffer.to(dtype))


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    starts: dict[tuple[str, int], list[Case]] = {}
    for case in selected(request, "name", "way", "precision"):
        starts.setdefault((WAYS[case[1]].engine, WAYS[case[1]].processes), []).append(case)
    found: dict[Case, list[Any]] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("runs"))
        for (_, processes), cases in starts.items():
            if processes == 1:
                ranks = [{case: train(case) for case in cases}]
            else:
                ranks = run_distributed(train_all, processes, cases, timeout=60 + 10 * len(cases))
            found.update({case: [rank[case] for rank in ranks] for case in cases})
    return found


def train_all(cases: list[Case]) -> dict[Case, Any]:
    return {case: train(case) for case in cases}


@pytest.mark.parametrize(("name", "way", "precision"), CASES, ids=["-".join((w, m, p)) for m, w, p in CASES])
def test_weights_are_those_of_a_hand_written_loop(name: str, way: str, precision: str, results: Any) -> None:
    ranks, words = results[name, way, precision], refusal((name, way, precision))
    if words:
        for found in ranks:
            assert isinstance(found, str), "it trains"
            assert found.startswith("after 0 steps: "), found
            assert words in found
        return
    module, expected = build(name), by_hand(name, readers(way), precision)
    before, of_rank_0 = module.state_dict(), {key for key, _ in module.named_buffers()}
    low, zero = DTYPES[precision] is not torch.float32 and precision.endswith("true"), "ZeRO" in way
    for number, found in enumerate(ranks):
        assert not isinstance(found, str), found
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            if number > 0 and key in of_rank_0:  # each process has its own, until the next step begins
                continue
            assert found[key].dtype == value.dtype or (zero and low), key
            moved, size = distance(value, before[key]), float(value.abs().max())
            # With 32 bits it is the weights that are rounded, too; and DeepSpeed computes with 16 bits of them.
            rounded = moved + size * (precision != "bf16-mixed" or zero)
            bound = ROUNDINGS * torch.finfo(DTYPES[precision]).eps * rounded
            assert distance(found[key], value) <= bound, f"{key} on rank {number}: {moved=}, {size=}, {bound=}"


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    kind = torch.complex128 if one.is_complex() else torch.float64
    return float((one.to(kind) - other.to(kind)).abs().max())


@pytest.mark.parametrize(("name", "way"), sorted(ORDER), ids=[f"{way}-{name}" for name, way in sorted(ORDER)])
def test_processes_that_use_different_layers_are_refused(name: str, way: str) -> None:
    with pytest.raises(AssertionError, match="have to come to the parts of the module in one order"):
        run_distributed(train_uncaught, WAYS[way].processes, (name, way, "32-true"))


def warnings_of(case: Case) -> list[str]:
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("trainer").addHandler(handler)
    train_uncaught(case)
    return [text for text in said if "weight decay and momentum" in text]


@pytest.mark.parametrize("way", ["ZeRO-1 x2", "ZeRO-2 x2", "ZeRO-3 x2"])
def test_that_zero_moves_what_a_step_has_not_used_is_said_once(way: str) -> None:
    """The reason why these cases are left out."""
    used, unused = [run_distributed(warnings_of, 2, (name, way, "32-true"))[0] for name in ("Plain", "Depth")]
    assert used == []
    assert len(unused) == 1
    assert "no backward of this step has used net.blocks.0." in unused[0]


def test_each_pair_of_the_table_has_a_case() -> None:
    missing = {(m, w) for m in MODULES for w in (*WHOLE, UNUSED, BLOCKS)} - ORDER - {(m, w) for m, w, _ in CASES}
    assert {m for m, _ in missing} == {"Depth", "Experts", "HalfFrozen"}
    assert {w for _, w in missing} == {"ZeRO-1 x2", "ZeRO-2 x2", "ZeRO-3 x2"}
    assert {(w, p) for _, w, p in CASES} == {(w, p) for w in WAYS for p in DTYPES}
    without = {(m, p) for m in MODULES for p in DTYPES} - {(m, p) for m, _, p in CASES}
    assert without == {("Recurrent", "bf16-mixed"), ("Sparse", "16-true")}
