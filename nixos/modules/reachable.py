"""A check that others can reach this board: its address, ssh's port from outside, a peer. As root.

ssh is asked from a network namespace of its own, over a pair of virtual interfaces: such a packet
passes the firewall, as one from the network does, and the loopback's does not. Standard library
only.
"""

import json
import re
import subprocess
import sys
from typing import Any

SPACE, INSIDE, OUTSIDE = "orin-probe", "orin-probe0", "orin-probe1"
#: Interfaces of containers and machines inside the board: nobody outside knows their addresses.
#: Docker's bridges are br- and twelve digits; br-lan is a person's.
INNER = re.compile(
    f"docker|podman|virbr|cni|cilium|kube|lxc|lxd|incus|veth|br-[0-9a-f]{{12}}$|{SPACE}"
)
#: Kinds that have their address whether or not anything goes through them.
TUNNELS = ("dummy", "geneve", "tun", "vxlan", "wireguard")
#: Networks of the probe, by address family: the board's end, the other end, the prefix.
PROBE = {
    "inet": ("169.254.213.1", "169.254.213.2", 30),
    "inet6": ("fd6f:7269::1", "fd6f:7269::2", 64),
}
SECONDS = 5
#: What runs at the other end: one line of what answers.
ASK = """
import socket, sys
with socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=5) as to:
    print(to.recv(64).decode(errors="replace").strip())
"""


def _ip(*arguments: str) -> str:
    """Run `ip`; its output."""
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, timeout=SECONDS * 2)
    if done.returncode:
        raise OSError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout


def addresses() -> list[tuple[str, str]]:
    """Family and address of each that another machine may know."""
    found: list[tuple[str, str]] = []
    links: list[dict[str, Any]] = json.loads(
        _ip("-json", "-details", "address", "show", "scope", "global", "up")
    )
    for link in links:
        kind = link.get("linkinfo", {}).get("info_kind")
        # A cable that is out, or a driver that does not see it, leaves an address in place. That it
        # is out shows at once here; NO-CARRIER follows when the kernel has told its watchers.
        flags = link.get("flags", ())
        lost = "LOWER_UP" not in flags or "LOOPBACK" in flags or kind in TUNNELS
        if lost or INNER.match(link.get("ifname", "")):
            continue
        for each in link.get("addr_info", ()):
            if each.get("family") in PROBE and not each.get("tentative"):
                found.append((each["family"], each["local"]))
    return found


def _forget_probe() -> None:
    for command in (["link", "delete", INSIDE], ["netns", "delete", SPACE]):
        subprocess.run(["ip", *command], capture_output=True, timeout=SECONDS * 2)


def ask_from_outside(family: str, address: str, port: int) -> str:
    """Connect to this board as another machine does; what it says first. Raises OSError."""
    near, far, prefix = PROBE[family]
    _forget_probe()
    inside = ["netns", "exec", SPACE]
    try:
        _ip("netns", "add", SPACE)
        _ip("link", "add", INSIDE, "type", "veth", "peer", "name", OUTSIDE, "netns", SPACE)
        nodad = ["nodad"] if family == "inet6" else []
        _ip("address", "add", f"{near}/{prefix}", "dev", INSIDE, *nodad)
        _ip("link", "set", INSIDE, "up")
        _ip(*inside, "ip", "address", "add", f"{far}/{prefix}", "dev", OUTSIDE, *nodad)
        _ip(*inside, "ip", "link", "set", OUTSIDE, "up")
        _ip(*inside, "ip", "route", "add", "default", "via", near)
        return _ip(*inside, sys.executable, "-c", ASK, address, str(port)).strip()
    finally:
        _forget_probe()


def _peer_problem(peer: str) -> str | None:
    host, _, port = peer.rpartition(":") if peer.count(":") == 1 else (peer, "", "")
    if port:
        command = [sys.executable, "-c", _CONNECT, host, port]
    else:
        command = ["ping", "-c", "1", "-W", str(SECONDS), host]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS * 4)
    return f"{peer} does not answer this board" if done.returncode else None


_CONNECT = (
    "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), 5).close()"
)


def _ssh_problems(port: int) -> list[str]:
    """Why no address of this board answers as ssh, one line each; none where one does."""
    wrong = []
    for family, address in (mine := addresses()):
        try:
            banner = ask_from_outside(family, address, port)
        except (OSError, subprocess.TimeoutExpired) as error:
            reason = "".join(str(error).strip().splitlines()[-1:])
            wrong.append(f"port {port} of {address} does not answer from outside: {reason}")
            continue
        if banner.startswith("SSH-"):
            return []
        wrong.append(f"port {port} of {address} says {banner!r}, which is not ssh")
    return wrong if mine else ["no connected interface has an address that others could know"]


def unreachable(ssh: int | None, peer: str | None) -> list[str]:
    """Reasons why nobody reaches this board, or none. ssh: its port, None where it is not asked."""
    wrong = []
    try:
        if ssh is not None:
            wrong += _ssh_problems(ssh)
    except (OSError, subprocess.TimeoutExpired) as error:
        wrong.append(f"the addresses are not known: {error}")
    try:
        if peer is not None and (problem := _peer_problem(peer)):
            wrong.append(problem)
    except subprocess.TimeoutExpired:
        wrong.append(f"{peer} does not answer this board")
    return wrong
