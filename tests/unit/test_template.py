"""Chat templates: what the well-known ones write, and what hostile ones cannot do."""

from __future__ import annotations

import gc
import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from quire import config
from quire.errors import RequestError, TemplateError
from quire.text.template import ChatTemplate, Worker, checked_messages
from quire.text.tokenizer import Tokenizer
from quire.weights.catalog import kept_models

SHARED = Path(__file__).parents[3] / "shared"

USER = {"role": "user", "content": "Hi"}
TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": " Hello! "},
    {"role": "user", "content": "Bye"},
]

CHATML = """
{%- for message in messages -%}
{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}
"""

LLAMA3 = """
{%- set loop_messages = messages %}
{%- for message in loop_messages %}
    {%- set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'
        + message['content'] | trim + '<|eot_id|>' %}
    {%- if loop.index0 == 0 %}
        {%- set content = bos_token + content %}
    {%- endif %}
    {{- content }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
{%- endif %}
"""

GEMMA = """{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {%- set first_user_prefix = messages[0]['content'] + '\n\n' -%}
    {%- set loop_messages = messages[1:] -%}
{%- else -%}
    {%- set first_user_prefix = '' -%}
    {%- set loop_messages = messages -%}
{%- endif -%}
{%- for message in loop_messages -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception("Conversation roles must alternate user/assistant/user/assistant/...") }}
    {%- endif -%}
    {%- if message['role'] == 'assistant' -%}
        {%- set role = 'model' -%}
    {%- else -%}
        {%- set role = message['role'] -%}
    {%- endif -%}
    {{ '<start_of_turn>' + role + '\n' + (first_user_prefix if loop.first else '') }}
    {%- if message['content'] is string -%}
        {{ message['content'] | trim }}
    {%- elif message['content'] is iterable -%}
        {%- for item in message['content'] -%}
            {%- if item['type'] == 'text' -%}{{ item['text'] | trim }}{%- endif -%}
        {%- endfor -%}
    {%- endif -%}
    {{ '<end_of_turn>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<start_of_turn>model\n' }}{%- endif -%}
"""

MISTRAL = """{{ bos_token }}
{%- for message in messages %}
    {%- if message['role'] == 'system' %}{% continue %}{% endif %}
    {%- if message['role'] == 'user' %}
        {{- '[INST] ' + message['content'] + ' [/INST]' }}
    {%- elif message['role'] == 'assistant' %}
        {{- ' ' + message['content'].strip() + eos_token }}
    {%- endif %}
{%- endfor %}
"""

QWEN = """
{%- if tools %}
    {{- '<|im_start|>system\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\n\n' }}{%- endif %}
    {{- "# Tools\n\n<tools>" }}
    {%- for tool in tools %}
        {{- "\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\n</tools><|im_end|>\n" }}
{%- endif %}
{%- set ns = namespace(last_user=-1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if message.role == "user" and not message.content.startswith('<tool_response>') %}
        {%- set ns.last_user = index %}
        {%- break %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == "user" %}
        {{- '<|im_start|>user\n' + message.content + '<|im_end|>\n' }}
    {%- elif message.role == "assistant" %}
        {%- set content = message.content %}
        {%- if content and '</think>' in content and loop.index0 < ns.last_user %}
            {%- set content = content.split('</think>')[-1].lstrip('\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant' }}
        {%- if content %}{{- '\n' + content }}{%- endif %}
        {%- for call in message.tool_calls or [] %}
            {{- '\n<tool_call>\n{"name": "' }}{{- call.function.name }}{{- '", "arguments": ' }}
            {{- call.function.arguments | tojson }}
            {{- '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif message.role == "tool" %}
        {{- '<|im_start|>user\n<tool_response>\n' + message.content + '\n</tool_response>' }}
        {{- '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\n\n</think>\n\n' }}
    {%- endif %}
{%- endif %}
"""


def render(source: str, messages: list[dict[str, Any]] | None = None, **extra: Any) -> str:
    template = ChatTemplate(source, bos_token="<s>", eos_token="</s>", name="x.gguf")
    return template.render(messages or [USER], **extra)


class TestWellKnownTemplates:
    def test_chatml(self) -> None:
        assert render(CHATML, TALK) == (
            "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
            "<|im_start|>assistant\n Hello! <|im_end|>\n<|im_start|>user\nBye<|im_end|>\n"
            "<|im_start|>assistant\n"
        )
        assert render(CHATML, add_generation_prompt=False).endswith("Hi<|im_end|>\n")

    def test_llama3(self) -> None:
        assert render(LLAMA3, TALK[:3]) == (
            "<s><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
            "<|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\nHello!<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\n"
        )

    def test_gemma(self) -> None:
        assert render(GEMMA, TALK) == (
            "<s><start_of_turn>user\nBe brief.\n\nHi<end_of_turn>\n"
            "<start_of_turn>model\nHello!<end_of_turn>\n<start_of_turn>user\nBye<end_of_turn>\n"
            "<start_of_turn>model\n"
        )
        parts = [{"role": "user", "content": [{"type": "text", "text": " Hi "}]}]
        assert "user\nHi<end_of_turn>" in render(GEMMA, parts)
        with pytest.raises(TemplateError, match=r"x\.gguf refuses .*: Conversation roles must"):
            render(GEMMA, [USER, USER])

    def test_mistral(self) -> None:
        assert render(MISTRAL, TALK) == "<s>[INST] Hi [/INST] Hello!</s>[INST] Bye [/INST]"

    def test_qwen_with_tools(self) -> None:
        tool = {"type": "function", "function": {"name": "now", "description": "<b> & é"}}
        call = {"function": {"name": "now", "arguments": {"z": 1, "a": [True, None]}}}
        messages: list[dict[str, Any]] = [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": "<think>\nhm\n</think>\n\nHello"},
            {"role": "user", "content": "Time?"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "content": "12:00"},
        ]
        assert render(QWEN, messages, tools=[tool], enable_thinking=False) == (
            "<|im_start|>system\nBe brief.\n\n# Tools\n\n<tools>\n"
            '{"type": "function", "function": {"name": "now", "description": "<b> & é"}}'
            "\n</tools><|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
            "<|im_start|>assistant\nHello<|im_end|>\n<|im_start|>user\nTime?<|im_end|>\n"
            '<|im_start|>assistant\n<tool_call>\n{"name": "now", "arguments": '
            '{"z": 1, "a": [true, null]}}\n</tool_call><|im_end|>\n'
            "<|im_start|>user\n<tool_response>\n12:00\n</tool_response><|im_end|>\n"
            "<|im_start|>assistant\n<think>\n\n</think>\n\n"
        )

    def test_smollm2(self) -> None:
        golden = SHARED / "golden" / "smollm2-135m-q4_1.json"
        models = [m for m in kept_models(config.cache_folder()) if m.name == "smollm2"]
        if not golden.is_file() or not models:
            pytest.skip("no golden data beside the repository, or no model in the cache")
        tokenizer = Tokenizer(models[0].path)
        template = ChatTemplate(tokenizer.chat_template, tokenizer.token_text(tokenizer.bos))
        chats = [p for p in json.loads(golden.read_text())["prompts"] if "messages" in p]
        assert chats
        for prompt in chats:
            assert template.render(prompt["messages"]) == prompt["text"]


class TestWhatTemplatesUse:
    @pytest.mark.parametrize(
        ("source", "text"),
        [
            ("{{ ' a '.strip() }}|{{ 'xax'.strip('x') }}|{{ 'a,b'.split(',')|join(';') }}",
             "a|a|a;b"),
            ("{{ 'ab'.startswith('a') }} {{ 'ab'.endswith('a') }}", "True False"),
            ("{{ 'ab'.upper() }}{{ 'a-b'.replace('-', '+') }}{{ 'ab'.find('b') }}", "ABa+b1"),
            ("{{ 'abc'[::-1] }}{{ 'abc'[1:] }}{{ 'a\nb'.splitlines()|length }}", "cbabc2"),
            ("{% for k, v in {'b': 1, 'a': 2}.items() %}{{ k }}{{ v }}{% endfor %}", "b1a2"),
            ("{% for k, v in {'b': 1}|items %}{{ k }}{{ v }}{% endfor %}", "b1"),
            ("{{ {'a': 1}.get('b', 'c') }}{{ {'a': 1}.keys()|list|join }}", "ca"),
            ("{% set ns = namespace(n=0) %}{% for i in range(4) %}{% set ns.n = ns.n + i %}"
             "{% endfor %}{{ ns.n }}", "6"),
            ("{% for i in range(9) %}{% if i == 1 %}{% continue %}{% endif %}"
             "{% if i > 3 %}{% break %}{% endif %}{{ i }}{% endfor %}", "023"),
            ("{% for i in [1,2] %}{{ loop.first }}{{ loop.last }}{{ loop.index }}{% endfor %}",
             "TrueFalse1FalseTrue2"),
            ("{% macro f(a, b='y') %}{{ a }}{{ b }}{% endmacro %}{{ f('x') }}{{ f(1, b=2) }}",
             "xy12"),
            ("{{ {'a': 'é<'}|tojson }}{{ [1]|tojson(indent=1) }}", '{"a": "é<"}[\n 1\n]'),
            ("{{ messages|selectattr('role', 'equalto', 'user')|map(attribute='content')|join }}",
             "Hi"),
            ("{{ x is defined }}{{ x is none }}{{ tools is none }}{{ 'a' is string }}",
             "FalseFalseTrueTrue"),
            ("{{ [1] is iterable }}{{ {} is mapping }}{{ 1 is number }}", "TrueTrueTrue"),
            ("{{ 'a' ~ 1 ~ none }}{{ 7 // 2 }}{{ 'a' if false else 'b' }}{{ x or 'd' }}",
             "a1None3bd"),
            ("{{ '<&>' }}{{ x|default('q') }}{{ '4'|int + 1 }}{{ 'ab'|length }}", "<&>q52"),
            ("{% set t %}abc{% endset %}{{ t|title }}{{ not true }}", "AbcFalse"),
            ("  {% if true %}\n  a\n  {% endif %}\nb", "  a\nb"),
            ("{% generation %}a{% endgeneration %} {%- generation -%} b {%- endgeneration %}",
             "ab"),
            ("{{ strftime_now('%Y')|length }}", "4"),
            ("{{ bos_token }}{{ eos_token }}{{ add_generation_prompt }}{{ custom }}",
             "<s></s>True7"),
        ],
    )  # fmt: skip
    def test_as_in_python(self, source: str, text: str) -> None:
        assert render(source, custom=7) == text

    def test_strange_texts_pass_through(self) -> None:
        content = "{{ 7 * 7 }} {% raw %} \0 \u2028 \x85 🙂 </s> \r\n"
        assert (
            render("{{ messages[0].content }}", [{"role": "user", "content": content}]) == content
        )


HOSTILE = {
    "endless loop": "{% for i in range(9999) %}{% for j in range(9999) %}{% for k in range(9999) %}"
    "{% endfor %}{% endfor %}{% endfor %}",
    "long string": "{{ 'a' * 300000000 }}",
    "long string, float": "{% set x = 'a' * 3e8 %}{{ x }}",
    "long range": "{% for i in range(1000000000) %}{% endfor %}",
    "doubling": "{% set ns = namespace(x='aaaaaaaa') %}{% for i in range(40) %}"
    "{% set ns.x = ns.x ~ ns.x %}{% endfor %}{{ ns.x|length }}",
    "doubling a list": "{% set ns = namespace(x=[1, 2]) %}{% for i in range(30) %}"
    "{% set ns.x = ns.x + ns.x %}{% endfor %}{{ ns.x|join('abc')|length }}",
    "replacing": "{{ ('a' * 10000)|replace('a', 'b' * 1000000)|length }}",
    "padding": "{{ '%900000000s'|format('a')|length }}",
    "much text": "{% for i in range(10000) %}{{ 'a' * 100000 }}{% endfor %}",
    "wide JSON": "{{ [1]|tojson(indent=2000000000) }}",
    "long date": "{{ strftime_now('%Y' * 20000000) }}",
    "recursion": "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
    "deep value": "{% set ns = namespace(x=[]) %}{% for i in range(99000) %}"
    "{% set ns.x = [ns.x] %}{% endfor %}{{ ns.x|tojson }}",
    "deep expression": "{{ " + "(" * 20000 + "1" + ")" * 20000 + " }}",
    "deep blocks": "{% if 1 %}" * 20000 + "{% endif %}" * 20000,
    "tags without end": "{%" * 400000,
    "wide indent": "{{ 'a\nb'|indent(900000000) }}",
}


class TestHostileTemplates:
    @pytest.mark.parametrize("source", HOSTILE.values(), ids=HOSTILE.keys())
    def test_come_to_an_end_at_their_limit(self, source: str) -> None:
        template = ChatTemplate(source, name="x.gguf")
        template.warm()
        start = time.perf_counter()
        with pytest.raises(TemplateError, match=r"x\.gguf: template exceeded its limit"):
            template.render([USER])
        assert time.perf_counter() - start < 15  # 0.5 of its own, and what a busy machine adds

    @pytest.mark.parametrize(
        "source",
        [
            "{{ ''.__class__.__mro__[1].__subclasses__() }}",
            "{{ messages[0].__init__.__globals__['sys'] }}",
            "{{ raise_exception.__globals__['sys'].exit() }}",
            "{{ (raise_exception|attr('__globals__'))['json'] }}",
            "{{ strftime_now.__self__.sleep(9) }}",
            "{{ '{0.__class__.__mro__}'.format(messages) }}",
            "{% include '/etc/passwd' %}",
            "{% import 'os' as os %}{{ os.getcwd() }}",
            "{{ self.__init__() }}",
            "{{ open('/etc/passwd').read() }}",
        ],
    )
    def test_cannot_reach_python(self, source: str) -> None:
        with pytest.raises(TemplateError, match="cannot be rendered"):
            render(source)

    def test_one_that_failed_can_be_used_again(self) -> None:
        source = "{% if messages|length > 1 %}" + HOSTILE["deep value"] + "{% endif %}ok"
        template = ChatTemplate(source)
        assert template.render([USER]) == "ok"
        with pytest.raises(TemplateError, match="exceeded its limit"):
            template.render([USER, USER])
        assert template.render([USER]) == "ok"

    def test_a_long_conversation_is_within_the_limit(self) -> None:
        messages = [dict(USER, content=f"{n} " * 100) for n in range(3000)]
        assert len(render(QWEN, messages)) > 1_000_000

    @pytest.mark.parametrize("source", ["{{ ", "{% for %}", "{{ 1 / 0 }}", "{{ nothing() }}"])
    def test_mistakes_are_named(self, source: str) -> None:
        with pytest.raises(TemplateError, match=r"x\.gguf cannot be rendered: .*chat template:1"):
            render(source)


class TestWorker:
    def test_one_that_has_to_wait_for_others_is_waited_for(self) -> None:
        template = ChatTemplate("{{ messages[0].content }}")
        template.warm()
        assert template._worker is not None
        pid = template._worker._process.pid
        os.kill(pid, signal.SIGSTOP)  # as on a machine that has no time for it
        threading.Timer(1.0, os.kill, (pid, signal.SIGCONT)).start()
        assert template.render([USER]) == "Hi"

    def test_ends_with_the_template(self) -> None:
        template = ChatTemplate("{{ messages[0].content }}")
        assert template.render([USER]) == "Hi"
        assert template._worker is not None
        process = template._worker._process
        assert process.poll() is None
        del template
        gc.collect()
        assert process.poll() is not None

    def test_one_that_died_is_replaced(self) -> None:
        template = ChatTemplate("{{ messages[0].content }}")
        template.warm()
        assert template._worker is not None
        template._worker._process.kill()
        template._worker._process.wait()
        assert template.render([USER]) == "Hi"

    def test_one_that_cannot_start(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("sys.executable", "")
        with pytest.raises(TemplateError, match="a Python interpreter"):
            Worker({})


class TestMessages:
    @pytest.mark.parametrize(
        ("messages", "message"),
        [
            ("hi", "messages must be a list"),
            ([], "at least one message"),
            (None, "messages must be a list"),
            ([USER, "x"], r"messages\[1\] must be an object, not str"),
            ([{"content": "x"}], r"messages\[0\] must have a role"),
            ([{"role": 5, "content": "x"}], r"messages\[0\] must have a role"),
            ([{"role": "user"}], r"messages\[0\] must have content"),
            ([{"role": "user", "content": 5}], r"content of messages\[0\] .* not int"),
            ([{"role": "user", "content": "a", "x": object()}], "plain JSON values"),
            ([{"role": "user", "content": "\ud800"}], "plain JSON values.*surrogates"),
        ],
    )
    def test_refused(self, messages: Any, message: str) -> None:
        with pytest.raises(RequestError, match=message):
            ChatTemplate("x").render(messages)

    def test_content_may_be_missing_beside_tool_calls(self) -> None:
        call = {"role": "assistant", "tool_calls": [{}]}
        assert checked_messages([call]) == [call]

    @pytest.mark.parametrize("source", [None, ""])
    def test_a_missing_template(self, source: str | None) -> None:
        with pytest.raises(TemplateError, match=r"x\.gguf has no chat template; .* use generate"):
            ChatTemplate(source, name="x.gguf")
        with pytest.raises(TemplateError, match="must be a string, not int"):
            ChatTemplate(5)
