// The view "Forward pass": a map of the network with all stages of one pass, and the values of those that are opened.

import { architectureOf, isWorkedExample } from "../articles.js";
import { el, labelled, select } from "../dom.js";
import { scrollRegion } from "../draw/tables.js";
import { percent, quoted, shown } from "../format.js";
import { isOther, isPosition, readPosition } from "../indices.js";
import { Pass } from "../network/pass.js";
import { cached } from "../passes.js";
import { note } from "../terms.js";
import { View, bodyOf } from "../view.js";
import "./forward_map.js";
import "./stage_search.js";

/**
 * @import { Architecture, ForwardAnswer, Model, PositionedToken, Prompt, Stage } from "../answers.js"
 * @import { StageEntry } from "../stages.js"
 * @import { Update, ViewState } from "../view.js"
 * @typedef {ViewState & typeof Forward.params} State
 * @typedef {{ model?: string, prompt: Prompt, positions?: number[] }} Body
 */

const MAX_PREDICTIONS = 10;
const MOST_ROWS = 60; // of a picture
const asList = (/** @type {string} */ text) => (text === "" ? [] : text.split(","));
const isEqual = (/** @type {unknown} */ one, /** @type {unknown} */ other) =>
  JSON.stringify(one) === JSON.stringify(other);
const layerOf = (/** @type {string} */ stage) => (stage.startsWith("blocks.") ? stage.split(".")[1] : null);

export default class Forward extends View {
  static showsWorkedExamples = true;
  /**
   * `layer` and `stage`: what is open, as lists with commas. `position`: the token of the figures and predictions; ""
   * is all tokens, and the predictions of the last.
   */
  static params = { layer: "0", stage: "", head: "0", position: "" };

  #answer = el("p", { class: "answer" });
  #tokens = el("ol", { class: "token-row" });
  #position = el("span");
  #search = el("stage-search");
  #map = el("forward-map");
  /** @type {State | null} */
  #state = null;
  /** @type {State | null} the last state whose layers, stages and position are known to exist */
  #checked = null;
  /** @type {PositionedToken[] | null} */
  #shownTokens = null;
  /** @type {Pass | null} the numbers of the pictures */
  #pass = null;
  /** @type {Model | null} the model that was served then: after a restart of the service, the pass is out of date */
  #served = null;
  /** @type {AbortSignal} */
  #signal = new AbortController().signal;

  build() {
    const tokens = scrollRegion("Tokens of the prompt", this.#tokens);
    const meaning = note(
      "Rows are tokens, columns are numbers: blue is above zero, orange below. Open a card to read its numbers.",
    );
    const controls = el("div", { class: "row" }, this.#search, this.#position, meaning);
    this.append(this.#answer, tokens, controls, this.#map);
    this.#search.addEventListener("go", ({ detail }) => this.#goTo(detail.stage));
    this.#map.addEventListener("layer", ({ detail }) => this.#toggleLayer(detail.layer));
    this.#map.addEventListener("stage", ({ detail }) => this.#toggleStage(detail.name));
    this.#map.addEventListener("head", ({ detail }) => this.context.navigate({ head: detail.head }));
    this.#map.addEventListener("sight", () => this.#fill().catch(this.context.report));
    this.#map.addEventListener("position", ({ detail }) =>
      this.context.navigate({ position: String(detail.position) }),
    );
  }

  /** @type {Update<State>} */
  async update(state, signal) {
    this.#state = state;
    this.#signal = signal;
    const base = bodyOf(state);
    const overview = await cached("/forward", { ...base, ...this.#outerRequest(state) }, signal);
    const names = isWorkedExample(this.context.service, state.model)
      ? overview.stages.map(({ name }) => name)
      : this.#catalogue();
    const architecture = architectureOf(this.context.service, state.model);
    const changes = isOther(this.#checked, state) ? stale(state, names, architecture, overview.tokens.length) : {};
    this.#checked = state;
    if (Object.keys(changes).length > 0) return this.context.navigate(changes, { replace: true });
    this.#map.build(names, architecture);
    this.#showTokens(overview);
    this.#showPositions(overview, state.position);
    const open = asList(state.stage);
    const layers = new Set([...asList(state.layer), ...open.map(layerOf).filter((layer) => layer !== null)]);
    this.#search.show({ stages: this.#map.stages, layers });
    const selected =
      state.position === "" ? base : { ...base, positions: [readPosition(state.position, overview.tokens.length)] };
    const outer =
      state.position === ""
        ? overview
        : await cached("/forward", { ...selected, ...this.#outerRequest(state), top_k: 0 }, signal);
    const summaries = [...layers].map((layer) =>
      cached("/forward", { ...selected, stages: [`blocks.${layer}.*`], top_k: 0 }, signal),
    );
    const [answers, stream] = await Promise.all([
      Promise.all(summaries),
      this.#stream(selected, names, signal),
      this.#showOpen(state, overview, signal),
      this.#run(base, signal),
    ]);
    [outer, ...answers].forEach((answer) => this.#map.showSummaries(answer));
    this.#map.showStream(stream);
    this.#map.showTop(overview, state.position === "" ? overview.tokens.length - 1 : Number(state.position));
    this.#map.setOpen(layers, new Set(open));
    this.#fill().catch(this.context.report);
    return undefined;
  }

  /**
   * Compute the pass of the pictures, unless it is here.
   * @param {Body} body
   * @param {AbortSignal} signal
   */
  async #run(body, signal) {
    const { service } = this.context;
    if (this.#served === service.model && isEqual(body, this.#pass?.body)) return;
    this.#served = service.model;
    this.#pass = isWorkedExample(service, body.model ?? null)
      ? await Pass.ofExample(body, signal)
      : await Pass.ofModel(body, this.model, (name) => name === "embed", null, signal);
  }

  /** Read the stages whose cards are in sight, and draw them. A long prompt has only some of its tokens as rows. */
  async #fill() {
    const [pass, state] = [this.#pass, this.#state];
    if (pass === null || state === null || !isEqual(pass.body, bodyOf(state))) return;
    const chosen = state.position === "" ? null : Number(state.position);
    const step = Math.ceil(pass.tokens.length / MOST_ROWS);
    const positions = pass.tokens
      .map(({ position }) => position)
      .filter((position) => position % step === 0 || position === chosen);
    await pass.read(this.#map.sight, positions, this.#signal);
    if (pass === this.#pass) this.#map.draw({ pass, positions, chosen });
  }

  request() {
    if (this.#state === null) return null;
    const { layer, stage } = this.#state;
    const stages = [...asList(layer).map((each) => `blocks.${each}.*`), ...asList(stage)];
    return {
      path: "/forward",
      body: { ...bodyOf(this.#state), stages: stages.length > 0 ? stages : ["logits"] },
    };
  }

  pictures() {
    return this.#map.pictures();
  }

  #catalogue() {
    return this.model.stages.map(({ name }) => name);
  }

  /**
   * The stages outside of the layers, and the predictions. Worked examples are small: all their stages at once.
   * @param {State} state
   */
  #outerRequest({ model }) {
    if (isWorkedExample(this.context.service, model)) return { stages: ["*"] };
    const top_k = Math.min(MAX_PREDICTIONS, this.model.sizes.d_vocab);
    return { stages: this.#catalogue().filter((name) => !name.startsWith("blocks.")), top_k };
  }

  /**
   * The residual stream after each layer.
   * @param {Body} base
   * @param {string[]} names
   * @param {AbortSignal} signal
   * @returns {Promise<{ stages: Stage[] }>}
   */
  async #stream(base, names, signal) {
    const stages = names.filter((name) => name.startsWith("blocks.") && name.endsWith(".resid_post"));
    return stages.length > 0 ? cached("/forward", { ...base, stages, top_k: 0 }, signal) : { stages: [] };
  }

  /**
   * Show the values of the open stages. Predictions are in the overview already.
   * @param {State} state
   * @param {ForwardAnswer} overview
   * @param {AbortSignal} signal
   */
  async #showOpen(state, overview, signal) {
    const count = overview.tokens.length;
    const position = state.position === "" ? count - 1 : readPosition(state.position, count);
    await Promise.all(
      asList(state.stage).map(async (name) => {
        if (this.#map.showsPredictions(name)) return this.#map.showPredictions(name, overview, position);
        // an unknown stage has no axes: the service says what is wrong with it
        const known = [...overview.stages, ...(this.context.service.model?.stages ?? [])];
        const dims = known.find((stage) => stage.name === name)?.dims ?? [];
        const heads = dims.some((dim) => dim === "head" || dim === "kv_head") ? { heads: [Number(state.head)] } : {};
        const numbers = { detail: "values", encoding: "base64", dtype: "float32", top_k: 0 };
        const body = { ...bodyOf(state), stages: [name], ...heads, ...numbers };
        const answer = await cached("/forward", body, signal);
        return this.#map.showValues(name, answer, Number(state.head));
      }),
    );
  }

  /**
   * The choice of the token whose figures are shown.
   * @param {ForwardAnswer} overview
   * @param {string} position
   */
  #showPositions({ tokens }, position) {
    const options = [
      ["", "all tokens together"],
      ...tokens.map((token) => [String(token.position), `${token.position} ${shown(token)}`]),
    ];
    const onchange = (/** @type {{ target: { value: string } }} */ { target }) =>
      this.context.navigate({ position: target.value });
    const control = this.#position.querySelector("select");
    if (control && this.#shownTokens === tokens) control.value = position;
    else this.#position.replaceChildren(labelled("Statistics of", select({ onchange }, options, position)));
    this.#shownTokens = tokens;
  }

  /** @param {ForwardAnswer} overview */
  #showTokens({ tokens, predictions }) {
    this.#tokens.replaceChildren(
      ...tokens.map((token) =>
        el(
          "li",
          {},
          el("span", { class: "faint" }, String(token.position)),
          el("span", { class: "token" }, shown(token)),
          el("span", { class: "faint" }, `id ${token.id}`),
        ),
      ),
    );
    const [first, second] = predictions[predictions.length - 1].top;
    const then = second ? `, then ${quoted(second)} (${percent(second.probability)})` : "";
    this.#answer.textContent =
      `After ${tokens.length === 1 ? "this token" : `these ${tokens.length} tokens`}, ` +
      `${quoted(first)} is most likely (${percent(first.probability)})${then}.`;
  }

  /** The open layers and stages. */
  #open() {
    return { layers: asList(this.#state?.layer ?? ""), stages: asList(this.#state?.stage ?? "") };
  }

  /**
   * Open a stage, if it is closed, and bring it into sight.
   * @param {StageEntry} stage
   */
  async #goTo({ name, layer }) {
    const { layers, stages } = this.#open();
    await this.context.navigate({
      layer: (layer === null || layers.includes(String(layer)) ? layers : [...layers, layer]).join(","),
      stage: (stages.includes(name) ? stages : [...stages, name]).join(","),
    });
    this.#map.reveal(name);
  }

  /** @param {string} layer */
  #toggleLayer(layer) {
    const { layers: open, stages } = this.#open();
    const isOpen = open.includes(layer) || stages.some((stage) => layerOf(stage) === layer);
    const layers = isOpen ? open.filter((each) => each !== layer) : [...open, layer];
    this.context.navigate({
      layer: layers.join(","),
      stage: stages.filter((stage) => !isOpen || layerOf(stage) !== layer).join(","),
    });
  }

  /** @param {string} name */
  async #toggleStage(name) {
    const { stages } = this.#open();
    const isOpen = stages.includes(name);
    await this.context.navigate({
      stage: (isOpen ? stages.filter((each) => each !== name) : [...stages, name]).join(","),
    });
    if (!isOpen) this.#map.showBody(name);
  }
}

/**
 * What the address still says of an earlier prompt or model, and what replaces it: what does not exist now is left out.
 * @param {State} state
 * @param {string[]} stages
 * @param {Architecture} architecture
 * @param {number} numTokens
 * @returns {Partial<typeof Forward.params>}
 */
function stale(state, stages, { num_heads: numHeads }, numTokens) {
  const { layer, stage, head, position } = state;
  const kept = {
    layer: asList(layer)
      .filter((each) => stages.some((name) => layerOf(name) === each))
      .join(","),
    stage: asList(stage)
      .filter((each) => stages.includes(each))
      .join(","),
    head: Number(head) < numHeads ? head : "0",
    position: position === "" || isPosition(position, numTokens) ? position : "",
  };
  const names = /** @type {(keyof typeof kept)[]} */ (Object.keys(kept));
  return Object.fromEntries(names.filter((name) => kept[name] !== state[name]).map((name) => [name, kept[name]]));
}

customElements.define("forward-view", Forward);
