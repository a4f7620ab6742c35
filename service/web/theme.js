// The light and the dark theme. Without a choice of the user, the system decides.

const KEY = "forwardscope-theme";
const darkSystem = matchMedia("(prefers-color-scheme: dark)");
const { style } = document.documentElement;

/** Colours of the style sheets that scripts read. As registered colours, they are those of the theme. */
export const COLOURS = "page panel text faint line river bank path branch negative edit".split(" ");
for (const name of COLOURS)
  CSS.registerProperty({ name: `--${name}`, syntax: "<color>", inherits: true, initialValue: "black" });

/** Whether the page is dark at this moment. */
export function isDark() {
  return style.colorScheme ? style.colorScheme === "dark" : darkSystem.matches;
}

/**
 * Let a button change the theme. The window gets an event "themechange", so that canvases are drawn again.
 * @param {HTMLButtonElement} button
 */
export function connectTheme(button) {
  const chosen = localStorage.getItem(KEY);
  if (chosen === "light" || chosen === "dark") style.colorScheme = chosen;
  const changed = () => {
    button.textContent = isDark() ? "☀" : "☾";
    button.title = isDark() ? "Light theme" : "Dark theme";
    button.setAttribute("aria-label", button.title);
    dispatchEvent(new Event("themechange"));
  };
  button.addEventListener("click", () => {
    style.colorScheme = isDark() ? "light" : "dark";
    localStorage.setItem(KEY, style.colorScheme);
    changed();
  });
  darkSystem.addEventListener("change", changed);
  changed();
}
