"""A check that others can reach this board: its address, ssh's port from outside, a peer. As root.

ssh is asked from a network namespace of its own, over a pair of virtual interfaces: such a packet
passes the firewall, as one from the network does, and the loopback's does not. Standard library
only.
"""

import json
import re
import subprocess
import sys

SPACE, INSIDE, OUTSIDE = "orin-probe", "orin-probe0", "orin-probe1"
#: Interfaces of containers and machines inside the board: nobody outside knows their addresses.
#: Docker's bridges are br- and twelve digits; br-lan is a person's.
INNER = re.compile(
    f"docker|podman|virbr|cni|cilium|kube|lxc|lxd|incus|veth|br-[0-9a-f]{{12}}$|{SPACE}"
)
#: Kinds that have their address whether or not anything goes through them.
TUNNELS = ("dummy", "geneve", "tun", "vxlan", "wireguard")
#: The probe, as batches of `ip`: the board's end, and the other one.
NEAR = f"""netns add {SPACE}
link add {INSIDE} type veth peer name {OUTSIDE} netns {SPACE}
address add 169.254.213.1/30 dev {INSIDE}
address add fd6f:7269::1/64 dev {INSIDE} nodad
link set {INSIDE} up
"""
FAR = f"""address add 169.254.213.2/30 dev {OUTSIDE}
address add fd6f:7269::2/64 dev {OUTSIDE} nodad
link set {OUTSIDE} up
route add default via 169.254.213.1
route add default via fd6f:7269::1
"""
GONE = f"link delete {INSIDE}\nnetns delete {SPACE}\n"
SECONDS = 5
CONNECT = "import socket, sys; to = socket.create_connection(tuple(sys.argv[1:]), timeout=5)"
#: What runs at the other end: one line of what answers.
ASK = f"{CONNECT}; print(to.recv(64).decode(errors='replace').strip())"


def _run_ip(*arguments: str, lines: str | None = None) -> str:
    """Run `ip`, or `lines` as a batch whatever fails of it; its output. Raises OSError."""
    batch = [] if lines is None else ["-force", "-batch", "-"]
    command = ["timeout", str(SECONDS * 2), "ip", *arguments, *batch]
    done = subprocess.run(command, input=lines, capture_output=True, text=True)
    if done.returncode and lines is None:
        raise OSError(done.stderr.strip() or f"ip ended with {done.returncode}")
    return done.stdout


def reachable_addresses() -> list[str]:
    """Each address that another machine may know."""
    found, asked = [], ("address", "show", "scope", "global", "up")
    for link in json.loads(_run_ip("-json", "-details", *asked)):
        kind = link.get("linkinfo", {}).get("info_kind")
        # A cable that is out, or a driver that does not see it, leaves an address in place. That it
        # is out shows at once here; NO-CARRIER follows when the kernel has told its watchers.
        flags = link.get("flags", ())
        lost = "LOWER_UP" not in flags or "LOOPBACK" in flags or kind in TUNNELS
        if not lost and not INNER.match(link.get("ifname", "")):
            given = [each for each in link.get("addr_info", ()) if not each.get("tentative")]
            found += [each["local"] for each in given if "local" in each]
    return found


def read_banner_from_outside(address: str, port: int) -> str:
    """Connect to this board as another machine does; what it says first. Raises OSError."""
    # A kernel without IPv6 refuses some of these lines, and what is asked does without them.
    _run_ip(lines=GONE + NEAR)
    try:
        _run_ip("-netns", SPACE, lines=FAR)
        command = [sys.executable, "-c", ASK, address, str(port)]
        return _run_ip("netns", "exec", SPACE, *command).strip()
    finally:
        _run_ip(lines=GONE)


def _ssh_problems(port: int) -> list[str]:
    """Why no address of this board answers as ssh, one line each; none where one does."""
    wrong = []
    for address in reachable_addresses():
        try:
            banner = read_banner_from_outside(address, port)
        except OSError as error:
            reason = str(error).splitlines()[-1]
            wrong.append(f"port {port} of {address} does not answer from outside: {reason}")
            continue
        if banner.startswith("SSH-"):
            return []
        wrong.append(f"port {port} of {address} says {banner!r}, which is not ssh")
    return wrong or ["no connected interface has an address that others could know"]


def reachability_problems(ssh: int | None, peer: str | None) -> list[str]:
    """Reasons why nobody reaches this board, or none. ssh: its port, None where it is not asked."""
    try:
        wrong = [] if ssh is None else _ssh_problems(ssh)
    except OSError as error:
        wrong = [f"the addresses are not known: {error}"]
    if peer is not None:
        host, _, port = peer.rpartition(":") if peer.count(":") == 1 else (peer, "", "")
        ping = ["ping", "-c", "1", "-W", str(SECONDS), host]
        command = [sys.executable, "-c", CONNECT, host, port] if port else ping
        # A name may take long.
        if subprocess.run(["timeout", str(SECONDS * 4), *command], capture_output=True).returncode:
            wrong.append(f"{peer} does not answer this board")
    return wrong
