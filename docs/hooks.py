"""Hook of the site build: formulas become MathML, which browsers draw without a script."""

from __future__ import annotations

import html
import re

from latex2mathml.converter import convert

FORMULA = re.compile(r'<(span|div) class="arithmatex">\\([(\[])(.*?)\\[)\]]</\1>', re.DOTALL)
# latex2mathml writes names of functions as variables, without the space around them, and infinity as an operator
FUNCTION = re.compile(r"<mi>(log|ln|exp|max|min|cos|sin)</mi>")
# ... and leaves escapes inside a text as they are
ESCAPE = re.compile(r"\\(?=[_%#&])")
SIGN = re.compile(r"<mo>(&#x0*221E;)</mo>", re.IGNORECASE)


def on_page_content(content: str, **_: object) -> str:
    return FORMULA.sub(_mathml, content)


def _mathml(found: re.Match) -> str:
    block = found.group(2) == "["
    text = convert(html.unescape(found.group(3)).strip(), display="block" if block else "inline")
    text = ESCAPE.sub("", text)
    return SIGN.sub(r"<mi>\1</mi>", FUNCTION.sub(r'<mo lspace="0.17em" rspace="0.17em">\1</mo>', text))
