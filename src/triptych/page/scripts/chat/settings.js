// The chat settings: system prompt, sampling, tools, response format.

import { Advice } from "../api.js";
import { byId, chips, show } from "../dom.js";
import { keepField, resetFields, setFields } from "../prefs.js";

const PRESETS = {
  Precise: { temperature: 0, top_p: "" },
  Balanced: { temperature: 0.7, top_p: 0.9 },
  Creative: { temperature: 1.1, top_p: 0.95 },
};
const NUMBERS = ["temperature", "top_p", "max_tokens", "seed", "repetition_penalty"];

export function openDrawer({ canSpeak }) {
  const button = byId("chat-drawer-open");
  const drawer = byId("chat-drawer");
  const set = (isOpen) => {
    show(drawer, isOpen);
    button.setAttribute("aria-expanded", String(isOpen));
    if (isOpen) drawer.querySelector("textarea").focus();
    else button.focus();
  };
  button.addEventListener("click", () => set(drawer.hidden));
  drawer.addEventListener("keydown", (event) => {
    if (event.key === "Escape") set(false);
  });
  const form = byId("chat-settings");
  form.addEventListener("submit", (event) => event.preventDefault());
  const fields = [...form.elements].filter((field) => field.name);
  fields.forEach(keepField);
  byId("chat-presets").append(
    ...chips(Object.keys(PRESETS), (name) => setFields(form, PRESETS[name])),
  );
  byId("chat-reset").addEventListener("click", () => resetFields(fields));
  show(byId("chat-aloud-field"), canSpeak);
}

/** Return the settings: {system, fields, isAloud}. Throws `Advice` for invalid ones. */
export function readSettings() {
  const form = byId("chat-settings");
  if (!form.checkValidity()) {
    show(byId("chat-drawer"));
    form.reportValidity();
    throw new Advice("A chat setting is out of range.");
  }
  const values = Object.fromEntries(new FormData(form));
  const fields = {};
  for (const name of NUMBERS) if (values[name] !== "") fields[name] = Number(values[name]);
  if (values.thinking) fields.enable_thinking = values.thinking === "true";
  if (values.tools.trim()) {
    fields.tools = parse(values.tools, "Tools");
    if (values.tool_choice) fields.tool_choice = values.tool_choice;
  }
  if (values.schema.trim()) {
    const schema = parse(values.schema, "Response format");
    fields.response_format = { type: "json_schema", json_schema: { name: "answer", schema } };
  }
  return { system: values.system.trim(), fields, isAloud: values.aloud === "on" };
}

function parse(text, label) {
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new Advice(`${label} in the settings is not valid JSON: ${error.message}`);
  }
}
