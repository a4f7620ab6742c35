// The picture of a score: a query and a key, multiplied number by number, and the sum of the products.

import { svg } from "../../dom.js";
import { said } from "../arithmetic/explanation.js";
import { chain, strongest, strip, text } from "./drawing.js";
import { OperationPicture } from "./operation_picture.js";

/**
 * @import { Num } from "../arithmetic/explanation.js"
 * @param {{
 *   label: string, names: [string, string][], products: { a: Num, b: Num }[], result: (string | number)[],
 * }} score `names`: of both vectors, and of their tokens; `result`: the sum, and what becomes of it
 */
export function scorePicture({ label, names, products, result }) {
  const columns = products.map(({ a, b }, index) => {
    const value = a.value * b.value;
    const sentence = `number ${index}: ${said(a.value)} × ${said(b.value)} = ${said(value)}`;
    return [{ ...a, num: a }, { ...b, num: b }, { value }].map((cell) => ({ ...cell, text: sentence, key: index }));
  });
  const rows = [0, 1, 2].map((row) => columns.map((cells) => cells[row]));
  const size = strongest(rows.slice(0, 2).flatMap((row) => row.map(({ value }) => value)));
  return new OperationPicture(label, (width) => {
    const left = width < 360 ? 74 : 88;
    const box = { x: left, width: width - left - 1, height: 20 };
    const [tops, middle] = [[2, 38, 80], left + box.width / 2];
    const { nodes, first: end } = chain(left, 132, box.width, result);
    const named = (/** @type {[string, string]} */ [name, token], /** @type {number} */ top) => [
      text(0, top + 8, name, { kind: "faint" }),
      text(0, top + 21, token, { kind: "token", room: left - 12 }),
    ];
    const inputs = names.map((each, row) => [
      ...named(each, tops[row]),
      ...strip({ ...box, y: tops[row] }, rows[row], size),
    ]);
    const below = strip({ ...box, y: tops[2] }, rows[2], strongest(rows[2].map(({ value }) => value)));
    const sides = [left, width - 1, end - 28, end + 28];
    const funnel = `M ${sides[0]} 102 H ${sides[1]} C ${sides[1]} 120, ${sides[3]} 114, ${sides[3]} 132
      H ${sides[2]} C ${sides[2]} 114, ${sides[0]} 120, ${sides[0]} 102 Z`;
    return {
      height: 155,
      parts: [
        inputs.flat(),
        [text(middle, 34, "×", { anchor: "middle" }), text(middle, 73, "=", { anchor: "middle" })],
        [text(0, 94, "products", { kind: "faint" }), ...below],
        [svg("path", { d: funnel, class: "flow" }), text(end, 122, "Σ", { anchor: "middle", kind: "faint" })],
        nodes,
      ],
    };
  });
}
