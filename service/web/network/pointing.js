// Pointer, wheel and touch on the picture of the network: point, choose, drag, zoom and pinch. The wheel scrolls the
// page, unless Ctrl is held: then it zooms, as on a map.

import { emit } from "../dom.js";

/** @import { NetworkCanvas } from "./network_canvas.js" */

const CLICK = 5; // pixels that a pointer may move in a click
const WHEEL = 0.0022;
const MOST_CELL = 150; // pixels of a cell from which the wheel zooms no further

export class Pointing {
  /** @type {NetworkCanvas} */
  #owner;
  /** @type {HTMLCanvasElement} */
  #canvas;
  /** @type {Map<number, { x: number, y: number }>} */
  #down = new Map();
  #moved = 0;

  /**
   * @param {NetworkCanvas} owner
   * @param {HTMLCanvasElement} canvas
   */
  constructor(owner, canvas) {
    this.#owner = owner;
    this.#canvas = canvas;
    canvas.addEventListener("pointerdown", (event) => this.#press(event));
    canvas.addEventListener("pointermove", (event) => this.#move(event));
    canvas.addEventListener("pointerup", (event) => this.#release(event));
    canvas.addEventListener("pointercancel", (event) => this.#down.delete(event.pointerId));
    canvas.addEventListener("pointerleave", () => owner.point(null));
    canvas.addEventListener("wheel", (event) => this.#wheel(event), { passive: false });
  }

  /** @param {PointerEvent} event */
  #press(event) {
    this.#down.set(event.pointerId, { x: event.offsetX, y: event.offsetY });
    this.#moved = this.#down.size > 1 ? Infinity : 0; // two fingers never click
  }

  /** @param {PointerEvent} event */
  #move(event) {
    const before = this.#down.get(event.pointerId);
    const now = { x: event.offsetX, y: event.offsetY };
    if (!before) return this.#owner.point(this.#owner.spotAt(now.x, now.y));
    const [dx, dy] = [now.x - before.x, now.y - before.y];
    this.#moved += Math.abs(dx) + Math.abs(dy);
    if (this.#moved < CLICK) return undefined;
    if (!this.#canvas.hasPointerCapture(event.pointerId)) this.#canvas.setPointerCapture(event.pointerId);
    const [along, across] = this.#owner.isDown ? [dy, dx] : [dx, dy];
    const other = [...this.#down].find(([id]) => id !== event.pointerId)?.[1];
    this.#owner.move(({ layout }) => {
      if (!other) return layout.move(-along, -across);
      const distance = (/** @type {{ x: number, y: number }} */ { x, y }) => Math.hypot(x - other.x, y - other.y);
      const [middle] = this.#owner.place((now.x + other.x) / 2, (now.y + other.y) / 2);
      return layout.zoomAt(distance(now) / Math.max(1, distance(before)), middle);
    });
    this.#down.set(event.pointerId, now);
    return undefined;
  }

  /** @param {PointerEvent} event */
  #release(event) {
    const wasDown = this.#down.delete(event.pointerId);
    if (!wasDown || this.#moved >= CLICK || event.button !== 0) return;
    const spot = this.#owner.spotAt(event.offsetX, event.offsetY);
    const isName = this.#owner.place(event.offsetX, event.offsetY)[0] < 0;
    if (spot) emit(this.#owner, "choose", { spot, isName });
  }

  /** @param {WheelEvent} event */
  #wheel(event) {
    const { scene } = this.#owner;
    if (!scene) return;
    const { layout, line } = scene;
    const [along] = this.#owner.place(event.offsetX, event.offsetY);
    const sideways = this.#owner.isDown ? 0 : event.deltaX;
    const isZoom = event.ctrlKey || event.metaKey; // browsers report a pinch on a touchpad as the wheel with Ctrl
    if (event.shiftKey || Math.abs(sideways) > Math.abs(event.deltaY)) {
      event.preventDefault();
      const by = event.shiftKey ? event.deltaY || event.deltaX : sideways;
      this.#owner.move(() => (event.shiftKey ? layout.move(0, by) : layout.move(by, 0)));
      return;
    }
    if (!isZoom) {
      emit(this.#owner, "wheelhint");
      return; // the page scrolls
    }
    event.preventDefault();
    const isOut = event.deltaY > 0;
    const item = Math.floor(layout.itemAt(along));
    const { heads, columns } = line.items[item];
    if (!isOut && layout.widthOf(item) / (heads * columns) > MOST_CELL) return;
    this.#owner.move(() => layout.zoomAt(Math.exp(-WHEEL * event.deltaY), along));
  }
}
