"""Chat templates render as Jinja2 renders them, set up as Hugging Face's transformers does it.

The small templates here have the constructs of well-known ones. llama.cpp's collection is compared
too where it is: models/templates of its sources (they are also in llama-cpp-python's source
distribution, under vendor/llama.cpp) in the folder build/templates.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jinja2
import pytest
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

from quire.errors import TemplateError
from quire.text.template import ChatTemplate

COLLECTION = Path(__file__).parents[2] / "build" / "templates"
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}


class Generation(Extension):
    """`{% generation %}` marks the model's words for training."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Any) -> Any:
        return caller()


def refuse(message: str) -> None:
    raise jinja2.TemplateError(message)


def jinja_environment() -> jinja2.Environment:
    made = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", Generation]
    )
    made.filters["tojson"] = lambda value, **options: json.dumps(
        value, **{"ensure_ascii": False, **options}
    )
    made.filters["safe"] = str  # a prompt is no HTML: what is added to a safe text stays as it is
    made.globals["raise_exception"] = refuse
    made.globals["strftime_now"] = time.strftime
    return made


def tool(name: str, **properties: str) -> dict[str, Any]:
    fields = {key: {"type": kind, "description": f"the {key}"} for key, kind in properties.items()}
    parameters = {"type": "object", "properties": fields, "required": list(properties)[:1]}
    told = {"name": name, "description": f'Does "{name}" & <more> — é', "parameters": parameters}
    return {"type": "function", "function": told}


TOOLS = [tool("get_weather", city="string", days="integer"), tool("now"), tool("add", a="number")]
CALL = {"name": "get_weather", "arguments": {"city": "Paris", "days": 2}}
USER = {"role": "user", "content": "Hi there\n"}
CONVERSATIONS: dict[str, tuple[list[dict[str, Any]], list[dict[str, Any]] | None]] = {
    "plain": ([USER], None),
    "many turns": (
        [
            {"role": "system", "content": "Be  kind.\n"}, USER,
            {"role": "assistant", "content": "Hello!\n"},
            {"role": "user", "content": " What's <b>2</b> & 3? "},
            {"role": "assistant", "content": "<think>\nhm\n</think>\n\n5"},
            {"role": "user", "content": "Danke, schön é"},
        ],
        None,
    ),
    "tools": ([USER], TOOLS),
    "a tool call": (
        [
            {"role": "system", "content": "Be kind."}, USER,
            {
                "role": "assistant", "content": "",
                "tool_calls": [{"id": "call12345", "type": "function", "function": CALL}],
            },
            {
                "role": "tool", "name": "get_weather", "tool_call_id": "call12345",
                "content": '{"t": 21}',
            },
            {"role": "assistant", "content": "It is 21."}, {"role": "user", "content": "And then?"},
        ],
        TOOLS,
    ),
}  # fmt: skip


def both(source: str) -> Iterator[tuple[str, str | Exception, str | Exception]]:
    """What Jinja makes of each conversation, and what we make of it."""
    theirs = jinja_environment().from_string(source)
    ours = ChatTemplate(source, *TOKENS.values())
    for name, (messages, tools) in CONVERSATIONS.items():
        made: list[str | Exception] = []
        try:
            context = {"messages": messages, "tools": tools, "documents": None, **TOKENS}
            made.append(theirs.render(add_generation_prompt=True, **context))
        except Exception as error:
            made.append(error)
        try:
            made.append(ours.render(messages, tools=tools))
        except TemplateError as error:
            made.append(error)
        yield name, made[0], made[1]


TEMPLATES = {
    "none is not iterable": "{% if tools is iterable and tools | length > 0 %}{{ tools|length }}"
    "{% elif messages is iterable %}none{% endif %}",
    "what is not defined is": "{{ nosuch is iterable }} {{ nosuch is sequence }}"
    " {{ nosuch|length }} {{ messages[0].nosuch is not iterable }} "
    "{{ ' nosuch is iterable ' }} it is iterable",
    "texts and mappings": "{% for x in [none, '', 'a', [], {}, 3, true, messages[0]] %}"
    "{{ x is iterable }}{{ x is sequence }}{{ x is mapping }}{{ x is string }},{% endfor %}",
    "indented": "{%- for m in messages %}{{- '{\\n'|indent(4, first=true) }}\n"
    "        {{- m.content|indent(2) }}|{{ m|tojson(indent=2)|indent(4, true) }}\n"
    "{{ 'a\\n\\nb\\n'|indent(2, blank=true) }}|\n    {%- endfor %}\n    {{- '\\n]' }}",
    "white space": "{% for m in messages %}\n  {{ m.role }}\n  {% if loop.last %}\n x\n"
    "  {% endif %}  \n{# c #}\n{%- endfor -%}\n\n  y {%+ if true %} z{% endif %}\n\n",
    "line ends": "{% for m in messages %}\r\n{{ m.role }}\r\n{% endfor %}\r\nx\ry{{ '\r\n' }}",
    "loop controls": "{% for m in messages %}{% if m.role == 'system' %}{% continue %}{% endif %}"
    "{{ m.role }}{% if loop.index > 2 %}{% break %}{% endif %}{% endfor %}",
    "numbers": "{{ '3'|int + 1 }} {{ 'x'|int }} {{ 'x'|int(7) }} {{ '2.5'|int }} {{ ''|float }}"
    " {{ '2.5'|float }} {{ 2.7|int }} {{ none|int }} {{ '0x1f'|int(0, 16) }}",
    "json": "{{ messages|tojson }}{{ tools|tojson(indent=4) }}"
    "{{ {'b': '</é>', 'a': none}|tojson(sort_keys=true, separators=(',', ':')) }}",
    "generation": "{% for m in messages %}{% generation %}\n{{ m.content }}\n"
    "{%- endgeneration %}{% endfor %}",
    "Python's texts": "{% for m in messages %}{% set c = m.content|string %}"
    "{{ c.split('\\n')[-1].strip() }}|{{ c.startswith(' ') }}|{{ c.rstrip('\\n') }}|"
    "{{ c.replace('e', 'E') }}|{{ (c.split('</think>')|last).lstrip('\\n') }}{% endfor %}",
    "mappings": "{% for t in tools or [] %}"
    "{% for k, v in t.function.parameters.properties.items() %}{{ k }}={{ v.type }}"
    "{{ v.get('enum', 'no') }}"
    "{% endfor %}{% for k, v in t.function|items %}{{ k }}{% endfor %}"
    "{% for k, v in t.function|dictsort %}{{ k }}{% endfor %}{% endfor %}",
    "namespaces and macros": "{% set ns = namespace(n=0, found=false) %}"
    "{% macro say(x, y='Y') %}[{{ x }}{{ y }}]{% endmacro %}{% for m in messages[::-1] %}"
    "{% set ns.n = ns.n + 1 %}{{ say(m.role) }}{{ say(m.role, y=ns.n) }}{% endfor %}{{ ns.n }}",
    "selections": "{{ messages|selectattr('role', 'equalto', 'user')|list|length }}"
    "{{ messages|map(attribute='role')|join(', ') }}"
    "{{ messages|rejectattr('tool_calls')|list|length }}{{ (messages|first).role }}"
    "{{ messages|map(attribute='role')|unique|list }}",
    "Python's spelling": "{{ none }}{{ true }}{{ [none, true, 1.5, 'a', \"it's\"] }}"
    "{{ {'a': [1]} }}{{ 'x' ~ none ~ 1.0 ~ false }}{{ 7 // 2 }}{{ 7 / 2 }}{{ -7 % 3 }}",
    "safe texts": "{% for t in tools or [] %}{{ \"Use '\"|safe + t.function.description"
    " + \"'\\n\"|safe + t.function|tojson }}{% endfor %}",
    "a refusal": "{% if tools %}{{ raise_exception('no tools here') }}{% endif %}{{ bos_token }}",
}  # fmt: skip


@pytest.mark.parametrize("name", TEMPLATES)
def test_small_templates(name: str) -> None:
    for conversation, theirs, ours in both(TEMPLATES[name]):
        if isinstance(theirs, jinja2.TemplateError) and name == "a refusal":
            assert "no tools here" in str(ours)
        else:
            assert ours == theirs, conversation


@pytest.mark.skipif(not COLLECTION.is_dir(), reason="llama.cpp's templates are not here")
def test_the_collection() -> None:
    """Whatever Jinja renders; what it refuses (a loop over none, say) may be rendered here.

    One template writes `schema.items` and means a field, which Jinja takes for the method of
    dictionaries; no conversation here has a schema with it.
    """
    same, differ = 0, []
    for path in sorted(COLLECTION.glob("*.jinja")):
        for name, theirs, ours in both(path.read_text()):
            if isinstance(theirs, str) and ours != theirs:
                differ.append((path.name, name, ours if isinstance(ours, Exception) else ""))
            same += isinstance(theirs, str)
    assert not differ and same > 200
