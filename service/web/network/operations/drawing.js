// The small parts of the pictures of operations: texts, cells, bars, arrows, and what the pointer can hit.

import { svg } from "../../dom.js";
import { colour, css, textOn } from "../../draw/colours.js";
import { cut } from "../../format.js";
import { brief } from "../labels.js";
import { sizeOf } from "../strips.js";
import { said } from "../arithmetic/explanation.js";

/**
 * @import { Num } from "../arithmetic/explanation.js"
 * @typedef {{ x: number, y: number, width: number, height: number }} Box
 * @typedef {{ text: string, num?: Num, key?: string | number }} Hit `text`: what is said of it; `num`: where it comes
 *   from; `key`: elements with the same one are marked together
 * @typedef {Hit & { value: number }} Cell
 * @typedef {"" | "faint" | "token" | "result" | "strong"} Kind
 */

const LEAST_CELL = 2; // pixels; of narrower cells, some neighbours are one
const CELL_LETTER = 6; // pixels of a letter in a cell
const LETTER = { "": 6.4, token: 7.3 }; // pixels
const FRAME = 66; // around a number
const LEAST_MARK = 5;
const PERCENTILE = 0.985;

/**
 * A text. `room`: the pixels that it may take; the rest is cut.
 * @param {number} x
 * @param {number} y of its base line
 * @param {string} content
 * @param {{ anchor?: "start" | "middle" | "end", kind?: Kind, room?: number }} [look]
 */
export function text(x, y, content, { anchor = "start", kind = "", room = Infinity } = {}) {
  const most = Math.max(2, Math.floor(room / LETTER[kind === "token" ? "token" : ""]));
  return svg("text", { x, y, "text-anchor": anchor, class: kind }, cut(content, most));
}

/**
 * The attributes of an element that the pointer can hit.
 * @param {Hit} hit
 */
export function hit({ text: words, num, key }) {
  const place = num?.stage === undefined ? {} : { stage: num.stage, row: num.row, column: num.column };
  return {
    class: num?.stage === undefined ? "hit" : "hit leads",
    dataset: { text: words, ...place, ...(key === undefined ? {} : { key }) },
  };
}

/**
 * An area without a colour of its own that the pointer can hit.
 * @param {Box & { rx?: number }} box
 * @param {Hit} what
 */
export function area(box, what) {
  return svg("rect", { ...box, fill: "transparent", ...hit(what) });
}

/**
 * The size that gets the strongest colour, or 1: a high percentile, so that a few large numbers do not make all others
 * pale.
 * @param {number[]} values
 */
export function strongest(values) {
  const sizes = values
    .filter(Number.isFinite)
    .map(Math.abs)
    .sort((a, b) => a - b);
  return sizes[Math.floor(PERCENTILE * (sizes.length - 1))] || sizes.at(-1) || 1;
}

/**
 * Numbers as coloured cells in a row. If there are too many, some neighbours share a cell.
 * @param {Box} box
 * @param {Cell[]} cells
 * @param {number} size the number with the strongest colour
 * @returns {SVGElement[]}
 */
export function strip({ x, y, width, height }, cells, size) {
  const bin = Math.max(1, Math.ceil((cells.length * LEAST_CELL) / width));
  const step = (width * bin) / cells.length;
  const longest = Math.max(...cells.map(({ value }) => brief(value).length));
  const hasTexts = height >= 12 && bin === 1 && step >= CELL_LETTER * longest + 6;
  return binned(cells, bin).flatMap((some, index) => {
    const [first] = some;
    const isHidden = some.every((cell) => !Number.isFinite(cell.value));
    const values = some.map((cell) => cell.value);
    const value = isHidden || bin === 1 ? first.value : sizeOf(values, 0, some.length);
    const dye = colour(0.5 + value / size / 2, "diverging");
    const place = { x: x + index * step, y, width: (step * some.length) / bin, height };
    const cell = svg("rect", {
      ...place,
      ...hit(bin === 1 ? first : together(some)),
      fill: isHidden ? "rgb(128 128 128 / 35%)" : css(dye),
    });
    if (!hasTexts || isHidden) return [cell];
    const number = svg(
      "text",
      { x: place.x + step / 2, y: y + height / 2 + 4, "text-anchor": "middle", fill: textOn(dye), class: "in-cell" },
      brief(value),
    );
    return [cell, number];
  });
}

/**
 * @template T
 * @param {T[]} cells
 * @param {number} bin
 * @returns {T[][]}
 */
function binned(cells, bin) {
  return Array.from({ length: Math.ceil(cells.length / bin) }, (_, at) => cells.slice(at * bin, (at + 1) * bin));
}

/**
 * What is said of neighbours in one cell: the largest of them.
 * @param {Cell[]} some
 * @returns {Hit}
 */
function together(some) {
  const finite = some.filter(({ value }) => Number.isFinite(value));
  const largest = (finite.length > 0 ? finite : some).reduce((most, cell) =>
    Math.abs(cell.value) > Math.abs(most.value) ? cell : most,
  );
  return { ...largest, key: some[0].key, text: `the largest of ${some.length} neighbours: ${largest.text}` };
}

/**
 * Numbers as bars up and down from a line at zero.
 * @param {Box} box
 * @param {Cell[]} cells
 * @param {number} most the number that fills the height; longer bars are cut there
 * @param {number} [chosen]
 */
export function bars({ x, y, width, height }, cells, most, chosen) {
  const bin = Math.max(1, Math.ceil((cells.length * LEAST_CELL) / width));
  const step = (width * bin) / cells.length;
  const zero = y + height / 2;
  const nodes = binned(cells, bin).flatMap((some, index) => {
    const hasChosen = chosen !== undefined && Math.floor(chosen / bin) === index;
    const shown = bin === 1 ? some[0] : together(some);
    const { value } = hasChosen
      ? cells[chosen]
      : some.reduce((a, b) => (Math.abs(b.value) > Math.abs(a.value) ? b : a));
    const length = Math.max(0.5, (Math.min(1, Math.abs(value) / most) * height) / 2);
    const inset = step > 4 ? step * 0.15 : 0;
    const place = { x: x + index * step + inset, width: step - 2 * inset };
    const kind = hasChosen ? "chosen" : value < 0 ? "negative" : "positive";
    return [
      svg("rect", { ...place, y: value < 0 ? zero : zero - length, height: length, class: kind }),
      area({ ...place, y, height }, hasChosen ? cells[chosen] : shown),
    ];
  });
  return [svg("path", { d: `M ${x} ${zero} h ${width}`, class: "axis" }), ...nodes];
}

/**
 * A mark around one cell of strips that stand one below the other.
 * @param {Box} box from the first strip to the last one
 * @param {number} index
 * @param {number} count
 */
export function mark({ x, y, width, height }, index, count) {
  const step = width / count;
  const size = Math.max(LEAST_MARK, step);
  const middle = x + (index + 0.5) * step;
  return svg("rect", { x: middle - size / 2, y: y - 1, width: size, height: height + 2, class: "mark", rx: 1.5 });
}

/**
 * Numbers in frames with texts between them, in one line that may begin further left. The last frame is the result.
 * `first`: the middle of the first frame.
 * @param {number} left
 * @param {number} y
 * @param {number} room
 * @param {(string | number)[]} words
 */
export function chain(left, y, room, words) {
  const widths = words.map((word) => (typeof word === "number" ? FRAME : 6.2 * word.length + 8));
  const total = widths.reduce((sum, width) => sum + width, 0);
  let x = Math.max(1, Math.min(left + (room - total) / 2, left + room - total));
  const begin = x;
  const nodes = words.flatMap((word, index) => {
    const middle = x + widths[index] / 2;
    x += widths[index];
    if (typeof word === "string") return [text(middle, y + 15, word, { anchor: "middle", kind: "faint" })];
    const isLast = index === words.length - 1;
    return [
      svg("rect", {
        x: middle - FRAME / 2,
        y,
        width: FRAME,
        height: 21,
        rx: 5,
        class: isLast ? "frame result" : "frame",
      }),
      text(middle, y + 15, said(word), { anchor: "middle", kind: isLast ? "result" : "strong" }),
    ];
  });
  return { nodes, first: begin + FRAME / 2 };
}

/**
 * An arrow from one point to another.
 * @param {[number, number]} from
 * @param {[number, number]} to
 * @param {string} kind
 */
export function arrow([x1, y1], [x2, y2], kind) {
  const angle = Math.atan2(y2 - y1, x2 - x1);
  const size = Math.min(8, Math.hypot(x2 - x1, y2 - y1));
  const wing = (/** @type {number} */ turn) =>
    `${(x2 - size * Math.cos(angle + turn)).toFixed(2)} ${(y2 - size * Math.sin(angle + turn)).toFixed(2)}`;
  const end = `${(x2 - size * 0.7 * Math.cos(angle)).toFixed(2)} ${(y2 - size * 0.7 * Math.sin(angle)).toFixed(2)}`;
  return svg(
    "g",
    { class: kind },
    svg("path", { d: `M ${x1} ${y1} L ${end}`, class: "shaft" }),
    svg("path", { d: `M ${x2.toFixed(2)} ${y2.toFixed(2)} L ${wing(0.42)} L ${wing(-0.42)} Z`, class: "tip" }),
  );
}
