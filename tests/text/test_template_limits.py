"""A template that would take much time or memory ends with a clear error, in about a second and in little memory."""

import threading
import time
import tracemalloc

import pytest

from model.text.template_budget import TooExpensive, size_of
from model.text.template_sandbox import TemplateEnvironment, render
from tests.tiny import quick

GROWING = "{% set ns = namespace(x=[1], y=[1]) %}{% for i in range(100000) %}"
LONG = "{% set x = range(100000) %}"
BIG = "{% set big = 'x' * 1000000 %}"
HOSTILE = {
    "a long text": "{{ 'a' * 10**9 }}",
    "a long list": "{{ [1] * 10**9 }}",
    "a large power": "{{ 10 ** 10000000000 }}",
    "a product of large numbers": "{{ ('f' * 1000000) | int(base=16) * 3 }}",
    "a method that pads": "{{ 'a'.center(10**9) }}",
    "a method that pads, found by name": "{{ ['a'] | map(attribute='center') | first(10**9) }}",
    "a filter that pads": "{{ 'a' | center(1000000000) }}",
    "a width in a format": "{{ '%1000000000d' % 5 }}",
    "many widths in a format": "{{ ('%99999d' * 1000) % 5 }}",
    "a width as a value": "{{ '%*d' % (1000000000, 5) }}",
    "a width in the filter format": "{{ '%1000000000d' | format(5) }}",
    "a width in str.format": "{{ '{:1000000000}'.format(1) }}",
    "a nested width in str.format": "{{ '{:{}}'.format(1, '1000000000') }}",
    "str.format by the filter attr": "{{ ('{:1000000000}' | attr('format'))(1) }}",
    "str.format_map": "{{ '{a:1000000000}'.format_map({'a': 1}) }}",
    "a format that repeats a text": BIG + "{{ '{0}{0}{0}{0}'.format(big) }}",
    "filters of map": "{{ ['%1000000000d'] | map('format', 5) | list }}",
    "nested loops": LONG + "{% for i in x %}{% for j in x %}{% endfor %}{% endfor %}",
    "loops with a false condition": LONG + "{% for i in x %}{% for j in x if i is string %}{% endfor %}{% endfor %}",
    "loops that write": "{% for i in range(100000) %}{% for j in range(100000) %}text{% endfor %}{% endfor %}",
    "a recursive loop": "{% for x in [1] recursive %}{{ loop([1, 1]) }}{% endfor %}",
    "a recursive macro": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "a branching macro": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
    "a recursive block": "{% block a %}{{ self.a() }}{% endblock %}",
    "fixed text in a loop of a macro": "{% macro m() %}{% for i in range(100000) %}"
    + "x" * 10000
    + "{% endfor %}{% endmacro %}{% set y = m() %}",
    "a doubled text": "{% set ns = namespace(x='a') %}" + "{% set ns.x = ns.x ~ ns.x %}" * 50,
    "a doubled list": GROWING + "{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "a list of lists": GROWING + "{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x }}",
    "a comparison of lists of lists": GROWING
    + "{% set ns.x = [ns.x, ns.x] %}{% set ns.y = [ns.y, ns.y] %}"
    + "{% if i == 30 and ns.x == ns.y %}{% endif %}{% endfor %}",
    "a dict of dicts": GROWING + "{% set ns.x = dict.fromkeys(['a', 'b'], ns.x) %}{% endfor %}{{ ns.x }}",
    "views of dicts": GROWING + "{% set ns.x = {'a': ns.x, 'b': ns.x}.items() %}{% endfor %}{{ ns.x }}",
    "arguments of a macro": "{% macro m(n) %}{% if n %}{{ m(n - 1, varargs, varargs) }}{% else %}{{ varargs == 1 }}"
    "{% endif %}{% endmacro %}{{ m(50, 1) }}",
    "a deep list": GROWING + "{% set ns.x = [ns.x] %}{% endfor %}{{ ns.x }}",
    "a replacement": BIG + "{{ big.replace('x', big) }}",
    "a replacement of nothing": BIG + "{{ big.replace('', big) }}",
    "the filter replace": BIG + "{{ big | replace('x', big) }}",
    "a join": BIG + "{{ big.join(range(100000) | map('string')) }}",
    "the filter join": BIG + "{{ range(100000) | join(big) }}",
    "a split": "{{ ('é' * 1000000).split('é') | length }}",
    "a split at spaces": "{{ ('é ' * 500000).split() | length }}",
    "a split into lines": "{{ ('\n' * 1000000).splitlines() | length }}",
    "the filter list": "{{ ('東' * 1000000) | list | length }}",
    "an indent": "{{ ('\n' * 90000) | indent(90000) }}",
    "tabs": "{{ ('\t' * 90000).expandtabs(90000) }}",
    "a translation": "{{ ('a' * 100000).translate({97: 'b' * 100000}) }}",
    "a sum of lists": "{{ ([[1]] * 50000) | sum(start=[]) }}",
    "sorting long texts": BIG + "{{ [big ~ 'a', big ~ 'b'] * 10000 | sort }}",
    "sorting texts that are made one by one": BIG + "{{ range(100000) | map('replace', '1', big) | sort | length }}",
    "searching long texts": BIG + "{% for i in range(100000) if (i | string) in big %}{% endfor %}",
    "searching long texts in a filter": BIG + "{{ range(100000) | map('string') | select('in', big) | list }}",
    "slices that are kept": "{% set big = 'é' * 1000000 %}" + "{% set x = big[1:] %}" * 100,
    "batches that are filled": "{% for b in [1] | batch(100000, ['a' * 1000] * 900) %}{{ b == b }}{% endfor %}",
    "a date": "{{ strftime_now('%1000000000Y') }}",
    "a long date": "{{ strftime_now('%c' * 100000) }}",
    "an indent of JSON": "{{ [1] | tojson(indent=1000000000) }}",
    "an indent of deep JSON": "{% set ns = namespace(x=[1] * 10000) %}"
    + "{% set ns.x = [ns.x] %}" * 300
    + "{{ ns.x | tojson(indent=100) }}",
    "bytes of a number": "{{ (5).to_bytes(1000000000) }}",
    "filler text": "{{ lipsum(n=100000) }}",
    "HTML escapes": BIG + "{{ (big.replace('x', '<')) | e }}",
    "blocks that are set": "{% set x = 'a' %}" + "{% set x %}{{ x }}{{ x }}{% endset %}" * 50,
}


def run(source: str) -> str:
    environment = TemplateEnvironment()
    return render(environment.compile_limited(environment.parse(source)), {})


@pytest.mark.parametrize("name", quick(30, HOSTILE))
def test_a_hostile_template_ends_soon_with_an_error(name: str) -> None:
    start = time.thread_time()
    with pytest.raises(Exception, match=r"."):  # what is not too expensive is refused by the sandbox
        run(HOSTILE[name])
    assert time.thread_time() - start < 2.5  # the limit is one second, and one more for a slow machine


@pytest.mark.parametrize(
    "name",
    ["a list of lists", "the filter join", "a doubled text", "slices that are kept", "fixed text in a loop of a macro"],
)
def test_a_hostile_template_takes_little_memory(name: str) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(TooExpensive):
            run(HOSTILE[name])
        assert tracemalloc.get_traced_memory()[1] < 100 << 20
    finally:
        tracemalloc.stop()


def test_the_limits_grow_with_the_messages() -> None:
    environment = TemplateEnvironment()
    source = "{% for m in messages %}{{ '<' + (m.content | trim) + '>' }}{% endfor %}{{ messages | tojson }}"
    template = environment.compile_limited(environment.parse(source))
    assert len(render(template, {"messages": [{"content": "x" * 1_000_000}] * 8})) > 16_000_000


def test_a_size_counts_a_shared_part_as_often_as_its_text_has_it() -> None:
    part = ["x" * 1000]
    assert size_of([part, part]) - size_of([part]) > 1000
    doubled: list[object] = [1]
    for _ in range(100):
        doubled = [doubled, doubled]
    with pytest.raises(TooExpensive):
        size_of(doubled, 1 << 20)


def test_renderings_at_the_same_time_have_budgets_of_their_own() -> None:
    environment = TemplateEnvironment()
    template = environment.compile_limited(environment.parse("{% for i in range(20000) %}{{ x }}{% endfor %}"))
    texts: list[str] = []
    threads = [
        threading.Thread(target=lambda text=text: texts.append(render(template, {"x": text}))) for text in "abcd"
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(texts) == [text * 20000 for text in "abcd"]
