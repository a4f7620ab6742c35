// The view "Worked examples": the numbers that three articles print, beside those that the service computes.

import { ARTICLES } from "../articles.js";
import { actionButton, el, find, findAll } from "../dom.js";
import { bodyRow, headRow, scrollRegion, table } from "../draw/tables.js";
import { number } from "../format.js";
import { cached } from "../passes.js";
import { describe } from "../stages.js";
import { View } from "../view.js";
import { placeOf, printedStage, verdict } from "./printed_stage.js";

/**
 * @import { Architecture, PrintedStage, PublishedResult, Published, WorkedAnswer } from "../answers.js"
 * @import { WorkedExampleEntry } from "../answers.js"
 * @import { Child } from "../dom.js"
 * @import { Article } from "../articles.js"
 * @import { Update, ViewState } from "../view.js"
 * @import { Labels } from "./printed_stage.js"
 * @typedef {ViewState & typeof WorkedExamples.params} State
 * @typedef {WorkedAnswer["worked_example"] & {
 *   example: WorkedExampleEntry, article: Article | undefined, architecture: Architecture, printed: PrintedStage[],
 *   place: Labels,
 * }} Shown `printed`: the stages that the article prints
 */

/** @type {Record<string, string | undefined>} */
const RESULTS = {
  loss: "Mean loss",
  total_loss: "Sum of the losses",
  perplexity: "Perplexity",
  prediction: "Most likely next token",
  prediction_probability: "Probability of this token",
};
const UNKNOWN = /** @type {Architecture} */ ({}); // of an article that the page does not know: its labels are plain
/** What a stage belongs to, by the part of the network. @type {[RegExp, string][]} */
const GROUPS = [
  [/^(embed|pos_embed)$/, "Embeddings"],
  [/^(resid_pre|ln1|attn|resid_mid)/, "Attention"],
  [/^(ln2|mlp|resid_post)/, "Feed-forward network"],
  [/./, "Prediction"],
];
const asList = (/** @type {string} */ text) => (text === "" ? [] : text.split(","));

export default class WorkedExamples extends View {
  static usesPrompt = false;
  static showsWorkedExamples = true;
  /** `example`: its name; "" is the chosen model, or the first one. `stage`: the open stages, with commas. */
  static params = { example: "", stage: "" };

  #choice = el("div", { class: "row", role: "group", "aria-label": "Worked example" });
  #about = el("section", { "aria-label": "About the article" });
  #results = el("section", { "aria-label": "Results" });
  #slips = el("section", { class: "long", "aria-label": "Numbers that look wrong", tabindex: "-1" });
  #stages = el("table", { class: "printed", "aria-label": "Printed stages" });
  /** @type {Record<string, unknown> | null} the request whose answer is shown */
  #body = null;

  build() {
    const examples = this.#examples();
    this.#choice.append(
      ...examples.map(({ name, title }) =>
        actionButton(
          [ARTICLES[name]?.title ?? title, " ", el("span", { class: "num-wrong" })],
          () => this.context.navigate({ example: name, stage: "" }),
          { dataset: { name } },
        ),
      ),
    );
    this.append(
      this.#choice,
      el("div", { class: "beside" }, el("div", {}, this.#about, legend()), this.#results),
      el(
        "div",
        { class: "beside" },
        el(
          "div",
          { class: "long" },
          el("h3", {}, "Printed stages, in the order of computation"),
          scrollRegion("Table of printed stages", this.#stages),
        ),
        this.#slips,
      ),
    );
  }

  /** @type {Update<State>} */
  async update(state, signal) {
    const examples = this.#examples();
    const chosen = state.example || examples.find(({ name }) => name === state.model)?.name || examples[0].name;
    const example = examples.find(({ name }) => name === chosen);
    if (!example)
      throw new Error(
        `example: there is no worked example “${chosen}”. There are ${examples.map(({ name }) => name).join(", ")}.`,
      );
    const bodyOf = (/** @type {WorkedExampleEntry} */ { name, prompt }) => ({
      model: name,
      prompt: prompt.text,
      detail: "values",
    });
    // their stages have nested lists of numbers, because the body asks for no encoding
    const given = await Promise.all(examples.map((each) => cached("/forward", bodyOf(each), signal)));
    const answers = /** @type {WorkedAnswer[]} */ (/** @type {unknown} */ (given));
    const [body, answer] = [bodyOf(example), answers[examples.indexOf(example)]];
    answers.forEach(({ worked_example: { slips } }, index) => {
      const said = find(this.#choice.children[index], ".num-wrong");
      said.textContent = `(${lookWrong(slips.length, true)})`;
      said.classList.toggle("differs", slips.length > 0);
    });
    this.#body = body;
    for (const button of findAll(this.#choice, "button"))
      button.setAttribute("aria-pressed", String(button.dataset.name === chosen));
    this.#show(example, answer, asList(state.stage));
  }

  request() {
    return this.#body && { path: "/forward", body: this.#body };
  }

  #examples() {
    return this.context.service.models.filter((model) => model.kind === "worked_example");
  }

  /**
   * @param {WorkedExampleEntry} example
   * @param {WorkedAnswer} answer
   * @param {string[]} open
   */
  #show(example, answer, open) {
    const article = ARTICLES[example.name];
    const architecture = article?.architecture ?? UNKNOWN;
    const printed = answer.stages.filter(isPrinted);
    // the vocabularies of the articles are smaller than top_k, so the predictions have all tokens
    const vocabulary = answer.predictions[0].top.toSorted((one, other) => one.id - other.id);
    const place = { tokens: answer.tokens, vocabulary };
    const unknown = open.find((name) => !printed.some((stage) => stage.name === name));
    if (unknown !== undefined) throw new Error(`stage: this article prints no stage “${unknown}”.`);
    const shown = { ...answer.worked_example, example, article, architecture, printed, place };
    this.#showArticle(shown);
    this.#showResults(shown);
    this.#showSlips(shown);
    let group = "";
    const stages = printed.flatMap((stage) => {
      const entry = describe(stage.name, architecture);
      const slips = shown.slips.filter((slip) => slip.stage === stage.name);
      const rows = printedStage({
        entry,
        stage,
        slips,
        place,
        isOpen: open.includes(stage.name),
        onToggle: () => this.#toggle(stage.name, open),
      });
      const before = group;
      group = GROUPS.find(([pattern]) => pattern.test(entry.part))?.[1] ?? "";
      return group === before ? [rows] : [groupRow(group), rows];
    });
    this.#stages.replaceChildren(
      el("thead", {}, headRow(["stage", "status", "largest difference", "look wrong"])),
      ...stages,
    );
  }

  /**
   * Open or close a stage. The list is built anew, so the focus goes back to the button.
   * @param {string} name
   * @param {string[]} open
   */
  async #toggle(name, open) {
    await this.context.navigate({
      stage: (open.includes(name) ? open.filter((each) => each !== name) : [...open, name]).join(","),
    });
    findAll(this.#stages, `[data-stage="${name}"] button`)[0]?.focus();
  }

  /** @param {Shown} shown */
  #showArticle({ example, article, printed, slips }) {
    const differing = printed.filter(({ published }) => !published.agrees);
    const following = differing.filter(({ published }) => published.from_previous?.agrees).length;
    const reason =
      differing.length === 0
        ? ""
        : ` ${following} of the ${differing.length} others differ only because of earlier numbers.`;
    const notes = article?.notes.map((note) => el("li", {}, note));
    const show = actionButton(slips.length === 1 ? "Show it" : "Show them", () => this.#slips.focus(), {
      class: "small",
    });
    this.#about.replaceChildren(
      el("p", { class: "answer" }, el("strong", {}, `${lookWrong(slips.length)}.`), " ", slips.length > 0 ? show : ""),
      el(
        "h3",
        {},
        article
          ? el("a", { href: article.address, target: "_blank", rel: "noreferrer" }, article.title)
          : example.title,
      ),
      el(
        "p",
        { class: "answer" },
        `Prompt “${example.prompt.text}”, one layer. Of ${printed.length} printed stages, ` +
          `${printed.length - differing.length} agree with the computed numbers.${reason}`,
      ),
      article
        ? el("details", {}, el("summary", {}, "How this network differs from a standard one"), el("ul", {}, notes))
        : "",
    );
  }

  /** @param {Shown} shown */
  #showResults({ results, printed, place }) {
    const probabilities = printed.find(({ name }) => name === "probabilities")?.published;
    const rows = results.map((result) =>
      bodyRow(RESULTS[result.name] ?? result.name, [
        result.published,
        result.computed,
        verdict(result.agrees, isPassedOn(result, probabilities, place)),
      ]),
    );
    const head = headRow(["result", "printed", "computed", "status"]);
    this.#results.replaceChildren(el("h3", {}, "Results"), table({ "aria-label": "Results" }, { head, rows }));
  }

  /** @param {Shown} shown */
  #showSlips({ slips, printed, architecture, place }) {
    this.#slips.replaceChildren(el("h3", {}, "Numbers that look wrong"));
    if (slips.length === 0)
      return this.#slips.append(el("p", {}, "None: every printed number follows from the numbers printed before it."));
    const bodies = [...Map.groupBy(slips, (slip) => slip.stage)].map(([name, some]) => {
      const stage = printed.find((each) => each.name === name);
      const rows = some.map((slip) =>
        bodyRow(stage ? placeOf(slip, stage, place) : "", [
          slip.printed.replace("-", "−"),
          number(slip.from_printed),
          number(slip.allowed),
        ]),
      );
      const group = groupRow(describe(name, architecture).label, " ", el("code", {}, name));
      group.append(...rows);
      return group;
    });
    const count =
      "These numbers do not follow from the numbers printed before them. Each difference is larger than rounding " +
      "explains.";
    const head = el("thead", {}, headRow(["where", "printed", "should be", "rounding can change it by"]));
    const region = scrollRegion("Table of numbers that look wrong", el("table", {}, head, bodies));
    return this.#slips.append(el("p", {}, count), region);
  }
}

/**
 * The heading of some rows of a table with four columns.
 * @param {...Child} label
 */
function groupRow(...label) {
  return el("tbody", { class: "group" }, el("tr", {}, el("th", { scope: "rowgroup", colspan: "4" }, label)));
}

/** What the signs of results, stages and numbers mean. */
function legend() {
  const kinds = [
    [verdict(true), " after rounding. "],
    [verdict(false, true), ": differs only because of earlier numbers, rounded or wrong. "],
    [verdict(false), " from what the numbers before it give. "],
    [el("span", { class: "verdict differs" }, "⚠ looks wrong"), ": such a single number."],
  ];
  return el("p", { class: "legend", "aria-label": "Signs" }, kinds);
}

/**
 * @param {PrintedStage | { published?: null }} stage
 * @returns {stage is PrintedStage}
 */
function isPrinted(stage) {
  return Boolean(stage.published);
}

/**
 * Whether a result follows from the last row of the printed probabilities, which themselves follow from the numbers
 * before them. Only the prediction and its probability can be read there.
 * @param {PublishedResult} result
 * @param {Published | undefined} probabilities
 * @param {Labels} place
 */
function isPassedOn({ name, published }, probabilities, { vocabulary }) {
  if (!probabilities || !(probabilities.agrees || probabilities.from_previous?.agrees)) return false;
  const [rows] = /** @type {(number | null)[][][]} */ (probabilities.values); // (batch, position, d_vocab)
  const last = rows[rows.length - 1] ?? [];
  const row = last.filter((value) => value !== null);
  if (row.length === 0 || row.length < last.length) return false;
  const largest = Math.max(...row);
  if (name === "prediction") return vocabulary[row.indexOf(largest)].text === published;
  const digits = (published.split(".")[1] ?? "").length;
  return name === "prediction_probability" && largest.toFixed(digits) === published;
}

/**
 * Such as "2 numbers look wrong".
 * @param {number} numWrong
 * @param {boolean} isShort
 */
function lookWrong(numWrong, isShort = false) {
  if (numWrong === 0) return isShort ? "none look wrong" : "No number looks wrong";
  return numWrong === 1 ? "1 number looks wrong" : `${numWrong} numbers look wrong`;
}

customElements.define("worked-view", WorkedExamples);
