"""A matplotlib figure as SVG that lives inside a page: its colours and font are the page's."""

import re
import xml.etree.ElementTree as ElementTree

from markupsafe import Markup
from matplotlib.figure import Figure

from orinbench.figures import GRID, INK, MUTED, SERIES, SURFACE, legible, svg_text

SVG, XLINK = "http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"
# A figure is drawn in these colours; in the page they are variables, which follow its scheme.
VARIABLES = {
    INK: "var(--ink)",
    MUTED: "var(--muted)",
    GRID: "var(--grid)",
    SURFACE: "var(--surface)",
    **{colour: f"var(--series-{index + 1})" for index, colour in enumerate(SERIES)},
}
# What matplotlib writes for the page to load or to obey.
UNWANTED = ("metadata", "style")

ElementTree.register_namespace("", SVG)


def inline_svg(figure: Figure, name: str, title: str, description: str) -> Markup:
    """Return a figure as an `svg` element.

    `name` is unique in the page and goes before every id; `title` and `description` are what a
    screen reader says.
    """
    root = ElementTree.fromstring(svg_text(figure))
    for parent in list(root.iter()):
        for child in list(parent):
            if child.tag in {f"{{{SVG}}}{tag}" for tag in UNWANTED}:
                parent.remove(child)
    for element in root.iter():
        _adopt(element, name)
    for size in ("width", "height"):
        root.attrib.pop(size, None)
    root.set("role", "img")
    root.set("aria-labelledby", f"{name}-title {name}-text")
    root.set("class", "figure")
    for place, (tag, text) in enumerate((("title", title), ("desc", description))):
        said = ElementTree.Element(f"{{{SVG}}}{tag}")
        said.text = legible(text)
        said.set("id", f"{name}-{'title' if tag == 'title' else 'text'}")
        root.insert(place, said)
    # Escaped by ElementTree, as all XML is.
    return Markup(ElementTree.tostring(root, encoding="unicode"))


def _adopt(element: ElementTree.Element, name: str) -> None:
    """Give an element's ids the figure's name, and its style the page's colours and font."""
    if "id" in element.attrib:
        element.set("id", f"{name}-{element.attrib['id']}")
    if (target := element.attrib.pop(f"{{{XLINK}}}href", None)) is not None:
        element.set("href", target.replace("#", f"#{name}-", 1))
    if "clip-path" in element.attrib:
        element.set("clip-path", element.attrib["clip-path"].replace("url(#", f"url(#{name}-"))
    if style := element.attrib.get("style"):
        for colour, variable in VARIABLES.items():
            style = style.replace(colour, variable)
        style = re.sub(r"font: ([^;]*?)([\d.]+px) [^;]*", r"font: \1\2 var(--font)", style)
        style = re.sub(r"font-family: [^;]*", "font-family: var(--font)", style)
        element.set("style", style)
