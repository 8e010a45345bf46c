"""Which partitions, accounts and QOS a job may name. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from trainkit.config.names import near
from trainkit.plan.asked import Asked
from trainkit.plan.cluster import Account, Cluster, Partition, Qos

Trouble = tuple[str, str, str]
"""Key of the config, message, hint."""
SUBACCOUNTS_COUNT_TOO = (23, 2)
"""From this version on a partition that allows an account allows those below it too, which are not known."""


def unknown_partitions(names: list[str] | None, cluster: Cluster) -> Iterator[Trouble]:
    """The named partitions that do not exist; None stands for the default one."""
    known = [item.name for item in cluster.partitions]
    if names is None and cluster.partition(None) is None:
        hint = f"there is {listed(item.name for item in cluster.partitions if not item.is_hidden)}"
        yield "resources.partition", f"is not set, and {cluster.name} has no default partition", hint
    for name in names or []:
        if cluster.partition(name) is None:
            shown = [item.name for item in cluster.partitions if not item.is_hidden]
            hint = f"{did_you_mean(name, known)}there is {listed(shown)}"
            message = f"is {name}, and {cluster.name} has no such partition"
            yield "resources.partition", message, with_source(hint, cluster)


def account_troubles(asked: Asked, cluster: Cluster) -> Iterator[Trouble]:
    """An account or QOS that does not exist, or that is not yours."""
    account = _account_of(asked, cluster)
    if asked.account is not None and cluster.accounts is not None and account is None:
        names = list(dict.fromkeys(item.name for item in cluster.accounts))
        hint = f"{did_you_mean(asked.account, names)}you have {listed(names) or 'none'}"
        message = f"is {asked.account}, and you have no such account on {cluster.name}"
        yield "resources.account", message, with_source(hint, cluster)
    if asked.qos is None:
        return
    known = None if cluster.qos is None else [item.name for item in cluster.qos]
    if known is not None and not _is_in(asked.qos, known):
        hint = f"{did_you_mean(asked.qos, known)}there is {listed(known)}"
        message = f"is {asked.qos}, and {cluster.name} has no such QOS"
        yield "resources.qos", message, with_source(hint, cluster)
    elif account is not None and account.qos is not None and not _is_in(asked.qos, account.qos):
        message = f"is {asked.qos}, which account {account.name} may not use"
        yield "resources.qos", message, with_source(f"it may use {listed(account.qos) or 'none'}", cluster)


def permission_troubles(asked: Asked, cluster: Cluster, partition: Partition) -> Iterator[Trouble]:
    """What a partition does not let an account or a QOS do, as far as that is known."""
    account = _account_of(asked, cluster)
    name = asked.account or (account.name if account is not None else None)
    names_are_all = () < cluster.slurm_version < SUBACCOUNTS_COUNT_TOO
    if name is not None and names_are_all and not _allows_account(partition, name):
        key = "resources.partition" if asked.account is None else "resources.account"
        message = f"is {partition.name}, which account {name} may not use"
        if asked.account is not None:
            message = f"is {name}, which may not use partition {partition.name}"
        allowed = partition.allowed_accounts
        yield key, message, f"accounts that may: {listed(allowed)}" if allowed else ""
    elif account is not None and not _is_in(partition.name, account.partitions):
        message = f"is {partition.name}, which account {account.name} may not use"
        hint = with_source(f"it may use {listed(account.partitions or ())}", cluster)
        yield "resources.partition", message, hint
    if asked.qos is not None and not _allows_qos(partition, asked.qos):
        hint = f"it takes {listed(partition.allowed_qos)}" if partition.allowed_qos else ""
        yield "resources.qos", f"is {asked.qos}, which partition {partition.name} does not take", hint


def _allows_account(partition: Partition, name: str) -> bool:
    if partition.allowed_accounts is not None:
        return _is_in(name, partition.allowed_accounts)
    return not _is_in(name, partition.denied_accounts)


def _allows_qos(partition: Partition, name: str) -> bool:
    if partition.allowed_qos is not None:
        return _is_in(name, partition.allowed_qos)
    return not _is_in(name, partition.denied_qos)


def _is_in(name: str, names: Iterable[str] | None) -> bool:
    """Whether names hold a name; None holds all. Slurm's accounting knows no capitals."""
    return names is None or name.lower() in {item.lower() for item in names}


def _account_of(asked: Asked, cluster: Cluster) -> Account | None:
    """The account that is charged, with everything that it may use in any partition."""
    found = [
        item
        for item in cluster.accounts or ()
        if (item.is_default if asked.account is None else _is_in(asked.account, [item.name]))
    ]
    if not found:
        return None
    partitions, qos = [item.partitions for item in found], [item.qos for item in found]
    return replace(found[0], partitions=_union(partitions), qos=_union(qos))


def _union(items: list[tuple[str, ...] | None]) -> tuple[str, ...] | None:
    if any(item is None for item in items):
        return None
    return tuple(dict.fromkeys(name for item in items for name in item or ()))


def qos_of(asked: Asked, cluster: Cluster) -> Qos | None:
    """The QOS that was asked for; one that is not known may override anything."""
    if asked.qos is None:
        return None
    unknown = Qos(asked.qos, overrides=None)
    return next((item for item in cluster.qos or () if _is_in(asked.qos, [item.name])), unknown)


def did_you_mean(word: str, words: Iterable[str]) -> str:
    """The beginning of a hint; empty when nothing is like the word."""
    match = near(word, words)
    return f"did you mean {match}? " if match else ""


def listed(names: Iterable[str], last: str = "and") -> str:
    """``a, b and c``."""
    words = list(names)
    return f" {last} ".join(filter(None, (", ".join(words[:-1]), *words[-1:])))


def with_source(hint: str, cluster: Cluster) -> str:
    """A hint, and what to do should the cluster have changed since."""
    return "; ".join(filter(None, (hint, cluster.out_of_date_hint)))
