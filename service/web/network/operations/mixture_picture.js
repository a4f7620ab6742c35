// The picture of what a head takes from the tokens: the value of each, as thick as its weight, and their sum.

import { svg } from "../../dom.js";
import { percent } from "../../format.js";
import { said } from "../arithmetic/explanation.js";
import { area, strongest, mark, strip, text } from "./drawing.js";
import { OperationPicture } from "./operation_picture.js";

/**
 * @import { Num } from "../arithmetic/explanation.js"
 * @typedef {{ name: string, weight: Num, values: Num[] }} Source
 */

const MOST = 7; // tokens
const [PITCH, THICK] = [17, 15];

/**
 * @param {{ label: string, sources: Source[], name: string, chosen: number }} mixture `sources`: all tokens; `name`: of
 *   the head; `chosen`: the index of the explained number
 */
export function mixturePicture({ label, sources, name, chosen }) {
  const sum = sources[0].values.map((_, index) =>
    sources.reduce((total, { weight, values }) => total + weight.value * values[index].value, 0),
  );
  const order = sources
    .filter(({ weight }) => weight.value > 0)
    .toSorted((one, other) => other.weight.value - one.weight.value);
  const first = new Set(order.slice(0, MOST));
  const shown = sources.filter((source) => first.has(source));
  const left = order.slice(MOST);
  const rest = left.reduce((total, { weight }) => total + weight.value, 0);
  const most = Math.max(...shown.map(({ weight }) => weight.value), 1e-9);
  const size = strongest([sum, ...shown.map(({ values }) => values.map(({ value }) => value))].flat());
  return new OperationPicture(label, (width) => {
    const names = width < 360 ? 74 : 100;
    const box = { x: names + 54, width: width - names - 54 - 30, height: 20 };
    const end = box.x + box.width;
    const bottom = shown.length * PITCH + (left.length > 0 ? 22 : 8);
    const rows = shown.map(({ name: token, weight, values }, row) => {
      const middle = row * PITCH + PITCH / 2;
      const height = Math.max(1, (THICK * weight.value) / most);
      const cells = values.map((num, index) => ({
        ...{ value: num.value, num, key: index },
        text: `number ${index}: ${percent(weight.value)} × ${said(num.value)} = ${said(weight.value * num.value)}`,
      }));
      const bend = `C ${end + 30} ${middle}, ${end + 30} ${bottom + 10}, ${end + 4} ${bottom + 10}`;
      return {
        label: [
          text(names, middle + 4, token, { anchor: "end", room: names }),
          text(box.x - 6, middle + 4, percent(weight.value), { anchor: "end" }),
          area(
            { x: 0, y: row * PITCH, width: box.x - 4, height: PITCH },
            { text: `${token}: weight ${said(weight.value)}`, num: weight },
          ),
        ],
        strip: strip({ ...box, y: middle - height / 2, height }, cells, size),
        flow: svg("path", { d: `M ${end + 1} ${middle} ${bend}`, class: "stream", "stroke-width": height * 0.6 }),
      };
    });
    const cells = sum.map((value, index) => ({
      value,
      key: index,
      text: `number ${index} of the sum: ${said(value)}`,
    }));
    const step = box.width / sum.length;
    const column = { x: box.x, y: 1, width: box.width, height: bottom + 19 };
    const middle = Math.min(Math.max(box.x + (chosen + 0.5) * step, box.x + 24), end - 24);
    return {
      height: bottom + 38,
      parts: [
        rows.flatMap((row) => row.label),
        rows.flatMap((row) => row.strip),
        [
          ...rows.map(({ flow }) => flow),
          ...(left.length > 0
            ? [text(0, bottom - 8, `${left.length} others have ${percent(rest)}`, { kind: "faint" })]
            : []),
        ],
        [text(box.x - 6, bottom + 14, name, { anchor: "end" }), ...strip({ ...box, y: bottom }, cells, size)],
        [
          mark(column, chosen, sum.length),
          text(middle, bottom + 35, said(sum[chosen]), { anchor: "middle", kind: "result" }),
        ],
      ],
    };
  });
}
