"""A real systemd as PID 1 in namespaces of this machine, with the units of an evaluated host.

No virtual machine, so no KVM: `unshare` gives processes, mounts, network, host name and control
groups of their own, `pid1.sh` a root folder. Programs of the Nix store are stand-ins under the
paths that the units name; systemd and the units are the real ones.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.nixos.recorded import STORE

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
SYSTEMD = Path("/usr/lib/systemd/systemd")
#: Units of systemd's own that ours order themselves by.
TARGETS = ("basic", "local-fs", "multi-user", "network", "network-online", "paths", "shutdown")
MORE_TARGETS = ("slices", "sockets", "swap", "sysinit", "timers", "umount")
JOURNAL = ("systemd-journald.service", "systemd-journald.socket", "systemd-journald-dev-log.socket")
#: Bus over which node_exporter asks systemd.
BUS = ("dbus.service", "dbus.socket")
#: Path where the stand-ins find this checkout and its Python: units hide /root and /home.
PYTHON, CHECKOUT, PACKAGES = "/opt/python", "/opt/checkout", "/opt/packages"
ROOMS = ("benchmarks", "engine", "simulator", "telemetry")
_USERS = ("messagebus", "sshd")
_GROUPS = ("systemd-journal", "video", "render", "adm", "utmp", "tty")


def refusal() -> str | None:
    """Return why this machine cannot do it, in one line, or None."""
    if sys.platform != "linux" or not SYSTEMD.exists():
        return f"no systemd here ({SYSTEMD}): apt-get install systemd"
    if os.geteuid() != 0:
        return "a systemd of one's own needs root: run pytest as root"
    tools = ("unshare", "nsenter", "ip", "dbus-daemon")
    if missing := [tool for tool in tools if shutil.which(tool) is None]:
        return f"{', '.join(missing)}: not here: apt-get install util-linux iproute2 dbus"
    if _cgroups() is None:
        return "no control groups of version 2 are mounted here"
    probe = subprocess.run(
        ["unshare", *_NAMESPACES, "mount", "-t", "tmpfs", "probe", "/mnt"],
        capture_output=True,
        text=True,
        timeout=30,
    )
    return f"no namespaces here: {probe.stderr.strip()}" if probe.returncode else None


_NAMESPACES = ("--mount", "--pid", "--fork", "--cgroup", "--ipc", "--uts", "--net", "--kill-child")


def _cgroups() -> Path | None:
    """Mount point of the control groups of version 2."""
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, where, kind, options, *_ = line.split()
        if kind == "cgroup2" and "rw" in options.split(","):
            return Path(where)
    return None


class Machine:
    """One systemd with its units; a context that ends it.

    units: texts by unit name.
    programs: shell scripts by their names below `/nix/store/any/bin`.
    binds: folders and files of this machine by the paths that they get inside, read-only.
    kept: folders by such paths, writable: they outlive the machine.
    """

    def __init__(
        self,
        folder: Path,
        units: Mapping[str, str],
        programs: Mapping[str, str],
        binds: Mapping[str, Path],
        kept: Mapping[str, Path] | None = None,
    ) -> None:
        self._kept = kept or {}
        self._tree = folder / "tree"
        self._log = folder / "pid1.log"
        self._binds = {
            PYTHON: Path(sys.base_prefix),
            CHECKOUT: ROOT,
            PACKAGES: Path(sys.prefix) / "lib" / f"python3.{sys.version_info.minor}/site-packages",
            **binds,
        }
        if (links := Path("/etc/alternatives")).exists():
            self._binds[str(links)] = links
        named = re.compile(r"^User=(?!root$)(.+)$", flags=re.MULTILINE)
        users = {user for text in units.values() for user in named.findall(text)}
        self._write_base([*_USERS, *sorted(users)])
        for name, text in units.items():
            self.write(f"/etc/systemd/system/{name}", text)
            for targets in re.findall(r"(?m)^WantedBy=(.*)$", text):
                for target in targets.split():
                    self._want(name, target)
        for name, script in programs.items():
            self.write(f"{STORE}/bin/{name}", f"#!/bin/sh\n{script}\n", 0o755)
        self._outer: subprocess.Popen[bytes] | None = None
        self._group: Path | None = None
        self._pid = 0

    def write(self, path: str, text: str, mode: int = 0o644) -> None:
        """Write a file into the root folder, before the machine starts."""
        target = self._tree / path.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
        target.chmod(mode)

    def folder(self, path: str) -> Path:
        """A folder of the root folder, to fill before the machine starts."""
        target = self._tree / path.lstrip("/")
        target.mkdir(parents=True, exist_ok=True)
        return target

    def _write_base(self, users: list[str]) -> None:
        numbered = [(name, 200 + n) for n, name in enumerate(users)]
        own = "".join(f"{name}:x:{n}:{n}::/:/bin/false\n" for name, n in numbered)
        nobody = "nobody:x:65534:65534::/:/bin/false\n"
        self.write("/etc/passwd", f"root:x:0:0::/root:/bin/sh\n{nobody}{own}")
        numbered += [(name, 50 + n) for n, name in enumerate(_GROUPS)]
        groups = "".join(f"{name}:x:{n}:\n" for name, n in numbered)
        self.write("/etc/group", f"root:x:0:\nnogroup:x:65534:\n{groups}")
        self.write("/etc/machine-id", "0123456789abcdef0123456789abcdef\n")
        self.write("/etc/hosts", "127.0.0.1 localhost\n::1 localhost\n")
        if (cache := Path("/etc/ld.so.cache")).exists():
            shutil.copy(cache, self._tree / "etc")
        debian = Path("/usr/lib/systemd/system")
        targets = [f"{name}.target" for name in TARGETS + MORE_TARGETS]
        for name in [*targets, *JOURNAL, *BUS]:
            if (debian / name).exists():
                self.write(f"/etc/systemd/system/{name}", (debian / name).read_text())
        for unit in (*JOURNAL[1:], BUS[1]):
            self._want(unit, "sockets.target")
        (self._tree / "etc/systemd/system/default.target").symlink_to("multi-user.target")

    def _want(self, unit: str, target: str) -> None:
        folder = self._tree / "etc/systemd/system" / f"{target}.wants"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / unit).symlink_to(f"/etc/systemd/system/{unit}")

    def __enter__(self) -> "Machine":
        groups = _cgroups()
        assert groups is not None
        self._group = groups / f"orin-pid1-{os.getpid()}-{id(self)}"
        self._group.mkdir()
        command = [
            "sh",
            "-c",
            'echo $$ >"$0/cgroup.procs" && exec "$@"',
            str(self._group),
            *("unshare", *_NAMESPACES, "--propagation", "private"),
            *("bash", str(HERE / "pid1.sh"), str(self._tree)),
            *(f"{source}={target}" for target, source in self._binds.items()),
            *(f"rw:{source}={target}" for target, source in self._kept.items()),
        ]
        with self._log.open("wb") as log:
            self._outer = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            self._await_manager()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _await_manager(self) -> None:
        assert self._outer is not None
        end = time.monotonic() + 240
        while time.monotonic() < end and self._outer.poll() is None:
            children = Path(f"/proc/{self._outer.pid}/task/{self._outer.pid}/children").read_text()
            if children:
                self._pid = int(children.split()[0])
                systemd = Path(f"/proc/{self._pid}/comm").read_text() == "systemd\n"
                # The socket by which systemctl asks, so that it is not started in vain.
                listens = Path(f"/proc/{self._pid}/root/run/systemd/private").exists()
                answers = systemd and listens and self.run("systemctl", "show", check=False)
                if answers and answers.returncode == 0:
                    return
            time.sleep(0.05)
        raise RuntimeError(f"systemd did not start as PID 1:\n{self._log.read_text()}")

    def __exit__(self, *error: object) -> None:
        assert self._outer is not None and self._group is not None
        if (kill := self._group / "cgroup.kill").exists():
            kill.write_text("1")
        self._outer.kill()
        self._outer.wait()
        for folder in sorted(self._group.rglob("*"), reverse=True):
            if folder.is_dir():
                _remove_group(folder)
        _remove_group(self._group)

    def ended(self) -> bool:
        """True if systemd has shut the machine down, or restarted it."""
        assert self._outer is not None
        return self._outer.poll() is not None

    def works(self, *units: str) -> bool:
        """True while one of the units has a process: a look from outside, which costs nothing."""
        assert self._group is not None
        return any((self._group / "system.slice" / unit).exists() for unit in units)

    def run(self, *command: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run a command inside, as root."""
        process = subprocess.Popen(
            ["nsenter", "--all", "--target", str(self._pid), "--wdns=/", *command],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={"PATH": "/usr/bin:/usr/sbin", "SYSTEMD_COLORS": "0", "LC_ALL": "C.UTF-8"},
        )
        end = time.monotonic() + 300
        while True:
            try:
                output, errors = process.communicate(timeout=0.5)
                break
            except subprocess.TimeoutExpired:
                # A restart stops all processes before it ends them, and nsenter stops with its own.
                process.send_signal(signal.SIGCONT)
                if time.monotonic() > end:
                    process.kill()
                    raise
        if check and process.returncode:
            raise AssertionError(f"{' '.join(command)}: {output}{errors}")
        return subprocess.CompletedProcess(command, process.returncode, output, errors)

    def put(self, path: str, content: bytes) -> None:
        """Write a file while the machine runs; its folders are made."""
        target = Path(f"/proc/{self._pid}/root") / path.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content)

    def show(self, unit: str, *names: str) -> dict[str, str]:
        """Properties of a unit, as `systemctl show` has them."""
        said = self.run("systemctl", "show", unit, *(f"--property={name}" for name in names)).stdout
        return dict(line.split("=", 1) for line in said.splitlines() if "=" in line)

    def journal(self, unit: str) -> str:
        """Journal of the unit, and systemd's lines about it."""
        return self.run("journalctl", "--no-pager", "--output=cat", f"--unit={unit}").stdout

    def wait(self, unit: str, state: str, seconds: float) -> dict[str, str]:
        """Wait until a unit's ActiveState is `state`; its properties then.

        A unit that has failed is not waited for: systemd does not start it again.
        """
        end = time.monotonic() + seconds
        while (now := self.show(unit, "ActiveState", "SubState", "MainPID", "NRestarts", "Result"))[
            "ActiveState"
        ] != state:
            if time.monotonic() > end or now["ActiveState"] == "failed":
                raise AssertionError(f"{unit} is {now}, of {seconds} s:\n{self.journal(unit)}")
            time.sleep(0.2)
        return now

    def http(
        self, url: str, body: Any = None, headers: Mapping[str, str] | None = None
    ) -> tuple[int, str]:
        """Ask a server inside: its status and body; status 0 and the reason where none answers."""
        spoken = json.dumps({"url": url, "body": body, "headers": dict(headers or {})})
        python = ("env", f"LD_LIBRARY_PATH={PYTHON}/lib", f"{PYTHON}/bin/python3")
        status, _, text = self.run(*python, "-c", _CLIENT, spoken).stdout.partition("\n")
        return int(status), text


_CLIENT = """
import json, sys, urllib.error, urllib.request
asked = json.loads(sys.argv[1])
data = None if asked["body"] is None else json.dumps(asked["body"]).encode()
headers = {"Content-Type": "application/json", **asked["headers"]}
try:
    request = urllib.request.Request(asked["url"], data, headers)
    answer = urllib.request.urlopen(request, timeout=120)
    print(answer.status, answer.read().decode(), sep="\\n")
except urllib.error.HTTPError as error:
    print(error.code, error.read().decode(), sep="\\n")
except OSError as error:
    print(0, error, sep="\\n")
"""


def _remove_group(folder: Path) -> None:
    """Remove a control group whose processes have just been killed."""
    for _ in range(100):
        try:
            return folder.rmdir()
        except OSError:
            time.sleep(0.05)


def with_checkout(command: str) -> str:
    """A shell script that runs a command with the Python of this checkout."""
    path = ":".join([*(f"{CHECKOUT}/{room}" for room in ROOMS), PACKAGES])
    # A Python of one's own may lie in /root, where it would look for its library.
    home = f"PYTHONHOME={PYTHON} LD_LIBRARY_PATH={PYTHON}/lib"
    return f"export {home} PYTHONPATH={path} PYTHONDONTWRITEBYTECODE=1\n{command}"


def python_program(module: str) -> str:
    """A shell script that runs the `main` of a module of this checkout."""
    start = f"from {module} import main; main()"
    return with_checkout(f'exec {PYTHON}/bin/python3 -c "{start}" "$@"')
