"""The group of orinbench's commands."""

import subprocess
import sys

import click

from orinbench.cli import orinbench


def test_commands_have_the_names_they_are_asked_for_by() -> None:
    context = click.Context(orinbench)
    for name in orinbench.list_commands(context):
        command = orinbench.get_command(context, name)
        assert command is not None and command.name == name


def test_a_command_is_imported_alone() -> None:
    program = (
        "import sys; from orinbench.cli import import_command; import_command(['synth'])\n"
        "print(*sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    modules = done.stdout.split()
    assert "orinbench.synth" in modules
    assert "httpx" not in modules  # which the checks and the servers' commands take long to import


def test_for_a_command_that_is_none_all_are_imported() -> None:
    """Click looks among them for the one that was meant."""
    group = type(orinbench)("orinbench")
    context = click.Context(group)
    assert group.get_command(context, "synt") is None
    assert sorted(group.commands) == group.list_commands(context)


def test_what_lists_the_commands_imports_them_first() -> None:
    """While Ctrl-C is silent."""
    program = (
        "import sys; from orinbench.cli import import_command, main\n"
        "import_command([]); before = {*sys.modules}\n"
        "try: main([])\n"
        "except SystemExit: pass\n"
        "print([name for name in {*sys.modules} - before if name.startswith('orinbench')])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"
