// Where the items and the tokens stand in the picture: a camera that zooms along the line of computation, and rows for
// the tokens that scroll. The followed token has a lane below its row. From near, items have other widths than from
// afar, and change them smoothly.

/** @import { Line } from "./items.js" */

/**
 * @typedef {{ zoom: number, centre: number, row: number, rowSize: number }} Camera `centre`: an item and a share of it,
 *   as 7.5; `rowSize`: pixels of a row
 */

const DETAIL = { from: 300, to: 1000 }; // pixels of a block from which it shows more, and up to which, at least
const ZOOMED = 0.9; // the share of the picture from which a block shows all
const ROW = { least: 22, most: 68 };
const NARROW_ROW = { least: 36, most: 90 };
const LANE = { across: 30, down: 74 }; // pixels below the row of the followed token
const FEW_ROWS = 7; // in sight while a step of a lesson is shown
const MOST = 4e7; // pixels of the whole line
const PREDICTIONS = 170; // pixels at the end of the whole network
const SIGHT = 0.94; // the share of the picture that what is zoomed to takes

export class Layout {
  /** @type {Line} */
  line;
  length = 1; // pixels in sight along the line
  breadth = 1; // pixels in sight across it
  numRows = 1;
  rowSize = ROW.most;
  wholeRow = ROW.most; // pixels of a row while the whole network is seen
  largeRow = ROW.most; // and while only a few rows matter
  isLarge = false; // whether only a few rows matter
  followed = 0; // the row of the token that is followed
  hasLane = false;
  lane = 0; // pixels below the row of the followed token
  zoom = 1;
  shift = 0; // pixels of the line that are before the picture
  rowShift = 0;
  detail = 0; // 0 from afar, 1 from near
  #starts = new Float64Array(1);

  /**
   * @param {Line} line
   * @param {number} numRows
   */
  constructor(line, numRows) {
    this.line = line;
    this.numRows = numRows;
    this.#starts = new Float64Array(line.items.length + 1);
  }

  /**
   * @param {number} length
   * @param {number} breadth
   * @param {boolean} isNarrow
   */
  resize(length, breadth, isNarrow) {
    const limits = isNarrow ? NARROW_ROW : ROW;
    const { centre, row } = this.camera;
    [this.length, this.breadth] = [length, breadth];
    this.lane = this.hasLane ? LANE[isNarrow ? "down" : "across"] : 0;
    const sized = (/** @type {number} */ size) => Math.min(limits.most, Math.max(limits.least, size));
    this.wholeRow = sized((breadth - this.lane) / this.numRows);
    this.largeRow = Math.max(this.wholeRow, sized(breadth / FEW_ROWS));
    this.camera = { zoom: this.zoom, centre, row, rowSize: this.restRow };
  }

  /** Pixels of a row when nothing moves. */
  get restRow() {
    return this.isLarge ? this.largeRow : this.wholeRow;
  }

  /** Pixels of the whole line. */
  get total() {
    return this.#starts[this.line.items.length];
  }

  /** Pixels of all rows. */
  get totalBreadth() {
    return this.numRows * this.rowSize + this.lane;
  }

  /** How many pixels the rows take in sight. */
  get rowsInSight() {
    return Math.min(this.breadth, this.totalBreadth);
  }

  /** Compute the places of all items for the zoom. */
  #solve() {
    const { items, blocks } = this.line;
    const total = Math.min(MOST, this.length * this.zoom);
    const block = total / Math.max(1, blocks.length);
    const whole = blocks.length > 1 ? this.length / blocks.length : 0;
    const from = Math.max(DETAIL.from, whole); // the whole network is always seen from afar
    const to = Math.min((from * DETAIL.to) / DETAIL.from, Math.max(DETAIL.to, ZOOMED * this.length));
    const share = Math.min(1, Math.max(0, Math.log(block / from) / Math.log(to / from)));
    this.detail = share * share * (3 - 2 * share);
    let sum = 0;
    items.forEach(({ far, near, kind }, index) => {
      this.#starts[index] = sum;
      const afar = kind === "predictions" ? (sum * PREDICTIONS) / Math.max(1, this.length - PREDICTIONS) : far;
      sum += afar + this.detail * (near - afar);
    });
    this.#starts[items.length] = sum;
    for (let index = 0; index <= items.length; index++) this.#starts[index] *= total / sum;
  }

  /** @param {number} index */
  startOf(index) {
    return this.#starts[index] - this.shift;
  }

  /** @param {number} index */
  widthOf(index) {
    return this.#starts[index + 1] - this.#starts[index];
  }

  /**
   * The item at a place of the picture, with the share of it that lies before the place.
   * @param {number} pixel
   */
  itemAt(pixel) {
    const place = pixel + this.shift;
    let [low, high] = [0, this.line.items.length - 1];
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (this.#starts[middle] <= place) low = middle;
      else high = middle - 1;
    }
    return low + Math.min(0.9999, Math.max(0, (place - this.#starts[low]) / Math.max(1e-9, this.widthOf(low))));
  }

  /**
   * The place of an item and a share of it on the whole line.
   * @param {number} item
   */
  #placeOf(item) {
    const index = Math.min(this.line.items.length - 1, Math.floor(item));
    return this.#starts[index] + (item - index) * this.widthOf(index);
  }

  /**
   * The row at a place across all rows, and a share of it. The lane belongs to the end of the row above it.
   * @param {number} place
   */
  #rowOf(place) {
    const end = (this.followed + 1) * this.rowSize;
    if (place < end) return place / this.rowSize;
    return place < end + this.lane ? this.followed + 0.9999 : (place - this.lane) / this.rowSize;
  }

  /** The row at a place across the picture, or null. @param {number} pixel */
  rowAt(pixel) {
    const row = Math.floor(this.#rowOf(pixel + this.rowShift));
    return row >= 0 && row < this.numRows && pixel < this.breadth ? row : null;
  }

  /** @param {number} row */
  rowStart(row) {
    return row * this.rowSize + (row > this.followed ? this.lane : 0) - this.rowShift;
  }

  /** Pixels of a row with the lane below it. @param {number} row */
  rowBreadth(row) {
    return this.rowSize + (row === this.followed ? this.lane : 0);
  }

  /** The first row in sight, and the one after the last. */
  get rows() {
    const first = Math.max(0, Math.floor(this.#rowOf(this.rowShift)));
    return [first, Math.min(this.numRows, Math.ceil(this.#rowOf(this.rowShift + this.breadth)))];
  }

  /** The items in sight: the first, and the one after the last. */
  get span() {
    return [Math.floor(this.itemAt(0)), Math.floor(this.itemAt(this.length)) + 1];
  }

  /** @returns {Camera} */
  get camera() {
    const row = this.#rowOf(this.rowShift + this.breadth / 2);
    return { zoom: this.zoom, centre: this.itemAt(this.length / 2), row, rowSize: this.rowSize };
  }

  set camera({ zoom, centre, row, rowSize }) {
    this.rowSize = rowSize;
    this.zoom = Math.min(MOST / this.length, Math.max(1, zoom));
    this.#solve();
    this.shift = within(this.#placeOf(centre) - this.length / 2, this.total - this.length);
    const middle = row * this.rowSize + (row > this.followed + 1 ? this.lane : 0);
    this.rowShift = within(middle - this.breadth / 2, this.totalBreadth - this.breadth);
  }

  /**
   * Zoom so that what is at a place stays there.
   * @param {number} factor
   * @param {number} pixel
   */
  zoomAt(factor, pixel) {
    const item = this.itemAt(pixel);
    this.zoom = Math.min(MOST / this.length, Math.max(1, this.zoom * factor));
    this.#solve();
    this.shift = within(this.#placeOf(item) - pixel, this.total - this.length);
  }

  /**
   * @param {number} along
   * @param {number} across
   */
  move(along, across) {
    this.shift = within(this.shift + along, this.total - this.length);
    this.rowShift = within(this.rowShift + across, this.totalBreadth - this.breadth);
  }

  /**
   * The camera that shows some items (with shares) as large as possible.
   * @param {number} from
   * @param {number} to
   * @param {number} row
   * @returns {Camera}
   */
  fit(from, to, row) {
    const kept = this.zoom;
    const measure = (/** @type {number} */ zoom) => {
      this.zoom = zoom;
      this.#solve();
      return this.#placeOf(to) - this.#placeOf(from);
    };
    let [low, high] = [0, Math.log(MOST / this.length)];
    for (let step = 0; step < 40; step++) {
      const middle = (low + high) / 2;
      if (measure(Math.exp(middle)) < SIGHT * this.length) low = middle;
      else high = middle;
    }
    measure(Math.exp(low));
    const place = (this.#placeOf(from) + this.#placeOf(to)) / 2;
    const centre = this.itemAt(place - this.shift);
    measure(kept);
    return { zoom: Math.exp(low), centre, row: row + 0.5, rowSize: this.restRow };
  }

  /**
   * The camera between two others. What is seen moves evenly, although the zoom changes by factors.
   * @param {Camera} from
   * @param {Camera} to
   * @param {number} share
   */
  between(from, to, share) {
    this.zoom = Math.exp(Math.log(from.zoom) + share * (Math.log(to.zoom) - Math.log(from.zoom)));
    this.#solve();
    const [begin, end] = [1 / from.zoom, 1 / to.zoom];
    const isSame = Math.abs(Math.log(from.zoom / to.zoom)) < 0.01;
    const moved = isSame ? share : (begin - 1 / this.zoom) / (begin - end);
    const place = this.#placeOf(from.centre) + moved * (this.#placeOf(to.centre) - this.#placeOf(from.centre));
    const mixed = (/** @type {number} */ one, /** @type {number} */ other) => one + share * (other - one);
    this.camera = {
      ...{ zoom: this.zoom, centre: this.itemAt(place - this.shift) },
      ...{ row: mixed(from.row, to.row), rowSize: mixed(from.rowSize, this.restRow) },
    };
  }
}

/**
 * @param {number} value
 * @param {number} most
 */
function within(value, most) {
  return Math.max(0, Math.min(value, Math.max(0, most)));
}
