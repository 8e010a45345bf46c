"""`trainkit shell` and `attach` on a terminal, and what a process there is."""

from __future__ import annotations

import json
import shlex

from tests.on_slurm.login import TRAINKIT, Login
from tests.on_slurm.terminal import Terminal


def terminal(login: Login, *args: str) -> Terminal:
    return Terminal([*TRAINKIT, *args], login.folder, {**login.cluster.environ, **login.env})


def test_a_shell_in_an_allocation_of_two_nodes(login: Login) -> None:
    config = login.folder / "shell.yaml"
    config.write_text("name: x\ndevice: cpu\nlaunch: {env: {FROM_CONFIG: it's here}}\n")
    with terminal(
        login, "shell", str(config), "--nodes", "2", "--gpus-per-node", "2", "--time", "5"
    ) as shell:
        shell.wait_for("Granted job allocation")
        assert shell.ask("hostname") == login.cluster.hosts[0]
        assert shell.ask("pwd") == str(login.folder)
        assert shell.ask('echo "$FROM_CONFIG"') == "it's here"
        found = json.loads(shell.ask("trainkit env --json"))
        assert (found["is_rank"], found["rank"]) == (False, None)
        assert "interactive" in found["reason"]
        answer = shell.ask("srun trainkit env --json").splitlines()
        ranks = sorted(
            (json.loads(line) for line in answer if line.startswith("{")), key=lambda one: one["rank"]
        )
        assert [(one["rank"], one["local_rank"], one["node_rank"]) for one in ranks] == [
            (0, 0, 0),
            (1, 1, 0),
            (2, 0, 1),
            (3, 1, 1),
        ]
        assert ranks[0]["hosts"] == login.cluster.hosts[:2]
        assert shell.close() == 0
    login.wait_until_idle()
    assert not list((login.folder / "runs").glob(".shell*"))


def test_a_shell_needs_a_terminal(login: Login) -> None:
    done = login.trainkit("shell", "--nodes", "2", "--gpus-per-node", "1")
    assert (done.returncode, done.stderr.splitlines()[0]) == (2, "error: a shell needs a terminal")
    assert not (login.folder / "runs").exists()
    assert login.jobs() == []


def test_what_a_shell_would_start_can_be_copied(login: Login) -> None:
    done = login.trainkit("shell", "--nodes", "1", "--constraint", "rack1|rack2", "--dry-run")
    assert done.returncode == 0, done.stderr
    assert "--constraint=rack1|rack2" in shlex.split(done.stdout.splitlines()[0])
    assert "'--constraint=rack1|rack2'" in done.stdout


def test_attach_to_a_node_of_a_busy_job(login: Login) -> None:
    args = ["--nodes", "2", "--gpus-per-node", "1", "--set", "resources.extra.exclusive=true"]
    run = login.submit_listeners(*args)
    for node in (0, 1):
        with terminal(login, "attach", str(run.path), "--node", str(node)) as shell:
            assert shell.ask("hostname") == login.cluster.hosts[node]
            assert "listens.py" in shell.ask("ps -eo args")
            found = json.loads(shell.ask("trainkit env --json"))
            assert (found["world_size"], found["hosts"]) == (1, [login.cluster.hosts[node]])
            assert shell.close() == 0
    assert login.trainkit("attach", str(run.path), "--node", "2").returncode == 2
    assert login.status(run)["state"] in ("running", "starting")
    login.trainkit("cancel", str(run.path), "--now")
    refused = login.trainkit("attach", str(run.path))
    assert refused.returncode == 2
