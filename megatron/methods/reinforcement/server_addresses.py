"""Returns the servers that generate the answers of reinforcement learning."""

from megatron.methods.reinforcement.keys import ReinforcementKeys
from megatron.neox_arguments.resolved import ResolvedArgs

DATASERVER_KEYS = ("online_dataserver_ips", "online_dataserver_ports")


def rollout_servers(args: ResolvedArgs) -> tuple[str, ...]:
    """Returns the servers' URLs without a trailing slash; an empty tuple if the training processes generate.

    The URLs come from `rollout.servers`, else from GPT-NeoX's keys if one of them is set.
    """
    keys = ReinforcementKeys.read_from(args)
    if keys.rollout is None:
        return ()
    if keys.rollout["servers"] is not None:
        return tuple(address.rstrip("/") for address in keys.rollout["servers"])
    if all(args.user_values.get(key) is None for key in DATASERVER_KEYS):
        return ()
    hosts, ports = keys.online_dataserver_ips, keys.online_dataserver_ports
    hosts = (hosts,) if isinstance(hosts, str) else hosts
    ports = (ports,) if isinstance(ports, int) else ports
    count = max(len(hosts), len(ports))
    hosts = tuple(f"[{host}]" if ":" in host else host for host in hosts)
    pairs = zip(hosts * (count if len(hosts) == 1 else 1), ports * (count if len(ports) == 1 else 1), strict=False)
    return tuple(f"http://{host}:{port}" for host, port in pairs)
