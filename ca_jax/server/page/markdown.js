// An answer's Markdown as elements. marked reads it; what it finds is made of elements and text here, so that nothing a
// model says is ever HTML: its tags are shown as they are written, and links go where they say or nowhere.

import { make } from "./dom.js";
import { Lexer } from "./marked.esm.js";

const LINKS = /^(https?:|mailto:)/i;
const OPTIONS = { gfm: true, breaks: true };
const FAR_REACHING = /\]:|<(a|pre|code|kbd|script)[\s>]/i; // Definitions of links and open tags change blocks far away.

const LEAST_GROWTH = 1 / 256; // Of what is read again: so that it is no more than 257 times the text, in one long list too.

// Shows a text that grows in an element. Only what may still change is read again: all from the last block on that stands
// behind an empty line, or is a heading, as far as its first line is complete. No later text changes blocks before that
// one: it cannot be part of a list or of code before it any more.
export class Markdown {
  #element;
  #settled = 0; // Characters that are not read again.
  #shown = 0; // Characters that were read at all.
  #links = {}; // Defined in them.
  #blocks = []; // { read, node } of the others.

  constructor(element) {
    this.#element = element;
  }

  // Shows a text that is complete, as reading it at once gives it.
  show(text) {
    if (FAR_REACHING.test(text)) {
      this.#element.replaceChildren();
      [this.#settled, this.#links, this.#blocks] = [0, {}, []];
    }
    this.#read(text);
  }

  // Shows a text that begins with the one that was shown last, once it has grown enough.
  grow(text) {
    this.#element.said = text;
    if (text.length - this.#shown >= LEAST_GROWTH * (this.#shown - this.#settled)) this.#read(text);
  }

  #read(text) {
    this.#element.said = text;
    this.#shown = text.length;
    const rest = text.replace(/\r\n?/g, "\n").slice(this.#settled);
    const tokens = lexed(rest, this.#links);
    this.#draw(tokens.filter((token) => token.type !== "space"));
    this.#settle(tokens, rest);
  }

  #draw(tokens) {
    const read = tokens.map((token) => JSON.stringify(token)); // What is behind a block may change it, not its text.
    let same = 0;
    while (same < this.#blocks.length && this.#blocks[same].read === read[same]) same++;
    for (const { node } of this.#blocks.splice(same)) node.remove();
    for (const [i, token] of tokens.slice(same).entries()) {
      const node = block(token);
      this.#blocks.push({ read: read[same + i], node });
      this.#element.append(node);
    }
  }

  #settle(tokens, rest) {
    let [at, settled, numTokens] = [0, 0, 0];
    tokens.forEach((token, i) => {
      const begins = isBehindEmptyLine(rest, at) || (token.type === "heading" && /^ *#/.test(token.raw));
      if (begins && isFullLine(rest, at)) [settled, numTokens] = [at, i];
      at += token.raw.length;
    });
    if (at !== rest.length) return;
    const done = tokens.slice(0, numTokens);
    for (const { tag, href, title } of done.filter((token) => token.type === "def")) this.#links[tag] ??= { href, title };
    this.#blocks.splice(0, done.filter((token) => token.type !== "space").length);
    this.#settled += settled;
  }
}

function lexed(text, links) {
  const lexing = new Lexer(OPTIONS);
  Object.assign(lexing.tokens.links, links);
  try {
    return lexing.lex(text);
  } catch {
    return [{ type: "text", raw: text, text }]; // marked breaks on some nested lists and quotes.
  }
}

function isBehindEmptyLine(text, at) {
  return at > 1 && /^[ \t]*\n$/.test(text.slice(text.lastIndexOf("\n", at - 2) + 1, at));
}

function isFullLine(text, at) {
  const end = text.indexOf("\n", at);
  return end > at && text.slice(at, end).trim() !== "";
}

// A button that copies a text.
export function copier(what, text) {
  const button = make("button", { type: "button", className: "quiet copy", "aria-label": `Copy ${what}` }, "Copy");
  button.addEventListener("click", async () => {
    await copy(text());
    button.textContent = "Copied";
    setTimeout(() => (button.textContent = "Copy"), 1500);
  });
  return button;
}

async function copy(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  const box = make("textarea", { className: "unseen" }); // Over plain HTTP there is no other way.
  box.value = text;
  document.body.append(box);
  box.select();
  document.execCommand("copy");
  box.remove();
}

function block(token) {
  switch (token.type) {
    case "heading":
      return make("p", { className: "heading", role: "heading", "aria-level": Math.min(token.depth + 2, 6) }, ...inline(token.tokens));
    case "code":
      return make(
        "figure",
        { className: "code" },
        make("figcaption", {}, token.lang || "code", copier("code", () => token.text)),
        make("pre", { tabindex: 0 }, make("code", {}, token.text)),
      );
    case "blockquote":
      return make("blockquote", {}, ...token.tokens.filter((each) => each.type !== "space").map(block));
    case "list":
      return make(token.ordered ? "ol" : "ul", { start: token.ordered && token.start }, ...token.items.map(item));
    case "table":
      return make(
        "div",
        { className: "wide", tabindex: 0, role: "group", "aria-label": "Table" },
        make("table", {}, row("th", token.header), ...token.rows.map((cells) => row("td", cells))),
      );
    case "hr":
      return make("hr");
    case "paragraph":
    case "text":
      return make("p", {}, ...inline(token.tokens ?? [token]));
    default: // HTML among them.
      return make("p", {}, token.raw.replace(/\n+$/, ""));
  }
}

function item(token) {
  const mark = token.task ? [token.checked ? "☑ " : "☐ "] : [];
  const parts = token.tokens.filter((each) => each.type !== "space" && each.type !== "checkbox");
  return make("li", {}, ...mark, ...parts.flatMap((each) => (each.type === "text" ? inline(each.tokens ?? [each]) : [block(each)])));
}

function row(tag, cells) {
  return make("tr", {}, ...cells.map((cell) => make(tag, {}, ...inline(cell.tokens))));
}

function inline(tokens) {
  return tokens.flatMap((token) => {
    switch (token.type) {
      case "strong":
      case "em":
      case "del":
        return [make(token.type, {}, ...inline(token.tokens))];
      case "codespan":
        return [make("code", {}, token.text)];
      case "br":
        return [make("br")];
      case "link":
        if (!LINKS.test(token.href)) return [token.raw];
        return [make("a", { href: token.href, rel: "noopener noreferrer", target: "_blank" }, ...inline(token.tokens))];
      case "escape":
        return [token.text];
      default: // Images and tags too: as they are written.
        return token.tokens ? inline(token.tokens) : [token.raw];
    }
  });
}
