// The view "Step by step": which positions each step of a generation computes, and which it reads from the cache.

import { columnsOf, rangeOf, roleOf, stepsOf } from "../cache_steps.js";
import { actionButton, el, find, findAll, labelled } from "../dom.js";
import { barTable } from "../draw/bars.js";
import { dataTable } from "../draw/data_table.js";
import { scrollRegion, table } from "../draw/tables.js";
import { tablePicture } from "../draw/table_picture.js";
import { bytes, count, number, percent, quoted, shown } from "../format.js";
import { cached } from "../passes.js";
import { note } from "../terms.js";
import { View, bodyOf } from "../view.js";

/**
 * @import { GenerateAnswer } from "../answers.js"
 * @import { Column, Role, Step } from "../cache_steps.js"
 * @import { Update, ViewState } from "../view.js"
 * @typedef {ViewState & typeof Steps.params} State
 * @typedef {{ body: Record<string, unknown>, answer: GenerateAnswer, steps: Step[], columns: Column[] }} Shown
 */

const NUM_PREDICTIONS = 5;
const PLAY_MILLISECONDS = 1200;
/** @type {Record<Role, [sign: string, says: string]>} */
const SIGNS = {
  computed: ["■", "computed"],
  read: ["▤", "read from the cache"],
  chosen: ["★", "chosen"],
  none: ["", "not there yet"],
};

/** @type {Record<string, number>} */
const BYTES = { float64: 8, float32: 4, bfloat16: 2, float16: 2 };

export default class Steps extends View {
  /** `step`: the step that is shown, from 0. `tokens`: how many tokens are generated. */
  static params = { step: "0", tokens: "8" };

  #salt = `step by step ${Date.now()} ${Math.random()}`; // so that no other request has computed the prompt before
  /** @type {Shown} */
  #shown;
  #step = 0;
  /** @type {number | null} */
  #timer = null;

  #said = el("p", { class: "answer step-said", "aria-live": "polite" });
  #play = actionButton("", () => (this.#timer === null ? this.#start() : this.#stop()), { class: "main play" });
  #back = actionButton("◀ Back", () => this.#go(this.#step - 1));
  #next = actionButton("Next ▶", () => this.#go(this.#step + 1));
  #slider = el("input", { type: "range", min: "0", step: "1" });
  #number = el("input", { type: "number", min: "1", class: "short" });
  #caption = el("p", { class: "faint" });
  #picture = scrollRegion("Steps and positions");
  #figures = el("dl", { class: "cache-figures" });
  #predictions = el("div", { class: "step-predictions" });
  #table = dataTable(() => this.#tableOf(), "Show all steps as a table");

  build() {
    const intro = note(
      "{prefill|Prefill} computes the prompt, usually in one step. Each {prefill|decode} step computes " +
        "one token, and reads all earlier ones from the {kv_cache}. The most likely token is always chosen " +
        "({greedy}).",
    );
    const controls = el(
      "div",
      { class: "row" },
      this.#play,
      this.#back,
      this.#next,
      labelled("Step", this.#slider),
      labelled("Tokens to generate", this.#number),
    );
    const legend = el(
      "p",
      { class: "legend" },
      Object.entries(SIGNS)
        .filter(([, [sign]]) => sign)
        .map(([role, [sign, says]]) => [el("span", { class: `sign ${role}` }, sign), ` ${says}  `]),
    );
    const picture = el("div", { class: "cache-picture" }, this.#caption, this.#picture, legend);
    const step = el(
      "div",
      { class: "wide" },
      this.#said,
      el("div", { class: "beside" }, this.#figures, this.#predictions),
      this.#table,
    );
    this.append(intro, controls, el("div", { class: "beside" }, picture, step));
    this.#slider.addEventListener("input", () => this.#go(Number(this.#slider.value)));
    this.#number.addEventListener("change", () => this.context.navigate({ tokens: this.#number.value, step: "0" }));
    this.#stop();
  }

  /** @type {Update<State>} */
  async update(state, signal) {
    const body = this.#body(state);
    const answer = await cached("/generate", body, signal);
    if (answer !== this.#shown?.answer) {
      this.#stop();
      this.#load(body, answer);
    }
    const { steps } = this.#shown;
    if (!/^\d+$/.test(state.step) || Number(state.step) >= steps.length)
      throw new Error(`step: ${state.step} is out of range; there are the steps 0 to ${steps.length - 1}.`);
    this.#number.value = state.tokens;
    this.#show(Number(state.step));
  }

  leave() {
    this.#stop();
  }

  request() {
    return this.#shown && { path: "/generate", body: this.#shown.body };
  }

  pictures() {
    const picture = () => {
      const { scrollLeft } = this.#picture;
      this.#picture.scrollLeft = 0; // the names of the steps stay at the left edge, and would cover positions
      const drawn = tablePicture(find(this.#picture, "table"));
      this.#picture.scrollLeft = scrollLeft;
      return drawn;
    };
    return this.#shown ? [{ name: "steps", element: { picture } }] : [];
  }

  /** @param {State} state */
  #body(state) {
    const { tokens } = state;
    if (!/^-?\d+$/.test(tokens)) throw new Error(`tokens: “${tokens}” is not a whole number.`);
    // the service would echo the prompt
    if (Number(tokens) === 0) throw new Error("tokens: 0 generates nothing; choose at least 1.");
    const top_k = Math.min(NUM_PREDICTIONS, this.model.sizes.d_vocab);
    const trace = { stages: ["embed"], detail: "none", top_k };
    return {
      ...bodyOf(state),
      max_tokens: Number(tokens),
      temperature: 0,
      echo: true,
      logprobs: 0,
      cache_salt: this.#salt,
      trace,
    };
  }

  /**
   * @param {Record<string, unknown>} body
   * @param {GenerateAnswer} answer
   */
  #load(body, answer) {
    const steps = stepsOf(answer);
    this.#shown = { body, answer, steps, columns: columnsOf(answer.logprobs, answer.usage.prompt_tokens) };
    this.#slider.max = String(steps.length - 1);
    this.#draw();
    this.#table.refresh();
  }

  /** @param {number} step */
  #go(step) {
    this.#stop();
    return this.context.navigate({ step: String(step) }, { replace: true });
  }

  /** Show one step after the other, from the beginning if the last one is shown. */
  #start() {
    const first = this.#step >= this.#shown.steps.length - 1 ? 0 : this.#step + 1;
    this.#play.textContent = "⏸ Pause";
    const show = async (/** @type {number} */ step) => {
      await this.context.navigate({ step: String(step) }, { replace: true });
      if (this.#timer === null) return;
      if (this.#step !== step || step >= this.#shown.steps.length - 1) this.#stop();
      else this.#timer = setTimeout(show, PLAY_MILLISECONDS, step + 1);
    };
    this.#timer = setTimeout(show, 0, first);
  }

  #stop() {
    clearTimeout(this.#timer ?? undefined);
    this.#timer = null;
    this.#play.textContent = "▶ Play";
  }

  /** The picture: a row for each step, a column for each position. */
  #draw() {
    const { answer, steps, columns } = this.#shown;
    const heading = (/** @type {Column} */ { from, to, token }) =>
      el(
        "th",
        { scope: "col" },
        el("span", { class: "faint" }, rangeOf([from, to])),
        el("span", { class: "token" }, token ? shown(token) : `${count(to - from + 1)} tokens`),
      );
    const head = el(
      "tr",
      {},
      el("th", { scope: "col" }, el("span", {}, "step ↓"), el("span", {}, "position →")),
      columns.map(heading),
    );
    const rows = steps.map((step, index) =>
      el(
        "tr",
        { dataset: { step: index } },
        el("th", { scope: "row" }, `${index} ${step.isPrompt ? "prefill" : "decode"}`),
        columns.map((column) => cell(roleOf(step, column))),
      ),
    );
    const { prompt_tokens: numPrompt, completion_tokens: numGenerated } = answer.usage;
    const caption = `${numPrompt} tokens of the prompt, ${numGenerated} generated`;
    this.#caption.textContent = caption;
    this.#picture.replaceChildren(table({ class: "cache-steps", "aria-label": caption }, { head, rows }));
  }

  /** @param {number} index */
  #show(index) {
    const { steps } = this.#shown;
    const step = steps[index];
    this.#step = index;
    this.#slider.value = String(index);
    this.#slider.setAttribute("aria-valuetext", `step ${index} of ${steps.length - 1}`);
    this.#back.disabled = index === 0;
    this.#next.disabled = index === steps.length - 1;
    for (const row of findAll(this.#picture, "tr[data-step]")) {
      const at = Number(row.dataset.step);
      row.classList.toggle("current", at === index);
      row.classList.toggle("later", at > index);
      if (at === index) row.setAttribute("aria-current", "step");
      else row.removeAttribute("aria-current");
    }
    this.#reveal(find(this.#picture, "tr.current"));
    this.#said.textContent = sentence(this.#shown, index);
    this.#showFigures(step);
    const last = step.positions.at(-1);
    this.#predictions.replaceChildren(
      barTable({
        caption: `What step ${index} predicts after position ${last} (temperature 1, whole vocabulary).`,
        columns: ["token", "probability"],
        rows: step.top.map((each) => ({
          cells: [shown(each), percent(each.probability)],
          shares: [each.probability],
          mark: each.id === step.chosen?.id,
        })),
      }),
    );
  }

  /**
   * Scroll the picture, but not the page, so that a cell and the one after it can be seen beside the names of the
   * steps.
   * @param {HTMLElement} row the row of the step; the cell is the last one that the step computes
   */
  #reveal(row) {
    const cells = findAll(row, "td");
    const at = cells.findLastIndex((each) => each.classList.contains("computed"));
    const [place, next] = [cells[at], cells[at + 1] ?? cells[at]];
    const left = place.offsetLeft - find(row, "th").offsetWidth;
    const right = next.offsetLeft + next.offsetWidth;
    const { scrollLeft, clientWidth } = this.#picture;
    if (right > scrollLeft + clientWidth) this.#picture.scrollLeft = right - clientWidth;
    else if (left < scrollLeft) this.#picture.scrollLeft = Math.max(0, left);
  }

  /** @param {Step} step */
  #showFigures(step) {
    const { config, dtype, limits } = this.model;
    const ofToken = limits.cache_token_bytes;
    const ofNumber = ofToken / (2 * config.num_layers * config.num_kv_heads * config.d_head);
    const layers = config.windowed_layers ? "Some layers read" : "Each layer reads";
    const group = config.num_heads / config.num_kv_heads; // query heads that read the same keys and values
    const shared = group === 1 ? "" : ` (each for ${group} query heads)`;
    const entries = [
      ["Computed", `${count(step.positions.length)} of ${count(step.stored)} positions`],
      ["Read from the cache", `${count(step.read)} positions`],
      ["Without a cache", `${count(step.stored)} computed`],
      [
        "So far",
        `${count(step.computed)} computed instead of ${count(step.withoutCache)}: ` +
          `${count(step.withoutCache - step.computed)} saved`,
      ],
      [
        "In the cache after it",
        `${count(step.stored)} positions × ${count(ofToken)} bytes = ${bytes(step.stored * ofToken)}`,
      ],
      [
        "Bytes of one token",
        `2 (key, value) × ${config.num_layers} layers × ${config.num_kv_heads} key-value ` +
          `heads${shared} × ${config.d_head} numbers × ${number(ofNumber).replace(/\.0+$/, "")} ` +
          `bytes${ofNumber === BYTES[dtype] ? ` (${dtype})` : ""} = ${count(ofToken)}`,
      ],
      ...(config.window ? [["Sliding window", `${layers} only the last ${config.window} positions.`]] : []),
    ];
    this.#figures.replaceChildren(...entries.flatMap(([name, says]) => [el("dt", {}, name), el("dd", {}, says)]));
  }

  #tableOf() {
    const { cache_token_bytes: ofToken } = this.model.limits;
    return {
      caption: "All steps",
      columns: [
        "step",
        "kind",
        "positions that it computes",
        "how many",
        "how many without a cache",
        "read from the cache",
        "computed so far",
        "so far without a cache",
        "size of the cache after it",
        "chosen token",
      ],
      rows: this.#shown.steps.map((step, index) => [
        String(index),
        step.isPrompt ? "prefill" : "decode",
        rangeOf(step.positions),
        count(step.positions.length),
        count(step.stored),
        count(step.read),
        count(step.computed),
        count(step.withoutCache),
        bytes(step.stored * ofToken),
        step.chosen ? shown(step.chosen) : "–",
      ]),
    };
  }
}

/** @param {Role} role */
function cell(role) {
  const [sign, says] = SIGNS[role];
  return el(
    "td",
    { class: role },
    el("span", { "aria-hidden": "true" }, sign),
    el("span", { class: "only-heard" }, says),
  );
}

/**
 * What happens in a step.
 * @param {Shown} shown
 * @param {number} index
 */
function sentence({ steps, answer }, index) {
  const { usage, logprobs, finish_reason: reason } = answer;
  const step = steps[index];
  const { positions, read, chosen } = step;
  const kept =
    usage.cached_tokens > 0 && index === 0 ? ` ${usage.cached_tokens} positions were in the cache already.` : "";
  const what = step.isPrompt
    ? `Step ${index} (prefill) computes ` +
      `${positions.length === usage.prompt_tokens ? "the whole prompt" : "a part of the prompt"} at once, ` +
      `positions ${rangeOf(positions)}.${kept}`
    : `Step ${index} (decode) computes only position ${rangeOf(positions)}, the token ` +
      `${quoted(logprobs[positions[0]])}, and reads the ${count(read)} positions before it from the cache.`;
  const then = chosen ? ` It chooses ${quoted(chosen)} (${percent(step.top[0].probability)}).` : "";
  const end = index === steps.length - 1 && reason === "stop" ? " It ends the text." : "";
  return what + then + end;
}

customElements.define("steps-view", Steps);
