"""Whatever lands in a report, it says nothing of whose board it is."""

import json
from pathlib import Path

import pytest

from orinbench.check.device.privacy import Scrubber, machine_secrets

PLANTED = {
    "host": "falcon-7",
    "user": "mkowalska",
    "name": "Kowalska",
    "serial": "1422723014587",
    "machine-id": "d3b07384d113edec49eaa6238ad5ff00",
}
TEXTS = {
    "model /home/mkowalska/models/secret-project.gguf is fine": "secret-project",
    "~/private/notes.txt": "notes",
    "on falcon-7, serial 1422723014587": "falcon-7",
    "FALCON-7.local answered": "FALCON",
    "from 192.168.1.77 and fe80:0:0:0:1:2:3:4": "192.168",
    "eth0 48:b0:2d:aa:bb:cc": "48:b0",
    "mail m.k@example.org": "example",
    "GPU-8f2c1a3e-77aa-bbbb-cccc-0123456789ab": "8f2c1a3e",
    "id d3b07384d113edec49eaa6238ad5ff00": "d3b07384",
    "by mkowalska": "kowalska",
    "file=/var/lib/models/x.gguf, next": "models",
}


@pytest.mark.parametrize(("text", "secret"), TEXTS.items())
def test_planted_secrets_are_gone_everywhere(text: str, secret: str) -> None:
    scrub = Scrubber(PLANTED.values())
    value = {"steps": [{"reason": text, text: 1}, (text, None, 1.5, True)]}
    said = json.dumps(scrub(value))
    assert secret.lower() not in said.lower()
    assert "<" in said


@pytest.mark.parametrize(
    "text",
    [
        "/dev/nvgpu/igpu0/ctrl",
        "/sys/class/hwmon/hwmon1",
        "tinygrad-orin 0.13.0+orin.1ba415c2285d",
        "L4T R36 (release), REVISION: 4.3",
        "driver 580.159.04",
        "pc 0xfbffa04090, warp_esr 0xf",
        "NVIDIA Jetson AGX Orin Developer Kit",
        "112.5 GB/s",
        "pp512+tg128 @ d4096",
        "test/backend/test_ops.py::TestOps::test_add",
        "2026-11-21T13:55Z",
        "root:video 0660",
        "copies and/or sums",
    ],
)
def test_what_names_nobody_stays(text: str) -> None:
    assert Scrubber({*PLANTED.values(), "orin", "root", "nvidia", "ab"}).scrubbed_text(text) == text


def test_this_machines_secrets_are_found() -> None:
    import os

    found = machine_secrets()
    assert os.uname().nodename in found and str(Path.home()) in found
    said = Scrubber({*found, "plantedhost"})({"a": f"{Path.home()}/x on plantedhost"})
    assert said == {"a": "<path> on <private>"}
