// The dialog that asks for the API key of the service.

/**
 * A function that shows the dialog, and resolves to the key, or to null if the user closes it. Requests that need the
 * key at the same time share one dialog.
 */
export function keyDialog(dialog) {
  const [title, input] = [dialog.querySelector("h2"), dialog.querySelector("input")];
  let answer = null;
  return (wasWrong) => {
    if (answer) return answer;
    title.textContent = wasWrong ? "The service refused this API key" : "This service needs an API key";
    input.value = "";
    dialog.returnValue = "";
    dialog.showModal();
    answer = new Promise((resolve) => {
      dialog.addEventListener("close", () => resolve(dialog.returnValue === "use" ? input.value : null), { once: true });
    });
    answer.finally(() => (answer = null));
    return answer;
  };
}
