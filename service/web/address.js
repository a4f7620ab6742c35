// The state of the page in the fragment of the address, so that a link restores it. Browsers do not send the fragment,
// so a prompt in it reaches no log, and may be long.

/** @typedef {Record<string, string | undefined>} State all values are texts */

/**
 * The state that an address describes: `view`, `model` and `prompt`, and the parameters of the view. All are texts.
 * A value that is missing from the address is the default.
 * @template {State} Defaults
 * @param {string} fragment
 * @param {Defaults} defaults
 * @returns {State & Defaults}
 */
export function readState(fragment, defaults) {
  const given = fragment.includes("=") ? fragment.replace(/^#/, "") : ""; // without one, it is the name of an element
  return { ...defaults, ...Object.fromEntries(new URLSearchParams(given)) };
}

/** Move a state that an older link has in its query into the fragment. */
export function moveQuery() {
  if (location.search.length > 1) history.replaceState(null, "", `./#${location.search.slice(1)}`);
}

/**
 * The address of a state, relative to the page, which a proxy may serve below any path. Values that are equal to the
 * defaults are left out.
 * @param {State} state
 * @param {State} defaults
 */
export function writeState(state, defaults) {
  const changed = Object.entries(state).flatMap(([name, value]) =>
    value === undefined || value === defaults[name] ? [] : [[name, value]],
  );
  const fragment = new URLSearchParams(changed).toString();
  return fragment === "" ? "./" : `./#${fragment}`;
}
