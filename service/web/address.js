// The state of the page in the address, so that a link restores it.

/**
 * The state that an address describes: `view`, `model` and `prompt`, and the parameters of the view. All are texts.
 * A value that is missing from the address is the default.
 */
export function readState(search, defaults) {
  return { ...defaults, ...Object.fromEntries(new URLSearchParams(search)) };
}

/** The address of a state. Values that are equal to the defaults are left out. */
export function writeState(state, defaults) {
  const changed = Object.entries(state).filter(([name, value]) => value !== undefined && value !== defaults[name]);
  const search = new URLSearchParams(changed).toString();
  return search === "" ? "/" : `/?${search}`;
}
