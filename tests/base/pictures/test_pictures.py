"""A picture is the same in a page and in a file of its own, which programs without CSS variables show too."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree

import pytest

from parallelize.base.pictures.html import document, figure, paragraph, table
from parallelize.base.pictures.stylesheet import PAGE_STYLE, PICTURE_STYLE
from parallelize.base.pictures.svg import box, legend, picture, standalone, text_at, ticks

CLASSES = re.compile(r"\.([a-z]\w*)")


def test_a_file_of_its_own_names_its_colors():
    svg = standalone(picture("a <b>", 100, 50, [box(0, 0, 10, 10, "c0", "a & b"), text_at(0, 9, "<c>")]))
    root = ElementTree.fromstring(svg)
    assert root.get("aria-label") == "a <b>" and root.tag.endswith("}svg")
    assert "var(" not in svg and ".c0 { fill: #0072b2; }" in svg


def test_a_dark_scheme_replaces_every_color_of_a_picture():
    light, _, dark = PICTURE_STYLE.partition("@media")
    colored = {line.partition(" {")[0] for line in light.splitlines() if "#" in line and "ffffff" not in line}
    fixed = {"svg .on", "svg .dark"}  # text on a fill that both schemes have
    assert colored - fixed <= {line.partition(" {")[0] for line in dark.splitlines()}


def test_page_and_picture_have_the_same_classes():
    assert set(CLASSES.findall(PICTURE_STYLE)) <= set(CLASSES.findall(PAGE_STYLE))


def test_a_page_is_escaped_and_its_numbers_are_aligned():
    page = document(
        "a <b>", [paragraph("1 < 2"), "", figure(""), table(("x", "n"), [("<c>", "1"), ("  d", "2")], (1,))]
    )
    assert "<title>a &lt;b&gt;</title>" in page and "<p>1 &lt; 2</p>" in page and "<figure>" not in page
    assert '<td>&lt;c&gt;</td><td class="n">1</td>' in page and '<td class="part">d</td>' in page


@pytest.mark.parametrize("end", [0.3, 1.0, 3.7, 9.9, 42.0, 3678.0, 10000.0])
def test_an_axis_has_three_to_ten_labels(end):
    assert 3 <= len(ticks(end, 10)) <= 11 and ticks(end, 10)[-1] <= end * (1 + 1e-9)


def test_a_legend_takes_as_many_rows_as_it_needs():
    entries = [(f"c{number}", f"entry {number}") for number in range(8)]
    narrow, bottom = legend(entries, 0, 200, 0)
    assert len(narrow) == 16 and bottom > legend(entries, 0, 2000, 0)[1]
