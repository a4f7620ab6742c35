// Move inside a grid with the keyboard.

/**
 * The place [row, column] that an arrow key, Home or End leads to from a cell; undefined for other keys.
 * @param {string} key
 * @param {number} row
 * @param {number} column
 * @param {number} numColumns
 */
export function placeAfter(key, row, column, numColumns) {
  /** @type {Record<string, [row: number, column: number] | undefined>} */
  const places = {
    ArrowUp: [row - 1, column],
    ArrowDown: [row + 1, column],
    ArrowLeft: [row, column - 1],
    ArrowRight: [row, column + 1],
    Home: [row, 0],
    End: [row, numColumns - 1],
  };
  return places[key];
}

/**
 * Move the focus from a cell to another one, which Tab then leads to.
 * @param {HTMLElement} from
 * @param {HTMLElement} to
 * @param {FocusOptions} [options]
 */
export function moveFocus(from, to, options) {
  from.tabIndex = -1;
  to.tabIndex = 0;
  to.focus(options);
}
