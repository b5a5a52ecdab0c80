"""The web page in a real browser, in front of a real server and a scripted engine."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator

import httpx
import pytest
from browser import Browser
from scripted_backend import MODEL, End, Fail, Hold, Say, Script, think
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from server_kit import OTHER, Live, eventually, serving

from hipfire.server.page import STATIC

TOKEN = "a-long-secret-token"


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    with serving() as live:
        yield live


@pytest.fixture
def page(server: Live, chromium: Browser) -> Iterator[Browser]:
    """Return the page, as somebody sees it who comes for the first time."""
    chromium.open(server.url)
    chromium.complaints()
    yield chromium
    assert chromium.complaints() == []


def script(server: Live, *scripts: Script, cached: int = 0) -> None:
    server.backend.scripts[:] = scripts
    server.backend.cached_tokens = cached


def test_the_files_are_public_and_nothing_but_them_may_run() -> None:
    with serving(token=TOKEN) as live, httpx.Client(base_url=live.url) as client:
        assert client.get("/v1/models").status_code == 401
        answers = [client.get("/"), *(client.get(f"/static/{path.name}") for path in STATIC.iterdir())]
        hidden = client.get("/static/%2e%2e%2fpage.py"), client.get("/static/page.py")
        # how Ollama's clients see whether a server is there
        assert client.head("/").status_code == 200
    for answer in answers:
        assert answer.status_code == 200
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "script-src 'self'" in policy
        assert "unsafe" not in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
    assert [each.status_code for each in hidden] == [404, 404]


def test_the_files_load_nothing_from_elsewhere() -> None:
    index = (STATIC / "index.html").read_text()
    assert re.findall(r"<script(?![^>]*\bsrc=)|<style|\son\w+=|\sstyle=", index) == []
    for path in STATIC.iterdir():
        # names of XML vocabularies are no addresses
        text = path.read_text().replace("http://www.w3.org/2000/svg", "")
        assert re.findall(r"https?://[a-z]", text) == [], path.name


def test_a_streamed_chat_of_two_turns_is_kept(server: Live, page: Browser) -> None:
    go_on = threading.Event()
    script(server, [Say("It is *blue*."), Hold(go_on), Say(" Mostly.")], [Say("You are welcome.")], cached=8)
    page.type("What colour is the sky?", Keys.ENTER)
    # the first words are there while the answer goes on
    page.until(lambda: "It is blue." in page.one(".assistant .text").text)
    assert page.one("#stop").is_displayed()
    assert not page.one("#send").is_displayed()
    go_on.set()
    page.until(lambda: page.texts(".assistant:not(.live) .text") == ["It is blue. Mostly."])
    page.say("Thanks!")
    assert [message["content"] for message in server.backend.seen[-1].messages or ()] == [
        "What colour is the sky?",
        "It is *blue*. Mostly.",
        "Thanks!",
    ]
    figures = page.texts(".figures")[-1]
    assert "6 tokens" in figures
    assert "40.0 tokens/s" in figures
    assert "first after 25 ms" in figures
    assert "prompt 12 (8 cached)" in figures
    page.open(page.driver.current_url, fresh=False)
    assert page.texts(".bubble") == ["What colour is the sky?", "Thanks!"]
    assert page.texts(".assistant .text") == ["It is blue. Mostly.", "You are welcome."]
    assert page.texts("#chats a") == ["What colour is the sky?"]


def test_stop_keeps_what_there_is_and_ends_the_turn(server: Live, page: Browser) -> None:
    script(server, [Say("Once upon"), Hold(threading.Event())], [Say("And then.")])
    page.type("Tell me a story", Keys.ENTER)
    page.until(lambda: page.texts(".assistant .text") == ["Once upon"])
    page.one("#stop").click()
    page.until(lambda: "stopped" in page.one(".figures").text)
    key = server.backend.seen[-1].key
    assert eventually(lambda: server.backend.ended.get(key) == "aborted")
    page.say("Go on")
    assert [message["content"] for message in server.backend.seen[-1].messages or ()] == [
        "Tell me a story",
        "Once upon",
        "Go on",
    ]


def test_escape_stops_and_shift_enter_only_starts_a_line(server: Live, page: Browser) -> None:
    script(server, [Say("Hm"), Hold(threading.Event())])
    page.type("one", Keys.SHIFT, Keys.ENTER, Keys.NULL, "two")
    assert page.one("#input").get_property("value") == "one\ntwo"
    page.type("", Keys.ENTER)
    page.until(lambda: page.texts(".assistant .text") == ["Hm"])
    assert page.texts(".bubble") == ["one\ntwo"]
    page.type("", Keys.ESCAPE)
    page.until(lambda: page.one("#send").is_displayed())


def test_reasoning_is_folded_and_goes_back_with_the_conversation(server: Live, page: Browser) -> None:
    script(server, [think("They *greet* me."), Say("Hi!")])
    page.say("Hello")
    fold = page.one(".reasoning")
    assert not page.one(".reasoning .prose").is_displayed()
    fold.find_element(By.TAG_NAME, "summary").click()
    assert page.one(".reasoning .prose").text == "They greet me."
    page.say("Again")
    assert (server.backend.seen[-1].messages or ())[1]["reasoning_content"] == "They *greet* me."


def test_errors_are_shown_and_the_question_can_be_tried_again(server: Live, page: Browser) -> None:
    script(server, [Fail("context_length", "5000 tokens but the context holds 2048")], [Say("Now.")])
    page.say("Hello")
    assert "5000 tokens" in page.one(".error").text
    page.complaints()  # the browser logs every answer that is no success
    page.one(".retry").click()
    page.until(lambda: page.texts(".assistant:not(.live) .text") == ["Now."])
    assert page.texts(".bubble") == ["Hello"]


def test_an_error_in_mid_answer_keeps_the_words_before_it(server: Live, page: Browser) -> None:
    script(server, [Say("Half an"), Fail("transient", "the engine died")], [Say("Fine.")])
    page.say("Hello")
    assert page.one(".assistant .text").text == "Half an"
    assert "the engine died" in page.one(".error").text
    page.say("And now?")
    assert len(server.backend.seen[-1].messages or ()) == 3


def test_warnings_are_shown(server: Live, page: Browser) -> None:
    script(server, [Say("Hi"), End(warnings=("this model has no efforts",))])
    page.say("Hello")
    assert page.texts(".warnings") == ["this model has no efforts"]


def test_a_model_that_loads_is_told_of(server: Live, page: Browser) -> None:
    script(server, [Say("Hi")])
    resident = server.backend.loaded()
    other = OTHER if resident is None or resident.path.stem == MODEL else MODEL
    page.one(f"#model option[value='{other}']").click()
    server.backend.load_seconds = 1.0
    try:
        page.type("Hello", Keys.ENTER)
        page.until(lambda: page.one(".wait").text == f"Loading {other} (50 %)")
        page.until(lambda: page.texts(".assistant:not(.live) .text") == ["Hi"])
        assert not page.one(".wait").is_displayed()
    finally:
        server.backend.load_seconds = 0.0


def test_a_question_without_an_answer_is_not_told_to_the_model(server: Live, page: Browser) -> None:
    script(server, [Fail("internal", "no luck", before_start=True)], [Say("Fine.")])
    page.say("First")
    page.complaints()
    page.say("Second")
    assert server.backend.seen[-1].messages == ({"role": "user", "content": "Second"},)


def test_settings_are_sent_only_where_they_were_chosen(server: Live, page: Browser) -> None:
    script(server, [Say("Hi"), End("length")])
    page.say("Hello")
    assert server.backend.seen[-1].sampling_given == frozenset()
    assert "cut off" in page.one(".figures").text
    page.one("#open-settings").click()
    chosen = {"system": "Be brief.", "temperature": "0", "top_k": "5", "seed": "7", "max_tokens": "30"}
    for name, text in chosen.items():
        page.one(f"[name={name}]").send_keys(text)
    page.one("[name=thinking]").send_keys("Off")
    page.open(page.driver.current_url, fresh=False)
    page.say("Again")
    turn = server.backend.seen[-1]
    assert (turn.messages or ())[0] == {"role": "system", "content": "Be brief."}
    assert (turn.sampling.temperature, turn.sampling.top_k, turn.sampling.seed) == (0.0, 5, 7)
    assert turn.sampling_given == frozenset({"temperature", "top_k", "seed"})
    assert turn.generation.max_tokens == 30
    assert turn.thinking.enabled is False


def test_the_model_is_chosen_and_remembered(server: Live, page: Browser) -> None:
    script(server, [Say("Hi")])
    assert sorted(page.texts("#model option")) == sorted([MODEL, OTHER])
    for name in (OTHER, MODEL):
        page.one(f"#model option[value='{name}']").click()
        page.say("Hello")
        assert server.backend.loads[-1][0].stem == name
    page.open(server.url, fresh=False)
    assert page.one("#model").get_property("value") == MODEL


def test_conversations_are_listed_opened_and_deleted(server: Live, page: Browser) -> None:
    script(server, [Say("Answer")])
    for text in ("First", "Second"):
        page.one("#new-chat").click()
        page.say(text)
    assert page.texts("#chats a") == ["Second", "First"]
    page.driver.find_element(By.LINK_TEXT, "First").click()
    page.until(lambda: page.texts(".bubble") == ["First"])
    remove = page.one("#chats li.open .remove")
    page.run("arguments[0].click(); arguments[0].click()", remove)
    assert page.texts("#chats a") == ["Second"]
    assert page.texts(".bubble") == []
    assert page.one("#empty").is_displayed()


def test_the_token_is_asked_for_and_forgotten_with_the_tab(chromium: Browser) -> None:
    with serving([Say("Hi")], token=TOKEN) as live:
        chromium.driver.get(live.url)
        chromium.until(lambda: chromium.one("#token-dialog").is_displayed())
        chromium.one("#token").send_keys("wrong", Keys.ENTER)
        chromium.until(lambda: chromium.one("#token").get_property("value") == "")
        chromium.until(lambda: chromium.one("#token-dialog").is_displayed())
        chromium.one("#token").send_keys(TOKEN, Keys.ENTER)
        chromium.until(lambda: chromium.one("#model").is_enabled())
        chromium.say("Hello")
        assert chromium.texts(".assistant .text") == ["Hi"]
        kept = chromium.run("return JSON.stringify(localStorage) + document.cookie")
        assert TOKEN not in kept
    chromium.complaints()


def test_the_page_fits_a_phone(server: Live, page: Browser) -> None:
    script(server, [Say("A line.\n\n```\n" + "x" * 300 + "\n```\n\n" + "y" * 300)])
    screen = {"width": 360, "height": 640, "deviceScaleFactor": 1, "mobile": True}
    page.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
    try:
        page.say("Hello")
        assert page.run("return document.documentElement.scrollWidth") <= 360
        assert (
            page.run("const t = document.getElementById('thread'); return t.scrollWidth - t.clientWidth") == 0
        )
        # it slides out of a narrower window
        page.until(lambda: not page.one("#sidebar").is_displayed())
        page.one("#open-sidebar").click()
        page.until(lambda: page.one("#new-chat").is_displayed())
        page.one("#new-chat").click()
        page.until(lambda: not page.one("#sidebar").is_displayed())
    finally:
        page.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_colours_follow_the_system_until_they_are_chosen(page: Browser) -> None:
    def paper() -> str:
        colour: str = page.run("return getComputedStyle(document.body).backgroundColor")
        return colour

    dark = {"features": [{"name": "prefers-color-scheme", "value": "dark"}]}
    page.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", dark)
    followed = paper()
    page.one("#theme").click()
    light = paper()
    page.one("#theme").click()
    assert paper() == followed != light
    page.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
    assert paper() == followed
