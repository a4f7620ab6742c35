// The picture of an activation: its curve, the number on it, and what a gate does with the other number.

import { svg } from "../../dom.js";
import { said } from "../arithmetic/explanation.js";
import { brief } from "../labels.js";
import { area, hit, text } from "./drawing.js";
import { OperationPicture } from "./operation_picture.js";

/**
 * @import { Num } from "../arithmetic/explanation.js"
 * @typedef {{
 *   name: string, curve: (x: number) => number, from: Num, neurons: Num[], factor: Num | null,
 * }} Activation `neurons`: the inputs of all neurons; `factor`: the other number, if there is a gate
 */

const LEAST_REACH = 3; // of the axis on both sides of zero
const [TOP, BOTTOM] = [14, 150];

/** @param {Activation} activation */
export function activationPicture({ name, curve, from, neurons, factor }) {
  const result = curve(from.value);
  const product = factor && `; × ${said(factor.value)} = ${said(result * factor.value)}`;
  const label = `The curve of ${name}: ${said(from.value)} becomes ${said(result)}${product ?? ""}.`;
  const reach = Math.max(LEAST_REACH, 1.15 * Math.abs(from.value));
  const ys = Array.from({ length: 121 }, (_, step) => curve(reach * (step / 60 - 1)));
  const [low, high] = [Math.min(...ys, 0), Math.max(...ys)];
  return new OperationPicture(label, (width) => {
    const room = factor ? Math.round(width * 0.5) : Math.min(width - 20, 300);
    const x = (/** @type {number} */ value) => 8 + ((room - 16) * (value / reach + 1)) / 2;
    const y = (/** @type {number} */ value) => BOTTOM - 22 - ((BOTTOM - 22 - TOP) * (value - low)) / (high - low || 1);
    const line = ys.map(
      (value, step) => `${step === 0 ? "M" : "L"} ${x(reach * (step / 60 - 1)).toFixed(1)} ${y(value).toFixed(1)}`,
    );
    const rug = neurons
      .filter(({ value }) => Math.abs(value) <= reach)
      .map(({ value }) => `M ${x(value).toFixed(1)} ${BOTTOM - 14} v 8`);
    const point = { cx: x(from.value), cy: y(result) };
    const isRight = from.value > reach * 0.2;
    const isLeft = from.value < 0;
    const [side, words] = [isLeft ? room - 8 : 8, `${neurons.length} neurons`];
    const isRoom = Math.abs(side - point.cx) > 6.4 * words.length + 34;
    return {
      height: BOTTOM + 8,
      parts: [
        [
          svg("path", { d: `M 8 ${y(0)} H ${room - 8} M ${x(0)} ${TOP - 6} V ${BOTTOM - 18}`, class: "axis" }),
          text(room - 8, y(0) + 13, brief(Number(reach.toPrecision(2))), { anchor: "end", kind: "faint" }),
          text(8, y(0) + 13, brief(-Number(reach.toPrecision(2))), { kind: "faint" }),
          text(x(0) - 5, TOP + 2, brief(Number(high.toPrecision(2))), { anchor: "end", kind: "faint" }),
          svg("path", { d: rug.join(" "), class: "rug" }),
          ...(isRoom ? [text(side, BOTTOM + 7, words, { anchor: isLeft ? "end" : "start", kind: "faint" })] : []),
        ],
        [svg("path", { d: line.join(" "), class: "curve" })],
        [
          svg("path", { d: `M ${point.cx} ${BOTTOM - 6} V ${point.cy} H ${x(0)}`, class: "projection" }),
          text(Math.min(room - 20, Math.max(24, point.cx)), BOTTOM + 7, said(from.value), {
            anchor: "middle",
            kind: "strong",
          }),
        ],
        [
          svg("circle", {
            ...{ ...point, r: 5, fill: "var(--path)" },
            ...hit({ text: `${name}(${said(from.value)}) = ${said(result)}`, num: from }),
          }),
          text(point.cx + (isRight ? -9 : 9), point.cy - 7, said(result), {
            anchor: isRight ? "end" : "start",
            kind: factor ? "strong" : "result",
          }),
        ],
        factor ? gate({ x: room + 14, width: width - room - 14 }, name, result, factor) : [],
      ],
    };
  });
}

/**
 * The result of the curve times the other number, as bars on one scale.
 * @param {{ x: number, width: number }} box
 * @param {string} name
 * @param {number} result
 * @param {Num} factor
 */
function gate({ x, width }, name, result, factor) {
  const rows = [
    { words: `${name} of the gate`, num: { value: result } },
    { words: "× linear part", num: factor },
    { words: "= product", num: { value: result * factor.value } },
  ];
  const most = Math.max(...rows.map(({ num }) => Math.abs(num.value)), 1e-9);
  const half = (width - 4) / 2;
  const zero = x + half;
  return [
    svg("path", { d: `M ${zero} ${TOP} V ${BOTTOM - 6}`, class: "axis" }),
    ...rows.flatMap(({ words, num }, index) => {
      const y = TOP + index * 46;
      const length = Math.max(0.5, (half * Math.abs(num.value)) / most);
      const isLast = index === 2;
      const kind = isLast ? "chosen" : num.value < 0 ? "negative" : "positive";
      return [
        text(x, y + 10, words, { kind: "faint" }),
        text(x + width, y + 10, said(num.value), { anchor: "end", kind: isLast ? "result" : "strong" }),
        svg("rect", { x: num.value < 0 ? zero - length : zero, y: y + 16, width: length, height: 14, class: kind }),
        area({ x, y, width, height: 34 }, { text: `${words}: ${said(num.value)}`, num }),
      ];
    }),
  ];
}
