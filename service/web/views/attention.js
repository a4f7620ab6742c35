// The view "Attention": a grid of small patterns for all layers and heads, one of them large, and a ranking of heads.

import { isWorkedExample } from "../articles.js";
import { el, labelled, select } from "../dom.js";
import { barLegend } from "../draw/bars.js";
import "../draw/pattern_grid.js";
import { editsIn } from "../edits_note.js";
import { percent } from "../format.js";
import { isOther, isPosition, readChoice, readIndex } from "../indices.js";
import { placeName } from "../network/names.js";
import { cached } from "../passes.js";
import { note } from "../terms.js";
import { View, bodyOf } from "../view.js";
import { STAGES } from "./attention_head.js";
import { AttentionMaps } from "./attention_maps.js";
import { CHOICES, TARGETS, TARGET_NAMES, ranked } from "./attention_ranking.js";
import { ablation, ofPrompt, readEdits } from "./edit_words.js";

/**
 * @import { Means, Model } from "../answers.js"
 * @import { Update, ViewState } from "../view.js"
 * @import { Body, HeadMeans, MapStage } from "./attention_maps.js"
 * @import { HeadWeights, Place, Choice } from "./attention_ranking.js"
 * @typedef {ViewState & typeof Attention.params} State
 * @typedef {{ layers: number, heads: number }} Size
 */

const SMALL_MAP = 64; // rows of a small map

export default class Attention extends View {
  static showsWorkedExamples = true;
  static appliesEdits = true;
  /** `layer` and `head`: both "" for the head that answers the question. */
  static params = { layer: "", head: "", pos: "", stage: "pattern", find: "previous", key: "", edits: "[]" };

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
    const meaning = note(
      "Each picture is the {pattern} of one {head}: a row for each {query}, a column for each {key}. " +
        `${placeName(4, 2)} is head 2 of layer 4.`,
    );
    const legend = el("p", { class: "legend" }, "Weight: ", barLegend("0 %", "100 %"), ".", this.#hatched);
    this.append(
      el(
        "div",
        { class: "beside" },
        el(
          "section",
          { class: "narrow", "aria-label": "All heads" },
          this.#ranking,
          meaning,
          this.#choice,
          this.#pointed,
          this.#grid,
          legend,
        ),
        this.#head,
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
    const ask = (/** @type {Record<string, string>} */ question) =>
      this.context.navigate({ ...question, layer: "", head: "" });
    this.#ranking.addEventListener("target", ({ detail }) => ask({ find: detail.target }));
    this.#ranking.addEventListener("pair", ({ detail }) => ask(detail));
    this.#head.addEventListener("change", ({ detail }) => this.context.navigate({ ...this.#named(), ...detail }));
    this.#head.addEventListener("ablate", () => this.#ablate());
    this.#head.addEventListener("trace", ({ detail }) => this.#trace(detail));
  }

  /** @type {Update<State>} */
  async update(state, signal) {
    this.#signal = signal;
    const plainBody = bodyOf(state);
    const edits = isWorkedExample(this.context.service, state.model) ? [] : ofPrompt(readEdits(state.edits));
    const body = edits.length > 0 ? { ...plainBody, edits } : plainBody;
    const size = await this.#sizeOf(state, body, signal);
    const { layers, heads } = size;
    const isNew = isOther(this.#state, state);
    const isNamed = state.layer !== "" || state.head !== "";
    const named = { layer: state.layer || "0", head: state.head || "0" };
    if (isNew && !(isPosition(named.layer, layers) && isPosition(named.head, heads)))
      return this.context.navigate({ layer: "", head: "" }, { replace: true });
    const given = { layer: readIndex(named.layer, "layer", layers), head: readIndex(named.head, "head", heads) };
    const stage = readChoice(state.stage, "stage", STAGES);
    const target = readChoice(state.find, "find", CHOICES);
    this.#use(body, edits.length > 0 ? plainBody : null, size);
    this.#head.canAblate =
      Boolean(this.context.service.model?.capabilities.edits) && !isWorkedExample(this.context.service, state.model);
    this.#point(null);
    if (isNamed) this.#grid.mark(given);
    await this.#fetchRows(this.#grid.visibleLayers(), signal);
    const means = await this.#maps.means(layers, signal);
    const { tokens } = this.#maps;
    for (const name of /** @type {const} */ (["pos", "key"]))
      if (isNew && state[name] !== "" && !isPosition(state[name], tokens.length))
        return this.context.navigate({ [name]: "" }, { replace: true });
    const query = state.pos === "" ? tokens.length - 1 : readIndex(state.pos, "position", tokens.length);
    const key = state.key === "" ? Math.max(0, query - 1) : readIndex(state.key, "key", tokens.length);
    const all = await this.#weigh(means, target, query, key, signal);
    const { layer, head } = isNamed ? given : (ranked(all, target)[0] ?? given);
    this.#grid.mark({ layer, head });
    this.#showChoice(size, { layer, head });
    const isEdited = this.#plain !== null;
    this.#ranking.show({ heads: all, target, isEdited, tokens, query, key, chosen: { layer, head } });
    const chosenKey = state.pos === "" || state.key === "" ? null : key;
    await this.#showHead({ layer, head, stage, position: query, key: chosenKey }, signal);
    if (this.#isChosen) this.#head.reveal();
    this.#isChosen = false;
    this.#state = state;
    return undefined;
  }

  /**
   * What the ranking compares, of each head.
   * @param {HeadMeans[]} means
   * @param {Choice} target
   * @param {number} query
   * @param {number} key
   * @param {AbortSignal} signal
   * @returns {Promise<HeadWeights[]>}
   */
  async #weigh(means, target, query, key, signal) {
    const rows = target === "chosen" || target === "changed" ? await this.#maps.rowOfAll(query, signal) : [];
    const before = target === "changed" ? await this.#plain?.rowOfAll(query, signal) : undefined;
    return means.map((each, index) => ({
      ...each,
      weight: rows[index]?.weights[key],
      moved: before && movedShare(rows[index].weights, before[index].weights),
    }));
  }

  /** The shown head in the address, so that a click in its picture does not lead to another head. */
  #named() {
    return { layer: String(this.#shown.layer), head: String(this.#shown.head) };
  }

  /**
   * A number of the shown head with its arithmetic, in the view of the network.
   * @param {{ query: number, key: number }} cell
   */
  #trace({ query, key }) {
    const { layer, head, stage } = this.#shown;
    const at = `blocks.${layer}.attn.${stage}`;
    const cell = String(head * this.#maps.tokens.length + key);
    return this.context.navigate({ view: "network", at, position: String(query), cell });
  }

  /** What the network predicts without the chosen head, in the view of interventions. */
  #ablate() {
    const { layer, head } = this.#shown;
    const edit = ablation(layer, head);
    const edits = editsIn(this.#state?.edits) ?? [];
    const others = edits.filter((other) => JSON.stringify(other) !== JSON.stringify(edit));
    return this.context.navigate({ view: "edits", edits: JSON.stringify([...others, edit]) });
  }

  request() {
    return this.#shown ? { path: "/forward", body: this.#maps.forwardBody(this.#shown) } : null;
  }

  pictures() {
    const picture = async () => {
      await this.#fetchRows([...Array(this.#grid.numLayers).keys()], this.#signal);
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
  async #sizeOf(state, body, signal) {
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
   * @param {Size} size
   * @param {Place} chosen
   */
  #showChoice({ layers, heads }, chosen) {
    const of = (/** @type {keyof Place} */ name, /** @type {number} */ count) => {
      const control = select(
        { name, onchange: ({ target }) => this.context.navigate({ ...this.#named(), [name]: target.value }) },
        [...Array(count).keys()],
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
   * @param {Size} size
   */
  #use(body, plainBody, size) {
    const key = JSON.stringify(body);
    if (key === this.#key && this.#servedModel === this.context.service.model) return;
    this.#key = key;
    this.#servedModel = this.context.service.model;
    this.#maps = new AttentionMaps(body, SMALL_MAP);
    this.#plain = plainBody && new AttentionMaps(plainBody, SMALL_MAP);
    this.#grid.reset(size);
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
    for (const [layer, row] of rows) {
      const patterns = row.map((map) => ({ ...map, says: saysOf(map.means) }));
      this.#grid.setRow(layer, patterns);
    }
    this.#hatched.hidden = this.#grid.isComplete;
  }

  /**
   * @param {Place & { stage: MapStage, position: number, key: number | null }} place
   * @param {AbortSignal} signal
   */
  async #showHead(place, signal) {
    const pattern = await this.#maps.head(place, "pattern", signal);
    const map = place.stage === "pattern" ? pattern : await this.#maps.head(place, place.stage, signal);
    const row = await this.#maps.row(place, pattern, signal);
    const plain = (await this.#plain?.head(place, "pattern", signal)) ?? null;
    const plainRow = (plain && (await this.#plain?.row(place, plain, signal))) ?? null;
    this.#shown = place;
    this.#head.show({ ...place, map, pattern, row, plain, plainRow });
  }

  /** @param {Place | null} place */
  #point(place) {
    const said = place && this.#grid.says(place);
    this.#pointed.textContent = said
      ? `${placeName(place.layer, place.head)}: ${said}.`
      : "Point at a picture, or use the arrow keys and Enter.";
  }
}

/**
 * The share of the weight of a query that is on other keys than before.
 * @param {Float32Array} weights
 * @param {Float32Array} before
 */
function movedShare(weights, before) {
  return weights.reduce((sum, weight, key) => sum + Math.abs(weight - before[key]), 0) / 2;
}

/** @param {Means | null} means */
function saysOf(means) {
  if (means === null) return "one token only";
  return TARGET_NAMES.map((name) => `${percent(means[name])} to ${TARGETS[name]}`).join(", ");
}

customElements.define("attention-view", Attention);
