"""The page's own modules in a real browser: markdown, the reading of streams, and what a request holds."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
from browser import Browser
from server_kit import serving

# shows the elements of a fragment as an outline: names, and what tells a list or link from another
OUTLINE = """
const { markdown } = await import("/static/markdown.js");
const box = document.createElement("div");
box.append(markdown(args[0]));
const walk = (node) => {
  if (node.nodeType === Node.TEXT_NODE) return node.data;
  const extra = node.className || node.getAttribute("href") || node.getAttribute("start") || "";
  const inner = [...node.childNodes].map(walk);
  return [node.tagName.toLowerCase() + (extra ? "." + extra : ""), ...inner];
};
return [...box.childNodes].map(walk);
"""


@pytest.fixture(scope="module")
def page(chromium: Browser) -> Iterator[Browser]:
    with serving() as live:
        chromium.open(live.url)
        yield chromium


def code(text: str, language: str = "code") -> list[Any]:
    bar = ["figcaption", ["span", language], ["button.copy", "Copy"]]
    return ["figure.code", bar, ["pre", ["code", text] if text else ["code"]]]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("one\ntwo\n\nthree", [["p", "one", ["br"], "two"], ["p", "three"]]),
        ("# Title #\n### C# #", [["h1", "Title"], ["h3", "C#"]]),
        ("#tag", [["p", "#tag"]]),
        ("a **b *c*** d", [["p", "a ", ["strong", "b ", ["em", "c"]], " d"]]),
        ("*a **b***", [["p", ["em", "a ", ["strong", "b"]]]]),
        ("***x***", [["p", ["strong", ["em", "x"]]]]),
        ("snake_case_name 2 * 3 * 4", [["p", "snake_case_name 2 * 3 * 4"]]),
        ("_yes_ ~~no~~ \\*plain\\*", [["p", ["em", "yes"], " ", ["del", "no"], " *plain*"]]),
        ("**open", [["p", "**open"]]),
        ("`a*b*` ``c`d``", [["p", ["code", "a*b*"], " ", ["code", "c`d"]]]),
        ("`open **b**", [["p", "`open ", ["strong", "b"]]]),
        ("```python\nx = '<b>'\n```\nafter", [code("x = '<b>'", "python"), ["p", "after"]]),
        ("```\nstill open\n# no title", [code("still open\n# no title")]),
        ("~~~~\n```\n~~~~", [code("```")]),
        ("- a\n- b", [["ul", ["li", "a"], ["li", "b"]]]),
        ("1. a\n2. b", [["ol", ["li", "a"], ["li", "b"]]]),
        ("3) a\n4) b", [["ol.3", ["li", "a"], ["li", "b"]]]),
        ("1. a\n   - b\n2. c", [["ol", ["li", "a", ["ul", ["li", "b"]]], ["li", "c"]]]),
        ("- a\n\n  more\n- b", [["ul", ["li", ["p", "a"], ["p", "more"]], ["li", "b"]]]),
        ("- a\n\n- b", [["ul", ["li", "a"], ["li", "b"]]]),
        ("* a\n  ```\n  x\n  ```", [["ul", ["li", "a", code("x")]]]),
        ("- a\n\nafter", [["ul", ["li", "a"]], ["p", "after"]]),
        ("in\n1984. It was", [["p", "in", ["br"], "1984. It was"]]),
        ("> a\n> > b\nlazy", [["blockquote", ["p", "a"], ["blockquote", ["p", "b", ["br"], "lazy"]]]]),
        ("a\n\n---\n***", [["p", "a"], ["hr"], ["hr"]]),
        (
            "| a | b |\n|:-:|--:|\n| 1 | x \\| y |\n| only |",
            [
                [
                    "div.table",
                    [
                        "table",
                        ["thead", ["tr", ["th.center", "a"], ["th.right", "b"]]],
                        [
                            "tbody",
                            ["tr", ["td.center", "1"], ["td.right", "x | y"]],
                            ["tr", ["td.center", "only"], ["td.right"]],
                        ],
                    ],
                ]
            ],
        ),
        ("[the *x*](https://a.b/c_(d))", [["p", ["a.https://a.b/c_(d)", "the ", ["em", "x"]]]]),
        ("see https://a.b/c.", [["p", "see ", ["a.https://a.b/c", "https://a.b/c"], "."]]),
        ("<mailto:x@y.z>", [["p", ["a.mailto:x@y.z", "mailto:x@y.z"]]]),
        ("![cat](https://a.b/c.png)", [["p", ["a.https://a.b/c.png", "picture: cat"]]]),
        ("", []),
    ],
)
def test_markdown(page: Browser, text: str, expected: list[Any]) -> None:
    assert page.later(OUTLINE, text) == expected


HOSTILE = [
    "<script>window.hacked = 1</script>",
    "<img src=x onerror='window.hacked = 1'>",
    "<svg onload=window.hacked=1>",
    "[x](javascript:window.hacked=1)",
    "[x]( javascript:window.hacked=1)",
    "[x](JaVaScRiPt:window.hacked=1)",
    "[x](data:text/html,<script>window.hacked=1</script>)",
    "<javascript:window.hacked=1>",
    "![x](javascript:window.hacked=1)",
    "[x](//evil.example)",
    "[x](/v1/models)",
    '```"><script>window.hacked=1</script>\nx\n```',
    "| <iframe src=/> | b |\n|---|---|\n| <style>*{display:none}</style> | c |",
    "# <a href=javascript:window.hacked=1>x</a>",
    '[<b onclick=window.hacked=1>x</b>](https://a.b/"onclick=window.hacked=1)',
]


ELEMENTS = [
    *("A", "BR", "CODE", "DEL", "EM", "SPAN", "STRONG", "P", "H1", "BLOCKQUOTE", "OL", "UL", "LI"),
    *("FIGURE", "FIGCAPTION", "BUTTON", "PRE", "DIV", "TABLE", "THEAD", "TBODY", "TR", "TH", "TD"),
]


def test_no_text_becomes_markup_script_or_another_kind_of_link(page: Browser) -> None:
    """Each hostile text is put into the page, alone and inside each kind of block."""
    found = page.later(
        """
        const { markdown } = await import("/static/markdown.js");
        const allowed = new Set(args[1]), names = new Set(args[2]);
        const bad = [];
        for (const text of args[0]) {
          for (const form of [text, "- " + text, "> " + text, "**" + text + "**", "a\\n" + text]) {
            const box = document.createElement("div");
            box.append(markdown(form));
            document.body.append(box);
            for (const node of box.querySelectorAll("*")) {
              if (!allowed.has(node.tagName)) bad.push(form + ": " + node.tagName);
              for (const { name } of node.attributes) if (!names.has(name)) bad.push(form + ": " + name);
              if (node.href && !/^(https?:|mailto:)/.test(node.getAttribute("href"))) bad.push(form);
            }
            box.remove();
          }
        }
        return [bad, window.hacked ?? 0];
        """,
        HOSTILE,
        ELEMENTS,
        ["class", "href", "target", "rel", "type", "tabindex", "start"],
    )
    assert found == [[], 0]


def test_no_text_is_lost_however_it_is_cut(page: Browser) -> None:
    """A reply is drawn at every length while it streams: its words must be there each time."""
    text = (
        "# A\n\n1. one *two*\n   - three `four`\n\n> five\n\n| six | seven |\n|---|---|\n| eight | nine |\n\n"
        "```js\nten\n```\n"
    )
    words = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
    lost = page.later(
        """
        const { markdown } = await import("/static/markdown.js");
        const lost = [];
        for (let end = 0; end <= args[0].length; end += 1) {
          const part = args[0].slice(0, end);
          const shown = markdown(part).textContent;
          for (const word of args[1].filter((each) => part.includes(each))) {
            if (!shown.includes(word)) lost.push([end, word]);
          }
        }
        return lost;
        """,
        text,
        words,
    )
    assert lost == []


@pytest.mark.parametrize(
    "text",
    [
        *("*" * 20000, "*a " * 6000, "_a_" * 6000, "[" * 20000, "[a](b" * 4000, "<http://a" * 3000),
        *("`" * 9999 + " `" * 5000, "``` " + "a " * 9000 + "`", "~~~" * 6000, "\\" * 20000),
        *("> " * 5000 + "x", "- " * 5000 + "x", "1. " * 5000, "# " + " #" * 9000),
        *("|" * 20000, "|-" * 9000 + "\n" + "|-" * 9000),
    ],
    ids=lambda text: text[:6],
)
def test_hostile_lengths_do_not_stop_the_page(page: Browser, text: str) -> None:
    began = time.monotonic()
    count = page.later(
        "const { markdown } = await import('/static/markdown.js');"
        "return markdown(args[0]).textContent.length",
        text,
    )
    assert time.monotonic() - began < 2
    assert isinstance(count, int)


STREAM = (
    'data: {"choices":[{"delta":{"role":"assistant"}}]}\n\n: keepalive\n\n'
    'data: {"choices":[{"delta":{"reasoning_content":"hm"}}]}\r\n\r\n'
    'data: {"choices":[{"delta":{"content":"né 世界🔥"}}]}\n\n'
    'event: x\ndata:{"usage":{"a":1},"choices":[]}\n\n'
    'data: {"choices":[{"delta":{},"finish_reason":"stop"}],"timings":{"b":2}}\n\ndata: [DONE]\n\n'
)
READ = """
const { streamChat } = await import("/static/api.js");
const bytes = new TextEncoder().encode(args[0]);
const real = window.fetch;
const runs = [];
try {
  for (const size of args[1]) {
    window.fetch = async () => new Response(new ReadableStream({ start(to) {
      for (let at = 0; at < bytes.length; at += size) to.enqueue(bytes.slice(at, at + size));
      to.close();
    } }));
    const events = [];
    try {
      for await (const event of streamChat({}, new AbortController().signal)) events.push(event);
    } catch (error) { events.push(error.message); }
    runs.push(events);
  }
} finally { window.fetch = real; }
return runs;
"""


def test_a_stream_reads_the_same_however_it_is_cut(page: Browser) -> None:
    expected = [{"reasoning": "hm"}, {"content": "né 世界🔥"}, {"usage": {"a": 1}}]
    expected += [{"finish": "stop"}, {"timings": {"b": 2}}]
    runs = page.later(READ, STREAM, [1, 2, 3, 5, 7, 64, 10000])
    assert runs == [expected] * 7


def test_a_stream_that_ends_early_or_in_an_error_is_no_answer(page: Browser) -> None:
    cut = STREAM.removesuffix("data: [DONE]\n\n")
    assert "ended before the answer was complete" in page.later(READ, cut, [16])[0][-1]
    failed = 'data: {"error":{"message":"no luck"}}\n\ndata: [DONE]\n\n'
    assert page.later(READ, failed, [16]) == [["no luck"]]


def test_pages_without_storage_still_work(page: Browser) -> None:
    told = page.later(
        """
        const store = await import("/static/store.js");
        const said = [];
        store.reportTrouble((text) => said.push(text));
        const put = Storage.prototype.setItem;
        Storage.prototype.setItem = () => { throw new DOMException("full", "QuotaExceededError"); };
        try {
          const chat = store.newChat();
          chat.messages.push({ role: "user", content: "Hi" });
          store.saveChat(chat);
          return [store.readChat(chat.id).messages.length, store.allChats().length >= 1, said.join()];
        } finally { Storage.prototype.setItem = put; }
        """
    )
    assert told[:2] == [1, True]
    assert "storage is full" in told[2]
