"""The page, in a browser: it chats with the real server and shows what that says of itself."""

import json
import re

import pytest
from axe_playwright_python.sync_playwright import Axe

from ca_jax.server.tenants import Tenants
from tests import engine_kit, server_kit
from tests.page_kit import SAID, is_live, say
from tests.server_kit import MODEL, chat, ssd_store, text_of, user

MARKUP = '<img src=x onerror="document.title=1"><b>bold</b>&amp;<script>document.title=1</script>'
CONTRASTS = """() => {
  const parse = (text) => (text.match(/[\\d.]+/g) ?? []).map(Number);
  const light = ([r, g, b]) => [r, g, b].map((v) => v / 255)
    .map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4))
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const found = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement;
    if (!walker.currentNode.data.trim() || !element.checkVisibility()) continue;
    if (element.closest("svg, :disabled, .unseen")) continue;
    let ground = element, colour = [];
    while (ground && !(colour = parse(getComputedStyle(ground).backgroundColor), colour.length === 3)) {
      if (getComputedStyle(ground).backgroundImage !== "none" || colour[3] > 0) break;
      ground = ground.parentElement;
    }
    if (!ground || colour.length !== 3) continue; // Patterns and mixed colours: looked at by eye.
    const [a, b] = [light(parse(getComputedStyle(element).color)), light(colour)].sort((x, y) => y - x);
    found.push([(a + 0.05) / (b + 0.05), walker.currentNode.data]);
  }
  return found;
}"""


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    store = ssd_store(tmp_path_factory.mktemp("ssd"), dram_gib=0.02, ssd_gib=0.1)
    with server_kit.running(store=store) as running:
        yield running


def axe(page):
    """What axe-core finds wrong."""
    found = Axe().run(page).response["violations"]
    return [(each["id"], node["target"], node["failureSummary"]) for each in found for node in each["nodes"]]


def settled(server, page):
    """The server's own account of the page's session, once the page has shown it."""
    page.locator("#turn-phase", has_text="done").wait_for()  # Until then there may be more to save.
    server.engine.wait_for_saves()
    session_id = page.evaluate("decodeURIComponent(location.hash.slice(1))")
    with server.http() as http:
        return http.get("/live/snapshot", params={"session_id": session_id}).json()


def test_a_conversation_by_keyboard_is_the_apis_and_its_second_turn_comes_from_the_cache(server, page):
    first = say(page, "Tell me about tides.", 12)
    second = say(page, "And in harbours?")
    alone = server.client()
    begun = chat(alone, [user("Tell me about tides.")], max_tokens=12)
    more = chat(alone, [user("And in harbours?")], max_tokens=12, extra_body={"session_id": begun.session_id})
    assert [first, second] == [text_of(begun), text_of(more)]
    cached = more.usage.prompt_tokens_details.cached_tokens
    shown = f"{cached} of {more.usage.prompt_tokens}"
    assert cached > 0
    assert shown in page.locator("#messages > .assistant:last-child .about").text_content()
    page.locator("#turn-cached", has_text=shown).wait_for()


def test_the_panels_show_what_the_server_tells(server, page):
    say(page, "What is in the tiers now?", 12)
    say(page, "And now?")
    told = settled(server, page)
    shown_bytes = {
        tier["name"]: page.evaluate("async (n) => (await import('/page/format.js')).bytes(n)", tier["used_bytes"])
        for tier in told["tiers"]
    }
    for tier in told["tiers"]:
        row = page.locator(f"[data-tier={tier['name']}]")
        row.locator(".used", has_text=shown_bytes[tier["name"]]).wait_for()
        assert row.locator(".sessions").text_content().startswith(f"{tier['num_sessions']} session")
        meter = row.get_by_role("meter")
        share = 100 * tier["used_bytes"] / tier["capacity_bytes"]
        assert float(meter.get_attribute("aria-valuenow")) == pytest.approx(share, abs=0.06)
    session = told["session"]
    page.locator("[data-tokens=SSD]", has_text=f"{session['ssd_tokens']} tokens").wait_for()
    assert page.locator("[data-tokens=DRAM]").text_content() == f"{session['dram_tokens']} tokens"
    titles = page.locator("#blocks .map title").all_text_contents()
    assert len(titles) == len(session["blocks"])
    assert titles[0] == f"tokens 0 to 15: {engine_kit.BLOCK_TOKENS} in DRAM, {engine_kit.BLOCK_TOKENS} on SSD"
    for span in session["turn"]["spans"]:
        length = page.evaluate(
            "async (s) => (await import('/page/format.js')).milliseconds(s)", span["end_s"] - span["start_s"]
        )
        assert page.locator(f"[data-span={span['name']}]").text_content().startswith(length)


def test_a_queue_is_drawn_with_its_windows(server, page):
    """The engine holds still while the page is drawn: it is shown a snapshot as the server would send it."""
    waiting = {"session_id": "s", "is_own": True, "num_tokens": 9, "residency": "ssd"}
    windows = {"in_prefetch_window": True, "in_eviction_window": True}
    jobs = [waiting | windows, waiting | windows | {"is_own": False, "session_id": None, "residency": "dram"}]
    jobs += [waiting | windows | {"in_prefetch_window": False, "residency": each} for each in ("pending", "absent")]
    with server.http() as http:
        told = http.get("/live/snapshot").json()
    told["queue"] = {"num_waiting": 4, "waiting": jobs, "prefetch_window_jobs": 2, "eviction_window_jobs": 4}
    told["running"] = [
        {"slot": 1, "session_id": None, "is_own": False, "phase": "decode", "num_tokens": 0},
        {"slot": 2, "session_id": "s", "is_own": True, "phase": "prefill", "num_tokens": 77},
    ]
    events = f"data: {json.dumps(told)}\n\n"
    page.route("**/live?*", lambda route: route.fulfill(body=events, content_type="text/event-stream"))
    page.reload()
    page.locator("#queue .job").nth(3).wait_for()
    assert page.locator("#queue .cells > .job").all_text_contents() == ["S", "D", "…", "\N{EN DASH}"]
    widths = [page.locator(f"#queue .bracket.{name}").bounding_box()["width"] for name in ("prefetch", "eviction")]
    cells = [page.locator("#queue .cells > .job").nth(i).bounding_box() for i in range(4)]
    ends = [cells[last]["x"] + cells[last]["width"] - cells[0]["x"] for last in (1, 3)]
    assert widths == pytest.approx(ends)
    assert "another tenant" in page.locator("#queue .job.foreign").first.get_attribute("title")
    assert page.locator("#tiers .slot").nth(1).text_content() == "decode other"
    assert page.locator("#tiers .slot").nth(2).text_content() == "prefill 77"


def test_escape_stops_an_answer_and_the_conversation_goes_on(server, page, stops_behind):
    page.evaluate("document.getElementById('max-tokens').value = 300")
    before, let_go = server.engine.metrics.cancelled, stops_behind(server.engine, 10)
    page.locator("#message").fill("A long story")
    page.locator("#message").press("Enter")
    page.locator(".typing .text").filter(has_text=re.compile(".")).wait_for()
    page.keyboard.press("Escape")
    page.locator(".assistant .about", has_text="stopped").wait_for()
    let_go.set()
    server_kit.wait_until_idle(server)
    assert server.engine.metrics.cancelled == before + 1
    assert page.locator("#stop").is_hidden()
    assert say(page, "Go on.", 6)
    assert page.locator("#messages > li").count() == 4


def test_what_is_said_is_shown_as_text_never_read_as_html(server, open_page):
    said = [user(MARKUP), {"role": "assistant", "content": MARKUP}, user("more")]
    session_id = chat(server.client(), said, max_tokens=4).session_id
    page = open_page(server.url)
    page.locator(f"[data-session='{session_id}']").click()
    page.locator("#messages > li").nth(3).wait_for()
    assert page.locator("#messages .text").all_text_contents()[:2] == [MARKUP] * 2
    delta = {"choices": [{"index": 0, "delta": {"content": MARKUP}}], "session_id": MARKUP}
    stream = f"data: {json.dumps(delta)}\n\ndata: [DONE]\n\n"
    page.locator("#new").click()
    page.route("**/completions", lambda route: route.fulfill(body=stream, content_type="text/event-stream"))
    assert say(page, MARKUP) == MARKUP
    assert page.locator("main :is(b, script, img)").filter(has_text="bold").count() == 0
    assert page.locator("main :is(script, img)").count() == 0
    assert page.title() == f"ca_jax · {MODEL}"


def test_a_conversation_is_found_on_any_page_of_the_list(server, page):
    with server.client() as client:
        for text in ("Which island?", "Which cape?", "Which bay?"):
            chat(client, [user(text)], 2)
    page.route("**/v1/sessions?*", lambda asked: asked.continue_(url=asked.request.url.replace("limit=100", "limit=1")))
    page.reload()
    page.locator("#sessions li", has_text="Which bay?").wait_for()
    assert page.locator("#sessions li", has_text="Which island?").count() == 0
    page.locator("#find").fill("ISLAND")
    page.locator("#sessions li", has_text="Which island?").wait_for()
    assert page.locator("#sessions li").count() == 1


def test_a_turn_is_asked_again_edited_found_and_deleted(server, page):
    first, second = say(page, "Name a harbour.", 6), say(page, "Name another.", 6)
    session_id = page.evaluate("decodeURIComponent(location.hash.slice(1))")
    page.get_by_role("button", name="Edit").nth(1).click()
    assert page.locator("#message").input_value() == "Name another."
    assert page.locator("#messages > .branch").text_content() == "Branched from Name a harbour."
    page.locator("#message").fill("")
    assert say(page, "Name another of the north.", 6)
    branch_id = page.evaluate("decodeURIComponent(location.hash.slice(1))")
    assert branch_id != session_id
    asked = page.locator("#messages .user .text").all_text_contents()
    assert asked == ["Name a harbour.", "Name another of the north."]
    page.get_by_role("button", name="Again").first.click()
    page.locator("#messages > .assistant:not(.typing)").wait_for()
    assert page.locator("#messages .user").count() == 1
    page.locator("#find").fill("harbour")
    page.locator("#sessions li").nth(2).wait_for()
    assert page.locator("#sessions .about", has_text="branch").count() >= 2
    page.locator("#find").fill("nothing like it")
    assert page.locator("#sessions li").count() == 0
    page.locator("#find").fill("")
    page.locator("#messages > .branch button").click()
    page.locator(f"[data-session='{branch_id}'][aria-current]").wait_for()
    page.locator("#messages > .branch button").click()
    page.locator("#messages .user .text", has_text="Name another.").wait_for()
    shown = page.locator("#messages > .assistant .text").evaluate_all(f"(all) => all.map({SAID})")
    assert shown == [first, second]
    page.on("dialog", lambda dialog: dialog.accept())
    page.locator(f"[data-session='{branch_id}'] + .drop").click()
    page.locator(f"[data-session='{branch_id}']").wait_for(state="detached")
    with server.http() as http:
        assert http.get(f"/v1/sessions/{branch_id}").status_code == 404
        assert http.get(f"/v1/sessions/{session_id}").status_code == 200


def test_a_branch_is_one_in_another_tab_and_after_a_restart(tmp_path, open_page):
    store = ssd_store(tmp_path)
    with server_kit.running(store=store) as server:
        page = open_page(server.url)
        is_live(page)
        page.locator("#settings summary").click()
        page.locator("#system").fill("Be brief.")
        say(page, "Name a harbour.", 6)
        say(page, "Name another.", 6)
        source = page.url.partition("#")[2]
        addresses = []
        for number, at in ((1, 3), (0, 1)):  # Behind a turn, and behind the system message alone.
            page.get_by_role("button", name="Edit").nth(number).click()
            page.locator("#message").fill("")
            say(page, "Name one of the north.", 6)
            addresses.append((page.url.partition("#")[2], at))
            page.locator("#messages > .branch button").click()
            page.locator("#messages .user .text", has_text="Name another.").wait_for()
        server.engine.wait_for_saves()
        page.close()
    with server_kit.running(store=store) as server:
        for session_id, at in addresses:
            with server.http() as http:
                shown = http.get(f"/v1/sessions/{session_id}").json()
            assert shown["forked_from"] == {"id": source, "at": at}
            page = open_page(f"{server.url}/#{session_id}")  # A tab that has seen nothing.
            page.locator("#messages > .branch button").wait_for()
            roles = page.locator("#messages > li").evaluate_all("(all) => all.map((each) => each.className)")
            assert roles.index("branch") == at
            assert say(page, "And its depth?", 6)
            page.locator(f"[data-session='{session_id}'] .about", has_text="branch").wait_for()  # It is open by now.
            assert "0 of" not in page.locator("#messages > .assistant:last-child .about").text_content()
            page.locator("#messages > .branch button").click()
            page.locator("#messages .user .text", has_text="Name another.").wait_for()
            page.close()


def test_a_branch_of_a_conversation_that_is_gone_begins_with_what_was_said(server, open_page):
    page = open_page(server.url, may_complain=["404"])
    is_live(page)
    say(page, "Name a harbour.", 6)
    say(page, "Name another.", 6)
    with server.http() as http:
        assert http.delete(f"/v1/sessions/{page.url.partition('#')[2]}").status_code == 200
    page.get_by_role("button", name="Edit").nth(1).click()
    page.locator("#message").fill("")
    assert say(page, "Name one of the north.", 6)
    with server.http() as http:
        shown = http.get(f"/v1/sessions/{page.url.partition('#')[2]}").json()
    said = [message["content"] for message in shown["messages"] if message["role"] == "user"]
    assert said == ["Name a harbour.", "Name one of the north."]


def test_documents_stand_in_front_of_a_question(server, page):
    page.locator("#attached summary").click()
    page.locator("#attach").click()
    page.keyboard.insert_text("The harbour opened in 1848. " * 3)
    assert say(page, "When did it open?", 6)
    assert page.locator("#messages .document div").text_content() == "The harbour opened in 1848. " * 3
    assert page.locator("#documents li").count() == 0
    session_id = page.evaluate("decodeURIComponent(location.hash.slice(1))")
    with server.http() as http:
        messages = http.get(f"/v1/sessions/{session_id}").json()["messages"]
    assert messages[0]["context"] == ["The harbour opened in 1848. " * 3]


def test_the_last_hour_is_drawn_as_the_server_kept_it(server, page):
    for number in range(2):
        say(page, f"Turn {number} of the hour.", 6)
        server.state.service.history.sample(server.engine)
    with server.http() as http:
        told = http.get("/live/history").json()
    assert len(told["samples"]) >= 3  # One as it began.
    page.keyboard.press("Escape")
    page.evaluate("document.activeElement.blur()")
    page.keyboard.press("h")
    page.locator("#charts figure").nth(3).wait_for()
    assert page.locator("#main").is_hidden()
    running = page.locator("#charts path").nth(3).get_attribute("d")
    assert len(re.findall("[ML]", running)) == len(told["samples"])
    generated = page.locator("#charts path").nth(1).get_attribute("d")  # A step for each time between two samples.
    assert len(re.findall("[ML]", generated)) == 2 * (len(told["samples"]) - 1)
    shares = ", ".join(
        f"{name} {100 * used:.1f}%"
        for name, used in zip(("DRAM", "SSD"), told["samples"][-1]["used_shares"].values(), strict=True)
    )
    assert f"Tiers taken now: {shares}" in page.locator("#charts figcaption").nth(3).text_content()
    assert page.locator("#slowest tr").count() == len(told["slowest"])
    page.keyboard.press("h")
    page.locator("#main").wait_for()


def test_the_last_hour_of_a_young_server_fills_the_charts(server, page):
    with server.http() as http:
        told = http.get("/live/history").json()
    first = told["samples"][0]
    for oldest_s, named in ((124.0, "2 min ago"), (42.0, "42 s ago"), (3598.0, "an hour ago")):
        samples = [{**first, "age_s": age_s} for age_s in (oldest_s, oldest_s / 2, 0.0)]
        body = json.dumps({**told, "samples": samples})
        page.route("**/live/history", lambda route, _, body=body: route.fulfill(body=body))
        page.locator("#operate-open").click()
        page.locator("#charts .hours", has_text=named).first.wait_for()
        running = page.locator("#charts path").nth(3).get_attribute("d")
        assert re.findall(r"[ML]([\d.]+) ", running) == ["0.0", "280.0", "560.0"]
        page.locator("#operate-open").click()


def test_a_line_is_broken_where_no_prompt_was_sent(server, page):
    with server.http() as http:
        told = http.get("/live/history").json()
    first = told["samples"][0]
    prompts = (0, 10, 10, 30)  # None came between the second and the third.
    samples = [
        {**first, "age_s": 90.0 - 30 * i, "done": {**first["done"], "prompt_tokens": num, "cached_tokens": num // 2}}
        for i, num in enumerate(prompts)
    ]
    body = json.dumps({**told, "samples": samples})
    page.route("**/live/history", lambda route: route.fulfill(body=body))
    page.locator("#operate-open").click()
    page.locator("#charts .hours", has_text="2 min ago").first.wait_for()
    cached = page.locator("#charts path").nth(0).get_attribute("d")
    assert re.findall(r"([ML])([\d.]+) ", cached) == [("M", "0.0"), ("L", "186.7"), ("M", "373.3"), ("L", "560.0")]


def test_an_error_of_the_last_hour_is_shown_there(server, open_page):
    page = open_page(server.url, may_complain=["503"])
    is_live(page)
    error = {"error": {"message": "the server is not ready", "type": "server_error", "param": None, "code": None}}
    page.route("**/live/history", lambda route: route.fulfill(status=503, body=json.dumps(error)))
    page.locator("#operate-open").click()
    page.get_by_role("alert").filter(has_text="The server is not ready").wait_for()
    page.locator("#operate-open").click()
    page.locator("#main").wait_for()
    assert page.get_by_role("alert").count() == 0
    page.unroute("**/live/history")
    page.locator("#operate-open").click()
    page.locator("#charts figure").first.wait_for()
    assert page.get_by_role("alert").count() == 0


def test_keys_and_the_theme(page):
    page.evaluate("document.activeElement.blur()")
    page.keyboard.press("?")
    page.locator("#help-dialog[open]").wait_for()
    page.keyboard.press("Escape")
    for pressed, focused in (("/", "find"), ("m", "message"), ("n", "message")):
        page.evaluate("document.activeElement.blur()")
        page.keyboard.press(pressed)
        page.wait_for_function(f"document.activeElement.id === '{focused}'")
    grounds = set()
    for theme in ("light", "dark", "system"):
        page.locator("#theme").click()
        assert page.locator("#theme").text_content() == f"Theme: {theme}"
        grounds.add(page.evaluate("getComputedStyle(document.body).backgroundColor"))
    assert len(grounds) == 2


def test_a_chat_that_is_gone_on_with_after_a_reload_or_switched_to(server, page):
    first = say(page, "Remember the number four.", 6)
    page.reload()
    is_live(page)
    page.locator("#messages .user .text", has_text="Remember the number four.").wait_for()
    page.locator("#new").press("Enter")
    assert page.locator("#messages > li").count() == 0
    page.locator("#settings summary").click()
    page.locator("#system").fill("Be brief.")
    say(page, "Another chat.", 6)
    assert page.locator("#messages .system .text").text_content() == "Be brief."
    page.locator("#sessions button", has_text="Remember the number").first.press("Enter")
    page.locator("#messages .user .text", has_text="Remember the number four.").wait_for()
    assert page.locator("#messages .assistant .text").evaluate(SAID) == first


def test_an_address_that_names_nothing_readable_begins_a_chat_and_stays_live(server, open_page):
    page = open_page(f"{server.url}/#%E0%A4%A")
    is_live(page)
    page.locator("#tiers .slot").first.wait_for()
    assert page.locator("#messages > li").count() == 0
    assert say(page, "Hello", 4)


def test_a_tab_is_told_that_another_went_on_and_shows_it(server, open_page):
    first = open_page(server.url, may_complain=["409"])
    is_live(first)
    say(first, "Begin.", 4)
    second = open_page(first.url)
    second.locator("#messages > .assistant").wait_for()
    say(second, "From the second tab.", 4)
    first.locator("#message").fill("From the first tab.")
    first.locator("#message").press("Enter")
    first.get_by_role("alert").filter(has_text="went on elsewhere").wait_for()
    texts = first.locator("#messages .user .text").all_text_contents()
    assert texts == ["Begin.", "From the second tab."]
    assert first.locator("#message").input_value() == "From the first tab."
    assert say(first, "", 4)
    assert first.locator("#messages > li").count() == 6


def test_changes_that_come_together_ask_for_one_list(server, page):
    """The server counts other sessions in each snapshot; the page may not ask for the list each time."""
    with server.http() as http:
        told = http.get("/live/snapshot").json()
    snapshots = []
    for number in range(40):
        tiers = [{**tier, "num_sessions": number} for tier in told["tiers"]]
        snapshots.append(f"data: {json.dumps({**told, 'tiers': tiers})}\n\n")
    asked = []
    page.on("request", lambda request: asked.append(request.url) if "/v1/sessions?" in request.url else None)
    events = "".join(snapshots)
    page.route("**/live?*", lambda route: route.fulfill(body=events, content_type="text/event-stream"))
    page.reload()
    page.locator("[data-tier=dram] .sessions", has_text="39 sessions").wait_for()
    page.locator("#sessions li").first.wait_for()
    assert len(asked) <= 2


def test_the_page_says_how_many_tokens_left(server, page):
    for number in range(4):
        say(page, f"{number} " + "tell me more of it " * 6, 6)
    about = page.locator("#messages > .assistant:last-child .about")
    assert re.search(r"\d+ tokens left the window", about.text_content())
    cuts = page.locator("#messages > .cut").all_text_contents()
    assert cuts
    assert all(re.fullmatch(r"The context was full: \d+ tokens left it\. The rest stayed .*\.", cut) for cut in cuts)


def test_a_server_that_is_busy_says_when_to_come_again(server, open_page):
    page = open_page(server.url, may_complain=["429"])
    is_live(page)
    error = {"error": {"message": "the server is busy", "type": "rate_limit_error", "param": None, "code": None}}
    page.route(
        "**/completions", lambda route: route.fulfill(status=429, headers={"Retry-After": "7"}, body=json.dumps(error))
    )
    page.locator("#message").fill("Anybody?")
    page.locator("#message").press("Enter")
    page.get_by_role("alert").filter(has_text="The server is busy. Try again in 7 s.").wait_for()
    assert page.locator("#message").input_value() == "Anybody?"  # To be sent again.
    assert page.locator("#messages > li").count() == 0
    page.unroute("**/completions")
    assert say(page, "", 4)
    assert page.get_by_role("alert").count() == 0


def test_a_server_that_asks_for_keys_gets_one(tmp_path, open_page):
    keys = tmp_path / "keys.toml"
    keys.write_text('[ann]\nkeys = ["a long secret"]\n')
    with server_kit.running(Tenants.read(keys)) as server:
        page = open_page(server.url, may_complain=["401"])
        page.locator("#key-dialog[open]").wait_for()
        page.keyboard.type("a wrong one")
        page.keyboard.press("Enter")
        page.locator("#key-why", has_text="does not know").wait_for()
        page.locator("#key").fill("a long secret")
        page.keyboard.press("Enter")
        is_live(page)
        assert say(page, "Hello", 4)
        page.close()  # Before its server, of whose end it would complain.


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_is_readable_in_both_schemes_and_fits_a_phone(server, open_page, scheme):
    page = open_page(server.url, color_scheme=scheme, reduced_motion="reduce")
    is_live(page)
    say(page, "Some text to read", 6)
    page.locator("#turn .track").first.wait_for()
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, ground[4:-1].split(","))) > 384) == (scheme == "light")
    contrasts = page.evaluate(CONTRASTS)
    assert len(contrasts) > 40
    assert [(ratio, text) for ratio, text in contrasts if ratio < 4.5] == []  # WCAG AA.
    assert page.evaluate("document.getAnimations().length") == 0
    assert axe(page) == []
    page.locator("#operate-open").click()
    page.locator("#slowest tr").first.wait_for()
    assert axe(page) == []
    page.set_viewport_size({"width": 360, "height": 740})
    assert axe(page) == []
    assert page.evaluate("document.documentElement.scrollWidth") == 360
    page.locator("#operate-open").click()
    assert axe(page) == []
    assert page.evaluate("document.documentElement.scrollWidth") == 360
    assert page.locator("aside").bounding_box()["y"] > page.locator(".chat").bounding_box()["y"]


def test_the_tab_key_reaches_everything_and_shows_where_it_is(server, page):
    say(page, "Something to show", 6)
    settled(server, page)  # What changes meanwhile is not in the same place twice.
    page.locator("#turn .track").first.wait_for()
    page.locator("#settings summary").click()
    name_of = "(each) => each.id || each.dataset.session || each.name || each.textContent.trim()"
    wanted = page.evaluate(
        f"""() => [...document.querySelectorAll("a[href], button, input, textarea, summary, [tabindex='0']")]
          .filter((each) => each.checkVisibility() && !each.disabled).map({name_of})"""
    )
    page.evaluate("document.activeElement.blur()")
    reached, unmarked = set(), set()
    for _ in range(len(wanted) + 2):
        page.keyboard.press("Tab")
        stop, outline = page.evaluate(
            f"""() => {{
              const at = document.activeElement;
              const shown = at.type === "radio" ? at.nextElementSibling : at;
              return [({name_of})(at), parseFloat(getComputedStyle(shown).outlineWidth)];
            }}"""
        )
        reached.add(stop)
        unmarked |= {stop} if outline < 2 and stop in wanted else set()
    assert set(wanted) - reached == set()
    assert unmarked == set()
    assert len(wanted) >= 10
