// The way to the server: the key, requests, and server-sent events. Not here: what is asked.

const KEY = "ca_jax.key";

export const key = {
  get: () => sessionStorage.getItem(KEY) ?? "",
  set: (value) => sessionStorage.setItem(KEY, value),
};

export class Failure extends Error {
  constructor(status, message, code, retryAfter) {
    super(message);
    this.status = status;
    this.code = code;
    this.retryAfter = retryAfter;
  }

  // What is said about it, for people.
  get told() {
    if (this.status === 429) return `${capital(this.message)}. Try again in ${this.retryAfter ?? "a few"} s.`;
    if (this.status === 401) return "The server asks for a key, or does not know this one.";
    if (this.status === 0) return "The server cannot be reached.";
    return capital(this.message);
  }
}

// The response, if it is a good one. Throws Failure otherwise; AbortError where the signal says so.
export async function ask(path, { method = "GET", body, signal } = {}) {
  const headers = {};
  if (key.get()) headers.Authorization = `Bearer ${key.get()}`;
  if (body !== undefined) headers["Content-Type"] = "application/json";
  let response;
  try {
    response = await fetch(path, {
      method,
      headers,
      signal,
      body: body === undefined ? undefined : JSON.stringify(body),
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Failure(0, "the server cannot be reached");
  }
  if (response.ok) return response;
  const told = await response.json().then(
    (answer) => answer.error,
    () => null,
  );
  const message = told?.message ?? `status ${response.status}`;
  throw new Failure(response.status, message, told?.code, response.headers.get("Retry-After"));
}

export async function askJson(path, options) {
  return (await ask(path, options)).json();
}

// Data of server-sent events, one string each, as they come.
export async function* events(response) {
  const decoder = new TextDecoder();
  let rest = "";
  const reader = response.body.getReader();
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const parts = (rest + decoder.decode(value, { stream: true })).split("\n\n");
    rest = parts.pop();
    for (const part of parts) if (part.startsWith("data: ")) yield part.slice(6);
  }
}

function capital(text) {
  return text.charAt(0).toUpperCase() + text.slice(1);
}
