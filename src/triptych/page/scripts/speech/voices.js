// The voices of a speech model.

import { getJson } from "../api.js";
import { fill, show } from "../dom.js";
import { restoreField } from "../prefs.js";

/** Fill `select` with the voices of a model, and show `field` if there is a choice. */
export async function fillVoices(select, field, model) {
  const { data } = await getJson(`/v1/audio/voices?model=${encodeURIComponent(model)}`).catch(
    () => ({ data: [] }),
  );
  const named = (voice) => (voice.language ? `${voice.name} (${voice.language})` : voice.name);
  fill(select, [["", "default"], ...data.map((voice) => [voice.id, named(voice)])]);
  restoreField(select);
  show(field, data.length > 1);
}
