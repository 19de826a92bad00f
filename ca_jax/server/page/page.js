// Starts the page and joins its parts. Not here: what each of them does.

import { Failure, askJson, key } from "./api.js";
import { Chat } from "./chat.js";
import { byId } from "./dom.js";
import { Live } from "./live.js";
import { Operate } from "./operate.js";
import { Panels } from "./panels.js";
import { Sessions } from "./sessions.js";
import { themed } from "./theme.js";

const RETRY_MS = 1000;

const panels = new Panels();
let numSessions = null; // In the tiers: the list is asked for anew when it changes.

const live = new Live(
  (snapshot) => {
    panels.show(snapshot);
    const count = snapshot.tiers.map((tier) => tier.num_sessions).join();
    if (count !== numSessions) sessions.refreshSoon();
    numSessions = count;
  },
  (state, told) => {
    byId("status").dataset.state = state;
    byId("status").textContent = told;
  },
);

const chat = new Chat({
  session(sessionId) {
    history.replaceState(null, "", sessionId ? `#${encodeURIComponent(sessionId)}` : location.pathname);
    sessions.current = sessionId;
    live.watch(sessionId);
  },
  ended() {
    sessions.name(chat.sessionId, chat.title);
    sessions.refreshSoon();
  },
  unauthorized: () => askForKey(),
});

const sessions = new Sessions({
  async open(sessionId) {
    try {
      await chat.open(sessionId);
      sessions.name(sessionId, chat.title);
    } catch (error) {
      show(error);
    }
  },
  error(error) {
    if (!(error instanceof Failure) || ![0, 503].includes(error.status)) show(error);
  },
  async dropped(sessionId) {
    if (sessionId === chat.sessionId) await chat.open(null);
    byId("message").focus();
  },
});

new Operate(() => askForKey());
themed(byId("theme"));
byId("help").addEventListener("click", () => byId("help-dialog").showModal());
byId("help-close").addEventListener("click", () => byId("help-dialog").close());
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]")) return;
  if (event.target.matches("input, textarea")) return;
  const does = { "?": () => byId("help").click(), n: () => byId("new").click(), h: () => byId("operate-open").click(), "/": () => byId("find").focus(), m: () => byId("message").focus() };
  if (!does[event.key]) return;
  event.preventDefault();
  does[event.key]();
});

byId("new").addEventListener("click", async () => {
  await chat.open(null);
  byId("message").focus();
});

function show(error) {
  if (error.status === 401) {
    askForKey();
    return;
  }
  byId("error").hidden = false;
  byId("error").textContent = error.told ?? error.message;
}

// The key

function askForKey() {
  byId("key-open").hidden = false;
  byId("key-why").textContent = key.get() ? "The server does not know this key." : "This server asks for a key.";
  if (!byId("key-dialog").open) byId("key-dialog").showModal();
}

byId("key-open").addEventListener("click", askForKey);
byId("key-cancel").addEventListener("click", () => byId("key-dialog").close());
byId("key-form").addEventListener("submit", () => {
  key.set(byId("key").value.trim());
  byId("key").value = "";
  byId("error").hidden = true;
  begin();
});

// The beginning

// The conversation that the address names; null if it names none, or nothing that can be read.
function named() {
  try {
    return decodeURIComponent(location.hash.slice(1)) || null;
  } catch {
    return null;
  }
}

async function begin() {
  for (;;) {
    try {
      const { data } = await askJson("/v1/models");
      chat.model = data[0].id;
      byId("model").textContent = data[0].id;
      document.title = `ca_jax · ${data[0].id}`;
      break;
    } catch (error) {
      if (error.status === 401) {
        byId("status").dataset.state = "broken";
        byId("status").textContent = "wants a key";
        askForKey();
        return;
      }
      byId("status").dataset.state = "starting";
      byId("status").textContent = error.status === 503 ? error.message : "no connection";
      await new Promise((done) => setTimeout(done, RETRY_MS));
    }
  }
  await chat.open(named()).catch(() => chat.open(null));
  sessions.name(chat.sessionId, chat.title);
  live.start();
  byId("message").focus();
}

begin();
