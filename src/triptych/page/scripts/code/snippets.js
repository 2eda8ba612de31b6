// A request as code: for curl, and for OpenAI's packages for Python and JavaScript.

import { urlOf } from "../api.js";
import { key } from "../key.js";

const SDK_FIELDS = {
  chat: [
    "model",
    "messages",
    "temperature",
    "top_p",
    "max_tokens",
    "seed",
    "tools",
    "tool_choice",
    "response_format",
  ],
  speech: ["model", "voice", "input", "speed"],
  image: ["model", "prompt", "n", "size"],
  embedding: ["model", "input"],
};
/** The route of each task. */
export const ROUTES = {
  chat: "/v1/chat/completions",
  speech: "/v1/audio/speech",
  transcription: "/v1/audio/transcriptions",
  image: "/v1/images/generations",
  embedding: "/v1/embeddings",
};
const PYTHON = {
  chat: ["answer = client.chat.completions.create", "print(answer.choices[0].message.content)"],
  speech: ["speech = client.audio.speech.create", 'speech.write_to_file("speech.wav")'],
  image: [
    "pictures = client.images.generate",
    'Path("picture.png").write_bytes(base64.b64decode(pictures.data[0].b64_json))',
  ],
  embedding: ["found = client.embeddings.create", "print(found.data[0].embedding[:5])"],
};
const SCRIPT = {
  chat: [
    "const answer = await client.chat.completions.create",
    "console.log(answer.choices[0].message.content);",
  ],
  speech: [
    "const speech = await client.audio.speech.create",
    'await writeFile("speech.wav", Buffer.from(await speech.arrayBuffer()));',
  ],
  image: [
    "const pictures = await client.images.generate",
    'await writeFile("picture.png", Buffer.from(pictures.data[0].b64_json, "base64"));',
  ],
  embedding: [
    "const found = await client.embeddings.create",
    "console.log(found.data[0].embedding.slice(0, 5));",
  ],
};

/** The languages: [name, function of a task and the fields of its request]. */
export const LANGUAGES = [
  ["curl", curl],
  ["Python", python],
  ["JavaScript", script],
];

/** Complete a request for use outside the page. */
export function whole(task, fields) {
  if (task === "speech") return { voice: "alloy", ...fields, response_format: "wav" };
  if (task === "image") return { ...fields, response_format: "b64_json" };
  return fields;
}

const INTO_FILE = { speech: "-o speech.wav" };

function curl(task, fields) {
  const parts = [`curl ${urlOf(ROUTES[task])}`];
  if (key()) parts.push('-H "Authorization: Bearer $TRIPTYCH_API_KEY"');
  if (task === "transcription") parts.push(`-F model=${fields.model}`, "-F file=@recording.wav");
  else {
    const body = JSON.stringify(whole(task, fields), null, 2).replaceAll("'", "'\\''");
    parts.push('-H "Content-Type: application/json"', `-d '${body}'`);
  }
  if (INTO_FILE[task]) parts.push(INTO_FILE[task]);
  return parts.join(" \\\n  ");
}

function python(task, fields) {
  const given = key() ? 'os.environ["TRIPTYCH_API_KEY"]' : '"none"';
  const modules = [
    ...(task === "image" ? ["import base64"] : []),
    ...(key() ? ["import os"] : []),
    ...(task === "image" ? ["from pathlib import Path"] : []),
  ];
  const head = [
    ...modules,
    ...(modules.length ? [""] : []),
    "from openai import OpenAI",
    "",
    `client = OpenAI(base_url="${urlOf("/v1")}", api_key=${given})`,
  ];
  if (task === "transcription") return [...head, ...pythonHearing(fields)].join("\n");
  const [make, use] = PYTHON[task];
  const { known, extra } = split(task, fields);
  const lines = Object.entries(known).map(([name, value]) => `    ${name}=${literal(value)},`);
  if (extra) lines.push(`    extra_body=${literal(extra)},`);
  return [...head, `${make}(`, ...lines, ")", use].join("\n");
}

const pythonHearing = ({ model }) => [
  'with open("recording.wav", "rb") as recording:',
  `    heard = client.audio.transcriptions.create(model="${model}", file=recording)`,
  "print(heard.text)",
];

/** Return the fields that the package has parameters for, and the others. */
function split(task, fields) {
  const entries = Object.entries(whole(task, fields));
  const isKnown = ([name]) => name === "response_format" || SDK_FIELDS[task].includes(name);
  const others = entries.filter((entry) => !isKnown(entry));
  return {
    known: Object.fromEntries(entries.filter(isKnown)),
    extra: others.length ? Object.fromEntries(others) : null,
  };
}

/** Write a JSON value as Python. */
function literal(value) {
  if (Array.isArray(value)) return `[${value.map(literal).join(", ")}]`;
  if (value === null) return "None";
  if (typeof value === "boolean") return value ? "True" : "False";
  if (typeof value !== "object") return JSON.stringify(value);
  const pairs = Object.entries(value).map(([name, item]) => `"${name}": ${literal(item)}`);
  return `{${pairs.join(", ")}}`;
}

function script(task, fields) {
  const given = key() ? "process.env.TRIPTYCH_API_KEY" : '"none"';
  const isFile = task === "speech" || task === "image";
  const head = [
    ...(isFile ? ['import { writeFile } from "node:fs/promises";'] : []),
    ...(task === "transcription" ? ['import { createReadStream } from "node:fs";'] : []),
    'import OpenAI from "openai";',
    "",
    `const client = new OpenAI({ baseURL: "${urlOf("/v1")}", apiKey: ${given} });`,
  ];
  if (task === "transcription") return [...head, ...scriptHearing(fields)].join("\n");
  const [make, use] = SCRIPT[task];
  return [...head, `${make}(${JSON.stringify(whole(task, fields), null, 2)});`, use].join("\n");
}

const scriptHearing = ({ model }) => [
  "const heard = await client.audio.transcriptions.create({",
  `  model: "${model}",`,
  '  file: createReadStream("recording.wav"),',
  "});",
  "console.log(heard.text);",
];
