// The tokens of a prompt in a line, with arcs from one of them, the query, to the tokens that it attends to. In SVG.

import { el, emit, svg } from "../dom.js";
import { cut, percent } from "../format.js";
import { colour, css } from "./colours.js";
import { DrawnElement } from "./drawn_element.js";

/**
 * @typedef {{ labels: string[], weights: Float32Array, query: number }} Shown
 * @typedef {{ position: number, x: number, width: number, gap: number, upright: number }} Place
 * @typedef {{
 *   left: number, size: (label: string) => number, space: number, hole: number, upright: number,
 * }} Arrangement
 */

const ALL = 40; // up to this many tokens, all are drawn if they fit; of more, only the query and the strongest
// pixels of a token that is written from top to bottom, and of "…" beside it
const UPRIGHT = { least: 16, most: 34, gap: 10 };
const LETTERS = 12; // the longest label
const LETTER = 8; // the width of a letter
const MOST_SPACE = 40; // pixels between tokens where there is much room
const HEIGHT = 120; // pixels above the tokens
const LEAST = 0.01; // weights below have no arc

/**
 * <attention-arcs>. `show({labels, weights, query})`: a text for each token, the weight of each token for the query,
 * and the index of the query. All tokens and arcs fit into the width of the page: where there is too little room for a
 * line of tokens, each one is written from top to bottom, and where there is still too little, weak ones are left out.
 * Events: "query" with detail {position} when a token is chosen; "point" with {position} while the mouse is over
 * a token, and null when it leaves. In a line that leaves tokens out, the mouse points at none, because another query
 * would move the tokens below it.
 */
export class AttentionArcs extends DrawnElement {
  /** @type {Shown} */
  #shown;
  /** @type {number | null} the token below the mouse */
  #pointed = null;
  #box = el("div", { class: "scroll", onpointerleave: () => this.#point(null) });
  #note = el("p", { class: "faint" });

  build() {
    this.append(this.#box, this.#note);
  }

  /** @param {Shown} shown */
  show(shown) {
    this.#shown = shown;
    this.redraw();
  }

  picture() {
    return /** @type {SVGSVGElement} */ (this.#box.firstElementChild);
  }

  redraw() {
    if (!this.#shown) return;
    const { weights, query } = this.#shown;
    const places = placesIn(this.clientWidth || 700, this.#shown);
    const [{ upright }] = places;
    const width = Math.ceil(endOf(places));
    const from = places.find(({ position }) => position === query)?.x ?? 0; // the query is always drawn
    const strongest = Math.max(...weights.filter((weight) => Number.isFinite(weight)), LEAST);
    const ends = places.filter(({ position }) => weights[position] >= LEAST);
    const farthest = Math.max(...ends.map(({ x }) => Math.abs(x - from)), 1);
    const arcs = ends.map(({ position, x }) =>
      arc(from, x, weights[position] / strongest, weights[position], farthest),
    );
    const tokens = places.map((place) => this.#token(place));
    const height = HEIGHT + (upright ? upright + 58 : 48);
    const picture = svg(
      "svg",
      {
        width,
        height,
        viewBox: `0 0 ${width} ${height}`,
        role: "listbox",
        tabindex: "0",
        "aria-label": `Arcs from token ${query} to the tokens that it attends to. The arrow keys choose another token.`,
        "aria-activedescendant": `arc-token-${query}`,
        "font-family": "ui-monospace, monospace",
        "font-size": "13",
      },
      arcs,
      tokens,
    );
    picture.addEventListener("keydown", (event) => this.#press(event));
    const hadFocus = this.contains(document.activeElement);
    this.#box.replaceChildren(picture);
    this.#note.textContent = sayLeftOut(places, this.#shown);
    if (hadFocus) picture.focus({ preventScroll: true });
  }

  /** @param {Place} place */
  #token({ position, x, width, gap, upright }) {
    const { labels, weights, query } = this.#shown;
    const isQuery = position === query;
    const look = { fill: "currentColor", "font-weight": isQuery ? 700 : 400 };
    /** @type {(y: number, content: string, size?: number, more?: object) => SVGElement} */
    const flat = (y, content, size, more) =>
      svg("text", { x, y, "text-anchor": "middle", "font-size": size, ...look, ...more }, content);
    /** @type {(y: number, content: string, size?: number) => SVGElement} */
    const down = (y, content, size) =>
      svg("text", { transform: `translate(${x - 4} ${y}) rotate(90)`, "font-size": size, ...look }, content);
    const share = weights[position] >= LEAST ? percent(weights[position]) : "";
    const said = `${labels[position]}, position ${position}: ${percent(weights[position])}`;
    return svg(
      "g",
      {
        role: "option",
        id: `arc-token-${position}`,
        "aria-selected": String(isQuery),
        class: "arc-token",
        // A mouse chooses when it is pressed: the picture of the token under it may be drawn before it is released.
        onpointerdown: (/** @type {PointerEvent} */ { pointerType, button }) =>
          pointerType === "mouse" && button === 0 && emit(this, "query", { position }),
        onclick: () => emit(this, "query", { position }),
        onpointerenter: (event) => event.pointerType === "mouse" && this.#point(position),
      },
      svg("title", {}, said), // also the name for screen readers
      svg("rect", {
        x: x - width / 2,
        y: HEIGHT,
        width,
        height: upright ? upright + 8 : 24,
        rx: 3,
        fill: "transparent",
        stroke: "currentColor",
        "stroke-width": isQuery ? 2.5 : 0.4,
      }),
      upright ? down(HEIGHT + 5, cut(labels[position], LETTERS)) : flat(HEIGHT + 16, cut(labels[position], LETTERS)),
      share === "" ? null : upright ? down(HEIGHT + upright + 12, share, 11) : flat(HEIGHT + 40, share, 11),
      gap ? flat(HEIGHT + 16, "…", undefined, { x: x - width / 2 - gap / 2, "font-weight": 400 }) : null,
    );
  }

  /** @param {number | null} position */
  #point(position) {
    if (position === this.#pointed || this.querySelectorAll(".arc-token").length < this.#shown.labels.length) return;
    this.#pointed = position;
    emit(this, "point", { position });
  }

  /** @param {KeyboardEvent} event */
  #press(event) {
    const { labels, query } = this.#shown;
    /** @type {Record<string, number>} */
    const places = { ArrowLeft: query - 1, ArrowRight: query + 1, Home: 0, End: labels.length - 1 };
    if (!(event.key in places)) return;
    event.preventDefault();
    emit(this, "query", { position: Math.min(Math.max(places[event.key], 0), labels.length - 1) });
  }
}

/**
 * Where each token stands that is drawn. `x`: its centre; `gap`: pixels before it in which tokens are left out, or 0;
 * `upright`: the height of the longest token if they are written from top to bottom, or 0.
 * @param {number} room
 * @param {Shown} shown
 * @returns {Place[]}
 */
function placesIn(room, shown) {
  const { labels } = shown;
  const listed = drawn(shown, ALL, ALL / 2);
  if (endOf(line(labels, listed)) <= room) return spread(room, labels, listed, FLAT);
  const [fitting, strongest] = [UPRIGHT.least, UPRIGHT.least + UPRIGHT.gap].map((size) =>
    Math.max(2, Math.floor((room - 20) / size)),
  );
  const positions = drawn(shown, Math.min(ALL, fitting), Math.min(ALL / 2, strongest - 1));
  const gaps = positions.length < labels.length ? positions.length * UPRIGHT.gap : 0;
  const width = Math.min(UPRIGHT.most, Math.max(UPRIGHT.least, Math.floor((room - 20 - gaps) / positions.length)));
  const upright = LETTER * Math.max(...positions.map((position) => cut(labels[position], LETTERS).length));
  return spread(room, labels, positions, { left: 10, size: () => width, space: 0, hole: UPRIGHT.gap, upright });
}

/**
 * The pixels that a line of tokens needs.
 * @param {Place[]} places
 */
function endOf(places) {
  const { x, width } = places[places.length - 1];
  return x + width / 2 + 8;
}

/**
 * Places with more space between them, so that they fill the room.
 * @param {number} room
 * @param {string[]} labels
 * @param {number[]} positions
 * @param {Arrangement} arrangement
 */
function spread(room, labels, positions, arrangement) {
  const spare = (room - endOf(line(labels, positions, arrangement))) / Math.max(1, positions.length - 1);
  const space = arrangement.space + Math.min(MOST_SPACE, Math.max(0, Math.floor(spare)));
  return line(labels, positions, { ...arrangement, space });
}

/**
 * The positions to draw: all up to a number of them, or else the query and some with the largest weights.
 * @param {Shown} shown
 * @param {number} most
 * @param {number} numStrongest
 */
function drawn({ weights, query }, most, numStrongest) {
  const all = Array.from(weights, (_, position) => position);
  if (all.length <= most) return all;
  const strongest = all.filter((position) => position !== query).sort((a, b) => weights[b] - weights[a]);
  return [query, ...strongest.slice(0, numStrongest)].sort((a, b) => a - b);
}

/**
 * Which tokens and arcs a picture leaves out.
 * @param {Place[]} places
 * @param {Shown} shown
 */
function sayLeftOut(places, { weights, query }) {
  const arcs = `Arcs: all weights of at least ${percent(LEAST)}; a loop is the weight on the token itself.`;
  if (places.length === weights.length) return arcs;
  const others = places.map(({ position }) => position).filter((position) => position !== query);
  const least = Math.min(...others.map((position) => weights[position]));
  return (
    `${places.length} of ${weights.length} tokens are drawn: the query, and the ${others.length} with the largest ` +
    `weights, from ${percent(least)} on. ${arcs}`
  );
}

/** @type {Arrangement} */
const FLAT = {
  left: 4,
  size: (label) => Math.max(44, LETTER * cut(label, LETTERS).length + 10),
  space: 4,
  hole: 18,
  upright: 0,
};

/**
 * Places side by side, from the left. `hole`: the room for "…" where tokens are left out.
 * @param {string[]} labels
 * @param {number[]} positions
 * @param {Arrangement} arrangement
 */
function line(labels, positions, { left: start, size, space, hole, upright } = FLAT) {
  let left = start;
  return positions.map((position, index) => {
    const width = size(labels[position]);
    const gap = position !== (index === 0 ? 0 : positions[index - 1] + 1) ? hole : 0;
    left += gap;
    const place = { position, x: left + width / 2, width, gap, upright };
    left += width + space;
    return place;
  });
}

/**
 * An arc between two places: the larger the weight, the stronger its colour (relative) and the thicker its line.
 * @param {number} from
 * @param {number} to
 * @param {number} relative
 * @param {number} weight
 * @param {number} farthest
 */
function arc(from, to, relative, weight, farthest) {
  const look = { fill: "none", stroke: css(colour(0.35 + 0.65 * relative)), "stroke-width": 1 + 6 * weight };
  if (from === to)
    return svg("path", {
      d: `M ${from - 8} ${HEIGHT} C ${from - 20} ${HEIGHT - 40} ${from + 20} ${HEIGHT - 40} ${from + 8} ${HEIGHT}`,
      ...look,
    });
  const top = HEIGHT - (24 + (HEIGHT * 1.25 - 24) * Math.sqrt(Math.abs(from - to) / farthest));
  return svg("path", { d: `M ${from} ${HEIGHT} C ${from} ${top} ${to} ${top} ${to} ${HEIGHT}`, ...look });
}

customElements.define("attention-arcs", AttentionArcs);
