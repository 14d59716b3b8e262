"""A key is refused by the flake where `ssh-keygen -lf` refuses it, and taken where it is taken."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest
from tests.nixos.conftest import NIX, ROOT

KINDS = ("rsa 1024", "rsa 4096", "ecdsa 256", "ecdsa 384", "ecdsa 521", "ed25519 256")


def spoiled(body: str, kinds: list[str]) -> list[str]:
    """Keys cut, lengthened, without their middle, and under the names of others."""
    bodies = [body, body[:-4], body[:-1], f"{body}AAAA", body[:40] + body[44:]]
    return [*(f"{kinds[0]} {each}" for each in bodies), *(f"{kind} {body}" for kind in kinds[1:])]


def test_ssh_keygen_and_the_flake_agree(tmp_path: Path) -> None:
    if shutil.which(NIX[0]) is None or shutil.which("ssh-keygen") is None:
        pytest.skip("nix and ssh-keygen are not both here: https://nixos.org/download")
    made = []
    for n, words in enumerate(KINDS):
        kind, bits = words.split()
        file = tmp_path / str(n)
        command = ["ssh-keygen", "-q", "-t", kind, "-b", bits, "-N", "", "-f", str(file)]
        subprocess.run(command, check=True)
        made.append(file.with_suffix(".pub").read_text().split()[:2])
    lines = []
    for kind, body in made:
        lines += spoiled(body, [kind, *(other for other, _ in made if other != kind)])
    truth = []
    for line in lines:
        (tmp_path / "key").write_text(f"{line}\n")
        asked = subprocess.run(["ssh-keygen", "-lf", tmp_path / "key"], capture_output=True)
        truth.append(asked.returncode == 0)
    expression = (
        "map (key: import ./nixos/modules/ssh-key.nix { lib = import <nixpkgs/lib>; } "
        "(builtins.elemAt key 0) (builtins.elemAt key 1) == null) "
        f"(builtins.fromJSON {json.dumps(json.dumps([line.split() for line in lines]))})"
    )
    command = [*NIX, "eval", "--impure", "--json", "--expr", expression]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    if done.returncode and ("nixpkgs" in done.stderr or "experimental" in done.stderr):
        pytest.skip(f"nix does not evaluate here: {done.stderr.strip().splitlines()[-1][:200]}")
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert len(said) == len(lines) > 50 and sum(truth) == len(KINDS)
    assert dict(zip(lines, said, strict=True)) == dict(zip(lines, truth, strict=True))
