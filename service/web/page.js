// The shell: the model, the prompt, the choice of a view, the address, errors, and the export of what is shown.

import { moveQuery, readState, writeState } from "./address.js";
import { keyDialog } from "./api_key.js";
import { architectureOf, isWorkedExample } from "./articles.js";
import { ApiError, getJson, isAbort, onKeyNeeded } from "./api.js";
import { Connection, isAway, readyStatus } from "./connection.js";
import { around, el, find, findAll, onSubmit } from "./dom.js";
import { showEditsNote } from "./edits_note.js";
import { forget } from "./passes.js";
import { defaultPrompt, readPrompt } from "./prompts.js";
import { factsOf, factsOfExample } from "./served.js";
import { glossary } from "./terms.js";
import { connectTheme } from "./theme.js";

/**
 * @import { State } from "./address.js"
 * @import { ExportBar } from "./export.js"
 * @import { Model } from "./answers.js"
 * @import { Service, View } from "./view.js"
 * @typedef {typeof View} ViewClass
 * @typedef {{ name: string, label: string, intro: string, module?: string }} MenuEntry
 * @typedef {{ view: string, model: string, prompt: string } & State} PageState
 * @typedef {{
 *   again: HTMLButtonElement, input: HTMLFormElement, key: HTMLDialogElement, model: HTMLSelectElement,
 *   prompt: HTMLTextAreaElement, theme: HTMLButtonElement, "to-export": HTMLButtonElement,
 * }} Controls
 */

/**
 * The views in the order of the menu: name in the address, label, and one sentence that introduces it.
 * @type {MenuEntry[]}
 */
export const VIEWS = [
  {
    name: "network",
    label: "Network",
    intro:
      "One forward pass, in the order of computation. Every colour is a number of this model; select one to zoom in.",
  },
  {
    name: "generate",
    label: "Generate",
    intro: "The model continues the prompt, token by token. Select a token to see what else was likely.",
  },
  {
    name: "forward",
    label: "Forward pass",
    intro: "Each stage of one forward pass, in the order in which the network computes it.",
  },
  {
    name: "weights",
    label: "Weights",
    intro: "The matrices that the network multiplies by, and what each of them does to a token.",
  },
  {
    name: "attention",
    label: "Attention",
    intro: "How much each token attends to the tokens before it, for each layer and head.",
  },
  { name: "lens", label: "Logit lens", intro: "What the network would predict if it stopped after each layer." },
  {
    name: "loss",
    label: "Loss",
    intro: "How well the network predicted each token of the prompt. A high loss means that the token was a surprise.",
  },
  {
    name: "worked",
    label: "Worked examples",
    intro:
      "Three articles print the numbers of a small network. They stand here beside the numbers that this service " +
      "computes.",
    module: "worked_examples",
  },
  {
    name: "steps",
    label: "KV cache",
    intro:
      "The key-value cache keeps the keys and values of each token, so the network computes them only once. The " +
      "steps of a generation show what this saves.",
  },
  {
    name: "edits",
    label: "Interventions",
    intro: "Change numbers in the middle of the network, and compare its predictions without and with the change.",
    module: "interventions",
  },
  { name: "status", label: "Status", intro: "What the service does at this moment." },
];

const EDITS = "edits"; // the view that makes edits

const LETTER_PIXELS = 8; // about the width of a letter in the prompt box
const LATE_MILLISECONDS = 250; // a result that is computed faster replaces the earlier one without a flicker

/**
 * An element of index.html.
 * @template {string} Id
 * @param {Id} id
 * @returns {Id extends keyof Controls ? Controls[Id] : HTMLElement}
 */
const byId = (id) => /** @type {any} */ (document.getElementById(id));

/** @type {Service} */
const service = { model: null, models: [] };
const connection = new Connection(byId("banner"), () => {
  if (isIncomplete) return location.reload();
  forget();
  return start();
});
/** @type {Map<string, View>} name of a view → its element */
const built = new Map();
/** @type {View | null} the view that is open */
let shown = null;
/** @type {string | null} the prompt that the address had when the form was last filled */
let shownPrompt = null;
/** @type {ExportBar | null} */
let exportBar = null;
/** @type {string | null} the model whose facts are in the header; "" for the served one */
let described = null;
let late = 0; // the timer after which the numbers of the earlier state turn grey
let isIncomplete = false; // whether a module could not be loaded: browsers do not ask for it twice
let controller = new AbortController();

/**
 * The module of a view exports its custom element as `default`, and defines it under the name "NAME-view".
 * @param {string} name
 * @returns {Promise<{ entry: MenuEntry, View: ViewClass }>}
 */
async function load(name) {
  const entry = VIEWS.find((view) => view.name === name);
  if (!entry) throw new Error(`There is no view “${name}”. Choose one of the menu.`);
  const path = `./views/${entry.module ?? entry.name}.js`;
  const module = await import(path).catch(async (error) => {
    if ((await readyStatus()) > 0) throw error; // the service answers: the file is wrong
    isIncomplete = true;
    throw new ApiError(0, "The service does not answer.");
  });
  return { entry, View: module.default };
}

/** What the address says, without any defaults. */
const addressed = () => readState(location.hash, /** @type {State} */ ({}));

/**
 * The values that the address of a view leaves out.
 * @param {ViewClass | null} View
 * @param {string} model
 * @returns {PageState}
 */
function defaults(View, model) {
  return { view: VIEWS[0].name, model: "", prompt: defaultPrompt(service, model), ...View?.params };
}

/**
 * The address after some changes. Another view keeps the model, the prompt and the edits only.
 * @param {State} changes
 */
function addressAfter(changes) {
  const now = addressed();
  const isOther = changes.view !== undefined && changes.view !== (now.view ?? VIEWS[0].name);
  const next = { ...(isOther ? { model: now.model, prompt: now.prompt, edits: now.edits } : now), ...changes };
  const View = isOther || shown === null ? null : /** @type {ViewClass} */ (shown.constructor);
  return writeState(next, defaults(View, next.model ?? ""));
}

/**
 * Change the state: update the address, then show it.
 * @param {State} changes
 * @param {{ replace?: boolean }} options
 */
function navigate(changes, { replace = false } = {}) {
  const address = addressAfter(changes);
  const isSame = address === addressAfter({});
  history[replace || isSame ? "replaceState" : "pushState"](null, "", address);
  return apply();
}

/** Show the state that the address describes. */
async function apply() {
  controller.abort();
  controller = new AbortController();
  const { signal } = controller;
  setPageState("busy");
  byId("failure").hidden = true;
  showPrompt();
  try {
    await showFacts(modelOf({ model: addressed().model ?? "" }), signal);
    const { entry, View } = await load(addressed().view ?? VIEWS[0].name);
    if (signal.aborted) return;
    const state = readState(location.hash, defaults(View, addressed().model ?? ""));
    const view = open(entry, View);
    fillForm(View, state);
    const obstacle = obstacleOf(View, state);
    view.hidden = obstacle !== null;
    exportBar?.refresh(null);
    byId("to-export").hidden = true;
    if (obstacle !== null) throw new Error(obstacle);
    await view.update(
      { ...state, model: modelOf(state), prompt: readPrompt(service, state.model, state.prompt) },
      signal,
    );
    if (signal.aborted) return;
    connection.found();
    setPageState("ready");
    refreshExport(signal);
  } catch (error) {
    if (!signal.aborted) report(error);
  }
}

/**
 * The `model` of requests: null for the served one. Without a served model, the first worked example is chosen.
 * @param {{ model: string }} state
 */
function modelOf({ model }) {
  return model || (service.model ? null : service.models[0].name);
}

/**
 * Say in the header how large the network is that is shown.
 * @param {string | null} model
 * @param {AbortSignal} signal
 */
async function showFacts(model, signal) {
  const example = model !== null && isWorkedExample(service, model) ? model : "";
  if (example === described || (!example && !service.model)) return;
  const path = /** @type {"/weights"} */ (`/weights?${new URLSearchParams({ model: example })}`);
  const facts = example
    ? factsOfExample(example, architectureOf(service, example), (await getJson(path, signal)).weights)
    : factsOf(/** @type {Model} */ (service.model));
  byId("served").replaceChildren(...facts);
  described = example;
}

/**
 * Put the element of a view into the page.
 * @param {MenuEntry} entry
 * @param {ViewClass} View
 */
function open(entry, View) {
  const view = built.get(entry.name) ?? build(entry, View);
  if (shown !== view) {
    shown?.leave();
    shown?.remove();
    byId("failure").after(view);
    shown = view;
  }
  byId("title").textContent = entry.label;
  byId("intro").textContent = entry.intro;
  const edits = entry.name === EDITS || !View.usesPrompt ? undefined : addressed().edits;
  showEditsNote(byId("edits-note"), edits, {
    href: addressAfter({ view: EDITS }),
    open: () => navigate({ view: EDITS }),
    remove: () => navigate({ edits: undefined }),
    isApplied: View.appliesEdits && !isWorkedExample(service, modelOf({ model: addressed().model ?? "" })),
  });
  document.title = `${entry.label} · Forwardscope`;
  for (const link of findAll(byId("views"), "a")) {
    link.href = addressAfter({ view: link.dataset.name });
    if (link.dataset.name === entry.name) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  showCurrentLink();
  return view;
}

/**
 * @param {MenuEntry} entry
 * @param {ViewClass} View
 */
function build(entry, View) {
  const view = new View();
  view.context = { service, navigate, report, offer: () => void refreshExport(controller.signal) };
  view.build();
  built.set(entry.name, view);
  return view;
}

/** Move the menu to the side, so that its current entry is in sight. */
function showCurrentLink() {
  const menu = byId("views");
  const link = find(menu, "[aria-current]");
  menu.scrollLeft = link.offsetLeft - (menu.clientWidth - link.offsetWidth) / 2;
}

/**
 * Why a view cannot show the chosen model, or null.
 * @param {ViewClass} View
 * @param {PageState} state
 */
function obstacleOf(View, state) {
  const isExample = isWorkedExample(service, modelOf(state));
  if (service.model === null && !View.showsWorkedExamples && View.usesPrompt)
    return "This service has no checkpoint, only worked examples. Start it with a model to use this view.";
  if (isExample && !View.showsWorkedExamples && View.usesPrompt)
    return (
      `A worked example has a single forward pass, which this view cannot show. Choose ${service.model?.name} as ` +
      "the model above."
    );
  if (View.needs !== null && !service.model?.capabilities[View.needs])
    return `This service does not offer ${View.needs}, which this view needs.`;
  return null;
}

/** Show the prompt of the address, at once. A prompt that was typed but not run stays, unless that has changed. */
function showPrompt() {
  const { prompt } = readState(location.hash, defaults(null, addressed().model ?? ""));
  if (prompt !== shownPrompt) byId("prompt").value = prompt;
  shownPrompt = prompt;
}

/**
 * @param {ViewClass} View
 * @param {PageState} state
 */
function fillForm(View, state) {
  byId("input").hidden = !View.usesPrompt;
  byId("model").value = state.model || (service.model?.name ?? service.models[0].name);
  promptChanged();
}

/**
 * Say whether the prompt in the box is another one than the prompt that is shown. The box grows with its text, up to
 * six lines (page.css). Browsers without `field-sizing` need `rows`.
 */
function promptChanged() {
  const { value, clientWidth } = byId("prompt");
  const perLine = Math.max(20, clientWidth / LETTER_PIXELS);
  byId("prompt").rows = value.split("\n").reduce((rows, line) => rows + Math.ceil((line.length + 1) / perLine), 0);
  byId("draft").hidden = byId("input").hidden || shownPrompt === null || value === shownPrompt;
}

/**
 * Show an error. Views call it for errors outside of `update`, such as those of a button.
 * @param {unknown} error
 */
function report(error) {
  if (isAbort(error)) return;
  const isExpected = error instanceof ApiError || (error instanceof Error && error.constructor === Error);
  if (!isExpected) console.error(error); // a defect of the page
  byId("error").textContent = error instanceof Error ? error.message : String(error);
  byId("failure").hidden = isAway(error); // the banner says it
  setPageState(isAway(error) ? "busy" : "error");
  if (isAway(error)) connection.wait(error);
}

/**
 * Tell tests, style sheets and screen readers whether something will still change without the user.
 * @param {"busy" | "ready" | "error"} result
 */
function setPageState(result) {
  clearTimeout(late);
  delete document.body.dataset.late;
  if (result === "busy") late = setTimeout(() => (document.body.dataset.late = ""), LATE_MILLISECONDS);
  document.body.dataset.state = result;
  byId("view").setAttribute("aria-busy", String(result === "busy"));
}

/**
 * The export bar is loaded after the view, so that the view is not delayed.
 * @param {AbortSignal} signal
 */
async function refreshExport(signal) {
  const { ExportBar } = await import("./export.js");
  if (signal.aborted) return;
  exportBar ??= new ExportBar(report); // after the import, for which two calls may have waited
  if (!exportBar.isConnected) byId("view").append(exportBar);
  exportBar.refresh(shown);
  byId("to-export").hidden = exportBar.hidden;
}

/** Read what is served, fill the form, and show the state of the address. */
async function start() {
  setPageState("busy");
  try {
    const status = await readyStatus();
    if (status === 0) throw new ApiError(0, "The service does not answer.");
    // while the model loads, the service answers, but does not say yet what it will serve
    if (status !== 200) throw new ApiError(503, "The model is loading.", null, "loading");
    service.models = (await getJson("/models")).models;
    service.model = service.models.some((model) => model.kind === "checkpoint") ? await getJson("/model") : null;
  } catch (error) {
    return report(error);
  }
  described = null;
  const kinds = { checkpoint: "", adapter: " (adapter)", worked_example: " (worked example)" };
  byId("model").replaceChildren(
    ...service.models.map(({ name, kind }) => el("option", { value: name }, name + kinds[kind])),
  );
  return apply();
}

/** The model of the form as it stands in the address: "" for the served one. */
function chosenModel() {
  const name = byId("model").value;
  return name === service.model?.name ? "" : name;
}

/** Another model. It gets its own first prompt only if the present prompt was the first one of the model before. */
function changeModel() {
  const [before, after] = [defaultPrompt(service, addressed().model ?? ""), defaultPrompt(service, chosenModel())];
  if (before !== after) byId("prompt").value = after;
  navigate({ model: chosenModel(), prompt: byId("prompt").value });
}

function connect() {
  byId("views").append(
    ...VIEWS.map(({ name, label, intro }) =>
      el("a", { href: `./#view=${name}`, title: intro, dataset: { name } }, label),
    ),
  );
  byId("views").addEventListener("click", (event) => {
    const link = around(event, "a");
    if (event.ctrlKey || event.metaKey || event.shiftKey || link === null) return;
    event.preventDefault();
    navigate({ view: link.dataset.name });
  });
  onSubmit(byId("input"), () => navigate({ prompt: byId("prompt").value }));
  byId("prompt").addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    byId("input").requestSubmit();
  });
  byId("prompt").addEventListener("input", promptChanged);
  byId("model").addEventListener("change", changeModel);
  byId("to-export").addEventListener("click", () => exportBar?.reveal());
  byId("again").addEventListener("click", () => (service.models.length > 0 ? apply() : start()));
  byId("glossary").addEventListener("toggle", () => byId("glossary").append(...glossary()), { once: true });
  addEventListener("popstate", apply);
  find(document, ".skip").addEventListener("click", (event) => {
    event.preventDefault(); // its fragment would replace the state
    byId("view").focus();
    byId("view").scrollIntoView();
  });
  onKeyNeeded(keyDialog(byId("key")));
  connectTheme(byId("theme"));
}

moveQuery();
connect();
start();
