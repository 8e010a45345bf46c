"""Runs that end because of a rank: its code, its memory, its disk or its config."""

import re
import shutil

from tests.on_slurm import survival
from tests.on_slurm.broken_cases import (
    GROUP,
    ONCE,
    TIMEOUT_S,
    broken,
    broken_scripts,
    changed_host,
    command_run,
    end_of,
    failed_command,
    hidden,
    on_host,
    over,
    running,
    training,
)
from tests.on_slurm.login import HOLD, Login, settings, wait_for
from tests.on_slurm.shared_disk import shared_small_disk
from tests.support.disks import fill
from trainkit.run.rundir import RunDir

# A rank fails.


@broken("killed", 1, 2)
def rank_killed(login: Login) -> RunDir:
    """The other rank reports lost connections."""
    run = running(login)
    survival.kill_rank(run, 1)
    return end_of(login, run)


@broken("missing-file", 1, 2)
def data_on_one_host(login: Login) -> RunDir:
    """The data is on a disk of the first host, and was not copied to the second host."""
    (login.cluster.local_disk(1) / "train.bin").write_text("tokens")
    return failed_command(login, GROUP + "open('/var/tmp/train.bin').read()\ndist.barrier()")


@broken("missing-file", 1, 2)
def training_data_on_one_host(login: Login) -> RunDir:
    config = survival.survivor_config(login.folder)
    (login.folder / "data").mkdir()
    text = shutil.copy(login.folder / "text.txt", login.folder / "data/text.txt")
    with hidden(login, 2, login.folder / "data"):
        run = login.submit(*ONCE, *settings(f"data.source={text}"), config=config)
        return end_of(login, run)


@broken("host-oom", cgroups=True)
def memory_of_the_agents(login: Login) -> RunDir:
    """Shared memory is not freed with its rank, so the kernel kills the agent too."""
    code = (
        "if rank == 1:\n  with open('/dev/shm/fill', 'wb') as f:\n    while True: f.write(b'x' * (1 << 20))\n"
    )
    run = command_run(login, code + "signal.pause()", *settings("resources.mem=300M"), "--per", "node")
    return over(login, run)


@broken("hang", 1, 2)
def rank_stopped(login: Login) -> RunDir:
    run = running(login, *settings("requeue.hang_min_s=8", "requeue.hang_factor=2"))
    survival.pause([survival.ranks_of(run)[1]])
    return end_of(login, run)


# These runs fail because of disks, checkpoints or configs.


@broken("disk-full", 0, 1)
def checkpoint_on_a_full_disk(login: Login) -> RunDir:
    """The disk of the run folder has no space for a checkpoint."""
    with shared_small_disk(login.cluster, login.folder / "disk", "8m") as disk:
        run = training(login, "--run-dir", str(disk / "run"), num_steps=40)
        survival.wait_for_steps(run, 1, 1)
        filler = fill(disk, 64_000)
        job_id = login.job_id(run)
        wait_for(lambda: job_id not in login.jobs(), "the end of the job", TIMEOUT_S, 1)
        filler.unlink()
        kept = login.folder / "kept"
        shutil.copytree(run.path, kept / "run", symlinks=True)
    (login.folder / "disk").rmdir()
    kept.rename(login.folder / "disk")
    return run


@broken("read-only", 0, 1)
def checkpoint_on_a_read_only_disk(login: Login) -> RunDir:
    """The file system of the checkpoints becomes read-only, as after an error of the disk."""
    run = training(login, num_steps=60)
    survival.wait_for_steps(run, 1, 3)
    folder = str(run.checkpoints_dir)
    on_host(login, 1, "mount", "--bind", folder, folder)
    try:
        on_host(login, 1, "mount", "-o", "remount,bind,ro", folder)
        return end_of(login, run)
    finally:
        login.cluster.run(["umount", "--lazy", folder], host=1)


@broken("diverged")
def diverged_on_two_hosts(login: Login) -> RunDir:
    return end_of(login, training(login, *settings("optimizer.lr=1e30"), num_steps=100))


@broken("shape-mismatch")
def resumed_with_another_model(login: Login) -> RunDir:
    """The run starts from the weights of another run, whose model is narrower."""
    first = training(login, *settings("train.steps=3", "train.global_batch_size=32"))
    login.finish(first)
    weights = settings(f"model.init_from={first.path}", "model.dim=96")
    run = login.submit(*ONCE, "--name", "wider", *weights, config=login.folder / "survivor.yaml")
    return end_of(login, run)


SMALL_SHM = ["mount", "-o", "remount,size=64k", "/dev/shm"]
LARGE_SHM = ["mount", "-o", "remount,size=1g", "/dev/shm"]


@broken("shared-memory", 1, 2)
def shared_memory_full(login: Login) -> RunDir:
    """The /dev/shm of the second host is too small when the ranks start."""
    with changed_host(login, 2, SMALL_SHM, LARGE_SHM):
        return failed_command(login, "signal.pause()")


@broken("shared-memory", 1, 2)
def shared_memory_of_a_loader(login: Login) -> RunDir:
    """A loader process passes its batches through a /dev/shm of 64 KiB on the second host."""
    code = GROUP + f"import subprocess\nif rank == 1: subprocess.run({SMALL_SHM}, check=True)\n"
    code += "from torch.utils.data import DataLoader\ndata = [torch.zeros(1 << 20)] * 8\n"
    code += "if __name__ == '__main__':\n  for batch in DataLoader(data, num_workers=1): dist.barrier()"
    try:
        return failed_command(login, code)
    finally:
        login.cluster.run(LARGE_SHM, host=2)


@broken("bad-config")
def config_edited(login: Login) -> RunDir:
    """The config of the run is edited while the job waits."""
    run = training(login, *HOLD)
    files = [run.config_file, *run.path.glob("attempts/*/config.yaml")]
    for file in files:
        if file.exists():
            file.write_text(re.sub(r"log_every: 1\b", "log_every: often", file.read_text()))
    login.run(["scontrol", "release", login.job_id(run)], check=True)
    return over(login, run)


broken_scripts(
    """
command-rank-killed killed 1 2
    GROUP
    if rank == 1: os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()
rank-segfault killed 1 2
    GROUP
    if rank == 1:
        import ctypes; ctypes.string_at(0)
    dist.barrier()
exception-on-one-rank exception 1 2
    GROUP
    if rank == 1: raise ValueError('12 labels for 10 classes')
    dist.barrier()
torchrun-exception exception 1 2 --launcher torchrun
    GROUP
    if rank == 1: raise KeyError('labels')
    dist.barrier()
torchrun-rank-killed killed 2 2 --launcher torchrun --gpus-per-node 2
    # One of two ranks of the second host's torchrun.
    GROUP
    if rank == 2: os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()
torchrun-import import-error 3 2 --launcher torchrun --gpus-per-node 2
    GROUP
    if rank == 3: import a_package_that_is_not_there
    dist.barrier()
memory host-oom 1 2 --set resources.mem=300M
    # Rank 1 uses more than the memory of the job, and the kernel kills it.
    if rank == 1: kept = [bytearray(1 << 26) for _ in range(64)]
    signal.pause()
memory-per-node host-oom 1 2 --set resources.mem=300M --per node
    if rank == 1: kept = [bytearray(1 << 26) for _ in range(64)]
    signal.pause()
command-silent hang - - --set requeue.silence_s=10
    # Rank 1 of a script no longer takes part; `requeue.silence_s` ends the run.
    GROUP
    if rank == 1: time.sleep(600)
    dist.barrier()
collective-timeout collective-timeout 2 2 --gpus-per-node 2
    # Rank 2 does not take part in a collective; the time-out of the group ends the other ranks.
    import datetime, torch, torch.distributed as dist
    dist.init_process_group('gloo', timeout=datetime.timedelta(seconds=10))
    dist.barrier()
    if rank == 2: time.sleep(600)
    dist.all_reduce(torch.ones(4))
command-rank-late rendezvous 1 2
    # Rank 1 of a script of the user starts late; rank 0 gives up.
    if rank == 1: time.sleep(120)
    import datetime, torch.distributed as dist
    dist.init_process_group('gloo', timeout=datetime.timedelta(seconds=5))
checkpoint-of-another-model shape-mismatch - -
    # A script whose model changed since its checkpoint was saved.
    GROUP
    torch.save(torch.nn.Linear(4, 16).state_dict(), f'{rank}.pt')
    dist.barrier()
    torch.nn.Linear(4, 8).load_state_dict(torch.load(f'{rank}.pt'))
wrong-argument bad-config - -
    import argparse
    parser = argparse.ArgumentParser()
    parser.add_argument('--lr')
    parser.parse_args(['--rl', '3'])
no-internet no-internet - -
    from huggingface_hub import hf_hub_download
    hf_hub_download('openai-community/gpt2', 'config.json')
"""
)
