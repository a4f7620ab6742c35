// One head in detail: its map with tokens on both axes, and what one token, the query, attends to.

import { actionButton, el, emit, find, findAll } from "../dom.js";
import "../draw/arcs.js";
import { barTable } from "../draw/bars.js";
import "../draw/heat_map.js";
import { percent, quoted, shown } from "../format.js";
import { placeName } from "../network/names.js";
import { note } from "../terms.js";
import { TARGETS, TARGET_NAMES } from "./attention_ranking.js";

/**
 * @import { HeadMap, MapStage } from "./attention_maps.js"
 * @typedef {{
 *   layer: number, head: number, stage: MapStage, position: number, map: HeadMap, pattern: HeadMap, row: Float32Array,
 *   plain: HeadMap | null, plainRow: Float32Array | null, key: number | null,
 * }} Shown `map`: the numbers of the stage; `pattern`: those of the pattern; `row`: the exact weights of the position;
 *   `plain` and `plainRow`: the same without the edits, if there are edits; `key`: that of the chosen cell, whose query
 *   is the position
 */

/** The stages of the switch → {label, the name of a value}. */
export const STAGES = {
  scores: { label: "Scores", value: "score" },
  attn_scores: { label: "Masked scores", value: "masked score" },
  pattern: { label: "Pattern", value: "weight" },
};
const NUM_KEYS = 8; // of more keys, only so many are listed at first

/**
 * <attention-head>. `show(shown)`. Events: "change" with detail {stage} or {pos}; "ablate", if `canAblate` is set;
 * "trace" with detail {query, key}: how a number of the picture was computed.
 */
export class AttentionHead extends HTMLElement {
  /** @type {Shown} */
  #shown;
  /** @type {number | null} the query under the pointer */
  #at = null;
  #frame = 0;
  #title = el("h3");
  #ablate = actionButton("Ablate this head", () => emit(this, "ablate"), { class: "small" });
  #answer = el("p", { class: "answer" });
  #stages = el("div", { class: "row", role: "group", "aria-label": "What the picture shows" });
  #note = el("p", { class: "faint" });
  #trace = actionButton(
    "How this number comes about",
    () => {
      const { position: query, key } = this.#shown;
      emit(this, "trace", { query, key });
    },
    { class: "small" },
  );
  #map = el("heat-map");
  #said = el("p", { class: "answer" });
  #arcs = el("attention-arcs");
  #bars = el("div");
  #heading = el("h3");
  #listsAll = false; // whether all keys are listed

  connectedCallback() {
    if (this.childElementCount > 0) return;
    this.#stages.append(
      ...Object.entries(STAGES).map(([stage, { label }]) =>
        actionButton(label, () => emit(this, "change", { stage }), { dataset: { stage } }),
      ),
    );
    const meaning = note(
      "The pattern is the {softmax} of the masked {score|scores}: each row adds up to 100 %. Click on a " +
        "cell to keep its row.",
    );
    this.append(
      el(
        "section",
        { class: "wide", "aria-label": "One head" },
        el("div", { class: "row" }, this.#title, this.#ablate),
        this.#answer,
        this.#stages,
        this.#map,
        this.#trace,
        this.#note,
        meaning,
      ),
      el(
        "section",
        { class: "wide", "aria-label": "One token" },
        this.#heading,
        this.#said,
        el("div", { class: "beside" }, this.#arcs, this.#bars),
      ),
    );
    this.#map.addEventListener("cell", ({ detail }) => this.#point(detail && this.#positionOf(detail.row)));
    this.#map.addEventListener("choose", ({ detail }) =>
      emit(this, "change", { pos: String(this.#positionOf(detail.row)), key: String(this.#positionOf(detail.column)) }),
    );
    this.#arcs.addEventListener("point", ({ detail }) => this.#point(detail.position));
    this.#arcs.addEventListener("query", ({ detail: { position } }) => {
      // what is shown may be pointed at
      if (position !== this.#shown.position) emit(this, "change", { pos: String(position), key: "" });
    });
  }

  /** @param {boolean} canAblate */
  set canAblate(canAblate) {
    this.#ablate.hidden = !canAblate;
  }

  /** @param {Shown} what */
  show(what) {
    const isSameMap = this.#shown?.map === what.map;
    this.#shown = what;
    this.#at = null;
    const { layer, head, stage } = what;
    this.#title.textContent = placeName(layer, head);
    this.#answer.textContent = this.#describe();
    for (const button of findAll(this.#stages, "button"))
      button.setAttribute("aria-pressed", String(button.dataset.stage === stage));
    if (!isSameMap) this.#drawMap();
    const { block } = what.map;
    const placeOf = (/** @type {number} */ position) => Math.floor(position / block);
    this.#map.keptCell = what.key === null ? null : { row: placeOf(what.position), column: placeOf(what.key) };
    this.#trace.hidden = what.key === null || block > 1; // the cells of a reduced map are not single numbers
    this.#note.textContent = this.#noteOf();
    const ofPattern = stage === "pattern" ? "" : " (weights of the pattern)";
    this.#heading.textContent = `What one token attends to${ofPattern}`;
    this.#showQuery(what.position, what.row, what.plainRow);
  }

  /** Scroll to the picture if little of it is in sight. */
  reveal() {
    const { top, bottom, height } = this.#map.getBoundingClientRect();
    if (Math.min(bottom, innerHeight) - Math.max(top, 0) < Math.min(height / 2, 250))
      this.#title.scrollIntoView({ block: "start" });
  }

  pictures() {
    return [
      { name: `layer ${this.#shown.layer} head ${this.#shown.head}`, element: this.#map },
      { name: "arcs", element: this.#arcs.picture() },
    ];
  }

  #describe() {
    const { means } = this.#shown.pattern;
    if (means === null) return "The prompt has one token only, which can attend to nothing but itself.";
    const [best, ...others] = TARGET_NAMES.toSorted((a, b) => (means[b] ?? 0) - (means[a] ?? 0));
    const part = (/** @type {keyof typeof TARGETS} */ name) => `${percent(means[name])} to ${TARGETS[name]}`;
    return (
      `On average: ${part(best)}, ${others.map(part).join(", ")}. These overlap: at position 1, the previous ` +
      "token is the first one."
    );
  }

  #drawMap() {
    const { stage, map } = this.#shown;
    const { tokens, size, block, values } = map;
    const labels = Array.from({ length: size }, (_, row) =>
      block === 1 ? `${row} ${shown(tokens[row])}` : `${row * block}–${Math.min(tokens.length, (row + 1) * block) - 1}`,
    );
    this.#map.data = {
      values,
      rowLabels: labels,
      columnLabels: labels,
      rowName: "query",
      columnName: "key",
      valueName: STAGES[stage].value,
      scale: stage === "pattern" ? { map: "sequential", low: 0, high: 1, ends: ["0 %", "100 %"] } : undefined,
    };
  }

  #noteOf() {
    const { stage, map } = this.#shown;
    const reduced =
      map.block > 1 ? `A long prompt: each cell shows the largest number of ${map.block} × ${map.block} tokens. ` : "";
    return stage === "pattern" && hidesLater(map)
      ? `${reduced}Above the diagonal, all weights are 0: the causal mask hides later tokens.`
      : reduced;
  }

  /** @param {number} row */
  #positionOf(row) {
    return Math.min(row * this.#shown.map.block, this.#shown.map.tokens.length - 1);
  }

  /**
   * The query under the pointer, once for each picture of the screen. Null: back to the chosen one.
   * @param {number | null} position
   */
  #point(position) {
    this.#at = position;
    if (this.#frame || this.#shown.map.block > 1) return;
    this.#frame = requestAnimationFrame(() => {
      this.#frame = 0;
      const query = this.#at ?? this.#shown.position;
      const rowOf = (/** @type {HeadMap} */ { size, values }) => values.subarray(query * size, (query + 1) * size);
      const { pattern, plain } = this.#shown;
      this.#showQuery(query, rowOf(pattern), plain && rowOf(plain));
    });
  }

  /**
   * @param {number} query
   * @param {Float32Array} weights
   * @param {Float32Array | null} before the weights without the edits, if there are edits
   */
  #showQuery(query, weights, before) {
    const { tokens, block } = this.#shown.map;
    this.#map.framedRow = Math.floor(query / block);
    const keys = Array.from(weights, (weight, position) => ({ weight, position })).sort((a, b) => b.weight - a.weight);
    const [best] = keys;
    const listed = this.#listsAll || keys.length < 2 * NUM_KEYS ? keys : keys.slice(0, NUM_KEYS);
    const list = (/** @type {boolean} */ listsAll) => () => {
      this.#listsAll = listsAll;
      this.#showQuery(query, weights, before);
      find(this.#bars, "button").focus();
    };
    this.#said.textContent =
      `${quoted(tokens[query])} (position ${query}) attends most to ` +
      `${best.position === query ? "itself" : `${quoted(tokens[best.position])} (position ${best.position})`}: ` +
      `${percent(best.weight)} of its weight.`;
    this.#arcs.show({ labels: tokens.map(shown), weights, query });
    this.#bars.replaceChildren(
      barTable({
        caption:
          listed.length < keys.length
            ? `The ${listed.length} strongest of ${keys.length} keys.`
            : `All ${keys.length} keys, the strongest first.`,
        columns: ["key", "position", ...(before ? ["without the edits"] : []), "weight"],
        rows: listed.map(({ weight, position }) => ({
          cells: [
            shown(tokens[position]),
            String(position),
            ...(before ? [percent(before[position])] : []),
            percent(weight),
          ],
          shares: before ? [before[position], weight] : [weight],
          mark: position === query,
        })),
      }),
      keys.length < 2 * NUM_KEYS
        ? ""
        : actionButton(
            this.#listsAll ? `Show the ${NUM_KEYS} strongest` : `Show all ${keys.length} keys`,
            list(!this.#listsAll),
          ),
    );
  }
}

/**
 * Whether no query attends to a later key.
 * @param {HeadMap} map
 */
function hidesLater({ size, values }) {
  for (let row = 0; row < size; row++)
    for (let column = row + 1; column < size; column++) if (values[row * size + column] !== 0) return false;
  return size > 1;
}

customElements.define("attention-head", AttentionHead);
