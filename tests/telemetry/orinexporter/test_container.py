"""Container image and compose file: what they name is there, and a hidden device tree is found."""

import ast
import re
import subprocess
import sys
from importlib.metadata import distributions, version
from pathlib import Path

import yaml
from tests.telemetry.conftest import TELEMETRY, Tree, idle

from orinboard.files import FileReader
from orinboard.replay import TreeOnDisk
from orinboard.sensors.system import read_identity

#: What a distribution's package is called where it is imported.
IMPORTED_AS = {"pyyaml": "yaml"}


def test_the_image_has_what_the_exporter_imports() -> None:
    said = (TELEMETRY / "Containerfile").read_text()
    (wanted,) = re.findall(r"wanted = '(.*?)'", said)
    imported = set()
    for room in ("orinboard", "orinexporter"):
        assert f"COPY telemetry/{room} /app/{room}" in said
        for file in (TELEMETRY / room).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.Import):
                    imported |= {alias.name.partition(".")[0] for alias in node.names}
                elif isinstance(node, ast.ImportFrom):
                    imported.add((node.module or "").partition(".")[0])
    # NVML is there beside them; a machine without it has no pynvml either.
    needed = imported - sys.stdlib_module_names - {"orinboard", "orinexporter", "pynvml"}
    assert {IMPORTED_AS.get(name, name) for name in wanted.split()} == needed


def test_the_image_knows_what_it_is_and_what_it_needs(tmp_path: Path) -> None:
    """The image has no installed package, and the exporter asks for its version as it starts."""
    (script,) = re.findall(
        r'RUN python3 -c "(.*?)"', (TELEMETRY / "Containerfile").read_text(), re.S
    )
    script = script.replace("\\\n", "\n")
    project = TELEMETRY.parent / "pyproject.toml"
    script = script.replace("/tmp/pyproject.toml", str(project)).replace("'/app'", f"'{tmp_path}'")
    done = subprocess.run(
        [sys.executable, "-c", " ".join(script.split("\n"))],
        capture_output=True,
        text=True,
        check=True,
    )
    assert len(done.stdout.splitlines()) == 8 and "uvicorn>=" in done.stdout
    (found,) = distributions(path=[str(tmp_path)])
    assert (found.name, found.version) == ("tinygrad-orin", version("tinygrad-orin"))


def test_what_the_compose_file_names_is_there() -> None:
    services = yaml.safe_load((TELEMETRY / "compose.yml").read_text())["services"]
    assert (
        TELEMETRY / services["exporter"]["build"]["context"] / "telemetry/Containerfile"
    ).exists()
    bound = [volume.split(":") for service in services.values() for volume in service["volumes"]]
    for source, _, *mode in bound:
        assert mode == ["ro"] or source == "prometheus"
        assert not source.startswith("./") or (TELEMETRY / source).exists()
    assert services["exporter"]["cap_drop"] == ["ALL"]


def test_a_board_whose_procfs_leads_nowhere(stage: TreeOnDisk) -> None:
    """In a container the link /proc/device-tree ends in a folder that is hidden."""
    proc, sysfs = "proc/device-tree/", "sys/firmware/devicetree/base/"
    tree: Tree = {path.replace(proc, sysfs): node for path, node in idle().items()}
    stage.replace_tree(tree)
    identity = read_identity(FileReader(stage.roots)).identity
    assert identity and identity.soc == "tegra234" and "Orin" in identity.model
