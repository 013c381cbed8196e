"""Chat templates give the text of transformers, within limits of time and memory that no template can exceed."""

# ruff: noqa: E501 (lines of templates)

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from checkpoints import byte_tokenizer
from spmoe.errors import PromptError, UsageError
from spmoe.models import template_limits
from spmoe.models.chat_template import render_chat, require_template_syntax

# in the manner of templates that models ship, with every feature that those use
CHATML = """{% for message in messages %}{{'<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>'
 + '\\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
MIXTRAL = """{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Roles must alternate') }}
    {%- endif %}
    {%- if message["role"] == "user" %}
        {%- if loop.first and system_message is defined %}
            {{- " [INST] " + system_message + "\\n\\n" + message["content"] + " [/INST]" }}
        {%- else %}
            {{- " [INST] " + message["content"] + " [/INST]" }}
        {%- endif %}
    {%- elif message["role"] == "assistant" %}
        {{- " " + message["content"] + eos_token}}
    {%- endif %}
{%- endfor %}"""
LLAMA = """{%- if not date_string is defined %}{%- if strftime_now is defined %}
{%- set date_string = strftime_now("%d %b %Y") %}{%- endif %}{%- endif %}
{%- if messages[0]['role'] == 'system' %}{%- set system = messages[0]['content']|trim %}
{%- set messages = messages[1:] %}{%- else %}{%- set system = "" %}{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\nToday: " ~ date_string ~ "\\n\\n" ~ system ~ "<|eot_id|>" }}
{%- for message in messages %}
{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'+ message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"""
QWEN = """{%- macro render(content, vision=false) -%}
    {%- if content is string -%}{{- content -}}
    {%- else -%}
        {%- for item in content if item.type == 'text' -%}{{ item.text }}{%- if not loop.last %} {% endif -%}{%- endfor -%}
    {%- endif -%}
{%- endmacro -%}
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and message.content is string %}
        {%- set ns.multi_step_tool = false %}
        {%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == "assistant" %}
        {%- set content = message.content %}
        {%- set thought = '' %}
        {%- if '</think>' in content %}
            {%- set thought = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last_query_index and (loop.last or thought) %}
            {{- '<|im_start|>assistant\\n<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' + content }}
        {%- else %}{{- '<|im_start|>assistant\\n' + content }}{%- endif %}
        {%- for call in message.tool_calls or [] %}
            {%- set call = call.function if call.function is defined else call %}
            {{- '\\n<tool_call>{"name": "' ~ call.name ~ '", "arguments": ' }}
            {{- call.arguments if call.arguments is string else call.arguments | tojson }}
            {{- '}</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.first or (messages[loop.index0 - 1].role != "tool") %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or (loop.nextitem.role != "tool") %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- else %}{{- '<|im_start|>' + message.role + '\\n' + render(message.content) + '<|im_end|>\\n' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- if enable_thinking is defined and not enable_thinking
 %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}{%- endif %}"""
DEEPSEEK = """{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}{% endif %}
{%- set ns = namespace(is_first=true, system_prompt='') -%}
{%- for message in messages if message['role'] == 'system' %}
{%- set ns.system_prompt = ns.system_prompt + ('' if ns.is_first else '\\n\\n') + message['content'] %}
{%- set ns.is_first = false %}{%- endfor -%}
{{ bos_token }}{{ ns.system_prompt }}
{%- for message in messages %}
{%- if message['role'] == 'system' %}{% continue %}{% endif %}
{%- if message['role'] == 'user' %}{{ '<|User|>' ~ message['content'] }}{%- endif %}
{%- if message['role'] == 'assistant' %}{% generation %}{{ '<|Assistant|>' + message.get('content', '') }}{{ eos_token }}
{%- endgeneration %}{%- endif %}
{%- if loop.index > 200 %}{% break %}{% endif %}
{%- endfor -%}
{% if add_generation_prompt %}{{ '<|Assistant|>' }}{% endif %}"""
OTHER = """{%- set names = messages | map(attribute='role') | unique | sort | join(', ') -%}
{{ names }} {{ messages | selectattr('role', 'equalto', 'user') | list | length }} {{ messages | tojson(indent=2) }}
{%- for key, value in messages[0] | dictsort %}{{ key }}={{ value }};{% endfor %}
{%- for key, value in messages[0].items() %}{{ loop.index }}/{{ loop.length }} {{ key|upper }}{{ value|length }}{% endfor %}
{%- set pairs = dict(a=1, b=[1, 2.5, none, true]) %}{{ pairs }}{{ (1, 'x') }}{{ 7 // 2 ** 2 % 3 - -1 }}{{ 3 / 2 }}
{%- for group in messages | groupby('role') %}{{ group.grouper }}:{{ group.list | length }}{% else %}none{% endfor %}
{{ "%s-%05.2f" % ('a', 1.5) }}{{ "{:>8}|{x}".format('b', x=3) }}{{ 'x' * 3 }}{{ 'a b'|replace(' ', '_')|indent(2, true) }}
{%- filter upper %}up{% endfilter %}{% set block %}in {{ 1 in [1, 2] }} {{ 'a' not in 'b' }} {{ 1 < 2 <= 2 }}{% endset %}
{{ block }}{% macro outer() %}<{{ caller('c') }}>{% endmacro %}{% call(c) outer() %}{{ c }}{% endcall %}
{%- for row in [[1, [2]], [3]] recursive %}{{ loop(row) if row is iterable else row }}{% endfor %}
{{- undefined_name }}{{ undefined_name is defined }}{{ undefined_name | default('d') }}{{ [3, 1, 2] | sort | first }}
{%- with a = 5 %}{{ a | string ~ a }}{% endwith %}{{ range(5) | sum }}{{ range(4) | batch(3, 0) | list }}{{ 2.567 | round(1) }}
{{- ['b', 'a'] | join('-') }}{{ ' x '.strip().center(5) }}{{ cycler('o', 'e').next() }}{{ {'k': messages[0].role}['k'] }}
{{- messages[0].content.split()[0] ~ messages[-1]['content'].title() }}{{ '<' | e }}{{ 'abc'[::-1] }}{{ none }}{{ 1.0 }}"""
TEMPLATES = {"chatml": CHATML, "mixtral": MIXTRAL, "llama": LLAMA, "qwen": QWEN, "deepseek": DEEPSEEK, "other": OTHER}
CHATS: dict[str, list[dict[str, Any]]] = {
    "one message": [{"role": "user", "content": "hello"}],
    "turns": [
        {"role": "system", "content": "  be brief\n"},
        {"role": "user", "content": "héllo <&> {{ x }}"},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\nhi"},
        {"role": "user", "content": "again"},
    ],
    "tools": [
        {"role": "user", "content": "weather?"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"function": {"name": "get", "arguments": {"city": "Köln", "n": [1, 2]}}}],
        },
        {"role": "tool", "content": "sun"},
        {"role": "tool", "content": "wind"},
        {"role": "assistant", "content": "fine"},
    ],
    "parts": [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image"}, {"type": "text", "text": "b"}]}
    ],
}


def rendered(render: Callable[[], str]) -> str:
    """Return the text, or that the template rejects the messages."""
    try:
        return render()
    except Exception:
        return "rejected"


@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_text_is_that_of_transformers(name: str, chat: str) -> None:
    tokenizer: Any = byte_tokenizer()
    tokenizer.chat_template = TEMPLATES[name]
    tokenizer.bos_token = "<s>"
    messages = CHATS[chat]
    theirs = rendered(lambda: tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False))
    assert rendered(lambda: render_chat(tokenizer, messages, "model")) == theirs
    assert theirs != "rejected" or chat in ("tools", "parts"), "the comparison means something"


def test_long_conversations_stay_within_the_limits() -> None:
    tokenizer: Any = byte_tokenizer()
    messages = [{"role": ("user", "assistant")[n % 2], "content": "word " * 2000} for n in range(300)]  # 3 MB
    for template in (CHATML, LLAMA, QWEN, MIXTRAL):
        tokenizer.chat_template = template
        assert len(render_chat(tokenizer, messages, "model")) > 2_900_000


DOUBLED = "{% set ns = namespace(s=START) %}{% for i in range(60) %}{% set ns.s = STEP %}{% endfor %}"


def doubled(start: str, step: str, use: str = "") -> str:
    return DOUBLED.replace("START", start).replace("STEP", step) + use


HOSTILE = {
    "loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "a loop that leaves everything out": (
        "{% for a in range(99999) %}{% for b in range(99999) if false %}{% endfor %}{% endfor %}"
    ),
    "macros that call themselves": (
        "{% macro f(n) %}{% if n > 0 %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}"
    ),
    "endless recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "a recursive loop": "{% for x in [1] recursive %}{{ loop([1, 1]) }}{% endfor %}",
    "a product": '{{ "x" * 10**9 }}',
    "a product of lists": "{{ ([1] * 10**9)|length }}",
    "a sum": doubled('"x"', "ns.s + ns.s"),
    "a concatenation": doubled('"x"', "ns.s ~ ns.s"),
    "lists": doubled("[1]", "ns.s + ns.s"),
    "nested lists printed": doubled("[1]", "[ns.s, ns.s]", "{{ ns.s }}"),
    "nested lists as JSON": doubled("[1]", "[ns.s, ns.s]", "{{ ns.s|tojson }}"),
    "nested lists compared": doubled("[1]", "[ns.s, ns.s]", doubled("[1]", "[ns.s, ns.s]").replace("ns", "nt"))
    + "{{ ns.s == nt.s }}",
    "nested tuples as a key": doubled("(1,)", "(ns.s, ns.s)", "{{ {ns.s: 1} }}"),
    "nested tuples looked up": doubled("(1,)", "(ns.s, ns.s)", "{{ messages[0].get(ns.s) }}{{ messages[0][ns.s] }}"),
    "nested namespaces": doubled("1", "namespace(a=ns.s, b=ns.s)", "{{ ns.s }}"),
    "a power": "{{ 9999999 ** 9999999 }}",
    "numbers": doubled("3", "ns.s * ns.s"),
    "a constant filter": '{{ "a"|center(999999999) }}',
    "a method": '{{ "a".ljust(999999999) }}',
    "bytes": '{{ (1).to_bytes(999999999, "big") }}',
    "formats": '{{ "%999999999d" % 1 }}',
    "formats in braces": '{{ "{:999999999}".format(1) }}',
    "a variable width": '{{ "{:{w}}".format(1, w=999999999) }}',
    "another variable width": '{{ "%*d" % (999999999, 1) }}',
    "many fields": '{% set x = "x" * 999999 %}{{ ("{0}" * 999999).format(x) }}',
    "replacements": '{% set x = "x" * 999999 %}{{ x.replace("x", x) }}',
    "replacements by a filter": '{% set x = "x" * 999999 %}{{ x|replace("x", x) }}',
    "separators": '{% set x = "x" * 999999 %}{{ x.join(range(99999)|map("string")) }}',
    "separators by a filter": '{% set x = "x" * 999999 %}{{ range(99999)|map("string")|join(x) }}',
    "indentation": '{{ ("\\n" * 999999)|indent(999999) }}',
    "indented JSON": "{{ [[1]]|tojson(indent=999999999) }}",
    "batches": "{{ [1]|batch(999999999, 0)|list }}",
    "slices": "{{ [1]|slice(999999999)|list }}",
    "rounding": '{{ 1.5|round(999999999, "ceil") }}',
    "sums of lists": "{% set x = [1] * 99999 %}{{ ([x] * 99999)|sum(start=[]) }}",
    "tabs": '{{ ("\\t" * 999999).expandtabs(999999) }}',
    "translations": '{{ ("a" * 999999).translate({97: "b" * 999999}) }}',
    "literal text": "{% set x %}{% for a in range(99999) %}" + "x" * 9999 + "{% endfor %}{% endset %}",
    "paragraphs": "{{ lipsum(n=99999999) }}",
    "parentheses": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "a long source": "x" * 2**21,
    "markup": '{{ ("x"|safe) * 999999999 }}',
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_templates_end(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_limits, "MAX_STEPS", 100_000)
    tokenizer: Any = byte_tokenizer()
    tokenizer.chat_template = HOSTILE[name]
    with pytest.raises(PromptError, match=r"the chat template of model (is refused|rejects these messages)") as caught:
        render_chat(tokenizer, [{"role": "user", "content": "hello"}], "model")
    assert len(str(caught.value)) < 400
    assert "\n" not in str(caught.value)


def test_time_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_limits, "MAX_SECONDS", 0.05)
    tokenizer: Any = byte_tokenizer()
    tokenizer.chat_template = HOSTILE["loops"]
    found: list[BaseException] = []

    def render() -> None:
        try:
            render_chat(tokenizer, [{"role": "user", "content": "hello"}], "model")
        except PromptError as error:
            found.append(error)

    started = time.monotonic()
    thread = threading.Thread(target=render)  # signals and alarms would work on the main thread only
    thread.start()
    thread.join(30)
    assert "takes longer than 0.05 s" in str(found[0])
    assert time.monotonic() - started < 30


def test_template_file_is_checked_within_the_limits(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(template_limits, "MAX_STEPS", 1000)
    with pytest.raises(
        UsageError, match=r"own\.jinja cannot be used as a chat template \(it takes more than 1000 steps"
    ):
        require_template_syntax(HOSTILE["loops"], "own.jinja")
    require_template_syntax("{{ raise_exception('only with tools') }}", "own.jinja")
