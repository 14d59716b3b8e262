"""A copy is what a process of its own is."""

import pytest
from tests.patches.tegra.device import Tegra

SCRIPT = """
import subprocess
d = Device["NV"]
x = (Tensor(np.arange(8)).realize() + 1).tolist()
second = subprocess.run([sys.executable, "-c", "import os; print(os.path.exists('/dev/nvgpu'))"],
                        capture_output=True, text=True).stdout
say(x=x, main=[__name__, __file__, vars(sys.modules["__main__"])["x"]], argv=sys.argv,
    folder=[os.getcwd(), sys.path[0]], second=second, stdin=sys.stdin.read(),
    variables=sorted(os.environ), tty=[stream.isatty() for stream in (sys.stdout, sys.stderr)])
class Late:
    def __del__(self): print("at the very end", x, file=sys.stderr)
late = Late()
kept = d.iface.alloc(4096)
"""


@pytest.mark.parametrize("end", ["", "raise ValueError('wrong')", "os.kill(os.getpid(), 9)"])
def test_both_run_alike(tegra: Tegra, end: str) -> None:
    copy = tegra(SCRIPT + end, clean=False)
    alone = tegra(SCRIPT + end, clean=False, DEV="TEGRA+NV")
    assert copy.said == alone.said and copy.said["x"] == [*range(1, 9)]
    assert copy.said["second"] == "True\n" and copy.status == alone.status
    for key in ("counts", "faults", "notes", "leaks"):
        assert copy.report.get(key) == alone.report.get(key), key
    ours = [line for line in copy.stderr.splitlines() if "copies.py" not in line]
    assert ours[-1:] == alone.stderr.splitlines()[-1:]


def test_a_command_that_is_refused(tegra: Tegra) -> None:
    run = tegra("", "--l2", "none", clean=False)
    assert run.status == 2 and run.stderr.startswith("nvgpusim: error: ") and "--l2" in run.stderr
