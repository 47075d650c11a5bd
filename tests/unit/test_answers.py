"""Answers: text, reasoning and calls of tools, however the text is cut."""

from __future__ import annotations

import itertools
import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.engine.constrain import Constrainer
from quire.errors import RequestError
from quire.text.answers import Answer
from quire.text.call_grammar import before_answer, call_grammar
from quire.text.calls import Tools, tools_of
from quire.text.styles import Style, style_of
from quire.types import Behind, Constraint, Grammar, Json, Regex

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Says what the weather is.",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string"},
                    "days": {"type": "integer"},
                    "units": {"enum": ["metric", "imperial"]},
                },
                "required": ["city"],
            },
        },
    },
    {"type": "function", "function": {"name": "now"}},
]
TEMPLATES = {
    "hermes": "{% if tools %}<tool_call>{'name': …, 'arguments': …}</tool_call>{% endif %}<think>",
    "qwen-xml": "{{ tools }}<tool_call><function=f><parameter=a></parameter></tool_call><think>",
    "llama3": '{{ tools }}<|start_header_id|>ipython<|end_header_id|>"parameters": <|python_tag|>',
    "mistral": "{{ tools }}[TOOL_CALLS]f[ARGS]{}[THINK][/THINK]",
    "mistral-list": "{{ tools }}[TOOL_CALLS][",
    "gemma": '{{ tools }}<|tool_call>call:f{a:<|"|>b<|"|>}<tool_call|><|channel>thought<channel|>',
    "functiongemma": "{{ tools }}<start_function_call>call:f{a:<escape>b<escape>}",
    "lfm2": "{{ tools }}<|tool_call_start|>[f(a=1)]<|tool_call_end|><think>",
    "gpt-oss": "{{ tools }}<|channel|>analysis<|message|>",
    "nemotron": "{{ tools }}<TOOLCALL>[]</TOOLCALL>",
}
WEATHER = {"city": 'São "Paulo"\n</tool_call> {x}', "days": 2}
_NAMED = '{"name": "weather", "%s": %s}'
_J = json.dumps(WEATHER, ensure_ascii=False)
# Each: what is written, the text, the reasoning, and the calls that it means.
BOTH = [("weather", WEATHER), ("now", {})]
WRITTEN = [
    ("hermes", f"Hi.\n<tool_call>\n{_NAMED % ('arguments', _J)}\n</tool_call>\n"
     '<tool_call>{"name": "now"}</tool_call>', "Hi.", "", BOTH),
    ("hermes", f"<tool_calls>[{_NAMED % ('arguments', _J)}]</tool_calls>", "", "", BOTH[:1]),
    ("hermes", "<think>\nlet me\nsee\n</think>\n\nHello <think> again\n", "Hello <think> again\n",
     "let me\nsee", []),
    ("hermes", '<think>a</think><tool_call>{"name": "now", "arguments": "{}"}</tool_call>'
     "<think>b</think> done", "done", "a\nb", [("now", {})]),
    ("qwen-xml", "Well\n<tool_call>\n<function=weather>\n<parameter=city>\n" + WEATHER["city"] +
     "\n</parameter>\n<parameter=days>\n2\n</parameter>\n</function>\n</tool_call>\n"
     "<function=now>\n</function>", "Well", "", BOTH),
    ("llama3", " " + _NAMED % ("parameters", _J) + '; {"name": "now", "parameters": {}}', "", "",
     BOTH),
    ("llama3", "<|python_tag|>" + _NAMED % ("parameters", _J), "", "", BOTH[:1]),
    ("mistral", "Yes[TOOL_CALLS]weather[ARGS]" + _J + "[TOOL_CALLS]now[CALL_ID]abcdefghi[ARGS]{}",
     "Yes", "", BOTH),
    ("mistral", "[THINK]hm[/THINK]Fine.", "Fine.", "hm", []),
    ("mistral-list", f"[TOOL_CALLS][{_NAMED % ('arguments', _J)}, " '{"name": "now", '
     '"arguments": {}, "id": "123456789"}]', "", "", BOTH),
    ("gemma", '<|channel>thought\nhm<channel|>So <|tool_call>call:weather{city:<|"|>'
     + WEATHER["city"] + '<|"|>,days:2}<tool_call|><|tool_call>call:now{}<tool_call|>', "So", "hm",
     BOTH),
    ("functiongemma", "<start_function_call>call:weather{city:<escape>" + WEATHER["city"] +
     "<escape>,days:2}<end_function_call>", "", "", BOTH[:1]),
    ("lfm2", f"<|tool_call_start|>[weather(city={WEATHER['city']!r}, days=2), now()]"
     "<|tool_call_end|>Calling.", "Calling.", "", BOTH),
    ("gpt-oss", "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary "
     f"to=functions.weather <|constrain|>json<|message|>{_J}<|call|>", "", "hm", BOTH[:1]),
    ("gpt-oss", "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>final"
     "<|message|> The <end>.", "The <end>.", "a", []),
    ("nemotron", f"<TOOLCALL>[{_NAMED % ('arguments', _J)}]</TOOLCALL>", "", "", BOTH[:1]),
]  # fmt: skip
# What looks like a call and is none stays as it is written.
NOT_CALLS = [
    ("hermes", "a <tool_call> b"),
    ("hermes", "<tool_call>\n{'name': now}\n</tool_call>  "),
    ("hermes", '<tool_call>{"name": "now", "arguments": {"a": NaN}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "now", "arguments": {"a": "cut off</tool_call>'),
    ("hermes", "<tool_call>"),
    ("qwen-xml", "<tool_call>\n<function=now>\n<parameter=a>\ncut"),
    ("qwen-xml", "<function=now>rubbish</function>"),
    ("llama3", '{"name": "unknown", "parameters": {}}'),
    ("llama3", ' {"an": "answer"} in JSON'),
    ("llama3", '<|python_tag|>print("hi")'),
    ("mistral", "[TOOL_CALLS]weather[ARGS]{"),
    ("gemma", "<|tool_call>call:now{a<tool_call|>"),
    ("gemma", "<|tool_call>call:now{" + "a:{" * 5000 + "<tool_call|>"),
    ("lfm2", "<|tool_call_start|>[now(1)]<|tool_call_end|>"),
    ("lfm2", "<|tool_call_start|>__import__('os').system('true')<|tool_call_end|>"),
    ("lfm2", "<|tool_call_start|>[now(a=(((" * 300),
    ("gpt-oss", "no channel at all"),
]


def style(name: str) -> Style:
    found = style_of(TEMPLATES[name])
    assert found.name == name and found.takes_tools
    return found


def tools() -> Tools:
    return tools_of(TOOLS)[1]


def read(name: str, pieces: list[str]) -> Answer:
    reader = style(name).reader(tools())
    parts = [reader.feed(piece) for piece in pieces]
    return sum(parts, Answer()) + reader.close()


def meant(answer: Answer) -> list[tuple[str, object]]:
    return [(call.name, json.loads(call.arguments)) for call in answer.tool_calls]


@pytest.mark.parametrize(("name", "written", "text", "reasoning", "calls"), WRITTEN)
def test_text_reasoning_and_calls_come_apart(name, written, text, reasoning, calls) -> None:
    answer = read(name, [written])
    assert (answer.text, answer.reasoning, meant(answer)) == (text, reasoning, calls)
    assert len({call.id for call in answer.tool_calls}) == len(calls)
    assert all(len(call.id) == 9 for call in answer.tool_calls)


@pytest.mark.parametrize(("name", "written"), NOT_CALLS)
def test_what_is_no_call_stays_text(name, written) -> None:
    answer = read(name, [written])
    assert (answer.text, answer.reasoning, answer.tool_calls) == (written, "", ())


_SAMPLES = [(name, written) for name, written, *_ in WRITTEN]
_SAMPLES += [(name, written) for name, written in NOT_CALLS if len(written) < 200]


@pytest.mark.parametrize(("name", "written"), _SAMPLES)
def test_letter_by_letter_is_the_same(name, written) -> None:
    assert read(name, list(written)) == read(name, [written])


@st.composite
def cut_texts(draw: st.DrawFn) -> tuple[str, list[str]]:
    """Pieces of all styles in any order, cut anywhere."""
    name = draw(st.sampled_from(sorted(TEMPLATES)))
    marks = [c for open, close in (style(name).calls.spans if style(name).calls else ()) for c in
             (open, close) if c] + [*(style(name).reasoning or ())]  # fmt: skip
    words = st.sampled_from([
        *marks, *(w for n, w in _SAMPLES if n == name), " ", "\n", "<", "{", "}", "[", "a", '"',
        "<|message|>", "<|end|>", "<|channel|>analysis", "to=functions.now",
    ])  # fmt: skip
    text = "".join(draw(st.lists(words, max_size=8)))
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=12)))
    edges = [0, *cuts, len(text)]
    return name, [text[a:b] for a, b in itertools.pairwise(edges)]


@settings(max_examples=200, deadline=None)
@given(cut_texts())
def test_parts_of_an_answer_are_joined_at_once_or_one_by_one(sample: tuple[str, list[str]]) -> None:
    name, pieces = sample
    reader = style(name).reader(tools())
    parts = [*map(reader.feed, pieces), reader.close()]
    assert Answer.of(parts) == sum(parts, Answer())


@settings(max_examples=200, deadline=None)
@given(cut_texts())
def test_any_cutting_gives_the_same(sample: tuple[str, list[str]]) -> None:
    name, pieces = sample
    assert read(name, pieces) == read(name, ["".join(pieces)])


def test_text_comes_as_early_as_it_can() -> None:
    reader = style("hermes").reader(tools())
    assert reader.feed("Let me look <to").text == "Let me look"
    assert reader.feed("ast>").text == " <toast>"
    assert reader.feed('<tool_call>{"name": "now"}</tool_call>').tool_calls
    assert not reader.close()


def test_a_prompt_may_begin_the_reasoning() -> None:
    reader = style("hermes").reader(None, prompt="<|im_start|>assistant\n<think>\n")
    assert reader.parse("so\n</think>\n\nyes") == Answer("yes", "so")
    reader = style("hermes").reader(None, prompt="<think>\n\n</think>\n\n")
    assert reader.parse("yes") == Answer("yes")


def test_without_tools_there_are_no_calls() -> None:
    written = '<think>x</think><tool_call>{"name": "now"}</tool_call>'
    answer = style("hermes").reader(None).parse(written)
    assert answer == Answer('<tool_call>{"name": "now"}</tool_call>', "x")
    assert style("llama3").reader(None).parse('{"name": "now", "parameters": {}}').text


def test_long_rubbish_is_read_in_time() -> None:
    for text in ("<tool_call>" * 20_000, '<tool_call>{"a": "' + "</tool_call>" * 20_000):
        assert read("hermes", [text]).text == text
    assert read("qwen-xml", ["<function=" + " " * 200_000]).tool_calls == ()


ODD_TOOLS = ["x", 3, [3], [{"type": "function"}], [{"name": ""}], [{"name": "a"}] * 2]


ODD_SCHEMAS = [
    3, {"properties": [1]}, {"properties": {"a": 3}}, {"required": 5}, {"required": [1]},
    {"required": "a"},
]  # fmt: skip
ODD_TOOLS += [[{"name": "a", "parameters": odd}] for odd in ODD_SCHEMAS]


@pytest.mark.parametrize("odd", ODD_TOOLS)
def test_odd_tools_are_refused(odd: object) -> None:
    with pytest.raises(RequestError, match="tools"):
        tools_of(odd)


# -- calls that have to be made -----------------------------------------------------------------

SPECIALS = [
    "<end>", "[TOOL_CALLS]", "[ARGS]", "<|tool_call_start|>", "<|tool_call_end|>", "<|tool_call>",
    "<tool_call|>", '<|"|>', "<start_function_call>", "<end_function_call>", "<escape>",
    "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|start|>", "<|call|>",
]  # fmt: skip
_ARGS = '{"city": "Rome", "days": 2}'
CALLED = {
    "hermes": f'<tool_call>\n{{"name": "weather", "arguments": {_ARGS}}}\n</tool_call>',
    "qwen-xml": "<tool_call>\n<function=weather>\n<parameter=city>\nRome\n</parameter>\n"
    "<parameter=days>\n2\n</parameter>\n</function>\n</tool_call>",
    "llama3": f'{{"name": "weather", "parameters": {_ARGS}}}',
    "mistral": f"[TOOL_CALLS]weather[ARGS]{_ARGS}",
    "mistral-list": f'[TOOL_CALLS][{{"name": "weather", "arguments": {_ARGS}}}]',
    "gemma": '<|tool_call>call:weather{city:<|"|>Rome<|"|>,days:2}<tool_call|>',
    "functiongemma": "<start_function_call>call:weather{city:<escape>Rome<escape>,days:2}"
    "<end_function_call>",
    "lfm2": '<|tool_call_start|>[weather(city="Rome", days=2)]<|tool_call_end|>',
    "gpt-oss": "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>" + _ARGS,
    "nemotron": f'<TOOLCALL>[{{"name": "weather", "arguments": {_ARGS}}}]</TOOLCALL>',
}


class Bytes:
    """A token for each byte, and one for each mark that models have as a token of control."""

    n_vocab = 256 + len(SPECIALS)
    eog_ids = frozenset({256})

    def token_bytes(self, id: int) -> bytes:
        return bytes([id]) if id < 256 else SPECIALS[id - 256].encode()

    def is_special(self, id: int) -> bool:
        return id >= 256

    def encode(self, text: str, add_special: bool = True, parse_special: bool = True) -> list[int]:
        parts = re.split("(" + "|".join(map(re.escape, SPECIALS)) + ")", text)
        ids: list[int] = []
        for part in parts:
            ids += [self.special(part)] if part in SPECIALS else part.encode()
        return ids

    def special(self, text: str) -> int | None:
        return 256 + SPECIALS.index(text) if text in SPECIALS else None


CONSTRAINER = Constrainer(Bytes())


def takes(
    name: str, text: str, thinking: bool = False, choice: str | None = None, held: bool = True,
    wanted: Tools | None = None,
) -> bool:  # fmt: skip
    """Whether a text is what a model must write."""
    wanted = wanted or (tools().named(choice) if choice else tools())
    grammar = call_grammar(
        style(name), wanted, Bytes().special, thinking, many=choice is None, held=held
    )
    matcher = CONSTRAINER.compile(grammar)._matcher
    return all(map(matcher.consume_token, Bytes().encode(text))) and matcher.is_accepting()


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_call_that_must_be_made_can_be_read(name: str) -> None:
    written = CALLED[name]
    assert takes(name, written) and takes(name, written, choice="weather")
    assert meant(read(name, [written])) == [("weather", {"city": "Rome", "days": 2})]
    now = re.sub("weather", "now", written)
    now = re.sub(r'<parameter.*(?=</function)|city.*?2(?=[})])|(?<={)"city": "Rome", "days": 2',
                 "", now, flags=re.S)  # fmt: skip
    assert takes(name, now), now
    assert meant(read(name, [now])) == [("now", {})]


@pytest.mark.parametrize(("name", "between"), [("hermes", "\n"), ("llama3", "; "), ("gemma", "")])
def test_several_calls_may_be_made_unless_one_is_named(name: str, between: str) -> None:
    twice = CALLED[name] + between + CALLED[name]
    assert takes(name, twice) and not takes(name, twice, choice="weather")
    assert len(read(name, [twice]).tool_calls) == 2


@pytest.mark.parametrize("name", TEMPLATES)
def test_nothing_else_can_be_written(name: str) -> None:
    written = CALLED[name]
    assert not takes(name, written, choice="now")
    for wrong in (
        written.replace("weather", "wetter"), written.replace("2", '"two"'),
        written.replace("city", "town"), written[:-1] + "!", "Hello", "",
    ):  # fmt: skip
        assert not takes(name, wrong), wrong


@pytest.mark.parametrize("name", TEMPLATES)
def test_arguments_that_are_not_held_to_their_schemas_are_any(name: str) -> None:
    """A schema may say what no grammar can, and tools may still be called beside a form."""
    odd = {"properties": {"city": {"not": {}, "pattern": "(?!a)", "$ref": "#/nowhere"}},
           "uniqueItems": True, "if": {}, "propertyNames": {"pattern": "^c"}}  # fmt: skip
    wanted = tools_of([{"name": one, "parameters": odd} for one in ("weather", "now")])[1]

    def free(text: str) -> bool:
        return takes(name, text, held=False, wanted=wanted)

    written = CALLED[name]
    three = written.replace("days", "nights").replace("2", "3")
    for text in (written, three, three.replace("3", "true")):
        assert free(text), text
        assert [call.name for call in read(name, [text]).tool_calls] == ["weather"]
    for wrong in (written.replace("weather", "wetter"), written[:-1] + "!", "Hello", ""):
        assert not free(wrong), wrong


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_call_without_arguments_is_one(name: str) -> None:
    none = re.sub(r'<parameter.*(?=</function)|city.*?2(?=[})])|(?<={)"city": "Rome", "days": 2',
                  "", CALLED[name], flags=re.S)  # fmt: skip
    assert takes(name, none, held=False) and meant(read(name, [none])) == [("weather", {})]


@pytest.mark.parametrize("name", TEMPLATES)
def test_schemas_that_multiply_are_refused_before_they_do(name: str) -> None:
    shared = {"$defs": {"long": {"enum": ["x" * 40_000]}}}
    several = {"properties": {f"p{i}": {"type": "integer"} for i in range(2000)}, **shared}
    wanted = tools_of([{"name": f"tool{i}", "parameters": several} for i in range(9)])[1]
    with pytest.raises(RequestError, match="too long") as refused:
        call_grammar(style(name), wanted, Bytes().special)
    assert refused.value.param == "tools"
    assert len(call_grammar(style(name), wanted, Bytes().special, held=False).text) < 10_000


def test_reasoning_may_come_before_a_call() -> None:
    assert takes("hermes", "<think>\nhm</think>\n\n" + CALLED["hermes"])
    assert takes("hermes", "hm\n</think>\n" + CALLED["hermes"], thinking=True)
    assert takes(
        "gpt-oss",
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant" + CALLED["gpt-oss"],
    )


BEFORE = {
    "hermes": ("<|im_start|>assistant\n<think>\n", "hm, </th>\n</think>\n\n"),
    "mistral": ("[/INST][THINK]", "hm[/THINK]"),
    "gpt-oss": ("<|start|>assistant", "<|channel|>final<|message|>"),
}


@pytest.mark.parametrize("name", BEFORE)
@pytest.mark.parametrize(
    "constraint",
    [Json({"enum": ["yes"]}), Regex('"y?es"'), Grammar('start: before\nbefore: "\\"yes\\""')],
)
def test_a_constraint_holds_behind_what_comes_first(name: str, constraint: Constraint) -> None:
    prompt, first = BEFORE[name]
    before = before_answer(style(name), prompt, Bytes().special)
    assert isinstance(constraint, (Json, Regex, Grammar))

    def taken(text: str) -> bool:
        matcher = CONSTRAINER.compile(Behind(before, constraint))._matcher
        return all(map(matcher.consume_token, Bytes().encode(text))) and matcher.is_accepting()

    assert taken(f'{first}"yes"') and not taken('"yes"') and not taken(f'{first}"no"')
    assert style(name).reader(prompt=prompt).parse(f'{first}"yes"').text == '"yes"'


def test_nothing_comes_before_an_answer_that_begins_at_once() -> None:
    for name, prompt in (
        ("hermes", "<think>\n</think>\n"),
        ("gpt-oss", "<|message|>So"),
        ("lfm2", ""),
    ):
        assert before_answer(style(name), prompt, Bytes().special) == ""


@pytest.mark.parametrize(
    ("name", "prompt", "answer", "reasoned"),
    [
        ("hermes", "<think>\n", "hm</think>so", 10), ("hermes", "<think>", "hm", 2),
        ("hermes", "", "<think>hm</think>so", 17), ("hermes", "", "hm</think>", 0),
        ("llama3", "<think>", "hm</think>", 0), ("gpt-oss", "", "<|channel|>final<|message|>a", 0),
        ("gpt-oss", "", "<|channel|>analysis<|message|>hm<|end|><|start|>assistant", 13),
    ],
)  # fmt: skip
def test_tokens_of_reasoning_are_counted(
    name: str, prompt: str, answer: str, reasoned: int
) -> None:
    pieces = list(map(Bytes().token_bytes, Bytes().encode(answer)))
    assert style(name).reasoned(prompt, pieces) == reasoned
    joined = [b"".join(pieces[:3]), *pieces[3:]]
    assert style(name).reasoned(prompt, joined) == max(reasoned - len(pieces[:3]) + 1, 0) * bool(
        reasoned
    )


def test_a_style_without_known_calls_cannot_be_held_to_them() -> None:
    with pytest.raises(RequestError, match="not known how"):
        call_grammar(style_of("{{ tools }}"), tools(), Bytes().special)
    with pytest.raises(RequestError, match="the tools are: weather, now"):
        tools().named("wetter")
