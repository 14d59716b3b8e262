"""A key is refused where `ssh-keygen -lf` refuses it: when evaluated, or when a host is built."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from tests.nixos.conftest import NIX, ROOT

KINDS = ("rsa 1024", "rsa 4096", "ecdsa 256", "ecdsa 384", "ecdsa 521", "ed25519 256")
#: The derivation's script, and what the evaluation says of each line.
EXPRESSION = """lines: let
  keys = import ./nixos/modules/host/ssh-keys.nix;
  pkgs.buildPackages = { openssh = null; runCommand = _: _: text: text; };
  pkgs.lib.escapeShellArgs = _: "\\"$KEY\\"";
in {
  script = keys.checked pkgs [ ];
  whole = map (line: keys.isWhole (builtins.elemAt line 0) (builtins.elemAt line 1)) lines;
}"""


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
    given = json.dumps(json.dumps([line.split() for line in lines]))
    command = [*NIX, "eval", "--impure", "--json", "--expr"]
    command += [f"({EXPRESSION}) (builtins.fromJSON {given})"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    if done.returncode and "experimental" in done.stderr:
        pytest.skip(f"nix does not evaluate here: {done.stderr.strip().splitlines()[-1][:200]}")
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert len(said["whole"]) == len(lines) > 50
    taken = []
    for line, whole in zip(lines, said["whole"], strict=True):
        environment = os.environ | {"KEY": line, "out": str(tmp_path / "out")}
        command = ["bash", "-c", said["script"]]
        built = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True)
        taken += [line] if built.returncode == 0 else []
        # What is whole is never refused, and of what is not the evaluation leaves RSA's alone.
        assert whole >= (built.returncode == 0), line
        assert whole == (built.returncode == 0) or line.startswith("ssh-rsa"), line
    assert taken == [" ".join(each) for each in made]
