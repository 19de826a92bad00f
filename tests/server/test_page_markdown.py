"""Answers as Markdown, in a browser: what is shown, and that a text that comes in pieces ends as if it came at once."""

import json
import random

import pytest

from tests.page_kit import is_live, say

MARKDOWN = """# Tides

They are **strong** and *slow*, `x < 1`, ~~old~~, [here](https://example.org/a) and [not here](javascript:alert(1)).

- one
- two

```py
print("<b>")
```

| a | b |
|---|---|
| 1 | 2 |

> said <i>so</i>
"""


def test_an_answer_s_markdown_is_shown_and_what_is_not_markdown_stays_text(server, open_page):
    page = open_page(server.url, permissions=["clipboard-read", "clipboard-write"])
    is_live(page)
    deltas = [{"choices": [{"index": 0, "delta": {"content": each}}], "session_id": "s"} for each in MARKDOWN]
    stream = "".join(f"data: {json.dumps(each)}\n\n" for each in deltas) + "data: [DONE]\n\n"
    page.route("**/completions", lambda route: route.fulfill(body=stream, content_type="text/event-stream"))
    assert say(page, "What are tides?") == MARKDOWN  # It came a character at a time.
    answer = page.locator("#messages > .assistant .text")
    found = {
        tag: answer.locator(tag).all_text_contents() for tag in ("strong", "em", "del", "li", "pre", "th", "td", "i")
    }
    assert found == {
        **{"strong": ["strong"], "em": ["slow"], "del": ["old"], "li": ["one", "two"], "pre": ['print("<b>")']},
        **{"th": ["a", "b"], "td": ["1", "2"], "i": []},
    }
    assert answer.get_by_role("heading").text_content() == "Tides"
    assert answer.locator("blockquote").text_content() == "said <i>so</i>"
    assert answer.locator("a").evaluate_all("(all) => all.map((each) => [each.href, each.rel])") == [
        ["https://example.org/a", "noopener noreferrer"]
    ]
    assert "[not here](javascript:alert(1))" in answer.text_content()
    for name, wanted in (("Copy code", 'print("<b>")'), ("Copy answer", MARKDOWN)):
        page.get_by_role("button", name=name).click()
        assert page.evaluate("navigator.clipboard.readText()") == wanted


PARTS = [
    *(
        "word ",
        "**b**",
        "*",
        "`x`",
        "\n",
        "\n",
        "\n\n",
        "\n\n",
        "  ",
        "    ",
        "\t",
        "é",
        "~~x~~",
        "\\",
        "&amp;",
        "  \n",
        "\r\n",
    ),
    *(
        "- ",
        "* ",
        "+ ",
        "1. ",
        "2) ",
        "- [ ] t\n",
        "- a\n- b\n",
        "- a\n\n  more\n\n",
        "> ",
        "> q\n> r\n",
        "# h\n",
        "---",
        "===",
    ),
    *(
        "```",
        "```py\nx\n\ny\n```\n",
        "~~~",
        "| a | b |\n|---|---|\n",
        "| 1 | 2 |\n",
        "|",
        "http://x.y ",
        "[a](http://x.y)",
    ),
    *("<b>", "</b>", "<div>\n", "<!--", "-->", "]", "[", '"'),
]
"""What texts of random Markdown are made of."""
FAR_REACHING = [
    "[a]",
    "[a]: http://q.r\n",
    "\n\n[b]: <http://s.t> 'u'\n\n",
    "[c][b] ",
    "<pre>",
    "</pre>",
    "<a href=x>",
    "</a>",
]
"""Parts by which a later block changes an earlier one, or the other way round."""
BLOCKS = MARKDOWN + "\n1. x\n2. y\n\n   more of it\n\n    print(1)\n\n    print(2)\n\n"
STREAMED = """async (text) => {
  const { Markdown } = await import("/page/markdown.js");
  const { Lexer } = await import("/page/marked.esm.js");
  const [piecewise, once] = [0, 1].map(() => document.createElement("div"));
  const lex = Lexer.prototype.lex;
  let numRead = 0;
  Lexer.prototype.lex = function (read) {
    numRead += read.length;
    return lex.call(this, read);
  };
  try {
    const markdown = new Markdown(piecewise);
    for (let end = 1; end <= text.length; end++) markdown.grow(text.slice(0, end));
    markdown.show(text);
    const numStreamed = numRead;
    new Markdown(once).show(text);
    return [piecewise.innerHTML, once.innerHTML, numStreamed, numRead - numStreamed];
  } finally {
    Lexer.prototype.lex = lex;
  }
}"""
"""Shows a text a character at a time, and at once; counts what is given to the lexer."""


def random_text(seed, parts):
    draw = random.Random(seed)
    return "".join(draw.choice(parts) for _ in range(draw.randrange(10, 120)))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("parts", [PARTS, PARTS + FAR_REACHING], ids=["near", "far-reaching"])
def test_markdown_that_comes_a_character_at_a_time_ends_as_if_it_were_read_once(page, parts, seed):
    for number in range(25):
        text = random_text(1000 * seed + number, parts)
        streamed, once, num_streamed, num_once = page.evaluate(STREAMED, text)
        assert streamed == once, text
        assert num_once == len(text.replace("\r\n", "\n"))
        assert num_streamed <= 258 * len(text)


def test_what_is_read_of_markdown_that_grows_is_linear_in_it(page):
    read = {}
    for times in (1, 8):
        streamed, once, num_streamed, _ = page.evaluate(STREAMED, BLOCKS * times)
        assert streamed == once
        read[times] = num_streamed / len(BLOCKS * times)
    assert read[8] < 1.5 * read[1]


@pytest.mark.parametrize("text", ["- one of **them**\n" * 300, "a sentence of it. " * 300, "```\n" + "x = 1\n" * 900])
def test_one_long_block_is_read_at_most_so_often(page, text):
    streamed, once, num_streamed, _ = page.evaluate(STREAMED, text)
    assert streamed == once
    assert num_streamed <= 258 * len(text)


def test_an_answer_is_drawn_at_most_once_a_frame(page):
    deltas = [{"choices": [{"index": 0, "delta": {"content": each}}], "session_id": "s"} for each in BLOCKS * 4]
    stream = "".join(f"data: {json.dumps(each)}\n\n" for each in deltas) + "data: [DONE]\n\n"
    page.route("**/completions", lambda route: route.fulfill(body=stream, content_type="text/event-stream"))
    page.evaluate(
        """async () => {
          const { Lexer } = await import("/page/marked.esm.js");
          const lex = Lexer.prototype.lex;
          window.counted = { frames: 0, drawn: 0 };
          Lexer.prototype.lex = function (read) {
            window.counted.drawn++;
            return lex.call(this, read);
          };
          const frame = () => requestAnimationFrame(() => (window.counted.frames++, frame()));
          frame();
        }"""
    )
    assert say(page, "What are tides?") == BLOCKS * 4
    counted = page.evaluate("window.counted")
    assert 0 < counted["drawn"] <= counted["frames"] + 2  # The first, and the last, which waits for no frame.
