"""Tests where a run starts if Slurm's commands exist but slurm.conf is in none of the usual places."""

import pytest

from tests.support.said import said
from trainkit.cluster import target
from trainkit.cluster.target import choose_backend
from trainkit.errors import SlurmError
from trainkit.slurm import environment as conf_file

NO_RECORD = """\
echo 'sbatch: error: resolve_ctls_from_dns_srv: res_nsearch error: Unknown host' >&2
echo 'sbatch: error: fetch_config: DNS SRV lookup failed' >&2
echo 'sbatch: fatal: Could not establish a configuration source' >&2
exit 1"""
NO_DNS = NO_RECORD.replace("Unknown host", "Host name lookup failure")


@pytest.fixture(autouse=True)
def no_slurm_conf(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target, "conf_file", lambda: None)
    monkeypatch.setattr(conf_file, "PROBE_TIMEOUT_S", 0.5)


def test_a_configless_cluster_is_a_cluster(fake):
    fake.add("sbatch", "echo slurm 24.11.1")
    assert choose_backend("auto")[0] == "sbatch"
    assert choose_backend("auto")[0] == "sbatch"
    assert fake.calls == [["sbatch", "--version"]], "asked once"


def test_packages_without_a_cluster(fake):
    fake.add("sbatch", NO_RECORD)
    backend, reason = choose_backend("auto")
    assert backend == "local"
    said(reason)


@pytest.mark.parametrize(
    "body",
    [
        NO_DNS,
        "exec sleep 60",
        "echo 'sbatch: error: fetch_config: unable to connect to controller' >&2; exit 1",
        "echo 'sbatch: fatal: Could not establish a configuration source' >&2; exit 1",
    ],
)
def test_what_is_not_known_is_not_guessed(fake, monkeypatch, body):
    monkeypatch.setattr(conf_file, "_has_network", lambda: True)
    fake.add("sbatch", body)
    monkeypatch.setenv("PATH", f"{fake.environ['PATH']}:/usr/bin:/bin")
    with pytest.raises(SlurmError, match="cannot tell whether this machine belongs to") as caught:
        choose_backend("auto")
    assert caught.value.exit_code == 3
    said(caught.value.hint)
    assert choose_backend("local")[0] == "local"
    assert choose_backend("sbatch")[0] == "sbatch"


def test_a_machine_without_a_network_is_no_login_node(fake, monkeypatch):
    monkeypatch.setattr(conf_file, "_has_network", lambda: False)
    fake.add("sbatch", NO_DNS)
    assert choose_backend("auto")[0] == "local"


def test_one_lost_packet_is_not_the_end_of_the_lookup(fake):
    fake.add("sbatch", f'[ "$RES_OPTIONS" = "timeout:1 attempts:4" ] || exit 1; {NO_RECORD}')
    assert choose_backend("auto")[0] == "local"


def test_nothing_is_asked_with_a_slurm_conf_or_without_sbatch(fake, monkeypatch):
    assert choose_backend("auto")[0] == "local"
    fake.add("sbatch", "exit 1")
    monkeypatch.setenv("SLURM_CONF", "/etc/elsewhere.conf")
    assert choose_backend("auto")[0] == "sbatch"
    assert fake.calls == []
