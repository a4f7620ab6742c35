// A canvas in coordinates of the network: `along` the computation, `across` the tokens. On wide screens the computation
// goes to the right; on narrow ones it goes down.

import { context2d, el } from "../dom.js";

/** @typedef {[along: number, across: number, length: number, breadth: number]} Box */

export class Plane {
  #canvas;
  #kept = context2d(el("canvas"));
  /** @type {CanvasRenderingContext2D} */
  context;
  isDown = false;

  /** @param {HTMLCanvasElement} canvas */
  constructor(canvas) {
    this.#canvas = canvas;
    this.context = context2d(canvas);
  }

  /**
   * @param {number} width
   * @param {number} height
   */
  resize(width, height) {
    const ratio = Math.min(2, devicePixelRatio || 1);
    for (const canvas of [this.#canvas, this.#kept.canvas]) {
      canvas.width = Math.round(width * ratio);
      canvas.height = Math.round(height * ratio);
    }
    Object.assign(this.#canvas.style, { width: `${width}px`, height: `${height}px` });
    this.context.setTransform(ratio, 0, 0, ratio, 0, 0);
  }

  /** Keep the picture, so that marks can be drawn on it and taken away. */
  keep() {
    this.#kept.drawImage(this.#canvas, 0, 0);
  }

  /** Show the picture that was kept. */
  restore() {
    const { width, height } = this.#canvas.style;
    this.context.drawImage(this.#kept.canvas, 0, 0, parseFloat(width), parseFloat(height));
  }

  /**
   * @param {number} along
   * @param {number} across
   * @returns {[x: number, y: number]}
   */
  point(along, across) {
    return this.isDown ? [across, along] : [along, across];
  }

  /**
   * A box of the network as a box of the canvas.
   * @param {Box} box
   * @returns {[x: number, y: number, width: number, height: number]}
   */
  #box([along, across, length, breadth]) {
    return this.isDown ? [across, along, breadth, length] : [along, across, length, breadth];
  }

  /** @param {Box} box */
  fill(...box) {
    this.context.fillRect(...this.#box(box));
  }

  /** @param {Box} box */
  frame(...box) {
    this.context.strokeRect(...this.#box(box));
  }

  /** @param {Box} box */
  clip(...box) {
    this.context.beginPath();
    this.context.rect(...this.#box(box));
    this.context.clip();
  }

  /**
   * Draw a picture whose columns go along.
   * @param {CanvasImageSource} image
   * @param {Box} part of the picture
   * @param {Box} place
   */
  image(image, part, place) {
    this.context.drawImage(image, ...this.#box(part), ...this.#box(place));
  }

  /** @param {number} along @param {number} across */
  moveTo(along, across) {
    this.context.moveTo(...this.point(along, across));
  }

  /** @param {number} along @param {number} across */
  lineTo(along, across) {
    this.context.lineTo(...this.point(along, across));
  }

  /**
   * A smooth line that begins and ends along the computation.
   * @param {number} fromAlong
   * @param {number} fromAcross
   * @param {number} along
   * @param {number} across
   */
  swing(fromAlong, fromAcross, along, across) {
    const middle = (fromAlong + along) / 2;
    this.context.bezierCurveTo(
      ...this.point(middle, fromAcross),
      ...this.point(middle, across),
      ...this.point(along, across),
    );
  }

  /**
   * A colour that changes along.
   * @param {number} from
   * @param {number} to
   * @param {string[]} colours
   */
  gradient(from, to, colours) {
    const gradient = this.context.createLinearGradient(...this.point(from, 0), ...this.point(to, 0));
    colours.forEach((colour, index) => gradient.addColorStop(index / Math.max(1, colours.length - 1), colour));
    return gradient;
  }

  /**
   * Write at a place of the canvas, in pixels. `y` is the middle of the line. `turn`: an angle around this place.
   * @param {string} text
   * @param {number} x
   * @param {number} y
   * @param {{ font: string, colour: string, align?: CanvasTextAlign, turn?: number }} look
   */
  write(text, x, y, { turn = 0, ...look }) {
    const { context } = this;
    if (turn !== 0) {
      context.save();
      context.translate(x, y);
      context.rotate(turn);
      this.write(text, 0, 0, look);
      return context.restore();
    }
    const { font, colour, align = "left" } = look;
    Object.assign(context, { font, fillStyle: colour, textAlign: align, textBaseline: "middle" });
    return context.fillText(text, x, y);
  }
}
