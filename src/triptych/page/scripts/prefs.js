// Preferences that stay between visits, in the browser's localStorage. Only values that differ from
// the page's own are stored.

const PREFIX = "triptych.";

/** Return a stored value, or `fallback`. */
export function pref(name, fallback = null) {
  try {
    return JSON.parse(localStorage.getItem(PREFIX + name)) ?? fallback;
  } catch {
    return fallback; // storage is switched off, or another program wrote there
  }
}

/** Store a value; null removes it. */
export function setPref(name, value) {
  try {
    if (value === null) localStorage.removeItem(PREFIX + name);
    else localStorage.setItem(PREFIX + name, JSON.stringify(value));
  } catch {
    // Storage is full or switched off: the value lasts as long as the page.
  }
}

const standardOf = (field) => {
  if (field.type === "checkbox") return field.defaultChecked;
  if (field.tagName !== "SELECT") return field.defaultValue;
  return (
    [...field.options].find((option) => option.defaultSelected)?.value ?? field.options[0]?.value
  );
};
const valueOf = (field) => (field.type === "checkbox" ? field.checked : field.value);

function setValue(field, value) {
  if (field.type === "checkbox") field.checked = value;
  else if (field.tagName !== "SELECT") field.value = value;
  else if ([...field.options].some((option) => option.value === value)) field.value = value;
  for (const type of ["input", "change"]) field.dispatchEvent(new Event(type, { bubbles: true }));
}

/** Restore the stored value of a field, and store each later one. */
export function keepField(field) {
  const name = field.id || `${field.form.id}.${field.name}`;
  restoreField(field, name);
  field.addEventListener("change", () => {
    const value = valueOf(field);
    setPref(name, value === standardOf(field) ? null : value);
  });
}

/** Restore a select whose options arrive late. */
export function restoreField(field, name = field.id) {
  const value = pref(name);
  if (value !== null && value !== valueOf(field)) setValue(field, value);
}

/** Set the fields of a form that `values` names. */
export function setFields(form, values) {
  for (const [name, value] of Object.entries(values)) setValue(form.elements[name], value);
}

/** Set fields to the page's own values. */
export function resetFields(fields) {
  for (const field of fields) setValue(field, standardOf(field));
}
