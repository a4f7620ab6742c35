// The numbers behind the picture as a table: of a stage, or of the residual stream.

import { percent, shown } from "../format.js";
import { guessesOf } from "./lens.js";
import { placeName } from "./names.js";
import { lengthOf } from "./river.js";

/**
 * @import { Prediction } from "../answers.js"
 * @import { Table } from "../draw/data_table.js"
 * @import { Parts } from "./names.js"
 * @import { Pass } from "./pass.js"
 */

/**
 * @param {Parts & { plain: Pass | null }} parts
 * @param {Pass} drawn whose numbers the picture draws: the pass, or what edits change in it
 * @param {string} at
 * @returns {Table}
 */
export function tableOf({ line, pass, plain }, drawn, at) {
  const isChange = drawn !== pass;
  const item = line.items.find(({ name }) => name === at);
  const heading = (/** @type {number} */ row) => `${row} ${shown(pass.tokens[row])}`;
  const rows = [...pass.tokens.keys()];
  if (item && pass.stages.has(item.name)) {
    const names = Array.from({ length: item.heads * item.columns }, (_, column) => {
      const [head, within] = [Math.floor(column / item.columns), column % item.columns];
      return `${item.heads > 1 ? `H${head} ` : ""}${item.hasKeys ? heading(within) : within}`;
    });
    const known = rows.filter((row) => drawn.row(item.name, row));
    const place = item.layer === null ? "" : `${placeName(item.layer)} `;
    return {
      caption: `${place}${item.label}${isChange ? " (with the edits − without)" : ""}: a row for each token`,
      columns: ["token", ...names],
      rows: known.map((row) => [heading(row), ...Array.from(drawn.row(item.name, row) ?? [], Number)]),
    };
  }
  const stream = line.items.filter(
    ({ part, layer }) => /^(embed|resid_post)$/.test(part) && (!/^L/.test(at) || `L${layer}` === at),
  );
  const said = (/** @type {Prediction | undefined} */ best) =>
    best ? `${shown(best)} ${percent(best.probability)}` : "";
  const places = stream.map(({ layer }) => (layer === null ? "embedding" : `after L${layer}`));
  const read = rows.filter((row) => guessesOf(pass, row));
  const guesses = read.length === 0 ? [] : stream.map(({ layer }) => (layer === null ? 0 : layer + 1));
  return {
    caption:
      `The length of ${isChange ? "the change of " : ""}each token's vector in the residual stream, ` +
      `and the most likely next token${read.length === 0 ? "" : ", for followed tokens also by the logit lens"}`,
    columns: [
      "token",
      ...places,
      ...guesses.map((_, index) => `lens, ${places[index]}`),
      "next",
      ...(plain ? ["next without the edits"] : []),
    ],
    rows: rows.map((row) => [
      heading(row),
      ...stream.map(({ name }) => lengthOf(drawn, name, row)),
      ...guesses.map((index) =>
        [plain, pass]
          .map((each) => each && said(guessesOf(each, row)?.[index].top[0]))
          .filter(Boolean)
          .join(" → "),
      ),
      said(pass.predictions.get(row)?.[0]),
      ...(plain ? [said(plain.predictions.get(row)?.[0])] : []),
    ]),
  };
}
