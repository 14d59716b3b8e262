"""Links lead somewhere, and every page can be found from the index."""

import importlib.util
import re
from pathlib import Path

import pytest
from tests.docs.pages import REPOSITORY, anchors, links, pages, prose, text

INDEX = "docs/README.md"


@pytest.mark.parametrize("page", pages())
def test_links_and_anchors(page: str) -> None:
    folder = (REPOSITORY / page).parent
    for link in links(page):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (folder / path).resolve() if path else REPOSITORY / page
        assert target.exists(), f"{page}: {link}: no such file"
        if anchor:
            assert target.suffix == ".md", f"{page}: {link}: an anchor in no page"
            assert anchor in anchors(target.relative_to(REPOSITORY).as_posix()), f"{page}: {link}"


@pytest.mark.parametrize("page", pages())
def test_files_that_are_named_exist(page: str) -> None:
    """`folder/name.py` in a sentence, for the folders of the repository."""
    rooms = {p.name for p in REPOSITORY.iterdir() if p.is_dir() and not p.name.startswith(".")}
    spec = importlib.util.find_spec("tinygrad")
    assert spec is not None and spec.origin is not None
    tinygrad = Path(spec.origin).parent
    for name in re.findall(r"`([\w.-]+/[\w./-]+)`", prose(page)):
        if name.split("/")[0] in rooms - {"build"}:
            # tinygrad has a folder engine/ too, which docs/reference/environment.md names.
            known = name == "build/mutations" or (tinygrad / name).exists()
            assert known or (REPOSITORY / name).exists(), f"{page}: `{name}`"


def test_the_index_names_every_page_and_no_other() -> None:
    named = {link for link in links(INDEX) if not link.startswith("..") and link.endswith(".md")}
    there = {page.removeprefix("docs/") for page in pages() if page.startswith("docs/")}
    assert named == there - {"README.md"}


def test_pages_speak_of_the_project_alone() -> None:
    for page in pages():
        assert not re.search(r"(?i)/(?:work|root)/|\bthis session\b", text(page)), page
