// The dialog that asks for the API key of the service.

import { find } from "./dom.js";

/**
 * A function that shows the dialog, and resolves to the key, or to null if the user closes it. Requests that need the
 * key at the same time share one dialog.
 * @param {HTMLDialogElement} dialog
 */
export function keyDialog(dialog) {
  const [title, input] = [find(dialog, "h2"), find(dialog, "input")];
  /** @type {Promise<string | null> | null} */
  let answer = null;
  return (/** @type {boolean} */ wasWrong) => {
    if (answer) return answer;
    title.textContent = wasWrong ? "The service refused this API key" : "This service needs an API key";
    input.value = "";
    dialog.returnValue = "";
    dialog.showModal();
    answer = new Promise((resolve) => {
      dialog.addEventListener("close", () => resolve(dialog.returnValue === "use" ? input.value : null), {
        once: true,
      });
    });
    answer.finally(() => (answer = null));
    return answer;
  };
}
