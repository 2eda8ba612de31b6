// JSON schemas in words: the type of a field, and the fields of an object.

import { el } from "../dom.js";
import { inline } from "../markdown/inline.js";

const MAX_DEPTH = 6;
const BOUNDS = [
  ["minimum", "maximum", ""],
  ["exclusiveMinimum", "exclusiveMaximum", " (not itself)"],
  ["minLength", "maxLength", " characters"],
  ["minItems", "maxItems", " entries"],
];

export class Schemas {
  constructor(document_) {
    this.byName = document_.components?.schemas ?? {};
  }

  /** Resolve a reference. */
  resolve(schema) {
    const name = schema?.$ref?.split("/").pop();
    return name ? { title: name, ...this.byName[name] } : (schema ?? {});
  }

  /** Return the alternatives of a schema, without null. */
  branches(schema, depth = 0) {
    const found = this.resolve(schema);
    const several = found.anyOf ?? found.oneOf ?? (found.allOf?.length === 1 ? found.allOf : null);
    if (!several || depth > MAX_DEPTH) return [found];
    return several
      .flatMap((branch) => this.branches(branch, depth + 1))
      .filter((branch) => branch.type !== "null");
  }

  /** Return the object schemas of a value or of its entries. */
  objects(schema, depth = 0) {
    return this.branches(schema).flatMap((branch) => {
      if (branch.properties) return [branch];
      return branch.type === "array" && depth < MAX_DEPTH
        ? this.objects(branch.items, depth + 1)
        : [];
    });
  }

  /** Return the names of a body's fields. */
  names(schema) {
    return this.objects(schema).flatMap((found) => Object.keys(found.properties));
  }
}

/** Return the contents of a body or response: [{type, schema}]. A stream has its events' schema. */
export function contentsOf(holder) {
  return Object.entries(holder?.content ?? {}).map(([type, { schema, itemSchema }]) => ({
    type,
    schema: schema ?? itemSchema ?? {},
  }));
}

/** Show the fields of a value as a table; several tables for several possible objects. */
export function fieldsOf(schema, schemas, depth = 0) {
  const objects = schemas.objects(schema);
  if (!objects.length) return el("p", { class: "note" }, kindOf(schema, schemas));
  const tables = objects.map((found) => tableOf(found, schemas, depth));
  if (tables.length === 1) return tables[0];
  return el(
    "div",
    { class: "either" },
    ...tables.map((table, index) =>
      el("div", {}, el("p", { class: "note" }, objects[index].title ?? "either"), table),
    ),
  );
}

function tableOf({ properties, required = [] }, schemas, depth) {
  const isNeeded = ([name]) => required.includes(name);
  const fields = Object.entries(properties).sort((one, other) => isNeeded(other) - isNeeded(one));
  const rows = fields.map(([name, field]) => {
    const isRequired = required.includes(name);
    const head = el(
      "th",
      { scope: "row" },
      el("code", {}, name),
      isRequired ? el("span", { class: "must" }, "required") : null,
    );
    return el("tr", {}, head, el("td", {}, ...aboutField(field, schemas, depth)));
  });
  return el(
    "div",
    { class: "scroll", tabindex: "0" },
    el("table", { class: "plain fields" }, el("tbody", {}, ...rows)),
  );
}

function aboutField(field, schemas, depth) {
  const about = [el("span", { class: "kind" }, kindOf(field, schemas))];
  const description = field.description ?? schemas.resolve(field).description;
  if (description) about.push(el("p", {}, ...inline(description)));
  if (depth < MAX_DEPTH && schemas.objects(field).length) {
    const inner = el(
      "details",
      {
        ontoggle: () =>
          inner.children.length === 1 && inner.append(fieldsOf(field, schemas, depth + 1)),
      },
      el("summary", {}, "Fields"),
    );
    about.push(inner);
  }
  return about;
}

/** Describe a type: `integer, 0 to 20`, `a list of text`, `"low" or "high"`. */
export function kindOf(schema, schemas, depth = 0) {
  const kinds = [
    ...new Set(schemas.branches(schema).map((branch) => oneKind(branch, schemas, depth))),
  ].filter(Boolean);
  const standard =
    schema.default === undefined || schema.default === null
      ? ""
      : `; default ${JSON.stringify(schema.default)}`;
  return (kinds.join(", or ") || "anything") + standard;
}

function oneKind(schema, schemas, depth) {
  if ("const" in schema) return JSON.stringify(schema.const);
  if (schema.enum) return schema.enum.map((value) => JSON.stringify(value)).join(", ");
  if (schema.type === "array")
    return `a list of ${schema.items && depth < MAX_DEPTH ? kindOf(schema.items, schemas, depth + 1) : "anything"}${bounds(schema)}`;
  if (schema.format === "binary") return "a file";
  if (schema.properties) return schema.title ?? "an object";
  const kind =
    { string: "text", object: "an object", boolean: "true or false" }[schema.type] ??
    schema.type ??
    "";
  return kind + bounds(schema);
}

/** Describe bounds: `, 1 to 20 entries`. */
function bounds(schema) {
  const parts = BOUNDS.map(([low, high, unit]) => [schema[low], schema[high], unit]);
  return parts
    .map(([low, high, unit]) => range(low, high) && `, ${range(low, high)}${unit}`)
    .join("");
}

function range(low, high) {
  if (low !== undefined && high !== undefined) return `${low} to ${high}`;
  if (high !== undefined) return `at most ${high}`;
  return low === undefined ? "" : `at least ${low}`;
}
