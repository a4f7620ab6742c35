// One stage that an article prints: the printed numbers beside the computed ones.

import { actionButton, el } from "../dom.js";
import { bodyRow, columnHeading, scrollRegion, table } from "../draw/tables.js";
import { number, shown, signed } from "../format.js";

/**
 * @import { Nested, PrintedStage, Published, Slip, Token } from "../answers.js"
 * @import { StageEntry } from "../stages.js"
 * @typedef {{ tokens: Token[], vocabulary: Token[] }} Labels
 * @typedef {(number | null)[]} Row
 * @typedef {{
 *   entry: StageEntry, stage: PrintedStage, slips: Slip[], place: Labels, isOpen: boolean, onToggle: () => void,
 * }} Printed
 */

let boxes = 0;

/**
 * Whether numbers agree, as a sign and words. `isPassedOn`: they follow from the numbers that are printed before them.
 * @param {boolean} agrees
 * @param {boolean} isPassedOn
 */
export function verdict(agrees, isPassedOn = false) {
  const [kind, says] = agrees
    ? ["agrees", "✓ agrees"]
    : isPassedOn
      ? ["passed-on", "↳ passed on"]
      : ["differs", "✗ differs"];
  return el("span", { class: `verdict ${kind}` }, says);
}

/**
 * The rows of a stage: its verdict, and below it the table that its button opens. `entry`: that of stages.js.
 * `place`: {tokens, vocabulary} for the labels.
 * @param {Printed} printed
 */
export function printedStage(printed) {
  const { entry, stage, slips, isOpen, onToggle } = printed;
  const id = `printed-${boxes++}`;
  const { published } = stage;
  const button = actionButton(entry.label, onToggle, {
    class: "stage-open",
    "aria-expanded": String(isOpen),
    "aria-controls": id,
  });
  const what = published.squared ? " (the article prints the square of this stage)" : "";
  const head = el(
    "tr",
    {},
    el("th", { scope: "row" }, button, " ", el("code", { class: "stage-name" }, stage.name)),
    el("td", {}, verdict(published.agrees, published.from_previous?.agrees)),
    el("td", {}, number(published.max_difference), what),
    el("td", { class: "differs" }, slips.length > 0 && `⚠ ${slips.length}`),
  );
  const box = el(
    "td",
    { colspan: "4" },
    isOpen && [el("p", { class: "faint" }, basis(published)), comparisonTable(printed)],
  );
  return el("tbody", { dataset: { stage: stage.name } }, head, el("tr", { id, hidden: !isOpen }, box));
}

/** @param {Published} published */
function basis({ from_previous: previous }) {
  if (previous === null)
    return (
      "The article does not print the weights of this stage. The service chose them so that its network gives " +
      "these numbers, so agreement here proves nothing."
    );
  if (previous.agrees)
    return (
      "Computed from the numbers that the article prints before, this stage agrees within their rounding (largest " +
      `difference ${number(previous.max_difference)}).`
    );
  return (
    "Computed from the numbers that the article prints before, this stage differs by up to " +
    `${number(previous.max_difference)}, more than their rounding explains: see the numbers that look wrong.`
  );
}

/**
 * A table with three lines for each row of the stage: printed, computed, and their difference.
 * @param {Printed} what
 */
function comparisonTable({ entry, stage, slips, place }) {
  const { dims, published } = stage;
  const columns = columnLabels(stage, place);
  const isSlip = (/** @type {number[]} */ index) => slips.some((slip) => slip.index.join() === index.join());
  const rows = rowsOf(published.values, stage.values, dims.length - 1).filter(({ printed }) =>
    printed.some((value) => value !== null),
  );
  const lines = rows.flatMap(({ index, printed, computed }) => {
    const ours = computed.map((value) => (published.squared && value !== null ? value ** 2 : value));
    const label = rowLabel(index, dims, place);
    const differences = printed.map((value, column) => {
      const other = ours[column];
      return value === null || other === null ? "–" : signed(other - value);
    });
    const cell = (/** @type {string} */ text, /** @type {number} */ column) =>
      el("td", { class: isSlip([...index, column]) && "slip" }, text, isSlip([...index, column]) ? " ⚠" : "");
    return [
      el(
        "tr",
        { class: "first-line" },
        el("th", { scope: "rowgroup", rowspan: "3" }, label),
        el("th", { scope: "row" }, "printed"),
        printed.map((value, column) => cell(value === null ? "–" : String(value).replace("-", "−"), column)),
      ),
      bodyRow(published.squared ? "computed, squared" : "computed", ours.map(number)),
      bodyRow("difference", differences),
    ];
  });
  const caption = `${entry.label}: printed and computed numbers`;
  const head = el("tr", {}, el("th", { scope: "col", colspan: "2" }), columns.map(columnHeading));
  return scrollRegion(caption, table({ class: "comparison" }, { caption, head, rows: lines }));
}

/**
 * The rows along the last axis: {index, printed, computed}, with the index of all axes before the last one.
 * @param {Nested[]} printed
 * @param {Nested[]} computed
 * @param {number} depth
 * @param {number[]} index
 * @returns {{ index: number[], printed: Row, computed: Row }[]}
 */
function rowsOf(printed, computed, depth, index = []) {
  if (depth === 0) return [{ index, printed: /** @type {Row} */ (printed), computed: /** @type {Row} */ (computed) }];
  return printed.flatMap((part, place) => rowsOf(listed(part), listed(computed[place]), depth - 1, [...index, place]));
}

/** @param {Nested} part */
function listed(part) {
  return Array.isArray(part) ? part : [];
}

/**
 * @param {PrintedStage} stage
 * @param {Labels} place
 */
function columnLabels({ dims, shape }, { tokens, vocabulary }) {
  const last = dims.length - 1;
  /** @type {Record<string, Token[] | undefined>} */
  const labels = { key: tokens, position: tokens, d_vocab: vocabulary };
  const [size, names] = [shape[last], labels[dims[last]]];
  return Array.from({ length: size }, (_, index) => (names?.[index] ? shown(names[index]) : String(index)));
}

/**
 * @param {number[]} index
 * @param {string[]} dims
 * @param {Labels} place
 */
function rowLabel(index, dims, { tokens }) {
  const parts = index.map((value, axis) => {
    if (dims[axis] === "batch") return null;
    return dims[axis] === "position" || dims[axis] === "query"
      ? shown(tokens[value])
      : `${dims[axis] === "kv_head" ? "head" : dims[axis]} ${value}`;
  });
  return parts.filter((part) => part !== null).join(", ");
}

/**
 * The place of a slip in words: such as "rocks, head 0, number 1".
 * @param {Slip} slip
 * @param {PrintedStage} stage
 * @param {Labels} place
 */
export function placeOf({ index }, { dims }, place) {
  const last = index[index.length - 1];
  const name =
    dims.at(-1) === "key"
      ? `key ${shown(place.tokens[last])}`
      : dims.at(-1) === "d_vocab"
        ? shown(place.vocabulary[last])
        : `number ${last}`;
  return [rowLabel(index.slice(0, -1), dims, place), name].filter(Boolean).join(", ");
}
