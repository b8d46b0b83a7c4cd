"""`trainer doctor` reports what works, what does not, and how to fix it; and it leaves no files."""

from __future__ import annotations

import json
import os
import shutil
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.helpers.processes import fork_python, run_distributed, run_python
from trainer.cli.doctor import collectives as doctor_ranks
from trainer.cli.doctor import disk as doctor_disk
from trainer.cli.doctor import machine as doctor_machine
from trainer.cli.doctor.results import CheckResult, summary


def of(results: Any, subject: str) -> CheckResult:
    found: CheckResult = next(result for result in results if result.subject == subject)
    return found


def test_this_machine_is_well_and_one_step_of_the_real_module_runs(project: Path) -> None:
    options = ["--module", "mymodel.py:Net", "--data", "mymodel.py:Data", "--trainer.default_root_dir", "out/runs"]
    before = sorted(path.name for path in project.iterdir())
    result = fork_python("-m", "trainer", "doctor", "--json", *options, cwd=project).wait().check(0)
    found = json.loads(result.stdout)
    assert found["ok"]
    results = {check["subject"]: check for check in found["checks"]}
    assert results["collectives"]["found"].startswith("2 processes on ")
    assert "right numbers" in results["collectives"]["found"]
    assert "every bit the same" in results["checkpoint"]["found"]
    assert results["one step"]["status"] == "OK"
    left = [path.name for path in project.iterdir() if not path.name.startswith(("__pycache__", "output-"))]
    assert sorted(left) == before


def test_processes_that_are_there_already_take_part_and_one_speaks(project: Path) -> None:
    before = sorted(path.name for path in project.iterdir())
    command = ("-m", "trainer", "launch", "--nproc-per-node", "2", "trainer", "doctor", "--devices", "7")
    result = run_python(*command, cwd=project).check(0)
    lines = [line for line in result.stdout.splitlines() if line.startswith(("OK", "WARN", "FAIL"))]
    assert [line.split()[1] for line in lines].count("python") == 1
    assert sum("collectives   2 processes on " in line and "right numbers" in line for line in lines) == 1
    left = [path.name for path in project.iterdir() if not path.name.startswith(("__pycache__", "output-"))]
    assert sorted(left) == before


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        ("self.layr(batch[0])", "has no attribute 'layr'"),
        ("(self.layer(batch[0]) * float('nan'))", "requires_grad=True, finite=False"),
        ("__import__('os').kill(__import__('os').getpid(), 9)", "trainer fit was killed by SIGKILL"),
    ],
)
def test_a_module_that_fails_is_reported_with_its_error(project: Path, mistake: str, message: str) -> None:
    broken = (project / "mymodel.py").read_text().replace("loss = self.layer(batch[0])", f"loss = {mistake}")
    (project / "broken.py").write_text(broken)
    options = ["--module", "broken.py:Net", "--data", "broken.py:Data", "--devices", "1"]
    result = fork_python("-m", "trainer", "doctor", *options, cwd=project).wait().check(1)
    line = next(line for line in result.stdout.splitlines() if line.startswith("FAIL"))
    assert "one step" in line
    assert message in line
    assert "To see all of it: python -m trainer fit" in line


# -- each thing that can be wrong --------------------------------------------------------------------------------------


def test_what_is_missing_is_reported_with_what_to_type(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda *args, **more: None)
    results = list(doctor_machine._compilers())
    assert of(results, "compiler").fix.startswith("apt install g++")
    monkeypatch.setattr(doctor_machine, "versions", lambda: defaultdict(lambda: None))
    assert 'pip install "torchmetrics>=1.6.2"' in of(doctor_machine._versions(), "torchmetrics").found


def test_small_shared_memory_and_few_files_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    import resource

    if not Path("/dev/shm").is_dir():
        pytest.skip("this system has no /dev/shm")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(total=2**26, free=2**26))
    monkeypatch.setattr(resource, "getrlimit", lambda which: (1024, 4096))
    results = list(doctor_machine._limits())
    assert of(results, "/dev/shm").line() == (
        "WARN  /dev/shm      64 MiB are free for DataLoader workers, which hand batches over in it; when it is full, "
        "'Bus error'. Start the container with --shm-size=8g or --ipc=host."
    )
    assert of(results, "open files").fix.endswith("ulimit -n 4096")


@pytest.mark.parametrize(("address", "status"), [("127.0.1.1", "NOTE"), ("10.1.2.3", "OK")])
def test_a_host_name_that_only_this_machine_understands_is_noted(
    monkeypatch: pytest.MonkeyPatch, address: str, status: str
) -> None:
    monkeypatch.setattr("socket.gethostbyname", lambda _: address)
    results = list(doctor_machine._network())
    assert results[-1].status == status
    assert summary(results) == ("1 OK, 1 NOTE, 0 WARN, 0 FAIL" if status == "NOTE" else "2 OK, 0 WARN, 0 FAIL")


def test_a_location_that_cannot_be_written_fails(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    results = list(doctor_disk.disk(tmp_path / "file" / "runs"))
    assert [result.status for result in results] == ["FAIL"]
    assert "--trainer.default_root_dir" in results[0].fix


def test_a_disk_that_loses_data_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import trainer.checkpoint.writing as writing

    write = writing.write_checkpoint

    def losing(path: Any, state: Any) -> None:
        write(path, state)
        file = Path(path) / "model.safetensors"
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)

    monkeypatch.setattr(writing, "write_checkpoint", losing)
    result = doctor_disk._checkpoint(tmp_path)
    assert result.status == "FAIL"
    assert "model.safetensors" in result.found


def test_file_systems_are_known_by_the_innermost_mount(tmp_path: Path) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_text("/dev/a / ext4 rw 0 0\nserver:/home /home nfs4 rw 0 0\nx /home/me\\040too fuse.sshfs rw 0 0\n")
    kinds = [doctor_disk.file_system(Path(p), mounts) for p in ("/tmp/x", "/home/you", "/home/me too/runs", "/homes")]
    assert kinds == ["ext4", "nfs4", "fuse.sshfs", "ext4"]


def exchange_and_look() -> tuple[list[str], bool]:
    return doctor_ranks.exchange(megabytes=1)["wrong"], torch.distributed.is_initialized()


def test_no_group_is_left_whose_threads_could_abort_a_process_that_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_distributed(exchange_and_look) == [([], False)] * 2


def test_an_interface_that_is_not_there_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nowhere0")
    result = doctor_ranks.collectives(2)
    assert result.status == "FAIL"
    assert "cannot exchange tensors" in result.found
    assert "GLOO_SOCKET_IFNAME" in result.fix
    assert os.environ["GLOO_SOCKET_IFNAME"] == "nowhere0"
