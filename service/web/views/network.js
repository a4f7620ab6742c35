// The view "Network": the whole network as one picture of a pass, which can be zoomed down to each number.

import { architectureOf, isWorkedExample } from "../articles.js";
import { actionButton, around, el, labelled, select } from "../dom.js";
import { number, percent, quoted } from "../format.js";
import { legendBar } from "../draw/colours.js";
import { dataTable } from "../draw/data_table.js";
import { editedName } from "../network/edit_signs.js";
import { lineOf } from "../network/items.js";
import { brief } from "../network/labels.js";
import { LESSONS } from "../network/lessons.js";
import { Change } from "../network/change.js";
import "../network/network_canvas.js";
import "../network/tour_card.js";
import { decidingOf, guessesOf, readGuesses } from "../network/lens.js";
import { isOther, isPosition, readChoice, readIndex, readPosition } from "../indices.js";
import { defaultPrompt } from "../prompts.js";
import { patternOf, valuesOf } from "../network/bands.js";
import { Pass } from "../network/pass.js";
import { tableOf } from "../network/table.js";
import { nameOf, placeName, stepsOf } from "../network/names.js";
import { readWriters, writersOf } from "../network/writers.js";
import { View, bodyOf } from "../view.js";
import { inWords, ofPrompt, readNamedEdits, withoutNames } from "./edit_words.js";

/**
 * @import { Line } from "../network/items.js"
 * @import { Lesson } from "../network/lessons.js"
 * @import { Spot } from "../network/scene.js"
 * @import { Edit, Model } from "../answers.js"
 * @import { Body } from "../network/pass.js"
 * @import { Update, ViewState } from "../view.js"
 * @typedef {ViewState & typeof Network.params} State
 */

const PREDICTIONS = "predictions"; // the item at the end of the line
const SHOWN = { "": "the numbers", change: "what edits change" }; // by the colours
const ATTENTION = /^blocks\.\d+\.attn\.(scores|attn_scores|pattern)$/; // the stages of the view Attention
const LANE = ", and below it what the network would say after each layer (logit lens)";
const CTRL = /Mac/.test(navigator.platform) ? "⌘" : "Ctrl"; // the key that makes the wheel zoom
const HINT_MILLISECONDS = 2500;
const IDLE_MILLISECONDS = 300; // after which the page reads what only a lesson needs
const MANY_WEIGHTS = 4e6; // of the patterns in sight; above, only those of the chosen token are read
const FIRST = /(embed|resid_post|attn\.pattern|attn_out|mlp\.post|mlp\.expert_weights|scale)$/; // what it shows

export default class Network extends View {
  static showsWorkedExamples = true;
  static appliesEdits = true;
  /**
   * `at`: "" is the whole network, "L3" a block, else a stage. `cell`: a column of the stage, of all heads. `lesson`:
   * one of `LESSONS`. `step`: of the lesson, from 0; "" outside of it. `show`: one of `SHOWN`.
   */
  static params = { at: "", position: "", head: "", cell: "", lesson: "", step: "", edits: "[]", show: "" };

  #answer = el("p", { class: "answer" });
  #trail = el("ol", { class: "trail" });
  #zoom = el("nav", { "aria-label": "Zoom" }, this.#trail);
  #heads = el("span");
  #showsChange = el("input", {
    ...{ type: "checkbox", role: "switch" },
    onchange: ({ target }) => this.context.navigate({ show: /** @type {any} */ (target).checked ? "change" : "" }),
  });
  #switch = el("label", { hidden: true }, this.#showsChange, " Show the change");
  #start = actionButton(LESSONS[""]?.title, () => this.#begin(""), { class: "main" });
  #why = actionButton("Why?", () => this.#go(Infinity, ""), { class: "small" });
  #articles = select({ onchange: ({ target }) => this.#begin(target.value) }, [["", "Read an article here"]], "");
  #lessons = el("span", { class: "row lessons" }, this.#start, this.#articles);
  #card = el("tour-card", { hidden: true });
  #picture = el("network-canvas");
  #hint = el("p", { class: "wheel-hint", role: "status", hidden: true }, `To zoom, hold ${CTRL} and turn the wheel.`);
  #cell = el("cell-arithmetic", { hidden: true });
  #legend = el("p", { class: "legend row network-legend" });
  #said = el("p", { class: "under-pointer", "aria-live": "polite" });
  #table = dataTable(() => tableOf(this.#parts(), this.#drawn(), this.#state?.at ?? ""), "Show as a table");
  /** @type {Line | null} */
  #line = null;
  /** @type {Pass | null} with the edits, if there are edits */
  #pass = null;
  /** @type {Pass | null} the pass without the edits, if there are edits */
  #plain = null;
  /** @type {Map<Edit, string>} each edit in words */
  #words = new Map();
  /** @type {Change | null} what the edits change, if there are edits */
  #change = null;
  #lineKey = "";
  /** @type {Model | null} the answer of GET /model with which the pass was computed */
  #served = null;
  /** @type {State | null} */
  #state = null;
  #passKey = "";
  #escape = (/** @type {KeyboardEvent} */ event) => this.#pressEscape(event);
  /** @type {AbortSignal} */
  #signal = new AbortController().signal;

  connectedCallback() {
    document.addEventListener("keydown", this.#escape);
  }

  disconnectedCallback() {
    document.removeEventListener("keydown", this.#escape);
  }

  build() {
    const bar = el(
      "div",
      { class: "row network-bar" },
      ...[this.#zoom, this.#answer, this.#lessons, this.#switch, this.#heads],
    );
    const picture = el("div", { class: "network-picture" }, this.#picture, this.#hint, this.#legend);
    const stage = el("div", { class: "network-stage" }, this.#card, picture, this.#cell);
    this.#articles.setAttribute("aria-label", "Lessons");
    this.#articles.append(...this.#offered().map(([value, { title }]) => el("option", { value }, title)));
    this.append(bar, stage, this.#said, this.#table);
    this.#card.addEventListener("step", ({ detail }) => this.#go(detail.step));
    this.#cell.addEventListener("go", ({ detail: { stage: at, row, column } }) =>
      this.context.navigate({ at, position: String(row), cell: String(column) }),
    );
    this.#picture.addEventListener("choose", ({ detail }) => this.#choose(detail.spot, detail.isName));
    this.#picture.addEventListener("point", ({ detail }) => this.#say(detail.spot));
    const showHint = () => {
      this.#hint.hidden = false;
      setTimeout(() => (this.#hint.hidden = true), HINT_MILLISECONDS);
    };
    this.#picture.addEventListener("wheelhint", showHint, { once: true });
    this.#picture.addEventListener("settle", () => {
      if (this.#picture.scene && this.#picture.scene.layout.zoom > 1) this.#hint.hidden = true;
      this.#fill().catch(this.context.report);
    });
    this.#picture.canvas.addEventListener("keydown", (event) => this.#press(event));
  }

  /** @type {Update<State>} */
  async update(state, signal) {
    const before = this.#state;
    this.#signal = signal;
    await this.#run(state, signal);
    const [pass, line] = [/** @type {Pass} */ (this.#pass), /** @type {Line} */ (this.#line)];
    this.#state = state;
    const stale = isOther(before, state) ? staleOf(state, line, pass, before?.lesson === state.lesson) : {};
    if (Object.keys(stale).length > 0) return this.context.navigate(stale, { replace: true });
    const spot = this.#spotOf(state);
    const row = spot.row;
    const reading = this.#readLens(row, signal); // while the picture is drawn
    reading.catch(() => {}); // its error is thrown below, unless there is another one
    await Promise.all([pass.readAround(row, signal), this.#plain?.readAround(row, signal)]);
    const head = state.head === "" ? null : readIndex(state.head, "head", numHeadsOf(pass));
    const chosen = spot.column === null ? null : { item: spot.from, row, column: spot.column };
    this.#cell.hidden = chosen === null;
    this.#showTrail(state);
    this.#showHeads(state);
    this.#showAnswer(row);
    this.#switch.hidden = this.#plain === null;
    this.#showsChange.checked = this.#drawn() !== pass;
    const focus = pass.stages.has(state.at) || state.at === PREDICTIONS ? spot.from : null;
    const look = { plain: this.#plain, row, head, chosen, lens: this.#lensOf(row), isStep: state.step !== "" };
    this.#card.hidden = state.step === ""; // the picture takes the room that remains
    const isNew = this.#picture.show(line, this.#drawn(), look, { focus, hasLens: this.#hasLens });
    this.#picture.measure();
    const place = (/** @type {State | null} */ s) => s && [s.at, s.cell, s.position].join();
    if (isNew && state.at === "") this.#picture.play();
    else if (isNew || place(before) !== place(state)) this.#picture.fly(this.#picture.cameraOf(spot));
    const lens = reading.then(() => this.#showLens(row, signal));
    const lesson = lens.then(() => this.#showLesson(state, row, signal)).then(() => this.#picture.measure());
    await Promise.all([this.#fill(), this.#showCell(state, chosen, signal), lesson]);
    this.#showLegend(state);
    this.#say(null);
    this.#table.refresh();
    if (this.#hasWriters)
      setTimeout(() => !signal.aborted && readWriters(pass, row).catch(this.context.report), IDLE_MILLISECONDS);
    return undefined;
  }

  /** The articles whose networks are served. @returns {[string, Lesson][]} */
  #offered() {
    const { models, model: served } = this.context.service;
    const isServed = (/** @type {Lesson} */ { model }) =>
      model ? models.some(({ name }) => name === model) : served !== null;
    const lessons = /** @type {[string, Lesson][]} */ (Object.entries(LESSONS));
    return lessons.filter(([name, lesson]) => name !== "" && isServed(lesson));
  }

  /**
   * Begin a lesson, with the network and the prompt of its article.
   * @param {string} name
   */
  async #begin(name) {
    this.#articles.value = "";
    const { model } = /** @type {Lesson} */ (LESSONS[name]);
    const entry = this.context.service.models.find((each) => each.name === model);
    const isLeft = name !== "" && !model && isWorkedExample(this.context.service, this.#state?.model ?? null);
    await this.context.navigate({
      ...(entry?.kind === "worked_example" && { model: entry.name, prompt: entry.prompt.text, position: "" }),
      ...(isLeft && { model: "", prompt: defaultPrompt(this.context.service, ""), position: "" }),
      ...{ lesson: name, step: "0", at: "", cell: "" },
    });
    this.#card.focus();
  }

  /**
   * Go to a step of a lesson, or leave it.
   * @param {number | null} step Infinity is the last one
   * @param {string} [lesson] the one that is shown, unless it is given
   */
  async #go(step, lesson) {
    const state = /** @type {State} */ (this.#state);
    if (step === null) return this.context.navigate({ lesson: "", step: "", at: "", cell: "" });
    try {
      const name = lesson ?? state.lesson;
      const steps = await this.#chapters(name, this.#spotOf(state).row, this.#signal);
      const index = Math.min(step, steps.length - 1);
      const { at, cell } = steps[index];
      return await this.context.navigate({ lesson: name, step: String(index), at, cell });
    } catch (error) {
      return this.context.report(error);
    }
  }

  /**
   * @param {string} lesson
   * @param {number} row
   * @param {AbortSignal} signal
   */
  async #chapters(lesson, row, signal) {
    const { chaptersOf } = await import("../network/chapters.js");
    const architecture = architectureOf(this.context.service, this.#state?.model ?? null);
    const offered = { hasLens: this.#hasLens, hasWriters: this.#hasWriters };
    return chaptersOf(lesson, { ...this.#parts(), architecture, ...offered }, row, signal);
  }

  /**
   * @param {State} state
   * @param {number} row
   * @param {AbortSignal} signal
   */
  async #showLesson(state, row, signal) {
    const { lesson, step, at, cell } = state;
    const { pass } = this.#parts();
    this.#answer.hidden = step !== "";
    this.#lessons.hidden = step !== "" || at !== "";
    this.#articles.value = "";
    if (step === "") return this.#card.stop();
    const steps = await this.#chapters(lesson, row, signal);
    if (signal.aborted) return undefined;
    const index = readIndex(step, "step", steps.length);
    this.#card.show(/** @type {Lesson} */ (LESSONS[lesson]), steps, index);
    if (this.#hasWriters && writersOf(pass, row) === undefined) {
      const isHere = steps[index].at === at && steps[index].cell === cell; // the user has not moved away
      const again = () => this.#renewStep(state, row, signal, isHere);
      readWriters(pass, row).then(again).catch(this.context.report);
    }
    return undefined;
  }

  /**
   * Show a step again, now that the page knows which parts write the token: the step may be at another head.
   * @param {State} state
   * @param {number} row
   * @param {AbortSignal} signal
   * @param {boolean} isHere whether the picture shows the place of the step
   */
  async #renewStep(state, row, signal, isHere) {
    if (signal.aborted) return;
    const { at, cell } = (await this.#chapters(state.lesson, row, signal))[Number(state.step)];
    if (signal.aborted) return;
    if (isHere && (at !== state.at || cell !== state.cell))
      await this.context.navigate({ at, cell }, { replace: true });
    else await this.#showLesson(state, row, signal);
  }

  /** Whether the logit lens can say what the network would predict after each layer. */
  get #hasLens() {
    const { service } = this.context;
    const isExample = isWorkedExample(service, this.#state?.model ?? null);
    return !isExample && service.model?.capabilities.attribution === true;
  }

  /** Whether the service says which parts write a token. */
  get #hasWriters() {
    return this.#hasLens && this.context.service.model?.capabilities.direct_attribution === true;
  }

  /** What the lens says of a token, as far as it is here. @param {number} row */
  #lensOf(row) {
    const { pass, plain } = this.#parts();
    const guesses = guessesOf(pass, row);
    return guesses && { guesses, before: plain && guessesOf(plain, row) };
  }

  /**
   * @param {number} row
   * @param {AbortSignal} signal
   */
  async #readLens(row, signal) {
    const { pass, plain } = this.#parts();
    if (this.#hasLens) await Promise.all([pass, plain].map((each) => each && readGuesses(each, row, signal)));
  }

  /**
   * Show what the lens says in the picture, which is there already, and in the sentence above it.
   * @param {number} row
   * @param {AbortSignal} signal
   */
  #showLens(row, signal) {
    if (signal.aborted) return;
    this.#picture.tell(this.#lensOf(row));
    this.#showAnswer(row);
  }

  /** What is shown, once there was a pass. */
  #parts() {
    const [line, pass] = [/** @type {Line} */ (this.#line), /** @type {Pass} */ (this.#pass)];
    return { line, pass, plain: this.#plain };
  }

  /** Whose numbers the picture draws: those of the pass, or what the edits change. */
  #drawn() {
    return (this.#state?.show === "change" && this.#change) || /** @type {Pass} */ (this.#pass);
  }

  request() {
    if (this.#state === null) return null;
    const { prompt, at } = this.#state;
    const stages =
      at === ""
        ? ["*.resid_post", "*.attn.pattern"]
        : [at === PREDICTIONS ? "logits" : at.replace(/^L(\d+)$/, "blocks.$1.*")];
    const body = { .../** @type {Pass} */ (this.#pass).body, prompt, stages };
    return { path: "/forward", body: { ...body, ...(this.#drawn() === this.#change && { baseline: true }) } };
  }

  pictures() {
    return [{ name: "network", element: this.#picture.canvas }];
  }

  /**
   * Compute the pass, and the one without the edits, unless they are here.
   * @type {Update<State>}
   */
  async #run(state, signal) {
    const { service } = this.context;
    readChoice(state.show, "show", SHOWN);
    const isExample = isWorkedExample(service, state.model);
    const named = isExample ? [] : ofPrompt(readNamedEdits(state.edits));
    const edits = withoutNames(named);
    const plainBody = bodyOf(state);
    const body = edits.length > 0 ? { ...plainBody, edits } : plainBody;
    const [key, plainKey] = [JSON.stringify(body), JSON.stringify(plainBody)];
    const isRestarted = this.#served !== service.model; // the service may serve another model
    this.#served = service.model;
    if (key === this.#passKey && !isRestarted) return;
    const kept = !isRestarted && this.#lineKey === plainKey ? (this.#plain ?? this.#pass) : null;
    const middle = /^\d+$/.test(state.position) ? Number(state.position) : null;
    const run = (/** @type {Body} */ each) =>
      isExample
        ? Pass.ofExample(each, signal)
        : Pass.ofModel(each, this.model, (name) => FIRST.test(name), middle, signal);
    const [plain, edited] = await Promise.all([kept ?? run(plainBody), edits.length > 0 ? run(body) : null]);
    [this.#passKey, this.#pass, this.#plain] = [key, edited ?? plain, edited && plain];
    this.#change = edited && new Change(edited, plain);
    this.#words = new Map(edits.map((edit, index) => [edit, inWords(named[index])]));
    if (plainKey === this.#lineKey && !isRestarted) return;
    this.#line = lineOf([...plain.stages.values()], architectureOf(service, state.model));
    this.#lineKey = plainKey;
  }

  /**
   * What the address names: items, a row and a column. A wrong name is an error.
   * @param {State} state
   */
  #spotOf({ at, position, cell }) {
    const { line, pass } = this.#parts();
    const count = pass.tokens.length;
    const row = position === "" ? count - 1 : readPosition(position, count);
    if (at === "") return { from: 0, to: line.items.length, row, column: null };
    const block = line.blocks.find(({ layer }) => at === `L${layer}`);
    if (block) return { from: block.first, to: block.last + 1, row, column: null };
    const from = line.items.findIndex(({ name }) => name === at);
    if (from < 0) throw new Error(`at: there is no block or stage “${at}” in this network.`);
    const { heads, columns } = line.items[from];
    if (cell !== "" && !isPosition(cell, heads * columns))
      throw new Error(`cell: ${cell} is out of range; ${at} has the columns 0 to ${heads * columns - 1}.`);
    return { from, to: from + 1, row, column: cell === "" ? null : Number(cell) };
  }

  /**
   * @param {State} state
   * @param {Spot | null} chosen
   * @param {AbortSignal} signal
   */
  async #showCell(state, chosen, signal) {
    if (chosen === null || chosen.column === null) return;
    const { pass, plain } = this.#parts();
    const { row, column } = chosen;
    const architecture = architectureOf(this.context.service, state.model);
    const [{ explain }, { explainPrediction }] = await Promise.all([
      import("../network/arithmetic/explain.js"), // the first view does not need them
      import("../network/arithmetic/prediction.js"),
      import("../network/cell_arithmetic.js"),
    ]);
    if (state.at === PREDICTIONS) {
      const [logit, probability] = await explainPrediction(pass, architecture, { row, id: column }, signal);
      const before = await plain?.logits(row, signal);
      if (signal.aborted) return;
      const edits = pass.editsAt("logits", row).map((edit) => this.#words.get(edit) ?? "");
      const token = pass.predictions.get(row)?.find(({ id }) => id === column) ?? { id: column };
      const title = `${quoted(token)} after ${quoted(pass.tokens[row])}`;
      this.#cell.show(
        { title: `Probability of ${title}`, explained: probability, before: before?.probabilities.values[column] },
        { title: `Logit of ${title}`, explained: logit, edits, before: before?.logits.values[column] },
      );
      return;
    }
    const explained = await explain(pass, architecture, { name: state.at, row, column }, signal);
    await plain?.read([state.at], [row], signal);
    if (signal.aborted) return;
    const { head, within } = explained.place;
    const edits = pass.editsAt(state.at, row, head, within).map((edit) => this.#words.get(edit) ?? "");
    const before = plain?.row(state.at, row)?.[column];
    this.#cell.show({ title: nameOf(this.#parts(), chosen), explained, edits, before });
    const stage = ATTENTION.exec(state.at)?.[1];
    if (stage === undefined) return;
    const place = { layer: String(explained.place.layer), head: String(head), stage };
    const go = () => this.context.navigate({ view: "attention", ...place, pos: String(row), key: String(within) });
    this.#cell.append(actionButton("Show in the view Attention", go, { class: "small" }));
  }

  /** Read what is in sight and not here, then draw it. */
  async #fill() {
    const pass = this.#picture.scene?.pass;
    if (!pass) return;
    const { names, layers, rows, row, isNear } = this.#picture.sight();
    this.#heads.hidden = !(isNear && layers.length > 0) && this.#state?.head === "";
    const patterns = new Set([...names.filter((name) => name.endsWith("pattern")), ...layers.map(patternOf)]);
    const columns = [...patterns].reduce((sum, name) => {
      const stage = pass.stages.get(name);
      return sum + (stage ? stage.heads * stage.columns : 0);
    }, 0);
    const isMuch = columns * rows.length > MANY_WEIGHTS;
    const values = pass === this.#change && !isMuch ? layers.map(valuesOf) : [];
    const all = [...names.filter((name) => !patterns.has(name)), ...(isMuch ? [] : patterns), ...values];
    const passes = pass === this.#pass && this.#plain ? [pass, this.#plain] : [pass]; // a change reads both
    const read = async (/** @type {string[]} */ some, /** @type {number[]} */ positions) =>
      (await Promise.all(passes.map((each) => each.read(some, positions, this.#signal)))).some(Boolean);
    let hasRead = await read(all, rows);
    if (isMuch) hasRead = (await read([...patterns], [row])) || hasRead;
    if (hasRead && pass === this.#picture.scene?.pass) this.#picture.drawSoon();
  }

  /**
   * A click on the name of a token follows it, and one on attention, whose bands lead across rows, only zooms.
   * @param {Spot} spot
   * @param {boolean} isName
   */
  #choose({ item, row, column }, isName) {
    if (isName) return this.context.navigate({ position: String(row) });
    const { line, pass } = this.#parts();
    const state = /** @type {State} */ (this.#state);
    const { name, kind, layer } = line.items[item];
    const position = kind === "bands" ? state.position : String(row);
    const best = pass.predictions.get(row)?.[0]?.id;
    if (kind === PREDICTIONS) return this.context.navigate({ at: PREDICTIONS, position, cell: String(best ?? 0) });
    const stage = kind === "bands" ? patternOf(/** @type {number} */ (layer)) : name;
    if (state.at === "" && layer !== null && line.blocks.length > 1)
      return this.context.navigate({ at: `L${layer}`, position, cell: "" });
    if (state.at !== stage) return this.context.navigate({ at: stage, position, cell: "" });
    return this.context.navigate({ position, cell: column === null ? "" : String(column) });
  }

  /**
   * Escape leads one level up, wherever the focus is, unless it has another meaning there.
   * @param {KeyboardEvent} event
   */
  #pressEscape(event) {
    const isTyping = around(event, "input, textarea, select, dialog, [contenteditable]") !== null;
    if (event.key !== "Escape" || event.defaultPrevented || isTyping || this.hidden || !this.#state) return undefined;
    if (this.#state.at === "" && this.#state.cell === "") return undefined;
    if (this.#cell.contains(document.activeElement)) this.#picture.canvas.focus({ preventScroll: true });
    return this.#leaveLevel();
  }

  /** One level up. */
  #leaveLevel() {
    const { line } = this.#parts();
    const state = /** @type {State} */ (this.#state);
    const layer = line.items.find(({ name }) => name === state.at)?.layer ?? null;
    if (state.cell !== "") return this.context.navigate({ cell: "" });
    if (layer !== null && line.blocks.length > 1) return this.context.navigate({ at: `L${layer}` });
    return this.context.navigate({ at: "" });
  }

  /** @param {KeyboardEvent} event */
  #press(event) {
    const { line, pass } = this.#parts();
    const state = /** @type {State} */ (this.#state);
    const spot = this.#spotOf(state);
    const isDown = this.#picture.isDown;
    const along = { [isDown ? "ArrowDown" : "ArrowRight"]: 1, [isDown ? "ArrowUp" : "ArrowLeft"]: -1 }[event.key];
    const across = { [isDown ? "ArrowRight" : "ArrowDown"]: 1, [isDown ? "ArrowLeft" : "ArrowUp"]: -1 }[event.key];
    const within = (/** @type {number} */ value, /** @type {number} */ size) => Math.min(size - 1, Math.max(0, value));
    if (!(along || across || ["Enter", "+", "-"].includes(event.key))) return undefined;
    event.preventDefault();
    if (across) return this.context.navigate({ position: String(within(spot.row + across, pass.tokens.length)) });
    if (event.key === "Enter") return this.#enterLevel(spot);
    if (along && spot.column !== null) {
      const { heads, columns } = line.items[spot.from];
      return this.context.navigate({ cell: String(within(spot.column + along, heads * columns)) });
    }
    if (along && /^L\d+$/.test(state.at)) {
      const block = line.blocks.findIndex(({ layer }) => state.at === `L${layer}`);
      return this.context.navigate({ at: `L${line.blocks[within(block + along, line.blocks.length)].layer}` });
    }
    if (along && state.at !== "") {
      const strips = line.items.filter(({ kind }) => kind === "strip" || kind === "gate");
      const index = strips.findIndex(({ name }) => name === state.at);
      return this.context.navigate({ at: strips[within(index + along, strips.length)].name });
    }
    if (["+", "-"].includes(event.key))
      return this.#picture.move(({ layout }) => layout.zoomAt(event.key === "+" ? 1.5 : 1 / 1.5, layout.length / 2));
    return undefined;
  }

  /** @param {{ from: number, column: number | null }} spot */
  #enterLevel({ from, column }) {
    const { line } = this.#parts();
    const state = /** @type {State} */ (this.#state);
    if (column !== null) return undefined;
    if (state.at === "" && line.blocks.length > 1) return this.context.navigate({ at: `L${line.blocks[0].layer}` });
    if (state.at === "" || /^L\d+$/.test(state.at)) {
      const strip = line.items.find(({ kind }, index) => index >= from && kind === "strip");
      return this.context.navigate({ at: strip?.name });
    }
    return this.context.navigate({ cell: "0" });
  }

  /** @param {State} state */
  #showTrail(state) {
    this.#zoom.hidden = state.at === "";
    const steps = stepsOf(this.#parts(), state);
    const last = steps.pop();
    this.#trail.replaceChildren(
      ...steps.map(({ text, changes }) => {
        const go = () => this.context.navigate(changes);
        return el("li", {}, actionButton(text, go, { class: "small" }));
      }),
      el("li", {}, el("span", { "aria-current": "location" }, last?.text ?? "")),
    );
  }

  /** @param {State} state */
  #showHeads({ head }) {
    const { pass } = this.#parts();
    const heads = Array.from({ length: numHeadsOf(pass) }, (_, index) => [String(index), `H${index}`]);
    const change = (/** @type {string} */ chosen) => this.context.navigate({ head: chosen });
    const control = select(
      { onchange: ({ target }) => change(target.value) },
      [["", "the mean of all heads"], ...heads],
      head,
    );
    this.#heads.replaceChildren(labelled("Bands show", control));
  }

  /**
   * What the colours mean, and how to move. Each stage has a scale of its own.
   * @param {State} state
   */
  #showLegend({ at }) {
    const hasLane = this.#picture.scene?.layout.hasLane;
    const pass = this.#drawn();
    const { low, high, isSigned } = pass.range(at);
    const [least, most] = pass.stages.has(at) ? [brief(low), brief(high)] : ["−", "+"];
    const [negative, positive] = [legendBar("diverging"), legendBar("diverging")];
    negative.classList.add("half");
    positive.classList.add("half", "positive");
    const isDiverging = isSigned || !pass.stages.has(at);
    const colours = isDiverging
      ? [el("span", {}, `${least} `, negative), " 0 ", el("span", {}, positive, ` ${most}`)]
      : [`${least} `, legendBar("sequential"), ` ${most}`];
    const isClipped = pass.stages.has(at) && !at.endsWith("pattern"); // the range is a high percentile
    const masked = pass.stages.get(at)?.hasKeys && [el("span", { class: "legend-masked" }), " masked"];
    this.#legend.replaceChildren(
      el(
        "span",
        { class: "legend-scale" },
        pass === this.#change && "With the edits − without: ",
        ...[colours, isClipped && " (beyond: the same colours)"],
      ),
      el("span", {}, el("span", { class: "legend-path" }), " the followed token", hasLane && LANE),
      masked ? el("span", {}, masked) : "",
      this.#plain
        ? el("span", {}, el("span", { class: "edited" }, "◆"), " an edit acts here; thin bars: without edits")
        : "",
      el(
        "span",
        {},
        at === "" ? `Click, pinch or turn the wheel with ${CTRL} to zoom in.` : "Drag to move; Escape goes back.",
      ),
    );
  }

  /** @param {number} row */
  #showAnswer(row) {
    const { line, pass, plain } = this.#parts();
    const expected = (/** @type {Pass} */ each) => {
      const guesses = guessesOf(each, row);
      const deciding = guesses && decidingOf(guesses);
      const top = (each.predictions.get(row) ?? []).slice(0, plain || deciding !== null ? 1 : 2);
      const words = top.map((token) => `${quoted(token)} (${percent(token.probability)})`).join(", then ");
      if (deciding === null) return words;
      return `${words}; ${deciding === 0 ? "the embedding" : placeName(line.blocks[deciding - 1].layer)} decides`;
    };
    const guesses = guessesOf(pass, row);
    this.#answer.replaceChildren(
      `After ${quoted(pass.tokens[row])}, the network expects ${expected(pass)}` +
        `${plain ? `; without the edits, ${expected(plain)}` : ""}.`,
      ...(guesses && decidingOf(guesses) !== null ? [" ", this.#why] : []),
    );
  }

  /** @param {Spot | null} spot */
  #say(spot) {
    const { line, pass, plain } = this.#parts();
    if (!spot) return (this.#said.textContent = "");
    const { item, row, column } = spot;
    const { kind, name } = line.items[item];
    const valueOf = (/** @type {Pass | null} */ each) =>
      column === null || kind === "bands" ? undefined : each?.row(name, row)?.[column];
    const [value, before] = [valueOf(pass), valueOf(plain)];
    const end = value === undefined ? "" : `: ${number(value)}`;
    const plainly = before === undefined ? "" : `, without the edits ${number(before)}`;
    const edits = pass.editsAt(editedName(line.items[item]), row).map((edit) => `. Edit: ${this.#words.get(edit)}`);
    return (this.#said.textContent = `${nameOf(this.#parts(), spot)}${end}${plainly}${edits.join("")}`);
  }
}

/**
 * What the address still says of an earlier prompt or model and does not exist now, and what replaces it.
 * @param {State} state
 * @param {Line} line
 * @param {Pass} pass
 * @param {boolean} isSameLesson
 */
function staleOf({ at, position, head, cell, step }, line, pass, isSameLesson) {
  const item = line.items.find(({ name }) => name === at);
  const isThere = at === "" || item || line.blocks.some(({ layer }) => at === `L${layer}`);
  const heads = numHeadsOf(pass);
  return {
    ...(!isThere && { at: "", cell: "" }),
    ...(step !== "" && isSameLesson && { lesson: "", step: "" }),
    ...(position !== "" && !isPosition(position, pass.tokens.length) && { position: "" }),
    ...(head !== "" && !isPosition(head, heads) && { head: "" }),
    ...(item && cell !== "" && !isPosition(cell, item.heads * item.columns) && { cell: "" }),
  };
}

/** @param {Pass} pass */
function numHeadsOf(pass) {
  return [...pass.stages.values()].find(({ name }) => name.endsWith("attn.pattern"))?.heads ?? 0;
}

customElements.define("network-view", Network);
