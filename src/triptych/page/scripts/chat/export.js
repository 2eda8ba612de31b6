// Chats as files: Markdown to read, JSON to process.

import { download } from "../dom.js";

export function saveAsJson(chats, name) {
  const text = JSON.stringify(chats.length === 1 ? chats[0] : chats, null, 2);
  download(new Blob([text], { type: "application/json" }), `${name}.json`);
}

export function saveAsMarkdown(chat) {
  download(new Blob([markdownOf(chat)], { type: "text/markdown" }), `${fileName(chat)}.md`);
}

export const fileName = ({ title }) =>
  title
    .toLowerCase()
    .replace(/[^\p{L}\d]+/gu, "-")
    .replace(/^-|-$/g, "")
    .slice(0, 50) || "chat";

/** Write a chat as Markdown, its images as data URLs. */
export function markdownOf({ title, updatedMs, turns }) {
  const date = new Date(updatedMs).toISOString().slice(0, 10);
  return [`# ${title}`, date, ...turns.map(turnText)].join("\n\n") + "\n";
}

function turnText(turn) {
  if (turn.role === "drawing")
    return `## ${turn.model}\n\n![${turn.prompt}](${turn.url})\n\n${turn.prompt}, seed ${turn.seed}`;
  const isUser = turn.role === "user";
  const images = (turn.images ?? []).map((url, index) => `![Image ${index + 1}](${url})`);
  const calls = (turn.calls ?? []).map(callText);
  const head = `## ${isUser ? "You" : turn.model}`;
  return [head, ...images, turn.text, ...calls].filter(Boolean).join("\n\n");
}

const callText = ({ name, args, result }) =>
  `Calls \`${name}\` with \`${args}\`${result === null ? "" : `; the result is \`${result}\``}.`;
