"""Every command of every page is run, parsed, or named with the reason why it is neither."""

import re
import shlex
import subprocess
from pathlib import Path

import click
import pytest
from tests.docs.pages import LANGUAGES, REPOSITORY, blocks, pages, prose, table_commands, text
from tests.docs.rules import NO_COMMANDS, RULES, Elsewhere, NotHere, Parsed, Run, rule

from orinbench.cli import orinbench

BLOCKS = [block for page in pages() for block in blocks(page)]
# Blocks that show output are run by test_output.py, which compares it.
COMMANDS = {
    command: f"{block.page}:{block.line}"
    for block in BLOCKS
    if not block.mark
    for command in block.commands
} | {command: f"{page}:{line}" for page in pages() for line, command in table_commands(page)}


def shell(command: str, folder: Path, environment: dict[str, str]) -> tuple[int, str]:
    done = subprocess.run(
        ["bash", "-c", command], cwd=folder, env=environment, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=600, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout


def test_every_command_has_a_rule_and_every_rule_a_command() -> None:
    without = [f"{place}: {command}" for command, place in COMMANDS.items() if not rule(command)]
    assert not without, f"say in tests/docs/rules.py what becomes of {without}"
    used = {found[0] for found in map(rule, COMMANDS) if found}
    assert not [pattern for pattern, _ in RULES if pattern not in used], "rules of no command"


def test_a_block_without_a_command_is_known() -> None:
    seen = set()
    for block in BLOCKS:
        if block.commands or block.language in LANGUAGES:
            continue
        known = [k for k in NO_COMMANDS if k[0] == block.page and block.lines[0].startswith(k[1])]
        assert known, f"{block.page}:{block.line}: no command seen, and not in NO_COMMANDS"
        seen |= set(known)
    assert seen == NO_COMMANDS.keys()


def answers(kind: type) -> list[str]:
    return [c for c in COMMANDS if (found := rule(c)) and isinstance(found[1], kind)]


def test_commands_run(desk: Path, environment: dict[str, str]) -> None:
    """In the pages' order: some leave what others read."""
    done: dict[str, str] = {}
    for command in answers(Run):
        found = rule(command)
        assert found and isinstance(found[1], Run)
        how, groups = found[1], found[2]
        real = how.instead.format(groups[0], *groups.groups()) if how.instead else command
        real = real.replace("/tmp/", f"{desk}/")
        if real in done:
            continue
        code, out = shell(real, desk, environment)
        done[real] = out
        assert code == how.code, f"{COMMANDS[command]}: {real}\n{out}"
        assert re.search(how.shows, out), f"{COMMANDS[command]}: {real}\n{out}"


@pytest.mark.parametrize("command", answers(Parsed))
def test_flags_are_taken(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command's own parser reads it, values included."""
    words = shlex.split(re.split(r" [|>] ", command)[0])
    assert words.pop(0) == "orinbench", f"{command}: only orinbench's parser is known here"
    monkeypatch.chdir(tmp_path)
    for word in words:
        if word.endswith((".gguf", ".json")):
            Path(word).touch()
        if word.startswith("/") and not Path(word).exists():
            words[words.index(word)] = str(tmp_path)
    name = words.pop(0)
    found = orinbench.get_command(click.Context(orinbench), name)
    assert found is not None, f"orinbench has no command {name}"
    found.make_context(name, words)


@pytest.mark.parametrize("command", answers(Elsewhere))
def test_what_runs_it_elsewhere_is_there(command: str) -> None:
    found = rule(command)
    assert found and isinstance(found[1], Elsewhere)
    file, _, name = found[1].place.partition("::")
    content = text(file)
    assert found[1].says in content, f"{file} no longer holds {found[1].says!r}"
    assert not name or re.search(rf"(?m)^def {name}\(", content), found[1].place


def test_reasons_are_given() -> None:
    for command in answers(NotHere) + answers(Parsed):
        found = rule(command)
        assert found and isinstance(found[1], NotHere | Parsed) and len(found[1].why) > 10


def test_commands_named_in_sentences_exist() -> None:
    """`orinbench X`, `make X` and `nix run .#X` in prose and tables name what there is."""
    targets = set(re.findall(r"(?m)^([\w-]+):", (REPOSITORY / "Makefile").read_text()))
    apps = (REPOSITORY / "overlays" / "apps.nix").read_text()
    for page in pages():
        for code in re.findall(r"`([^`\n]+)`", prose(page)):
            if match := re.match(r"orinbench ([a-z][\w-]+)", code):
                known = orinbench.get_command(click.Context(orinbench), match[1])
                assert known, f"{page}: `{code}`: orinbench has no {match[1]}"
            if match := re.match(r"make ([\w-]+)(?!=)\b", code):
                assert match[1] in targets, f"{page}: `{code}`: no such target"
            if match := re.match(r"nix run \.#([\w-]+)", code):
                assert match[1] in apps, f"{page}: `{code}`: no such app"
