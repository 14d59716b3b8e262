"""Whatever an upgrade brings, the board comes back to a system that answers, and nobody helps."""

import shutil
from pathlib import Path

import pytest
from tests.nixos.pid1 import Machine, refusal
from tests.nixos.recorded import STORE
from tests.nixos.upgrade.board import (
    ADDRESS,
    CHECK,
    FIREWALL,
    GPU,
    HANGS,
    HEALTHY,
    LONG,
    NET,
    NETWORK,
    PANICS,
    SHORT,
    SSH,
    SSHD,
    UPGRADE,
    Board,
    Generation,
    oneshot,
    service,
)

reason = refusal()
TOOLS = ("sshd", "nft", "ssh-keygen")
if reason is None and (missing := [tool for tool in TOOLS if shutil.which(tool) is None]):
    reason = f"{', '.join(missing)}: not here: apt-get install openssh-server nftables"
pytestmark = pytest.mark.skipif(reason is not None, reason=str(reason))


def units(**changed: str | None) -> dict[str, str]:
    """The healthy units but for some; None leaves one out."""
    names = {"net": NET, "sshd": SSHD, "gpu": GPU, "firewall": FIREWALL}
    every = HEALTHY | {names.get(k, f"{k}.service"): v for k, v in changed.items() if v is not None}
    return {
        k: v
        for k, v in every.items()
        if k not in [names[n] for n, v in changed.items() if v is None]
    }


def drops(rule: str) -> str:
    """A firewall with one rule."""
    table = "add table inet f; add chain inet f i { type filter hook input priority 0; }"
    rules = oneshot(f"nft '{table}; add rule inet f i {rule}'")
    return rules.replace("[Install]", "ExecStop=/usr/sbin/nft flush ruleset\n[Install]")


UNDER_OLD = "readlink /run/booted-system | grep -q old"


def without_own_boot(command: str, before: str = "") -> str:
    """A unit that is well under the old kernel, and not after the boot of its own system."""
    return oneshot(f"{UNDER_OLD} || {command}", before)


EARLY = "[Unit]\nDefaultDependencies=no\nAfter=booted.service\n{}WantedBy=sysinit.target\n"
EMERGENCY = """[Unit]
DefaultDependencies=no
After=booted.service
Before=sysinit.target
OnFailure=emergency.target
OnFailureJobMode=replace-irreversibly
[Service]
Type=oneshot
ExecStart=/bin/sh -c "UNDER_OLD"
[Install]
WantedBy=sysinit.target
""".replace("UNDER_OLD", UNDER_OLD)
#: A machine beyond the router, and the way to it.
BEYOND = "10.10.0.1"
IN_LAN = "/usr/sbin/ip netns exec lan"
PEER = f"{NETWORK}; {IN_LAN} ip address add {BEYOND}/32 dev lo; {IN_LAN} ip link set lo up"
ANSWERS = f"{IN_LAN} {SSH.format(port=7, more='')}"
SIX = NETWORK.replace(f"{ADDRESS}/24", "fd00::2/64").replace("dev eth0;", "dev eth0 nodad;")
ACCEPT = 'import socket, time; s = socket.create_server(("", 22)); time.sleep(1000)'
MUTE = service(f"/usr/bin/python3 -c '{ACCEPT}'")

NEW = "6.6"
#: Nothing of ours starts any more, as with a Python that is damaged.
MUTE_CHECK = EARLY.format(without_own_boot(f"echo damaged >{STORE}/upgrade.py", "sysinit.target"))
HANGS_EARLY = Generation(
    units(early=EARLY.format(without_own_boot(HANGS, "sysinit.target"))),
    version=NEW,
    deadline=SHORT,
)
BROKEN = units(gpu=oneshot("false"))
#: Failures by what fails first. A board meets those of a group one after another.
FAILURES = {
    "kernel": {
        "kernel panics": Generation(kernel=PANICS, version=NEW),
        "kernel panics, built as the running one": Generation(kernel=PANICS),
        "root file system is not there": Generation(units(disk=EMERGENCY), version=NEW),
        "boot hangs before the network": HANGS_EARLY,
        "check and deadline do not start": Generation(
            units(early=MUTE_CHECK), version=NEW, deadline=SHORT
        ),
        "GPU fails after a boot of its own alone": Generation(
            units(gpu=without_own_boot("false")), version=NEW
        ),
        "GPU hangs after a boot of its own, built as the running one": Generation(
            units(gpu=without_own_boot(HANGS))
        ),
    },
    "network": {
        "network is not set up": Generation(units(net=None), version=NEW),
        "network is not set up, with the same kernel": Generation(
            units(net=oneshot("ip link delete eth0"))
        ),
        "interface stays down": Generation(
            units(net=oneshot(NETWORK.replace("link set eth0 up", "link"))), version=NEW
        ),
        "interface has no address": Generation(
            units(net=oneshot("ip link add eth0 type veth")), version=NEW
        ),
        "address of a container alone": Generation(
            units(net=oneshot(NETWORK.replace("eth0", "docker0"))), version=NEW
        ),
        "cable is not seen": Generation(
            units(net=oneshot(f"{NETWORK}; ip netns exec lan ip link set eth1 down"))
        ),
        "way beyond the router is lost": Generation(
            units(net=oneshot(PEER, SSHD), beyond=service(ANSWERS)),
            peer=f"{BEYOND}:7",
        ),
        "ssh is off": Generation(units(sshd=None), version=NEW),
    },
    "ssh": {
        "ssh has a wrong configuration": Generation(
            units(sshd=service(SSH.format(port=22, more="-o Nonsense=1")))
        ),
        "ssh on another port": Generation(units(sshd=service(SSH.format(port=2222, more="")))),
        "ssh on the loopback alone": Generation(
            units(sshd=service(SSH.format(port=22, more="-o ListenAddress=127.0.0.1")))
        ),
        "ssh says nothing": Generation(units(sshd=MUTE)),
        "ssh fails after a boot of its own alone": Generation(
            units(sshd=service(f'/bin/sh -c "{UNDER_OLD} && exec {SSH.format(port=22, more="")}"'))
        ),
    },
    "firewall": {
        "firewall drops ssh": Generation(units(firewall=drops("tcp dport 22 drop")), version=NEW),
        "firewall rejects ssh": Generation(units(firewall=drops("tcp dport 22 reject"))),
        "firewall drops all but the loopback": Generation(units(firewall=drops("iif != lo drop"))),
        "firewall drops what IPv6 finds its neighbours with": Generation(
            units(net=oneshot(SIX, SSHD), firewall=drops("meta l4proto icmpv6 drop"))
        ),
    },
    "GPU": {
        "GPU fails": Generation(BROKEN, version=NEW),
        "GPU hangs": Generation(units(gpu=oneshot(HANGS)), version=NEW),
        "hang after the switch": Generation(BROKEN, after_switch=HANGS),
        "boot partition becomes read-only": Generation(
            BROKEN, after_switch="mount -o remount,bind,ro /boot"
        ),
        "notes become read-only": Generation(
            BROKEN, after_switch="mount -o remount,bind,ro /var/lib/orin-upgrade"
        ),
        "memory runs out after the switch": Generation(BROKEN, after_switch="kill -KILL 0"),
        "check ends by a fault": Generation(
            units(
                gpu=oneshot(
                    f"echo echo noise >{STORE}/bin/ip; chmod +x {STORE}/bin/ip; sleep 2;"
                    f"rm {STORE}/bin/ip; false"
                )
            )
        ),
        "memory runs out for the check": Generation(
            units(gpu=oneshot(f"sleep 1; systemctl kill --signal=KILL {CHECK}; false"))
        ),
        # For good: the last of these.
        "Nix's database is damaged": Generation(BROKEN, after_switch="touch /srv/nix-env-fails"),
    },
    "upgrade": {
        "hang before the switch": Generation(before_switch=HANGS, version=NEW),
        "firmware is too old": Generation(
            before_switch="echo the firmware is older; exit 1", version=NEW
        ),
        "disk is full while it builds": Generation(
            BROKEN, version=NEW, build="echo no space left on device; exit 1"
        ),
        "build hangs": Generation(BROKEN, version=NEW, build=HANGS),
        "memory runs out while it builds": Generation(BROKEN, build="kill -KILL 0"),
        "list of good systems is damaged": Generation(
            BROKEN, version=NEW, build="echo noise >/var/lib/orin-upgrade/good"
        ),
    },
}


#: A disk that is full, by its folder on the board.
FULL = {"notes cannot be written": "notes", "boot partition is full": "boot"}


def assert_old_answers(board: Board, machine: Machine) -> None:
    """The old system runs, is the next one, and answers a machine on its network."""
    for link in ("/run/current-system", "/nix/var/nix/profiles/system"):
        assert machine.run("readlink", "-f", link).stdout.strip() == "/nix/store/old", board.journal
    assert board.choose() == "old"
    ask = f"import socket; print(socket.create_connection(('{ADDRESS}', 22), 5).recv(4))"
    from_lan = machine.run("ip", "netns", "exec", "lan", "/usr/bin/python3", "-c", ask)
    assert from_lan.stdout == "b'SSH-'\n"
    assert machine.show(GPU, "ActiveState")["ActiveState"] == "active"


def assert_comes_back(board: Board, name: str) -> None:
    """A board that works is upgraded, and is back at the end."""
    machine = board.upgrade(name)
    # What works without a restart has its own boot still to come.
    if machine.run("readlink", "-f", "/run/current-system").stdout.strip() != "/nix/store/old":
        assert "works so far" in board.journal, board.journal
        machine = board.restart()
    assert_old_answers(board, machine)
    bad = board.notes / "bad"
    made = [str(link.readlink()) for link in (board.nix / "nix/profiles").glob("system-*-link")]
    # Where nothing could be noted, its restart tells, or the check.
    left = (bool(board.boots) and f"/nix/store/{name}" in made) or "went back" in board.journal
    noted = bad.exists() and f"/nix/store/{name}\n" in bad.read_text()
    met = left or noted or name in board.boots
    assert met or f"{UPGRADE}: Failed with result" in board.journal, board.journal


@pytest.mark.parametrize("kind", FAILURES)
def test_a_system_that_does_not_work_goes_away(tmp_path: Path, kind: str) -> None:
    names = {f"new{n}": what for n, what in enumerate(FAILURES[kind])}
    with Board(tmp_path, {name: FAILURES[kind][what] for name, what in names.items()}) as board:
        board.start()
        for name, what in names.items():
            try:
                assert_comes_back(board, name)
            except AssertionError as error:
                raise AssertionError(f"{what}: {error}") from error


def test_power_that_goes_while_the_menu_is_made_leaves_a_way_back(tmp_path: Path) -> None:
    """The boot loader's installation names the new system; its tries are counted right behind."""
    with Board(tmp_path, {"new": Generation(BROKEN), "hangs": HANGS_EARLY}) as board:
        for n, name in ((2, "new"), (4, "hangs")):
            board.restart()
            board.install(name, n)
            assert board.choose() == name
            machine = board.restart()
            assert name in board.boots
            assert_old_answers(board, machine)


@pytest.mark.parametrize("what", FULL)
def test_a_full_disk_is_no_reason_to_stay(tmp_path: Path, what: str) -> None:
    with Board(tmp_path, {"new": Generation(BROKEN)}, [FULL[what]]) as board:
        board.start()
        assert_comes_back(board, "new")


def test_a_system_that_works_is_good_after_its_own_boot(tmp_path: Path) -> None:
    late = (
        oneshot(f"sleep 2; {NETWORK}")
        .replace(f"Before={SSHD} ", "Before=")
        .replace("Type=oneshot", "Type=exec")
    )
    new = Generation(units(net=late), version=NEW, seconds=LONG)
    with Board(tmp_path, {"new": new}) as board:
        good = board.notes / "good"
        board.start()
        board.upgrade("new")
        assert good.read_text() == "/nix/store/old\n"
        assert "works so far" in board.journal
        board.restart()
        assert good.read_text().splitlines()[-1] == "/nix/store/new"
        assert board.choose() == "new"
