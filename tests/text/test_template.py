"""Rendering, with transformers' apply_chat_template as the judge of what a template prints."""

import copy
import datetime
import re
from concurrent.futures import ThreadPoolExecutor

import pytest
from jinja2.exceptions import TemplateError
from templates_kit import CALL, CONVERSATIONS, TEMPLATES, TOOLS
from text_kit import json_bpe
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from hipfire.base.errors import ArtifactError, ValidationError
from hipfire.text.messages import normalize_messages
from hipfire.text.origin import RenderedPrompt
from hipfire.text.template import ChatTemplate

USER = {"role": "user", "content": "hi"}
DAY = datetime.date(2025, 3, 9)


@pytest.fixture(scope="module")
def judge():
    engine = json_bpe([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=engine, bos_token="<s>", eos_token="</s>")


def template(source, **options):
    return ChatTemplate(source, bos_token="<s>", eos_token="</s>", **options)


def judged(judge, source, messages, tools, prompt, options):
    """Return what transformers prints and "", or "" and the words of its refusal."""
    try:
        text = judge.apply_chat_template(
            normalize_messages(messages),
            tools=tools,
            chat_template=source,
            tokenize=False,
            add_generation_prompt=prompt,
            **options,
        )
    except TemplateError as error:
        return "", str(error)
    return text, ""


def text_of(source, messages=(USER,), **options):
    return template(source).render(list(messages), **options).text


@pytest.mark.parametrize("name", sorted(TEMPLATES))
@pytest.mark.parametrize("talk", sorted(CONVERSATIONS))
@pytest.mark.parametrize("tools", [None, TOOLS], ids=["no tools", "tools"])
@pytest.mark.parametrize("prompt", [True, False])
def test_text_equals_that_of_transformers(judge, name, talk, tools, prompt):
    messages = CONVERSATIONS[talk]
    options = {"enable_thinking": False} if prompt else {}
    want, refusal = judged(judge, TEMPLATES[name], messages, tools, prompt, options)
    if refusal:
        with pytest.raises(ValidationError, match=re.escape(refusal)):
            template(TEMPLATES[name]).render(
                messages, tools=tools, add_generation_prompt=prompt, extra=options
            )
        return
    made = template(TEMPLATES[name]).render(
        messages, tools=tools, add_generation_prompt=prompt, extra=options
    )
    assert made.text == want
    assert type(made.text) is str


def test_some_of_those_conversations_are_refused_and_most_are_not():
    """Guards the test above against a judge that refuses everything."""
    refused = 0
    for source in TEMPLATES.values():
        for messages in CONVERSATIONS.values():
            try:
                template(source).render(messages)
            except ValidationError:
                refused += 1
    assert 1 <= refused <= len(TEMPLATES) * len(CONVERSATIONS) // 3


@pytest.mark.parametrize(
    ("source", "want"),
    [
        ("{{ tools | tojson }}", '[{"x": "<&\'é😀>"}]'),
        ("{{ tools | tojson(indent=2) }}", '[\n  {\n    "x": "<&\'é😀>"\n  }\n]'),
        ("{{ tools | tojson(separators=(',', ':')) }}", '[{"x":"<&\'é😀>"}]'),
        ("{{ {'b': 1, 'a': 2} | tojson(sort_keys=true) }}", '{"a": 2, "b": 1}'),
        ("{{ 'é' | tojson(ensure_ascii=true) }}", '"\\u00e9"'),
        ("{% for m in [1, 2, 3] %}{% if m == 2 %}{% continue %}{% endif %}{{ m }}{% endfor %}", "13"),
        ("{% for m in [1, 2, 3] %}{{ m }}{% break %}{% endfor %}", "1"),
        ("{% generation %}kept{% set inner = 1 %}{% endgeneration %}{{ inner }}", "kept"),
        ("{{ bos_token }}{{ eos_token }}{{ nothing }}{{ messages[0].nothing }}", "<s></s>"),
        ("{{ strftime_now('%d %b %Y %H:%M') }}", "09 Mar 2025 00:00"),
        ("{% if documents %}x{% else %}none{% endif %}{{ documents is none }}", "noneTrue"),
        ("  {% if true %}\nline\n  {% endif %}\nend", "line\nend"),
        ("{{ messages | length }}{{ range(3) | list }}{{ 'a-b'.split('-') }}", "1[0, 1, 2]['a', 'b']"),
        (
            "{% set n = namespace(n=0) %}{% for i in [1, 5] %}{% set n.n = n.n + i %}{% endfor %}{{ n.n }}",
            "6",
        ),
        ("{% macro f(a) %}[{{ a }}{{ caller() }}]{% endmacro %}{% call f('x') %}y{% endcall %}", "[xy]"),
        ("{% for c in ['a'] recursive %}{{ c }}{{ loop([]) if loop.last }}{% endfor %}", "a"),
        (
            "{{ '%s-%d' % ('a', 3) }}{{ '{1}{0:>3}'.format('a', 'b') }}",
            "a-3b  a",
        ),
        ("{% filter upper %}a{{ messages[0].content }}{% endfilter %}", "AHI"),
    ],
)
def test_the_idioms_of_published_templates(source, want):
    assert text_of(source, tools=[{"x": "<&'é😀>"}], today=DAY) == want


def test_renders_of_one_day_are_equal_and_the_date_is_the_current_one_by_default():
    source = "{{ strftime_now('%Y-%m-%d %H:%M:%S') }}"
    before = datetime.date.today()
    made = {text_of(source), text_of(source)}
    allowed = {f"{day.isoformat()} 00:00:00" for day in (before, datetime.date.today())}
    assert made <= allowed
    assert text_of(source, today=DAY) == "2025-03-09 00:00:00"


def test_missing_special_tokens_are_undefined():
    made = ChatTemplate("{{ bos_token is defined }}{{ eos_token }}", eos_token="E").render([USER])
    assert made.text == "FalseE"


def test_messages_tools_and_arguments_are_never_changed():
    source = (
        "{% for m in messages %}{% set x = m.update({'a': 1}) if false %}{{ m.items() | list | length }}"
        "{% for c in m.tool_calls or [] %}{{ c.function.arguments.at }}{% endfor %}{% endfor %}"
    )
    messages = [USER, {"role": "assistant", "content": None, "tool_calls": [copy.deepcopy(CALL)]}]
    tools, extra = copy.deepcopy(TOOLS), {"names": ["a"]}
    before = copy.deepcopy((messages, tools, extra))
    template(source).render(messages, tools=tools, extra=extra)
    assert (messages, tools, extra) == before
    for attack in (
        "messages.append(1)",
        "messages[0].update(a=1)",
        "messages[0].pop('role')",
        "names.clear()",
    ):
        with pytest.raises(ArtifactError, match="unsafe"):
            template("{{ " + attack + " }}").render(messages, tools=tools, extra=extra)
    assert (messages, tools, extra) == before


def test_a_refusal_by_the_template_is_a_validation_error_with_its_words():
    source = (
        "{% for m in messages %}"
        "{% if m.role == 'system' %}{{ raise_exception('no system role here') }}{% endif %}"
        "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}"
        "{% endif %}{{ m.content }}{% endfor %}"
    )
    with pytest.raises(ValidationError, match="no system role here"):
        text_of(source, [{"role": "system", "content": "x"}, USER])
    with pytest.raises(ValidationError, match="roles must alternate"):
        text_of(source, [USER, USER])
    assert text_of(source, [USER]) == "hi"


@pytest.mark.parametrize("source", ["{{ messages[0].a.b }}", "{{ 1 + 'a' }}", "{{ {}.a.b }}", "{{ 1 // 0 }}"])
def test_other_faults_at_rendering_are_typed_and_name_the_template(source):
    with pytest.raises(ValidationError, match="my template"):
        ChatTemplate(source, origin="my template").render([USER])


@pytest.mark.parametrize(
    ("source", "match"),
    [
        ("{% for %}", "line 1"),
        ("\n\n{{ a | nofilter }}", "line 3"),
        ("{{ a", "line 1"),
        ("{{ " + "(" * 3000 + ")" * 3000 + " }}", "compiled|line"),
        ("{{ " + "a." * 30000 + "b }}", "compiled|line"),
        ("x" * 2_000_000, "characters"),
    ],
)
def test_faults_in_the_source_are_found_at_once(source, match):
    with pytest.raises(ArtifactError, match=match) as caught:
        ChatTemplate(source, origin="my template")
    assert "my template" in str(caught.value)


@pytest.mark.parametrize(
    "name",
    [
        "chat_template",
        "template",
        "messages",
        "tools",
        "bos_token",
        "raise_exception",
        "strftime_now",
        "range",
    ],
)
def test_a_request_cannot_set_reserved_names(name):
    with pytest.raises(ValidationError, match=name):
        text_of("{{ messages }}", extra={name: "x"})


def test_extra_arguments_reach_the_template():
    source = "{{ enable_thinking }}{{ effort if effort is defined }}{{ documents[0].a }}"
    assert text_of(source, extra={"enable_thinking": False, "documents": [{"a": "b"}]}) == "Falseb"
    with pytest.raises(ValidationError, match="JSON"):
        text_of(source, extra={"enable_thinking": object()})


def test_many_threads_may_use_one_template():
    one = template("{% for m in messages %}{% for i in range(50) %}{{ m.content }}{% endfor %}{% endfor %}")

    def render(number):
        return one.render([{"role": "user", "content": f"<{number}>"}])

    with ThreadPoolExecutor(8) as pool:
        for number, made in enumerate(pool.map(render, range(64))):
            assert made.text == f"<{number}>" * 50


def test_the_load_time_check_reports_what_fails_only_with_tools():
    source = (
        "{% for m in messages %}{{ m.content }}{% endfor %}{% if tools %}{{ tools | nofilter }}{% endif %}"
    )
    failures = template(source).check()
    assert [line.split(":")[0] for line in failures] == ["tools", "tool result"]
    assert all("nofilter" in line for line in failures)
    strict = "{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}ok"
    assert template(strict).check() == ()


@pytest.mark.parametrize("name", sorted(TEMPLATES))
def test_the_sample_templates_pass_their_own_check(name):
    assert template(TEMPLATES[name]).check() == ()


def test_the_result_is_plain_data():
    made = template("A{{ messages[0].content }}B").render([USER])
    assert made == RenderedPrompt("AhiB", ((1, 3),))


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0].content.text }}",
        "{{ messages[0].content['text'] }}",
        "{{ messages[0].content['x'] is defined }}",
        "{{ messages[0].content.upper is defined }}",
        "{% if messages[0].content[0].text is defined %}parts{% else %}text{% endif %}",
    ],
)
def test_missing_fields_of_a_text_are_undefined(judge, source):
    assert (text_of(source), "") == judged(judge, source, [USER], None, False, {})
