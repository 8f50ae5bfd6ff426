"""Pictures: the same in text, in colour, in a notebook and in a file."""

import io
import re
import xml.etree.ElementTree as ET

import spmd
from tests.inspect.drawings import SVG


def test_the_ways_to_show_it(tmp_path):
    picture = spmd.visualize("a/x b", (4, 6), {"x": 2})
    assert repr(picture) == str(picture)
    assert picture._repr_svg_() == picture.svg
    assert picture.svg in picture._repr_html_()
    picture.save(tmp_path / "p.svg")
    ET.parse(tmp_path / "p.svg")
    picture.save(str(tmp_path / "p.html"))
    assert picture.svg in (tmp_path / "p.html").read_text(encoding="utf-8")
    picture.save(tmp_path / "p.txt")
    assert (tmp_path / "p.txt").read_text(encoding="utf-8") == f"{picture}\n"


def test_a_plan_shows_itself():
    plan = spmd.plan("a/x b -> a b/x", sizes={"a": 8, "b": 8}, mesh={"x": 4})
    assert plan._repr_svg_() == spmd.visualize(plan).svg


def test_svg_stands_alone():
    """No ids, styles, scripts or references, which could clash with or reach out of a notebook."""
    svg = spmd.visualize("a/x b", (4, 6), {"x": 2}).svg
    page = ET.fromstring(svg)
    assert {one.tag.removeprefix(SVG) for one in page.iter()} <= {"svg", "g", "rect", "text", "title"}
    assert not [one for one in page.iter() if one.get("id") or one.get("class") or one.get("style")]
    assert "href" not in svg and "url(" not in svg


def test_rich_colours_the_same_text():
    from rich.console import Console

    picture = spmd.visualize("a/x b", (4, 6), {"x": 2})
    out = io.StringIO()
    Console(file=out, force_terminal=True, color_system="truecolor", width=100).print(picture)
    assert "\x1b[" in out.getvalue()
    bare = re.sub(r"\x1b\[[0-9;]*m", "", out.getvalue())
    assert [line.rstrip() for line in bare.splitlines()] == picture.text(100).splitlines()
