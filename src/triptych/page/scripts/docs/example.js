// A shell example of a route with its required fields.

import { contentsOf } from "./schema.js";

const SAMPLES = {
  model: "MODEL",
  input: "Good morning.",
  prompt: "a red apple",
  messages: [{ role: "user", content: "Hello!" }],
};

/** Return the curl command. */
export function curlOf({ path, method, operation, schemas }) {
  const parts = [
    `curl ${location.origin}${path.replace(/\{(\w+)[^}]*\}/g, (_, name) => name.toUpperCase())}`,
  ];
  if (method !== "get" && method !== "post") parts.push(`-X ${method.toUpperCase()}`);
  parts.push('-H "Authorization: Bearer $KEY"');
  const [content] = contentsOf(operation.requestBody);
  if (content?.type === "application/json") {
    const body = JSON.stringify(exampleOf(content.schema, schemas));
    parts.push("-H 'Content-Type: application/json'", `-d '${body.replaceAll("'", "'\\''")}'`);
  } else if (content) {
    parts.push(
      ...required(content.schema, schemas).map(
        ([name, field]) =>
          `-F ${name}=${schemas.branches(field)[0].format === "binary" ? "@FILE" : (SAMPLES[name] ?? "TEXT")}`,
      ),
    );
  }
  return parts.join(" \\\n  ");
}

function required(schema, schemas) {
  const [found] = schemas.objects(schema);
  return (found?.required ?? []).map((name) => [name, found.properties[name]]);
}

function exampleOf(schema, schemas) {
  return Object.fromEntries(
    required(schema, schemas).map(([name, field]) => [
      name,
      SAMPLES[name] ?? valueOf(field, schemas),
    ]),
  );
}

function valueOf(field, schemas, depth = 0) {
  const [branch = {}] = schemas.branches(field);
  if ("const" in branch) return branch.const;
  if (branch.enum) return branch.enum[0];
  if (branch.type === "array")
    return depth < 4 ? [valueOf(branch.items ?? {}, schemas, depth + 1)] : [];
  if (branch.properties) return exampleOf(branch, schemas);
  return (
    { integer: branch.minimum ?? 1, number: branch.minimum ?? 1, boolean: true }[branch.type] ??
    "TEXT"
  );
}
