// The view "Attention": a grid of small patterns for all layers and heads, one of them large, and a ranking of heads.

import { isWorkedExample } from "../articles.js";
import { el, labelled, select } from "../dom.js";
import { barLegend } from "../draw/bars.js";
import "../draw/pattern_grid.js";
import { editsIn } from "../edits_note.js";
import { percent } from "../format.js";
import { readChoice, readIndex } from "../indices.js";
import { cached } from "../passes.js";
import { term } from "../terms.js";
import { View } from "../view.js";
import { STAGES } from "./attention_head.js";
import { AttentionMaps } from "./attention_maps.js";
import { CHOICES, TARGETS, TARGET_NAMES } from "./attention_ranking.js";
import { ofPrompt, readEdits } from "./edit_words.js";
import { isOther, isPosition } from "./positions.js";

/**
 * @import { Means, Model } from "../answers.js"
 * @import { ViewState } from "../view.js"
 * @import { Body, HeadMap, MapStage } from "./attention_maps.js"
 * @typedef {ViewState & typeof Attention.params} State
 * @typedef {{ layer: number, head: number }} Place
 */

const SMALL_MAP = 64; // rows of a small map

export default class Attention extends View {
  static showsWorkedExamples = true;
  static appliesEdits = true;
  static params = { layer: "0", head: "0", pos: "", stage: "pattern", find: "previous", key: "", edits: "[]" };

  #grid = el("pattern-grid");
  #hatched = el("span", {}, " Hatched: still loading. A row is loaded when you scroll to it.");
  #pointed = el("p", { class: "under-pointer", "aria-live": "polite" });
  #ranking = el("attention-ranking");
  #choice = el("div", { class: "row" });
  #head = el("attention-head");
  /** @type {AttentionMaps} */
  #maps;
  /** @type {AttentionMaps | null} those without the edits, if there are edits */
  #plain = null;
  /** @type {string} what #maps belong to */
  #key;
  /** @type {Model | null} likewise */
  #servedModel = null;
  /** @type {AbortSignal} */
  #signal;
  /** @type {State | null} the state that was shown last */
  #state = null;
  /** @type {Place & { stage: MapStage }} */
  #shown;
  #isChosen = false; // whether a head was chosen here since the last update

  build() {
    const meaning = el(
      "p",
      { class: "faint" },
      "Each picture is the ",
      term("pattern"),
      " of one head: a row for each token that looks ",
      inBrackets("query"),
      ", a column for each token that is looked at ",
      inBrackets("key"),
      ". Choose one to see it large.",
    );
    const legend = el("p", { class: "legend" }, "Weight: ", barLegend("0 %", "100 %"), ".", this.#hatched);
    const first = el(
      "p",
      { class: "faint" },
      "Each ",
      term("layer"),
      " has several ",
      term("head", "heads"),
      ", which work side by side. For each token, a head decides how much it takes from which token.",
    );
    this.append(
      first,
      this.#ranking,
      el(
        "div",
        { class: "beside" },
        el(
          "section",
          { class: "narrow", "aria-label": "All heads" },
          el("h3", {}, "All heads"),
          meaning,
          this.#pointed,
          this.#grid,
          legend,
        ),
        el("section", { class: "wide", "aria-label": "One head" }, this.#choice, this.#head),
      ),
    );
    const choose = (/** @type {CustomEvent<Place>} */ { detail }) => {
      this.#isChosen = true;
      return this.context.navigate({ layer: String(detail.layer), head: String(detail.head) });
    };
    this.#grid.addEventListener("choose", choose);
    this.#ranking.addEventListener("choose", choose);
    this.#grid.addEventListener("point", ({ detail }) => this.#point(detail));
    this.#grid.addEventListener(
      "visible",
      ({ detail }) => this.#maps && this.#fetchRows(detail, this.#signal).catch(this.context.report),
    );
    this.#ranking.addEventListener("target", ({ detail }) => this.context.navigate({ find: detail.target }));
    this.#ranking.addEventListener("pair", ({ detail }) => this.context.navigate(detail));
    this.#head.addEventListener("change", ({ detail }) => this.context.navigate(detail));
    this.#head.addEventListener("ablate", () => this.#ablate());
  }

  /**
   * @param {State} state
   * @param {AbortSignal} signal
   * @returns {Promise<void>}
   */
  async update(state, signal) {
    this.#signal = signal;
    const plainBody = { ...(state.model ? { model: state.model } : {}), prompt: state.prompt };
    const edits = isWorkedExample(this.context.service, state.model) ? [] : ofPrompt(readEdits(state.edits));
    const body = edits.length > 0 ? { ...plainBody, edits } : plainBody;
    const { layers, heads } = await this.#sizes(state, body, signal);
    const isNew = isOther(this.#state, state);
    if (isNew && !(isPosition(state.layer, layers) && isPosition(state.head, heads)))
      return this.context.navigate({ layer: "0", head: "0" }, { replace: true });
    const [layer, head] = [readIndex(state.layer, "layer", layers), readIndex(state.head, "head", heads)];
    const stage = readChoice(state.stage, "stage", STAGES);
    const target = readChoice(state.find, "find", CHOICES);
    this.#use(body, edits.length > 0 ? plainBody : null, layers, heads);
    this.#head.canAblate =
      Boolean(this.context.service.model?.capabilities.edits) && !isWorkedExample(this.context.service, state.model);
    this.#grid.mark(layer, head);
    this.#showChoice(layers, heads, { layer, head });
    this.#point(null);
    const { tokens } = await this.#maps.head(layer, head, "pattern", signal);
    if (isNew && state.pos !== "" && !isPosition(state.pos, tokens.length))
      return this.context.navigate({ pos: "" }, { replace: true });
    if (isNew && state.key !== "" && !isPosition(state.key, tokens.length))
      return this.context.navigate({ key: "" }, { replace: true });
    const query = state.pos === "" ? tokens.length - 1 : readIndex(state.pos, "position", tokens.length);
    const key = state.key === "" ? Math.max(0, query - 1) : readIndex(state.key, "key", tokens.length);
    const one = this.#showHead({ layer, head, stage, position: query }, signal);
    const all = this.#fetchRows(this.#grid.visibleLayers(), signal).then(async () => {
      const means = await this.#maps.means(layers, signal);
      const rows = target === "chosen" || target === "changed" ? await this.#maps.rowOfAll(query, signal) : [];
      const before = target === "changed" ? await this.#plain?.rowOfAll(query, signal) : undefined;
      this.#ranking.show({
        heads: means.map((each, index) => ({
          ...each,
          weight: rows[index]?.weights[key],
          moved: before && movedShare(rows[index].weights, before[index].weights),
        })),
        target,
        isEdited: this.#plain !== null,
        tokens,
        query,
        key,
        chosen: { layer, head },
      });
    });
    await Promise.all([one, all]);
    if (this.#isChosen) this.#head.reveal();
    this.#isChosen = false;
    this.#state = state;
    return undefined;
  }

  /** What the network predicts without the chosen head, in the view of interventions. */
  #ablate() {
    const { layer, head } = this.#shown;
    const edit = { stage: `blocks.${layer}.attn.z`, op: "zero", heads: [head] };
    const others = (editsIn(this.#state?.edits) ?? []).filter(
      (other) => JSON.stringify(other) !== JSON.stringify(edit),
    );
    return this.context.navigate({ view: "edits", edits: JSON.stringify([...others, edit]) });
  }

  request() {
    if (!this.#shown) return null;
    const { layer, head, stage } = this.#shown;
    return { path: "/forward", body: this.#maps.forwardBody(layer, head, stage) };
  }

  pictures() {
    const picture = async () => {
      const layers = Array.from({ length: this.#grid.numLayers }, (_, layer) => layer);
      await this.#fetchRows(layers, this.#signal);
      return this.#grid.picture();
    };
    return [...this.#head.pictures(), { name: "all heads", element: { picture } }];
  }

  /**
   * The numbers of layers and heads. Worked examples say them in their answers only.
   * @param {State} state
   * @param {Body} body
   * @param {AbortSignal} signal
   */
  async #sizes(state, body, signal) {
    if (!isWorkedExample(this.context.service, state.model))
      return { layers: this.model.config.num_layers, heads: this.model.sizes.head };
    const { maps } = await cached("/patterns", body, signal);
    return {
      layers: 1 + Math.max(...maps.map(({ layer }) => layer)),
      heads: 1 + Math.max(...maps.map(({ head }) => head)),
    };
  }

  /**
   * Selects of the layer and the head, beside the grid.
   * @param {number} layers
   * @param {number} heads
   * @param {Place} chosen
   */
  #showChoice(layers, heads, chosen) {
    const of = (/** @type {keyof Place} */ name, /** @type {number} */ size) => {
      const indices = Array.from({ length: size }, (_, index) => index);
      const control = select(
        { name, onchange: ({ target }) => this.context.navigate({ [name]: target.value }) },
        indices,
        chosen[name],
      );
      return labelled(`${name[0].toUpperCase()}${name.slice(1)}`, control);
    };
    if (this.#choice.querySelectorAll("option").length !== layers + heads)
      this.#choice.replaceChildren(of("layer", layers), of("head", heads));
    for (const control of this.#choice.querySelectorAll("select"))
      control.value = String(control.name === "layer" ? chosen.layer : chosen.head);
  }

  /**
   * Begin anew if the prompt, the model or the edits are others.
   * @param {Body} body
   * @param {Body | null} plainBody
   * @param {number} layers
   * @param {number} heads
   */
  #use(body, plainBody, layers, heads) {
    const key = JSON.stringify(body);
    if (key === this.#key && this.#servedModel === this.context.service.model) return;
    this.#key = key;
    this.#servedModel = this.context.service.model;
    this.#maps = new AttentionMaps(body, SMALL_MAP);
    this.#plain = plainBody && new AttentionMaps(plainBody, SMALL_MAP);
    this.#grid.reset({ layers, heads });
  }

  /**
   * @param {number[]} layers
   * @param {AbortSignal} signal
   */
  async #fetchRows(layers, signal) {
    const maps = this.#maps;
    const missing = layers.filter((layer) => !this.#grid.has(layer));
    const rows = await maps.rows(missing, signal);
    if (maps !== this.#maps) return;
    for (const [layer, row] of rows)
      this.#grid.setRow(
        layer,
        row.map((map) => ({ ...map, says: saysOf(map.means) })),
      );
    this.#hatched.hidden = this.#grid.isComplete;
  }

  /**
   * @param {Place & { stage: MapStage, position: number }} place
   * @param {AbortSignal} signal
   */
  async #showHead({ layer, head, stage, position }, signal) {
    const pattern = await this.#maps.head(layer, head, "pattern", signal);
    const map = stage === "pattern" ? pattern : await this.#maps.head(layer, head, stage, signal);
    const row = await rowOf(this.#maps, pattern, { layer, head, position }, signal);
    const plain = (await this.#plain?.head(layer, head, "pattern", signal)) ?? null;
    const plainRow = this.#plain && plain && (await rowOf(this.#plain, plain, { layer, head, position }, signal));
    this.#shown = { layer, head, stage };
    this.#head.show({ layer, head, stage, position, map, pattern, row, plain, plainRow });
  }

  /** @param {Place | null} place */
  #point(place) {
    const said = place && this.#grid.says(place);
    this.#pointed.textContent = said
      ? `Layer ${place.layer}, head ${place.head}: ${said}.`
      : "Point at a picture, or use the arrow keys and Enter.";
  }
}

/**
 * The exact weights of one query.
 * @param {AttentionMaps} maps
 * @param {HeadMap} pattern of the head
 * @param {Place & { position: number }} place
 * @param {AbortSignal} signal
 */
async function rowOf(maps, { block, size, values }, { layer, head, position }, signal) {
  return block === 1
    ? values.subarray(position * size, (position + 1) * size)
    : maps.row(layer, head, position, signal);
}

/**
 * The share of the weight of a query that is on other keys than before.
 * @param {Float32Array} weights
 * @param {Float32Array} before
 */
function movedShare(weights, before) {
  return weights.reduce((sum, weight, key) => sum + Math.abs(weight - before[key]), 0) / 2;
}

/**
 * A term in brackets, which no line breaks apart.
 * @param {"query" | "key"} id
 */
function inBrackets(id) {
  return el("span", { class: "together" }, "(", term(id), ")");
}

/** @param {Means | null} means */
function saysOf(means) {
  if (means === null) return "one token only";
  return TARGET_NAMES.map((name) => `${percent(means[name])} to ${TARGETS[name]}`).join(", ");
}

customElements.define("attention-view", Attention);
