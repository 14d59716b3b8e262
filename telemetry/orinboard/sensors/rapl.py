"""The energy counters of an x86 processor, through powercap."""

from orinboard.files import FileReader
from orinboard.readings import Rail, Readings

POWERCAP = "sys/class/powercap"
#: Packages, and memory, which is not in its package's figure. Cores and uncore are; psys is the
#: whole machine (kernel Documentation/power/powercap).
COUNTED = ("package", "dram")


def read_rapl(files: FileReader) -> Readings:
    """Counters in joules of the packages and of their memory; the files are root's by default."""
    rails = []
    for entry in files.entries(POWERCAP):
        # intel-rapl:0 is a package, intel-rapl:0:2 a part of it; intel-rapl-mmio shows them again.
        if not entry.startswith("intel-rapl:"):
            continue
        name = files.text(f"{POWERCAP}/{entry}/name")
        if not name or not name.startswith(COUNTED):
            continue
        microjoules = files.number(f"{POWERCAP}/{entry}/energy_uj")
        wrap = files.number(f"{POWERCAP}/{entry}/max_energy_range_uj")
        if microjoules is None:
            continue
        package = entry.split(":")[1]
        rails.append(
            Rail(
                name=name if name.startswith("package") else f"{name}-{package}",
                device="rapl",
                chip="rapl",
                joules=microjoules / 1e6,
                joules_wrap=None if wrap is None else wrap / 1e6,
            )
        )
    return Readings(rails=tuple(rails))
