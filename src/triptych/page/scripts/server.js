// The state of the server and of its models, from /readyz.

import { urlOf } from "./api.js";
import { key } from "./key.js";

const CALM_MS = 5000;
const HURRIED_MS = 700; // while a request waits or a model loads

const listeners = new Set();
let state = null;
let numHurried = 0;
let timer = null;

/** Call `listener` with each new state, null without a connection. Returns a function that ends it. */
export function onServer(listener) {
  listeners.add(listener);
  if (state) listener(state);
  if (listeners.size === 1 && timer === null) poll();
  return () => listeners.delete(listener);
}

async function poll() {
  clearTimeout(timer);
  timer = 0;
  const sent = key();
  const headers = sent ? { Authorization: `Bearer ${sent}` } : {};
  state = await fetch(urlOf("/readyz"), { headers })
    .then((reply) => reply.json())
    .catch(() => null);
  for (const listener of [...listeners]) listener(state);
  const isLoading = state?.models?.some((model) => model.state === "loading");
  timer = setTimeout(poll, numHurried || isLoading ? HURRIED_MS : CALM_MS);
}

/** Return {state, progress, message} of a model, or null where it is not known. */
export const stateOf = (name) => state?.models?.find(({ model }) => model === name) ?? null;

/** Describe a model's state in a word or two. */
export function stateText(known) {
  if (!known) return "";
  if (known.state === "loading") return `loading ${Math.round(known.progress * 100)} %`;
  return { ready: "ready", unloaded: "asleep", failed: "failed" }[known.state] ?? known.state;
}

/** Call `say` with the reason why a request to a model waits. Returns a function that ends it. */
export function sayWhileWaiting(name, say) {
  numHurried += 1;
  let said = "";
  const stop = onServer(() => {
    const text = waitText(name);
    if (text !== said) say((said = text));
  });
  if (timer) poll();
  return () => {
    if (stop()) numHurried -= 1;
  };
}

function waitText(name) {
  const known = stateOf(name);
  if (known?.state === "loading")
    return `${name} is loading: ${Math.round(known.progress * 100)} %`;
  if (known?.state === "unloaded") return `${name} was asleep and is waking up`;
  return state && state.status !== "ok" && !known ? `The server is not ready: ${state.reason}` : "";
}
