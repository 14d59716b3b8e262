"""Write a recording of the exporter's made-up board into a folder, for `--replay`."""

import sys
from pathlib import Path

from orinboard.replay import FILE, save
from orinexporter import scenario

with (Path(sys.argv[1]) / FILE).open("w") as file:
    save(scenario.frames(), file)
