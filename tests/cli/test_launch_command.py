"""`trainer launch` and `trainer env`, with real processes where they start any."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.launcher_variables import OPEN_MPI, SRUN, TORCHRUN
from tests.helpers.processes import ROOT, alive, descendants, run_python, start_python, wait_until
from tests.helpers.project import Command
from tests.helpers.training import EVERY, make, steps_of, weights_of
from trainer.testing.processes import rank_of

SAYS = """
import os, sys
from trainer.distributed.environment import detect_environment
e = detect_environment()
threads = os.environ["OMP_NUM_THREADS"]
print("process", e.rank, e.world_size, e.local_rank, e.num_nodes, threads, sys.argv[1:], flush=True)
"""


def test_a_script_with_its_arguments(tmp_path: Path) -> None:
    (tmp_path / "says.py").write_text(SAYS)
    arguments = ["--nproc-per-node=2", "says.py", "--nnodes", "7", "a b", "$x"]
    result = run_python("-m", "trainer", "launch", *arguments, cwd=tmp_path).check()
    assert sorted(result.stdout.splitlines()) == [
        f"process {rank} 2 {rank} 1 1 ['--nnodes', '7', 'a b', '$x']" for rank in (0, 1)
    ]
    assert result.stderr == ""


def test_a_module_and_the_variables_of_a_pod(tmp_path: Path) -> None:
    (tmp_path / "says.py").write_text(SAYS)
    env = {"PET_NPROC_PER_NODE": "2", "PET_NNODES": "1", "PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}"}
    result = run_python("-m", "trainer", "launch", "-m", "says", "x", cwd=tmp_path, env=env).check()
    assert sorted(result.stdout.splitlines()) == [f"process {rank} 2 {rank} 1 1 ['x']" for rank in (0, 1)]


def test_a_trainer_command(project: Path) -> None:
    arguments = ["launch", "--nproc-per-node", "2", "trainer", "fit", "--module", "mymodel.py:Net", "--data"]
    more = ["mymodel.py:Data", "--trainer.max_steps", "2", "--trainer.logger", "false"]
    result = run_python("-m", "trainer", *arguments, *more, cwd=project).check()
    assert "after 2 steps" in result.stdout
    assert (project / "runs" / "version_0" / "checkpoints").is_dir()


def test_a_failing_process_decides_the_exit_code(tmp_path: Path) -> None:
    (tmp_path / "fails.py").write_text(
        "import os, sys, time\nif os.environ['RANK'] == '1': sys.exit(7)\ntime.sleep(3600)\n"
    )
    run_python("-m", "trainer", "launch", "--nproc-per-node", "2", "fails.py", cwd=tmp_path).check(7)


@pytest.mark.skipif(sys.platform != "linux", reason="needs PR_SET_PDEATHSIG")
def test_processes_of_any_program_end_with_a_launcher_that_is_killed(tmp_path: Path) -> None:
    (tmp_path / "sleeps.py").write_text("import time\nprint('sleeping', flush=True)\ntime.sleep(3600)\n")
    running = start_python("-m", "trainer", "launch", "--nproc-per-node", "2", "sleeps.py", cwd=tmp_path)
    running.wait_for("sleeping", count=2)
    workers = descendants(running.pid)
    running.process.kill()
    running.wait()
    assert len(workers) == 2
    wait_until(lambda: not any(alive(pid) for pid in workers))


def test_a_killed_worker_costs_one_interval_and_changes_no_bit(tmp_path: Path) -> None:
    uninterrupted, script = make(tmp_path / "uninterrupted"), make(tmp_path / "broken")
    steps = str(6 * EVERY)
    launcher = ("-m", "trainer", "launch", "--nproc-per-node", "2")
    run_python(*launcher, str(uninterrupted), str(uninterrupted.parent / "out"), steps, "0", cwd=tmp_path).check()
    out = script.parent / "out"
    running = start_python(*launcher, "--max-restarts", "1", str(script), str(out), steps, "0.05", cwd=tmp_path)
    wait_until(lambda: len(steps_of(out)) >= 2 * EVERY + 2, what=str(running))
    os.kill(rank_of(running.pid, 1), signal.SIGKILL)
    result = running.wait().check()
    assert "rank 1 was ended by SIGKILL" in result.stderr
    assert "starting all processes again (1 of 1)" in result.stderr
    done = steps_of(out)
    repeated = len(done) - len(set(done))
    assert sorted(set(done)) == list(range(1, 6 * EVERY + 1))
    assert repeated <= EVERY
    assert weights_of(out) == weights_of(uninterrupted.parent / "out")


def test_torchruns_command_of_the_page(tmp_path: Path) -> None:
    """tests/test_docs.py runs the other commands, which begin with `trainer`."""
    page = (ROOT / "docs" / "launch.md").read_text().splitlines()
    commands = [line.split() for line in page if line.startswith(".venv/bin/torchrun")]
    assert len(commands) == 1
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    result = run_python("-m", "torch.distributed.run", "--standalone", *commands[0][1:], cwd=tmp_path)
    assert (tmp_path / "runs" / "digits" / "version_0" / "checkpoints").is_dir(), result
    result.check()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "nothing to launch: give a script, -m MODULE or a trainer command"),
        (["gone.py"], "there is no script 'gone.py'"),
        (["--num_processes", "2", "mymodel.py"], "Use --nproc-per-node N: processes on this machine"),
        (["--master-addr", "a", "mymodel.py"], "unknown option '--master-addr'. Use --rdzv HOST:PORT"),
        (["--main_process_ip", "a", "--main_process_port", "1", "mymodel.py"], "Use --rdzv HOST:PORT"),
        (["--main_process_port=1", "mymodel.py"], "Use --rdzv HOST:PORT, the same on all machines"),
        (["--num_machines", "2", "mymodel.py"], "Use --nnodes N"),
        (["--multi_gpu", "mymodel.py"], "Use nothing: one process is started for each GPU"),
        (["--config_file", "a.yaml", "mymodel.py"], "`trainer config --from FILE` translates a file of Accelerate"),
        (["--mixed_precision", "bf16", "mymodel.py"], "Use Trainer(precision='bf16-mixed')"),
        (["--rdzv-backend", "etcd", "mymodel.py"], "invalid choice: 'etcd'. Known: c10d."),
        (["--print", "mymodel.py"], "--print: for a file for sbatch, which --slurm --print writes"),
        (["--nodes", "2", "--partition", "gpu", "mymodel.py"], "--partition: for a file for sbatch"),
        (["gone.py"], "there is no script"),
        (["mypackage.train"], "Is it a module? Write -m before it."),
        (["--nproc-per-nod", "2", "mymodel.py"], "unknown option '--nproc-per-nod'. Did you mean '--nproc-per-node'?"),
        (["--devices", "2", "mymodel.py"], "unknown option '--devices'. Use --nproc-per-node N: processes on this"),
        (["--gpus=2", "mymodel.py"], "Use --nproc-per-node N"),
        (["--nproc-per-node", "two", "mymodel.py"], "--nproc-per-node two: give a number from 1, gpu, cpu or auto"),
        (
            ["--nnodes", "2", "mymodel.py"],
            "--nnodes 2 machines have to meet: give HOST:PORT, such as node1:29500, to --rdzv",
        ),
        (["--nnodes", "4:2", "--rdzv", "a:1", "mymodel.py"], "--nnodes: '4:2': give a number of machines from 1, or"),
        (["--nnodes", "2", "--rdzv", "a:b", "mymodel.py"], "'a:b': give HOST:PORT"),
        (
            ["--nnodes", "2", "--rdzv", "a", "--node-rank", "2", "mymodel.py"],
            "--node-rank 2: give a number from 0 to 1",
        ),
        (["--rdzv-conf", "wait=3", "mymodel.py"], "'wait=3': give KEY=SECONDS with one of join_timeout"),
        (["--max-restarts", "-1", "mymodel.py"], "'-1': give a number from 0"),
        (["--slurm", "mymodel.py"], "--slurm writes a file for sbatch, and starts nothing: add --print"),
        (["--slurm", "--print", "--nodes", "0", "mymodel.py"], "--nodes: '0': give a number from 1"),
        (["--slurm", "--print", "--rdzv", "a:1", "mymodel.py"], "the machines are --nodes and meet by themselves"),
    ],
)
def test_wrong_command_lines(command: Command, arguments: list[str], message: str) -> None:
    code, out, err = command("launch", *arguments)
    assert (code, out) == (2, "")
    assert message in err
    assert "Traceback" not in err


def test_a_rendezvous_port_that_is_taken_is_reported(project: Path) -> None:
    import socket

    with socket.socket() as listener:
        listener.bind(("", 0))
        listener.listen()
        port = listener.getsockname()[1]
        arguments = ["--nnodes", "2", "--node-rank", "0", "--rdzv", f"127.0.0.1:{port}", "mymodel.py"]
        result = run_python("-m", "trainer", "launch", *arguments, cwd=project).check(1)
    assert f"port {port} of {socket.gethostname()} (--rdzv 127.0.0.1:{port}) cannot be opened" in result.stderr


def test_help_has_examples_and_needs_no_torch(command: Command) -> None:
    for name in ("launch", "env"):
        code, out, _ = command(name, "--help")
        assert code == 0
        assert f"examples:\n  trainer {name}" in out
    code = (
        "import sys\nfrom trainer.cli.main import main\nmain(['launch', '--help'])\nassert 'torch' not in sys.modules\n"
    )
    assert run_python(code).check().stdout


def sbatch(command: Command, *arguments: str) -> str:
    code, out, err = command("launch", "--slurm", "--print", *arguments)
    assert (code, err) == (0, "")
    # The shell checks the syntax, without running the file.
    subprocess.run(["bash", "-n"], input=out, text=True, check=True)
    return out


def test_a_file_for_sbatch_with_one_task_per_gpu(command: Command) -> None:
    text = sbatch(
        command,
        "--nodes",
        "4",
        "--gpus-per-node",
        "8",
        "--time",
        "24:00:00",
        "--partition",
        "a100",
        "mymodel.py",
        "a b",
    )
    for line in (
        "#SBATCH --nodes=4",
        "#SBATCH --ntasks-per-node=8",
        "#SBATCH --gpus-per-node=8",
        "#SBATCH --time=24:00:00",
        "#SBATCH --partition=a100",
        "#SBATCH --signal=USR1@120",
        "#SBATCH --requeue",
        "#SBATCH --open-mode=append",
        "export TRAINER_REQUEUE=1",
        f"srun --kill-on-bad-exit=1 {sys.executable} mymodel.py 'a b'",
    ):
        assert line in text.splitlines(), line


def test_a_file_for_sbatch_with_restarts_starts_a_launcher_on_each_machine(command: Command) -> None:
    arguments = ["--nodes", "2", "--gpus-per-node", "8", "--max-restarts", "3", "--cpus-per-task", "16"]
    text = sbatch(command, *arguments, "trainer", "fit", "--config", "run.yaml")
    assert "#SBATCH --ntasks-per-node=1" in text.splitlines()
    assert f"srun --kill-on-bad-exit=1 --cpus-per-task=16 {sys.executable} -m trainer launch --nnodes 2 " in text
    assert "--nproc-per-node 8" in text
    assert "--max-restarts 3" in text
    assert text.rstrip().endswith("trainer fit --config run.yaml")


def test_env_says_who_decided_and_why(command: Command) -> None:
    code, out, _ = command("env")
    assert code == 0
    assert "a single process" in out
    assert "Slurm       no: no SLURM_JOB_ID" in out
    assert "torch 2." in out


@pytest.mark.parametrize(
    ("variables", "line", "answers"),
    [
        (TORCHRUN, "torchrun: rank 5 of 8, on this machine 1 of 4, machine 1 of 2, rendezvous at localhost:29500", {}),
        (
            SRUN,
            "Slurm: rank 3 of 5, on this machine 1 of 2, machine 1 of 3, rendezvous at node08:",
            {"torchrun": "no: RANK"},
        ),
        ({**SRUN, **OPEN_MPI}, "mpirun (Open MPI): rank 3 of 4", {"Slurm": "yes"}),
    ],
)
def test_env_in_other_surroundings(
    variables: dict[str, str], line: str, answers: dict[str, str], command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    both = {bool(option): command("env", *option)[1] for option in ([], ["--json"])}
    assert line in both[False]
    for source, answer in answers.items():
        assert f"  {source:<12}{answer}" in both[False]
    found = json.loads(both[True])
    assert found["started_by"]["source"] in line
    assert next(source["name"] for source in found["sources"] if source["answer"] == "yes").split()[0] in line


def test_env_reports_a_contradiction(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    code, out, _ = command("env")
    assert code == 2
    assert "error: WORLD_SIZE=2 set, but not RANK" in out
