"""The environment variables that launchers set for their processes."""

from __future__ import annotations

TORCHRUN = {
    "RANK": "5",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "8",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "MASTER_ADDR": "localhost",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RESTART_COUNT": "2",
}
# As Slurm 22.05 sets them (its allocation's first, then what srun adds for a task).
ALLOCATION = {"SLURM_JOB_ID": "74", "SLURM_NTASKS": "5", "SLURM_JOB_NODELIST": "node[08-10]"}
BATCH = {**ALLOCATION, "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_TASK_PID": "3023"}
SRUN = {
    **ALLOCATION,
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
    "SLURM_STEP_NODELIST": "node[08-10]",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "MASTER_ADDR": "node1",
    "MASTER_PORT": "29500",
}
MVAPICH = {name.replace("OMPI_", "MV2_"): value for name, value in OPEN_MPI.items()}
HYDRA = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2", "MASTER_PORT": "29500"}
KUBEFLOW = {
    "PET_NNODES": "4",
    "PET_NPROC_PER_NODE": "1",
    "RANK": "2",
    "WORLD_SIZE": "4",
    "MASTER_ADDR": "job-master-0",
    "MASTER_PORT": "23456",
}

_OF_RANK_3 = {"RANK": "3", "SIZE": "4", "LOCAL_RANK": "1", "LOCAL_SIZE": "2"}
_NODE1 = {"MASTER_ADDR": "node1", "MASTER_PORT": "29500"}
JSRUN = {"LSB_JOBID": "7", **{f"JSM_NAMESPACE_{name}": value for name, value in _OF_RANK_3.items()}, **_NODE1}
HOROVODRUN = {"HOROVOD_RANK": "1", "HOROVOD_SIZE": "2", "HOROVOD_LOCAL_RANK": "1", "HOROVOD_LOCAL_SIZE": "2"}
PALS = {
    "PALS_RANKID": "3",
    "PMI_RANK": "3",
    "PMI_SIZE": "4",
    "PALS_LOCAL_RANKID": "1",
    "PALS_LOCAL_SIZE": "2",
    **_NODE1,
}
FLUX = {"FLUX_TASK_RANK": "3", "FLUX_JOB_SIZE": "4", "FLUX_TASK_LOCAL_ID": "1", "FLUX_JOB_NNODES": "2", **_NODE1}
DEEPSPEED = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_SIZE": "2", "CROSS_SIZE": "2", **_NODE1}
OLD_SRUN = {
    name.replace("_STEP_NUM_TASKS", "_NTASKS").replace("_STEP_TASKS_PER", "_TASKS_PER"): value
    for name, value in SRUN.items()
}
