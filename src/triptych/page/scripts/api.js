// API calls: keys, errors for users, and event streams.

import { el } from "./dom.js";
import { askForKey, key } from "./key.js";

/** An error that the user can resolve. */
export class Advice extends Error {}

/** An error of the server or of the connection to it. */
export class ApiError extends Advice {
  constructor(message, { status = 0, code = "", requestId = "", retryAfterS = 0 } = {}) {
    super(message);
    Object.assign(this, { status, code, requestId, retryAfterS });
  }
}

export const isAborted = (error) => error?.name === "AbortError";

/** Return the URL of a path of the server, which a proxy may publish below a path of its own. */
export const urlOf = (path) => new URL(`.${path}`, document.baseURI).href;

/** Return the successful response of a route. Prompts for a key if one is needed. */
export async function call(path, { json, form, signal, method } = {}) {
  const body = json === undefined ? form : JSON.stringify(json);
  for (;;) {
    const sent = key();
    const headers = sent ? { Authorization: `Bearer ${sent}` } : {};
    if (json !== undefined) headers["Content-Type"] = "application/json";
    const response = await reach(path, {
      method: method ?? (body ? "POST" : "GET"),
      headers,
      body,
      signal,
    });
    if (response.status === 401) {
      if (sent === key()) await askForKey();
    } else if (response.ok) {
      return response;
    } else {
      throw await errorOf(response);
    }
  }
}

export const getJson = async (path, options) => (await call(path, options)).json();

async function reach(path, options) {
  try {
    return await fetch(urlOf(path), options);
  } catch (error) {
    if (isAborted(error)) throw error;
    throw new ApiError("The server cannot be reached. Check that it is running, then try again.");
  }
}

async function errorOf(response) {
  const found = await response.json().catch(() => ({}));
  return fromDocument(
    found.error ?? {},
    response.status,
    Number(response.headers.get("retry-after")) || 0,
  );
}

function fromDocument(error, status = 0, retryAfterS = 0) {
  const message = error.message ?? `The server answered ${status} without a reason.`;
  return new ApiError(message, {
    status,
    retryAfterS,
    code: error.code,
    requestId: error.request_id,
  });
}

/** Yield the events of a stream: {event, data}, `data` parsed. Throws an error event. */
export async function* events(response) {
  for await (const block of blocks(response.body)) {
    const lines = block.split(/\r?\n/);
    const event =
      lines
        .find((line) => line.startsWith("event:"))
        ?.slice(6)
        .trim() ?? "";
    const text = lines
      .filter((line) => line.startsWith("data:"))
      .map((line) => line.slice(5).trimStart())
      .join("\n");
    if (text === "[DONE]") return;
    if (!text) continue;
    const data = JSON.parse(text);
    if (data.error) throw fromDocument(data.error);
    yield { event, data };
  }
}

async function* blocks(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const parts = (rest + value).split(/\r?\n\r?\n/);
      rest = parts.pop();
      yield* parts;
    }
  } catch (error) {
    if (isAborted(error)) throw error;
    throw new ApiError("The connection was lost before the answer was complete. Try again.");
  } finally {
    reader.cancel().catch(() => {});
  }
}

/** Build an error box: the message, when to retry, and the request id for the log. */
export function errorBox(error, retry) {
  if (!(error instanceof Advice)) console.error(error);
  const wait = error.retryAfterS ? ` The server is busy: try again in ${error.retryAfterS} s.` : "";
  const box = el(
    "div",
    { class: "error", role: "alert" },
    el("p", {}, (error.message || String(error)) + wait),
  );
  if (retry)
    box.append(
      el("button", { type: "button", onclick: () => (box.remove(), retry()) }, "Try again"),
    );
  if (error.requestId) box.append(el("p", { class: "note" }, `Request ${error.requestId}`));
  return box;
}
