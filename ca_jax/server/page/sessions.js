// The list of the tenant's conversations. Not here: the one that is shown.

import { ask, askJson } from "./api.js";
import { byId, make, painter } from "./dom.js";
import { many, shortName } from "./format.js";

const MOST = 100;
const PAUSE_MS = 5000; // Between two lists: whatever changes meanwhile is in the next one.
const TITLES = "ca_jax.titles";

export class Sessions {
  #current = null;
  #listed = [];
  #hasMore = false;
  #on;
  #askedMs = -Infinity;
  #timer = null;
  #titles = JSON.parse(sessionStorage.getItem(TITLES) ?? "{}");
  #list = painter(byId("sessions"), (...shown) => this.#items(...shown));

  // on: { open(id), error(error), dropped(id) }
  constructor(on) {
    this.#on = on;
    byId("find").addEventListener("input", () => {
      this.#paint();
      if (this.#hasMore) this.#refresh().catch(this.#on.error);
    });
  }

  set current(sessionId) {
    this.#current = sessionId;
    this.#paint();
  }

  // Remembers what a conversation is about, by what was said first in it.
  name(sessionId, title) {
    if (!sessionId || !title || this.#titles[sessionId] === title) return;
    this.#titles[sessionId] = title.slice(0, 80);
    sessionStorage.setItem(TITLES, JSON.stringify(this.#titles));
    this.#paint();
  }

  // Has the list asked for: at once, or when the last one is old enough.
  refreshSoon() {
    this.#timer ??= setTimeout(
      async () => {
        await this.#refresh().catch(this.#on.error);
        this.#askedMs = performance.now();
        this.#timer = null;
      },
      Math.max(0, this.#askedMs + PAUSE_MS - performance.now()),
    );
  }

  async #refresh() {
    const data = [];
    let page;
    do {
      const after = page ? `&after=${encodeURIComponent(page.last_id)}` : "";
      page = await askJson(`/v1/sessions?limit=${MOST}${after}`);
      data.push(...page.data);
    } while (page.has_more && byId("find").value.trim()); // What is looked for may be on any page.
    this.#hasMore = page.has_more;
    this.#listed = data.filter((session) => session.num_tokens || session.id === this.#current);
    this.#paint();
  }

  async #drop(sessionId, title) {
    if (!confirm(`Delete “${title}” and its KV?`)) return;
    try {
      await ask(`/v1/sessions/${encodeURIComponent(sessionId)}`, { method: "DELETE" });
    } catch (error) {
      this.#on.error(error);
      return;
    }
    this.#listed = this.#listed.filter((session) => session.id !== sessionId);
    this.#paint();
    this.#on.dropped(sessionId);
  }

  #paint() {
    const focused = document.activeElement?.dataset?.session;
    const named = this.#listed.map((session) => ({ ...session, title: this.#titles[session.id] ?? session.title }));
    const wanted = byId("find").value.trim().toLowerCase();
    const found = named.filter((session) => `${session.title ?? ""} ${session.id}`.toLowerCase().includes(wanted));
    this.#list(found, this.#current);
    if (focused)
      byId("sessions")
        .querySelector(`[data-session="${CSS.escape(focused)}"]`)
        ?.focus();
  }

  #items(listed, current) {
    return listed.map((session) => {
      const stored = session.stored;
      const where = stored
        ? [stored.tier === "dram" && "DRAM", stored.ssd_tokens && "SSD"].filter(Boolean).join(" + ")
        : "not stored";
      const title = session.title || shortName(session.id);
      const button = make(
        "button",
        {
          type: "button",
          title: session.id,
          "aria-current": session.id === current && "true",
          "data-session": session.id,
        },
        make("span", {}, title),
        make(
          "span",
          { className: "about" },
          `${session.forked_from ? "branch · " : ""}${many(session.num_tokens, "token")} · ${where || stored.tier}`,
        ),
      );
      button.addEventListener("click", () => this.#on.open(session.id));
      const drop = make("button", { type: "button", className: "drop", "aria-label": `Delete ${title}` }, "×");
      drop.addEventListener("click", () => this.#drop(session.id, title));
      return make("li", {}, button, drop);
    });
  }
}
