// The picture of an operation on whole vectors, number by number: strips one below the other, such as a sum of vectors.

import { said } from "../arithmetic/explanation.js";
import { number } from "../../format.js";
import { strongest, mark, strip, text } from "./drawing.js";
import { OperationPicture } from "./operation_picture.js";

/**
 * @import { Num } from "../arithmetic/explanation.js"
 * @typedef {{ sign: string, name: string, nums: Num[] }} Row `sign`: what stands before it
 */

const PITCH = 31;

/**
 * @param {{ label: string, rows: Row[], chosen: number, nameOf?: (index: number) => string }} strips `rows`: the last
 *   one is the result; `chosen`: the index of the explained number
 */
export function stripsPicture({ label, rows, chosen, nameOf = (index) => `number ${index}` }) {
  const size = strongest(rows.flatMap(({ nums }) => nums.map(({ value }) => value)));
  const count = rows[0].nums.length;
  return new OperationPicture(label, (width) => {
    const left = width < 360 ? 82 : 96;
    const box = { x: left, width: width - left - 70, height: 20 };
    const parts = rows.map(({ sign, name, nums }, row) => {
      const y = 2 + row * PITCH;
      const isLast = row === rows.length - 1;
      const cells = nums.map((num, index) => ({
        ...{ value: num.value, num, key: index },
        text: `${nameOf(index)} of ${name}: ${number(num.value)}`,
      }));
      const value = nums[chosen].value;
      return [
        text(0, y + 14, `${sign}${name}`, { room: left - 4 }),
        ...strip({ ...box, y }, cells, size),
        text(width, y + 14, Number.isFinite(value) ? said(value) : number(value), {
          anchor: "end",
          kind: isLast ? "result" : "strong",
        }),
      ];
    });
    const height = (rows.length - 1) * PITCH + box.height;
    return { height: height + 6, parts: [...parts, [mark({ ...box, y: 2, height }, chosen, count)]] };
  });
}
