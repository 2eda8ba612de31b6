// The order of the API reference: groups of routes, the most used first.

const GROUPS = [
  ["Chat", ({ path }) => /^\/v1\/(chat\/)?completions/.test(path)],
  ["Responses", ({ tag }) => tag === "responses"],
  ["Speech", ({ tag }) => tag === "speech"],
  ["Transcription", ({ tag }) => tag === "audio"],
  ["Images", ({ tag }) => tag === "images"],
  ["Models", ({ tag }) => tag === "models"],
  ["Embeddings", ({ path }) => /embed|similarity/.test(path) && !path.startsWith("/api/")],
  ["Ranking", ({ path }) => /rank|score/.test(path)],
  ["Tokens and templates", ({ path }) => /token|template/.test(path) && !/messages/.test(path)],
  ["Anthropic’s API", ({ path }) => path.startsWith("/v1/messages")],
  ["Ollama’s API", ({ path }) => path.startsWith("/api/")],
  ["Files and batches", ({ tag }) => tag === "files" || tag === "batches"],
  ["Engine", ({ tag }) => tag === "engine"],
  ["Health", ({ tag }) => tag === "health"],
];
const REST = "Other";

/** Group routes, entries {path, tag}: a map of names to routes, in the order of the reference. */
export function grouped(routes) {
  const nameOf = (route) => GROUPS.find(([, belongs]) => belongs(route))?.[0] ?? REST;
  const found = Map.groupBy(routes, nameOf);
  const names = [...GROUPS.map(([name]) => name), REST].filter((name) => found.has(name));
  return new Map(names.map((name) => [name, found.get(name)]));
}
