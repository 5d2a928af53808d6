"""Pages: HTML that contains its style sheet and pictures, without scripts or external files."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from html import escape

from parallelize.base.pictures.stylesheet import PAGE_STYLE


def document(title: str, body: Iterable[str]) -> str:
    """A page. body: HTML; empty parts are left out."""
    screen = '<meta name="viewport" content="width=device-width, initial-scale=1"/>'
    head = f'<meta charset="utf-8"/>{screen}<title>{escape(title)}</title><style>{PAGE_STYLE}</style>'
    text = "\n".join(part for part in body if part)
    return f'<!DOCTYPE html>\n<html lang="en"><head>{head}</head>\n<body>\n{text}\n</body></html>\n'


def heading(text: str) -> str:
    return f"<h1>{escape(text)}</h1>"


def section(title: str, *parts: str) -> str:
    """title and parts are HTML."""
    return f"<section><h2>{title}</h2>\n" + "\n".join(parts) + "\n</section>"


def paragraph(text: str) -> str:
    return f"<p>{escape(text)}</p>"


def figure(picture: str, caption: str = "") -> str:
    """A picture with a text above it; nothing without a picture."""
    figcaption = f"<figcaption>{escape(caption)}</figcaption>" if caption else ""
    return f"<figure>{figcaption}{picture}</figure>" if picture else ""


def scroll(inner: str) -> str:
    return f'<div class="scroll">{inner}</div>'


def table(head: Sequence[str], rows: Iterable[Sequence[str]], numbers: Collection[int] = ()) -> str:
    """Rows of texts. A cell that begins with spaces is a part of the one above, and is indented.

    Args:
        numbers: indices of the columns that are aligned to the right.
    """

    def cells(row: Sequence[str], tag: str) -> str:
        html = ""
        for index, text in enumerate(row):
            classes = [*(["n"] if index in numbers else []), *(["part"] if text.startswith("  ") else [])]
            attribute = f' class="{" ".join(classes)}"' if classes else ""
            html += f"<{tag}{attribute}>{escape(text.strip())}</{tag}>"
        return f"<tr>{html}</tr>"

    body = "".join(cells(row, "td") for row in rows)
    return scroll(f"<table><thead>{cells(head, 'th')}</thead><tbody>{body}</tbody></table>")
