// The view "Worked examples": the numbers that three articles print, beside those that the service computes.

import { ARTICLES } from "../articles.js";
import { el } from "../dom.js";
import { number } from "../format.js";
import { cached } from "../passes.js";
import { describe } from "../stages.js";
import { View } from "../view.js";
import { placeOf, printedStage, verdict } from "./printed_stage.js";

const RESULTS = {
  loss: "Mean loss",
  total_loss: "Sum of the losses",
  perplexity: "Perplexity",
  prediction: "Most likely next token",
  prediction_probability: "Probability of this token",
};
const asList = (text) => (text === "" ? [] : text.split(","));

export default class WorkedExamples extends View {
  static usesPrompt = false;
  static showsWorkedExamples = true;
  /** `example`: its name; "" is the chosen model, or the first one. `stage`: the open stages, with commas. */
  static params = { example: "", stage: "" };

  #choice = el("div", { class: "row", role: "group", "aria-label": "Worked example" });
  #about = el("section", { "aria-label": "About the article" });
  #results = el("section", { "aria-label": "Results" });
  #slips = el("section", { "aria-label": "Numbers that look wrong", tabindex: "-1" });
  #stages = el("ol", { class: "printed" });
  #shown = null; // {body, answer}

  build() {
    const examples = this.#examples();
    this.#choice.append(...examples.map(({ name, title }) => el("button", { type: "button", dataset: { name }, onclick: () => this.context.navigate({ example: name, stage: "" }) }, ARTICLES[name]?.title ?? title, " ", el("span", { class: "num-wrong" }))));
    this.append(this.#choice, this.#about, legend(), this.#results, el("h3", {}, "Printed stages, in the order of computation"), el("p", { class: "faint" }, "Open a stage to see its printed and its computed numbers."), this.#stages, this.#slips);
  }

  async update(state, signal) {
    const examples = this.#examples();
    const chosen = state.example || examples.find(({ name }) => name === state.model)?.name || examples[0].name;
    const example = examples.find(({ name }) => name === chosen);
    if (!example) throw new Error(`example: there is no worked example “${chosen}”. There are ${examples.map(({ name }) => name).join(", ")}.`);
    const bodyOf = ({ name, prompt }) => ({ model: name, prompt: prompt.text, detail: "values" });
    const answers = await Promise.all(examples.map((each) => cached("/forward", bodyOf(each), signal)));
    const [body, answer] = [bodyOf(example), answers[examples.indexOf(example)]];
    answers.forEach(({ worked_example: { slips } }, index) => {
      const said = this.#choice.children[index].querySelector(".num-wrong");
      said.textContent = `(${lookWrong(slips.length, true)})`;
      said.classList.toggle("differs", slips.length > 0);
    });
    this.#shown = { body, answer };
    for (const button of this.#choice.children) button.setAttribute("aria-pressed", String(button.dataset.name === chosen));
    this.#show(example, answer, asList(state.stage));
  }

  request() {
    return this.#shown && { path: "/forward", body: this.#shown.body };
  }

  #examples() {
    return this.context.service.models.filter(({ kind }) => kind === "worked_example");
  }

  #show(example, answer, open) {
    const article = ARTICLES[example.name];
    const architecture = article?.architecture ?? {};
    const printed = answer.stages.filter(({ published }) => published);
    const place = { tokens: answer.tokens, vocabulary: vocabularyOf(answer) };
    const unknown = open.find((name) => !printed.some((stage) => stage.name === name));
    if (unknown !== undefined) throw new Error(`stage: this article prints no stage “${unknown}”.`);
    this.#showArticle(example, article, printed, answer.worked_example.slips);
    this.#showResults(answer.worked_example.results, printed, place);
    this.#showSlips(answer.worked_example.slips, printed, architecture, place);
    this.#stages.replaceChildren(
      ...printed.map((stage) => {
        const entry = describe(stage.name, architecture);
        const slips = answer.worked_example.slips.filter((slip) => slip.stage === stage.name);
        return printedStage({ entry, stage, slips, place, isOpen: open.includes(stage.name), onToggle: () => this.#toggle(stage.name, open) });
      }),
    );
  }

  /** Open or close a stage. The list is built anew, so the focus goes back to the button. */
  async #toggle(name, open) {
    await this.context.navigate({ stage: (open.includes(name) ? open.filter((each) => each !== name) : [...open, name]).join(",") });
    this.#stages.querySelector(`[data-stage="${name}"] button`)?.focus();
  }

  #showArticle(example, article, printed, slips) {
    const differing = printed.filter(({ published }) => !published.agrees);
    const following = differing.filter(({ published }) => published.from_previous?.agrees).length;
    const reason = differing.length === 0 ? "" : ` Of the ${differing.length} others, ${following} differ only because of earlier numbers.`;
    const show = el("button", { type: "button", class: "small", onclick: () => this.#slips.focus() }, slips.length === 1 ? "Show it" : "Show them");
    this.#about.replaceChildren(
      el("p", { class: "answer" }, el("strong", {}, `${lookWrong(slips.length)}.`), " ", slips.length > 0 ? show : ""),
      el("h3", {}, article ? el("a", { href: article.address, target: "_blank", rel: "noreferrer" }, article.title) : example.title),
      el("p", { class: "answer" }, `The article follows the prompt “${example.prompt.text}” through one layer. It prints ${printed.length} stages; ${printed.length - differing.length} of them agree with the numbers that this service computes.${reason}`),
      ...(article ? [el("p", {}, "How this network differs from a standard one:"), el("ul", {}, article.notes.map((note) => el("li", {}, note)))] : []),
    );
  }

  #showResults(results, printed, place) {
    const probabilities = printed.find(({ name }) => name === "probabilities")?.published;
    const rows = results.map((result) => el("tr", {}, el("th", { scope: "row" }, RESULTS[result.name] ?? result.name), el("td", {}, result.published), el("td", {}, result.computed), el("td", {}, verdict(result.agrees, isPassedOn(result, probabilities, place)))));
    const head = el("tr", {}, ["result", "printed", "computed", ""].map((name) => el("th", { scope: "col" }, name)));
    this.#results.replaceChildren(el("h3", {}, "Results"), el("table", { "aria-label": "Results" }, el("thead", {}, head), el("tbody", {}, rows)));
  }

  #showSlips(slips, printed, architecture, place) {
    this.#slips.replaceChildren(el("h3", {}, "Numbers that look wrong"));
    if (slips.length === 0) return this.#slips.append(el("p", {}, "None: every printed number follows from the numbers printed before it."));
    const rows = slips.map((slip) => {
      const stage = printed.find(({ name }) => name === slip.stage);
      const label = `${describe(slip.stage, architecture).label}: ${placeOf(slip, stage, place)}`;
      return el("tr", {}, el("th", { scope: "row" }, label, " ", el("code", {}, slip.stage)), el("td", {}, slip.printed.replace("-", "−")), el("td", {}, number(slip.from_printed)), el("td", {}, number(slip.allowed)));
    });
    const head = el("tr", {}, ["where", "printed", "should be", "rounding can change it by"].map((name) => el("th", { scope: "col" }, name)));
    const count = "These numbers do not follow from the numbers that the article prints before them. “Should be” is the number that does follow. Printed numbers are rounded, but each difference is larger than rounding can explain.";
    const table = el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Table of numbers that look wrong" }, el("table", {}, el("thead", {}, head), el("tbody", {}, rows)));
    return this.#slips.append(el("p", {}, count), table);
  }
}

/** What the signs of results, stages and numbers mean. */
function legend() {
  const kinds = [
    [verdict(true), ": rounded as the article rounds, the computed number is the printed one. "],
    [verdict(false, true), ": the article went on from numbers that are rounded or wrong. "],
    [verdict(false), ": the numbers that the article prints before it do not give it. "],
    [el("strong", { class: "differs" }, "⚠ looks wrong"), ": marks each single number that they do not give."],
  ];
  return el("p", { class: "legend", "aria-label": "Signs" }, kinds);
}

/**
 * Whether a result follows from the last row of the printed probabilities, which themselves follow from the numbers
 * before them. Only the prediction and its probability can be read there.
 */
function isPassedOn({ name, published }, probabilities, { vocabulary }) {
  const row = probabilities?.values[0].at(-1) ?? [];
  if (row.length === 0 || row.includes(null) || !(probabilities.agrees || probabilities.from_previous?.agrees)) return false;
  const largest = Math.max(...row);
  if (name === "prediction") return vocabulary[row.indexOf(largest)].text === published;
  const digits = (published.split(".")[1] ?? "").length;
  return name === "prediction_probability" && largest.toFixed(digits) === published;
}

/** Such as "2 numbers look wrong". */
function lookWrong(number, isShort = false) {
  if (number === 0) return isShort ? "none look wrong" : "No number looks wrong";
  return number === 1 ? "1 number looks wrong" : `${number} numbers look wrong`;
}

/** The tokens of the vocabulary in the order of their ids. The vocabularies of the articles are smaller than top_k. */
function vocabularyOf({ predictions }) {
  return [...predictions[0].top].sort((one, other) => one.id - other.id);
}

customElements.define("worked-view", WorkedExamples);
