// The tokens of a prompt in a line, with arcs from one of them, the query, to the tokens that it attends to. In SVG.

import { el, svg } from "../dom.js";
import { percent } from "../format.js";
import { colour, css } from "./colours.js";

const ALL = 40; // up to this many tokens, all are drawn; of more, only the query and the strongest
const HEIGHT = 120; // pixels above the tokens
const LEAST = 0.01; // weights below have no arc

/**
 * <attention-arcs>. `show({labels, weights, query})`: a text for each token, the weight of each token for the query, and
 * the index of the query. Events: "query" with detail {position} when another token is chosen; "point" with {position}
 * while the mouse is over a token, and null when it leaves. In a line that leaves tokens out, the mouse points at none,
 * because another query would move the tokens below it.
 */
export class AttentionArcs extends HTMLElement {
  #shown = null;
  #pointed = null; // the token below the mouse
  #note = el("p", { class: "faint" });
  #redraw = () => this.#shown && this.#draw();

  connectedCallback() {
    addEventListener("themechange", this.#redraw);
  }

  disconnectedCallback() {
    removeEventListener("themechange", this.#redraw);
  }

  show(shown) {
    this.#shown = shown;
    this.#draw();
  }

  picture() {
    return this.querySelector("svg");
  }

  #draw() {
    const { labels, weights, query } = this.#shown;
    const places = line(labels, drawn(weights, query));
    const width = Math.ceil(Math.max(...places.map(({ x, width: w }) => x + w / 2))) + 8;
    const centre = new Map(places.map(({ position, x }) => [position, x]));
    const strongest = Math.max(...weights.filter((weight) => Number.isFinite(weight)), LEAST);
    const ends = places.filter(({ position }) => weights[position] >= LEAST);
    const farthest = Math.max(...ends.map(({ x }) => Math.abs(x - centre.get(query))), 1);
    const arcs = ends.map(({ position, x }) => arc(centre.get(query), x, weights[position] / strongest, weights[position], farthest));
    const tokens = places.map((place) => this.#token(place, labels, weights, query));
    const picture = svg(
      "svg",
      { width, height: HEIGHT + 48, viewBox: `0 0 ${width} ${HEIGHT + 48}`, role: "listbox", tabindex: "0", "aria-label": `Arcs from token ${query} to the tokens that it attends to. The arrow keys choose another token.`, "aria-activedescendant": `arc-token-${query}`, "font-family": "ui-monospace, monospace", "font-size": "13" },
      arcs,
      tokens,
    );
    picture.addEventListener("keydown", (event) => this.#press(event));
    const said = sayLeftOut(places.length, weights, query);
    const hadFocus = this.contains(document.activeElement);
    const box = this.querySelector(".scroll") ?? document.createElement("div");
    box.className = "scroll";
    box.replaceChildren(picture);
    if (!box.parentNode) {
      box.addEventListener("pointerleave", () => this.#point(null));
      this.append(box, this.#note);
    }
    this.#note.textContent = said;
    if (hadFocus) picture.focus({ preventScroll: true });
    if (this.#pointed === null) box.scrollLeft = centre.get(query) - 0.75 * box.clientWidth;
  }

  #token({ position, x, width, gap }, labels, weights, query) {
    const isQuery = position === query;
    const text = (y, content, size) => svg("text", { x, y, "text-anchor": "middle", fill: "currentColor", "font-size": size, "font-weight": isQuery ? 700 : 400 }, content);
    const said = `${labels[position]}, position ${position}: ${percent(weights[position])}`;
    return svg(
      "g",
      { role: "option", id: `arc-token-${position}`, "aria-selected": String(isQuery), class: "arc-token", onclick: () => this.#choose(position), onpointerenter: (event) => event.pointerType === "mouse" && this.#point(position) },
      svg("title", {}, said), // also the name for screen readers
      svg("rect", { x: x - width / 2, y: HEIGHT, width, height: 24, rx: 3, fill: "transparent", stroke: "currentColor", "stroke-width": isQuery ? 2.5 : 0.4 }),
      text(HEIGHT + 16, cut(labels[position])),
      weights[position] >= LEAST ? text(HEIGHT + 40, percent(weights[position]), 11) : null,
      gap ? svg("text", { x: x - width / 2 - 9, y: HEIGHT + 16, "text-anchor": "middle", fill: "currentColor" }, "…") : null,
    );
  }

  #choose(position) {
    if (position !== this.#shown.query) this.dispatchEvent(new CustomEvent("query", { detail: { position } }));
  }

  #point(position) {
    if (position === this.#pointed || this.#shown.labels.length > ALL) return;
    this.#pointed = position;
    this.dispatchEvent(new CustomEvent("point", { detail: { position } }));
  }

  #press(event) {
    const { labels, query } = this.#shown;
    const places = { ArrowLeft: query - 1, ArrowRight: query + 1, Home: 0, End: labels.length - 1 };
    if (!(event.key in places)) return;
    event.preventDefault();
    this.#choose(Math.min(Math.max(places[event.key], 0), labels.length - 1));
  }
}

/** The positions to draw: all, or of a long prompt the query and those with the largest weights. */
function drawn(weights, query) {
  const all = Array.from(weights, (_, position) => position);
  if (all.length <= ALL) return all;
  const strongest = all.filter((position) => position !== query).sort((a, b) => weights[b] - weights[a]);
  return [query, ...strongest.slice(0, ALL / 2)].sort((a, b) => a - b);
}

/** Which tokens and arcs a picture of `numDrawn` tokens leaves out. */
function sayLeftOut(numDrawn, weights, query) {
  const arcs = `Arcs: all weights of at least ${percent(LEAST)}; a loop is the weight on the token itself.`;
  if (numDrawn === weights.length) return arcs;
  const others = drawn(weights, query).filter((position) => position !== query);
  const least = Math.min(...others.map((position) => weights[position]));
  return `${numDrawn} of ${weights.length} tokens are drawn: the query, and the ${others.length} with the largest weights, from ${percent(least)} on. ${arcs}`;
}

/** Where each token stands: its centre and width; `gap` if tokens before it are left out. */
function line(labels, positions) {
  let left = 4;
  return positions.map((position, index) => {
    const width = Math.max(44, 8 * cut(labels[position]).length + 10);
    const gap = position !== (index === 0 ? 0 : positions[index - 1] + 1);
    left += gap ? 18 : 0;
    const place = { position, x: left + width / 2, width, gap };
    left += width + 4;
    return place;
  });
}

/** An arc between two places: the larger the weight, the stronger its colour (relative) and the thicker its line. */
function arc(from, to, relative, weight, farthest) {
  const line = { fill: "none", stroke: css(colour(0.35 + 0.65 * relative)), "stroke-width": 1 + 6 * weight };
  if (from === to) return svg("path", { d: `M ${from - 8} ${HEIGHT} C ${from - 20} ${HEIGHT - 40} ${from + 20} ${HEIGHT - 40} ${from + 8} ${HEIGHT}`, ...line });
  const top = HEIGHT - (24 + (HEIGHT * 1.25 - 24) * Math.sqrt(Math.abs(from - to) / farthest));
  return svg("path", { d: `M ${from} ${HEIGHT} C ${from} ${top} ${to} ${top} ${to} ${HEIGHT}`, ...line });
}

function cut(text) {
  return text.length > 12 ? `${text.slice(0, 11)}…` : text;
}

customElements.define("attention-arcs", AttentionArcs);
