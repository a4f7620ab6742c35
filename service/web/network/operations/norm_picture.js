// The picture of a norm: the numbers of a vector before and after they are divided, on the same scale if it
// shows both.

import { svg } from "../../dom.js";
import { said } from "../arithmetic/explanation.js";
import { bars, text } from "./drawing.js";
import { OperationPicture } from "./operation_picture.js";

/** @import { Num } from "../arithmetic/explanation.js" */

const [HEIGHT, TOP, BETWEEN] = [66, 4, 34];
const MOST = 3; // times the typical size: longer bars are cut
const MOST_RATIO = 6; // of the typical sizes before and after that are drawn on one scale

/**
 * @param {{ vector: Num[], mean: number, divisor: number, isCentred: boolean, chosen?: number }} norm `isCentred`:
 *   whether the mean is subtracted; `chosen`: the index of the explained number, unless that is the divisor
 */
export function normPicture({ vector, mean, divisor, isCentred, chosen }) {
  const shift = isCentred ? `− ${said(mean)}, then ` : "";
  const label =
    `${vector.length} numbers before and after a norm: each one ${shift}÷ ${said(divisor)}. ` +
    `Afterwards, their root mean square is 1.`;
  const after = vector.map(({ value }) => (value - mean) / divisor);
  const before = vector.map((num, index) => ({
    ...{ value: num.value, num, key: index },
    text: `number ${index}: ${said(num.value)} becomes ${said(after[index])}`,
  }));
  const divided = before.map(({ text: words, key }, index) => ({ value: after[index], text: words, key }));
  const isSame = divisor < MOST_RATIO && divisor > 1 / MOST_RATIO;
  const largest = [before, divided].map((cells) => Math.max(...cells.map(({ value }) => Math.abs(value))));
  const most = [divisor, 1].map(
    (size, index) =>
      Math.min(MOST * (isSame ? Math.max(divisor, 1) : size), isSame ? Math.max(...largest) : largest[index]) || 1,
  );
  const notes = [
    isSame ? "" : `Here, 1 is as tall as ${said(most[0] / most[1])} above.`,
    largest.some((size, index) => size > most[index]) ? "The longest bars are cut." : "",
  ].filter(Boolean);
  return new OperationPicture(label, (width) => {
    const left = 46;
    const box = { x: left, width: width - left - 58, height: HEIGHT };
    const second = TOP + HEIGHT + BETWEEN;
    const lines = (/** @type {number} */ index, /** @type {number} */ middle, /** @type {number} */ size) => {
      const top = [TOP, second][index];
      const y = (/** @type {number} */ value) =>
        top + (HEIGHT / 2) * (1 - Math.min(1, Math.max(-1, value / most[index])));
      const d = [middle - size, middle + size].map((value) => `M ${left} ${y(value)} h ${box.width + 4}`).join(" ");
      return [
        svg("path", { d, class: "rms" }),
        text(width, Math.max(top + 8, y(middle + size) + 4), `± ${size === 1 ? 1 : said(size)}`, { anchor: "end" }),
      ];
    };
    const middle = left + box.width * (isCentred ? 0.6 : 0.5);
    const arrowTop = TOP + HEIGHT + 6;
    return {
      height: second + HEIGHT + (notes.length > 0 ? 16 : 4),
      parts: [
        [
          text(0, TOP + HEIGHT / 2 + 4, "before", { kind: "faint" }),
          ...bars({ ...box, y: TOP }, before, most[0], chosen),
        ],
        lines(0, mean, divisor),
        [
          text(middle - 12, arrowTop + 15, `${isCentred ? `− mean ${said(mean)},  ` : ""}÷ ${said(divisor)}`, {
            anchor: "end",
            kind: chosen === undefined ? "result" : "strong",
          }),
          svg("path", { d: `M ${middle} ${arrowTop} v 18 m -5 -6 l 5 6 l 5 -6`, class: "pointer" }),
          chosen === undefined
            ? text(middle + 14, arrowTop + 15, isCentred ? "standard deviation" : "root mean square", { kind: "faint" })
            : text(middle + 14, arrowTop + 15, `${said(vector[chosen].value)} → ${said(after[chosen])}`, {
                kind: "result",
              }),
        ],
        [
          text(0, second + HEIGHT / 2 + 4, "after", { kind: "faint" }),
          ...bars({ ...box, y: second }, divided, most[1], chosen),
        ],
        [
          ...lines(1, 0, 1),
          ...(notes.length > 0 ? [text(0, second + HEIGHT + 13, notes.join(" "), { kind: "faint" })] : []),
        ],
      ],
    };
  });
}
