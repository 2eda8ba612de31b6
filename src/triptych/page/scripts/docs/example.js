// A shell example of a route with its required fields.

import { urlOf } from "../api.js";
import { key } from "../key.js";
import { contentsOf } from "./schema.js";

const TASKS = [
  [/speech|voices/, "speech"],
  [/audio/, "transcription"],
  [/images/, "image"],
  [/embed|rank|score|similarity/, "embedding"],
];
const SAMPLES = {
  input: "Good morning.",
  prompt: "a red apple",
  messages: [{ role: "user", content: "Hello!" }],
};

/** Return the curl command, with the name of one of `models` that does the route's task. */
export function curlOf({ path, method, operation, schemas }, models) {
  const task = TASKS.find(([pattern]) => pattern.test(path))?.[1] ?? "chat";
  const model = models.find((each) => each.task === task)?.id ?? "MODEL";
  const samples = { ...SAMPLES, model };
  const parts = [
    `curl ${urlOf(path.replace(/\{(\w+)[^}]*\}/g, (_, name) => name.toUpperCase()))}`,
  ];
  if (method !== "get" && method !== "post") parts.push(`-X ${method.toUpperCase()}`);
  if (key()) parts.push('-H "Authorization: Bearer $TRIPTYCH_API_KEY"');
  const [content] = contentsOf(operation.requestBody);
  if (content?.type === "application/json") {
    const body = JSON.stringify(exampleOf(content.schema, schemas, samples));
    parts.push("-H 'Content-Type: application/json'", `-d '${body.replaceAll("'", "'\\''")}'`);
  } else if (content) {
    parts.push(
      ...required(content.schema, schemas).map(
        ([name, field]) =>
          `-F ${name}=${schemas.branches(field)[0].format === "binary" ? "@FILE" : (samples[name] ?? "TEXT")}`,
      ),
    );
  }
  return parts.join(" \\\n  ");
}

function required(schema, schemas) {
  const [found] = schemas.objects(schema);
  return (found?.required ?? []).map((name) => [name, found.properties[name]]);
}

function exampleOf(schema, schemas, samples) {
  return Object.fromEntries(
    required(schema, schemas).map(([name, field]) => [
      name,
      samples[name] ?? valueOf(field, schemas, samples),
    ]),
  );
}

function valueOf(field, schemas, samples, depth = 0) {
  const [branch = {}] = schemas.branches(field);
  if ("const" in branch) return branch.const;
  if (branch.enum) return branch.enum[0];
  if (branch.type === "array")
    return depth < 4 ? [valueOf(branch.items ?? {}, schemas, samples, depth + 1)] : [];
  if (branch.properties) return exampleOf(branch, schemas, samples);
  return (
    { integer: branch.minimum ?? 1, number: branch.minimum ?? 1, boolean: true }[branch.type] ??
    "TEXT"
  );
}
