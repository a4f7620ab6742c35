// The edits of the address in the other views than Interventions, and the line that says whether they are applied.

/** @import { Edit } from "./answers.js" */

import { actionButton, el } from "./dom.js";

/**
 * Show how many edits the address has, or nothing if there are none. `text`: the edits of the address, or undefined;
 * `href` and `open`: the address of the view Interventions, and how to open it; `remove`: how to remove the edits;
 * `isApplied`: by the view that is shown.
 * @param {HTMLElement} box
 * @param {string | undefined} text
 * @param {{ href: string, open: () => unknown, remove: () => unknown, isApplied: boolean }} view
 */
export function showEditsNote(box, text, { href, open, remove, isApplied }) {
  const edits = editsIn(text);
  const number = edits?.length ?? null;
  const numGenerated = edits?.filter(({ positions }) => positions === "generated").length ?? 0;
  box.hidden = number === 0;
  if (box.hidden) return;
  const follow = (/** @type {MouseEvent} */ event) => {
    if (event.ctrlKey || event.metaKey || event.shiftKey) return;
    event.preventDefault();
    open();
  };
  const what = number === null ? "Edits are" : number === 1 ? "1 edit is" : `${number} edits are`;
  box.replaceChildren(
    isApplied
      ? `${what} applied. ${numGenerated > 0 ? `Of these, ${numGenerated} only at generated tokens. ` : ""}`
      : `${what} set in the view Interventions. This view does not apply edits: it shows the model without them. `,
    el("a", { href, onclick: follow }, "Open Interventions"),
    " ",
    actionButton(number === 1 ? "Remove the edit" : "Remove the edits", remove, { class: "small" }),
  );
}

/**
 * The edits in a text of the address: none if there is no text, and null if it is not a list.
 * @param {string | undefined} text
 * @returns {Edit[] | null}
 */
export function editsIn(text) {
  if (text === undefined || text === "") return [];
  try {
    const edits = JSON.parse(text);
    return Array.isArray(edits) ? edits : null;
  } catch {
    return null;
  }
}
