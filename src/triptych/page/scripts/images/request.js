// Image requests: the events of a generation or an edit, for the views of its pictures.

import { call, events } from "../api.js";
import { sayWhileWaiting } from "../server.js";

const NUM_PREVIEWS = 3; // the maximum
const MAX_SEED = 1_000_000; // of seeds that the page draws: short enough to read and to type

export const randomSeed = () => Math.floor(Math.random() * MAX_SEED);

/** Generate the pictures of `fields` into `views`, one each. `edit` has the files of an edit. */
export async function generateInto(views, fields, { signal, edit = null, onDone = () => {} }) {
  const asked = { ...fields, stream: true, partial_images: NUM_PREVIEWS, progress: true };
  const stopWaiting = sayWhileWaiting(fields.model, (text) =>
    views.forEach((view) => view.wait(text)),
  );
  try {
    const response = await (edit ? postEdit(asked, edit, signal) : post(asked, signal));
    for await (const { data } of events(response)) {
      stopWaiting();
      const view = views[data.index];
      const type = `image/${data.output_format}`;
      if (data.type.endsWith(".progress")) view.progress(data);
      else if (data.type.endsWith(".partial_image")) view.preview(data.b64_json, type);
      else if (data.type.endsWith(".completed")) {
        view.finish(data.b64_json, type, data);
        onDone(view, data);
      }
    }
  } finally {
    stopWaiting();
  }
}

const post = (json, signal) => call("/v1/images/generations", { json, signal });

function postEdit(fields, files, signal) {
  const form = new FormData();
  for (const [name, value] of Object.entries(fields)) form.append(name, String(value));
  for (const [name, value] of Object.entries(files)) {
    if (value instanceof Blob) form.append(name, value, `${name}.png`);
    else form.append(name, value);
  }
  return call("/v1/images/edits", { form, signal });
}
