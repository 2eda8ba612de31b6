// Markdown as DOM nodes, for text that grows: unchanged blocks keep their nodes.

import { codeBlock, el } from "../dom.js";
import { inline } from "./inline.js";

const MAX_DEPTH = 8; // of nested quotes and lists
const MAX_RULE_CHARS = 1000; // of a table
const FENCE = /^ {0,3}(`{3,}|~{3,})([^`\n]*)$/;
const HEADING = /^ {0,3}(#{1,6})\s(.*)$/;
const RULE = /^ {0,3}([-*_])(?:\s*\1){2,}\s*$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( {0,3})([-*+]|\d{1,9}[.)])( {1,4}|$)/;
const TABLE_RULE = /^ {0,3}\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?\s*$/;

const shown = new WeakMap(); // the source of each element

/** Show `text` in `container`, keeping elements with an unchanged source. */
export function showMarkdown(container, text) {
  const sources = split(text.split("\n"));
  sources.forEach((block, index) => {
    const source = block.lines.join("\n");
    const there = container.children[index];
    if (there && shown.get(there) === source) return;
    const made = render(block, 0);
    shown.set(made, source);
    if (there) there.replaceWith(made);
    else container.append(made);
  });
  while (container.children.length > sources.length) container.lastElementChild.remove();
}

/** Return the blocks of some lines: {kind, lines}. */
function split(lines) {
  const blocks = [];
  for (let at = 0; at < lines.length;) {
    if (!lines[at].trim()) {
      at += 1;
      continue;
    }
    const kind = kindOf(lines, at);
    const end = endOf(kind, lines, at);
    blocks.push({ kind, lines: lines.slice(at, end) });
    at = end;
  }
  return blocks;
}

function kindOf(lines, at) {
  const line = lines[at];
  if (FENCE.test(line)) return "fence";
  if (HEADING.test(line)) return "heading";
  if (RULE.test(line)) return "rule";
  if (QUOTE.test(line)) return "quote";
  if (ITEM.test(line)) return "list";
  return line.includes("|") && isTableRule(lines[at + 1] ?? "") ? "table" : "paragraph";
}

const isTableRule = (line) =>
  line.length < MAX_RULE_CHARS && line.includes("-") && TABLE_RULE.test(line);

function endOf(kind, lines, at) {
  if (kind === "heading" || kind === "rule") return at + 1;
  if (kind === "fence") return endOfFence(lines, at);
  if (kind === "list") return endOfList(lines, at);
  let end = at + 1;
  while (end < lines.length && lines[end].trim()) {
    const next = kindOf(lines, end);
    if (
      kind === "paragraph"
        ? next !== "paragraph"
        : kind === "quote"
          ? next !== "quote" && next !== "paragraph"
          : !lines[end].includes("|")
    )
      break;
    end += 1;
  }
  return end;
}

function endOfFence(lines, at) {
  const [, ticks] = FENCE.exec(lines[at]);
  const closing = lines.findIndex((line, index) => index > at && isClosing(line, ticks));
  return closing < 0 ? lines.length : closing + 1;
}

const isClosing = (line, ticks) => {
  const found = /^ {0,3}(`{3,}|~{3,})\s*$/.exec(line);
  return Boolean(found) && found[1][0] === ticks[0] && found[1].length >= ticks.length;
};

function endOfList(lines, at) {
  const isOrdered = /\d/.test(ITEM.exec(lines[at])[2]);
  let end = at + 1;
  for (; end < lines.length; end += 1) {
    const line = lines[end];
    const item = ITEM.exec(line);
    if (item && !RULE.test(line)) {
      if (/\d/.test(item[2]) !== isOrdered) break;
    } else if (!/^\s{2,}/.test(line) && line.trim()) {
      const isLazy = lines[end - 1].trim() && kindOf(lines, end) === "paragraph";
      if (!isLazy) break;
    }
  }
  while (!lines[end - 1].trim()) end -= 1;
  return end;
}

function render({ kind, lines }, depth) {
  if (kind === "fence") return fence(lines);
  if (kind === "heading") return heading(lines[0]);
  if (kind === "rule") return el("hr");
  if (kind === "table") return table(lines);
  if (depth < MAX_DEPTH && kind === "quote")
    return el(
      "blockquote",
      {},
      ...children(
        lines.map((line) => line.replace(QUOTE, "")),
        depth,
      ),
    );
  if (depth < MAX_DEPTH && kind === "list") return list(lines, depth);
  return el("p", {}, ...inline(lines.map((line) => line.trimStart()).join("\n")));
}

const children = (lines, depth) => split(lines).map((block) => render(block, depth + 1));

function heading(line) {
  const [, marks, text] = HEADING.exec(line);
  return el(
    `h${Math.min(6, marks.length + 2)}`,
    {},
    ...inline(text.trim().replace(/(^|\s)#+$/, "")),
  ); // below the panel's own
}

function fence(lines) {
  const [, ticks, about] = FENCE.exec(lines[0]);
  const isClosed = lines.length > 1 && isClosing(lines.at(-1), ticks);
  const code = lines.slice(1, isClosed ? -1 : undefined).join("\n");
  return codeBlock(code, about.trim().split(/\s/)[0] || "code");
}

function list(lines, depth) {
  const items = [];
  for (const line of lines) {
    const found = ITEM.exec(line);
    if (found && !RULE.test(line))
      items.push({ indent: found[0].length, lines: [line.slice(found[0].length)] });
    else items.at(-1).lines.push(unindented(line, items.at(-1).indent));
  }
  const first = ITEM.exec(lines[0])[2];
  const isLoose = lines.some((line) => !line.trim());
  const made = items.map((entry) => item(entry.lines, depth, isLoose));
  if (!/\d/.test(first)) return el("ul", {}, ...made);
  return el("ol", { start: String(parseInt(first, 10)) }, ...made);
}

const unindented = (line, width) =>
  line.slice(Math.min(width, line.length - line.trimStart().length));

function item(lines, depth, isLoose) {
  const task = /^\[([ xX])\]\s+/.exec(lines[0]);
  if (task) lines = [lines[0].slice(task[0].length), ...lines.slice(1)];
  const nodes = children(lines, depth);
  if (!isLoose && nodes[0]?.tagName === "P") nodes.splice(0, 1, ...nodes[0].childNodes);
  if (task) nodes.unshift(task[1] === " " ? "☐ " : "☑ ");
  return el("li", {}, ...nodes);
}

const cells = (line) =>
  line
    .trim()
    .replace(/^\|/, "")
    .replace(/\|$/, "")
    .split(/(?<!\\)\|/)
    .map((text) => text.trim().replace(/\\\|/g, "|"));

function table(lines) {
  const sides = cells(lines[1]).map((rule) =>
    /^:-+:$/.test(rule) ? "middle" : /-:$/.test(rule) ? "end" : null,
  );
  const row = (line, tag) =>
    el(
      "tr",
      {},
      ...cells(line)
        .slice(0, sides.length)
        .map((text, index) => el(tag, { class: sides[index] }, ...inline(text))),
    );
  const body = lines.slice(2).map((line) => row(line, "td"));
  return el(
    "div",
    { class: "scroll", tabindex: "0" },
    el("table", {}, el("thead", {}, row(lines[0], "th")), el("tbody", {}, ...body)),
  );
}
