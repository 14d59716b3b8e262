"""Boards on disk: a tree of files that changes with time, recorded from a board or made up.

A recording is one file, `recording.jsonl`: a header, then a frame a line with the files that
changed since the one before. It is played into a directory of real files, so that the readers do
with it exactly what they do on a board; a gated sensor is a FIFO with an idle writer, which answers
EAGAIN as the kernel does.
"""

import json
import os
import re
import shutil
import tempfile
import threading
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from orinboard.files import GATED, FailingFile, Node, Roots, SymbolicLink, Tree
from orinboard.sensors.debugfs import NVMAP_CLIENTS
from orinboard.sources import SOURCES, BoardReader

FILE = "recording.jsonl"
FORMAT = "jetson-recording"
VERSION = 1
#: Lines that a recording keeps, by file: those that are read. Names of processes are nobody's.
KEPT_LINES = {
    "proc/meminfo": re.compile(
        r"^(?:NvMapMemUsed|MemTotal|MemAvailable|SwapTotal|SwapFree):.*\n?", flags=re.MULTILINE
    ),
    "proc/stat": re.compile(r"^cpu\d+ .*\n?", flags=re.MULTILINE),
    NVMAP_CLIENTS: re.compile(r"(?!)"),
}

Changes = Mapping[str, Node | None]


class RecordingError(ValueError):
    """A recording that cannot be played; the message names the file and the line."""


@dataclass(frozen=True, slots=True)
class Frame:
    """Files that changed (None: that vanished), `seconds` after the start."""

    seconds: float
    changes: Changes


def require_playable_failure(failure: FailingFile) -> FailingFile:
    """`failure` if a real file can answer so; raises RecordingError."""
    if failure.errno != GATED:
        raise RecordingError(f"only {GATED} can be played, not {failure.errno}")
    return failure


class TreeOnDisk:
    """A directory that holds a tree as real files."""

    def __init__(self) -> None:
        memory = "/dev/shm"
        self.path = tempfile.mkdtemp(
            prefix="jetson-replay-",
            dir=memory if os.access(memory, os.W_OK) else None,
        )
        self.roots = Roots.in_directory(self.path)
        self.tree: Tree = {}
        self._writers: dict[str, int] = {}

    def apply_changes(self, changes: Changes) -> None:
        """Make the files what `changes` says; a reader sees the old or the new file, whole."""
        # Links first: other files may lie behind them.
        for path in sorted(changes, key=lambda path: not isinstance(changes[path], SymbolicLink)):
            node = changes[path]
            if node == self.tree.get(path):
                continue
            # A text that follows a text replaces it in one step.
            if not (isinstance(node, str) and isinstance(self.tree.get(path), str)):
                self._remove_node(path)
            if node is not None:
                self._write_node(path, node)
                self.tree[path] = node

    def replace_tree(self, tree: Mapping[str, Node]) -> None:
        """Make the files exactly this tree."""
        self.apply_changes({path: None for path in self.tree if path not in tree} | dict(tree))

    def _write_node(self, path: str, node: Node) -> None:
        target = self.roots.path_on_disk(path)
        os.makedirs(os.path.dirname(target), exist_ok=True)
        if isinstance(node, SymbolicLink):
            device = os.path.join(self.path, "devices", node.name)
            os.makedirs(device, exist_ok=True)
            os.symlink(device, target)
        elif isinstance(node, FailingFile):
            require_playable_failure(node)
            os.mkfifo(target)
            self._writers[path] = os.open(target, os.O_RDWR | os.O_NONBLOCK)
        else:
            with open(f"{target}.new", "w") as file:
                file.write(node)
            os.replace(f"{target}.new", target)

    def _remove_node(self, path: str) -> None:
        if self.tree.pop(path, None) is not None:
            os.unlink(self.roots.path_on_disk(path))
        if path in self._writers:
            os.close(self._writers.pop(path))

    def close(self) -> None:
        """Remove the directory."""
        for fd in self._writers.values():
            os.close(fd)
        self._writers.clear()
        shutil.rmtree(self.path, ignore_errors=True)


class RecordingPlayer:
    """Plays frames onto a stage in their own time, over and over, from a thread of its own.

    The last frame is held for `hold` seconds.
    """

    def __init__(self, frames: Sequence[Frame], hold: float = 1.0) -> None:
        self.stage = TreeOnDisk()
        self._frames, self._hold = frames, hold
        self._stop = threading.Event()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._play_until_closed, name="replay", daemon=True)

    def start(self) -> "RecordingPlayer":
        """Begin; returns when the first frame stands."""
        self._thread.start()
        try:
            self._ready.wait()
        except BaseException:  # such as Ctrl-C: who never got us cannot close us
            self.close()
            raise
        return self

    def close(self) -> None:
        """End, and remove the stage."""
        self._stop.set()
        self._thread.join()
        self.stage.close()

    def __enter__(self) -> "RecordingPlayer":
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _play_until_closed(self) -> None:
        while not self._stop.is_set():
            begun = time.monotonic()
            for number, frame in enumerate(self._frames):
                if self._stop.wait(max(begun + frame.seconds - time.monotonic(), 0)):
                    return
                if number == 0:
                    there = {k: v for k, v in frame.changes.items() if v is not None}
                    self.stage.replace_tree(there)
                    self._ready.set()
                else:
                    self.stage.apply_changes(frame.changes)
            self._stop.wait(self._hold)


def node_to_json_value(node: Node | None) -> object:
    """A node as JSON: its text, or what stands for a link or an error."""
    if isinstance(node, SymbolicLink):
        return {"link": node.name}
    if isinstance(node, FailingFile):
        return {"errno": node.errno}
    return node


def node_from_json_value(value: object) -> Node | None:
    """The reverse of `node_to_json_value`; raises ValueError."""
    match value:
        case None | str():
            return value
        case {"link": str(name)} if "/" not in name and name not in ("", ".", ".."):
            return SymbolicLink(name)
        case {"errno": str(name)}:
            return require_playable_failure(FailingFile(name))
    raise ValueError(f"{value!r} is no file")


def require_path_inside_roots(path: object) -> str:
    """`path` if it stays inside the roots; raises ValueError."""
    if not isinstance(path, str) or not re.match(r"(sys|proc|etc|var|dev)/", path):
        raise ValueError(f"{path!r} is in none of sys/, proc/, etc/, var/, dev/")
    if ".." in path.split("/"):
        raise ValueError(f"{path!r} leads out of the tree")
    return path


def refuse_path_below_file(paths: Iterable[str], files: Collection[str]) -> None:
    """Raises ValueError if one of `paths` lies below one of `files`."""
    for path in paths:
        parts = path.split("/")
        for end in range(1, len(parts)):
            if (folder := "/".join(parts[:end])) in files:
                raise ValueError(f"{path!r} lies below {folder!r}, which is a file")


def load_recording(directory: Path) -> list[Frame]:
    """The frames of a recording; a last line that was cut short is left out.

    Raises RecordingError, or OSError when there is no file.
    """
    file = directory / FILE
    lines = file.read_text(errors="replace").splitlines()
    frames = []
    files: set[str] = set()
    for number, line in enumerate(lines, 1):
        try:
            data = json.loads(line)
            if number == 1:
                require_playable_header(data)
                continue
            items = data["files"].items()
            changes = {require_path_inside_roots(k): node_from_json_value(v) for k, v in items}
            files |= {path for path, node in changes.items() if not isinstance(node, SymbolicLink)}
            refuse_path_below_file(changes, files)
            frames.append(Frame(float(data["t"]), changes))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            if number == len(lines) and number > 2:
                break
            raise RecordingError(f"{file}, line {number}: {error}") from None
    if not frames:
        raise RecordingError(f"{file}: no frame in it")
    return frames


def require_playable_header(data: object) -> None:
    """Raises ValueError unless `data` is the first line of a recording that we can play."""
    match data:
        case {"format": str(name), "version": int(version)} if name == FORMAT:
            if version != VERSION:
                raise ValueError(f"version {version}, where {VERSION} is understood")
        case _:
            raise ValueError(f"the first line is not that of a {FORMAT}")


def without_unread_lines(tree: Mapping[str, Node]) -> dict[str, Node]:
    """The tree without what nobody asked for: of some files, only the lines that are read."""
    kept = dict(tree)
    for path, lines in KEPT_LINES.items():
        text = kept.get(path)
        if isinstance(text, str):
            kept[path] = "".join(lines.findall(text))
    return kept


def iter_board_frames(roots: Roots, interval: float, stop: threading.Event) -> Iterator[Frame]:
    """Frames of a board until `stop`: the files that its sources read, and nothing else."""
    trace: Tree = {}
    shown: dict[str, Node] = {}
    begun = time.monotonic()
    with BoardReader(roots, SOURCES, trace=trace) as board:
        number = 0
        while not stop.is_set():
            trace.clear()
            seconds = time.monotonic() - begun
            board.read()
            tree = without_unread_lines(trace)
            changes: dict[str, Node | None] = {
                path: node for path, node in tree.items() if shown.get(path) != node
            }
            changes |= {path: None for path in shown if path not in tree}
            shown = tree
            yield Frame(round(seconds, 3), changes)
            number += 1
            stop.wait(max(begun + number * interval - time.monotonic(), 0))


def save_recording(frames: Iterable[Frame], file: TextIO) -> int:
    """Write a recording, each frame as it comes; returns how many there were."""
    file.write(json.dumps({"format": FORMAT, "version": VERSION}) + "\n")
    count = 0
    for frame in frames:
        files = {path: node_to_json_value(frame.changes[path]) for path in sorted(frame.changes)}
        file.write(json.dumps({"t": frame.seconds, "files": files}) + "\n")
        file.flush()
        count += 1
    return count
