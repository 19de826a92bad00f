// One conversation at a time: what is shown of it, what is sent, the answer as it comes. Not here: the store's panels.

import { Failure, ask, askJson, events } from "./api.js";
import { byId, make } from "./dom.js";
import { TIERS, many, milliseconds, shortName } from "./format.js";
import { Markdown, copier } from "./markdown.js";

const NAMES = { user: "You", assistant: "Model", system: "System" };
const BUSY_TRIES = 10; // While a turn that was stopped still ends.
const BUSY_PAUSE_MS = 150;
const SPOKEN = /[.!?:\n]\s*$/; // Readers of the screen are told whole sentences.

export class Chat {
  sessionId = null;
  #model = null;
  #state = null; // Where the session stands as this page knows it; null where it does not.
  #messages = []; // What was said, in full: what a session that is gone is begun anew with.
  #asking = null; // The AbortController of the answer that comes.
  #frame = null; // In which that will be drawn.
  #branch = null; // Where this conversation left another: { id, at }, its name and the messages that both have.
  #fork = null; // While the server was not asked for it yet: { id, behind }, how many messages of that are left out.
  #on;

  // on: { session(id), ended(), unauthorized() }
  constructor(on) {
    this.#on = on;
    byId("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this.send();
    });
    byId("message").addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      this.send();
    });
    document.addEventListener("keydown", (event) => {
      if (event.key === "Escape" && !document.querySelector("dialog[open]")) this.stop();
    });
    byId("stop").addEventListener("click", () => this.stop());
    byId("attach").addEventListener("click", () => {
      byId("documents").append(documentBox(""));
      byId("documents").querySelector("li:last-child textarea").focus();
    });
  }

  set model(name) {
    this.#model = name;
  }

  get title() {
    return this.#messages.find((message) => message.role === "user")?.content ?? "";
  }

  // Shows a conversation of the server, or none: a new one.
  async open(sessionId) {
    this.stop();
    this.#fail(null);
    const shown = sessionId ? await askJson(`/v1/sessions/${encodeURIComponent(sessionId)}`) : null;
    this.sessionId = sessionId;
    this.#state = shown?.session_state || null;
    this.#messages = shown?.messages ?? [];
    this.#branch = shown?.forked_from ?? null;
    this.#fork = null;
    this.#showAll();
    byId("system").disabled = sessionId !== null;
    this.#scroll(true);
    this.#on.session(sessionId);
  }

  #showAll() {
    byId("messages").replaceChildren(...this.#messages.map((message, at) => this.#shown(message, at).item));
    this.#markBranch();
    byId("empty").hidden = this.#messages.length > 0;
  }

  // A message with what can be done with it: what is edited or asked again begins a branch, the rest stays as it is.
  #shown(message, at) {
    const shown = shownMessage(message);
    const button = (text, does) => {
      const made = make("button", { type: "button", className: "quiet" }, text);
      made.addEventListener("click", does);
      shown.actions.append(made);
    };
    if (message.role === "user") button("Edit", () => this.#edit(at));
    if (message.role === "assistant") {
      shown.actions.append(copier("answer", () => shown.said));
      button("Again", () => this.#again(at));
    }
    return shown;
  }

  // Takes the conversation back to before a message, as one of its own.
  #leave(at) {
    const id = this.sessionId ?? this.#fork?.id;
    const behind = this.#messages.length - at + (this.sessionId ? 0 : (this.#fork?.behind ?? 0));
    [this.#branch, this.#fork] = id ? [{ id, at }, { id, behind }] : [null, null];
    this.sessionId = this.#state = null;
    this.#messages = this.#messages.slice(0, at);
    this.#showAll();
    this.#on.session(null);
  }

  #edit(at) {
    if (this.#asking) return;
    const { content, context = [] } = this.#messages[at];
    this.#leave(at);
    byId("message").value = content;
    this.documents = context.filter((chunk) => typeof chunk === "string");
    byId("message").focus();
  }

  // The answer to the same once more; where tokens are not drawn, it would be the same: then they are.
  #again(at) {
    if (this.#asking) return;
    const asked = this.#messages[at - 1];
    if (asked?.role !== "user") return;
    this.#leave(at - 1);
    this.documents = (asked.context ?? []).filter((chunk) => typeof chunk === "string");
    this.send(asked.content, { temperature: byId("temperature").valueAsNumber || 0.8, seed: Date.now() % 2 ** 31 });
  }

  #markBranch() {
    for (const mark of byId("messages").querySelectorAll(".branch")) mark.remove();
    if (!this.#branch) return;
    const { id, at } = this.#branch;
    const has = (message) => message.role === "user";
    const title = this.#messages.slice(0, at).some(has) ? this.title : shortName(id); // They begin alike.
    const back = make("button", { type: "button", className: "quiet" }, title);
    back.addEventListener("click", () => this.open(id).catch((error) => this.#fail(error)));
    const mark = make("li", { className: "branch" }, "Branched from ", back);
    byId("messages").insertBefore(mark, byId("messages").children[at] ?? null);
  }

  // Texts that stand in front of the next message, each a chunk whose KV is blended.
  get documents() {
    return [...byId("documents").querySelectorAll("textarea")].map((box) => box.value).filter((text) => text.trim());
  }

  set documents(texts) {
    byId("documents").replaceChildren(...texts.map(documentBox));
    byId("attached").open = texts.length > 0;
  }

  stop() {
    this.#asking?.abort();
  }

  async send(said = null, drawn = {}) {
    const box = byId("message");
    const text = said ?? box.value;
    if (!text.trim() || this.#asking) return;
    const context = this.documents;
    this.#fail(null);
    const asking = (this.#asking = new AbortController());
    this.#setBusy(true);
    const added = [];
    const system = byId("system").value.trim();
    if (!this.#messages.length && system) added.push({ role: "system", content: system });
    added.push({ role: "user", content: text, ...(context.length && { context }) });
    const first = this.#messages.length;
    const shown = added.map((message, index) => this.#shown(message, first + index));
    const answer = this.#shown({ role: "assistant", content: "" }, first + added.length);
    answer.item.classList.add("typing");
    byId("messages").append(...shown.map((each) => each.item), answer.item);
    byId("empty").hidden = true;
    if (said === null) box.value = "";
    this.documents = [];
    this.#scroll(true);
    let failure = null;
    try {
      const response = await this.#ask([...added], asking.signal, drawn);
      this.#state = null; // Until the answer's end says: where one that is stopped ends only the server knows.
      await this.#read(response, answer);
    } catch (error) {
      failure = error;
    }
    this.#draw(answer, (text) => answer.markdown.show(text));
    if (this.#asking === asking) this.#asking = null;
    this.#setBusy(false);
    answer.item.classList.remove("typing");
    const stopped = failure?.name === "AbortError";
    if (answer.said || !failure) {
      this.#messages.push(...added, { role: "assistant", content: answer.said });
      if (stopped) answer.about.textContent = "stopped";
    } else {
      for (const each of [...shown, answer]) each.item.remove(); // Nothing came of it: it is to be sent again.
      byId("empty").hidden = this.#messages.length > 0;
      if (!box.value) box.value = text;
      this.documents = context;
    }
    if (failure?.code === "session_moved") await this.#moved();
    else if (failure && !stopped) this.#fail(failure);
    this.#scroll(false);
    box.focus();
    this.#on.ended();
  }

  // The conversation was gone on with elsewhere, in another tab say: it is shown as it stands now.
  async #moved() {
    try {
      await this.open(this.sessionId);
      this.#fail(new Failure(409, "this conversation went on elsewhere and is shown as it is now; send again to go on"));
    } catch (error) {
      this.#fail(error);
    }
  }

  // The answer's stream; where the session is gone, of a new one that begins with all that was said.
  async #ask(added, signal, drawn) {
    const body = {
      model: this.#model,
      stream: true,
      stream_options: { include_usage: true },
      temperature: byId("temperature").valueAsNumber || 0,
      max_tokens: byId("max-tokens").valueAsNumber || 256,
      ...drawn,
    };
    for (let attempt = 1; ; attempt++) {
      try {
        if (this.#fork) await this.#begin(signal);
        body.messages = this.sessionId ? added : [...this.#messages, ...added];
        body.session_id = this.sessionId ?? undefined;
        body.session_state = (this.sessionId && this.#state) ?? undefined;
        return await ask("/v1/chat/completions", { method: "POST", body, signal });
      } catch (error) {
        if (!(error instanceof Failure)) throw error;
        if (error.code === "session_not_found" && this.sessionId) {
          this.sessionId = this.#state = null;
        } else if (error.code === "session_busy" && attempt < BUSY_TRIES) {
          await new Promise((done) => setTimeout(done, BUSY_PAUSE_MS));
        } else throw error;
      }
    }
  }

  // Has the server begin this branch as a fork. Where it cannot, all that was said begins it.
  async #begin(signal) {
    const { id, behind } = this.#fork;
    const path = `/v1/sessions/${encodeURIComponent(id)}`;
    try {
      const { messages } = await askJson(path, { signal }); // Fewer than here, where some have left the window.
      const at = messages.length - behind;
      const forked = await askJson(`${path}/fork`, { method: "POST", body: { at }, signal });
      this.#state = forked.session_state || null;
      this.#branch = forked.forked_from;
      this.#named(forked.id);
    } catch (error) {
      if (!(error instanceof Failure) || ![400, 404].includes(error.status)) throw error;
    }
    this.#fork = null;
  }

  async #read(response, answer) {
    let unspoken = "";
    const speak = () => {
      if (unspoken.trim()) byId("said").append(make("p", {}, unspoken));
      unspoken = "";
    };
    byId("said").replaceChildren();
    for await (const data of events(response)) {
      if (data === "[DONE]") break;
      const chunk = JSON.parse(data);
      if (chunk.error)
        throw new Failure(chunk.error.type === "server_error" ? 500 : 400, chunk.error.message, chunk.error.code);
      if (chunk.session_id && chunk.session_id !== this.sessionId) {
        this.#named(chunk.session_id);
      }
      if (chunk.session_state) this.#state = chunk.session_state;
      const piece = chunk.choices[0]?.delta.content;
      if (piece) {
        answer.said += piece;
        this.#drawSoon(answer);
        unspoken += piece;
        if (unspoken.length > 60 && SPOKEN.test(unspoken)) speak();
      }
      if (chunk.usage) {
        answer.about.replaceChildren(...aboutUsage(chunk.usage));
        const cut = aboutCut(chunk.usage.ca_jax);
        if (cut) answer.item.before(make("li", { className: "cut" }, cut));
      }
    }
    speak();
  }

  // An answer that grows is drawn once a frame, however many pieces of it come.
  #drawSoon(answer) {
    this.#frame ??= requestAnimationFrame(() => this.#draw(answer, (text) => answer.markdown.grow(text)));
  }

  #draw(answer, show) {
    cancelAnimationFrame(this.#frame);
    this.#frame = null;
    const follows = this.#isAtEnd();
    show(answer.said);
    if (follows) this.#scroll(true);
  }

  #named(sessionId) {
    this.sessionId = sessionId;
    byId("system").disabled = true;
    this.#on.session(sessionId);
  }

  #fail(error) {
    const shown = byId("error");
    shown.hidden = !error;
    shown.textContent = error ? (error.told ?? `The page met an error: ${error.message}`) : "";
    if (error?.status === 401) this.#on.unauthorized();
  }

  #setBusy(isBusy) {
    byId("stop").hidden = !isBusy;
    byId("send").disabled = isBusy;
    byId("log").setAttribute("aria-busy", String(isBusy));
  }

  #isAtEnd() {
    const log = byId("log");
    return log.scrollHeight - log.scrollTop - log.clientHeight < 60;
  }

  #scroll(always) {
    const log = byId("log");
    if (always || this.#isAtEnd()) log.scrollTop = log.scrollHeight;
  }
}

function shownMessage({ role, content, context = [] }) {
  const documents = context.map((chunk) => (typeof chunk === "string" ? chunk : `(${many(chunk.length, "token")})`));
  const text = make("div", { className: "text" });
  const markdown = new Markdown(text);
  if (role === "assistant") markdown.show(content ?? "");
  else text.append(content ?? "");
  const about = make("p", { className: "about" });
  const actions = make("p", { className: "actions" });
  const attached = documents.map((said, at) =>
    make("details", { className: "document" }, make("summary", {}, `Document ${at + 1}`), make("div", {}, said)),
  );
  const who = make("p", { className: "who" }, NAMES[role] ?? role);
  const item = make("li", { className: role }, who, ...attached, text, about, actions);
  return { item, text, markdown, about, actions, said: content ?? "" };
}

function documentBox(text) {
  const box = make("textarea", { rows: 3, "aria-label": "Document" });
  box.value = text;
  const remove = make("button", { type: "button", className: "quiet" }, "Remove");
  const item = make("li", {}, box, remove);
  remove.addEventListener("click", () => item.remove());
  return item;
}

// What left the context in a turn, and what was made of the rest.
function aboutCut(took) {
  if (!took.dropped_tokens) return null;
  const repaired = took.repaired_tokens ? ` and ${many(took.repaired_tokens, "token")} of it were computed anew` : "";
  return `The context was full: ${many(took.dropped_tokens, "token")} left it. The rest stayed as it is stored${repaired}.`;
}

function aboutUsage(usage) {
  const took = usage.ca_jax;
  const cached = usage.prompt_tokens_details.cached_tokens;
  const tier = Object.keys(took.cached_tokens).find((name) => took.cached_tokens[name]) ?? "";
  const speed = took.decode_s > 0 ? ` · ${((usage.completion_tokens - 1) / took.decode_s).toFixed(1)} tokens/s` : "";
  const where = tier ? ` from ${TIERS[tier] ?? tier}` : "";
  return [
    "first token ",
    make("b", {}, milliseconds(took.ttft_s)),
    speed,
    " · ",
    make("b", {}, `${cached} of ${usage.prompt_tokens}`),
    ` prompt tokens${where} · ${many(usage.completion_tokens, "token")}`,
    took.missed_chunks > 0 && ` · ${many(took.missed_chunks, "document")} computed`,
    took.repaired_tokens > 0 && ` · ${many(took.repaired_tokens, "cached token")} computed anew`,
    took.num_dropped > 0 && ` · ${many(took.num_dropped, "token")} left the window`,
  ].filter(Boolean);
}
