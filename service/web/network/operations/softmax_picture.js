// The picture of a softmax: each number and the share that it becomes.

import { svg } from "../../dom.js";
import { count, percent } from "../../format.js";
import { sharesOf } from "../arithmetic/softmax.js";
import { LISTED, said } from "../arithmetic/explanation.js";
import { area, text } from "./drawing.js";
import { OperationPicture } from "./operation_picture.js";

/** @import { Num } from "../arithmetic/explanation.js" */

const PITCH = 15;
const [TOP, BAR] = [18, 10];

/**
 * @param {{ name: string, num: Num }[]} numbers
 * @param {number} chosen
 * @param {{ from: string, to: string, isRanked?: boolean }} words `from`, `to`: headings; `isRanked`: the largest first
 */
export function softmaxPicture(numbers, chosen, { from, to, isRanked = false }) {
  const { powers, sum } = sharesOf(numbers);
  const entries = numbers.map((each, index) => ({ ...each, share: powers[index] / sum }));
  const { name, num, share } = entries[chosen];
  const finite = entries.filter((each) => Number.isFinite(each.num.value)).length;
  const label =
    `Softmax of ${finite} numbers: ${said(num.value)} of ${name} becomes ${percent(share)}. ` +
    "All shares add up to 100 %.";
  const shown = listed(entries, chosen, isRanked);
  const left = entries.filter((each, index) => Number.isFinite(each.num.value) && !shown.includes(index));
  const masked = entries.length - finite - shown.filter((index) => !Number.isFinite(entries[index].num.value)).length;
  const rest = [
    left.length > 0
      ? `${count(left.length)} others share ${percent(left.reduce((total, each) => total + each.share, 0))}`
      : "",
    masked > 0 ? `${masked} masked` : "",
  ].filter(Boolean);
  return new OperationPicture(label, (width) => {
    const names = Math.round(width * 0.24);
    const link = Math.round(width * 0.08);
    const room = (width - names - 6 - 58 - link - 54) / 2;
    const [scores, values] = [names + 6, names + 6 + room + 58];
    const shares = values + link + 4;
    const sizes = shown.map((index) => entries[index].num.value).filter(Number.isFinite);
    const [low, high] = [Math.min(0, ...sizes), Math.max(0, ...sizes)];
    const place = (/** @type {number} */ value) => scores + (room * (value - low)) / (high - low || 1);
    const most = Math.max(...shown.map((index) => entries[index].share), 1e-9);
    const rows = shown.map((index, at) => {
      const entry = entries[index];
      const y = TOP + at * PITCH;
      const [middle, isChosen] = [y + BAR / 2, index === chosen];
      const isMasked = !Number.isFinite(entry.num.value);
      const words = `${entry.name}: ${isMasked ? "masked" : said(entry.num.value)} becomes ${percent(entry.share)}`;
      const kind = isChosen ? "chosen" : "positive";
      const [begin, end] = [place(Math.min(0, entry.num.value)), place(Math.max(0, entry.num.value))];
      const length = Math.max(0.5, (room * entry.share) / most);
      return {
        before: [
          text(names, y + 9, entry.name, { anchor: "end", kind: isChosen ? "result" : "", room: names }),
          text(values, y + 9, isMasked ? "−∞" : said(entry.num.value), {
            anchor: "end",
            kind: isMasked ? "faint" : isChosen ? "result" : "",
          }),
          isMasked
            ? svg("rect", { x: scores, y, width: room, height: BAR, class: "masked" })
            : svg("rect", {
                ...{ x: begin, y, width: Math.max(0.5, end - begin), height: BAR },
                class: isChosen ? "chosen" : entry.num.value < 0 ? "negative" : "positive",
              }),
        ],
        between: svg("path", {
          d: `M ${values + 4} ${middle} H ${shares - 3}`,
          class: isChosen ? "link chosen-line" : "link",
          "stroke-width": 0.75 + 3 * entry.share,
        }),
        after: [
          svg("rect", { x: shares, y, width: length, height: BAR, class: kind }),
          text(width, y + 9, percent(entry.share), { anchor: "end", kind: isChosen ? "result" : "" }),
          area({ x: 0, y: y - 2, width, height: PITCH - 1, rx: 2 }, { text: words, num: entry.num }),
        ],
      };
    });
    const bottom = TOP + rows.length * PITCH;
    const foot = [
      text(0, bottom + 10, rest.join("; "), { kind: "faint" }),
      text(width, bottom + 10, "Σ = 100 %", { anchor: "end", kind: "faint" }),
    ];
    const axis = svg("path", { d: `M ${place(0)} ${TOP - 2} V ${bottom - 2}`, class: "axis" });
    return {
      height: bottom + 14,
      parts: [
        [text(scores, 10, from, { kind: "faint" }), axis, ...rows.flatMap(({ before }) => before)],
        [text((values + shares) / 2 - 6, 10, "eˣ ÷ Σ", { anchor: "middle", kind: "faint" })],
        rows.map(({ between }) => between),
        [text(width, 10, to, { anchor: "end", kind: "faint" }), ...rows.flatMap(({ after }) => after)],
        foot,
      ],
    };
  });
}

/**
 * The entries that are drawn: all, or those with the largest shares and the chosen one.
 * @param {{ num: Num, share: number }[]} entries
 * @param {number} chosen
 * @param {boolean} isRanked
 */
function listed(entries, chosen, isRanked) {
  const order = [...entries.keys()].sort((a, b) => entries[b].share - entries[a].share || a - b);
  const most = Math.min(LISTED, order.length);
  const shown = order.indexOf(chosen) < most ? order.slice(0, most) : [...order.slice(0, most - 1), chosen];
  return isRanked ? shown : shown.sort((a, b) => a - b);
}
