"""The proof of the series: it applies, imports, each patch stands alone and each one matters."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from .process import SeriesError, error_line
from .series import Patch, Series
from .tree import apply_patches, commit_series, hard_link_copy, patches_of_commits, unpack_tar

# Modules that each prefix of the series must import: the model, and all runtimes patched.
MODULES = (
    "tinygrad",
    "tinygrad.llm.model",
    "tinygrad.codegen.opt.search",
    "tinygrad.runtime.ops_cpu",
    "tinygrad.runtime.ops_cuda",
    "tinygrad.runtime.ops_nv",
    "tinygrad.runtime.graph.cuda",
    "tinygrad.runtime.graph.hcq",
    "tinygrad.runtime.support.compiler_cuda",
)
# One test run may take this long, in seconds; what takes longer hangs.
TEST_TIMEOUT = 600

Say = Callable[[str], None]


class Verifier:
    """Holds the pristine tree and makes patched ones from it, all in `scratch`."""

    def __init__(self, series: Series, sdist: Path, scratch: Path, say: Say) -> None:
        self.series, self.scratch, self.say = series, scratch, say
        self.failures: list[str] = []
        self.pristine = unpack_tar(sdist, scratch / "base")

    def report_check(self, label: str, problem: str | None) -> None:
        """Report one check; remember it when there is a problem."""
        if problem is None:
            self.say(f"ok   {label}")
        else:
            self.say(f"FAIL {label}: {problem}")
            self.failures.append(label)

    # *** the checks ***

    def check_and_report_prefixes(self, workers: int) -> None:
        """Apply in order; import the modules on the base and after each patch."""
        # The base's byte code is made once and linked into every later copy.
        failed = self._import_problem(self.pristine)
        self.report_check(f"base {self.series.base.version} imports", failed)
        tree, prefixes, problem = self.pristine, [], None
        for patch in self.series.patches:
            tree = hard_link_copy(tree, self.scratch / f"prefix-{patch.number}")
            try:
                apply_patches(tree, [patch])
            except SeriesError as e:
                problem = (f"{patch.number} applies in order", str(e))
                break
            prefixes.append((f"{patch.number} applies in order and imports", tree))
        with ThreadPoolExecutor(workers) as pool:
            imports = pool.map(self._import_problem, [tree for _, tree in prefixes])
            for (label, _), failed in zip(prefixes, imports, strict=True):
                self.report_check(label, failed)
        if problem is not None:
            self.report_check(*problem)

    def check_and_report_roundtrip(self) -> None:
        """export(checkout(series)) is byte-identical."""
        tree = hard_link_copy(self.pristine, self.scratch / "roundtrip")
        try:
            commit_series(tree, self.series.patches)
            back = patches_of_commits(tree)
        except SeriesError as e:
            self.report_check("export of checkout is identical", str(e))
            return
        pairs = zip(self.series.patches, back, strict=True)
        differs = [patch.file for patch, again in pairs if patch.text != again.text]
        problem = f"{', '.join(differs)} (rewrite with series export)" if differs else None
        self.report_check("export of checkout is identical", problem)

    def check_and_report_patch_tests(self, patches: Iterable[Patch], workers: int) -> None:
        """Each patch with its Depends-on alone passes its tests; without it each test fails."""
        with ThreadPoolExecutor(workers) as pool:
            labels = {True: "alone passes its tests", False: "left out fails its tests"}
            jobs = [
                (f"{patch.number} {label}", pool.submit(self._tests_problem, patch, alone=alone))
                for patch in patches
                for alone, label in labels.items()
            ]
            for label, future in jobs:
                self.report_check(label, future.result())

    def _tests_problem(self, patch: Patch, *, alone: bool) -> str | None:
        series = self.series
        tree = self.scratch / f"{'alone' if alone else 'without'}-{patch.number}"
        chosen = series.with_dependencies if alone else series.without_patch_and_dependents
        try:
            apply_patches(hard_link_copy(self.pristine, tree), chosen(patch))
            seen = self._run_tests(tree, patch, {} if alone else {"SERIES_FIRST_FAILURE": "1"})
        except SeriesError as e:
            return str(e)
        return _outcome_problem(patch, seen, want_pass=alone)

    # *** what they run ***

    def _import_problem(self, tree: Path) -> str | None:
        code = "import importlib, sys\nfor m in sys.argv[1:]: importlib.import_module(m)"
        done = subprocess.run(
            [sys.executable, "-c", code, *MODULES],
            cwd=tree, env=self._environment(tree), capture_output=True, text=True, check=False,
        )  # fmt: skip
        return error_line(done.stderr) if done.returncode else None

    def _environment(self, tree: Path) -> dict[str, str]:
        cache = self.scratch / f"cache-{tree.name}"
        cache.mkdir(exist_ok=True)
        # Each tree starts many interpreters: its byte code is kept whatever the caller's are told.
        dropped = ("DEV", "BEAM", "DEBUG", "CACHEDB", "PYTHONDONTWRITEBYTECODE")
        keep = {name: value for name, value in os.environ.items() if name not in dropped}
        tools = str(Path(__file__).resolve().parent)
        return keep | {
            "PYTHONPATH": os.pathsep.join([str(tree), tools]),
            "SERIES_TREE": str(tree),
            "XDG_CACHE_HOME": str(cache),
        }

    def _run_tests(self, tree: Path, patch: Patch, settings: dict[str, str]) -> dict[str, str]:
        outcomes = self.scratch / f"{tree.name}.json"
        settings = settings | {"SERIES_OUTCOMES": str(outcomes)}
        command = [sys.executable, "-m", "pytest", "-p", "outcome_plugin", "-p", "no:cacheprovider"]
        try:
            done = subprocess.run(
                [*command, "-q", "--no-header", "--tb=line", *patch.tests],
                cwd=self.series.root, env=self._environment(tree) | settings,
                capture_output=True, text=True, check=False, timeout=TEST_TIMEOUT,
            )  # fmt: skip
        except subprocess.TimeoutExpired as e:
            raise SeriesError(f"its tests took longer than {TEST_TIMEOUT} s", 1) from e
        if not outcomes.is_file():
            raise SeriesError(f"pytest did not run: {error_line(done.stderr or done.stdout)}", 1)
        seen: dict[str, str] = json.loads(outcomes.read_text())
        if done.returncode not in (0, 1, 2) or not seen:
            raise SeriesError(f"pytest ended with {done.returncode}: {error_line(done.stderr)}", 1)
        return seen


def _outcome_problem(patch: Patch, seen: dict[str, str], want_pass: bool) -> str | None:
    for test in patch.tests:
        module = test.split("::")[0]
        results = [o for node, o in seen.items() if node == test or node.startswith(f"{test}[")]
        if want_pass and (not results or set(results) != {"passed"}):
            return f"{test}: {', '.join(sorted(set(results))) or 'did not run'}"
        # A module that cannot even be imported without the patch fails all its tests.
        if not want_pass and "failed" not in results and seen.get(module) != "failed":
            return f"{test} does not notice that the patch is missing"
    return None


def verify_series(
    series: Series, sdist: Path, names: list[str], quick: bool, workers: int, say: Say
) -> bool:
    """Run the checks; True when all hold.

    `names` are the patches whose tests to run (all when empty), `quick` runs none, `workers` is the
    number of test runs at a time. Raises SeriesError for a name that the series does not have.
    """
    chosen = series.select_patches(names)
    with tempfile.TemporaryDirectory(prefix="tinygrad-orin-verify-") as tmp:
        verifier = Verifier(series, sdist, Path(tmp), say)
        verifier.check_and_report_prefixes(workers)
        verifier.check_and_report_roundtrip()
        if not quick and not verifier.failures:
            verifier.check_and_report_patch_tests(chosen, workers)
        return not verifier.failures
