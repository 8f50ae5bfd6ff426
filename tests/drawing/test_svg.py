"""Boxes of SVG: they know their sizes, and lie beside and below each other without overlap."""

import re
import xml.etree.ElementTree as ET

from spmd.drawing._picture import EDGES, FILLS, WIDTH, Box, below, beside, card, element, flow, paragraph, text


def test_attributes_and_text_are_escaped():
    assert element("g", data_index='a "b"', x=1.50) == '<g data-index="a &quot;b&quot;" x="1.5"/>'
    assert "&lt;b&gt;" in text(0, 0, "<b>") and text(0, 0, "") == ""


def test_boxes_beside_and_below_add_their_sizes():
    boxes = [Box(10, 5, "<a/>"), Box(20, 8, "<b/>")]
    side, pile = beside(boxes, 4), below(boxes, 3)
    assert (side.width, side.height) == (34, 8) and (pile.width, pile.height) == (20, 16)
    assert 'translate(14 0)"' in side.body and 'translate(0 8)"' in pile.body
    assert (beside([]).width, below([]).height) == (0, 0)


def test_a_row_is_never_wider_than_the_page():
    boxes = [Box(WIDTH / 3, 10, "<a/>")] * 5
    assert flow(boxes).width <= WIDTH and flow(boxes).height > 10
    assert flow([Box(2 * WIDTH, 10, "<a/>")]).height == 10


def test_long_text_goes_on_in_the_next_line():
    words = "devices " * 60
    box = paragraph(words)
    lines = re.findall("<text", box.body)
    assert len(lines) > 1 and box.width <= WIDTH and box.height == 17 * len(lines)


def test_a_card_is_a_document_of_its_own():
    root = ET.fromstring(card(Box(100, 50, "<g/>"), "b/dp & more"))
    assert root.attrib["viewBox"] == "0 0 132 82" and root[0].text == "b/dp & more"


def test_each_device_that_is_drawn_has_a_colour():
    assert len(set(FILLS)) == len(FILLS) == len(EDGES) == len(set(EDGES)) == 64
