"""The parser is total, and writing and reading are inverse to each other."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miniverl.agent.protocol import (
    ParsedFinal,
    ParsedTool,
    ParseFailure,
    parse_generation,
    prefix_length,
    render_final,
    render_tool_call,
    render_tool_result,
)
from miniverl.core import DataError, loads_strict
from miniverl.environments.base import (
    FINAL_CLOSE,
    FINAL_OPEN,
    RESULT_CLOSE,
    RESULT_OPEN,
    TOOL_CLOSE,
    TOOL_OPEN,
    StepResult,
)

few = settings(max_examples=100, deadline=None)
MARKERS = [TOOL_OPEN, TOOL_CLOSE, RESULT_OPEN, RESULT_CLOSE, FINAL_OPEN, FINAL_CLOSE]
hostile = st.lists(
    st.one_of(
        st.sampled_from(
            [
                *MARKERS,
                '{"name":"a"',
                '"arguments":{',
                "}",
                "[",
                "NaN",
                "-Infinity",
                "1e999",
                "9" * 200,
                "\n",
                "\\",
                '"',
                "\ud800",
                "</",
            ]
        ),
        st.text(max_size=5),
    ),
    max_size=14,
).map("".join)
texts = st.lists(
    st.one_of(
        st.sampled_from([*MARKERS, "</", "\\", '"', "\n"]),
        st.text(st.characters(exclude_categories=["Cs"]), max_size=6),
    ),
    max_size=6,
).map("".join)
values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**30), 10**30)
    | st.floats(allow_nan=False, allow_infinity=False)
    | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)


@few
@given(hostile)
def test_every_string_has_one_of_three_meanings(text):
    result = parse_generation(text)
    assert isinstance(result, (ParsedTool, ParsedFinal, ParseFailure))
    assert 0 <= prefix_length(text) <= len(text)
    if isinstance(result, ParseFailure):
        assert result.reason and result.reason.isascii() and len(result.reason) < 250
    else:
        assert text.startswith(result.prefix) and len(result.prefix) == prefix_length(text)


@few
@given(
    texts.filter(bool),
    st.dictionaries(texts, values, max_size=3),
    texts.filter(lambda t: TOOL_OPEN not in t and FINAL_OPEN not in t),
    st.sampled_from(["", " ", "\n\n"]),
)
def test_a_rendered_call_is_read_back(name, arguments, prefix, rest):
    block = render_tool_call(name, arguments)
    parsed = parse_generation(prefix + block + rest)
    assert parsed == ParsedTool(name, arguments, block, prefix)
    assert block.count(TOOL_CLOSE) == 1


@few
@given(texts)
def test_a_rendered_answer_is_read_back_or_refused(text):
    if FINAL_OPEN in text or FINAL_CLOSE in text:
        with pytest.raises(DataError):
            render_final(text)
    else:
        assert parse_generation(render_final(text)) == ParsedFinal(text.strip(), "")


@few
@given(texts, st.booleans())
def test_a_result_cannot_close_its_block_early(text, ok):
    block = render_tool_result(StepResult(ok, "s1", result=text if ok else None, error=None if ok else text))
    assert block.count(RESULT_CLOSE) == 1 and block.endswith(RESULT_CLOSE)
    assert not any(marker in block for marker in (TOOL_CLOSE, FINAL_CLOSE))
    body = loads_strict(block.removeprefix(RESULT_OPEN).removesuffix(RESULT_CLOSE))
    assert body == ({"ok": True, "result": text} if ok else {"ok": False, "error": text})


def test_the_bytes_of_the_blocks():
    assert (
        render_tool_call("calculator", {"expression": "12 * 7"})
        == '<tool_call>\n{"arguments":{"expression":"12 * 7"},"name":"calculator"}\n</tool_call>'
    )
    assert (
        render_tool_result(StepResult(True, "s1", result="84"))
        == '<tool_result>\n{"ok":true,"result":"84"}\n</tool_result>'
    )
    assert (
        render_tool_result(StepResult(False, "s1", error="unknown tool"))
        == '<tool_result>\n{"error":"unknown tool","ok":false}\n</tool_result>'
    )
    assert render_final("84") == "<final>\n84\n</final>"


@pytest.mark.parametrize(
    "json_text",
    [
        "[" * 4000,
        '{"name":"a","arguments":' + '{"x":' * 40 + "0" + "}" * 41,
        '{"name":"a","arguments":{"x":' + "9" * 3000 + "}}",
        '{"name":"a","arguments":{"x":1e400}}',
        '{"name":7}',
        '{"arguments":{}}',
        "null",
        "",
    ],
)
def test_bad_payloads_fail_politely(json_text):
    assert isinstance(parse_generation(f"{TOOL_OPEN}{json_text}{TOOL_CLOSE}"), ParseFailure)
