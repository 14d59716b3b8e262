"""First on PYTHONPATH of a simulated run: starts the simulator, then the real sitecustomize."""

import importlib
import importlib.machinery
import importlib.util
import os
import sys

_here = os.path.dirname(os.path.abspath(__file__))


def _start_simulator() -> None:
    if not os.environ.get("NVGPUSIM_OPTIONS"):
        return
    root = os.path.dirname(os.path.dirname(_here))
    try:
        try:
            importlib.import_module("nvgpusim")
        except ImportError:
            sys.path.append(root)
        importlib.import_module("nvgpusim.orin.simulation").start_from_environment()
    except ImportError as error:
        sys.stderr.write(f"nvgpusim: error: {sys.executable} cannot load the simulator: {error}\n")
        os._exit(2)


def _run_hidden_sitecustomize() -> None:
    """Run the sitecustomize that this one hides."""
    path = [p for p in sys.path if os.path.abspath(p or ".") != _here]
    sys.path[:] = path
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", path)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


_start_simulator()
_run_hidden_sitecustomize()
