// The picture of a norm: the numbers of a vector before and after they are divided, on the same scale.

import { svg } from "../../dom.js";
import { said } from "../arithmetic/explanation.js";
import { bars, text } from "./drawing.js";
import { OperationPicture } from "./operation_picture.js";

/** @import { Num } from "../arithmetic/explanation.js" */

const [HEIGHT, TOP, BETWEEN] = [66, 4, 34];
const MOST = 3; // times the typical size: longer bars are cut

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
  const typical = Math.max(divisor, 1);
  const largest = Math.max(...before.map(({ value }) => Math.abs(value)), ...after.map((value) => Math.abs(value)));
  const most = Math.min(MOST * typical, largest) || 1;
  const isCut = largest > most;
  return new OperationPicture(label, (width) => {
    const left = 60;
    const box = { x: left, width: width - left - 52, height: HEIGHT };
    const second = TOP + HEIGHT + BETWEEN;
    const lines = (/** @type {number} */ top, /** @type {number} */ middle, /** @type {number} */ size) => {
      const y = (/** @type {number} */ value) => top + (HEIGHT / 2) * (1 - Math.min(1, Math.max(-1, value / most)));
      const d = [middle - size, middle + size].map((value) => `M ${left} ${y(value)} h ${box.width + 4}`).join(" ");
      return [
        svg("path", { d, class: "rms" }),
        text(width, Math.max(top + 8, y(middle + size) + 4), said(size), { anchor: "end", kind: "result" }),
      ];
    };
    const middle = left + box.width / 2;
    const arrowTop = TOP + HEIGHT + 6;
    return {
      height: second + HEIGHT + (isCut ? 16 : 4),
      parts: [
        [text(0, TOP + HEIGHT / 2 + 4, "before", { kind: "faint" }), ...bars({ ...box, y: TOP }, before, most, chosen)],
        lines(TOP, mean, divisor),
        [
          text(middle - 12, arrowTop + 15, `${isCentred ? `− mean ${said(mean)},  ` : ""}÷ ${said(divisor)}`, {
            anchor: "end",
            kind: chosen === undefined ? "result" : "strong",
          }),
          svg("path", { d: `M ${middle} ${arrowTop} v 18 m -5 -6 l 5 6 l 5 -6`, class: "pointer" }),
          ...(chosen === undefined
            ? []
            : [
                text(middle + 14, arrowTop + 15, `${said(vector[chosen].value)} → ${said(after[chosen])}`, {
                  kind: "result",
                }),
              ]),
        ],
        [
          text(0, second + HEIGHT / 2 + 4, "after", { kind: "faint" }),
          ...bars({ ...box, y: second }, divided, most, chosen),
        ],
        [
          ...lines(second, 0, 1),
          ...(isCut ? [text(left, second + HEIGHT + 13, "The longest bars are cut.", { kind: "faint" })] : []),
        ],
      ],
    };
  });
}
