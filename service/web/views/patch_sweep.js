// Patch every position at every layer, one after the other: where does the network keep what tells two prompts apart?

import { isAbort, postStream } from "../api.js";
import { actionButton, el, emit, labelled, onSubmit, textBox } from "../dom.js";
import { scaleOf } from "../draw/colours.js";
import "../draw/heat_map.js";
import { count, number, quoted, shown } from "../format.js";
import { placeName } from "../network/names.js";
import { cached } from "../passes.js";
import { note } from "../terms.js";
import { FieldMessage, isRefusal, messageOf } from "./field_message.js";

/**
 * @import { ForwardAnswer, Prediction, Prompt, SweepEvent, Token } from "../answers.js"
 * @typedef {{ name: string | null, prompt: Prompt, other: Prompt }} Question `name`: the `model` of requests; the pass
 *   over `prompt` is patched with numbers of that over `other`
 *
 * `plain`, `goal`: the logit of `token` minus that of `minus` for this prompt and for the other one; `values`: the same
 * after each patch, layer by layer, NaN for those that are not computed yet.
 * @typedef {{
 *   here: Token[], there: Token[], token: Token, minus: Token, plain: number, goal: number, values: Float64Array,
 * }} Found
 * @typedef {{
 *   question: Question, stopper: AbortController, promise: Promise<void>, found: Found | null, isComplete: boolean,
 * }} Sweep
 */

const ENOUGH = 0.5; // the share that a patch has to bring over to be named
const SMALL = 0.05; // a smaller negative share has the colour of 0

/**
 * <patch-sweep>. `prepare(text)`: the text of the other prompt in the form. `show(question)` computes a sweep, unless
 * it is there already, and shows nothing for null. `leave` ends one that runs. Events: "sweep" with detail {other}, a
 * text, and "add" with detail {edit}.
 */
export class PatchSweep extends HTMLElement {
  #other = textBox("other");
  #stop = actionButton("Stop", () => this.#sweep?.stopper.abort(), { hidden: true });
  #form = el(
    "form",
    { class: "row", "aria-label": "Try every layer and position" },
    labelled("Other prompt", this.#other),
    el("button", { type: "submit" }, "Try every patch"),
    this.#stop,
  );
  #message = new FieldMessage("sweep-message");
  #status = el("p", { class: "faint", role: "status" });
  #said = el("p", { class: "answer" });
  #map = el("heat-map");
  #chosen = el("p", { class: "row", role: "status" });
  #result = el("div", { hidden: true }, this.#said, this.#map, this.#chosen);
  #prepared = "";
  /** @type {Sweep | null} */
  #sweep = null;

  connectedCallback() {
    if (this.childElementCount > 0) return;
    this.append(
      el("h3", {}, "Where is the difference of two prompts?"),
      note(
        "Each cell is one {patching|patch} of the {residual} before a layer, at one position, with the " +
          "numbers of the other prompt. 0: the answer stays that of this prompt. 1: it becomes that of the " +
          "other one. Edits are left out.",
      ),
      this.#form,
      this.#status,
      this.#result,
    );
    this.#form.addEventListener("input", () => this.#message.clear());
    onSubmit(this.#form, () => {
      this.#end(); // the same sweep again, if it was stopped
      if (this.#other.value === "") return this.#message.show("Write a text.", this.#form, this.#other);
      return emit(this, "sweep", { other: this.#other.value });
    });
    this.#map.addEventListener("choose", ({ detail }) => this.#choose(detail.row, detail.column));
  }

  /** @param {string} text */
  prepare(text) {
    if (text !== this.#prepared) this.#other.value = text; // what is typed stays
    this.#prepared = text;
  }

  leave() {
    if (!this.#sweep?.isComplete) this.#end();
  }

  pictures() {
    return this.#result.hidden ? [] : [{ name: "patches", element: this.#map }];
  }

  /**
   * @param {Question | null} question
   * @returns {Promise<void>}
   */
  async show(question) {
    if (question === null) return this.#end();
    if (JSON.stringify(this.#sweep?.question) === JSON.stringify(question)) return this.#sweep?.promise;
    this.#end();
    const [stopper, promise] = [new AbortController(), Promise.resolve()];
    /** @type {Sweep} */
    const sweep = { question, stopper, promise, found: null, isComplete: false };
    this.#sweep = sweep;
    this.#stop.hidden = false;
    this.#status.textContent = "Computing both prompts …";
    sweep.promise = this.#run(sweep);
    return sweep.promise;
  }

  /** End the sweep, and show nothing. */
  #end() {
    this.#sweep?.stopper.abort();
    this.#sweep = null;
    this.#message.clear();
    this.#stop.hidden = this.#result.hidden = true;
    this.#status.textContent = "";
    this.#chosen.replaceChildren();
  }

  /** @param {Sweep} sweep */
  async #run(sweep) {
    try {
      await this.#compute(sweep);
      sweep.isComplete = true;
    } catch (error) {
      if (sweep === this.#sweep) this.#fail(sweep, error);
    } finally {
      if (sweep === this.#sweep) this.#stop.hidden = true;
    }
  }

  /**
   * @param {Sweep} sweep
   * @param {unknown} error
   */
  #fail(sweep, error) {
    if (isAbort(error)) {
      this.#status.textContent = sweep.found ? `Stopped after ${numDone(sweep.found.values)}.` : "Stopped.";
      return;
    }
    this.#end();
    if (!isRefusal(error)) throw error;
    this.#sweep = sweep; // it is not computed again until the form asks for it
    this.#message.show(messageOf(error), this.#form, this.#other);
  }

  /** @param {Sweep} sweep */
  async #compute(sweep) {
    const { name, prompt, other } = sweep.question;
    const { signal } = sweep.stopper;
    const model = name ? { model: name } : {};
    const pass = { ...model, stages: ["logits"], detail: "none", positions: [-1] };
    const [here, there] = await Promise.all(
      [prompt, other].map((text) => cached("/forward", { ...pass, prompt: text }, signal)),
    );
    const [token, minus] = answers(here, there);
    const question = { prompt: other, corrupted: prompt, token: token.id, minus: minus.id };
    const body = { ...model, method: "patching", ...question, stages: ["*.resid_pre"], by: ["position"] };
    for await (const event of postStream("/attribute", body, signal)) {
      if (event.clean_value !== undefined)
        sweep.found = { here: here.tokens, there: there.tokens, token, minus, ...begin(event) };
      if (sweep.found === null) continue;
      for (const { stage, position, value } of event.cells ?? [])
        sweep.found.values[Number(stage.split(".")[1]) * here.tokens.length + position] = value ?? NaN;
      if (sweep === this.#sweep) this.#draw(sweep.found);
    }
  }

  /** @param {Found} found */
  #draw(found) {
    const { here, there, values } = found;
    const shares = values.map((value) => shareOf(found, value));
    const rows = shares.length / here.length;
    this.#status.textContent = `${numDone(values)}.`;
    this.#result.hidden = false;
    this.#said.textContent = `${comparison(found)} ${verdict(shares, here)}`;
    this.#map.data = {
      values: shares,
      rowLabels: Array.from({ length: rows }, (_, layer) => placeName(layer)),
      columnLabels: here.map((token, index) => swapped(token, there[index])),
      rowName: "layer",
      columnName: "position",
      valueName: "share",
      missing: "not computed",
      scale: scaleOf([1, ...shares.map((share) => (share < -SMALL ? share : Math.max(0, share)))]),
    };
  }

  /**
   * Offer the patch of a cell as an edit.
   * @param {number} layer
   * @param {number} position
   */
  #choose(layer, position) {
    if (!this.#sweep?.found) return;
    const { question, found } = this.#sweep;
    const { here, there, values } = found;
    const value = values[layer * here.length + position];
    const edit = {
      stage: `blocks.${layer}.resid_pre`,
      op: "patch",
      positions: [position],
      source: { prompt: question.other },
    };
    this.#chosen.replaceChildren(
      el(
        "span",
        {},
        `Before ${placeName(layer)} at position ${position}, ${swapped(here[position], there[position])}: ` +
          `share ${number(shareOf(found, value))}, difference of the logits ${number(value)}.`,
      ),
      actionButton("Add this patch to the edits", () => emit(this, "add", { edit })),
    );
  }
}

/**
 * The token whose logit is compared, and the one whose logit is subtracted: the most likely ones of the other prompt
 * and of this one. If they are the same, those of the likely ones whose logits differ most.
 * @param {ForwardAnswer} here
 * @param {ForwardAnswer} there
 * @returns {[Token, Token]}
 */
function answers(here, there) {
  const [numHere, numThere] = [here.tokens.length, there.tokens.length];
  if (numHere !== numThere)
    throw new Error(
      `This prompt has ${numHere} tokens, and the other one ${numThere}. Write one with as many tokens, position by ` +
        "position.",
    );
  if (here.tokens.every(({ id }, index) => id === there.tokens[index].id))
    throw new Error("Both prompts are the same. Change a word of the other prompt.");
  const [[before], [after]] = [here.predictions, there.predictions].map((all) => all.map(({ top }) => top));
  if (before[0].id !== after[0].id) return [after[0], before[0]];
  const logits = new Map(before.map(({ id, logit }) => [id, logit ?? NaN]));
  const gain = (/** @type {Prediction} */ { id, logit }) => (logit ?? NaN) - (logits.get(id) ?? NaN);
  const both = after.filter(({ id }) => logits.has(id)).sort((one, other) => gain(other) - gain(one));
  return [both[0], both[both.length - 1]];
}

/**
 * What the first event of a sweep says.
 * @param {SweepEvent} event
 */
function begin({ clean_value, corrupted_value, num_cells }) {
  const [goal, plain] = [clean_value ?? NaN, corrupted_value ?? NaN];
  if (!(Math.abs(goal - plain) > 0))
    throw new Error("The network continues both prompts in the same way, so there is no difference to find.");
  return { goal, plain, values: new Float64Array(num_cells ?? 0).fill(NaN) };
}

/** @param {Float64Array} values */
function numDone(values) {
  const left = values.filter(Number.isNaN).length;
  return `${count(values.length - left)} of ${count(values.length)} patches`;
}

/**
 * How much of the difference a patch brings over: 0 for none of it, 1 for all.
 * @param {Found} found
 * @param {number} value
 */
function shareOf({ plain, goal }, value) {
  return (value - plain) / (goal - plain);
}

/**
 * A token, and the one that the other prompt has in its place if that is another one.
 * @param {Token} here
 * @param {Token} there
 */
function swapped(here, there) {
  return here.id === there.id ? shown(here) : `${shown(here)}←${shown(there)}`;
}

/** @param {Found} found */
function comparison({ token, minus, plain, goal }) {
  return (
    `The logit of ${quoted(token)} minus that of ${quoted(minus)} is ${number(plain)} for this prompt (share 0) and ` +
    `${number(goal)} for the other one (share 1).`
  );
}

/**
 * The position whose patch brings over most, for each run of layers.
 * @param {Float64Array} shares
 * @param {Token[]} tokens
 */
function verdict(shares, tokens) {
  if (shares.some(Number.isNaN)) return "";
  /** @type {{ position: number, first: number, last: number }[]} */
  const runs = [];
  for (let layer = 0; layer < shares.length / tokens.length; layer++) {
    const row = shares.subarray(layer * tokens.length, (layer + 1) * tokens.length);
    const position = row.indexOf(Math.max(...row));
    const run = runs.at(-1);
    if (row[position] < ENOUGH) continue;
    if (run?.position === position && run.last === layer - 1) run.last = layer;
    else runs.push({ position, first: layer, last: layer });
  }
  if (runs.length === 0) return "No single patch brings over half of this difference.";
  const said = runs.map(({ position, first, last }) => {
    const layers = first === last ? `before ${placeName(first)}` : `before ${placeName(first)} to ${placeName(last)}`;
    return `at ${quoted(tokens[position])} (position ${position}) ${layers}`;
  });
  return `Most of this difference is ${said.join(", then ")}.`;
}

customElements.define("patch-sweep", PatchSweep);
