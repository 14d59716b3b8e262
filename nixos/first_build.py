"""Say what the first build of a host takes: nix derivation show -r HOST | first_build.py

A derivation whose sources are NVIDIA's, or that needs one of these, is in no public cache: Hydra
builds nothing unfree. Neither is what our overlay changes. The rest comes from cache.nixos.org, but
for the host's own small files and a few of JetPack's. Standard library only.
"""

import argparse
import json
import re
import sys
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

#: Addresses that NVIDIA's sources have, in the derivations of jetpack-nixos and of cudaPackages.
NVIDIA = re.compile(r"[a-z]+://\S*(nvidia\.com|nv-tegra)\S*")

#: Part of the names of packages that are made for the board on another machine.
CROSS = "aarch64-unknown-linux-gnu"

Derivations = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class FirstBuild:
    """Parts of a host's first build. downloads: addresses; built: names, each sorted.

    cross: packages that another machine makes for the board; Hydra makes few of them.
    """

    downloads: list[str]
    built: list[str]
    cross: int
    cached: int
    own: int


def attributes(derivation: dict[str, Any]) -> dict[str, Any]:
    """Attributes that a derivation was made of, structured or not."""
    env: dict[str, Any] = derivation["env"]
    return json.loads(env["__json"]) if "__json" in env else env


def address(derivation: dict[str, Any]) -> str | None:
    """The first of NVIDIA's addresses that a download has, or None."""
    given = attributes(derivation)
    text = " ".join(str(given.get(name, "")) for name in ("urls", "url"))
    found = NVIDIA.search(text)
    return found.group(0).strip("'],") if found else None


def small(derivation: dict[str, Any]) -> bool:
    """True for what Nix is told to make here: texts, links, units."""
    given = attributes(derivation)
    return bool(given.get("preferLocalBuild")) or given.get("allowSubstitutes") in ("", False)


def first_build(derivations: Derivations, changed: Collection[str] = ()) -> FirstBuild:
    """Divide a closure of derivations, as `nix derivation show -r` has it.

    changed: packages by their `pname` that no cache has though no source of theirs is NVIDIA's.
    """
    fetched = {
        path
        for path, derivation in derivations.items()
        if any("hash" in output for output in derivation["outputs"].values())
    }
    sources = {path: url for path in fetched if (url := address(derivations[path]))}
    # Users by what they use, walked from the sources on.
    users: dict[str, list[str]] = {}
    for path in derivations.keys() - fetched:
        for used in derivations[path]["inputDrvs"]:
            users.setdefault(used, []).append(path)
    after = {
        path
        for path in derivations.keys() - fetched
        if attributes(derivations[path]).get("pname") in changed
    }
    todo = [*sources, *after]
    while todo:
        new = [user for user in users.get(todo.pop(), ()) if user not in after]
        after.update(new)
        todo += new
    others = derivations.keys() - fetched - after
    own = {path for path in others if small(derivations[path])}
    cross = sum(CROSS in derivations[path]["name"] for path in others - own)
    built = [derivations[path]["name"] for path in after if not small(derivations[path])]
    return FirstBuild(
        downloads=sorted(sources.values()),
        built=sorted(built),
        cross=cross,
        cached=len(derivations) - len(sources) - len(after) - len(own) - cross,
        own=len(own) + len(after) - len(built),
    )


def main(arguments: list[str] | None = None) -> int:
    """Read the derivations from the standard input; 2 where they are none."""
    parser = argparse.ArgumentParser(
        prog="first-build",
        description="nix derivation show -r HOST | first-build: what HOST's first build takes.",
    )
    parser.add_argument(
        "--changed",
        nargs="*",
        default=[],
        metavar="PNAME",
        help="packages that no cache has although they need no source of NVIDIA's",
    )
    changed = parser.parse_args(arguments).changed
    try:
        if sys.stdin.isatty():
            raise ValueError("a terminal")
        parts = first_build(json.load(sys.stdin), changed)
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        print(
            f"first-build: no derivations on the standard input ({error!r}): "
            "nix derivation show -r HOST | first-build",
            file=sys.stderr,
        )
        return 2
    print(f"{len(parts.downloads)} downloads from NVIDIA:")
    print("".join(f"  {each}\n" for each in parts.downloads))
    print(f"{len(parts.built)} builds that no public cache has:")
    for name, times in Counter(parts.built).items():
        print(f"  {name}{f' ({times} of this name)' if times > 1 else ''}")
    if parts.cross:
        print(f"\n{parts.cross} more that are cross-compiled, of which public caches have few.")
    print(
        f"\n{parts.own} small files of the host itself. The caches have the other {parts.cached} "
        "or what they make: `nix build --dry-run HOST` says how many bytes that is."
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
