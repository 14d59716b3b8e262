"""What only root may read: the clocks of the memory controller and of the video engines."""

from jetson.files import Files
from jetson.readings import Clock, Readings

BPMP_CLOCKS = "sys/kernel/debug/bpmp/debug/clk"
KERNEL_CLOCKS = "sys/kernel/debug/clk"
#: Thor's memory controller has a devfreq node, which everybody may read.
THOR_EMC = "sys/class/devfreq/bwmgr"
#: The engines of Orin; numbered ones are listed by the names that the firmware gives them.
ENGINES = ("ape", "nvdec", "nvdla0", "nvdla1", "nvenc", "nvjpg", "nvjpg1", "ofa", "pva0", "vic")


def read_emc(files: Files) -> Clock | None:
    """The memory controller's clock."""
    for node, names in (
        (f"{BPMP_CLOCKS}/emc", ("rate", "min_rate", "max_rate")),
        (THOR_EMC, ("cur_freq", "min_freq", "max_freq")),
    ):
        current, low, high = (files.number(f"{node}/{name}") for name in names)
        if current is not None:
            return Clock("emc", current, low, high)
    return None


def read_debugfs(files: Files) -> Readings:
    """EMC and engine clocks; nothing on a machine without BPMP."""
    engines = []
    for name in ENGINES:
        rate = files.number(f"{BPMP_CLOCKS}/{name}/rate")
        count = files.number(f"{KERNEL_CLOCKS}/{name}/clk_enable_count")
        if rate is not None or count is not None:
            engines.append(Clock(name, rate, enabled=None if count is None else count > 0))
    return Readings(emc=read_emc(files), engines=tuple(engines))
