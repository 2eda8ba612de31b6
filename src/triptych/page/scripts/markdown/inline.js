// Markdown within a paragraph, as DOM nodes: code, emphasis, links. Images become links: loading
// one would disclose the reader to its host.

import { el } from "../dom.js";

const MAX_CHARS = 20000; // longer paragraphs stay plain text
const MAX_LINK_CHARS = 2000;
const LINK =
  /!?\[((?:[^[\]\\]|\\.|\[[^[\]]{0,200}\]){0,500})\]\(\s{0,3}<?([^\s<>()]{0,1500}(?:\([^\s<>()]{0,200}\)[^\s<>()]{0,200})?)>?(?:\s{1,3}"[^"]{0,300}")?\s{0,3}\)/y;
const ADDRESS = /https?:\/\/[^\s<>"'`]{1,1500}/y;
const ESCAPABLE = /[!-/:-@[-`{-~]/;
const ELEMENTS = { "*1": "em", _1: "em", "*2": "strong", _2: "strong", "~2": "del" };

/** Return the nodes of a text. */
export function inline(text, { hasLinks = true } = {}) {
  if (text.length > MAX_CHARS) return [document.createTextNode(text)];
  return emphasize(pieces(text, hasLinks));
}

/** Return the URL of a link if a browser may follow it, else null. */
export function safeAddress(address) {
  return /^(https?:\/\/|mailto:)/i.test(address) ? address : null;
}

/** Return nodes and delimiter runs, in order. */
function pieces(text, hasLinks) {
  const found = [];
  const unclosed = new Set(); // lengths of backtick runs that no other follows
  let plain = "";
  const put = (piece) => {
    if (plain) found.push(document.createTextNode(plain));
    plain = "";
    found.push(piece);
  };
  for (let at = 0; at < text.length;) {
    const special = atSpecial(text, at, hasLinks, unclosed);
    if (!special) plain += text[at++];
    else {
      if (special.text !== undefined) plain += special.text;
      else put(special.node ?? special);
      at = special.end;
    }
  }
  if (plain) found.push(document.createTextNode(plain));
  return found;
}

function atSpecial(text, at, hasLinks, unclosed) {
  switch (text[at]) {
    case "\\":
      if (text[at + 1] === "\n") return { node: el("br"), end: at + 2 };
      return ESCAPABLE.test(text[at + 1] ?? "") ? { text: text[at + 1], end: at + 2 } : null;
    case " ":
      return /^ {2,}\n/.test(text.slice(at, at + 9))
        ? { node: el("br"), end: text.indexOf("\n", at) + 1 }
        : null;
    case "`":
      return codeAt(text, at, unclosed);
    case "!":
    case "[":
      return hasLinks ? linkAt(text, at) : null;
    case "h":
      return hasLinks ? addressAt(text, at) : null;
    case "*":
    case "_":
    case "~":
      return delimitersAt(text, at);
    default:
      return null;
  }
}

function codeAt(text, at, unclosed) {
  const run = /`+/y;
  run.lastIndex = at;
  const [ticks] = run.exec(text);
  const start = at + ticks.length;
  if (!unclosed.has(ticks.length)) {
    for (let end = text.indexOf(ticks, start); end >= 0;) {
      run.lastIndex = end;
      const [closing] = run.exec(text);
      if (closing.length === ticks.length) {
        return { node: el("code", {}, bare(text.slice(start, end))), end: end + ticks.length };
      }
      end = text.indexOf(ticks, end + closing.length);
    }
    unclosed.add(ticks.length);
  }
  return { text: ticks, end: start };
}

/** Strip the spaces that separate code from its backticks. */
function bare(code) {
  const line = code.replaceAll("\n", " ");
  return line.startsWith(" ") && line.endsWith(" ") && line.trim() ? line.slice(1, -1) : line;
}

function linkAt(text, at) {
  LINK.lastIndex = 0;
  const found = LINK.exec(text.slice(at, at + MAX_LINK_CHARS));
  if (!found) return null;
  const [whole, label, address] = found;
  const href = safeAddress(address);
  const nodes = inline(label, { hasLinks: false });
  return { node: href ? anchor(href, nodes) : el("span", {}, ...nodes), end: at + whole.length };
}

function addressAt(text, at) {
  if (/\w/.test(text[at - 1] ?? "")) return null;
  ADDRESS.lastIndex = at;
  const found = ADDRESS.exec(text);
  if (!found) return null;
  const address = found[0].replace(/[.,;:!?)\]*_~]+$/, "");
  return { node: anchor(address, [address]), end: at + address.length };
}

function anchor(href, nodes) {
  return el("a", { href, target: "_blank", rel: "noopener noreferrer nofollow" }, ...nodes);
}

function delimitersAt(text, at) {
  const char = text[at];
  let end = at;
  while (text[end] === char) end += 1;
  const before = text[at - 1] ?? " ";
  const after = text[end] ?? " ";
  const isOpening = !/\s/.test(after) && (!/\p{P}/u.test(after) || /[\s\p{P}]/u.test(before));
  const isClosing = !/\s/.test(before) && (!/\p{P}/u.test(before) || /[\s\p{P}]/u.test(after));
  const isInWord = char === "_" && /\w/.test(before) && /\w/.test(after);
  return {
    char,
    count: end - at,
    end,
    canOpen: isOpening && !isInWord,
    canClose: isClosing && !isInWord,
  };
}

/** Pair delimiters, innermost first, and wrap the nodes between them. */
function emphasize(found) {
  const out = [];
  const openers = []; // [index in out, delimiter]
  for (const piece of found) {
    if (piece instanceof Node) {
      out.push(piece);
      continue;
    }
    if (piece.canClose) close(piece, out, openers);
    if (!piece.count) continue;
    if (piece.canOpen) openers.push([out.length, piece]);
    out.push(piece);
  }
  return out.map((piece) =>
    piece instanceof Node ? piece : document.createTextNode(piece.char.repeat(piece.count)),
  );
}

function close(closer, out, openers) {
  for (let index = openers.length - 1; index >= 0 && closer.count; index -= 1) {
    const [place, opener] = openers[index];
    if (opener.char !== closer.char) continue;
    const size = Math.min(opener.count, closer.count, 2);
    const tag = ELEMENTS[closer.char + size];
    if (!tag) return;
    const inner = out
      .splice(place + 1)
      .map((piece) => (piece instanceof Node ? piece : piece.char.repeat(piece.count)));
    opener.count -= size;
    closer.count -= size;
    if (!opener.count) out.pop();
    out.push(el(tag, {}, ...inner));
    openers.length = opener.count ? index + 1 : index;
    if (opener.count) index += 1;
  }
}
