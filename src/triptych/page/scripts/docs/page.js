// The API reference: the routes of /openapi.json, rendered when they are opened.

import { call, errorBox, getJson, isAborted, urlOf } from "../api.js";
import { codeTabs } from "../code/dialog.js";
import { byId, codeBlock, el, show } from "../dom.js";
import { ASK, DRAW, seedOf, SPEAK } from "../examples.js";
import { showMarkdown } from "../markdown/blocks.js";
import { markLink, showLinks, watchHealth } from "../rail.js";
import { curlOf } from "./example.js";
import { grouped } from "./groups.js";
import { contentsOf, fieldsOf, Schemas } from "./schema.js";

class Route {
  /** `models` are the served ones, for examples. */
  constructor(path, method, operation, { schemas, models }) {
    Object.assign(this, { path, method, operation, schemas, models });
    this.tag = operation.tags?.[0] ?? "";
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
    body.append(el("h3", {}, "Example"), codeBlock(curlOf(this, this.models), "shell"));
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

function routesOf(document_, models) {
  const shared = { schemas: new Schemas(document_), models };
  return Object.entries(document_.paths).flatMap(([path, methods]) =>
    Object.entries(methods).map(
      ([method, operation]) => new Route(path, method, operation, shared),
    ),
  );
}

/** Show the routes in their groups, and links to these in the rail. */
function showRoutes(routes) {
  const groups = [...grouped(routes)];
  const idOf = (name) => `group-${name.toLowerCase().replace(/[^a-z]+/g, "-")}`;
  const sections = groups.map(([name, members]) =>
    el(
      "section",
      { "aria-labelledby": idOf(name) },
      el("h2", { id: idOf(name), tabindex: "-1" }, name),
      ...members.map((route) => route.element),
    ),
  );
  byId("routes").replaceChildren(...sections);
  byId("groups").replaceChildren(
    ...groups.map(([name]) => el("a", { href: `#${idOf(name)}` }, name)),
  );
}

const EXAMPLES = {
  chat: { messages: [{ role: "user", content: ASK[0] }] },
  speech: { input: SPEAK[0] },
  transcription: {},
  image: { prompt: DRAW[1], seed: seedOf(DRAW[1]) },
  embedding: { input: ["a cat", "a kitten"] },
};

/** Show a first request for each task, with the name of a served model. */
function showQuick(models) {
  const requests = Object.entries(EXAMPLES).flatMap(([task, fields]) => {
    const model = models.find((each) => each.task === task);
    return model ? [{ task, fields: { model: model.id, ...fields } }] : [];
  });
  if (!requests.length) return;
  byId("quick-code").replaceChildren(codeTabs(requests, { isRunnable: true }));
  show(byId("quick"));
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
  watchHealth();
  markLink("docs");
  try {
    const text = await (await call("/openapi.json")).text();
    const document_ = JSON.parse(text);
    const { data: models } = await getJson("/v1/models");
    showLinks(models);
    showQuick(models);
    byId("about").textContent =
      `Version ${document_.info.version}. Any OpenAI client works with the base URL ${urlOf("/v1")}.`;
    const raw = URL.createObjectURL(new Blob([text], { type: "application/json" })); // a link cannot send a key
    byId("raw").href = raw;
    const routes = routesOf(document_, models);
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
