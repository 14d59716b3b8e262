"""Upgrade, backup and cache under a real systemd: evaluated units, real restic, sqlite3 and Nix.

Stand-ins: `nixos-rebuild`, which sets the next system in the profile and switches to it,
harmonia, which says ready and answers with its key's name, and NVIDIA's generator of the CDI file.
Podman is Debian's; the GPU that its container reads from is the kernel's zero device.
"""

import json
import re
import shutil
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.nixos.fake_board import config, write_board
from tests.nixos.pid1 import PYTHON, Machine, refusal, with_checkout
from tests.nixos.recorded import SCRIPTS, recorded

MODULES = Path(__file__).resolve().parents[3] / "nixos" / "modules"
TOOLS = ("restic", "sqlite3", "nix-env", "podman", "crun")
reason = refusal()
if reason is None and (missing := [tool for tool in TOOLS if shutil.which(tool) is None]):
    reason = f"{', '.join(missing)}: not here: apt-get install restic sqlite3 nix-bin podman crun"
pytestmark = pytest.mark.skipif(reason is not None, reason=str(reason))

READBACK, UPGRADE = "orin-performance-readback.service", "nixos-upgrade.service"
CHECK, BACKUP = "orin-upgrade-check.service", "restic-backups-orin.service"
CACHE, KEY = "harmonia.service", "orin-cache-key.service"
CDI = "nvidia-container-toolkit-cdi-generator.service"
NAMES = (READBACK, UPGRADE, CHECK, BACKUP, KEY, CACHE, "harmonia.socket", CDI)
HISTORY = "/home/orin/.local/state/tinygrad-orin/history.db"
GRAFANA = "/var/lib/grafana/data/grafana.db"
GPU = "/srv/board/sys/devices/platform/17000000.gpu/devfreq_dev/max_freq"
PROFILE = "/nix/var/nix/profiles/system"
CDI_FILE = "/run/cdi/nvidia-container-toolkit.json"
NODES = ("/dev/nvgpu/igpu0/ctrl", "/dev/nvmap")
LIBRARY = "/run/opengl-driver/lib"
#: What `nvidia-ctk cdi generate` writes on a Jetson: nodes of its CSV files, the module's mounts.
SPEC = {
    "cdiVersion": "0.5.0",
    "kind": "nvidia.com/gpu",
    "devices": [
        {"name": "all", "containerEdits": {"deviceNodes": [{"path": node} for node in NODES]}}
    ],
    "containerEdits": {
        "env": ["NVIDIA_VISIBLE_DEVICES=void"],
        "mounts": [
            {
                "hostPath": LIBRARY,
                "containerPath": LIBRARY,
                "options": ["ro", "nosuid", "nodev", "bind"],
            }
        ],
    },
}

HARMONIA = """
import os, socket
key = open(os.environ["SIGN_KEY_PATHS"]).read()
listening = socket.socket(fileno=3)
told = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
told.sendto(b"READY=1", os.environ["NOTIFY_SOCKET"])
while True:
    client, _ = listening.accept()
    client.recv(4096)
    client.sendall(b"HTTP/1.0 200 OK\\r\\n\\r\\n" + key.split(":")[0].encode())
    client.close()
"""
PROGRAMS = {
    "python3": with_checkout(f'exec {PYTHON}/bin/python3 "$@"'),
    "restic": 'exec restic "$@"',
    "sqlite3": 'exec sqlite3 "$@"',
    "systemctl": 'exec systemctl "$@"',
    "harmonia-cache": with_checkout(f"exec {PYTHON}/bin/python3 /srv/harmonia.py"),
    "udevadm": "exit 1",
    "nvidia-cdi-generator": 'cp /srv/cdi.json "$RUNTIME_DIRECTORY/nvidia-container-toolkit.json"',
    "nixos-rebuild": f"""set -e
test "$*" = "switch --refresh --flake /etc/nixos"
nix-env --profile {PROFILE} --set "$(cat /srv/next)"
exec "$(cat /srv/next)/bin/switch-to-configuration" switch""",
}
#: Like NixOS' own: it ends with 4 where a unit is failed after the switch.
SWITCH = f"""#!/bin/sh
here=$(dirname "$(dirname "$(readlink -f "$0")")")
ln -sfn "$here" /run/current-system
cat "$here/frequency" >{GPU}
systemctl restart {READBACK} || exit 4
"""


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    """A board of files with its operations, not yet upgraded, backed up or asked."""
    folder = tmp_path_factory.mktemp("machine")
    texts = {name: text for name, text in recorded().items() if name in NAMES}
    texts[READBACK] = texts[READBACK].replace(" check ", " check --root /srv/board ")
    # Of the units that an upgrade is judged by, the one that is here.
    texts[CHECK] = re.sub(r"(--seconds) \d+ .*", rf"\1 20 {READBACK}", texts[CHECK])
    # No network here: that the board is reached is shown by test_upgrade_failures.py.
    texts[CHECK] += "\n[Service]\nEnvironment=PATH=/usr/sbin:/usr/bin\n"
    texts[KEY] += "[Install]\nRequiredBy=harmonia.service\n"
    scripts = {name: f"set -e\n{recorded()[f'{name}.sh']}" for name in SCRIPTS}
    machine = Machine(folder, texts, PROGRAMS | scripts, {})
    for name in ("backupPrepareCommand", "staticPaths"):
        # Scripts in the store without a first line: a shell runs them, as bash does.
        machine.write(f"/nix/store/{name}", recorded()[f"{name}.sh"], 0o755)
    machine.write("/etc/systemd/system/harmonia.service.d/key.conf", f"[Unit]\nRequires={KEY}\n")
    machine.write("/srv/harmonia.py", HARMONIA)
    machine.write("/srv/cdi.json", json.dumps(SPEC))
    machine.write("/nix/store/power_mode.py", (MODULES / "performance/power_mode.py").read_text())
    for name in ("reachable.py", "upgrade.py"):
        # It needs no longer to see that what is up here stays so.
        text = (MODULES / "upgrade" / name).read_text()
        text = text.replace("STEADY_SECONDS = 15.0", "STEADY_SECONDS = 0.1")
        machine.write(f"/nix/store/any/{name}", text)
    machine.write("/etc/nvpmodel.conf", config())
    write_board(machine.folder("/srv/board"), "MAXN", pinned=True)
    for name, frequency in {"old": 1300500000, "new": 612000000}.items():
        machine.write(f"/srv/{name}/bin/switch-to-configuration", SWITCH, 0o755)
        machine.write(f"/srv/{name}/frequency", f"{frequency}\n")
    # A container's root folder: /usr is bound there.
    for name in ("bin", "lib", "lib64"):
        (machine.folder("/srv/image") / name).symlink_to(f"usr/{name}")
    machine.write("/var/lib/secrets/backup", "correct-horse\n", 0o400)
    machine.write("/var/lib/orin-grafana/grafana-secret-key", "the key\n", 0o400)
    with machine:
        yield machine


def test_an_upgrade_that_breaks_a_unit_is_undone(machine: Machine) -> None:
    """`switch` itself fails then, which must not keep the check from its work."""
    old, new = (
        machine.run("nix-store", "--add", f"/srv/{name}").stdout.strip() for name in ("old", "new")
    )
    machine.run("nix-env", "--profile", PROFILE, "--set", old)
    machine.run("ln", "-s", old, "/run/booted-system")
    machine.run(f"{old}/bin/switch-to-configuration", "switch")
    machine.run("systemctl", "start", CHECK)
    assert f"{old} is good: 1 units are up" in machine.journal(CHECK)
    # What the collector keeps, and the boot loader's installation writes an entry of.
    good = f"{PROFILE}-profiles/orin-good"
    assert machine.run("readlink", "-f", good).stdout.strip() == old

    machine.run("sh", "-c", f"echo {new} >/srv/next")
    assert machine.run("systemctl", "start", UPGRADE, check=False).returncode == 1
    end = time.monotonic() + 30
    while machine.show(CHECK, "Result")["Result"] != "exit-code" and time.monotonic() < end:
        time.sleep(0.2)
    said = machine.journal(CHECK)
    assert f"{new} does not work: {READBACK} is failed" in said
    assert f"the last that passed is {old}: went back to it" in said
    assert machine.run("readlink", "-f", PROFILE).stdout.strip() == old
    assert machine.run("readlink", "-f", "/run/current-system").stdout.strip() == old
    assert machine.wait(READBACK, "active", 10)["Result"] == "success"


def write_database(machine: Machine, path: str, rows: int) -> None:
    """A database whose last rows are in its write-ahead log alone."""
    made = machine.folder("/srv") / "made.db"
    database = sqlite3.connect(made, isolation_level=None)
    database.execute("PRAGMA journal_mode=WAL")
    database.execute("CREATE TABLE run (n)")
    database.executemany("INSERT INTO run VALUES (?)", [(n,) for n in range(rows)])
    for end in ("", "-wal"):
        machine.put(path + end, made.with_name(f"made.db{end}").read_bytes())
    database.close()


#: What is lost with a disk and comes back from the backup, with its mode.
KEPT = {
    "/etc/nixos/flake.nix": "644",
    "/etc/nixos/keys/ssh host": "600",
    "/var/lib/orin-grafana/grafana-secret-key": "400",
    "/var/lib/orin-cache/secret-key": "600",
}


def test_a_backup_brings_back_a_board_that_lost_its_disk(machine: Machine) -> None:
    machine.run("systemctl", "start", KEY)
    # Neither a flake nor a database yet, which is no failure: restic 0.19 ends with 3 for less.
    machine.run("systemctl", "start", BACKUP)
    assert "skipping" not in machine.journal(BACKUP)
    write_database(machine, HISTORY, 7)
    for path, mode in KEPT.items():
        if path.startswith("/etc"):
            machine.put(path, f"text of {path}\n".encode())
            machine.run("chmod", mode, path)
    before = {path: machine.run("cat", path).stdout for path in KEPT}
    machine.run("systemctl", "start", BACKUP)

    # A power cut leaves a lock that keeps all others out: a check, slow enough to be killed.
    options = ("--no-cache", "-r", "/srv/backup", "-p", "/var/lib/secrets/backup")
    check = " ".join(("restic", *options, "check", "--read-data", "--limit-download", "1"))
    # By its whole name: what restic had not yet renamed is no lock, and keeps nobody out.
    lock = "ls /srv/backup/locks | grep -qx '[0-9a-f]\\{64\\}'"
    machine.run("sh", "-c", f"{check} & until {lock}; do sleep 0.02; done; kill -KILL $!")
    assert machine.run("sh", "-c", lock, check=False).returncode == 0
    # A copy that fails is a failed backup; the lock does not stand in the way of the next.
    machine.put(GRAFANA, b"no database at all " * 100)
    assert machine.run("systemctl", "start", BACKUP, check=False).returncode == 1
    assert "file is not a database" in machine.journal(BACKUP)
    assert machine.run("sh", "-c", lock, check=False).returncode != 0
    snapshots = machine.run("restic", *options, "snapshots", "--json").stdout
    assert snapshots.count('"short_id"') == 1

    # As docs/nixos.md says it.
    machine.run("rm", "-r", "/etc/nixos", "/var/lib/orin-grafana", "/var/lib/orin-backup", HISTORY)
    machine.run("sh", "-c", "rm -r /var/lib/orin-cache/*")
    machine.run("restic", *options, "restore", "latest", "--target", "/")
    # Else root has a history that its user cannot add to. The page's user is not here.
    page = (MODULES.parents[1] / "docs/nixos.md").read_text()
    (install,) = re.findall(rf"# (install .*/history\.db {HISTORY})\n", page)
    machine.run(*install.replace("orin -g users", "messagebus -g video", 1).split())
    assert machine.run("stat", "--format=%U", HISTORY).stdout == "messagebus\n"
    for path, mode in KEPT.items():
        assert machine.run("cat", path).stdout == before[path]
        assert machine.run("stat", "--format=%a %U", path).stdout == f"{mode} root\n"
    counted = machine.run("sqlite3", HISTORY, "PRAGMA integrity_check; SELECT count(*) FROM run")
    assert counted.stdout.split() == ["ok", "7"]

    # A disk that is not plugged in: nothing is written where it would be.
    missing = b"[Mount]\nWhat=/srv/none\nWhere=/srv/backup\nType=ext4\n"
    machine.put("/etc/systemd/system/srv-backup.mount", missing)
    machine.run("systemctl", "daemon-reload")
    started = machine.run("systemctl", "start", BACKUP, check=False)
    assert started.returncode == 1 and "dependency" in started.stderr


def test_a_cache_makes_its_key_once_and_says_it_to_the_other_boards(machine: Machine) -> None:
    status, name = machine.http("http://127.0.0.1:5000/nix-cache-info")
    assert (status, name) == (200, "orin-llm-1\n")
    shown = machine.journal(KEY)
    line = r'orin\.host\.caches\."http://orin-llm:5000" = "orin-llm-1:[A-Za-z0-9+/]{43}=";'
    assert re.search(line, shown), shown
    listed = machine.run("stat", "--format=%a %U", "/var/lib/orin-cache/secret-key").stdout
    assert listed == "600 root\n"
    secret = machine.run("cat", "/var/lib/orin-cache/secret-key").stdout
    assert secret.split(":")[1] not in shown
    machine.run("systemctl", "restart", KEY)
    assert machine.run("cat", "/var/lib/orin-cache/secret-key").stdout == secret
    pid = machine.wait(CACHE, "active", 10)["MainPID"]
    assert machine.run("stat", "--format=%u", f"/proc/{pid}").stdout.strip() != "0"


def contained(machine: Machine, script: str, *options: str) -> str:
    """Run a shell script in a container of podman; the programs in it are this machine's."""
    # Neither control groups nor limits above those of this machine: CI has no right to set them.
    common = ["--rm", "--network=none", "--cgroups=disabled", "--volume=/usr:/usr:ro"]
    limits = [f"--ulimit={name}=1000:1000" for name in ("nofile", "nproc")]
    command = ["podman", "run", *common, *limits, *options, "--rootfs", "/srv/image"]
    done = machine.run(*command, "/usr/bin/sh", "-c", script, check=False)
    return done.stdout + done.stderr


def test_a_container_that_asks_for_the_gpu_sees_it_for_as_long_as_the_board_is_up(
    machine: Machine,
) -> None:
    """Podman reads the CDI file at each start, long after its maker has ended."""
    assert machine.wait(CDI, "active", 20)["SubState"] == "exited"
    machine.run("systemctl", "restart", CDI)
    assert json.loads(machine.run("cat", CDI_FILE).stdout) == SPEC
    for node in NODES:
        machine.run("install", "-d", str(Path(node).parent))
        machine.run("mknod", node, "c", "1", "5")
    machine.put(f"{LIBRARY}/libcuda.so.1", b"the driver")
    script = f"head -c 4 {NODES[0]} | od; ls {' '.join(NODES)}; cat {LIBRARY}/libcuda.so.1"
    seen = contained(machine, script, "--device", "nvidia.com/gpu=all")
    assert seen == "0000000 000000 000000\n0000004\n" + "\n".join(NODES) + "\nthe driver"
    unseen = contained(machine, script)
    assert unseen.count("No such file or directory") == 4
    unknown = contained(machine, script, "--device", "nvidia.com/gpu=7")
    assert "unresolvable CDI devices nvidia.com/gpu=7" in unknown
