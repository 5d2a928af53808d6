"""An explanation on the terminal and as a page: it is complete and correct, and the page fetches nothing."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from dataclasses import replace
from itertools import pairwise

import pytest

pytest.importorskip("transformers")

from parallelize.axes.pipeline.schedules import build_schedule
from parallelize.axes.pipeline.timeline import simulate
from parallelize.base.pictures.svg import ticks
from parallelize.base.terminal.numbers import amount, count, duration, times
from parallelize.tools.analysis.explain import explain
from parallelize.tools.analysis.show.charts import draw_pipeline
from parallelize.tools.analysis.show.memory_chart import draw_step, scale_of, timed_moments
from parallelize.tools.analysis.show.page import as_html, compare_html, draw_traffic
from parallelize.tools.analysis.show.tables import expensive_first, largest, parts_of
from parallelize.tools.analysis.show.terminal_report import MAX_MESSAGES, as_text, compare_text
from tests.tools.analysis.cost.explain_jobs import source_of

pytestmark = [pytest.mark.xdist_group("explanations"), pytest.mark.sweep]  # made once, in many seconds

MESHES = {
    "one": ("dp=1", {}),
    "tp": ("tp=2", {}),
    "narrow": ("dp=2,tp=2", {"dtype": "bfloat16", "zero": 2}),
    "pipeline": ("pp=3,dp=2,tp=2", {"batch": 4, "num_microbatches": 4, "sequence_parallel": True}),
}


@pytest.fixture(scope="module")
def explanations():
    return {name: explain("gpt2", None, mesh, sequence=16, **options) for name, (mesh, options) in MESHES.items()}


@pytest.fixture(scope="module")
def pages(explanations):
    single = {name: as_html(explanation) for name, explanation in explanations.items()}
    return {**single, "both": compare_html(explanations["tp"], explanations["pipeline"])}


def tree(page: str) -> ET.Element:
    """Parsed as XML, which is stricter than HTML."""
    assert page.startswith("<!DOCTYPE html>\n")
    return ET.fromstring(page.split("\n", 1)[1])


def text_of(page: str) -> str:
    return " ".join(" ".join(tree(page).find("body").itertext()).split())


def bytes_of(text: str) -> float:
    number, unit = text.split()
    return float(number) * {"B": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}[unit]


def cells(page: str, first: str) -> list[str]:
    """The row of a table that begins with the cell `first`."""
    rows = [["".join(cell.itertext()) for cell in row] for row in tree(page).iter("tr")]
    return next(row for row in rows if row[0] == first)


# -- completeness -------------------------------------------------------------------------------------------------


@pytest.mark.variants(every=4)
@pytest.mark.parametrize("name", MESHES)
def test_text_and_page_show_every_axis_rank_and_peak(explanations, pages, name):
    explanation = explanations[name]
    for text in (as_text(explanation), text_of(pages[name])):
        assert "estimate" in text.lower() and explanation.setting in " ".join(text.split())
        for rank in explanation.ranks:
            assert amount(rank.memory.peak) in text and rank.memory.peak_at in text and rank.units in text
            assert len(explanation.ranks) == 1 or f"pp rank {rank.pp_rank}" in text
            for total in rank.totals:
                assert re.search(rf"\b{re.escape(total.axis)}\b.*{re.escape(amount(total.sent_bytes))}", text, re.S)
        for assumption in explanation.assumptions:
            assert assumption in " ".join(text.split())
        for advice in explanation.advice:
            assert advice.change in text and advice.gain in text
        names = [name.rpartition(".*.")[2] for line in explanation.parameters for name in line.name.split(" = ")]
        assert all(name in text for name in names)


@pytest.mark.parametrize("name", MESHES)
def test_the_page_has_every_message_and_constant(explanations, pages, name):
    text = text_of(pages[name])
    for rank in explanations[name].ranks:
        for message in rank.messages:
            assert f"{message.op} {message.axis} {message.ranks} {amount(message.bytes)} {message.count:,}" in text
    assert all(constant in text and source in text for constant, source in explanations[name].machine_sources.items())


def test_expensive_messages_are_first_and_the_rest_is_counted(explanations):
    explanation = explanations["pipeline"]
    rank = largest(explanation)
    many = tuple(replace(message, module=f"{message.module}.{n}") for n in range(9) for message in rank.messages)
    text = as_text(replace(explanation, ranks=(replace(rank, messages=many),)))
    assert f"and {len(many) - MAX_MESSAGES} less expensive ones" in text
    assert len(re.findall(r"^(?:all_reduce|all_gather|reduce_scatter|send|recv) ", text, re.M)) == MAX_MESSAGES
    assert "less expensive ones" not in as_text(explanations["tp"])
    costs = [message.seconds for message in expensive_first(rank)]
    assert all(a >= b for a, b in pairwise(costs)) and costs[0] > costs[-1]


def test_a_setting_that_does_not_fit(explanations):
    small = replace(explanations["tp"], machine_memory_bytes=explanations["tp"].peak_bytes / 2)
    assert "does NOT fit" in as_text(small) and "NOT" not in as_text(explanations["tp"])
    assert 'class="cards over"' in as_html(small) and 'class="cards over"' not in as_html(explanations["tp"])
    assert "200.0%" in as_text(small) and "200.0%" in as_html(small)


def test_terminal_lines_are_not_too_long(explanations):
    assert max(map(len, as_text(explanations["pipeline"]).splitlines())) <= 120


# -- numbers ------------------------------------------------------------------------------------------------------


def test_numbers_are_those_of_the_explanation(explanations, pages):
    explanation, page = explanations["pipeline"], pages["pipeline"]
    for name, field in {"parameters": "parameters", "peak": "peak", "optimizer state": "optimizer"}.items():
        row = cells(page, name)[1:]
        line = next(line for line in as_text(explanation).splitlines() if re.match(rf"{name}  ", line))
        for rank, on_page, on_terminal in zip(explanation.ranks, row, re.findall(r"[\d.]+ \w?B", line), strict=True):
            assert bytes_of(on_page) == bytes_of(on_terminal) == pytest.approx(getattr(rank.memory, field), rel=5e-3)
    time = explanation.time
    assert cells(page, "step")[1:] == [
        duration(seconds) for seconds in (time.step_s, time.in_turn_s, time.overlapped_s)
    ]
    assert cells(page, "MFU")[3] == f"{100 * explanation.time.mfu_overlapped:.1f}%"


@pytest.mark.parametrize("name", MESHES)
def test_parts_add_up_to_the_peak(explanations, name):
    for rank in explanations[name].ranks:
        parts = parts_of(rank.memory)
        assert sum(parts) == rank.memory.peak and min(parts) >= 0
    assert (parts.gradients > 0) == (name in ("narrow", "pipeline"))  # a reducer keeps them


def test_a_rank_s_memory_is_drawn_to_scale(explanations):
    explanation = explanations["pipeline"]
    rank, top = explanation.ranks[0], scale_of(explanation)
    picture = ET.fromstring(draw_step(explanation, rank, top))
    corners = [[float(y) for _, y in _points(shape)] for shape in picture.iter("polygon")]
    floor, highest = max(map(max, corners)), min(map(min, corners))
    assert (floor - highest) / 190 * top == pytest.approx(rank.memory.peak, rel=0.01)
    parameters = max(corners[0]) - min(corners[0])
    assert parameters / 190 * top == pytest.approx(rank.memory.parameters, rel=0.02)


def test_moments_are_within_their_action(explanations):
    explanation = explanations["pipeline"]
    for rank in explanation.ranks:
        spans = {str(action): (start, stop) for action, start, stop in explanation.time.timeline.spans[rank.pp_rank]}
        placed = timed_moments(explanation, rank)
        assert [part.moment for part in placed] == list(rank.memory.moments)
        for part in placed:
            start, stop = spans[part.moment.action]
            assert start - 1e-9 <= part.start < part.stop <= stop + 1e-9


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0 B"),
        (31.97, "32 B"),
        (999_600, "1.00 MB"),
        (811_419_648, "811 MB"),
        (65_103_972_992, "65.1 GB"),
        (2e16, "20.0 PB"),
    ],
)
def test_bytes_as_text(value, text):
    assert amount(value) == text


def test_other_figures_as_text():
    assert [duration(s) for s in (0, 25e-6, 0.5501, 6.06, 4000)] == ["0 s", "25.0 us", "550 ms", "6.06 s", "4,000 s"]
    assert [count(n) for n in (768, 163_037_184, 70_553_706_496)] == ["768", "163M", "70.6B"]
    assert [times(*pair) for pair in ((2, 2), (0, 3), (3, 0), (2, 3))] == ["same", "new", "gone", "x1.5"]
    assert ticks(80, 5) == [0, 20, 40, 60, 80] and ticks(0, 5) == [0]


# -- the page -----------------------------------------------------------------------------------------------------


def test_the_page_fetches_nothing_and_runs_nothing(pages):
    for page in pages.values():
        for part in tree(page).iter():
            assert part.tag not in ("script", "link", "img", "iframe", "object")
            assert not {"src", "href", "srcset", "onload", "onclick"} & set(part.attrib)
        assert (
            "url(" not in page and "@import" not in page and "http" not in page.split("<style>")[1].split("</style>")[0]
        )


def test_hostile_names_are_escaped(explanations):
    bad = '<script>alert("1")</script>&'
    explanation = explanations["tp"]
    lines = tuple(replace(line, name=bad + line.name, style=bad, rule=bad) for line in explanation.parameters)
    rank = explanation.ranks[0]
    messages = tuple(replace(message, module=bad) for message in rank.messages)
    memory = replace(rank.memory, peak_at=bad)
    ranks = (replace(rank, units=bad, messages=messages, memory=memory),)
    hostile = replace(
        explanation, model=bad, plan=bad, setting=bad, machine=bad, parameters=lines, ranks=ranks, assumptions=(bad,)
    )
    for page in (as_html(hostile), compare_html(hostile, explanation)):
        assert bad in text_of(page) and not list(tree(page).iter("script")) and "<script" not in page


def _points(shape: ET.Element) -> list[tuple[str, str]]:
    return [tuple(pair.split(",")) for pair in shape.get("points").split()]


def _edges(part: ET.Element):
    """(x, y) of the corners of a drawn element."""
    number = {key: float(value) for key, value in part.attrib.items() if re.fullmatch(r"-?[\d.]+", value)}
    if part.tag == "rect":
        yield number["x"], number["y"]
        yield number["x"] + number["width"], number["y"] + number["height"]
    elif part.tag == "line":
        yield number["x1"], number["y1"]
        yield number["x2"], number["y2"]
    elif part.tag == "polygon":
        yield from ((float(x), float(y)) for x, y in _points(part))
    elif part.tag == "path":
        for x, y, width, height in re.findall(r"M([\d.]+) ([\d.]+)h([\d.]+)v([\d.]+)", part.get("d")):
            yield float(x), float(y)
            yield float(x) + float(width), float(y) + float(height)
    elif part.tag == "text":
        width = 0.58 * number["font-size"] * len(part.text)
        left = number["x"] - width * {"start": 0, "middle": 0.5, "end": 1}[part.get("text-anchor")]
        yield left, number["y"] - number["font-size"]
        yield left + width, number["y"]


def check_picture(picture: ET.Element) -> int:
    _, _, width, height = map(float, picture.get("viewBox").split())
    drawn = 0
    for part in picture.iter():
        for x, y in _edges(part):
            assert -1 <= x <= width + 1 and -1 <= y <= height + 1, (ET.tostring(part), width, height)
            drawn += 1
    return drawn


def test_pictures_are_within_their_frame(pages):
    for page in pages.values():
        pictures = list(tree(page).iter("svg"))
        assert len(pictures) > 4 and all(check_picture(picture) for picture in pictures)
        assert all(picture.get("aria-label") for picture in pictures)


def test_the_first_rank_s_chunks_are_drawn(explanations):
    """gpt2's packed query, key and value: the first half of each of three chunks."""
    page = as_html(explanations["tp"])
    packed = next(picture for picture in tree(page).iter("svg") if "c_attn.weight" in picture.get("aria-label"))
    outline = next(box for box in packed.iter("rect") if box.get("class") == "empty")
    filled = [box for box in packed.iter("rect") if box.get("class") == "c0"]
    width = float(outline.get("width"))
    assert len(filled) == 3
    for number, box in enumerate(filled):
        assert float(box.get("x")) - float(outline.get("x")) == pytest.approx(number * width / 3, abs=0.2)
        assert float(box.get("width")) == pytest.approx(width / 6, abs=0.2)
    replicated = next(picture for picture in tree(page).iter("svg") if "wpe.weight" in picture.get("aria-label"))
    assert [box.get("class") for box in replicated.iter("rect")] == ["c0", "outline"]


@pytest.mark.parametrize(("schedule", "ranks", "microbatches"), [("1f1b", 2, 3), ("zbv", 16, 64), ("1f1b", 16, 256)])
def test_pipelines_of_any_size_are_small_pictures(schedule, ranks, microbatches):
    timeline = simulate(build_schedule(schedule, ranks, microbatches))
    picture = draw_pipeline(timeline, schedule)
    parsed = ET.fromstring(picture)
    assert check_picture(parsed) and len(picture) < 400_000
    boxes = [part for part in parsed.iter("rect") if "frame" in part.get("class")]
    paths = "".join(part.get("d") for part in parsed.iter("path"))
    assert len(boxes) + paths.count("M") == sum(map(len, timeline.spans))


def test_narrow_boxes_of_a_pipeline_are_merged():
    timeline = simulate(build_schedule("gpipe", 2, 4000))
    picture = draw_pipeline(timeline, "gpipe")
    assert check_picture(ET.fromstring(picture)) and picture.count("M") < 8000 < sum(map(len, timeline.spans))


# -- empty sections -----------------------------------------------------------------------------------------------


def test_one_rank_sends_nothing(explanations, pages):
    explanation = explanations["one"]
    assert not explanation.ranks[0].messages and "sends no message" in as_text(explanation)
    assert draw_traffic([("the rank", explanation.ranks[0])]) == ""
    assert "Nothing is sent" in pages["one"] and "bytes sent over each axis" not in pages["one"]


def test_only_pipelines_are_drawn(pages):
    assert "bubbles" not in pages["tp"] and "bubbles" in pages["pipeline"] and "bubbles" in pages["both"]


def test_without_recompute_advice_and_moments(explanations):
    explanation = explanations["tp"]
    bare = replace(explanation.ranks[0], memory=replace(explanation.ranks[0].memory, moments=(), peak_at=""))
    empty = replace(explanation, activations_without_recompute=0, advice=(), ranks=(bare,), machine_sources={})
    assert "with recompute=full" in as_text(explanation) and "with recompute=full" not in as_text(empty)
    assert "no single change" in as_text(empty) and "No single change" in text_of(as_html(empty))


# -- comparison ---------------------------------------------------------------------------------------------------


def test_comparison_shows_ratios_layouts_and_axes(explanations, pages):
    a, b = explanations["tp"], explanations["pipeline"]
    terminal, page = compare_text(a, b), text_of(pages["both"])
    for text in (terminal, page):
        assert a.setting in text and b.setting in text and "estimate" in text.lower()
        assert amount(a.peak_bytes) in text and amount(b.peak_bytes) in text
        assert times(a.time.in_turn_s, b.time.in_turn_s) in text
    assert re.search(r"^dp +0 ", terminal, re.M) and cells(pages["both"], "pp")[1] == "0"
    assert "transformer.h.*.ln_1.weight" in terminal and "gradient summed" in terminal
    assert cells(pages["both"], "parameters of the model")[3] == "same"


def test_a_setting_compared_with_itself_is_the_same(explanations):
    text = compare_text(explanations["tp"], explanations["tp"])
    assert "every parameter has the same layout" in text and not re.search(r"x\d|new|gone", text)
    assert "Every parameter has the same layout" in compare_html(explanations["tp"], explanations["tp"])


def test_experts_over_ep_have_a_line_about_routing(explanations):
    explanation = explain(source_of("mixtral", {}), None, "dp=2", sequence=16, batch=2, ep=2, zero=1)
    worst = explanation.worst_routing
    assert worst.choices == 2 * worst.even_choices and worst.peak_bytes > worst.even_peak_bytes
    assert explanation.as_dict()["worst_routing"]["rows"] == worst.rows
    for text in (as_text(explanation), text_of(as_html(explanation))):
        line = " ".join(text.split())
        assert f"computes {count(worst.choices)} choices of experts (evenly {count(worst.even_choices)})" in line
        assert f"its peak is {amount(worst.peak_bytes)} (evenly {amount(worst.even_peak_bytes)}), which" in line
    assert explanations["tp"].worst_routing is None and "ep group" not in as_text(explanations["tp"])
