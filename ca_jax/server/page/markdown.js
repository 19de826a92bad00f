// An answer's Markdown as elements. marked reads it; what it finds is made of elements and text here, so that nothing a
// model says is ever HTML: its tags are shown as they are written, and links go where they say or nowhere.

import { make } from "./dom.js";
import { lexer } from "./marked.esm.js";

const LINKS = /^(https?:|mailto:)/i;

// Shows a text that grows in an element: what has not changed since stays, so that a long answer is not made anew.
export class Markdown {
  #element;
  #blocks = []; // { raw, node }

  constructor(element) {
    this.#element = element;
  }

  show(text) {
    this.#element.said = text;
    const tokens = lexer(text, { gfm: true, breaks: true }).filter((token) => token.type !== "space");
    let same = 0;
    while (same < this.#blocks.length && same < tokens.length && this.#blocks[same].raw === tokens[same].raw) same++;
    for (const { node } of this.#blocks.splice(same)) node.remove();
    for (const token of tokens.slice(same)) {
      const node = block(token);
      this.#blocks.push({ raw: token.raw, node });
      this.#element.append(node);
    }
  }
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
