// The numbers behind the picture as a table: of a stage, or of the residual stream.

import { percent, shown } from "../format.js";
import { lengthOf } from "./river.js";

/**
 * @import { Table } from "../draw/data_table.js"
 * @import { Parts } from "./names.js"
 */

/**
 * @param {Parts} parts
 * @param {string} at
 * @returns {Table}
 */
export function tableOf({ line, pass }, at) {
  const item = line.items.find(({ name }) => name === at);
  const heading = (/** @type {number} */ row) => `${row} ${shown(pass.tokens[row])}`;
  const rows = [...pass.tokens.keys()];
  if (item && pass.stages.has(item.name)) {
    const names = Array.from({ length: item.heads * item.columns }, (_, column) => {
      const [head, within] = [Math.floor(column / item.columns), column % item.columns];
      return `${item.heads > 1 ? `H${head} ` : ""}${item.hasKeys ? heading(within) : within}`;
    });
    const known = rows.filter((row) => pass.row(item.name, row));
    return {
      caption: `${item.name}: a row for each token`,
      columns: ["token", ...names],
      rows: known.map((row) => [heading(row), ...Array.from(pass.row(item.name, row) ?? [], Number)]),
    };
  }
  const stream = line.items.filter(
    ({ part, layer }) => /^(embed|resid_post)$/.test(part) && (!/^L/.test(at) || `L${layer}` === at),
  );
  const next = (/** @type {number} */ row) => pass.predictions.get(row)?.[0];
  return {
    caption: "The length of each token's vector in the residual stream, and the most likely next token",
    columns: ["token", ...stream.map(({ layer }) => (layer === null ? "embedding" : `after L${layer}`)), "next"],
    rows: rows.map((row) => [
      heading(row),
      ...stream.map(({ name }) => lengthOf(pass, name, row)),
      `${shown(next(row) ?? {})} ${percent(next(row)?.probability)}`,
    ]),
  };
}
