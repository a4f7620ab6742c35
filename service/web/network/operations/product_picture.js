// The picture of one number of a product: the input, the column of weights, and what both multiply to.

import { readState, writeState } from "../../address.js";
import { el } from "../../dom.js";
import "../../draw/matrix_product.js";
import { placeName } from "../names.js";

/**
 * @import { Num, Place } from "../arithmetic/explanation.js"
 * @import { Weight } from "../weights.js"
 * @typedef {{ name: string, a: Num, b: Num }} Factors
 */

const STRIPES = 64; // that can be told apart in the panel

/**
 * @param {Place} place
 * @param {Factors[]} products
 * @param {{ matrix: Weight, shift: Weight | undefined, hasHead: boolean }} weights `shift`: the bias; `hasHead`:
 *   whether the matrix has a part for the head of the number
 */
export function productPicture(place, products, { matrix, shift, hasHead }) {
  const { layer, head, within, row, column, served } = place;
  const { most, stripes } = strongest(products);
  const picture = el("matrix-product", { small: true });
  const words = `sum of ${products.length} products${shift ? " + bias" : ""}`;
  picture.data = {
    values: stripes.map(({ b }) => b.value),
    ...{ rowLabels: [String(within)], columnLabels: stripes.map(({ name }) => name) },
    ...{ rowName: "number", columnName: "input", valueName: matrix.name },
    ...{ input: stripes.map(({ a }) => a.value), inputName: words },
    ...{ output: [served], outputName: "result", bias: null },
    ...{ isPart: most > 1, chosen: 0 },
    hint: most > 1 ? `Each stripe is the largest of ${most} products.` : "Each stripe is one product.",
  };
  const { model, prompt, edits } = readState(location.hash, {});
  const state = { view: "weights", model, prompt, edits, weight: matrix.name, position: String(row) };
  const spot = { ...(hasHead && { head: String(head) }), cell: String(hasHead ? within : column) };
  const name = `${matrix.name.split(".").at(-1)} of ${placeName(layer ?? 0, hasHead ? head : undefined)}`;
  return el("div", {}, picture, el("a", { href: writeState({ ...state, ...spot }, {}) }, `${name} as a whole`));
}

/**
 * The products in their order; of many, the largest one of some that follow each other.
 * @param {Factors[]} products
 */
function strongest(products) {
  const most = Math.ceil(products.length / STRIPES);
  const size = (/** @type {Factors} */ { a, b }) => Math.abs(a.value * b.value);
  const stripes = Array.from({ length: Math.ceil(products.length / most) }, (_, index) =>
    products.slice(index * most, (index + 1) * most).reduce((one, other) => (size(other) > size(one) ? other : one)),
  );
  return { most, stripes };
}
