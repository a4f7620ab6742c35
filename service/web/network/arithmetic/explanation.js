// The arithmetic of one number: its form, and what all kinds of it need. Only numbers that the service computed are
// added up, and the result is compared with the number that the service computed.

/**
 * @import { Architecture } from "../../answers.js"
 * @import { Pass, PassStage } from "../pass.js"
 *
 * @typedef {{ value: number, stage?: string, row?: number, column?: number }} Num a number, and where it comes from
 * @typedef {(string | Num)[]} Formula
 * @typedef {{ name: string, cells: (string | Num)[], share: number }} Term
 * @typedef {{
 *   sentence: string, formula: Formula, columns: string[], terms: Term[], rest: string, computed: number | null,
 *   slack: number, picture?: Node | null,
 * }} Explanation `sentence`: the formula in words; `terms`: those that are listed first come first; `rest`: about the
 *   terms that are not listed at first; `computed`: null if the page cannot compute the number; `slack`: how far
 *   rounding may take it from the number of the service; `picture`: of the operation, with its numbers
 * @typedef {{
 *   pass: Pass, architecture: Architecture, stage: PassStage, layer: number | null, part: string, row: number,
 *   column: number, head: number, within: number, served: number,
 * }} Place `column`: of all heads together; `within`: in its head
 * @typedef {{ place: Place, formula: string, explanation: Explanation | null }} Explained `formula`: of the stage, in
 *   words
 * @typedef {(stages: (string | null)[], rows?: number[]) => Promise<unknown>} Read `rows`: that of the place, unless
 *   others are given
 * @typedef {{
 *   explain: (place: Place, read: Read) => Promise<Explanation | null>, isKnown?: (place: Place) => boolean,
 * }} Kind `isKnown`: whether the stages that it reads exist
 */

export const LISTED = 10; // terms of a sum that are listed at first
export const MOST_TERMS = 1000; // of a sum that can be listed
const SHOWN = 3; // terms of a sum that are written out

/** The distance between numbers of a format, relative to their size. @type {Record<string, number | undefined>} */
const UNITS = { bfloat16: 2 ** -8, float16: 2 ** -11, float32: 2 ** -23, float64: 2 ** -52 };

/** The rounding of the numbers of a stage, relative to their size. @param {Place} place */
export const unitOf = ({ stage }) => UNITS[stage.dtype] ?? 2 ** -23;

/**
 * How far a sum may be from the number of the service: its rounding, and that of the terms.
 * @param {Place} place
 * @param {number} size the sum of the sizes of the terms
 * @param {number} roundings of numbers that the service rounds on the way and does not show
 */
export function slackOf(place, size, roundings = 0) {
  return Math.abs(place.served) * unitOf(place) * (1 + roundings) + size * 1e-6 + 1e-9;
}

/**
 * A number of another stage of the same pass.
 * @param {Place} place
 * @param {string} stage
 * @param {number} row
 * @param {number} column
 * @returns {Num}
 */
export function numOf({ pass }, stage, row, column) {
  return { value: pass.row(stage, row)?.[column] ?? NaN, stage, row, column };
}

/**
 * The name of a part of the same block, if the network has it.
 * @param {Pick<Place, "pass" | "layer">} place
 * @param {...string} parts the first one that exists is taken
 */
export function siblingOf({ pass, layer }, ...parts) {
  const names = parts.map((part) => (layer === null ? part : `blocks.${layer}.${part}`));
  return names.find((name) => pass.stages.has(name)) ?? null;
}

/**
 * A sum: the largest terms are written out and come first.
 * @param {(Term & { formula: Formula })[]} terms `formula`: of each term
 * @returns {{ formula: Formula, terms: Term[], rest: string, sum: number, size: number }}
 */
export function sumOf(terms) {
  const sized = terms.toSorted((one, other) => Math.abs(other.share) - Math.abs(one.share));
  const written = sized.slice(0, SHOWN).flatMap(({ formula }, index) => [index > 0 ? " + " : "", ...formula]);
  const left = sized.slice(LISTED);
  const total = (/** @type {Term[]} */ some) => some.reduce((sum, { share }) => sum + share, 0);
  return {
    formula: [...written, sized.length > SHOWN ? " + …" : ""],
    terms: sized.slice(0, MOST_TERMS),
    rest: left.length > 0 ? `${left.length} smaller terms add ${said(total(left))}.` : "",
    sum: total(sized),
    size: sized.reduce((sum, { share }) => sum + Math.abs(share), 0),
  };
}

/** A sum of products. @param {{ name: string, a: Num, b: Num }[]} products */
export function sumOfProducts(products) {
  return sumOf(
    products.map(({ name, a, b }) => {
      const value = a.value * b.value;
      return { name, cells: [a, b, { value }], share: value, formula: [a, " × ", b] };
    }),
  );
}

/**
 * An explanation without a table of terms.
 * @param {Place} place
 * @param {string} sentence
 * @param {Formula} formula
 * @param {number | null} computed
 * @param {number} size of the terms, for the rounding
 * @param {number} [roundings] of numbers that the service rounds on the way and does not show
 * @returns {Explanation}
 */
export function plain(place, sentence, formula, computed, size, roundings) {
  return { sentence, formula, columns: [], terms: [], rest: "", computed, slack: slackOf(place, size, roundings) };
}

/** A number with four digits. @param {number} value */
export function said(value) {
  const size = Math.abs(value);
  const text = size !== 0 && (size < 1e-3 || size >= 1e5) ? value.toExponential(2) : value.toPrecision(4);
  return text.replaceAll("-", "−");
}
