// The API reference: the routes of /openapi.json, rendered when they are opened.

import { call, errorBox, isAborted } from "../api.js";
import { byId, copy, el, show } from "../dom.js";
import { showMarkdown } from "../markdown/blocks.js";
import { curlOf } from "./example.js";
import { contentsOf, fieldsOf, Schemas } from "./schema.js";

const TAGS = {
  text: "Text",
  responses: "Responses",
  speech: "Speech",
  audio: "Audio",
  images: "Images",
  models: "Models",
  health: "Health",
  engine: "Engine",
};

class Route {
  constructor(path, method, operation, schemas) {
    Object.assign(this, { path, method, operation, schemas });
    this.id = `${method}-${path.replace(/[^\w]+/g, "-").replace(/^-|-$/g, "")}`;
    const badge = el("span", { class: `method ${method}` }, method.toUpperCase());
    const lead = el(
      "span",
      { class: "lead" },
      firstLine(operation.description ?? operation.summary ?? ""),
    );
    this.element = el(
      "details",
      { class: "route", id: this.id, ontoggle: () => this.#open() },
      el("summary", {}, badge, el("code", {}, path), lead),
    );
  }

  /** The text that is searched. */
  get words() {
    this.cachedWords ??=
      `${this.path} ${this.operation.description ?? ""} ${this.#fieldNames().join(" ")}`.toLowerCase();
    return this.cachedWords;
  }

  #fieldNames() {
    const bodies = contentsOf(this.operation.requestBody).map(({ schema }) => schema);
    return [
      ...(this.operation.parameters ?? []).map(({ name }) => name),
      ...bodies.flatMap((schema) => this.schemas.names(schema)),
    ];
  }

  #open() {
    if (!this.element.open) return;
    history.replaceState(null, "", `#${this.id}`);
    if (this.element.children.length === 1) this.element.append(this.#body());
  }

  #body() {
    const { operation, schemas } = this;
    const body = el("div", { class: "route-body" });
    const [, more = ""] = (operation.description ?? "").split(/\n([^]*)/); // the summary has the first line
    const about = el("div", { class: "markdown" });
    showMarkdown(about, more);
    if (more) body.append(about);
    const parameters = operation.parameters ?? [];
    if (parameters.length)
      body.append(el("h3", {}, "Parameters"), parameterTable(parameters, schemas));
    for (const { type, schema } of contentsOf(operation.requestBody))
      body.append(el("h3", {}, "Body", el("code", {}, type)), fieldsOf(schema, schemas));
    const curl = curlOf(this);
    const button = el(
      "button",
      { type: "button", class: "quiet", onclick: () => copy(curl, button) },
      "Copy",
    );
    body.append(
      el("h3", {}, "Example"),
      el(
        "div",
        { class: "code-block" },
        el("div", { class: "code-head" }, el("span", {}, "shell"), button),
        el("pre", { tabindex: "0" }, el("code", {}, curl)),
      ),
    );
    body.append(
      el("h3", {}, "Responses"),
      ...Object.entries(operation.responses ?? {}).map(([status, response]) =>
        answerOf(status, response, schemas),
      ),
    );
    return body;
  }
}

const firstLine = (text) => text.split("\n")[0];

function parameterTable(parameters, schemas) {
  const properties = Object.fromEntries(
    parameters.map(({ name, schema, description }) => [
      name,
      { ...schema, description: description ?? schema?.description },
    ]),
  );
  const required = parameters.filter((parameter) => parameter.required).map(({ name }) => name);
  return fieldsOf({ type: "object", properties, required }, schemas);
}

function answerOf(status, response, schemas) {
  const contents = contentsOf(response).filter(({ schema }) => Object.keys(schema).length);
  const parts = contents.map(({ type, schema }) =>
    el("div", {}, el("p", {}, el("code", {}, type)), fieldsOf(schema, schemas)),
  );
  return el(
    "details",
    { class: "answer" },
    el("summary", {}, el("b", {}, status), ` ${response.description ?? ""}`),
    ...parts,
  );
}

function routesOf(document_) {
  const schemas = new Schemas(document_);
  return Object.entries(document_.paths).flatMap(([path, methods]) =>
    Object.entries(methods).map(
      ([method, operation]) => new Route(path, method, operation, schemas),
    ),
  );
}

/** Show the routes grouped by tag, in the order of `TAGS`. */
function showRoutes(routes) {
  const groups = Map.groupBy(routes, (route) => route.operation.tags?.[0] ?? "other");
  const tags = [...new Set([...Object.keys(TAGS), ...groups.keys()])].filter((tag) =>
    groups.has(tag),
  );
  const sections = tags.map((tag) => {
    const members = groups.get(tag).map((route) => route.element);
    return el(
      "section",
      { "aria-label": TAGS[tag] ?? tag },
      el("h2", {}, TAGS[tag] ?? tag),
      ...members,
    );
  });
  byId("routes").replaceChildren(...sections);
}

function search(routes) {
  const words = byId("find").value.toLowerCase().split(/\s+/).filter(Boolean);
  const shown = routes.filter((route) => {
    const isFound = words.every((word) => route.words.includes(word));
    show(route.element, isFound);
    return isFound;
  });
  for (const section of byId("routes").children)
    show(
      section,
      [...section.querySelectorAll("details.route")].some((route) => !route.hidden),
    );
  byId("found").textContent = words.length ? `${shown.length} of ${routes.length} routes` : "";
}

async function start() {
  try {
    const text = await (await call("/openapi.json")).text();
    const document_ = JSON.parse(text);
    byId("about").textContent =
      `Version ${document_.info.version}. Any OpenAI client works with the base URL ${location.origin}/v1.`;
    const raw = URL.createObjectURL(new Blob([text], { type: "application/json" })); // a link cannot send a key
    byId("raw").href = raw;
    const routes = routesOf(document_);
    showRoutes(routes);
    byId("find").addEventListener("input", () => search(routes));
    search(routes); // for input during loading
    const wanted = routes.find((route) => route.id === location.hash.slice(1));
    if (wanted) wanted.element.open = true;
    wanted?.element.scrollIntoView();
  } catch (error) {
    if (!isAborted(error)) byId("routes").replaceChildren(errorBox(error, start));
  }
}

start();
