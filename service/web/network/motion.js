// Motion: the flight of the camera, and the way of a new pass through the network. Each runs once; then the picture
// rests.

const FLIGHT = 520; // milliseconds
const PASS = 1700;

/** Whether the user wants less motion. */
export const isCalm = () => matchMedia("(prefers-reduced-motion: reduce)").matches;

/** @param {number} share */
const ease = (share) => (share < 0.5 ? 4 * share ** 3 : 1 - (2 - 2 * share) ** 3 / 2);

/** One motion at a time: `step(share)` is called until the share is 1. */
export class Motion {
  #frame = 0;

  /**
   * @param {"flight" | "pass"} kind
   * @param {(share: number) => void} step
   */
  run(kind, step) {
    this.stop();
    if (isCalm() || document.hidden) return step(1);
    const begin = performance.now();
    const length = kind === "flight" ? FLIGHT : PASS;
    const next = (/** @type {number} */ now) => {
      const share = Math.min(1, Math.max(0, (now - begin) / length));
      step(kind === "flight" ? ease(share) : share);
      if (share < 1) this.#frame = requestAnimationFrame(next);
    };
    this.#frame = requestAnimationFrame(next);
    return undefined;
  }

  stop() {
    cancelAnimationFrame(this.#frame);
  }
}
