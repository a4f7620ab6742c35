// <network-canvas>: the picture of the network, with pointer and keys. It says what is chosen and what is in sight, and
// its owner reads the numbers.

import { el, emit } from "../dom.js";
import { DrawnElement } from "../draw/drawn_element.js";
import { shown } from "../format.js";
import { Layout } from "./layout.js";
import { Motion } from "./motion.js";
import { LEAST_PIXELS, paint, paintPointed } from "./paint.js";
import { Plane } from "./plane.js";
import { Pointing } from "./pointing.js";
import { paletteOf } from "./scene.js";
import { headPlaces, maskOf, Strips } from "./strips.js";

/**
 * @import { Line } from "./items.js"
 * @import { Camera } from "./layout.js"
 * @import { Pass } from "./pass.js"
 * @import { Scene, Spot } from "./scene.js"
 */

const NARROW = 640; // pixels of the page below which the computation goes down
const HEADING = { across: 46, down: 30 };
const KEYS = { across: 15, down: 44, letter: 6.2, most: 70, cell: 7.5 }; // room for the tokens of keys in the heading
const GUTTER = { letter: 7.9, numbers: 40, least: 70, most: 150, down: 66 };
const HEIGHT = { least: 300, below: 120, down: 620 };
const SETTLE_MILLISECONDS = 140;
const NEAR = 0.3; // of the detail of the layout

/**
 * Events: "choose" with detail {spot, isName}, `isName`: a click on the name of a token; "point" with {spot} (or
 * null); "settle" when what is in sight has changed; "wheelhint" when the wheel turns and does not zoom.
 */
export class NetworkCanvas extends DrawnElement {
  canvas = el("canvas", { tabindex: "0", role: "img" });
  #plane = new Plane(this.canvas);
  #motion = new Motion();
  /** @type {Scene | null} */
  scene = null;
  /** @type {number | null} the stage that is zoomed to */
  #focus = null;
  #frame = 0;
  #mark = 0; // the frame in which the place under the pointer is marked
  #settle = 0;
  #measured = "";
  #measure = () => this.measure();

  build() {
    this.append(this.canvas);
    new Pointing(this, this.canvas);
  }

  connectedCallback() {
    super.connectedCallback();
    addEventListener("resize", this.#measure); // the height of the window matters, too
  }

  disconnectedCallback() {
    super.disconnectedCallback();
    removeEventListener("resize", this.#measure);
    this.#motion.stop();
  }

  redraw() {
    if (this.scene) this.#restrip();
    this.drawSoon();
  }

  resized() {
    this.measure();
  }

  /**
   * Show a pass. Returns whether it is a new one, and not what edits change in the pass that was shown.
   * @param {Line} line
   * @param {Pass} pass
   * @param {Pick<Scene, "plain" | "row" | "head" | "chosen" | "lens" | "isStep">} look
   * @param {{ focus: number | null, hasLens: boolean }} place `focus`: the stage that is zoomed to; `hasLens`: whether
   *   there is a lane for what the lens says
   */
  show(line, pass, look, { focus, hasLens }) {
    this.#focus = focus;
    const before = this.scene;
    const isNew = before?.pass.body !== pass.body;
    if (before?.line !== line) {
      const layout = new Layout(line, pass.tokens.length);
      const margins = { gutter: 0, heading: 0, keys: 0 };
      const shared = { plane: this.#plane, line, layout, margins, pass, pointed: null, front: Infinity };
      this.scene = { ...shared, ...look, strips: new Strips(pass, false, 1), palette: paletteOf(this) };
    } else {
      const isOther = before.pass !== pass;
      Object.assign(before, look, { pass });
      if (isOther) this.#restrip();
    }
    const { layout } = /** @type {Scene} */ (this.scene);
    Object.assign(layout, { followed: look.row, hasLane: hasLens && focus === null });
    layout.isLarge = look.isStep && focus !== null;
    if (before?.line !== line) this.#resize();
    this.canvas.setAttribute("aria-label", describe(line, pass));
    this.drawSoon();
    return isNew;
  }

  /** Show what the lens says, once it is read. @param {Scene["lens"]} lens */
  tell(lens) {
    if (!this.scene || JSON.stringify(lens) === JSON.stringify(this.scene.lens)) return;
    this.scene.lens = lens;
    this.drawSoon();
  }

  /** Fit the picture to the page, if its place or what it shows has changed. */
  measure() {
    if (this.clientWidth > 0 && this.#measured !== JSON.stringify(this.#room())) this.#resize();
  }

  /** The width and height that the picture may take, and the heading that it needs. */
  #room() {
    const width = this.clientWidth || 900;
    const top = Math.round(this.getBoundingClientRect().top + scrollY);
    const height = Math.max(HEIGHT.least, innerHeight - top - HEIGHT.below);
    const { hasLane = false, isLarge = false } = this.scene?.layout ?? {};
    return { width, height, keys: this.#keysRoom(width), hasLane, isLarge };
  }

  /**
   * Pixels of the heading for the tokens of keys or the indices of numbers: none, if their columns are too narrow.
   * @param {number} width
   */
  #keysRoom(width) {
    if (!this.scene || this.#focus === null) return 0;
    const { line, pass, chosen } = this.scene;
    const { kind, heads, columns, hasKeys } = line.items[this.#focus];
    if (kind !== "strip" || columns === 1) return 0;
    if (!hasKeys) return chosen ? KEYS.across : 0; // for the index of each number
    if (chosen) return width < NARROW ? KEYS.down : KEYS.across;
    if (width < NARROW || (width - GUTTER.most) / (heads * columns + heads) < KEYS.cell) return 0;
    return Math.min(KEYS.most, 8 + KEYS.letter * longest(pass));
  }

  /** Let the pass move through the network, as far as it is in sight. */
  play() {
    const scene = this.scene;
    if (!scene) return;
    this.#motion.run("pass", (share) => {
      scene.front = share === 1 ? Infinity : share * scene.layout.length;
      this.#draw();
    });
  }

  /** @param {Camera} camera */
  fly(camera) {
    const scene = this.scene;
    if (!scene) return;
    scene.front = Infinity;
    const from = scene.layout.camera;
    this.#motion.run("flight", (share) => {
      scene.layout.between(from, camera, share);
      if (share === 1) scene.layout.camera = { ...camera, rowSize: scene.layout.restRow };
      this.#draw();
      if (share === 1) this.#settled();
    });
  }

  /** The camera that shows an item, a block or, with null, the whole network; with a column, its cell so that it can be
   * read.
   * @param {{ from: number, to: number, row: number, column: number | null }} what
   */
  cameraOf({ from, to, row, column }) {
    const { layout, line } = /** @type {Scene} */ (this.scene);
    const item = line.items[from];
    if (item.kind === "gate" && to === from + 1) return layout.fit(...normAround(line, from), row);
    if (column === null || item.kind !== "strip") return layout.fit(from, to, row);
    const camera = layout.fit(from, from + 1, row);
    const size = 1 / (item.heads * item.columns); // near, the room around the heads is too small to matter
    const middle = from + (column + 0.5) * size;
    const cells = Math.max(3, layout.length / 64);
    const half = Math.min(0.5, (cells * size) / 2);
    const centre = Math.min(from + 1 - half, Math.max(from + half, middle));
    return half >= 0.5 ? camera : layout.fit(centre - half, centre + half, row);
  }

  drawSoon() {
    cancelAnimationFrame(this.#frame);
    this.#frame = requestAnimationFrame(() => this.#draw());
  }

  /** The stages and rows in sight, which must be here to be drawn, and whether the parts of a layer are seen. */
  sight() {
    const { layout, line, row } = /** @type {Scene} */ (this.scene);
    const [from, to] = layout.span;
    const [first, last] = layout.rows;
    const rows = Array.from({ length: last - first }, (_, index) => first + index);
    const names = line.items.flatMap(({ name, kind }, index) =>
      index >= from && index < to && layout.widthOf(index) >= LEAST_PIXELS && /strip|gate/.test(kind) ? [name] : [],
    );
    const masks = names.filter((name) => maskOf(name) !== name).map(maskOf);
    const layers = line.items.flatMap(({ kind, layer }, index) =>
      kind === "bands" && index >= from && index < to && layer !== null ? [layer] : [],
    );
    return { names: [...new Set([...names, ...masks])], layers, rows, row, isNear: layout.detail > NEAR };
  }

  /**
   * Move the picture, as a pointer or a key wants it.
   * @param {(scene: Scene) => void} change
   */
  move(change) {
    if (!this.scene) return;
    this.#motion.stop();
    this.scene.front = Infinity;
    change(this.scene);
    this.drawSoon();
    this.#settled();
  }

  /**
   * What is at a place of the canvas, in pixels of the page.
   * @param {number} x
   * @param {number} y
   * @returns {Spot | null}
   */
  spotAt(x, y) {
    if (!this.scene) return null;
    const { layout, line } = this.scene;
    const [along, across] = this.place(x, y);
    const row = layout.rowAt(across);
    if (row === null || along > layout.length) return null;
    if (along < 0) return { item: 0, row, column: null };
    const item = Math.floor(layout.itemAt(along));
    return { item, row, column: columnAt(line.items[item], layout.startOf(item), layout.widthOf(item), along) };
  }

  /**
   * @param {number} x
   * @param {number} y
   * @returns {[along: number, across: number]}
   */
  place(x, y) {
    const { gutter = 0, heading = 0 } = this.scene?.margins ?? {};
    const [along, across] = this.#plane.isDown ? [y, x] : [x, y];
    return [along - gutter, across - heading];
  }

  get isDown() {
    return this.#plane.isDown;
  }

  /** @param {Spot | null} spot */
  point(spot) {
    if (!this.scene || JSON.stringify(spot) === JSON.stringify(this.scene.pointed)) return;
    this.scene.pointed = spot;
    cancelAnimationFrame(this.#mark);
    this.#mark = requestAnimationFrame(() => this.#drawMark());
    emit(this, "point", { spot });
  }

  #settled() {
    clearTimeout(this.#settle);
    this.#settle = setTimeout(() => emit(this, "settle"), SETTLE_MILLISECONDS);
  }

  #resize() {
    if (!this.scene) return;
    const { layout, pass, plane } = this.scene;
    const room = this.#room();
    const { width, height, keys } = room;
    this.#measured = JSON.stringify(room);
    plane.isDown = width < NARROW;
    if (plane.isDown) {
      const heading = HEADING.down + keys;
      this.scene.margins = { gutter: GUTTER.down, heading, keys };
      layout.resize(HEIGHT.down - GUTTER.down, width - heading, true);
      plane.resize(width, HEIGHT.down);
    } else {
      const heading = HEADING.across + keys;
      const gutter = Math.min(GUTTER.most, Math.max(GUTTER.least, GUTTER.letter * longest(pass) + GUTTER.numbers));
      this.scene.margins = { gutter, heading, keys };
      layout.resize(width - gutter, height - heading, false);
      plane.resize(width, heading + Math.min(layout.breadth, layout.numRows * layout.wholeRow + layout.lane));
    }
    layout.camera = { ...layout.camera, row: this.scene.row + 0.5 }; // the followed token stays in sight
    this.#restrip();
    this.drawSoon();
    this.#settled();
  }

  #restrip() {
    const scene = /** @type {Scene} */ (this.scene);
    scene.palette = paletteOf(this);
    scene.strips = new Strips(scene.pass, scene.plane.isDown, scene.layout.rowSize);
  }

  #draw() {
    cancelAnimationFrame(this.#frame);
    if (!this.scene) return;
    paint(this.scene);
    this.#plane.keep();
    paintPointed(this.scene);
  }

  /** What is under the pointer has changed, and nothing else. */
  #drawMark() {
    if (!this.scene) return;
    this.#plane.restore();
    paintPointed(this.scene);
  }
}

/**
 * A norm, with what it reads and what it gives.
 * @param {Line} line
 * @param {number} gate the item that divides
 * @returns {[from: number, to: number]}
 */
function normAround({ items }, gate) {
  const { layer, part } = items[gate];
  const norm = part.split(".")[0];
  const last = items.findLastIndex((item) => item.layer === layer && item.part.startsWith(`${norm}.`));
  return [Math.max(0, gate - 1), last + 1];
}

/** The number of letters of the longest token. @param {Pass} pass */
function longest({ tokens }) {
  return Math.max(...tokens.map((token) => shown(token).length));
}

/**
 * @param {Line} line
 * @param {Pass} pass
 */
function describe({ blocks }, { tokens }) {
  return (
    `The network: ${tokens.length} tokens go through ${blocks.length} layers to the predictions. ` +
    "The arrow keys move, Enter zooms in, Escape zooms out. The table below has the numbers."
  );
}

/**
 * The column of a strip at a place along, of all heads together; null between heads.
 * @param {import("./items.js").Item} item
 * @param {number} start
 * @param {number} width
 * @param {number} along
 */
function columnAt(item, start, width, along) {
  if (item.kind === "gate") return 0;
  if (item.kind !== "strip") return null;
  const places = headPlaces(item, start, width);
  const head = places.findIndex(({ begin, size }) => along >= begin && along < begin + size);
  if (head < 0) return null;
  const { begin, size } = places[head];
  return head * item.columns + Math.floor(((along - begin) / size) * item.columns);
}

customElements.define("network-canvas", NetworkCanvas);
