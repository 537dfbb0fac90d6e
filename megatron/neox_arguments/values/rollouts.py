"""Which servers write the answers of reinforcement learning."""

from megatron.neox_arguments.resolved import ResolvedArgs

DATASERVER_KEYS = ("online_dataserver_ips", "online_dataserver_ports")


def rollout_servers(args: ResolvedArgs) -> tuple[str, ...]:
    """Their addresses, without a slash at the end; none where the training processes write.

    They are those of `rollout.servers`, else of GPT-NeoX's keys where one of these was given.
    """
    if args.rollout is None:
        return ()
    if args.rollout["servers"] is not None:
        return tuple(address.rstrip("/") for address in args.rollout["servers"])
    if all(args.user_values.get(key) is None for key in DATASERVER_KEYS):
        return ()
    hosts, ports = args.online_dataserver_ips, args.online_dataserver_ports
    hosts = (hosts,) if isinstance(hosts, str) else hosts
    ports = (ports,) if isinstance(ports, int) else ports
    count = max(len(hosts), len(ports))
    hosts = tuple(f"[{host}]" if ":" in host else host for host in hosts)
    pairs = zip(hosts * (count if len(hosts) == 1 else 1), ports * (count if len(ports) == 1 else 1), strict=False)
    return tuple(f"http://{host}:{port}" for host, port in pairs)
