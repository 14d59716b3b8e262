"""Models by name, hf.co/OWNER/REPO[:QUANT], and their checksums: huggingface_hub and its cache.

Its environment counts here too: HF_HOME says where files lie, HF_TOKEN who asks, HF_HUB_OFFLINE
that nobody may be asked, HF_ENDPOINT which server it is.
"""

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orinllm.errors import BadInput
from orinllm.progress import Say

#: Prefixes of a name; a file of that path on this machine comes first.
PREFIXES = ("hf.co/", "https://hf.co/", "https://huggingface.co/", "huggingface.co/")
# Taken where no type is named and the repository has it, as llama.cpp's -hf does.
_USUAL = "Q4_K_M"
_EXPECTED = "want hf.co/OWNER/REPO or hf.co/OWNER/REPO:QUANT, such as hf.co/owner/model-GGUF:Q4_K_M"
_PART = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")
_SHA256 = re.compile(r"[0-9a-f]{64}")
# Seconds without a byte of the list of files, for which huggingface_hub would wait for ever.
_PATIENCE = 30.0
# Of an encoder, the best first: halves, which every path reads as they are.
_MMPROJ_TYPES = ("F16", "BF16", "F32", "Q8_0")


@dataclass(frozen=True)
class HubName:
    """A repository of the hub, and the type of the weights if one is named."""

    repository: str
    quant: str | None = None

    @staticmethod
    def parse_unless_path(text: str) -> "HubName | None":
        """Return the name that a text is, None for a path; raises BadInput for half a name."""
        prefix = next((prefix for prefix in PREFIXES if text.startswith(prefix)), None)
        if prefix is None:
            return None
        rest, _, quant = text.removeprefix(prefix).partition(":")
        parts = rest.split("/")
        if len(parts) != 2 or not all(re.fullmatch(r"[\w.-]+", part) for part in parts):
            raise BadInput(f"{text!a}: is no model of the hub; {_EXPECTED}")
        if ":" in text.removeprefix(prefix) and not re.fullmatch(r"[\w.-]+", quant):
            raise BadInput(f"{text!a}: names no type behind the colon; {_EXPECTED}")
        return HubName(rest, quant or None)

    def __str__(self) -> str:
        return f"hf.co/{self.repository}" + (f":{self.quant}" if self.quant else "")


def find_or_fetch_mmproj(given: str | Path, say: Say) -> Path:
    """Return the file of a path, or the mmproj of a repository, as `find_or_fetch_model` does."""
    return find_or_fetch_model(given, say, lambda name, files: [choose_mmproj_file(name, files)])


def find_or_fetch_model(given: str | Path, say: Say, choose: "Choose | None" = None) -> Path:
    """Return the file of a path, or of a model's name, which is fetched if it is not here yet.

    Progress goes to standard error, and `say` gets a line where the cache answers for the hub.
    Raises BadInput, one line, for a name that is none, a hub that fails, and bytes that are not
    those that the hub promised.
    """
    path = Path(given)
    if path.exists() or (name := HubName.parse_unless_path(str(given))) is None:
        return path
    from huggingface_hub.errors import OfflineModeIsEnabled

    choose = choose or choose_model_files
    try:
        with _translated_hub_errors(name):
            wanted = choose(name, _list_hub_files(name))
    except _NoAnswerError as error:
        if not (cached := _cached_files(name)):
            raise BadInput(str(error)) from None
        chosen = choose(name, cached)
        files = [cached[file] for file in chosen]
        for file, path in zip(chosen, files, strict=True):
            if (mark := _unchecked_mark_path(name, file)).exists():
                _verify_or_delete_file(name, file, path, mark)
        if not isinstance(error.__cause__, OfflineModeIsEnabled):
            say(f"{error}; using the copy that is here")
        return files[0]
    try:
        with _translated_hub_errors(name):
            paths = [_fetch_file(name, file) for file in wanted]
    except _NoAnswerError as error:
        raise BadInput(f"{error}; what has arrived is kept, the same command goes on") from None
    return paths[0]


def choose_mmproj_file(name: HubName, files: Iterable[str]) -> str:
    """Return the file of a repository that lets its model see, of F16 if there are several.

    Raises BadInput where there is none.
    """
    found = sorted(
        file
        for file in files
        if file.endswith(".gguf") and file.isprintable()
        if is_mmproj_name(file)
    )
    if not found:
        raise BadInput(f"{name}: has no mmproj file; its model sees nothing")
    wanted = (name.quant, *_MMPROJ_TYPES)
    by_type = {(_quant_in_name(_model_stem(file)) or "").upper(): file for file in reversed(found)}
    return next(
        (by_type[kind.upper()] for kind in wanted if kind and kind.upper() in by_type), found[0]
    )


def is_mmproj_name(file: str) -> bool:
    """Say whether a file's name is that of an encoder of pictures."""
    return "mmproj" in file.lower()


def choose_model_files(name: HubName, files: Iterable[str]) -> list[str]:
    """Return the files of the wanted model in a repository: one, or all parts in order.

    Raises BadInput where there is none, naming what there is.
    """
    found = sorted(
        file
        for file in files
        if file.endswith(".gguf") and file.isprintable() and not is_mmproj_name(file)
        if (part := _PART.search(file)) is None or int(part[1]) == 1 <= int(part[2])
    )
    if not found:
        raise BadInput(f"{name}: has no GGUF file; {_EXPECTED}")
    asked = name.quant or _USUAL
    pattern = re.compile(rf"(?:^|[-._/]){re.escape(asked)}(?=[-./])", re.IGNORECASE)
    matching = [file for file in found if pattern.search(file)]
    if not matching:
        if name.quant is not None or len(found) > 1:
            asking = (
                f"no {asked}" if name.quant else f"no {asked}, which is taken unless one is named"
            )
            raise BadInput(f"{name}: has {asking}; it has {', '.join(found[:12])}")
        matching = found
    first = min(matching, key=len)
    if not (part := _PART.search(first)):
        return [first]
    stem, count = first[: part.start()], int(part[2])
    parts = [f"{stem}-{index:05}-of-{part[2]}.gguf" for index in range(1, count + 1)]
    if missing := set(parts) - set(files):
        raise BadInput(f"{name}: lacks a part of its model: {min(missing)}")
    return parts


class _NoAnswerError(Exception):
    """The hub did not answer, or not to the end."""


@contextmanager
def _translated_hub_errors(name: HubName) -> Iterator[None]:
    """Turn the hub's errors into one line each."""
    from huggingface_hub import errors

    try:
        yield
    except BadInput:
        raise
    except errors.HFValidationError:
        raise BadInput(f"{name}: is no model of the hub; {_EXPECTED}") from None
    except errors.OfflineModeIsEnabled as error:
        raise _NoAnswerError(f"{name}: is not here, and HF_HUB_OFFLINE forbids to ask") from error
    except errors.GatedRepoError:
        raise BadInput(
            f"{name}: its owner asks for an agreement; accept it on the hub, then set HF_TOKEN"
        ) from None
    except errors.RepositoryNotFoundError:
        raise BadInput(
            f"{name}: the hub has no such repository, or HF_TOKEN may not read it"
        ) from None
    except errors.EntryNotFoundError as error:
        if isinstance(error, errors.LocalEntryNotFoundError):
            raise _NoAnswerError(f"{name}: the hub does not answer") from error
        raise BadInput(f"{name}: the hub lists a file that it does not have") from None
    except errors.HfHubHTTPError as error:
        status = error.response.status_code if error.response is not None else "an error"
        raise _NoAnswerError(f"{name}: the hub answers {status}") from error
    # Of httpx or httpx2, as huggingface_hub has it.
    except (errors.HTTPError, ConnectionError, TimeoutError) as error:  # type: ignore[attr-defined]
        raise _NoAnswerError(f"{name}: the hub does not answer: {type(error).__name__}") from error
    except OSError as error:
        if error.errno is None:  # huggingface_hub's word for sizes that do not agree
            raise _NoAnswerError(f"{name}: the hub sent fewer bytes than it promised") from error
        raise BadInput(f"{name}: cannot be kept: {error.strerror}") from None
    except ValueError as error:  # its word for paths that leave the cache, and for no JSON
        why = " ".join(str(error).split())
        raise BadInput(f"{name}: the hub answers what cannot be used: {why}") from None


def _list_hub_files(name: HubName) -> list[str]:
    from huggingface_hub import HfApi, set_client_factory
    from huggingface_hub.utils._http import default_client_factory

    def guarded() -> Any:
        client = default_client_factory()
        client.event_hooks["response"].append(_refuse_headers_with_paths)
        return client

    set_client_factory(guarded)
    found: list[Any]
    try:
        answer = HfApi().model_info(name.repository, timeout=_PATIENCE)
        found = [entry.rfilename for entry in answer.siblings or ()]
    except (AttributeError, KeyError, TypeError, RecursionError):  # JSON of another form
        found = [None]
    if not all(isinstance(file, str) for file in found):
        raise BadInput(f"{name}: the hub answers what cannot be used: no list of files")
    return found


def _refuse_headers_with_paths(response: Any) -> None:
    """Refuse an answer whose headers lead out of the cache, where they become names of files."""
    for header in ("ETag", "X-Linked-Etag", "X-Repo-Commit"):
        said = response.headers.get(header, "").removeprefix("W/")
        if re.search(r"[/\\\0]", said) or said.strip('"') in (".", ".."):
            raise ValueError(f"{header} {said}")


def _fetch_file(name: HubName, file: str) -> Path:
    """Return a file of a repository, fetched where the cache has not its newest version."""
    from huggingface_hub import hf_hub_download, try_to_load_from_cache

    before = try_to_load_from_cache(name.repository, file)
    mark = _unchecked_mark_path(name, file)
    unchecked = mark.exists()
    with suppress(OSError):  # a cache that others fill
        mark.parent.mkdir(parents=True, exist_ok=True)
        mark.touch()
    path = Path(hf_hub_download(name.repository, file))
    if unchecked or str(path) != before:
        _verify_or_delete_file(name, file, path, mark)
    else:
        _remove_unchecked_mark(mark)
    return path


def _verify_or_delete_file(name: HubName, file: str, path: Path, mark: Path) -> None:
    """Check a file's bytes, and take its mark away; raises BadInput, and removes a wrong file."""
    try:
        _check_checksum(name, file, path)
    except BadInput:
        path.unlink(missing_ok=True)
        raise
    _remove_unchecked_mark(mark)


def _remove_unchecked_mark(mark: Path) -> None:
    with suppress(OSError):
        mark.unlink(missing_ok=True)


def _unchecked_mark_path(name: HubName, file: str) -> Path:
    """Return what is in the cache while a file is fetched and checked.

    A process that is killed leaves it, and the next one checks the bytes that it finds.
    """
    from huggingface_hub.constants import HF_HUB_CACHE

    digest = hashlib.sha256(file.encode()).hexdigest()[:16]
    folder = f"models--{name.repository.replace('/', '--')}"
    return Path(HF_HUB_CACHE, folder, f".unchecked-{digest}")


def _check_checksum(name: HubName, file: str, path: Path) -> None:
    """Compare a large file with its checksum, which is its name in the hub's cache."""
    blob = path.resolve()
    if not _SHA256.fullmatch(blob.name):
        return
    with blob.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256")
    if digest.hexdigest() != blob.name:
        blob.unlink()
        raise BadInput(
            f"{name}: {file} arrived with other bytes than the hub promised (SHA-256); it is "
            "removed, the same command fetches it again"
        )


#: Returns the files that a name means, of a repository's.
Choose = Callable[[HubName, Iterable[str]], list[str]]


@dataclass(frozen=True)
class CachedModel:
    """A model of the cache: its name, its bytes, and its path in the repository.

    stem: that path without a part's number and without .gguf.
    """

    name: HubName
    size_bytes: int
    stem: str


def _cached_files(name: HubName) -> dict[str, Path]:
    """Return the files of a repository that the cache has, newest version last."""
    return {file: path for repository, file, path in _walk_cache() if repository == name.repository}


def _walk_cache() -> Iterator[tuple[str, str, Path]]:
    """Yield repository, file and path of each GGUF file in the cache, oldest versions first."""
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        repositories = scan_cache_dir().repos
    except CacheNotFound:
        return
    for repository in sorted(repositories, key=lambda found: found.repo_id):
        for revision in sorted(repository.revisions, key=lambda found: found.last_modified):
            for file in sorted(revision.files, key=lambda found: found.file_name):
                if file.file_name.endswith(".gguf"):
                    inside = file.file_path.relative_to(revision.snapshot_path).as_posix()
                    yield repository.repo_id, inside, file.file_path


def cached_models() -> list[CachedModel]:
    """Return the models of the cache, a model of several parts as one."""
    models: dict[tuple[str, str], dict[str, Path]] = {}
    for repository, file, path in _walk_cache():
        models.setdefault((repository, _model_stem(file)), {})[file] = path
    return [
        CachedModel(
            HubName(repository, _quant_in_name(stem)),
            sum(p.stat().st_size for p in files.values()),
            stem,
        )
        for (repository, stem), files in models.items()
    ]


def _model_stem(file: str) -> str:
    return _PART.sub("", file).removesuffix(".gguf")


def _quant_in_name(stem: str) -> str | None:
    """Return the type in a file's name, as people write it behind a colon."""
    found = re.findall(
        r"(?:UD-)?(?:I?Q\d\w*|MXFP4\w*|BF16|F16|F32)(?=$|[-./])", stem, re.IGNORECASE
    )
    return found[-1] if found else None


def remove_cached_model(text: str) -> CachedModel:
    """Remove a model from the cache, all its versions; raises BadInput where it is not there."""
    name = HubName.parse_unless_path(text)
    if name is None:
        raise BadInput(f"{text}: is no name of the hub; {_EXPECTED}")
    found = [kept for kept in cached_models() if kept.name.repository == name.repository]
    matching = [k for k in found if name.quant in (None, k.name.quant)]
    if len(matching) != 1:
        there = ", ".join(str(kept.name) for kept in found) or "nothing of it"
        what = "is not here" if not matching else "names several"
        raise BadInput(f"{name}: {what}; here is {there} (orinllm list)")
    (kept,) = matching
    versions = [
        path
        for repository, file, path in _walk_cache()
        if repository == name.repository and _model_stem(file) == kept.stem
    ]
    for path in versions:
        blob = path.resolve()
        path.unlink(missing_ok=True)
        blob.unlink(missing_ok=True)
    return kept
