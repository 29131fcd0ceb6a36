"""Calls and reasoning in the text of each family, however the text is cut."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from api.outputs.deltas import Delta, calls_of, merged, reasoning_of, text_of
from api.outputs.reading import (
    DEEPSEEK,
    HERMES,
    LLAMA,
    MISTRAL,
    PYTHONIC,
    Reading,
    Syntax,
    Thinking,
    syntax_of,
    thinking_of,
)

NAMES = frozenset({"get_weather", "search", "now"})
WEATHER = {"city": 'Zürich "}', "days": [1, 2], "nested": {"a": "]"}}
W = json.dumps(WEATHER, ensure_ascii=False)
THINK = Thinking("<think>", "</think>")
BEGIN, END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, DONE, SEP = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"

RECORDED: list[tuple[str, Syntax, str, str, list[tuple[str, Any]]]] = [
    (
        "hermes",
        HERMES,
        f'Let me see.\n<tool_call>\n{{"name": "get_weather", "arguments": {W}}}\n</tool_call>\n'
        '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
        "Let me see.",
        [("get_weather", WEATHER), ("now", {})],
    ),
    (
        "hermes with the arguments first and inside of a string",
        HERMES,
        '<tool_call>{"arguments": "{\\"city\\": \\"Bern\\"}", "name": "get_weather"}</tool_call>',
        "",
        [("get_weather", {"city": "Bern"})],
    ),
    (
        "hermes without arguments",
        HERMES,
        '<tool_call>{"name": "now"}</tool_call>',
        "",
        [("now", {})],
    ),
    (
        "llama",
        LLAMA,
        f'<|python_tag|>{{"name": "get_weather", "parameters": {W}}}',
        "",
        [("get_weather", WEATHER)],
    ),
    (
        "llama, several",
        LLAMA,
        '{"type": "function", "name": "now", "parameters": {}}; '
        f'{{"name": "get_weather", "parameters": {W}}}',
        "",
        [("now", {}), ("get_weather", WEATHER)],
    ),
    (
        "mistral",
        MISTRAL,
        f'[TOOL_CALLS] [{{"name": "get_weather", "arguments": {W}}}, '
        '{"name": "now", "arguments": {}}]',
        "",
        [("get_weather", WEATHER), ("now", {})],
    ),
    (
        "mistral since version 11",
        MISTRAL,
        f"On it.[TOOL_CALLS]get_weather[ARGS]{W}[TOOL_CALLS]now[CALL_ID]abc[ARGS]{{}}",
        "On it.",
        [("get_weather", WEATHER), ("now", {})],
    ),
    (
        "deepseek v3 and r1",
        DEEPSEEK,
        f"{BEGIN}{CALL}function{SEP}get_weather\n```json\n{W}\n```{DONE}\n"
        f"{CALL}function{SEP}now\n```json\n{{}}\n```{DONE}{END}",
        "",
        [("get_weather", WEATHER), ("now", {})],
    ),
    (
        "deepseek v3.1",
        DEEPSEEK,
        f"Yes.{BEGIN}{CALL}get_weather{SEP}{W}{DONE}{CALL}now{SEP}{{}}{DONE}{END}",
        "Yes.",
        [("get_weather", WEATHER), ("now", {})],
    ),
    (
        "pythonic",
        PYTHONIC,
        '[get_weather(city="Zürich \\"}", days=[1, 2], nested={"a": "]"}), now()]',
        "",
        [("get_weather", WEATHER), ("now", {})],
    ),
]
"""Name, syntax, the model's text, what is shown of it, the calls in it."""

NO_CALLS = [
    (HERMES, "A plain answer with <tool_ and { braces }."),
    (HERMES, 'An unknown one: <tool_call>\n{"name": "rm", "arguments": {}}\n</tool_call> ok'),
    (HERMES, "No JSON: <tool_call>hello</tool_call> there"),
    (HERMES, 'Cut off: <tool_call>{"na'),
    (LLAMA, '{"answer": {"name": "get_weather"}}'),
    (LLAMA, '  {"name": "nobody", "parameters": {}}'),
    (LLAMA, "Plain text."),
    (MISTRAL, "Half a marker: [TOOL_CAL"),
    (MISTRAL, "[TOOL_CALLS]nothing of the kind"),
    (DEEPSEEK, f"{CALL}strange{SEP}{{}}{DONE}"),
    (PYTHONIC, "[1, 2, 3] is a list"),
    (PYTHONIC, "[get_weather(city=open('x'))]"),
    (PYTHONIC, "[get_weather(" + "(" * 300),
    (PYTHONIC, "[now( "),
]


def read(reading: Reading, pieces: list[str]) -> list[Delta]:
    parser = reading.parser()
    found = [delta for piece in pieces for delta in parser.push(piece)]
    return merged([*found, *parser.end()])


def cuts(text: str, size: int) -> list[str]:
    return [text[start : start + size] for start in range(0, len(text), size)]


@pytest.mark.parametrize(
    ("syntax", "text", "shown", "calls"),
    [recorded[1:] for recorded in RECORDED],
    ids=[recorded[0] for recorded in RECORDED],
)
@pytest.mark.parametrize("size", [1, 2, 3, 7, 1_000])
def test_the_calls_of_each_family_are_found(
    syntax: Syntax, text: str, shown: str, calls: list[tuple[str, Any]], size: int
) -> None:
    deltas = read(Reading(names=NAMES, syntax=syntax), cuts(text, size))
    assert text_of(deltas) == shown
    found = calls_of(deltas)
    assert [(call.name, json.loads(call.arguments)) for call in found] == calls
    assert [call.index for call in found] == list(range(len(calls)))
    assert len({call.id for call in found}) == len(calls)


@pytest.mark.parametrize("recorded", RECORDED, ids=lambda recorded: recorded[0])
@given(data=st.data())
@settings(max_examples=25)
def test_where_the_text_is_cut_changes_nothing(recorded: Any, data: st.DataObject) -> None:
    _, syntax, text, shown, calls = recorded
    at = sorted(data.draw(st.sets(st.integers(1, len(text) - 1), max_size=12)))
    pieces = [text[a:b] for a, b in zip([0, *at], [*at, len(text)], strict=True)]
    deltas = read(Reading(names=NAMES, syntax=syntax), pieces)
    assert text_of(deltas) == shown
    found = [(call.name, json.loads(call.arguments)) for call in calls_of(deltas)]
    assert found == calls


@pytest.mark.parametrize(("syntax", "text"), NO_CALLS)
@pytest.mark.parametrize("size", [1, 5, 1_000])
def test_what_is_no_call_is_text_as_it_was_written(syntax: Syntax, text: str, size: int) -> None:
    deltas = read(Reading(names=NAMES, syntax=syntax), cuts(text, size))
    assert calls_of(deltas) == []
    assert "".join(text_of(deltas).split()) == "".join(text.split())


@pytest.mark.parametrize("syntax", [HERMES, LLAMA, MISTRAL, DEEPSEEK, PYTHONIC])
@given(
    text=st.text(alphabet='<>|[]{}"\\:,()= \nabTOL_CSnow｜▁', max_size=60), cut=st.integers(1, 9)
)
@settings(max_examples=60)
def test_no_text_breaks_a_parser_or_is_read_differently_in_pieces(
    syntax: Syntax, text: str, cut: int
) -> None:
    reading = Reading(thinking=THINK, names=NAMES, syntax=syntax)

    def meaning(pieces: list[str]) -> list[Any]:
        deltas = read(reading, pieces)
        return [text_of(deltas), [(call.name, call.arguments) for call in calls_of(deltas)]]

    assert meaning(cuts(text, cut)) == meaning([text])


@pytest.mark.parametrize("is_open", [False, True])
@pytest.mark.parametrize("size", [1, 4, 1_000])
def test_reasoning_is_split_from_the_answer(is_open: bool, size: int) -> None:
    text = "Two < three.\n\nSo yes.\n</think>\n\nYes, <think> is a tag."
    reading = Reading(thinking=THINK, begins_in_thought=is_open)
    deltas = read(reading, cuts(text if is_open else f"<think>\n{text}", size))
    assert reasoning_of(deltas) == "Two < three.\n\nSo yes."
    assert text_of(deltas) == "Yes, <think> is a tag."


def test_an_answer_without_reasoning_is_all_answer() -> None:
    deltas = read(Reading(thinking=THINK), cuts(" <thin air>", 1))
    assert (reasoning_of(deltas), text_of(deltas)) == ("", " <thin air>")


def test_a_call_follows_reasoning() -> None:
    text = '<think>I need it.</think>\n<tool_call>{"name": "now", "arguments": {}}</tool_call>'
    deltas = read(Reading(thinking=THINK, names=NAMES, syntax=HERMES), cuts(text, 1))
    assert reasoning_of(deltas) == "I need it."
    assert [call.name for call in calls_of(deltas)] == ["now"]
    assert text_of(deltas) == ""


def test_only_one_call_where_only_one_is_allowed() -> None:
    text = '<tool_call>{"name": "now"}</tool_call>' * 2
    parser = Reading(names=NAMES, syntax=HERMES, is_parallel=False).parser()
    deltas = parser.push(text)
    assert parser.is_satisfied
    assert len(calls_of([*deltas, *parser.end()])) == 1


def test_forced_calls_are_read_from_a_json_list() -> None:
    text = f'[{{"name": "get_weather", "arguments": {W}}}]'
    for syntax in (HERMES, MISTRAL):
        reading = Reading(names=NAMES, syntax=syntax, is_forced=True)
        deltas = read(reading, cuts(text, 3))
        assert [json.loads(call.arguments) for call in calls_of(deltas)] == [WEATHER]
        assert text_of(deltas) == ""


def test_the_syntax_is_chosen_by_the_template() -> None:
    assert syntax_of("{{ '[TOOL_CALLS]' }}") is MISTRAL
    assert syntax_of("{{ '<tool_call>' }}") is HERMES
    assert syntax_of(f"{{{{ '{BEGIN}' }}}}") is DEEPSEEK
    assert syntax_of("{{- '\"parameters\": ' }}") is LLAMA
    assert syntax_of("[func_name1(params_name1=params_value1") is PYTHONIC
    assert syntax_of("nothing") is HERMES
    assert thinking_of("{{ content.split('</think>') }}") == THINK
    assert thinking_of("nothing") is None


def test_mistral_s_ids_are_what_its_template_accepts() -> None:
    text = '[TOOL_CALLS][{"name": "now", "arguments": {}}]'
    (call,) = calls_of(read(Reading(names=NAMES, syntax=MISTRAL), [text]))
    assert call.id is not None
    assert len(call.id) == 9
    assert call.id.isalnum()
