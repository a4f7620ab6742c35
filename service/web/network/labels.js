// The words in the picture: the tokens at its beginning, the predictions at its end, and the numbers inside cells that
// are large enough.

import { cut, number, percent, shown } from "../format.js";
import { colour, textOn } from "../draw/colours.js";
import { bandOf } from "./scene.js";
import { headPlaces, isMasked, shareOf } from "./strips.js";

/** @import { Scene } from "./scene.js" */

export const FONT = "system-ui, sans-serif";
export const MONO = 'ui-monospace, "DejaVu Sans Mono", monospace';
const CELL = { length: 46, breadth: 13 }; // pixels from which a cell shows its number
const LINE = 15;
const THIN = 2;

/**
 * The most likely next tokens, with bars as long as their probabilities. If there are edits, a thin bar is the
 * probability without them, and an arrow leads from the token that was the most likely one.
 * @param {Scene} scene
 */
export function drawPredictions(scene) {
  const { plane, layout, line, pass, plain, palette, row: chosen } = scene;
  const { context } = plane;
  const index = line.items.length - 1;
  const [start, width] = [layout.startOf(index) + 16, layout.widthOf(index) - 20];
  if (start > layout.length || width < 24) return;
  const [first, last] = layout.rows;
  const room = plane.isDown ? 1 : Math.max(1, Math.min(5, Math.floor((layout.rowSize - 4) / LINE)));
  const faint = /** @type {const} */ ({ font: `11px ${FONT}`, colour: palette.faint, align: "right" });
  for (let row = first; row < last; row++) {
    const top = pass.predictions.get(row) ?? [];
    const before = plain?.predictions.get(row) ?? [];
    const isNear = layout.detail > 0.5;
    const isNamed = isNear || row === chosen; // else brief
    const lines = top.slice(0, isNamed ? room : 1);
    const begin = layout.rowStart(row) + layout.rowSize / 2 - ((lines.length - 1) * LINE) / 2;
    lines.forEach((token, at) => {
      const across = begin + at * LINE;
      const share = token.probability ?? 0;
      const was = before.find(({ id }) => id === token.id)?.probability ?? null;
      const isOther = at === 0 && before.length > 0 && before[0].id !== token.id;
      const text = isOther ? `${shown(before[0])} → ${shown(token)}` : shown(token);
      context.globalAlpha = row === chosen ? 1 : 0.75;
      context.fillStyle = row === chosen ? palette.path : palette.river;
      if (plane.isDown) {
        context.globalAlpha *= 0.3;
        plane.fill(start, layout.rowStart(row) + 2, Math.max(2, share * width), layout.rowSize - 4);
        context.globalAlpha = 1;
        if (was !== null) plane.fill(start, layout.rowStart(row) + layout.rowSize - 4, was * width, THIN);
        return upright(scene, text, start + 4, across, width - 8, row === chosen);
      }
      context.globalAlpha *= 0.28;
      plane.fill(start, across - LINE / 2 + 1, Math.max(2, share * width), LINE - 2);
      context.globalAlpha = row === chosen || at === 0 ? 1 : 0.7;
      if (was !== null) plane.fill(start, across + LINE / 2 - 1, was * width, THIN);
      const length = isNamed ? width - 44 : width;
      const font = `${row === chosen && at === 0 ? "600 " : ""}12px ${MONO}`;
      plane.write(cut(text, Math.max(2, Math.floor(length / 7.4))), start + 4, across, { font, colour: palette.text });
      if (isNamed && length >= 20) plane.write(percent(share), start + width, across, faint);
      return undefined;
    });
    context.globalAlpha = 1;
  }
}

/**
 * A text that stands in the column of a token: level if there is room, else turned.
 * @param {Scene} scene
 * @param {string} text
 * @param {number} along
 * @param {number} across
 * @param {number} length
 * @param {boolean} isChosen
 */
function upright({ plane, layout, palette }, text, along, across, length, isChosen) {
  const look = { font: `${isChosen ? "600 " : ""}12px ${MONO}`, colour: palette.text };
  if (text.length * 7.4 <= layout.rowSize - 2)
    return plane.write(text, across, along + 7, { ...look, align: "center" });
  const short = cut(text, Math.max(2, Math.floor(length / 7.4)));
  return plane.write(short, across, along, { ...look, turn: Math.PI / 2 });
}

/**
 * The tokens, at the beginning of their rows. They stay in sight while the network is zoomed.
 * @param {Scene} scene
 */
export function drawTokens(scene) {
  const { plane, layout, pass, palette, row: chosen } = scene;
  const { gutter } = scene.margins;
  const [first, last] = layout.rows;
  for (let row = first; row < last; row++) {
    const middle = layout.rowStart(row) + layout.rowSize / 2;
    const text = shown(pass.tokens[row]);
    if (plane.isDown) {
      upright(scene, text, 6 - gutter, middle, gutter - 10, row === chosen);
      continue;
    }
    const font = `${row === chosen ? "600 " : ""}13px ${MONO}`;
    const token = cut(text, Math.floor((gutter - 34) / 7.9));
    plane.write(token, -10, middle, { font, colour: palette.text, align: "right" });
    if (layout.detail > 0.5 || row === chosen)
      plane.write(String(row), 2 - gutter, middle, { font: `10px ${FONT}`, colour: palette.faint });
  }
}

/**
 * What other rows than the chosen one do not show from afar, for the row under the pointer: its number, and the
 * probability of the most likely next token.
 * @param {Scene} scene
 */
export function drawPointedRow({ plane, layout, line, margins: { gutter }, pass, palette, row: chosen, pointed }) {
  const row = pointed?.row ?? chosen;
  if (row === chosen || layout.detail > 0.5 || plane.isDown) return;
  const middle = layout.rowStart(row) + layout.rowSize / 2;
  plane.write(String(row), 2 - gutter, middle, { font: `10px ${FONT}`, colour: palette.faint });
  const end = line.items.length - 1;
  const right = layout.startOf(end) + layout.widthOf(end) - 4;
  const share = percent(pass.predictions.get(row)?.[0].probability);
  plane.write(share, right, middle, { font: `11px ${FONT}`, colour: palette.faint, align: "right" });
}

/**
 * Whether the cells of a stage are large enough for their numbers.
 * @param {Scene} scene
 * @param {number} index of the item
 */
export function hasNumbers({ plane, layout, line }, index) {
  const item = line.items[index];
  const [{ size }] = headPlaces(item, layout.startOf(index), layout.widthOf(index));
  const [along, across] = plane.isDown ? [CELL.breadth, CELL.length - 12] : [CELL.length, CELL.breadth];
  return size / item.columns >= along && layout.rowSize >= across;
}

/**
 * The numbers inside the cells in sight, if there is room for them.
 * @param {Scene} scene
 * @param {number} index of the item
 */
export function drawNumbers(scene, index) {
  if (!hasNumbers(scene, index)) return;
  const { plane, layout, line, pass, palette, isStep, row: chosen } = scene;
  const item = line.items[index];
  const { context } = plane;
  const places = headPlaces(item, layout.startOf(index), layout.widthOf(index));
  const size = places[0].size / item.columns;
  const room = (plane.isDown ? layout.rowSize : size) - 4;
  const range = pass.range(item.name);
  const [begin, end] = bandOf(item.height, item.branch !== null, layout.rowSize);
  const [first, last] = layout.rows;
  context.font = `11px ${FONT}`;
  context.textAlign = "center";
  context.textBaseline = "middle";
  places.forEach((place, head) => {
    // only cells that are wholly in sight
    const from = Math.max(0, Math.ceil(-place.begin / size - 0.05));
    const to = Math.min(item.columns, Math.floor((layout.length - place.begin) / size + 0.05));
    for (let row = first; row < last; row++) {
      const numbers = pass.row(item.name, row);
      if (!numbers || (isStep && row !== chosen)) continue;
      const across = layout.rowStart(row) + ((begin + end) / 2) * layout.rowSize;
      for (let column = from; column < to; column++) {
        const value = numbers[head * item.columns + column];
        const under = colour(shareOf(value, range), range.isSigned ? "diverging" : "sequential");
        const isHidden = !Number.isFinite(value) || isMasked(pass, item, row, head * item.columns + column);
        context.fillStyle = isHidden ? palette.text : textOn(under);
        context.fillText(brief(value), ...plane.point(place.begin + (column + 0.5) * size, across), room);
      }
    }
  });
}

/** A number that fits into a cell. @param {number} value */
export function brief(value) {
  if (!Number.isFinite(value)) return value < 0 ? "−∞" : number(value);
  if (Number.isInteger(value) && Math.abs(value) < 1e4) return String(value).replace("-", "−");
  const size = Math.abs(value);
  if (size >= 1e4 || (size < 1e-3 && size > 0)) return value.toExponential(1).replace("-", "−");
  return value.toPrecision(3).replace("-", "−");
}
