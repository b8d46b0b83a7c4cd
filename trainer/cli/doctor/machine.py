"""Check this machine: versions, compilers, devices, memory, limits, network, clock."""

from __future__ import annotations

import os
import re
import resource
import shutil
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

from trainer.cli.collisions import collisions
from trainer.cli.doctor.results import CheckResult, check_result, gib
from trainer.cli.env import versions
from trainer.distributed.store import free_port
from trainer.errors import install_command
from trainer.launchers.launcher import usable_cores

EXTRAS = {
    "tensorboard": "logs for TensorBoard",
    "torchmetrics": "torchmetrics objects in self.log",
    "deepspeed": "the strategies deepspeed_stage_1 to 3",
}
"""Optional packages and their purpose."""
ENOUGH_SHM = 2**30
ENOUGH_FILES = 4096
ENOUGH_MEMORY = 2 * 2**30


def machine() -> Iterator[CheckResult]:
    """Run the checks that write nothing and need no other process."""
    yield from _versions()
    yield from _compilers()
    yield from devices()
    yield matrix_products()
    yield from _memory()
    yield from _limits()
    yield from _network()


def _versions() -> Iterator[CheckResult]:
    installed = versions()
    yield CheckResult("OK", "python", f"{installed['python']}, {sys.executable}")
    yield CheckResult("OK", "torch", str(installed["torch"]))
    for collision in collisions():
        yield CheckResult("WARN", "import name", collision)
    for package, gives in EXTRAS.items():
        missing = f"not installed, and not needed unless you want {gives}: {install_command(package)}"
        yield CheckResult("OK", package, installed[package] or missing)


def _compilers() -> Iterator[CheckResult]:
    compiler = os.environ.get("CXX", "g++")
    path = shutil.which(compiler.split()[0])
    missing = f"no {compiler}: compile= does not work on the CPU, nor what DeepSpeed compiles (CPUAdam, nvme)"
    yield check_result("WARN", path is None, "compiler", path or missing, "apt install g++, or set CXX.")
    if versions()["deepspeed"] is not None:
        ninja = shutil.which("ninja")
        missing = "is not on the PATH: DeepSpeed cannot compile its operators"
        fix = "pip install ninja, in an active environment."
        yield check_result("WARN", ninja is None, "ninja", ninja or missing, fix)


def devices() -> Iterator[CheckResult]:
    """Check that torch can use the accelerators."""
    import torch

    for number in range(torch.cuda.device_count()):
        yield _gpu(number)
    if torch.cuda.is_available():
        return
    if any(Path(driver).exists() for driver in ("/dev/nvidia0", "/dev/kfd")):
        built = torch.version.cuda or torch.version.hip or "the CPU alone"
        fix = "Look at nvidia-smi and CUDA_VISIBLE_DEVICES; a driver that is too old for this torch is the usual cause."
        yield CheckResult("FAIL", "devices", f"there is a GPU, but torch (built for {built}) sees none.", fix)
        return
    found = "mps" if torch.backends.mps.is_available() else "no accelerator: everything runs on the CPU"
    yield CheckResult("OK", "devices", found)


def _gpu(number: int) -> CheckResult:
    """Check that torch has code for a GPU, and that its memory is free."""
    import torch

    properties = torch.cuda.get_device_properties(number)
    free, total = torch.cuda.mem_get_info(number)
    text = f"{properties.name}, {gib(free)} of {gib(total)} are free"
    architectures = " ".join(torch.cuda.get_arch_list())
    newest = max([int(found) // 10 for found in re.findall(r"_(\d+)", architectures)], default=properties.major)
    if properties.major > newest:
        fix = f"This torch is built for {architectures}: install a newer one."
        return CheckResult("FAIL", f"cuda:{number}", f"{text}; its compute capability is unknown to torch.", fix)
    used = "Somebody else uses it: nvidia-smi shows who."
    return check_result("WARN", free < total / 2, f"cuda:{number}", text, used)


def matrix_products() -> CheckResult:
    """Measure the speed of matrix products, which a model's FLOP/s are compared with, on the first device."""
    import torch

    from trainer.model.peak_flops import measured_peak, peak_of

    device = torch.device(torch.accelerator.current_accelerator(check_available=True) or "cpu")
    speeds = []
    for dtype in (torch.float32, torch.bfloat16):
        try:
            speed = measured_peak(device, dtype)
        except RuntimeError as error:
            found = f"a product in {dtype} fails on {device}: {str(error).splitlines()[0]}"
            return CheckResult("WARN", "matrices", found, "See the devices.")
        vendor = peak_of(device, dtype)
        of = "" if vendor is None else f" of the vendor's {vendor / 1e12:g}"
        speeds.append(f"{str(dtype).removeprefix('torch.')} {speed / 1e12:.3g}{of} TFLOP/s")
    return CheckResult("OK", "matrices", f"measured by a product on {device}: {', '.join(speeds)}")


def _memory() -> Iterator[CheckResult]:
    from trainer.model.memory_limit import free_memory

    cores, free = usable_cores(), free_memory()
    if free is None:
        yield CheckResult("OK", "cpu", f"{cores} cores for this process")
        return
    text = f"{cores} cores for this process, {gib(free)} of memory are free"
    yield check_result("WARN", free < ENOUGH_MEMORY, "memory", text, "Each process needs about 1 GiB for torch alone.")


def _limits() -> Iterator[CheckResult]:
    shm = Path("/dev/shm")
    if shm.is_dir():
        free = shutil.disk_usage(shm).free
        use = "for DataLoader workers, which hand batches over in it; when it is full, 'Bus error'"
        fix = "Start the container with --shm-size=8g or --ipc=host."
        yield check_result("WARN", free < ENOUGH_SHM, "/dev/shm", f"{gib(free)} are free {use}", fix)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = soft != resource.RLIM_INFINITY and soft < ENOUGH_FILES
    number = hard if 0 < hard < 65536 else 65536
    fix = f"Many DataLoader workers may need more ('Too many open files'): ulimit -n {number}"
    yield check_result("WARN", few, "open files", f"{soft if few else 'enough'} at once", fix)


def _network() -> Iterator[CheckResult]:
    try:
        port = free_port()
        with socket.socket() as server:
            server.bind(("127.0.0.1", port))
            server.listen(1)
            socket.create_connection(("127.0.0.1", port), timeout=5).close()
        yield CheckResult("OK", "port", f"processes can meet on this machine (port {port} is free)")
    except OSError as error:
        fix = "A firewall or a sandbox forbids connections on 127.0.0.1, which local processes need."
        yield CheckResult("FAIL", "port", f"a connection to this machine itself fails: {error}.", fix)
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except OSError as error:
        fix = f"Add '127.0.0.1 {name}' to /etc/hosts; with several machines, give addresses in numbers to --rdzv."
        yield CheckResult("WARN", "host name", f"{name} means no machine: {error}.", fix)
        return
    alone = address.startswith("127.")
    fix = "Other machines do not find this one by that address: give --rdzv another one."
    yield check_result("NOTE", alone, "host name", f"{name} is {address}", fix)
