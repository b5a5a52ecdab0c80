"""Templates that do not end, grow without bound or break out: typed errors, soon."""

import time

import pytest

from hipfire.base.errors import ArtifactError, HipfireError, ValidationError
from hipfire.text.budget import Budget, Limits
from hipfire.text.template import ChatTemplate

USER = [{"role": "user", "content": "hi " * 50}]
GROW = "{% set ns = namespace(x=START) %}{% for i in range(1000) %}{% set ns.x = STEP %}{% endfor %}"


def grow(start, step):
    return GROW.replace("START", start).replace("STEP", step)


SHARED = "{% set a = ['x'] * 1000 %}{% set b = [a] * 1000 %}{% set c = [b] * 50 %}"
SHARED_USES = [
    "{{ c }}",
    "{{ c | tojson }}",
    "{{ c | string }}",
    "{{ c | upper }}",
    "{{ c ~ '' }}",
    "{{ '%s' % [c] }}",
    "{{ '%r' % (c,) }}",
    "{{ '%(k)s' % {'k': c} }}",
    "{{ '%s' | format(c) }}",
    "{{ '{}'.format(c) }}",
    "{{ '{x!r}'.format_map({'x': c}) }}",
    "{{ c | join }}",
    "{{ [c, c] | sort | length }}",
    "{{ [c, c] | min }}",
    "{{ {'k': c}.values() }}",
    "{{ {'k': c}.items() }}",
    "{{ {'k': c} | dictsort(by='value') | length }}",
    "{{ namespace(c=c) }}",
    "{{ c is upper }}",
    "{{ 'x' | replace('x', c) }}",
    "{{ raise_exception(c) }}",
]
LONG = "{% set x = 'x' * 10000000 %}{% set y = [x] * 150 %}"
LONG_USES = [
    "{{ y | sort | length }}",
    "{{ y | select | sort | length }}",
    "{{ y | unique | list | length }}",
    "{{ y | max | length }}",
    "{{ y | min | length }}",
    "{{ ([{'k': x}] * 150) | groupby('k') | length }}",
    "{{ ([x] * 200) | string | length }}",
    "{{ y | join | length }}",
    "{{ ('%s' * 150) % ((x,) * 150) }}",
]
ENDLESS = {
    "billion steps": "{% for i in range(1000000000) %}x{% endfor %}",
    "range beyond machine words": "{% for i in range(10 * 10 ** 20) %}{% endfor %}",
    "nested loops": "{% for i in range(25000) %}{% for j in range(25000) %}{% endfor %}{% endfor %}",
    "nested loops over a filter": "{% for i in range(9999) %}{{ range(99999) | list | length }}{% endfor %}",
    "loop with a condition": "{% for i in range(9999) %}"
    "{% for j in range(9999) if j < 0 %}{% endfor %}{% endfor %}",
    "macro calls itself twice": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}"
    "{% endmacro %}{{ f(90) }}",
    "recursive loop": "{% for i in [1, 2] recursive %}{{ loop([1, 2]) }}{% endfor %}",
    "doubling by ~": grow("'x'", "ns.x ~ ns.x"),
    "doubling by +": grow("'x'", "ns.x + ns.x"),
    "doubling by *": grow("'x'", "ns.x * 2"),
    "doubling by join": grow("'x'", "[ns.x, ns.x] | join"),
    "doubling by str.join": grow("'x'", "''.join([ns.x, ns.x])"),
    "doubling by replace": grow("'x'", "ns.x | replace('x', 'xx')"),
    "doubling by str.replace": grow("'x'", "ns.x.replace('x', 'xx')"),
    "doubling by %": grow("'x'", "'%s%s' % (ns.x, ns.x)"),
    "doubling by format": grow("'x'", "'{0}{0}'.format(ns.x)"),
    "doubling a list": grow("[1]", "ns.x + ns.x"),
    "squaring a number": grow("3", "ns.x * ns.x"),
    "power tower": "{{ 9 ** 9 ** 9 ** 9 }}",
    "a long string": "{{ 'x' * 1000000000 }}",
    "a long list": "{{ [1] * 1000000000 }}",
    "centre": "{{ 'x' | center(1000000000) }}",
    "centre of a method": "{{ 'x'.center(1000000000) }}",
    "padding": "{{ 'x'.ljust(1000000000) }}",
    "indent": "{{ 'x\ny' | indent(1000000000) }}",
    "indent by a long text": "{{ ('x\n' * 100000) | indent('y' * 10000) }}",
    "tabs": "{{ ('\t' * 1000000).expandtabs(9999) }}",
    "width in %": "{{ '%1000000000d' % 1 }}",
    "width in % from a value": "{{ '%*d' % (1000000000, 1) }}",
    "width in the format filter": "{{ '%1000000000d' | format(1) }}",
    "width in format": "{{ '{:>1000000000}'.format(1) }}",
    "width in format from a value": "{{ '{:>{}}'.format(1, 1000000000) }}",
    "width in format_map": "{{ '{x:>1000000000}'.format_map({'x': 1}) }}",
    "json indent": "{{ [1, [2]] | tojson(indent=1000000000) }}",
    "batch": "{{ [1] | batch(1000000000, 0) | list | length }}",
    "slice": "{{ [1] | slice(1000000000) | list | length }}",
    "rounding": "{{ 2.5 | round(1000000000, 'ceil') }}",
    "long separator": "{{ range(100000) | map('string') | join('x' * 100000) }}",
    "long separator in str.join": "{{ ('x' * 100000).join(['a'] * 100000) }}",
    "many pieces": "{{ ('x ' * 8000000).split() | length }}",
    "many letters": "{{ ('x' * 16000000) | list | length }}",
    "many letters joined": "{{ ('x' * 16000000) | join('-') }}",
    "many letters joined by a method": "{{ '-'.join('x' * 16000000) }}",
    "many of the caller's letters": "{{ (messages[0].content * 100000) | list | length }}",
    "doubling lists in lists": grow("[1]", "[ns.x, ns.x]") + "{{ ns.x }}",
    "a namespace that holds itself": "{% set ns = namespace() %}{% set ns.x = ns %}{{ ns ~ '' }}",
    **{f"shared items, {use}": SHARED + use for use in SHARED_USES},
    **{f"long items, {use}": LONG + use for use in LONG_USES},
    "summing lists": "{{ ([[0] * 100] * 10000) | sum(start=[]) | length }}",
    "summing lists by position": "{{ ([[0] * 100] * 10000) | sum(none, []) | length }}",
    "deep indentation": "{{ ([[[0] * 100] * 10] * 10) | tojson(indent=9999) }}",
    "huge output": "{% for i in range(99999) %}" + "x" * 10_000 + "{% endfor %}",
}


@pytest.mark.parametrize("name", sorted(ENDLESS))
def test_endless_and_growing_templates_fail_soon(name):
    started = time.thread_time()
    template = ChatTemplate(ENDLESS[name])
    with pytest.raises(HipfireError) as caught:
        template.render(USER)
    assert time.thread_time() - started < 2
    assert isinstance(caught.value, ArtifactError | ValidationError)
    assert "\n" not in caught.value.line()
    assert ChatTemplate("{{ messages[0].content }}").render(USER).text == USER[0]["content"]


@pytest.mark.parametrize(
    ("source", "match"),
    [
        (ENDLESS["billion steps"], "1000000000"),
        (ENDLESS["nested loops"], "steps"),
        (ENDLESS["doubling by ~"], "characters"),
        (ENDLESS["squaring a number"], "bits"),
        (ENDLESS["padding"], "integer arguments"),
    ],
)
def test_the_error_names_the_limit(source, match):
    with pytest.raises(ArtifactError, match=match):
        ChatTemplate(source).render(USER)


def test_the_clock_stops_what_the_step_counter_would_allow():
    source = "{% for i in range(5000) %}{{ range(3000) | list | length }}{% endfor %}"
    template = ChatTemplate(source, limits=Limits(seconds=0.05, steps=10**9, work=10**12))
    with pytest.raises(ArtifactError, match="processor time"):
        template.render(USER)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__ }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__class__.__base__ }}",
        "{{ (messages | attr('__class__')).__base__ }}",
        "{{ messages[0]['__class__'].x.y }}",
        "{{ raise_exception.__globals__ }}",
        "{{ cycler.__init__.__globals__.os.popen('id') }}",
        "{{ range.__self__.budget }}",
        "{{ strftime_now.__globals__ }}",
        "{{ '{0.__class__.__mro__}'.format('') }}",
        "{{ '{x.__class__}'.format_map({'x': ''}) }}",
        "{{ messages | map(attribute='__class__') | list }}",
        "{{ self.__init__.__globals__ }}",
        "{{ messages[0].content._spans }}",
        "{% import 'os' as os %}{{ os }}",
        "{% include '/etc/passwd' %}",
        "{% extends 'x' %}",
        "{{ lipsum(n=1000) }}",
        "{{ open('/etc/passwd') }}",
    ],
)
def test_gadgets_raise(source):
    with pytest.raises((ArtifactError, ValidationError)):
        ChatTemplate(source).render(USER)


def test_an_ordinary_long_chat_is_far_from_every_limit():
    messages = [
        {"role": role, "content": "word " * 4000} for _ in range(200) for role in ("user", "assistant")
    ]
    source = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + (m.content | trim) + '<|im_end|>\\n' }}"
        "{% endfor %}"
    )
    limits = Limits()
    tight = Limits(steps=limits.steps // 10, work=limits.work // 3)
    made = ChatTemplate(source, limits=tight).render(messages)
    assert len(made.text) > 400 * 19_999


def test_each_account_has_its_limit():
    budget = Budget(Limits(text=10, work=100, items=2, rounds=3, number=5, bits=8))
    budget.text(10)
    budget.items(2)
    budget.rounds(3)
    budget.arguments([5, -5, "999", 3.5])
    budget.integer(8)
    for overdraw in (
        lambda: budget.text(11),
        lambda: budget.items(3),
        lambda: budget.rounds(4),
        lambda: budget.arguments([6]),
        lambda: budget.arguments([-6]),
        lambda: budget.arguments([1 << 200]),
        lambda: budget.integer(9),
        lambda: [budget.text(10) for _ in range(9)],
    ):
        with pytest.raises(ArtifactError, match="asks for more than"):
            overdraw()
