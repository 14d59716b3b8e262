"""The page's text: what is in it, what must not be, and that it does not trust its input."""

import html.parser
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from tests.benchmarks.show.conftest import figures_of

from orinbench.judge.identity import case_key
from orinbench.judge.load_results import completed_record, load_records
from orinbench.judge.saved_comparison import compare_saved
from orinbench.judge.schema import Plain, Record
from orinbench.judge.verdict import Noise
from orinbench.show.html_page import PageRuns, render_run, render_runs, short_number_text
from orinbench.show.timeline import ReadingPanel, panels_and_axis_text

DATA = Path(__file__).parents[1] / "judge/history/data"
HOSTILE = '<script>alert(1)</script>"\'&{{7*7}}$\\frac{1}{</svg></style>#0068a8 id="x\x00\x1b'


class Reader(html.parser.HTMLParser):
    """Collects tags, ids, headings and the text of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text.append(data)

    def values(self, name: str) -> list[str]:
        return [value for _, found in self.tags if (value := found.get(name)) is not None]

    def sections(self) -> list[str]:
        return [str(found.get("id")) for tag, found in self.tags if tag == "section"]


def test_a_board_with_sensors_has_every_section(rich_page: str) -> None:
    page = Reader(rich_page)
    assert page.sections() == ["verdicts", "measured-0", "run", "notes"]
    said = " ".join(page.text)
    for text in (
        "Orin (nvgpu) (Jetson AGX Orin)",
        "tinygrad:CPU is faster",
        "sum of VDD_GPU_SOC",
        "Warning: it drifted: all rows (+3 %).",
        "seconds since the first repetition ended",
        "temperature, °C",
    ):
        assert text in said, text
    assert "No sensor for" not in said


def test_a_machine_without_has_what_is_known(plain_page: str) -> None:
    page = Reader(plain_page)
    said = " ".join(page.text)
    assert "No sensor for: GPU clock, CPU clock, temperature, power." in said
    assert "Interrupted: the figures above are those measured until then" in said
    assert "synthetic model" in said and "Energy" not in said


def test_nothing_is_loaded_or_run(rich_page: str) -> None:
    page = Reader(rich_page)
    tags = {tag for tag, _ in page.tags}
    assert not {"script", "link", "img", "iframe", "object", "embed"} & tags
    assert not [name for _, found in page.tags for name in found if name.startswith("on")]
    assert not page.values("src")
    assert all(target.startswith("#") for target in page.values("href"))
    assert all("url(#" in part for part in re.findall(r"url\([^)]*", rich_page))
    assert "://" not in rich_page
    assert "@import" not in rich_page and "default-src 'none'" in rich_page


def test_ids_are_unique_and_every_reference_has_one(rich_page: str) -> None:
    page = Reader(rich_page)
    ids = page.values("id")
    assert len(ids) == len(set(ids))
    used = {word for value in page.values("aria-labelledby") for word in value.split()}
    used |= {target[1:] for target in page.values("href")}
    used |= set(re.findall(r"url\(#([^)]+)", rich_page))
    assert used <= set(ids)


def test_charts_are_told_and_have_tables_beside_them(rich_page: str) -> None:
    charts = figures_of(rich_page)
    assert len(charts) == 4  # throughput, roofline, energy; the run
    for chart in charts:
        assert 'role="img" aria-label="' in chart and chart.count("<div") >= 1
    for section in re.findall(r"<section.*?</section>", rich_page, re.S):
        assert "<figure" not in section or "<table" in section


def test_bars_are_as_long_as_their_figures_and_a_backend_has_one_colour(rich_page: str) -> None:
    throughput, _, energy = figures_of(rich_page)[:3]
    (tg,) = re.findall(r'<div class="group">(.*?)</div>', throughput, re.S)[:1]
    bars = re.findall(r'bar-label">(.*?)<.*?series-(\d)" style="width: ([\d.]+)%', tg, re.S)
    assert [name for name, _, _ in bars] == ["tinygrad:CPU", "llama.cpp"]
    ends = re.findall(r'interval" style="left: ([\d.]+)%; width: ([\d.]+)%', tg)
    ours, theirs = (float(length) for _, _, length in bars)
    assert ours / theirs == pytest.approx(150 / 80, rel=1e-3)
    assert all(float(left) <= length <= float(left) + float(width) + 0.01
               for (left, width), length in zip(ends, (ours, theirs), strict=True))  # fmt: skip
    assert float(ends[0][0]) + float(ends[0][1]) == pytest.approx(100, abs=0.02)
    colours = dict(re.findall(r'bar-label">(.*?)<.*?series-(\d)"', energy, re.S))
    assert colours == {name: colour for name, colour, _ in bars}
    legend = figures_of(rich_page)[-1]
    assert {n.strip(): c for c, n in re.findall(r'key series-(\d)"></span>([^<]*)', legend)} == (
        colours
    )


def groups_of(page: str, chart: int) -> dict[str, str]:
    groups = re.findall(r'<div class="group">(.*?)</div>', figures_of(page)[chart], re.S)
    return {re.findall(r'group-title">(.*?)<', group)[0]: group for group in groups}


def test_a_time_below_zero_is_no_bar(plain_records: list[Record]) -> None:
    record = replace(plain_records[0], extra={"first_text_ms": -1.0})
    assert "Time to first text in ms" not in render_run([record])


def test_several_runs_stand_side_by_side_with_their_verdicts(plain_records: list[Record]) -> None:
    after = [
        replace(r, samples_ts=[1.2 * s for s in r.samples_ts], median_ts=1.2 * r.median_or_mean)
        for r in plain_records
        if r.backend == "tinygrad:CPU"
    ]
    after[1].extra = {"first_text_ms": 40.0}  # pp512
    noise = {case_key(record): Noise(0.001, 9) for record in after[:1]}
    compared = {"after": compare_saved(plain_records, after, noise)}
    page = render_runs(PageRuns({"before": plain_records, "after": after}, compared))
    tg = groups_of(page, 0)["tg128"]
    assert re.findall(r'bar-label">(.*?)<', tg) == [
        "before tinygrad:CPU", "after tinygrad:CPU", "before llama.cpp"
    ]  # fmt: skip
    assert '<li class="faster">' in tg and "1.2 × before (" in tg and ", faster" in tg
    said = " ".join(Reader(page).text)
    assert "after is faster: 1.2 times as fast as before" in said
    assert "before and after: noise between runs not known. Below each test" in said
    assert "In it, llama.cpp tg128: was not measured." in said
    assert {"run-0", "run-1"} <= set(Reader(page).sections())
    # Times have a chart of their own, in ms; a roofline's bar is as long as its share.
    texts = figures_of(page)[2]
    assert "Time to first text in ms" in texts and '<span class="bar-text">40</span>' in texts
    roofline = groups_of(page, 1)["tg128"]
    widths = [float(width) for width in re.findall(r"width: ([\d.]+)%", roofline)]
    shares = [r.roofline_percent or 0 for r in plain_records if r.n_gen]
    assert widths == pytest.approx([shares[0], shares[0], shares[1]], abs=0.01)


FIELDS = ("test", "backend", "model_type", "device_name", "unit", "benchmark", "error", "software")


def test_a_ratio_without_a_verdict_says_so(rich_records: list[Record]) -> None:
    assert ", no verdict" not in render_run(rich_records)
    for record in rich_records:
        for comparison in record.comparisons:
            comparison["verdict"] = "too few processes"
    assert ", no verdict" in render_run(rich_records)
    for record in rich_records:
        for comparison in record.comparisons:
            comparison["verdict"] = "no difference shown"
    page = render_run(rich_records)
    assert ", no difference shown" in page and ", no verdict" not in page


def test_hostile_text_stays_text(rich_records: list[Record]) -> None:
    """In every field and object that comes from a file, and in a title."""
    record = rich_records[0]
    for name in FIELDS:
        setattr(record, name, HOSTILE)
    record.warnings = [{"kind": "x", "text": HOSTILE, "detail": HOSTILE}]
    record.comparisons = [
        {"baseline": HOSTILE, "ratio": 1.0, "verdict": f'"{HOSTILE}', "text": HOSTILE}
    ]
    record.environment = {"cpu": HOSTILE, "tinygrad_variables": {HOSTILE: HOSTILE}}
    record.check = {"text": HOSTILE}
    record.ignored_flags = [HOSTILE]
    text = render_run(rich_records, HOSTILE)
    page = Reader(text)
    tags = [tag for tag, _ in page.tags]
    assert "script" not in tags and "<script" not in text
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in text
    assert "{{7*7}}" in text  # and not 49
    assert tags.count("svg") == text.count("</svg>") == text.count("<svg")
    assert tags.count("style") == text.count("</style>") == 1


def test_results_of_llama_cpp_and_failed_ones(plain_records: list[Record]) -> None:
    text = render_run(load_records(DATA / "llama_bench.json"))
    assert "llama ?B Q6_K on AMD EPYC" in text and "measured-0" in text
    none: Plain = {"samples_ts": [], "median_ts": None, "avg_ts": None, "comparisons": []}
    text = render_run([replace(record, **none, error="out of memory") for record in plain_records])
    assert "<figure" not in text and "llama.cpp tg128 failed: out of memory." in text


def test_other_benchmarks_are_read_by_their_fields(plain_records: list[Record]) -> None:
    shared: Plain = {"device": "CPU", "environment": plain_records[0].environment}
    products = suite_rows(
        *(
            {"test": f"fp16 {size}", "peak_percent": size / 100, "samples_ts": [size] * 6} | shared
            for size in (16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
        )
    )
    page = Reader(render_run([*plain_records, *products]))
    assert {"measured-0", "measured-1"} <= set(page.sections())
    said = " ".join(page.text)
    assert "matmul, GFLOPS" in said and "81.9 %" in said


def test_numbers_are_short() -> None:
    numbers = (0.0123456, 1.5, 999.4, 1562.07, 57884.5, 3.2e6, 4.5e9)
    assert [short_number_text(number) for number in numbers] == [
        *("0.0123", "1.5", "999", "1562", "57.9 k", "3.2 M", "4.5 G")
    ]  # fmt: skip


def by_title(records: list[Record]) -> tuple[dict[str, ReadingPanel], str]:
    panels, across = panels_and_axis_text(records)
    return {panel.title.partition(",")[0]: panel for panel in panels}, across


def test_repetitions_without_times_stand_at_their_rounds(plain_records: list[Record]) -> None:
    panels, across = by_title(
        [completed_record(json.loads(json.dumps(vars(r)))) for r in plain_records]
    )
    assert across == "round" and set(panels) == {"speed"}
    places = {x for points in panels["speed"].points.values() for x, _ in points}
    assert places == {round(100 * n / 7, 2) for n in range(8)}


def test_repetitions_of_a_board(rich_records: list[Record]) -> None:
    panels, across = by_title(rich_records)
    assert across == "seconds since the first repetition ended"
    assert set(panels["GPU clock"].values) == {1300.5}
    assert set(panels["CPU clock"].values) == {2201.6}
    assert panels["temperature"].values[0] == 50.0  # the junction, not the hottest
    assert (panels["power"].values[0], panels["power"].least) == (30.0, 0.0)
    rails = [{"name": "VDD_GPU_SOC", "watts": 12.0}]
    record = replace(rich_records[0], board_after=[{"rails": rails}])
    assert by_title([record])[0]["power"].values == [12.0]


def suite_rows(*rows: Plain) -> list[Record]:
    """Records of a suite's run from what differs."""
    shared = {"schema_version": 1, "benchmark": "matmul", "backend": "tinygrad:CPU"}
    shared |= {"unit": "GFLOPS", "model_type": ""}
    return [completed_record({**shared, **row}) for row in rows]


def test_what_is_timed_is_told_of_the_tests_that_it_is_true_of() -> None:
    rows: list[Plain] = [
        {"test": "direct", "benchmark": "launch", "included": "a call"},
        {"test": "jit", "benchmark": "launch", "included": "a jit"},
        {"test": "jit 2", "benchmark": "launch", "included": "a jit"},
        {"test": "fp32 512", "included": "a kernel"},
    ]
    said = " ".join(Reader(render_run(suite_rows(*rows))).text)
    for text in ("launch (direct): a call", "launch (jit, jit 2): a jit", "matmul: a kernel"):
        assert f"Timed by {text}." in said


def test_a_row_without_figures_says_why() -> None:
    rows: list[Plain] = [
        {"test": "fp32 512", "median_ts": 1.0, "samples_ts": [1.0]},
        {"test": "fp32 8192", "extra": {"left_out": "8 GiB are not free"}},
        {"test": "fp16 512", "partial": True},
    ]
    said = " ".join(Reader(render_run(suite_rows(*rows))).text)
    assert "left out: 8 GiB are not free" in said
    assert "not run" in said
