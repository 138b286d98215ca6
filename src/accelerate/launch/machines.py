"""Which machines take part in a run, which of them this is, and where they meet."""

from collections.abc import Mapping
from dataclasses import replace

from accelerate.config.options import BY_NAME
from accelerate.launch.cluster import Cluster
from accelerate.launch.errors import LaunchError
from accelerate.launch.plan import Machines, Rendezvous, Resolved, Source
from accelerate.runtime.ranks import DEFAULT_PORT

# What a scheduler can know, and where it says so.
_FROM_CLUSTER = {
    "num_machines": "machines",
    "machine_rank": "machine_rank",
    "main_process_ip": "address",
    "main_process_port": "port",
}
_BACKENDS = ("static", "c10d")
# What `--rdzv_conf` can say about several machines, in seconds.
_SECONDS = ("timeout", "join_timeout", "heartbeat_timeout")


def ask_cluster(values: dict[str, Resolved], cluster: Cluster | None, notes: list[str]) -> Cluster | None:
    """Let a scheduler fill in what the command line does not say: it is a part of the environment.

    Args:
        values: option name to resolved value; changed in place.
        cluster: what the scheduler says, or None.
        notes: lines for the user; added to.

    Returns:
        The same, or None where the command line asks for something else.
    """
    if cluster is None:
        return None
    asked = values["num_machines"]
    if asked.source is Source.COMMAND_LINE and asked.value != cluster.machines:
        notes.append(
            f"--num_machines is {asked.value} on the command line, and {cluster.source} speaks of {cluster.machines}: "
            f"{cluster.source} is not asked for ranks and addresses."
        )
        return None
    if cluster.machines == 1 and cluster.task is None:
        return cluster
    for name, field in _FROM_CLUSTER.items():
        offered, former = getattr(cluster, field), values[name]
        if offered is None or former.source >= Source.ENVIRONMENT:
            continue
        values[name] = Resolved(offered, Source.ENVIRONMENT, f"{cluster.source} ({cluster.detail})")
        if former.source is Source.FILE and former.value != offered:
            notes.append(
                f"{name} is {offered!r} (from {cluster.source}), not {former.value!r} (from the {former.origin})."
            )
    return cluster


def settle(values: dict[str, Resolved], cluster: Cluster | None) -> Machines:
    """Return the machines of a run.

    Args:
        values: option name to resolved value; changed in place.
        cluster: what the scheduler says, or None.

    Raises:
        LaunchError: a number or an address is missing or impossible.
    """
    count = values["num_machines"]
    if count.value is None:
        count = values["num_machines"] = Resolved(1, count.source, count.detail)
    if count.value < 1:
        raise LaunchError(f"--num_machines is {count.value} ({count.origin}); it must be at least 1.")
    if count.value == 1:
        return Machines()
    rank = values["machine_rank"]
    if rank.value is not None and not 0 <= rank.value < count.value:
        raise LaunchError(
            f"--machine_rank is {rank.value} ({rank.origin}), and --num_machines is {count.value} ({count.origin}): machines "
            f"are numbered from 0 to {count.value - 1}."
        )
    source = cluster.source if cluster and values["machine_rank"].detail.startswith(cluster.source) else None
    if rank.value is None and values["rdzv_backend"].value == "static":
        raise LaunchError(
            f"--num_machines is {count.value} ({count.origin}), and nobody says which machine this is. Give --machine_rank, from 0 "
            f"to {count.value - 1}, another one on each machine; or --rdzv_backend c10d, which numbers them itself."
        )
    _require_address(values, cluster.no_address if cluster else "")
    return Machines(count.value, rank.value, source)


def _require_address(values: dict[str, Resolved], why: str) -> None:
    count, address, port = (values[name] for name in ("num_machines", "main_process_ip", "main_process_port"))
    if not address.value:
        raise LaunchError(
            f"--num_machines is {count.value} ({count.origin}), and nobody says where the machines meet. Give --main_process_ip, "
            f"the address of machine 0, on each of them. {why}".rstrip()
        )
    if port.value == 0 and port.source > Source.DEFAULT:
        raise LaunchError(
            f"--main_process_port is 0 ({port.origin}): several machines must all know the port. Give one, on each of them."
        )
    if port.value is None:
        values["main_process_port"] = Resolved(DEFAULT_PORT, Source.DEFAULT, "torch's default")
    elif not 0 < port.value < 65536:
        raise LaunchError(f"--main_process_port is {port.value} ({port.origin}); ports go from 1 to 65535.")


def rendezvous(values: Mapping[str, Resolved], machines: Machines, notes: list[str]) -> Rendezvous:
    """Return how the processes find each other.

    Args:
        values: option name to resolved value.
        machines: the machines.
        notes: lines for the user; added to.

    Raises:
        LaunchError: the method is unknown, or a setting of it malformed.
    """
    backend = values["rdzv_backend"]
    if backend.value not in _BACKENDS:
        also = (
            " etcd is not offered; c10d does the same without a server."
            if str(backend.value).startswith("etcd")
            else ""
        )
        raise LaunchError(
            f"--rdzv_backend is {backend.value!r} ({backend.origin}); choose one of {', '.join(_BACKENDS)}.{also}"
        )
    found = Rendezvous(backend.value, port=values["main_process_port"].value or 0, settings=_settings(values))
    if machines.count == 1:
        return found
    notes.extend(
        f"--rdzv_conf {key}={value} has no effect on several machines; {', '.join(_SECONDS)} have."
        for key, value in found.settings.items()
        if key not in _SECONDS
    )
    if found.backend == "static" and values["max_restarts"].value:
        notes.append(
            "--max_restarts on several machines needs a rendezvous that machines can come back to: c10d is used, at the same address."
        )
        found = replace(found, backend="c10d")
    return replace(found, host=str(values["main_process_ip"].value))


def _settings(values: Mapping[str, Resolved]) -> dict[str, str]:
    settings = {}
    for part in filter(None, str(values["rdzv_conf"].value or "").split(",")):
        key, equals, value = part.partition("=")
        if not equals:
            raise LaunchError(f"{BY_NAME['rdzv_conf'].spellings[0]} holds {part!r}; write key=value,key=value.")
        settings[key.strip()] = value.strip()
    for key in _SECONDS:
        if key in settings and not _is_seconds(settings[key]):
            raise LaunchError(f"--rdzv_conf holds {key}={settings[key]}; it takes a number of seconds above 0.")
    return settings


def _is_seconds(text: str) -> bool:
    try:
        return 0 < float(text) < float("inf")
    except ValueError:
        return False
